"""Means over the batch that the loss bends or chooses by: a second walk, behind the first operation without a rule.

Comparisons of numbers may see one branch only: `torch.where(loss > 1, …)`, free nats and `if loss > 1` are linear on
either side, and differ where micro-batches lie on both. So the graph is followed a second time as if every unknown
operation kept the samples apart, also through the recordings of code that runs as written. What bends a mean there, or
hands it to Python, counts as coupling.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from workbench.capture.batch_coupling import (
    COUNTS,
    LINEAR,
    MADE_ANEW,
    NONE,
    OF_COUNT,
    OF_SUM,
    RESHAPES,
    SELECTED,
    SELECTIONS,
    SUM,
    UNKNOWN,
    Coupling,
    Follower,
    is_float,
    is_truth,
)
from workbench.capture.dataflow import Dataflow
from workbench.capture.opaque import OpaqueCall, call_of
from workbench.capture.operations import ancestors, arguments_of, op_name, shape_of
from workbench.capture.recording import ITEM


def batch_coupling(flow: Dataflow, loss: fx.Node, means: Iterable[fx.Node] = ()) -> Coupling:
    """Follow the batch dim to the loss; `means` are the losses that the runtime divides by the labels of all."""
    needed, of_all = ancestors([loss]), frozenset(means)
    found = Follower(flow, needed, of_all).coupling(loss)
    if found.lines or not found.unknown:
        return found
    walk = _AssumingFollower(flow, needed, of_all)
    walk.behind = f"behind {found.unknown}"
    assumed = walk.coupling(loss)
    return Coupling(assumed.lines, assumed.quotients, found.unknown)


class _AssumingFollower(Follower):
    """A walk that takes each operation without a rule for one that keeps the samples apart.

    Its batch dim is the one that grows with those of its operands; where that is not known, the one of the same size.
    A number for all samples is taken for a mean, apart from the largest and the smallest. Only operations on sums over
    the samples are reported: whether rows meet rows of other samples is decided by numbers.
    """

    def __init__(self, flow: Dataflow, needed: set[fx.Node], means: frozenset[fx.Node]) -> None:
        super().__init__(flow, needed, means)
        self._given: dict[fx.Node, int] = {}
        """States of the tensors that a recorded call was given."""
        self._samples_in: dict[fx.Node, frozenset[int]] = {}
        """Samples that a node is computed from, for those in a loop over the samples: `loss(x[0]) + loss(x[1])`."""
        self._apart: set[fx.Node] = set()
        """Lists with one tensor for each sample."""
        self.behind = ""
        """Words for the first operation without a rule."""
        self._places_of: dict[fx.Node, str] = {}
        """Words for the code that an operation of a recording is in."""

    def _described(self, node: fx.Node) -> str:
        place = self._places_of.get(node, self.behind)
        return f"{super()._described(node)}, on what may be a mean over the batch {place}"

    def _mixing(self, node: fx.Node) -> int:
        return super()._mixing(node) if any(self._states[each] < NONE for each in node.all_input_nodes) else UNKNOWN

    def _state(self, node: fx.Node) -> int:
        if node in self._given:
            return self._given[node]
        if (call := call_of(node)) is not None and call.recording is not None:
            return self._inside(node, call)
        if node.target is ITEM and self._is_chosen_by(node.args[0]):  # type: ignore[arg-type]
            self._coupled.append(node)
        sample = self._sample_of(node)
        if sample is not None or node in self._apart:
            if sample is not None:
                self._samples_in[node] = frozenset([sample])
            self.groups[node] = 1
            return NONE
        state = super()._state(node)
        if state == NONE and any(source in self._samples_in for source in node.all_input_nodes):
            return self._of_loop(node)
        return self._assumed(node) if state == UNKNOWN and node.op == "call_function" else state

    def _is_chosen_by(self, read: fx.Node) -> bool:
        """Return True if a value that Python reads may decide by all samples: a mean, their rows, or a number of them.

        Whether there are any at all has the same answer for nearly every micro-batch.
        """
        state = self._states[read]
        if is_float(read):
            return state in (SUM, OF_SUM) or (0 <= state < len(shape_of(read)) and shape_of(read)[state] > 1)
        return state == OF_COUNT and is_truth(read) and read.args[1:] not in ((0,), (0.0,))

    # Code that runs as written

    def _inside(self, node: fx.Node, call: OpaqueCall) -> int:
        """Follow the operations that a call was recorded to run, and note the states of what it returns."""
        recording, tensors = call.recording, node.args[1]
        assert recording is not None
        inner = _AssumingFollower(recording.flow, set(recording.flow.order), frozenset())
        inner._samples, inner._size = self._samples, self._size
        for given, tensor in zip(recording.given, tensors, strict=True):  # type: ignore[arg-type]
            inner._given[given] = self._states[tensor]
            inner.groups[given] = self.groups[tensor]
        inner.follow()
        if node in self._needed:
            self._coupled += inner._coupled
            self._needed |= set(inner._coupled)
            self._places_of |= dict.fromkeys(inner._coupled, f"in {call.label or 'its forward'}, which runs as written")
            self._places_of |= inner._places_of
        self.groups[node] = 1
        dims = [inner._states[each] if inner.groups.get(each, 1) == 1 else UNKNOWN for each in recording.returned]
        self._dims_of_outputs[node] = dims
        return next((dim for dim in dims if dim >= 0), UNKNOWN)

    # A loop over the samples

    def _sample_of(self, node: fx.Node) -> int | None:
        """Return the sample that an operation takes out of the batch by its index; None for other operations."""
        source: Any = node.args[0] if node.args else None
        if node.op != "call_function" or not isinstance(source, fx.Node):
            return None
        name, state, shape = op_name(node), self._states[source], shape_of(source)
        if name == "getitem":
            return node.args[1] if source in self._apart else None  # type: ignore[return-value]
        if state < 0 or name not in ("select", "slice", "unbind", "split", "chunk"):
            return None
        given = arguments_of(node)
        if given["dim"] % len(shape) != state or shape[state] != self._size or self._size == 1:
            return None
        if name == "select":
            return int(given["index"] % self._size)
        if name == "slice":
            return int((given["start"] or 0) % self._size) if shape_of(node)[state] == 1 else None
        if len(node.meta["val"]) == self._size:
            self._apart.add(node)
        return None

    def _of_loop(self, node: fx.Node) -> int:
        """Return the state of a result of single samples: of one, a sum over several, or rows that are put together."""
        name, found = op_name(node).rstrip("_"), [self._samples_in.get(source) for source in node.all_input_nodes]
        samples = frozenset().union(*(each for each in found if each))
        if name in MADE_ANEW:
            return NONE
        if len(samples) == 1 or (name in ("cat", "stack") and len(samples) < self._size):
            self._samples_in[node] = samples
            return NONE
        if name in ("cat", "stack") and shape_of(node):
            dim = int(arguments_of(node)["dim"] % len(shape_of(node)))
            return dim if shape_of(node)[dim] % self._size == 0 else self._assumed(node)
        return SUM if name in LINEAR else self._assumed(node)

    def _write(self, owner: fx.Node, node: fx.Node) -> None:
        """Let memory that a loop writes sample by sample hold what is not known to be apart."""
        if samples := self._samples_in.get(node):
            for other in self._sharing[owner]:
                if self._states[other] == NONE:
                    self._samples_in[other] = self._samples_in.get(other, samples) | samples
                    if len(self._samples_in[other]) > 1:
                        self._states[other] = UNKNOWN
        super()._write(owner, node)

    # Operations without a rule

    def _assumed(self, node: fx.Node) -> int:
        value, inputs = node.meta.get("val"), node.all_input_nodes
        if op_name(node).rstrip("_") in SELECTIONS:
            return NONE
        if isinstance(value, (list, tuple)):
            self._dims_of_outputs[node] = dims = self._places(node, value)
            return next((dim for dim in dims if dim >= 0), UNKNOWN)
        if (of_output := self._of_output(node)) is not None:
            return of_output
        if not isinstance(value, torch.Tensor):
            return UNKNOWN
        if not all(isinstance(size, int) for size in value.shape):
            return SELECTED
        if any(not isinstance(size, int) for source in inputs for size in shape_of(source)) and not value.shape:
            return SUM
        return self._places(node, [value])[0]

    def _places(self, node: fx.Node, values: Sequence[Any]) -> list[int]:
        """Return the state of each tensor that an operation returns."""
        rows = [source for source in node.all_input_nodes if self._states[source] >= 0]
        shapes = [tuple(value.shape) if isinstance(value, torch.Tensor) else () for value in values]
        larger = _shapes_of_more_samples(node, {source: self._states[source] for source in rows})
        places = []
        for index, shape in enumerate(shapes):
            grown = larger[index] if larger and len(larger[index]) == len(shape) else shape
            same = (d for s in rows if (d := self._states[s]) < len(shape) and shape[d] == shape_of(s)[d])
            dims = [dim for dim, (less, more) in enumerate(zip(shape, grown, strict=True)) if less != more]
            unplaced = SUM if not shape or op_name(node).rstrip("_") in COUNTS else next(same, UNKNOWN)
            places.append(dims[0] if len(dims) == 1 else unplaced)
        return places


def _shapes_of_more_samples(node: fx.Node, rows: Mapping[fx.Node, int]) -> list[tuple[int, ...]]:
    """Return the shapes that an operation would return for three times as many samples; empty if that is not known."""

    def given(source: fx.Node) -> Any:
        value = source.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return value
        size = [3 * each if dim == rows.get(source) else each for dim, each in enumerate(value.shape)]
        return torch.empty(size, dtype=value.dtype, device="meta")

    if not rows or call_of(node) is not None or op_name(node).rstrip("_") in RESHAPES:
        return []
    try:
        with torch.no_grad():
            result = node.target(*fx.map_arg(node.args, given), **fx.map_arg(node.kwargs, given))  # type: ignore[operator]
    except Exception:  # such as an operation with a size among its arguments, or one that reads values
        return []
    results = result if isinstance(result, (list, tuple)) else [result]
    return [tuple(each.shape) if isinstance(each, torch.Tensor) else () for each in results]
