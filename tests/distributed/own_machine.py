"""What tests of runs share, and kernels that they start import: no library of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from workbench.record.rundir import RunDir, read_json
from workbench.runs.launching import processes


def own_machine(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give a test a device queue and a folder of runs of its own, and end the processes that it leaves."""
    runs = folder / "runs"
    for name, value in (("WORKBENCH_HOME", folder / "home"), ("WORKBENCH_RUNS", runs), ("OMP_NUM_THREADS", 1)):
        patch.setenv(name, str(value))
    patch.syspath_prepend(str(Path(__file__).parent))  # of the stand-in workers
    yield folder
    processes.kill_trees([read_json(file) for file in runs.glob("*/supervisor.json")])
    for path in (*runs.glob("*"), *runs.glob("*/runs/*")):
        supervisor = processes.launcher_record(RunDir(path)).get("supervisor")
        processes.kill_trees([*([supervisor] if supervisor else []), *processes.live_workers(RunDir(path))])
