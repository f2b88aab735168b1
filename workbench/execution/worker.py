"""One rank of a run: `python -m workbench.execution.worker RUN_DIR`, started by `accelerate launch` or `torchrun`.

Reads the run directory, builds its stage, trains, and appends events. Leaves with exit code 0 when the run is
finished or was asked to stop; an exception is written to `errors/<rank>.json` and ends it with code 1. Without a
supervisor, the ranks also write the run's states.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from accelerate.utils import ProjectConfiguration, send_to_device
from torch.utils.data import DataLoader

from workbench.capture import Graph
from workbench.errors import PlanMismatch, root_exception
from workbench.execution.blocks.context import StepContext
from workbench.execution.blocks.cuda_graphs import NCCL_SETTING
from workbench.execution.blocks.labelled_head import LabelCounts
from workbench.execution.build import build_model, build_stage, capture_for, prepare_compiler, turn_to_build
from workbench.execution.checkpoint.files import step_of
from workbench.execution.checkpoint.model_export import describe_model
from workbench.execution.checkpoint.save_load import Checkpoints, Extras, Progress, Saved
from workbench.execution.deterministic import REFUSAL, make_repeatable
from workbench.execution.parallel.mesh import MeshCoordinate, parallelism_config
from workbench.execution.parallel.stage import RankStages
from workbench.execution.step_timeline import recorded
from workbench.execution.trainer import StepResult, Trainer
from workbench.experiment import Experiment
from workbench.planning.plan import Plan
from workbench.rundir import RunDir, append_event, read_json, this_process, write_json
from workbench.units import GIB, gib

LESS_MEMORY = 0.9
"""Of the limit that a plan did not keep to, what to try next."""
LOADER_WORKERS = 2
"""Processes that assemble batches for a GPU; a CPU run assembles them itself."""


def main(directory: str) -> int:
    run = RunDir(Path(directory))
    _complete_environment()
    rank = int(os.environ["RANK"])
    _redirect_output(run.log(rank))
    plan = Plan.from_json(read_json(run.plan))
    stage = rank // (plan.data * plan.tensor)
    write_json(run.rank(rank), {**this_process(), "rank": rank, "stage": stage, "device": _device_name(rank)})
    supervised = "supervisor" in (read_json(run.launcher) if run.launcher.exists() else {})
    if not supervised and rank == 0:
        append_event(run.events, "status", state="starting", message="")
    try:
        steps = _Worker(run, plan).run()
    except BaseException as error:
        _report(run, rank, stage, error, plan)
        if not supervised:
            cause = root_exception(error)
            message = f"rank {rank} (stage {stage}): {type(cause).__name__}: {message_of(cause, plan)}".splitlines()[0]
            append_event(run.events, "status", state="failed", message=message)
        return 1
    if not supervised and rank == 0:
        _conclude(run, steps)
    return 0


def _conclude(run: RunDir, steps: int) -> None:
    target = read_json(run.experiment)["steps"]
    if steps >= target:
        append_event(run.events, "status", state="finished", message=f"{steps} steps.")
    else:
        append_event(run.events, "status", state="stopped", message=f"Stopped at step {steps} of {target}.")


def _complete_environment() -> None:
    """A single process is a world of one; Accelerate's launcher leaves these unset for it."""
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1")):
        os.environ.setdefault(name, value)
    if "MASTER_PORT" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(probe.getsockname()[1])


def _redirect_output(log: Path) -> None:
    """Everything this process prints, C++ included, goes to its own log."""
    log.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _device_name(rank: int) -> str:
    if not _on_gpu():
        return f"CPU process {rank}"
    local = int(os.environ["LOCAL_RANK"])
    return f"cuda:{local} {torch.cuda.get_device_name(local)}"


def _on_gpu() -> bool:
    return torch.cuda.is_available() and os.environ.get("ACCELERATE_USE_CPU", "false").lower() not in ("1", "true")


def _report(run: RunDir, rank: int, stage: int, error: BaseException, plan: Plan) -> None:
    text = "".join(traceback.format_exception(error))
    print(text, file=sys.stderr, flush=True)
    cause = root_exception(error)
    facts = {"rank": rank, "stage": stage, "type": type(cause).__name__, "message": message_of(cause, plan)}
    facts["traceback"] = text
    write_json(run.error(rank), {**facts, "time": time.time()})


def message_of(cause: BaseException, plan: Plan) -> str:
    """What an error says; of a device that is full also what the plan counted on, and the way out."""
    if REFUSAL in str(cause):
        operation = str(cause).partition(REFUSAL)[0].strip()
        return (
            f"{operation} {REFUSAL}, and the experiment asks for deterministic=True. Replace that operation in the "
            "model, or leave deterministic out: runs then repeat to rounding."
        )
    if not isinstance(cause, torch.OutOfMemoryError):
        return str(cause)
    has = plan.cluster.device.memory_bytes
    limit = min(plan.memory_limit_bytes or has, has)
    planned = f"The plan counts on {gib(plan.peak_bytes)} of {gib(limit)} a device."
    less = f"plan = wb.plan(experiment, memory_limit_gib={LESS_MEMORY * limit / GIB:.3g})"
    way_out = f"Plan with less, {less}, and launch that, or resume this run with wb.resume(run, plan=plan)."
    return f"{str(cause).splitlines()[0]} {planned} {way_out}"


def cap_memory(plan: Plan, device: torch.device) -> None:
    """From now on PyTorch allocates no more on the device than the plan was allowed; beyond, it raises."""
    if plan.memory_limit_bytes is not None:
        share = plan.memory_limit_bytes / torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), device)


@dataclass(frozen=True)
class _Mark:
    """A moment on the device's own clock (the host's, for a CPU)."""

    event: torch.cuda.Event | None
    host_s: float

    @staticmethod
    def now(device: torch.device) -> _Mark:
        event = None
        if device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        return _Mark(event, time.perf_counter())

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()

    def seconds_since(self, earlier: _Mark) -> float:
        """Both must have passed."""
        if self.event is not None and earlier.event is not None:
            return float(earlier.event.elapsed_time(self.event)) / 1e3
        return self.host_s - earlier.host_s


@dataclass(frozen=True)
class _Pending:
    """A step that has been launched and whose scalars are on their way to the host."""

    step: int
    learning_rate: float
    host: torch.Tensor
    ended: _Mark

    @staticmethod
    def of(step: int, result: StepResult) -> _Pending:
        scalars = result.scalars
        host = scalars
        if scalars.device.type == "cuda":
            host = torch.empty(scalars.shape, dtype=scalars.dtype, pin_memory=True)
            host.copy_(scalars, non_blocking=True)
        return _Pending(step, result.learning_rate, host, _Mark.now(scalars.device))

    def read(self) -> tuple[float, float, bool]:
        """(loss, gradient norm, somebody wants to stop); waits for the step to end."""
        self.ended.wait()
        loss, squared_norm, stop = self.host.tolist()
        return loss, squared_norm**0.5, stop > 0


class _Worker:
    def __init__(self, run: RunDir, plan: Plan) -> None:
        self.run_dir, self.plan = run, plan
        self.experiment = _load_experiment(run)
        self._started = time.perf_counter()
        if self.experiment.deterministic:
            make_repeatable()
        if plan.cuda_graphs:
            os.environ.setdefault(*NCCL_SETTING)
        self.accelerator = Accelerator(
            cpu=not _on_gpu(),
            mixed_precision="bf16" if plan.precision == "bf16" else "no",
            parallelism_config=parallelism_config(plan.pipeline, plan.data, plan.zero, plan.tensor),
            project_config=ProjectConfiguration(project_dir=str(run.path)),
            step_scheduler_with_optimizer=False,
        )
        if not dist.is_initialized():
            dist.init_process_group("nccl" if _on_gpu() else "gloo", rank=0, world_size=1)
        self.coordinate = MeshCoordinate.from_mesh(self.accelerator.torch_device_mesh)
        self.device = self.accelerator.device
        self.is_main = dist.get_rank() == 0
        self._stop_requested = False
        self._resident = psutil.Process().memory_info().rss
        signal.signal(signal.SIGTERM, self._on_sigterm)
        torch.set_float32_matmul_precision("high" if plan.precision == "bf16" else "highest")

    def run(self) -> int:
        """Train; returns the number of completed steps."""
        self._phase("start", time.perf_counter() - self._started)
        trainer, extras = self._build()
        keep = self.experiment.keep_checkpoints
        self._checkpoints = Checkpoints(trainer, self.run_dir, keep, extras, self._report_checkpoint)
        progress = Progress(0, 0.0)
        resumed_from = None
        if self.run_dir.resume.exists():
            asked = Path(read_json(self.run_dir.resume)["checkpoint"])
            with self._timed("resume"):
                progress, used = self._checkpoints.load_newest(asked, self._report_rejected)
            resumed_from = str(used)
        self._announce(trainer, resumed_from)
        try:
            final = self._train(trainer, progress)
            dist.barrier()
        finally:
            self.accelerator.end_training()
            if dist.is_initialized() and self._checkpoints.idle:  # its thread may still use a group
                dist.destroy_process_group()
        if self.is_main:
            append_event(self.run_dir.events, "end", steps=final.step, seconds=final.seconds)
        return final.step

    def _build(self) -> tuple[Trainer, Extras]:
        context = StepContext(self.experiment.seed, self.device)
        compile = self.experiment.compile if self.experiment.compile is not None else _on_gpu()
        if compile:
            prepare_compiler()
        with turn_to_build(self.plan.model_bytes, self.device, self.accelerator.local_process_index):
            graph, stage, extras = self._take(context, compile)
        trainer = Trainer(self.experiment, self.plan, graph, stage, context, self.coordinate)
        if _on_gpu():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            cap_memory(self.plan, self.device)
        return trainer, extras

    def _take(self, context: StepContext, compile: bool) -> tuple[Graph, RankStages, Extras]:
        """This rank's stages out of the model, which is gone afterwards."""
        specs = self.experiment.data.batch_specs(self.experiment)
        with self._timed("build"):
            size, seed = self.plan.model_bytes, self.experiment.seed
            model = build_model(self.experiment.model.build, size, self.device, seed)
        with self._timed("capture"):
            graph = capture_for(self.plan, model, specs)
        if graph.signature != self.plan.signature or len(graph.blocks) != len(self.plan.block_names):
            raise PlanMismatch(
                f"The plan was made for {self.plan.model} of {len(self.plan.block_names)} blocks (signature "
                f"{self.plan.signature}); this model has {len(graph.blocks)} (signature {graph.signature}). "
                f"Plan again.",
                planned=self.plan.signature,
                found=graph.signature,
            )
        with self._timed("stage"):
            extras = self._extras(model, graph)
            stage = build_stage(
                self.plan,
                self.coordinate,
                model,
                graph,
                context,
                compile=compile,
                autocast=self.accelerator.autocast,
            )
        return graph, stage, extras

    def _extras(self, model: torch.nn.Module, graph: Graph) -> Extras:
        """What the checkpoints of rank 0 say of the model beyond its stages."""
        if not self.is_main:
            return Extras()
        held = {name for block in graph.blocks for name in (*block.parameters, *block.buffers)}
        facts = describe_model(model)
        unused = {name: facts.tensors[name].detach().cpu() for name in facts.persistent if name not in held}
        return Extras(facts.to_json(), unused)

    def _announce(self, trainer: Trainer, resumed_from: str | None) -> None:
        if not self.is_main:
            return
        plan = self.plan
        device = plan.cluster.device
        append_event(
            self.run_dir.events,
            "start",
            devices=plan.world,
            world=plan.world,
            parameters=trainer.graph.parameter_count,
            flops_per_step=plan.flops_per_step,
            peak_flops=device.peak(plan.precision) * plan.world if device.type == "cuda" else None,
            tokens_per_step=self.experiment.tokens_per_step,
            samples_per_step=self.experiment.global_batch,
            resumed_from=resumed_from,
        )

    def _batches(self, trainer: Trainer, first_step: int) -> Iterator[tuple[Mapping[str, torch.Tensor], LabelCounts]]:
        """This replica's part of every global batch, in training order, on its device; and its labels, counted."""
        dataset = self.experiment.data.dataset(self.experiment)
        loader = DataLoader(
            dataset,
            batch_size=trainer.samples,
            collate_fn=dataset.collate,
            num_workers=LOADER_WORKERS if _on_gpu() else 0,
            pin_memory=_on_gpu(),
        )
        sharded = prepare_data_loader(
            loader,
            self.device,
            num_processes=self.coordinate.data,
            process_index=self.coordinate.data_rank,
            put_on_device=False,
            rng_types=None,
        )
        for batch in skip_first_batches(sharded, first_step):
            yield send_to_device(batch, self.device, non_blocking=True), trainer.labels_of(batch)

    def _train(self, trainer: Trainer, progress: Progress) -> Progress:
        log = _StepLog(self, progress)
        pending: _Pending | None = None
        every = self.experiment.checkpoint_every
        stop = False
        step = progress.step
        for batch, labelled in self._batches(trainer, progress.step):
            with recorded(trainer.context, self.coordinate, self.run_dir, step, progress.step):
                result = trainer.step(step, batch, stop=self._wants_stop(), labelled=labelled)
            if pending is not None:
                stop = log.write(pending)
            pending = _Pending.of(step, result)
            step += 1
            if step == min(progress.step + 3, self.experiment.steps):
                self._memory_event()
            due = every is not None and step % every == 0 and step < self.experiment.steps
            if due or stop or step == self.experiment.steps:
                log.write(pending)
                pending = None
                self._checkpoints.save(Progress(step, log.seconds))
                log.resume()
            if stop or step == self.experiment.steps:
                break
        self._checkpoints.finish()
        self._memory_event()
        return Progress(step, log.seconds)

    def _report_checkpoint(self, saved: Saved) -> None:
        facts: dict[str, Any] = {"step": saved.step, "path": str(saved.path)}
        if saved.error is None:
            append_event(self.run_dir.events, "checkpoint", **facts, seconds=saved.pause_s, write_s=saved.seconds)
        else:
            append_event(self.run_dir.events, "checkpoint_problem", **facts, message=saved.error)

    def _report_rejected(self, path: Path, reason: str) -> None:
        print(f"passed over: {reason}", flush=True)
        append_event(self.run_dir.events, "checkpoint_problem", step=step_of(path), path=str(path), message=reason)

    def _wants_stop(self) -> bool:
        return self._stop_requested or self.run_dir.stop_file.exists()

    def _on_sigterm(self, *_: Any) -> None:
        self._stop_requested = True

    def _memory_event(self) -> None:
        device = self.plan.cluster.device
        if _on_gpu():
            peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        else:
            peak = reserved = max(0, psutil.Process().memory_info().rss - self._resident)
        append_event(
            self.run_dir.events,
            "memory",
            rank=dist.get_rank(),
            stage=self.coordinate.pipeline_rank,
            device=_device_name(dist.get_rank()),
            peak_bytes=peak,
            reserved_bytes=reserved,
            limit_bytes=self.plan.memory_limit_bytes or device.memory_bytes,
        )

    def _phase(self, name: str, seconds: float) -> None:
        if self.is_main:
            append_event(self.run_dir.events, "phase", name=name, seconds=seconds)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._phase(name, time.perf_counter() - started)


class _StepLog:
    """Turns steps that have ended into events; one step late, so that logging never waits."""

    def __init__(self, worker: _Worker, progress: Progress) -> None:
        self._worker = worker
        self.seconds = progress.seconds
        self._previous = _Mark.now(worker.device)

    def resume(self) -> None:
        """What passed since the last step was not training."""
        self._previous = _Mark.now(self._worker.device)

    def write(self, pending: _Pending) -> bool:
        """Record one step; True when somebody asked to stop."""
        loss, norm, stop = pending.read()
        step_s = pending.ended.seconds_since(self._previous)
        self._previous = pending.ended
        self.seconds += step_s
        worker, done = self._worker, pending.step + 1
        experiment, plan = worker.experiment, worker.plan
        if worker.is_main and (done % experiment.log_every == 0 or done == experiment.steps or stop):
            device = plan.cluster.device
            peak = device.peak(plan.precision) * plan.world if device.type == "cuda" else None
            row = {
                "loss": loss,
                "learning_rate": pending.learning_rate,
                "grad_norm": norm,
                "step_ms": step_s * 1e3,
                "tokens": done * experiment.tokens_per_step,
                "samples": done * experiment.global_batch,
                "flops": done * plan.flops_per_step,
                "seconds": self.seconds,
                "tokens_per_s": experiment.tokens_per_step / step_s,
                "mfu": plan.flops_per_step / step_s / peak if peak else None,
            }
            append_event(worker.run_dir.events, "step", step=done, **row)
        return stop


def _load_experiment(run: RunDir) -> Experiment:
    """The experiment, with the user's own model and dataset unpickled from the run's own `code/`."""
    return Experiment.from_json(
        read_json(run.experiment), model=_unpickled(run.model_code), data=_unpickled(run.data_code)
    )


def _unpickled(path: Path) -> Any:
    return pickle.loads(path.read_bytes()) if path.exists() else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
