"""The blocks of a model measured on this machine's GPUs before it is planned for: seconds, once per model and device.

Each micro-batch is a process of its own (`execution.block_probe`), spread over the GPUs; the kernel that plans never
touches one. They start before the kernel imports torch; while it captures the model they work on the micro-batches
that they guess; once it is priced they are told which to measure. That is kept under `$WORKBENCH_HOME/blocks` for this
model, device and torch version.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from workbench.cost import Cluster, Device, Profile
from workbench.cost.correction import BlockMeasurement
from workbench.home import cache_home
from workbench.machine import available_cores
from workbench.measure.probe_request import KEPT, MICRO_BATCH, REQUEST, RESULT, ProbeRequest
from workbench.rundir import read_json, write_json
from workbench.user_code import pickled, user_path

FORMAT = 7
PROBE = "workbench.execution.block_probe"
TIMEOUT_S = 180.0
LONGEST_MS = 300.0
"""A probed forward and backward is planned to take no longer; few devices' shares of a batch do."""
SIZES = 3
"""Micro-batches that are probed, each a quarter of the one before."""
HELPERS = 2
"""Processes beside each probe that compile some kinds of blocks for it; fewer where they would take more than half of
this machine's cores."""


def cached_measurements(profile: Profile, cluster: Cluster) -> tuple[BlockMeasurement, ...]:
    """What was measured earlier of this model on this kind of device, under this torch version; perhaps nothing."""
    return _read(_kept_at(profile, cluster))


def has_nvidia_gpus() -> bool:
    """Whether this machine has NVIDIA GPUs that this process may see, asked without torch: a cheap guess."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") != "" and any(Path("/dev").glob("nvidia[0-9]*"))


def has_cached_measurements(model: str) -> bool:
    """Whether blocks of a model of that name were measured here, for whatever device and version: a cheap guess."""
    return any(_content(path).get("model") == model for path in (cache_home() / "blocks").glob("*.json"))


def measure_blocks(
    probes: BlockProbes, profile: Profile, cluster: Cluster, global_batch: int
) -> tuple[BlockMeasurement, ...]:
    """Every kind of block of `profile` measured on this machine's device, and kept.

    What cannot be measured (a GPU in use, too little memory) is left out, with a warning where nothing is left.
    """
    found, reasons = probes.measure(probed_micro_batches(profile, cluster, global_batch))
    if found:
        blocks = [one.to_json() for one in found]
        kept = {"format": FORMAT, "model": profile.model, "blocks": blocks, "seconds": probes.seconds}
        write_json(_kept_at(profile, cluster), kept)
    else:
        warnings.warn(
            f"The blocks of {profile.model} could not be measured on this machine ({'; '.join(reasons)}). The plan is "
            "made from the device's constants instead; plan again once a GPU is free.",
            stacklevel=2,
        )
    return found


def probed_micro_batches(profile: Profile, cluster: Cluster, global_batch: int) -> tuple[int, ...]:
    """Powers of two, descending by quarters from the largest that is quick enough to probe and that devices would run
    if they shared the batch; what is between two sizes is interpolated, so a size that nobody runs would mislead."""
    kinds = Counter(block.block_type for block in profile.blocks)

    def chain_ms(size: int) -> float:
        costs = ((count, profile.priced_ms(kind, size, cluster.device)) for kind, count in kinds.items())
        return sum(min(count, KEPT) * sum(times) for count, times in costs)

    largest = likely_micro_batches(cluster, global_batch)[0]
    while largest > 1 and chain_ms(largest) > LONGEST_MS:
        largest //= 2
    return _quarters(largest)


def likely_micro_batches(cluster: Cluster, global_batch: int) -> tuple[int, ...]:
    """What `micro_batches` will be, said before the model is captured: right where they are quick enough."""
    share = max(1, global_batch // cluster.gpus)
    return _quarters(1 << (share.bit_length() - 1))


def _quarters(largest: int) -> tuple[int, ...]:
    return tuple(dict.fromkeys(max(1, largest // 4**index) for index in range(SIZES)))


def _kept_at(profile: Profile, cluster: Cluster) -> Path:
    how = [profile.precision, profile.compiled, profile.labelled_share, profile.deterministic]
    what = [FORMAT, profile.signature, profile.code, *sorted(profile.frozen), *how, cluster.device.name]
    key = hashlib.sha256(json.dumps([*what, metadata.version("torch").partition("+")[0]]).encode()).hexdigest()[:16]
    return cache_home() / "blocks" / f"{key}.json"


def _read(path: Path) -> tuple[BlockMeasurement, ...]:
    try:
        return tuple(BlockMeasurement(**one) for one in _content(path)["blocks"])
    except (KeyError, TypeError):
        return ()


def _content(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path)
    except (OSError, json.JSONDecodeError):
        return {}
    return found if isinstance(found, dict) else {}


class BlockProbes:
    """Processes for one model, one for each micro-batch that will be measured. They begin to import what they need;
    once asked, they begin with what they guess these are.

    A context: what still runs at its end is killed.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="workbench-probe-")
        self._processes = [self._start(slot) for slot in range(SIZES)]
        count = max(0, min(HELPERS, available_cores() // (2 * SIZES) - 1))
        self._helpers = [[self._start(slot, one + 1, count) for one in range(count)] for slot in range(SIZES)]
        self.seconds: list[dict[str, float]] = []
        """Of each probe that measured: how long after its start each thing was done."""

    def ask(self, request: ProbeRequest, device: Device) -> None:
        """Let them work on what they will most likely be told to measure."""
        asked = len(request.micro_batches) if request.compiled else 0
        _end([helper for helpers in self._helpers[asked:] for helper in helpers])
        _end(self._processes[len(request.micro_batches) :])
        del self._helpers[asked:], self._processes[len(request.micro_batches) :]
        whole = self._path / f"{REQUEST}.part"
        whole.write_bytes(pickled("model", request))
        whole.rename(self._path / REQUEST)
        text = f"Measuring the blocks of {request.name} on this machine's {device.name}: once, about a minute …"
        print(text, file=sys.stderr, flush=True)

    def __enter__(self) -> BlockProbes:
        return self

    def __exit__(self, *_: object) -> None:
        _end([*self._processes, *(helper for helpers in self._helpers for helper in helpers)])
        self._folder.cleanup()

    def measure(self, sizes: Sequence[int]) -> tuple[tuple[BlockMeasurement, ...], list[str]]:
        """The measurements at no more micro-batches than were guessed, and why those that lack do."""
        assert len(sizes) <= len(self._processes)
        for slot, size in enumerate(sizes):
            write_json(self._path / f"{slot}{MICRO_BATCH}", size)
        found: list[BlockMeasurement] = []
        reasons: list[str] = []
        for slot, size in enumerate(sizes):
            blocks, reason = self._finished(slot)
            found += blocks
            reasons += [f"micro-batch {size}: {reason}"] if reason else []
        return tuple(found), reasons

    @property
    def _path(self) -> Path:
        return Path(self._folder.name)

    def _start(self, slot: int, helper: int = 0, helpers: int = 0) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", PROBE, str(self._path), str(slot), str(helper), str(helpers)]
        environment: Mapping[str, str] = {**os.environ, "PYTHONPATH": os.pathsep.join(user_path())}
        with (self._path / f"{slot}{'.helper' * bool(helper)}.log").open("ab") as log:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)

    def _finished(self, slot: int) -> tuple[list[BlockMeasurement], str]:
        process = self._processes[slot]
        try:
            process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return [], f"no result after {TIMEOUT_S:.0f} s"
        blocks = _read(self._path / f"{slot}{RESULT}")
        if not blocks:
            lines = (self._path / f"{slot}.log").read_text(errors="replace").strip().splitlines()
            return [], lines[-1][:200] if lines else f"exit status {process.returncode}"
        self.seconds.append(_content(self._path / f"{slot}{RESULT}").get("seconds", {}))
        return list(blocks), ""


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
        process.wait()
