"""Equal and similar documents stay on one side of a split, kinds are held out alike, and what overlaps is counted."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import workbench as wb
from workbench.base.errors import DataError, InvalidArgument
from workbench.data import duplicates
from workbench.data.store import Split
from workbench.experiment import Experiment

VOCABULARY = 600
DOCUMENTS = 200


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Documents of which some come again as they are, some with a word changed, and the others once."""
    draw = np.random.default_rng(0)
    words = [f"{a}{b}" for a in "bcdfghjklmnp" for b in "aeiou"]
    once = [" ".join(draw.choice(words, int(draw.integers(90, 140)))) for _ in range(DOCUMENTS)]
    edited = []
    for text in once[:60]:
        own = text.split()
        for at in draw.choice(len(own), 1):
            own[at] = "changed"
        edited.append(" ".join(own))
    every = [*once, *edited, *once[60:100]]
    return [every[at] for at in draw.permutation(len(every))]


def asked(data: Any, samples: int = 16) -> Experiment:
    model = wb.models.gpt2(hidden_size=32, num_layers=1, num_heads=2, vocab_size=VOCABULARY, max_positions=32)
    evaluation = wb.Evaluation(every=1, samples=samples)
    return Experiment.of(model=model, data=data, seq_len=32, global_batch=4, steps=2, evaluation=evaluation)


def of_texts(texts: list[str], **options: Any) -> Any:
    return wb.data.documents(texts, vocab_size=VOCABULARY, progress=False, **options)


def parts_of(data: Any) -> Split:
    experiment = asked(data)
    found: Split = experiment.data.reads(experiment)._parts()  # type: ignore[attr-defined]
    return found


def held_documents(parts: Split) -> NDArray[np.bool_]:
    """Return for each document whether it is held out; no document is cut."""
    store = parts.held_out.store
    starts, ends = store.document_starts, np.append(store.document_starts, store.tokens)[1:]
    held = np.zeros(store.tokens, np.bool_)
    for begin, end in zip(parts.held_out.starts, parts.held_out.ends, strict=True):
        held[begin:end] = True
    assert all(len(set(held[a:b].tolist())) == 1 for a, b in zip(starts, ends, strict=True))
    return held[starts]


def documents_of(parts: Split) -> list[tuple[int, ...]]:
    store = parts.held_out.store
    edges = [*store.document_starts.tolist(), store.tokens]
    return [tuple(store.ids[a:b].tolist()) for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize("length", [1, 2, 3, 5, 8, 13])
def test_runs_of_tokens_have_equal_hashes_exactly_where_they_are_equal(length: int) -> None:
    ids = np.random.default_rng(0).integers(0, 3, 300).astype(np.uint16)
    hashes = duplicates.run_hashes(ids, length).tolist()
    runs = [tuple(ids[at : at + length]) for at in range(len(ids) - length + 1)]
    assert len(hashes) == len(runs)
    assert len(set(hashes)) == len(set(runs)) == len(set(zip(hashes, runs, strict=True)))


def test_exact_groups_are_the_equal_documents_and_near_ones_those_of_similar_sets(texts: list[str]) -> None:
    parts = parts_of(of_texts(texts, deduplicate="exact"))
    store, documents = parts.held_out.store, documents_of(parts)
    assert duplicates.groups_of(store, "exact").tolist() == [documents.index(each) for each in documents]
    # Near ones by comparing every pair; none is so close to the limit that an estimate could miss it.
    size = duplicates.SHINGLE
    runs = [{ids[at : at + size] for at in range(len(ids) - size + 1)} for ids in documents]
    pairs = {
        (a, b): len(runs[a] & runs[b]) / len(runs[a] | runs[b])
        for a, b in itertools.combinations(range(len(documents)), 2)
    }
    near = {pair for pair, similar in pairs.items() if similar >= duplicates.NEAR}
    assert {pair for pair, similar in pairs.items() if 0.4 < similar < 0.8} == set()
    groups = list(range(len(documents)))
    for a, b in sorted(near):
        groups = [groups[a] if each == groups[b] else each for each in groups]
    assert duplicates.groups_of(store, "near").tolist() == groups
    assert len(near) > 90


@pytest.mark.parametrize("how", ["exact", "near"])
def test_duplicates_are_held_out_together_or_not_at_all(texts: list[str], how: str) -> None:
    parts = parts_of(of_texts(texts, deduplicate=how))
    held = held_documents(parts)
    sides: dict[Any, set[bool]] = {}
    for group, side in zip(duplicates.groups_of(parts.held_out.store, how).tolist(), held.tolist(), strict=True):
        sides.setdefault(group, set()).add(side)
    assert {len(each) for each in sides.values()} == {1}
    assert parts.held_out.tokens >= 0.05 * parts.among
    assert parts.held_out.tokens + parts.training.tokens == parts.among


def test_the_run_says_how_many_held_out_windows_share_words_with_training(texts: list[str]) -> None:
    for options in ({}, {"deduplicate": "near"}):
        experiment = asked(of_texts(texts, **options))
        reading = experiment.data.reads(experiment)
        parts, width = reading._parts(), 32  # type: ignore[attr-defined]
        trained = parts.training.ids[np.arange(parts.training.tokens)].tolist()
        held = parts.held_out.ids[np.arange(parts.held_out.tokens // width * width)].tolist()
        runs = {tuple(trained[at : at + duplicates.RUN]) for at in range(len(trained) - duplicates.RUN + 1)}
        begins = range(len(held) - duplicates.RUN + 1)
        shared = {at // width for at in begins if tuple(held[at : at + duplicates.RUN]) in runs}
        said = f"{len(shared)} of {len(held) // width} held-out windows"
        assert said in reading.held_out_in_words()
        assert said in reading.prepare(progress=False).held_out
        assert (len(shared) > 3) is (not options)
        assert said in reading.held_out_in_words(), "as it is stored"


def test_a_longer_text_is_looked_through_in_parts_and_other_text_is_compared_too(
    texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = parts_of(of_texts(texts))
    monkeypatch.setattr(duplicates, "PIECE", 1 << 10)
    whole = duplicates.shared_samples([parts.training], parts.held_out, 32)
    monkeypatch.undo()
    assert whole == duplicates.shared_samples([parts.training], parts.held_out, 32)
    monkeypatch.setattr(duplicates, "PIECE", 1 << 10)
    monkeypatch.setattr(duplicates, "MOST_COMPARED", 1 << 12)
    shared, windows, looked = duplicates.shared_samples([parts.training], parts.held_out, 32)
    assert looked < 1
    assert (shared <= whole[0], windows) == (True, whole[1])
    monkeypatch.undo()
    experiment = asked(of_texts(texts)).replace(eval_data=of_texts(texts[:40], name="other"))
    words = experiment.data.reads(experiment).held_out_in_words()
    windows = experiment.data.reads(experiment).evaluated_on().samples.text.tokens // 32  # type: ignore[attr-defined]
    assert words.startswith(f"{windows} of {windows} held-out windows (100%)")


def test_what_is_stored_of_groups_is_made_again_where_it_is_damaged(texts: list[str]) -> None:
    store = parts_of(of_texts(texts, deduplicate="near")).held_out.store
    [file] = store.folder.parent.glob(f"{store.folder.name}.near-*.npy")
    before = np.load(file)
    file.write_bytes(file.read_bytes()[:100])
    assert np.array_equal(duplicates.groups_of(store, "near"), before)
    np.save(file, before[:-1])
    assert np.array_equal(duplicates.groups_of(store, "near"), before)
    assert np.array_equal(np.load(file), before)


def test_short_files_that_are_sorted_by_kind_are_held_out_of_every_kind(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    for kind in range(8):
        for number in range(100):
            words = " ".join(draw.choice([f"k{kind}w{word}" for word in range(30)], 20))
            (tmp_path / f"{kind}-{number:03}.txt").write_text(words + "\n")
    (tmp_path / "4-blank.txt").write_text(" \n")  # no document
    for by in ("document", "file"):
        held = held_documents(parts_of(wb.data.corpus(tmp_path, vocab_size=VOCABULARY, held_out_by=by)))
        assert len(held) == 800
        assert all(held[kind * 100 : kind * 100 + 100].any() for kind in range(8))


def test_rows_with_one_value_of_a_field_are_held_out_together(texts: list[str], tmp_path: Path) -> None:
    sites = [None if at % 50 == 0 else at * 7 % 40 for at in range(len(texts))]
    rows = [{"text": text, "site": site} for text, site in zip(texts, sites, strict=True)]
    rows.insert(5, {"text": "  ", "site": 3})  # no document
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = wb.data.hub(tmp_path / "rows.jsonl", vocab_size=VOCABULARY, held_out_by="site")
    held = held_documents(parts_of(data))
    sides = {site: {held[at] for at, own in enumerate(sites) if own == site} for site in set(sites) - {None}}
    assert {len(each) for each in sides.values()} == {1}
    assert held.any()
    with pytest.raises(DataError, match=r"'author' is no column of the rows\. They have: text, site"):
        parts_of(wb.data.hub(tmp_path / "rows.jsonl", vocab_size=VOCABULARY, held_out_by="author"))


def test_what_cannot_be_held_out_so_is_refused_with_a_way_out(texts: list[str]) -> None:
    with pytest.raises(DataError, match=r"deduplicate='near' chooses among all documents.*Remove streaming=True"):
        of_texts(texts, deduplicate="near", streaming=True)
    with pytest.raises((DataError, InvalidArgument), match="deduplicate"):
        of_texts(texts, deduplicate="fuzzy")
    with pytest.raises(DataError, match=r'names a field, and plain text has none\. Give "document" or "file"'):
        parts_of(of_texts(texts, held_out_by="site"))
    with pytest.raises(DataError, match='is one file, and held_out_by="file" needs several'):
        parts_of(of_texts(texts, held_out_by="file"))
    with pytest.raises(DataError, match=r"1 group of documents that stay together.*Remove held_out_by and deduplicate"):
        parts_of(of_texts([texts[0]] * 50, deduplicate="exact"))
    experiment = asked(of_texts(texts, held_out_by="document"), samples=100_000)
    with pytest.raises(DataError, match="more than half"):
        experiment.data.reads(experiment)._parts()  # type: ignore[attr-defined]
