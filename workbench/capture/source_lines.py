"""Lines of the user's own code, for errors that say where a model stops capture."""

from __future__ import annotations

import linecache
import re
import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from workbench.errors import CaptureError

_INSTALLED = tuple(
    str(Path(path)) for path in {sys.prefix, sys.base_prefix, str(Path(torch.__file__).parent)} if path != "/"
)
_OWN = str(Path(__file__).parent.parent)


@dataclass(frozen=True)
class SourceLine:
    """A line of the model's code; without a file if it is not known."""

    file: str = ""
    number: int = 0
    text: str = ""

    @property
    def where(self) -> str:
        """The line as a part of a sentence, `" at file:number (`text`)"`; empty if it is not known."""
        return f" at {self.file}:{self.number} (`{self.text}`)" if self.file else ""

    def error(self, model: str, message: str, **facts: Any) -> CaptureError:
        """Return a `CaptureError` that blames this line; the message continues the model's name."""
        return CaptureError(f"{model} {message}", model=model, file=self.file, line=self.number, **facts)


def line_of_node(node: fx.Node) -> SourceLine:
    """Return the innermost line that export noted for an operation."""
    lines = re.findall(r'File "([^"]+)", line (\d+)[^\n]*\n\s*([^\n]*)', node.stack_trace or "")
    return SourceLine(lines[-1][0], int(lines[-1][1]), lines[-1][2]) if lines else SourceLine()


def line_of_frames(frames: Iterable[traceback.FrameSummary]) -> SourceLine:
    """Return the innermost line of the user's code; if there is none, the innermost in a model of `transformers`."""
    inside = [frame for frame in frames if frame.name != "<module>"]
    users = [f for f in inside if not f.filename.startswith((*_INSTALLED, _OWN, "<frozen", "<string>"))]
    candidates = users or [f for f in inside if "transformers/models" in f.filename.replace("\\", "/")]
    if not candidates:
        return SourceLine()
    frame = candidates[-1]
    number = frame.lineno or 0
    return SourceLine(frame.filename, number, frame.line or linecache.getline(frame.filename, number).strip())
