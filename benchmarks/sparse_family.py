"""Train the runs of templates/sparse_pareto.ipynb one on each GPU, without Jupyter, the most telling first.

    python benchmarks/sparse_family.py TEXT --folder runs/family [--minutes M] [-p NAME=VALUE ...]
    workbench execute sparse_pareto -p preset=full -p corpus=TEXT -p trained=runs/family    # shows them, on any machine
    python benchmarks/sparse_family.py --folder runs/family                 # writes runs/family/losses.json only

It executes the template's own cells: rates are tried, the family is trained, and pairs that lie close get a second
seed. `losses.json` has the held-out losses, the step and the training time of each finished run, and the seconds from
its start until its ranks could train. A run that is predicted not to end within M minutes is not begun. A second start
goes on: what has finished is not trained again, what still trains is waited for, and anything else begins anew. No
checkpoints are written. `-p` gives further parameters of the template, as JSON: `-p preset='"rehearsal"'` trains tiny
models, without GPUs as well.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import nbformat
import torch

import workbench as wb
from workbench.base.errors import RunFailed
from workbench.record.event_log import read_events

TEMPLATE = Path(__file__).resolve().parents[1] / "templates" / "sparse_pareto.ipynb"
PARAMETERS, TRAINS, LAST = "preset = ", "def train(", "\nsecond = "
"""Words of three of the template's cells: parameters, the definition of `train`, and its last use."""
BESIDE_S = 30.0
"""Seconds that a run takes beside its steps, roughly: start, evaluations, and moves of the pattern."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="?", help="text file or folder to train on")
    parser.add_argument("--folder", type=Path, required=True, help="folder of the run directories")
    parser.add_argument("--minutes", type=float, default=60.0, help="time after which runs are stopped")
    parser.add_argument("-p", action="append", default=[], metavar="NAME=VALUE", help="a parameter of the template")
    given = parser.parse_args()
    if given.text:
        train_family(given)
    write_losses(given.folder)


def train_family(given: argparse.Namespace) -> None:
    """Execute the template's cells until its last training."""
    ends = time.time() + 60 * given.minutes
    parameters = {"preset": "full", "corpus": given.text}
    parameters |= {name: json.loads(value) for name, value in (item.split("=", 1) for item in given.p)}
    spawn, visible = multiprocessing.get_context("spawn"), os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    gpus = visible.split(",")[:count] if visible else [str(number) for number in range(count)]
    queue = spawn.Queue()
    for gpu in gpus:
        queue.put(gpu)
    names: dict[str, Any] = {}
    with ProcessPoolExecutor(max(1, count), spawn, take_gpu if gpus else None, (queue,) if gpus else ()) as pool:
        for cell in nbformat.read(TEMPLATE, 4).cells:
            if cell.cell_type != "code":
                continue
            exec(cell.source, names)
            if cell.source.startswith(PARAMETERS):
                names |= parameters
            if TRAINS in cell.source:
                wb.runs.tokenize(names["wanted"][0])  # once, for all runs
                names["train"] = partial(train, names, pool, given.folder.absolute(), ends)
            if LAST in cell.source:
                return


def write_losses(folder: Path) -> None:
    """Write what the finished runs of a folder learned, held-out losses by tokens, and the times that they took."""
    found = {}
    for path in sorted(path.parent for path in folder.glob("*/experiment.json") if has_finished(path.parent)):
        run = wb.load_run(path)
        evaluations, history = run.evaluations(), run.history()
        steps_ms = history.step_ms.tolist()
        times = {event.get("state", event["type"]): event["time"] for event in read_events(run.directory.events)}
        found[path.name] = {
            "start_s": round(times["start"] - times["starting"], 1),
            "predicted_ms": round(run.plan.prediction.step_ms, 2),
            "step_ms": round(statistics.median(steps_ms[len(steps_ms) // 2 :]), 2),
            "trained_s": round(float(history.seconds[-1]), 1),
            "tokens": evaluations.tokens.tolist(),
            "held_out": [round(loss, 4) for loss in evaluations.eval_loss.tolist()],
        }
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(each)}" for name, each in found.items())
    (folder / "losses.json").write_text(f"{{\n{lines}\n}}\n")


def take_gpu(queue: Queue[str]) -> None:
    """Show a process of the pool the next GPU only, for the measurement of blocks and for its runs."""
    os.environ["CUDA_VISIBLE_DEVICES"] = queue.get()


def train(
    names: dict[str, Any],
    pool: ProcessPoolExecutor,
    folder: Path,
    ends: float,
    asked: list[tuple[wb.Experiment, list[float]]],
    seeds: int = 1,
) -> list[wb.Run]:
    """Do what the template's `train` does, with as many runs at a time as the pool has processes."""
    experiments = {folder / names["directory"](each): each for each in names["expanded"](asked, seeds)}
    left = [(path, each) for path, each in experiments.items() if not has_finished(path)]
    for future in [pool.submit(train_one, each.to_json(), path, ends) for path, each in left]:
        future.result()
    return [wb.load_run(path) for path in experiments if has_finished(path)]


def has_finished(path: Path) -> bool:
    """Return True if a run in this directory trained to its end."""
    return path.exists() and wb.load_run(path).status.state == "finished"


def train_one(experiment: dict[str, Any], path: Path, ends: float) -> None:
    """Train an experiment, or wait for the run of it that an earlier start has left."""
    try:
        if path.exists():
            with contextlib.suppress(RunFailed):  # it was interrupted, or failed: train it anew
                wb.load_run(path).wait(timeout=max(1.0, ends - time.time()))
            if has_finished(path):
                return
        settings = wb.Experiment.from_json(experiment).replace(checkpoints=wb.Checkpoints(keep=0))
        planned = wb.plan(settings)
        step_ms = planned.prediction.step_ms
        seconds = BESIDE_S + settings.steps * step_ms / 1e3
        if time.time() + seconds > ends:
            print(f"{time.strftime('%T')} {path.name}: no time is left for {seconds:.0f} s", flush=True)
            return
        if path.exists():
            path.rename(path.with_name(f"interrupted-{time.time_ns()}-{path.name}"))
        print(f"{time.strftime('%T')} {path.name}: {planned}, {step_ms:.1f} ms predicted", flush=True)
        run = wb.launch(settings, planned, directory=path, progress=False)
        if not run.wait(timeout=max(1.0, ends - time.time())).status.final:
            run.stop(wait=True)
        steps_ms = run.history().step_ms.tolist()
        measured = statistics.median(steps_ms[len(steps_ms) // 2 :] or [0.0])
        print(f"{time.strftime('%T')} {path.name}: {run.status}, {measured:.1f} ms measured", flush=True)
    except Exception:  # the other runs are still worth training
        print(f"{time.strftime('%T')} {path.name} failed", flush=True)
        traceback.print_exc()


if __name__ == "__main__":
    main()
