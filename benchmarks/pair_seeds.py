"""Train the pair of templates/bert_scaling.ipynb with another seed or with AdamW, one run at a time.

    python benchmarks/pair_seeds.py TEXT large muon 1 [-p NAME=VALUE ...] [--name NAME] [--rehearsal]
    TEXT=texts python benchmarks/on_node.py benchmarks/tasks/pair_seeds.toml --folder out    # those of four H200
    TEXT=FOLDER python benchmarks/on_node.py benchmarks/tasks/pair_60m.toml …                # those to come, on two
    python benchmarks/pair_seeds.py losses FOLDER... --out FILE                              # what runs have learned
    python benchmarks/pair_seeds.py verdict FOLDER...                                        # which model is lower

The experiments are those of the template with `preset="full"` and the parameters that `-p` names, by default 76 M
tokens and 256 sequences a step, which ran on four GPUs (`notebooks/bert_scaling_4xH200.ipynb`): the same text, samples,
masks and rates, so that runs differ in the seed or the optimiser alone. A second start goes on with a run that was
interrupted from its last checkpoint, or trains it anew where there is none. `--rehearsal` trains tiny models, on CPUs
as well. The run directories stand in `$WORKBENCH_RUNS`; `wb.contrast` compares them. A node needs no W&B: nothing is
tracked. `losses` writes a raw file with the held-out losses and the steps of run directories. `verdict` compares scaled
BERT with BERT-Large by the protocol of the README beside this file: where all runs have come, at equal tokens, FLOPs
and GPU-hours, by the mean of the losses on both held-out sets, with Student's 95 % interval over the seeds of both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from full_preset import executed

import workbench as wb

HELD_OUT = ("prose", "manuals")
"""The sets whose mean loss the verdict is on."""
SMALL = 0.02
"""A difference in nats that is called small: twice the scatter of seeds that had been seen before."""
STUDENT_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306)
"""Student's t for a two-sided interval of 95 %, with one degree of freedom and more."""
AXES = {"tokens": "at {:.1f} M tokens", "flops": "at {:.1f} PFLOP", "gpu_hours": "at {:.1f} GPU-minutes"}


def main() -> None:
    if sys.argv[1:2] == ["losses"]:
        return write_losses(sys.argv[2:])
    if sys.argv[1:2] == ["verdict"]:
        return print(*verdict([wb.load_run(each) for each in sys.argv[2:]]), sep="\n")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", help="text file or folder to train on")
    parser.add_argument("model", choices=("large", "scaled"))
    parser.add_argument("algorithm", choices=("muon", "adamw"))
    parser.add_argument("seed", type=int)
    parser.add_argument("-p", action="append", default=[], metavar="NAME=VALUE", help="a parameter of the template")
    parser.add_argument("--name", help="of the run; by default that of model, optimiser and seed")
    parser.add_argument("--rehearsal", action="store_true", help="tiny models, on CPUs")
    given = parser.parse_args()
    name = given.name or f"bert-{given.model}-{given.algorithm}-seed{given.seed}"
    folder = Path(os.environ.get("WORKBENCH_RUNS", "runs")) / name
    run = wb.load_run(folder) if folder.exists() else None
    if run is not None and run.status.state != "finished":
        if run.checkpoints:
            run = run.resume()
        else:
            folder.rename(folder.with_name(f"interrupted-{time.time_ns()}-{folder.name}"))
            run = None
    if run is None:
        settings = experiment(given).replace(tracking=wb.Tracking(project=""))
        planned = wb.plan(settings)
        print(time.strftime("%T"), folder.name, planned, f"{planned.prediction.step_ms:.1f} ms", flush=True)
        run = wb.launch(settings, planned, directory=folder, progress=False)
    print(time.strftime("%T"), folder.name, run.wait().status, flush=True)
    sys.exit(run.status.state != "finished")


def experiment(given: argparse.Namespace) -> wb.Experiment:
    """Return the experiment of the template that was asked for."""
    parameters: dict[str, Any] = {
        "preset": "rehearsal" if given.rehearsal else "full",
        "corpus": given.text,
        "algorithm": given.algorithm,
        "seed": given.seed,
        "pilot_rates": [],
    }
    if not given.rehearsal:
        parameters |= {"tokens": 76_000_000, "global_batch": 256}
    for item in given.p:
        name, _, value = item.partition("=")
        parameters[name] = json.loads(value)
    made: wb.Experiment = executed(parameters, after="target = ")[given.model]
    return made


def write_losses(arguments: list[str]) -> None:
    """Write a raw file with what runs have learned, one run a line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folders", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args(arguments)
    lines = ",\n".join(json.dumps({"run": Path(each).name, **learned(wb.load_run(each))}) for each in asked.folders)
    asked.out.write_text(f"[\n{lines}\n]\n")


def learned(run: wb.Run) -> dict[str, Any]:
    """Return a run's settings, its held-out losses by tokens, and its step in ms, measured and predicted."""
    settings, known, history = run.experiment, run.evaluations(), run.history()
    sets = {"held_out": known.eval_loss, **{name: known[name] for name in settings.evaluation.also}}
    return {
        "algorithm": settings.optimizer.algorithm,
        "learning_rate": settings.learning_rate,
        "seed": settings.seed,
        "samples": settings.global_batch,
        "state": run.status.state,
        "tokens": known.tokens.tolist(),
        **{name: [round(float(loss), 4) for loss in losses] for name, losses in sets.items()},
        "step_ms": round(statistics.median(history.step_ms.tolist()), 1),
        "predicted_ms": round(run.plan.prediction.step_ms, 1),
    }


def verdict(runs: Sequence[wb.Run]) -> Iterator[str]:
    """Yield a line for each axis: the difference of scaled BERT to BERT-Large, with its 95 % interval over seeds."""
    models = [run.experiment.model.name for run in runs]
    if len(runs) < 3 or {*models} != {"bert-scaled", "bert-large"}:
        sys.exit("A verdict needs runs of both models, and two seeds of at least one.")
    if len(algorithms := {run.experiment.optimizer.algorithm for run in runs}) > 1:
        sys.exit(f"A verdict is on one optimiser, and these runs have {' and '.join(sorted(algorithms))}.")
    known = [run.evaluations() for run in runs]
    losses = [np.mean([each[name] for name in HELD_OUT], axis=0) for each in known]
    for axis, unit in (("tokens", 1e6), ("flops", 1e15), ("gpu_hours", 1 / 60)):
        at = min(each[axis][-1] for each in known)
        ends: dict[str, list[float]] = {"bert-scaled": [], "bert-large": []}
        for model, each, loss in zip(models, known, losses, strict=True):
            ends[model].append(float(np.interp(at, each[axis], loss)))
        scaled, large = ends.values()
        freedom = len(scaled) + len(large) - 2
        squares = sum(sum((end - statistics.mean(own)) ** 2 for end in own) for own in ends.values())
        value = statistics.mean(scaled) - statistics.mean(large)
        margin = STUDENT_95[freedom - 1] * (squares / freedom * (1 / len(scaled) + 1 / len(large))) ** 0.5
        found = "cannot tell" if abs(value) <= margin else "lower" if value < 0 else "higher"
        size = ", which is small" if found != "cannot tell" and abs(value) < SMALL else ""
        seeds = f"{len(scaled)} and {len(large)} seeds"
        yield f"{AXES[axis].format(at / unit)}: {found}{size} ({value:+.3f} ± {margin:.3f}, {seeds})"


if __name__ == "__main__":
    main()
