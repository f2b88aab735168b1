"""Observations that only a run of the user's own code gives, since an export has no values and runs forward once.

Tensors that forward keeps on its modules outside of buffers, Python numbers that it changes, and the operations of code
that export cannot follow.
"""

from __future__ import annotations

import contextlib
import copy
import operator
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakTensorKeyDictionary

from workbench.capture.operations import Dataflow
from workbench.data.datasets import untouched_generators
from workbench.errors import CaptureError
from workbench.user_code import SourceLine, is_users, line_of_frames, line_of_running_code

# Tensors that forward keeps on its modules outside of buffers: capture runs forward once, so each step starts without.
#
# Attributes, lists, dicts and plain objects may hold them. What forward keeps and never computes with again (an
# attention map to look at) is harmless, and so is what it makes alike in every step (a table of positions that is made
# once).

MOST_ITEMS = 1_000
"""Items of a list, dict or object above which it is not searched: a table of data, not a state."""
DEPTH = 4
"""Number of lists, dicts and objects inside one another that are searched."""
_TABLES = ("_parameters", "_buffers", "_modules")


class Held:
    """The tensors that the modules of a model hold outside of parameters and buffers, and what holds them."""

    def __init__(self, model: nn.Module) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        """Tensor by the expression that a user would write: `self.layer.state["h"]`."""
        self._contents: list[tuple[Any, Any]] = []
        self._seen: set[int] = set()
        for path, module in model.named_modules():
            if type(module).__module__.startswith("torch."):
                continue
            for name, value in vars(module).items():
                if name not in _TABLES and not name.startswith(("_forward", "_backward", "_state_dict", "_load_state")):
                    self._search(value, f"self.{path}.{name}" if path else f"self.{name}", DEPTH)

    def _search(self, value: Any, place: str, depth: int) -> None:
        if isinstance(value, torch.Tensor):
            if not isinstance(value, nn.Parameter):
                self.tensors[place] = value
        elif depth and id(value) not in self._seen and (items := items_of(value, place)) is not None:
            self._seen.add(id(value))
            content = value if isinstance(value, (list, dict, set)) else _entries(value)
            self._contents.append((value, copy.copy(content)))
            for inner, item in items:
                self._search(item, inner, depth - 1)

    def new_in(self, later: Held) -> dict[str, torch.Tensor]:
        """Return the tensors that were not held before."""
        before = {id(tensor) for tensor in self.tensors.values()}
        return {place: tensor for place, tensor in later.tensors.items() if id(tensor) not in before}

    def restore(self) -> None:
        """Give every list, dict and object what it held; attributes of modules are restored by the export itself."""
        for value, content in self._contents:
            if isinstance(value, list):
                value[:] = content
            elif isinstance(value, (dict, set)):
                value.clear()
                value.update(content)
            elif isinstance(content, dict):
                _entries(value).clear()
                _entries(value).update(content)


def _entries(value: Any) -> Any:
    return value if isinstance(value, tuple) else vars(value)


def items_of(value: Any, place: str) -> Iterator[tuple[str, Any]] | None:
    """Return what a list, dict or plain object holds, each with its place; None for anything else."""
    if isinstance(value, (list, tuple, set)):
        return ((f"{place}[{at}]", item) for at, item in enumerate(value)) if len(value) <= MOST_ITEMS else None
    if isinstance(value, dict):
        return ((f"{place}[{key!r}]", item) for key, item in value.items()) if len(value) <= MOST_ITEMS else None
    is_code = isinstance(value, (nn.Module, type, ModuleType, FunctionType, MethodType))
    if is_code or not hasattr(value, "__dict__") or type(value).__module__.startswith("torch"):
        return None
    return ((f"{place}.{name}", item) for name, item in vars(value).items())


def read_again(
    model: nn.Module, batch: Mapping[str, torch.Tensor], loss_of: Callable[[Any], torch.Tensor]
) -> tuple[str, SourceLine] | None:
    """Return the first tensor that one forward of the model keeps and the next one's loss depends on, and the line.

    Two forwards of a copy of the model run as written. Returns None if there is none, or if they cannot run.
    """
    try:
        model = copy.deepcopy(model)
        with untouched_generators(), torch.enable_grad():
            before = Held(model)
            with _Tainted([*model.parameters(), *model.buffers(), *batch.values()]) as first:
                model(**batch)
            kept = {place: t for place, t in before.new_in(Held(model)).items() if first.has(t)}
            if not kept:
                return None
            with _Tainted(kept.values(), kept) as second:
                loss = loss_of(model(**batch))
    except Exception:  # such as a model of the meta device that reads values
        return None
    return second.first if second.has(loss) else None


class _Tainted(TorchDispatchMode):
    """Follows which tensors are computed from some, or drawn at random, by the memory that they lie in."""

    supports_higher_order_operators = True

    def __init__(self, tensors: Any, places: Mapping[str, torch.Tensor] | None = None) -> None:
        super().__init__()
        self._storages = {_key(tensor): tensor.untyped_storage() for tensor in tensors}
        self._places = None if places is None else {_key(tensor): place for place, tensor in places.items()}
        self.first: tuple[str, SourceLine] | None = None
        """The first of the tensors that an operation read, and its line."""

    def has(self, tensor: torch.Tensor) -> bool:
        return _key(tensor) in self._storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        read = next((tensor for tensor in given if self.has(tensor)), None)
        is_drawn = self._places is None and torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        if read is not None or is_drawn:
            for leaf in pytree.tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self._storages[_key(leaf)] = leaf.untyped_storage()
        if self.first is None and self._places is not None and read is not None and _key(read) in self._places:
            self.first = self._places[_key(read)], line_of_frames(traceback.extract_stack())
        return result


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


# Python numbers that forward changes: capture runs forward once, and repeats the numbers of that run in every step.
#
# Attributes may hold them, also in lists, dicts and plain objects, and so may the model's classes and the globals of
# the user's code that the methods of these read.

Number = int | float


@dataclass(frozen=True)
class Numbers:
    """The Python numbers that the forward of a model may change, at one moment."""

    values: Mapping[str, Number]
    """Number by the expression that a user would write: `self.layer.state['step']`."""
    holders: Mapping[str, tuple[Any, Any]]
    """Module, object, list or dict that holds the number, and its attribute, key or index there."""

    @staticmethod
    def of(model: nn.Module) -> Numbers:
        """Return the present numbers of a model."""
        found: dict[str, tuple[Number, Any, Any]] = {}
        seen: set[int] = set()

        def search(holder: Any, key: Any, value: Any, place: str, depth: int) -> None:
            if isinstance(value, Number):
                if not isinstance(holder, (tuple, set)):
                    found[place] = value, holder, key
            elif depth and id(value) not in seen:
                seen.add(id(value))
                defined_in = getattr(sys.modules.get(type(value).__module__), "__file__", None)
                # Objects of a library's classes are left out, but for containers.
                is_plain = isinstance(value, (list, tuple, set, dict)) or (
                    type(value).__module__ in sys.modules and is_users(defined_in or "")
                )
                items = (items_of(value, place) if is_plain else None) or ()
                keys = list(value) if isinstance(value, dict) else None
                for at, (inner, item) in enumerate(items):
                    name = keys[at] if keys is not None else inner.rpartition(".")[2]
                    search(value, at if isinstance(value, (list, tuple)) else name, item, inner, depth - 1)

        for path, module in model.named_modules():
            prefix = f"self.{path}" if path else "self"
            for name, value in vars(module).items():
                if not name.startswith("_") and name != "training":
                    search(module, name, value, f"{prefix}.{name}", DEPTH)
        for holder, name, value, place in _shared(model):
            search(holder, name, value, place, DEPTH)
        return Numbers({place: each[0] for place, each in found.items()}, {p: each[1:] for p, each in found.items()})

    def changes_to(self, later: Numbers) -> Numbers:
        """Return the later numbers that differ, with those that were not there before."""
        changed = {place: n for place, n in later.values.items() if place not in self.values or self.values[place] != n}
        return Numbers(changed, {place: later.holders[place] for place in changed})

    @contextmanager
    def held_by(self, model: nn.Module) -> Iterator[None]:
        """Return a context in which the model has these numbers; afterwards it has its own again."""
        own = Numbers.of(model)
        for place, number in self.values.items():  # an export may put a copy of a list or dict in its place
            _set(*own.holders.get(place, self.holders[place]), number)
        try:
            yield
        finally:
            own.restore(model)

    def restore(self, model: nn.Module) -> None:
        """Give the model these numbers again, and no others."""
        present = Numbers.of(model)
        for place, (holder, key) in present.holders.items():
            if place in self.values:
                if present.values[place] != self.values[place]:
                    _set(holder, key, self.values[place])
            elif isinstance(holder, dict):
                del holder[key]
            elif not isinstance(holder, list):
                delattr(holder, key)

    def __str__(self) -> str:
        return ", ".join(self.values)


def _shared(model: nn.Module) -> Iterator[tuple[Any, str, Any, str]]:
    """Return what the user's classes of modules hold, and the globals that their methods read, with holder and name."""
    classes = {each for module in model.modules() for each in type(module).__mro__}
    for owner in sorted(classes, key=lambda each: each.__qualname__):
        methods = [each for each in vars(owner).values() if isinstance(each, FunctionType)]
        methods = [each for each in methods if is_users(each.__code__.co_filename)]
        if not methods:
            continue
        yield from ((owner, name, value, f"{owner.__name__}.{name}") for name, value in vars(owner).items())
        names = dict.fromkeys(name for each in methods for name in each.__code__.co_names)
        space = methods[0].__globals__
        yield from ((space, name, space[name], name) for name in names if name in space)


def _set(holder: Any, key: Any, number: Number) -> None:
    if isinstance(holder, (list, dict)):
        holder[key] = number
    else:
        setattr(holder, key, number)


def note_of_changes(changed: Numbers, known: Numbers, first: fx.Graph, second: fx.Graph, model: str) -> tuple[str, ...]:
    """Return a sentence on numbers that forward changes and whose new values make no difference to the next forward.

    There is none on numbers that forward makes anew: `known` were there before. `first` and `second` are two captures
    in a row. Raises `CaptureError` if they differ.
    """
    if _text(first) != _text(second):
        raise CaptureError(
            f"The forward of {model} changes {changed} and computes with it, and capture would repeat its present "
            "value in every step. Register it as a buffer, self.register_buffer('count', torch.zeros(())), and change "
            "it in place: self.count += 1."
        )
    if not (before := ", ".join(place for place in changed.values if place in known.values)):
        return ()
    return (
        f"The forward changes {before}, which stays as it was at capture. Its next value made no difference; a "
        "branch that a later value would take is never taken.",
    )


def _text(graph: fx.Graph) -> str:
    return "\n".join(f"{node.op} {node.target} {node.args} {node.kwargs}" for node in graph.nodes)


# The operations that user's code runs, recorded as a graph with their shapes: what is known where no export is.
#
# Code that export cannot follow runs on random tensors before it becomes an opaque call. The recording has the branches
# that such a run took. Where the code takes a number from a tensor (`loss.item()`, `if loss > 1`), it has an operation.

_NUMBER = torch.ops.aten._local_scalar_dense.default
ITEM = torch.ops.aten.item.default
"""Operation of a recording that stands for everything that hands the value of a tensor to Python."""
_READS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__}
"""Methods that hand values to Python without an operation."""
_HARMLESS = {
    *(torch.Tensor.__format__, torch.Tensor.__repr__),
    *(getattr(owner, name) for owner in (torch, torch.Tensor) for name in ("isfinite", "isnan", "isinf")),
}
"""Functions that print values, or ask what has the same answer for every loss that training goes on with."""


@dataclass(frozen=True)
class Recording:
    """The operations that one run of a call consisted of."""

    flow: Dataflow
    given: tuple[fx.Node, ...]
    """The tensors that the call was given, in order."""
    returned: tuple[fx.Node, ...]
    """The tensors that it returned, and the new values of the buffers that it wrote."""


class Recorder(TorchDispatchMode):
    """Counts the FLOPs of code that runs inside a `with` block, and records its operations if it is given tensors.

    torch's `FlopCounterMode` puts hooks on modules, under which they can take no derivatives.
    """

    supports_higher_order_operators = True

    def __init__(self, compiles: bool, given: Sequence[torch.Tensor] | None = None) -> None:
        """`compiles` says that the code compiles a part of itself, in which operations are not seen."""
        super().__init__()
        self.flops, self._compiles = 0.0, compiles
        self._graph, self._nodes, self._is_on = fx.Graph(), WeakTensorKeyDictionary(), given is not None
        self._given = [self._graph.placeholder(f"given_{at}") for at in range(len(given or ()))]
        for tensor, node in zip(given or (), self._given, strict=True):
            self._set(tensor, node)

    def ignore_compile_internals(self) -> bool:  # type: ignore[override]
        return self._compiles

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if (formula := flop_registry.get(getattr(func, "_overloadpacket", func))) is not None:
            self.flops += formula(*args, **kwargs, out_val=result)
        if self._is_on:
            node = self._call(ITEM if func is _NUMBER else func, args, kwargs)
            self._set(result, node)
        return result

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Record inside a `with` block; it is entered beside the mode, since some reads of values are no operations."""
        with self, contextlib.nullcontext() if self._compiles else _Methods(self):
            yield

    def recording(self, returned: Sequence[torch.Tensor]) -> Recording:
        """Return what was recorded of code that returned these tensors."""
        results = tuple(self._node(tensor) for tensor in returned)
        order = {node: at for at, node in enumerate(self._graph.nodes)}
        none: frozenset[fx.Node] = frozenset()
        return Recording(Dataflow(order, {}, none, none, none, none, {}), tuple(self._given), results)

    def _call(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> fx.Node:
        leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
        nodes = [self._node(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        plain = [
            leaf if isinstance(leaf, (fx.Node, *fx.node.base_types)) or leaf is None else str(leaf) for leaf in nodes
        ]
        taken = pytree.tree_unflatten(plain, structure)
        node = self._graph.create_node("call_function", func, *taken)
        line = line_of_running_code()
        node.meta["stack_trace"] = f'File "{line.file}", line {line.number}\n  {line.text}' if line.file else ""
        return node

    def _node(self, tensor: torch.Tensor) -> fx.Node:
        """Return the node of a tensor; one that the code found elsewhere is a constant."""
        node = self._nodes.get(tensor)
        if node is None:
            node = self._graph.create_node("get_attr", "constant")
            self._set(tensor, node)
        return node  # type: ignore[no-any-return]

    def _set(self, result: Any, node: fx.Node) -> None:
        """Note that an operation returned a tensor, or several in a list."""
        if isinstance(result, torch.Tensor):
            self._nodes[result] = node
            with contextlib.suppress(RuntimeError):  # a nested tensor has no shape
                node.meta["val"] = torch.empty(result.shape, dtype=result.dtype, device="meta")
        elif isinstance(result, (list, tuple)):
            values = []
            for at, each in enumerate(result):
                item = self._graph.call_function(operator.getitem, (node, at))
                self._set(each, item)
                values.append(item.meta.get("val"))
            node.meta["val"] = values
        else:
            node.meta["val"] = result


class _Methods(TorchFunctionMode):
    """Tells a recorder of methods that are no operations."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.data.__get__:  # type: ignore[attr-defined]
            return args[0].detach()  # with the version of the tensor, so that writes are noticed
        recorder, before = self._recorder, self._recorder._is_on
        if func in _READS and before:
            recorder._call(ITEM, (args[0],), {})
        recorder._is_on = before and func not in _HARMLESS
        try:
            return func(*args, **(kwargs or {}))
        finally:
            recorder._is_on = before
