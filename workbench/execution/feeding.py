"""The samples of a training as one rank reads them, from a dataset or from the stream of its node.

The lowest rank of a node starts the process that makes the samples and hands its file to the other ranks of the node.
The file has no name from then on, so that nothing is left behind by a rank that is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import DataLoaderShard
from accelerate.utils import send_to_device
from torch.utils.data import Sampler

from workbench.base.errors import DataError
from workbench.capture import spec_of
from workbench.data import data_fingerprint
from workbench.data.datasets import StreamedDataset, TrainingDataset
from workbench.data.streaming import Feeder, Ring, new_ring_file, ring_for
from workbench.execution.blocks.step_context import LabelCounts
from workbench.execution.parallel.mesh import MeshCoordinate
from workbench.execution.trainer import Trainer
from workbench.experiment import Experiment
from workbench.record.rundir import RunDir, read_json, read_object, write_json

LOADER_WORKERS = 2
"""Processes that assemble batches for a GPU; a rank on a CPU assembles its own."""


@dataclass(frozen=True)
class _Shares(Sampler[range]):
    """The numbers of the samples of one replica, a part of each batch."""

    experiment: Experiment
    first_step: int
    skipped: int
    coordinate: MeshCoordinate

    def __iter__(self) -> Iterator[range]:
        experiment, rank = self.experiment, self.coordinate.data_rank
        for step in range(self.first_step, experiment.total_steps):
            first, share = experiment.samples_before(step) + self.skipped, experiment.batches.at(step)
            share //= self.coordinate.data
            yield range(first + rank * share, first + (rank + 1) * share)

    def __len__(self) -> int:
        return self.experiment.total_steps - self.first_step


@dataclass(frozen=True)
class Feed:
    """The samples of a training, and what tells the process that makes them how far this rank has read."""

    dataset: TrainingDataset
    identity: str | None = None
    ring: Ring | None = None
    reader: int = 0
    feeder: Feeder | None = None


@contextlib.contextmanager
def feed(dataset: TrainingDataset, first: int, global_batch: int, state: Mapping[str, Any] | None) -> Iterator[Feed]:
    """Give this rank the samples of a training from `first` on; every rank must call it at the same time.

    `state` is what `TrainingSamples.stream_state` returned before, or None to find the sample from the beginning of the
    stream.
    """
    if not isinstance(dataset, StreamedDataset):
        yield Feed(dataset)
        return
    if state is not None and (state["of"] != dataset.identity or state["first"] > first):
        state = None
    # The ranks of a node share one file: those that see the same folder for temporary files, on a host of one name.
    folder = os.stat(tempfile.gettempdir())
    node = (socket.gethostname(), folder.st_dev, folder.st_ino)
    nodes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(nodes, node)
    mine = [rank for rank, other in enumerate(nodes) if other == node]
    reader = mine.index(dist.get_rank())
    descriptor, path = new_ring_file() if reader == 0 else (None, None)
    paths: list[Any] = [None] * len(nodes)
    dist.all_gather_object(paths, str(path))
    if descriptor is None:
        descriptor = os.open(paths[mine[0]], os.O_RDWR)
    feeder = None
    try:
        ring = ring_for(dataset.stream, descriptor, global_batch, len(mine), dataset.vocabulary)
        if reader == 0:
            ring.clear(first)
        dist.barrier()  # every rank has opened the file, which loses its name now
        if path is not None:
            path.unlink()
        feeder = Feeder(dataset.stream, ring, first, state) if reader == 0 else None
        yield Feed(dataset.reading(ring), dataset.identity, ring, reader, feeder)
    finally:
        if feeder is not None:
            feeder.close()
        os.close(descriptor)


class TrainingSamples:
    """The samples of a training as one rank reads them, from any step on."""

    def __init__(self, experiment: Experiment, coordinate: MeshCoordinate, device: torch.device) -> None:
        self._experiment, self._coordinate, self._device = experiment, coordinate, device
        self._feed: Feed | None = None
        self._state: Mapping[str, Any] | None = None
        self.skipped = 0
        """Samples that have been left out so far, after loss spikes."""

    def go_on(self, state: Mapping[str, Any] | None, skipped: int) -> None:
        """Take up the state of a stream, and the number of samples left out, of a checkpoint."""
        self._state, self.skipped = state, skipped

    def batches(self, trainer: Trainer, first_step: int) -> Iterator[tuple[Mapping[str, torch.Tensor], LabelCounts]]:
        """Yield this replica's share of every global batch, in training order, on its device, with its label counts.

        Labels are counted while the batch is still in the host's memory, where counting does not wait for the device.
        Raises `DataError` for items of other types or shapes than those that the model was captured with.
        """
        experiment, state = self._experiment, self.stream_state(first_step)
        dataset, first = experiment.reading.dataset(), self._first_sample(first_step)
        with feed(dataset, first, experiment.largest_batch, state) as self._feed:
            self._feed.dataset.length += self.skipped
            on_gpu = self._device.type == "cuda"
            # Accelerate's `prepare_data_loader` does the same for batches of one size, but imports `datasets` and with
            # it pandas.
            loader = DataLoaderShard(
                self._feed.dataset,
                batch_sampler=_Shares(experiment, first_step, self.skipped, self._coordinate),
                collate_fn=self._feed.dataset.collate,
                num_workers=LOADER_WORKERS if on_gpu else 0,
                pin_memory=on_gpu,
                # Forked, they write their stacks when a stall is looked into (`stalls.StallWatch`).
                multiprocessing_context="fork" if on_gpu else None,
            )
            for step, own in enumerate(loader, first_step):
                if self._feed.ring is not None:  # no sample below that number is needed here any more
                    self._feed.ring.release(self._feed.reader, self._first_sample(step + 1))
                for name, spec in trainer.graph.batch.items():
                    found = spec_of(name, own[name])
                    if (found.dtype, found.shape[1:]) != (spec.dtype, spec.shape[1:]):
                        raise DataError(
                            f"The items of step {step + 1:,} have {name} as {found.dtype} {list(found.shape[1:])}, and "
                            f"the first item of the dataset has {spec.dtype} {list(spec.shape[1:])}. Let every item "
                            "have the same types and shapes, by .to(dtype) in the dataset for instance."
                        )
                yield send_to_device(own, self._device, non_blocking=True), trainer.count_labels_on_host(own)

    def stream_state(self, step: int) -> Mapping[str, Any] | None:
        """Return the state from which a stream goes on with the first sample of a step, or None if none is known."""
        if self._feed is None or self._feed.feeder is None:
            return self._state
        found = self._feed.feeder.state(self._first_sample(step))
        return self._state if found is None else {"of": self._feed.identity, **found}

    def _first_sample(self, step: int) -> int:
        """Return the number of the first sample of a step, counted from 0."""
        return self._experiment.samples_before(step) + self.skipped


# User-defined datasets, whose code only ranks execute: are their samples still those of the start of the run?


def check_user_data(run: RunDir, experiment: Experiment) -> None:
    """Raise `DataError` if a user-defined dataset gives other samples than when the run was started.

    The first and last samples of the training are compared. A dataset whose samples differ from one reading to the next
    cannot be compared, and neither can one that raises. An experiment that names other data asks for the change. Does
    nothing if no dataset is user-defined.
    """
    read = {name: data for name in ("data", "eval_data") if (data := getattr(experiment, name)) is not None}
    if not any(data.is_user_defined for data in read.values()):
        return

    def fingerprint(of: Experiment) -> str | None:
        first, second = (data_fingerprint(of) for _ in range(2))
        return first if first == second else None  # two readings may differ

    names = {name: data.to_json() for name, data in read.items()}
    if run.resume.exists():
        source = RunDir(Path(read_json(run.resume)["checkpoint"]).parent.parent)
        recorded = read_object(source.user_data)
        accepted = read_object(run.environment).get("accepted_changed_data")
        if recorded.get("names") == json.loads(json.dumps(names)) and not accepted:
            before = recorded["fingerprint"]
            found = None if before is None else fingerprint(experiment.replace(steps=recorded["steps"]))
            if found is not None and found != before:
                raise DataError(
                    f"{experiment.data.name} gives other samples than when {source.path.name} was started: its first "
                    f"and last samples have the fingerprint {found[:12]} instead of {before[:12]}. Restore what it "
                    "reads, or continue with the new samples: run.resume(accept_changed_data=True)."
                )
            if source.path.resolve() == run.path.resolve():
                return
    write_json(run.user_data, {"names": names, "steps": experiment.total_steps, "fingerprint": fingerprint(experiment)})
