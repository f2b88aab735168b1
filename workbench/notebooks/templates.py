"""The template notebooks, in a checkout and where an installed wheel puts them."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from workbench.errors import RunNotFound, WorkbenchError, suggestion

FOLDER = Path("notebook_templates") / "workbench"
"""Folder of the templates inside a Jupyter data folder."""
CHECKOUT = Path(__file__).resolve().parents[2] / "templates"


def template_path(template: str) -> Path:
    """Return the notebook at this path, or the template of this name; raises `RunNotFound` with the known names."""
    given = Path(template)
    if given.is_file():
        return given
    installed = templates()
    if given.stem in installed:
        return installed[given.stem]
    none = "No templates are installed here; give the path of a notebook."
    raise RunNotFound(f"There is no notebook {template!r}. {suggestion(given.stem, installed) if installed else none}")


def templates() -> dict[str, Path]:
    """Return the templates by name: those of the current folder win over the checkout's and the installed ones."""
    from jupyter_core.paths import jupyter_path

    installed = [Path(folder) for folder in reversed(jupyter_path(*FOLDER.parts))]
    folders = [*installed, Path(sys.prefix) / "share/jupyter" / FOLDER, CHECKOUT, Path("templates")]
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.ipynb"))}


def new(template: str, path: str | Path | None = None) -> Path:
    """Copy a template to `path` (a file or a folder; the current folder by default) and return the copy's path.

    Raises `RunNotFound` for an unknown template, and `WorkbenchError` if the file exists already.
    """
    source = template_path(template)
    target = Path(path) if path is not None else Path()
    if target.is_dir():
        target /= source.name
    target = target.with_suffix(".ipynb").absolute()
    if target.exists():
        raise WorkbenchError(f"{target} exists already. Give another path: workbench new {source.stem} PATH.")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    return target
