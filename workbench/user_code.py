"""The user's own code on its way to other processes: pickled by value where a cell defined it, with this path."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from workbench.errors import InvalidExperiment


def pickled(name: str, value: Any) -> bytes:
    """By value what was defined in a cell, by reference what a module of the user's defines."""
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        raise InvalidExperiment(
            f"The {name} cannot be sent to the workers: {type(error).__name__}: {error}. Let it build what it needs "
            "when it is called (open files, connections, locks) instead of capturing it.",
            part=name,
        ) from error


def user_path() -> Iterable[str]:
    """This process's `sys.path` without Python's own folders: what lies beside the notebook imports in the workers."""
    own = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    standard = tuple(str(Path(path)) for path in own)
    entries = [os.path.abspath(entry or os.curdir) for entry in sys.path]
    package = str(Path(__file__).resolve().parents[1])
    kept = [entry for entry in entries if not entry.startswith(standard) and not entry.endswith(".zip")]
    return dict.fromkeys([*kept, *(() if package.startswith(standard) else (package,))])
