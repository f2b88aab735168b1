"""Tokenisers of `transformers` as they are given, Japanese text, and the samples that are made with their tokens."""

from __future__ import annotations

import io
import itertools
import json
import random
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers.convert_slow_tokenizer import import_protobuf

import workbench as wb
from workbench.base.errors import DataError
from workbench.data.tokenizer import (
    SpecialTokens,
    TextTokenizer,
    folder_of,
    special_tokens_of,
    train_byte_level_bpe,
    train_wordpiece,
)

JAPANESE = """ガラスのコップと、ﾊﾟﾝの値段がひどく上がった。
山の上では、がんばった人だけが湯気の立つ味噌汁を飲んだ。

東京都の電車は、雨のぶんだけ遅れて着く。
窓ぎわの席で、彼女はノートにｶﾞｷﾞｸﾞと書いた。 [MASK]
"""
MIXED = JAPANESE + "\nThe naïve café didn't open on 24 July; Straße, двойка and हिन्दी stayed.\n\n"
TEXTS = [line for line in MIXED.splitlines() if line]
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home"))
    path = tmp_path / "text.txt"
    path.write_text(MIXED * 30)
    return path


def framed(tokenizer: Tokenizer, begin: str, end: str, between: str | None = None) -> None:
    """Let a tokeniser set special tokens around a text."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A {end}".strip(),
        pair=f"{begin} $A {between or end} $B {end}".strip(),
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in {begin, end} - {""}],
    )


def roberta() -> Any:
    """Return a byte-level BPE with RoBERTa's special tokens, of which two stand between two segments."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    framed(tokenizer, "<s>", "</s>", "</s> </s>")
    named = {"cls_token": "<s>", "sep_token": "</s>", "bos_token": "<s>", "eos_token": "</s>", "mask_token": "<mask>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **named)


def unigram(begin: str = "", **named: str) -> Any:
    """Return a tokeniser as SentencePiece makes them; with `begin`, documents have a token at their beginning."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = [*SPECIAL, *(f"<extra_id_{number}>" for number in range(9))] if not begin else SPECIAL
    trainer = trainers.UnigramTrainer(vocab_size=150, special_tokens=special, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    framed(tokenizer, begin, "</s>")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>", pad_token="<pad>", **named
    )


def wordpiece() -> Any:
    """Return a cased BERT, whose special tokens do not come first."""
    pieces = [*sorted({*"".join(TEXTS), *(f"##{letter}" for letter in "".join(TEXTS))}), "電車", "東京都", "##ven"]
    vocabulary = {token: at for at, token in enumerate([*pieces, "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])}
    return transformers.BertTokenizer(vocab=vocabulary, do_lower_case=False, strip_accents=False)


def characters(folder: Path) -> Any:
    """Return a tokeniser that is written in Python, as those with a morphological analyser are."""
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(set("".join(TEXTS)))]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    return transformers.BertJapaneseTokenizer(
        str(folder / "vocab.txt"), word_tokenizer_type="basic", subword_tokenizer_type="character"
    )


def given(name: str, folder: Path) -> Any:
    makers = {"wordpiece": wordpiece, "byte-level": roberta, "unigram": unigram}
    if name == "llama":
        return unigram("<s>", bos_token="<s>")
    return characters(folder) if name == "python" else makers[name]()


def experiment(data: Any, objective: str, **options: Any) -> wb.Experiment:
    """Return an experiment whose model is of no family, so that the text says the objective."""
    assert data.objective == objective
    return wb.Experiment.of(model=object, data=data, **{"seq_len": 16, "global_batch": 4, "steps": 8, **options})


@pytest.mark.parametrize("objective", ["mlm", "clm"])
@pytest.mark.parametrize("name", ["wordpiece", "byte-level", "unigram", "llama", "python"])
def test_text_becomes_the_ids_that_transformers_gives(text: Path, tmp_path: Path, name: str, objective: str) -> None:
    made = given(name, tmp_path)
    made.save_pretrained(tmp_path / "saved")
    data = wb.data.corpus(text, objective=objective, tokenizer=tmp_path / "saved")
    assert wb.data.from_json(json.loads(json.dumps(data.to_json()))) == data
    asked = experiment(data, objective)
    if (objective, name) in (("clm", "wordpiece"), ("clm", "python"), ("mlm", "unigram"), ("mlm", "llama")):
        with pytest.raises(DataError, match=r"has no (mask token|token that ends a document \(eos_token\)), which"):
            wb.runs.tokenize(asked, progress=False)
        return
    store = wb.runs.tokenize(asked, progress=False)
    found = np.asarray(data.reads(asked).dataset().samples.store.ids)
    reader = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    options = {"add_special_tokens": False, "split_special_tokens": True}
    break_ = "\n" if name == "byte-level" else ""
    begins = name in ("llama", "byte-level")
    documents = []
    for document in MIXED.strip().split("\n\n"):
        first, *others = document.split("\n")
        ids = [
            number
            for line in (first, *(break_ + each.strip() for each in others))
            for number in reader(line, **options).input_ids
        ]
        documents.append([reader.bos_token_id, *ids] if objective == "clm" and begins else ids)
    end = [reader.eos_token_id] if objective == "clm" else []
    expected = [number for document in documents * 30 for number in (*document, *end)]
    assert found.tolist() == expected
    assert store.documents == len(documents) * 30
    assert transformers.AutoTokenizer.from_pretrained(store.folder)(TEXTS[0]).input_ids == reader(TEXTS[0]).input_ids


def test_an_object_its_folder_and_its_file_are_one_tokeniser(text: Path, tmp_path: Path) -> None:
    made = roberta()
    made.save_pretrained(tmp_path / "saved")
    ways = (made, made.backend_tokenizer, tmp_path / "saved", tmp_path / "saved/tokenizer.json")
    facts = [SpecialTokens.of_folder(folder_of(wb.data.corpus(text, tokenizer=way).tokenizer)) for way in ways]
    assert len(set(facts)) == 1
    assert (facts[0].mask, facts[0].end, facts[0].frame) == (4, 2, ((0,), (2, 2), (2,)))
    assert set(facts[0].special) == set(range(5))
    again = wb.data.corpus(text, tokenizer=made)
    assert again == wb.data.corpus(text, tokenizer=made), "the same object is described by the same value"


@pytest.mark.parametrize("name", ["wordpiece", "byte-level"])
@pytest.mark.parametrize("objective", ["mlm", "mlm_nsp"])
def test_masked_samples_have_the_special_tokens_of_their_tokeniser(text: Path, name: str, objective: str) -> None:
    made = given(name, text.parent)
    asked = experiment(wb.data.corpus(text, objective=objective, tokenizer=made), objective, seq_len=32)
    batch = asked.data.reads(asked).dataset().samples.batch(np.arange(32))
    original = np.where(batch["labels"] == -100, batch["input_ids"], batch["labels"])
    special = {made.cls_token_id, made.sep_token_id, made.mask_token_id, made.pad_token_id, made.unk_token_id}
    assert (original[:, 0] == made.cls_token_id).all()
    assert (original[:, -1] == made.sep_token_id).all()
    counts = (original == made.sep_token_id).sum(axis=1)
    between = 2 if name == "byte-level" else 1
    assert (counts == 1 + between * (objective == "mlm_nsp")).all()
    if objective == "mlm_nsp":
        second = batch["token_type_ids"].argmax(axis=1)
        assert (original[np.arange(32), second - 1] == made.sep_token_id).all()
        assert (original[np.arange(32), second] != made.sep_token_id).all()
    hidden = batch["labels"] != -100
    assert (hidden.sum(axis=1) == round(0.15 * 32)).all()
    shown = batch["input_ids"][hidden]
    assert np.mean(shown == made.mask_token_id) == pytest.approx(0.8, abs=0.12)
    assert not (special - {made.unk_token_id, made.mask_token_id}) & set(shown.tolist())


@pytest.mark.parametrize("name", ["wordpiece", "byte-level", "unigram"])
def test_whole_words_are_those_of_the_tokeniser(text: Path, name: str) -> None:
    made = given(name, text.parent)
    tokenizer = TextTokenizer(Tokenizer.from_str(made.backend_tokenizer.to_str()))
    joints = tokenizer.joints()
    # Byte-level pieces do not show the marks of Hindi, nor that "n't" is one word for GPT-2.
    whole = [line for line in TEXTS if name != "byte-level" or "हि" not in line]
    for line in (*whole, "It is 24th, is it?  Two  blanks;3x (a) naïve"):
        encoding = made.backend_tokenizer.encode(line, add_special_tokens=False)
        ids = np.asarray([number for number in encoding.ids if number not in made.all_special_ids])
        words = [word for word, number in zip(encoding.word_ids, encoding.ids, strict=True) if number in set(ids)]
        continues = (joints[ids[1:], 0] & joints[ids[:-1], 1]).astype(bool)
        if len(ids) == len(encoding.ids):
            assert continues.tolist() == [one == two for one, two in itertools.pairwise(words)], line
    if name == "unigram":
        return
    data = wb.data.corpus(text, objective="mlm", tokenizer=made, whole_words=True, masked_share=0.3)
    asked = experiment(data, "mlm", seq_len=64)
    batch = asked.data.reads(asked).dataset().samples.batch(np.arange(64))
    hidden = batch["labels"] != -100
    assert (hidden.sum(axis=1) == round(0.3 * 64)).all(), "the number of labels does not depend on the words"
    original = np.where(hidden, batch["labels"], batch["input_ids"])
    joined = (joints[original[:, 1:], 0] & joints[original[:, :-1], 1]).astype(bool)
    cut = (joined & (hidden[:, 1:] != hidden[:, :-1])).sum(axis=1)
    assert joined.mean() > 0.2
    assert cut.max() <= 1, "only the last word of a sample may be hidden in part"


@pytest.mark.parametrize("sentinels", [True, False], ids=["T5", "BART"])
def test_spans_and_what_is_left_of_a_window_make_the_window(text: Path, sentinels: bool) -> None:
    made = unigram() if sentinels else roberta()
    data = wb.data.corpus(text, objective="seq2seq", tokenizer=made, masked_share=0.2)
    asked = experiment(data, "seq2seq", seq_len=48, global_batch=16)
    dataset = data.reads(asked).dataset()
    samples, specs = dataset.samples, data.reads(asked).batch_specs()
    batch = samples.batch(np.arange(16))
    assert {name: field.shape[1:] for name, field in batch.items()} == {n: spec.shape for n, spec in specs.items()}
    windows = samples.windows(np.arange(16))
    marks = [made.convert_tokens_to_ids(f"<extra_id_{n}>") for n in range(9)] if sentinels else [made.mask_token_id]
    lengths = []
    for inputs, labels, window in zip(batch["input_ids"], batch["labels"], windows, strict=True):
        assert inputs[-1] == labels[-1] == made.eos_token_id
        if not sentinels:
            assert labels[0] == inputs[0] == made.bos_token_id
            assert labels[1:-1].tolist() == window.tolist()
            # What is shown stands in the window in its order.
            rest = iter(window.tolist())
            assert all(token in rest for token in inputs[1:-1].tolist() if token not in marks)
            continue
        spans: dict[int, list[int]] = {}
        for token in labels[:-1].tolist():
            if token in marks:
                spans[last := token] = []
            else:
                spans[last].append(token)
        assert list(spans) == marks[: len(spans)]
        lengths += [len(span) for span in spans.values()]
        restored = [each for token in inputs[:-1].tolist() for each in spans.get(token, [token])]
        assert restored == window.tolist()
    if sentinels:
        assert min(lengths) >= 1
        assert np.mean(lengths) == pytest.approx(3, abs=0.5)
    assert not (samples.batch(np.arange(16, 32))["input_ids"] == batch["input_ids"]).all()


def test_a_trained_vocabulary_reads_japanese_with_its_voiced_marks(text: Path) -> None:
    asked = wb.Experiment(model=wb.models.bert(vocab_size=700), data=wb.data.corpus(text, vocab_size=700), seq_len=32)
    tokenizer = asked.data.reads(asked).text_tokenizer()

    def read(written: str) -> str:
        return "".join(tokenizer.decode(tokenizer.encode(written)).split())

    assert read("ガラスのコップがひどくがんばった") == "ガラスのコップがひどくがんばった"
    assert read("ﾊﾟﾝ ｶﾞｷﾞｸﾞ") == "パンガギグ", "half-width letters are the letters that they stand for (NFKC)"
    assert read("हिन्दी двойка") == "हिन्दीдвойка", "no script loses its marks"
    assert read("Naïve CAFÉ Straße") == "naïvecaféstraße"
    decomposed = [unicodedata.normalize("NFD", line) for line in TEXTS]
    both = [train_wordpiece(lines * 30, 700, lambda _: None) for lines in (TEXTS, decomposed)]
    assert both[0].get_vocab() == both[1].get_vocab()
    assert [both[0].encode(line).ids for line in TEXTS] == [both[0].encode(line).ids for line in decomposed]
    plain = train_wordpiece(TEXTS * 30, 300, lambda _: None, strip_accents=True)
    assert plain.normalizer.normalize_str("Naïve CAFÉ Ångström") == "naive cafe angstrom"
    kept = "ガラスがﾊﾟﾝ हिन्दी 한국어"
    assert plain.normalizer.normalize_str(kept) == unicodedata.normalize("NFKC", kept)


@pytest.mark.usefixtures("text")
def odd_texts() -> list[str]:
    """Return texts of letters that normalisation composes, splits, removes or takes for blanks, and of blanks."""
    dice = random.Random(0)
    signs = [*map(chr, (*range(0x500), *range(0x2000, 0x2070), *range(0x3000, 0x3100), 0xFB01, 0x1100, 0x1161, 0xFEFF))]
    signs += [" "] * len(signs)
    fixed = [
        "",
        " ",
        "  a  ",
        "[SEP] a[SEP]b  [MASK]",
        f"{'x' * 150} {'y' * 99}",
        "a\u00a0b \u0301c",
        "e \u0301e\u0301",
    ]
    return [*fixed, *TEXTS, *("".join(dice.choices(signs, k=dice.randrange(300))) for _ in range(200))]


@pytest.mark.parametrize("strip_accents", [False, True])
def test_words_that_are_read_one_by_one_become_the_ids_of_the_whole_text(strip_accents: bool) -> None:
    texts = odd_texts()
    trained = train_wordpiece(texts, 300, lambda _: None, strip_accents=strip_accents)
    whole = [each.ids for each in trained.encode_batch([*texts, "[SEP]"], add_special_tokens=False)]
    assert whole.pop() == [trained.token_to_id("[SEP]")]
    reading = TextTokenizer(Tokenizer.from_str(trained.to_str())).for_text()
    expected = [each.ids for each in reading.library.encode_batch(texts, add_special_tokens=False)]
    assert expected != whole, "the names of special tokens are text"
    assert list(reading.batch(texts)) == expected


def test_a_word_is_read_once_however_often_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = train_wordpiece(TEXTS, 300, lambda _: None)
    reading, read = TextTokenizer(trained).for_text(), list[str]()

    class Counting:
        def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
            read.extend(texts)
            return trained.encode_batch_fast(texts, **options)

    reading.library = Counting()
    for _ in range(3):
        list(reading.batch(["to be or not to be", "or not"]))
    assert sorted(read) == ["be", "not", "or", "to"]
    monkeypatch.setattr("workbench.data.tokenizer.MOST_LETTERS", 12)
    assert [len(ids) for ids in reading.batch(["to be", "unlike"])] == [
        len(trained.encode(each, add_special_tokens=False)) for each in ("to be", "unlike")
    ]
    assert sorted(read[4:]) == ["be", "to", "unlike"], "the table is emptied before it grows too large"


@pytest.mark.parametrize(
    "change",
    [
        lambda each: setattr(each, "pre_tokenizer", pre_tokenizers.Metaspace()),
        lambda each: setattr(each, "normalizer", normalizers.Replace(" is ", "was")),
        lambda each: setattr(each, "model", models.Unigram([("a", 0.0), (" ", 0.0)], 0)),
        lambda each: each.add_tokens(["New York"]),
    ],
    ids=["pre-tokeniser", "normaliser", "model", "added tokens"],
)
def test_a_tokeniser_that_may_look_beyond_a_blank_reads_the_whole_text(change: Any) -> None:
    library = Tokenizer.from_str(train_wordpiece(TEXTS, 300, lambda _: None).to_str())
    change(library)
    text = "This is New York"
    assert list(TextTokenizer(library).for_text().batch([text])) == [library.encode(text, add_special_tokens=False).ids]
    assert TextTokenizer(library).for_text()._words is None


def test_the_tokens_of_a_trained_vocabulary_are_known_before_it_is_trained() -> None:
    for kind, train in (
        ("wordpiece", train_wordpiece),
        ("bpe", train_byte_level_bpe),
        ("span_bpe", lambda *given: train_byte_level_bpe(*given, special="span_bpe")),
    ):
        trained = TextTokenizer(train(TEXTS * 30, 420, lambda _: None))
        folder = Path(wb.data.documents(["a"], progress=False).path).parent
        for file in folder.iterdir():
            file.unlink()
        trained.write(folder)
        assert SpecialTokens.of_folder(folder) == special_tokens_of(kind, trained.vocabulary)


def sentence_piece(path: Path, kind: int, pieces: dict[str, float]) -> Path:
    """Write a file as SentencePiece writes it (1: Unigram, 2: BPE), with a mask that its user defined."""
    proto = import_protobuf().ModelProto()
    proto.trainer_spec.model_type, proto.trainer_spec.unk_id = kind, 0
    for piece, score, role in [
        *[("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), ("<mask>", 0.0, 4)],
        *((piece, score, 1) for piece, score in pieces.items()),
    ]:
        proto.pieces.add(piece=piece, score=score, type=role)
    path.write_bytes(proto.SerializeToString())
    return path


def likeliest(word: str, scores: dict[str, float]) -> list[str]:
    """Return the pieces of a word with the largest sum of scores, of all ways to cut it."""
    cuts = [list(cut) for n in range(len(word)) for cut in itertools.combinations(range(1, len(word)), n)]
    ways = [[word[a:b] for a, b in itertools.pairwise([0, *cut, len(word)])] for cut in cuts]
    known = [way for way in ways if all(piece in scores for piece in way)]
    return max(known, key=lambda way: sum(scores[piece] for piece in way))


def merged(word: str, scores: dict[str, float]) -> list[str]:
    """Return the pieces of a word after the neighbours whose union has the best score are joined, until none has."""
    pieces = list(word)
    while found := [(scores[a + b], -at) for at, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in scores]:
        at = -max(found)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    return pieces


@pytest.mark.parametrize(("kind", "by_hand"), [(1, likeliest), (2, merged)])
def test_a_bare_file_of_sentencepiece_cuts_words_as_its_model_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: int, by_hand: Any
) -> None:
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home"))
    joined = ["er", "▁l", "▁lo", "low", "▁low", "es", "est", "▁n", "new", "▁new", "we", "ow", "lower"]
    scores = {piece: -2.0 - at / 7 for at, piece in enumerate([*joined, *"▁ lowernst".replace(" ", "")])}
    if kind == 2:  # ranks of merges
        scores = {piece: -float(at) for at, piece in enumerate(scores)}
    text, words = "lower  slow newest lowest", ["▁lower", "▁slow", "▁newest", "▁lowest"]
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "text.txt").write_text(f"{text}\n" * 100)
    numbers = {piece: number for number, piece in enumerate(["<unk>", "<s>", "</s>", "<mask>", *scores])}
    expected = [numbers[piece] for word in words for piece in by_hand(word, scores)]
    file = sentence_piece(folder / "spiece.model", kind, scores)
    for tokenizer in (file, folder):
        data = wb.data.corpus(tmp_path / "text.txt", tokenizer=tokenizer, objective="mlm")
        reader = data.reads(experiment(data, "mlm")).text_tokenizer()
        assert reader.encode(text) == expected
        assert reader.encode("slow <mask> lowest") == [
            *(numbers[piece] for piece in by_hand("▁slow", scores)),
            *(numbers[piece] for piece in ("▁", "<mask>")),
            *(numbers[piece] for piece in by_hand("▁lowest", scores)),
        ]
        assert reader.encode("?!") == [numbers["▁"], numbers["<unk>"]]
        assert reader.decode(expected) == "lower slow newest lowest"
        tokens = SpecialTokens.of_folder(data.reads(experiment(data, "mlm")).tokenizer_folder())
        assert (tokens.vocabulary, tokens.mask, tokens.end, tokens.frame[0]) == (len(numbers), 3, 2, (1,))


SMALL = {"num_threads": 1, "minloglevel": 2, "hard_vocab_limit": False, "num_sub_iterations": 1}
"""Options of a training of SentencePiece that takes a moment."""
SCRIPTS = {
    "Japanese": [(0x3041, 0x3097), (0x30A1, 0x30FB), (0x4E00, 0x4FFF), (0xFF66, 0xFF9F), (0x3099, 0x309B)],
    "Korean": [(0xAC00, 0xAD00), (0x1100, 0x1113), (0x1161, 0x1176), (0x11A8, 0x11C3), (0x3131, 0x318F)],
    "Arabic": [(0x621, 0x653), (0xFE70, 0xFEFD), (0xFDF0, 0xFDFD)],
    "Vietnamese": [(0x61, 0x7B), (0x300, 0x304), (0x306, 0x307), (0x309, 0x30A), (0x323, 0x324), (0x1EA0, 0x1EFA)],
    "emoji": [(0x1F600, 0x1F650), (0x1F3FB, 0x1F400), (0x200D, 0x200E), (0xFE0F, 0xFE10), (0x1F468, 0x1F46A)],
}
BLANKS = [*" " * 6, "  ", "\t", "\u3000", "\u00a0", "\r\n", "\u200b", "\u2003", " \u2581", "\u00ad"]


def lines_of_unicode(number: int) -> list[str]:
    """Return characters that Unicode decomposes, in all their forms, and lines of several scripts with odd blanks."""
    dice, lines = random.Random(0), []
    decomposed = [chr(code) for code in range(0x20, 0x30000) if unicodedata.decomposition(chr(code))]
    for each in decomposed[::4]:
        forms = dict.fromkeys([each, *(unicodedata.normalize(form, each) for form in ("NFC", "NFD", "NFKC", "NFKD"))])
        lines += [" ".join(forms), f"a{each}{chr(dice.choice([0x300, 0x323, 0x3099, 0x5B0, 0x64B]))}b"]
    ends = ["", "1234", "...", "…", "㌔", "ｶﾞｷﾞ", "か\u3099", "</s>", "<0x41>"]
    for _ in range(number - len(lines)):
        scripts = dice.choice([[each] for each in SCRIPTS.values()] + [list(SCRIPTS.values())])
        words = []
        for _ in range(dice.randint(1, 8)):
            letters = (chr(dice.randrange(*dice.choice(dice.choice(scripts)))) for _ in range(dice.randint(1, 8)))
            words += ["".join(letters), dice.choice(BLANKS)]
        lines.append(dice.choice(["", "", " ", "\u3000"]) + "".join(words) + dice.choice(ends))
    return lines


def test_a_model_of_sentencepiece_reads_ten_thousand_lines_as_sentencepiece_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rules go by the longest prefix of the text, and of two ways to cut a word that tie, the same one is taken."""
    sentencepiece = pytest.importorskip("sentencepiece")
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path))
    lines = lines_of_unicode(10_000)
    trained = [unicodedata.normalize("NFKC", " ".join(line.split())) for line in lines[::9]]
    for options in (
        {"model_type": "unigram"},
        {"model_type": "unigram", "byte_fallback": True, "normalization_rule_name": "identity"},
        {"model_type": "unigram", "normalization_rule_name": "nmt_nfkc_cf", "user_defined_symbols": ["<sym>", "か"]},
        {"model_type": "bpe", "byte_fallback": True, "remove_extra_whitespaces": False},
    ):
        file = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(trained),
            model_writer=file,
            vocab_size=2000,
            character_coverage=0.98,
            **SMALL,
            **options,
        )
        (tmp_path / "trained.model").write_bytes(file.getvalue())
        reader = TextTokenizer.of_folder(folder_of(str(tmp_path / "trained.model"))).for_text()
        known = sentencepiece.SentencePieceProcessor(model_proto=file.getvalue())
        texts = lines if options == {"model_type": "unigram"} else lines[::10]
        found = list(map(list, reader.batch(texts)))
        assert [text for text, ids in zip(texts, found, strict=True) if ids != known.encode(text)] == [], options
        document = " ".join(trained)  # whose sums are so large that fp32 rounds what two pieces differ by
        assert list(next(iter(reader.batch([document])))) == known.encode(document), options
        assert reader.encode("か\u3099 …") == known.encode("か\u3099 …"), options


def test_a_file_that_is_no_model_of_sentencepiece_is_refused_with_a_way_out(tmp_path: Path) -> None:
    for name, content in (("tiktoken", b"IQ== 0\nIg== 1\n"), ("empty", b""), ("garbage", bytes(range(256)))):
        (tmp_path / f"{name}.model").write_bytes(content)
        with pytest.raises(DataError, match=r"holds no Unigram or BPE model of SentencePiece.* transformers makes"):
            wb.data.corpus("demo", tokenizer=tmp_path / f"{name}.model")
    with pytest.raises(DataError, match=r"holds no tokenizer.json.*or a model of SentencePiece"):
        wb.data.corpus("demo", tokenizer=tmp_path)  # of three files, none is the one
    folder = tmp_path / "described"
    folder.mkdir()
    (folder / "spiece.model").write_bytes(bytes(range(256)))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "T5Tokenizer"}')
    with pytest.raises(DataError, match=r"pip install sentencepiece, or give .*tokenizer='.*spiece.model'"):
        wb.data.corpus("demo", tokenizer=folder)


def test_options_that_do_not_suit_the_objective_are_refused(text: Path) -> None:
    def refused(words: str, objective: str, **options: Any) -> None:
        asked = {name: options.pop(name) for name in ("seq_len", "evaluation") if name in options}
        data = wb.data.corpus(text, objective=objective, **options)
        with pytest.raises(DataError, match=words):
            wb.runs.tokenize(experiment(data, objective, **asked), progress=False)

    refused("whole_words says how masked models hide words", "clm", whole_words=True, vocab_size=400)
    refused(
        "hide 10 spans, and the tokeniser has 9 sentinels",
        "seq2seq",
        tokenizer=unigram(),
        masked_share=0.2,
        seq_len=128,
    )
    evaluation = wb.Evaluation(every=4, samples=4, masked_share=0.3)
    refused("Remove masked_share=0.3 from the evaluation", "seq2seq", vocab_size=420, evaluation=evaluation)
