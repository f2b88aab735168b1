"""Ranks of a bisection that are at fault: the run `plan-<n>` has the n-th of `FAULTS`, counted round."""

import copy
import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from workbench.capture.operations import ATTENTION
from workbench.execution.examining_worker import Tracer
from workbench.execution.trainer import Trainer
from workbench.execution.worker import main
from workbench.optimizers.parameters import local

FAULTY_BLOCK = 2


def scaled_gradients(trainer: Trainer) -> None:
    """Multiply the gradients of the second stage by 1.01."""

    def faulty(gradients: Callable[..., Any], *given: Any) -> Any:
        loss = gradients(*given)
        for parameter in trainer.stages.model_parameters().values():
            parameter.grad.mul_(1.01)
        return loss

    if trainer.coordinate.pipeline_rank == 1:
        trainer.gradients = functools.partial(faulty, trainer.gradients)


def stale_weights(trainer: Trainer) -> None:
    """Let the second stage compute with the weights of the step before."""
    earlier: list[torch.Tensor] = []

    @torch.no_grad()
    def set_to(values: list[torch.Tensor]) -> list[torch.Tensor]:
        parameters = trainer.stages.model_parameters().values()
        present = [parameter.clone() for parameter in parameters]
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)
        return present

    def faulty(gradients: Callable[..., Any], *given: Any) -> Any:
        present = set_to(earlier or [p.clone() for p in trainer.stages.model_parameters().values()])
        loss = gradients(*given)
        set_to(present)
        earlier[:] = present
        return loss

    if trainer.coordinate.pipeline_rank == 1:
        trainer.gradients = functools.partial(faulty, trainer.gradients)


def _replace_code(trainer: Trainer, change: Callable[[Any], Any]) -> None:
    for stage in trainer.stages.stages:
        for module in stage.block_modules():
            if module.block.index == FAULTY_BLOCK:
                module.use(dataclasses.replace(module.program, run=change(module.program.run)))


def low_precision(trainer: Trainer) -> None:
    """Compute one block in bf16."""
    _replace_code(trainer, torch.autocast("cpu", torch.bfloat16))


def wrong_mask(trainer: Trainer) -> None:
    """Let the attention of one block see what comes before a token alone."""

    def causal(code: Any) -> Any:
        code = copy.deepcopy(code)
        [attention] = [node for node in code.graph.nodes if node.target is ATTENTION]
        attention.update_arg(5, True)
        code.recompile()
        return code

    _replace_code(trainer, causal)


def scaled_update(trainer: Trainer) -> None:
    """Let the second stage learn 1.01 times as fast."""
    if trainer.coordinate.pipeline_rank == 1:
        trainer._peak_rates = [1.01 * rate for rate in trainer._peak_rates]


def lone_replica(trainer: Trainer) -> None:
    """Let one replica add something to its gradients after they were reduced."""

    def faulty(gradients: Callable[..., Any], *given: Any) -> Any:
        loss = gradients(*given)
        trainer.stages.model_parameters()["cls.predictions.bias"].grad.add_(1e-3)
        return loss

    if trainer.coordinate.data_rank == 1:
        trainer.gradients = functools.partial(faulty, trainer.gradients)


QUERY = "bert.encoder.layer.1.attention.self.query.weight"


def flipped_shard(trainer: Trainer) -> None:
    """Let one rank begin with the rows of its shard in the other order."""
    if trainer.coordinate.data_rank == 1:
        with torch.no_grad():
            shard = local(trainer.stages.model_parameters()[QUERY])
            shard.copy_(shard.flip(0))


def doubled_shard(trainer: Trainer) -> None:
    """Double one rank's shard of a gradient after it was reduced."""

    def faulty(gradients: Callable[..., Any], *given: Any) -> Any:
        loss = gradients(*given)
        local(trainer.stages.model_parameters()[QUERY].grad).mul_(2.0)
        return loss

    if trainer.coordinate.data_rank == 1:
        trainer.gradients = functools.partial(faulty, trainer.gradients)


FAULTS = (
    *(scaled_gradients, stale_weights, low_precision, wrong_mask, scaled_update, lone_replica),
    *(flipped_shard, doubled_shard),
)


class FaultyTracer(Tracer):
    def _train(self, trainer: Trainer, *given: Any) -> Any:
        FAULTS[int(self.run_dir.path.name.removeprefix("plan-")) % len(FAULTS)](trainer)
        return super()._train(trainer, *given)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], FaultyTracer))
