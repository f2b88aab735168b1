"""Items that can only be read one after the other; the process that feeds ranks with them imports little else."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import IterableDataset

VOCAB, SEQ = 96, 16


class WordStream(IterableDataset):
    """Masked words that depend on their number, 50 in a pass, with a state that tells how many were read."""

    read = 0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while self.read < 50:
            self.read += 1
            labels = torch.randint(0, VOCAB, (SEQ,), generator=torch.Generator().manual_seed(self.read))
            yield {"input_ids": torch.full((SEQ,), self.read), "labels": labels}

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.read = state["read"]
