"""The columns of a logged step: one row each, from which log, history, curves, panels, axes and W&B names derive.

To add a column, add one row to `COLUMNS`. The log writes it into each `step` event, `run.history()` reads it as a NumPy
column, `y=` draws it, a `Panel` shows it beside the loss, an `Axis` makes it a choice of `x=`, and no metric of an
experiment may have its name.

A model, its loss function and callbacks add columns of their own to a run by `log_scalar`.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from workbench.base.errors import InvalidExperiment, suggestion
from workbench.base.units import COUNTS, DEVICE_TIME, FLOPS, TIME, Unit, duration, many, quantity


@dataclass(frozen=True)
class FinishedStep:
    """The facts of a finished step that rank 0 computes its columns from."""

    step: int
    """Number of the step, from 1."""
    loss: float
    """Loss over the global batch."""
    grad_norm: float
    """Norm of its gradient before clipping."""
    learning_rate: float
    step_s: float
    waited_s: float | None
    """Seconds of `step_s` before the step's batch was there."""
    seconds: float
    """Training time up to the end of the step."""
    tokens_per_sample: int
    samples_per_step: int
    """Samples of this step."""
    samples: int
    """Samples since the start of training."""
    flops_per_step: float
    """The model's FLOPs of this step."""
    flops: float
    """The model's FLOPs since the start of training."""
    peak_flops: float | None
    """Peak of all devices in FLOP/s; None where it is unknown."""
    scalars: Mapping[str, float] = field(default_factory=dict)
    """Figures of the scalars that the run logs, by name (`log_scalar`)."""
    spikes: int | None = None
    """Loss spikes so far; None without a rule for them."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A small multiple beside the loss."""

    title: str = ""
    """Title of the panel, with the unit; empty for the column's own label."""
    scale: float = 1.0
    """Factor by which the column is multiplied before it is drawn."""
    tick_format: str | None = None
    logarithmic: bool = False
    least: float | None = None
    """Smallest mean, over the steps after the first, for which there is a panel; None always shows a known column."""


class AxisUnit(NamedTuple):
    """One unit of an axis: a tick of 1 stands for `scale` in the recorded column; `title` is the axis title."""

    scale: float
    title: str


def titled(units: Sequence[Unit], title: str, name: Callable[[Unit], str]) -> tuple[AxisUnit, ...]:
    """Return the units of an axis: its title, and the name of the unit behind it where it has one."""
    return tuple(AxisUnit(unit.factor, f"{title} ({name(unit)})" if name(unit) else title) for unit in units)


def power_of_ten(unit: Unit) -> str:
    """Return the factor of a unit as it stands in print: `10¹⁵`."""
    return "10" + str(round(math.log10(unit.factor))).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))


@dataclass(frozen=True)
class Axis:
    """One measure of the progress of a training run."""

    column: str
    """Name of the column that holds the axis' values; it must rise with the step."""
    label: str
    """Name in menus and sentences."""
    units: tuple[tuple[float, str], ...]
    """Scale and title of each `AxisUnit`, from large to small."""
    describe: Callable[[float], str]
    """Function that writes one recorded value for people, such as `30.1 M tokens`."""
    name: str = ""
    """Name that `x=` takes; empty for the column's."""
    least: float = 1.0
    """Number of a unit from which an axis that ends there is in it, and not in a smaller one."""

    def unit(self, largest: float) -> AxisUnit:
        """Return the unit of an axis whose largest value is `largest` in the recorded column."""
        units = [AxisUnit(*unit) for unit in self.units]
        return next((unit for unit in units if largest >= self.least * unit.scale), units[-1])


@dataclass(frozen=True, kw_only=True)
class Column:
    """One figure of a logged step, a float64 in a history; NaN where it is unknown.

    `value` says how it is logged; a column without it is added by the writer of events (`time`) or computed by the
    reader (`is_derived`).
    """

    words: str
    """Description for people, with the unit."""
    label: str = ""
    """Title of the y axis of its curve, with the unit; empty for a column that is no curve by itself."""
    value: Callable[[FinishedStep], float | None] | None = None
    """Function that computes it on rank 0."""
    is_derived: bool = False
    """True for a column that no event holds."""
    is_whole: bool = False
    """True for a count, which events hold as an integer."""
    is_exact: bool = False
    """True for what is set or counted and has no noise: its curve is not smoothed, which would round its corners."""
    panel: Panel | None = None
    axis: Axis | None = None
    """The x axis whose values it holds."""
    wandb: tuple[str, ...] = ()
    """Names on W&B: the first one is written, all are read in a run that another program logged; empty for the column's
    own name."""


COLUMNS: dict[str, Column] = {
    "step": Column(
        words="number of the step, from 1",
        is_whole=True,
        value=lambda step: step.step,
        axis=Axis("step", "step", ((1.0, "Step"),), lambda value: many(value, "step")),
    ),
    "loss": Column(
        words="loss over the global batch",
        label="Loss",
        value=lambda step: step.loss,
        wandb=("loss", "train/loss", "train_loss", "training_loss"),
    ),
    "step_ms": Column(
        words="time of the step in ms",
        label="Step time (ms)",
        value=lambda step: step.step_s * 1e3,
    ),
    "tokens_per_s": Column(
        words="tokens per second, over all devices",
        label="Tokens/s",
        value=lambda step: step.samples_per_step * step.tokens_per_sample / step.step_s,
        panel=Panel(tick_format="~s"),
    ),
    "mfu": Column(
        words="model FLOPs utilisation from 0 to 1: the model's FLOP/s over the peak of all devices",
        label="MFU",
        value=lambda step: step.flops_per_step / step.step_s / step.peak_flops if step.peak_flops else None,
        panel=Panel(title="MFU (%)", scale=100.0),
    ),
    "data_wait": Column(
        words="share of the step's time, from 0 to 1, in which the device of rank 0 waited for its batch",
        label="Share of the time waiting for data",
        value=lambda step: None if step.waited_s is None else max(0.0, step.waited_s) / step.step_s,
        panel=Panel(title="Waiting for data (%)", scale=100.0, least=0.02),
    ),
    "grad_norm": Column(
        words="norm of the gradient before clipping",
        label="Gradient norm",
        value=lambda step: step.grad_norm,
        panel=Panel(tick_format=",~g", logarithmic=True),
    ),
    "spikes": Column(
        words="loss spikes so far",
        is_whole=True,
        is_exact=True,
        label="Loss spikes",
        value=lambda step: step.spikes,
        panel=Panel(least=1e-9),
    ),
    "learning_rate": Column(
        words="learning rate",
        label="Learning rate",
        is_exact=True,
        value=lambda step: step.learning_rate,
        panel=Panel(),
    ),
    "tokens": Column(
        words="tokens since the start of training",
        is_whole=True,
        value=lambda step: step.samples * step.tokens_per_sample,
        axis=Axis(
            "tokens",
            "tokens",
            titled(COUNTS, "Tokens", lambda unit: unit.name),
            lambda value: many(value, "token"),
        ),
    ),
    "samples": Column(
        words="samples since the start of training",
        is_whole=True,
        value=lambda step: step.samples,
        axis=Axis(
            "samples",
            "samples",
            titled(COUNTS, "Samples", lambda unit: unit.name),
            lambda value: many(value, "sample"),
        ),
    ),
    "seconds": Column(
        words="training time in s, without start-up, evaluations and the pause before a resumption",
        value=lambda step: step.seconds,
        axis=Axis(
            "seconds",
            "time",
            titled(TIME, "Training time", lambda unit: unit.name),
            duration,
            name="time",
            least=2.0,
        ),
        wandb=("seconds", "_runtime"),
    ),
    "flops": Column(
        words="the model's FLOPs since the start of training",
        value=lambda step: step.flops,
        axis=Axis(
            "flops",
            "FLOPs",
            titled(FLOPS, "Model FLOPs", lambda unit: f"{unit.name}, {power_of_ten(unit)}"),
            lambda value: f"{value:.3g} FLOPs",
        ),
    ),
    "gpu_hours": Column(
        words="training time multiplied by the number of devices, in hours",
        is_derived=True,
        axis=Axis(
            "gpu_hours",
            "device-hours",
            tuple(AxisUnit(unit.factor, unit.name.capitalize()) for unit in DEVICE_TIME),
            lambda value: quantity(value, DEVICE_TIME, 0.1),
        ),
    ),
    "time": Column(words="time at which the step was logged, in Unix seconds"),
}
"""The columns of a history by name, in the order of panels and of the menu of axes."""

NORMS = {"weights": "weight", "gradients": "gradient", "updates": "update"}
"""Tables that `wb.Tracking(norms_every=…)` records by parameter, and the word for one item of each."""

EVALUATION_LABELS = {"eval_loss": "Held-out loss", "perplexity": "Held-out perplexity"}
"""Columns with one value per evaluation instead of one per step, and the titles of their y axes; the metrics of
experiments are such too."""


def logged_columns(step: FinishedStep) -> dict[str, Any]:
    """Return the figures of a step as its event holds them; those of the run's own are in `scalars`."""
    figures = {name: column.value(step) for name, column in COLUMNS.items() if column.value is not None}
    return figures | ({"scalars": dict(step.scalars)} if step.scalars else {})


def wandb_name(name: str) -> str:
    """Return the name that a field of a step has on W&B."""
    return COLUMNS[name].wandb[0] if name in COLUMNS and COLUMNS[name].wandb else name


# Scalars of the user's own

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
"""Names that metrics and scalars may have."""
REDUCTIONS = ("mean", "sum", "max", "min", "last")
"""Choices of `log_scalar(reduce=…)`."""
WEIGHTED, WEIGHTS = "weighted sum", "sum of weights"
"""Reductions of the two sums whose quotient a mean with weights is."""


def reserved_names() -> tuple[str, ...]:
    """Return the names of columns and panels, which neither metrics nor scalars may have."""
    return tuple(sorted({*COLUMNS, *EVALUATION_LABELS, "eval_seconds", "utilization", "memory"}))


@dataclass(frozen=True)
class LoggedScalar:
    """A scalar that user-defined code has logged."""

    name: str
    reduce: str
    value: Any
    """A tensor without dims, or a float."""


_LOGGED: ContextVar[list[LoggedScalar] | None] = ContextVar("scalars that are logged", default=None)


def log_scalar(name: str, value: Any, reduce: str = "mean", weight: Any = None) -> None:
    """Log a number of this step under a name, from a model's forward, its loss function or a callback.

    The run then has a column of this name: `run.history()[name]`, `y=name` in figures, a panel and a metric on W&B.
    Where no run trains (in a notebook cell, in evaluations), the arguments are checked and nothing is logged.

    A model computes the value once for each micro-batch. Those of a step are reduced over its micro-batches, replicas
    and stages, and over calls with the same name. A recomputation of activations does not count again. In a callback,
    the value of rank 0 is logged as it is.

    A `mean` weights each micro-batch by `weight`. Without one it weights a value that is computed from a mean loss by
    the labels of that, a quotient whose divisor is made of the batch alone (`right.sum() / mask.sum()`) by its divisor,
    and other values equally, which is by samples.

    >>> def forward(self, input_ids, labels):
    ...     logits = self.layers(input_ids)
    ...     wb.log_scalar("largest_logit", logits.max(), reduce="max")
    ...     return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    Args:
        name: a word of letters, digits, `-` and `_` that no recorded column has.
        value: a tensor without dims or a number. No gradient flows through it.
        reduce: `mean`, `sum`, `max`, `min`, or `last` for that of the last micro-batch of the last replica.
        weight: what a mean weights the value by, such as the number of tokens that it is the mean of: a tensor without
            dims or a number of at least 0. A value whose weight is 0 does not count.

    Raises:
        InvalidExperiment: the name is reserved or no word, the value or the weight has dims, or there is no such
            reduction, or one that takes no weight.
    """
    if not isinstance(name, str) or not NAME.fullmatch(name) or name in reserved_names():
        raise InvalidExperiment(
            f"{name!r} cannot be the name of a scalar. Choose a word of letters, digits, '-' and '_' that no recorded "
            f"column has ({', '.join(reserved_names())})."
        )
    if reduce not in REDUCTIONS:
        raise InvalidExperiment(f"The scalar {name!r} has reduce={reduce!r}. {suggestion(reduce, REDUCTIONS)}")
    for given, what in ((value, ""), *(() if weight is None else ((weight, "the weight "),))):
        is_number = isinstance(given, float) or (isinstance(given, int) and abs(given) <= sys.float_info.max)
        is_number = is_number or getattr(given, "shape", None) == ()
        if not is_number or "complex" in str(getattr(given, "dtype", "")):
            shape = getattr(given, "shape", None)
            said = f"a {type(given).__name__}" if shape is None else f"a value of shape {list(shape)}"
            raise InvalidExperiment(
                f"The scalar {name!r} was given {what}{said}. Log one real number: a tensor without dims, such as "
                "value.mean(), or a number."
            )
    if weight is not None and reduce != "mean":
        raise InvalidExperiment(
            f"The scalar {name!r} has reduce={reduce!r} and a weight, and only a mean takes one. Leave one of them out."
        )
    if isinstance(weight, int | float) and not 0 <= weight < math.inf:
        raise InvalidExperiment(f"The scalar {name!r} has weight={weight}. Give a finite number of at least 0.")
    if weight is None or _LOGGED.get() is None:
        log_again(name, value, reduce)
        return
    own, by = _own(value), _own(weight)  # a mean over nothing is not a number, and does not count
    is_number = isinstance(by, float)
    log_again(name, (own * by if by else 0.0) if is_number else (own * by).masked_fill(by == 0, 0.0), WEIGHTED)
    log_again(name, by, WEIGHTS)


def log_again(name: str, value: Any, reduce: str) -> None:
    """Log what `log_scalar` has checked."""
    logged = _LOGGED.get()
    if logged is not None:
        logged.append(LoggedScalar(name, reduce, _own(value)))


def _own(value: Any) -> Any:
    """Return a copy, which keeps its value if the model changes the tensor in place afterwards."""
    return value.detach().float().clone() if hasattr(value, "detach") else float(value)


@contextmanager
def logging_scalars() -> Iterator[list[LoggedScalar]]:
    """Return a context in which `log_scalar` adds to a list, which is its value."""
    logged = list[LoggedScalar]()
    token = _LOGGED.set(logged)
    try:
        yield logged
    finally:
        _LOGGED.reset(token)
