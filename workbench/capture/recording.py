"""The operations that user's code runs, recorded as a graph with their shapes: what is known where no export is.

Code that export cannot follow runs on random tensors before it becomes an opaque call. The recording has the branches
that such a run took. Where the code takes a number from a tensor (`loss.item()`, `if loss > 1`), it has an operation.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakTensorKeyDictionary

from workbench.capture.operations import Dataflow
from workbench.capture.source_lines import line_of_running_code

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

    def read(self, tensor: torch.Tensor) -> None:
        """Note that Python takes the values of a tensor."""
        if self._is_on:
            self._call(ITEM, (tensor,), {})

    @contextlib.contextmanager
    def pausing(self) -> Iterator[None]:
        """Record nothing inside a `with` block."""
        before, self._is_on = self._is_on, False
        try:
            yield
        finally:
            self._is_on = before

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

    def _argument(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self._node(leaf)
        return leaf if leaf is None or isinstance(leaf, fx.node.base_types) else str(leaf)

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
        if func in _READS:
            self._recorder.read(args[0])
        with self._recorder.pausing() if func in _HARMLESS else contextlib.nullcontext():
            return func(*args, **(kwargs or {}))
