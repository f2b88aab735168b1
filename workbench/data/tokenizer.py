"""`TextTokenizer`: any tokeniser as one value, made from a file, a folder, an object or a vocabulary trained here.

Its folder holds the files that `transformers.AutoTokenizer` loads, and `special_tokens.json` with what samples need to
know beside the ids. Where the tokeniser is one of the library `tokenizers`, nothing but that library reads it; one that
is written in Python, such as those with a morphological analyser, is loaded by `transformers`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import re
import shutil
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from workbench.base.errors import DataError, first_line
from workbench.base.machine import cache_home
from workbench.data.sentence_piece import SentencePiece, rules_of
from workbench.data.store import TOKENIZER_FACTS as FACTS
from workbench.data.store import only_process, writing_to
from workbench.data.text import Advance

Ids = tuple[int, ...]

FORMAT = 2
"""Version of the folder's format; part of its name."""
FAST = "tokenizer.json"
"""File of a tokeniser of the library `tokenizers`."""
CONFIG = "tokenizer_config.json"
TEXT_FILES = (".json", ".txt", ".model", ".spm", ".tiktoken", ".jinja", ".vocab", ".dic")
"""Endings of the files of a folder that may belong to a tokeniser; weights have others."""
ROLES = {
    "cls_token": ("[CLS]", "<s>"),
    "sep_token": ("[SEP]", "</s>"),
    "mask_token": ("[MASK]", "<mask>"),
    "pad_token": ("[PAD]", "<pad>"),
    "unk_token": ("[UNK]", "<unk>"),
    "bos_token": ("<s>", "<|begin_of_text|>", "<bos>"),
    "eos_token": ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>"),
}
"""Special tokens by which a `tokenizer.json` alone is read, since it does not name their roles; the first that a
vocabulary has is used."""
SENTINEL = "<extra_id_{}>"
"""Token that stands for a hidden span in T5 (arXiv:1910.10683), numbered from 0."""
SENTENCE_PIECE = (".model", ".spm")
"""Endings of a file that SentencePiece wrote (https://github.com/google/sentencepiece)."""
READING = "sentence_piece.json"
"""File of a tokeniser of SentencePiece that says how texts are read, which `tokenizer.json` says but roughly."""
CONTROL, USER_DEFINED = 3, 4
"""Types of a piece in SentencePiece's file: symbols that text never is, and those that are tokens in every text."""
LONGEST_WORD = 250
"""Letters without a blank of which a trainer of vocabularies makes one word."""
LONG_WORD = re.compile(rf"(?<!\S)\S{{{LONGEST_WORD},}}")
MOST_IDS = 1 << 24
"""Number of ids of the largest vocabulary: that of a named model."""
MOST_LETTERS = 1 << 22
"""Letters of the different words of a text whose ids are kept; the words of prose have a twentieth of that."""
REMEDY = (
    "Give a tokeniser of transformers, the folder into which save_pretrained wrote one, a tokenizer.json, a folder "
    "with vocab.json and merges.txt, or a model of SentencePiece (*.model)."
)


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of a tokeniser that are no text, and how they frame samples."""

    vocabulary: int
    """The largest id, and one more."""
    special: Ids
    """Ids that stand for no text: special tokens, and gaps of the vocabulary."""
    mask: int | None = None
    end: int | None = None
    """Id that ends a document."""
    begin: int | None = None
    """Id with which the tokeniser itself begins a text, such as Llama's `<s>`; each document begins with it."""
    frame: tuple[Ids, Ids, Ids] = ((), (), ())
    """Ids before a sample, between two segments, and after the last segment."""
    sentinels: Ids = ()
    line_breaks: bool = False
    """True if ids tell a line break from a blank, so that paragraphs are separated by one."""

    @property
    def prefix(self) -> Ids:
        return self.frame[0]

    @property
    def suffix(self) -> Ids:
        return self.frame[2]

    @cached_property
    def words(self) -> NDArray[np.int64]:
        """Ids that stand for text, ascending."""
        return np.setdiff1d(np.arange(self.vocabulary), np.asarray(self.special, dtype=np.int64))

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "words"}

    @classmethod
    def of_folder(cls, folder: Path) -> SpecialTokens:
        """Read the facts of a tokeniser's folder."""
        fields: dict[str, Any] = json.loads((folder / FACTS).read_text())["special_tokens"]
        fields["frame"] = tuple(tuple(ids) for ids in fields["frame"])
        given: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
        return cls(**given)


class TextTokenizer:
    """A tokeniser of `tokenizers`, or one of `transformers` that is written in Python, with the same few methods."""

    def __init__(self, library: Any, reading: SentencePiece | None = None) -> None:
        """`reading` goes before the library, which does not normalise then, or, of a Unigram model, instead of it."""
        self.library, self._reading = library, reading
        self.is_fast = isinstance(library, Tokenizer)
        self._words: dict[str, list[int]] | None = None
        """Ids of the words of a text so far, for a tokeniser whose words do not depend on what is beside them."""
        self._letters = 0

    @classmethod
    def of_folder(cls, folder: Path) -> TextTokenizer:
        """Load the tokeniser that `write` left in a folder."""
        if (folder / READING).exists():
            library = Tokenizer.from_file(str(folder / FAST))
            library.normalizer = normalizers.Sequence([])
            library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=library.pre_tokenizer.split)
            return cls(library, SentencePiece(json.loads((folder / READING).read_text())))
        if (folder / FAST).exists():
            return cls(Tokenizer.from_file(str(folder / FAST)))
        return cls(named_tokenizer(folder))

    def for_text(self) -> TextTokenizer:
        """Return the tokeniser set to read text, in which a `[SEP]` is text, whole and one by one."""
        if self.is_fast:
            self.library.encode_special_tokens = True
            self.library.no_padding()
            self.library.no_truncation()
            self._words = {} if _divides_at_blanks(self.library) else None
        return self

    def batch(self, texts: list[str]) -> Iterable[list[int]]:
        """Return the ids of each text, without special tokens; call `for_text` before."""
        if self._words is not None:
            return self._batch_of_words(texts, self._words)
        if self._reading is not None:
            texts = list(map(self._reading.normalization, texts))
            if self._reading.unigram is not None:
                return map(self._reading.unigram, texts)
        if self.is_fast:
            return (encoding.ids for encoding in self.library.encode_batch_fast(texts, add_special_tokens=False))
        # Its methods for batches do the same one after the other, and warn of texts that are longer than the model.
        options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
        return (self.library(text, **options)["input_ids"] for text in texts)

    def _batch_of_words(self, texts: list[str], known: dict[str, list[int]]) -> Iterator[list[int]]:
        """Return the ids of each text, for which each of its different words is read once: a word comes again soon."""
        words_of = [text.split(" ") for text in texts]
        new = list({word for words in words_of for word in words} - known.keys())
        self._letters += sum(map(len, new))
        if self._letters > MOST_LETTERS:
            known.clear()
            new, self._letters = list({word for words in words_of for word in words}), 0
        encodings = self.library.encode_batch_fast(new, add_special_tokens=False)
        known.update(zip(new, (encoding.ids for encoding in encodings), strict=True))
        return (list(itertools.chain.from_iterable(map(known.__getitem__, words))) for words in words_of)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text in which special tokens, such as a mask, are recognised."""
        if self._reading is not None:
            text = self._reading.normalization(text)
            if self._reading.unigram is not None and not any(special in text for special in self._special_tokens):
                return self._reading.unigram(text)
        if self.is_fast:
            return list(self.library.encode(text, add_special_tokens=False).ids)
        return list(self.library(text, add_special_tokens=False, verbose=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids without its special tokens."""
        return str(self.library.decode(list(ids), skip_special_tokens=True))

    def token(self, number: int) -> str:
        """Return the token with an id."""
        if self.is_fast:
            return str(self.library.id_to_token(number))
        return str(self.library.convert_ids_to_tokens(number))

    @cached_property
    def ids(self) -> dict[str, int]:
        """Id of each token, added ones included."""
        return dict(self.library.get_vocab())

    @property
    def vocabulary(self) -> int:
        """The largest id, and one more."""
        return int(max(self.ids.values(), default=-1)) + 1

    def joints(self) -> NDArray[np.uint8]:
        """Return for each id the kinds of word that it goes on with at its left and at its right, shape `(ids, 2)`.

        A token continues the word of the token before it if the bits at its left and at the other's right meet.
        WordPiece marks the tokens that continue a word (`##`); SentencePiece (`▁`) and byte-level BPE (`Ġ`) mark
        those that begin one. Byte-level words also end where letters, digits and other signs meet, as GPT-2 splits
        text; bytes that are no whole character count as letters,
        and `n't` is two words. A tokeniser without any mark has words of one token.
        """
        tokens = self.ids
        joints = np.zeros((self.vocabulary, 2), dtype=np.uint8)
        added = set(self._special_ids())
        parts = json.loads(self.library.to_str()) if self.is_fast else {"model": {}}
        byte_level = "ByteLevel" in json.dumps(parts.get("pre_tokenizer"))
        marks_words = any(token.startswith("▁") for token in tokens)
        ending = parts["model"].get("end_of_word_suffix")
        prefix = parts["model"].get("continuing_subword_prefix") or "##"
        # Byte-level vocabularies write a byte as itself where it prints, else as a character from 256 on: GPT-2's table
        # (https://github.com/openai/gpt-2, `encoder.py`).
        printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = (byte for byte in range(256) if byte not in printed)
        of_byte = {chr(byte): byte for byte in printed} | {chr(256 + at): byte for at, byte in enumerate(others)}
        for token, number in tokens.items():
            if number in added:
                continue
            if byte_level:
                text = bytes(of_byte.get(character, 63) for character in token).decode(errors="replace")
                # A blank alone belongs to the word after it.
                joints[number] = _kind(text[:1]), 7 if text == " " else _kind(text[-1:])
            elif marks_words:
                joints[number] = (not token.startswith("▁"), 1)
            elif ending:
                joints[number] = (1, not token.endswith(ending))
            else:
                joints[number] = (token.startswith(prefix) and len(token) > len(prefix), 1)
        return joints

    @cached_property
    def _special_tokens(self) -> list[str]:
        return [token.content for token in self.library.get_added_tokens_decoder().values() if token.special]

    def _special_ids(self) -> list[int]:
        if self.is_fast:
            return [number for number, token in self.library.get_added_tokens_decoder().items() if token.special]
        return list(self.library.all_special_ids)

    def write(self, folder: Path, named: Any = None, reading: Mapping[str, Any] | None = None) -> None:
        """Write the files that `AutoTokenizer` loads, and what samples need to know, into an existing folder.

        `named` is the tokeniser of `transformers` whose files are written; without, special tokens are known by name.
        With a `reading`, which is written beside, texts are read as SentencePiece reads them.
        """
        if named is not None:
            named.save_pretrained(folder)
            named_tokens = {role: getattr(named, role, None) for role in ROLES}
            roles = {role: str(token) for role, token in named_tokens.items() if token is not None}
        else:
            self.library.save(str(folder / FAST))
            added = {str(token.content) for token in self.library.get_added_tokens_decoder().values() if token.special}
            present = {role: [name for name in names if name in added] for role, names in ROLES.items()}
            roles = {role: names[0] for role, names in present.items() if names}
            inputs = ["input_ids", "attention_mask"]
            if any(self.library.encode("a", "a").type_ids):  # it tells two segments apart, and so does its model
                inputs.insert(1, "token_type_ids")
            described = {"tokenizer_class": "TokenizersBackend", "model_input_names": inputs, **roles}
            (folder / CONFIG).write_text(json.dumps(described, indent=2) + "\n")
        if not self.is_fast:
            (folder / FAST).unlink(missing_ok=True)  # it would lack what is written in Python
        if reading is not None:
            (folder / READING).write_text(json.dumps(reading))
        facts = {"files": sorted(path.name for path in folder.iterdir()), "special_tokens": self._facts(roles)}
        (folder / FACTS).write_text(json.dumps(facts, indent=2) + "\n")

    def _facts(self, roles: dict[str, str]) -> dict[str, Any]:
        number = {role: self.ids[token] for role, token in roles.items() if token in self.ids}
        known = {*self._special_ids(), *(number[role] for role in number if role != "unk_token")}
        sentinels: list[int] = []
        while (sentinel := self.ids.get(SENTINEL.format(len(sentinels)))) is not None:
            sentinels.append(sentinel)
        gaps = set(range(self.vocabulary)) - set(self.ids.values())
        frame, begin = self._frame(), number.get("bos_token")
        begins = begin in frame[0] and begin != number.get("eos_token")
        if frame == ((), (), ()) and {"cls_token", "sep_token"} <= number.keys():
            frame = (number["cls_token"],), (number["sep_token"],), (number["sep_token"],)
        plain = TextTokenizer(Tokenizer.from_str(self.library.to_str())) if self.is_fast else self
        with_break, with_blank = plain.for_text().batch(["a\nb", "a b"])
        facts = SpecialTokens(
            vocabulary=self.vocabulary,
            special=tuple(sorted(known | gaps | set(sentinels))),
            mask=number.get("mask_token"),
            end=number.get("eos_token"),
            begin=begin if begins else None,
            frame=frame,
            sentinels=tuple(sentinels),
            line_breaks=with_break != with_blank and "\n" in self.decode(with_break),
        )
        return dataclasses.asdict(facts)

    def _frame(self) -> tuple[Ids, Ids, Ids]:
        """Return the special tokens that the tokeniser sets around one segment, and between two."""
        if self.is_fast:
            one, two = self.library.encode("a"), self.library.encode("a", "a")
            ids = [list(encoding.ids) for encoding in (one, two)]
            plain = [not special for special in one.special_tokens_mask], [not s for s in two.special_tokens_mask]
        else:
            content = self.encode("a")
            ids = [self.library.build_inputs_with_special_tokens(content)]
            ids.append(self.library.build_inputs_with_special_tokens(content, content))
            plain = tuple([token in content for token in each] for each in ids)  # type: ignore[assignment]
        if any(plain[0]) and not all(plain[0]):
            first, last = plain[0].index(True), len(plain[0]) - plain[0][::-1].index(True)
            inside = [at for at, is_text in enumerate(plain[1]) if is_text]
            gap = [at for at in range(inside[0], inside[-1]) if not plain[1][at]]
            return tuple(ids[0][:first]), tuple(ids[1][at] for at in gap), tuple(ids[0][last:])
        return (), (), ()


def _divides_at_blanks(library: Tokenizer) -> bool:
    """Return True for a tokeniser that reads a text as it reads its words, divided at blanks, one by one.

    WordPiece reads one word at a time, BERT's pre-tokeniser ends a word at each blank, and the normalisers of our own
    vocabularies and of BERT change no letter because of one beyond a blank: no letter composes with a blank (Unicode
    Standard Annex 15). Special tokens of a text are text (`for_text`); other added tokens may hold blanks.
    """
    own = [_untrained_wordpiece({}, accents).normalizer for accents in (False, True)]
    return (
        type(library.model) is models.WordPiece
        and type(library.pre_tokenizer) is pre_tokenizers.BertPreTokenizer
        and (
            type(library.normalizer) is normalizers.BertNormalizer
            or library.normalizer.__getstate__() in [each.__getstate__() for each in own]
        )
        and all(token.special for token in library.get_added_tokens_decoder().values())
    )


def _kind(character: str) -> int:
    """Return the bit of letters, digits or other signs for a character, and no bit for a blank or none."""
    if not character or character.isspace():
        return 0
    category = unicodedata.category(character)[0]
    return {"L": 1, "N": 2}.get(category, 1 if character == "\ufffd" else 4)


def files_of(path: str) -> tuple[Path, ...]:
    """Return the files that decide what a tokeniser does; raise `DataError` if there are none at that path."""
    given = Path(path)
    if os.path.isfile(given):  # unlike `Path.is_file` also for a name that is too long for a file
        return (given,)
    if not os.path.isdir(given):
        raise DataError(f"There is no tokeniser at {path}. {REMEDY}")
    files = tuple(sorted(file for file in given.iterdir() if file.is_file() and file.name.endswith(TEXT_FILES)))
    if (given / FACTS).is_file():  # of the cache, where the facts about a tokenised text may lie beside its tokeniser
        files = tuple(file for file in files if file.name != "facts.json")
    names = {file.name for file in files}
    is_known = bool(names & {FAST, CONFIG, "config.json"}) or {"vocab.json", "merges.txt"} <= names
    if not is_known and len(_sentence_pieces(names)) != 1:
        raise DataError(f"The folder {path} holds no {FAST}. {REMEDY}")
    return files


def digest_of(path: str) -> str:
    """Return a hash of the content of a tokeniser's files, wherever they are."""
    digest = hashlib.sha256(f"{FORMAT}".encode())
    files = files_of(path)
    try:
        for file in files:
            digest.update((file.name if len(files) > 1 else "").encode() + hashlib.sha256(file.read_bytes()).digest())
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}. {REMEDY}") from None
    return digest.hexdigest()


def folder_of(path: str) -> Path:
    """Return the folder of the cache with the tokeniser of a file or folder, after reading it if it is new."""
    folder = cache_home() / "tokenizers" / digest_of(path)[:16]
    if not (folder / FACTS).exists():
        with only_process(folder):
            if not (folder / FACTS).exists():
                tokenizer, named, reading = _loaded(path)
                part = folder.with_name(f"{folder.name}.part")
                shutil.rmtree(part, ignore_errors=True)
                part.mkdir()
                tokenizer.write(part, named, reading)
                shutil.rmtree(folder, ignore_errors=True)
                part.rename(folder)
    return folder


def other_tokens(given: Path, known: str) -> str:
    """Return how the ids of a tokeniser of the cache differ from those of the tokeniser beside a model's weights.

    `known` is the folder of the weights. The result is a clause with their number and an example. It is empty where
    each id stands for the same token, or for none of the folder's, and where the folder holds no tokeniser that loads.
    """
    try:
        beside = folder_of(known)
    except DataError:
        return ""
    if beside == given:
        return ""
    tokens, own = (
        {number: token for token, number in TextTokenizer.of_folder(each).ids.items()} for each in (beside, given)
    )
    wrong = [number for number in sorted(own) if tokens.get(number, own[number]) != own[number]]
    if not wrong:
        return ""
    example = f"{wrong[0]:,} is {own[wrong[0]]!r} instead of {tokens[wrong[0]]!r}"
    return f"{len(wrong):,} of its {len(own):,} ids stand for other tokens there, such as {example}"


def saved(tokenizer: Any) -> Path:
    """Write a tokeniser of `transformers` or `tokenizers` to the cache, and return its folder."""
    fast = isinstance(tokenizer, Tokenizer)
    if not fast and not (hasattr(tokenizer, "save_pretrained") and hasattr(tokenizer, "get_vocab")):
        raise DataError(f"tokenizer is a {type(tokenizer).__name__}. {REMEDY}")
    root = cache_home() / "tokenizers"
    with writing_to(root, "cache of tokenisers"):
        part = root / f"{os.getpid()}.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        try:
            if fast:
                TextTokenizer(tokenizer).write(part)
                (part / FACTS).unlink()
            else:
                tokenizer.save_pretrained(part)
            folder = root / f"given-{digest_of(str(part))[:16]}"
            if not folder.exists():
                part.rename(folder)
            return folder
        finally:
            shutil.rmtree(part, ignore_errors=True)


def _loaded(path: str) -> tuple[TextTokenizer, Any, dict[str, Any] | None]:
    """Load a tokeniser, the object of `transformers` that names its special tokens, and SentencePiece's reading.

    Each of the last two is None if there is none.
    """
    files = {file.name: file for file in files_of(path)}
    is_alone = os.path.isfile(path)
    for file in files.values():
        _check_ids(file)
    try:
        pieces = [] if {FAST, CONFIG, "config.json", "merges.txt"} & files.keys() else _sentence_pieces(files)
        if pieces:
            library, reading = _from_sentence_piece(files[pieces[0]])
            return TextTokenizer(library), None, reading
        if {READING, FAST} <= files.keys():  # an export of one
            reading = json.loads(files[READING].read_text())
            SentencePiece(reading)
            return TextTokenizer(Tokenizer.from_file(str(files[FAST]))), None, reading
        if is_alone or (FAST in files and CONFIG not in files):
            file = next(iter(files.values())) if is_alone else files[FAST]
            return TextTokenizer(Tokenizer.from_file(str(file))), None, None
        if CONFIG not in files and "config.json" not in files:
            return TextTokenizer(_from_merges(str(files["vocab.json"]), str(files["merges.txt"]))), None, None
        named = named_tokenizer(Path(path))
    except Exception as error:  # the libraries raise every type
        remedy, bare = REMEDY, [] if is_alone else _sentence_pieces(files)
        if bare:  # transformers asks for tiktoken where it lacks the library sentencepiece
            remedy = f"pip install sentencepiece, or give the bare file: tokenizer={str(files[bare[0]])!r}."
        raise DataError(f"{path} cannot be loaded as a tokeniser: {first_line(error)}. {remedy}") from error
    backend = getattr(named, "backend_tokenizer", None)
    try:
        return TextTokenizer(named if backend is None else Tokenizer.from_str(backend.to_str())), named, None
    except Exception:  # a part of it is written in Python
        return TextTokenizer(named), named, None


def _check_ids(file: Path) -> None:
    """Raise `DataError` for an id that no vocabulary has: `tokenizers` writes, and we keep, a row for each up to it."""
    try:
        described = json.loads(file.read_bytes()) if file.suffix == ".json" else {}
        model = described.get("model", {})
        added = described.get("added_tokens", ())
        tables = (model.get("vocab"), described if file.name in ("vocab.json", "added_tokens.json") else {})
        ids = {token: number for table in tables if isinstance(table, dict) for token, number in table.items()}
        ids |= {token["content"]: token["id"] for token in added}
        ids |= {token["content"]: int(number) for number, token in described.get("added_tokens_decoder", {}).items()}
        token, largest = max(ids.items(), key=lambda item: item[1], default=("", 0))
    except (AttributeError, KeyError, TypeError, ValueError):  # which the libraries word
        return
    if largest >= MOST_IDS:
        raise DataError(
            f"{file} gives {token[:40]!r} the id {largest:,}, and ids up to {MOST_IDS - 1:,} can be trained. Number "
            "its tokens from 0 on."
        )


def named_tokenizer(folder: Path) -> Any:
    """Return the tokeniser of a folder as `transformers` loads it."""
    import transformers

    return transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)


def _sentence_pieces(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if name.endswith(SENTENCE_PIECE))


def _from_sentence_piece(path: Path) -> tuple[Tokenizer, dict[str, Any]]:
    """Return the tokeniser of `tokenizers` with the pieces and scores of a file of SentencePiece, and how that reads.

    The normalisation of the library itself, which an export has, goes by graphemes.

    SentencePiece begins each text with a blank and joins blanks; symbols that its user defined are tokens wherever they
    stand. A Unigram model of `tokenizers` finds control symbols, such as `</s>`, in a text as well.
    """
    from transformers.convert_slow_tokenizer import generate_merges, import_protobuf

    proto = import_protobuf().ModelProto()
    try:
        proto.ParseFromString(path.read_bytes())
    except Exception:  # protobuf's two implementations raise different types
        proto.Clear()
    trained, normal, pieces = proto.trainer_spec, proto.normalizer_spec, proto.pieces
    if not pieces or trained.model_type not in (1, 2):
        raise ValueError(
            "it holds no Unigram or BPE model of SentencePiece. A file of ranks (tiktoken's) says neither how text is "
            "split nor which tokens are special: transformers makes a tokenizer.json of the whole folder by "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(other)"
        )
    fallback = bool(trained.byte_fallback)
    if trained.model_type == 1:
        vocabulary = [(piece.piece, piece.score) for piece in pieces]
        tokenizer = Tokenizer(models.Unigram(vocabulary, trained.unk_id, fallback))
    else:
        numbers = {piece.piece: number for number, piece in enumerate(pieces)}
        others = {piece.piece for piece in pieces if piece.type != 1}
        merges = generate_merges(numbers, {piece.piece: piece.score for piece in pieces}, others)
        options = {"unk_token": trained.unk_piece, "fuse_unk": True, "byte_fallback": fallback}
        tokenizer = Tokenizer(models.BPE(numbers, merges, **options))
    defined = [piece.piece for piece in pieces if piece.type == USER_DEFINED]
    steps: list[Any] = [normalizers.Precompiled(normal.precompiled_charsmap)] if normal.precompiled_charsmap else []
    if normal.remove_extra_whitespaces:
        # Between two symbols a blank at an end is one inside the text.
        steps += [] if defined else [normalizers.Strip()]
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    tokenizer.normalizer = normalizers.Sequence(steps)
    # A text that symbols divide has one blank at its beginning, not one in each part.
    first = ("first" if defined else "always") if normal.add_dummy_prefix else "never"
    normal_pieces = [piece.piece for piece in pieces if piece.type != USER_DEFINED]
    has_suffix = bool(trained.treat_whitespace_as_suffix)
    is_split = "▁" in normal_pieces and not has_suffix and not any("▁" in piece[1:] for piece in normal_pieces)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=first, split=is_split)
    parts = [decoders.ByteFallback(), decoders.Fuse()] if fallback else []
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Metaspace(prepend_scheme=first)])
    roles = set(itertools.chain(*ROLES.values()))
    special = [piece.piece for piece in pieces if piece.type == CONTROL or piece.piece in roles]
    tokenizer.add_special_tokens([AddedToken(each, normalized=False) for each in special])
    tokenizer.add_tokens([AddedToken(each, normalized=False) for each in defined if each not in special])
    described = {
        "rules": rules_of(normal.precompiled_charsmap),
        "symbols": defined,
        "joins_blanks": bool(normal.remove_extra_whitespaces),
        "first_blank": bool(normal.add_dummy_prefix) and not has_suffix,
        "last_blank": bool(normal.add_dummy_prefix) and has_suffix,
    }
    listed = [(piece.piece, piece.score, piece.type) for piece in pieces]
    unigram = {"pieces": listed, "unknown": trained.unk_id, "fallback": fallback} if trained.model_type == 1 else None
    return tokenizer, {"normalization": described, "unigram": unigram}


def _from_merges(vocabulary: str, merges: str) -> Tokenizer:
    """Return GPT-2's tokeniser with the vocabulary of two files."""
    tokenizer = Tokenizer(models.BPE.from_file(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # The files do not say which tokens are special. Those of OPT and RoBERTa begin with "<s>".
    fairseq = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"] if tokenizer.token_to_id("<s>") == 0 else ["<|endoftext|>"]
    present = [token for token in fairseq if tokenizer.token_to_id(token) is not None]
    if present:
        tokenizer.add_special_tokens(present)
    return tokenizer


# Vocabularies are trained on a text: WordPiece for masked models, byte-level BPE for the others.

SMALLEST_WITH_WORDS = 256
"""Vocabulary size from which WordPiece keeps at least half of its entries for pieces of words."""
SENTINELS = 100
"""Sentinels of a vocabulary for sequence-to-sequence models, as T5 has (arXiv:1910.10683)."""
SPECIAL_TOKENS = {
    "wordpiece": ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    "bpe": ("<|endoftext|>",),
    "span_bpe": ("<pad>", "</s>", *(f"<extra_id_{number}>" for number in range(SENTINELS))),
}
"""Special tokens of each type of tokeniser that is trained here; the id of a token is its index."""
ACCENTS = Regex(r"[\u0300-\u036f]")
"""Combining marks of Latin, Greek and Cyrillic letters. Those of other scripts are letters of their own: the voiced
marks of Japanese (U+3099, U+309A), and vowels of Indic scripts and Thai."""


def special_tokens_of(tokenizer_type: str, vocab_size: int) -> SpecialTokens:
    """Return the special tokens of a tokeniser that is trained here, with up to `vocab_size` ids."""
    names = SPECIAL_TOKENS[tokenizer_type]
    number = {name: names.index(name) for name in names}
    special = tuple(range(len(names)))
    if tokenizer_type == "wordpiece":
        cls, sep = (number["[CLS]"],), (number["[SEP]"],)
        return SpecialTokens(vocab_size, special, mask=number["[MASK]"], frame=(cls, sep, sep))
    if tokenizer_type == "bpe":
        return SpecialTokens(vocab_size, special, end=0, line_breaks=True)
    end = number["</s>"]
    return SpecialTokens(
        vocab_size, special, end=end, frame=((), (end,), (end,)), sentinels=special[2:], line_breaks=True
    )


def train_wordpiece(sample: list[str], vocab_size: int, advance: Advance, *, strip_accents: bool = False) -> Tokenizer:
    """Train a tokeniser as BERT's uncased one: Unicode is normalised (NFKC), case lowered, and ideographs separated.

    Unlike BERT's it keeps accents, unless `strip_accents` asks for Latin, Greek and Cyrillic letters without.

    By default the trainer numbers the continuing characters (`##a`) in the order of a hash table and breaks ties by
    those numbers, so that every process learns another vocabulary. Naming them beforehand, as special tokens, makes
    training repeatable; the returned tokeniser is built from the result and has BERT's five special tokens only.
    """
    special = SPECIAL_TOKENS["wordpiece"]
    tokenizer = _untrained_wordpiece({}, strip_accents)
    # Each character may enter twice, alone and continuing a word, so that half of the entries hold it at most. A tiny
    # vocabulary is all characters: with a quarter of 64 entries, every third token of English would be unknown.
    room = vocab_size - len(special)
    limit = room // 2 if vocab_size < SMALLEST_WITH_WORDS else min(6000, room // 4)
    alphabet, continuing = _alphabet(sample, tokenizer, limit)
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        special_tokens=[*special, *(f"##{character}" for character in continuing)],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_counted(sample, advance), trainer=trainer)
    trained = _untrained_wordpiece(tokenizer.get_vocab(), strip_accents)
    trained.add_special_tokens(list(special))
    frame = [(token, trained.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    trained.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=frame
    )
    return trained


def _untrained_wordpiece(vocabulary: dict[str, int], strip_accents: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=100))
    bert = normalizers.BertNormalizer(clean_text=True, handle_chinese_chars=True, strip_accents=False, lowercase=True)
    without = [normalizers.NFD(), normalizers.Replace(ACCENTS, ""), normalizers.NFC()] if strip_accents else []
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), *without, bert])
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    return tokenizer


def _alphabet(sample: list[str], tokenizer: Tokenizer, limit: int) -> tuple[list[str], list[str]]:
    """Return the `limit` most frequent characters after normalisation, and those of them that can continue a word."""
    counts = np.zeros(sys.maxunicode + 1, dtype=np.int64)
    for first in range(0, len(sample), 1024):
        # Marks that a text writes after their letters are composed first, or the letters would not be counted.
        text = unicodedata.normalize("NFKC", "\n".join(sample[first : first + 1024]))
        counts += np.bincount(np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32), minlength=len(counts))
    frequency: Counter[str] = Counter()
    continuing: set[str] = set()
    for code in np.flatnonzero(counts).tolist():
        words = tokenizer.pre_tokenizer.pre_tokenize_str(tokenizer.normalizer.normalize_str("a" + chr(code)))
        for character in "".join(word for word, _ in words)[1:]:
            frequency[character] += int(counts[code])
        if len(words) == 1:
            continuing.update(words[0][0][1:])
    ranked = sorted(frequency, key=lambda character: (-frequency[character], character))
    alphabet = sorted(ranked[:limit])
    return alphabet, [character for character in alphabet if character in continuing]


def train_byte_level_bpe(sample: list[str], vocab_size: int, advance: Advance, *, special: str = "bpe") -> Tokenizer:
    """Train GPT-2's tokeniser: byte-pair encoding over bytes, so that no character is unknown.

    `special` names the entry of `SPECIAL_TOKENS` with which the vocabulary begins. With sentinels, the tokeniser ends a
    text with `</s>`, as T5's does.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIAL_TOKENS[special]),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_counted(sample, advance), trainer=trainer)
    if special == "span_bpe":
        tokenizer.post_processor = processors.TemplateProcessing(
            single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", tokenizer.token_to_id("</s>"))]
        )
    return tokenizer


def _cut(word: re.Match[str]) -> str:
    return " ".join(word[0][at : at + LONGEST_WORD] for at in range(0, len(word[0]), LONGEST_WORD))


def _counted(sample: list[str], advance: Advance) -> Iterator[list[str]]:
    for first in range(0, len(sample), 1024):
        batch = sample[first : first + 1024]
        # A trainer joins the pairs of letters of a word one after the other, in a time that grows with its square.
        yield [LONG_WORD.sub(_cut, text) if len(text) >= LONGEST_WORD else text for text in batch]
        advance(len(batch))
