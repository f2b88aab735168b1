"""The process that sees a run through: waits for its turn, runs `accelerate launch`, and says how it ended.

Started detached by `launch` as `python -m workbench.runs.launching.supervisor RUN_DIR`; it needs nothing of the
kernel that started it, and the kernel may restart or go away.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from workbench.machine import available_cores
from workbench.rundir import KILLED, EventTail, RunDir, append_event, process_record, read_json, write_json
from workbench.runs.launching import device_queue as turns
from workbench.runs.launching import processes
from workbench.runs.launching.device_sampler import sampled
from workbench.runs.launching.failure import record_silent_death, root_cause
from workbench.runs.tracking.wandb_run import start_recorder

POLL_S = 0.2
LONGEST_POLL_S = 10.0
"""Far back in a long queue: each look reads every place in it."""
FAILURE_GRACE_S = 10.0
"""After one rank has reported an error, how long the others may take to leave by themselves."""
STOP_GRACE_S = 300.0
"""After a stop was asked for, how long the ranks may go without any event (they write a checkpoint)."""
TERMINATE_GRACE_S = 60.0
"""After SIGTERM, how long until SIGKILL."""
ELASTIC_SHUTDOWN_S = "30"
ELASTIC_ENDED = 1
"""Exit code of torchrun's launcher after SIGTERM, too; a rank that fails leaves its error besides."""
ALLOCATOR = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
"""Variables by which a user may set torch's CUDA allocator; the second is their older name."""
GROWING = "expandable_segments:True"
"""Memory that is mapped as it is needed: near a limit, fixed segments waste what no tensor fits into."""
FOREIGN_LAUNCH = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "ROLE_RANK"),
    *("MASTER_ADDR", "MASTER_PORT", "WANDB_SERVICE", "WANDB_RUN_ID"),
)
"""Variables of a launch around this one (or of the kernel's own W&B run) that would mislead the ranks."""


@dataclass(frozen=True)
class Nodes:
    """Where one node stands among those that share a run."""

    count: int = 1
    rank: int = 0
    address: str = ""
    """Of the first node."""
    port: int = 0

    @property
    def log(self) -> str:
        """The name of this node's launcher log."""
        return f"launcher-{self.rank}" if self.rank else "launcher"


@dataclass
class _Watch:
    """What the supervisor has seen of the running attempt."""

    run: RunDir
    events: EventTail
    last_sign: float = field(default_factory=time.monotonic)
    """When the ranks last wrote an event, or were last asked for something."""
    started: bool = False
    stopping: bool = False
    terminated_at: float | None = None
    failed_at: float | None = None
    forced: bool = False
    """Ranks were killed from here: their exit codes say nothing about the cause."""
    steps: int | None = None
    """Of the `end` event: the ranks left in order."""

    def read(self) -> None:
        for event in self.events.read():
            if event["type"] in ("status", "tracking", "device"):  # not from the ranks
                continue
            self.last_sign = time.monotonic()
            if event["type"] == "start" and not self.started:
                self.started = True
                _status(self.run, "running", "")
            if event["type"] == "end":
                self.steps = int(event["steps"])


def main(directory: str) -> int:
    run = RunDir(Path(directory))
    signal.signal(signal.SIGTERM, lambda *_: run.stop_file.touch())
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    _wait_until_known(run)
    with _last_words(run):
        exit_code = _see_through(run)
    keep_history(run)  # its devices are free by now
    return exit_code


def supervise(run: RunDir, launcher: dict[str, Any]) -> int:
    """See a run through from the first of its nodes, on the devices that this process may use."""
    _save(run, launcher)
    _status(run, "starting", "")
    with _last_words(run):
        exit_code = _train(run, launcher)
    keep_history(run)
    return exit_code


@contextlib.contextmanager
def _last_words(run: RunDir) -> Iterator[None]:
    """A supervisor that cannot go on (a full disk, a directory that was removed) leaves no rank behind."""
    try:
        yield
    except BaseException as error:
        processes.kill_trees(record for record in processes.strays(run) if record["pid"] != os.getpid())
        _status(run, "failed", f"the supervisor raised {type(error).__name__}: {error}; see {run.log('launcher')}.")
        raise


def keep_history(run: RunDir) -> None:
    """Read a long run's events once, so that nobody has to who opens it (`history_file`)."""
    from workbench.runs.records.history import HistoryTail

    with contextlib.suppress(OSError):
        HistoryTail(run.events).read()


def reap(directory: str) -> int:
    """End the ranks of a run whose supervisor is gone, and write the final status in its place."""
    run = RunDir(Path(directory))
    watch = _Watch(run, EventTail(run.events), started=True)
    watch.read()
    watch.steps = None
    workers = processes.survivors(run)
    if run.kill_file.exists():
        processes.kill_trees(workers)
    processes.send_signal(processes.rank_records(run), signal.SIGTERM)
    while not processes.wait_gone(workers, POLL_S):
        watch.read()
        if time.monotonic() - watch.last_sign > _seconds("WORKBENCH_STOP_GRACE_S", STOP_GRACE_S):
            processes.kill_trees(workers)
    watch.read()
    saved = f" at step {watch.steps}" if watch.steps is not None else ""
    message = KILLED if run.kill_file.exists() else f"Stopped{saved} after the launcher had vanished."
    _status(run, "stopped", message)
    return 0


def _see_through(run: RunDir) -> int:
    launcher = read_json(run.launcher)
    ticket = turns.Ticket(Path(launcher["ticket"]))
    try:
        devices = _wait_for_turn(run, ticket)
        if devices is None:
            _status(run, "stopped", "Stopped before it started.")
            return 0
        _status(run, "starting", "")
        return _train(run, {**launcher, "devices": devices})
    finally:
        ticket.leave()


def _wait_for_turn(run: RunDir, ticket: turns.Ticket) -> tuple[str, ...] | None:
    """Block until devices are free; None when the run was stopped first."""
    announced: list[str] | None = None
    while not _asked_to_leave(run):
        devices = ticket.try_start()
        if devices is not None:
            return devices
        ahead = ticket.ahead()
        if ahead != announced:
            _status(run, "queued", f"Waits for {', '.join(ahead)}." if ahead else "Waits for its devices.")
            announced = ahead
        look_again = time.monotonic() + min(LONGEST_POLL_S, POLL_S * max(1, len(ahead)))
        while time.monotonic() < look_again and not _asked_to_leave(run):
            time.sleep(POLL_S)
    return None


def _asked_to_leave(run: RunDir) -> bool:
    return run.stop_file.exists() or run.kill_file.exists()


def _train(run: RunDir, launcher: dict[str, Any]) -> int:
    log = run.log("launcher")
    log_start = log.stat().st_size if log.exists() else 0
    events = EventTail(run.events)
    events.read()
    watch = _Watch(run, events)
    start_recorder(run)
    process = start_ranks(run, launcher)
    launcher |= {"accelerate": process_record(process.pid), "command": process.args}
    _save(run, launcher)
    with sample_devices(run, launcher, process.pid):
        exit_code = _watch(process, watch, launcher)
    survivors = processes.survivors(run)
    if survivors:
        _end(survivors, grace_s=0.0 if root_cause(run) else TERMINATE_GRACE_S)
    watch.read()
    with log.open(errors="replace") as file:
        file.seek(log_start)
        return _conclude(run, watch, exit_code, file.read())


def start_ranks(run: RunDir, launcher: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Start `accelerate launch` for this node's ranks; it leads a session of its own and writes to this one's log."""
    plan, nodes = launcher["plan"], launcher.get("nodes") or Nodes()
    world, kind, precision = plan["world"], plan["kind"], plan["precision"]
    config = run.path / f"accelerate{f'-{nodes.rank}' if nodes.rank else ''}.yaml"
    config.write_text(_accelerate_config(world, kind, precision, nodes))
    command = accelerate_command(config, world, kind, precision, launcher["worker"], run.path, nodes)
    environment = worker_environment(dict(os.environ), world // nodes.count, kind, launcher["devices"])
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, start_new_session=True)


def sample_devices(run: RunDir, launcher: dict[str, Any], pid: int) -> contextlib.AbstractContextManager[None]:
    """Record how busy this node's devices are while the ranks below `pid` live."""
    plan, nodes = launcher["plan"], launcher.get("nodes") or Nodes()
    devices = launcher["devices"][: plan["world"] // nodes.count]
    return sampled(run, plan["kind"], devices, pid, nodes.rank if nodes.count > 1 else None)


def _save(run: RunDir, launcher: dict[str, Any]) -> None:
    nodes = launcher.get("nodes")
    write_json(run.launcher, {**launcher, "nodes": asdict(nodes)} if nodes else launcher)


def accelerate_command(
    config: Path, world: int, kind: str, precision: str, worker: str, run: Path, nodes: Nodes = Nodes()
) -> list[str]:
    """The whole command line of the launch on one node.

    `--cpu --num_processes n` starts one process only; `--multi_gpu` under `ACCELERATE_USE_CPU=true`
    starts n, on gloo. The config file keeps the user's own default configuration out of it.
    """
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    if world > 1:
        command += ["--multi_gpu", "--main_process_port", str(nodes.port)]
    elif kind == "cpu":
        command += ["--cpu"]
    if nodes.count > 1:
        command += ["--machine_rank", str(nodes.rank), "--main_process_ip", nodes.address]
    command += ["--num_processes", str(world), "--num_machines", str(nodes.count), "--dynamo_backend", "no"]
    command += ["--mixed_precision", "bf16" if precision == "bf16" else "no"]
    return [*command, "-m", worker, str(run)]


def _accelerate_config(world: int, kind: str, precision: str, nodes: Nodes) -> str:
    fields = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU" if world > 1 else "NO",
        "mixed_precision": "bf16" if precision == "bf16" else "'no'",
        "num_machines": nodes.count,
        "machine_rank": nodes.rank,
        "num_processes": world,
        "use_cpu": str(kind == "cpu").lower(),
        "debug": "false",
        "gpu_ids": "all",
    }
    return "".join(f"{name}: {value}\n" for name, value in fields.items())


def worker_environment(base: dict[str, str], world: int, kind: str, devices: tuple[str, ...]) -> dict[str, str]:
    """The caller's environment (its `NCCL_*` untouched) with what the ranks need, without another launch's ranks."""
    environment = {k: v for k, v in base.items() if k not in FOREIGN_LAUNCH and not k.startswith("TORCHELASTIC_")}
    threads = max(1, available_cores() // world)
    environment.setdefault("OMP_NUM_THREADS", str(threads if kind == "cpu" else min(threads, 8)))
    environment["ACCELERATE_USE_CPU"] = str(kind == "cpu").lower()
    environment["CUDA_VISIBLE_DEVICES"] = "" if kind == "cpu" else ",".join(devices)
    environment["PYTHONUNBUFFERED"] = "1"
    if kind == "cuda" and not any(name in environment for name in ALLOCATOR):
        environment[ALLOCATOR[0]] = GROWING
    environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = ELASTIC_SHUTDOWN_S
    return environment


def _watch(process: subprocess.Popen[bytes], watch: _Watch, launcher: dict[str, Any]) -> int:
    """Until Accelerate's launcher has gone: its exit code. Never waits for ranks that cannot come back."""
    next_census = 0.0
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(POLL_S)
        watch.read()
        if time.monotonic() > next_census:
            next_census = time.monotonic() + (5.0 if watch.started else 0.5)
            _census(watch.run, process.pid, launcher)
        _enforce_failure(watch)
        _enforce_stop(watch)


def _census(run: RunDir, pid: int, launcher: dict[str, Any]) -> None:
    """Keep `launcher.json` knowing every worker, also those that have not yet written their rank."""
    workers = processes.descendants(pid)
    known = {record["pid"] for record in launcher.get("workers", ())}
    if not {record["pid"] for record in workers} <= known:
        launcher["workers"] = workers
        _save(run, launcher)


def _enforce_failure(watch: _Watch) -> None:
    """One rank's error dooms the step: the others, who may wait for it in a collective, get a short grace."""
    if watch.failed_at is None:
        if any(watch.run.errors.glob("*.json")):
            watch.failed_at = time.monotonic()
    elif time.monotonic() - watch.failed_at > failure_grace_s():
        watch.forced = True
        processes.kill_trees(_ranks(watch.run))


def _enforce_stop(watch: _Watch) -> None:
    """The ranks honour STOP by themselves; a rank that hangs gets SIGTERM, then SIGKILL. `run.kill()` asks nobody."""
    if watch.run.kill_file.exists():
        watch.forced = True
        processes.kill_trees(_ranks(watch.run))
        return
    if not watch.run.stop_file.exists():
        return
    now = time.monotonic()
    if not watch.stopping:
        watch.stopping, watch.last_sign = True, now
    if watch.terminated_at is None:
        if now - watch.last_sign > _seconds("WORKBENCH_STOP_GRACE_S", STOP_GRACE_S):
            processes.send_signal(_ranks(watch.run), signal.SIGTERM)
            watch.terminated_at = now
    elif now - watch.terminated_at > _seconds("WORKBENCH_TERMINATE_GRACE_S", TERMINATE_GRACE_S):
        watch.forced = True
        processes.kill_trees(_ranks(watch.run))


def _ranks(run: RunDir) -> list[dict[str, Any]]:
    """Live workers without the launcher above them, which has to tell how they ended."""
    accelerate = processes.launcher_record(run).get("accelerate") or {}
    return [record for record in processes.live_workers(run) if record["pid"] != accelerate.get("pid")]


def _end(survivors: list[dict[str, Any]], grace_s: float) -> None:
    """No rank outlives its launcher: SIGTERM, which the worker answers with a checkpoint, then SIGKILL."""
    if grace_s > 0:
        processes.send_signal(survivors, signal.SIGTERM)
        processes.wait_gone(survivors, grace_s)
    processes.kill_trees(survivors)


def _conclude(run: RunDir, watch: _Watch, exit_code: int, launcher_output: str) -> int:
    """Turn exit code, error files and the `end` event into the final status."""
    if root_cause(run) is None:
        ending = _orderly_ending(run, watch, exit_code)
        if ending is not None:
            _status(run, *ending)
            return 0
    if root_cause(run) is None and exit_code < 0:
        name = signal.Signals(-exit_code).name
        _status(run, "failed", f"the launcher was killed by {name}; its ranks were ended.")
        return 1
    if not watch.forced:
        record_silent_death(run, launcher_output)
    cause = root_cause(run)
    _status(run, "failed", cause.sentence if cause else f"the launcher ended with exit code {exit_code}.")
    return 1


def _orderly_ending(run: RunDir, watch: _Watch, exit_code: int) -> tuple[str, str] | None:
    """State and message if the ranks left of their own accord, or because a stop was asked for.

    A scheduler, or a machine that shuts down, sends SIGTERM to every process: the ranks answer with a checkpoint, and
    their launcher dies of it.
    """
    target = read_json(run.experiment)["steps"]
    if exit_code in (0, ELASTIC_ENDED, -signal.SIGTERM) and watch.steps is not None:
        if watch.steps >= target:
            return "finished", f"{watch.steps} steps."
        return "stopped", f"Stopped at step {watch.steps} of {target}."
    if watch.run.kill_file.exists():
        return "stopped", KILLED
    if watch.stopping:
        return "stopped", "Stopped; the ranks did not leave by themselves and were ended."
    return None


def _wait_until_known(run: RunDir) -> None:
    """`launch` writes this process's ticket and `launcher.json` just after starting it."""
    deadline = time.monotonic() + 30
    me = os.getpid()
    while processes.launcher_record(run).get("supervisor", {}).get("pid") != me:
        if time.monotonic() > deadline:
            raise SystemExit("The kernel that launched this run went away before it was queued.")
        time.sleep(0.02)


def _status(run: RunDir, state: str, message: str) -> None:
    append_event(run.events, "status", state=state, message=message)


def failure_grace_s() -> float:
    return _seconds("WORKBENCH_FAILURE_GRACE_S", FAILURE_GRACE_S)


def _seconds(variable: str, default: float) -> float:
    return float(os.environ.get(variable) or default)


if __name__ == "__main__":
    sys.exit(reap(sys.argv[2]) if sys.argv[1] == "--reap" else main(sys.argv[1]))
