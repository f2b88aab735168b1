"""The `Cluster` that this machine is."""

from __future__ import annotations

from workbench.arguments import checked_arguments
from workbench.cost.cluster import Cluster
from workbench.cost.device import FITTED
from workbench.measure.calibration import cached_calibration
from workbench.measure.detection import detected_cluster


@checked_arguments
def local_cluster(processes: int | None = None) -> Cluster:
    """Return this machine as a `Cluster`: its CUDA GPUs or, without any, `processes` (2) CPU processes.

    What `wb.measure.calibrate` measured on this machine is applied, unless the device's constants were fitted to whole
    training steps. Raises `PlanInfeasible` if `processes` exceeds the number of GPUs.
    """
    cluster = detected_cluster(processes)
    calibration = None if cluster.device.basis == FITTED else cached_calibration()
    return cluster if calibration is None else calibration.applied_to(cluster)
