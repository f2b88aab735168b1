"""Train the pair of templates/bert_scaling.ipynb with another seed or with AdamW, one run at a time.

    python benchmarks/pair_seeds.py TEXT large muon 1 [-p NAME=VALUE ...] [--name NAME] [--rehearsal]
    TEXT=texts python benchmarks/on_node.py benchmarks/tasks/pair_seeds.toml --folder out    # those of four H200
    TEXT=FOLDER python benchmarks/on_node.py benchmarks/tasks/pair_60m.toml …                # those to come, on two

The experiments are those of the template with `preset="full"` and the parameters that `-p` names, by default 76 M
tokens and 256 sequences a step, which ran on four GPUs (`notebooks/bert_scaling_4xH200.ipynb`): the same text, samples,
masks and rates, so that runs differ in the seed or the optimiser alone. A second start goes on with a run that was
interrupted from its last checkpoint, or trains it anew where there is none. `--rehearsal` trains tiny models, on CPUs
as well. The run directories stand in `$WORKBENCH_RUNS`; `wb.contrast` compares them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from full_preset import executed

import workbench as wb


def main() -> None:
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
        settings = experiment(given)
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


if __name__ == "__main__":
    main()
