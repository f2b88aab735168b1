"""A worker for tests of the fork server: writes what its process is like to `told.json`, and trains nothing.

It ends when its gate is open to the last step.
"""

import logging
import os
import random
import sys
from pathlib import Path

import numpy as np
import torch

from tests.logs import append_event
from tests.patience import wait_for_gate
from workbench.record.rundir import RunDir, this_process, write_json


def main(run: RunDir) -> None:
    import edited_module

    write_json(run.rank(0), {**this_process(), "rank": 0, "stage": 0, "device": "cpu"})
    told = {
        "imported": logging._startTime,
        "modules": len(sys.modules),
        "edited": edited_module.VALUE,
        "directory": os.getcwd(),
        "path": sys.path,
        "environment": dict(os.environ),
        "threads": torch.get_num_threads(),
        "drawn": [float(np.random.random()), random.random()],
    }
    write_json(run.path / "told.json", told)
    print("told", flush=True)
    append_event(run.events, "start", devices=1, world=1, tokens_per_step=8, resumed_from=0)
    wait_for_gate(3)
    append_event(run.events, "end", steps=3, seconds=0.0)


if __name__ == "__main__":
    main(RunDir(Path(sys.argv[1])))
