"""A process that works for this one: a module of the package that reads its input and writes answers to its output.

It is a process of its own rather than a fork or a `multiprocessing` child, so that it neither repeats the user's script
nor copies this process. It ends when its input does, which the kernel closes even if this process was killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, cast


class Child:
    """The process, seen from the one that started it."""

    def __init__(self, module: str, environment: Mapping[str, str], descriptors: Sequence[int] = ()) -> None:
        """Start the `main` of a module, which begins with `answers`; it inherits the open files `descriptors`."""
        root = str(Path(__file__).resolve().parents[2])
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"from {module} import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=descriptors,
            env={**environment, "PYTHONPATH": os.pathsep.join([root, *filter(None, sys.path)])},
        )
        self.input, self.output = cast(IO[bytes], self.process.stdin), cast(IO[bytes], self.process.stdout)

    def end(self) -> None:
        """End the process, and wait for its end; its last answers can still be read."""
        with contextlib.suppress(OSError):
            self.input.close()
        self.process.kill()
        self.process.wait()


def answers() -> IO[bytes]:
    """Return the file for the answers of this process, a child, and send to its log what libraries print."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends this process.
    file = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return file
