"""The inputs of every optimiser: parameter groups, the rate of each step, and this rank's shards of tensors.

Optimisers that need whole tensors reach them through two protocols, which the ranks of a training implement: sums over
the shards of a tensor (`WholeTensors`), and the way of a matrix to the rank that owns it (`MatrixExchange`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from workbench.base.validation import factor_of
from workbench.experiment import Experiment
from workbench.sparsity.kernels.index import BlockIndex

# Parameter groups: which parameters decay, and the rate, decay and epsilon that patterns of names give them.

Group = dict[str, Any]
DECAYED_DIMS = 2
"""Least number of dims of a tensor that weight decay applies to."""


def parameter_groups(
    parameters: Mapping[str, nn.Parameter], experiment: Experiment, orthogonal: Collection[str] = ()
) -> list[Group]:
    """Divide the trainable parameters by decay, rate, epsilon, and by whether updates are orthogonalised.

    A group has the entries `params`, `names`, `lr`, `weight_decay` and `orthogonal`, which is True for the parameters
    that `orthogonal` names, and `eps` if the experiment scales it. Tensors of fewer than two dims do not decay. The
    rate of parameters that AdamW updates beside Muon is the experiment's `adamw_rate`.
    """
    chosen = experiment.optimizer
    of_others = chosen.adamw_rate or experiment.learning_rate
    groups: dict[tuple[float, ...], Group] = {}
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            continue
        decays = parameter.ndim >= DECAYED_DIMS
        rate, decay, eps = (
            factor_of(name, scale or {}) for scale in (chosen.rate_scale, chosen.decay_scale, chosen.eps_scale)
        )
        group = groups.setdefault(
            (not decays, rate, decay if decays else 1.0, eps, name in orthogonal),
            {
                "params": [],
                "names": [],
                "lr": rate * (experiment.learning_rate if name in orthogonal else of_others),
                "weight_decay": chosen.weight_decay * decay if decays else 0.0,
                "orthogonal": name in orthogonal,
                **({"eps": chosen.eps * eps} if chosen.eps_scale else {}),
            },
        )
        group["params"].append(parameter)
        group["names"].append(name)
    return [groups[key] for key in sorted(groups)]


# Learning-rate schedules: the multiple of the peak rate at each step.

DECAY_SHARE = 0.2
"""Last fraction of the steps in which `wsd` decays to 0, the share that Hägele et al. recommend (arXiv:2405.18392)."""


def learning_rate_factor(step: int, warmup: int, steps: int, schedule: str | Callable[[int], float]) -> float:
    """Return the multiple of the peak learning rate for the update after `step` completed steps.

    A linear warm-up reaches 1 at update `warmup`. Then the schedule decays to 0 at `steps` (`linear`, `cosine`), stays
    (`constant`), stays and decays linearly in the last fifth of the steps (`wsd`: warm-up, stable, decay,
    arXiv:2404.06395), or falls with the square root of the step (`inverse_sqrt`, arXiv:1706.03762). A user-defined
    function gives the factor of every step, and there is no warm-up.
    """
    if not isinstance(schedule, str):
        return float(schedule(step))
    if step < warmup:
        return (step + 1) / warmup
    if schedule == "constant":
        return 1.0
    if schedule == "inverse_sqrt":
        return math.sqrt(max(1, warmup) / (step + 1))
    if schedule == "wsd":
        decay = max(1, round(DECAY_SHARE * steps))
        return min(1.0, max(0, steps - step) / decay)
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return 0.5 * (1 + math.cos(math.pi * progress)) if schedule == "cosine" else 1 - progress


def rate_factor(experiment: Experiment, step: int) -> float:
    """Return the multiple of the experiment's peak rates for the update after `step` completed steps."""
    schedule = experiment.optimizer.lr_schedule
    return learning_rate_factor(step, experiment.warmup, experiment.schedule_steps, schedule)


LARGEST_LEAP = 0.1
"""Relative change of the rate from one step to the next that a longer schedule makes and nobody is told of."""


def leap_of_rate(launched: Experiment, resumed: Experiment, step: int) -> str:
    """Return a sentence with both rates if a training that is resumed at a step has another rate there than before.

    The rates are those of the step in both schedules, or of the last step where the old schedule ends there. The
    sentence is empty where they differ by no more than `LARGEST_LEAP`.
    """
    if not isinstance(launched.optimizer.lr_schedule, str) or not 0 < step < resumed.total_steps:
        return ""  # a function of the step alone, or no step that follows another
    has_ended = step >= launched.schedule_steps
    before = launched.learning_rate * rate_factor(launched, step - has_ended)
    after = resumed.learning_rate * rate_factor(resumed, step)
    if math.isclose(before, after, rel_tol=LARGEST_LEAP):
        return ""
    lengths = f"{resumed.schedule_steps:,} steps instead of {launched.schedule_steps:,}"
    was = f"after {before:.3g}" if has_ended else f"and not {before:.3g}"
    return (
        f"The {launched.optimizer.lr_schedule} schedule of {launched.name} is now laid over {lengths}, so that the "
        f"rate leaps: it is {after:.3g} at step {step + 1:,}, {was}. To go on without a leap, launch a run with "
        f"wb.Optimizer(schedule_steps={resumed.total_steps}), and resume that."
    )


# Shards of tensors, and what needs them whole.


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a distributed tensor, or a plain tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the host's memory on a device; the host does not wait for the device."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def momentum_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> torch.Tensor:
    """Return the momentum of a parameter, which begins at zero, sharded as the parameter is."""
    state: dict[str, torch.Tensor] = optimizer.state[parameter]
    if not state:
        state["momentum_buffer"] = torch.zeros_like(parameter)
    return state["momentum_buffer"]


class WholeTensors(Protocol):
    """Access to the whole tensors of which this rank holds shards, or only the blocks that exist."""

    indices: Mapping[str, BlockIndex]
    """Index of each parameter that is stored without absent blocks, by name."""

    def summed(self, names: Sequence[str], parameters: Sequence[nn.Parameter], shares: torch.Tensor) -> torch.Tensor:
        """Return `shares` (…, one column for each parameter), each summed over the shards of its parameter."""

    def all_gathered(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the whole of a tensor that is stored like the parameter `name`."""

    def as_stored(self, name: str, whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return what this rank stores of a whole tensor, as a plain tensor; `like` is sharded as the result is."""


Owned = Sequence[Sequence[str]]
"""Names of the matrices that each rank owns, by rank."""


Arriving = Callable[[], dict[str, torch.Tensor]]
"""Waits for a collective, and returns what it brought by name of the matrix."""


class MatrixExchange(Protocol):
    """The ways of matrices from the ranks that hold their shards to their owners, and back.

    All ranks must call `to_owners` and `from_owners` in the same order.
    """

    ranks: int
    rank: int

    def whole_shape(self, name: str, parameter: nn.Parameter) -> torch.Size:
        """Return the shape of the whole of a matrix."""

    def is_source(self, name: str, owner: int) -> bool:
        """Return True if the owner takes this rank's shard of a matrix, and not an equal one of another rank."""

    def to_owners(self, owned: Owned, shards: Mapping[str, torch.Tensor]) -> Arriving:
        """Send this rank's shards, of the matrices it is a source of; whole matrices arrive at their owners."""

    def from_owners(self, owned: Owned, whole: Mapping[str, torch.Tensor]) -> Arriving:
        """Send the matrices that this rank owns; this rank's shards of all owned matrices arrive."""


class OneRank:
    """The exchange of a rank that owns all matrices, and holds them whole."""

    ranks, rank = 1, 0

    def whole_shape(self, name: str, parameter: nn.Parameter) -> torch.Size:  # noqa: ARG002
        return parameter.shape

    def is_source(self, name: str, owner: int) -> bool:  # noqa: ARG002
        return True

    def to_owners(self, owned: Owned, shards: Mapping[str, torch.Tensor]) -> Arriving:  # noqa: ARG002
        return lambda: dict(shards)

    from_owners = to_owners
