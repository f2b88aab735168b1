"""The device mesh, owned by Accelerate: its `ParallelismConfig` with a pipeline axis added.

Axes, outermost first: `pp`; the data-parallel one, named `dp_replicate` (ZeRO 0) or `dp_shard` (ZeRO 1, 2, 3); `tp`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from torch.distributed.device_mesh import DeviceMesh

from workbench.errors import PlanInfeasible


@dataclass
class PipelineParallelismConfig(ParallelismConfig):
    """`ParallelismConfig` knows data, tensor, context and sequence axes; this adds the pipeline."""

    pp_size: int = 1

    tp_size: int = 1

    def __post_init__(self) -> None:
        """Accelerate refuses tensor next to plain data parallelism, which its own wrapping cannot do; ours can."""
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
                f"Launch the run through wb.launch, or start exactly {self.total_size}.",
                planned=self.total_size,
                started=accelerator.num_processes,
            )


def parallelism(pipeline: int, data: int, zero: int, tensor: int = 1) -> PipelineParallelismConfig:
    sharded = zero > 0 and data > 1
    return PipelineParallelismConfig(
        pp_size=pipeline,
        dp_replicate_size=1 if sharded else data,
        dp_shard_size=data if sharded else 1,
        tp_size=tensor,
    )


@dataclass(frozen=True)
class Place:
    """Where this rank stands on the mesh, with the groups it talks to."""

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
    def data_group(self) -> dist.ProcessGroup:
        return self.data_mesh.get_group()

    @property
    def tensor_group(self) -> dist.ProcessGroup:
        return self.tensor_mesh.get_group()

    @staticmethod
    def on(mesh: DeviceMesh) -> Place:
        names = mesh.mesh_dim_names
        assert names is not None
        pipe, data, tensor = (mesh[name] for name in names)
        return Place(
            rank=dist.get_rank(),
            pipeline_rank=pipe.get_local_rank(),
            data_rank=data.get_local_rank(),
            tensor_rank=tensor.get_local_rank(),
            pipeline=pipe.size(),
            data=data.size(),
            tensor=tensor.size(),
            pipeline_group=pipe.get_group(),
            data_mesh=data,
            tensor_mesh=tensor,
        )

    @staticmethod
    def of(accelerator: Accelerator) -> Place:
        return Place.on(accelerator.torch_device_mesh)
