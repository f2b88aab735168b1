"""A worker for tests of sweeps: keeps the real worker's contract, and its loss depends on the experiment.

The loss falls to `learning_rate * 1000 + global_batch / 100 + seed / 1000`; a rate above 0.5 diverges to 100. A run
begins a step when the gate of all runs is open to that step, or its own gate, if there is one.
"""

import os
import sys
from pathlib import Path

from tests.logs import append_event
from tests.patience import GATE, wait_for_gate
from workbench.record.rundir import RunDir, read_json, this_process, write_json


def main(run: RunDir) -> None:
    take_own_gate(run)
    write_json(run.rank(0), {**this_process(), "rank": 0, "stage": 0, "device": "cpu"})
    experiment = read_json(run.experiment)
    first = read_json(run.resume)["step"] if run.resume.exists() else 0
    append_event(run.events, "start", devices=1, world=1, tokens_per_step=8, resumed_from=first)
    rate, batch, seed = (experiment[name] for name in ("learning_rate", "global_batch", "seed"))
    step = first
    while step < experiment["steps"]:
        wait_for_gate(step + 1, unless=run.stop_file.exists)
        if run.stop_file.exists():
            break
        step += 1
        loss = 100.0 if rate > 0.5 else rate * 1000 + batch / 100 + seed / 1000 + 1 / step
        measured = {"step_ms": 50.0, "seconds": 0.05 * step, "tokens_per_s": 8.0, "learning_rate": rate}
        totals = {"tokens": batch * 8 * step, "samples": batch * step, "flops": 1e6 * step}
        append_event(run.events, "step", step=step, loss=loss, grad_norm=1.0, mfu=None, **measured, **totals)
    run.checkpoint(step).mkdir(parents=True, exist_ok=True)
    append_event(run.events, "checkpoint", step=step, path=str(run.checkpoint(step)), seconds=0.0)
    append_event(run.events, "end", steps=step, seconds=0.05 * step)


def take_own_gate(run: RunDir) -> None:
    """Obey the run's own gate from now on, if the test made one beside that of all runs: `gate-0002` for the third."""
    gate = os.environ.get(GATE)
    if gate is not None and (own := Path(f"{gate}-{run.path.name[:4]}")).exists():
        os.environ[GATE] = str(own)


if __name__ == "__main__":
    main(RunDir(Path(sys.argv[1])))
