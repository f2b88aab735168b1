"""The patterns of a sparse training as NumPy columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workbench.events import SparsityEvent

Column = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Patterns:
    """The patterns of a run: float64 columns of equal length, in order of `step`, which begins at 0.

    There is one row before the first step and one after each update; a dense run has none.
    """

    step: Column
    tokens: Column
    flops: Column
    """FLOPs so far, without the products of absent blocks."""
    seconds: Column
    prune_ratio: Column
    """Share of the present blocks that an update at this step prunes."""
    present: Column
    """Share of the blocks of all sparse weights that are present."""
    explored: Column
    """Share of the blocks that are or once were present."""
    moved: Column
    """Share of the present blocks that the last update replaced."""
    weight: str
    """Name of the weight that `pictures` show; empty for a dense run."""
    pictures: tuple[NDArray[np.bool_], ...]
    """Upper left corner of that weight's pattern at each row: True for a block that is present."""

    def __len__(self) -> int:
        return len(self.step)

    def __getitem__(self, name: str) -> Column:
        return np.asarray(getattr(self, name))

    def __repr__(self) -> str:
        if not len(self):
            return "Patterns(none: the weights are dense)"
        return (
            f"Patterns({100 * self.present[-1]:.3g} % of the blocks present, {len(self) - 1:,} updates, "
            f"{100 * self.explored[-1]:.3g} % explored)"
        )


def patterns_of(events: Sequence[SparsityEvent]) -> Patterns:
    """Return the columns of events that are in order of their steps."""

    def column(values: Sequence[float]) -> Column:
        return np.array(values, dtype=np.float64)

    return Patterns(
        step=column([event["step"] for event in events]),
        tokens=column([event["tokens"] for event in events]),
        flops=column([event["flops"] for event in events]),
        seconds=column([event["seconds"] for event in events]),
        prune_ratio=column([event["prune_ratio"] for event in events]),
        present=column([event["present"] / event["blocks"] for event in events]),
        explored=column([event["explored"] / event["blocks"] for event in events]),
        moved=column([event["moved"] / max(1, event["present"]) for event in events]),
        weight=events[0]["weight"] if events else "",
        pictures=tuple(np.array([[block == "#" for block in row] for row in event["pattern"]]) for event in events),
    )
