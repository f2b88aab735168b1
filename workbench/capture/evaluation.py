"""Comparison of a model captured in eval mode with the same model captured in train mode."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from workbench.capture.graph import Graph
from workbench.capture.model import capture
from workbench.capture.tensor_parallel import plan_tensor_parallel
from workbench.errors import CaptureError


def capture_for_evaluation(model: nn.Module, training: Graph) -> Graph:
    """Capture the model in eval mode at the micro-batch of `training`, and leave it in train mode."""
    model.eval()
    try:
        return capture(model, training.batch, name=training.model, loss=training.loss_choice)
    finally:
        model.train()


def require_same_stages(training: Graph, evaluation: Graph, cuts: Sequence[int], tensor: int) -> None:
    """Raise `CaptureError` unless the evaluation can run in stages of the training.

    `cuts` are the first blocks of all stages but the first; `tensor` is the tensor-parallel degree. Each block may read
    only parameters and buffers that the same block reads in training, and stages must exchange the same shapes.
    """
    name, counts = training.model, (len(training.blocks), len(evaluation.blocks))
    if counts[0] != counts[1]:
        raise _refused(name, f"it has {counts[0]} blocks in train mode and {counts[1]} in eval mode")
    for block, other in zip(training.blocks, evaluation.blocks, strict=True):
        extra = [p for p in other.parameters if p not in block.parameters]
        extra += [b for b in other.buffers if b not in block.buffers and b not in evaluation.constants]
        if extra:
            raise _refused(name, f"block {block.name} reads {', '.join(extra[:3])} in eval mode only")
    for cut in cuts:
        sent, received = (
            [(graph.values[value].shape, graph.values[value].dtype) for value in graph.crossing(cut)]
            for graph in (training, evaluation)
        )
        if sent != received:
            raise _refused(
                name,
                f"{len(sent)} values reach block {training.blocks[cut].name} in train mode, {len(received)} in eval",
            )
    shards, others = (plan_tensor_parallel(graph, tensor).parameters for graph in (training, evaluation))
    if any(others.get(parameter) != sharding for parameter, sharding in shards.items() if parameter in others):
        raise _refused(name, f"its {tensor} tensor-parallel devices would divide its parameters differently")
    whole = [p for p in evaluation.parameters if p in shards and p not in others]
    if whole:
        raise _refused(name, f"eval mode needs the whole of {whole[0]}, which {tensor} devices divide")


def _refused(name: str, reason: str) -> CaptureError:
    return CaptureError(
        f"{name} cannot be evaluated under this plan, because {reason}. Let its forward use the same layers in "
        "train and eval mode, or train without evaluate.",
        model=name,
    )
