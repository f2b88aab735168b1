"""Where the workbench keeps what it can make again: tokenised text, measurements, the queue of this machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_home() -> Path:
    """`$WORKBENCH_HOME`, or the user's cache folder by the platform's custom."""
    if home := os.environ.get("WORKBENCH_HOME"):
        return Path(home).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "workbench"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "workbench"
