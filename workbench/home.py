"""The cache folder, for everything that can be made again: tokenised text, measurements, the device queue."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from workbench.errors import WorkbenchError


def cache_home() -> Path:
    """Return `$WORKBENCH_HOME`, or the user's cache folder by the custom of the platform."""
    if home := os.environ.get("WORKBENCH_HOME"):
        return Path(home).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "workbench"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "workbench"


def current_folder() -> Path:
    """Return the current folder; raises `WorkbenchError` if it was deleted or may not be read."""
    try:
        return Path.cwd()
    except OSError as error:
        raise WorkbenchError(
            f"The current folder cannot be used: {error.strerror}. It was deleted or closed to you while this process "
            "was in it. Change to another one, os.chdir(...), or %cd in a notebook."
        ) from None
