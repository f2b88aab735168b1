"""The parameters of a notebook: what its cell tagged `parameters` sets, and that cell with other values."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import math
import re
import shutil
import sys
import tokenize
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from workbench import arguments
from workbench.errors import InvalidArgument, RunNotFound, UnknownParameter, WorkbenchError, suggestion
from workbench.figures.figure import read_notebook

LONGEST_TEXT = 10_000
"""Largest number of characters of a value that a form may send."""

LONGEST_SEQUENCE = 2**20
"""Largest number of tokens of a sequence that a form takes."""

TYPES: Mapping[str, Any] = {
    "bool": bool,
    "int": int,
    "float": float,
    "str": str,
    "list": list,
    "tuple": Sequence,
    "Sequence": Sequence,
    "dict": dict,
    "Mapping": dict,
    "None": None,
}
"""Types that an annotation of a parameter may name; another one takes every value."""
YES_NO = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
"""Words for True and False, in any case."""


@dataclass(frozen=True)
class Parameter:
    """One parameter: its name, its default as Python writes it, its comment, and the choices that this quotes."""

    name: str
    default: str
    help: str
    choices: tuple[str, ...]
    annotation: str = ""
    """The type as the cell writes it, `steps: int | None = None`; empty where the default says it."""

    @property
    def type(self) -> Any:
        """The type of its values: that of the annotation, or else of the default; `Any` if neither says it."""
        if self.annotation:
            return _annotated(ast.parse(self.annotation, mode="eval").body)
        try:
            return _type_of(ast.literal_eval(self.default))
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return Any  # an expression


def parameters(notebook: Path) -> dict[str, Parameter]:
    """Return the parameters of a notebook by name, in the order of its cell.

    Raises `WorkbenchError` for a cell that is no Python.
    """
    tagged = [cell for cell in read_notebook(notebook).cells if "parameters" in cell.metadata.get("tags", ())]
    source = "".join(re.sub(r"^[%!].*", "", line) for line in tagged[0].source.splitlines(True)) if tagged else ""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError) as error:
        raise WorkbenchError(f"The cell of {notebook.name} tagged parameters is no Python: {error}. Mend it.") from None
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    found = {}
    for node in body:
        for name, value, annotation in _assigned(node):
            default, comment = ast.get_source_segment(source, value) or "", comments.get(node.end_lineno or 0, "")
            kind = "" if annotation is None else ast.get_source_segment(source, annotation) or ""
            choices = tuple(re.findall(r'"(\w+)"(?=:)', comment))
            quoted = default.strip("\"'") in choices
            found[name] = Parameter(name, default, comment, choices if quoted else (), kind)
    return found


def _assigned(node: ast.stmt) -> list[tuple[str, ast.expr, ast.expr | None]]:
    """Return the name, value and annotation that a statement gives one variable, if it does only that."""
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
        return [(node.target.id, node.value, node.annotation)]
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        return [(node.targets[0].id, node.value, None)]
    return []


def _annotated(node: ast.expr) -> Any:
    """Return the type that an annotation names."""
    if isinstance(node, ast.Constant):
        return _annotated(ast.parse(node.value, mode="eval").body) if isinstance(node.value, str) else node.value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return typing.Union[_annotated(node.left), _annotated(node.right)]  # noqa: UP007
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None
    if not isinstance(node, ast.Subscript):
        return TYPES.get(str(name), Any)
    outer = ast.unparse(node.value).rpartition(".")[2]
    inner = list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]
    if outer == "Literal":
        return typing.Literal[tuple(ast.literal_eval(one) for one in inner)]
    if outer in ("Union", "Optional"):
        none = [None] if outer == "Optional" else []
        return typing.Union[(*map(_annotated, inner), *none)]
    if outer in ("list", "tuple", "Sequence"):
        return Sequence[_annotated(inner[0])]  # type: ignore[misc]
    return TYPES.get(outer, Any)


def _type_of(value: Any) -> Any:
    """Return the type of a default; that of a list says what it holds, if all of it is of one type."""
    if value is None:
        return Any
    if isinstance(value, list | tuple):
        types = {_type_of(item) for item in value}
        types = {float} if types == {int, float} else types
        return Sequence[types.pop()] if len(types) == 1 else list  # type: ignore[misc]
    return type(value)


def check_values(notebook: Path, values: Mapping[str, Any]) -> None:
    """Raise an error for the first value that a parameter of the notebook cannot have.

    A value must have the type of its default, or that of the annotation. One that is named as a field of an experiment
    is checked as that field, unless it is None or a list, which stands for several values. Raises `UnknownParameter`
    for a name that the cell does not set, and the `InvalidArgument` or `InvalidExperiment` that names the first wrong
    value.
    """
    import workbench as wb

    declared = parameters(notebook) if values else {}
    fields_of_experiment = {field.name for field in fields(wb.Experiment)}
    for name in values:
        if name not in declared:
            names = ", ".join(declared) or "none"
            hint = suggestion(name, declared) if declared else "It has no cell tagged parameters."
            listed = "" if hint.startswith("Known names") or not declared else f" It has: {names}."
            raise UnknownParameter(f"{notebook.name} has no parameter {name!r}. {hint}{listed}")
    for name, value in values.items():
        kind, choices = declared[name].type, declared[name].choices
        if typing.get_origin(kind) is typing.Literal:
            kind, choices = Any, typing.get_args(kind)
        if choices and value not in choices:
            hint = f"Give one of {', '.join(map(str, choices))}."
            raise InvalidArgument(f"{notebook.stem} cannot use {name}={value!r}. {hint}")
        arguments.check(notebook.stem, name, value, kind)
        if not _is_finite(value):
            raise InvalidArgument(f"{name}={value!r} is not finite. Give a finite number.")
        if value is not None and not isinstance(value, list) and name in fields_of_experiment:
            model = wb.models.bert_large(max_positions=LONGEST_SEQUENCE)  # the template's own model may take fewer
            wb.Experiment(model=model, data=wb.data.corpus("demo"), **{name: value})


def values_of(notebook: Path, texts: Mapping[str, str]) -> dict[str, Any]:
    """Return the values that a user wrote for parameters, each of the type of its parameter; see `check_values`."""
    declared = parameters(notebook) if texts else {}
    kinds = {name: parameter.type for name, parameter in declared.items()}
    values = {name: _value(text[:LONGEST_TEXT].strip(), kinds.get(name, Any)) for name, text in texts.items()}
    check_values(notebook, values)
    return values


def _value(text: str, kind: Any) -> Any:
    """Return what a text means for a type: Python's or JSON's literals, `yes` and `no`, and text where it is neither.

    A text that has no meaning for the type is returned as it is read without one, for `check_values` to refuse.
    """
    literal: Any = text
    try:
        literal = ast.literal_eval(text)
        repr(literal)  # ValueError for a number of thousands of digits, which nothing could show
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        literal = text
        with contextlib.suppress(ValueError, RecursionError):
            literal = json.loads(text)
    kinds = typing.get_args(kind) if typing.get_origin(kind) is typing.Union else (kind,)
    if type(None) in kinds and (literal is None or text.lower() == "null"):
        return None
    if bool in kinds and text.lower() in YES_NO and not (int in kinds and text in "01"):
        return YES_NO[text.lower()]
    if str in kinds and not isinstance(literal, str):
        others = [one for one in kinds if one is not str]
        return literal if any(arguments.fits(literal, one) for one in others) else text
    return literal


def _is_finite(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def with_values(source: str, values: Mapping[str, Any]) -> str:
    """Return the source of a parameters cell with other values; its comments stay."""
    lines = source.encode().splitlines(keepends=True)  # ast counts bytes
    for node in reversed(ast.parse(source).body):
        for name, value, _ in _assigned(node):
            if name not in values:
                continue
            first, last = value.lineno - 1, (value.end_lineno or 1) - 1
            written = repr(values[name]).encode()
            lines[first : last + 1] = [lines[first][: value.col_offset] + written + lines[last][value.end_col_offset :]]
    return b"".join(lines).decode()


# The template notebooks, in a checkout and where an installed wheel puts them.

FOLDER = Path("notebook_templates") / "workbench"
"""Folder of the templates inside a Jupyter data folder."""
CHECKOUT = Path(__file__).resolve().parents[2] / "templates"


def template_path(template: str) -> Path:
    """Return the notebook at this path, or the template of this name; raises `RunNotFound` with the known names."""
    given = Path(template)
    if given.is_file():
        return given
    installed = templates()
    if given.stem in installed:
        return installed[given.stem]
    none = "No templates are installed here; give the path of a notebook."
    raise RunNotFound(f"There is no notebook {template!r}. {suggestion(given.stem, installed) if installed else none}")


def templates() -> dict[str, Path]:
    """Return the templates by name: those of the current folder win over the checkout's and the installed ones."""
    from jupyter_core.paths import jupyter_path

    installed = [Path(folder) for folder in reversed(jupyter_path(*FOLDER.parts))]
    folders = [*installed, Path(sys.prefix) / "share/jupyter" / FOLDER, CHECKOUT, Path("templates")]
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.ipynb"))}


def new(template: str, path: str | Path | None = None) -> Path:
    """Copy a template to `path` (a file or a folder; the current folder by default) and return the copy's path.

    Raises `RunNotFound` for an unknown template, and `WorkbenchError` if the file exists already.
    """
    source = template_path(template)
    target = Path(path) if path is not None else Path()
    if target.is_dir():
        target /= source.name
    target = target.with_suffix(".ipynb").absolute()
    if target.exists():
        raise WorkbenchError(f"{target} exists already. Give another path: workbench new {source.stem} PATH.")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    return target
