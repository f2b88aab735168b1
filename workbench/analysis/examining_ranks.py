"""Ranks that examine a model in place of training it: those of `wb.bisect` and `wb.parity`.

A `ParityRank` trains the same steps under several plans, one
after another, and compares each with the loop of plain PyTorch (`workbench.analysis.plain_loop`).

A bisection has ranks of each plan, which write their numbers down, and one more that compares them. `Tracer` trains a
few steps as every rank does, and stores what each block sends and passes back, the gradients, and the state before and
after each update. `Referee` repeats every step on one device from the state that the ranks had: in float64, and several
times in the plan's precision with other roundings, which is the noise that their numbers are measured against. Each
step, and each update, begins with the numbers of the ranks, so that what rounding did in one step is no difference in
the next.

TTrace (arXiv:2506.09280) finds its tolerances by perturbing a reference too.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.modules.batchnorm import _BatchNorm

from workbench.analysis import deviation
from workbench.analysis.plain_loop import (
    DRAWN_FROM_TENSORS,
    PlainLoop,
    Reference,
    Rounding,
    SameDraws,
    block_on_rank,
    captured_trainer,
    first_blocks,
    gradients_of,
    keep_everything,
    on_one_device,
    set_state,
    state_of,
    trained,
    trainer_under,
    with_changed_code,
)
from workbench.base.arguments import memoised
from workbench.base.errors import DataError
from workbench.capture import Graph
from workbench.capture.captured_model import CapturedModel
from workbench.capture.operations import drop_nothing, is_random, op_name
from workbench.execution import build
from workbench.execution.blocks.step_context import LabelCounts
from workbench.execution.checkpoint.save_load import CheckpointStore, TrainingProgress
from workbench.execution.feeding import TrainingSamples
from workbench.execution.observation import BACKWARD, BATCH, FORWARD, BlockObserver
from workbench.execution.parallel.mesh import MeshCoordinate
from workbench.execution.parallel.stage import written_buffers
from workbench.execution.trainer import NonFinite, Trainer
from workbench.execution.worker import BetweenSteps, TrainingWorker, build_model_of, main
from workbench.planning.plan import Plan
from workbench.record.rundir import RunDir, append_event, read_json, read_object, read_record, write_record

TRACES, RESULT, OWNERS = "traces", "bisection.json", "owners"
"""Folder of the numbers of a plan's ranks, and file of the comparison, in a run directory; first word of the names of
files in that folder that say which rank holds each element."""
ROUNDINGS = (0, 1, 1, deviation.COARSE)
"""Coarseness of the random roundings of each repetition of a step; 0 for the roundings of the arithmetic alone."""
FACTS = "facts.json"
"""File of a parity's folder that says what the model draws, and what its numbers depend on."""
MOST_TOLD = 200
"""Number of deviations of a plan that are kept: those from where its fault begins, or the largest."""


def settings_of(run: RunDir) -> dict[str, Any]:
    """Return what `wb.bisect` asks of a run's ranks."""
    return dict(read_record(run.environment)["bisection"])


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
        return replace(progress, step=self.trace(trainer, self.run_dir.path / TRACES))

    def trace(self, trainer: Trainer, folder: Path) -> int:
        """Train, write the numbers to a folder, and return the number of steps; a collective."""
        folder.mkdir(parents=True, exist_ok=True)
        numbers, steps = state_of(trainer, 0, deviation.START), int(settings_of(self.run_dir)["steps"])
        owners = owners_of(trainer)
        if owners:
            torch.save(owners, folder / f"{OWNERS}-{dist.get_rank()}.pt")
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
            alike = {k: [at for at, each in enumerate(everyone) if each.get(str(k)) == mine[str(k)]] for k in numbers}
            alike = {key: ranks for key, ranks in alike.items() if ranks[0] == dist.get_rank()}
            written = {"numbers": {key: numbers[key] for key in alike}, "ranks": alike}
            torch.save(written, folder / f"{step}-{dist.get_rank()}.pt")
            numbers = {}
        return steps


def owners_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return the rank that holds each element of the parameters that ranks share; a collective.

    Of the ranks that share a parameter, the first returns it.
    """
    rank, found = dist.get_rank(), dict[str, torch.Tensor]()
    for name, parameter in trainer.stages.model_parameters().items():
        if name in trainer.whole.indices:
            continue  # stored without absent blocks, which no rank holds
        marks = torch.full_like(parameter.detach(), float(rank), dtype=torch.float32)
        owners = trainer.full(name, marks).to("cpu", torch.int32)
        if owners.numel() and int(owners.min()) == rank and int(owners.max()) > rank:
            found[name] = owners
    return found


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
        place = partial(block_on_rank, plan, graph)
        # Each replica has running averages of its own micro-batches.
        unlike = {f"model.{name}" for name in written_buffers(graph.blocks)} if plan.data > 1 else set[str]()
        files = [folder / f"{OWNERS}-{rank}.pt" for rank in range(plan.world)]
        owners = [torch.load(file, mmap=True) if file.exists() else {} for file in files]
        rows, losses, exact_losses = [], [], []
        before: deviation.Numbers = {}
        for step, (batch, label_counts) in enumerate(itertools.islice(batches, self._steps)):
            self.heartbeat.begin("step", step + 1)
            written = [torch.load(folder / f"{step}-{rank}.pt", mmap=True) for rank in range(plan.world)]
            ranks, alike = ([each[name] for each in written] for name in ("numbers", "ranks"))
            found: deviation.Numbers = {}
            for numbers in reversed(ranks):
                found |= numbers  # the first rank's, where several have another
            if step == 0:
                before = {key: value for key, value in found.items() if key[1] == deviation.START}
                start = self._starts[here.micro_batch, here.gathers]
                same = [(0, dict.fromkeys(start, deviation.SAME))]
                rows += deviation.compared(start, same, *self._of_ranks(start, ranks, {}, owners, alike, place))
            held = {key[3]: value for key, value in before.items()}
            repeated = partial(self._repeated, here, step, batch, label_counts, before, found, plan.shards)
            reference = {key: value for key, value in repeated().items() if key[3] not in unlike}
            repetitions = [
                (coarse, deviation.distances(reference, repeated(coarse, index), held))
                for index, coarse in enumerate(ROUNDINGS)
            ]
            of_ranks = self._of_ranks(reference, ranks, held, owners, alike, place)
            rows += deviation.compared(reference, repetitions, *of_ranks)
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

    @staticmethod
    def _of_ranks(
        reference: deviation.Numbers,
        ranks: Sequence[deviation.Numbers],
        before: Mapping[str, torch.Tensor],
        owners: Sequence[Mapping[str, torch.Tensor]],
        alike: Sequence[Mapping[deviation.Key, Sequence[int]]],
        place: Any,
    ) -> tuple[list[Any], Any, list[Any]]:
        """Return the distances of what each rank wrote, `place`, and the ranks that hold it or its shards."""
        found, held = [], []
        for rank, numbers in enumerate(ranks):
            whole, shards = deviation.distances_of_shards(reference, numbers, before, owners[rank])
            found.append(whole)
            held.append({key: tuple((each, whole[key]) for each in alike[rank][key]) for key in whole} | shards)
        return found, place, held

    def _repeated(
        self,
        plan: Plan,
        step: int,
        batch: Mapping[str, torch.Tensor],
        label_counts: LabelCounts,
        before: deviation.Numbers,
        found: deviation.Numbers,
        shards: bool,
        coarse: int | None = None,
        seed: int = 0,
    ) -> deviation.Numbers:
        """Return the numbers of a step from the state `before`, and those of the update with the gradients `found`.

        Without `coarse` they are the reference; with it they have random roundings of the plan's precision, which are
        so many times coarser, and none for 0. `shards` says whether the plan's ranks gather weights by FSDP2.
        """
        if coarse is not None:
            trainer, is_cast = self._trainer(plan, exact=False), shards and plan.precision == "bf16"
            return self._run(trainer, step, batch, label_counts, before, found, coarse, seed, is_cast)
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
        bf16_weights: bool = False,
    ) -> deviation.Numbers:
        plan, parameters = trainer.plan, trainer.stages.model_parameters()
        is_wide = any(parameter.dtype == torch.float64 for parameter in parameters.values())
        fields = {n: v.double() if is_wide and v.is_floating_point() else v.clone() for n, v in batch.items()}
        half_ulp = torch.finfo(torch.bfloat16 if plan.precision == "bf16" else torch.float32).eps / 2
        rounding = Rounding(coarse * half_ulp, seed, bf16_weights=bf16_weights)
        set_state(trainer, before, rounding)
        recorder = Recorder(trainer, step, rounding)
        with recorder.observing():
            trainer.measure(step, fields, label_counts=label_counts)
        numbers = recorder.numbers | gradients_of(trainer, step)

        rounding = Rounding(coarse * torch.finfo(torch.float32).eps / 2, seed)  # updates are fp32 in every precision
        buffers = {f"model.{name}" for name in trainer.stages.model_buffers()}  # the forward may have changed them
        set_state(trainer, {key: value for key, value in before.items() if key[3] not in buffers}, rounding)
        blocks = first_blocks(trainer.graph)
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
        trainer = self._trainers[key] = captured_trainer(
            self.experiment, plan, self.coordinate, self.device, dtype, without_dropout=self._without_dropout
        )
        if dtype == torch.float32:
            self._starts.setdefault((plan.micro_batch, plan.gathers), state_of(trainer, 0, deviation.START))
        return trainer


class ParityRank(TrainingWorker):
    """A rank of a world in which several plans train the same steps, one after another, beside plain PyTorch.

    A world of one process makes the references first. The model is built once, and captured once for each size of a
    micro-batch. Rank 0 writes what was found for each plan.
    """

    def run(self) -> int:
        asked = read_record(self.run_dir.environment)["parity"]
        self._folder, self._steps = Path(asked["folder"]), int(asked["steps"])
        self._plans = {int(index): Plan.load(self._folder / f"plan-{index}.json") for index in asked["plans"]}
        self._model = build_model_of(self)
        self._tensors = {
            name: value.detach().clone()
            for name, value in (*self._model.named_parameters(), *self._model.named_buffers())
        }
        if asked["makes_references"]:
            every = sorted(self._folder.glob("plan-*.json"))
            self._make_references([Plan.load(file) for file in every])
        self._facts = read_json(self._folder / FACTS)
        for number, (index, plan) in enumerate(self._plans.items()):
            self.heartbeat.begin("step", number + 1)
            found = self._compared(plan)
            if self.is_main:
                write_record(self._folder / f"found-{index}.json", found)
        dist.barrier()
        if self.is_main:  # the run has finished with it, so that no rank may fail afterwards
            append_event(self.run_dir.events, "end", steps=self.experiment.total_steps, seconds=0.0)
        dist.destroy_process_group()
        return self.experiment.total_steps

    def _make_references(self, plans: Sequence[Plan]) -> None:
        """Write a reference for each way in which the plans divide the batch, and the facts of the model's numbers."""
        experiment, first = self.experiment, on_one_device(plans[0])
        graph, on_cpu = self._graph(first), self.device.type == "cpu"
        loop = self._loop(first, None, None, torch.float32)
        batches, again = (list(itertools.islice(self.samples.batches(loop.trainer, 0), n)) for n in (self._steps, 1))
        unlike = [name for name, value in batches[0][0].items() if not torch.equal(value, again[0][0][name])]
        if unlike:
            raise DataError(
                f"{experiment.data.name} gives other samples each time it is read, in {', '.join(unlike)}, so that no "
                "two trainings could be equal. Let an item depend on its index alone, as with "
                "torch.Generator().manual_seed(index)."
            )
        has_statistics = any(isinstance(module, _BatchNorm) for module in self._model.modules()) or any(
            op_name(node) == "batch_norm" for block in graph.blocks for node in block.code.graph.nodes
        )
        state = torch.get_rng_state if on_cpu else torch.cuda.get_rng_state
        before = state()
        loop.measure(0, *batches[0])
        seen = None if torch.equal(state(), before) else set[str]()
        if seen is not None and not on_cpu:  # where dropouts draw in kernels of their own, which no mode reaches
            nodes = [node for block in graph.blocks for node in block.code.graph.nodes]
            seen |= {op_name(node) for node in nodes if is_random(node)} or {"random numbers"}
        is_allowed = experiment.numerics.batch_coupling == "allow"
        depends = bool(has_statistics or written_buffers(graph.blocks) or plans[0].loss_depends or is_allowed)

        # Plain PyTorch: once, or once for each size of a micro-batch if the numbers depend on it
        is_weighable = not depends or len(graph.label_counts) < 2
        dtype = ""
        for size in {plan.micro_batch: None for plan in plans} if depends else (None,):
            make = partial(self._loop, first, size, seen)
            reference = Reference.of(make, batches, first.precision, shards=any(plan.shards for plan in plans))
            reference.save(self._folder / f"plain-{size}.pt")
            dtype = reference.dtype
        draws = sorted(seen or ())
        follows = is_weighable and not DRAWN_FROM_TENSORS.intersection(draws) and (not draws or on_cpu)

        # The captured blocks on one device, which draw what they draw in the plan
        for key, plan in {(plan.micro_batch, plan.gathers): plan for plan in plans}.items():
            if draws or not follows:
                here = on_one_device(plan)
                trainer = captured_trainer(experiment, here, self.coordinate, self.device)
                counted = [(batch, trainer.count_labels_on_host(batch)) for batch, _ in batches]
                of = partial(Reference.of, partial(_same, trainer), counted, plan.precision, exact=False)
                reference = of(shards=any(each.shards for each in plans))
                reference.save(self._folder / f"captured-{key[0]}-{key[1]}.pt")
        write_record(
            self._folder / FACTS,
            {"draws": draws, "follows": follows, "depends": depends, "reference": dtype},
        )

    def _loop(self, plan: Plan, micro_batch: int | None, seen: set[str] | None, dtype: torch.dtype) -> PlainLoop:
        """Return a loop that gives every sample the same random numbers, unless nothing is drawn."""
        modes = [partial(SameDraws, seen)] if seen is not None and self.device.type == "cpu" else []
        return PlainLoop(
            self.experiment,
            plan,
            self._graph(plan),
            self.coordinate,
            self.device,
            dtype,
            micro_batch=micro_batch,
            modes=modes,
        )

    def _compared(self, plan: Plan) -> dict[str, Any]:
        """Return what was found of a plan, or why it was not compared; a collective."""
        facts, found = self._facts, dict[str, Any]()
        others = [name for name in facts["draws"] if not name.startswith("bernoulli")]
        if facts["follows"] and not (plan.tensor > 1 and others):
            file = f"plain-{plan.micro_batch if facts['depends'] else None}.pt"
            mode = SameDraws if facts["draws"] else nullcontext
            found["plain"] = self._judged(plan, Reference.load(self._folder / file), mode)
        if (facts["draws"] or not facts["follows"]) and plan.tensor == 1 and not self._compiles:
            file = f"captured-{plan.micro_batch}-{plan.gathers}.pt"
            found["captured"] = self._judged(plan, Reference.load(self._folder / file), nullcontext)
        return found

    def _judged(self, plan: Plan, reference: Reference, mode: Any) -> dict[str, Any]:
        """Train under a plan, and return how far it is from a reference; a collective."""
        trainer = self._trainer(plan, reference, mode is SameDraws and (plan.tensor > 1 or self._compiles))
        graph = trainer.graph
        samples = TrainingSamples(self.experiment, trainer.coordinate, self.device)
        batches = itertools.islice(samples.batches(trainer, 0), self._steps)
        numbers = trained(trainer, batches, Rounding(), mode)
        # Each replica has running averages of its own micro-batches.
        unlike = {f"model.{name}" for name in written_buffers(graph.blocks)} if plan.data > 1 else set[str]()
        found, shards = reference.distances_of_shards(numbers, owners_of(trainer))
        mine: Any = {key: each for key, each in found.items() if key[3] not in unlike}, shards
        everyone: list[Any] = [mine]
        if plan.world > 1:
            everyone = [None] * plan.world
            dist.all_gather_object(everyone, mine)
        place, (wholes, parts) = partial(block_on_rank, plan, graph), zip(*everyone, strict=True)
        rows = reference.rows(wholes, parts, place, unlike) if self.is_main else []
        judged = deviation.judged(rows, plan.division(), plan.block_names)
        fault = deviation.first_fault(judged)
        worst = sorted(judged, key=lambda each: -each.excess)
        steps = []
        for step in range(self._steps):
            row: dict[str, Any] = {
                "loss": float(numbers[step, deviation.OUTPUT, 0, deviation.LOSS, -1]),
                "norm": float(numbers[step, deviation.GRADIENT, 0, deviation.NORM, -1]),
            }
            for name in (deviation.LOSS, deviation.EVERY):
                each = next((each for each in judged if (each.step, each.tensor) == (step + 1, name)), None)
                row[name] = None if each is None else [each.size, each.bound]
            steps.append(row)
        return {
            "fault": None if fault is None else deviation.to_json(fault),
            "deviations": [deviation.to_json(each) for each in worst[:MOST_TOLD]],
            "compared": len(judged),
            "steps": steps,
        }

    @cached_property
    def _compiles(self) -> bool:
        asked = self.experiment.numerics.compile
        return self.device.type == "cuda" if asked is None else asked

    def _trainer(self, plan: Plan, reference: Reference, keeps_everything: bool) -> Trainer:
        """Return the trainer of this rank under a plan, which starts with the weights of the reference."""
        graph, coordinate = self._graph(plan), self._coordinate(plan)
        if keeps_everything:
            graph = with_changed_code(graph, keep_everything)
        self._restore({key[3]: value for key, value in reference.numbers.items() if key[1] == deviation.START})
        args = self.experiment, plan, graph, self._model, coordinate, self.device
        return trainer_under(*args, compile=self._compiles)

    def _restore(self, start: Mapping[str, torch.Tensor]) -> None:
        """Give the model its first weights and buffers again, which the stages of a plan take out of it."""

        def first(name: str) -> torch.Tensor:
            own = self._tensors[name]
            return start.get(f"model.{name}", own).to(own.device, own.dtype, copy=True)

        for name, parameter in self._model.named_parameters():
            parameter.data = first(name)
        for name, _ in list(self._model.named_buffers()):
            module, _, own = name.rpartition(".")
            self._model.get_submodule(module)._buffers[own] = first(name)

    def _graph(self, plan: Plan) -> Graph:
        return self._captured(plan.micro_batch, plan.loss_samples)

    @memoised
    def _captured(self, micro_batch: int, loss_samples: int | None) -> Graph:
        self._restore({})
        return CapturedModel(self.experiment, micro_batch, self._model).step_graph(loss_samples)

    def _coordinate(self, plan: Plan) -> MeshCoordinate:
        return self._on_mesh(plan.pipeline, plan.data, plan.tensor)

    @memoised
    def _on_mesh(self, pipeline: int, data: int, tensor: int) -> MeshCoordinate:
        mesh = init_device_mesh(self.device.type, (pipeline, data, tensor), mesh_dim_names=("pp", "dp", "tp"))
        return MeshCoordinate.from_mesh(mesh)


def _loss(numbers: deviation.Numbers, name: str) -> float | None:
    """Return the loss of a step, the mean over its micro-batches; None if a rank did not write one down."""
    losses = [float(value) for key, value in numbers.items() if key[1] == deviation.OUTPUT and key[3] == name]
    return sum(losses) / len(losses) if losses else None


def _same(trainer: Trainer, _: torch.dtype) -> Trainer:
    return trainer


def worker_of(asked: Mapping[str, Any]) -> type[TrainingWorker]:
    """Return the worker for what the environment of a run asks of its ranks."""
    return ParityRank if "parity" in asked else Referee if "traces" in asked["bisection"] else Tracer


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], worker_of(read_object(RunDir(Path(sys.argv[1])).environment))))
