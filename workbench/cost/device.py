"""Devices and the links between them, as plain values; importing this loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Efficiency:
    """The share of a data sheet's figures that training reaches on a device, and the host's time beside it.

    The defaults are those of a GPU that was never measured; those of the H200 were fitted to measured training steps
    (docs/cost.md).
    """

    gemm: float = 0.75
    """Share of peak FLOP/s that a large matrix product reaches."""
    gemm_half_flops: float = 2e9
    """FLOPs of a product that reaches half of `gemm`: share = gemm * f / (f + gemm_half_flops)."""
    attention_forward: float = 0.45
    """Share of peak that the fused attention kernel's forward reaches (FlashAttention-2, arXiv:2307.08691, fig. 4)."""
    attention_backward: float = 0.35
    """Share of peak that the fused attention kernel's backward reaches."""
    bandwidth: float = 0.85
    """Share of the memory bandwidth that memory-bound kernels reach."""
    launch_s: float = 6e-6
    """Least time between two kernels in seconds, when Python launches each operation."""
    compiled_launch_s: float = 2.5e-6
    """Least time between two kernels of one compiled block, in seconds."""
    block_forward_s: float = 0.8e-3
    """Least host time of one block's forward in seconds: hooks, guards, autograd nodes, launches.

    Used for blocks that were not measured. The value is that of a BERT layer of width 1920 on the host of 4 H200.
    """
    block_backward_s: float = 1.0e-3
    """Least host time of one block's backward, in seconds."""
    selective_recompute: float = 0.4
    """Share of its time alone that selective recomputation adds to a compiled backward, whose kernels it is fused with.

    Measured as 0.30 to 0.42 in three pairs of plans on one H200 (benchmarks/prediction.py).
    """
    overlapped_link: float = 0.6
    """Share of a link's bandwidth that collectives reach while the device also computes."""
    in_step: float = 1.05
    """Ratio of a block's time in a step of several devices to its time in a probe: a step waits for the slowest one."""
    host_in_step: float = 0.95
    """Ratio of the host's time for a block in a training step to that in a probe.

    Fitted, with `action_s`, to two pipelines of a BERT of 2.5 B parameters on 4 H200.
    """
    action_s: float = 1.0e-3
    """Host time in seconds that a pipeline adds to each forward and backward of a stage: schedule, sends, receives."""
    sharded_block_s: float = 1.0e-3
    """Host time in seconds that FSDP2 adds to each forward and backward of a block."""
    collective_s: float = 80e-6
    """Host time in seconds that an all-reduce inside a block adds: its launch and the synchronisation of streams.

    Measured as 54 to 91 µs on 4 H200 (benchmarks/collectives.py).
    """
    captured_block_s: float = 0.1e-3
    """Host time in seconds to launch the forward or the backward of a block that is captured as a CUDA graph."""
    captured_action_s: float = 0.6e-3
    """Value that replaces `action_s` where blocks are captured as CUDA graphs, in seconds.

    Fitted, with `captured_block_s`, to 8 BERT layers in pipelines of 2 H200 (benchmarks/cuda_graphs.py): 14.8 ms for 16
    actions, 24.9 ms for 32.
    """


DATA_SHEET, FITTED, TIMED, CALIBRATED = "data sheet", "fitted", "timed", "calibrated"
"""Values of `Device.basis`: the data sheet alone; fitted to training steps; one product and one copy timed on this
machine; `wb.measure.calibrate`."""

FRAGMENTATION = 0.06
"""Share of a device's memory that the caching allocator cannot hand out.

Of 138 GiB on H200, a BERT of 2.5 B parameters ran at full speed with 132.5 GiB in use and one of 4.8 B with 131.8 GiB;
with 132.3 GiB the larger one ran at half its speed.
"""


@dataclass(frozen=True)
class Device:
    """One accelerator."""

    name: str
    type: str
    """Device type as torch names it: `cuda` or `cpu`."""
    memory_bytes: int
    """Bytes that one process can allocate on an otherwise idle device."""
    peak_flops: Mapping[str, float] = field(hash=False)
    """Dense FLOP/s by precision (`fp32`, `bf16`)."""
    memory_bandwidth: float
    """Bytes per second, read plus written."""
    reserved_bytes: int = 0
    """Bytes outside the allocator: the CUDA context, work areas of libraries, NCCL's channels."""
    efficiency: Efficiency = Efficiency()
    host_bandwidth: float = 20e9
    """Bytes per second between device and host memory, each way (PCIe 4.0 × 16 less overheads)."""
    shared_host_bandwidth: float | None = None
    """Bytes per second, each way, that all devices of a node reach together, if that is less; None if unknown."""
    basis: str = DATA_SHEET
    """Origin of the speeds: `DATA_SHEET`, `FITTED`, `TIMED` or `CALIBRATED`."""
    measured: str = ""
    """When this machine's speeds were measured and beside how much other work, in words that follow "timed"."""

    def peak(self, precision: str) -> float:
        """Return the dense FLOP/s at `precision`; a device without bf16 units computes bf16 at its fp32 rate."""
        return self.peak_flops.get(precision, self.peak_flops["fp32"])

    @property
    def usable_bytes(self) -> int:
        """Bytes that tensors can fill: memory less `reserved_bytes`, less what fragmentation wastes."""
        return max(0, int((self.memory_bytes - self.reserved_bytes) * (1 - FRAGMENTATION)))

    def scaled(self, factor: float) -> Device:
        """Return the device with `factor` times the memory and speed: a CPU process that shares its processor."""
        return replace(
            self,
            memory_bytes=int(self.memory_bytes * factor),
            peak_flops={precision: flops * factor for precision, flops in self.peak_flops.items()},
            memory_bandwidth=self.memory_bandwidth * factor,
        )


@dataclass(frozen=True)
class Link:
    """The connection between devices, as a collective uses it."""

    bandwidth: float
    """Bus bandwidth in bytes per second, per device and direction."""
    latency_s: float
    paired: float = 1.0
    """Share of the bandwidth that an all-reduce of only two devices reaches."""
