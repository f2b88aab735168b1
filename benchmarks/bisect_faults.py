"""What `wb.bisect` finds of planted faults, and what it says of right plans: the table of docs/how-to/bisect.md.

    nice python benchmarks/bisect_faults.py      # writes results/bisect_faults_2cores.json; half an hour of two cores

Eight kinds of faults (`tests/distributed/faulty_tracer.py`) are planted on rank 1 of two, each in three sizes, under
eight plans in fp32 and bf16. A size is the share of what is wrong: a gradient that counts twice at 0.01 is 1.01 times
as large. The same plans without a fault are compared as well, and in bf16 for three more seeds: in two of them without
dropout, since tensor parallelism draws other masks than one device does.

A second start goes on where the first has stopped: what is in the raw file is not measured again.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import options

SIZES = (0.1, 0.01, 0.001)
DEGREES: dict[str, dict[str, Any]] = {
    "PP 2, 1F1B": {"pipeline": 2},
    "PP 2, interleaved, full recompute": {
        "pipeline": 2, "schedule": "interleaved", "chunks": 2, "recompute": "full"
    },
    "PP 2, GPipe": {"pipeline": 2, "schedule": "gpipe"},
    "TP 2": {"tensor": 2},
    "DP 2, ZeRO 0": {"data": 2, "zero": 0},
    "DP 2, ZeRO 1": {"data": 2, "zero": 1},
    "DP 2, ZeRO 2": {"data": 2, "zero": 2},
    "DP 2, ZeRO 3": {"data": 2, "zero": 3},
}  # fmt: skip
FULL = {"DP 2, ZeRO 3, full recompute": {"data": 2, "zero": 3, "recompute": "full"}}
RIGHT = {1: ("BERT", DEGREES), 2: ("GPT-2", DEGREES | FULL), 3: ("GPT-2", DEGREES)}
"""Seeds of right plans in bf16, with the model; that of `FULL` draws dropout."""
STEPS = 2
Case = tuple[str, Any, str | None, float]
"""The words of a plan, the plan, a fault or None, and its size."""


def main() -> None:
    asked = options.parsed(options.parser(__doc__, "bisect_faults_2cores.json"))
    folders = [str(options.ROOT), str(options.ROOT / "tests" / "distributed")]  # of what the ranks import
    found: dict[str, Any] = json.loads(asked.out.read_text()) if asked.out.exists() else {"steps": STEPS, "units": {}}
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(sys, "path", [*folders, *sys.path]),
        # A device queue of its own, so that no other run of this machine is waited for.
        mock.patch.dict(
            os.environ, WORKBENCH_RUNS=f"{folder}/runs", WORKBENCH_HOME=f"{folder}/home", OMP_NUM_THREADS="1"
        ),
    ):
        for name, experiment, cases in itertools.islice(_units(), 1 if asked.tiny else None):
            if name not in found["units"]:
                found["units"][name] = _judged(experiment, cases[:2] if asked.tiny else cases, Path(folder) / "unit")
                new = asked.out.with_suffix(".new")
                new.write_text(json.dumps(found, indent=1) + "\n")
                new.replace(asked.out)
                print(name, flush=True)


def _units() -> Iterator[tuple[str, Any, list[Case]]]:
    """Yield the cases that are tried one after another: the faults of a plan, or right plans."""
    import faulty_tracer

    from tests.distributed import real_worker
    from workbench import models

    def experiment(seed: int, **changes: Any) -> Any:
        # Every step is clipped, so that a wrong norm shows.
        settings = {"learning_rate": 1e-3, "warmup_steps": 1, "clip_norm": 0.1, "seed": seed, **changes}
        return real_worker.experiment(**settings)

    def plan(asked: Any, precision: str, degrees: dict[str, Any]) -> Any:
        return dataclasses.replace(real_worker.plan(asked, **degrees), precision=precision)

    bert = experiment(0)
    for precision, (name, degrees) in itertools.product(("bf16", "fp32"), DEGREES.items()):
        divided = plan(bert, precision, degrees)
        cases: list[Case] = [(name, divided, None, 0.0)]
        cases += [(name, divided, kind, size) for kind in faulty_tracer.SIZED for size in SIZES]
        if divided.tensor > 1:  # whose dropout is off in a bisection
            cases = [each for each in cases if each[2] != "less_dropout"]
        yield f"{name}, {precision}, seed 0", bert, cases
    sizes = {"vocab_size": real_worker.VOCAB, "max_positions": real_worker.SEQ, "dropout": 0.1}
    for seed, (model, plans) in RIGHT.items():
        changes = {} if model == "BERT" else {"model": models.gpt2(32, 2, 4, **sizes)}
        asked = experiment(seed, **changes)
        kept = {name: each for name, each in plans.items() if plans is DEGREES or "tensor" not in each}
        yield (
            f"{len(kept)} right plans of {model}, bf16, seed {seed}",
            asked,
            [(name, plan(asked, "bf16", degrees), None, 0.0) for name, degrees in kept.items()],
        )


def _judged(experiment: Any, cases: list[Case], folder: Path) -> list[dict[str, Any]]:
    """Train each case in one world of ranks, and return what one more process says of them."""
    from workbench.analysis.bisection import EXAMINER, examined, extent, tensor_words
    from workbench.analysis.deviation import from_json
    from workbench.analysis.examining_ranks import RESULT
    from workbench.analysis.plain_loop import on_one_device
    from workbench.record.rundir import read_record
    from workbench.runs.evaluating import wait_for_child
    from workbench.runs.launching.launcher import Attempt, start_attempt

    experiment, first = examined(experiment, STEPS), cases[0][1]
    settings: dict[str, Any] = {"steps": STEPS, "without_dropout": any(plan.tensor > 1 for _, plan, *_ in cases)}
    try:
        planted = [(plan.to_json(), fault, size) for _, plan, fault, size in cases]
        asked = {"bisection": settings, "faults": planted}
        ranks = start_attempt(Attempt(experiment, first, folder / "ranks", provenance=asked), worker="faulty_tracer")
        wait_for_child(ranks)
        folders = [ranks.path / f"case-{index}" for index in range(len(cases))]
        for (_, plan, *_), written in zip(cases, folders, strict=True):
            plan.save(written / "plan.json")
        asked = {"bisection": {**settings, "traces": list(map(str, folders))}}
        attempt = Attempt(experiment, on_one_device(first), folder / "reference", provenance=asked)
        referee = start_attempt(attempt, worker=EXAMINER)
        wait_for_child(referee)
        results = read_record(referee.path / RESULT)["plans"]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    rows = []
    for (name, _, fault, size), result in zip(cases, results, strict=True):
        row: dict[str, Any] = {"plan": name, "fault": fault, "size": size}
        told = from_json(result["fault"] or result["deviations"][0])
        row |= {name: getattr(told, name) for name in ("step", "part", "block_name", "ranks", "measure")}
        row |= {"tensor": tensor_words(told), "excess": float(f"{min(told.excess, 1e9):.3g}")}
        row |= {"is_fault": result["fault"] is not None, "words": extent(told, "plan A", "one device")}
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
