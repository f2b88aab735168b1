"""User-defined code: pickled for other processes, with the path from which they import; its names, source and lines."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import inspect
import io
import linecache
import os
import pickle
import re
import sys
import sysconfig
import textwrap
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

from workbench.base.display import place
from workbench.base.errors import CaptureError, InvalidExperiment, in_words
from workbench.base.machine import current_folder

if TYPE_CHECKING:
    from torch import fx

LONGEST_LAMBDA = 60
"""Letters of a lambda's text that name it."""


def pickled(name: str, value: Any) -> bytes:
    """Pickle an object: by value if a notebook cell defined it, by reference if a module of the user did.

    Raises `InvalidExperiment` if the object cannot be pickled; `name` says what it is.
    """
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        raise InvalidExperiment(
            f"The {name} cannot be sent to the workers: {in_words(error)}. Let it build what it needs "
            "when it is called (open files, connections, locks) instead of capturing it."
        ) from error


def unpickled(stored: bytes) -> Any:
    """Return what `pickled` wrote, also in a run of a version whose modules stood in no room (`workbench.columns`)."""
    return _Unpickler(io.BytesIO(stored)).load()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        package, _, stem = module.partition(".")
        if package == "workbench" and stem.isidentifier() and importlib.util.find_spec(module) is None:
            rooms = (f"workbench.{room}.{stem}" for room in _LATER_ROOMS)
            module = next(filter(importlib.util.find_spec, rooms), module)
        return super().find_class(module, name)


_LATER_ROOMS = ("base", "record")
_IN_LATER_ROOM = re.compile(rf"^workbench\.({'|'.join(_LATER_ROOMS)})\.")


def stored_name(module: str) -> str:
    """Return the name of a module in what outlives a version: without a room that it moved into later."""
    return _IN_LATER_ROOM.sub("workbench.", module)


@dataclass(frozen=True)
class UserFunction:
    """A callable of the user that an experiment holds: an optimiser or a learning-rate schedule."""

    function: Callable[..., Any] | None = field(repr=False)
    """The callable; None if it was only read from the description of a run."""
    name: str = ""
    source: str | None = field(default=None, repr=False, compare=False)
    """Source code of the callable, if Python can find it."""

    def __post_init__(self) -> None:
        if self.function is not None and not self.name:
            object.__setattr__(self, "name", name_of(self.function))
            object.__setattr__(self, "source", source_of(self.function))

    @property
    def is_loaded(self) -> bool:
        """Return True unless only the description of the callable is here."""
        return self.function is not None

    def __call__(self, *arguments: Any) -> Any:
        if self.function is None:
            raise InvalidExperiment(
                f"Only the description of {self.name} is here, not the callable itself. Give it to the experiment "
                "again: experiment.replace(…)."
            )
        return self.function(*arguments)

    def to_json(self) -> dict[str, Any]:
        return {"type": "user_defined", "name": self.name, "source": self.source}


def as_user_function(value: Any, function: Callable[..., Any] | None = None) -> Any:
    """Wrap a callable, or the description of one with its `function`, in a `UserFunction`; return others unchanged."""
    if isinstance(value, UserFunction):
        return value
    if isinstance(value, Mapping) and value.get("type") == "user_defined":
        return UserFunction(function, value["name"], value["source"])
    return UserFunction(value) if callable(value) else value


def innermost(function: Callable[..., Any]) -> Any:
    """Return what `functools.partial` objects bind."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a callable, or of its type."""
    inner = innermost(function)
    return str(getattr(inner, "__name__", None) or type(inner).__name__)


def telling_name(function: Callable[..., Any]) -> str:
    """Return a name for tables that tells a callable from others of its code, by the plain values that it is bound to.

    `functools.partial(build, width=32)` and a function in whose closure `width` is 32 are `build(width=32)`. A lambda
    is named by the variable that it was assigned to, or else by its own text.
    """
    bound: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        with contextlib.suppress(TypeError, ValueError):
            bound = {**inspect.signature(function.func).bind_partial(*function.args).arguments, **bound}
        bound, function = {**function.keywords, **bound}, function.func
    name = name_of(function)
    if isinstance(function, FunctionType):
        bound |= inspect.getclosurevars(function).nonlocals
        if name == "<lambda>":
            parameters = inspect.signature(function).parameters.values()
            bound |= {each.name: each.default for each in parameters if each.default is not each.empty}
            name = _lambda_name(function)
    plain = ", ".join(f"{key}={value}" for key, value in bound.items() if isinstance(value, bool | int | float | str))
    if not plain:
        return name
    return f"{name}; {plain}" if name.startswith("lambda ") else f"{name}({plain})"


def _lambda_name(function: FunctionType) -> str:
    """Return the variable that a lambda was assigned to, or its text; `lambda` where its source cannot be found."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)).strip().rstrip(","))
    except (OSError, TypeError, SyntaxError):
        return "lambda"
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Lambda)]
    if len(found) > 1:
        own = (function.__code__.co_code, function.__code__.co_names, function.__code__.co_varnames)
        codes = {node: compile(ast.Expression(node), "lambda", "eval").co_consts[0] for node in found}
        constants = function.__code__.co_consts
        found = [
            node
            for node, code in codes.items()
            if (code.co_code, code.co_names, code.co_varnames) == own and code.co_consts == constants
        ]
    if not found:
        return "lambda"
    for statement in ast.walk(tree):
        if isinstance(statement, ast.Assign) and statement.value is found[0]:
            return ast.unparse(statement.targets[0])
    found[0].args.defaults = []  # they are named with their values
    text = ast.unparse(found[0])
    return text if len(text) <= LONGEST_LAMBDA else f"{text[: LONGEST_LAMBDA - 1]}…"


def source_of(function: Callable[..., Any]) -> str | None:
    """Return the source code of a callable, if Python can find it."""
    try:
        return inspect.getsource(innermost(function))
    except (OSError, TypeError):
        return None


def required_arguments(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the arguments without a default; none for built-ins that have no signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return tuple(p.name for p in parameters if p.default is p.empty and p.kind not in variadic)


def user_path() -> Iterable[str]:
    """Return `sys.path` without Python's own folders, so that modules beside a notebook can be imported in workers."""
    python = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    standard = tuple(str(Path(path)) for path in python)
    here = current_folder()
    entries = [os.path.normpath(here / entry) for entry in sys.path]
    package = str(Path(__file__).resolve().parents[2])
    users = [entry for entry in entries if not entry.startswith(standard) and not entry.endswith(".zip")]
    return dict.fromkeys([*users, *(() if package.startswith(standard) else (package,))])


# Files of installed libraries, and of the user

_PACKAGE = str(Path(__file__).parents[1])


@functools.cache
def _installed_roots() -> tuple[str, ...]:
    """Return the folders of Python, its libraries and this package, and that of torch, which may lie elsewhere."""
    torch = importlib.util.find_spec("torch")
    libraries = [str(Path(torch.origin).parent)] if torch is not None and torch.origin else []
    folders = {str(Path(path)) for path in (sys.prefix, sys.base_prefix, _PACKAGE, *libraries)}
    return (*(folder for folder in folders if folder != "/"), "<frozen", "<string>", "<attrs", "<__array")


def _is_installed(file: str | None) -> bool:
    """Return True for a file of an installed library or of this package, and for what has no file, as built-ins."""
    return not file or file.startswith(_installed_roots())


# Lines of the user's code, for errors that say where a model stops capture.

FORWARD = "forward_loss"
"""Name of the function of this package that calls the model's forward while it is exported."""
_LIBRARY_MODELS = re.compile(r"/(?:transformers|(?:site|dist)-packages/[^/]+)/models/")
"""Files of installed libraries that hold models."""


@dataclass(frozen=True)
class SourceLine:
    """A line of the model's code; without a file if it is not known."""

    file: str = ""
    number: int = 0
    text: str = ""
    caller: str = ""
    """The user's line that led to it, `file:number`, if it is in a library."""

    @property
    def where(self) -> str:
        """The line as a part of a sentence, `" at file:number (`text`)"`; empty if it is not known."""
        caller = f", called from {self.caller}" if self.caller else ""
        return f" at {place(self.file, self.number)} (`{self.text}`{caller})" if self.file else ""

    @property
    def is_of_library(self) -> bool:
        """True if the line is in an installed library."""
        return bool(self.file) and not is_users(self.file)

    def error(self, model: str, message: str, **facts: Any) -> CaptureError:
        """Return a `CaptureError` that blames this line; the message continues the model's name."""
        return CaptureError(f"{model} {message}", file=self.file, line=self.number, **facts)


def line_of_node(node: fx.Node) -> SourceLine:
    """Return the innermost line that export noted for an operation."""
    lines = re.findall(r'File "([^"]+)", line (\d+)[^\n]*\n\s*([^\n]*)', node.stack_trace or "")
    return SourceLine(lines[-1][0], int(lines[-1][1]), lines[-1][2]) if lines else SourceLine()


def line_of_frames(frames: Iterable[traceback.FrameSummary]) -> SourceLine:
    """Return the innermost line inside forward that is the user's, or in a model of an installed library.

    Lines outside of forward, as those that called capture, are left out. A line of a library comes with the user's
    line that led to it.
    """
    every = list(frames)
    inside = [
        index for index, frame in enumerate(every) if frame.name == FORWARD and frame.filename.startswith(_PACKAGE)
    ]
    model = [frame for frame in every[inside[-1] + 1 if inside else 0 :] if frame.name != "<module>"]
    users = [f for f in model if is_users(f.filename)]
    candidates = [f for f in model if f in users or _is_of_library_model(f.filename)]
    if not candidates:
        return SourceLine()
    frame = candidates[-1]
    line = line_at(frame.filename, frame.lineno or 0, frame.line)
    if frame in users or not users:
        return line
    return replace(line, caller=place(users[-1].filename, users[-1].lineno or 0))


def line_of_running_code() -> SourceLine:
    """Return the innermost line of the code that calls this which is the user's, or in a model of a library."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_of_model(file):
            return line_at(file, frame.f_lineno)
        frame = frame.f_back
    return SourceLine()


@functools.cache
def is_users(file: str) -> bool:
    """Return True for a file that is neither an installed library's nor of this package."""
    return not file or not _is_installed(file)


def is_of_model(file: str) -> bool:
    """Return True for a file that is the user's, or has a model of an installed library."""
    return is_users(file) or _is_of_library_model(file)


@functools.cache
def _is_of_library_model(file: str) -> bool:
    return bool(_LIBRARY_MODELS.search(file.replace("\\", "/")))


def line_at(file: str, number: int, text: str | None = None) -> SourceLine:
    """Return a line of a file, with its text."""
    return SourceLine(file, number, text or linecache.getline(file, number).strip())
