"""`Experiment`: the model, the data and the optimisation of one training, as one frozen value.

An `Experiment` says nothing about devices; `wb.plan` and `wb.launch` add those.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from workbench import data as _data
from workbench import models as _models
from workbench.columns import COLUMNS, EVALUATION_LABELS
from workbench.data import DataSource
from workbench.errors import InvalidExperiment, UnknownParameter, checked_keywords, suggestion
from workbench.models import ModelSource
from workbench.sparsity import Static
from workbench.sparsity import from_json as sparsity_from_json
from workbench.user_code import UserFunction, as_user_function

BATCH_COUPLING = ("keep", "allow")
PRECISIONS = ("auto", "fp32", "bf16")
OPTIMIZERS = ("adamw", "lamb", "muon", "sgd")
LR_SCHEDULES = ("linear", "cosine", "constant", "wsd", "inverse_sqrt")
USER_FUNCTIONS = ("lr_schedule", "loss", "optimizer")
"""Fields that may hold a callable of the user, which travels to the workers in `code/<field>.pkl`."""
METRICS = "metrics"
"""Field whose callables travel together in `code/metrics.pkl`."""
UNWRITTEN = ("epochs", "tokens", "sparsity")
"""Fields that a description of an experiment leaves out where they are None."""
METRIC_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
RESERVED_NAMES = frozenset({*COLUMNS, *EVALUATION_LABELS, "eval_seconds", "utilization", "memory"})
"""Names of columns and panels, which a metric cannot have."""
_MINIMA: Mapping[str, int | None] = {
    **dict.fromkeys(("steps", "global_batch", "seq_len", "log_every", "checkpoint_every"), 1),
    **dict.fromkeys(("keep_checkpoints", "warmup_steps", "seed", "weight_decay"), 0),
    **dict.fromkeys(("learning_rate", "eps", "clip_norm", "epochs")),
    "tokens": 1,
}
"""Smallest value of each number; None if it must be greater than 0."""
LARGEST_COUNT = 2**31 - 1
"""Largest number of steps, samples or tokens: two of them multiplied still fit into 64 bits."""
LARGEST_SEED = 2**63 - 1
DEFAULT_STEPS = 1000
_REAL = ("learning_rate", "eps", "clip_norm", "weight_decay", "epochs")
"""Numbers that need not be whole."""
_OPTIONAL = ("checkpoint_every", "warmup_steps", "clip_norm", "epochs", "tokens")
"""Numbers that may be None."""


@dataclass(frozen=True)
class Evaluate:
    """When and on how many held-out samples the loss of a model is computed while it trains.

    The loss is computed before the first step, every `every` steps and after the last one.
    """

    every: int = 100
    """Steps between two evaluations."""
    samples: int = 2048
    """Held-out samples of each evaluation; `eval_data` with fewer items is used whole."""

    def __post_init__(self) -> None:
        for name in ("every", "samples"):
            _require_number(f"Evaluate.{name}", getattr(self, name), 1)


@dataclass(frozen=True)
class Samples:
    """Prompts that a model answers while it trains: a causal model continues them, a masked model fills `[MASK]`.

    Samples are written before the first step, every `every` steps and after the last one.
    """

    prompts: tuple[str, ...]
    every: int = 200
    """Steps between two samples."""
    tokens: int = 40
    """Tokens that a causal model writes after each prompt."""
    seed: int | None = 0
    """Seed of the random numbers with which tokens are drawn among the 50 most probable ones, the same at every step;
    `None` takes the most probable token each time."""

    def __post_init__(self) -> None:
        is_list = isinstance(self.prompts, (list, tuple)) and len(self.prompts) > 0
        if not is_list or not all(isinstance(prompt, str) and prompt.strip() for prompt in self.prompts):
            raise InvalidExperiment(
                f'Samples.prompts={self.prompts!r} is no list of texts. Write prompts=["Hello! I am"].',
                parameter="Samples.prompts",
            )
        object.__setattr__(self, "prompts", tuple(self.prompts))
        for name in ("every", "tokens"):
            _require_number(f"Samples.{name}", getattr(self, name), 1)
        if self.seed is not None:
            _require_number("Samples.seed", self.seed, 0)


@dataclass(frozen=True)
class Experiment:
    """A model, its data, and the optimisation that trains the one on the other.

    `model` is one of `wb.models.…`, or any callable that returns an `nn.Module`; `data` is one of `wb.data.…`, a
    dataset whose items are dicts of tensors, map-style or iterable, or a callable that returns one. Callables and
    datasets become a `CustomModel` and a `UserData`. The model must return its loss: as `.loss`, `["loss"]`, the
    first item of a tuple, or the only scalar of what it returns; `loss` chooses among several.

    One *step* consumes `global_batch` samples (sequences of `seq_len` tokens for text) over all devices, however a
    plan divides them. Losses are means over the whole global batch, so that curves do not depend on the plan.

    The length of the training is one of `steps`, `epochs` and `tokens`. Warm-up, decay and everything else that asks
    for the number of steps read `steps`, which follows from the other two, rounded up.

    Raises `InvalidExperiment` for values that can never train, before anything is computed.
    """

    model: ModelSource
    data: DataSource
    steps: int = field(default_factory=lambda: cast(int, None))
    """Steps of the training; 1,000 unless `epochs` or `tokens` is given. With `epochs`, the samples are counted when
    this is first read, for which text is tokenised, as `wb.launch` does in any case."""
    epochs: float | None = field(default=None, kw_only=True)
    """Passes over the data instead of `steps`; fractions are allowed."""
    tokens: int | None = field(default=None, kw_only=True)
    """Tokens to train on instead of `steps`, counted as `seq_len` for each sample."""
    global_batch: int = 64
    seq_len: int = 128
    """Tokens per sample. A user-defined dataset decides the length itself: give it here, since it counts tokens."""
    learning_rate: float = 1e-4
    warmup_steps: int | None = None
    """Steps of linear warm-up from 0; `None` takes a tenth of `steps`."""
    lr_schedule: str | Callable[[int], float] | UserFunction = "linear"
    """Decay after the warm-up: `linear` or `cosine` to zero at `steps`, `wsd` (constant, then linear to zero in the
    last fifth of the steps), `inverse_sqrt` of the step, or `constant`. A callable gives the multiple of
    `learning_rate` for each step (from 0), without a warm-up."""
    rate_scale: Mapping[str, float] | None = None
    """Multiple of `learning_rate` by pattern of the parameter's name (`fnmatch`); the first pattern that matches
    counts, and a parameter that none matches has 1."""
    optimizer: str | Callable[[list[dict[str, Any]]], Any] | UserFunction = "adamw"
    """`adamw`, `lamb` (arXiv:1904.00962), `muon` (`torch.optim.Muon` for hidden matrices, AdamW for the rest), or `sgd`
    with momentum 0.9. A callable takes a list of parameter groups (`params`, `names`, `lr`, `weight_decay`) and returns
    a `torch.optim.Optimizer` over them."""
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
    """Number of complete checkpoints to keep; older ones are deleted as new ones are written. 0 writes none."""
    stop_on_non_finite: bool = True
    """End the run as failed at the first step whose loss or gradient norm is NaN or infinite, before a checkpoint of
    its weights is written. False trains on."""
    evaluate: Evaluate | None = None
    """Compute the loss on held-out samples while training; text gives up about 5 % of its documents for them."""
    eval_data: DataSource | None = None
    """Held-out data, of the same kinds and with the same fields as `data`; by default a part of the text."""
    metrics: Mapping[str, Callable[[Any, Mapping[str, Any]], Any] | UserFunction] | None = None
    """Functions by name that evaluations compute beside the loss. Each is given the outputs of forward and the batch,
    and returns a sum and a count over the samples; the metric is the quotient over the whole set."""
    samples: Samples | None = None
    """Let the model write text while it trains. Only for text, which has a tokeniser."""
    sparsity: Static | None = None
    """Blocks of weights that are absent: `wb.sparsity.Dynamic(...)` or `wb.sparsity.Static(...)`; `None` is dense."""
    loss: str | int | Callable[[Any, Mapping[str, Any]], Any] | UserFunction | None = None
    """Loss among what forward returns: its name, its index, or a function of the outputs and the batch that returns a
    scalar. `None` takes `.loss`, `["loss"]`, the first item of a tuple, or else the only scalar."""
    batch_coupling: str = "keep"
    """Treatment of a loss that compares samples of one batch: `keep` plans the whole batch as one micro-batch on one
    replica; `allow` divides it like any other, so that the loss compares the samples of one micro-batch."""
    name: str | None = None
    tags: tuple[str, ...] = ()
    project: str = "workbench"
    """Weights & Biases project that tracks the run."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", _models.as_model(self.model))
        object.__setattr__(self, "data", _data.as_data(self.data))
        if self.eval_data is not None:
            object.__setattr__(self, "eval_data", _data.as_data(self.eval_data))
        for check in (_check_evaluation, _check_metrics, _check_samples, _check_sparsity):
            check(self)
        for name in USER_FUNCTIONS:
            object.__setattr__(self, name, as_user_function(getattr(self, name)))
        if isinstance(self.loss, bool) or not isinstance(self.loss, (str, int, UserFunction, type(None))):
            raise InvalidExperiment(
                f"loss={self.loss!r} is neither a name, an index nor a function of the outputs and the batch. Give one "
                f"of these, or None for the only scalar that forward returns.",
                parameter="loss",
            )
        _require_pair_below_one("betas", self.betas)
        object.__setattr__(self, "betas", tuple(self.betas))
        _require_texts("tags", self.tags)
        object.__setattr__(self, "tags", tuple(self.tags))
        if self.name is None:
            object.__setattr__(self, "name", self.model.name)
        _require_text("name", self.name)
        if self.project != "":  # which switches tracking off
            _require_text("project", self.project)
        _choose_length(self)
        for name, least in _MINIMA.items():
            if name in self.__dict__:
                _require_number(name, getattr(self, name), least)
        for name in ("deterministic", "stop_on_non_finite"):
            _require_bool(name, getattr(self, name))
        if self.compile is not None:
            _require_bool("compile", self.compile)
        _require_known("precision", self.precision, PRECISIONS)
        _require_known("batch_coupling", self.batch_coupling, BATCH_COUPLING)
        if not isinstance(self.optimizer, UserFunction):
            _require_known("optimizer", self.optimizer, OPTIMIZERS)
        _check_rates(self)
        if "steps" in self.__dict__:
            _check_schedule(self)
        limit = self.model.max_positions
        if limit is not None and self.seq_len > limit:
            raise InvalidExperiment(
                f"seq_len={self.seq_len} is longer than the {limit} positions of {self.model.name}. "
                f"Shorten it to at most {limit}, or build the model with max_positions={self.seq_len}.",
                seq_len=self.seq_len,
                max_positions=limit,
            )

    def __repr__(self) -> str:
        """Write the fields that are known, without counting the steps of epochs."""
        known = [f.name for f in dataclasses.fields(self) if f.name in self.__dict__]
        shown = [name for name in known if name not in UNWRITTEN or self.__dict__[name] is not None]
        return f"Experiment({', '.join(f'{name}={self.__dict__[name]!r}' for name in shown)})"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Count the steps of an experiment in epochs when they are first read."""
            if name != "steps" or self.__dict__.get("epochs") is None:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            samples = round(self.epochs * self.data.samples_per_epoch(self))
            object.__setattr__(self, "steps", max(1, math.ceil(samples / self.global_batch)))
            _require_number("steps", self.steps, 1)
            _check_schedule(self)
            return self.steps

    @property
    def optimizer_name(self) -> str:
        """Name of the optimiser, or of the callable that builds it."""
        return self.optimizer.name if isinstance(self.optimizer, UserFunction) else str(self.optimizer)

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
        lengths = ("steps", "epochs", "tokens")
        if any(changes.get(name) is not None for name in lengths):
            changes = {**dict.fromkeys(lengths), **changes}
        elif self.epochs is not None or self.tokens is not None:
            changes["steps"] = None  # counted again, as the batch, the length or the data may be others
        return dataclasses.replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """Return a description that a person can read and from which `from_json` rebuilds the experiment.

        The user's callables and datasets are described by name and source only: the objects themselves travel to
        the workers in `code/` of the run directory.
        """
        value = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        value["model"] = self.model.to_json()
        value["data"] = self.data.to_json()
        value["evaluate"] = None if self.evaluate is None else dataclasses.asdict(self.evaluate)
        value["eval_data"] = None if self.eval_data is None else self.eval_data.to_json()
        value["betas"], value["tags"] = list(self.betas), list(self.tags)
        for name in USER_FUNCTIONS:
            value[name] = value[name].to_json() if isinstance(value[name], UserFunction) else value[name]
        value["samples"] = None if self.samples is None else dataclasses.asdict(self.samples)
        value["metrics"] = {name: as_user_function(own).to_json() for name, own in (self.metrics or {}).items()} or None
        value["sparsity"] = None if self.sparsity is None else self.sparsity.to_json()
        value["rate_scale"] = None if self.rate_scale is None else dict(self.rate_scale)
        return {name: item for name, item in value.items() if name not in UNWRITTEN or item is not None}

    @staticmethod
    def from_json(
        value: Mapping[str, Any],
        *,
        model: Callable[[], Any] | None = None,
        data: Any = None,
        eval_data: Any = None,
        functions: Mapping[str, Any] = MappingProxyType({}),
    ) -> Experiment:
        """Rebuild an experiment; the other arguments supply the user's own objects, which the JSON only names.

        `functions` holds callables by field (`USER_FUNCTIONS`), and a mapping of names to callables for `metrics`.
        """
        if not isinstance(value, Mapping) or not {"model", "data", "betas", "tags"} <= value.keys():
            raise InvalidExperiment(
                "This JSON describes no experiment: it is no object with a model, data, betas and tags. Give what "
                "experiment.to_json() returned, or experiment.json of a run directory."
            )
        fields = dict(value)
        fields["model"] = _models.from_json(fields["model"], factory=model)
        fields["data"] = _data.from_json(fields["data"], dataset=data)
        if fields.get("evaluate") is not None:
            fields["evaluate"] = Evaluate(**fields["evaluate"])
        if fields.get("samples") is not None:
            fields["samples"] = Samples(**fields["samples"])
        if fields.get("sparsity") is not None:
            fields["sparsity"] = sparsity_from_json(fields["sparsity"])
        if fields.get("eval_data") is not None:
            fields["eval_data"] = _data.from_json(fields["eval_data"], dataset=eval_data)
        fields["betas"], fields["tags"] = tuple(fields["betas"]), tuple(fields["tags"])
        for name in USER_FUNCTIONS:
            if name in fields:
                fields[name] = as_user_function(fields[name], functions.get(name))
        if fields.get(METRICS) is not None:
            own = functions.get(METRICS) or {}
            fields[METRICS] = {name: as_user_function(item, own.get(name)) for name, item in fields[METRICS].items()}
        if fields.get("epochs") is None and fields.get("tokens") is None:
            return Experiment(**fields)
        steps = fields.pop("steps", None)
        experiment = Experiment(**fields)
        if steps is not None:  # counted when it was described, so that the data need not be here
            _require_number("steps", steps, 1)
            object.__setattr__(experiment, "steps", steps)
        return experiment


def _check_evaluation(experiment: Experiment) -> None:
    """Raise `InvalidExperiment` unless `evaluate` and `eval_data` fit each other and the data."""
    evaluate, held_out = experiment.evaluate, experiment.eval_data
    if evaluate is not None and not isinstance(evaluate, Evaluate):
        raise InvalidExperiment(
            f"evaluate={evaluate!r} is no Evaluate. Write evaluate=wb.Evaluate(every=100, samples=2048).",
            parameter="evaluate",
        )
    if evaluate is None and held_out is not None:
        raise InvalidExperiment(
            "eval_data is given, and evaluate is None, so that nothing would read it. "
            "Add evaluate=wb.Evaluate(every=100), or remove eval_data.",
            parameter="eval_data",
        )
    if evaluate is not None and held_out is None and experiment.data.is_user_defined:
        raise InvalidExperiment(
            f"evaluate is given, but a user-defined dataset ({experiment.data.name}) is not split. "
            "Give held-out samples: eval_data=my_validation_dataset.",
            parameter="eval_data",
        )
    if held_out is not None and experiment.data.is_user_defined and not held_out.is_user_defined:
        raise InvalidExperiment(
            f"eval_data is the text {held_out.name}, but data is a user-defined dataset ({experiment.data.name}), "
            "which has another tokeniser or none. Give a dataset with the same fields as eval_data.",
            parameter="eval_data",
        )


def _check_metrics(experiment: Experiment) -> None:
    """Raise `InvalidExperiment` unless each metric is a function with a name of its own; wrap them."""
    metrics = experiment.metrics
    if metrics is None:
        return
    if not isinstance(metrics, Mapping) or not all(callable(metric) for metric in metrics.values()):
        raise InvalidExperiment(
            f"metrics={metrics!r} does not map names to functions. Write, for instance, "
            'metrics={"accuracy": lambda outputs, batch: (correct.sum(), correct.numel())}.',
            parameter=METRICS,
        )
    for name in metrics:
        if not isinstance(name, str) or not METRIC_NAME.fullmatch(name) or name in RESERVED_NAMES:
            raise InvalidExperiment(
                f"{name!r} is no name for a metric. Choose a word of letters, digits, '-' and '_' that no recorded "
                f"column has ({', '.join(sorted(RESERVED_NAMES))}).",
                parameter=METRICS,
            )
    if metrics and experiment.evaluate is None:
        raise InvalidExperiment(
            f"metrics ({', '.join(metrics)}) are computed on held-out samples, and evaluate is None. "
            "Add evaluate=wb.Evaluate(every=100), or remove metrics.",
            parameter=METRICS,
        )
    object.__setattr__(
        experiment, METRICS, {name: as_user_function(metric) for name, metric in metrics.items()} or None
    )


def _check_samples(experiment: Experiment) -> None:
    """Raise `InvalidExperiment` unless `samples` is a `Samples` and the data has a tokeniser."""
    samples = experiment.samples
    if samples is None:
        return
    if not isinstance(samples, Samples):
        raise InvalidExperiment(
            f'samples={samples!r} is no Samples. Write samples=wb.Samples(prompts=["Hello! I am"]).',
            parameter="samples",
        )
    if experiment.data.is_user_defined:
        raise InvalidExperiment(
            f"samples need a tokeniser, and data is a user-defined dataset ({experiment.data.name}), which has none. "
            "Train on text (wb.data.corpus or wb.data.hub), or remove samples.",
            parameter="samples",
        )


def _check_rates(experiment: Experiment) -> None:
    """Raise `InvalidExperiment` unless the schedule and the scales of the learning rate can be used."""
    schedule, scales = experiment.lr_schedule, experiment.rate_scale
    if not isinstance(schedule, UserFunction):
        _require_known("lr_schedule", str(schedule), LR_SCHEDULES)
    elif experiment.warmup_steps is not None:
        raise InvalidExperiment(
            f"warmup_steps={experiment.warmup_steps} is given, and lr_schedule is a callable, which decides the rate "
            "of every step itself. Leave warmup_steps out, and let the callable warm up.",
            warmup_steps=experiment.warmup_steps,
        )
    if scales is None:
        return
    is_mapping = isinstance(scales, Mapping) and len(scales) > 0 and all(isinstance(name, str) for name in scales)
    if not is_mapping or not all(_is_finite(scale) and scale > 0 for scale in scales.values()):
        raise InvalidExperiment(
            f"rate_scale={scales!r} does not map patterns of parameter names to numbers greater than 0. Write, for "
            'instance, rate_scale={"*embed*": 1.0, "*": 0.5}.',
            rate_scale=repr(scales),
        )
    object.__setattr__(experiment, "rate_scale", dict(scales))


def _choose_length(experiment: Experiment) -> None:
    """Set `steps` from `tokens` or to its default, or remove it if epochs must be counted first.

    Raises `InvalidExperiment` if more than one of the three is given.
    """
    given = [name for name in ("steps", "epochs", "tokens") if getattr(experiment, name) is not None]
    if len(given) > 1:
        raise InvalidExperiment(
            f"The length of the training is given {len(given)} times: "
            f"{' and '.join(f'{name}={getattr(experiment, name)!r}' for name in given)}. Give one of them.",
            parameter=given[-1],
        )
    for name in ("global_batch", "seq_len", "epochs", "tokens"):
        _require_number(name, getattr(experiment, name), _MINIMA[name])
    if experiment.tokens is not None:
        object.__setattr__(experiment, "steps", math.ceil(experiment.tokens / experiment.tokens_per_step))
    elif experiment.epochs is not None:
        object.__delattr__(experiment, "steps")
    elif not given:
        object.__setattr__(experiment, "steps", DEFAULT_STEPS)


def _check_schedule(experiment: Experiment) -> None:
    """Raise `InvalidExperiment` unless each step has a learning rate, and at most one update of a sparse pattern."""
    schedule, warmup, steps = experiment.lr_schedule, experiment.warmup_steps, experiment.steps
    if isinstance(schedule, UserFunction) and schedule.function is not None:
        for step in sorted({0, steps // 2, steps - 1}):
            _require_factor(schedule, step)
    if warmup is not None and not 0 <= warmup <= steps:
        raise InvalidExperiment(
            f"warmup_steps={warmup} lies outside the {steps} steps of the experiment. "
            f"Choose 0 to {steps}, or None for a tenth.",
            warmup_steps=warmup,
            steps=steps,
        )
    updates = getattr(experiment.sparsity, "updates", 0)
    if updates > steps:
        raise InvalidExperiment(
            f"updates={updates:,} of the pattern are more than the {steps:,} steps of the experiment. "
            f"Choose at most {steps:,} updates, or train longer.",
            updates=updates,
            steps=steps,
        )


def _check_sparsity(experiment: Experiment) -> None:
    """Raise `InvalidExperiment` unless `sparsity` describes a pattern."""
    sparsity = experiment.sparsity
    if sparsity is not None and not isinstance(sparsity, Static):
        raise InvalidExperiment(
            f"sparsity={sparsity!r} describes no pattern. Write sparsity=wb.sparsity.Dynamic(sparsity=0.9, block=16), "
            "or None for dense weights.",
            parameter="sparsity",
        )


def _require_factor(schedule: UserFunction, step: int) -> None:
    try:
        factor = schedule(step)
    except Exception as error:
        raise InvalidExperiment(
            f"lr_schedule raised {type(error).__name__} for step {step}: {error}. It is called with the number of the "
            "step, from 0, and must return the multiple of learning_rate.",
            step=step,
        ) from error
    if not _is_finite(factor) or factor < 0:
        raise InvalidExperiment(
            f"lr_schedule returned {factor!r} for step {step}. It must return a number of at least 0: the multiple of "
            "learning_rate for that step.",
            step=step,
        )


def _is_finite(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)
    except OverflowError:  # a whole number beyond any float
        return False


def _require_number(name: str, value: Any, least: int | None) -> None:
    if value is None and name in _OPTIONAL:
        return
    number: type = Real if name in _REAL else Integral
    described = "a number" if name in _REAL else "a whole number"
    if not isinstance(value, number) or isinstance(value, bool):
        raise InvalidExperiment(f"{name}={value!r} is not {described}. Give {described}.", parameter=name, value=value)
    if number is Real and not _is_finite(value):
        raise InvalidExperiment(f"{name}={value!r} is not finite. Give a finite number.", parameter=name, value=value)
    if least is None and not value > 0:  # type: ignore[operator]
        raise InvalidExperiment(f"{name}={value!r} must be greater than 0.", parameter=name, value=value)
    if least is not None and not value >= least:  # type: ignore[operator]
        raise InvalidExperiment(f"{name}={value!r} must be {least} or more.", parameter=name, value=value)
    most = LARGEST_SEED if name in ("seed", "tokens") else LARGEST_COUNT
    if (number is Integral or name == "epochs") and value > most:  # type: ignore[operator]
        raise InvalidExperiment(f"{name}={value!r} must be at most {most:,}.", parameter=name, value=value)


def _require_text(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise InvalidExperiment(f"{name}={value!r} is not a name. Give a text of one line.", parameter=name)


def _require_texts(name: str, value: Any) -> None:
    if not isinstance(value, (tuple, list)) or not all(isinstance(text, str) for text in value):
        raise InvalidExperiment(f"{name}={value!r} is not a list of texts. Write {name}=('trial',).", parameter=name)


def _require_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise InvalidExperiment(f"{name}={value!r} is neither True nor False. Give one of them.", parameter=name)


def _require_pair_below_one(name: str, value: Any) -> None:
    if not isinstance(value, (tuple, list)) or len(value) != 2 or not all(map(_is_finite, value)):
        raise InvalidExperiment(f"{name}={value!r} is not two numbers. Give two, such as (0.9, 0.98).", value=value)
    if not all(0 <= v < 1 for v in value):
        raise InvalidExperiment(f"{name}={value!r} must each be at least 0 and below 1.", value=value)


def _require_known(name: str, value: Any, known: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in known:
        raise InvalidExperiment(f"{name}={value!r} is not one of the choices. {suggestion(value, known)}", value=value)


Evaluate.__init__ = checked_keywords(Evaluate.__init__)  # type: ignore[method-assign]
Samples.__init__ = checked_keywords(Samples.__init__)  # type: ignore[method-assign]
Experiment.__init__ = checked_keywords(Experiment.__init__)  # type: ignore[method-assign]
