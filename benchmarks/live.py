"""How quickly what trains is seen, and what watching costs.

    python benchmarks/live.py            # everything; minutes, and Chromium for the first four
    python benchmarks/live.py tracking launch
    python benchmarks/live.py open --beside ../other-checkout --out benchmarks/results/opening_2cores.json

Prints, for this machine:

- `first_curve`: clicks and seconds from the launcher to the first curve that `templates/bert_scaling.ipynb` draws
  in view, and how long after the click its first cell was done, its runs were launched and a step was logged;
- `latency`: from the moment an event is written to the moment a real browser (JupyterLab in headless Chromium) has
  drawn it, p50 and p95;
- `zoom`: 10 runs × 1 M points: time of `wb.live` for runs that nobody has opened before, and again in another kernel
  (the panels of such long runs follow in the background); then from the end of a drag to the redrawn curve with the
  points of the visible range, p50, p95 and the longest of 30;
- `open`: the same opening in kernels without a page, by turns with another checkout's, in wall and processor time;
- `memory`: growth of the kernel and of the page while a recorded 8-hour run (one step a second) is replayed;
- `tracking`: what one step's events cost the training with 50 metrics a step, as a share of steps of several lengths;
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY / "tests" / "browser"))

EIGHT_HOURS = 8 * 3600
CELL = """
import os, psutil, time
from workbench.runs.registry import load_run
from workbench.widgets import live
started = time.perf_counter()
dashboard = live([load_run(path) for path in {paths!r}], x="step")
opened_s = time.perf_counter() - started
dashboard
"""
WRITING = "live.write_long_runs(pathlib.Path(sys.argv[3]), {}, {})"
OPENING = """
import json, resource, time
import workbench
from workbench.runs.registry import load_run
from workbench.widgets import live
assert workbench.__file__.startswith({checkout!r}), workbench.__file__
started, computed = time.perf_counter(), time.process_time()
dashboard = live([load_run(path) for path in {paths!r}], x="step")
took = [time.perf_counter() - started, time.process_time() - computed]
dashboard.stop()
print(json.dumps([*took, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10]))
"""
GRAPH = "document.querySelector('.jupyter-widgets .js-plotly-plot')"


def write_run(path: Path, steps: int, metrics: int = 0, state: str = "running") -> Path:
    """A run directory with a history; alive as long as this process is."""
    from workbench.rundir import RunDir, append_event, this_process, write_json

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
    from workbench.rundir import event_line

    random = np.random.default_rng(first)
    noise = random.normal(0, 0.1, last - first + 1)
    extra = {f"metric_{index}": 1.0 / (index + 1) for index in range(metrics)}
    now = time.time()
    with events.open("ab") as file:
        for step, jitter in zip(range(first, last + 1), noise, strict=True):
            row = step_row(step, 4 + 6 * float(np.exp(-step / 5e4)) + float(jitter))
            file.write(event_line("step", time=now, **row, **extra))


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
def laboratory(folder: Path) -> Iterator[tuple[Any, Any]]:
    """A JupyterLab over `folder`, and a page of a real browser."""
    import lab
    from conftest import CHROMIUM
    from playwright.sync_api import sync_playwright

    if CHROMIUM is None:
        sys.exit(
            "There is no Chromium on this machine. Install one (apt-get install chromium), or ask for: tracking launch."
        )
    environment = {"PYTHONPATH": str(REPOSITORY), "WORKBENCH_RUNS": str(folder / "runs")}
    with lab.jupyterlab(folder, environment) as server, sync_playwright() as play:
        browser = play.chromium.launch(
            executable_path=CHROMIUM, args=[*lab.CHROMIUM_ARGUMENTS, "--enable-precise-memory-info"]
        )
        yield server, browser.new_page(viewport={"width": 1400, "height": 1000})
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


def first_curve(folder: Path) -> str:
    """One click on the card of the demo; what is drawn is counted in the page, and the clicks too."""
    import lab

    from workbench.rundir import read_events
    from workbench.runs.registry import list_runs

    with laboratory(folder / "lab") as (server, page):
        page.add_init_script("window.clicks = 0; addEventListener('click', e => window.clicks += e.isTrusted, true)")
        lab.open_launcher(page, server)
        clicked = time.time()
        page.locator(lab.CARD, has_text="Scaled BERT").click()
        cells = "window.jupyterapp.shell.currentWidget?.content?.widgets"
        page.wait_for_function(f"() => {cells}?.some?.(cell => cell.model.executionCount)")
        began_s = time.time() - clicked
        lab.wait_for_curve(page)
        curve_s = time.time() - clicked
        clicks = page.evaluate("() => window.clicks")
        events = [read_events(run.directory.events) for run in list_runs(folder / "lab" / "runs")]
        launched_s = min(each[0]["time"] for each in events) - clicked
        step_s = min(event["time"] for each in events for event in each if event["type"] == "step") - clicked
        for run in list_runs(folder / "lab" / "runs"):
            run.kill()
    parts = f"first cell done {began_s:.1f} s, launched {launched_s:.1f} s, first step {step_s:.1f} s after the click"
    return f"first curve     {clicks} click and {curve_s:.1f} s ({parts})"


def latency(folder: Path, updates: int = 60, every_s: float = 0.5) -> str:
    """Events are written by this process; the page notes when each was drawn. Both read this machine's clock."""
    from workbench.rundir import append_event

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
            append_event(run / "events.jsonl", "step", **step_row(step, 4.0))
            written[step] = time.time()
            time.sleep(every_s)
        page.wait_for_timeout(2000)
        seen = {int(float(step)): at / 1e3 for step, at in page.evaluate("() => window.seen").items()}
    late_ms = [1e3 * (seen[step] - written[step]) for step in written if step in seen]
    p50, p95 = np.percentile(late_ms, [50, 95])
    return f"log to screen   p50 {p50:.0f} ms, p95 {p95:.0f} ms ({len(late_ms)} of {updates} steps drawn one by one)"


def write_long_runs(folder: Path, runs: int, points: int) -> list[Path]:
    """Runs of so many steps, whose columns were kept as each run's supervisor does while it goes on."""
    from workbench.runs.records.kept_blocks import ColumnKeeper

    first = write_run(folder / "run-0", points)
    paths = [first]
    for index in range(1, runs):
        path = folder / f"run-{index}"
        write_run(path, 0)
        (path / "events.jsonl").unlink()
        os.link(first / "events.jsonl", path / "events.jsonl")
        paths.append(path)
    for path in paths:
        ColumnKeeper(path / "events.jsonl").keep()
    return paths


def zoom(folder: Path, runs: int = 10, points: int = 1_000_000, drags: int = 30) -> str:
    """The last run trains, the others have ended; a drag over the plot, and when its points were there."""
    paths = write_long_runs(folder, runs, points)
    with laboratory(folder / "lab") as (server, page):
        page.set_default_timeout(600_000)
        show_dashboard(server, page, paths)
        opened_s = [in_kernel(page, "opened_s")]
        show_dashboard(server, page, paths, "again.ipynb")
        opened_s.append(in_kernel(page, "opened_s"))
        page.wait_for_timeout(1000)
        took_ms = [_drag_ms(page, 0.1 + 0.7 * turn / drags) for turn in range(drags)]
    p50, p95 = np.percentile(took_ms, [50, 95])
    return (
        f"open            {runs} runs × {points:,} points: wb.live takes {opened_s[0]:.1f} s the first time, "
        f"{opened_s[1]:.1f} s in the next kernel\n"
        f"zoom            p50 {p50:.0f} ms, p95 {p95:.0f} ms, longest {max(took_ms):.0f} ms ({drags} drags in these)"
    )


def opening(folder: Path, beside: Path | None, runs: int = 10, points: int = 1_000_000, rounds: int = 5) -> Any:
    """`wb.live` in new kernels, each checkout with runs of its own, because each may keep columns in its own way."""
    from jupyter_client.manager import start_new_kernel

    from workbench.rundir import RunDir, this_process, write_json

    checkouts = [REPOSITORY, *([beside.resolve()] if beside else [])]
    paths: dict[Path, list[str]] = {}
    for number, checkout in enumerate(checkouts):
        place = folder / str(number)
        place.mkdir()
        write = f"import sys, pathlib; sys.path[:0] = sys.argv[1:3]; import live; {WRITING.format(runs, points)}"
        subprocess.run([sys.executable, "-c", write, checkout, REPOSITORY / "benchmarks", place], check=True)
        paths[checkout] = [str(place / f"run-{index}") for index in range(runs)]
        for path in paths[checkout]:  # its writer is gone
            write_json(RunDir(Path(path)).launcher, {"supervisor": this_process()})
    time.sleep(3)  # the files' times of change must have settled
    measured: dict[str, list[list[float]]] = {str(checkout): [] for checkout in checkouts}
    for round_ in range(rounds + 1):
        for checkout in checkouts:
            manager, client = start_new_kernel(env={**os.environ, "PYTHONPATH": str(checkout)})
            said = list[str]()
            code = OPENING.format(checkout=str(checkout), paths=paths[checkout])
            client.execute_interactive(code, output_hook=lambda m, said=said: said.append(m["content"].get("text", "")))
            manager.shutdown_kernel(now=True)
            if round_:  # the first writes that the columns agree with the events
                measured[str(checkout)].append(json.loads("".join(said)))
    return measured


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


def memory(folder: Path, seconds: float = 120.0) -> str:
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
    kernel, objects, history, heap = zip(*looks, strict=True)
    return (
        f"memory          kernel {_row(kernel)} MiB, of these the history {_row(history, 1)}; its Python objects "
        f"{_row(objects)}; the page's heap {_row(heap)} MiB: after 2, 4, 6 and 8 hours of an 8-hour run "
        f"(step {steps:,}, {len(edges) - 1} updates)"
    )


def _row(values: Sequence[float], digits: int = 0) -> str:
    return ", ".join(f"{value:,.{digits}f}" for value in values)


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


def tracking(folder: Path, steps: int = 5000, metrics: int = 50) -> str:
    """Writing a step's event is all that tracking asks of a training; W&B is told by another process."""
    from workbench.rundir import append_event

    path = folder / "events.jsonl"
    row = {**step_row(1, 4.0), **{f"metric_{index}": 1.0 / (index + 1) for index in range(metrics)}}
    took_us = []
    for _ in range(steps):
        started = time.perf_counter()
        append_event(path, "step", **row)
        took_us.append(1e6 * (time.perf_counter() - started))
    median, p99 = np.percentile(took_us, [50, 99])
    shares = ", ".join(f"{median / 1e3 / step_ms:.2%} of a {step_ms:.0f} ms step" for step_ms in (20, 100, 1000))
    return f"tracking        {median:.0f} µs a step with {metrics} metrics (p99 {p99:.0f} µs): {shares}"


def launch(folder: Path) -> str:
    """Time for `wb.launch` to return, the data being tokenised already; the run is stopped at once."""
    code = """
import sys, time
import workbench as wb
data = wb.data.corpus("demo", vocab_size=2048)
model = wb.models.bert(hidden_size=64, num_layers=4, num_heads=8, vocab_size=2048, max_positions=64)
experiment = wb.Experiment(model=model, data=data, steps=100000, global_batch=32, seq_len=64)
plan = wb.plan(experiment)
experiment.data.prepare(experiment)
took = []
for _ in range(3):
    started = time.perf_counter()
    run = wb.launch(experiment, plan)
    took.append(time.perf_counter() - started)
    run.stop(wait=True)
print(*took)
"""
    environment = {**os.environ, "WORKBENCH_RUNS": str(folder / "runs"), "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    first, *others = map(float, done.stdout.split()[-3:])
    return f"launch          returns in {statistics.median(others):.2f} s (the first of a kernel: {first:.2f} s)"


def _open(folder: Path, beside: Path | None, out: Path | None) -> str:
    """The medians of `opening`, and the ratios of neighbouring kernels; everything measured goes to `out`."""
    measured = opening(folder, beside)
    own, *others = [np.array(rows) for rows in measured.values()]
    if out:
        names = ("wall_s", "processor_s", "peak_mib")
        rows = [[dict(zip(names, row, strict=True)) for row in each] for each in measured.values()]
        what = {
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
            "here": rows[0],
            "beside": rows[1] if others else [],
        }
        out.write_text(json.dumps(what, indent=1) + "\n")
    wall_s, processor_s, peak_mib = np.median(own, axis=0)
    words = f"open            {wall_s:.2f} s in a new kernel, {processor_s:.2f} s of processor time, {peak_mib:.0f} MiB"
    if others:
        all_ratios = others[0] / own
        ends = zip(all_ratios.min(axis=0), all_ratios.max(axis=0), strict=True)
        ratios = [f"{least:.1f} to {most:.1f}" for least, most in ends]
        words += f"; the other checkout takes {ratios[0]} times as long, {ratios[1]} times the processor time, "
        words += f"{ratios[2]} times the memory"
    return words


MEASUREMENTS = {
    "tracking": tracking,
    "launch": launch,
    "first_curve": first_curve,
    "latency": latency,
    "zoom": zoom,
    "memory": memory,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", nargs="*", metavar="|".join([*MEASUREMENTS, "open"]), help="by default all but open")
    parser.add_argument("--beside", type=Path, help="another checkout, which `open` measures by turns with this one")
    parser.add_argument("--out", type=Path, help="file for everything that `open` measured, as JSON")
    asked = parser.parse_args()
    measurements = {**MEASUREMENTS, "open": lambda folder: _open(folder, asked.beside, asked.out)}
    for name in asked.what or MEASUREMENTS:
        with tempfile.TemporaryDirectory(prefix="workbench-live-") as folder:
            path = Path(folder)
            (path / "lab").mkdir()
            print(measurements[name](path), flush=True)
    print(f"{os.cpu_count()} cores; load {os.getloadavg()[0]:.1f}; Python {sys.version.split()[0]}")


if __name__ == "__main__":
    main()
