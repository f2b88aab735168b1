"""`SparsityLog`: writes an event of the pattern of a sparse training before the first step and after each update."""

from __future__ import annotations

from pathlib import Path

from workbench.execution.step_log import StepLog, flops_of
from workbench.execution.trainer import Trainer
from workbench.rundir import log_event
from workbench.sparsity import Dynamic
from workbench.sparsity.pattern import is_present

WINDOW = 64
"""Largest number of rows and columns of blocks that an event shows of a pattern, from its upper left corner."""


class SparsityLog:
    """Sums the counts of the patterns of all ranks; the rank that owns the first sparse weight writes the event."""

    def __init__(self, trainer: Trainer, events: Path) -> None:
        assert trainer.sparse_weights is not None
        self._trainer, self._sparse = trainer, trainer.sparse_weights
        self._owned = frozenset(name for name in self._sparse.patterns if trainer.owns(name))
        here = trainer.coordinate
        is_first = self._sparse.names[0] in self._owned and here.data_rank == here.tensor_rank == 0
        self._events = events if is_first else None
        self._update_steps = self._sparse.sparsity.update_steps(trainer.experiment.total_steps)

    def is_due(self, step: int) -> bool:
        """Return True if the pattern has just moved, after `step` steps."""
        return self._sparse.is_due(step - 1)

    def run(self, step: int, log: StepLog) -> None:
        """Write the state of the patterns after `step` steps; a collective."""
        log.flush()
        counts = self._sparse.counts(self._owned)
        if self._events is not None:
            experiment, sparsity, name = self._trainer.experiment, self._sparse.sparsity, self._sparse.names[0]
            corner_RC = is_present(self._sparse.patterns[name])[:WINDOW, :WINDOW].int()
            log_event(
                self._events,
                "sparsity",
                step=step,
                update=sum(each <= step for each in self._update_steps),
                prune_ratio=sparsity.ratio(step, experiment.total_steps) if isinstance(sparsity, Dynamic) else 0.0,
                **counts,
                tokens=(samples := experiment.samples_before(step)) * experiment.seq_len,
                flops=flops_of(self._trainer.plan, samples),
                seconds=log.seconds,
                weight=name,
                pattern=["".join(".#"[block] for block in row) for row in corner_RC.tolist()],
            )
        log.restart_clock()
