"""The process that sees a run through: it waits in the device queue, runs `accelerate launch`, and says how it ended.

Started detached by `launch` as `python -m workbench.runs.launching.supervisor RUN_DIR`; it needs nothing of the
kernel that started it, and the kernel may restart or go away.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from workbench.base.errors import in_words
from workbench.base.machine import available_cores
from workbench.record.event_log import LogTail
from workbench.record.events import LauncherRecord, PlanFacts, ProcessRecord
from workbench.record.rundir import (
    KILLED,
    RunDir,
    append_event,
    process_alive,
    process_record,
    read_json,
    read_object,
    read_record,
    stop_grace_s,
    until_there_is_room,
    write_json,
)
from workbench.record.step_table import num_logged
from workbench.runs.launching import fork_server, processes
from workbench.runs.launching.alerts import AlertWatch
from workbench.runs.launching.device_queue import Ticket, node_devices, sampled
from workbench.runs.launching.processes import record_silent_death, root_cause
from workbench.runs.launching.stalls import StallWatch
from workbench.runs.tracking.delivery import start_recorder

POLL_S = 0.2
LONGEST_POLL_S = 10.0
"""Longest pause between two looks at the device queue; each look reads every ticket, so a long queue is read less."""
QUEUED_WITHIN_S = 30.0
"""Seconds from the start of this process until `launch` must have queued it."""
FAILURE_GRACE_S = 10.0
"""Seconds that the other ranks have to leave by themselves after one rank has reported an error."""
TERMINATE_GRACE_S = 60.0
"""Seconds from SIGTERM to SIGKILL."""
AHEAD = "--ahead"
"""Argument in place of a run directory: leave a server, and see no run through."""
ELASTIC_SHUTDOWN_S = "30"
ELASTIC_ENDED = 1
"""Exit code of torchrun's launcher, also after SIGTERM; a rank that fails leaves its error file besides."""
ENDED_IN_ORDER = (0, ELASTIC_ENDED, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP, 128 + signal.SIGINT)
"""Exit codes of the launcher that do not contradict the `end` event of the ranks."""
ALLOCATOR = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
"""Variables by which a user may configure torch's CUDA allocator; the second is the older name."""
GROWING = "expandable_segments:True"
"""Allocator setting that maps memory as it is needed; near a limit, fixed segments waste what no tensor fits into."""
FOREIGN_LAUNCH = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "ROLE_RANK"),
    *("MASTER_ADDR", "MASTER_PORT", "WANDB_SERVICE", "WANDB_RUN_ID"),
)
"""Variables of a launch around this one, or of the kernel's own W&B run, that would mislead the ranks."""


@dataclass(frozen=True)
class Nodes:
    """The position of one node among those that share a run."""

    count: int = 1
    rank: int = 0
    address: str = ""
    """Host name or IP address of the first node."""
    port: int = 0

    @property
    def log(self) -> str:
        """Return the name of this node's launcher log."""
        return f"launcher-{self.rank}" if self.rank else "launcher"


@dataclass
class _Supervised:
    """The running attempt, as far as the supervisor has seen it."""

    run: RunDir
    events: LogTail
    last_sign: float = field(default_factory=time.monotonic)
    """Monotonic time at which the ranks last wrote an event, or were last asked for something."""
    started: bool = False
    stopping: bool = False
    terminated_at: float | None = None
    failed_at: float | None = None
    gone: set[int] | None = None
    """The ranks that had died before the others were killed from here; None if none was. The exit codes of the others
    say nothing about the cause."""
    killed: bool = False
    """True if the user had the ranks killed before any had failed: one may report that it lost another."""
    steps: int | None = None
    """Steps in the ranks' `end` event; None unless the ranks have left in order."""
    stalls: StallWatch = field(init=False)
    alerts: AlertWatch = field(init=False)

    def __post_init__(self) -> None:
        self.stalls, self.alerts = StallWatch(self.run), AlertWatch(self.run)

    def read(self) -> None:
        for event in self.events.read():
            if event["type"] in ("status", "tracking", "device", "alert"):  # not written by the ranks
                continue
            self.last_sign = time.monotonic()
            if event["type"] == "start" and not self.started:
                self.started = True
                _status(self.run, "running", "")
            if event["type"] == "step":
                self.stalls.note_step(event.get("step_ms"))
                self.alerts.note_step(event["step"], event["loss"])
            if event["type"] == "end":
                self.steps = int(event["steps"])


def main(directory: str) -> int:
    run = RunDir(Path(directory))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: run.stop_file.touch())
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # otherwise nobody would learn how the launcher ended
    # `launch` writes launcher.json just after it has started this process.
    deadline, me = time.monotonic() + QUEUED_WITHIN_S, os.getpid()
    while (record := processes.launcher_record(run).get("supervisor")) is None or record["pid"] != me:
        if time.monotonic() > deadline:
            raise SystemExit("The kernel that launched this run went away before it was queued.")
        time.sleep(0.02)
    with _last_words(run):
        launcher: LauncherRecord = read_json(run.launcher)
        ticket = Ticket(Path(launcher["ticket"]))
        try:
            devices = _wait_for_devices(run, ticket)
            if devices is None:
                _status(run, "stopped", "Stopped before it started.")
                return 0
            _status(run, "starting", "")
            launcher["devices"] = devices
            on_cpu = launcher["plan"]["device_type"] == "cpu"
            import_all = functools.partial(import_ahead, read_object(run.experiment), on_cpu)
            fork_server.leave_server(_environment(launcher, Nodes()), import_all)
            return _train(run, launcher, Nodes())
        finally:
            ticket.leave()


def import_ahead(experiment: Mapping[str, Any], on_cpu: bool) -> None:
    """Import what the launchers of runs import, and what their ranks do if those are forked.

    `experiment` is the JSON of one of the runs.
    """
    importlib.import_module(processes.LOCAL_LAUNCHER).preload(processes.WORKER, experiment, on_cpu)


def leave_server_ahead(device_type: str, world: int) -> int:
    """Leave a server for runs of `world` ranks of which nothing else is known (`launcher.import_ahead`)."""
    environment = worker_environment(dict(os.environ), world, device_type, node_devices(device_type))
    fork_server.leave_server(environment, functools.partial(import_ahead, {}, on_cpu=device_type == "cpu"))
    return 0


def supervise(run: RunDir, launcher: LauncherRecord, nodes: Nodes) -> int:
    """See a run through from the first of its nodes, on the devices that this process may use."""
    _save(run, launcher, nodes)
    _status(run, "starting", "")
    with _last_words(run):
        return _train(run, launcher, nodes)


@contextlib.contextmanager
def _last_words(run: RunDir) -> Iterator[None]:
    """End every rank and write the final status if the block raises (a full disk, a directory that was removed)."""
    try:
        yield
    except BaseException as error:
        processes.kill_trees(record for record in processes.named(run) if record["pid"] != os.getpid())
        if run.events.is_file():
            _status(run, "failed", f"the supervisor raised {in_words(error)}; see {run.log('launcher')}.")
        raise


def reap(directory: str) -> int:
    """End the ranks of a run whose supervisor is gone, and write the final status in its place."""
    run = RunDir(Path(directory))
    attempt = _Supervised(run, LogTail(run.events), started=True)
    attempt.read()
    attempt.steps = None
    workers = processes.survivors(run)
    if run.kill_file.exists():
        processes.kill_trees(workers)
    processes.send_signal(processes.rank_records(run), signal.SIGTERM)
    while not processes.wait_gone(workers, POLL_S):
        attempt.read()
        if time.monotonic() - attempt.last_sign > stop_grace_s():
            processes.kill_trees(workers)
    attempt.read()
    saved = f" at step {attempt.steps}" if attempt.steps is not None else ""
    message = KILLED if run.kill_file.exists() else f"Stopped{saved} after the launcher had vanished."
    _status(run, "stopped", message)
    return 0


def _wait_for_devices(run: RunDir, ticket: Ticket) -> tuple[str, ...] | None:
    """Block until devices are free; return them, or None when the run was stopped first."""
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


def _train(run: RunDir, launcher: LauncherRecord, nodes: Nodes) -> int:
    log = run.log("launcher")
    log_start = log.stat().st_size if log.exists() else 0
    events = LogTail(run.events)
    events.read()
    attempt = _Supervised(run, events)
    start_recorder(run)
    process = start_ranks(run, launcher, nodes)
    launcher |= {"accelerate": process_record(process.pid)}
    _save(run, launcher, nodes)
    with sample_devices(run, launcher, nodes, process.pid):
        exit_code = _watch(process, attempt, launcher, nodes)
    if exit_code is None:  # the end is certain, and is told while the ranks free their devices, which may take seconds
        ended = _conclude(attempt, 0, "")
        process.wait(TERMINATE_GRACE_S)
        processes.kill_trees([*processes.live_workers(run), *processes.survivors(run)])
        return ended
    survivors = processes.survivors(run)  # ranks that outlived their launcher
    if survivors and root_cause(run) is None:
        processes.send_signal(survivors, signal.SIGTERM)  # which the worker answers with a checkpoint
        processes.wait_gone(survivors, TERMINATE_GRACE_S)
    processes.kill_trees(survivors)
    attempt.read()
    with log.open(errors="replace") as file:
        file.seek(log_start)
        return _conclude(attempt, exit_code, file.read())


def start_ranks(run: RunDir, launcher: LauncherRecord, nodes: Nodes) -> fork_server.Forked:
    """Start `accelerate launch` for this node's ranks; it leads a session of its own and writes to this one's log."""
    plan = launcher["plan"]
    config = run.path / f"accelerate{f'-{nodes.rank}' if nodes.rank else ''}.yaml"
    config.write_text(_accelerate_config(plan, nodes))
    command = [*accelerate_command(config, plan, nodes), "-m", launcher["worker"], str(run.path)]
    return fork_server.fork(command, _environment(launcher, nodes))


def _environment(launcher: LauncherRecord, nodes: Nodes) -> dict[str, str]:
    plan = launcher["plan"]
    ranks = plan["world"] // nodes.count
    return worker_environment(dict(os.environ), ranks, plan["device_type"], launcher["devices"])


def sample_devices(
    run: RunDir, launcher: LauncherRecord, nodes: Nodes, pid: int
) -> contextlib.AbstractContextManager[None]:
    """Record how busy this node's devices are while the ranks below `pid` live."""
    plan = launcher["plan"]
    devices = launcher["devices"][: plan["world"] // nodes.count]
    return sampled(run, plan["device_type"], devices, pid, nodes.rank if nodes.count > 1 else None)


def _save(run: RunDir, launcher: LauncherRecord, nodes: Nodes) -> None:
    write_json(run.launcher, {**launcher, "nodes": asdict(nodes)} if nodes.count > 1 else launcher)


def accelerate_command(config: Path, plan: PlanFacts, nodes: Nodes = Nodes()) -> list[str]:
    """Return the command line of Accelerate's launcher on one node, without the worker's module.

    `--cpu --num_processes n` starts one process only; `--multi_gpu` under `ACCELERATE_USE_CPU=true` starts n, on gloo.
    The config file keeps the user's own default configuration out of it. Several ranks of one node meet on the loopback
    interface, and ranks on CPUs are forked from a launcher that has imported what they need.
    """
    launcher = processes.LOCAL_LAUNCHER if nodes.count == 1 else processes.LAUNCHER
    command = [sys.executable, "-m", launcher, "--config_file", str(config)]
    if plan["world"] > 1:
        command += ["--multi_gpu", "--main_process_port", str(nodes.port)]
    elif plan["device_type"] == "cpu":
        command += ["--cpu"]
    if nodes.count > 1:
        command += ["--machine_rank", str(nodes.rank), "--main_process_ip", nodes.address]
    command += ["--num_processes", str(plan["world"]), "--num_machines", str(nodes.count), "--dynamo_backend", "no"]
    return [*command, "--mixed_precision", "bf16" if plan["precision"] == "bf16" else "no"]


def _accelerate_config(plan: PlanFacts, nodes: Nodes) -> str:
    fields = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU" if plan["world"] > 1 else "NO",
        "mixed_precision": "bf16" if plan["precision"] == "bf16" else "'no'",
        "num_machines": nodes.count,
        "machine_rank": nodes.rank,
        "num_processes": plan["world"],
        "use_cpu": str(plan["device_type"] == "cpu").lower(),
        "debug": "false",
        "gpu_ids": "all",
    }
    return "".join(f"{name}: {value}\n" for name, value in fields.items())


def worker_environment(base: dict[str, str], world: int, device_type: str, devices: Iterable[str]) -> dict[str, str]:
    """Return the ranks' environment: the caller's, its `NCCL_*` untouched, without variables of another launch."""
    environment = {k: v for k, v in base.items() if k not in FOREIGN_LAUNCH and not k.startswith("TORCHELASTIC_")}
    threads = max(1, available_cores() // world)
    environment.setdefault("OMP_NUM_THREADS", str(threads if device_type == "cpu" else min(threads, 8)))
    environment["ACCELERATE_USE_CPU"] = str(device_type == "cpu").lower()
    environment["CUDA_VISIBLE_DEVICES"] = "" if device_type == "cpu" else ",".join(devices)
    environment["PYTHONUNBUFFERED"] = "1"
    if device_type == "cuda" and not any(name in environment for name in ALLOCATOR):
        environment[ALLOCATOR[0]] = GROWING
    if device_type == "cuda":  # torch counts devices, and does not ask CUDA for them, which would not survive a fork
        environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = ELASTIC_SHUTDOWN_S
    return environment


def _watch(process: fork_server.Forked, attempt: _Supervised, launcher: LauncherRecord, nodes: Nodes) -> int | None:
    """Return the exit code of Accelerate's launcher once it has gone; never wait for ranks that cannot come back.

    Returns None where the ranks have logged their end before that: what follows changes nothing that the run has left.
    """
    next_census = 0.0
    while True:
        exit_code = process.wait(POLL_S)
        if attempt.run.was_deleted:
            raise FileNotFoundError(f"{attempt.run.path} was deleted while it trained, and its processes are ended.")
        if exit_code is not None:
            return exit_code
        attempt.read()
        if attempt.steps is not None and root_cause(attempt.run) is None:
            return None
        if time.monotonic() > next_census:
            next_census = time.monotonic() + (5.0 if attempt.started else 0.5)
            # launcher.json must know every worker, also those that have not yet written their rank.
            workers = processes.descendants(process.pid)
            if not {one["pid"] for one in workers} <= {one["pid"] for one in launcher.get("workers", ())}:
                launcher["workers"] = workers
                _save(attempt.run, launcher, nodes)
        if attempt.stalls.look():
            _kill(attempt)
        _enforce(attempt)


def _enforce(attempt: _Supervised) -> None:
    """Kill ranks that an error or the user ends, and that do not leave by themselves in time."""
    run, now = attempt.run, time.monotonic()
    # The others may wait for a rank that has failed in a collective, which nobody can cancel from outside.
    if attempt.failed_at is None:
        if any(run.errors.glob("*.json")):
            attempt.failed_at = now
    elif now - attempt.failed_at > failure_grace_s():
        _kill(attempt)

    # KILL is for now. STOP lets the ranks end their step and write a checkpoint, then SIGTERM asks for the same once
    # more, and only ranks that answer neither are killed.
    if run.kill_file.exists():
        attempt.killed = attempt.killed or attempt.failed_at is None
        _kill(attempt)
    elif run.stop_file.exists():
        if not attempt.stopping:
            attempt.stopping, attempt.last_sign = True, now
        if attempt.terminated_at is None:
            if now - attempt.last_sign > stop_grace_s():
                processes.send_signal(_ranks(run), signal.SIGTERM)
                attempt.terminated_at = now
        elif now - attempt.terminated_at > processes.seconds_of("WORKBENCH_TERMINATE_GRACE_S", TERMINATE_GRACE_S):
            _kill(attempt)


def _kill(attempt: _Supervised) -> None:
    """Kill the ranks that still run, and remember which had died before."""
    if attempt.gone is None:
        dead = [record for record in processes.rank_records(attempt.run) if not process_alive(record)]
        attempt.gone = {int(record["rank"]) for record in dead}
    processes.kill_trees(_ranks(attempt.run))


def _ranks(run: RunDir) -> list[ProcessRecord]:
    """Return the live workers without the launcher above them, which has to tell how they ended."""
    accelerate = processes.launcher_record(run).get("accelerate")
    pid = accelerate["pid"] if accelerate else None
    return [record for record in processes.live_workers(run) if record["pid"] != pid]


def _conclude(attempt: _Supervised, exit_code: int, launcher_output: str) -> int:
    """Write the final status, deduced from the exit code, the error files and the `end` event."""
    run = attempt.run
    if attempt.killed or root_cause(run) is None:
        ending = _orderly_ending(attempt, exit_code)
        if ending is not None:
            _status(run, *ending)
            if ending[0] == "finished":
                _compare_with_prediction(attempt)
            return 0
    if root_cause(run) is None and exit_code < 0:
        name = signal.Signals(-exit_code).name
        _status(run, "failed", f"the launcher was killed by {name}; its ranks were ended.")
        return 1
    until_there_is_room(lambda: record_silent_death(run, launcher_output, attempt.gone), stop_grace_s(), run.reserve)
    cause = root_cause(run)
    _status(run, "failed", cause.sentence if cause else f"the launcher ended with exit code {exit_code}.")
    return 1


def _compare_with_prediction(attempt: _Supervised) -> None:
    """Note for the next plan of this machine whether the steps contradict what was measured of its speed."""
    from workbench.cost.hardware import CALIBRATED, TIMED
    from workbench.measure.detection import compare

    step_ms = attempt.stalls.usual_step_ms
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # a plan file of another version
        plan = read_record(attempt.run.plan)
        if step_ms is not None and plan["cluster"]["device"]["basis"] in (CALIBRATED, TIMED):
            compare(plan["prediction"]["step_ms"], step_ms)


def _orderly_ending(attempt: _Supervised, exit_code: int) -> tuple[str, str] | None:
    """Return state and message if the ranks left of their own accord, or because a stop was asked for.

    A scheduler, a terminal that closes, or a machine that shuts down, sends a signal to every process: the ranks
    answer with a checkpoint, and their launcher dies of it.
    """
    target = read_record(attempt.run.experiment)["steps"]
    if exit_code in ENDED_IN_ORDER and attempt.steps is not None:
        if attempt.steps >= target:
            return "finished", f"{attempt.steps} steps."
        return "stopped", f"Stopped at step {attempt.steps} of {target}."
    if attempt.run.kill_file.exists():
        return "stopped", KILLED
    if attempt.stopping:
        return "stopped", "Stopped; the ranks did not leave by themselves and were ended."
    return None


def _status(run: RunDir, state: str, message: str) -> None:
    facts = {"state": state, "message": message, "rows": num_logged(run.path)}
    until_there_is_room(lambda: append_event(run.events, "status", **facts), stop_grace_s(), run.reserve)
    AlertWatch(run).note_state(state, message)


def failure_grace_s() -> float:
    """Return `$WORKBENCH_FAILURE_GRACE_S`, or its default."""
    return processes.seconds_of("WORKBENCH_FAILURE_GRACE_S", FAILURE_GRACE_S)


if __name__ == "__main__":
    if sys.argv[1] == AHEAD:
        fork_server.leave(leave_server_ahead(sys.argv[2], int(sys.argv[3])))
    fork_server.leave(reap(sys.argv[2]) if sys.argv[1] == "--reap" else main(sys.argv[1]))
