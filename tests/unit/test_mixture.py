"""A mixture gives each source its share exactly, of samples of its own, and what does not mix is refused."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from streams import written_here

import workbench as wb
from workbench.analysis.plateau import context_free
from workbench.base.errors import DataError
from workbench.data import data_fingerprint, held_out
from workbench.data.corpora import LARGEST_PERIOD, Mixture, PartUse, shares_of
from workbench.data.duplicates import RUN
from workbench.data.sampling import NEVER, MixedOrder
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


STREAMED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "both streamed": ({"streaming": True, "shuffle_buffer": 7}, {"streaming": True, "shuffle_buffer": 30}),
    "one streamed": ({"streaming": True, "shuffle_buffer": 9}, {}),
}


@pytest.mark.parametrize("model", [CAUSAL, MASKED], ids=["causal", "masked"])
@pytest.mark.parametrize("options", STREAMED.values(), ids=STREAMED)
def test_a_mixture_with_streamed_sources_gives_the_samples_of_the_stored_one_from_any_state(
    texts: Any, options: Any, model: Any
) -> None:
    """Both sources are read for several epochs; the second comes late, and the first pauses."""
    weights, changes = (1, 0), {5: (0.7, 0.3), 30: (0, 1), 40: (2, 1)}
    evaluation = wb.Evaluation(samples=8)
    streamed, stored = (
        asked(
            wb.data.mixture(
                [(replace(text, **{**own, **how}), w) for text, own, w in zip(texts, options, weights, strict=True)],
                changes,
            ),
            model,
            evaluation=evaluation,
            steps=120,
        )
        for how in ({}, {"streaming": False})
    )
    wanted, found = stored.reading.dataset(), streamed.reading.dataset()
    assert min(use.epochs for use in streamed.reading.use(streamed.total_samples)) > 1.5
    assert str(streamed.reading.use(500)) == str(stored.reading.use(500))
    everything = wanted.__getitems__(range(len(wanted)))
    with written_here(found.stream, len(found), found.vocabulary) as ring:
        read = found.reading(ring).__getitems__(range(len(found)))
    assert read.keys() == everything.keys()
    assert all(torch.equal(read[name], field) for name, field in everything.items())
    chunks = list(itertools.takewhile(lambda chunk: chunk.first < len(found), found.stream.chunks(None)))
    for chunk in chunks[:: max(1, len(chunks) // 9)]:
        state = json.loads(json.dumps(chunk.state))
        again = [next(stream) for stream in [found.stream.chunks(state)] for _ in range(3)]
        joined = np.concatenate([each.records for each in again])
        assert again[0].first == chunk.first
        assert (joined == np.concatenate([each.records for each in chunks])[chunk.first :][: len(joined)]).all()
    kept = [held_out(each).__getitems__(range(8))["labels"] for each in (streamed, stored)]
    assert torch.equal(*kept)


def test_places_invert_the_order_of_a_mixture() -> None:
    shares = [(0, (1, 0, 2)), (10, (0, 1, 0)), (12, (0, 0, 1)), (20, (3, 2, 0))]
    order = MixedOrder([(first, shares_of(weights)) for first, weights in shares])
    part, number = order.of(np.arange(500))
    for source in range(3):
        assert (order.places(source, number[part == source]) == np.flatnonzero(part == source)).all()
    assert order.places(2, np.asarray([len(number[part == 2])]))[0] == NEVER


def test_a_source_that_fails_or_gives_nothing_is_named(texts: Any, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("the sea was grey\n" * 40)
    (tmp_path / "late.txt").write_text("the sea was grey and old\n" * 400)
    for name, content in (("short", "the sea"), ("late", b"the sea \xff\n" * 400)):
        path = tmp_path / f"{name}.txt"
        source = wb.data.corpus(path, streaming=True, shuffle_buffer=5)
        found = asked(wb.data.mixture([(replace(texts[0], streaming=True), 1), (source, 1)])).reading.dataset()
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(DataError, match=name):
            list(itertools.islice(found.stream.chunks(None), 9))


def test_sources_of_one_name_are_told_apart(tmp_path: Path) -> None:
    paths = [tmp_path / folder / "web.txt" for folder in "ab"]
    for path in paths:
        path.parent.mkdir()
        path.write_text(f"the sea of {path.parent.name} was grey\n" * 400)
    data = wb.data.mixture([(wb.data.corpus(path, vocab_size=400, streaming=path == paths[1]), 1) for path in paths])
    assert data.name == "50 % web (source 1) + 50 % web (source 2)"
    used = asked(data).reading.use(400)
    assert [use.name for use in used] == ["web (source 1)", "web (source 2)"]


def test_held_out_text_of_one_source_that_another_trains_on_is_counted(tmp_path: Path) -> None:
    draw = np.random.default_rng(2)
    lines = [" ".join(draw.choice(WORDS, 30)) for _ in range(300)]
    paths = [tmp_path / "one.txt", tmp_path / "two.txt"]
    paired = ["\n".join(lines[at : at + 2]) for at in range(100, 300, 2)]  # documents of other hashes
    for path, own in zip(paths, (lines[:200], paired), strict=True):
        path.write_text("\n\n".join(own))
    data = wb.data.mixture([(wb.data.corpus(path, vocab_size=400), 1) for path in paths])
    experiment = asked(data, evaluation=wb.Evaluation(samples=8))
    parts: Any = [read._parts() for read in experiment.reading.parts()]
    trained = [part.training.ids[np.arange(part.training.tokens)].tolist() for part in parts]
    runs = {tuple(ids[at : at + RUN]) for ids in trained for at in range(len(ids) - RUN + 1)}
    for name, part in zip(("one", "two"), parts, strict=True):
        held = part.held_out.ids[np.arange(part.held_out.tokens // SEQ * SEQ)].tolist()
        shared = {at // SEQ for at in range(len(held) - RUN + 1) if tuple(held[at : at + RUN]) in runs}
        assert 0 < len(shared) < len(held) // SEQ
        words = experiment.reading.prepare(progress=False).held_out
        assert f"Of {name}, {part} {len(shared)} of {len(held) // SEQ} held-out windows" in words
    copied = experiment.replace(eval_data=wb.data.documents(lines[:20] + lines[-20:], "copied"))
    assert "held-out windows (100%)" in copied.reading.held_out_in_words()


def test_a_mixture_keeps_its_tokeniser_when_the_text_that_it_comes_from_is_tokenised(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"the sea of {name} was grey and old\n" * 200)
    parts = [(wb.data.corpus(tmp_path / f"{name}.txt", vocab_size=400, streaming=True), 1) for name in "ab"]
    reading = asked(wb.data.mixture(parts)).reading
    before = [part.key.folder for part in reading.parts()]
    reading.prepare(progress=False)
    assert before[0].is_dir(), "a small text is tokenised to count its samples"
    assert [part.key.folder for part in reading.parts()] == before


def test_what_a_long_stream_gives_is_estimated_and_said_so(texts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    data = wb.data.mixture([(texts[0], 1), (replace(texts[1], streaming=True), 1)])
    exact = asked(data).reading.use(400)
    monkeypatch.setattr("workbench.data.tokenizing.SMALL_BYTES", 0)
    is_stored = property(lambda reading: not reading.data.streaming)
    monkeypatch.setattr("workbench.data.tokenizing.TextReading.is_tokenised", is_stored)
    reading = asked(data).reading
    prepared, estimated = reading.prepare(progress=False), reading.use(400)
    assert prepared.streamed
    assert prepared.tokens_per_core_s is not None
    assert [use.estimated for use in estimated] == [False, True]
    assert estimated[1].epochs == pytest.approx(exact[1].epochs, rel=0.02)
    assert "3.2 k tokens of sea (0.651 epochs), 3.2 k tokens of shore (about 1.3" in reading.note()


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


class Counting(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    """Numbers in their order, without an index and without a length."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return ({"x": torch.full((3,), 7.0), "n": torch.tensor(number)} for number in range(11))


def test_datasets_that_can_only_be_iterated_are_mixed_in_their_own_order() -> None:
    experiment = asked(wb.data.mixture([(Numbers(1), 1), (Counting(), 3)]), lambda: torch.nn.Linear(3, 1))
    experiment.reading.check()
    found = experiment.reading.dataset()
    with written_here(found.stream, 400, 0) as ring:
        rows = found.reading(ring).__getitems__(range(400))
    assert rows["n"][rows["x"][:, 0] == 7].tolist() == [number % 11 for number in range(300)]
    assert sorted(rows["n"][rows["x"][:, 0] == 1][:10].tolist()) == list(range(10))
    assert [use.epochs for use in experiment.reading.use(400)] == [10, None]
    assert str(experiment.reading.use(400)[1]) == "4.8 k tokens of Counting"


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
        ([(first, 1), (replace(first, streaming=True, masked_share=0.3), 2)], "is given twice"),
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
