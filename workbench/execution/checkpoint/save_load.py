"""Save and load checkpoints under the model's own parameter names, whatever the plan (`torch.distributed.checkpoint`).

Keys are `model.<parameter or buffer>`, `optim.<parameter>.<state>`, `average.<parameter>` where weights are averaged
and, for the pattern of a sparse weight, `sparsity.<parameter>`. A tied parameter is stored once, and one that tensor
parallelism divides is stored whole. A save copies the state to the host's memory and continues in a thread with its own
gloo group, so that training goes on.
`workbench.execution.checkpoint.files` describes the files.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from workbench.base.errors import CheckpointError
from workbench.execution.blocks.sparse_weights import INDEX
from workbench.execution.checkpoint import files
from workbench.execution.checkpoint.model_export import GuardedReader
from workbench.execution.parallel.sharding import local
from workbench.execution.trainer import Trainer
from workbench.optimizers.building import create_state, forget_state
from workbench.record.rundir import RETRY_S, RunDir, stop_grace_s, write_json

T = TypeVar("T")
KEEP = 3
"""Number of checkpoints to keep by default."""
LAUNCH_ANEW = "launch the experiment anew: no other checkpoint is complete."
SPILL = "WORKBENCH_SPILL"
"""Environment variable with a folder for the last checkpoint of a run whose own disk is full."""


@dataclass(frozen=True)
class TrainingProgress:
    """Completed steps, the training time in seconds, and the state of a stream of data."""

    step: int
    seconds: float
    stream_state: Mapping[str, Any] | None = None
    """Value from which streamed data go on with the next step; None for data that are read by their index."""
    skipped_samples: int = 0
    """Samples that rewinds have left out so far."""
    spikes: Mapping[str, Any] | None = None
    """State of the rule for loss spikes; None without one."""


@dataclass(frozen=True)
class CheckpointExtras:
    """Content of a checkpoint that is not the state of any stage."""

    model: Mapping[str, Any] = field(default_factory=dict)
    """Content of `model.json`: names, ties, class and configuration, for an export."""
    unused: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Persistent tensors of the model that no block uses, on the CPU; training leaves them as initialised."""


@dataclass(frozen=True)
class SaveResult:
    """The outcome of one save."""

    step: int
    path: Path
    pause_s: float
    """Seconds that training waited for the save."""
    write_s: float
    """Seconds that the thread needed to write the files."""
    error: str | None = None
    """Reason why the save failed; None if it succeeded."""


class CheckpointStore:
    """Saves and restores one trainer. Every rank must call the same methods in the same order.

    `report` is called on rank 0 at the end of each save, from the thread that writes.
    """

    def __init__(
        self,
        trainer: Trainer,
        run: RunDir,
        keep: int = KEEP,
        extras: CheckpointExtras | None = None,
        report: Callable[[SaveResult], None] = lambda _: None,
    ) -> None:
        self._trainer, self._run, self._keep = trainer, run, keep
        self._extras = extras or CheckpointExtras()
        self._report = report
        run.checkpoints.mkdir(exist_ok=True)
        self._group = dist.new_group(backend="gloo")
        self._thread: threading.Thread | None = None
        self._last: SaveResult | None = None
        self._unwritten: tuple[Mapping[str, torch.Tensor], TrainingProgress, float] | None = None
        """The arguments of the last save, if it failed."""

    def save(self, progress: TrainingProgress) -> None:
        """Start to write a checkpoint; waits for the previous save and for the copy to the host's memory."""
        began = time.perf_counter()
        self.wait()
        self._unwritten = None

        # This rank's share of the state. One rank stages what several hold alike; buffers are those of the first
        # replica, since forward may have written others on each.
        trainer, coordinate = self._trainer, self._trainer.coordinate
        if trainer.context.device.type == "cuda":
            torch.cuda.synchronize()  # Offloaded moments may still be on their way to the host.
        replicas, replica = coordinate.devices_per_stage, coordinate.rank_in_stage
        staged: dict[str, torch.Tensor] = {}
        buffers = trainer.stages.model_buffers()
        for index, (key, name, value) in enumerate(entries(trainer)):
            if self._is_divided(name, value):
                value = trainer.full(name, value.to(trainer.context.device))
            if isinstance(value, DTensor):
                if coordinate.tensor_rank == index % coordinate.tensor:
                    staged[key] = DTensor(local(value).to("cpu", copy=True), value._spec, requires_grad=False)
            elif replica == (0 if name in buffers else index % replicas):
                staged[key] = value.to("cpu", copy=True)
        if self._is_main:
            staged |= {f"model.{name}": tensor.clone() for name, tensor in self._extras.unused.items()}
        pause_s = time.perf_counter() - began
        # The thread is a daemon: a rank that dies must not wait for a save with ranks that no longer answer.
        self._thread = threading.Thread(
            target=self._write, args=(staged, progress, pause_s), name=f"checkpoint {progress.step}", daemon=True
        )
        self._thread.start()

    def finish(self) -> None:
        """Wait for the last save; raise `CheckpointError` on every rank if it failed.

        On a full disk it is tried again: once in the folder that `$WORKBENCH_SPILL` names, else for half of the time
        that ranks have to end after a stop.
        """
        self.wait()
        spill, deadline = os.environ.get(SPILL), time.monotonic() + stop_grace_s() / 2
        failed, folder = self._last, self._run.checkpoints
        while self._unwritten is not None:
            share = partial(_needed_and_free, self._unwritten[0].values(), folder)
            is_full = _is_too_small(self._together(share))
            if is_full and not spill:
                if not self._together(lambda: time.monotonic() < deadline)[0]:
                    break
                time.sleep(RETRY_S)
            self._write(*self._unwritten, Path(spill).expanduser() / self._run.path.name if is_full and spill else None)
            if spill or not is_full:
                break
        now = self._last
        if failed is None or failed.error is None or now is None or (now.error is None and now.path.parent == folder):
            return
        problem = f"The checkpoint of step {failed.step} could not be written: {failed.error.removesuffix('.')}."
        if now.error is None:
            there = f"It stands in {now.path}. Make room, move that folder to {folder}, and resume the run."
            raise CheckpointError(f"{problem} {there}")
        saved = files.complete_checkpoints(folder)
        resume = f"resume the run from step {files.step_of(saved[-1])}." if saved else LAUNCH_ANEW
        raise CheckpointError(f"{problem} Make room under {folder}, and {resume}")

    @property
    def is_idle(self) -> bool:
        """Return True if this rank is not writing a checkpoint."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the save that is being written, if there is one, has succeeded or failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(
        self, staged: Mapping[str, torch.Tensor], progress: TrainingProgress, pause_s: float, spill: Path | None = None
    ) -> None:
        began = time.perf_counter()
        path = (spill or self._run.checkpoints) / self._run.checkpoint(progress.step).name
        error, is_again = None, self._unwritten is not None
        try:
            self._together(lambda: _empty_folder(path, spill) if self._is_main else None)
            writer = _Writer(path, thread_count=files.THREADS)
            dcp_save(dict(staged), storage_writer=writer, process_group=self._group)
            written = {name: file for each in self._together(lambda: self._digests(path)) for name, file in each}
            self._together(lambda: self._mark_complete(path, progress, written) if self._is_main else None)
        except BaseException as failure:  # torch's CheckpointException is no Exception
            error, self._unwritten = _sentence(failure), (staged, progress, pause_s)
            if self._is_main:
                files.remove(path)  # Nobody writes there any more, and a full disk gets its room back.
            with contextlib.suppress(OSError):  # The log may lie on the same full disk.
                print(f"checkpoint of step {progress.step} failed: {error}", flush=True)
        else:
            self._unwritten = None
        self._last = SaveResult(progress.step, path, pause_s, time.perf_counter() - began, error)
        if self._is_main and (error is None or not is_again):
            self._report(self._last)

    def _digests(self, path: Path) -> list[tuple[str, dict[str, Any]]]:
        """Return the digests of the files that this rank wrote."""
        mine = list(path.glob(f"__{dist.get_rank()}_*"))
        if self._is_main:
            write_json(path / files.MODEL, dict(self._extras.model))
            mine += [path / ".metadata", path / files.MODEL]
        return list(files.digests(mine).items())

    def _mark_complete(self, path: Path, progress: TrainingProgress, written: Mapping[str, Any]) -> None:
        signature = self._trainer.plan.signature
        manifest = {"step": progress.step, "seconds": progress.seconds, "signature": signature, "files": dict(written)}
        if progress.stream_state is not None:
            manifest["stream_state"] = dict(progress.stream_state)
        if progress.spikes is not None:
            manifest |= {"spikes": dict(progress.spikes), "skipped_samples": progress.skipped_samples}
        write_json(path / files.COMPLETE, {**manifest, "digest": files.digest_of(manifest)})
        files.prune(path.parent, self._keep, progress.step)

    @property
    def _is_main(self) -> bool:
        return dist.get_rank() == 0

    def _together(self, action: Callable[[], T]) -> list[T]:
        """Run `action` on every rank and return all results; if it fails on one, raise `CheckpointError` on all."""
        mine: tuple[T | None, str | None]
        try:
            mine = (action(), None)
        except Exception as error:
            mine = (None, f"rank {dist.get_rank()}: {_sentence(error)}")
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine, group=self._group)
        for _, failure in everyone:
            if failure is not None:
                raise CheckpointError(failure)
        return [value for value, _ in everyone]

    def load(self, path: Path) -> TrainingProgress:
        """Restore the trainer from a checkpoint that this or another plan of the same model wrote.

        Raises `CheckpointError`, before anything is changed, if the checkpoint is incomplete, damaged or of another
        model.
        """
        manifest = files.read_manifest(path)
        if manifest["signature"] != self._trainer.plan.signature:
            raise CheckpointError(
                f"{path} was saved from a model of other parameters (signature {manifest['signature']}, this model has "
                f"{self._trainer.plan.signature}). Resume with the experiment that wrote it."
            )
        written, rank, world = manifest["files"], dist.get_rank(), dist.get_world_size()
        mine = {name: written[name] for name in sorted(written)[rank::world]}  # each rank reads some of the files
        for problem in self._together(lambda: files.find_damage(path, mine)):
            if problem is not None:
                raise files.DamagedCheckpoint(f"The checkpoint {path.name} is damaged: {problem}", path=str(path))
        # Nothing is changed before here.
        stored: Mapping[str, Any] = GuardedReader(path).read_metadata().state_dict_metadata
        sparse = self._trainer.sparse_weights
        for name, pattern in ({} if sparse is None else sparse.patterns).items():
            saved = stored.get(f"sparsity.{name}")
            if saved is None or saved.size != pattern.shape:
                found = "no pattern" if saved is None else f"a pattern of {' × '.join(map(str, saved.size))} blocks"
                raise CheckpointError(
                    f"{path} has {found} for the weight {name}, and the experiment divides it into "
                    f"{' × '.join(map(str, pattern.shape))} blocks. Resume with the sparsity that wrote it, or launch "
                    "the experiment anew."
                )

        # The live tensors are the targets of the reading, and whole ones those of what this rank holds a part of.
        create_state(self._trainer.optimizer)
        parameters = self._trainer.stages.model_parameters()
        begun = {name for name in parameters if any(key.startswith(f"optim.{name}.") for key in stored)}
        forget_state(self._trainer.optimizer, [p for name, p in parameters.items() if name not in begun])
        live = [entry for entry in entries(self._trainer) if entry[0] in stored or not entry[0].startswith("average.")]
        divided = {key for key, name, value in live if self._is_divided(name, value)}
        targets = {
            key: torch.empty(self._trainer.graph.parameters[name].shape, dtype=value.dtype) if key in divided else value
            for key, name, value in live
        }
        if self._is_main:
            targets |= {f"model.{name}": tensor for name, tensor in self._extras.unused.items()}
        dcp_load(targets, storage_reader=GuardedReader(path), process_group=self._group)
        if sparse is not None:
            sparse.restore_patterns()  # which say where the blocks of compact weights belong
        for key, name, value in live:
            if key in divided:  # this rank's shard, or stored blocks, of the whole tensor
                whole = targets[key].to(self._trainer.context.device) if isinstance(value, DTensor) else targets[key]
                with torch.no_grad():
                    local(value).copy_(self._trainer.whole.as_stored(name, whole, value))
        if sparse is not None:
            sparse.mask_weights()
        if self._trainer.average is not None and not any(key.startswith("average.") for key, _, _ in live):
            self._trainer.average.restart()  # the checkpoint was written without an average, which begins here
        return TrainingProgress(
            int(manifest["step"]),
            float(manifest["seconds"]),
            manifest.get("stream_state"),
            int(manifest.get("skipped_samples", 0)),
            manifest.get("spikes"),
        )

    def load_newest(self, path: Path, rejected: Callable[[Path, str], None]) -> tuple[TrainingProgress, Path]:
        """Restore from `path` or, if that is damaged, from the newest undamaged checkpoint before it.

        `rejected` is called on rank 0 with each skipped checkpoint and the reason. Also returns the
        checkpoint that was used.
        """
        complete = files.complete_checkpoints(path.parent)
        before = [other for other in complete if files.step_of(other) < files.step_of(path)]
        reasons = []
        for candidate in (path, *reversed(before)):
            try:
                return self.load(candidate), candidate
            except files.DamagedCheckpoint as error:
                reasons.append(str(error))
                if self._is_main:
                    rejected(candidate, str(error))
        raise CheckpointError(
            f"No checkpoint in {path.parent} can be resumed from. {reasons[0]} Launch the experiment anew."
        )

    def newest(self, step: int) -> Path | None:
        """Return the run's last complete checkpoint of at most `step` steps, the same on every rank; None without."""
        self.wait()
        saved = self._together(lambda: files.complete_checkpoints(self._run.checkpoints))[0]
        return next((path for path in reversed(saved) if files.step_of(path) <= step), None)

    def _is_divided(self, name: str, value: torch.Tensor) -> bool:
        """Return True if this rank holds a tensor-parallel shard of a value, or only its stored blocks."""
        stages = self._trainer.stages
        return (name in stages.shardings or name in stages.compact.indices) and value.ndim > 0


def entries(trainer: Trainer) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield (key, the model's name, live tensor) of this rank's stages, in the same order on all their replicas."""
    names: dict[torch.Tensor, str] = {}
    for name, parameter in trainer.stages.model_parameters().items():
        names[parameter] = name
        yield f"model.{name}", name, parameter.detach()
    for name, average in ({} if trainer.average is None else trainer.average.values).items():
        yield f"average.{name}", name, average
    for name, buffer in trainer.stages.model_buffers().items():
        if not name.startswith(("_constant.", INDEX)):
            yield f"model.{name}", name, buffer
    if trainer.sparse_weights is not None:
        for name, pattern in trainer.sparse_weights.patterns.items():
            yield f"sparsity.{name}", f"sparsity.{name}", pattern  # every rank of a stage holds the whole of it
    for tensor, slots in trainer.optimizer.state.items():
        for slot, value in slots.items():
            yield f"optim.{names[tensor]}.{slot}", names[tensor], value


class _Writer(FileSystemWriter):
    """torch's writer, but for one thing: it passes over a thread that cannot write, and over what is missing then."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write what stands where, once all of it was written; raises `CheckpointError` otherwise."""
        stored = metadata.state_dict_metadata.values()
        planned = sum(len(each.chunks) if isinstance(each, TensorStorageMetadata) else 1 for each in stored)
        written = sum(map(len, results))
        if written < planned:
            raise CheckpointError(f"{planned - written:,} of {planned:,} tensors could not be written.")
        super().finish(metadata, results)


_ROOM_BYTES = 2**16
"""Room that a checkpoint needs beside its tensors."""


def _needed_and_free(tensors: Iterable[torch.Tensor], folder: Path) -> tuple[int, int]:
    """Return the bytes of this rank's tensors, and those that are free on the disk of a folder."""
    return sum(local(tensor).nbytes for tensor in tensors), shutil.disk_usage(folder).free


def _is_too_small(needed_and_free: Iterable[tuple[int, int]]) -> bool:
    """Return True if the tensors of all ranks have too little room on the disk."""
    facts = list(needed_and_free)
    return sum(needed for needed, _ in facts) + _ROOM_BYTES > min(free for _, free in facts)


def _empty_folder(path: Path, spill: Path | None) -> None:
    if spill is not None:
        spill.mkdir(parents=True, exist_ok=True)
    if path.exists():
        shutil.rmtree(path)
    path.mkdir()  # without the folders around it: a run that was deleted is not made again


def _sentence(error: BaseException) -> str:
    """Return the first line of the first cause of an error, with its type."""
    failures = getattr(error, "failures", None)
    if failures:  # torch.distributed.checkpoint maps ranks to (exception, traceback).
        rank, (error, *_) = next(iter(failures.items()))
        return f"rank {rank}: {_sentence(error)}"
    text = str(error).splitlines()[0] if str(error) else ""
    return text if isinstance(error, CheckpointError) else f"{type(error).__name__}: {text or 'no message'}"
