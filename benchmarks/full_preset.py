"""Plan the full preset of templates/bert_scaling.ipynb for 4 × H200, and predict the time of the whole notebook.

    python benchmarks/full_preset.py

It executes the template's own cells up to the predicted times, with the real sizes, on any machine: models are captured
without weights. Only the plans are made here, because the template plans for the machine on which it runs. Nothing is
trained. The result goes to benchmarks/results/. `--tiny` takes the preset `rehearsal`.
"""

from __future__ import annotations

import json
import time
from typing import Any

import nbformat
import options

import workbench as wb
from workbench.base.units import GIB

CLUSTER = "4 × H200"
PARAMETERS, PLANS, TIMES = "preset = ", "large_plan = ", "def predicted_minutes"
"""Beginnings of three of the template's cells: parameters, plans and predicted times."""


def main() -> None:
    asked = options.parsed(options.parser(__doc__, "full_preset_4xH200_predicted.json"))
    names = executed({"preset": "rehearsal" if asked.tiny else "full"}, after=TIMES)
    plans = {each.name: plan_facts(each, plan) for each, plan in names["pairs"]}
    minutes = {name: round(value, 2) for name, value in names["minutes"].items()}
    pilots = {"rates": names["rates_tried"], "steps": names["short_steps"]}
    found = {"cluster": CLUSTER, "date": time.strftime("%Y-%m-%d"), "plans": plans, "pilots": pilots}
    found |= {"minutes": minutes, "minutes_together": round(sum(minutes.values()), 2)}
    asked.out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps(found, indent=1, ensure_ascii=False))


def executed(parameters: dict[str, Any], after: str) -> dict[str, Any]:
    """Return the names of the template after the cell that begins with `after`, with other parameters.

    The cell of plans plans for four H200.
    """
    notebook = nbformat.read(options.ROOT / "templates" / "bert_scaling.ipynb", 4)
    names: dict[str, Any] = {}
    for source in (cell.source for cell in notebook.cells if cell.cell_type == "code"):
        if source.startswith(PLANS):
            cluster = wb.Cluster.of("h200", gpus=4)
            names["large_plan"] = wb.plan(names["large"], cluster)
            names["plan"] = wb.plan(names["scaled"], cluster)
            continue
        exec(source, names)
        if source.startswith(PARAMETERS):
            names |= parameters
        if source.startswith(after):
            return names
    raise ValueError(f"The template has no cell that begins with {after!r}.")


def plan_facts(experiment: wb.Experiment, plan: wb.Plan) -> dict[str, Any]:
    """Return what a plan predicts for a run of an experiment."""
    predicted = plan.prediction
    return {
        "plan": repr(plan),
        "parameters": plan.model_bytes // 4,  # fp32
        "steps": experiment.steps,
        "tokens": experiment.steps * experiment.global_batch * experiment.seq_len,
        "step_ms": round(predicted.step_ms, 1),
        "evaluation_s": round(predicted.evaluation_s, 2),
        "mfu": predicted.mfu and round(predicted.mfu, 3),
        "peak_gib": round(plan.peak_bytes / GIB, 1),
    }


if __name__ == "__main__":
    main()
