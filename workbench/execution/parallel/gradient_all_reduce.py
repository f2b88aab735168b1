"""All-reduce gradients over the replicas, where neither DistributedDataParallel nor FSDP2 does it.

The gradients that CUDA graphs make lie in one buffer per block and dtype. The buffer is reduced in place, overlapped
with the rest of the backward, once the block's last backward has been launched. All other gradients are reduced in
buckets when the backward is over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

OVERLAPPED_BUCKET_BYTES = 16 << 20
"""Smallest bucket that is reduced during the backward: smaller buffers wait for others and are copied into one."""
FINAL_BUCKET_BYTES = 64 << 20
"""Smallest bucket that is reduced when the backward is over, except for the last one of each dtype."""
MAX_COPIED_BUCKETS = 4
"""Number of buckets with copied gradients that may exist at once: starting another waits for the oldest."""


@dataclass(frozen=True, eq=False)
class _Bucket:
    """Gradients whose all-reduce is running."""

    gradients: Sequence[torch.Tensor]
    flat: torch.Tensor
    """The only gradient, or a flat copy of all of them."""
    work: dist.Work

    @property
    def is_copy(self) -> bool:
        return self.flat is not self.gradients[0]

    def wait(self) -> None:
        """Make later kernels wait for the means, and copy them back into the gradients."""
        self.work.wait()
        if self.is_copy:
            means = self.flat.split([gradient.numel() for gradient in self.gradients])
            shaped = [mean.view_as(gradient) for mean, gradient in zip(means, self.gradients, strict=True)]
            torch._foreach_copy_(list(self.gradients), shaped)


class GradientAllReduce:
    """Replaces one rank's gradients by their means over the replicas.

    Every replica must make the same calls in the same order, because gradients are reduced in the order in which they
    are passed.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._supports_mean = dist.get_backend(group) == "nccl"  # gloo only sums
        self._started: set[nn.Parameter] = set()
        self._waiting: defaultdict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
        self._running: list[_Bucket] = []

    def start(self, parameters: Iterable[nn.Parameter], buffers: Iterable[torch.Tensor]) -> None:
        """Start to reduce `buffers`, which hold the gradients of `parameters`; they are means once `finish` returns."""
        self._started.update(parameters)
        for buffer in buffers:
            self._add(buffer, OVERLAPPED_BUCKET_BYTES)

    def finish(self, parameters: Iterable[nn.Parameter]) -> None:
        """Reduce the gradients of those parameters that were not started, and wait for all reductions."""
        for parameter in parameters:
            if parameter.grad is not None and parameter not in self._started:
                self._add(parameter.grad, FINAL_BUCKET_BYTES)
        for waiting in self._waiting.values():
            self._reduce(waiting)
        for bucket in self._running:
            bucket.wait()
        self._running.clear()
        self._started.clear()

    def _add(self, gradient: torch.Tensor, bucket_bytes: int) -> None:
        waiting = self._waiting[gradient.dtype]
        waiting.append(gradient)
        if sum(tensor.nbytes for tensor in waiting) >= bucket_bytes:
            self._reduce(waiting)

    def _reduce(self, waiting: list[torch.Tensor]) -> None:
        """Start the all-reduce of one bucket, and empty the list."""
        if not waiting:
            return
        gradients = tuple(waiting)
        waiting.clear()
        is_alone = len(gradients) == 1 and gradients[0].is_contiguous()
        flat = gradients[0] if is_alone else torch.cat([gradient.flatten() for gradient in gradients])
        if not self._supports_mean:
            flat.div_(self._group.size())
        operation = dist.ReduceOp.AVG if self._supports_mean else dist.ReduceOp.SUM
        work = dist.all_reduce(flat, op=operation, group=self._group, async_op=True)
        assert work is not None  # only ranks outside of the group get None
        self._running.append(_Bucket(gradients, flat, work))
        for bucket in [bucket for bucket in self._running if bucket.is_copy][:-MAX_COPIED_BUCKETS]:
            bucket.wait()
            self._running.remove(bucket)
