"""Ranks that examine a model in place of training it: those of `run.evaluate` and of `wb.bisect`.

`Evaluation` loads a checkpoint and computes its loss. A bisection has ranks of each plan, which write their numbers
down, and one more that compares them. `Tracer` trains a few steps as every rank does, and stores what each block sends
and passes back, the gradients, and the state before and after each update. `Referee` repeats every step on one device
from the state that the ranks had: in float64, and several times in the plan's precision with other roundings, which is
the noise that their numbers are measured against. Each step, and each update, begins with the numbers of the ranks, so
that what rounding did in one step is no difference in the next.

TTrace (arXiv:2506.09280) finds its tolerances by perturbing a reference too; random roundings are those of Monte Carlo
arithmetic (Parker, UCLA CSD-970002, 1997).
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from workbench.capture import Graph
from workbench.capture.captured_model import CapturedModel
from workbench.capture.operations import drop_nothing, use_float64
from workbench.execution import build, deviation
from workbench.execution.between_steps import Evaluator
from workbench.execution.blocks import LabelCounts, StepContext, mix
from workbench.execution.checkpoint.save_load import CheckpointStore, TrainingProgress, entries
from workbench.execution.observation import BACKWARD, BATCH, FORWARD, BlockObserver
from workbench.execution.parallel.stage import written_buffers
from workbench.execution.step_log import StepLog
from workbench.execution.trainer import NonFinite, Trainer
from workbench.execution.worker import BetweenSteps, TrainingWorker, main
from workbench.optimizers.building import create_state, forget_state
from workbench.planning.plan import Memory, Plan, Stage
from workbench.rundir import RunDir, append_event, read_object, read_record, write_record

TRACES, RESULT = "traces", "bisection.json"
"""Folder of the numbers of a plan's ranks, and file of the comparison, in a run directory."""
ROUNDINGS = (0, 1, 1, deviation.COARSE)
"""Coarseness of the random roundings of each repetition of a step; 0 for the roundings of the arithmetic alone."""
MOST_TOLD = 200
"""Number of deviations of a plan that are kept: those from where its fault begins, or the largest."""


def settings_of(run: RunDir) -> dict[str, Any]:
    """Return what `wb.bisect` asks of a run's ranks."""
    return dict(read_record(run.environment)["bisection"])


class Rounding:
    """Random roundings, each of which changes a floating-point number by up to `unit` of itself."""

    def __init__(self, unit: float = 0.0, seed: int = 0) -> None:
        self._unit, self._seed, self._count = unit, seed, 0

    def of(self, value: torch.Tensor) -> torch.Tensor:
        """Return rounded numbers, through which a gradient passes as it is; other types and `unit` 0 are left alone."""
        if not self._unit or not value.is_floating_point():
            return value
        self._count += 1  # a generator of its own, because the model's must draw what they draw in the plan
        generator = torch.Generator(value.device).manual_seed(mix(self._seed, self._count))
        limits, old = torch.finfo(value.dtype), value.detach()
        draws = torch.rand(value.shape, dtype=torch.float64, device=value.device, generator=generator)
        new = (old.double() * (1 + self._unit * (2 * draws - 1))).clamp(limits.min, limits.max).to(value.dtype)
        return value + torch.where(old.isfinite(), new - old, 0.0)


class Recorder(BlockObserver):
    """Keeps what the blocks of a rank read, send and pass back, after a rounding.

    Gradients are those of the mean loss of a micro-batch, whatever the number of micro-batches.
    """

    def __init__(self, trainer: Trainer, step: int, rounding: Rounding | None = None) -> None:
        super().__init__(trainer)
        self._step, self._rounding = step, rounding or Rounding()
        self.numbers: deviation.Numbers = {}

    def note(self, source: int, block: int, name: str, micro_batch: int, value: torch.Tensor) -> torch.Tensor | None:
        if source == BACKWARD and name not in self._trainer.graph.blocks[block].receives:
            return None  # the part of a weight's gradient that stems from one of the blocks that share it
        part = {BATCH: deviation.SAMPLES, FORWARD: deviation.OUTPUT, BACKWARD: deviation.PASSED}[source]
        used = value if source == BATCH else self._rounding.of(value)
        kept = used.detach()
        if part == deviation.PASSED:
            kept = kept.double() * self._trainer.plan.num_microbatches
        self.numbers[self._step, part, block, name, micro_batch] = kept.to("cpu", copy=True)
        return None if used is value else used


def state_of(trainer: Trainer, step: int, part: int) -> deviation.Numbers:
    """Return the weights, buffers and optimiser state of this rank, whole; a collective."""
    found: deviation.Numbers = {}
    blocks = _first_blocks(trainer.graph)
    for key, name, value in entries(trainer):
        whole = trainer.full(name, value.to(trainer.context.device)) if value.ndim else value
        found[step, part, blocks.get(name, 0), key, -1] = whole.detach().to("cpu", copy=True)
    return found


def gradients_of(trainer: Trainer, step: int) -> deviation.Numbers:
    """Return the gradients of this rank's parameters, whole; a collective."""
    found: deviation.Numbers = {}
    blocks = _first_blocks(trainer.graph)
    for name in trainer.stages.model_parameters():
        gradient = trainer.full_gradient(name)
        if gradient is not None:
            found[step, deviation.GRADIENT, blocks[name], name, -1] = gradient.detach().to("cpu", copy=True)
    return found


def _first_blocks(graph: Graph) -> dict[str, int]:
    """Map parameters and buffers to the first block that reads them, whose backward completes a gradient."""
    return {name: b.index for b in reversed(graph.blocks) for name in (*b.parameters, *b.buffers)}


def with_changed_code(graph: Graph, change: Callable[[fx.GraphModule], None]) -> Graph:
    """Return the graph with copies of its blocks' code, each changed."""
    codes = {block.block_type: copy.deepcopy(block.code) for block in graph.blocks}
    for code in codes.values():
        change(code)
    return replace(graph, blocks=tuple(replace(block, code=codes[block.block_type]) for block in graph.blocks))


class Evaluation(TrainingWorker):
    """A rank that evaluates the checkpoint that `resume.json` names, and writes no checkpoint."""

    is_exact = True

    def _train(
        self,
        trainer: Trainer,  # noqa: ARG002 - its evaluators are in `between`
        checkpoints: CheckpointStore,  # noqa: ARG002 - a training saves
        progress: TrainingProgress,
        between: Sequence[BetweenSteps],
    ) -> TrainingProgress:
        """Compute the loss of the held-out samples once."""
        events = self.run_dir.events if self.is_main else None
        log = StepLog(self.experiment, self.plan, self.device, events, progress.seconds)
        self.heartbeat.begin("evaluation")
        for each in between:
            if isinstance(each, Evaluator):
                each.run(progress.step, log)
        return progress


class Tracer(TrainingWorker):
    """A rank of a plan, which writes its numbers down."""

    def _code_to_run(self, graph: Graph) -> Graph:
        return with_changed_code(graph, drop_nothing) if settings_of(self.run_dir)["without_dropout"] else graph

    def _train(
        self,
        trainer: Trainer,
        checkpoints: CheckpointStore,  # noqa: ARG002 - a training saves
        progress: TrainingProgress,
        between: Sequence[BetweenSteps],  # noqa: ARG002 - nothing is evaluated
    ) -> TrainingProgress:
        folder = self.run_dir.path / TRACES
        folder.mkdir(exist_ok=True)
        numbers, steps = state_of(trainer, 0, deviation.START), int(settings_of(self.run_dir)["steps"])
        for step, (batch, label_counts) in enumerate(itertools.islice(self.samples.batches(trainer, 0), steps)):
            self.heartbeat.begin("step", step + 1)
            recorder = Recorder(trainer, step)
            with recorder.observing():
                scalars = trainer.measure(step, batch, label_counts=label_counts)
            numbers |= recorder.numbers | gradients_of(trainer, step)
            trainer.update(step, scalars)
            numbers |= state_of(trainer, step, deviation.UPDATE)
            # Only what no rank before this one has to the last bit is written.
            mine = build.digests({str(key): value for key, value in numbers.items()}, ())
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, mine)
            before = everyone[: dist.get_rank()]
            numbers = {k: v for k, v in numbers.items() if all(each.get(str(k)) != mine[str(k)] for each in before)}
            torch.save(numbers, folder / f"{step}-{dist.get_rank()}.pt")
            numbers = {}
        return replace(progress, step=steps)


class Referee(TrainingWorker):
    """Repeats the steps of each plan on one device, and writes how far the plan's numbers are from there."""

    def run(self) -> int:
        asked = settings_of(self.run_dir)
        self._steps, self._without_dropout = int(asked["steps"]), bool(asked["without_dropout"])
        self._trainers: dict[tuple[Any, ...], Trainer] = {}
        self._starts: dict[tuple[int, bool], deviation.Numbers] = {}
        self._reference = torch.float64
        folders = [Path(trace) for trace in asked["traces"]]
        found = [self._compared(Plan.load(folder / "plan.json"), folder / TRACES) for folder in folders]
        reference = str(self._reference).removeprefix("torch.")
        write_record(self.run_dir.path / RESULT, {"plans": found, "reference": reference})
        append_event(self.run_dir.events, "end", steps=self._steps, seconds=0.0)
        dist.destroy_process_group()
        return self._steps

    def _compared(self, plan: Plan, folder: Path) -> dict[str, Any]:
        """Return where a plan deviates, and the loss of each step."""
        here = on_one_device(plan)
        trainer = self._trainer(here, exact=False)
        graph, batches = trainer.graph, self.samples.batches(trainer, 0)
        block_on_rank = partial(_block_on_rank, plan, graph)
        # Each replica has running averages of its own micro-batches.
        unlike = {f"model.{name}" for name in written_buffers(graph.blocks)} if plan.data > 1 else set[str]()
        rows, losses, exact_losses = [], [], []
        before: deviation.Numbers = {}
        for step, (batch, label_counts) in enumerate(itertools.islice(batches, self._steps)):
            self.heartbeat.begin("step", step + 1)
            ranks = [
                torch.load(file, mmap=True)
                for file in sorted(folder.glob(f"{step}-*.pt"), key=lambda file: int(file.stem.partition("-")[2]))
            ]
            found: deviation.Numbers = {}
            for numbers in reversed(ranks):
                found |= numbers  # the first rank's, where several have another
            if step == 0:
                before = {key: value for key, value in found.items() if key[1] == deviation.START}
                start = self._starts[here.micro_batch, here.gathers]
                rows += deviation.compared(start, [(0, dict.fromkeys(start, deviation.SAME))], ranks, {}, block_on_rank)
            held = {key[3]: value for key, value in before.items()}
            repeated = partial(self._repeated, here, step, batch, label_counts, before, found)
            reference = {key: value for key, value in repeated().items() if key[3] not in unlike}
            repetitions = [
                (coarse, deviation.distances(reference, repeated(coarse, index), held))
                for index, coarse in enumerate(ROUNDINGS)
            ]
            rows += deviation.compared(reference, repetitions, ranks, held, block_on_rank)
            losses.append(_loss(found, graph.loss))
            exact_losses.append(_loss(reference, graph.loss))
            before = {key: value for key, value in found.items() if key[1] == deviation.UPDATE}
        deviations = deviation.judged(rows, plan.division(), plan.block_names)
        fault = deviation.first_fault(deviations)
        largest = sorted(deviations, key=lambda each: -each.excess)
        told = [each for each in deviations if each.excess > 1] if fault else largest
        return {
            "fault": None if fault is None else deviation.to_json(fault),
            "deviations": [deviation.to_json(each) for each in told[:MOST_TOLD]],
            "compared": len(deviations),
            "losses": losses,
            "reference_losses": exact_losses,
        }

    def _repeated(
        self,
        plan: Plan,
        step: int,
        batch: Mapping[str, torch.Tensor],
        label_counts: LabelCounts,
        before: deviation.Numbers,
        found: deviation.Numbers,
        coarse: int | None = None,
        seed: int = 0,
    ) -> deviation.Numbers:
        """Return the numbers of a step from the state `before`, and those of the update with the gradients `found`.

        Without `coarse` they are the reference; with it they have random roundings of the plan's precision, which are
        so many times coarser, and none for 0.
        """
        if coarse is not None:
            return self._run(self._trainer(plan, exact=False), step, batch, label_counts, before, found, coarse, seed)
        try:
            return self._run(self._trainer(plan, exact=True), step, batch, label_counts, before, found)
        except (RuntimeError, TypeError) as error:
            if self._reference == torch.float32 or isinstance(error, torch.OutOfMemoryError):
                raise
            print(f"The model does not compute in float64, so that the reference is fp32: {error}", flush=True)
            self._reference = torch.float32
            return self._run(self._trainer(plan, exact=True), step, batch, label_counts, before, found)

    def _run(
        self,
        trainer: Trainer,
        step: int,
        batch: Mapping[str, torch.Tensor],
        label_counts: LabelCounts,
        before: deviation.Numbers,
        found: deviation.Numbers,
        coarse: int = 0,
        seed: int = 0,
    ) -> deviation.Numbers:
        plan, parameters = trainer.plan, trainer.stages.model_parameters()
        is_wide = any(parameter.dtype == torch.float64 for parameter in parameters.values())
        fields = {n: v.double() if is_wide and v.is_floating_point() else v.clone() for n, v in batch.items()}
        half_ulp = torch.finfo(torch.bfloat16 if plan.precision == "bf16" else torch.float32).eps / 2
        rounding = Rounding(coarse * half_ulp, seed)
        _set_state(trainer, before, rounding)
        recorder = Recorder(trainer, step, rounding)
        with recorder.observing():
            trainer.measure(step, fields, label_counts=label_counts)
        numbers = recorder.numbers | gradients_of(trainer, step)

        rounding = Rounding(coarse * torch.finfo(torch.float32).eps / 2, seed)  # updates are fp32 in every precision
        buffers = {f"model.{name}" for name in trainer.stages.model_buffers()}  # the forward may have changed them
        _set_state(trainer, {key: value for key, value in before.items() if key[3] not in buffers}, rounding)
        blocks = _first_blocks(trainer.graph)
        for name, parameter in parameters.items():
            gradient = found.get((step, deviation.GRADIENT, blocks[name], name, -1))
            parameter.grad = None
            if gradient is not None:
                own = gradient.to(parameter.device, parameter.dtype, copy=True)  # clipping changes it
                parameter.grad = rounding.of(own)
        if trainer.spikes is None:  # numbers of another plan, or of another repetition, may not have been finite
            trainer._skips_after = NonFinite() if trainer.experiment.numerics.stop_on_non_finite else None
        trainer.update(step, trainer.scalars(torch.zeros((), device=trainer.context.device)))
        return numbers | state_of(trainer, step, deviation.UPDATE)

    def _trainer(self, plan: Plan, *, exact: bool) -> Trainer:
        """Return the trainer of a plan of one device, of the reference or of the plan's own precision."""
        dtype = self._reference if exact else torch.float32
        plan = replace(plan, precision="fp32") if exact else plan  # without bf16 copies of weights
        has_autocast = plan.precision == "bf16"
        key = (dtype, has_autocast, plan.precision, plan.micro_batch, plan.num_microbatches, plan.gathers)
        if key in self._trainers:
            return self._trainers[key]
        experiment = self.experiment
        model = build.build_model(experiment.model.build, plan.model_bytes, self.device, experiment.seed)
        captured = CapturedModel(experiment, plan.micro_batch, model)
        graph = captured.step_graph(plan.loss_samples)
        if self._without_dropout:
            graph = with_changed_code(graph, drop_nothing)
        if dtype == torch.float64:
            model.double()
            graph = with_changed_code(graph, use_float64)
            constants = {n: c.double() if c.is_floating_point() else c for n, c in graph.constants.items()}
            graph = replace(graph, constants=constants)
        context = StepContext(experiment.seed, self.device)
        autocast: Any = partial(torch.autocast, self.device.type, torch.bfloat16) if has_autocast else nullcontext
        stages = build.build_stage(plan, self.coordinate, model, graph, context, autocast=autocast)
        trainer = self._trainers[key] = Trainer(experiment, plan, graph, stages, context, self.coordinate)
        if dtype == torch.float32:
            self._starts.setdefault((plan.micro_batch, plan.gathers), state_of(trainer, 0, deviation.START))
        return trainer


@torch.no_grad()
def _set_state(trainer: Trainer, state: deviation.Numbers, rounding: Rounding) -> None:
    """Give a trainer on one device a state, with rounded weights."""
    values = {key[3]: value for key, value in state.items()}
    parameters = trainer.stages.model_parameters()
    begun = {name.removeprefix("optim.").rpartition(".")[0] for name in values if name.startswith("optim.")}
    if begun - {name for key, name, _ in entries(trainer) if key.startswith("optim.")}:
        create_state(trainer.optimizer)
    forget_state(trainer.optimizer, [parameter for name, parameter in parameters.items() if name not in begun])
    for key, _, value in entries(trainer):
        if key not in values:
            continue
        value.copy_(values[key])
        if key.startswith("model."):
            value.copy_(rounding.of(value))
    if trainer.sparse_weights is not None:
        trainer.sparse_weights.restore_patterns()


def _loss(numbers: deviation.Numbers, name: str) -> float | None:
    """Return the loss of a step, the mean over its micro-batches; None if a rank did not write one down."""
    losses = [float(value) for key, value in numbers.items() if key[1] == deviation.OUTPUT and key[3] == name]
    return sum(losses) / len(losses) if losses else None


def on_one_device(plan: Plan) -> Plan:
    """Return the plan whose one stage computes the micro-batches of a plan's whole global batch."""
    parameters = sum(stage.parameters for stage in plan.stages)
    nothing = Memory(0, 0, 0, 0, 0)
    return replace(
        plan,
        cluster=plan.cluster.resized(1),
        pipeline=1,
        data=1,
        tensor=1,
        zero=0,
        schedule="1f1b",
        num_microbatches=plan.num_microbatches * plan.data,
        stages=(Stage(0, 0, len(plan.block_names), parameters, 0.0, 0.0, 0, "none", nothing),),
        memory_limit_bytes=None,
        offload_optimizer=False,
        cuda_graphs=False,
        block_sparse=False,
        candidates=(),
    )


def _block_on_rank(plan: Plan, graph: Graph, rank: int, key: deviation.Key) -> int:
    """Return the first block of a rank that has the tensor of a key."""
    _, part, first, name, _ = key
    if part not in (deviation.START, deviation.GRADIENT, deviation.UPDATE):
        return first
    stages = plan.stages_of(rank // (plan.data * plan.tensor))
    whole = name.partition(".")[2]  # behind `model.`, `average.` or `optim.`, which is followed by the slot
    for block in (graph.blocks[index] for stage in stages for index in range(stage.first_block, stage.end_block)):
        if any(each in (name, whole) or whole.startswith(f"{each}.") for each in (*block.parameters, *block.buffers)):
            return block.index
    return first


if __name__ == "__main__":
    asked = read_object(RunDir(Path(sys.argv[1])).environment).get("bisection")
    sys.exit(main(sys.argv[1], Evaluation if asked is None else Referee if "traces" in asked else Tracer))
