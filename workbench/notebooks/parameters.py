"""The parameters of a notebook: what its cell tagged `parameters` sets, and that cell with other values."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from workbench import arguments
from workbench.errors import InvalidArgument, UnknownParameter, suggestion

LONGEST_TEXT = 10_000
"""Largest number of characters of a value that a form may send."""

LONGEST_SEQUENCE = 2**20
"""Largest number of tokens of a sequence that a form takes."""


@dataclass(frozen=True)
class Parameter:
    """One parameter: its name, its default as Python writes it, its comment, and the choices that this quotes."""

    name: str
    default: str
    help: str
    choices: tuple[str, ...]


def parameters(notebook: Path) -> dict[str, Parameter]:
    """Return the parameters of a notebook by name, in the order of its cell."""
    import papermill

    found = {}
    for name, facts in papermill.inspect_notebook(str(notebook)).items():
        choices = tuple(re.findall(r'"(\w+)"(?=:)', facts["help"]))
        quoted = facts["default"].strip("\"'") in choices
        found[name] = Parameter(name, facts["default"], facts["help"], choices if quoted else ())
    return found


def check_names(notebook: Path, values: Mapping[str, Any]) -> None:
    """Raise `UnknownParameter`, with the known names, for a name that the notebook's cell does not set."""
    declared = parameters(notebook) if values else {}
    for name in values:
        if name not in declared:
            names = ", ".join(declared) or "none"
            hint = suggestion(name, declared) if declared else "It has no cell tagged parameters."
            listed = "" if hint.startswith("Known names") or not declared else f" It has: {names}."
            raise UnknownParameter(f"{notebook.name} has no parameter {name!r}. {hint}{listed}")


def checked_values(notebook: Path, texts: Mapping[str, str]) -> dict[str, Any]:
    """Return the values that a user wrote for parameters: Python's literals, and text where it is none.

    A value must have the type of its default. One that is named as a field of an experiment is checked as that field.
    Raises `UnknownParameter`, or the `InvalidArgument` or `InvalidExperiment` that names the first wrong value.
    """
    check_names(notebook, texts)
    declared = parameters(notebook)
    values = {name: _literal(text[:LONGEST_TEXT]) for name, text in texts.items()}
    for name, value in values.items():
        default, choices = _literal(declared[name].default), declared[name].choices
        if choices and value not in choices:
            hint = f"Give one of {', '.join(choices)}."
            raise InvalidArgument(f"{notebook.stem} cannot use {name}={value!r}. {hint}")
        if default is not None:
            arguments.check(notebook.stem, name, value, type(default))
        if _literal(repr(value)) != value:
            raise InvalidArgument(f"{name}={value!r} is not finite. Give a finite number.")
        _check_as_field(name, value)
    return values


def _literal(text: str) -> Any:
    try:
        value = ast.literal_eval(text.strip())
        repr(value)  # ValueError for a number of thousands of digits, which nothing could show
        return value
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text.strip()


def _check_as_field(name: str, value: Any) -> None:
    """Raise `InvalidExperiment` if an experiment would refuse the value; None and lists stand for several values."""
    import workbench as wb

    if value is not None and not isinstance(value, list) and name in {field.name for field in fields(wb.Experiment)}:
        model = wb.models.bert_large(max_positions=LONGEST_SEQUENCE)  # the template's own model may take fewer
        wb.Experiment(model=model, data=wb.data.corpus("demo"), **{name: value})


def with_values(source: str, values: Mapping[str, Any]) -> str:
    """Return the source of a parameters cell with other values; its comments stay."""
    lines = source.encode().splitlines(keepends=True)  # ast counts bytes
    for node in reversed(ast.parse(source).body):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in values:
            first, last, value = node.value.lineno - 1, (node.value.end_lineno or 1) - 1, node.value
            written = repr(values[node.targets[0].id]).encode()
            lines[first : last + 1] = [lines[first][: value.col_offset] + written + lines[last][value.end_col_offset :]]
    return b"".join(lines).decode()
