"""Groups of nodes of an exported graph -> functional `Block`s; equal computations share one `code`.

Layers are found in the model, nodes are grouped by layer, each group becomes a block, and digests tell equal ones.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from types import FunctionType
from typing import Any

import torch
from torch import fx, nn

from workbench.capture.export.exporting import Exported
from workbench.capture.export.opaque import call_of
from workbench.capture.graph import Block
from workbench.capture.losses import MeanLoss, MicroBatchMean, Quotient, emit_sum_over_count
from workbench.capture.operations import (
    Dataflow,
    arguments_of,
    op_name,
    restore_regions,
    storage_of,
    tensor_at,
)

# The boundaries between blocks: repeated modules, and the runs of operations between them.

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_Run = tuple[tuple[str, str] | None, list[fx.Node]]
"""The layer and call that consecutive nodes belong to (None between layers), and the nodes."""


@dataclass(frozen=True)
class NodeGroup:
    """Consecutive live nodes of the exported graph that become one block."""

    name: str
    nodes: tuple[fx.Node, ...]


def find_layers(model: nn.Module, flow: Dataflow) -> frozenset[str]:
    """Return the paths of the layers.

    Layers are the members with parameters of the outermost lists (`ModuleList`, `Sequential`, `ModuleDict`) of two
    modules or more, composite modules that forward calls more than once (ALBERT's one layer), and modules that run as
    written.

    A module whose parameters lie mostly in a list of composite modules of one class (a stage of Swin or of a ResNet)
    is opened instead: the members of that list are the layers. It stays whole if a residual connection goes around
    that list, as in a bottleneck of a ResNet, unless its members have residual connections of their own.
    """
    return frozenset(_LayerSearch(model, flow).layers_below(model, ""))


class _LayerSearch:
    def __init__(self, model: nn.Module, flow: Dataflow) -> None:
        self._flow = flow
        self._nodes: dict[str, list[fx.Node]] = defaultdict(list)
        calls: dict[str, set[str]] = defaultdict(set)
        for node in flow.order:
            for call, (called, _) in (node.meta.get("nn_module_stack") or {}).items():
                path = called.partition("@")[0]
                self._nodes[path].append(node)
                calls[path].add(call)
        repeated = (path for path, names in calls.items() if path and len(names) > 1)
        self._repeated = {path for path in repeated if _is_composite(model.get_submodule(path))}
        calls_as_written = filter(None, map(call_of, flow.order))
        self._opaque = {call.label for call in calls_as_written if call.modules and _parameter_count(call.modules[0])}

    def layers_below(self, module: nn.Module, path: str) -> Iterator[str]:
        children = dict(module.named_children())
        is_list = isinstance(module, _LISTS) and len(children) >= 2
        for name, child in children.items():
            child_path = _join(path, name)
            is_member = (is_list and _parameter_count(child)) or child_path in self._repeated
            if child_path in self._opaque or (is_member and not self._holds_layers(child, child_path)):
                yield child_path
            else:
                yield from self.layers_below(child, child_path)

    def _holds_layers(self, module: nn.Module, path: str) -> bool:
        """Return True if most parameters lie in a list of two or more composite modules of one class."""
        total = _parameter_count(module)
        return any(
            isinstance(inner, _LISTS)
            and max(Counter(type(m) for m in inner.children() if _is_composite(m)).values(), default=0) >= 2
            and 2 * _parameter_count(inner) > total
            and not self._is_bypassed(path, _join(path, name), inner)
            for name, inner in module.named_modules()
        )

    def _is_bypassed(self, path: str, list_path: str, members: nn.Module) -> bool:
        """Return True if a residual connection goes around a list, and most of its members have none of their own.

        The connection is an activation from before the list's first operation that the module at `path` reads after
        its last one.
        """
        operations = [self._operations(_join(list_path, name)) for name, _ in members.named_children()]
        operations = [nodes for nodes in operations if nodes]
        positions = [self._flow.order[node] for nodes in operations for node in nodes]
        if not positions:
            return False
        later = (node for node in self._operations(path) if self._flow.order[node] > max(positions))
        first = min(positions)
        around = any(self._flow.order[source] < first for node in later for source in self._activations(node))
        branching = 0  # members that read an activation from outside more than once: residual connections of their own
        for nodes in operations:
            inside = set(nodes)
            reads = Counter(s for node in nodes for s in self._activations(node) if s not in inside)
            branching += max(reads.values(), default=0) > 1
        return around and 2 * branching <= len(operations)

    def _operations(self, path: str) -> list[fx.Node]:
        return [node for node in self._nodes[path] if node in self._flow.live and node.op == "call_function"]

    def _activations(self, node: fx.Node) -> Iterator[fx.Node]:
        flow = self._flow
        return (s for s in node.all_input_nodes if s not in flow.recomputable and s not in flow.tensors)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


def _is_composite(module: nn.Module) -> bool:
    return any(True for _ in module.children())


def _parameter_count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def group_nodes(
    flow: Dataflow, layers: frozenset[str], loss: fx.Node, in_training: bool = True
) -> tuple[NodeGroup, ...]:
    """Group the live nodes that are not recomputable, in order, with a boundary wherever the layer changes.

    Operations between two layers that read no parameter belong to the layer before them. Those that do (an embedding, a
    head, a norm between stages) form a group of their own. Groups are joined where an in-place write reaches across
    their boundary, in eval mode as in training, where BatchNorm writes. What follows the loss (a buffer's update) joins
    its group, so that this is the last. Views of parameters belong to no group in the end: each that reads one makes it
    again.
    """
    # Runs of nodes of one layer, and then those between layers that belong to the layer before them.
    runs: list[_Run] = []
    for node in flow.order:
        if node not in flow.live or node in flow.recomputable or node.op != "call_function":
            continue
        key = _owner(node, layers)
        # An item of a tuple stays with the operation that made it, since tuples never cross a boundary.
        is_item = bool(runs) and "getitem" in str(node.target) and any(s in runs[-1][1] for s in node.all_input_nodes)
        if runs and (runs[-1][0] == key or is_item):
            runs[-1][1].append(node)
        else:
            runs.append((key, [node]))
    grouped: list[_Run] = []
    for key, nodes in runs:
        reads_tensors = any(source in flow.tensors for node in nodes for source in node.all_input_nodes)
        if grouped and (grouped[-1][0] == key if key is not None else not reads_tensors):
            grouped[-1][1].extend(nodes)
        else:
            grouped.append((key, list(nodes)))
    grouped = [(key, nodes) for key, nodes in grouped if not flow.views.issuperset(nodes)]
    writers = dict(flow.writers)
    for node in flow.order if not in_training else ():
        if op_name(node) == "batch_norm" and isinstance(mean := arguments_of(node)["running_mean"], fx.Node):
            writers.setdefault(storage_of(mean), (node,))
    joined = _join_across_writes([nodes for _, nodes in grouped], flow, loss, writers)
    # Names: of the layer, or of what the nodes have in common.
    owners = {nodes[0]: key[0] for key, nodes in grouped if key}
    calls: Counter[str] = Counter()
    groups = []
    for nodes in joined:
        name = owners.get(nodes[0]) or _common_path(nodes, flow)
        calls[name] += 1
        computed = tuple(node for node in nodes if node not in flow.views)
        groups.append(NodeGroup(name if calls[name] == 1 else f"{name} (call {calls[name]})", computed))
    return tuple(groups)


def _owner(node: fx.Node, layers: frozenset[str]) -> tuple[str, str] | None:
    """Return (path, call) of the layer that a node was traced in; the call tells repeated uses of one module apart.

    If forward calls a method of a layer other than the layer itself, only the layer's members appear in the node's
    stack: then the call is not known, and empty.
    """
    for call, (called, _) in (node.meta.get("nn_module_stack") or {}).items():
        path = called.partition("@")[0]
        if path in layers:
            return path, call
        parts = path.split(".")
        outer = (".".join(parts[:count]) for count in range(1, len(parts)))
        above = next((path for path in outer if path in layers), None)
        if above is not None:
            return above, ""
    return None


def _join_across_writes(
    groups: list[list[fx.Node]], flow: Dataflow, loss: fx.Node, writers: Mapping[fx.Node, Sequence[fx.Node]]
) -> list[list[fx.Node]]:
    """Join neighbours whose boundary would part a value from a later write to it, or the uses of a changing buffer."""
    with_loss = next((index for index, group in enumerate(groups) if loss in group), len(groups))
    barred = set(range(with_loss + 1, len(groups)))
    at = {node: index for index, group in enumerate(groups) for node in group}
    uses: dict[int, set[int]] = defaultdict(set)
    for node, index in at.items():
        for used in (node, *node.all_input_nodes):
            uses[flow.identity(storage_of(used))].add(index)
    for owner, nodes in writers.items():
        touched = uses[flow.identity(owner)]
        if touched:
            # From the first group that makes or uses it to the last that writes to it, or for a buffer uses it.
            last = max(touched) if owner in flow.tensors else max((at[w] for w in nodes if w in at), default=0)
            barred.update(range(min(touched) + 1, last + 1))
    joined: list[list[fx.Node]] = []
    for index, group in enumerate(groups):
        if joined and index in barred:
            joined[-1].extend(group)
        else:
            joined.append(list(group))
    return joined


def _common_path(nodes: Iterable[fx.Node], flow: Dataflow) -> str:
    """Return the deepest module that holds every node that reads a parameter, or `first … last` of the outermost."""
    readers = [n for n in nodes if any(source in flow.tensors for source in n.all_input_nodes)]
    stacks = (node.meta.get("nn_module_stack") for node in readers or nodes)
    paths = list(dict.fromkeys(path for s in stacks if s and (path := next(reversed(s.values()))[0].partition("@")[0])))
    if not paths:  # operations of the model's own forward: name the modules whose parameters they read
        tensors = (str(source.target) for n in readers for source in n.all_input_nodes if source in flow.tensors)
        paths = list(dict.fromkeys(path for name in tensors if (path := name.rpartition(".")[0])))
    if not paths:
        return "loss"
    levels = zip(*(path.split(".") for path in paths), strict=False)
    shared = ".".join(level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels))
    return shared or f"{paths[0]} … {paths[-1]}"


def canonical_names(named: Iterable[tuple[str, torch.Tensor]]) -> tuple[dict[int, str], dict[str, tuple[str, ...]]]:
    """Return (id of each tensor -> canonical name, the first that it has; canonical name -> its other names)."""
    canonical: dict[int, str] = {}
    aliases: dict[str, list[str]] = {}
    for name, tensor in named:
        first = canonical.setdefault(id(tensor), name)
        if first != name:
            aliases.setdefault(first, []).append(name)
    return canonical, {name: tuple(others) for name, others in aliases.items()}


# A block of one group of nodes.


class BlockExtractor:
    """Makes blocks of groups of nodes; holds the code of each block type, and the constants met on the way."""

    def __init__(
        self,
        exported: Exported,
        flow: Dataflow,
        names: Mapping[int, str],
        losses: Sequence[MeanLoss | Quotient | MicroBatchMean],
        outputs: Collection[fx.Node] = (),
    ) -> None:
        """Take the graph and its facts; `names` are the canonical names of parameters and buffers by `id`."""
        self._exported = exported
        self._flow = flow
        self._names = names
        self._outputs = dict.fromkeys(outputs)
        self._losses = {mean.node: index for index, mean in enumerate(losses)}
        names_of_counts = {MeanLoss: "count", Quotient: "total", MicroBatchMean: "ratio"}
        self._counted = [names_of_counts[type(mean)] for mean in losses]
        self._codes: dict[str, fx.GraphModule] = {}
        self.constants: dict[str, torch.Tensor] = {}
        """Tensors that the model's forward creates from Python numbers; they have no name in the model."""

    def extract(self, index: int, group: NodeGroup, group_of: Mapping[fx.Node, int]) -> Block:
        """Return the block of one group; `group_of` gives the index of the group that computes a node."""
        flow, loss = self._flow, self._exported.loss
        # What the block reads and returns, and what it computes again because every block may.
        inside = set(group.nodes)
        recomputed = [node for node in self._outputs if loss in inside and node not in group_of]
        needed = (flow.recomputable_sources((*group.nodes, *recomputed)) | set(recomputed)) - inside
        read = {source for node in group.nodes for source in node.all_input_nodes} - inside
        read -= flow.recomputable | flow.views
        receives = [node for node in flow.order if node in read and node.op == "call_function"]
        read_later = [n for n in group.nodes if any(group_of.get(user, -1) > index for user in n.users)]
        sends = [node for node in group.nodes if node in {loss, *self._outputs, *read_later}] + recomputed
        returned = [n.name for n in sends if n is not loss and n not in read_later]
        names = {}
        for node in flow.order:
            if node in needed and node in flow.tensors:
                tensor = flow.tensors[node]
                names[node] = self._names.get(id(tensor), f"_constant.{node.target}")
                if id(tensor) not in self._names:
                    self.constants[names[node]] = tensor
        is_parameter = {name: isinstance(flow.tensors[node], nn.Parameter) for node, name in names.items()}
        parameters = tuple(name for name, yes in is_parameter.items() if yes)
        buffers = tuple(name for name, yes in is_parameter.items() if not yes)
        inputs = [n for n in flow.order if n.op == "placeholder" and n in needed]
        counts = [index for node, index in self._losses.items() if node in inside or node in needed]
        # Its arguments, in the order of the fields of `Block`.
        graph, root = fx.Graph(), nn.Module()
        by_name = {name: graph.placeholder(f"p{i}") for i, name in enumerate((*parameters, *buffers))}
        copies = {node: by_name[name] for node, name in names.items()}
        copies |= {node: graph.placeholder(f"r{i}") for i, node in enumerate(receives)}
        copies |= {node: graph.placeholder(f"b_{node.target}") for node in inputs}
        divisors = {count: graph.placeholder(f"{self._counted[count]}{count}") for count in counts}
        for node, placeholder in (*copies.items(), *((loss, divisor) for divisor in divisors.values())):
            placeholder.meta = {"val": node.meta["val"]}
        # Its operations, with mean losses as sums over the counts that it is given.
        for node in flow.order:
            if node in copies or (node not in inside and node not in needed):
                continue
            if node.op == "get_attr":  # the graph of a branch, which becomes a child of the block's code
                name = str(node.target).replace(".", "_")
                root.add_module(name, tensor_at(self._exported.module, str(node.target)))
                copies[node] = graph.get_attr(name)
            else:
                copies[node] = graph.node_copy(node, copies.__getitem__)
            if node in self._losses:
                copies[node] = emit_sum_over_count(graph, copies[node], divisors[self._losses[node]])
        results = []
        for node in sends:
            results.append(copies[node])
            if node in flow.aliases:  # it shares memory with a parameter, which ZeRO 3 frees after the block
                results[-1] = graph.call_function(torch.ops.aten.clone.default, (copies[node],))
                results[-1].meta = dict(node.meta)
        graph.output(tuple(results))
        restore_regions(graph)
        block_type = digest(graph, root, [at for at, node in enumerate(sends) if node.name in returned])
        if block_type not in self._codes:
            graph.lint()
            self._codes[block_type] = fx.GraphModule(root, graph)
        return Block(
            index=index,
            name=group.name,
            block_type=block_type,
            cost_type=digest(graph, root, of_cost=True),
            parameters=parameters,
            buffers=buffers,
            receives=tuple(node.name for node in receives),
            inputs=tuple(str(node.target) for node in inputs),
            counts=tuple(counts),
            sends=tuple(node.name for node in sends),
            returned=tuple(returned),
            code=self._codes[block_type],
        )


# Digests of a block: what is equal in them has one code, or one cost.


def digest(graph: fx.Graph, root: nn.Module, returned: Sequence[int] = (), of_cost: bool = False) -> str:
    """Return a hash of operations, constants, wiring, shapes and types: equal for layers that compute the same.

    `returned` are the positions of the sent values that no later block reads. With `of_cost`, it is equal for layers
    that cost the same: their numbers may differ, such as the rates of stochastic depth, and opaque calls of other
    modules of one class may compute something else.
    """
    position = {node: index for index, node in enumerate(graph.nodes)}
    lines = [f"{line_of_digest(node, root, position, of_cost)} {_shape(node.meta.get('val'))}" for node in graph.nodes]
    lines += [f"returned {list(returned)}"] if returned else []
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def line_of_digest(
    node: fx.Node,
    root: nn.Module,
    position: Mapping[fx.Node, int],
    of_cost: bool = False,
    given: tuple[Any, Any] | None = None,
) -> str:
    """Return an operation with its arguments as text that other processes share; `position` numbers the nodes.

    `given` are arguments in place of its own, but for those of an opaque call.
    """
    arguments = (node.args, node.kwargs) if given is None else given
    if (call := call_of(node)) is not None:  # by a name that other processes share
        arguments = (call.cost_digest if of_cost else call.digest, *node.args[1:]), node.kwargs
    written = (_canonical(each, position, of_cost) for each in arguments)
    target = str(node.target)
    if node.op == "placeholder":
        target = target.rstrip("0123456789")
    elif node.op == "get_attr":  # the graph of an operation (a branch of `torch.cond`), with those inside that one
        target = "\n".join(str(getattr(module, "code", "")) for module in tensor_at(root, target).modules())
    elif isinstance(node.target, FunctionType):
        target = f"{node.target.__module__}.{node.target.__qualname__}"
    return f"{node.op} {target} {' '.join(written)}"


def _canonical(value: Any, position: Mapping[fx.Node, int], of_cost: bool) -> str:
    """Return arguments as text that does not depend on the names of nodes or on the device.

    With `of_cost`, it does not depend on the values of numbers either, but for those that save an operation.
    """

    def leaf(item: Any) -> Any:
        if isinstance(item, fx.Node):
            return f"%{position[item]}"
        if of_cost and isinstance(item, float) and item not in (0.0, 1.0):
            return "number"
        return "device" if isinstance(item, torch.device) else item

    if isinstance(value, Mapping):
        return str({key: _canonical(item, position, of_cost) for key, item in value.items()})
    return str(fx.node.map_aggregate(value, leaf))


def _shape(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {value.dtype}"
    if isinstance(value, (tuple, list)):
        return str([_shape(item) for item in value])
    return type(value).__name__
