"""A loss over the samples of all micro-batches and replicas of a step (GradCache, arXiv:2101.06983).

First the towers run forward over every micro-batch, without a graph, and their results are gathered in the last stage.
The loss and its gradient with respect to these are computed there once, over the whole batch, on every replica. Then
each micro-batch runs forward again, with the same random numbers, and backward from its part of that gradient. The only
micro-batch of a replica runs forward once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from workbench.capture import Block, SampleDim
from workbench.capture.gathering import join_rows, part_rows
from workbench.errors import WorkbenchError
from workbench.execution.blocks.context import StepContext
from workbench.execution.blocks.labelled_head import Runner

Values = tuple[torch.Tensor, ...]


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
        gathered: Sequence[SampleDim],
        context: StepContext,
        num_microbatches: int,
        group: dist.ProcessGroup,
    ) -> None:
        self._run, self._block, self._context = run, block, context
        self._parts, self._group = num_microbatches, group
        rows = {value.name: value for value in gathered}
        self._rows = [rows[name] for name in block.receives] + [SampleDim(name, 0) for name in block.inputs]
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
            whole = [self._gather(*pair) for pair in pairs]
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

    def _gather(self, rows: SampleDim, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a value of the whole batch, given the micro-batches of this replica; a collective."""
        own = join_rows(rows, parts).contiguous()
        if self._group.size() == 1:
            return own
        as_bytes = own.view(torch.uint8) if own.dtype == torch.bool else own  # which gloo does not gather
        replicas = [torch.empty_like(as_bytes) for _ in range(self._group.size())]
        dist.all_gather(replicas, as_bytes, group=self._group)
        return join_rows(rows, [replica.view(own.dtype) for replica in replicas])

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
                "updated. This is a fault of Workbench or of the communication library; please report it. With "
                "data=1 or with micro_batch=global_batch, nothing is gathered over replicas."
            )
        self._is_checked = True

    def _compute(self, weights: Values, buffers: Values, whole: Sequence[torch.Tensor], counts: Values) -> None:
        """Compute the loss of the whole batch and its gradients."""
        trained = [weight.requires_grad for weight in weights]
        given = [weight.detach().requires_grad_(yes) for weight, yes in zip(weights, trained, strict=True)]
        values = [value.requires_grad_(value.is_floating_point()) for value in whole]
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
