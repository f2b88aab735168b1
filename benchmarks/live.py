"""How quickly what trains is seen, and what watching costs.

    python -m benchmarks.live measure FILE            # everything; ten minutes, and Chromium for all but three
    python -m benchmarks.live measure FILE tracking launch
    python -m benchmarks.live update FILE             # puts FILE's table into benchmarks/README.md

Measures, on this machine, and writes every value to FILE, beside the load before; with names it keeps the rest of FILE:

- `first_curve`: clicks and seconds from the launcher to the first curve that `templates/bert_scaling.ipynb` draws
  in view, how long after the click its first cell was done, its runs were launched and a step was logged, and the
  processor time of kernel, supervisors and ranks until then: on a home without a cache, and once more. The click comes
  when the kernel that the server prepares is ready, or after some seconds where none is prepared;
- `latency`: from the moment an event is written to the moment a real browser (JupyterLab in headless Chromium) has
  drawn it;
- `zoom`: 10 runs × 1 M points: time of `wb.live` for runs that nobody has opened before, and again in another kernel
  (the panels of such long runs follow in the background); then from the end of a drag to the redrawn curve with the
  points of the visible range, 30 times;
- `open`: the same opening in five new kernels without a page, in wall and processor time and memory;
- `sidebar`: 1,000 runs: time from the click on JupyterLab's sidebar to the first rows, and of a search, ten words;
- `memory`: growth of the kernel and of the page while a recorded 8-hour run (one step a second) is replayed;
- `tracking`: what one step's events of 50 metrics cost the training, in processor time;
- `launch`: time for `wb.launch` to return.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.pages import fill
from tests.patience import PATIENCE_S

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY / "tests" / "browser"))

EIGHT_HOURS = 8 * 3600
RUNS, POINTS = 10, 1_000_000
METRICS = 50
LOOKING_S = 3.0
"""Seconds for which the cards are looked at before the click, at least."""
CELL = """
import os, psutil, time
from workbench.runs.registry import load_run
from workbench.widgets import live
started = time.perf_counter()
dashboard = live([load_run(path) for path in {paths!r}], x="step")
opened_s = time.perf_counter() - started
dashboard
"""
OPENING = """
import json, resource, time
from workbench.runs.registry import load_run
from workbench.widgets import live
started, computed = time.perf_counter(), time.process_time()
dashboard = live([load_run(path) for path in {paths!r}], x="step")
took = [time.perf_counter() - started, time.process_time() - computed]
dashboard.stop()
print(json.dumps([*took, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10]))
"""
GRAPH = "document.querySelector('.jupyter-widgets .js-plotly-plot')"


def write_run(path: Path, steps: int, metrics: int = 0, state: str = "running") -> Path:
    """A run directory with a history; alive as long as this process is."""
    from workbench.record.rundir import RunDir, append_event, this_process, write_json

    run = RunDir(path)
    run.path.mkdir(parents=True)
    write_json(run.environment, {})
    write_json(run.launcher, {"supervisor": this_process()})
    write_json(run.experiment, {"steps": max(steps, EIGHT_HOURS), "name": path.name})
    append_event(run.events, "status", state="running", message="")
    append_event(run.events, "start", devices=4, world=4, resumed_from=None)
    if steps:
        write_steps(run.events, 1, steps, metrics)
    if state != "running":
        append_event(run.events, "status", state=state, message="")
    return path


def write_steps(events: Path, first: int, last: int, metrics: int = 0) -> None:
    """Steps `first` … `last` in one go, as a recorded run has them."""
    from workbench.record.step_table import log_steps

    random = np.random.default_rng(first)
    noise = random.normal(0, 0.1, last - first + 1)
    extra = {f"metric_{index}": 1.0 / (index + 1) for index in range(metrics)}
    losses = (
        (step, 4 + 6 * float(np.exp(-step / 5e4)) + float(noise[step - first])) for step in range(first, last + 1)
    )
    log_steps(events.parent, [{**step_row(step, loss), "scalars": extra} for step, loss in losses])


def step_row(step: int, loss: float) -> dict[str, Any]:
    rates = {
        "learning_rate": 1e-4,
        "grad_norm": 1.0 + 0.1 * loss,
        "step_ms": 1000.0,
        "tokens_per_s": 8192.0,
        "mfu": 0.4,
    }
    totals = {"tokens": step * 8192, "samples": step * 64, "flops": step * 1e12, "seconds": float(step)}
    return {"step": step, "loss": loss, **rates, **totals}


@contextlib.contextmanager
def laboratory(folder: Path, **variables: str) -> Iterator[tuple[Any, Any]]:
    """A JupyterLab over `folder` with further environment variables, and a page of a real browser."""
    import lab
    from conftest import CHROMIUM
    from playwright.sync_api import sync_playwright

    if CHROMIUM is None:
        sys.exit(
            "There is no Chromium on this machine. "
            "Install one (apt-get install chromium), or ask for: open tracking launch."
        )
    environment = {"PYTHONPATH": str(REPOSITORY), "WORKBENCH_RUNS": str(folder / "runs"), **variables}
    with lab.jupyterlab(folder, environment) as server, sync_playwright() as play:
        browser = play.chromium.launch(
            executable_path=CHROMIUM, args=[*lab.CHROMIUM_ARGUMENTS, "--enable-precise-memory-info"]
        )
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        page.set_default_timeout(1e3 * PATIENCE_S)
        yield server, page
        browser.close()


def show_dashboard(server: Any, page: Any, paths: list[Path], name: str = "live.ipynb") -> None:
    import lab

    lab.write_notebook(server.root / name, [CELL.format(paths=[str(path) for path in paths])])
    lab.open_notebook(page, server, name)
    lab.run_all(page)
    page.wait_for_function(f"() => {GRAPH} && {GRAPH}.data.some(t => t.meta === 'line' && t.x && t.x.length)")


def in_kernel(page: Any, expression: str) -> Any:
    """The value of a Python expression in the notebook's kernel, by way of JSON."""
    answer = page.evaluate(
        """(code) => new Promise(done => {
            const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
            const future = kernel.requestExecute({code: 'import json, os, psutil; print(json.dumps(' + code + '))'});
            future.onIOPub = message => { if (message.header.msg_type === 'stream') done(message.content.text); };
        })""",
        expression,
    )
    return json.loads(answer)


def first_curve(folder: Path) -> dict[str, Any]:
    """One click on the card of the demo, twice; what is drawn is counted in the page, and the clicks too."""
    with laboratory(folder / "lab", WORKBENCH_HOME=str(folder / "home")) as (server, page):
        page.add_init_script("window.clicks = 0; addEventListener('click', e => window.clicks += e.isTrusted, true)")
        return {home: _click(folder, server, page) for home in ("new_home", "used_home")}


def _click(folder: Path, server: Any, page: Any) -> dict[str, Any]:
    import lab

    from workbench.record.event_log import read_events
    from workbench.runs.registry import list_runs

    lab.open_launcher(page, server)
    page.wait_for_timeout(1e3 * LOOKING_S)
    while lab.asked(server, "kernels") and not lab.prepared_kernels(server):
        page.wait_for_timeout(200)
    prepared = lab.prepared_kernels(server)
    load, before, clicked = os.getloadavg()[0], _processor_seconds(folder), time.time()
    page.locator(lab.CARD, has_text="Scaled BERT").click()
    cells = "window.jupyterapp.shell.currentWidget?.content?.widgets"
    page.wait_for_function(f"() => {cells}?.some?.(cell => cell.model.executionCount)")
    began_s = time.time() - clicked
    lab.wait_for_curve(page)
    curve_s, used = time.time() - clicked, _processor_seconds(folder)
    clicks = page.evaluate("() => window.clicks")
    kernel = page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.id")
    runs = {run: read_events(run.directory.events) for run in list_runs(folder / "lab" / "runs")}
    events = [each for each in runs.values() if each[0]["time"] > clicked]
    launched_s = min(each[0]["time"] for each in events) - clicked
    step_s = min(event["time"] for each in events for event in each if event["type"] == "step") - clicked
    for run in runs:
        run.kill()
    page.goto("about:blank")
    lab.end_kernels(server)
    kernel_s, all_s = (after - first for first, after in zip(before, used, strict=True))
    parts: dict[str, Any] = {"first_cell_s": began_s, "launched_s": launched_s, "first_step_s": step_s}
    processor = {"kernel_processor_s": kernel_s, "others_processor_s": all_s - kernel_s}
    parts["prepared"] = kernel in prepared
    return {"clicks": clicks, "curve_s": curve_s, **parts, **processor, "load_at_click": load}


def _processor_seconds(folder: Path) -> tuple[float, float]:
    """Return the processor time of the kernels below a folder, and that of all processes of kernels and runs.

    All of them have the time of their children that ended.
    """
    kernels_s = all_s = 0.0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            command = " ".join(process.cmdline())
            if process.environ().get("WORKBENCH_HOME") == str(folder / "home") and "jupyterlab" not in command:
                times = process.cpu_times()
                own_s = times.user + times.system
                kernels_s += own_s if "ipykernel_launcher" in command else 0.0
                all_s += own_s + times.children_user + times.children_system
    return kernels_s, all_s


def latency(folder: Path, updates: int = 60, every_s: float = 0.5) -> dict[str, Any]:
    """Events are written by this process; the page notes when each was drawn. Both read this machine's clock."""
    from workbench.record.step_table import log_step

    run = write_run(folder / "latency", 500)
    with laboratory(folder / "lab") as (server, page):
        show_dashboard(server, page, [run])
        page.evaluate(
            f"""() => {{
                window.seen = {{}};
                const graph = {GRAPH};
                graph.on('plotly_afterplot', () => {{
                    const line = graph._fullData.find(t => t.meta === 'line');
                    const last = line.x[line.x.length - 1];
                    if (!(last in window.seen)) window.seen[last] = Date.now();
                }});
            }}"""
        )
        written = {}
        for step in range(501, 501 + updates):
            log_step(run, **step_row(step, 4.0))
            written[step] = time.time()
            time.sleep(every_s)
        page.wait_for_timeout(2000)
        seen = {int(float(step)): at / 1e3 for step, at in page.evaluate("() => window.seen").items()}
    return {"updates": updates, "late_ms": [1e3 * (seen[step] - written[step]) for step in written if step in seen]}


def write_long_runs(folder: Path, runs: int = RUNS, points: int = POINTS) -> list[Path]:
    """Runs of so many steps."""
    first = write_run(folder / "run-0", points)
    paths = [first]
    for index in range(1, runs):
        path = folder / f"run-{index}"
        write_run(path, 0)
        for name in ("steps.table", "steps.tail"):
            os.link(first / name, path / name)
        paths.append(path)
    return paths


def zoom(folder: Path, drags: int = 30, points: int = POINTS) -> dict[str, Any]:
    """The last run trains, the others have ended; a drag over the plot, and when its points were there."""
    paths = write_long_runs(folder, points=points)
    with laboratory(folder / "lab") as (server, page):
        page.set_default_timeout(600_000)
        show_dashboard(server, page, paths)
        opened_s = [in_kernel(page, "opened_s")]
        show_dashboard(server, page, paths, "again.ipynb")
        opened_s.append(in_kernel(page, "opened_s"))
        page.wait_for_timeout(1000)
        took_ms = [_drag_ms(page, 0.1 + 0.7 * turn / drags) for turn in range(drags)]
    return {"opened_s": opened_s, "drag_ms": took_ms}


def opening(folder: Path, rounds: int = 5, points: int = POINTS) -> dict[str, Any]:
    """`wb.live` in new kernels without a page."""
    from jupyter_client.manager import start_new_kernel

    paths = [str(path) for path in write_long_runs(folder, points=points)]
    measured = list[list[float]]()
    for _ in range(rounds):
        manager, client = start_new_kernel(env={**os.environ, "PYTHONPATH": str(REPOSITORY)})
        said = list[str]()
        code = OPENING.format(paths=paths)
        client.execute_interactive(code, output_hook=lambda m, said=said: said.append(m["content"].get("text", "")))
        manager.shutdown_kernel(now=True)
        measured.append(json.loads("".join(said)))
    return dict(zip(("wall_s", "processor_s", "peak_mib"), zip(*measured, strict=True), strict=True))


def _drag_ms(page: Any, left: float) -> float:
    """Milliseconds from letting go of the mouse to the redrawn plot that holds new points."""
    page.mouse.dblclick(*_at(page, 0.5))
    page.wait_for_timeout(2500)
    page.evaluate(
        f"""() => {{
            const graph = {GRAPH};
            const span = graph._fullLayout.xaxis.range[1] - graph._fullLayout.xaxis.range[0];
            const count = () => {{
                const [low, high] = graph._fullLayout.xaxis.range;
                const raw = graph._fullData.find(t => t.meta === 'raw');
                return high - low < 0.5 * span ? raw.x.filter(x => x >= low && x <= high).length : 0;
            }};
            window.zoomed = null;
            let released = null;
            const release = () => {{ released = performance.now(); }};
            document.addEventListener("mouseup", release, {{capture: true, once: true}});
            const drawn = () => {{
                if (released === null || count() < 300) return;  // of the whole picture's points, a tenth lay here
                window.zoomed = performance.now() - released;
                graph.removeListener('plotly_afterplot', drawn);
            }};
            graph.on('plotly_afterplot', drawn);
        }}"""
    )
    page.mouse.move(*_at(page, left))
    page.mouse.down()
    page.mouse.move(*_at(page, left + 0.05), steps=3)
    page.mouse.move(*_at(page, left + 0.1), steps=3)
    page.mouse.up()
    page.wait_for_function("() => window.zoomed !== null", timeout=60_000)
    return float(page.evaluate("() => window.zoomed"))


def _at(page: Any, share: float) -> tuple[float, float]:
    box = page.locator(".js-plotly-plot .nsewdrag").first.bounding_box()
    return box["x"] + share * box["width"], box["y"] + box["height"] / 2


def sidebar(folder: Path, openings: int = 5) -> dict[str, Any]:
    """The page is loaded anew for each opening; the first of the server's openings reads all runs."""
    import test_runs_sidebar

    for number in range(1000):
        test_runs_sidebar.write_run(folder / "runs" / f"old-{number:03d}", 10_000 + number)
    with laboratory(folder) as (server, page):
        page.set_default_timeout(120_000)
        opened_s = [test_runs_sidebar.open_sidebar(page, server) for _ in range(openings)]
        page.locator(".wb-count", has_text="runs").wait_for()
        searched_ms = [test_runs_sidebar.search(page, f"old-0{number}")[0] for number in range(10)]
    return {"runs": 1000, "opened_s": opened_s, "searched_ms": searched_ms}


def memory(folder: Path, seconds: float = 120.0) -> dict[str, Any]:
    """Eight hours of one step a second, replayed in `seconds`, five updates a second; looked at every two hours."""
    run = write_run(folder / "eight-hours", 7200)
    looks = []
    with laboratory(folder / "lab") as (server, page):
        show_dashboard(server, page, [run])
        page.wait_for_timeout(5000)
        edges = np.linspace(7200, EIGHT_HOURS, int(seconds * 5) + 1).astype(int)
        for update, (first, last) in enumerate(itertools.pairwise(edges)):
            if update % -(-(len(edges) - 1) // 3) == 0:
                looks.append(_look(page))
            write_steps(run / "events.jsonl", int(first) + 1, int(last))
            time.sleep(0.2)
        page.wait_for_timeout(3000)
        looks.append(_look(page))
        steps = in_kernel(page, "dashboard._snapshots[0].step")
    columns = zip(("kernel_mib", "objects", "history_mib", "page_mib"), zip(*looks, strict=True), strict=True)
    return {"step": steps, "updates": len(edges) - 1, **dict(columns)}


def _look(page: Any) -> tuple[float, int, float, float]:
    """MiB of the kernel, its objects, MiB of the columns that it keeps, MiB of the page."""
    gc = "__import__('gc')"
    kernel, objects, history = in_kernel(
        page,
        f"({gc}.collect(), psutil.Process().memory_info().rss / 2**20, len({gc}.get_objects()), "
        "sum(dashboard._snapshots[0].history[name].nbytes for name in dashboard._snapshots[0].history) / 2**20)[1:]",
    )
    return kernel, objects, history, _heap(page)


def _heap(page: Any) -> float:
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    return float(session.send("Runtime.getHeapUsage")["usedSize"]) / 2**20


def tracking(folder: Path, steps: int = 5000) -> dict[str, Any]:
    """Writing a step's event is all that tracking asks of a training; W&B is told by another process."""
    from workbench.record.step_table import log_step

    row = {**step_row(1, 4.0), "scalars": {f"metric_{index}": 1.0 / (index + 1) for index in range(METRICS)}}
    took_us = []
    for _ in range(steps):
        started = time.process_time_ns()
        log_step(folder, **row)
        took_us.append((time.process_time_ns() - started) / 1e3)
    p50, p99 = np.percentile(took_us, [50, 99])
    return {"metrics": METRICS, "processor_us": {"p50": p50, "p99": p99}}


def launch(folder: Path, times: int = 3) -> dict[str, Any]:
    """Time for `wb.launch` to return, the data being tokenised already; the run is stopped at once."""
    code = """
import sys, time
import workbench as wb
data = wb.data.corpus("demo", vocab_size=2048)
model = wb.models.bert(hidden_size=64, num_layers=4, num_heads=8, vocab_size=2048, max_positions=64)
experiment = wb.Experiment(model=model, data=data, steps=100000, global_batch=32, seq_len=64)
plan = wb.plan(experiment)
experiment.reading.prepare()
took = []
for _ in range(int(sys.argv[1])):
    started = time.perf_counter()
    run = wb.launch(experiment, plan)
    took.append(time.perf_counter() - started)
    run.stop(wait=True)
print(*took)
"""
    environment = {**os.environ, "WORKBENCH_RUNS": str(folder / "runs"), "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(times)], capture_output=True, text=True, env=environment, check=True
    )
    return {"returned_s": [float(each) for each in done.stdout.split()[-times:]]}


MEASUREMENTS = {
    "first_curve": first_curve,
    "latency": latency,
    "zoom": zoom,
    "open": opening,
    "sidebar": sidebar,
    "memory": memory,
    "tracking": tracking,
    "launch": launch,
}


TINY: dict[str, dict[str, Any]] = {
    "latency": {"updates": 2},
    "zoom": {"drags": 1, "points": 10_000},
    "open": {"rounds": 1, "points": 10_000},
    "sidebar": {"openings": 2},
    "memory": {"seconds": 2.0},
    "tracking": {"steps": 10},
    "launch": {"times": 1},
}


def table(found: dict[str, dict[str, Any]]) -> list[str]:
    """Return a table with a row for each sentence about what was measured, and the load before it."""
    lines = ["| what | measured | goal | load |", "|---|---|---|--:|"]
    for name in MEASUREMENTS:
        if name in found:
            load = f"{found[name]['load']:.1f}"
            lines += [f"| {' | '.join(cells)} | {load} |" for cells in ROWS[name](found[name])]
    return lines


def _curve_rows(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    rows = []
    for name, words, goal in (("new_home", ", on a home without a cache", "20 s"), ("used_home", ", once more", "8 s")):
        click = found[name]
        parts = "first cell {first_cell_s:.1f} s, launched {launched_s:.1f} s, first step {first_step_s:.1f} s".format(
            **click
        )
        spent = "{kernel_processor_s:.1f} s of processor time in the kernel and {others_processor_s:.1f} s in others"
        shown = (
            f"{click['curve_s']:.1f} s ({parts}), {spent.format(**click)}, at a load of {click['load_at_click']:.1f}"
        )
        rows.append((f"the first curve in view, after {click['clicks']} click on the demo's card{words}", shown, goal))
    return rows


def _latency_rows(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    drawn = f"{len(found['late_ms'])} of {found['updates']} steps drawn one by one"
    return [("from a written event to the drawn curve", f"{_ms(found['late_ms'])}; {drawn}", "p95 100 ms")]


def _zoom_rows(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    first, again = found["opened_s"]
    runs = f"{RUNS} runs × {POINTS:,} points"
    drag = f"{_ms(found['drag_ms'])}, longest {max(found['drag_ms']):.0f} ms"
    return [
        (f"`wb.live` of {runs}, the first time, in JupyterLab", f"{first:.1f} s", "3 s"),
        ("the same again, in another kernel beside the first", f"{again:.1f} s", "0.5 s"),
        ("from the end of a drag to the curve of the visible stretch", drag, ""),
    ]


def _open_rows(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    wall_s, processor_s, peak_mib = (statistics.median(found[name]) for name in ("wall_s", "processor_s", "peak_mib"))
    shown = f"{wall_s:.2f} s, {processor_s:.2f} s of processor time, {peak_mib:.0f} MiB"
    return [(f"`wb.live` of {RUNS} runs × {POINTS:,} points in a new kernel without a page", shown, "0.5 s")]


def _sidebar_rows(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    first, *again = found["opened_s"]
    opened = f"{first:.2f} s the first time, then {statistics.median(again):.2f} s"
    searched = f"{statistics.median(found['searched_ms']):.0f} ms, longest {max(found['searched_ms']):.0f} ms"
    return [
        (f"from the click on the sidebar to the first of {found['runs']:,} runs", opened, "1 s"),
        ("a search among them", searched, "200 ms"),
    ]


def _memory_rows(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    kernel, history, page = (
        ", ".join(f"{value:.{digits}f}" for value in found[name])
        for name, digits in (("kernel_mib", 0), ("history_mib", 1), ("page_mib", 0))
    )
    shown = f"kernel {kernel} MiB, of these the history {history}; page {page} MiB"
    return [("memory after 2, 4, 6 and 8 hours of a run with a step a second", shown, "")]


def _tracking_rows(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    us = found["processor_us"]
    shares = " and ".join(f"{us['p50'] / 1e3 / step_ms:.2%} of {step_ms} ms" for step_ms in (20, 100))
    shown = f"{us['p50']:.0f} µs of processor time (p99 {us['p99']:.0f} µs): {shares}"
    return [(f"what a step with {found['metrics']} metrics costs the training", shown, "0.5 %")]


def _launch_rows(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    first, *others = found["returned_s"]
    shown = f"{statistics.median(others):.2f} s (the first of a kernel: {first:.2f} s)"
    return [("until `wb.launch` returns", shown, "1 s")]


def _ms(values: list[float]) -> str:
    p50, p95 = np.percentile(values, [50, 95])
    return f"p50 {p50:.0f} ms, p95 {p95:.0f} ms"


ROWS = {
    "first_curve": _curve_rows,
    "latency": _latency_rows,
    "zoom": _zoom_rows,
    "open": _open_rows,
    "sidebar": _sidebar_rows,
    "memory": _memory_rows,
    "tracking": _tracking_rows,
    "launch": _launch_rows,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "update"))
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("names", nargs="*", metavar="|".join(MEASUREMENTS), help="all by default")
    parser.add_argument("--tiny", action="store_true", help="of no interest but to see that this runs")
    asked = parser.parse_args()
    found = json.loads(asked.file.read_text()) if asked.file.exists() else {}
    if asked.what == "update":
        fill(REPOSITORY / "benchmarks" / "README.md", "live.py", table(found))
        return
    for name in asked.names or MEASUREMENTS:
        made = {"load": os.getloadavg()[0], "cores": os.cpu_count(), "date": time.strftime("%Y-%m-%d")}
        with tempfile.TemporaryDirectory(prefix="workbench-live-") as folder:
            (Path(folder) / "lab").mkdir()
            found[name] = made | MEASUREMENTS[name](Path(folder), **(TINY.get(name, {}) if asked.tiny else {}))
        print(*table({name: found[name]})[2:], sep="\n", flush=True)
        asked.file.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
