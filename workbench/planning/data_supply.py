"""`DataSupply`: whether text that is tokenised while it trains is tokenised as fast as a plan trains on it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from workbench.data import Prepared
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


def data_supply(prepared: Prepared, plan: Plan) -> DataSupply | None:
    """Compare a plan with text that was prepared for it; None for data that are not tokenised while training."""
    if prepared.tokens_per_core_s is None:
        return None
    ranks = min(plan.world, plan.cluster.gpus_per_node)
    cores = max(1, available_cores() - ranks)
    return DataSupply(plan.prediction.tokens_per_s, prepared.tokens_per_core_s, cores)
