"""One training step of one rank, the same code for every plan: a single stage is a pipeline of length one.

Order of a step: label counts → schedule (forwards, backwards, data-parallel reduction) → tied gradients → mask of
sparse weights → norm and clipping → optimiser → mask and, where due, move of the pattern of sparse weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from workbench.base.errors import LossSpikes
from workbench.capture import Graph, LabelCount
from workbench.capture.blocks.hidden_matrices import projections
from workbench.capture.losses import count_labels, on_device
from workbench.execution.blocks.loss_runners import LabelCounter
from workbench.execution.blocks.sparse_weights import BlockSparseWeights, MaskedWeights, SparseWeights
from workbench.execution.blocks.step_context import LabelCounts, StepContext, StepScalars
from workbench.execution.gradients import GradientAllReduce, GradientNorms
from workbench.execution.parallel.mesh import MeshCoordinate
from workbench.execution.parallel.pipeline import FIELD, ForwardOnly, PipeStage, Schedules
from workbench.execution.parallel.sharding import ReplicaExchange, ShardedTensors, distribute, is_sharded, local
from workbench.execution.parallel.stage import RankStages
from workbench.execution.tensor_norms import TensorNorms
from workbench.experiment import Experiment, Numerics
from workbench.optimizers.adamw import ShardedAdamW
from workbench.optimizers.building import build_optimizer
from workbench.optimizers.parameters import rate_factor, sent
from workbench.planning.plan import Plan


@dataclass(frozen=True)
class StepResult:
    """The scalars of one step, equal on all ranks and still on the device: reading them waits for the step."""

    scalars: torch.Tensor
    """Loss over the global batch, squared norm of its gradient, the number of ranks that want to stop, and what
    the model logs (`Trainer.scalar_names`)."""
    learning_rate: float
    apart_s: float = 0.0
    """Seconds that were spent on a record of the step, and are no part of its time."""
    spiked: torch.Tensor | None = None
    """True, on the device, for a loss spike, whose update was left out; None without a rule for spikes."""


class Trainer:
    """Makes the steps of one rank: the gradients of its stages, their reduction over ranks, and the update."""

    def __init__(
        self,
        experiment: Experiment,
        plan: Plan,
        graph: Graph,
        stages: RankStages,
        context: StepContext,
        coordinate: MeshCoordinate,
    ) -> None:
        self.experiment, self.plan, self.graph = experiment, plan, graph
        self.stages, self.context, self.coordinate = stages, context, coordinate
        is_prepared = plan.all_reduces_gradients or plan.shards  # FSDP2 sharded the stages when they were built
        pipe_stages = [
            PipeStage(
                stage if is_prepared else distribute(stage, coordinate.data_mesh, plan.zero, plan.precision),
                stage,
                coordinate.pipeline_rank + index * plan.pipeline,
                len(plan.stages),
                group=coordinate.pipeline_group,
                context=context,
                zero=plan.zero,
            )
            for index, stage in enumerate(stages.stages)
        ]
        self._schedules = Schedules(plan.schedule, pipe_stages, stages.stages, plan.num_microbatches)
        self.forward_only = ForwardOnly(stages, plan, context, coordinate)
        self._parameters = stages.model_parameters()  # after sharding, which replaces parameters
        self.whole = ShardedTensors(stages, coordinate)
        self._ties = _tied_groups(plan, graph, coordinate)
        self.optimizer = _build_optimizer(self)
        self.sparse_weights: SparseWeights | None = None
        if experiment.sparsity is not None:
            execution = BlockSparseWeights if plan.block_sparse else MaskedWeights
            self.sparse_weights = execution(experiment, graph, self._parameters, self.whole, coordinate, self.optimizer)
        decay = experiment.optimizer.ema_decay
        self.average = None if decay is None else AveragedWeights(self._parameters, decay)
        self._copied: Mapping[nn.Parameter, int] = {}
        """The weights whose bf16 copies the last update has written, with their version at that time."""
        if isinstance(self.optimizer, ShardedAdamW):
            self.optimizer.copies = {w: copy for copies in stages.weight_copies for w, copy in copies.copies.items()}
            is_alone = self.sparse_weights is None and not isinstance(experiment.optimizer.clip_norm, Mapping)
            if plan.makes_gradients_once and self.optimizer.reads_bf16_gradients and is_alone:
                for copies in stages.weight_copies:
                    copies.keep_gradients()
        self._peak_rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        numerics = experiment.numerics
        self.spikes = None if numerics.spike_factor is None else Spikes(numerics, context.device)
        self._skips_after = self.spikes or (NonFinite() if numerics.stop_on_non_finite else None)

        # The wrappers of the data-parallel axis reduce all gradients but these.
        parameters = [parameter for stage in stages.stages for parameter in stage.parameters()]
        self._all_reduce = GradientAllReduce(coordinate.data_group) if plan.data > 1 else None
        self._all_reduced = [
            p for p in parameters if plan.all_reduces_gradients or (plan.zero > 0 and not isinstance(p, DTensor))
        ]
        if self._all_reduce is not None and context.cuda_graphs is not None:
            context.cuda_graphs.on_last_backward = self._all_reduce.start

        self._duplicates = stages.duplicated_parameters()
        holders = {}
        for name, parameter in self._parameters.items():
            if name not in self._ties or self.owns(name):  # a tied parameter counts once, on the first that holds it
                replicas = 1 if is_sharded(parameter) else plan.data
                holders[name] = replicas * (1 if name in stages.shardings else plan.tensor)
        self.tensor_norms = _tensor_norms(self)
        self._norms = GradientNorms(experiment.optimizer, self._parameters, holders, context.device)

        modules = [module for stage in stages.stages for module in stage.block_modules()]
        logs = StepScalars(graph, plan.num_microbatches, plan.data, plan.tensor, context.device)
        self._scalars = context.scalars = logs if graph.scalars else None
        counts = graph.label_counts if graph.scalars or any(module.block.counts for module in modules) else ()
        self._label_counts = [on_device(count, context.device) for count in counts]
        selecting = {loss: graph.label_counts[loss] for each in modules if (loss := each.selecting_loss) is not None}
        self._host_counter = LabelCounter(selecting, plan.micro_batch)

    @property
    def scalar_names(self) -> tuple[str, ...]:
        """Names of the scalars that the model logs, in the order of a step's result."""
        return () if self._scalars is None else self._scalars.names

    def owns(self, name: str) -> bool:
        """Return True if this pipeline rank is the first of those that hold a parameter."""
        return pipeline_ranks_with(name, self.plan, self.graph)[0] == self.coordinate.pipeline_rank

    @property
    def samples(self) -> int:
        """Samples of one step on this replica."""
        return self.plan.micro_batch * self.plan.num_microbatches

    def count_labels_on_host(self, batch: Mapping[str, torch.Tensor]) -> LabelCounts:
        """Count the labels of each micro-batch if this rank selects rows by them; waits if `batch` is on a device."""
        return self._host_counter.count(batch)

    def step(
        self,
        step: int,
        batch: Mapping[str, torch.Tensor],
        stop: float = 0,
        label_counts: LabelCounts | None = None,
    ) -> StepResult:
        """Make one update; `step` counts from 0.

        `stop` (1, or `IN_HASTE` after a signal) is summed over the ranks along with the loss; `batch` and
        `label_counts` are those of `gradients`.
        """
        return self.update(step, self.measure(step, batch, stop, label_counts))

    def update(self, step: int, scalars: torch.Tensor) -> StepResult:
        """Update the weights of step `step` (0-based) with the gradients in place; `scalars` are those of `measure`."""
        experiment, norms = self.experiment, self.tensor_norms
        if norms is not None and not norms.is_due(step + 1):
            norms = None
        if norms is not None:
            norms.before_update()
        # The norm is that over all ranks: clipping by a rank's own would give replicas different weights.
        self._norms.clip(self.optimizer, scalars[1], self._squared_of_groups)
        factor = rate_factor(experiment, step)
        for group, rate in zip(self.optimizer.param_groups, self._peak_rates, strict=True):
            group["lr"] = rate * factor
        skips = None if self._skips_after is None else self._skips_after.seen(scalars[:2])
        # To read `skips` would make the host wait for the whole step before it could launch the next one. AdamW's
        # kernel on a GPU reads it on the device instead, and leaves the update out there.
        if skips is not None and isinstance(self.optimizer, ShardedAdamW) and self.optimizer.defaults["fused"]:
            self.optimizer.skips_update = skips.float()
            may_update = True
        else:
            may_update = skips is None or not bool(skips)
        if may_update:
            self.optimizer.step()
            if isinstance(self.optimizer, ShardedAdamW):
                self._copied = self.optimizer.copied
        sparse = self.sparse_weights
        if sparse is not None:
            sparse.mask_weights()
        if norms is not None:  # before a pattern moves, after which the stored elements are others
            norms.after_update()
        if sparse is not None and sparse.is_due(step) and not (skips is not None and bool(skips)):
            sparse.move(step)
        if self.average is not None and not (self.spikes is not None and bool(skips)):
            self.average.update(step)
        apart_s = 0.0 if norms is None else norms.spent_s
        return StepResult(scalars, experiment.learning_rate * factor, apart_s, None if self.spikes is None else skips)

    def measure(
        self,
        step: int,
        batch: Mapping[str, torch.Tensor],
        stop: float = 0,
        label_counts: LabelCounts | None = None,
    ) -> torch.Tensor:
        """Compute the gradients of a step and return the scalars of its `StepResult`; `step` explains the arguments."""
        loss = self.gradients(step, batch, label_counts)
        self._norms.free_untrained(step)
        return self.scalars(loss, stop)

    def scalars(self, loss: torch.Tensor, stop: float = 0) -> torch.Tensor:
        """Return the scalars of a `StepResult` of the gradients in place; `loss` is this rank's share. A collective."""
        norm, *groups = self._norms.squared()
        logged, coordinate = self._scalars, self.coordinate
        is_last = coordinate.data_rank == self.plan.data - 1
        own = [] if logged is None else logged.shares(is_last)
        # One all-reduce for all that a step tells, in this order: spikes and clipping read the first two, the log the
        # third, scalars of the model follow, and norms of groups come last, which are split off again.
        scalars = torch.stack([loss.float(), norm, torch.full_like(norm, stop), *own, *groups])
        if self.plan.world > 1:
            dist.all_reduce(scalars)
        scalars = scalars if logged is None else logged.divided(scalars, len(groups))
        scalars, self._squared_of_groups = scalars.split([len(scalars) - len(groups), len(groups)])
        if logged is not None and logged.num_sums < len(logged.names):
            scalars = torch.cat([scalars, logged.extremes()])
        return scalars

    def gradients(
        self, step: int, batch: Mapping[str, torch.Tensor], label_counts: LabelCounts | None = None
    ) -> torch.Tensor:
        """Run the forwards and backwards of step `step` (0-based) over `batch`, this replica's share of the batch.

        Leaves every gradient of the mean loss over the global batch in place; those of tied parameters are summed over
        the stages that hold them, and those of absent blocks are zero. Returns this rank's share of that loss: the sum
        over all ranks is the loss. `label_counts` is the result of `count_labels_on_host`, taken before the batch was
        sent to the device; without it, the host waits for a batch on a device.
        """
        context, count = self.context, len(next(iter(batch.values()))) // self.plan.micro_batch
        context.label_counts = self.count_labels_on_host(batch) if label_counts is None else label_counts
        context.step = step
        if self._scalars is not None:
            self._scalars.divide(count)
        context.first_microbatch = self.coordinate.data_rank * count

        # A mean loss is divided by the labels of the global batch over the number of its micro-batches, and not by
        # those of its own micro-batch: the mean over the micro-batches is then the mean over the global batch, however
        # the labels are spread. A loss that is gathered over the micro-batches is the only one.
        if self._label_counts:
            counted = _counted(self._label_counts, context, batch, self.plan.micro_batch)
            labels = torch.stack([each.sum() for each in counted]).float()
            if self.plan.data > 1:
                dist.all_reduce(labels, group=self.coordinate.data_group)
            microbatches = 1 if self.plan.gathers else count * self.plan.data
            context.loss_denominators = [
                each.divisor(total) / microbatches for each, total in zip(self._label_counts, labels, strict=True)
            ]
            if self._scalars is not None:
                self._scalars.weigh(context.loss_denominators, self._label_counts, counted, self.plan.gathers)

        # Forwards and backwards, in the order of the schedule
        self.prepare_forward()
        if context.cuda_graphs is not None:
            context.cuda_graphs.begin_step()
        if self.plan.runs_forward_twice:
            self.forward_only.over_whole_batch(batch, trains=True)
        losses: list[torch.Tensor] = []
        target = torch.empty(count * self.plan.micro_batch, device="meta") if self.stages.computes_loss else None
        fields: dict[str, Any] = {f"{FIELD}{name}": value for name, value in batch.items()}
        with self._schedules.dividing_by(count) as schedule:
            schedule.step(target=target, losses=losses, return_outputs=False, **fields)
        if self._all_reduce is not None:
            self._all_reduce.finish(self._all_reduced)

        # A tied parameter: the sum over this rank's copies, then over the ranks that hold it. Every one of these takes
        # part, also where the backward left no gradient.
        for first, *others in self._duplicates.values():
            for other in others:
                if other.grad is not None:
                    if first.grad is None:
                        first.grad = torch.zeros_like(first)
                    local(first.grad).add_(local(other.grad))
        for name, group in self._ties.items():
            parameter = self._parameters[name]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(local(parameter.grad), group=group)
        if self.sparse_weights is not None:
            self.sparse_weights.mask_gradients(step)
        if not losses:
            return torch.zeros((), device=context.device)
        return torch.stack([loss.detach() for loss in losses]).sum() / self.plan.devices_per_stage

    def prepare_forward(self) -> None:
        """Update every copy of a parameter after the last update or a loaded checkpoint, and free the gradients."""
        for first, *others in self._duplicates.values():
            for other in others:
                other.grad = None
                local(other.detach()).copy_(local(first.detach()))
        for copies in self.stages.weight_copies:
            copies.refresh(self._copied)
        self.optimizer.zero_grad(set_to_none=True)

    def full_gradient(self, name: str) -> torch.Tensor | None:
        """Return the whole gradient of a parameter of this rank, gathered from its shards (a collective).

        After a step it is clipped, unless AdamW's kernel has made the update (`workbench.optimizers.update_kernels`),
        and bf16 for weights of which `WeightCopies.keep_gradients` was called.
        """
        gradient = self._parameters[name].grad
        return None if gradient is None else self.full(name, gradient)

    def full(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Gather a parameter, or a tensor sharded like it, from its shards (a collective)."""
        return self.whole.all_gathered(name, tensor.detach())


def _build_optimizer(trainer: Trainer) -> torch.optim.Optimizer:
    """Return the optimiser of a rank's parameters; a collective of all ranks where they share Muon's matrices out."""
    experiment, plan, whole = trainer.experiment, trainer.plan, trainer.whole
    parameters = trainer.stages.model_parameters()
    if not experiment.optimizer.record.updates_matrices:
        return build_optimizer(parameters, experiment, offload=plan.offload_optimizer, whole=whole)
    found = projections(trainer.graph, experiment.optimizer)
    matrices = {name: found[name] for name in parameters if name in found}
    is_shared = plan.shares_matrices_of(trainer.coordinate.pipeline_rank)
    exchange = ReplicaExchange(trainer.stages, trainer.coordinate) if is_shared else None
    # The stages that hold a tied matrix do not exchange results.
    return build_optimizer(
        parameters, experiment, whole=whole, matrices=matrices, exchange=exchange, apart=trainer._ties
    )


def _tensor_norms(trainer: Trainer) -> TensorNorms | None:
    """Return the measurement of norms, of which each rank counts what no rank before it holds; None if none is due."""
    experiment, stages, here = trainer.experiment, trainer.stages, trainer.coordinate
    if experiment.tracking.norms_every is None:
        return None
    parameters = stages.model_parameters()
    counted = {
        name
        for name, parameter in parameters.items()
        if trainer.owns(name)
        and (here.data_rank == 0 or is_sharded(parameter))
        and (here.tensor_rank == 0 or name in stages.shardings)
    }
    every, layers = experiment.tracking.norms_every, layers_of(trainer.graph)
    return TensorNorms(every, experiment.total_steps, parameters, counted, layers, trainer.context.device)


def layers_of(graph: Graph) -> dict[str, int]:
    """Map each trained parameter, in the model's order, to the first block that reads it."""
    first = dict[str, int]()
    for index, block in enumerate(graph.blocks):
        for name in block.parameters:
            first.setdefault(name, index)
    return {name: first[name] for name in graph.parameters if name in first and name not in graph.frozen}


def pipeline_ranks_with(name: str, plan: Plan, graph: Graph) -> tuple[int, ...]:
    """Return the pipeline ranks that hold a parameter, in ascending order."""
    return tuple(
        rank
        for rank in range(plan.pipeline)
        if any(
            name in block.parameters
            for stage in plan.stages_of(rank)
            for block in graph.blocks[stage.first_block : stage.end_block]
        )
    )


def _tied_groups(plan: Plan, graph: Graph, coordinate: MeshCoordinate) -> dict[str, dist.ProcessGroup]:
    """Map each tied parameter of this rank to the group of ranks that share its gradient.

    The group holds one rank per stage that uses the parameter, of the same replica and tensor-parallel rank. Every rank
    creates every group in the same order, as `torch.distributed` demands.
    """
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    own: dict[str, dist.ProcessGroup] = {}
    for name in graph.parameters:
        pipeline_ranks = pipeline_ranks_with(name, plan, graph)
        if len(pipeline_ranks) < 2 or name in graph.frozen:
            continue
        for inner in range(plan.devices_per_stage):
            members = tuple(rank * plan.devices_per_stage + inner for rank in pipeline_ranks)
            if members not in groups:
                groups[members] = dist.new_group(list(members))
            if coordinate.rank in members:
                own[name] = groups[members]
    return own


def _counted(
    losses: list[LabelCount], context: StepContext, batch: Mapping[str, torch.Tensor], micro_batch: int
) -> list[torch.Tensor]:
    """Return the labels of each micro-batch for each mean loss; those that the host has counted are sent."""
    known = {loss: torch.tensor(counts) for loss, counts in context.label_counts.items()}
    return [
        sent(known[loss], context.device) if loss in known else count_labels(each, batch, micro_batch)
        for loss, each in enumerate(losses)
    ]


# Loss spikes: steps whose loss or gradient norm leaps above those before, and what the experiment says happens then.
#
# Whether a step is a spike is known on the device, before its update, and alike on every rank, because it is computed
# of scalars that all ranks share. The host reads it a step later, with the step's other scalars.


class Rewind(Exception):
    """A spike after which training goes back to a checkpoint; every rank raises it at the same step."""

    def __init__(self, step: int, facts: Mapping[str, Any]) -> None:
        """`step` is the number of the step, from 1; `facts` are the fields of its event."""
        super().__init__(f"step {step:,}")
        self.step, self.facts = step, facts


class NonFinite:
    """The rule without spikes: once a loss or a gradient norm was not finite, all updates are left out.

    The next step is launched before the scalars of this one are read, and must not move the weights.
    """

    def __init__(self) -> None:
        self._diverged: torch.Tensor | None = None

    def seen(self, loss_and_squared_norm: torch.Tensor) -> torch.Tensor:
        """Return whether the update of a step is left out, as a boolean on the device."""
        is_bad = ~loss_and_squared_norm.isfinite().all()
        self._diverged = is_bad if self._diverged is None else self._diverged | is_bad
        return self._diverged


class Spikes:
    """The rule of one run: the losses and gradient norms of its last steps, and the number of spikes so far."""

    def __init__(self, numerics: Numerics, device: torch.device) -> None:
        assert numerics.spike_factor is not None
        self._numerics, self._factor = numerics, numerics.spike_factor
        self.found = 0
        """Number of spikes that the host knows of; a rewind does not take it back."""
        self.can_rewind: Callable[[int], bool] = lambda _: False
        """Function that says whether there is a checkpoint to go back to from a step; a collective."""
        self._recent = torch.full((numerics.spike_window, 2), torch.nan, device=device)
        """Loss and gradient norm of the last steps that were no spikes, at their number modulo the window."""
        self._count = torch.zeros((), dtype=torch.int64, device=device)
        self._slots = torch.arange(numerics.spike_window, device=device)

    def seen(self, loss_and_squared_norm: torch.Tensor) -> torch.Tensor:
        """Return whether a step is a spike, as a boolean on the device, and remember its values if it is not.

        It is one if its loss or its gradient norm exceeds `spike_factor` times the median of the window, once the
        window is full, or if one of them is not finite. A median of 0 or less, as a likelihood of densities has, says
        nothing.
        """
        values = torch.stack([loss_and_squared_norm[0], loss_and_squared_norm[1].sqrt()])
        median = self._recent.median(dim=0).values
        leaps = (median > 0) & (values > self._factor * median)
        spiked = ~values.isfinite().all() | ((self._count >= len(self._recent)) & leaps.any())
        taken = ((self._slots == self._count % len(self._recent)) & ~spiked)[:, None]
        self._recent = torch.where(taken, values, self._recent)
        self._count = self._count + (~spiked).long()
        return spiked

    def reported(self, step: int, loss: float, grad_norm: float) -> dict[str, Any]:
        """Count a spike whose update was left out, in a step that counts from 1, and return the fields of its event.

        Raises `Rewind` where training goes back, and `LossSpikes` after more spikes than the experiment allows.
        """
        self.found += 1
        facts = {"step": step, "loss": loss, "grad_norm": grad_norm, "number": self.found}
        if self.found > self._numerics.spike_limit:
            raise LossSpikes(
                f"Step {step:,} has loss {loss:g} and gradient norm {grad_norm:g}. It is spike {self.found:,} of the "
                f"run, and spike_limit is {self._numerics.spike_limit:,}. Checkpoints of earlier steps are kept. "
                "Train with a lower learning rate or a longer warm-up, run.clone(learning_rate=..., warmup_steps=...), "
                "or with a higher spike_limit or spike_factor.",
            )
        if self._numerics.on_spike == "rewind" and self.can_rewind(step):
            raise Rewind(step, facts)
        return {**facts, "action": "skipped"}

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds: the values of the window, oldest first, and the number of spikes."""
        count, size = int(self._count), len(self._recent)
        recent = self._recent[:count] if count < size else self._recent.roll(-(count % size), 0)
        return {"recent": recent.tolist(), "found": self.found}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take up the state of a checkpoint, of which the last steps count that the window has room for."""
        rows = torch.tensor(state["recent"][-len(self._recent) :], device=self._recent.device).reshape(-1, 2)
        self._recent = torch.full_like(self._recent, torch.nan)
        self._recent[: len(rows)] = rows
        self._count = torch.full_like(self._count, len(rows))
        self.found = max(self.found, int(state["found"]))


# The moving average of a rank's trained weights, and the swap that lets evaluations compute with it.


class AveragedWeights:
    """An exponential moving average of weights, sharded as they are: `torch.optim.swa_utils.get_ema_multi_avg_fn`."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        """`parameters` are those of the rank, after sharding; the trained ones among them are averaged."""
        self._decay = decay
        self._parameters = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        self.values = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        """The averages by name, each like its parameter."""

    @property
    def _shards(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        averages = [local(value) for value in self.values.values()]
        return averages, [local(parameter.detach()) for parameter in self._parameters.values()]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take the weights after step `step` (from 0) into the average; the first ones become the average."""
        averages, weights = self._shards
        if averages:
            torch._foreach_lerp_(averages, weights, 1.0 - self._decay if step else 1.0)

    @torch.no_grad()
    def restart(self) -> None:
        """Let the present weights be the average."""
        for average, weight in zip(*self._shards, strict=True):
            average.copy_(weight)

    @contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """Let parameters hold the averages meanwhile; their own values are kept where the averages were."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        averages, _ = self._shards
        for average, parameter in zip(averages, self._parameters.values(), strict=True):
            weight, kept = local(parameter.detach()), average.clone()
            average.copy_(weight)
            weight.copy_(kept)  # which changes the parameter's version, so that its bf16 copy is made anew
