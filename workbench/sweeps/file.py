"""The YAML file of `workbench sweep`: an experiment, axes, and how to sweep them."""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from workbench.errors import InvalidExperiment, UnknownParameter, suggestion
from workbench.sweeps.rules import Diverged, diverged

KEYS = ("experiment", "set", "axes", "seeds", "sampler", "trials", "stop", "runs_per_gpu", "directory")
"""Keys of the file. `set` and `axes` hold fields of the experiment; the others are arguments of `wb.sweep`."""


class _Loader(yaml.SafeLoader):
    """A loader of plain values that reads 1e-4 as a number, as YAML 1.2 does, and refuses a key that stands twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"{twice!r} stands twice", node.start_mark)
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return mapping


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def read_sweep_file(path: Path) -> dict[str, Any]:
    """Return the keys of a file that are given; raises `InvalidExperiment` in a sentence for a file that is wrong.

    `set` and `axes` are mappings, and `axes` is not empty; `stop` is what `wb.sweep` takes.
    """
    try:
        value = yaml.load(path.read_text(), _Loader)
    except OSError as error:
        raise InvalidExperiment(f"{path} cannot be read: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f" in line {mark.line + 1}" if mark is not None else ""
        words = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise InvalidExperiment(f"{path} is not YAML: {words}{place}.") from None
    if not isinstance(value, dict) or not value.keys() >= {"experiment", "axes"}:
        raise InvalidExperiment(
            f"{path} describes no sweep. Give it the keys experiment (a model such as bert-large) and axes (fields of "
            "the experiment with lists of values)."
        )
    for key in value:
        if key not in KEYS:
            raise UnknownParameter(f"{path} has the key {key!r}. {suggestion(str(key), KEYS)}")
    if not isinstance(value["experiment"], str):
        raise InvalidExperiment(
            f"{path}: experiment is {value['experiment']!r}. Write a model, such as bert-large, or the name of a JSON "
            "file."
        )
    for key in ("set", "axes"):
        if not isinstance(value.get(key, {}), dict):
            raise InvalidExperiment(f"{path}: {key} is {value[key]!r}. Write one field of the experiment in each line.")
        value[key] = {str(name): item for name, item in value.get(key, {}).items()}
    if "stop" in value:
        value["stop"] = _rule(path, value["stop"])
    return value


def _rule(path: Path, value: Any) -> Diverged | str | None:
    if isinstance(value, dict):
        if not value.keys() <= {"above", "after"} or "above" not in value:
            raise InvalidExperiment(
                f"{path}: stop is {value!r}. Write stop: {{above: 6.5, after: 500}} or stop: median."
            )
        return diverged(**value)
    return value  # type: ignore[no-any-return]  # `wb.sweep` checks it
