"""The user's functions that are called after each step, and the view of the training that they are given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from workbench.columns import logging_scalars
from workbench.data.datasets import untouched_generators
from workbench.errors import UnknownParameter, suggestion
from workbench.execution.step_log import StepLog
from workbench.execution.trainer import Trainer, pipeline_ranks_with
from workbench.rundir import RunDir


class Weights(Mapping[str, torch.Tensor]):
    """Copies of the model's parameters by name, each gathered from all ranks when it is asked for.

    Every rank must ask for the same names in the same order. To change a copy changes nothing in the training.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def __getitem__(self, name: str) -> torch.Tensor:
        trainer = self._trainer
        graph, here = trainer.graph, trainer.coordinate
        canonical = next((first for first, others in graph.ties.items() if name in others), name)
        if canonical not in graph.parameters:
            raise UnknownParameter(f"The model has no parameter {name!r}. {suggestion(name, graph.parameters)}")
        own, owner = trainer.stages.model_parameters(), pipeline_ranks_with(canonical, trainer.plan, graph)[0]
        if canonical in own:
            value = trainer.full(canonical, own[canonical]).clone().contiguous()
        else:
            spec = graph.parameters[canonical]
            value = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=trainer.context.device)
        if trainer.plan.pipeline > 1:
            dist.broadcast(value, group=here.pipeline_group, group_src=owner)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._trainer.graph.parameters)

    def __len__(self) -> int:
        return len(self._trainer.graph.parameters)


class StepView:
    """The training after a step, as a callback sees it; what it may ask for is done when all callbacks have run."""

    def __init__(self, step: int, trainer: Trainer, log: StepLog, folder: Path) -> None:
        self.step = step
        """Number of completed steps, from 1."""
        self.steps = trainer.experiment.total_steps
        """Number of steps that the experiment asks for."""
        self.is_main = dist.get_rank() == 0
        """True on rank 0, where files are to be written."""
        self.folder = folder
        """Folder of the run."""
        self.parameters: Mapping[str, torch.Tensor] = Weights(trainer)
        """Copies of the weights by name; each is gathered from all ranks when it is asked for."""
        self._log = log
        self.wants_stop = self.wants_checkpoint = False

    @property
    def metrics(self) -> Mapping[str, float]:
        """The figures of this step, equal on all ranks; waits until the device has finished it.

        They are `loss`, `grad_norm`, `learning_rate`, the scalars that the model logs, and `eval_loss` and the metrics
        of the last evaluation before this step.
        """
        return {**self._log.evaluated, **self._log.latest}

    def stop(self) -> None:
        """Ask for the end of the training after this step, with a checkpoint, as `run.stop()` does."""
        self.wants_stop = True

    def checkpoint(self) -> None:
        """Ask for a checkpoint of this step."""
        self.wants_checkpoint = True


class Callbacks:
    """Calls the user's functions on every rank, and tells all ranks what any of them asked for."""

    def __init__(self, trainer: Trainer, run: RunDir, begin: Callable[[str], None]) -> None:
        """`begin` is told that the rank calls functions, for which it may take its time."""
        self._trainer, self._folder, self._begin = trainer, run.path, begin
        self._functions = functions = trainer.experiment.callbacks
        # On the hosts, so that no device is waited for.
        self._group = dist.new_group(backend="gloo") if functions and dist.get_world_size() > 1 else None

    def run(self, step: int, log: StepLog) -> tuple[bool, bool]:
        """Call all functions after `step` steps; return whether to stop, and whether to write a checkpoint."""
        if not self._functions:
            return False, False
        self._begin("callbacks")
        view = StepView(step, self._trainer, log, self._folder)
        with untouched_generators(self._trainer.context.device), torch.no_grad(), logging_scalars() as logged:
            for function in self._functions:
                function(view)
        log.add_scalars({scalar.name: float(scalar.value) for scalar in logged})
        asked = torch.tensor([view.wants_stop, view.wants_checkpoint], dtype=torch.int32)
        if self._group is not None:
            dist.all_reduce(asked, op=dist.ReduceOp.MAX, group=self._group)
        return bool(asked[0]), bool(asked[1])
