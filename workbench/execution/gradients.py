"""The gradients of a step: added up over micro-batches, reduced over replicas, their norm, and the clipping by it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import fx, nn

from workbench.base.validation import factor_of, first_match
from workbench.experiment import Optimizer
from workbench.optimizers.adamw import ShardedAdamW
from workbench.optimizers.parameters import local
from workbench.sparsity.kernels.operators import runs_triton

if TYPE_CHECKING:
    from workbench.optimizers.update_kernels import TensorTable

# Accumulation: a block's weight gradients are added to those of earlier micro-batches, all of the block in one kernel.
#
# PyTorch adds a bf16 tensor to an fp32 one in one kernel per weight, without wide loads, at 2.2 of an H200's 4.3 TB/s.
# The compiler makes one kernel of the whole list. Both give the same numbers to the last bit.

MIN_COMPILED_ELEMENTS = 4 << 20
"""Smallest block, in elements, whose additions are compiled: PyTorch adds smaller ones in 20 µs on an H200, whereas
compiling a kernel takes a second or more."""


class GradientAccumulator:
    """Accumulator of one rank's weight gradients.

    With `compiles`, each list of shapes of at least `MIN_COMPILED_ELEMENTS` is added by a kernel of its own, compiled
    at its first use.
    """

    def __init__(self, compiles: bool) -> None:
        self._compiles = compiles
        self._compiled: dict[Hashable, Callable[..., None]] = {}

    @torch.no_grad()
    def add(
        self,
        weights: Sequence[nn.Parameter],
        gradients: Sequence[torch.Tensor],
        allocate: Callable[[Sequence[nn.Parameter]], None] | None = None,
    ) -> None:
        """Add one gradient to each weight's `grad`; `allocate` creates those that are missing, uninitialised.

        A weight whose `grad_dtype` is not its dtype takes the gradient as it is, because a step makes only one.
        """
        for weight, gradient in zip(weights, gradients, strict=True):
            if weight.grad_dtype != weight.dtype:
                weight.grad = gradient.contiguous()
        pairs = [(w, gradient) for w, gradient in zip(weights, gradients, strict=True) if w.grad_dtype == w.dtype]
        new = [(weight, gradient) for weight, gradient in pairs if weight.grad is None]
        later = [(weight.grad, gradient) for weight, gradient in pairs if weight.grad is not None]
        if new:
            if allocate is not None:
                allocate([weight for weight, _ in new])
            else:
                for weight, _ in new:
                    weight.grad = torch.empty_like(weight)
            # Between two dtypes this is twice as fast as `copy_` for each, but not in a list of several dtypes.
            for dtype in dict.fromkeys(gradient.dtype for _, gradient in new):
                alike = [(weight.grad, gradient) for weight, gradient in new if gradient.dtype == dtype]
                torch._foreach_copy_([total for total, _ in alike if total is not None], [value for _, value in alike])
        if not later:
            return
        totals, values = [total for total, _ in later], [gradient for _, gradient in later]
        if not self._compiles or sum(tensor.numel() for tensor in totals) < MIN_COMPILED_ELEMENTS:
            torch._foreach_add_(totals, values)
            return
        tensors = totals + values
        key = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors)
        if key not in self._compiled:
            # A graph module of its own, because the compiler keeps one cache per module.
            graph = fx.Graph()
            into, added = (
                [graph.placeholder(f"{name}{at}") for at in range(len(totals))] for name in ("into", "value")
            )
            graph.call_function(torch.ops.aten._foreach_add_.List, (into, added))
            graph.output(())
            additions = fx.GraphModule(nn.Module(), graph)
            self._compiled[key] = torch.compile(additions, dynamic=False, fullgraph=True)
        self._compiled[key](*tensors)


# All-reduce over the replicas, where neither DistributedDataParallel nor FSDP2 does it.
#
# The gradients that CUDA graphs make lie in one buffer per block and dtype. The buffer is reduced in place, overlapped
# with the rest of the backward, once the block's last backward has been launched. All other gradients are reduced in
# buckets when the backward is over.

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
            # Before the sum, which over many replicas may leave the range of fp16.
            flat.div_(self._group.size())
        operation = dist.ReduceOp.AVG if self._supports_mean else dist.ReduceOp.SUM
        work = dist.all_reduce(flat, op=operation, group=self._group, async_op=True)
        assert work is not None  # only ranks outside of the group get None
        self._running.append(_Bucket(gradients, flat, work))
        for bucket in [bucket for bucket in self._running if bucket.is_copy][:-MAX_COPIED_BUCKETS]:
            bucket.wait()
            self._running.remove(bucket)


# Norms over all ranks, and the clipping by them: of all parameters together, or of each group.
#
# A rank adds the squares of the gradients that it holds, each divided by the number of ranks that hold the same; the
# sum over all ranks is the squared norm.

Tables = dict[float, "TensorTable"]
"""Tables of our kernel for gradients, by what their squares are divided by."""


class GradientNorms:
    """The norms and limits of one rank's gradients, and the steps in which its parameters have one."""

    def __init__(
        self,
        settings: Optimizer,
        parameters: Mapping[str, nn.Parameter],
        holders: Mapping[str, int],
        device: torch.device,
    ) -> None:
        """`holders` are the ranks that hold the same values, for the parameters whose squares this rank adds."""
        self._parameters, self._device, self._limit = parameters, device, settings.clip_norm
        scales = settings.grad_norm_scale or {}
        self._divisors = {parameters[name]: count / factor_of(name, scales) ** 2 for name, count in holders.items()}
        limits = settings.clip_norm if isinstance(settings.clip_norm, Mapping) else {}
        self._groups: dict[str, list[nn.Parameter]] = {pattern: [] for pattern in limits}
        """Parameters of each group that has a limit."""
        self._tables: list[Tables] = [{} for _ in range(1 + len(limits))]
        spans = settings.trained_during or {}
        self._spans: dict[nn.Parameter, tuple[int, int | None]] = {}
        """First and end step of the parameters that are not always trained."""
        for name, parameter in parameters.items():
            if (pattern := first_match(name, limits)) is not None:
                self._groups[pattern].append(parameter)
            if (pattern := first_match(name, spans)) is not None:
                self._spans[parameter] = spans[pattern]

    def free_untrained(self, step: int) -> None:
        """Remove the gradients of parameters that are not trained in step `step`, counted from 0."""
        for parameter, (first, end) in self._spans.items():
            if step < first or (end is not None and step >= end):
                parameter.grad = None

    def squared(self) -> list[torch.Tensor]:
        """Return this rank's share of the squared norm of all gradients, and of those of each group."""
        divisors, groups = self._divisors, (self._parameters.values(), *self._groups.values())
        counted = ([(p.grad, divisors[p]) for p in group if p in divisors and p.grad is not None] for group in groups)
        pairs = zip(counted, self._tables, strict=True)
        return [squared_norm(gradients, self._device, tables) for gradients, tables in pairs]

    def clip(self, optimizer: torch.optim.Optimizer, squared: torch.Tensor, of_groups: torch.Tensor) -> None:
        """Clip the gradients, or let the optimiser's kernel do so; the squared norms are those over all ranks."""
        if isinstance(self._limit, Mapping):
            for (pattern, parameters), norm in zip(self._groups.items(), of_groups, strict=True):
                scale_gradients(parameters, clip_factor(norm.sqrt(), self._limit[pattern]))
        elif self._limit is not None:
            factor = clip_factor(squared.sqrt(), self._limit)
            if isinstance(optimizer, ShardedAdamW):
                optimizer.gradient_factor = factor
            else:
                scale_gradients(self._parameters.values(), factor)


@torch.no_grad()  # With autograd, reading the shards of DTensors would take 5 times the host's time.
def squared_norm(
    gradients: Iterable[tuple[torch.Tensor, float]], device: torch.device, tables: Tables | None = None
) -> torch.Tensor:
    """Return this rank's share of the squared global norm, which is the sum of the shares of all ranks.

    Each gradient (or this rank's shard of it) comes with what its squares are divided by, such as the number of ranks
    that hold the same values. `tables` are those of earlier calls, for our kernel.
    """
    alike: dict[float, list[torch.Tensor]] = {}
    for gradient, divisor in gradients:
        alike.setdefault(divisor, []).append(local(gradient))
    total = torch.zeros((), device=device)
    tables = {} if tables is None else tables
    for divisor, shards in alike.items():
        total = total + _sum_of_squares(shards, divisor, tables) / divisor
    return total


def _sum_of_squares(shards: list[torch.Tensor], key: float, tables: Tables) -> torch.Tensor:
    if runs_triton(shards[0]):
        from workbench.optimizers.update_kernels import TensorTable, sum_of_squares

        if (found := sum_of_squares(tables.setdefault(key, TensorTable()), shards)) is not None:
            return found
    norms = list[torch.Tensor]()
    for dtype in dict.fromkeys(shard.dtype for shard in shards):
        of_type = [shard for shard in shards if shard.dtype == dtype]
        # Without the dtype each norm would be rounded to the 8 bits of bf16 before the norms are added.
        norms += torch._foreach_norm(of_type, dtype=torch.float32 if dtype == torch.bfloat16 else None)
    return torch.stack([norm.float() for norm in norms]).square().sum()


def clip_factor(norm: torch.Tensor, limit: float) -> torch.Tensor:
    """Return the factor of gradients whose norm may exceed the limit (Pascanu et al., arXiv:1211.5063)."""
    # The 1e-6 is that of `torch.nn.utils.clip_grad_norm_`, whose factors these are to the last bit.
    return torch.clamp(limit / (norm + 1e-6), max=1.0)


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: torch.Tensor) -> None:
    """Multiply every gradient, or this rank's shard of it, by a factor."""
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)
