"""A private JupyterLab server, and a page that drives it; nothing outside 127.0.0.1 is reached."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat

CHROMIUM_ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # nothing else is reached
]
START_TIMEOUT_S = 120
PATIENCE_MS = 180_000
"""Longest wait in ms for anything that must happen: a busy machine takes many times longer than an idle one."""
ATTEMPTS = 6
EXTENSION = Path(__file__).parents[2] / "workbench" / "lab" / "jupyter"
"""Folder in which Jupyter finds the extension of this checkout, before one that is installed."""


@dataclass(frozen=True)
class Server:
    """A running JupyterLab."""

    url: str
    token: str
    root: Path


@contextlib.contextmanager
def jupyterlab(root: Path, environment: dict[str, str]) -> Iterator[Server]:
    """Start JupyterLab with our extension over `root`, with settings of its own; end it on leaving."""
    port, token = _free_port(), secrets.token_hex(16)
    server = Server(f"http://127.0.0.1:{port}", token, root)
    with (root / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [
                *(
                    sys.executable,
                    "-m",
                    "jupyterlab",
                    "--no-browser",
                    "--ip=127.0.0.1",
                    f"--port={port}",
                    "--allow-root",
                ),
                *(f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={root}"),
                *("--LabApp.expose_app_in_browser=True", "--LabApp.news_url=None"),
                "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
                "--ServerApp.terminals_enabled=False",
            ],
            stdout=log,
            stderr=log,
            env={**os.environ, **_private_folders(root), **environment},
            start_new_session=True,
        )
        try:
            _wait_until_ready(server, process)
            yield server
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            if process.poll() is None:
                process.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _private_folders(root: Path) -> dict[str, str]:
    names = {
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_DATA_DIR": "data",
        "JUPYTER_RUNTIME_DIR": "runtime",
        "IPYTHONDIR": "ipython",
        "JUPYTERLAB_SETTINGS_DIR": "settings",
        "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
    }
    folders = {variable: root / ".jupyter" / name for variable, name in names.items()}  # some of them may exist
    for folder in folders.values():
        folder.mkdir(parents=True, exist_ok=True)
    quiet = folders["JUPYTERLAB_SETTINGS_DIR"] / "@jupyterlab" / "apputils-extension"
    quiet.mkdir(parents=True)
    (quiet / "notification.jupyterlab-settings").write_text('{"fetchNews": "false", "checkForUpdates": false}')
    found = dict.fromkeys(("JUPYTER_PATH", "JUPYTER_CONFIG_PATH"), str(EXTENSION))
    return {variable: str(folder) for variable, folder in folders.items()} | found


def end_kernels(server: Server) -> None:
    """End every kernel of the server with its session."""

    def answer(method: str, path: str) -> bytes:
        headers = {"Authorization": f"token {server.token}"}
        request = urllib.request.Request(f"{server.url}/api/{path}", headers=headers, method=method)
        with urllib.request.urlopen(request, timeout=PATIENCE_MS / 1e3) as response:
            return bytes(response.read())

    for session in json.loads(answer("GET", "sessions")):
        answer("DELETE", f"sessions/{session['id']}")


def _wait_until_ready(server: Server, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        with contextlib.suppress(urllib.error.URLError, OSError):
            urllib.request.urlopen(f"{server.url}/api/status?token={server.token}", timeout=1)
            return
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(
                f"JupyterLab did not start; it said:\n{(server.root / 'server.log').read_text()[-2000:]}"
            )
        time.sleep(0.1)


def write_notebook(path: Path, cells: Sequence[str]) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, path)


def open_notebook(page: Any, server: Server, name: str) -> None:
    """Open a notebook and wait until its kernel is idle."""
    page.goto(f"{server.url}/lab/tree/{name}?token={server.token}&reset", timeout=PATIENCE_MS)
    wait_for_kernel(page)


def wait_for_kernel(page: Any) -> None:
    """Wait until the notebook has opened and its kernel is connected and idle."""
    page.wait_for_selector(".jp-NotebookPanel .jp-Cell", timeout=PATIENCE_MS)
    page.evaluate("() => window.jupyterapp.restored.then(() => 1)")
    page.wait_for_function(
        """() => {
            const panel = window.jupyterapp.shell.currentWidget;
            const kernel = panel?.sessionContext?.session?.kernel;
            const connected = panel?.sessionContext?.isReady && kernel?.connectionStatus === 'connected';
            return connected && kernel.status === 'idle';
        }""",
        timeout=PATIENCE_MS,
    )
    page.evaluate("() => window.jupyterapp.shell.currentWidget.context.ready.then(() => 1)")


CELLS = "window.jupyterapp.shell.currentWidget.content.widgets.filter(w => w.model.type === 'code')"


def start_all(page: Any) -> None:
    """Run every cell; return when the kernel has started the first.

    A click on the menu leaves cells unrun at times, and the command's promise never resolves if the kernel reconnects
    meanwhile. The state of the cells is read instead, and the command is repeated until one has started.
    """
    from playwright.sync_api import TimeoutError as NotYet

    page.evaluate(f"() => {CELLS}.forEach(cell => {{ cell.model.executionCount = null; }})")
    taken = f"{CELLS}.some(cell => cell.model.executionState === 'running' || cell.model.executionCount !== null)"
    for _ in range(ATTEMPTS):
        page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-all-cells'); }")
        with contextlib.suppress(NotYet):
            page.wait_for_function(f"() => {taken}", timeout=PATIENCE_MS / ATTEMPTS)
            return
        wait_for_kernel(page)
    raise AssertionError("the kernel started no cell")


def run_all(page: Any) -> None:
    """Run every cell; return when all have finished, or fail with the traceback of one that failed."""
    start_all(page)
    done = f"{CELLS}.every(cell => cell.model.executionState !== 'running' && cell.model.executionCount !== null)"
    failures = f"{CELLS}.flatMap(cell => cell.model.sharedModel.getOutputs().filter(o => o.output_type === 'error'))"
    page.wait_for_function(f"() => {done} || {failures}.length", timeout=PATIENCE_MS)
    found = page.evaluate(f"() => {failures}.map(output => output.traceback.join('\\n'))")
    assert not found, found[0]


def change_theme(page: Any, name: str) -> None:
    """Change JupyterLab's theme (`Dark`, `Light`); return when the page shows it, and no longer the splash."""
    page.evaluate(
        "name => window.jupyterapp.commands.execute('apputils:change-theme', {theme: name})", f"JupyterLab {name}"
    )
    page.wait_for_function(
        """dark => document.body.dataset.jpThemeLight === String(!dark)
            && !document.getElementById('jupyterlab-splash')?.checkVisibility()""",
        arg=name == "Dark",
        timeout=PATIENCE_MS,
    )
    page.wait_for_timeout(1000)  # figures are drawn anew


def eventually(truth: Callable[[], Any], explain: Callable[[], Any] = lambda: "") -> None:
    """Wait until something is true of the page, or fail with what `explain` returns then."""
    deadline = time.monotonic() + PATIENCE_MS / 1e3
    while not truth():
        assert time.monotonic() < deadline, f"it did not come true in time {explain()!r}"
        time.sleep(0.1)


def restart_kernel(page: Any) -> None:
    """Restart the kernel of the open notebook; return when the new one is idle."""
    page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart().then(() => 1)")
    wait_for_kernel(page)


def save(page: Any) -> None:
    page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save').then(() => 1)")


CARD = ".jp-LauncherCard[data-category='Workbench']"
DRAWN = """() => {
    const graph = document.querySelector('.jupyter-widgets .js-plotly-plot');
    const area = graph?.closest('.jp-WindowedPanel-outer')?.getBoundingClientRect();
    const shown = (graph?.querySelector('.plot') ?? graph)?.getBoundingClientRect();
    if (!area || shown.height < 50 || shown.top < area.top || shown.top + shown.height / 2 > area.bottom) return 0;
    const lines = Array.from(graph.querySelectorAll('.scatterlayer path.js-line'));
    return Math.max(0, ...lines.map(line => (line.getAttribute('d').match(/[LHVC]/g) || []).length));
}"""
"""Script that returns the segments of the longest line drawn by a live figure; 0 while its plot is out of view."""


def open_launcher(page: Any, server: Server) -> None:
    """Open JupyterLab with its launcher, and wait for the cards of the templates."""
    page.goto(f"{server.url}/lab?token={server.token}&reset", timeout=PATIENCE_MS)
    page.locator(CARD).first.wait_for(timeout=PATIENCE_MS)


def wait_for_curve(page: Any, segments: int = 10) -> None:
    """Wait until a live figure in view has drawn a line of so many segments."""
    page.wait_for_function(f"() => ({DRAWN})() >= {segments}", timeout=PATIENCE_MS)
