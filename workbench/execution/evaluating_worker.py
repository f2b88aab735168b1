"""Ranks that evaluate a checkpoint in place of training: those of `run.evaluate`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from workbench.execution.between_steps import Evaluator
from workbench.execution.checkpoint.save_load import CheckpointStore, TrainingProgress
from workbench.execution.step_log import StepLog
from workbench.execution.trainer import Trainer
from workbench.execution.worker import BetweenSteps, TrainingWorker, main


class Evaluation(TrainingWorker):
    """A rank that evaluates the checkpoint that `resume.json` names, and writes no checkpoint."""

    is_exact = True

    def _train(
        self,
        trainer: Trainer,  # noqa: ARG002 - its evaluators are in `between`
        checkpoints: CheckpointStore,  # noqa: ARG002 - a training saves
        progress: TrainingProgress,
        between: Sequence[BetweenSteps],
    ) -> TrainingProgress:
        """Compute the loss of the held-out samples once."""
        events = self.run_dir.events if self.is_main else None
        log = StepLog(self.experiment, self.plan, self.device, events, progress.seconds)
        self.heartbeat.begin("evaluation")
        for each in between:
            if isinstance(each, Evaluator):
                each.run(progress.step, log)
        return progress


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Evaluation))
