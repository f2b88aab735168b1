"""The devices of a node: how they are named, which run may use them, and how busy they are.

Runs that need the same devices wait for each other, first come, first served. A run may ask for a share of its devices,
so that runs of a sweep train side by side on one CPU or GPU. Each run holds a numbered ticket, a small JSON file in one
folder per host. A ticket counts for as long as a process of its run is alive (supervisor, launcher or rank), so no
crash can leave the node locked, and a launcher killed with -9 whose ranks train on still keeps its devices.

While a run trains, its supervisor (on further nodes, the process that started the ranks there) asks NVML for the GPUs
that the run was given, or the kernel for the CPU time of its processes, and writes a `device` event every two seconds.
It does so in a daemon thread, so that a driver that does not answer delays nothing. The ranks take no part in it.
Without NVML there are no samples.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from workbench.base.errors import PlanInfeasible, WorkbenchError, in_words
from workbench.base.machine import available_cores, cache_home
from workbench.record.events import ProcessRecord
from workbench.record.rundir import RunDir, locked, log_event, process_alive, read_json, write_json
from workbench.runs.launching.processes import run_alive

if TYPE_CHECKING:
    from workbench.planning.plan import Plan

CPU = ("cpu",)
LOCK = "lock"
"""File of a queue that is locked for milliseconds, while tickets are read or written."""
OTHERS = "another user's run"
ROUNDING = 1e-6
"""Tolerated excess of the sum of shares of a device over 1: three shares of a third are one device."""


def node_devices(device_type: str) -> tuple[str, ...]:
    """Return the devices that runs of this type (`cpu` or `cuda`) share on this node: one CPU, or the visible GPUs.

    GPUs are named by UUID where `nvidia-smi` tells it, so that kernels with different `CUDA_VISIBLE_DEVICES` agree on
    which device is which. Does not import torch.
    """
    if device_type == "cpu":
        return CPU
    if shutil.which("nvidia-smi") is None:  # some containers have the driver only
        files = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
        uuids = re.findall(r"GPU UUID:\s*(\S+)", "\n".join(file.read_text() for file in files))
    else:
        listed = ""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # a driver that hangs
            command = ["nvidia-smi", "-L"]
            listed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stdout
        uuids = re.findall(r"^GPU \d+:.*UUID: ([^)]+)\)", listed, flags=re.MULTILINE)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(uuids)
    # Entries are indices, or the beginnings of UUIDs. CUDA ignores everything after the first that is no device: "-1",
    # Slurm's "NoDevFiles".
    devices: dict[str, None] = {}
    for name in map(str.strip, visible.split(",")):
        if name.isdigit() and uuids and int(name) >= len(uuids):
            break
        if name.isdigit():
            devices[uuids[int(name)] if uuids else name] = None
        elif name.startswith(("GPU-", "MIG-")):
            devices[next((uuid for uuid in uuids if uuid.startswith(name)), name)] = None
        else:
            break
    return tuple(devices)


def devices_for(plan: Plan) -> tuple[str, ...]:
    """Return the devices of this node that the run may be given; raises where the plan needs more."""
    device_type = plan.cluster.device.type
    devices = node_devices(device_type)
    if device_type != "cpu" and len(devices) < plan.world:
        raise PlanInfeasible(
            f"The plan uses {plan.world} × {plan.cluster.device.name}, and this machine offers "
            f"{len(devices) or 'no'} GPU{'s' * (len(devices) != 1)}. Plan for this machine: wb.plan(experiment), or "
            "launch it there."
        )
    return devices


@dataclass(frozen=True)
class Ticket:
    """The place of one run in the queue of one host."""

    path: Path

    @property
    def number(self) -> int:
        return int(self.path.stem)

    def try_start(self) -> tuple[str, ...] | None:
        """Return the devices that this run may use from now on, or None while it has to wait.

        A run waits until every earlier ticket for some of these devices has started, and enough of them are free. Of
        those it is given the ones that fewest others share.
        """
        with locked(self.path.with_name(LOCK)):
            mine = read_json(self.path)
            rivals = self._rivals(mine)
            if any(t["devices"] is None for t in rivals):
                return None
            taken = defaultdict[str, float](float)
            for rival in rivals:
                for device in rival["devices"]:
                    taken[device] += rival.get("share", 1.0)
            free = [device for device in mine["pool"] if taken[device] + mine["share"] <= 1 + ROUNDING]
            if len(free) < mine["count"]:
                return None
            emptiest = sorted(free, key=taken.__getitem__)[: mine["count"]]
            devices = tuple(device for device in mine["pool"] if device in emptiest)
            write_json(self.path, {**mine, "devices": devices})
            return devices

    def ahead(self) -> list[str]:
        """Return the names of the live runs before this one, oldest first; those of other users are not told."""
        mine = read_json(self.path)
        with locked(self.path.with_name(LOCK)):
            return [_name_for_me(ticket) for ticket in self._rivals(mine)]

    def _rivals(self, mine: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the live earlier tickets that may be given some of the same devices."""
        earlier = [ticket for ticket in _live_tickets(self.path.parent) if ticket["number"] < self.number]
        # Two kernels may see different GPUs.
        return [t for t in earlier if not set(mine["pool"]).isdisjoint(t["pool"])]

    def leave(self) -> None:
        self.path.unlink(missing_ok=True)


def waiting_and_training() -> list[dict[str, Any]]:
    """Return every live run of this host's queue, oldest first: its name, its devices, and the runs that it waits for.

    `devices` is None for a run that waits. Other users' runs have no name.
    """
    folder = queue_folder()
    with locked(folder / LOCK):
        live = _live_tickets(folder)
    queue = []
    for fields in live:
        with contextlib.suppress(FileNotFoundError):  # it left a moment ago
            ahead = [] if fields["devices"] else Ticket(folder / f"{fields['number']:06d}.json").ahead()
            queue.append({"name": _name_for_me(fields), "devices": fields["devices"], "waits_for": ahead})
    return queue


def take_ticket(
    run: RunDir, *, pool: Sequence[str], count: int, supervisor: ProcessRecord, share: float = 1.0
) -> Ticket:
    """Queue the run for a share of each of `count` devices out of `pool`, behind every run that asked before.

    No process of the run may be alive. A ticket that a kill left behind is removed: it would count again as soon as the
    run lives, and the run would wait for itself.
    """
    folder = queue_folder()
    with locked(folder / LOCK):
        _live_tickets(folder)  # removes the others
        number = max((int(path.stem) for path in _tickets(folder)), default=0) + 1
        ticket = Ticket(folder / f"{number:06d}.json")
        fields = {"run": str(run.path), "pool": list(pool), "count": count, "share": share}
        write_json(ticket.path, {**fields, "devices": None, "supervisor": supervisor})
    return ticket


def queue_folder() -> Path:
    """Return the folder of this host's tickets, made if needed; raises `WorkbenchError` if it cannot be written."""
    folder = cache_home() / "device_queue" / socket.gethostname()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / LOCK):
            return folder
    except OSError as error:
        raise WorkbenchError(
            f"This machine's queue of runs cannot be written to {folder}: {error.strerror}. Set WORKBENCH_HOME to a "
            "folder that can be written."
        ) from None


def _name_for_me(ticket: Mapping[str, Any]) -> str:
    """Return the name of a ticket's run to its owner, and to everybody else that it is another user's."""
    return Path(ticket["run"]).name if ticket["user"] == os.getuid() else OTHERS


def _tickets(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.json") if re.fullmatch("[0-9]{1,18}", path.stem))


def _live_tickets(folder: Path) -> list[dict[str, Any]]:
    """Return the tickets of runs that have a live process, oldest first, and remove the others."""
    live = []
    for path in _tickets(folder):
        with contextlib.suppress(OSError, ValueError):
            ticket = read_json(path)
            if not _is_whole(ticket):  # written by another program, or damaged: nobody would ever remove it
                path.unlink(missing_ok=True)
            elif process_alive(ticket["supervisor"]) or run_alive(RunDir(Path(ticket["run"]))):
                live.append({**ticket, "number": int(path.stem), "user": path.stat().st_uid})
            else:
                path.unlink(missing_ok=True)
    return live


def _is_whole(ticket: Any) -> bool:
    """Return True for a ticket that `take_ticket` wrote."""
    types: dict[str, Any] = {"run": str, "pool": list, "count": int, "devices": list | None, "supervisor": dict}
    fields = ticket if isinstance(ticket, Mapping) else {}
    return (
        all(name in fields and isinstance(fields[name], kind) for name, kind in types.items())
        and all(isinstance(device, str) for device in (*fields["pool"], *(fields["devices"] or ())))
        and isinstance(fields.get("share", 1.0), int | float)
    )


# How busy the devices are

SAMPLE_S = 2.0
LEAVES_S = 1.0
"""Seconds to wait for the sampling thread when the ranks have left; one that hangs in the driver is abandoned."""


@dataclass(frozen=True)
class Sample:
    """One sample of some devices; None where a device did not answer."""

    names: tuple[str, ...]
    shares: tuple[float | None, ...]
    """Utilisation of each device, from 0 to 1."""
    used_bytes: tuple[int | None, ...]


def _handle(nvml: Any, device: str) -> Any:
    """Return NVML's handle of a GPU by its name in `CUDA_VISIBLE_DEVICES`: UUID, beginning of the UUID, or index."""
    if device.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(device))
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        if nvml.nvmlDeviceGetUUID(handle).startswith(device):
            return handle
    return nvml.nvmlDeviceGetHandleByUUID(device)


class GpuMeter:
    """The GPUs of these names in `CUDA_VISIBLE_DEVICES`: UUIDs, their beginnings, or indices.

    A share is the part of the driver's last sampling period (up to a second) in which a kernel ran. Memory counts the
    use by any process. Raises `ImportError` or `pynvml.NVMLError` where NVML cannot be asked.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        import pynvml

        self._nvml = pynvml
        pynvml.nvmlInit()
        self._handles = [_handle(pynvml, name) for name in devices]
        self._names = tuple(f"GPU {pynvml.nvmlDeviceGetIndex(handle)}" for handle in self._handles)

    def sample(self) -> Sample:
        shares, used = [], []
        for handle in self._handles:
            share = self._ask(self._nvml.nvmlDeviceGetUtilizationRates, handle)
            memory = self._ask(self._nvml.nvmlDeviceGetMemoryInfo, handle)
            shares.append(None if share is None else share.gpu / 100)
            used.append(None if memory is None else int(memory.used))
        return Sample(self._names, tuple(shares), tuple(used))

    def _ask(self, question: Any, handle: Any) -> Any:
        try:
            return question(handle)
        except self._nvml.NVMLError:  # not supported (a slice of a GPU), or the GPU has fallen off the bus
            return None


class CpuMeter:
    """The node's cores: the share of them that a process and all below it have used since the last sample."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._cores = available_cores()
        self._spent, self._at = self._look()[0], time.monotonic()

    def sample(self) -> Sample:
        spent, resident = self._look()
        now = time.monotonic()
        busy = sum(seconds - self._spent.get(process, 0.0) for process, seconds in spent.items())
        share = busy / (self._cores * max(1e-3, now - self._at))
        self._spent, self._at = spent, now
        return Sample(("CPU",), (min(1.0, share),), (resident,))

    def _look(self) -> tuple[dict[tuple[int, float], float], int]:
        """Return the CPU seconds of each process so far, and the resident bytes of all."""
        spent, resident = {}, 0
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in (self._root, *self._root.children(recursive=True)):
                with contextlib.suppress(psutil.Error), process.oneshot():
                    times = process.cpu_times()
                    spent[process.pid, process.create_time()] = times.user + times.system
                    resident += process.memory_info().rss
        return spent, resident


def open_meter(device_type: str, devices: Sequence[str], pid: int) -> CpuMeter | GpuMeter:
    """Return a meter for the devices of a run whose launcher has this pid; `device_type` is `cpu` or `cuda`."""
    return CpuMeter(pid) if device_type == "cpu" else GpuMeter(devices)


@contextlib.contextmanager
def sampled(run: RunDir, device_type: str, devices: Sequence[str], pid: int, node: int | None = None) -> Iterator[None]:
    """Record how busy the devices are for as long as the block runs; an error of the sampling is only printed."""
    over = threading.Event()

    def record() -> None:
        try:
            meter = open_meter(device_type, devices, pid)
            while not over.wait(SAMPLE_S):
                write_sample(run, device_type, meter.sample(), node)
        except Exception as error:  # no NVML, a driver of another version, a full disk
            print(f"Devices are not sampled: {in_words(error)}", flush=True)

    thread = threading.Thread(target=record, name="devices", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(LEAVES_S)


def write_sample(run: RunDir, device_type: str, sample: Sample, node: int | None = None) -> None:
    """Append one `device` event."""
    shares = [None if share is None else round(share, 3) for share in sample.shares]
    columns = {"names": list(sample.names), "shares": shares, "used_bytes": list(sample.used_bytes)}
    log_event(run.events, "device", device_type=device_type, **({} if node is None else {"node": node}), **columns)
