"""Executing a notebook with parameters, and keeping in it what a second execution needs."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.errors import UnknownParameter, WorkbenchError, suggestion
from workbench.figures.pages import notebook_to_html, read_notebook, without_widgets
from workbench.notebooks._record import add_record
from workbench.rundir import RunDir
from workbench.runs import Run
from workbench.runs.records.follow import Follower
from workbench.runs.launching.launcher import LAUNCHES
from workbench.runs.tracking.wandb_run import start_upload

REPORT_EVERY_S = 15.0
POLL_S = 0.5
KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}


@dataclass(frozen=True)
class Executed:
    """An executed notebook, the page made of it, and the runs that it launched, in order."""

    notebook: Path
    page: Path
    runs: tuple[Run, ...]


def execute(
    notebook: Path,
    to: Path,
    parameters: Mapping[str, Any] | None = None,
    *,
    kernel: str | None = None,
    report: Callable[[str], None] | None = None,
    variables: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Executed:
    """Execute into the folder `to`, export, and record what ran in the notebook's metadata.

    `report` is given a line of progress every few seconds while runs of the notebook train. `variables` are added to
    the kernel's environment, and `folder` is where it starts. A failing cell still leaves notebook and page, up to the
    failure. Raises `UnknownParameter` for a parameter that the notebook's `parameters` cell does not set, before
    anything runs, and `WorkbenchError` for a kernel that is not here.
    """
    if (to / notebook.name).resolve() == notebook.resolve():
        raise WorkbenchError(f"{notebook} would be overwritten. Give another folder: workbench execute … --to FOLDER.")
    executed, page = to.absolute() / notebook.name, to.absolute() / f"{notebook.stem}.html"
    with tempfile.TemporaryDirectory() as scratch:
        source = _with_kernel(notebook, Path(scratch))
        _check_parameters(source, parameters or {})
        to.mkdir(parents=True, exist_ok=True)
        launches = Path(scratch) / "launches"
        launches.touch()
        with _environment({**(variables or {}), LAUNCHES: str(launches)}), _reported(launches, report):
            failure = _papermill(source, executed, parameters or {}, kernel, folder)
        runs = launched(launches)
    without_widgets(executed)
    add_record(executed, runs)
    notebook_to_html(executed, page)
    for run in runs:
        shutil.copyfile(executed, run.directory.notebook)
        start_upload(run.directory)
    if failure is not None:
        raise WorkbenchError(f"{failure} See {page}.", notebook=str(executed))
    return Executed(executed, page, tuple(runs))


def _papermill(
    notebook: Path, executed: Path, parameters: Mapping[str, Any], kernel: str | None, folder: Path | None
) -> str | None:
    """What failed, in one sentence; None if every cell ran."""
    import papermill
    from jupyter_client.kernelspec import NoSuchKernel
    from nbclient.exceptions import DeadKernelError

    try:
        papermill.execute_notebook(
            str(notebook),
            str(executed),
            parameters=dict(parameters),
            kernel_name=kernel,
            progress_bar=sys.stderr.isatty(),
            cwd=None if folder is None else str(folder),
        )
    except papermill.PapermillExecutionError as error:
        return f"{notebook.name} failed in cell {error.exec_count}: {error.ename}: {error.evalue}"
    except NoSuchKernel as error:
        raise WorkbenchError(
            f"{notebook.name} asks for the kernel {error.name!r}, which is not here. Run it with this one's: "
            f"--kernel {KERNEL['name']}.",
            kernel=error.name,
        ) from None
    except DeadKernelError:
        return f"The kernel of {notebook.name} died: it was killed, or ran out of memory. Its runs train on."
    return None


def _with_kernel(notebook: Path, scratch: Path) -> Path:
    """The notebook, or a copy that names a kernel where it does not, as some editors leave it.

    Raises `DataError` for what is no notebook.
    """
    import nbformat

    value = read_notebook(notebook)
    if value.metadata.get("kernelspec", {}).get("name"):
        return notebook
    value.metadata["kernelspec"] = nbformat.from_dict(KERNEL)
    nbformat.write(value, scratch / notebook.name)
    return scratch / notebook.name


def _check_parameters(notebook: Path, parameters: Mapping[str, Any]) -> None:
    import papermill

    known = papermill.inspect_notebook(str(notebook)) if parameters else {}
    for name in parameters:
        if name not in known:
            names = ", ".join(known) or "none"
            hint = suggestion(name, known) if known else "It has no cell tagged parameters."
            listed = "" if hint.startswith("Known names") or not known else f" It has: {names}."
            raise UnknownParameter(
                f"{notebook.name} has no parameter {name!r}. {hint}{listed}", parameter=name, known=tuple(known)
            )


def launched(file: Path) -> list[Run]:
    """The runs in the file that `$WORKBENCH_LAUNCHES` named, in the order of their launch."""
    paths = [Path(line) for line in file.read_text().splitlines() if line]
    return [Run(path) for path in dict.fromkeys(paths) if RunDir(path).experiment.is_file()]


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """The kernel inherits this process's environment."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _reported(launches: Path, report: Callable[[str], None] | None) -> Iterator[None]:
    """Say, from a thread of its own, where the runs stand that the notebook has launched so far."""
    if report is None:
        yield
        return
    done = threading.Event()

    def watch() -> None:
        follower = Follower(REPORT_EVERY_S)
        while not done.wait(POLL_S):
            for line in follower.lines(launched(launches)):
                report(line)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
