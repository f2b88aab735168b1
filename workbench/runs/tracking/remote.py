"""A colleague's run, out of Weights & Biases: copied once into a run directory, then read like one's own.

Written by Workbench, it brings experiment, plan and environment; any other W&B run brings its curve and its config.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from workbench.errors import RunNotFound, WorkbenchError
from workbench.home import cache_home
from workbench.rundir import RunDir, append_event, write_json
from workbench.runs.run import Run

LOSSES = ("loss", "train/loss", "train_loss", "training_loss")
ANSWER_LIMIT_S = 60
_STATES = {"finished": "finished", "running": "running", "pending": "queued", "killed": "stopped"}
_ADDRESS = re.compile(r"wandb:/*(?:([\w.-]+)/)?([\w.-]+)/(?:runs/)?([\w.-]+)")


def load_remote(address: str) -> Run:
    """The run at `wandb:entity/project/id`, as W&B has it now; the entity may be left out for one's own.

    It can be read and compared; no process of it is here, so that it cannot be stopped or continued.
    Raises `RunNotFound` if there is none, `WorkbenchError` if the server does not answer.
    """
    entity, project, identity = _parse(address)
    path = "/".join(part for part in (entity, project, identity) if part)
    remote, rows = _fetch(path)
    run = RunDir(cache_home() / "wandb" / str(remote.entity) / project / identity)
    _write(run, remote, rows)
    return Run(run.path)


def _parse(address: str) -> tuple[str | None, str, str]:
    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise RunNotFound(f"{address!r} is not an address on W&B. Write wandb:entity/project/id.", run=address)
    return match[1], match[2], match[3]


def _fetch(path: str) -> tuple[Any, list[dict[str, Any]]]:
    import wandb

    try:
        remote = wandb.Api(timeout=ANSWER_LIMIT_S).run(path)
        return remote, list(remote.scan_history(use_cache=False))
    except Exception as error:  # CommError, UsageError, AuthenticationError, RunNotFoundError, …
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        if "ould not find run" in reason:
            raise RunNotFound(f"W&B has no run {path}, or you may not see it. {reason}.", run=path) from None
        raise WorkbenchError(
            f"W&B gave no answer for {path}: {reason}. Check the network, `wandb login` and WANDB_BASE_URL.", run=path
        ) from None


def _write(run: RunDir, remote: Any, rows: list[dict[str, Any]]) -> None:
    config = _plain(dict(remote.config))
    plan, environment = config.pop("plan", None), config.pop("environment", None)
    steps = [_step(row) for row in rows]
    last = max((step["step"] for step in steps), default=0)
    write_json(run.remote, {"url": str(remote.url)})
    write_json(run.experiment, {"steps": last, **config, "name": str(remote.display_name or remote.id)})
    if isinstance(plan, Mapping) and "stages" in plan:
        write_json(run.plan, {**plan, "candidates": []})
    write_json(run.environment, environment if isinstance(environment, Mapping) else {})
    _write_events(run, remote, steps, devices=_devices(plan))


def _devices(plan: Any) -> int:
    degrees = ("pipeline", "data", "tensor")
    known = isinstance(plan, Mapping) and all(degree in plan for degree in degrees)
    return math.prod(int(plan[degree]) for degree in degrees) if known else 1


def _write_events(run: RunDir, remote: Any, steps: list[dict[str, Any]], devices: int) -> None:
    """Replaced as a whole: a reader sees the old curve or the new one."""
    part = run.events.with_suffix(".part")
    part.unlink(missing_ok=True)
    begun = [step["time"] for step in steps if step.get("time")]
    append_event(part, "status", state="starting", message="", **({"time": begun[0]} if begun else {}))
    append_event(part, "start", devices=devices, resumed_from=None)
    with part.open("a") as file:
        file.writelines(json.dumps({"type": "step", **step}) + "\n" for step in steps)
    append_event(part, "status", state=_STATES.get(remote.state, "failed"), message=f"On W&B: {remote.state}.")
    part.replace(run.events)


def _step(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of W&B as a step event: its own names where Workbench wrote them, else W&B's nearest."""
    metrics = {key: _number(value) for key, value in row.items() if not key.startswith("_")}
    loss = next((metrics[name] for name in LOSSES if name in metrics), None)
    seconds = metrics.get("seconds", _number(row.get("_runtime")))
    return {**metrics, "step": int(row["_step"]), "time": row.get("_timestamp"), "loss": loss, "seconds": seconds}


def _number(value: Any) -> float | None:
    """W&B writes what JSON cannot hold as words: `"NaN"`, `"Infinity"`."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _plain(value: Any) -> Any:
    """The client's config as JSON: it answers with types of its own."""
    return json.loads(json.dumps(value, default=str))
