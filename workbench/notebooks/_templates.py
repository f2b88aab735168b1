"""The notebooks to start from: found in a checkout, and where an installed wheel put them."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from workbench.errors import RunNotFound, WorkbenchError, suggestion

FOLDER = Path("notebook_templates") / "workbench"
CHECKOUT = Path(__file__).resolve().parents[2] / "templates"


def template_path(template: str) -> Path:
    """The notebook at that path, or the template of that name. Raises `RunNotFound` with the names that there are."""
    given = Path(template)
    if given.is_file():
        return given
    known = templates()
    if given.stem in known:
        return known[given.stem]
    hint = suggestion(given.stem, known) if known else "No templates are installed here; give the path of a notebook."
    raise RunNotFound(f"There is no notebook {template!r}. {hint}", template=template)


def templates() -> dict[str, Path]:
    """Name -> file: of the current folder, else of the checkout, else of the installation."""
    from jupyter_core.paths import jupyter_path

    installed = [Path(folder) for folder in reversed(jupyter_path(*FOLDER.parts))]
    folders = [*installed, Path(sys.prefix) / "share/jupyter" / FOLDER, CHECKOUT, Path("templates")]
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.ipynb"))}


def new(template: str, path: str | Path | None = None) -> Path:
    """Copy a template to `path` (a file or a folder; the current folder by default) and return where it is.

    Raises `RunNotFound` for an unknown template and `WorkbenchError` rather than overwrite anything.
    """
    source = template_path(template)
    target = Path(path) if path is not None else Path()
    if target.is_dir():
        target /= source.name
    target = target.with_suffix(".ipynb").absolute()
    if target.exists():
        raise WorkbenchError(
            f"{target} is there already. Give another path: workbench new {source.stem} PATH.", path=str(target)
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    return target
