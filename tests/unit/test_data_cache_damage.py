"""A damaged token cache is tokenised again: no mutation gives other tokens or a bare error."""

from __future__ import annotations

import importlib
import os
import random
from pathlib import Path

import numpy as np
import pytest

from workbench.data.store import TokenStore, tokenizer_files
from workbench.data.text import Files
from workbench.data.tokenizing import TokensKey, tokenised
from workbench.runs.environment import Finding, doctor

doctor_module = importlib.import_module("workbench.runs.environment")

MUTATIONS = 40
FILES = ("tokens.bin", "documents.bin", "runs.npy", "tokenizer.json", "special_tokens.json", "facts.json")


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TokensKey:
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home"))
    return TokensKey("text", "wordpiece", 128)


def opened(key: TokensKey, text: Path) -> tuple[TokenStore, bool]:
    return tokenised(key, "text", lambda: Files((text,), one_document_each=False), progress=False)


def content(store: TokenStore) -> tuple[list[int], list[int], str]:
    tokenizer = "".join((store.folder / name).read_text() for name in tokenizer_files(store.folder))
    return np.asarray(store.ids).tolist(), store.document_starts.tolist(), tokenizer


def damage(folder: Path, dice: random.Random) -> None:
    """Overwrite, cut, grow or remove one file of a folder of the cache."""
    file = folder / dice.choice(FILES)
    match dice.choice(("overwrite", "cut", "grow", "remove", "empty")):
        case "overwrite":
            content = bytearray(file.read_bytes())
            content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
            file.write_bytes(content)
        case "cut":
            os.truncate(file, dice.randrange(file.stat().st_size))
        case "grow":
            file.write_bytes(file.read_bytes() + dice.randbytes(dice.randint(1, 50)))
        case "remove":
            file.unlink()
        case "empty":
            file.write_bytes(b"")


def test_a_damaged_cache_heals_and_never_gives_other_tokens(key: TokensKey, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"The {i} quick brown foxes jump over {i * i} lazy dogs." for i in range(60)))
    store, was_cached = opened(key, text)
    assert not was_cached
    whole, dice = content(store), random.Random(0)
    healed = 0
    for number in range(MUTATIONS):
        damage(key.folder, dice)
        store, was_cached = opened(key, text)
        assert content(store) == whole, number
        healed += not was_cached
    assert healed >= MUTATIONS * 0.9, "damage to the times in facts.json alone needs no tokenising"
    assert opened(key, text)[1], "an undamaged folder is used as it is"


def test_a_cache_that_was_copied_is_read_once_and_used(key: TokensKey, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"The {i} quick brown foxes jump." for i in range(60)))
    opened(key, text)
    for name in FILES:
        os.utime(key.folder / name, (1, 1))
    assert opened(key, text)[1]


def test_the_doctor_finds_what_opening_cannot(key: TokensKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_module, "_torch", lambda: Finding("PyTorch", True, "it is here"))
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"The {i} quick brown foxes jump." for i in range(60)))
    opened(key, text)
    assert "Token cache" not in repr(doctor())
    assert "1 texts, every file as it was written" in repr(doctor(data=True))
    file = key.folder / "tokens.bin"
    then, content_ = file.stat(), bytearray(file.read_bytes())
    content_[7] ^= 1
    file.write_bytes(content_)
    os.utime(file, ns=(then.st_atime_ns, then.st_mtime_ns))
    assert opened(key, text)[1], "the file looks untouched"
    [found] = [finding for finding in doctor(data=True) if finding.subject == "Token cache"]
    assert not found.ok
    assert f"1 of 1 texts are damaged: {file} does not hold" in found.found
    file.unlink()
    assert "tokens.bin is missing" in repr(doctor(data=True))
