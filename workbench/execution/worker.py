"""One rank of a run: `python -m workbench.execution.worker RUN_DIR`, started by `accelerate launch` or `torchrun`.

A rank reads the run directory, joins the process groups, builds the model, keeps its own stages of it, trains them, and
appends events (see `workbench.record.events`). It ends with exit code 0 if the run is finished or was asked to stop. It
writes an exception to `errors/<rank>.json` and ends with exit code 1. Without a supervisor, ranks also write the run's
states.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import ProjectConfiguration, send_to_device

from workbench.base.code_identity import (
    FUNCTIONS,
    IMPORTED,
    and_more,
    changed_between,
    changed_since,
    identities_json,
    identity,
    read_identities,
    way_out,
)
from workbench.base.display import CELLS, formatted, know_cells
from workbench.base.errors import DataError, NonFiniteLoss, PlanMismatch, WorkbenchError, message_of, root_exception
from workbench.base.secrets import masked_words
from workbench.base.units import GIB, gib
from workbench.base.user_code import unpickled, user_path
from workbench.capture import Graph
from workbench.capture.captured_model import CapturedModel
from workbench.capture.torch_internals import seen_allocations
from workbench.cost.sparse_matrices import absent_flops
from workbench.data import Mixture, held_out
from workbench.data.datasets import StreamedDataset, seed_generators, untouched_generators
from workbench.execution import build
from workbench.execution.between_steps import Evaluator, NormsLog, Sampler, SparsityLog
from workbench.execution.blocks.cuda_graphs import NCCL_SETTING
from workbench.execution.blocks.step_context import StepContext, Timestamp, record_actions
from workbench.execution.checkpoint.files import requested_checkpoint, step_of
from workbench.execution.checkpoint.model_export import describe_model, write_tokenizer
from workbench.execution.checkpoint.save_load import CheckpointExtras, CheckpointStore, SaveResult, TrainingProgress
from workbench.execution.comparison import check_numbers
from workbench.execution.feeding import TrainingSamples, check_user_data
from workbench.execution.heartbeat import Heartbeat, serving_collectives
from workbench.execution.local_launch import LOOPBACK, loopback_interface, loopback_store, new_loopback_store
from workbench.execution.observation import with_origin
from workbench.execution.parallel.mesh import MeshCoordinate, parallelism_config
from workbench.execution.parallel.sharding import local
from workbench.execution.parallel.stage import RankStages
from workbench.execution.step_log import IN_HASTE, Callbacks, StepLog, peak_flops
from workbench.execution.trainer import Rewind, Trainer
from workbench.experiment import USER_PARTS, Experiment
from workbench.planning.plan import Plan
from workbench.planning.planner import facts_of
from workbench.planning.runnable import check_runnable
from workbench.record.rundir import (
    RESERVE_BYTES,
    RunDir,
    append_event,
    check_unedited,
    log_event,
    read_json,
    read_object,
    read_record,
    redirect_output,
    stop_grace_s,
    this_process,
    until_there_is_room,
    write_json,
    write_record,
)
from workbench.record.step_table import num_logged, num_waiting, write_waiting

BetweenSteps = Evaluator | Sampler | SparsityLog | NormsLog
"""Computation or observation of the model between two steps, when it is due."""
IN_WORDS = {
    r"Target (-?\d+) is out of bounds": (
        "The label {} is none of the classes that the loss is given. Labels of C classes must lie in 0 to C - 1, or be "
        "the loss's ignore_index. Correct them in the dataset, or give the head more outputs."
    ),
    r"index out of range in self": (
        "An index in the batch lies outside of the table that it is looked up in, such as a token id that is not below "
        "the number of rows of the embedding. Correct it in the dataset, or make the table larger."
    ),
    r"(.*(?:have the same dtype, but|\(\w+\) should be the same|mixed dtype|expected scalar type).*?)\.?(?:\n|$)": (
        "{}: an operation is given numbers of two types, most often because the dataset returns another one than the "
        "weights have. Convert it there, x.float() for weights in float32, or in forward: x.to(self.weight.dtype)."
    ),
    r"device-side assert triggered": (
        "An index lies outside of its table on the GPU, which does not tell which: most often a label that is not "
        "below the number of classes, or a token id that is not below the number of rows of the embedding. Correct it "
        "in the dataset; a run of one step on CPUs names it."
    ),
    r"(/\S+\.so): (?:file too short|invalid ELF header)": (
        "The compiled code {0} is cut off, as by a process that was killed while it wrote the file. Remove it "
        "(rm {0}), and start the run again: it is compiled anew."
    ),
}
"""Patterns of messages of torch, with what they mean and what to do; a sentence names the groups of its pattern."""
SUGGESTED_LIMIT = 0.9
"""Fraction of an exceeded memory limit that the error message suggests for the next plan."""
WARM_STEPS = 3
"""Steps after which the peak memory is reported for the first time."""


def main(directory: str, worker_type: type[TrainingWorker] | None = None) -> int:
    """Run one rank from start to end, by default of a training; return the exit code of its process."""
    run = RunDir(Path(directory))
    _complete_environment()
    redirect_output(run.log(int(os.environ["RANK"])))
    know_cells(run.code / CELLS)
    try:
        train(run, worker_type or TrainingWorker, heeds_signals=True)
    except BaseException as error:
        print(masked_words(formatted(error)), file=sys.stderr, flush=True)  # an address with a password, say
        return 1
    return 0


def train(run: RunDir, worker_type: type[TrainingWorker], *, heeds_signals: bool = False) -> None:
    """Be the rank that the environment names; an exception is written to the run directory before it is raised.

    A rank that `heeds_signals` answers SIGTERM, SIGINT and SIGHUP with a checkpoint, and leaves.
    """
    rank = int(os.environ["RANK"])
    is_supervised = run.launcher.exists() and "supervisor" in read_json(run.launcher)

    def enter(state: str, message: str = "") -> None:
        if not is_supervised:
            append_event(run.events, "status", state=state, message=message, rows=num_logged(run.path))

    try:
        plan = Plan.load(run.plan)
    except PlanMismatch as error:  # without a plan, the rank does not know its stage
        said = {"rank": rank, "stage": None, "type": type(error).__name__, "message": masked_words(str(error))}
        text = masked_words(traceback.format_exc())
        write_record(run.error(rank), {**said, "traceback": text, "time": time.time()})
        enter("failed", f"rank {rank}: {said['message']}".splitlines()[0])
        raise
    stage = plan.pipeline_rank_of(rank)
    write_json(run.rank(rank), {**this_process(), "rank": rank, "stage": stage, "device": _device_name(rank)})
    if rank == 0:
        with suppress(OSError):
            run.reserve.write_bytes(bytes(RESERVE_BYTES))
        enter("starting")
    try:
        worker = worker_type(run, plan)
        if heeds_signals:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, worker.ask_to_stop)
        steps, target = worker.run(), worker.experiment.total_steps
    except BaseException as error:
        if run.was_deleted:  # and is not to be made again
            raise
        cause = root_exception(error)
        message = masked_words(error_message(cause, plan))
        facts = {"rank": rank, "stage": stage, "type": type(cause).__name__, "message": message}
        if isinstance(cause, NonFiniteLoss):  # all ranks raise it, and one of the stage where it arose tells
            facts |= {"facts": cause.facts, "is_origin": cause.facts.get("stage", stage) == stage}
        if rank == 0 and (lost := num_waiting(run.path)):
            facts["message"] = message = f"{message} {lost:,} logged steps could not be written: the disk is full."
        facts |= {"traceback": masked_words(formatted(error)), "time": time.time()}
        until_there_is_room(lambda: write_record(run.error(rank), facts), stop_grace_s() / 8, run.reserve)
        enter(
            "failed", f"rank {rank} (stage {stage}): {type(cause).__name__}: {message or 'no message'}".splitlines()[0]
        )
        raise
    finally:
        if rank == 0:
            run.reserve.unlink(missing_ok=True)
    if rank == 0 and steps >= target:
        enter("finished", f"{steps} steps.")
    elif rank == 0:
        enter("stopped", f"Stopped at step {steps} of {target}.")


class TrainingWorker:
    """Leads a rank from start to end: `__init__` joins the process groups, and `run` builds, resumes and trains."""

    is_fresh = True
    """True for a rank that is a process of its own, which has run none of the user's code."""
    is_exact = False
    """True for a rank whose numbers stand beside others of the run."""

    def __init__(self, run_dir: RunDir, plan: Plan) -> None:
        self.run_dir, self.plan = run_dir, plan
        check_unedited(run_dir)
        seed_generators(int(read_record(run_dir.experiment).get("seed", 0)))  # a module may draw when it is imported
        self.experiment = experiment_of(run_dir, is_fresh=self.is_fresh, is_exact=self.is_exact)
        with self._timed_phase("start"):
            if self.experiment.numerics.deterministic:
                build.use_deterministic_kernels()
            if plan.cuda_graphs:
                os.environ.setdefault(*NCCL_SETTING)
            self.accelerator = Accelerator(
                cpu=not _on_gpu(),
                mixed_precision="bf16" if plan.precision == "bf16" else "no",
                parallelism_config=parallelism_config(plan.pipeline, plan.data, plan.zero, plan.tensor),
                project_config=ProjectConfiguration(project_dir=str(run_dir.path)),
                step_scheduler_with_optimizer=False,
            )
            if not dist.is_initialized():
                dist.init_process_group("nccl" if _on_gpu() else "gloo", rank=0, world_size=1)
            self.coordinate = MeshCoordinate.from_mesh(self.accelerator.torch_device_mesh)
            # Accelerate numbers CPUs by ranks; tensors say "cpu", and the compiler takes "cpu:0" for another device.
            self.device = self.accelerator.device if _on_gpu() else torch.device("cpu")
            self.is_main = dist.get_rank() == 0
            self.heartbeat = Heartbeat(run_dir, dist.get_rank())
            self._stop_requested = False
            self.digests: build.Digests = {}
            self.samples = TrainingSamples(self.experiment, self.coordinate, self.device)
            self._initial_rss = psutil.Process().memory_info().rss
            torch.set_float32_matmul_precision("high" if plan.precision == "bf16" else "highest")

    def ask_to_stop(self, *_: Any) -> None:
        """Write a checkpoint after the step that runs, and leave: a handler of signals."""
        self._stop_requested = True

    def run(self) -> int:
        """Train, and return the number of completed steps."""
        experiment = self.experiment
        if self.is_main:
            check_user_data(self.run_dir, experiment)

        # This rank's stages. The rest of the model is freed when they have been taken out of it.
        context = StepContext(experiment.seed, self.device)
        compile = experiment.numerics.compile if experiment.numerics.compile is not None else _on_gpu()
        if compile:
            build.prepare_compiler()
        with build.build_lock(self.plan.model_bytes, self.device, self.accelerator.local_process_index) as is_together:
            graph, evaluated, sampled, stages, extras = self._build_stages(context, compile, is_together)
        if not is_together:  # the models are freed, so that a difference can only be told
            build.take_from_rank_0(experiment.model.name, self.digests, {}, self.device)
        absent = round(absent_flops(graph, experiment.sparsity) * experiment.largest_batch)
        self.plan = replace(self.plan, flops_per_step=self.plan.flops_per_step - absent)
        trainer = Trainer(experiment, self.plan, graph, stages, context, self.coordinate)
        if _on_gpu():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            cap_memory(self.plan, self.device)

        # What is computed or observed between two steps
        between, events = list[BetweenSteps](), self.run_dir.events if self.is_main else None
        if evaluated is not None:
            how: dict[str, Any] = {"compile": compile, "compact": stages.compact}
            programs = build.evaluation_programs(self.plan, self.coordinate, evaluated, context, **how)
            sets = experiment.held_out_sets.items()
            further = {name: Evaluator(trainer, evaluated, programs, held_out(each)) for name, each in sets}
            held, metrics = held_out(experiment), experiment.metrics
            between.append(Evaluator(trainer, evaluated, programs, held, metrics, further, events))
        if trainer.sparse_weights is not None:
            between.append(SparsityLog(trainer, self.run_dir.events))
        if trainer.tensor_norms is not None:
            between.append(NormsLog(trainer, events))
        if sampled:
            between.append(Sampler(trainer, sampled, events))

        # From a checkpoint or from the start to the end
        keep, report = experiment.checkpoints.keep, partial(report_checkpoint, self.run_dir)
        checkpoints = CheckpointStore(trainer, self.run_dir, keep, extras, report)
        progress, resumed_from = TrainingProgress(0, 0.0), None
        if (requested := requested_checkpoint(self.run_dir)) is not None:
            with self._timed_phase("resume"):
                progress, resumed_from = checkpoints.load_newest(requested, partial(report_rejected, self.run_dir))
        if trainer.spikes is not None:
            trainer.spikes.can_rewind = lambda step: checkpoints.newest(step - 1) is not None
        with serving_collectives(self.run_dir, dist.get_rank()):
            try:
                progress = self._train_on(trainer, checkpoints, progress, resumed_from, between)
                dist.barrier()
                if self.is_main:  # every rank has trained and saved, and nothing that a rank does now is of consequence
                    log_end(self.run_dir, progress)
            finally:
                self.heartbeat.begin("leaving")
                try:
                    if trainer.context.cuda_graphs is not None:
                        trainer.context.cuda_graphs.release()
                    self.accelerator.end_training()
                    if dist.is_initialized() and checkpoints.is_idle:  # A thread that still writes may use a group.
                        dist.destroy_process_group()
                except Exception:  # of a device that has failed, which has an error of its own unless the run has ended
                    traceback.print_exc()
        return progress.step

    def _build_stages(
        self, context: StepContext, compile: bool, is_together: bool
    ) -> tuple[Graph, Graph | None, list[Graph], RankStages, CheckpointExtras]:
        """Build the model, `is_together` with all ranks, and take this rank's stages out of it; then it is freed."""
        plan, experiment = self.plan, self.experiment
        with self._timed_phase("build"):
            model = build_model_of(self)
        captured = CapturedModel(experiment, plan.micro_batch, model)
        with self._timed_phase("capture"):
            graph = captured.step_graph(plan.loss_samples)
            evaluated = None if experiment.evaluation is None else captured.evaluation(experiment, plan.loss_samples)
            sampled = captured.samples(experiment)
        with self._timed_phase("compare"):
            hold_in_common(self, model, [graph, *([] if evaluated is None else [evaluated]), *sampled], is_together)
            check_runnable(experiment, plan, facts_of(experiment, captured))
            if self.is_main:
                check_numbers(experiment, plan, captured, model)
        with self._timed_phase("stage"):
            extras = CheckpointExtras()
            if self.is_main:
                write_tokenizer(experiment, self.run_dir)
                used = {name for block in graph.blocks for name in (*block.parameters, *block.buffers)}
                described, persistent = describe_model(model, experiment.data.class_names)
                unused = {name: each.detach().cpu() for name, each in persistent.items() if name not in used}
                extras = CheckpointExtras(described, unused)
            compact = build.block_sparse_parameters(experiment, plan, self.coordinate, graph, self.device)
            code, autocast = self._code_to_run(graph), self.accelerator.autocast
            stages = build.build_stage(
                plan, self.coordinate, model, code, context, compile=compile, autocast=autocast, compact=compact
            )
        return graph, evaluated, sampled, stages, extras

    def _code_to_run(self, graph: Graph) -> Graph:
        """Return the graph that is trained, which a worker of another purpose may change."""
        return graph

    def _train_on(
        self,
        trainer: Trainer,
        checkpoints: CheckpointStore,
        progress: TrainingProgress,
        resumed_from: Path | None,
        between: Sequence[BetweenSteps],
    ) -> TrainingProgress:
        """Train to the end, and go back to a checkpoint as often as a spike asks for it."""
        before, spike = self.experiment.samples_before, None
        self.callbacks = Callbacks(trainer, self.run_dir, self.heartbeat.begin)
        while True:
            self.samples.go_on(progress.stream_state, progress.skipped_samples)
            if trainer.spikes is not None and progress.spikes is not None:
                trainer.spikes.load(progress.spikes)
            if self.is_main:
                log_event(
                    self.run_dir.events,
                    "start",
                    devices=self.plan.world,
                    world=self.plan.world,
                    parameters=trainer.graph.parameter_count,
                    flops_per_step=self.plan.flops_per_step,
                    peak_flops=peak_flops(self.plan),
                    tokens_per_step=self.experiment.tokens_per_step,
                    samples_per_step=self.experiment.largest_batch,
                    resumed_from=None if resumed_from is None else str(resumed_from),
                    held_out=self.experiment.reading.held_out_in_words(),
                    rows=num_logged(self.run_dir.path),
                )
                log_data_use(self.run_dir, self.experiment, progress)
                if spike is not None:  # after the start, by which readers drop the steps that are repeated
                    log_event(self.run_dir.events, "spike", **spike)
            try:
                return self._train(trainer, checkpoints, progress, between)
            except Rewind as rewind:
                self.heartbeat.begin("rewinding")
                newest = checkpoints.newest(rewind.step - 1)
                assert newest is not None
                loaded, resumed_from = checkpoints.load_newest(newest, partial(report_rejected, self.run_dir))
                between_them = before(rewind.step) - before(loaded.step)
                progress = replace(loaded, skipped_samples=self.samples.skipped + between_them)
                spike = {**rewind.facts, "action": "rewound", "to": loaded.step, "skipped_samples": between_them}

    def _train(
        self,
        trainer: Trainer,
        checkpoints: CheckpointStore,
        progress: TrainingProgress,
        between: Sequence[BetweenSteps],
    ) -> TrainingProgress:
        """Train from `progress` to the last step or to a request to stop, and write the checkpoints that are due."""
        steps, checkpoint_every = self.experiment.total_steps, self.experiment.checkpoints.every or sys.maxsize
        events = self.run_dir.events if self.is_main else None
        names, spikes = trainer.scalar_names, trainer.spikes
        log = StepLog(self.experiment, self.plan, self.device, events, progress.seconds, names, spikes)
        step, begin = progress.step, self.heartbeat.begin
        memory = None if _on_gpu() else TensorMemory(trainer, self.experiment, step)
        for observation in between if step == 0 else ():
            observation.run(step, log)
        try:
            begin("batch", step + 1)
            # The host launches a step and goes on: the scalars of the step before are read when this one is launched.
            for batch, label_counts in self.samples.batches(trainer, progress.step):
                arrived = Timestamp.now(self.device)
                begin("step")
                with record_actions(trainer.context, self.coordinate, self.run_dir, step, progress.step):
                    wants_stop = IN_HASTE if self._stop_requested else self.run_dir.stop_file.exists()
                    with nullcontext() if memory is None else memory.counted(step):
                        result = trainer.step(step, batch, wants_stop, label_counts)
                stop, step = log.add(step, result, arrived), step + 1
                asks_stop, asks_checkpoint = self.callbacks.run(step, log)  # before an evaluation writes the row
                if step == min(progress.step + WARM_STEPS, steps):
                    log_memory(self.run_dir, self.plan, self.coordinate, self._initial_rss, memory)
                for observation in between:  # before a checkpoint of this step, so that a resumption has the point
                    if observation.is_due(step):
                        begin("evaluation")
                        observation.run(step, log)
                if (is_last := stop or asks_stop or step == steps) or asks_checkpoint or step % checkpoint_every == 0:
                    log.flush()
                    state = None if spikes is None else spikes.state()
                    read = self.samples
                    reached = TrainingProgress(step, log.seconds, read.stream_state(step), read.skipped, state)
                    if self.experiment.checkpoints.keep:
                        begin("checkpoint")
                        checkpoints.save(reached)
                    if self.is_main:
                        log_data_use(self.run_dir, self.experiment, reached)
                    log.restart_clock()
                if is_last:
                    # What is due at the last step is due at the end of a training that was asked to stop, too: after
                    # its checkpoint, and not if a signal asked, which leaves little time.
                    early = between if step < steps and not log.in_haste else ()
                    for observation in early:
                        if observation.is_due(steps) and not observation.is_due(step):
                            begin("evaluation")
                            observation.run(step, log)
                    break
                begin("batch", step + 1)
            else:
                if step < steps:
                    raise DataError(
                        f"The data ended after {step:,} of {steps:,} steps. Let the dataset return as many items as "
                        "its __len__ says, and raise StopIteration nowhere but in an iterator."
                    )
        except NonFiniteLoss as error:  # Every rank raises it at the same step, so that all can act together.
            begin("locating")
            checkpoints.wait()
            with self._timed_phase("locate"):
                located = with_origin(error, trainer, partial(self.samples.batches, trainer))
            raise located from None
        begin("ending")
        checkpoints.finish()
        log_memory(self.run_dir, self.plan, self.coordinate, self._initial_rss, memory)
        return TrainingProgress(step, log.seconds)

    @contextmanager
    def _timed_phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        if self.is_main:
            log_event(self.run_dir.events, "phase", name=name, seconds=time.perf_counter() - started)


def experiment_of(run_dir: RunDir, *, is_fresh: bool = True, is_exact: bool = False) -> Experiment:
    """Return the experiment of a run with the user's objects, which the launcher pickled.

    Those of a module that can be imported were pickled by reference, so that an edit of its file since the launch would
    train other code than was planned. Raises `PlanMismatch` where that has happened. `is_fresh` says that this process
    has run none of the code yet, so that its values are those of the files: those of rank 0 are compared with what rank
    0 had when the run was started. Values that are others in every process are told, and `is_exact` refuses them.
    """
    files = {name: run_dir.code / f"{name}.pkl" for name in USER_PARTS}
    code = {name: unpickled(file.read_bytes()) for name, file in files.items() if file.exists()}
    launched, imported = (read_identities(run_dir.code / name) for name in (FUNCTIONS, IMPORTED))
    accepts = read_object(run_dir.environment).get("accepted_changed_data")
    notes_values = is_fresh and os.environ["RANK"] == "0"
    for part, value in code.items():
        is_data = part in ("data", "eval_data")
        now, before = identity(value, held=not is_data), launched.get(part, {})
        if is_data and accepts:
            imported.pop(part, None)
        changed, unsteady = changed_between(before, now), list[str]()
        if notes_values and part in imported:
            since, unsteady = changed_since(imported[part], now, before)
            unsteady = [each for each in unsteady if part != "callbacks" and not each.endswith(("'", '"'))]  # a path
            changed = since or changed
        if changed and not (is_data and accepts):
            raise PlanMismatch(
                f"The {part} is another than the one that was started: {changed[0]}{and_more(changed)}. {way_out(part)}"
            )
        if unsteady:
            said = (
                f"The {part} reads what every process draws or computes anew: {unsteady[0]}{and_more(unsteady)}. Seed "
                "what draws it, or write its value down, and launch the run anew."
            )
            if is_exact:
                raise PlanMismatch(said)
            log_event(run_dir.events, "code_problem", message=said)
        imported.setdefault(part, now)
    if notes_values and code:
        (run_dir.code / IMPORTED).write_bytes(identities_json(imported))
    return Experiment.from_json(read_record(run_dir.experiment), code)


def hold_in_common(worker: TrainingWorker, model: torch.nn.Module, graphs: Sequence[Graph], together: bool) -> None:
    """Let the ranks hold the same, if they are here `together`, and compare it with what the run held at its start.

    Raises `PlanMismatch` for what a block computes, and for a tensor that no checkpoint holds and that is another than
    at the start. A clone tells that it begins with other weights than its run. A run that begins writes its start down.
    """
    run_dir, device, name = worker.run_dir, worker.device, worker.experiment.model.name
    tensors = build.held_tensors(model, graphs)
    worker.digests = digests = build.digests(tensors, graphs)
    if worker.plan.world > 1 and together and (taken := build.take_from_rank_0(name, digests, tensors, device)):
        print(f"Every rank has the values of rank 0 in what differed: {', '.join(taken)}.", flush=True)
    if not worker.is_main:
        return
    start = build.Start.read(run_dir.start_tensors)
    if start is None:
        build.Start.of(model, digests, device).write(run_dir.start_tensors)
        return
    unlike = start.unlike(digests, device)
    registered = {*dict(model.named_parameters()), *dict(model.named_buffers())}
    if others := [each for each in unlike if each not in registered]:
        raise PlanMismatch(
            f"{name} is another than when the run was started: {build.words_of_constant(graphs[0], others[0])} has "
            f"another content{and_more(others)}, although Python's, NumPy's and torch's generators were seeded alike. "
            "Something draws it without a seed, or reads it from outside. Let the model register it, "
            "self.register_buffer(...), which checkpoints store, or seed what draws it, "
            "numpy.random.default_rng(torch.initial_seed()), and launch the run anew."
        )
    if unlike and not run_dir.resume.exists():
        said = (
            f"{name} begins with other weights than the run that was cloned ({unlike[0]}{and_more(unlike)}): its "
            "constructor draws them without a seed."
        )
        log_event(run_dir.events, "code_problem", message=said)


def build_model_of(worker: TrainingWorker) -> torch.nn.Module:
    """Build a rank's model with the tensors of the run's start that no checkpoint holds.

    Weights that a checkpoint will replace are not loaded: their folder may have gone.
    """
    factory = worker.experiment.factory(loads=requested_checkpoint(worker.run_dir) is None)
    model = build.build_model(factory, worker.plan.model_bytes, worker.device, worker.experiment.seed)
    if (start := build.Start.read(worker.run_dir.start_tensors)) is not None:
        start.give_back(model)
    return model


def error_message(cause: BaseException, plan: Plan) -> str:
    """Return the message of an exception, with numbers and a remedy for the errors whose own message has none."""
    said = message_of(cause)
    if build.NO_DETERMINISTIC_KERNEL in said:
        operation = said.partition(build.NO_DETERMINISTIC_KERNEL)[0].strip()
        return (
            f"{operation} {build.NO_DETERMINISTIC_KERNEL}, and the experiment asks for deterministic=True. Replace "
            "that operation in the model, or remove deterministic=True: runs then repeat up to rounding."
        )
    for pattern, sentence in IN_WORDS.items():
        if found := re.search(pattern, said):
            return sentence.format(*found.groups())
    if not isinstance(cause, torch.OutOfMemoryError):
        return said
    capacity = plan.cluster.device.memory_bytes
    limit = min(plan.memory_limit_bytes or capacity, capacity)
    suggested = f"plan = wb.plan(experiment, memory_limit_gib={SUGGESTED_LIMIT * limit / GIB:.3g})"
    return (
        f"{said.splitlines()[0]} The plan predicts a peak of {gib(plan.peak_bytes)} and allows {gib(limit)} per "
        f"device. Plan with less, {suggested}, and launch that, or resume this run with run.resume(plan)."
    )


def report_checkpoint(run_dir: RunDir, saved: SaveResult) -> None:
    """Log a checkpoint that was written, or why it was not."""
    facts: dict[str, Any] = {"step": saved.step, "path": str(saved.path)}
    if saved.error is None:
        log_event(run_dir.events, "checkpoint", **facts, seconds=saved.pause_s, write_s=saved.write_s)
    else:
        log_event(run_dir.events, "checkpoint_problem", **facts, message=saved.error)


def report_rejected(run_dir: RunDir, path: Path, reason: str) -> None:
    """Log that a damaged checkpoint was passed over."""
    print(f"skipped a checkpoint: {reason}", flush=True)
    log_event(run_dir.events, "checkpoint_problem", step=step_of(path), path=str(path), message=reason)


def log_end(run_dir: RunDir, progress: TrainingProgress) -> None:
    """Log the end of a training, once everything before it is written; raises `OSError` if a disk stays full."""

    def write() -> None:
        write_waiting(run_dir.path)
        rows = num_logged(run_dir.path)
        append_event(run_dir.events, "end", steps=progress.step, seconds=progress.seconds, rows=rows)

    until_there_is_room(write, stop_grace_s() / 4)


def log_data_use(run_dir: RunDir, experiment: Experiment, progress: TrainingProgress) -> None:
    """Log what a training has read so far of each source of a mixture."""
    if isinstance(experiment.data, Mixture):
        samples = experiment.samples_before(progress.step) + progress.skipped_samples
        parts = [use._asdict() for use in experiment.data.reads(experiment).use(samples)]
        log_event(run_dir.events, "data_use", step=progress.step, parts=parts)


class TensorMemory:
    """Counts the bytes of a rank's tensors on a CPU, where the process holds much more than these.

    The first steps with the largest batch are counted, the last of which has all that a step finds and makes: moments,
    buckets and gradients come in the steps before.
    """

    def __init__(self, trainer: Trainer, experiment: Experiment, step: int) -> None:
        """Count from `step`, of which none of the trainer's tensors is known to the counter, or later."""
        self._trainer, batches = trainer, experiment.batches
        first = max(step, min(start for start, samples in batches.stretches if samples == batches.largest))
        self._steps = range(first, first + WARM_STEPS)
        self._alive: dict[int, int] = {}
        """Bytes of the tensors that are known to be there, by where they lie."""
        self.peak_bytes: int | None = None
        """Largest number of bytes in a step that was counted; None if none was."""

    @contextmanager
    def counted(self, step: int) -> Iterator[None]:
        """Count a step, if it is one of those."""
        if step not in self._steps:
            yield
            return
        self._alive = self._alive or self._held()
        with seen_allocations() as seen:
            yield
        if not seen:
            return
        if self.peak_bytes is None:  # buckets of gradients are older than a step, too, and seen when it has filled them
            made = {address for address, size in seen if size > 0}
            self._alive |= {address: size for address, size in self._held().items() if address not in made}
        total, peaks = sum(self._alive.values()), []
        for address, size in seen:
            total -= self._alive.pop(address, 0)  # of a new tensor, too: gloo's threads give tensors back unseen
            if size > 0:
                self._alive[address] = size
                total += size
            peaks.append(total)
        self.peak_bytes = max(self.peak_bytes or 0, *peaks)

    def _held(self) -> dict[int, int]:
        """Return the bytes of weights, gradients, buffers and the state of the optimiser, by where they lie."""
        stages, optimizer = self._trainer.stages, self._trainer.optimizer
        tensors = [tensor for stage in stages.stages for tensor in (*stage.parameters(), *stage.buffers())]
        tensors += [tensor.grad for tensor in tensors if tensor.grad is not None]
        tensors += [copy for copies in stages.weight_copies for copy in copies.copies.values()]
        tensors += [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
        storages = [local(tensor.detach()).untyped_storage() for tensor in tensors]
        return {storage.data_ptr(): storage.nbytes() for storage in storages}


def log_memory(
    run_dir: RunDir, plan: Plan, coordinate: MeshCoordinate, initial_rss: int, memory: TensorMemory | None
) -> None:
    """Report the peak memory of this rank's tensors and what was reserved for it: on a CPU, the process's growth."""
    counted: dict[str, bool] = {}
    if memory is None:
        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    else:
        reserved = max(0, psutil.Process().memory_info().rss - initial_rss)
        peak = reserved if memory.peak_bytes is None else memory.peak_bytes
        counted = {"counted": memory.peak_bytes is not None}
    log_event(
        run_dir.events,
        "memory",
        rank=dist.get_rank(),
        stage=coordinate.pipeline_rank,
        device=_device_name(dist.get_rank()),
        peak_bytes=peak,
        reserved_bytes=reserved,
        limit_bytes=plan.memory_limit_bytes or plan.cluster.device.memory_bytes,
        **counted,
    )


def cap_memory(plan: Plan, device: torch.device) -> None:
    """Make PyTorch raise `OutOfMemoryError` if it would allocate more on the device than the plan's memory limit."""
    if plan.memory_limit_bytes is not None:
        share = plan.memory_limit_bytes / torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), device)


def _complete_environment() -> None:
    """Set the variables of a world of one process, which Accelerate's launcher leaves unset."""
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", LOOPBACK)):
        os.environ.setdefault(name, value)
    if "MASTER_PORT" not in os.environ:
        # Otherwise torch would open a store that listens on every address.
        port = str(loopback_store().port)
        os.environ |= {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}


def _device_name(rank: int) -> str:
    if not _on_gpu():
        return f"CPU process {rank}"
    local = int(os.environ["LOCAL_RANK"])
    return f"cuda:{local} {torch.cuda.get_device_name(local)}"


def _on_gpu() -> bool:
    return torch.cuda.is_available() and os.environ.get("ACCELERATE_USE_CPU", "false").lower() not in ("1", "true")


# Rank 0 in the calling process, where a breakpoint in the model stops; further ranks are processes as always.
#
# A rank changes much of the process that it is: its environment, random numbers, torch's settings, process groups. All
# of that is as before when the training has ended.

LEAVES_S = 60.0
"""Seconds in which the other ranks must have left once this one has ended in order."""


class _WorkerHere(TrainingWorker):
    """A rank in a process that lives on."""

    is_fresh = False

    def run(self) -> int:
        """Call the model with the first samples, then train; return the number of completed steps.

        The training runs blocks that were captured from the model: only here does its own code compute.
        """
        try:
            dataset = self.experiment.reading.dataset()
            if isinstance(dataset, StreamedDataset):
                samples = self.experiment.reading.examples()
            else:
                samples = dataset.collate([dataset[index] for index in range(self.plan.micro_batch)])
            if samples is not None:
                model = build_model_of(self)
                with self.accelerator.autocast():
                    model(**send_to_device(dict(samples), self.device))
            return super().run()
        finally:
            self.heartbeat.close()


def check_free() -> None:
    """Raise `WorkbenchError` if this process cannot be a rank, because it has process groups or an `Accelerator`."""
    if dist.is_initialized() or PartialState._shared_state:
        raise WorkbenchError(
            "This process has process groups or an Accelerator already, and a rank makes its own. Restart it, or "
            "launch the run in processes of its own: wb.launch(experiment, plan)."
        )


def train_here(path: Path, world: int, device_type: str) -> None:
    """Train a prepared run of `world` ranks to its end, with rank 0 in this process; raises what the rank raises."""
    run = RunDir(path)
    store = new_loopback_store()
    meeting = {
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(store.port),
        "GLOO_SOCKET_IFNAME": loopback_interface(),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "ACCELERATE_USE_CPU": str(device_type == "cpu"),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    with _as_before(torch.device(device_type)), ExitStack() as others:
        os.environ |= meeting
        processes = []
        for rank in map(str, range(1, world)):  # the others are processes, which end with this block
            environment = {**os.environ, "RANK": rank, "LOCAL_RANK": rank, "PYTHONPATH": os.pathsep.join(user_path())}
            command = [sys.executable, "-m", "workbench.execution.worker", str(run.path)]
            process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
            others.callback(process.wait)
            others.callback(process.kill)
            processes.append(process)
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0"}
        try:
            train(run, _WorkerHere)
            for process in processes:
                process.wait(LEAVES_S)
        finally:
            run.rank(0).unlink(missing_ok=True)  # this process lives on, but the rank does not


@contextmanager
def _as_before(device: torch.device) -> Iterator[None]:
    """Give this process back what a rank changes: environment, random numbers, torch's settings, process groups."""
    environment = dict(os.environ)
    precision = torch.get_float32_matmul_precision()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    try:
        with untouched_generators(device):
            yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        # Accelerate's states are one per process. The calls are private; its own tests reset them so (Accelerate 1.15).
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        torch.use_deterministic_algorithms(deterministic, warn_only=warns)
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
        torch.set_float32_matmul_precision(precision)
        if torch.cuda.is_initialized():
            torch.cuda.set_per_process_memory_fraction(1.0)
        os.environ.clear()
        os.environ |= environment


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
