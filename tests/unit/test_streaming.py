"""A streamed text gives the samples of the stored text in the same order, from any state, in bounded memory."""

from __future__ import annotations

import bz2
import itertools
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streams import fed_alone

import workbench as wb
from tests.patience import eventually
from workbench.base.errors import DataError
from workbench.data import data_fingerprint, from_json, held_out
from workbench.data.streaming import Feeder, new_ring_file, ring_for
from workbench.data.text import Files
from workbench.experiment import Experiment

SEQ = 16
SIZES = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 400, "max_positions": 64}


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Any:
    patch = pytest.MonkeyPatch()
    patch.setenv("WORKBENCH_HOME", str(tmp_path_factory.mktemp("home")))
    patch.setattr("workbench.data.text.BLOCK_BYTES", 1 << 11)
    yield
    patch.undo()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents from one line to several blocks of text."""
    path = tmp_path_factory.mktemp("text") / "numbers.txt"
    documents = (
        "\n".join(f"The square of {i} is {i * i}." for _ in range(1 + i % 7 + 90 * (i % 41 == 0))) for i in range(300)
    )
    path.write_text("\n\n".join(documents))
    return path


def asked(path: Path, streaming: bool, buffer: int | None = None, model: str = "opt", **changes: Any) -> Experiment:
    sizes = {**SIZES, **({"next_sentence": False} if model == "bert" else {})}
    data = wb.data.corpus(path, vocab_size=400, streaming=streaming, shuffle_buffer=buffer)
    fields = {"steps": 50, "global_batch": 8, "seq_len": SEQ, **changes}
    return wb.Experiment.of(model=getattr(wb.models, model)(**sizes), data=data, **fields)


def dataset(experiment: Experiment) -> Any:
    return experiment.data.reads(experiment).dataset()


@pytest.mark.parametrize("evaluate", [None, wb.Evaluation(samples=40)], ids=["everything", "held out"])
@pytest.mark.parametrize("buffer", [5, 10**6])
def test_a_stream_gives_the_windows_of_the_store_over_two_epochs_from_any_state(
    text: Path, buffer: int, evaluate: Any
) -> None:
    streamed, stored = (asked(text, streaming, buffer, evaluation=evaluate) for streaming in (True, False))
    windows = stored.data.reads(stored).samples_per_epoch()
    chunks = list(itertools.takewhile(lambda chunk: chunk.first < 2 * windows, dataset(streamed).stream.chunks(None)))
    found = np.concatenate([chunk.records for chunk in chunks])
    assert [chunk.first for chunk in chunks] == np.cumsum([0, *(len(chunk.records) for chunk in chunks[:-1])]).tolist()
    assert (found == dataset(stored).samples.batch(np.arange(2 * windows))["input_ids"]).all()
    order = dataset(stored).samples.starts(np.arange(windows)) // SEQ
    assert sorted(order.tolist()) == list(range(windows))
    for chunk in chunks[:: max(1, len(chunks) // 6)]:
        again = next(dataset(streamed).stream.chunks(json.loads(json.dumps(chunk.state))))
        assert again.first == chunk.first
        assert (again.records == chunk.records).all()


def held_out_windows(experiment: Experiment) -> Any:
    found = held_out(experiment)
    return found.__getitems__(range(len(found)))["input_ids"]


@pytest.mark.parametrize("documents", ["many", "one"])
def test_a_small_text_holds_out_the_same_however_it_is_read(text: Path, documents: str, tmp_path: Path) -> None:
    evaluate = wb.Evaluation(samples=40)
    if documents == "one":
        single = tmp_path / "single.txt"
        single.write_text(text.read_text().replace("\n\n", "\n"))
        text = single
    streamed, in_chunks, stored = (
        held_out_windows(asked(text, streaming, buffer, evaluation=evaluate))
        for streaming, buffer in ((True, 5), (False, 5), (False, None))
    )
    assert (streamed == stored).all()
    assert (in_chunks == stored).all()


@pytest.mark.parametrize("tokens", [1000, 640])
def test_a_stream_holds_out_documents_of_the_beginning_as_the_stored_text_does(
    text: Path, tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first 640 tokens are a part of one document, which is cut."""
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path))
    monkeypatch.setattr("workbench.data.store.SMALLEST_BEGINNING", tokens)
    monkeypatch.setattr("workbench.data.tokenizing.SMALL_BYTES", 0)
    streamed, stored = (asked(text, streaming, 20, evaluation=wb.Evaluation(samples=2)) for streaming in (True, False))
    windows = held_out_windows(streamed)
    assert (windows == held_out_windows(stored)).all()
    count = stored.data.reads(stored).samples_per_epoch()
    chunks = itertools.takewhile(lambda chunk: chunk.first < count, dataset(streamed).stream.chunks(None))
    found = np.concatenate([chunk.records for chunk in chunks])
    assert (found == dataset(stored).samples.batch(np.arange(count))["input_ids"]).all()
    beginning, whole = sorted(json.loads(file.read_text())["tokens"] for file in tmp_path.glob("tokens/*/facts.json"))
    assert tokens < beginning < 0.3 * whole
    said = streamed.data.reads(streamed).prepare(progress=False).held_out
    assert "Later text is trained on alone" in said
    assert stored.data.reads(stored).prepare().held_out.startswith(f"{said} ")  # which is compared with the rest


def test_blank_files_and_long_documents_of_a_folder_are_streamed_as_they_are_stored(text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    long = text.read_text().replace("\n\n", "\n")
    for number, content in enumerate(["", " \n\n ", "one\n", long, "\n", "two words\n", long]):
        (folder / f"{number}.txt").write_text(content)
    streamed, stored = asked(folder, True, 50), asked(folder, False, 50)
    windows = stored.data.reads(stored).samples_per_epoch()
    chunks = itertools.takewhile(lambda chunk: chunk.first < windows, dataset(streamed).stream.chunks(None))
    found = np.concatenate([chunk.records for chunk in chunks])
    assert (found == dataset(stored).samples.batch(np.arange(windows))["input_ids"]).all()


@pytest.mark.parametrize("model", ["opt", "bert"])
def test_a_process_hands_the_samples_on_through_a_file(text: Path, model: str) -> None:
    streamed, stored = asked(text, True, 20, model), asked(text, False, 20, model)
    found = dataset(streamed)
    with fed_alone(found.stream, 64, found.vocabulary) as ring:
        batch = found.reading(ring).__getitems__([0, 63, 7])
    expected = dataset(stored).__getitems__([0, 63, 7])
    assert batch.keys() == expected.keys()
    assert all((batch[name] == expected[name]).all() for name in batch)


def test_the_writer_waits_for_the_slowest_reader_and_goes_on_from_a_state(text: Path) -> None:
    streamed, stored = asked(text, True, 10), asked(text, False, 10)
    found, first = dataset(streamed), 35
    state = next(chunk.state for chunk in found.stream.chunks(None) if chunk.first == 30)
    descriptor, path = new_ring_file()
    path.unlink()
    ring = ring_for(found.stream, descriptor, 1, readers=2, vocabulary=found.vocabulary)
    assert ring.capacity == 20
    ring.clear(first)
    feeder = Feeder(found.stream, ring, first, state)
    expected = dataset(stored)
    try:
        for index in range(first, 150):
            assert (found.reading(ring)[index]["input_ids"] == expected[index]["input_ids"]).all()
            ring.release(0, index + 1)
            if index > first + 5:
                ring.release(1, index - 4)
        # The state of a chunk comes when the writer begins that chunk. Reading the chunk before does not wait for it.
        reached = eventually(lambda: (state := feeder.state(150)) and state["first"] >= 150 and state)
        assert reached["first"] == 150
        assert feeder.state(149) is None, "states before the last that was asked for are forgotten"
    finally:
        feeder.close()
        os.close(descriptor)


def test_readers_learn_that_the_writer_is_gone_or_why(text: Path, tmp_path: Path) -> None:
    streamed = asked(text, True, 10)
    found = dataset(streamed)
    descriptor, path = new_ring_file()
    path.unlink()
    ring = ring_for(found.stream, descriptor, 1, readers=1, vocabulary=found.vocabulary)
    ring.clear(0)
    feeder = Feeder(found.stream, ring, 0, None)
    found.reading(ring)[3]
    os.kill(feeder._child.process.pid, signal.SIGKILL)
    with pytest.raises(DataError, match="ended unexpectedly"):
        found.reading(ring)[399]
    feeder.close()
    os.close(descriptor)

    broken = tmp_path / "broken.txt"
    broken.write_bytes(text.read_bytes())
    found = dataset(asked(broken, True, 10))
    content = bytearray(text.read_bytes())
    content[100] = 0xFF
    broken.write_bytes(content)
    with (
        fed_alone(found.stream, 400, found.vocabulary) as ring,
        pytest.raises(DataError, match=r"broken\.txt is not"),
    ):
        found.reading(ring)[399]


def test_what_cannot_be_streamed_is_refused_with_a_way_out(text: Path) -> None:
    paired = asked(text, True).replace(model=wb.models.bert(**SIZES))
    with pytest.raises(DataError, match=r"next_sentence=False\), or remove streaming=True"):
        paired.data.reads(paired).check()
    with pytest.raises(DataError, match="shuffle_buffer=0 must be 1 or more"):
        wb.data.corpus(text, shuffle_buffer=0)
    with pytest.raises(DataError, match="streaming=False"):
        dataset(asked(text, True))[0]
    both = asked(text, False, evaluation=wb.Evaluation(samples=8), eval_data=asked(text, True).data)
    with pytest.raises(DataError, match="Remove streaming=True"):
        held_out(both)


def test_a_description_of_streamed_text_is_complete(text: Path) -> None:
    streamed = asked(text, True, 13).data
    assert from_json(streamed.to_json()) == streamed
    prints = {data_fingerprint(asked(text, True, buffer, seed=seed)) for buffer, seed in ((13, 0), (14, 0), (13, 1))}
    assert len(prints) == 3
    assert None not in prints
    assert data_fingerprint(asked(text, True, 13)) in prints


def test_epochs_of_a_small_text_are_exact_and_those_of_a_large_one_estimated(
    text: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    exact = asked(text, True, 13, steps=None, epochs=2)
    assert exact.resolved().steps == asked(text, False, 13, steps=None, epochs=2).resolved().steps
    large = tmp_path / "large.txt"
    large.write_text("\n\n".join(text.read_text() for _ in range(4)))
    monkeypatch.setattr("workbench.data.tokenizing.SMALL_BYTES", 1 << 10)
    monkeypatch.setattr("workbench.data.text.BLOCK_BYTES", 1 << 14)
    estimated = asked(large, True, 13, steps=None, epochs=2)
    prepared = estimated.data.reads(estimated).prepare(progress=False)
    assert "streamed, about" in repr(prepared)
    monkeypatch.undo()
    stored = asked(large, False, 13, steps=None, epochs=2)
    assert estimated.resolved().steps == pytest.approx(stored.resolved().steps, rel=0.05)


def test_excerpts_come_from_everywhere(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.data.text.BLOCK_BYTES", 1 << 12)
    block, share = Files((text,), one_document_each=False).excerpts()
    written = sum(len(part.text) for part in block.parts)
    assert share == pytest.approx(written / text.stat().st_size)
    assert 0.05 < share < 0.5
    packed = tmp_path / "numbers.txt.bz2"
    packed.write_bytes(bz2.compress(text.read_bytes()))
    block, share = Files((packed, text), one_document_each=True).excerpts()
    assert {part.path for part in block.parts} == {str(packed), str(text)}
    assert 0 < share <= 1


def test_rows_and_documents_are_streamed_as_they_are_stored(text: Path, tmp_path: Path) -> None:
    documents = text.read_text().split("\n\n")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"text": document}) for document in documents))
    for make in (
        lambda **options: wb.data.hub(rows, vocab_size=400, shuffle_buffer=7, **options),
        lambda **options: wb.data.documents(documents, vocab_size=400, shuffle_buffer=7, progress=False, **options),
    ):
        streamed, stored = (asked(text, False).replace(data=make(streaming=streams)) for streams in (True, False))
        found = dataset(streamed)
        with fed_alone(found.stream, 40, found.vocabulary) as ring:
            read = found.reading(ring).__getitems__(range(40))
        wanted = dataset(stored).__getitems__(range(40))
        assert all((read[name] == wanted[name]).all() for name in wanted)
