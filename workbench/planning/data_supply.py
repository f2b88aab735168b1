"""`DataSupply`: whether text that is tokenised while it trains is tokenised as fast as a plan trains on it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from workbench.arguments import checked_arguments
from workbench.data import Prepared
from workbench.errors import DataError
from workbench.experiment import Experiment
from workbench.machine import available_cores
from workbench.planning.plan import Plan
from workbench.units import count


@dataclass(frozen=True)
class DataSupply:
    """The tokens that a plan is predicted to train on in a second, beside those that a node can make."""

    needed_tokens_per_s: float
    """Predicted tokens per second of the training, over all devices; each node makes all of them."""
    tokens_per_core_s: float
    """Tokens that one core makes in a second, measured on excerpts of the text."""
    cores: int
    """Cores of this machine that its ranks leave, at least one."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens that the cores make in a second."""
        return self.cores * self.tokens_per_core_s

    @property
    def cores_needed(self) -> int:
        """Cores that would make the tokens as fast as they are trained on."""
        return math.ceil(self.needed_tokens_per_s / self.tokens_per_core_s)

    @property
    def keeps_up(self) -> bool:
        """True if training need not wait for tokens."""
        return self.cores >= self.cores_needed

    @property
    def waiting_share(self) -> float:
        """Predicted share of the time that training waits for tokens."""
        return max(0.0, 1 - self.tokens_per_s / self.needed_tokens_per_s)

    def __repr__(self) -> str:
        cores = f"{self.cores} core{'s' * (self.cores > 1)}"
        said = (
            f"Tokenising makes {count(self.tokens_per_s)} tokens/s on the {cores} that the ranks leave, and the plan "
            f"trains on {count(self.needed_tokens_per_s)} tokens/s"
        )
        if self.keeps_up:
            return f"{said}: it keeps up, for which {self.cores_needed} would do."
        return (
            f"{said}: training will wait for {self.waiting_share:.0%} of the time. {self.cores_needed} cores would "
            "keep up; or tokenise the text beforehand, with streaming=False."
        )


@checked_arguments
def data_supply(experiment: Experiment, plan: Plan) -> DataSupply:
    """Say whether streamed text is tokenised as fast as a plan trains on it, and how many cores that takes.

    It compares the plan's predicted tokens per second with those that the cores of this machine make, measured on
    excerpts of the text. `launch` warns of a training that would wait. Raises `DataError` for data that are not
    streamed.
    """
    experiment.data.check(experiment)
    supply = supply_of(experiment.data.prepare(experiment), plan)
    if supply is None:
        raise DataError(
            f"{experiment.data.name} is not tokenised while it trains, so that training does not wait for it. Streamed "
            "text is wb.data.corpus(path, streaming=True)."
        )
    return supply


def supply_of(prepared: Prepared, plan: Plan) -> DataSupply | None:
    """Compare a plan with text that was prepared for it; None for data that are not tokenised while training."""
    if prepared.tokens_per_core_s is None:
        return None
    ranks = min(plan.world, plan.cluster.gpus_per_node)
    cores = max(1, available_cores() - ranks)
    return DataSupply(plan.prediction.tokens_per_s, prepared.tokens_per_core_s, cores)
