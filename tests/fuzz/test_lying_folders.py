"""Folders of pretrained weights whose files lie: each is told by a `WorkbenchError`, or trained with its weights.

A case changes one or two things of a right folder: a value of its configuration, a name, a shape or a type of a weight,
bytes of a file, a file that another one names. Nothing may raise another error, be accepted with other weights, or
hang.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import workbench as wb
from tests.exhaustive import EXHAUSTIVE
from tests.unit.test_pretrained_folders import folder
from workbench.base.errors import WorkbenchError

CASES = 300 if EXHAUSTIVE else 40
SEED = 20261129
ODD: tuple[Any, ...] = (
    *(-1, 0, 1, 3, 2**31, 10**9, 2**70, 1e308, float("nan"), float("inf"), True, None, "", "x" * 5000, "../../etc"),
    *([], {}, [1, 2], {"a": 1}, [[]], "BertModel", ["BertModel"], ["NoSuchModel"], "gelu", "float16", "complex64"),
)
KEYS = (
    *("architectures", "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    *("vocab_size", "max_position_embeddings", "type_vocab_size", "hidden_act", "pad_token_id", "initializer_range"),
    *(
        "layer_norm_eps",
        "dtype",
        "tie_word_embeddings",
        "id2label",
        "num_labels",
        "auto_map",
        "is_decoder",
        "use_cache",
    ),
    *("quantization_config", "hidden_dropout_prob", "problem_type", "transformers_version", "chunk_size_feed_forward"),
)


def of_configuration(path: Path, draw: random.Random) -> str:
    file = path / "config.json"
    config = json.loads(file.read_text())
    key, value = draw.choice(KEYS), draw.choice(ODD)
    if draw.random() < 0.2:
        config.pop(key, None)
        value = "removed"
    else:
        config[key] = value
    file.write_text(json.dumps(config))
    return f"{key}={value!r:.40}"


def of_weights(path: Path, draw: random.Random) -> str:
    file = path / "model.safetensors"
    weights = load_file(file)
    name = draw.choice(sorted(weights))
    changes: dict[str, Callable[[torch.Tensor], Any]] = {
        "removed": lambda _: weights.pop(name),
        "renamed": lambda _: weights.update({f"{name}s": weights.pop(name)}),
        "flat": lambda value: weights.update({name: value.flatten()}),
        "longer": lambda value: weights.update({name: torch.cat([value, value])}),
        "whole": lambda value: weights.update({name: value.to(torch.int64)}),
        "half": lambda value: weights.update({name: value.half()}),
        "not a number": lambda value: value.view(-1).__setitem__(0, float("nan")),
        "empty": lambda value: weights.update({name: value[:0]}),
    }
    what = draw.choice(sorted(changes))
    changes[what](weights[name])
    save_file({key: value.contiguous() for key, value in weights.items()}, file, metadata={"format": "pt"})
    return f"{name} {what}"


def of_bytes(path: Path, draw: random.Random) -> str:
    file = draw.choice(sorted(path.iterdir()))
    octets = bytearray(file.read_bytes())
    at = draw.randrange(min(len(octets), 4096))
    what = draw.choice(("cut", "flipped", "emptied", "doubled", "a length that lies"))
    if what == "cut":
        octets = octets[:at]
    elif what == "flipped":
        octets[at] ^= 1 << draw.randrange(8)
    elif what == "emptied":
        octets = bytearray()
    elif what == "doubled":
        octets = octets * 2
    else:
        octets[:8] = (2 ** draw.randrange(64) - 1).to_bytes(8, "little")
    file.write_bytes(octets)
    return f"{file.name} {what} at {at}"


def of_files(path: Path, draw: random.Random) -> str:
    what = draw.choice(("an index of nothing", "an index of another file", "a folder", "a link", "gone"))
    file = path / "model.safetensors"
    if what.startswith("an index"):
        names = list(load_file(file))
        other = "../outside.safetensors" if "another" in what else "model-00001-of-00002.safetensors"
        index = {"metadata": {"total_size": -1}, "weight_map": dict.fromkeys(names, other)}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    if what != "an index of another file":
        file.unlink()
    if what == "a folder":
        file.mkdir()
    if what == "a link":
        file.symlink_to(path / "nothing")
    return what


CHANGES = (of_configuration, of_configuration, of_weights, of_bytes, of_files)


def outcome(path: Path) -> str:
    """Return what became of a folder: empty if it was told, or if what is built has the folder's values."""
    try:
        model = wb.models.pretrained(path)
        model.check_weights()
        built = model.build().state_dict()
    except WorkbenchError:
        return ""
    except Exception as error:
        return f"raw {type(error).__name__}: {error!s:.200}"
    given = load_file(path / "model.safetensors")
    other = [name for name, value in given.items() if not torch.equal(built[name], value.to(built[name].dtype))]
    missing = sorted(built.keys() - given.keys() - {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"})
    return f"silent: {[*other, *missing][:3]}" if other or missing else ""


def test_a_folder_that_lies_is_told_or_is_what_is_trained(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    right = folder(tmp_path / "right")
    assert not outcome(right)
    found, draw = list[str](), random.Random(SEED)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for case in range(CASES):
        path = tmp_path / "case"
        shutil.copytree(right, path)
        said = [change(path, draw) for change in draw.sample(CHANGES, draw.choice((1, 1, 2))) if not _is_broken(path)]
        if wrong := outcome(path):
            found.append(f"{case} {'; '.join(said)}: {wrong}")
        shutil.rmtree(path)
    capfd.readouterr()
    assert not found, "\n".join(found)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20, (
        "kilobytes: no folder takes a gigabyte"
    )


def _is_broken(path: Path) -> bool:
    """Return True where an earlier change left nothing that another could change."""
    try:
        json.loads((path / "config.json").read_text())
        return not load_file(path / "model.safetensors")
    except Exception:
        return True
