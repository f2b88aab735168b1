"""Tokenising is the same by any number of processes, goes on after a kill, and takes nothing half-written for whole."""

from __future__ import annotations

import bz2
import errno
import os
import random
import resource
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow
import pytest

from workbench.base.errors import DataError
from workbench.data import text as texts
from workbench.data.store import PartialTokens, write_documents
from workbench.data.streaming import Encoder, encode_all
from workbench.data.text import Files
from workbench.data.tokenizing import TokensKey, tokenised

STORED = ("tokens.bin", "documents.bin", "runs.npy", "tokenizer.json", "tokenizer_config.json", "special_tokens.json")
WORDS = ("the", "Fox", "naïve", "日本", "　", "\t", "a  b", "🙂", "[SEP]", "x" * 30)


def sentences(lines: int, seed: int = 0) -> str:
    """Return lines of odd words, a fifth of them blank in one of several ways."""
    dice = random.Random(seed)
    text = [
        dice.choice(("", "  ", "　", "\r")) if dice.random() < 0.2 else " ".join(dice.choices(WORDS, k=12))
        for _ in range(lines)
    ]
    return "\ufeff" + "\n".join(text)


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(texts, "BLOCK_BYTES", 1 << 12)
    path = tmp_path / "text.txt"
    path.write_text(sentences(1200), newline="")
    return path


def stored(path: Path, kind: str = "bpe", workers: int = 0, key: str = "one") -> dict[str, bytes]:
    """Tokenise a file, or the files of a folder, and return what the cache then holds."""
    paths = tuple(sorted(path.iterdir())) if path.is_dir() else (path,)
    source = Files(paths, one_document_each=path.is_dir())
    store, _ = tokenised(TokensKey(key, kind, 400), "text", lambda: source, False, workers)
    assert not list(store.folder.parent.glob("*.part"))
    assert {file.name for file in store.folder.iterdir()} == {*STORED, "facts.json"}
    return {name: (store.folder / name).read_bytes() for name in STORED}


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_processes_and_sizes_of_blocks_do_not_matter(text: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    by_two = stored(text, kind, workers=2, key="two")
    assert by_two == stored(text, kind, key="one")
    monkeypatch.setattr(texts, "BLOCK_BYTES", 1 << 20)
    assert by_two == stored(text, kind, key="large")


@pytest.mark.usefixtures("text")
def test_small_files_share_a_block_and_each_is_a_document(tmp_path: Path) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number:02}.txt").write_text(sentences(6, number) if number % 7 else "\n \n")
    files = Files(tuple(sorted(folder.iterdir())), one_document_each=True)
    assert len(list(files.blocks())) < 20
    small = stored(folder)
    assert len(np.frombuffer(small["documents.bin"], np.int64)) == 34
    for number, block in enumerate(files.blocks()):  # from every place where work can go on
        rest = [paragraph for later in files.blocks(block.end) for paragraph in later.paragraphs()]
        whole = [paragraph for later in list(files.blocks())[number + 1 :] for paragraph in later.paragraphs()]
        assert rest == whole


def test_a_line_of_any_length_is_read_in_blocks_and_cut_as_a_whole_one(tmp_path: Path) -> None:
    for line in ("word  " * 900_000, "y" * 2_500_000, "日本 " * 400_000, " " * 3_000_000 + "end"):
        path = tmp_path / "line.txt"
        path.write_text(f"before\n\n{line}\nafter")
        blocks = list(Files((path,), one_document_each=False).blocks())
        assert max(len(part.text) for block in blocks for part in block.parts) <= 4 * texts.BLOCK_BYTES
        found = [paragraph for block in blocks for paragraph in block.paragraphs()]
        pieces = [piece.decode().strip() for piece in texts._pieces(line.encode())]
        pieces = [piece for piece in pieces if piece]
        assert max(map(len, pieces)) <= texts.LONGEST_LINE
        starts = [True] + [False] * len(pieces)
        assert found == [(True, "before"), *zip(starts, pieces, strict=False), (False, "after")]


KILLED = """
import os, random, signal, sys
from pathlib import Path
from workbench.data import text, tokenizing
from workbench.data.store import PartialTokens
text.BLOCK_BYTES = 1 << 12
source = text.Files((Path(sys.argv[1]),), one_document_each=False)
dice, write = random.Random(3), PartialTokens._write
for attempt in range(10):
    written, last, part = 0, dice.randint(4, 18), dice.choice((0, 0.5, 1))

    def write_or_die(file, content):
        global written
        written += 1
        if written == last:
            write(file, content[: int(part * len(content))])
            os.kill(os.getpid(), signal.SIGKILL)
        write(file, content)

    PartialTokens._write = staticmethod(write_or_die)
    if not (process := os.fork()):
        key = tokenizing.TokensKey("killed", "bpe", 400)
        tokenizing.tokenised(key, "text", lambda: source, False, attempt % 5 == 0)
        os._exit(0)
    ended = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    print(ended, (Path(sys.argv[2]) / "progress.jsonl").read_bytes().count(10))
"""


def test_killed_ten_times_in_the_middle_of_a_write_the_tokens_are_those_of_one_go(text: Path) -> None:
    text.write_text(sentences(6000), newline="")
    part = TokensKey("killed", "bpe", 400).folder.with_suffix(".part")
    command = [sys.executable, "-c", KILLED, str(text), str(part)]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    ended, done = zip(*(map(int, line.split()) for line in said.splitlines()), strict=True)
    assert ended == (-signal.SIGKILL,) * 10, "the text is too short to be killed ten times"
    assert list(done) == sorted(set(done)), "work does not go on where it stopped"
    assert not (part.with_suffix("") / "facts.json").exists()
    assert stored(text, workers=1, key="killed") == stored(text, key="one go")


def _lines(part: Path) -> int:
    try:
        return (part / "progress.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def stopped(text: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, after: int = 5) -> Path:
    """Tokenise until a block cannot be written, and return the folder of what is left."""
    calls, write = iter(range(1000)), PartialTokens.append

    def append(self: Any, *args: Any) -> None:
        if next(calls) == after:
            raise error
        write(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(PartialTokens, "append", append)
        with pytest.raises((DataError, KeyboardInterrupt)):
            stored(text)
    return TokensKey("one", "bpe", 400).folder.with_suffix(".part")


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 3)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def grow(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"{}")


@pytest.mark.parametrize("name", ["tokens.bin", "documents.bin", "progress.jsonl", "tokenizer.json"])
@pytest.mark.parametrize("damage", [cut, flip, grow, Path.unlink])
def test_damage_to_unfinished_tokens_is_made_good(
    text: Path, monkeypatch: pytest.MonkeyPatch, name: str, damage: Callable[[Path], None]
) -> None:
    whole = stored(text, key="whole")
    damage(stopped(text, monkeypatch, KeyboardInterrupt()) / name)
    assert stored(text) == whole


def test_interrupted_work_goes_on_and_does_nothing_twice(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = stored(text, key="whole")
    stopped(text, monkeypatch, KeyboardInterrupt(), after=5)
    begun: list[Any] = []
    read = Files.blocks
    monkeypatch.setattr(Files, "blocks", lambda self, after=(): begun.append(after) or read(self, after))
    assert stored(text) == whole
    assert [position[1] > 4 * texts.BLOCK_BYTES for position in begun] == [True], "the vocabulary is not trained again"


def test_a_full_disk_is_one_sentence_and_what_is_done_is_kept(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = stored(text, key="whole")
    full = OSError(errno.ENOSPC, "No space left on device")
    part = stopped(text, monkeypatch, full)
    assert _lines(part) == 6
    with monkeypatch.context() as patch:
        patch.setattr(PartialTokens, "append", lambda *_: (_ for _ in ()).throw(full))
        with pytest.raises(DataError, match=r"The disk of the token cache at .* is full \(.*GiB are free\)"):
            stored(text)
    assert stored(text) == whole


@pytest.mark.parametrize("workers", [0, 2])
def test_bytes_that_are_no_text_are_named_by_their_line(text: Path, workers: int) -> None:
    lines = text.read_bytes().split(b"\n")
    lines[777] = b"caf\xe9"
    text.write_bytes(b"\n".join(lines))
    key = TokensKey("no text", "bpe", 400)
    source = Files((text,), one_document_each=False)
    with pytest.raises(DataError, match=r"text\.txt is not readable as text: .*0xe9.* \(line 778\)"):
        tokenised(key, "text", lambda: source, False, workers)
    assert not list(key.folder.parent.glob("*.part")), "another text has another folder"


def test_a_worker_names_the_line_too_and_a_killed_one_is_reported(text: Path) -> None:
    stored(text)
    encoder = Encoder(TokensKey("one", "bpe", 400).folder, "uint16", 0)
    blocks = list(Files((text,), one_document_each=False).blocks())
    bad = texts.TextBlock((texts.Part("a.txt", 41, True, b"fine\ncaf\xe9"),), False, 0, ())
    with pytest.raises(DataError, match=r"a\.txt is not readable as text.*line 42"):
        list(encode_all([*blocks[:2], bad, *blocks[2:]], encoder, 1))
    before = set(psutil.Process().children())
    encoded = encode_all(iter(blocks * 20), encoder, 1)
    next(encoded)
    for child in set(psutil.Process().children()) - before:
        child.kill()
    with pytest.raises(DataError, match=r"exit code -9; .*workers=1"):
        list(encoded)
    assert set(psutil.Process().children()) == before


def test_a_file_that_cannot_be_read_is_one_sentence(text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "a.txt").mkdir(parents=True)
    for name in ("0.txt", "b.txt"):
        (folder / name).write_text(text.read_text())
    with pytest.raises(DataError, match=r"a\.txt cannot be read: Is a directory"):
        stored(folder)


@pytest.mark.parametrize("ending", [".bz2", ".zst"])
def test_compressed_text_goes_on_from_any_place(text: Path, tmp_path: Path, ending: str) -> None:
    content = text.read_bytes()
    half = content.index(b"\n", len(content) // 2)
    pack = bz2.compress if ending == ".bz2" else lambda part: pyarrow.compress(part, codec="zstd", asbytes=True)
    packed = tmp_path / f"packed.txt{ending}"
    packed.write_bytes(pack(content[:half]) + pack(content[half:]))  # as pbzip2 and pzstd write it
    assert stored(packed, key="packed") == stored(text)
    files = Files((packed,), one_document_each=False)
    blocks = list(files.blocks())
    rest = [paragraph for block in files.blocks(blocks[3].end) for paragraph in block.paragraphs()]
    assert rest == [paragraph for block in blocks[4:] for paragraph in block.paragraphs()]
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(DataError, match="not readable as text"):
        list(files.blocks())


@pytest.mark.usefixtures("text")
def test_a_hub_dataset_is_read_in_blocks_of_rows() -> None:
    import datasets

    rows = [f"row {number} " * 50 for number in range(300)]
    source = texts.DatasetColumn(datasets.Dataset.from_dict({"text": [None, "", *rows]}), "text", "key")
    blocks = list(source.blocks())
    assert len(blocks) > 10
    assert sum(block.advance for block in blocks) == source.size
    rest = [paragraph for block in source.blocks(blocks[4].end) for paragraph in block.paragraphs()]
    assert rest == [paragraph for block in blocks[5:] for paragraph in block.paragraphs()]
    assert [paragraph for block in blocks for paragraph in block.paragraphs()] == [(True, row.strip()) for row in rows]


def test_newlines_alone_end_a_line_in_files_rows_and_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path))
    given, lines = "a\u2028b\x0cc\x85d\x0be\r\n f\rg \n", ["a\u2028b\x0cc\x85d\x0be", "f\rg"]
    file = tmp_path / "text.txt"
    file.write_bytes(given.encode())
    sources = (
        Files((file,), one_document_each=True),
        Files((write_documents([given], "text", False),), one_document_each=False),
        texts.DatasetColumn(datasets.Dataset.from_dict({"text": [given]}), "text", "key"),
    )
    for source in sources:
        assert [text for block in source.blocks() for _, text in block.paragraphs()] == lines


def test_a_file_that_stops_growing_in_the_middle_of_a_block_is_taken_up_again(text: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_001, before[1]))
    try:
        with pytest.raises(DataError) as raised:
            stored(text, key="limited")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = str(raised.value)
    assert "The token cache at" in said
    assert "cannot be written: File too large" in said
    part = TokensKey("limited", "bpe", 400).folder.with_suffix(".part")
    assert (part / "tokens.bin").stat().st_size == 20_001, "a torn token was written"
    assert not part.with_suffix("").exists()
    done = _lines(part)
    assert done > 2
    assert stored(text, key="limited") == stored(text, key="whole")


def test_one_long_document_is_never_held_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path))
    monkeypatch.setattr(texts, "BLOCK_BYTES", 1 << 14)
    for document in ("word  " * 150_000, "a line of words\n" * 60_000):
        tracemalloc.start()
        written = write_documents([document, " \u2028 "], "long", False)
        for block in Files((written,), one_document_each=False).blocks():
            assert sum(len(paragraph) for _, paragraph in block.paragraphs()) <= 4 * texts.BLOCK_BYTES
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < len(document) / 2
        expected = "".join(f"{line.strip()}\n" for line in document.split("\n") if line.strip())
        assert written.read_text() == f"{expected}\n"
