"""Predicted and measured steps of a dense and of a masked sparse training on this machine's processor, interleaved.

    python benchmarks/sparse_prediction.py --out benchmarks/results/sparse_prediction_2cores.json

Both trainings run in turn, `--rounds` times, so that other work on the machine slows both. A measured step is the
median of a run's steps after the first four; that of a training is the median over its runs.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import options

import workbench as wb

STEPS, SKIPPED = 14, 4


def experiment(sparsity: wb.sparsity.Static | None, tiny: bool) -> wb.Experiment:
    width, vocabulary, seq_len = (32, 64, 16) if tiny else (256, 4000, 128)
    sizes = {"vocab_size": vocabulary} if tiny else {}
    return wb.Experiment(
        model=wb.models.bert(hidden_size=width, num_layers=2, num_heads=4, **sizes),
        data=wb.data.corpus("demo", vocab_size=vocabulary),
        seq_len=seq_len,
        global_batch=4,
        steps=STEPS,
        sparsity=sparsity,
    )


def main() -> None:
    parser = options.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = options.parsed(parser)
    rounds = 1 if arguments.tiny else arguments.rounds
    pattern = wb.sparsity.Dynamic(sparsity=0.5 if arguments.tiny else 0.9, block=16, updates=4)
    experiments = {"dense": experiment(None, arguments.tiny), "masked": experiment(pattern, arguments.tiny)}
    cluster = wb.measure.local_cluster().resized(1)
    plans = {name: wb.plan(each, cluster, micro_batch=4) for name, each in experiments.items()}
    measured: dict[str, list[float]] = {name: [] for name in plans}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            for name, plan in plans.items():
                run = wb.launch(experiments[name], plan, directory=Path(folder) / f"{name}-{number}").wait()
                measured[name].append(statistics.median(run.history().step_ms[SKIPPED:].tolist()))
    report: dict[str, Any] = {"device": cluster.device.name, "steps": STEPS, "sparsity": pattern.to_json()}
    for name, plan in plans.items():
        step_ms = statistics.median(measured[name])
        predicted = plan.prediction.step_ms
        report[name] = {
            "predicted_ms": round(predicted, 2),
            "measured_ms": round(step_ms, 2),
            "of_each_run_ms": [round(ms, 2) for ms in measured[name]],
            "predicted_over_measured": round(predicted / step_ms, 3),
        }
        print(f"{name}: predicted {predicted:.1f} ms, measured {step_ms:.1f} ms, ratio {predicted / step_ms:.2f}")
    ratios = {kind: report["masked"][kind] / report["dense"][kind] for kind in ("predicted_ms", "measured_ms")}
    report["masked_over_dense"] = {kind.removesuffix("_ms"): round(ratio, 3) for kind, ratio in ratios.items()}
    print("masked over dense:", report["masked_over_dense"])
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
