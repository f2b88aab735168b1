"""Lines of the user's own code, for errors that say where a model stops capture."""

from __future__ import annotations

import functools
import linecache
import re
import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

from workbench.display import place
from workbench.errors import CaptureError

_INSTALLED = tuple(
    str(Path(path)) for path in {sys.prefix, sys.base_prefix, str(Path(torch.__file__).parent)} if path != "/"
)
_OWN = str(Path(__file__).parent.parent)
_LIBRARY_MODELS = re.compile(r"/(?:transformers|(?:site|dist)-packages/[^/]+)/models/")
"""Files of installed libraries that hold models."""
FORWARD = "forward_loss"
"""Name of the function of this package that calls the model's forward while it is exported."""


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
    inside = [index for index, frame in enumerate(every) if frame.name == FORWARD and frame.filename.startswith(_OWN)]
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
        if is_users(file) or _is_of_library_model(file):
            return line_at(file, frame.f_lineno)
        frame = frame.f_back
    return SourceLine()


@functools.cache
def is_users(file: str) -> bool:
    """Return True for a file that is neither an installed library's nor of this package."""
    return not file.startswith((*_INSTALLED, _OWN, "<frozen", "<string>"))


@functools.cache
def _is_of_library_model(file: str) -> bool:
    return bool(_LIBRARY_MODELS.search(file.replace("\\", "/")))


def line_at(file: str, number: int, text: str | None = None) -> SourceLine:
    """Return a line of a file, with its text."""
    return SourceLine(file, number, text or linecache.getline(file, number).strip())
