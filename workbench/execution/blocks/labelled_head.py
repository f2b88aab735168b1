"""Blocks run only where a label stands, as `workbench.capture.labelled` found possible: the same loss and gradients.

The number of labels differs from micro-batch to micro-batch and compiled code has fixed sizes. So the rows are put in
an order, labelled ones first, and as many sixteenths of them are computed as hold all labels; rows without a label
fill up the last one. The host must know the number of labels before the device does: `LabelCounter`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from workbench.capture.division import shape_of
from workbench.capture.graph import Graph, LabelCount
from workbench.capture.labelled import BINARY, MEAN, LabelledPart, after, labelled_part
from workbench.execution.random_batch import repeated

aten = torch.ops.aten
Runner = Callable[..., tuple[torch.Tensor, ...]]
LabelCounts = Mapping[int, Sequence[int]]
"""Index into `Graph.label_counts` -> labels that stand in each micro-batch of a replica."""


class LabelledRows:
    """Runs a kind of block: over all rows when called, and over those that hold the labels as `over` returns it.

    `finish` makes a runner (compiles, say) of the code; it is asked once for each number of rows that comes up.
    """

    def __init__(self, code: fx.GraphModule, part: LabelledPart, finish: Callable[[fx.GraphModule], Runner]) -> None:
        self.part = part
        self._code = code
        self._finish = finish
        self._runners: dict[int | None, Runner] = {}

    def __call__(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self._runner(None)(*values)

    def over(self, labels: int) -> Runner:
        """For a micro-batch in which at most so many labels stand."""
        return self._runner(self.part.kept(labels))

    @property
    def sizes(self) -> frozenset[int | None]:
        """The numbers of rows that have come up, None for all of them."""
        return frozenset(self._runners)

    def _runner(self, kept: int | None) -> Runner:
        if kept not in self._runners:
            code = self._code if kept is None else over_labelled_rows(self._code, self.part, kept)
            self._runners[kept] = self._finish(code)
        return self._runners[kept]


class LabelCounter:
    """Counts the labels of each micro-batch on the host.

    A batch on the host is counted at once. One on a device is waited for, and its counts remembered for as long as
    the same tensors come again unchanged.
    """

    def __init__(self, counts: Mapping[int, LabelCount], micro_batch: int) -> None:
        self._inputs = {index: count.inputs for index, count in counts.items()}
        self._codes = {index: copy.deepcopy(count.code) for index, count in counts.items()}
        self._micro_batch = micro_batch
        self._device: torch.device | None = None
        self._seen: tuple[tuple[torch.Tensor, int], ...] = ()
        self._found: LabelCounts = {}

    def of(self, batch: Mapping[str, torch.Tensor]) -> LabelCounts:
        """`batch` is one replica's part of the global batch."""
        fields = [batch[name] for inputs in self._inputs.values() for name in inputs]
        if not self._is_same(fields):
            self._found = {index: self._count(index, batch) for index in self._inputs}
            self._seen = tuple((field, field._version) for field in fields if field.device.type != "cpu")
        return self._found

    def _is_same(self, fields: Sequence[torch.Tensor]) -> bool:
        return len(self._seen) == len(fields) > 0 and all(
            field is seen and field._version == version
            for field, (seen, version) in zip(fields, self._seen, strict=True)
        )

    def _count(self, index: int, batch: Mapping[str, torch.Tensor]) -> list[int]:
        self._move(next(iter(batch.values())).device)
        counts = labels_of_micro_batches(self._codes[index], self._inputs[index], batch, self._micro_batch)
        return [int(count) for count in counts.tolist()]

    def _move(self, device: torch.device) -> None:
        if device != self._device:
            for code in self._codes.values():
                retarget(code.to(device), device)
            self._device = device


def labelled_share(graph: Graph, examples: Mapping[str, torch.Tensor]) -> float:
    """Of the rows that a head computes, how many are labelled: the most in any micro-batch that `examples` make.

    1 where no block may pass over rows. `examples` are a batch on the host.
    """
    parts = [(block.counts[part.count], part.rows) for block in graph.blocks if (part := labelled_part(block))]
    counter = LabelCounter({index: graph.label_counts[index] for index, _ in parts}, graph.micro_batch)
    micro_batches = math.ceil(len(next(iter(examples.values()))) / graph.micro_batch)
    found = counter.of(repeated(examples, micro_batches * graph.micro_batch, torch.device("cpu")))
    return max((max(found[index]) / rows for index, rows in parts), default=1.0)


def labels_of_micro_batches(
    code: fx.GraphModule, inputs: Sequence[str], batch: Mapping[str, torch.Tensor], micro_batch: int
) -> torch.Tensor:
    """What `LabelCount.code` counts in each micro-batch; more samples at once may not fit sizes that it has fixed."""
    samples = len(next(iter(batch.values())))
    parts = [slice(first, first + micro_batch) for first in range(0, samples, micro_batch)]
    return torch.stack([code(*(batch[name][part] for name in inputs)) for part in parts])


def retarget(code: fx.GraphModule, device: torch.device) -> None:
    """Point factory calls and casts that capture fixed to the model's device at this one."""

    def moved(value: Any) -> Any:
        return device if isinstance(value, torch.device) else value

    for node in code.graph.nodes:
        node.args = fx.node.map_aggregate(node.args, moved)
        node.kwargs = fx.node.map_aggregate(node.kwargs, moved)
    code.recompile()


# Operations on rows


def labelled_first(labels_N: torch.Tensor, ignore: int) -> torch.Tensor:
    """The place of each row when the labelled ones come first, both kinds in their order: a permutation."""
    stands_N = labels_N != ignore
    before_N = stands_N.long().cumsum(0)
    others_N = before_N[-1] + (~stands_N).long().cumsum(0)
    return torch.where(stands_N, before_N, others_N) - 1


def first_rows(place_N: torch.Tensor, kept: int) -> torch.Tensor:
    """The rows at the first `kept` places."""
    rows_N = torch.arange(place_N.shape[0], device=place_N.device)
    return torch.empty_like(place_N).scatter(0, place_N, rows_N)[:kept]


class _SelectRows(torch.autograd.Function):
    """Rows are taken once, so the backward needs no sum: each row reads its own gradient, or zero."""

    @staticmethod
    def forward(ctx: Any, value_NH: torch.Tensor, rows_K: torch.Tensor, place_N: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(place_N)
        return value_NH.index_select(0, rows_K)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        [place_N], [gradient_KH] = ctx.saved_tensors, gradients
        kept = gradient_KH.shape[0]
        found_NH = gradient_KH.index_select(0, place_N.clamp(max=kept - 1))
        return found_NH.masked_fill((place_N >= kept)[:, None], 0), None, None


def select_rows(value: torch.Tensor, rows_K: torch.Tensor, place_N: torch.Tensor) -> torch.Tensor:
    """(…, H), whose leading dims make up the N rows -> (K, H)."""
    result: torch.Tensor = _SelectRows.apply(value.reshape(-1, value.shape[-1]), rows_K, place_N)
    return result


# The rewriting


def over_labelled_rows(code: fx.GraphModule, part: LabelledPart, kept: int) -> fx.GraphModule:
    """A block's code that computes `part` over the first `kept` rows, labelled ones first."""
    return fx.GraphModule(dict(code.named_children()), _Rewriting(code, part, kept).graph)


class _Rewriting:
    """What the part does not need comes first, then the part, then what needs its loss."""

    def __init__(self, code: fx.GraphModule, part: LabelledPart, kept: int) -> None:
        self.graph = fx.Graph()
        self._part = part
        self._copies: dict[fx.Node, fx.Node] = {}
        self._selected: dict[fx.Node, fx.Node] = {}
        nodes = {node.name: node for node in code.graph.nodes}
        members = [nodes[name] for name in part.reads]
        last = after(nodes[part.loss])
        for node in nodes.values():
            if node.name not in part.reads and node not in last:
                self._copies[node] = self.graph.node_copy(node, self._copies.__getitem__)
        target = self._copies[nodes[part.target]]
        self._place = self.graph.call_function(labelled_first, (target, part.ignore_index))
        self._rows = self.graph.call_function(first_rows, (self._place, kept))
        self._labels = self.graph.call_function(aten.index_select.default, (target, 0, self._rows))
        for node in members:
            self._selected[node] = self._row_wise(node)
        self._copies[members[-1]] = self._selected[members[-1]]
        for node in nodes.values():
            if node in last:
                self._copies[node] = self.graph.node_copy(node, self._copies.__getitem__)
        self.graph.lint()

    def _row_wise(self, node: fx.Node) -> fx.Node:
        """A member of the part, over two-dimensional operands."""
        if node.name in self._part.views:
            return self._rows_of(node.all_input_nodes[0])
        copied = self.graph.node_copy(node, lambda source: self._operand(node, source))
        copied.meta = {key: value for key, value in node.meta.items() if key != "val"}
        if node.target is MEAN:
            copied.update_arg(1, [-1])
        return copied

    def _operand(self, node: fx.Node, source: fx.Node) -> fx.Node:
        if source.name in self._part.reads[node.name]:
            return self._rows_of(source)
        if node.name == self._part.loss:
            return self._labels
        copied = self._copies[source]
        if node.target in BINARY and len(shape_of(source)) > 2:
            return self.graph.call_function(aten.reshape.default, (copied, [1, shape_of(source)[-1]]))
        return copied

    def _rows_of(self, source: fx.Node) -> fx.Node:
        """The rows that are computed of a value."""
        if source not in self._selected:
            arguments = (self._copies[source], self._rows, self._place)
            self._selected[source] = self.graph.call_function(select_rows, arguments)
        return self._selected[source]
