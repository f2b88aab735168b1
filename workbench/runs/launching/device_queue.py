"""The device queue of a node: runs that need the same devices wait for each other, first come, first served.

A run may ask for a share of its devices, so that runs of a sweep train side by side on one CPU or GPU.

Each run holds a numbered ticket, a small JSON file in one folder per host. A ticket counts for as long as a process of
its run is alive (supervisor, launcher or rank), so no crash can leave the node locked, and a launcher killed with -9
whose ranks train on still keeps its devices.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError
from workbench.events import ProcessRecord
from workbench.rundir import RunDir, locked, process_alive, read_json, write_json
from workbench.runs.launching.processes import run_alive

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
    uuids = _gpu_uuids()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return uuids
    devices: dict[str, None] = {}
    for name in map(str.strip, visible.split(",")):
        device = _visible_device(name, uuids)
        if device is None:
            break  # CUDA ignores everything after the first device that does not exist: "-1", Slurm's "NoDevFiles"
        devices[device] = None
    return tuple(devices)


def _visible_device(name: str, uuids: Sequence[str]) -> str | None:
    """Return the whole UUID, where it is known, of an entry of `CUDA_VISIBLE_DEVICES`; None for what is no device."""
    if name.isdigit():
        return (uuids[int(name)] if int(name) < len(uuids) else None) if uuids else name
    if not name.startswith(("GPU-", "MIG-")):
        return None
    return next((uuid for uuid in uuids if uuid.startswith(name)), name)


def _gpu_uuids() -> tuple[str, ...]:
    if shutil.which("nvidia-smi") is None:  # some containers have the driver only
        files = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
        return tuple(re.findall(r"GPU UUID:\s*(\S+)", "\n".join(file.read_text() for file in files)))
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):  # a driver that hangs
        return ()
    return tuple(re.findall(r"^GPU \d+:.*UUID: ([^)]+)\)", listing, flags=re.MULTILINE))


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
    from workbench.home import cache_home

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
    return sorted(path for path in folder.glob("*.json") if path.stem.isdigit())


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
    return all(name in fields and isinstance(fields[name], kind) for name, kind in types.items())
