"""User-defined code on its way to other processes: pickled objects, and the path from which they import."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.errors import InvalidExperiment


def pickled(name: str, value: Any) -> bytes:
    """Pickle an object: by value if a notebook cell defined it, by reference if a module of the user did.

    Raises `InvalidExperiment` if the object cannot be pickled; `name` says what it is.
    """
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        raise InvalidExperiment(
            f"The {name} cannot be sent to the workers: {type(error).__name__}: {error}. Let it build what it needs "
            "when it is called (open files, connections, locks) instead of capturing it."
        ) from error


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
    entries = [os.path.abspath(entry or os.curdir) for entry in sys.path]
    package = str(Path(__file__).resolve().parents[1])
    users = [entry for entry in entries if not entry.startswith(standard) and not entry.endswith(".zip")]
    return dict.fromkeys([*users, *(() if package.startswith(standard) else (package,))])
