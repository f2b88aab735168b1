"""Checkpoints under the model's own parameter names, whatever the plan (`torch.distributed.checkpoint`).

Keys: `model.<parameter or buffer>` and `optim.<parameter>.<state>`. A tied parameter is stored once. The file
`complete.json` is written last: a checkpoint without it is not one.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from workbench.errors import CheckpointError
from workbench.execution.trainer import Trainer
from workbench.rundir import RunDir, read_json, write_json

COMPLETE = "complete.json"


@dataclass(frozen=True)
class Progress:
    """Where a checkpoint stands: completed steps and training time."""

    step: int
    seconds: float


def save(trainer: Trainer, run: RunDir, progress: Progress) -> Path:
    """Write this rank's part; every rank must call it. Returns the checkpoint's directory."""
    path = run.checkpoint(progress.step)
    if dist.get_rank() == 0 and path.exists():
        shutil.rmtree(path)
    dist.barrier()
    dcp_save(state(trainer), checkpoint_id=path)
    if dist.get_rank() == 0:
        facts = {"step": progress.step, "seconds": progress.seconds, "signature": trainer.plan.signature}
        write_json(path / COMPLETE, facts)
    dist.barrier()
    return path


def load(trainer: Trainer, path: Path) -> Progress:
    """Read this rank's part, saved under this or another plan of the same model."""
    if not (path / COMPLETE).exists():
        raise CheckpointError(
            f"{path} is not a complete checkpoint: {COMPLETE} is missing, so its writing was interrupted. "
            f"Resume from an earlier one.",
            path=str(path),
        )
    facts = read_json(path / COMPLETE)
    if facts["signature"] != trainer.plan.signature:
        raise CheckpointError(
            f"{path} was saved from a model of other parameters (signature {facts['signature']}, this model has "
            f"{trainer.plan.signature}). Resume with the experiment that wrote it.",
            path=str(path),
        )
    _materialise(trainer.optimizer)
    values = state(trainer)
    dcp_load(values, checkpoint_id=path)
    return Progress(int(facts["step"]), float(facts["seconds"]))


def state(trainer: Trainer) -> dict[str, Any]:
    """Names -> live tensors of this rank's stage; loading into them restores the trainer in place."""
    named = trainer.stage.named()
    names = {id(parameter): name for name, parameter in named.items()}
    found: dict[str, Any] = {f"model.{name}": parameter.detach() for name, parameter in named.items()}
    found |= {
        f"model.{name}": buffer
        for name, buffer in trainer.stage.named_state().items()
        if not name.startswith("_constant.")
    }
    for parameter, slots in trainer.optimizer.state.items():
        for slot, value in slots.items():
            found[f"optim.{names[id(parameter)]}.{slot}"] = value
    return found


def _materialise(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter its moments, without moving any weight, so that there is something to load into."""
    saved = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = 0.0, 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, (rate, decay) in zip(optimizer.param_groups, saved, strict=True):
        group["lr"], group["weight_decay"] = rate, decay
