"""Our `Trainer` on random tokens, without a run directory: what the benchmarks time."""

from __future__ import annotations

import contextlib

import torch
from torch.distributed.device_mesh import init_device_mesh

import workbench as wb
from workbench.capture.captured_model import CapturedModel
from workbench.capture.coupling.division import random_batch as random_tokens
from workbench.capture.coupling.division import repeated
from workbench.execution.blocks.step_context import StepContext
from workbench.execution.build import (
    block_sparse_parameters,
    build_model,
    build_stage,
    prepare_compiler,
    use_deterministic_kernels,
)
from workbench.execution.parallel.mesh import MeshCoordinate
from workbench.execution.trainer import Trainer
from workbench.planning.plan import Plan


def trainer_for(experiment: wb.Experiment, plan: Plan, device: torch.device) -> Trainer:
    """This rank's trainer; the default process group must exist and be as large as the plan."""
    if experiment.numerics.deterministic:
        use_deterministic_kernels()
    context = StepContext(experiment.seed, device)
    if device.type == "cuda":
        prepare_compiler()
    model = build_model(experiment.model.build, plan.model_bytes, device, experiment.seed)
    graph = CapturedModel(experiment, plan.micro_batch, model).graph
    names = ("pp", "dp_shard" if plan.zero else "dp_replicate", "tp")
    mesh = init_device_mesh(device.type, (plan.pipeline, plan.data, plan.tensor), mesh_dim_names=names)
    coordinate = MeshCoordinate.from_mesh(mesh)
    half = plan.precision == "bf16"
    stages = build_stage(
        plan,
        coordinate,
        model,
        graph,
        context,
        compile=device.type == "cuda" and experiment.numerics.compile is not False,
        autocast=lambda: torch.autocast(device.type, torch.bfloat16) if half else contextlib.nullcontext(),
        compact=block_sparse_parameters(experiment, plan, coordinate, graph, device),
    )
    del model
    trainer = Trainer(experiment, plan, graph, stages, context, coordinate)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_accumulated_memory_stats()
    return trainer


def random_batch(
    experiment: wb.Experiment, samples: int, replica: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """`samples` random ones, the same on every rank of a replica; as many labels stand as the data would leave.

    Of data of one's own, a few of its own again and again.
    """
    examples = experiment.reading.examples()
    if examples is not None:
        return repeated(examples, samples, device)
    return random_tokens(
        experiment.reading.batch_specs(),
        samples,
        vocab_size=experiment.model.vocab_size,
        labelled_share=experiment.reading.labelled_share(),
        device=device,
        seed=replica,
    )
