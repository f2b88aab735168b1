"""The device mesh, created by Accelerate: its `ParallelismConfig` with a pipeline axis added.

Axes, outermost first: `pp`; the data-parallel axis, named `dp_replicate` (ZeRO 0) or `dp_shard` (ZeRO 1, 2, 3); `tp`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from accelerate.parallelism_config import ParallelismConfig
from torch.distributed.device_mesh import DeviceMesh

from workbench.base.errors import PlanInfeasible


@dataclass
class PipelineParallelismConfig(ParallelismConfig):
    """`ParallelismConfig`, which has data, tensor, context and sequence axes, with a pipeline axis added."""

    pp_size: int = 1

    tp_size: int = 1

    def __post_init__(self) -> None:
        """Allow tensor next to plain data parallelism.

        Accelerate refuses the combination because its own wrapping of models does not support it; Workbench's does.
        """
        tensor, self.tp_size = self.tp_size, 1
        super().__post_init__()
        self._set_size("tp", tensor)
        self._sizes["pp"] = self.pp_size

    @property
    def total_size(self) -> int:
        return int(super().total_size) * self.pp_size

    @property
    def non_data_parallel_size(self) -> int:
        return int(super().non_data_parallel_size) * self.pp_size

    def _get_mesh(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        data = "dp_shard" if self._sizes["dp_shard"] > 1 else "dp_replicate"
        return ("pp", data, "tp"), (self.pp_size, self._sizes[data], self.tp_size)

    def _validate_accelerator(self, accelerator: Any) -> None:
        if self.total_size != accelerator.num_processes:
            raise PlanInfeasible(
                f"The plan uses {self.total_size} processes and {accelerator.num_processes} were started. "
                f"Launch the run through wb.launch, or start exactly {self.total_size}."
            )


def parallelism_config(pipeline: int, data: int, zero: int, tensor: int = 1) -> PipelineParallelismConfig:
    """Return Accelerate's configuration for the three parallel degrees and a ZeRO stage."""
    is_sharded = zero > 0 and data > 1
    return PipelineParallelismConfig(
        pp_size=pipeline,
        dp_replicate_size=1 if is_sharded else data,
        dp_shard_size=data if is_sharded else 1,
        tp_size=tensor,
    )


@dataclass(frozen=True)
class MeshCoordinate:
    """The position of this rank on the mesh, the sizes of the axes and the process groups along them."""

    rank: int
    pipeline_rank: int
    data_rank: int
    tensor_rank: int
    pipeline: int
    data: int
    tensor: int
    pipeline_group: dist.ProcessGroup
    data_mesh: DeviceMesh
    tensor_mesh: DeviceMesh

    @property
    def devices_per_stage(self) -> int:
        """Number of ranks that hold the stages of this pipeline rank, as `Strategy.devices_per_stage`."""
        return self.data * self.tensor

    @property
    def rank_in_stage(self) -> int:
        """Number of this rank among them: the tensor-parallel axis is the innermost."""
        return self.data_rank * self.tensor + self.tensor_rank

    @property
    def data_group(self) -> dist.ProcessGroup:
        return self.data_mesh.get_group()

    @property
    def tensor_group(self) -> dist.ProcessGroup:
        return self.tensor_mesh.get_group()

    @staticmethod
    def from_mesh(mesh: DeviceMesh) -> MeshCoordinate:
        """Return this rank's coordinate on a mesh with the axes `pp`, `tp` and one whose name begins with `dp`."""
        axes = {name[:2]: mesh[name] for name in mesh.mesh_dim_names or ()}
        pipeline, data, tensor = axes["pp"], axes["dp"], axes["tp"]
        return MeshCoordinate(
            rank=dist.get_rank(),
            pipeline_rank=pipeline.get_local_rank(),
            data_rank=data.get_local_rank(),
            tensor_rank=tensor.get_local_rank(),
            pipeline=pipeline.size(),
            data=data.size(),
            tensor=tensor.size(),
            pipeline_group=pipeline.get_group(),
            data_mesh=data,
            tensor_mesh=tensor,
        )
