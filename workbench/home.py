"""The cache folder, for everything that can be made again: tokenised text, measurements, the device queue."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_home() -> Path:
    """Return `$WORKBENCH_HOME`, or the user's cache folder by the custom of the platform."""
    if home := os.environ.get("WORKBENCH_HOME"):
        return Path(home).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "workbench"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "workbench"
