"""This node measured: matrix products, attention, memory, launches, the host, links; kept, and shareable as JSON.

    calibration = wb.calibrate()               # under a minute, once per machine and torch version
    calibration.save("node.json")              # for a colleague: Calibration.load("node.json").cluster(gpus=8)
    wb.plan(experiment)                        # local_cluster() now plans with it

A device whose constants were fitted to whole training steps (`Device.basis`) keeps them in `local_cluster()`: they
say more than kernels that run alone. `calibration.cluster()` plans with the measurements nevertheless.

Kernels run alone here, and slower inside a step (caches, clocks, neighbours): `IN_TRAINING` is the share of the
measured rates that planning counts on.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from workbench.cost.cluster import Cluster
from workbench.cost.device import CALIBRATED, Device, Link
from workbench.errors import PlanMismatch
from workbench.home import cache_home
from workbench.machine import available_cores, cpu_model
from workbench.measure.local_cluster import CPU_PROCESSES, known_gpu, local_cluster
from workbench.rundir import read_json, write_json
from workbench.units import flops_per_s, gib, is_count

FORMAT = 1
IN_TRAINING = 0.78
"""Of a matrix product's rate when it runs alone: on H200, 613 TFLOP/s fitted to whole steps over 760 to 810 alone."""
LINK_PROBE = "workbench.measure.links"
LINK_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Rates:
    """What kernels of one precision reach."""

    peak_flops: float
    """Of a large matrix product, alone."""
    half_flops: float
    """A product of so many FLOPs reaches half of it."""
    attention_forward: float
    """Share of `peak_flops`."""
    attention_backward: float


@dataclass(frozen=True)
class Calibration:
    """Measurements of one machine under one torch version."""

    device: str
    """As torch names it."""
    kind: str
    torch: str
    devices: int
    measured: str
    """Date, UTC."""
    rates: Mapping[str, Rates]
    """By precision."""
    memory_bandwidth: float
    """Bytes per second of a copy, read plus written."""
    launch_s: float
    block_forward_s: float
    """The host's time around a block that takes the device none."""
    block_backward_s: float
    host_bandwidth: float | None
    """Bytes per second from pinned host memory; None on a CPU."""
    link: Link | None
    """Fitted to all-reduces over all devices; None where there is one."""

    def check(self) -> None:
        """Raise `PlanMismatch` unless this was measured on this hardware under this torch version."""
        import torch

        here, count_here = device_name(), device_count()
        if self.device != here:
            raise PlanMismatch(
                f"The calibration was measured on {self.device} and this machine has {here}. Run wb.calibrate() here, "
                f"or plan for the other machine with calibration.cluster().",
                calibrated=self.device,
                found=here,
            )
        if _release(self.torch) != _release(torch.__version__):
            raise PlanMismatch(
                f"The calibration was measured under torch {self.torch} and this is torch {torch.__version__}, whose "
                f"kernels differ. Run wb.calibrate() again, or install torch {_release(self.torch)}.",
                calibrated=self.torch,
                found=torch.__version__,
            )
        if self.kind == "cuda" and self.devices != count_here:
            raise PlanMismatch(
                f"The calibration was measured with {self.devices} GPUs and this machine shows {count_here}: their "
                f"links may differ. Run wb.calibrate() again.",
                calibrated=self.devices,
                found=count_here,
            )

    def link_instead_of(self, known: Link) -> Link:
        """What was measured, over all devices; of two among more, the share that is `known`."""
        if self.link is None:
            return known
        return replace(self.link, paired=known.paired) if self.devices > 2 else self.link

    def cluster(self, gpus: int | None = None) -> Cluster:
        """The measured machine, or `gpus` devices like its own, to plan for; raises `PlanInfeasible` for no device."""
        chosen = self.devices if gpus is None else gpus
        if self.kind == "cpu":
            base = local_cluster(chosen, calibrated=False)
            return replace(base, device=self.applied_to(base.device, chosen), intra=self.link_instead_of(base.intra))
        known = known_gpu(self.device)
        if known is None:
            base = local_cluster(None, calibrated=False)
            if base.device.name != self.device.removeprefix("NVIDIA "):
                raise PlanMismatch(
                    f"The calibration was measured on {self.device}, whose memory it does not tell: the hardware table "
                    f"lacks it and this machine has {base.device.name}. Plan on the machine that was measured.",
                    calibrated=self.device,
                    found=base.device.name,
                )
            device, intra, inter = base.device, base.intra, base.inter
        else:
            device, intra, inter = known
        cluster = Cluster(self.applied_to(device, chosen), chosen, self.devices, self.link_instead_of(intra), inter)
        return replace(cluster, gpus_per_node=min(cluster.gpus, self.devices))

    def applied_to(self, device: Device, processes: int) -> Device:
        """The device with what was measured in place of the table's assumptions. A GPU's peak stays its data sheet's,
        which MFU is defined by; processes of a CPU share what was measured of all its cores."""
        share = 1 / processes if self.kind == "cpu" else 1.0
        peaks = {precision: found.peak_flops * share for precision, found in self.rates.items()}
        if self.kind == "cuda":
            peaks = dict(device.peak_flops)
        precision = "bf16" if "bf16" in self.rates else "fp32"
        rates = self.rates[precision]
        reached = IN_TRAINING * rates.peak_flops * share / peaks.get(precision, peaks["fp32"])
        efficiency = replace(
            device.efficiency,
            gemm=reached,
            gemm_half_flops=rates.half_flops,
            attention_forward=reached * rates.attention_forward,
            attention_backward=reached * rates.attention_backward,
            bandwidth=1.0,
            launch_s=self.launch_s,
            block_forward_s=self.block_forward_s,
            block_backward_s=self.block_backward_s,
        )
        return replace(
            device,
            peak_flops=peaks,
            memory_bandwidth=self.memory_bandwidth * share,
            efficiency=efficiency,
            host_bandwidth=self.host_bandwidth or device.host_bandwidth,
            basis=CALIBRATED,
        )

    def save(self, path: str | os.PathLike[str]) -> Path:
        """As JSON that `load` reads."""
        file = Path(path).expanduser()
        write_json(file, {"format": FORMAT, **asdict(self)})
        return file

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Calibration:
        """Raises `PlanMismatch` for a file that is not a calibration."""
        try:
            value = read_json(Path(path).expanduser())
            fields = {key: item for key, item in value.items() if key != "format"}
            if value.get("format", FORMAT) > FORMAT:
                raise ValueError(f"format {value['format']}, of a later workbench; this one reads up to {FORMAT}")
            fields["rates"] = {name: Rates(**rates) for name, rates in fields["rates"].items()}
            fields["link"] = None if fields["link"] is None else Link(**fields["link"])
            found = Calibration(**fields)
            _check_figures(found)
            return found
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise PlanMismatch(
                f"{path} is not a calibration ({error}). Run wb.calibrate() and share the file that "
                f"calibration.save(path) writes.",
                path=str(path),
            ) from error

    def __repr__(self) -> str:
        products = ", ".join(f"{flops_per_s(rates.peak_flops)} {name}" for name, rates in self.rates.items())
        link = f", {gib(self.link.bandwidth)}/s between devices" if self.link else ""
        return (
            f"Calibration({self.devices} × {self.device}, torch {self.torch}, {self.measured}: {products}, "
            f"{gib(self.memory_bandwidth)}/s memory{link})"
        )


def _check_figures(found: Calibration) -> None:
    """Raise `ValueError` for a figure that no measurement gives, such as one that is not positive and finite."""
    if found.kind not in ("cuda", "cpu"):
        raise ValueError(f"kind is {found.kind!r}")
    if "fp32" not in found.rates:
        raise ValueError("it has no rates for fp32")
    facts = asdict(found)
    for text in ("device", "kind", "torch", "measured"):
        if not isinstance(facts.pop(text), str):
            raise ValueError(f"{text} is no text")
    for name, part in {**facts.pop("rates"), "link": facts.pop("link") or {}}.items():
        facts |= {f"{name}.{key}": figure for key, figure in part.items()}
    if facts["host_bandwidth"] is None:
        del facts["host_bandwidth"]
    for name, figure in facts.items():
        if isinstance(figure, bool) or not isinstance(figure, (int, float)) or not 0 < figure < float("inf"):
            raise ValueError(f"{name} is {figure!r}")
    if not is_count(found.devices):
        raise ValueError(f"devices is {found.devices!r}")


def calibrate(*, again: bool = False) -> Calibration:
    """Measure this machine, or give what was measured before for this hardware and torch version."""
    found = None if again else kept()
    if found is None:
        found = _measured()
        found.save(_path())
    return found


def kept() -> Calibration | None:
    """What `calibrate` measured earlier on this machine, for this hardware and torch version."""
    try:
        found = Calibration.load(_path())
        found.check()
    except PlanMismatch:
        return None
    return found


def _path() -> Path:
    import torch

    name = "".join(letter if letter.isalnum() else "-" for letter in f"{device_name()}-{torch.__version__}")
    return cache_home() / "calibrations" / f"{name}-{device_count()}.json"


def device_name() -> str:
    """Of the first GPU as torch names it; of a machine without one, its processor and cores."""
    import torch

    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name(0))
    return f"CPU {cpu_model()}, {available_cores()} cores"


def device_count() -> int:
    """GPUs; without any, the processes that `local_cluster` uses."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else CPU_PROCESSES


def _release(version: str) -> str:
    """Without the build: `2.13.0+cu128` is `2.13.0`."""
    return version.partition("+")[0]


# Measuring


def _measured() -> Calibration:
    import torch

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    precisions = ("fp32", "bf16") if kind == "cuda" else ("fp32",)
    forward, backward = _host_seconds(kind)
    return Calibration(
        device=device_name(),
        kind=kind,
        torch=str(torch.__version__),
        devices=device_count(),
        measured=f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
        rates={precision: _rates(kind, precision) for precision in precisions},
        memory_bandwidth=_memory_bandwidth(kind),
        launch_s=_launch_seconds(kind),
        block_forward_s=forward,
        block_backward_s=backward,
        host_bandwidth=_host_bandwidth() if kind == "cuda" else None,
        link=_link(device_count()),
    )


def _seconds(work: Callable[[], Any], kind: str, repeats: int = 5) -> float:
    """The fastest of a few runs after two to warm up."""
    import torch

    best = float("inf")
    for attempt in range(repeats + 2):
        if kind == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        if kind == "cuda":
            torch.cuda.synchronize()
        if attempt >= 2:
            best = min(best, time.perf_counter() - started)
    return best


def _dtype(precision: str) -> Any:
    import torch

    return torch.bfloat16 if precision == "bf16" else torch.float32


def _rates(kind: str, precision: str) -> Rates:
    import torch

    points = []
    for size in (512, 1024, 2048, 4096, 8192) if kind == "cuda" else (64, 128, 256, 512, 1024):
        left = torch.randn(size, size, device=kind, dtype=_dtype(precision))
        points.append((2.0 * size**3, _seconds(partial(torch.mm, left, left), kind)))
    peak, half = fit_products(points)
    forward, backward = _attention_flops(kind, precision)
    return Rates(peak, half, min(1.0, forward / peak), min(1.0, backward / peak))


def fit_products(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Peak FLOP/s and the FLOPs that reach half of it, from (FLOPs, seconds).

    rate = peak · f / (f + half) means seconds = f / peak + half / peak, a line. The largest product gives its slope
    together with the offset that fits the others best; relative errors count.
    """
    flops, seconds = np.array(points).T
    slope, offset = np.polyfit(flops, seconds, 1, w=1 / seconds)
    if slope <= 0 or offset < 0:  # noise hides the offset
        return float((flops / seconds).max()), float(flops.min()) / 100
    return float(1 / slope), float(offset / slope)


def _attention_flops(kind: str, precision: str) -> tuple[float, float]:
    """FLOP/s of fused attention, forward and backward, at the shape of a large transformer."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    batch, heads, tokens, width = (8, 16, 1024, 64) if kind == "cuda" else (1, 4, 256, 64)
    shape = (batch, heads, tokens, width)
    query, key, value = (torch.randn(shape, device=kind, dtype=_dtype(precision), requires_grad=True) for _ in range(3))
    flops = 4.0 * batch * heads * tokens * tokens * width
    with torch.no_grad():
        forward = _seconds(lambda: scaled_dot_product_attention(query, key, value), kind)
    gradient = torch.randn(shape, device=kind, dtype=_dtype(precision))

    def both() -> None:
        torch.autograd.grad(scaled_dot_product_attention(query, key, value), (query, key, value), gradient)

    backward = max(_seconds(both, kind) - forward, forward)
    return flops / forward, 2.5 * flops / backward


def _memory_bandwidth(kind: str) -> float:
    import torch

    source = torch.ones((1 << 30 if kind == "cuda" else 256 << 20) // 4, device=kind)
    target = torch.zeros_like(source)
    return 2 * source.nbytes / _seconds(lambda: target.copy_(source), kind)


def _host_bandwidth() -> float:
    import torch

    source = torch.ones(256 << 20, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device="cuda")
    return source.nbytes / _seconds(lambda: target.copy_(source, non_blocking=True), "cuda")


def _launch_seconds(kind: str, launches: int = 200) -> float:
    """Of one small operation from Python."""
    import torch

    value = torch.zeros(8, device=kind)

    def many() -> None:
        for _ in range(launches):
            value.add_(1.0)

    return _seconds(many, kind) / launches


def _host_seconds(kind: str) -> tuple[float, float]:
    """Forward and backward of a transformer layer so small that only the host takes time; compiled on a GPU, as there
    blocks run compiled."""
    import torch
    from torch import nn

    layer: Any = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True, device=kind)
    run = torch.compile(layer) if kind == "cuda" else layer
    value = torch.randn(1, 8, 32, device=kind, requires_grad=True)
    forward = _seconds(lambda: run(value), kind, repeats=20)
    both = _seconds(lambda: run(value).sum().backward(), kind, repeats=20)
    return forward, max(both - forward, 0.5 * forward)


def _link(devices: int) -> Link | None:
    """α and β of an all-reduce over all devices, from processes of their own; None for one device or on failure."""
    if devices < 2:
        return None
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "times.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={devices}"]
        command += ["-m", LINK_PROBE, str(result)]
        package = str(Path(__file__).resolve().parents[2])
        paths = os.pathsep.join(path for path in (package, os.environ.get("PYTHONPATH", "")) if path)
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        try:
            subprocess.run(command, env=environment, capture_output=True, timeout=LINK_TIMEOUT_S, check=True)
            points = json.loads(result.read_text())
        except (OSError, subprocess.SubprocessError, json.JSONDecodeError):
            return None
    return fit_link(points, devices)


def fit_link(points: Sequence[tuple[float, float]], group: int) -> Link:
    """Latency and bus bandwidth from (bytes, seconds) of all-reduces: t = 2 · steps · α + 2 (g - 1) / g · bytes / β.

    As `workbench.cost.communication` prices them. The largest message gives β, the smallest α.
    """
    ordered = sorted(points)
    steps = 2 * (group - 1).bit_length()
    latency = ordered[0][1] / steps
    size, seconds = ordered[-1]
    moving = max(seconds - steps * latency, 0.5 * seconds)
    return Link(2 * (group - 1) / group * size / moving, latency)
