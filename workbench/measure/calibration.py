"""The speed of this node, measured by `wb.measure.calibrate` in under a minute, cached, and shareable as JSON.

    calibration = wb.measure.calibrate()               # once per machine and torch version
    wb.plan(experiment)                        # local_cluster() now plans with it
    calibration.save("node.json")              # for a colleague: Calibration.load("node.json").cluster(gpus=8)

`local_cluster()` does not apply it to a device whose constants were fitted to whole training steps (`Device.basis`),
because those are better than kernels that run alone. `calibration.cluster()` applies it to every device.
"""

from __future__ import annotations

import datetime
import functools
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated

from workbench.base.arguments import checked_arguments
from workbench.base.errors import PlanMismatch
from workbench.base.machine import available_cores, cache_home, cpu_model
from workbench.base.units import flops_per_s, gib
from workbench.base.validation import (
    AfterValidator,
    ConfigDict,
    Field,
    PlainValidator,
    TypeAdapter,
    ValidationError,
    first_problem,
    known,
)
from workbench.cost.hardware import CALIBRATED, FITTED, Cluster, Link, Node
from workbench.measure.detection import (
    CPU_PROCESSES,
    LoadWatch,
    attention_rates,
    block_host_seconds,
    copy_rate,
    detected_cluster,
    host_rate,
    in_words,
    is_doubtful,
    is_quiet,
    launch_seconds,
    measured_together,
    product_rates,
)
from workbench.record.rundir import read_json, write_json

FORMAT = 3
"""Version of the JSON file."""
IN_TRAINING = 0.78
"""Ratio of a product's rate in training to its rate alone: caches, clocks and neighbouring kernels slow it down.

Measured on H200: 613 TFLOP/s fitted to whole steps, 760 to 810 TFLOP/s alone.
"""


def _measured_link(link: Link) -> Link:
    if not all(0 < figure < float("inf") for figure in vars(link).values()):
        raise ValueError(f"{link} has a figure that is not positive and finite")
    return link


Measured = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class Calibration:
    """Measurements of one machine under one torch version."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    device: str
    """Name of the device as torch reports it."""
    device_type: Annotated[str, PlainValidator(known(("cuda", "cpu")))]
    """`cuda` or `cpu`."""
    torch: str
    devices: Annotated[int, Field(ge=1)]
    measured: str
    """Date, UTC."""
    precision: Annotated[str, PlainValidator(known(("bf16", "fp32")))]
    """Precision of the products and of attention: bf16 on a GPU, fp32 on a CPU."""
    product_flops: Measured
    """FLOP/s of a large matrix product that runs alone; on a CPU, that all processes reach together."""
    product_half_flops: Measured
    """FLOPs of a product that reaches half of `product_flops`."""
    attention_forward: Measured
    """Share of `product_flops` that fused attention reaches in a forward."""
    attention_backward: Measured
    """Share of `product_flops` that fused attention reaches in a backward."""
    memory_bandwidth: Measured
    """Bytes per second of a copy, read plus written; on a CPU, that all processes reach together."""
    launch_s: Measured
    """Seconds between two operations that Python launches."""
    block_forward_s: Measured
    """Host time in seconds of the forward of a block that takes the device no time."""
    block_backward_s: Measured
    """Host time in seconds of the backward of such a block."""
    host_bandwidth: Measured | None
    """Bytes per second from pinned host memory; None on a CPU."""
    link: Annotated[Link, AfterValidator(_measured_link)] | None
    """Link fitted to all-reduces over all devices; None for a single device."""
    beside: Measured = 1.0
    """Rate of a copy of one CPU process while the others copy too, over its rate alone: they share the memory."""
    circumstances: Mapping[str, Share] = field(default_factory=dict, hash=False)
    """When this was measured, and the share of the cores that other processes took (`workbench.measure.detection`)."""

    def cluster(self, gpus: int | None = None) -> Cluster:
        """Return the measured machine, or `gpus` devices like its own.

        Raises `PlanInfeasible` for no device, `PlanMismatch` for a GPU that neither the hardware table nor this machine
        has, because the calibration does not hold its memory.
        """
        chosen = self.devices if gpus is None else gpus
        if self.device_type == "cpu":
            return self.applied_to(detected_cluster(chosen))
        listed = Node.of_card(self.device) or detected_cluster(None)
        if isinstance(listed, Cluster) and listed.device.name != self.device.removeprefix("NVIDIA "):
            raise PlanMismatch(
                f"The calibration was measured on {self.device}, which the hardware table lacks, and this machine "
                f"has {listed.device.name}: its memory size is unknown. Plan on the machine that was measured."
            )
        whole = Cluster(listed.device, chosen, self.devices, listed.intra, listed.inter)
        return self.applied_to(replace(whole, gpus_per_node=min(whole.gpus, self.devices)))

    def applied_to(self, cluster: Cluster) -> Cluster:
        """Return the cluster with measured speeds and links in place of the hardware table's assumptions.

        A GPU's peak stays that of its data sheet, which defines MFU. CPU processes share what was measured of all
        cores.
        """
        device = cluster.device
        share = 1 / cluster.gpus if self.device_type == "cpu" else 1.0
        product_flops = self.product_flops * share
        peaks = dict(device.peak_flops) if self.device_type == "cuda" else {self.precision: product_flops}
        gemm = IN_TRAINING * product_flops / peaks.get(self.precision, peaks["fp32"])
        efficiency = replace(
            device.efficiency,
            gemm=gemm,
            gemm_half_flops=self.product_half_flops,
            attention_forward=gemm * self.attention_forward,
            attention_backward=gemm * self.attention_backward,
            bandwidth=1.0,
            launch_s=self.launch_s,
            block_forward_s=self.block_forward_s,
            block_backward_s=self.block_backward_s,
        )
        measured = replace(
            device,
            peak_flops=peaks,
            memory_bandwidth=self.memory_bandwidth * share,
            efficiency=efficiency,
            host_bandwidth=self.host_bandwidth or device.host_bandwidth,
            basis=CALIBRATED,
            measured=in_words(self.circumstances),
        )
        link = self.link or cluster.intra
        if self.devices > 2:  # Only two devices can measure the share of bandwidth that an all-reduce of two reaches.
            link = replace(link, paired=cluster.intra.paired)
        return replace(cluster, device=measured, intra=link)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write JSON that `load` reads, and return its path."""
        file = Path(path).expanduser()
        write_json(file, {"format": FORMAT, **asdict(self)})
        return file

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Calibration:
        """Read a calibration; raises `PlanMismatch` for another file, or for a figure that no measurement gives."""
        try:
            fields = read_json(Path(os.path.realpath(Path(path).expanduser())))
            file_format = fields.pop("format")
            if file_format != FORMAT:
                raise ValueError(f"its format is {file_format}, and this workbench reads format {FORMAT}")
            return _stored().validate_json(json.dumps(fields), strict=True)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            said = first_problem(error) if isinstance(error, ValidationError) else error
            raise PlanMismatch(
                f"{path} is not a calibration ({said}). Run wb.measure.calibrate() and share the file that "
                f"calibration.save(path) writes."
            ) from error

    def __repr__(self) -> str:
        link = f", {gib(self.link.bandwidth)}/s between devices" if self.link else ""
        link += f", {self.beside:.2f} of a copy's rate beside the others" if self.device_type == "cpu" else ""
        when = in_words(self.circumstances) or f" on {self.measured}"
        return (
            f"Calibration({self.devices} × {self.device}, torch {self.torch}: {flops_per_s(self.product_flops)} "
            f"{self.precision}, {gib(self.memory_bandwidth)}/s memory{link}; measured{when})"
        )


@functools.cache
def _stored() -> TypeAdapter[Calibration]:
    """Return what checks the type and the range of everything in a calibration that is read."""
    return TypeAdapter(Calibration)


@checked_arguments
def calibrate(*, again: bool = False) -> Calibration:
    """Measure this machine once: matrix products, attention, memory, kernel launches, and links between devices.

    The result is cached for this hardware and torch version, and `wb.measure.local_cluster()` uses it from then on;
    `again=True` measures again, and so does a call on a quiet machine if the earlier one was made beside much other
    work, or if a run that has finished since contradicts it. `.save(path)` writes it to a file, and
    `Calibration.load(path).cluster(gpus=8)` plans for this machine on another one.
    """
    calibration = None if again else cached_calibration()
    if calibration is None or (is_doubtful(calibration.circumstances) and is_quiet()):
        calibration = _measured()
        calibration.save(_cache_path())
    return calibration


def cached_calibration() -> Calibration | None:
    """Return what `calibrate` measured earlier for this hardware and torch version."""
    try:
        return Calibration.load(_cache_path())
    except PlanMismatch:
        return None


def _cache_path() -> Path:
    import torch

    name, count = _device_name_and_count()
    words = "".join(letter if letter.isalnum() else "-" for letter in f"{name}-{torch.__version__}")
    return cache_home() / "calibrations" / f"{words}-{count}.json"


def _device_name_and_count() -> tuple[str, int]:
    """Return torch's name and the number of the GPUs; without any, the processor and `local_cluster`'s processes."""
    import torch

    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name(0)), torch.cuda.device_count()
    return f"CPU {cpu_model()}, {available_cores()} cores", CPU_PROCESSES


def _measured() -> Calibration:
    import torch

    device_type, precision = ("cuda", "bf16") if torch.cuda.is_available() else ("cpu", "fp32")
    name, count = _device_name_and_count()
    block_forward_s, block_backward_s = block_host_seconds(device_type)
    watch = LoadWatch()
    product_flops, product_half_flops = product_rates(device_type, precision)
    memory_bandwidth = copy_rate(1 << 30 if device_type == "cuda" else 256 << 20, device_type)
    together = measured_together(count)
    if together and device_type == "cpu":
        product_flops, memory_bandwidth = together["product_flops"], together["memory_bandwidth"]
    forward, backward = attention_rates(device_type, precision)
    return Calibration(
        device=name,
        device_type=device_type,
        torch=str(torch.__version__),
        devices=count,
        measured=f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
        precision=precision,
        product_flops=product_flops,
        product_half_flops=product_half_flops,
        attention_forward=min(1.0, forward / product_flops),
        attention_backward=min(1.0, backward / product_flops),
        memory_bandwidth=memory_bandwidth,
        launch_s=launch_seconds(device_type),
        block_forward_s=block_forward_s,
        block_backward_s=block_backward_s,
        host_bandwidth=host_rate() if device_type == "cuda" else None,
        link=together.get("link"),
        beside=together.get("beside", 1.0),
        circumstances=watch.facts(),
    )


@checked_arguments
def local_cluster(processes: int | None = None) -> Cluster:
    """Return this machine as a `Cluster`: its CUDA GPUs or, without any, `processes` (2) CPU processes.

    What `wb.measure.calibrate` measured on this machine is applied, unless the device's constants were fitted to whole
    training steps. Raises `PlanInfeasible` if `processes` exceeds the number of GPUs.
    """
    cluster = detected_cluster(processes)
    calibration = None if cluster.device.basis == FITTED else cached_calibration()
    return cluster if calibration is None else calibration.applied_to(cluster)
