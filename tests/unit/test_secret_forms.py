"""How many forms of keys are found, and how many harmless texts are changed, of those in `secret_texts.toml`."""

from __future__ import annotations

import base64
import io
import json
import random
import re
import signal
import string
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from workbench.base.secrets import masked_json, masked_words

TEXTS = tomllib.loads(Path(__file__).with_name("secret_texts.toml").read_text())
SECURITY = Path(__file__).resolve().parents[2] / "docs" / "security.md"
LETTERS = {
    "hex": "0123456789abcdef",
    "b62": string.ascii_letters + string.digits,
    "b36": string.ascii_lowercase + string.digits,
    "b64": string.ascii_letters + string.digits + "+/",
    "caps": string.ascii_uppercase + "234567",
    "digits": string.digits,
}
PASSWORDS = ("hunter2", "Tr0ub4dor&3", "correct-horse7", "p4ss!w0rd", "x9$kQ")
SIGNS = {"ESC": "\x1b", "NL": "\n", "ZWSP": "\u200b"}
PLACE = re.compile("«([^»]*)»")
PIECE = 6
"""Shortest piece of a secret that may not remain."""
MOST_WRONG = 0.03
LIMIT_S = 20.0  # clock: processor seconds, ten times what linear reading takes; the square of it takes minutes


def filled(given: str, drawn: random.Random, secrets: list[str], environment: Mapping[str, str]) -> str:
    """Return a text of the list with letters in its places, which are added to `secrets`."""

    def letters(place: re.Match[str]) -> str:
        kind, _, length = place[1].partition(":")
        if kind in SIGNS:
            return SIGNS[kind]
        if kind in ("word", "env"):
            secret = drawn.choice(PASSWORDS) if kind == "word" else environment[length]
        else:
            secret = "".join(drawn.choices(LETTERS[kind], k=int(length)))
        secrets.append(secret)
        return secret

    return PLACE.sub(letters, given)


def is_left(secret: str, shown: str) -> bool:
    return any(secret[at : at + PIECE] in shown for at in range(max(1, len(secret) - PIECE + 1)))


def shown(value: Any) -> str:
    """Return what stays of a text, of outputs one after the other, or of a value of JSON."""
    if isinstance(value, str):
        return masked_words(value)
    if isinstance(value, list):
        outputs = [{"output_type": "stream", "name": "stdout", "text": text} for text in value]
        return "\n".join(output["text"] for output in masked_json(outputs))
    return json.dumps(masked_json(value), ensure_ascii=False)


def walked(value: Any, change: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [walked(item, change) for item in value]
    return {change(key): walked(item, change) for key, item in value.items()} if isinstance(value, dict) else value


def errors(texts: Mapping[str, Any], seed: int, environment: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Return the forms of keys that are not found, and the harmless texts that are changed."""
    drawn, leaked, changed = random.Random(seed), list[str](), list[str]()
    for form in texts["keys"]:
        secrets = list[str]()
        value = walked(form, lambda text, found=secrets: filled(text, drawn, found, environment))
        left = shown(value)
        if any(is_left(secret, left) for secret in secrets):
            leaked.append(f"{form}\n      {left!r}")
    for text in texts["harmless"]:
        value = walked(text, lambda part: filled(part, drawn, [], environment))
        plain = value if isinstance(value, str) else "\n".join(value) if isinstance(value, list) else None
        expected = json.dumps(value, ensure_ascii=False) if plain is None else plain
        if shown(value) != expected:
            changed.append(f"{text}\n      {shown(value)!r}")
    return leaked, changed


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    values = {"": "Zq7" + "".join(random.Random(5).choices(LETTERS["b62"], k=29)), "password": "lake/under5tone"}
    monkeypatch.setenv("TEAM_HANDLE", values[""])
    monkeypatch.setenv("DB_PASSWORD", values["password"])
    return values


def test_at_most_3_percent_of_keys_and_of_harmless_texts_are_wrong_as_the_page_on_security_says(
    environment: dict[str, str],
) -> None:
    keys, harmless = len(TEXTS["keys"]), len(TEXTS["harmless"])
    assert keys >= 102
    assert harmless >= 138
    leaked, changed = errors(TEXTS, 0, environment)
    said = "\n".join(["", *(f"leaked:  {one}" for one in leaked), *(f"changed: {one}" for one in changed)])
    assert len(leaked) <= MOST_WRONG * keys, said
    assert len(changed) <= MOST_WRONG * harmless, said
    page = " ".join(SECURITY.read_text().split())
    rates = (
        f"{len(leaked)} of {keys} forms of keys are missed, and {len(changed)} of {harmless} harmless texts are changed"
    )
    assert rates in page, said


KEY = f"hf_{'aB3' * 11}"


@pytest.mark.parametrize("kind", ["PNG", "compressed PNG", "JPEG", "GIF"])
def test_a_key_in_the_comment_of_a_picture_goes_and_the_picture_stays(kind: str) -> None:
    def encoded(comment: str) -> str:
        drawn, info, file = Image.new("RGB", (8, 8), "red"), PngInfo(), io.BytesIO()
        info.add_text("Comment", comment, zip=kind == "compressed PNG")
        drawn.save(file, kind.split()[-1], **({"pnginfo": info} if "PNG" in kind else {"comment": comment}))
        return base64.b64encode(file.getvalue()).decode()

    harmless = {"image/png": encoded("made by hand, 2026"), "text/plain": "<Figure size 640x480>"}
    assert masked_json(harmless) == harmless
    shown = masked_json({"image/png": encoded(f"made with {KEY}")})["image/png"]
    content = base64.b64decode(shown)
    assert KEY[:12].encode() not in content
    picture = Image.open(io.BytesIO(content))
    picture.load()
    assert "hf_" not in str(picture.info)
    assert picture.convert("RGB").getpixel((0, 0))[0] > 250
    page = f'<img src="data:image/png;base64,{encoded(KEY)}">'
    assert page.split(",")[1][:-2] not in masked_words(page)


def test_a_value_of_the_environment_that_looks_drawn_goes_wherever_it_stands_and_known_digests_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = "".join(random.Random(1).choices(LETTERS["b62"], k=32))
    commit = "".join(random.Random(1).choices(LETTERS["hex"], k=40))
    monkeypatch.setenv("SOMETHING", drawn)
    monkeypatch.setenv("GITHUB_SHA", commit)
    monkeypatch.setenv("RUN_UUID", drawn[::-1])
    text = f"{drawn[:10]}\n{drawn[10:]} of {commit} and {drawn[::-1]} <b>{drawn[:5]}</b>{drawn[5:]}"
    assert masked_words(text) == f"*** of {commit} and {drawn[::-1]} <b>***</b>"


def test_letters_that_each_could_begin_a_secret_are_read_once() -> None:
    def too_long(*_: Any) -> None:
        raise AssertionError("the time grows with the square of the length")

    previous = signal.signal(signal.SIGPROF, too_long)
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    try:
        for begins, length in {"-----BEGIN PRIVATE KEY-----\n": 10**6, "://a:b": 10**5, "\\": 10**5}.items():
            assert len(masked_words(begins * (length // len(begins)))) <= length
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)


def test_masked_objects_keep_all_their_keys() -> None:
    others = [f"ghp_{'a1B' * 12}", f"glpat-{'a1B' * 8}"]
    assert masked_json({KEY: 1, **dict.fromkeys(others, 2), "x": [KEY, ("y",)]}) == {
        "***": 1,
        "*** 1": 2,
        "*** 2": 2,
        "x": ["***", ["y"]],
    }
