"""The columns of a logged step: one row each, from which log, history, curves, panels, axes and W&B names derive.

To add a column, add one row to `COLUMNS`. The log writes it into each `step` event, `run.history()` reads it as a NumPy
column, `y=` draws it, a `Panel` shows it beside the loss, an `Axis` makes it a choice of `x=`, and no metric of an
experiment may have its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from workbench.units import count, duration


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
    tokens_per_step: int
    samples_per_step: int
    flops_per_step: float
    peak_flops: float | None
    """Peak of all devices in FLOP/s; None where it is unknown."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """Sum over the ranks of what `Column.share` returned, by column."""
    world: int = 1
    """Number of ranks."""


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

    def unit(self, largest: float) -> AxisUnit:
        """Return the largest unit that is no larger than `largest`, or else the smallest unit."""
        return next((AxisUnit(*unit) for unit in self.units if largest >= unit[0]), AxisUnit(*self.units[-1]))


@dataclass(frozen=True, kw_only=True)
class Column:
    """One figure of a logged step, a float64 in a history; NaN where it is unknown.

    One of `value` and `share` says how it is logged; a column without either is added by the writer of events (`time`)
    or computed by the reader (`is_derived`).
    """

    words: str
    """Description for people, with the unit."""
    label: str = ""
    """Title of the y axis of its curve, with the unit; empty for a column that is no curve by itself."""
    value: Callable[[FinishedStep], float | None] | None = None
    """Function that computes it on rank 0."""
    share: Callable[[], float] | None = None
    """Function that every rank calls at the end of a step, instead of `value`."""
    over_ranks: Literal["sum", "mean"] = "sum"
    """Reduction of the ranks' shares."""
    is_derived: bool = False
    """True for a column that no event holds."""
    panel: Panel | None = None
    axis: Axis | None = None
    """The x axis whose values it holds."""
    wandb: tuple[str, ...] = ()
    """Names on W&B: the first one is written, all are read in a run that another program logged; empty for the column's
    own name."""


COLUMNS: dict[str, Column] = {
    "step": Column(
        words="number of the step, from 1",
        value=lambda step: step.step,
        axis=Axis("step", "step", ((1.0, "Step"),), lambda value: f"{count(value)} steps"),
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
        value=lambda step: step.tokens_per_step / step.step_s,
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
    "learning_rate": Column(
        words="learning rate",
        label="Learning rate",
        value=lambda step: step.learning_rate,
        panel=Panel(),
    ),
    "tokens": Column(
        words="tokens since the start of training",
        value=lambda step: step.step * step.tokens_per_step,
        axis=Axis(
            "tokens",
            "tokens",
            ((1e12, "Tokens (T)"), (1e9, "Tokens (B)"), (1e6, "Tokens (M)"), (1e3, "Tokens (k)"), (1.0, "Tokens")),
            lambda value: f"{count(value)} tokens",
        ),
    ),
    "samples": Column(
        words="samples since the start of training",
        value=lambda step: step.step * step.samples_per_step,
        axis=Axis(
            "samples",
            "samples",
            ((1e6, "Samples (M)"), (1e3, "Samples (k)"), (1.0, "Samples")),
            lambda value: f"{count(value)} samples",
        ),
    ),
    "seconds": Column(
        words="training time in s, without start-up, evaluations and the pause before a resumption",
        value=lambda step: step.seconds,
        axis=Axis(
            "seconds",
            "time",
            ((7200.0, "Training time (hours)"), (120.0, "Training time (minutes)"), (1.0, "Training time (seconds)")),
            duration,
            name="time",
        ),
        wandb=("seconds", "_runtime"),
    ),
    "flops": Column(
        words="the model's FLOPs since the start of training",
        value=lambda step: step.step * step.flops_per_step,
        axis=Axis(
            "flops",
            "FLOPs",
            (
                (1e21, "Model FLOPs (ZFLOP, 10²¹)"),
                (1e18, "Model FLOPs (EFLOP, 10¹⁸)"),
                (1e15, "Model FLOPs (PFLOP, 10¹⁵)"),
                (1e12, "Model FLOPs (TFLOP, 10¹²)"),
                (1e9, "Model FLOPs (GFLOP, 10⁹)"),
            ),
            lambda value: f"{value:.3g} FLOPs",
        ),
    ),
    "gpu_hours": Column(
        words="training time multiplied by the number of devices, in hours",
        is_derived=True,
        axis=Axis(
            "gpu_hours",
            "device-hours",
            ((1.0, "Device-hours"), (1 / 60, "Device-minutes")),
            lambda value: f"{value:.3g} device-hours" if value >= 0.1 else f"{60 * value:.3g} device-minutes",
        ),
    ),
    "time": Column(words="time at which the step was logged, in Unix seconds"),
}
"""The columns of a history by name, in the order of panels and of the menu of axes."""

EVALUATION_LABELS = {"eval_loss": "Held-out loss", "perplexity": "Held-out perplexity"}
"""Columns with one value per evaluation instead of one per step, and the titles of their y axes; the metrics of
experiments are such too."""


def shared_columns() -> dict[str, Callable[[], float]]:
    """Return the function that gives a rank's share, for each column that is reduced over the ranks."""
    return {name: column.share for name, column in COLUMNS.items() if column.share is not None}


def logged_columns(step: FinishedStep) -> dict[str, float | None]:
    """Return the figures of a step as its event holds them."""
    shares = {
        name: share / (step.world if COLUMNS[name].over_ranks == "mean" else 1) for name, share in step.shares.items()
    }
    return {name: column.value(step) for name, column in COLUMNS.items() if column.value is not None} | shares


def wandb_name(name: str) -> str:
    """Return the name that a field of a step has on W&B."""
    return COLUMNS[name].wandb[0] if name in COLUMNS and COLUMNS[name].wandb else name
