"""Where one block ends and the next begins: repeated modules, and the runs of operations between them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import fx, nn

from workbench.capture.dataflow import Dataflow, storage_of

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True)
class Atom:
    """Consecutive live nodes of the exported graph that will become one block."""

    name: str
    nodes: tuple[fx.Node, ...]


def layer_paths(model: nn.Module, flow: Dataflow) -> frozenset[str]:
    """Paths of the layers: members with parameters of the outermost lists (`ModuleList`, `Sequential`) of two modules
    or more, and composite modules that forward calls more than once (ALBERT's one layer).

    A module whose parameters lie mostly in a list of composite modules of one class (a stage of Swin or of a ResNet)
    is opened instead: the members of that list are the layers. Not so where something goes around the list, as in a
    bottleneck of a ResNet, unless its members are such layers themselves.
    """
    return _Layers(model, flow).found()


class _Layers:
    """See `layer_paths`."""

    def __init__(self, model: nn.Module, flow: Dataflow) -> None:
        self._model = model
        self._flow = flow
        self._nodes: dict[str, list[fx.Node]] = defaultdict(list)
        calls: dict[str, set[str]] = defaultdict(set)
        for node in flow.order:
            for call, (called, _) in (node.meta.get("nn_module_stack") or {}).items():
                path = called.partition("@")[0]
                self._nodes[path].append(node)
                calls[path].add(call)
        repeated = (path for path, found in calls.items() if path and len(found) > 1)
        self._repeated = {path for path in repeated if any(True for _ in model.get_submodule(path).children())}

    def found(self) -> frozenset[str]:
        return frozenset(self._below(self._model, ""))

    def _below(self, module: nn.Module, path: str) -> Iterator[str]:
        children = dict(module.named_children())
        is_list = isinstance(module, _LISTS) and len(children) >= 2
        for name, child in children.items():
            child_path = _join(path, name)
            is_member = (is_list and _size(child)) or child_path in self._repeated
            if is_member and not self._holds_layers(child, child_path):
                yield child_path
            else:
                yield from self._below(child, child_path)

    def _holds_layers(self, module: nn.Module, path: str) -> bool:
        """Whether more than half of the parameters belong to a list of at least two composite modules of one class."""
        total = _size(module)
        return any(
            isinstance(inner, _LISTS)
            and _alike(inner)
            and 2 * _size(inner) > total
            and not self._is_bypassed(path, _join(path, name), inner)
            for name, inner in module.named_modules()
        )

    def _is_bypassed(self, path: str, list_path: str, members: nn.Module) -> bool:
        """Whether the module at `path` reads, after the list's last operation, an activation from before its first,
        and the members do nothing of the kind."""
        operations = [self._operations(_join(list_path, name)) for name, _ in members.named_children()]
        operations = [found for found in operations if found]
        inside = {node for found in operations for node in found}
        if not inside:
            return False
        first, last = (end(self._flow.order[node] for node in inside) for end in (min, max))
        later = (node for node in self._operations(path) if self._flow.order[node] > last)
        around = any(self._flow.order[source] < first for node in later for source in self._activations(node))
        return around and 2 * sum(map(self._is_branched, operations)) <= len(operations)

    def _is_branched(self, operations: list[fx.Node]) -> bool:
        """Whether an activation from outside is read more than once."""
        inside = set(operations)
        reads = Counter(source for node in operations for source in self._activations(node) if source not in inside)
        return max(reads.values(), default=0) > 1

    def _operations(self, path: str) -> list[fx.Node]:
        return [node for node in self._nodes[path] if node in self._flow.live and node.op == "call_function"]

    def _activations(self, node: fx.Node) -> Iterator[fx.Node]:
        flow = self._flow
        return (source for source in node.all_input_nodes if source not in flow.free and source not in flow.tensors)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


def _alike(modules: nn.Module) -> bool:
    classes = Counter(type(member) for member in modules.children() if any(True for _ in member.children()))
    return max(classes.values(), default=0) >= 2


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _owner(node: fx.Node, layers: frozenset[str]) -> tuple[str, str] | None:
    """(path, call) of the layer that a node was traced in; the call tells repeated uses of one module apart.

    Of a layer whose `forward` is called by name, only what its members do is seen, and not which call it was.
    """
    for call, (called, _) in (node.meta.get("nn_module_stack") or {}).items():
        path = called.partition("@")[0]
        if path in layers:
            return path, call
        above = next((outer for outer in _above(path) if outer in layers), None)
        if above is not None:
            return above, ""
    return None


def _above(path: str) -> Iterator[str]:
    """`a.b.c` -> `a`, `a.b`."""
    parts = path.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts)))


def _module_path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack")
    return next(reversed(stack.values()))[0].partition("@")[0] if stack else ""


def atoms(flow: Dataflow, layers: frozenset[str], loss: fx.Node) -> tuple[Atom, ...]:
    """The live, not-free nodes in order, cut where the layer changes.

    Operations between two layers that touch no parameter belong to the layer before them; those that do (an
    embedding, a head, a norm between stages) form an atom of their own. Cuts that an in-place write reaches
    across are removed by joining the atoms; what follows the loss (a buffer's update) joins it, so that it is last.
    """
    nodes = [n for n in flow.order if n in flow.live and n not in flow.free and n.op == "call_function"]
    runs: list[tuple[tuple[str, str] | None, list[fx.Node]]] = []
    for node in nodes:
        key = _owner(node, layers)
        if runs and (runs[-1][0] == key or _must_follow(node, runs[-1][1])):
            runs[-1][1].append(node)
        else:
            runs.append((key, [node]))
    grouped = _absorb_glue(runs, flow)
    joined = _join_across_writes([found for _, found in grouped], flow, loss)
    owners = {found[0]: key[0] for key, found in grouped if key}
    names = [owners.get(found[0]) or _common_path(found, flow) for found in joined]
    return tuple(Atom(name, tuple(found)) for name, found in zip(_numbered(names), joined, strict=True))


def _numbered(names: Iterable[str]) -> Iterator[str]:
    """Tell the second and later calls of one module apart."""
    calls: Counter[str] = Counter()
    for name in names:
        calls[name] += 1
        yield name if calls[name] == 1 else f"{name} (call {calls[name]})"


def _must_follow(node: fx.Node, run: Iterable[fx.Node]) -> bool:
    """`getitem` of a multi-output operation stays with it: tuples never cross a cut."""
    return "getitem" in str(node.target) and any(source in set(run) for source in node.all_input_nodes)


def _absorb_glue(
    runs: list[tuple[tuple[str, str] | None, list[fx.Node]]], flow: Dataflow
) -> list[tuple[tuple[str, str] | None, list[fx.Node]]]:
    grouped: list[tuple[tuple[str, str] | None, list[fx.Node]]] = []
    for key, found in runs:
        touches = any(source in flow.tensors for node in found for source in node.all_input_nodes)
        if (key is None and not touches and grouped) or (grouped and key is not None and grouped[-1][0] == key):
            grouped[-1][1].extend(found)
        else:
            grouped.append((key, list(found)))
    return grouped


def _join_across_writes(groups: list[list[fx.Node]], flow: Dataflow, loss: fx.Node) -> list[list[fx.Node]]:
    """Merge neighbours wherever a cut would part the uses of something that is written to.

    A value may not cross a cut and be written to after it; a buffer that forward changes has one home.
    """
    with_loss = next((index for index, group in enumerate(groups) if loss in group), len(groups))
    barred = set(range(with_loss + 1, len(groups)))
    for first, last in _spans_of_writes(groups, flow):
        barred.update(range(first + 1, last + 1))
    joined: list[list[fx.Node]] = []
    for index, group in enumerate(groups):
        if joined and index in barred:
            joined[-1].extend(group)
        else:
            joined.append(list(group))
    return joined


def _spans_of_writes(groups: list[list[fx.Node]], flow: Dataflow) -> Iterator[tuple[int, int]]:
    """(first group that makes or uses it, last group that writes to it, or for a buffer uses it)."""
    at = {node: index for index, group in enumerate(groups) for node in group}
    uses: dict[int, set[int]] = defaultdict(set)
    for node, index in at.items():
        for used in (node, *node.all_input_nodes):
            uses[flow.identity(storage_of(used))].add(index)
    for owner, writers in flow.writers.items():
        touched = uses[flow.identity(owner)]
        if touched:
            last = max(touched) if owner in flow.tensors else max((at[w] for w in writers if w in at), default=0)
            yield min(touched), last


def _common_path(nodes: Iterable[fx.Node], flow: Dataflow) -> str:
    """The deepest module that holds every node that reads a parameter, or `first … last` of the outermost ones."""
    readers = [n for n in nodes if any(source in flow.tensors for source in n.all_input_nodes)]
    paths = list(dict.fromkeys(path for node in readers or nodes if (path := _module_path(node))))
    paths = paths or list(dict.fromkeys(path for node in readers for path in _modules_read(node, flow)))
    if not paths:
        return "loss"
    parts = [path.split(".") for path in paths]
    shared = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    if shared:
        return ".".join(shared)
    return f"{paths[0]} … {paths[-1]}"


def _modules_read(node: fx.Node, flow: Dataflow) -> Iterator[str]:
    """The modules whose parameters an operation of the model's own forward reads."""
    for source in node.all_input_nodes:
        path, _, _ = str(source.target).rpartition(".")
        if source in flow.tensors and path:
            yield path


def parameter_names(model: nn.Module) -> tuple[dict[int, str], dict[str, tuple[str, ...]]]:
    """(id of each parameter or buffer -> canonical name, canonical name -> its other names)."""
    canonical: dict[int, str] = {}
    aliases: dict[str, list[str]] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        first = canonical.setdefault(id(tensor), name)
        if first != name:
            aliases.setdefault(first, []).append(name)
    return canonical, {name: tuple(others) for name, others in aliases.items()}
