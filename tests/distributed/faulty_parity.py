"""Ranks of a parity of which each plan has a fault, or none: the n-th plan has the n-th of the names in `PLANTED`."""

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.distributed import faulty_tracer
from workbench.analysis.examining_ranks import ParityRank
from workbench.analysis.plain_loop import with_changed_code
from workbench.capture import Graph
from workbench.execution.parallel.sharding import local
from workbench.execution.trainer import Trainer
from workbench.execution.worker import main

PLANTED = "WORKBENCH_PLANTED"
"""Environment variable with the names of the faults, separated by commas."""
Change = Callable[[Any], None]


def _after_gradients(change: Change, on_rank: int | None = 1) -> Change:
    def plant(trainer: Any) -> None:
        inner = trainer.gradients

        def faulty(*given: Any) -> torch.Tensor:
            loss = inner(*given)
            change(trainer)
            return loss

        if on_rank in (None, dist.get_rank()):
            trainer.gradients = faulty

    return plant


def _gradients(trainer: Any) -> list[torch.Tensor]:
    parameters = trainer.stages.model_parameters().values()
    return [local(parameter.grad) for parameter in parameters if parameter.grad is not None]


def _scale(trainer: Any) -> None:
    for gradient in _gradients(trainer):
        gradient.mul_(1.01)


def _scale_one(trainer: Any) -> None:
    """Scale the smallest gradient, which has few elements, by a thousandth."""
    min(_gradients(trainer), key=lambda gradient: gradient.numel() or 10**9).mul_(1.001)


def _transpose(trainer: Any) -> None:
    """Turn the rows of a shard around: its norm stays as it is."""
    shard = next(gradient for gradient in _gradients(trainer) if gradient.ndim == 2 and len(gradient) > 1)
    shard.copy_(shard.flip(0))


def other_micro_batch(trainer: Any) -> None:
    """Compute the first micro-batch again in place of the last."""
    inner, size = trainer.gradients, trainer.plan.micro_batch
    trainer.gradients = lambda step, batch, *_: inner(
        step, {name: torch.cat([field[:-size], field[:size]]) for name, field in batch.items()}
    )


def fewer_micro_batches(trainer: Any) -> None:
    """Leave the last micro-batch out."""
    inner, size = trainer.gradients, trainer.plan.micro_batch
    trainer.gradients = lambda step, batch, *_: inner(step, {name: field[:-size] for name, field in batch.items()})


def other_mask(trainer: Any) -> None:
    """Draw other dropout masks on one rank."""
    trainer.context.seed += dist.get_rank()


def own_labels(trainer: Any) -> None:
    """Divide by the labels of each replica, as if all had equally many."""
    inner, reduce = trainer.gradients, dist.all_reduce

    def skipping(tensor: Any, *given: Any, **named: Any) -> Any:
        if tensor.ndim == 1 and len(tensor) == len(trainer.graph.label_counts) and "group" in named:
            return tensor.mul_(trainer.plan.data)
        return reduce(tensor, *given, **named)

    def faulty(*given: Any) -> torch.Tensor:
        dist.all_reduce = skipping
        try:
            return inner(*given)
        finally:
            dist.all_reduce = reduce

    trainer.gradients = faulty


def turned_update(trainer: Any) -> None:
    """Turn a shard of a weight around after each update."""
    inner = trainer.update

    def faulty(*given: Any) -> Any:
        result = inner(*given)
        weights = trainer.stages.model_parameters()
        shard = local(weights["bert.encoder.layer.0.attention.self.query.weight"].detach())
        shard.copy_(shard.flip(0))
        return result

    if dist.get_rank() == 1:
        trainer.update = faulty


def without_decay(trainer: Any) -> None:
    for group in trainer.optimizer.param_groups:
        group["weight_decay"] = 0.0


def other_clipping(trainer: Any) -> None:
    """Clip by a norm of its own on one rank."""
    inner = trainer._norms.clip
    factor = 1.1 if dist.get_rank() == 1 else 1.0
    trainer._norms.clip = lambda optimizer, squared, groups: inner(optimizer, squared * factor, groups)


def other_start(trainer: Any) -> None:
    """Begin with a weight that is larger by a millionth."""
    weight = local(list(trainer.stages.model_parameters().values())[1].detach())
    weight.mul_(1 + 1e-6)


def wrong_capture(_: Any) -> None:
    """Nothing: the code of the blocks has been changed before."""


def _scale_products(code: Any) -> None:
    for node in code.graph.find_nodes(op="call_function", target=torch.ops.aten.gelu.default):
        with code.graph.inserting_after(node):
            scaled = code.graph.call_function(torch.ops.aten.mul.Tensor, (node, 1.0001))
        scaled.meta = dict(node.meta)
        node.replace_all_uses_with(scaled, delete_user_cb=lambda user, scaled=scaled: user is not scaled)
    code.recompile()


FAULTS: dict[str, Change] = {
    "right": lambda _: None,
    "scaled": _after_gradients(_scale),
    "scaled everywhere": _after_gradients(_scale, None),
    "scaled bias": _after_gradients(_scale_one),
    "transposed shard": _after_gradients(_transpose),
    "transposed update": turned_update,
    "micro-batch twice": other_micro_batch,
    "micro-batch dropped": fewer_micro_batches,
    "other mask": other_mask,
    "own labels": own_labels,
    "no decay": without_decay,
    "other clipping": other_clipping,
    "other start": other_start,
    "wrong capture": wrong_capture,
    "stale weights": faulty_tracer.stale_weights,
    "low precision": faulty_tracer.low_precision,
    "wrong attention": faulty_tracer.wrong_mask,
    "other rate": faulty_tracer.scaled_update,
    "lone replica": faulty_tracer.lone_replica,
}


class FaultyRank(ParityRank):
    def _trainer(self, plan: Any, *given: Any) -> Trainer:
        index = next(index for index, each in self._plans.items() if each is plan)
        self._planted = os.environ[PLANTED].split(",")[index]
        trainer = super()._trainer(plan, *given)
        FAULTS[self._planted](trainer)
        return trainer

    def _graph(self, plan: Any) -> Graph:
        graph = super()._graph(plan)
        is_wrong = getattr(self, "_planted", "") == "wrong capture"
        return with_changed_code(graph, _scale_products) if is_wrong else graph


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], FaultyRank))
