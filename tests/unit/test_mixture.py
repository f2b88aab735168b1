"""A mixture gives each source its share exactly, of samples of its own, and what does not mix is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

import workbench as wb
from workbench.analysis.plateau import context_free
from workbench.base.errors import DataError
from workbench.data import data_fingerprint, held_out
from workbench.data.corpora import LARGEST_PERIOD, Mixture, PartUse, shares_of
from workbench.data.sampling import MixedOrder
from workbench.runs.loss_basis import loss_basis, why_not_compared
from workbench.sweeps.queue import label
from workbench.sweeps.sweep import Axes

SEQ, BATCH = 16, 8
SIZES: dict[str, Any] = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 400, "max_positions": SEQ}
WORDS = ["the", "sea", "was", "grey", "and", "one", "boat", "came", "back", "to", "an", "old", "harbour", "again"]
CAUSAL, MASKED = wb.models.gpt2(**SIZES), wb.models.bert(**SIZES, next_sentence=False)


def text(name: str, documents: int, seed: int) -> wb.data.Corpus:
    draw = np.random.default_rng(seed)
    return wb.data.documents((" ".join(draw.choice(WORDS, 40)) for _ in range(documents)), name, vocab_size=400)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[wb.data.Corpus, wb.data.Corpus]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_HOME", str(tmp_path_factory.mktemp("home")))
        yield text("sea", 120, 0), text("shore", 60, 1)


def asked(data: Any, model: Any = CAUSAL, **changes: Any) -> wb.Experiment:
    return wb.Experiment(
        **{"model": model, "data": data, "steps": 50, "global_batch": BATCH, "seq_len": SEQ, **changes}
    )


@pytest.mark.parametrize(
    "weights", [(0.7, 0.3), (1, 1, 1), (0.9, *[0.01] * 10), (5, 0, 3), (0.123, 0.456, 0.421), (2.5e9, 1.5e9)]
)
def test_after_any_number_of_samples_each_source_is_within_one_of_its_share(weights: tuple[float, ...]) -> None:
    shares = shares_of(weights)
    assert sum(shares) == 1
    assert [float(share) for share in shares] == pytest.approx([w / sum(weights) for w in weights], rel=1e-12)
    order, count = MixedOrder([(0, shares)]), 3000
    part, number = order.of(np.arange(count))
    given = np.eye(len(weights), dtype=int)[part].cumsum(0)
    exact = np.arange(1, count + 1)[:, None] * np.array([float(share) for share in shares])
    assert np.abs(given - exact).max() < 1
    assert (number == given[np.arange(count), part] - 1).all()
    assert (order.given(count) == given[-1]).all()
    scattered = np.random.default_rng(0).permutation(count)
    assert (order.of(scattered)[0] == part[scattered]).all()


def test_shares_without_a_small_denominator_are_rounded_and_none_to_nothing() -> None:
    shares = shares_of([math.pi, math.e, 1e-12])
    assert sum(shares) == 1
    assert shares[2] == Fraction(1, LARGEST_PERIOD)
    assert float(shares[0]) == pytest.approx(math.pi / (math.pi + math.e), abs=2 / LARGEST_PERIOD)


def test_weights_that_change_at_a_step_hold_from_that_step_on(texts: Any) -> None:
    data = wb.data.mixture([(texts[0], 1), (texts[1], 0)], changes={10: (1, 3), 30: (0, 1)})
    part, number = data.reads(asked(data)).order.of(np.arange(50 * BATCH))
    by_step = part.reshape(50, BATCH).sum(1).tolist()
    assert by_step == [0] * 10 + [6] * 20 + [8] * 20
    for source in (0, 1):
        assert number[part == source].tolist() == list(range((part == source).sum()))


@pytest.mark.parametrize("model", [CAUSAL, MASKED], ids=["causal", "masked"])
def test_each_source_gives_the_samples_of_a_training_on_it_alone(texts: Any, model: Any) -> None:
    """The plain way: take the next sample of the source whose turn it is."""
    data = wb.data.mixture([(texts[0], 0.7), (texts[1], 0.3)])
    experiment = asked(data, model)
    folder = texts[0].reads(experiment).tokenizer_folder()
    second = replace(texts[1], tokenizer=str(folder), vocab_size=data.reads(experiment).prepare().vocabulary)
    own, other = [read.request for read in data.reads(experiment).parts()]
    assert (own.seed, other.seed != own.seed) == (experiment.seed, True)
    alone = [
        source.reads(experiment.replace(data=source, seed=seed)).dataset()
        for source, seed in zip((texts[0], second), (own.seed, other.seed), strict=True)
    ]
    dataset, taken = data.reads(experiment).dataset(), [0, 0]
    mixed = dataset.__getitems__(range(len(dataset)))
    assert len(dataset) == 50 * BATCH
    for index, part in enumerate(data.reads(experiment).order.of(np.arange(len(dataset)))[0].tolist()):
        expected = alone[part][taken[part]]
        taken[part] += 1
        assert all(torch.equal(mixed[name][index], field) for name, field in expected.items())
    assert taken == [280, 120]
    assert torch.equal(dataset[123]["input_ids"], mixed["input_ids"][123])
    assert (
        data.reads(experiment).use(experiment.total_samples)[1].epochs
        == 120 / second.reads(experiment).samples_per_epoch()
    )


def test_the_plan_says_how_often_each_source_is_read(texts: Any) -> None:
    experiment = asked(wb.data.mixture([(texts[0], 0.5), (texts[1], 0.5)]), steps=200)
    experiment.data.reads(experiment).check()
    note = experiment.data.reads(experiment).note()
    assert note.startswith("The mixture reads 12.8 k tokens of sea (")
    assert note.endswith("epochs, read more than once).")
    assert str(PartUse("sea", 10, 160, 0.5)) == "160 tokens of sea (0.5 epochs)"


def test_held_out_samples_are_mixed_by_the_last_weights_or_those_of_a_source_alone(texts: Any) -> None:
    evaluation = wb.Evaluation(samples=8)
    data = wb.data.mixture([(texts[0], 1), (texts[1], 1)], changes={20: (1, 3)})
    mixed, alone = asked(data, evaluation=evaluation), asked(texts[0], evaluation=evaluation)
    rows = held_out(mixed).__getitems__(range(8))["input_ids"].tolist()
    of_first = held_out(alone).__getitems__(range(8))["input_ids"].tolist()
    assert sum(row in of_first for row in rows) == 2
    named = mixed.replace(eval_data=texts[0])
    assert held_out(named).__getitems__(range(8))["input_ids"].tolist() == of_first
    trained = {tuple(row.tolist()) for row in data.reads(mixed).dataset().__getitems__(range(400))["input_ids"]}
    assert torch.equal(data.reads(named).dataset()[5]["input_ids"], data.reads(mixed).dataset()[5]["input_ids"])
    assert not trained & set(map(tuple, rows))
    basis = [loss_basis(each.to_json()) for each in (named, alone)]
    assert why_not_compared(basis, held_out=True) is None
    assert why_not_compared([basis[0], loss_basis(named.replace(data=other(texts)).to_json())], held_out=True) is None
    assert "held-out set" in str(why_not_compared([loss_basis(mixed.to_json()), basis[1]], held_out=True))
    same = loss_basis(mixed.replace(data=wb.data.mixture([(texts[1], 5), (texts[0], 5)], {20: (9, 3)})).to_json())
    assert "text of the tokeniser" in str(why_not_compared([loss_basis(mixed.to_json()), same], held_out=True))
    assert "data (" in str(why_not_compared([loss_basis(mixed.to_json()), basis[1]], held_out=False))


def other(texts: Any) -> Mixture:
    return wb.data.mixture([(texts[0], 0.1), (texts[1], 0.9)])


def test_other_text_is_held_out_whole_and_a_mixture_of_other_texts_by_its_weights(texts: Any) -> None:
    third = text("third", 40, 2)
    experiment = asked(other(texts), evaluation=wb.Evaluation(samples=8, data=third))
    assert len(held_out(experiment)) == 8
    without = asked(other(texts))
    assert torch.equal(
        experiment.data.reads(experiment).dataset()[9]["labels"], without.data.reads(without).dataset()[9]["labels"]
    )
    mixed = experiment.replace(eval_data=wb.data.mixture([(third, 1), (text("fourth", 40, 3), 3)]))
    rows = held_out(mixed).__getitems__(range(8))["input_ids"].tolist()
    assert len(rows) == 8
    assert sum(row in held_out(experiment).__getitems__(range(8))["input_ids"].tolist() for row in rows) == 2


def test_a_mixture_survives_json_and_other_weights_are_another_training(texts: Any) -> None:
    experiment = asked(wb.data.mixture([(texts[0], 0.7), (texts[1], 0.3)], changes={9: (1, 2)}))
    assert wb.Experiment.from_json(experiment.to_json()) == experiment
    assert experiment.data.name == "70 % sea + 30 % shore, from step 9 on 33.3 % sea + 66.7 % shore"
    axes = Axes(experiment, {"data": [experiment.data, other(texts)]})
    assert list(map(label, axes.json_values("data"))) == [experiment.data.name, other(texts).name]
    assert data_fingerprint(experiment) == data_fingerprint(experiment) != data_fingerprint(asked(other(texts)))
    frequencies = [context_free(asked(data)).unigram_entropy for data in (*texts, other(texts))]
    assert frequencies[2] > 0


class Numbers:
    """A dataset of one number."""

    def __init__(self, value: int, size: int = 10, width: int = 3) -> None:
        self.value, self.size, self.width = value, size, width

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((self.width,), float(self.value)), "n": torch.tensor(index)}


def test_datasets_of_ones_own_are_mixed_too() -> None:
    experiment = asked(wb.data.mixture([(Numbers(1), 1), (Numbers(2, 5), 3)]), lambda: torch.nn.Linear(3, 1))
    experiment.data.reads(experiment).check()
    rows = experiment.data.reads(experiment).dataset().__getitems__(range(400))
    assert (rows["x"][:, 0] == 2).sum() == 300
    assert sorted(rows["n"][rows["x"][:, 0] == 2][:5].tolist()) == [0, 1, 2, 3, 4]
    assert experiment.data.reads(experiment).examples()["x"].shape[1:] == (3,)
    assert [use.epochs for use in experiment.data.reads(experiment).use(400)] == [10, 60]
    described = wb.Experiment.from_json(experiment.to_json())
    assert not described.data.is_loaded
    wrong = asked(wb.data.mixture([(Numbers(1), 1), (Numbers(2, width=4), 3)]), lambda: torch.nn.Linear(3, 1))
    with pytest.raises(DataError, match="have the fields x \\[4\\]"):
        wrong.data.reads(wrong).check()


def test_what_does_not_mix_is_refused(texts: Any) -> None:
    first, second = texts
    folder = str(first.reads(asked(first)).tokenizer_folder())
    for parts, words in (
        ([(first, 1)], "at least two sources"),
        ([(first, 1), (second, -1)], "finite numbers of at least 0"),
        ([(first, 0), (second, 0)], "not all of them 0"),
        ([(first, 1), (second, 0)], "weight 0 at every step"),
        ([(first, 1), (first, 2)], "is given twice"),
        ([(first, 1), (Numbers(1), 2)], "text and user-defined"),
        ([(first, 1), (replace(second, streaming=True), 2)], "is streamed"),
        ([(first, 1), (other(texts), 2)], "is a mixture itself"),
        ([(first, "much"), (second, 1)], "finite numbers"),
        ([first, second], "no pair"),
    ):
        with pytest.raises(DataError, match=words):
            wb.data.mixture(parts)
    for changes, words in (({0: (1, 1)}, "from 1"), ({5: (1,)}, "for 2 sources"), ({5: (0, 0)}, "not all")):
        with pytest.raises(DataError, match=words):
            wb.data.mixture([(first, 1), (second, 1)], changes)
    for data, words in (
        ([(first, 1), (replace(second, tokenizer=folder, vocab_size=66), 1)], "need one tokeniser"),
        ([(first, 1), (replace(second, objective="mlm"), 1)], "prepared for 'mlm'"),
    ):
        mixed = wb.data.mixture(data)
        with pytest.raises(DataError, match=words):
            mixed.reads(asked(mixed)).check()
    with pytest.raises(DataError, match="different rates"):
        asked(other(texts), steps=None, epochs=2).resolved()
