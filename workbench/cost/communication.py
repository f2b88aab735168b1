"""The time of collectives on one link by the α–β model, t = steps · α + volume / bandwidth.

Volumes are those of ring algorithms, which move the least data (Patarasuk and Yuan, "Bandwidth optimal all-reduce
algorithms for clusters of workstations", JPDC 2009); a link's bandwidth is therefore the *bus* bandwidth of
NVIDIA/nccl-tests (doc/PERFORMANCE.md). Steps are those of the tree that NCCL takes where latency rules
(Sanders, Speck and Träff, "Two-tree algorithms", Parallel Computing 2009): log2 of the group, rounded up.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from workbench.cost.device import Link

Bytes = TypeVar("Bytes", float, npt.NDArray[np.float64])


def point_to_point_s(num_bytes: Bytes, link: Link) -> Bytes:
    """Return the seconds of one send and its receive."""
    return link.latency_s + num_bytes / link.bandwidth


def all_gather_s(num_bytes: Bytes, group: int, link: Link) -> Bytes:
    """Return the seconds until `group` devices, which hold 1/group of `num_bytes` each, hold all of them."""
    return (group - 1).bit_length() * link.latency_s + num_bytes * (group - 1) / group / link.bandwidth


def reduce_scatter_s(num_bytes: Bytes, group: int, link: Link) -> Bytes:
    """Return the seconds until each device holds 1/group of the sum of all devices' `num_bytes`."""
    return all_gather_s(num_bytes, group, link)


def all_reduce_s(num_bytes: Bytes, group: int, link: Link) -> Bytes:
    """Return the seconds of a reduce-scatter followed by an all-gather."""
    if group == 2:
        num_bytes = num_bytes / link.paired
    return reduce_scatter_s(num_bytes, group, link) + all_gather_s(num_bytes, group, link)
