"""`Experiment`: the model, the data and the optimisation of one training, as one frozen value.

An `Experiment` says nothing about devices; `wb.plan` and `wb.launch` add those.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from workbench import data as _data
from workbench import models as _models
from workbench.data import DataSource
from workbench.errors import InvalidExperiment, UnknownParameter, checked_keywords, suggestion
from workbench.models import ModelSource

PRECISIONS = ("auto", "fp32", "bf16")
LR_SCHEDULES = ("linear", "cosine", "constant")
_MINIMA: Mapping[str, int | None] = {
    **dict.fromkeys(("steps", "global_batch", "seq_len", "log_every", "checkpoint_every", "keep_checkpoints"), 1),
    **dict.fromkeys(("warmup_steps", "seed", "weight_decay"), 0),
    **dict.fromkeys(("learning_rate", "eps", "clip_norm")),
}
"""Smallest value of each number; None if it must be greater than 0."""
_REAL = ("learning_rate", "eps", "clip_norm", "weight_decay")
"""Numbers that need not be whole."""
_OPTIONAL = ("checkpoint_every", "warmup_steps", "clip_norm")
"""Numbers that may be None."""


@dataclass(frozen=True)
class Experiment:
    """A model, its data, and the optimisation that trains the one on the other.

    `model` is one of `wb.models.…`, or any callable that returns an `nn.Module`; `data` is one of `wb.data.…`, a
    map-style dataset whose items are dicts of tensors, or a callable that returns one. Callables and datasets become
    a `CustomModel` and a `CustomData`. The model must return its loss: as `.loss`, `["loss"]`, the first item of a
    tuple, or a scalar.

    One *step* consumes `global_batch` samples (sequences of `seq_len` tokens for text) over all devices, however a
    plan divides them. Losses are means over the whole global batch, so that curves do not depend on the plan.

    Raises `InvalidExperiment` for values that can never train, before anything is computed.
    """

    model: ModelSource
    data: DataSource
    steps: int = 1000
    global_batch: int = 64
    seq_len: int = 128
    """Tokens per sample. A custom dataset decides the length itself: give its length here, since it counts tokens."""
    learning_rate: float = 1e-4
    warmup_steps: int | None = None
    """Steps of linear warm-up from 0; `None` takes a tenth of `steps`."""
    lr_schedule: str = "linear"
    """Decay after the warm-up, to zero at `steps`: `linear`, `cosine`, or `constant`."""
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-8
    weight_decay: float = 0.01
    """Weight decay of AdamW; not applied to biases and normalisation weights (tensors of fewer than two dims)."""
    clip_norm: float | None = 1.0
    """Limit of the gradient's global norm over all parameters, each tied parameter once; `None` clips nothing."""
    precision: str = "auto"
    """`fp32`, `bf16` (autocast over fp32 weights), or `auto`: bf16 on GPUs, fp32 on CPUs."""
    compile: bool | None = None
    """Compile each block type once with `torch.compile`; `None` does so on GPUs only."""
    seed: int = 0
    deterministic: bool = False
    """Use only kernels that give the same bits every time, so that a resumed run on GPUs repeats the curve of an
    unbroken one exactly. Usually slower; an operation without such a kernel ends the run. CPUs do not need it."""
    log_every: int = 1
    checkpoint_every: int | None = None
    """Steps between checkpoints; `None` writes only one, at the end or when the run is stopped."""
    keep_checkpoints: int = 3
    """Number of complete checkpoints to keep; older ones are deleted as new ones are written."""
    stop_on_non_finite: bool = True
    """End the run as failed at the first step whose loss or gradient norm is NaN or infinite, before a checkpoint of
    its weights is written. False trains on."""
    name: str | None = None
    tags: tuple[str, ...] = ()
    project: str = "workbench"
    """Weights & Biases project that tracks the run."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", _models.as_model(self.model))
        object.__setattr__(self, "data", _data.as_data(self.data))
        _require_pair_below_one("betas", self.betas)
        object.__setattr__(self, "betas", tuple(self.betas))
        object.__setattr__(self, "tags", tuple(self.tags))
        if self.name is None:
            object.__setattr__(self, "name", self.model.name)
        for field, least in _MINIMA.items():
            _require_number(field, getattr(self, field), least)
        for field in ("deterministic", "stop_on_non_finite"):
            _require_bool(field, getattr(self, field))
        _require_known("precision", self.precision, PRECISIONS)
        _require_known("lr_schedule", self.lr_schedule, LR_SCHEDULES)
        if self.warmup_steps is not None and not 0 <= self.warmup_steps <= self.steps:
            raise InvalidExperiment(
                f"warmup_steps={self.warmup_steps} lies outside the {self.steps} steps of the experiment. "
                f"Choose 0 to {self.steps}, or None for a tenth.",
                warmup_steps=self.warmup_steps,
                steps=self.steps,
            )
        limit = self.model.max_positions
        if limit is not None and self.seq_len > limit:
            raise InvalidExperiment(
                f"seq_len={self.seq_len} is longer than the {limit} positions of {self.model.name}. "
                f"Shorten it to at most {limit}, or build the model with max_positions={self.seq_len}.",
                seq_len=self.seq_len,
                max_positions=limit,
            )

    @property
    def warmup(self) -> int:
        """Steps of warm-up, with the default resolved."""
        return self.steps // 10 if self.warmup_steps is None else self.warmup_steps

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.seq_len

    def replace(self, **changes: Any) -> Experiment:
        """Return this experiment with some fields changed; a changed model renames it unless `name` is given."""
        known = {f.name for f in dataclasses.fields(self)}
        for word in changes:
            if word not in known:
                raise UnknownParameter(
                    f"Experiment has no parameter {word!r}. {suggestion(word, known)}", parameter=word
                )
        if "model" in changes and "name" not in changes and self.name == self.model.name:
            changes["name"] = None
        return dataclasses.replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """Return a description that a person can read and from which `from_json` rebuilds the experiment.

        The user's callables and datasets are described by name and source only: the objects themselves travel to
        the workers in `code/` of the run directory.
        """
        value = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        value["model"] = self.model.to_json()
        value["data"] = self.data.to_json()
        value["betas"], value["tags"] = list(self.betas), list(self.tags)
        return value

    @staticmethod
    def from_json(value: Mapping[str, Any], *, model: Callable[[], Any] | None = None, data: Any = None) -> Experiment:
        """Rebuild an experiment; `model` and `data` supply the user's own objects, which the JSON only names."""
        fields = dict(value)
        fields["model"] = _models.from_json(fields["model"], factory=model)
        fields["data"] = _data.from_json(fields["data"], dataset=data)
        fields["betas"], fields["tags"] = tuple(fields["betas"]), tuple(fields["tags"])
        return Experiment(**fields)


def _require_number(name: str, value: Any, least: int | None) -> None:
    if value is None and name in _OPTIONAL:
        return
    number: type = Real if name in _REAL else Integral
    described = "a number" if name in _REAL else "a whole number"
    if not isinstance(value, number) or isinstance(value, bool):
        raise InvalidExperiment(f"{name}={value!r} is not {described}. Give {described}.", parameter=name, value=value)
    if least is None and not value > 0:  # type: ignore[operator]
        raise InvalidExperiment(f"{name}={value!r} must be greater than 0.", parameter=name, value=value)
    if least is not None and not value >= least:  # type: ignore[operator]
        raise InvalidExperiment(f"{name}={value!r} must be {least} or more.", parameter=name, value=value)


def _require_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise InvalidExperiment(f"{name}={value!r} is neither True nor False. Give one of them.", parameter=name)


def _require_pair_below_one(name: str, value: Any) -> None:
    if not isinstance(value, (tuple, list)) or len(value) != 2 or not all(isinstance(v, Real) for v in value):
        raise InvalidExperiment(f"{name}={value!r} is not two numbers. Give two, such as (0.9, 0.98).", value=value)
    if not all(0 <= v < 1 for v in value):
        raise InvalidExperiment(f"{name}={value!r} must each be at least 0 and below 1.", value=value)


def _require_known(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise InvalidExperiment(f"{name}={value!r} is not one of the choices. {suggestion(value, known)}", value=value)


Experiment.__init__ = checked_keywords(Experiment.__init__)  # type: ignore[method-assign]
