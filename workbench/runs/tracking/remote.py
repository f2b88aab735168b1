"""Runs of colleagues, copied from Weights & Biases into a run directory and then read like any other run.

A run that Workbench recorded has experiment, plan and environment; any other W&B run has its curve and its config.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.columns import COLUMNS, NAME
from workbench.errors import RunNotFound, WorkbenchError, first_line
from workbench.home import cache_home
from workbench.rundir import RunDir, append_event, event_line, write_json, write_record

ANSWER_LIMIT_S = 60
_STATES = {"finished": "finished", "running": "running", "pending": "queued", "killed": "stopped"}
_ADDRESS = re.compile(r"wandb:/*(?:([\w.-]+)/)?([\w.-]+)/(?:runs/)?([\w.-]+)")


def download_run(address: str) -> Path:
    """Copy the run at `wandb:entity/project/id`, as W&B has it now, into a run directory, and return its path.

    The entity may be left out for the user's own runs. The copy can be read and compared; it has no process here, so it
    cannot be stopped or continued. Raises `RunNotFound` if there is no such run, `WorkbenchError` if the server does
    not answer.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise RunNotFound(f"{address!r} is not an address on W&B. Write wandb:entity/project/id.")
    entity, project, identity = match.groups()
    path = "/".join(part for part in (entity, project, identity) if part)
    remote, rows = _fetch(path)
    run = RunDir(cache_home() / "wandb" / str(remote.entity) / project / identity)
    _write(run, remote, rows)
    return run.path


def _fetch(path: str) -> tuple[Any, list[dict[str, Any]]]:
    import wandb

    try:
        remote = wandb.Api(timeout=ANSWER_LIMIT_S).run(path)
        return remote, list(remote.scan_history(use_cache=False))
    except Exception as error:  # CommError, UsageError, AuthenticationError, RunNotFoundError, …
        reason = first_line(error)
        if "ould not find run" in reason:
            raise RunNotFound(f"W&B has no run {path}, or you may not see it. {reason}.") from None
        raise WorkbenchError(
            f"W&B gave no answer for {path}: {reason}. Check the network, `wandb login` and WANDB_BASE_URL."
        ) from None


def _write(run: RunDir, remote: Any, rows: list[dict[str, Any]]) -> None:
    config = json.loads(json.dumps(dict(remote.config), default=str))  # the client answers with types of its own
    plan, environment = config.pop("plan", None), config.pop("environment", None)
    steps = [_step(row) for row in rows]
    last = max((step["step"] for step in steps), default=0)
    write_json(run.remote, {"url": str(remote.url)})
    write_record(run.experiment, {"steps": last, **config, "name": str(remote.display_name or remote.id)})
    if isinstance(plan, Mapping) and "stages" in plan:
        write_record(run.plan, {**plan, "candidates": []})
    write_record(run.environment, environment if isinstance(environment, Mapping) else {})
    degrees = ("pipeline", "data", "tensor")
    is_planned = isinstance(plan, Mapping) and all(degree in plan for degree in degrees)
    devices = math.prod(int(plan[degree]) for degree in degrees) if is_planned else 1
    _write_events(run, remote, steps, devices=devices)


def _write_events(run: RunDir, remote: Any, steps: list[dict[str, Any]], devices: int) -> None:
    """Replace the events as a whole, so that a reader sees the old curve or the new one."""
    part = run.events.with_suffix(".part")
    part.unlink(missing_ok=True)
    begun = [step["time"] for step in steps if step.get("time")]
    append_event(part, "status", state="starting", message="", **({"time": begun[0]} if begun else {}))
    append_event(part, "start", devices=devices, resumed_from=None)
    with part.open("ab") as file:
        file.writelines(event_line("step", **step) for step in steps)
    append_event(part, "status", state=_STATES.get(remote.state, "failed"), message=f"On W&B: {remote.state}.")
    part.replace(run.events)


def _step(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of W&B as a step event, with the nearest names of W&B where Workbench did not write the row."""
    metrics = {key: _number(value) for key, value in row.items() if not key.startswith("_")}
    renamed = {
        name: next((_number(row[key]) for key in column.wandb if key in row), None)
        for name, column in COLUMNS.items()
        if column.wandb
    }
    other = {key: value for key, value in metrics.items() if NAME.fullmatch(key) and key not in COLUMNS}
    scalars = {"scalars": other} if any(value is not None for value in other.values()) else {}
    return {**metrics, **renamed, **scalars, "step": int(row["_step"]), "time": row.get("_timestamp")}


def _number(value: Any) -> float | None:
    """Return a number, also from the words that W&B writes for what JSON cannot hold: `"NaN"`, `"Infinity"`."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
