"""Comparison of a model captured in eval mode with the same model captured in train mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from workbench.capture.graph import Graph
from workbench.capture.model import capture
from workbench.capture.outputs import Metric, read_by, slots_of
from workbench.capture.tensor_parallel import plan_tensor_parallel
from workbench.errors import CaptureError, InvalidExperiment
from workbench.tensors import TensorSpec


def capture_for_evaluation(
    model: nn.Module,
    training: Graph,
    metrics: Mapping[str, Metric] = MappingProxyType({}),
    batch: Mapping[str, TensorSpec] | None = None,
    gathers: bool = False,
    examples: Mapping[str, torch.Tensor] | None = None,
) -> Graph:
    """Capture the model in eval mode, by default at the micro-batch of `training`, and leave it in train mode.

    With `metrics`, the graph computes what they read of forward's outputs. `gathers` and `examples` are those of
    `capture`. Raises `InvalidExperiment` for a metric that cannot be computed.
    """
    batch, name, loss = training.batch if batch is None else batch, training.model, training.loss_choice

    def read(template: Any) -> dict[int, str]:
        return {slot: f"The metric {metric!r}" for slot, metric in read_by(metrics, template, batch).items()}

    returns = read if metrics else None
    options: dict[str, Any] = {"loss": loss, "returns": returns, "gathers": gathers, "examples": examples}
    with _eval_mode(model):
        return _with_values_of(training, partial(capture, model, batch, name=name, **options))


def capture_for_samples(model: nn.Module, training: Graph, batch: Mapping[str, TensorSpec], vocabulary: int) -> Graph:
    """Capture the model in eval mode for a batch of prompts, with its logits as the only output.

    `batch` has the fields of the training with P prompts of S tokens. The logits are the first tensor of shape
    (P, S, V) or (P * S, V) that forward returns, with V at least `vocabulary`; one whose V is that of the embedding is
    preferred. Raises `InvalidExperiment` if forward returns none. The model is left in train mode.
    """
    prompts, tokens = batch["input_ids"].shape
    rows = {spec.shape[0] for spec in training.parameters.values() if len(spec.shape) == 2}

    def logits(template: Any) -> dict[int, str]:
        slots = [slot for slot in slots_of(template) if slot.spec.is_floating and len(slot.spec.shape) in (2, 3)]
        fitting = [
            slot
            for slot in slots
            if slot.spec.shape[:-1] in ((prompts, tokens), (prompts * tokens,)) and slot.spec.shape[-1] >= vocabulary
        ]
        fitting.sort(key=lambda slot: slot.spec.shape[-1] not in rows)
        if not fitting:
            shapes = ", ".join(str(list(slot.spec.shape)) for slot in slots_of(template))
            raise InvalidExperiment(
                f"samples need the logits of every token, a tensor of {prompts} × {tokens} × at least {vocabulary:,} "
                f"for these prompts, and {training.model} returned {shapes or 'no tensor'}. Let forward return its "
                "logits beside the loss, or remove samples."
            )
        return {fitting[0].index: "samples"}

    options: dict[str, Any] = {"loss": training.loss_choice, "returns": logits}
    with _eval_mode(model):
        return _with_values_of(training, partial(capture, model, batch, name=training.model, **options))


def _with_values_of(training: Graph, captured: Callable[..., Graph]) -> Graph:
    """Return the graph that `captured()` captures, and with what it logs, too, where stages exchange values for that.

    Evaluations log nothing, but a scalar of two layers' values (`(last - first).norm()`) lets stages send one of them.
    """
    graph = captured()
    numbers = [
        [len(each.crossing(cut, with_outputs=False)) for cut in range(1, len(each.blocks))]
        for each in (training, graph)
    ]
    return captured(logs=True) if training.scalars and numbers[0] != numbers[1] else graph


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    model.eval()
    try:
        yield
    finally:
        model.train()


def require_same_stages(
    training: Graph, evaluation: Graph, cuts: Sequence[int], tensor: int, same_shapes: bool = True
) -> None:
    """Raise `CaptureError` unless the evaluation can run in stages of the training.

    `cuts` are the first blocks of all stages but the first; `tensor` is the tensor-parallel degree. Each block may read
    only parameters and buffers that the same block reads in training, and stages must exchange the same shapes, or with
    `same_shapes=False` as many values.
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
            [
                (spec.shape, spec.dtype)
                for name in graph.crossing(cut, with_outputs=False)
                for spec in [graph.values[name]]
            ]
            for graph in (training, evaluation)
        )
        if sent != received if same_shapes else len(sent) != len(received):
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
        "train and eval mode, or train without evaluate, metrics and samples."
    )
