"""Packed sequences: the recurrent module alone runs as written, and what follows has as many steps as the longest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from tests.unit.capture_models import Batch, captured, copies, interpret, loss_of
from workbench.capture import packed_sequences
from workbench.capture.captured_model import CapturedModel
from workbench.capture.opaque import opaque_calls
from workbench.errors import CaptureError
from workbench.experiment import Experiment

WIDTH, STEPS = 8, 6


class Packs(nn.Module):
    """Packs embedded tokens in its own forward, and takes a mean over as many steps as the longest sequence has."""

    def __init__(self, make: Callable[..., nn.RNNBase] = nn.LSTM, sorted_first: bool = False, **padding: Any) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, WIDTH)
        self.rnn = make(WIDTH, WIDTH, batch_first=not sorted_first)
        self.head = nn.LazyLinear(5)
        self.sorted_first, self.padding = sorted_first, padding
        with torch.no_grad():
            self(torch.zeros(2, STEPS, dtype=torch.long), torch.tensor([2, 2]), torch.zeros(2, dtype=torch.long))

    def steps(self, input_ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids)
        if self.sorted_first:
            lengths, order = lengths.sort(descending=True)
            packed = pack_padded_sequence(x[order].transpose(0, 1), lengths.cpu())
        else:
            packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        found, last = self.rnn(packed)
        state = last[0] if isinstance(last, tuple) else last
        out, counted = pad_packed_sequence(found, batch_first=True, **self.padding)
        return out.mean(1) + state[-1].mean(-1, keepdim=True) + counted.to(x.device)[:, None] / STEPS

    def forward(self, input_ids: torch.Tensor, lengths: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.head(self.steps(input_ids, lengths)), labels)


class ReadsData(Packs):
    """Reads the rows of the packed sequence themselves, of which there are as many as the lengths say."""

    def steps(self, input_ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(self.tokens(input_ids), lengths.cpu(), batch_first=True, enforce_sorted=False)
        packed = PackedSequence(packed.data.tanh(), *packed[1:])
        return self.rnn(packed)[1][0][-1] + packed.data.mean()


def batch_of(*lengths: int) -> Batch:
    count = len(lengths)
    generator = torch.Generator().manual_seed(0)
    return {
        "input_ids": torch.randint(0, 20, (count, STEPS), generator=generator),
        "lengths": torch.tensor(lengths),
        "labels": torch.arange(count) % 5,
    }


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "an LSTM": Packs,
    "a GRU of two layers and two directions": partial(Packs, partial(nn.GRU, num_layers=2, bidirectional=True)),
    "an RNN, steps first, of sorted sequences": partial(Packs, nn.RNN, sorted_first=True),
    "padding with ones": partial(Packs, padding_value=1.0),
    "a fixed length": partial(Packs, total_length=STEPS),
    "a greater length": partial(Packs, total_length=STEPS + 2, padding_value=0.5),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_recurrent_module_alone_runs_as_written_and_equals_plain_pytorch(name: str) -> None:
    model, same = copies(MODELS[name])
    batch = batch_of(2, 5, 3, 4)  # the longest has one step less than the batch
    graph = captured(same, batch)
    assert [call.label for block in graph.blocks for call in opaque_calls(block.code.graph)] == ["rnn"]
    assert [block.name for block in graph.blocks] == ["tokens", "rnn", "head"]
    for lengths in ((2, 5, 3, 4), (6, 1, 1, 1)):
        batch = batch_of(*lengths)
        expected, found = loss_of(model, batch), interpret(graph, same, batch)
        torch.testing.assert_close(found, expected)
        model.zero_grad()
        same.zero_grad()
        expected.backward()
        found.backward()
        for mine, theirs in zip(same.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)


def test_a_forward_that_reads_the_rows_of_a_packed_sequence_runs_as_written_as_a_whole() -> None:
    model, same = copies(ReadsData)
    batch = batch_of(2, 5, 3, 4)
    graph = captured(same, batch)
    assert [call.label for block in graph.blocks for call in opaque_calls(block.code.graph)] == ["model"]
    torch.testing.assert_close(interpret(graph, same, batch), loss_of(model, batch))


def test_steps_that_are_not_cut_are_refused_before_the_first_update(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_of(*[2, 5, 3, 4] * 4)
    samples = [{name: field[index] for name, field in batch.items()} for index in range(16)]
    experiment = Experiment.of(model=Packs, data=samples, steps=1, global_batch=8, seq_len=1)
    right = packed_sequences._pad

    def uncut(value: torch.Tensor, sizes: torch.Tensor, *rest: Any) -> Any:
        total_length = STEPS  # noqa: F841  (which the caller's frame is asked for)
        return right(value, sizes, *rest)

    monkeypatch.setattr(packed_sequences, "_pad", uncut)
    with pytest.raises(CaptureError, match="does not compute the model's"):
        _ = CapturedModel(experiment, 2).division
