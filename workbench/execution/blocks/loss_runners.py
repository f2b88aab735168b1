"""Runners of blocks whose loss needs more than their own micro-batch as it is: labelled rows only, or all samples.

`LabelledRows` runs a block's head and loss only on rows that have a label; the loss and all gradients stay the same.
`workbench.capture.losses` finds the part of a block for which this is possible. The number of labels differs
between micro-batches, whereas compiled code has fixed sizes. Therefore the rows are permuted, labelled ones first, and
the smallest number of sixteenths that covers all labels is computed; rows without a label fill the last one. The host
must know the number of labels before the device does: `LabelCounter` counts them.

Suffixes of tensor names: N rows, K computed rows, H features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from workbench.base.errors import WorkbenchError
from workbench.capture import Block, Graph, SampleDim
from workbench.capture.coupling.gathering import join_rows, part_rows
from workbench.capture.graph import LabelCount
from workbench.capture.losses import BINARY, MEAN, RowwiseHead, count_labels, on_device
from workbench.capture.operations import descendants, shape_of
from workbench.execution.blocks.rewriting import GraphRewriter
from workbench.execution.blocks.step_context import LabelCounts, StepContext, Values

aten = torch.ops.aten
Runner = Callable[..., tuple[torch.Tensor, ...]]


class LabelledRows:
    """A runner of one block type: over all rows when it is called, over labelled rows as `for_labels` returns it.

    `finish` makes a runner of rewritten code (it may compile it) and is called once for each number of rows.
    """

    def __init__(self, code: fx.GraphModule, part: RowwiseHead, finish: Callable[[fx.GraphModule], Runner]) -> None:
        self.part = part
        self._code = code
        self._finish = finish
        self._runners: dict[int | None, Runner] = {}  # by the number of rows that they compute; None: all rows

    def __call__(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.for_labels(None)(*values)

    def for_labels(self, labels: int | None) -> Runner:
        """Return a runner for a micro-batch with at most `labels` labels, or for all rows without that number."""
        num_rows = None if labels is None else self.part.rows_to_compute(labels)
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
    """Rewrite a block's code to compute `part` over `num_rows` rows, labelled ones first.

    Operations that the part does not need come first, then the part, then those that need its loss.
    """
    rewriter = GraphRewriter(code)
    nodes = {node.name: node for node in code.graph.nodes}
    after_loss = descendants(nodes[part.loss])
    for node in nodes.values():
        if node.name not in part.reads and node not in after_loss:
            rewriter.copies[node] = rewriter.copy(node)
    target = rewriter.copies[nodes[part.target]]
    position = rewriter.call(labelled_first, target, part.ignore_index)
    rows = rewriter.call(first_rows, position, num_rows)
    labels = rewriter.call(aten.index_select.default, target, 0, rows)
    selected: dict[fx.Node, fx.Node] = {}

    # Operations of the part work on two-dimensional operands: the computed rows of values.
    def rows_of(source: fx.Node) -> fx.Node:
        if source not in selected:
            selected[source] = rewriter.call(select_rows, rewriter.copies[source], rows, position)
        return selected[source]

    def operand(node: fx.Node, source: fx.Node) -> fx.Node:
        if source.name in part.reads[node.name]:
            return rows_of(source)
        if node.name == part.loss:
            return labels
        copied = rewriter.copies[source]
        if node.target in BINARY and len(shape_of(source)) > 2:
            return rewriter.call(aten.reshape.default, copied, [1, shape_of(source)[-1]])
        return copied

    for node in (nodes[name] for name in part.reads):
        if node.name in part.views:
            selected[node] = rows_of(node.all_input_nodes[0])
            continue
        copied = rewriter.copy(node, partial(operand, node))
        copied.meta = {key: value for key, value in node.meta.items() if key != "val"}
        if node.target is MEAN:
            copied.update_arg(1, [-1])
        selected[node] = copied
    rewriter.copies[nodes[part.loss]] = selected[nodes[part.loss]]
    for node in nodes.values():
        if node in after_loss:
            rewriter.copies[node] = rewriter.copy(node)
    return rewriter.finish()


# A loss over the samples of all micro-batches and replicas of a step (GradCache, arXiv:2101.06983).
#
# First the towers run forward over every micro-batch, without a graph, and their results are gathered in the last
# stage. The loss and its gradient with respect to these are computed there once, over the whole batch, on every
# replica. Then each micro-batch runs forward again, with the same random numbers, and backward from its part of that
# gradient. The only micro-batch of a replica runs forward once.


class _GivenGradients(torch.autograd.Function):
    """Returns a number that was computed before, and passes given gradients to the tensors that it depends on."""

    @staticmethod
    def forward(ctx: Any, number: torch.Tensor, gradients: Sequence[torch.Tensor | None], *_: torch.Tensor) -> Any:
        ctx.gradients = gradients
        return number.clone()

    @staticmethod
    def backward(ctx: Any, *received: torch.Tensor) -> Any:
        [scale] = received
        return None, None, *(None if gradient is None else gradient * scale for gradient in ctx.gradients)


class GatheredLoss:
    """Runner of the block that computes the loss of the whole batch, which is called once for each micro-batch.

    While `collecting`, it keeps what it is given, and computes the loss at the last micro-batch. Otherwise it returns
    the whole loss, whose backward passes on that micro-batch's part of the gradient.

    When the loss is computed for the first time, every replica checks that the values that it gathered are those of
    all others, with its own at its place.
    """

    def __init__(
        self,
        run: Runner,
        block: Block,
        graph: Graph,
        context: StepContext,
        num_microbatches: int,
        group: dist.ProcessGroup,
    ) -> None:
        self._run, self._block, self._context = run, block, context
        self._parts, self._group = num_microbatches, group
        rows = {value.name: value for value in graph.gathered}
        self._rows = [rows[name] for name in block.receives] + [SampleDim(name, 0) for name in block.inputs]
        # Not fields of the batch, nor what was detached: torch has no derivative for the weights of a loss, say.
        self._has_gradient = [name in graph.differentiated for name in block.receives] + [False] * len(block.inputs)
        self._collected: list[Values] | None = None
        self._trains, self._is_checked = True, False
        self._at = next(at for at, name in enumerate(block.sends) if name not in block.returned)
        """Position of the loss among what the block computes; scalars that are logged stand beside it."""
        self._loss, self._scalars = torch.zeros(()), list[torch.Tensor]()
        self._gradients: list[list[torch.Tensor | None]] = []
        """Gradients of the loss for the block's arguments, by micro-batch."""

    @contextmanager
    def collecting(self, trains: bool) -> Iterator[None]:
        """Return a context in which every micro-batch runs forward once, in order.

        Unless it `trains`, the last of them returns what the block computes of the whole batch, and no gradient.
        """
        self._collected, self._trains = [], trains
        try:
            yield
        finally:
            self._collected, self._trains = None, True

    def __call__(self, *arguments: torch.Tensor) -> Values:
        weights = len(self._block.parameters)
        first = weights + len(self._block.buffers)
        end = first + len(self._rows)
        if self._collected is not None or self._parts == 1:
            collected = [] if self._collected is None else self._collected
            collected.append(tuple(value.detach() for value in arguments[first:end]))
            if len(collected) < self._parts:
                return tuple(torch.zeros((), device=self._context.device) for _ in self._block.sends)
            pairs = list(zip(self._rows, zip(*collected, strict=True), strict=True))
            whole = []  # of every replica; a collective
            for rows, parts in pairs:
                own = join_rows(rows, parts).contiguous()
                if self._group.size() == 1:
                    whole.append(own)
                    continue
                as_bytes = own.view(torch.uint8) if own.dtype == torch.bool else own  # which gloo does not gather
                replicas = [torch.empty_like(as_bytes) for _ in range(self._group.size())]
                dist.all_gather(replicas, as_bytes, group=self._group)
                whole.append(join_rows(rows, [replica.view(own.dtype) for replica in replicas]))
            if not self._is_checked:
                self._check([(rows, parts, value) for (rows, parts), value in zip(pairs, whole, strict=True)])
            if not self._trains:
                return self._run(*arguments[:first], *whole, *arguments[end:])
            self._compute(arguments[:weights], arguments[weights:first], whole, arguments[end:])
        if self._collected is not None:
            return self._beside_scalars(self._loss)
        gradients, self._gradients[self._context.microbatch] = self._gradients[self._context.microbatch], []
        loss = _GivenGradients.apply(self._loss, gradients, *arguments[:weights], *arguments[first:end])
        return self._beside_scalars(loss)

    def _beside_scalars(self, loss: torch.Tensor) -> Values:
        """Return what the block computes: the loss and the scalars of the whole batch."""
        return (*self._scalars[: self._at], loss, *self._scalars[self._at :])

    def _check(self, gathered: Sequence[tuple[SampleDim, Sequence[torch.Tensor], torch.Tensor]]) -> None:
        """Raise `WorkbenchError` on every replica if a value was gathered in another order on one; a collective."""
        first, total = dist.get_rank(self._group) * self._parts, self._group.size() * self._parts
        is_wrong = torch.zeros(len(gathered), device=self._context.device)
        for index, (rows, parts, whole) in enumerate(gathered):
            own = part_rows(rows, whole, total)[first : first + self._parts]
            of_first = _bits(whole).clone()
            dist.broadcast(of_first, dist.get_global_rank(self._group, 0), self._group)
            pairs = [(_bits(whole), of_first), *((_bits(a), _bits(b)) for a, b in zip(own, parts, strict=True))]
            is_wrong[index] = not all(torch.equal(*pair) for pair in pairs)
        dist.all_reduce(is_wrong, op=dist.ReduceOp.MAX, group=self._group)
        names = [rows.name for (rows, _, _), wrong in zip(gathered, is_wrong.tolist(), strict=True) if wrong]
        if names:
            raise WorkbenchError(
                f"The samples of {', '.join(names)} were gathered in another order on one of {self._group.size()} "
                "replicas than they were computed in, so that the loss and its gradients would be wrong. Nothing was "
                "updated: what the processes of this machine exchange arrives wrong. Plan with one replica, "
                "wb.plan(experiment, data=1), and nothing is gathered over them."
            )
        self._is_checked = True

    def _compute(self, weights: Values, buffers: Values, whole: Sequence[torch.Tensor], counts: Values) -> None:
        """Compute the loss of the whole batch and its gradients."""
        trained = [weight.requires_grad for weight in weights]
        given = [weight.detach().requires_grad_(yes) for weight, yes in zip(weights, trained, strict=True)]
        values = [value.requires_grad_(yes) for value, yes in zip(whole, self._has_gradient, strict=True)]
        with torch.enable_grad():
            computed = list(self._run(*given, *buffers, *values, *counts))
            loss = computed.pop(self._at)
            leaves = [leaf for leaf in (*given, *values) if leaf.requires_grad]
            with torch.autocast(self._context.device.type, enabled=False):
                found = iter(torch.autograd.grad(loss.float().sum(), leaves, allow_unused=True, materialize_grads=True))
        self._loss, self._scalars = loss.detach().float().reshape(()), computed
        of_weights = [next(found) if weight.requires_grad else None for weight in given]
        replicas = self._group.size()
        first = dist.get_rank(self._group) * self._parts
        parts: list[list[torch.Tensor | None]] = []
        for rows, value in zip(self._rows, values, strict=True):
            if not value.requires_grad:
                parts.append([None] * self._parts)
                continue
            # The loss counts in every micro-batch, divided by their number, and replicas take the mean of gradients.
            gradient = next(found) * (self._parts * replicas)
            own = part_rows(rows, gradient, self._parts * replicas)[first : first + self._parts]
            parts.append([part.contiguous() for part in own])
        self._gradients = [[*of_weights, *of_values] for of_values in zip(*parts, strict=True)]


def _bits(value: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, which are equal also where it holds no numbers."""
    return value.contiguous().flatten().view(torch.uint8)
