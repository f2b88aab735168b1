"""The user's own code on its way to other processes: pickled objects, and the path from which they import."""

from __future__ import annotations

import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable
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
            "when it is called (open files, connections, locks) instead of capturing it.",
            part=name,
        ) from error


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
