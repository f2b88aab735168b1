"""The blocks of a model measured on this machine's GPUs before it is planned for: about a minute, once per model.

Each micro-batch is measured by a process of its own, spread over the GPUs; the process that plans never uses one. They
are forked from one process (`execution.block_probe`), which starts before this one imports torch. While this process
captures the model, the probes capture and compile for the micro-batches that they will most likely measure. Once the
model is priced they are told which to measure. Measurements are cached under `$WORKBENCH_HOME/blocks` by model, device
and torch version.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from workbench.base.display import Say, waiting
from workbench.base.machine import cache_home
from workbench.base.tensors import TensorSpec
from workbench.base.user_code import pickled, user_path
from workbench.cost import Cluster, Profile
from workbench.cost.profile import BlockMeasurement, computed_on, corrected_profile
from workbench.experiment import Experiment
from workbench.measure import calibration
from workbench.measure.detection import local_gpu_name
from workbench.models import UserModel
from workbench.record.rundir import read_object, write_json

# The request to the processes that measure a model's blocks: a value without torch, and the names of their files.

MAX_BLOCKS_PER_TYPE = 4
"""Blocks of each type that a probe runs."""
REQUEST = "request.pkl"
"""File in the probes' folder that holds the pickled `ProbeRequest`."""
MICRO_BATCH = "-micro-batch.json"
"""Name, after a probe's number, of the file with the micro-batch that it must measure."""
RESULT = "-blocks.json"
"""Name, after a probe's number, of the file with its measurements, or with the reason why there are none."""
PHASES = "-phases.json"
"""Name, after a probe's number, of the file with the seconds from its start to the end of each of its phases so far."""
DOING = {"built": "is captured", "captured": "is compiled", "compiled": "waits", "assigned": "is measured"}
DOING |= {"measured": "is done"}
"""Words for the work of a probe, by the last phase that has ended."""


@dataclass(frozen=True)
class ProbeRequest:
    """A model and its batch, as training would run them."""

    name: str
    build: Callable[[], Any]
    """Function that makes the `nn.Module`."""
    samples: Mapping[str, TensorSpec]
    """Fields of the batch, for one sample."""
    vocab_size: int
    """Number of different random tokens."""
    labelled: float
    """Share of the random labels that are not ignored."""
    precision: str
    compiled: bool
    deterministic: bool
    micro_batches: tuple[int, ...]
    """Expected micro-batch of each probe, which captures and compiles for it before it is told the final one."""
    examples: Mapping[str, Any] | None = None
    """Batch of real samples to repeat instead of random tokens."""
    loss: Any = None
    """Loss among what forward returns: a name, an index, a function of the outputs and the batch, or None."""

    @staticmethod
    def of(experiment: Experiment, cluster: Cluster) -> ProbeRequest:
        """Return the request for the blocks of an experiment's model on a device of the cluster."""
        likely = likely_micro_batches(cluster, experiment.largest_batch)
        precision, compiled = computed_on(cluster.device, experiment)
        return ProbeRequest(
            experiment.model.name,
            experiment.model.build,
            dict(experiment.reading.batch_specs()),
            experiment.model.vocab_size or int(getattr(experiment.data, "vocab_size", 0)),
            experiment.reading.labelled_share(),
            precision,
            compiled,
            experiment.numerics.deterministic,
            likely,
            experiment.reading.examples(),
            experiment.loss,
        )


FORMAT = 10
"""Version of the cached files."""
PROBE = "workbench.execution.block_probe"
"""Module from whose process the probes are forked."""
TIMEOUT_S = 180.0
"""Seconds after which a probe is given up."""
LONGEST_MS = 300.0
"""Longest analytic time of a probed forward and backward; few devices' shares of a batch take longer."""
SIZES = 3
"""Number of micro-batches that are probed, each a quarter of the one before."""
HELPERS = 2
"""Processes beside each probe that compile some block types for it; fewer if they would take over half of the cores."""
FORKED = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "TORCHINDUCTOR_WORKER_START": "fork"}
"""Variables of the probes: torch finds GPUs without initialising CUDA, which does not survive a fork, and Inductor
forks the processes that compile kernels for a probe. By default each of them would be new, and import torch."""
LOOK_S = 0.1
"""Seconds between two looks whether a probe is done."""
LOG = "log"
"""Name of the file with what all probes print."""


@contextmanager
def measured_blocks(experiment: Experiment, cluster: Cluster | None) -> Iterator[Measured]:
    """Start to measure the blocks of an experiment's model if it is planned for this machine's GPU.

    The processes that measure start first, because they need as long as this process to import torch; they capture and
    compile while the body of the `with` statement captures and prices the model.
    """
    with ExitStack() as stack:
        model, named = experiment.model.name, not isinstance(experiment.model, UserModel)
        on_gpus = has_nvidia_gpus() and (cluster is None or cluster.device.type == "cuda")
        early = on_gpus and not has_cached_measurements(model)
        probes = stack.enter_context(BlockProbes(named)) if early else None
        if cluster is None:
            cluster = calibration.local_cluster()
        request = None
        if cluster.device.type == "cuda" and local_gpu_name() == cluster.device.name:
            request = ProbeRequest.of(experiment, cluster)
        if probes is not None and request is not None:
            probes.ask(request)
        elif probes is not None:
            stack.close()

        def correct(costs: Profile) -> Profile:
            found = cached_measurements(costs, cluster) if cluster.device.type == "cuda" else ()
            if not found and request is not None:
                asked = probes
                if asked is None:
                    asked = stack.enter_context(BlockProbes(named))
                    asked.ask(request)
                device = cluster.device.name
                text = f"Measuring the blocks of {request.name} on this machine's {device}: once, about a minute …"
                print(text, file=sys.stderr, flush=True)
                with waiting(f"measuring the blocks of {request.name} on this machine") as say:
                    found = measure_blocks(asked, costs, cluster, experiment.largest_batch, say)
            return corrected_profile(costs, cluster.device, found) if found else costs

        yield Measured(cluster, correct)


@dataclass(frozen=True)
class Measured:
    """The cluster that a model is planned for, and what measurements make of its profile."""

    cluster: Cluster
    correct: Callable[[Profile], Profile]
    """Return the profile corrected by cached measurements, or by new ones, for which it waits."""


def cached_measurements(profile: Profile, cluster: Cluster) -> tuple[BlockMeasurement, ...]:
    """Return earlier measurements of this model on this device under this torch version, if there are any.

    They may be those of a model with another name; the file has this name, too, from then on.
    """
    path = _cache_path(profile, cluster)
    found, names = _read_measurements(path), read_object(path).get("models", [])
    if found and profile.model not in names:
        write_json(path, {**read_object(path), "models": [*names, profile.model]})
    return found


def has_nvidia_gpus() -> bool:
    """Return True if this machine shows NVIDIA GPUs to this process: a guess that needs no torch."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") != "" and any(Path("/dev").glob("nvidia[0-9]*"))


def has_cached_measurements(model: str) -> bool:
    """Return True if a model of that name was measured here, on whatever device: a guess that needs no capture."""
    return any(model in read_object(path).get("models", ()) for path in (cache_home() / "blocks").glob("*.json"))


def measure_blocks(
    probes: BlockProbes, profile: Profile, cluster: Cluster, global_batch: int, say: Say = lambda _: None
) -> tuple[BlockMeasurement, ...]:
    """Measure every block type of `profile` on this machine's device, and cache the measurements.

    `say` is told what each probe does. Warns and returns nothing if nothing can be measured (a GPU in use, too little
    memory).
    """
    measurements, reasons = probes.measure(probed_micro_batches(profile, cluster, global_batch), say)
    if measurements:
        blocks = [vars(one) for one in measurements]
        content = {"format": FORMAT, "models": [profile.model], "blocks": blocks, "seconds": probes.seconds}
        write_json(_cache_path(profile, cluster), content)
    else:
        warnings.warn(
            f"The blocks of {profile.model} could not be measured on this machine ({'; '.join(reasons)}). The plan is "
            "made from the device's constants instead; plan again once a GPU is free.",
            stacklevel=2,
        )
    return measurements


def probed_micro_batches(profile: Profile, cluster: Cluster, global_batch: int) -> tuple[int, ...]:
    """Return the micro-batches to measure: powers of two, descending by quarters.

    The largest is a device's share of the global batch, or less where that takes longer than `LONGEST_MS`. Sizes
    between two are interpolated, so a size that nobody would run would mislead.
    """
    counts = Counter(block.block_type for block in profile.blocks)

    def chain_ms(size: int) -> float:
        times = ((count, profile.analytic_ms(index, size, cluster.device)) for index, count in counts.items())
        return sum(min(count, MAX_BLOCKS_PER_TYPE) * sum(each) for count, each in times)

    largest = likely_micro_batches(cluster, global_batch)[0]
    while largest > 1 and chain_ms(largest) > LONGEST_MS:
        largest //= 2
    return _quarters(largest)


def likely_micro_batches(cluster: Cluster, global_batch: int) -> tuple[int, ...]:
    """Return `probed_micro_batches` as expected before the model is captured: right if they are quick enough."""
    share = max(1, global_batch // cluster.gpus)
    return _quarters(1 << (share.bit_length() - 1))


def _quarters(largest: int) -> tuple[int, ...]:
    return tuple(dict.fromkeys(max(1, largest // 4**index) for index in range(SIZES)))


def _cache_path(profile: Profile, cluster: Cluster) -> Path:
    how = [profile.precision, profile.compiled, profile.labelled_share, profile.deterministic]
    what = [FORMAT, profile.signature, profile.code, *sorted(profile.frozen), *how, cluster.device.name]
    key = hashlib.sha256(json.dumps([*what, metadata.version("torch").partition("+")[0]]).encode()).hexdigest()[:16]
    return cache_home() / "blocks" / f"{key}.json"


def _read_measurements(path: Path) -> tuple[BlockMeasurement, ...]:
    try:
        return tuple(BlockMeasurement(**one) for one in read_object(path)["blocks"])
    except (KeyError, TypeError):
        return ()


class BlockProbes:
    """Processes that measure the blocks of one model, one for each micro-batch.

    The process that they are forked from imports what they need as soon as it starts. `ask` gives them the model, so
    that they compile for the expected micro-batches, and `measure` tells them the final ones. As a context, it kills
    what still runs at its end.
    """

    def __init__(self, named: bool = False) -> None:
        """A `named` model is built by transformers, which is imported before the probes are asked."""
        self._folder = tempfile.TemporaryDirectory(prefix="workbench-probe-")
        # Told to import the user's modules from where this process does, since the model is pickled by name.
        environment = FORKED | dict(os.environ) | {"PYTHONPATH": os.pathsep.join(user_path())}
        command = [sys.executable, "-m", PROBE, str(self._path), str(int(named))]
        with (self._path / LOG).open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        self.seconds: list[dict[str, float]] = []
        """Seconds from the start of the probes to the end of each phase, for each probe that measured."""

    def ask(self, request: ProbeRequest) -> None:
        """Let the probes capture and compile for the expected micro-batches."""
        partial_file = self._path / f"{REQUEST}.part"
        partial_file.write_bytes(pickled("model", request))
        partial_file.rename(self._path / REQUEST)

    def __enter__(self) -> BlockProbes:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):  # all of them have ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._folder.cleanup()

    def measure(
        self, sizes: Sequence[int], say: Say = lambda _: None
    ) -> tuple[tuple[BlockMeasurement, ...], list[str]]:
        """Return measurements at these micro-batches (no more than were expected), and a reason for each failure."""
        for slot, size in enumerate(sizes):
            write_json(self._path / f"{slot}{MICRO_BATCH}", size)
        measurements: list[BlockMeasurement] = []
        reasons: list[str] = []
        for slot, size in enumerate(sizes):
            blocks, reason = self._result(slot, lambda: say(self._progress(sizes)))
            measurements += blocks
            reasons += [f"micro-batch {size}: {reason}"] if reason else []
        return tuple(measurements), reasons

    def _progress(self, sizes: Sequence[int]) -> str:
        """Return what each probe does, such as `"micro-batch 32 is compiled, 8 is measured, 2 is done"`."""
        ended = [list(read_object(self._path / f"{slot}{PHASES}")) for slot in range(len(sizes))]
        doing = (DOING.get(phases[-1], "is built") if phases else "is built" for phases in ended)
        return f"micro-batch {', '.join(f'{size} {words}' for size, words in zip(sizes, doing, strict=True))}"

    @property
    def _path(self) -> Path:
        return Path(self._folder.name)

    def _result(self, slot: int, look: Callable[[], None]) -> tuple[tuple[BlockMeasurement, ...], str]:
        file, deadline = self._path / f"{slot}{RESULT}", time.monotonic() + TIMEOUT_S
        while not file.exists():
            look()
            if self._process.poll() is not None and not file.exists():
                lines = (self._path / LOG).read_text(errors="replace").strip().splitlines()
                return (), lines[-1][:200] if lines else f"exit status {self._process.returncode}"
            if time.monotonic() > deadline:
                return (), f"no result after {TIMEOUT_S:.0f} s"
            time.sleep(LOOK_S)
        blocks = _read_measurements(file)
        if not blocks:
            return (), str(read_object(file).get("reason"))
        self.seconds.append(read_object(self._path / f"{slot}{PHASES}"))
        return blocks, ""
