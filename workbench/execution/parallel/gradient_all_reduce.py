"""Gradients replaced by their means over the replicas, where neither DistributedDataParallel nor FSDP2 does.

Those that CUDA graphs make lie in one buffer for each block. It is reduced where it lies, beside the rest of the
backward, once the block's last backward is launched. The others are averaged when the backward is over, a bucket at a
time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

BESIDE_BYTES = 16 << 20
"""Gradients that are reduced together beside the backward: smaller buffers wait for others, and are copied into one."""
AT_THE_END_BYTES = 64 << 20
"""The same where nothing overlaps with them."""
MOST_COPIES = 4
"""Such buckets at once: after the next has begun, the first of them is waited for."""


@dataclass(frozen=True, eq=False)
class _Bucket:
    gradients: Sequence[torch.Tensor]
    flat: torch.Tensor
    """Their only one, or what they were copied into."""
    work: dist.Work

    @property
    def is_copy(self) -> bool:
        return self.flat is not self.gradients[0]

    def settle(self) -> None:
        """What is launched from now on finds the means."""
        self.work.wait()
        if self.is_copy:
            means = self.flat.split([gradient.numel() for gradient in self.gradients])
            shaped = [mean.view_as(gradient) for mean, gradient in zip(means, self.gradients, strict=True)]
            torch._foreach_copy_(list(self.gradients), shaped)


class Averaging:
    """Of one rank. Every replica must call it alike: what it is given is reduced in that order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._divides = dist.get_backend(group) == "nccl"  # gloo has no means
        self._begun: set[nn.Parameter] = set()
        self._waiting: defaultdict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
        self._running: list[_Bucket] = []

    def begin(self, parameters: Iterable[nn.Parameter], buffers: Iterable[torch.Tensor]) -> None:
        """Average `buffers`, which hold the gradients of `parameters`, until `finish` returns."""
        self._begun.update(parameters)
        for buffer in buffers:
            self._add(buffer, BESIDE_BYTES)

    def finish(self, parameters: Iterable[nn.Parameter]) -> None:
        """Average the gradients of those that have not begun; then all are means to what is launched next."""
        for parameter in parameters:
            if parameter.grad is not None and parameter not in self._begun:
                self._add(parameter.grad, AT_THE_END_BYTES)
        for together in self._waiting.values():
            self._reduce(together)
        for bucket in self._running:
            bucket.settle()
        self._running.clear()
        self._begun.clear()

    def _add(self, gradient: torch.Tensor, enough: int) -> None:
        together = self._waiting[gradient.dtype]
        together.append(gradient)
        if sum(waiting.nbytes for waiting in together) >= enough:
            self._reduce(together)

    def _reduce(self, together: list[torch.Tensor]) -> None:
        if not together:
            return
        gradients = tuple(together)
        together.clear()
        alone = len(gradients) == 1 and gradients[0].is_contiguous()
        flat = gradients[0] if alone else torch.cat([gradient.flatten() for gradient in gradients])
        if not self._divides:
            flat.div_(self._group.size())
        means = dist.ReduceOp.AVG if self._divides else dist.ReduceOp.SUM
        work = dist.all_reduce(flat, op=means, group=self._group, async_op=True)
        assert work is not None  # it is for ranks outside of the group
        self._running.append(_Bucket(gradients, flat, work))
        for bucket in [bucket for bucket in self._running if bucket.is_copy][:-MOST_COPIES]:
            bucket.settle()
            self._running.remove(bucket)
