"""Run a block's head and loss only on rows that have a label; the loss and all gradients stay the same.

`workbench.capture.losses` finds the part of a block for which this is possible. The number of labels differs
between micro-batches, whereas compiled code has fixed sizes. Therefore the rows are permuted, labelled ones first, and
the smallest number of sixteenths that covers all labels is computed; rows without a label fill the last one. The host
must know the number of labels before the device does: `LabelCounter` counts them.

Suffixes of tensor names: N rows, K computed rows, H features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from workbench.capture.graph import LabelCount
from workbench.capture.losses import BINARY, MEAN, RowwiseHead, count_labels, on_device
from workbench.capture.operations import descendants, shape_of
from workbench.execution.blocks.graph_rewriter import GraphRewriter

aten = torch.ops.aten
Runner = Callable[..., tuple[torch.Tensor, ...]]
LabelCounts = Mapping[int, Sequence[int]]
"""Index into `Graph.label_counts` -> number of labels in each micro-batch of a replica."""


class LabelledRows:
    """A runner of one block type: over all rows when it is called, over labelled rows as `for_labels` returns it.

    `finish` makes a runner of rewritten code (it may compile it) and is called once for each number of rows.
    """

    def __init__(self, code: fx.GraphModule, part: RowwiseHead, finish: Callable[[fx.GraphModule], Runner]) -> None:
        self.part = part
        self._code = code
        self._finish = finish
        self._runners: dict[int | None, Runner] = {}

    def __call__(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self._runner(None)(*values)

    def for_labels(self, labels: int) -> Runner:
        """Return a runner for a micro-batch with at most `labels` labels."""
        return self._runner(self.part.rows_to_compute(labels))

    @property
    def row_counts(self) -> frozenset[int | None]:
        """The numbers of computed rows that have occurred; None stands for all rows."""
        return frozenset(self._runners)

    def _runner(self, num_rows: int | None) -> Runner:
        if num_rows not in self._runners:
            code = self._code if num_rows is None else restrict_to_labelled_rows(self._code, self.part, num_rows)
            self._runners[num_rows] = self._finish(code)
        return self._runners[num_rows]


class LabelCounter:
    """Counts the labels of each micro-batch on the host.

    A batch in the host's memory is counted at once. For a batch on a device the host waits; the result is cached for as
    long as the same unchanged tensors are passed again.
    """

    def __init__(self, label_counts: Mapping[int, LabelCount], micro_batch: int) -> None:
        """`label_counts` are entries of `Graph.label_counts` by index; `micro_batch` is a number of samples."""
        self._counts, self._micro_batch = dict(label_counts), micro_batch
        self._device: torch.device | None = None
        self._cached_for: tuple[tuple[torch.Tensor, int], ...] = ()
        self._cached: LabelCounts = {}

    def count(self, batch: Mapping[str, torch.Tensor]) -> LabelCounts:
        """Count the labels in `batch`, one replica's share of the global batch."""
        fields = [batch[name] for count in self._counts.values() for name in count.inputs]
        if len(self._cached_for) == len(fields) > 0 and all(
            field is cached and field._version == version
            for field, (cached, version) in zip(fields, self._cached_for, strict=True)
        ):
            return self._cached
        device = next(iter(batch.values())).device
        if device != self._device:
            self._counts = {index: on_device(count, device) for index, count in self._counts.items()}
            self._device = device
        self._cached = {
            index: [int(labels) for labels in count_labels(count, batch, self._micro_batch).tolist()]
            for index, count in self._counts.items()
        }
        self._cached_for = tuple((field, field._version) for field in fields if field.device.type != "cpu")
        return self._cached


# Operations on rows


def labelled_first(labels_N: torch.Tensor, ignore: int) -> torch.Tensor:
    """Return each row's new position when labelled rows come first, both groups in their old order: a permutation."""
    labelled_N = labels_N != ignore
    before_N = labelled_N.long().cumsum(0)
    others_N = before_N[-1] + (~labelled_N).long().cumsum(0)
    return torch.where(labelled_N, before_N, others_N) - 1


def first_rows(position_N: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return the rows at the first `num_rows` positions."""
    rows_N = torch.arange(position_N.shape[0], device=position_N.device)
    return torch.empty_like(position_N).scatter(0, position_N, rows_N)[:num_rows]


class _SelectRows(torch.autograd.Function):
    """Selects rows; each is taken at most once, so the backward needs no sum: a row reads its own gradient or zero."""

    @staticmethod
    def forward(ctx: Any, value_NH: torch.Tensor, rows_K: torch.Tensor, position_N: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(position_N)
        return value_NH.index_select(0, rows_K)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        [position_N], [gradient_KH] = ctx.saved_tensors, gradients
        num_rows = gradient_KH.shape[0]
        gradient_NH = gradient_KH.index_select(0, position_N.clamp(max=num_rows - 1))
        return gradient_NH.masked_fill((position_N >= num_rows)[:, None], 0), None, None


def select_rows(value: torch.Tensor, rows_K: torch.Tensor, position_N: torch.Tensor) -> torch.Tensor:
    """Select rows of a tensor (…, H) whose leading dims together are the N rows; returns (K, H)."""
    result: torch.Tensor = _SelectRows.apply(value.reshape(-1, value.shape[-1]), rows_K, position_N)
    return result


# The graph pass


def restrict_to_labelled_rows(code: fx.GraphModule, part: RowwiseHead, num_rows: int) -> fx.GraphModule:
    """Rewrite a block's code to compute `part` over `num_rows` rows, labelled ones first."""
    return _LabelledRowsRewriter(code, part, num_rows).finish()


class _LabelledRowsRewriter(GraphRewriter):
    """Orders the code so: operations that the part does not need, then the part, then those that need its loss."""

    def __init__(self, code: fx.GraphModule, part: RowwiseHead, num_rows: int) -> None:
        super().__init__(code)
        self._part = part
        self._selected: dict[fx.Node, fx.Node] = {}
        nodes = {node.name: node for node in code.graph.nodes}
        after_loss = descendants(nodes[part.loss])
        for node in nodes.values():
            if node.name not in part.reads and node not in after_loss:
                self.copies[node] = self.copy(node)
        target = self.copies[nodes[part.target]]
        self._position = self.call(labelled_first, target, part.ignore_index)
        self._rows = self.call(first_rows, self._position, num_rows)
        self._labels = self.call(aten.index_select.default, target, 0, self._rows)
        for name in part.reads:
            self._selected[nodes[name]] = self._row_wise(nodes[name])
        self.copies[nodes[part.loss]] = self._selected[nodes[part.loss]]
        for node in nodes.values():
            if node in after_loss:
                self.copies[node] = self.copy(node)

    def _row_wise(self, node: fx.Node) -> fx.Node:
        """Copy an operation of the part so that it works on two-dimensional operands."""
        if node.name in self._part.views:
            return self._rows_of(node.all_input_nodes[0])
        copied = self.copy(node, lambda source: self._operand(node, source))
        copied.meta = {key: value for key, value in node.meta.items() if key != "val"}
        if node.target is MEAN:
            copied.update_arg(1, [-1])
        return copied

    def _operand(self, node: fx.Node, source: fx.Node) -> fx.Node:
        if source.name in self._part.reads[node.name]:
            return self._rows_of(source)
        if node.name == self._part.loss:
            return self._labels
        copied = self.copies[source]
        if node.target in BINARY and len(shape_of(source)) > 2:
            return self.call(aten.reshape.default, copied, [1, shape_of(source)[-1]])
        return copied

    def _rows_of(self, source: fx.Node) -> fx.Node:
        """Return the computed rows of a value."""
        if source not in self._selected:
            self._selected[source] = self.call(select_rows, self.copies[source], self._rows, self._position)
        return self._selected[source]
