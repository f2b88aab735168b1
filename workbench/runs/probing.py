"""The blocks of a model measured on this machine's GPUs before it is planned for: seconds, once per model and device.

Each micro-batch is a process of its own (`execution.block_probe`), spread over the GPUs; the kernel that plans never
touches one. What was measured is kept under `$WORKBENCH_HOME/blocks` for this model, device and torch version.
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

from workbench.cost import Cluster, Profile
from workbench.cost.detect import local_gpus
from workbench.cost.measured import Measurement
from workbench.execution.probe_request import KEPT, Request
from workbench.home import cache_home
from workbench.rundir import read_json, write_json
from workbench.runs.launcher import pickled, user_path

FORMAT = 2
PROBE = "workbench.execution.block_probe"
TIMEOUT_S = 180.0
LONGEST_MS = 120.0
"""A probed forward and backward is planned to take no longer."""
SIZES = 3
"""Micro-batches that are probed, each a quarter of the one before."""


def kept_blocks(profile: Profile, cluster: Cluster) -> tuple[Measurement, ...]:
    """What was measured earlier of this model on this kind of device, under this torch version; perhaps nothing."""
    return _read(_kept_at(profile, cluster))


def measured_blocks(request: Request, profile: Profile, cluster: Cluster, global_batch: int) -> tuple[Measurement, ...]:
    """Every kind of block of `profile` measured on this machine's device, and kept.

    What cannot be measured (a GPU in use, too little memory) is left out, with a warning where nothing is left.
    """
    path = _kept_at(profile, cluster)
    text = f"Measuring the blocks of {profile.model} on this machine's {cluster.device.name}: once, under a minute …"
    print(text, file=sys.stderr, flush=True)
    found, reasons = _probe(
        request, micro_batches(profile, cluster, global_batch), local_gpus() if cluster.device.kind == "cuda" else [""]
    )
    if found:
        write_json(path, {"format": FORMAT, "model": profile.model, "blocks": [one.to_json() for one in found]})
    else:
        warnings.warn(
            f"The blocks of {profile.model} could not be measured on this machine ({'; '.join(reasons)}). The plan is "
            "made from the device's constants instead; plan again once a GPU is free.",
            stacklevel=2,
        )
    return found


def micro_batches(profile: Profile, cluster: Cluster, global_batch: int) -> tuple[int, ...]:
    """Powers of two, descending by quarters from the largest that is quick enough to probe."""
    kinds = Counter(block.kind for block in profile.blocks)

    def chain_ms(size: int) -> float:
        costs = ((count, profile.priced_ms(kind, size, cluster.device)) for kind, count in kinds.items())
        return sum(min(count, KEPT) * sum(times) for count, times in costs)

    largest = 1
    while 2 * largest <= global_batch and chain_ms(2 * largest) <= LONGEST_MS:
        largest *= 2
    return tuple(dict.fromkeys(max(1, largest // 4**index) for index in range(SIZES)))


def _kept_at(profile: Profile, cluster: Cluster) -> Path:
    how = [profile.precision, profile.compiled, profile.labelled_share]
    what = [FORMAT, profile.signature, *how, cluster.device.name]
    key = hashlib.sha256(json.dumps([*what, metadata.version("torch").partition("+")[0]]).encode()).hexdigest()[:16]
    return cache_home() / "blocks" / f"{key}.json"


def _read(path: Path) -> tuple[Measurement, ...]:
    try:
        return tuple(Measurement(**one) for one in read_json(path)["blocks"])
    except (OSError, json.JSONDecodeError, KeyError, TypeError):
        return ()


def _probe(request: Request, sizes: Sequence[int], gpus: Sequence[str]) -> tuple[tuple[Measurement, ...], list[str]]:
    """The measurements of every size, and why those that lack do."""
    with tempfile.TemporaryDirectory(prefix="workbench-probe-") as name:
        folder = Path(name)
        (folder / "request.pkl").write_bytes(pickled("model", request))
        started = [(size, _start(folder, size, gpus[index % len(gpus)])) for index, size in enumerate(sizes)]
        found: list[Measurement] = []
        reasons: list[str] = []
        try:
            for size, process in started:
                blocks, reason = _finished(folder, size, process)
                found += blocks
                reasons += [f"micro-batch {size}: {reason}"] if reason else []
        finally:
            for _, process in started:  # still there if this was interrupted
                process.kill()
                process.wait()
        return tuple(found), reasons


def _start(folder: Path, size: int, gpu: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", PROBE, str(folder / "request.pkl"), str(size), str(folder / f"{size}.json")]
    environment: Mapping[str, str] = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(user_path()),
        "CUDA_VISIBLE_DEVICES": gpu,
    }
    with (folder / f"{size}.log").open("wb") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)


def _finished(folder: Path, size: int, process: subprocess.Popen[bytes]) -> tuple[list[Measurement], str]:
    try:
        process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return [], f"no result after {TIMEOUT_S:.0f} s"
    try:
        blocks: list[dict[str, Any]] = json.loads((folder / f"{size}.json").read_text())
    except (OSError, json.JSONDecodeError):
        lines = (folder / f"{size}.log").read_text(errors="replace").strip().splitlines()
        return [], lines[-1][:200] if lines else f"exit status {process.returncode}"
    return [Measurement(**block) for block in blocks], ""
