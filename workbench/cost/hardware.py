"""The hardware table: what data sheets promise, what a tensor program reaches.

Data sheets: V100 (nvidia.com, "Tesla V100 GPU accelerator", 2018: 15.7 fp32, 125 tensor TFLOP/s,
900 GB/s, NVLink 150 GB/s per direction); A100 (2021: 19.5 fp32, 312 bf16, 1,555 and 2,039 GB/s, NVLink
300 GB/s); H100 SXM (2023: 67 fp32, 989 bf16 dense, 3,350 GB/s, NVLink 450 GB/s); H200 SXM (2024: as
H100, 4,800 GB/s, 141 GB). fp32 is without TF32, which torch leaves off by default. Memory is what
`torch.cuda.mem_get_info` reports of an idle device, less than the decimal gigabytes of the data sheet.

Links inside a node are the bus bandwidth (NVIDIA/nccl-tests, doc/PERFORMANCE.md) of a large
all-reduce: about 0.75 of NVLink's figure. Links between nodes are one network card per GPU, as in the
vendor's own systems (DGX-1 4 × 100 Gb/s for 8 GPUs, DGX A100 8 × 200 Gb/s, DGX H100/H200 8 × 400 Gb/s), at 0.85.
"""

from __future__ import annotations

from workbench.cost.cluster import Device, Efficiency, Link
from workbench.units import GIB

_LIBRARIES = int(1.6 * GIB)  # CUDA context, cuBLAS and NCCL work areas seen beside the allocator on H200

V100 = Device("V100", "cuda", int(31.7 * GIB), {"fp32": 15.7e12, "fp16": 125e12}, 900e9, _LIBRARIES)
A100_40 = Device("A100 40GB", "cuda", int(39.4 * GIB), {"fp32": 19.5e12, "bf16": 312e12}, 1555e9, _LIBRARIES)
A100 = Device("A100", "cuda", int(79.1 * GIB), {"fp32": 19.5e12, "bf16": 312e12}, 2039e9, _LIBRARIES)
H100 = Device("H100", "cuda", int(79.1 * GIB), {"fp32": 67e12, "bf16": 989e12}, 3350e9, _LIBRARIES)
H200 = Device(
    "H200",
    "cuda",
    int(139.8 * GIB),
    {"fp32": 67e12, "bf16": 989e12},
    4800e9,
    _LIBRARIES,
    Efficiency(
        gemm=0.62,
        gemm_half_flops=4e9,
        bandwidth=0.80,
    ),
    host_bandwidth=55e9,
    shared_host_bandwidth=145e9,  # 36e9 each of four, seen in two plans with optimiser state on the host
)

_V100_LINKS = (Link(110e9, 12e-6), Link(5.3e9, 25e-6))
_A100_LINKS = (Link(225e9, 10e-6), Link(21e9, 20e-6))
_H100_LINKS = (Link(340e9, 10e-6), Link(42e9, 20e-6))
_H200_LINKS = (Link(350e9, 7.5e-6, paired=0.8), Link(42e9, 20e-6))
"""Measured by wb.calibrate(), without NVLink multicast; of two devices by benchmarks/collectives.py."""

FITTED = ("H200",)
"""Devices whose `Efficiency` was fitted to whole training steps."""

NODES: dict[str, tuple[Device, int, Link, Link]] = {
    "v100": (V100, 8, *_V100_LINKS),
    "a100": (A100, 8, *_A100_LINKS),
    "a100-80gb": (A100, 8, *_A100_LINKS),
    "a100-40gb": (A100_40, 8, *_A100_LINKS),
    "h100": (H100, 8, *_H100_LINKS),
    "h200": (H200, 8, *_H200_LINKS),
}
"""Name -> device, GPUs in one node, link inside a node, link between nodes (per GPU)."""

HOST_BYTES = {
    "v100": 512 * GIB,
    "a100": 2048 * GIB,
    "a100-80gb": 2048 * GIB,
    "a100-40gb": 1024 * GIB,
    "h100": 2048 * GIB,
    "h200": 2048 * GIB,
}
"""Memory of one whole node's host, in the vendor's own systems (data sheets of DGX-1, DGX A100, DGX H100 and H200)."""
