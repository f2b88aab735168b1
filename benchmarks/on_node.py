"""Run a list of commands on the GPUs of this node, and go on with it after an interruption.

    TEXT=prose.txt python benchmarks/on_node.py benchmarks/tasks/sparse.toml --folder out --minutes 25
    TEXT=prose.txt python benchmarks/on_node.py benchmarks/tasks/sparse.toml --folder out --rehearse    # on CPUs
    COMMIT=1a2b3c4 python benchmarks/on_node.py …    # where these files are no checkout of git: for the raw files

The list is a TOML file with a table for each command:

    [large]
    command = "python benchmarks/throughput.py --gpus $GPUS --out $FOLDER/large.json large"
    gpus = 1                 # how many it needs; without this line, all
    minutes = 3              # it is not begun if less time is left
    rehearsal = "…"          # what `--rehearse` runs instead

Commands are bash, and run at the root of this repository with `$FOLDER`, `$GPUS` (how many they may use) and `$LEFT`
(minutes until the end). They begin in the order of the list, as soon as enough GPUs are free, and no GPU ever has two.
Each writes `FOLDER/NAME.log`. A command that succeeded leaves `FOLDER/NAME.done` and is not repeated by a second start;
one that failed or was interrupted begins anew, so that it must go on by itself where that saves time. After M minutes
what still runs is ended, with every process that it started.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
MARK = "WORKBENCH_ON_NODE"
"""Environment variable by which all processes of a task are found, those in sessions of their own as well."""
POLL_S = 0.5
GRACE_S = 10.0
"""Seconds between the request to end and SIGKILL."""


@dataclass(frozen=True)
class Task:
    """A command of the list."""

    name: str
    command: str
    gpus: int
    minutes: float
    rehearsal: str

    def begin(self, folder: Path, devices: list[str], ends: float, *, rehearse: bool) -> subprocess.Popen[bytes]:
        """Start the command, which sees these GPUs only."""
        environment = os.environ | {
            MARK: f"{folder}/{self.name}",
            "FOLDER": str(folder),
            "GPUS": str(self.gpus),
            "LEFT": f"{max(0.0, ends - time.time()) / 60:.1f}",
            "CUDA_VISIBLE_DEVICES": ",".join(devices),
        }
        command = ["bash", "-euo", "pipefail", "-c", (rehearse and self.rehearsal) or self.command]
        with (folder / f"{self.name}.log").open("ab") as log:
            return subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("list", type=Path)
    parser.add_argument("--folder", type=Path, required=True, help="for logs and results")
    parser.add_argument("--minutes", type=float, default=60.0, help="after which commands are ended")
    parser.add_argument("--gpus", type=int, default=None, help="how many to use; all that are visible by default")
    parser.add_argument("--rehearse", action="store_true", help="run the rehearsals, on CPUs as well")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what was begun is ended, too
    gpus = given.gpus if given.gpus and given.rehearse else visible_gpus(given.gpus, rehearse=given.rehearse)
    folder = given.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    tasks = read_list(given.list, gpus)
    failed = run_all(tasks, folder, first_devices(gpus), time.time() + 60 * given.minutes, rehearse=given.rehearse)
    sys.exit(f"Did not succeed: {', '.join(failed)}." if failed else 0)


def visible_gpus(wanted: int | None, *, rehearse: bool) -> int:
    """Return how many GPUs to use: those that are wanted, or all; raise `SystemExit` if there are fewer."""
    import torch

    found = torch.cuda.device_count()
    if not rehearse and not 1 <= (wanted or found) <= found:
        sys.exit(f"{found} GPUs are visible here, and --gpus may not ask for more. --rehearse needs none.")
    return wanted or max(1, found)


def first_devices(gpus: int) -> list[str]:
    """Return the names of the first GPUs that this process may use, or as many numbers where none is named."""
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return named[:gpus] if len(named) >= gpus else [str(number) for number in range(gpus)]


def read_list(path: Path, gpus: int) -> list[Task]:
    """Return the tasks of a TOML file; raise `SystemExit` for a key that is none, or more GPUs than there are."""
    tasks = []
    for name, table in tomllib.loads(path.read_text()).items():
        known: dict[str, Any] = {"gpus": gpus, "minutes": 1.0, "rehearsal": "", "name": name}
        if unknown := table.keys() - known.keys() - {"command"}:
            sys.exit(f"{path}: [{name}] has {', '.join(sorted(unknown))}, which this command does not know.")
        task = Task(**known | table)
        if task.gpus > gpus:
            sys.exit(f"{path}: [{name}] needs {task.gpus} GPUs, and there are {gpus}. Take it off the list.")
        tasks.append(task)
    return tasks


def run_all(tasks: list[Task], folder: Path, free: list[str], ends: float, *, rehearse: bool) -> list[str]:
    """Run the tasks that are not done, and return the names of those that did not succeed."""
    for task in tasks:
        end_all(folder, task)  # what an interrupted start has left
    waiting = [task for task in tasks if not (folder / f"{task.name}.done").exists()]
    failed: list[str] = []
    running: list[tuple[Task, subprocess.Popen[bytes], list[str]]] = []
    try:
        while (waiting or running) and time.time() < ends:
            if waiting and ends - time.time() < 60 * waiting[0].minutes:
                failed.append(waiting[0].name)
                say(f"{waiting[0].name}: not begun, it needs {waiting[0].minutes:g} minutes")
                del waiting[0]
            elif waiting and waiting[0].gpus <= len(free):
                task = waiting.pop(0)
                devices, free = free[: task.gpus], free[task.gpus :]
                running.append((task, task.begin(folder, devices, ends, rehearse=rehearse), devices))
                say(f"{task.name}: begun on {len(devices)} GPUs")
            else:
                time.sleep(POLL_S)
            for each in [each for each in running if each[1].poll() is not None]:
                task, process, devices = each
                end_all(folder, task)  # what it left behind would disturb the next one
                say(f"{task.name}: {'done' if process.returncode == 0 else f'exit code {process.returncode}'}")
                if process.returncode == 0:
                    (folder / f"{task.name}.done").touch()
                else:
                    failed.append(task.name)
                running.remove(each)
                free += devices
    finally:
        for task, process, _ in running:
            say(f"{task.name}: ended before its end")
            process.terminate()
            end_all(folder, task)
    return [*failed, *(task.name for task, *_ in running), *(task.name for task in waiting)]


def end_all(folder: Path, task: Task) -> None:
    """End every process of a task: by request, and after `GRACE_S` seconds by force.

    Looks until none is left: a process that is about to execute another program shows no environment for a moment.
    """
    begun = time.monotonic()
    while (found := processes_of(f"{folder}/{task.name}")) and time.monotonic() < begun + 2 * GRACE_S:
        is_late = time.monotonic() >= begun + GRACE_S
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill() if is_late else process.terminate()
        psutil.wait_procs(found, timeout=GRACE_S)


def processes_of(mark: str) -> list[psutil.Process]:
    """Return the processes whose environment has this mark."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                found.append(process)
    return found


def say(sentence: str) -> None:
    print(time.strftime("%T"), sentence, flush=True)


if __name__ == "__main__":
    main()
