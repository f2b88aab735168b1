"""Loss spikes: steps whose loss or gradient norm leaps above those before, and what the experiment says happens then.

Whether a step is a spike is known on the device, before its update, and alike on every rank, because it is computed of
scalars that all ranks share. The host reads it a step later, with the step's other scalars.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from workbench.errors import LossSpikes
from workbench.experiment import Numerics


class Rewind(Exception):
    """A spike after which training goes back to a checkpoint; every rank raises it at the same step."""

    def __init__(self, step: int, facts: Mapping[str, Any]) -> None:
        """`step` is the number of the step, from 1; `facts` are the fields of its event."""
        super().__init__(f"step {step:,}")
        self.step, self.facts = step, facts


class NonFinite:
    """The rule without spikes: once a loss or a gradient norm was not finite, all updates are left out.

    The next step is launched before the scalars of this one are read, and must not move the weights.
    """

    def __init__(self) -> None:
        self._diverged: torch.Tensor | None = None

    def seen(self, loss_and_squared_norm: torch.Tensor) -> torch.Tensor:
        """Return whether the update of a step is left out, as a boolean on the device."""
        is_bad = ~loss_and_squared_norm.isfinite().all()
        self._diverged = is_bad if self._diverged is None else self._diverged | is_bad
        return self._diverged


class Spikes:
    """The rule of one run: the losses and gradient norms of its last steps, and the number of spikes so far."""

    def __init__(self, numerics: Numerics, device: torch.device) -> None:
        assert numerics.spike_factor is not None
        self._numerics, self._factor = numerics, numerics.spike_factor
        self.found = 0
        """Number of spikes that the host knows of; a rewind does not take it back."""
        self.can_rewind: Callable[[int], bool] = lambda _: False
        """Function that says whether there is a checkpoint to go back to from a step; a collective."""
        self._recent = torch.full((numerics.spike_window, 2), torch.nan, device=device)
        """Loss and gradient norm of the last steps that were no spikes, at their number modulo the window."""
        self._count = torch.zeros((), dtype=torch.int64, device=device)
        self._slots = torch.arange(numerics.spike_window, device=device)

    def seen(self, loss_and_squared_norm: torch.Tensor) -> torch.Tensor:
        """Return whether a step is a spike, as a boolean on the device, and remember its values if it is not.

        It is one if its loss or its gradient norm exceeds `spike_factor` times the median of the window, once the
        window is full, or if one of them is not finite. A median of 0 or less, as a likelihood of densities has, says
        nothing.
        """
        values = torch.stack([loss_and_squared_norm[0], loss_and_squared_norm[1].sqrt()])
        median = self._recent.median(dim=0).values
        leaps = (median > 0) & (values > self._factor * median)
        spiked = ~values.isfinite().all() | ((self._count >= len(self._recent)) & leaps.any())
        taken = ((self._slots == self._count % len(self._recent)) & ~spiked)[:, None]
        self._recent = torch.where(taken, values, self._recent)
        self._count = self._count + (~spiked).long()
        return spiked

    def report(self, step: int, loss: float, grad_norm: float, log: Callable[[Mapping[str, Any]], None]) -> None:
        """Tell of a spike, whose number counts from 1: `log` writes its event.

        Raises `Rewind` where training goes back, and `LossSpikes` after more spikes than the experiment allows.
        """
        self.found += 1
        facts = {"step": step, "loss": loss, "grad_norm": grad_norm, "number": self.found}
        if self.found > self._numerics.spike_limit:
            raise LossSpikes(
                f"Step {step:,} has loss {loss:g} and gradient norm {grad_norm:g}. It is spike {self.found:,} of the "
                f"run, and spike_limit is {self._numerics.spike_limit:,}. Checkpoints of earlier steps are kept. "
                "Train with a lower learning rate or a longer warm-up, run.clone(learning_rate=..., warmup_steps=...), "
                "or with a higher spike_limit or spike_factor.",
            )
        if self._numerics.on_spike == "rewind" and self.can_rewind(step):
            raise Rewind(step, facts)
        log({**facts, "action": "skipped"})

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds: the values of the window, oldest first, and the number of spikes."""
        count, size = int(self._count), len(self._recent)
        recent = self._recent[:count] if count < size else self._recent.roll(-(count % size), 0)
        return {"recent": recent.tolist(), "found": self.found}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take up the state of a checkpoint, of which the last steps count that the window has room for."""
        rows = torch.tensor(state["recent"][-len(self._recent) :], device=self._recent.device).reshape(-1, 2)
        self._recent = torch.full_like(self._recent, torch.nan)
        self._recent[: len(rows)] = rows
        self._count = torch.full_like(self._count, len(rows))
        self.found = max(self.found, int(state["found"]))
