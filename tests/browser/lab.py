"""A private JupyterLab server, and a page that drives it; nothing outside 127.0.0.1 is reached."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat

from tests.patience import PATIENCE_S, eventually

CHROMIUM_ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # nothing else is reached
]
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
    token, folders = secrets.token_hex(16), _private_folders(root)
    command = [
        *(sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", "--allow-root"),
        *(f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={root}"),
        *("--LabApp.expose_app_in_browser=True", "--LabApp.news_url=None"),
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
        "--ServerApp.terminals_enabled=False",
    ]
    with (root / "server.log").open("wb") as log:
        environment = {**os.environ, **folders, **environment}
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        try:
            yield _wait_until_ready(process, token, root)
        finally:
            process.terminate()
            try:
                process.wait(PATIENCE_S)
            finally:
                process.kill()


def _wait_until_ready(process: subprocess.Popen[bytes], token: str, root: Path) -> Server:
    """Return the server once it answers. Its own file says its port: another process may take one that was free."""
    file = root / ".jupyter" / "runtime" / f"jpserver-{process.pid}.json"

    def answering() -> Server | None:
        assert process.poll() is None, (
            f"JupyterLab did not start; it said:\n{(root / 'server.log').read_text()[-2000:]}"
        )
        with contextlib.suppress(OSError, ValueError):  # the file is not there yet, or not whole
            server = Server(f"http://127.0.0.1:{json.loads(file.read_text())['port']}", token, root)
            urllib.request.urlopen(f"{server.url}/api/status?token={token}", timeout=PATIENCE_S).close()
            return server
        return None

    return eventually(answering)


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


def asked(server: Server, path: str, method: str = "GET") -> Any:
    """Return the answer of the server's own interface; None where it is empty."""
    headers = {"Authorization": f"token {server.token}"}
    request = urllib.request.Request(f"{server.url}/api/{path}", headers=headers, method=method)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        return json.loads(response.read() or b"null")


def end_kernels(server: Server) -> None:
    """End every kernel of the server with its session."""
    for session in asked(server, "sessions"):
        asked(server, f"sessions/{session['id']}", "DELETE")


def prepared_kernels(server: Server) -> list[str]:
    """Return the idle kernels that no notebook has: the one that waits for a click, if it has done its imports."""
    used = {session["kernel"]["id"] for session in asked(server, "sessions")}
    return [
        each["id"] for each in asked(server, "kernels") if each["id"] not in used and each["execution_state"] == "idle"
    ]


@contextlib.contextmanager
def own_runs(server: Server) -> Iterator[Path]:
    """Give the server an empty folder of runs; those of earlier tests come back on leaving."""
    runs, earlier = server.root / "runs", Path(tempfile.mkdtemp(dir=server.root))
    runs.mkdir(exist_ok=True)
    runs.rename(earlier / "runs")
    runs.mkdir()
    try:
        yield runs
    finally:
        runs.rename(earlier / "left")
        (earlier / "runs").rename(runs)


def write_notebook(path: Path, cells: Sequence[str]) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, path)


def open_notebook(page: Any, server: Server, name: str) -> None:
    """Open a notebook and wait until its kernel is idle."""
    page.goto(f"{server.url}/lab/tree/{name}?token={server.token}&reset")
    wait_for_kernel(page)


def wait_for_kernel(page: Any) -> None:
    """Wait until the notebook has opened and its kernel is connected and idle."""
    page.wait_for_selector(".jp-NotebookPanel .jp-Cell")
    page.evaluate("() => window.jupyterapp.restored.then(() => 1)")
    page.wait_for_function(
        """() => {
            const panel = window.jupyterapp.shell.currentWidget;
            const kernel = panel?.sessionContext?.session?.kernel;
            const connected = panel?.sessionContext?.isReady && kernel?.connectionStatus === 'connected';
            return connected && kernel.status === 'idle';
        }""",
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
            page.wait_for_function(f"() => {taken}", timeout=PATIENCE_S * 1e3 / ATTEMPTS)
            return
        wait_for_kernel(page)
    raise AssertionError("the kernel started no cell")


def run_all(page: Any) -> None:
    """Run every cell; return when all have finished, or fail with the traceback of one that failed."""
    start_all(page)
    done = f"{CELLS}.every(cell => cell.model.executionState !== 'running' && cell.model.executionCount !== null)"
    failures = f"{CELLS}.flatMap(cell => cell.model.sharedModel.getOutputs().filter(o => o.output_type === 'error'))"
    page.wait_for_function(f"() => {done} || {failures}.length")
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
    )
    frames(page)


def frames(page: Any) -> None:
    """Wait until the page has drawn whatever it was told before."""
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def later_timers(page: Any, delay_ms: int) -> None:
    """Wait until the page has served every timer that was due within a delay, and has drawn what they changed.

    However slow the machine is, a browser serves timers in the order in which they are due.
    """
    page.evaluate("delay => new Promise(done => setTimeout(done, delay))", delay_ms)
    frames(page)


def stop_clock(page: Any) -> None:
    """Let no limit of our code in the page pass, as that for which the curve is held in view."""
    page.evaluate("() => { const now = Date.now(); Date.now = () => now; }")


STILL = """() => {
    const graphs = [...document.querySelectorAll('.js-plotly-plot')].filter(graph => graph.offsetWidth);
    const places = graphs.flatMap(graph => [graph, ...graph.querySelectorAll('.main-svg text')]).map(part => {
        const {x, y, width, height} = part.getBoundingClientRect();
        return [part.textContent, x, y, width, height];
    });
    const place = JSON.stringify(places);
    const isFull = ({_fullLayout, offsetWidth}) => _fullLayout && Math.abs(_fullLayout.width - offsetWidth) <= 1;
    window.stillFrames = place === window.lastPlace && graphs.every(isFull) ? (window.stillFrames ?? 0) + 1 : 0;
    window.lastPlace = place;
    return window.stillFrames >= 5;
}"""
"""Script that is asked once a frame and returns True when all figures fill their rooms and no word has moved lately."""


def wait_until_still(page: Any) -> None:
    """Wait until every figure has drawn itself as wide as its room, and its words keep their places."""
    page.evaluate("() => { window.stillFrames = 0; return document.fonts.ready.then(() => 1); }")
    page.wait_for_function(STILL)


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


STEPS = """() => {
    const traces = document.querySelector('.jupyter-widgets .js-plotly-plot')?._fullData ?? [];
    const lines = traces.filter(trace => trace.meta === 'line' && Array.isArray(trace.customdata));
    const steps = lines.map(trace => trace.customdata.map(point => point[1]));
    return steps.sort((one, other) => one.length - other.length).at(-1) ?? [];
}"""
"""Script that returns the steps of the points that a dashboard has drawn of its longest curve."""


def wait_for_step(page: Any, step: int) -> None:
    """Wait until a dashboard has drawn its longest curve up to a step."""
    page.wait_for_function(f"() => ({STEPS})().at(-1) >= {step}")


def open_launcher(page: Any, server: Server) -> None:
    """Open JupyterLab with its launcher, and wait for the cards of the templates."""
    page.goto(f"{server.url}/lab?token={server.token}&reset")
    page.locator(CARD).first.wait_for()


def wait_for_curve(page: Any, segments: int = 10) -> None:
    """Wait until a live figure in view has drawn a line of so many segments."""
    page.wait_for_function(f"() => ({DRAWN})() >= {segments}")
