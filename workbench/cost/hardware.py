"""The hardware table: the figures of data sheets, the links of usual nodes, and the memory of their hosts.

Data sheets: V100 (nvidia.com, "Tesla V100 GPU accelerator", 2018: 15.7 fp32, 125 tensor TFLOP/s, 900 GB/s, 16 or 32 GB
of HBM2, NVLink 150 GB/s per direction); A100 (2021: 19.5 fp32, 312 bf16, 1,555 and 2,039 GB/s, NVLink 300 GB/s); H100
SXM (2023: 67 fp32, 989 bf16 dense, 3,350 GB/s, NVLink 450 GB/s); H200 SXM (2024: as H100, 4,800 GB/s, 141 GB). Cards
for workstations and servers: whitepapers of GA102 (2020: RTX 3090 35.6 fp32, 71 bf16, 936 GB/s; RTX A6000 38.7, 154.8,
768), AD102 (2022: RTX 4090 82.6, 165.2, 1,008; RTX 6000 Ada 91.1, 364.2, 960) and GB202 (2025: RTX 5090 104.8, 209.5,
1,792); data sheets of A10 (31.2, 125, 600) and L40S (91.6, 362, 864). Tensor rates are dense and accumulate in fp32,
which GeForce cards do at half the rate. fp32 is without TF32, which torch leaves off by default. Memory is the figure
that `torch.cuda.mem_get_info` reports of an idle device, which is less than the data sheet's decimal gigabytes.

Links inside a node have the bus bandwidth (NVIDIA/nccl-tests, doc/PERFORMANCE.md) of a large all-reduce: about 0.75 of
NVLink's figure. Links between nodes are one network card per GPU at 0.85 of its rate, as in the vendor's own systems
(DGX-1 4 × 100 Gb/s for 8 GPUs, DGX A100 8 × 200 Gb/s, DGX H100/H200 8 × 400 Gb/s). Cards are assumed to communicate
over PCIe 4.0 × 16 (31.5 GB/s less overheads), GeForce cards through the host's memory, as NCCL does without
peer-to-peer access (eight RTX 5090 over PCIe 5.0 reach 28 GB/s: NVIDIA/nccl, issue 1639). Four cards are assumed to
share one 100 Gb/s network card. Only the figures of the H200 were checked by measurement.
"""

from __future__ import annotations

from typing import NamedTuple

from workbench.cost.device import FITTED, Device, Efficiency, Link
from workbench.units import GIB

_LIBRARIES = int(1.6 * GIB)
"""Bytes of the CUDA context and of cuBLAS's and NCCL's work areas, measured beside the allocator on H200."""

V100 = Device("V100", "cuda", int(31.7 * GIB), {"fp32": 15.7e12, "fp16": 125e12}, 900e9, _LIBRARIES)
V100_16 = Device("V100 16GB", "cuda", int(15.7 * GIB), {"fp32": 15.7e12, "fp16": 125e12}, 900e9, _LIBRARIES)
A100_40 = Device("A100 40GB", "cuda", int(39.4 * GIB), {"fp32": 19.5e12, "bf16": 312e12}, 1555e9, _LIBRARIES)
A100 = Device("A100", "cuda", int(79.1 * GIB), {"fp32": 19.5e12, "bf16": 312e12}, 2039e9, _LIBRARIES)
H100 = Device(
    "H100",
    "cuda",
    int(79.1 * GIB),
    {"fp32": 67e12, "bf16": 989e12},
    3350e9,
    _LIBRARIES,
    host_bandwidth=54e9,  # PCIe 5.0, measured by wb.measure.calibrate() on one H100
)
H200 = Device(
    "H200",
    "cuda",
    int(139.8 * GIB),
    {"fp32": 67e12, "bf16": 989e12},
    4800e9,
    _LIBRARIES,
    Efficiency(gemm=0.62, gemm_half_flops=4e9, bandwidth=0.80),
    host_bandwidth=55e9,
    shared_host_bandwidth=145e9,  # 36e9 for each of four GPUs, measured in two plans with optimiser state on the host
    basis=FITTED,
)

RTX_3090 = Device("RTX 3090", "cuda", int(23.7 * GIB), {"fp32": 35.6e12, "bf16": 71e12}, 936e9, _LIBRARIES)
RTX_4090 = Device("RTX 4090", "cuda", int(23.6 * GIB), {"fp32": 82.6e12, "bf16": 165.2e12}, 1008e9, _LIBRARIES)
RTX_5090 = Device("RTX 5090", "cuda", int(31.4 * GIB), {"fp32": 104.8e12, "bf16": 209.5e12}, 1792e9, _LIBRARIES)
RTX_A6000 = Device("RTX A6000", "cuda", int(47.5 * GIB), {"fp32": 38.7e12, "bf16": 154.8e12}, 768e9, _LIBRARIES)
RTX_6000_ADA = Device("RTX 6000 Ada", "cuda", int(44.4 * GIB), {"fp32": 91.1e12, "bf16": 364.2e12}, 960e9, _LIBRARIES)
A10 = Device("A10", "cuda", int(22.0 * GIB), {"fp32": 31.2e12, "bf16": 125e12}, 600e9, _LIBRARIES)
L40S = Device("L40S", "cuda", int(44.4 * GIB), {"fp32": 91.6e12, "bf16": 362e12}, 864e9, _LIBRARIES)

PCIE = Link(20e9, 20e-6)
_ONE_NETWORK_CARD = Link(2.6e9, 30e-6)
_PEER_TO_PEER = (PCIE, _ONE_NETWORK_CARD)
_THROUGH_THE_HOST = (Link(10e9, 25e-6), _ONE_NETWORK_CARD)
_THROUGH_THE_HOST_5 = (Link(25e9, 25e-6), _ONE_NETWORK_CARD)
_V100_LINKS = (Link(110e9, 12e-6), Link(5.3e9, 25e-6))
_A100_LINKS = (Link(225e9, 10e-6), Link(21e9, 20e-6))
_H100_LINKS = (Link(340e9, 10e-6), Link(42e9, 20e-6))
_H200_LINKS = (Link(350e9, 7.5e-6, paired=0.8), Link(42e9, 20e-6))
"""Links of H200, measured by wb.measure.calibrate() without NVLink multicast; `paired` by benchmarks/collectives.py."""


class Node(NamedTuple):
    """A usual node of one device."""

    device: Device
    gpus: int
    intra: Link
    """Link inside the node."""
    inter: Link
    """Link between nodes, per GPU."""
    host_bytes: int
    """Bytes of the host's memory: of V100 to H200 in the vendor's own systems (data sheets of DGX-1, DGX A100, DGX H100
    and H200), of cards a usual size."""


NODES = {
    "v100": Node(V100, 8, *_V100_LINKS, 512 * GIB),
    "v100-32gb": Node(V100, 8, *_V100_LINKS, 512 * GIB),
    "v100-16gb": Node(V100_16, 8, *_V100_LINKS, 512 * GIB),
    "a100": Node(A100, 8, *_A100_LINKS, 2048 * GIB),
    "a100-80gb": Node(A100, 8, *_A100_LINKS, 2048 * GIB),
    "a100-40gb": Node(A100_40, 8, *_A100_LINKS, 1024 * GIB),
    "h100": Node(H100, 8, *_H100_LINKS, 2048 * GIB),
    "h200": Node(H200, 8, *_H200_LINKS, 2048 * GIB),
    "rtx-3090": Node(RTX_3090, 4, *_THROUGH_THE_HOST, 128 * GIB),
    "rtx-4090": Node(RTX_4090, 4, *_THROUGH_THE_HOST, 256 * GIB),
    "rtx-5090": Node(RTX_5090, 4, *_THROUGH_THE_HOST_5, 256 * GIB),
    "rtx-a6000": Node(RTX_A6000, 4, *_PEER_TO_PEER, 256 * GIB),
    "rtx-6000-ada": Node(RTX_6000_ADA, 4, *_PEER_TO_PEER, 512 * GIB),
    "a10": Node(A10, 8, *_PEER_TO_PEER, 512 * GIB),
    "l40s": Node(L40S, 8, *_PEER_TO_PEER, 1024 * GIB),
}

CARDS = {
    "nvidia geforce rtx 3090": "rtx-3090",
    "nvidia geforce rtx 4090": "rtx-4090",
    "nvidia geforce rtx 5090": "rtx-5090",
    "nvidia rtx a6000": "rtx-a6000",
    "nvidia rtx 6000 ada generation": "rtx-6000-ada",
    "nvidia a10": "a10",
    "nvidia l40s": "l40s",
}
"""Key of `NODES` by torch's device name, for cards whose speed is measured where they are present
(`workbench.measure.detection`)."""
