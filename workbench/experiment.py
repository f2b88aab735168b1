"""`Experiment`: the model, the data and the optimisation of one training, as one frozen value.

An `Experiment` says nothing about devices; `wb.plan` and `wb.launch` add those. What belongs together is one value:
`Optimizer`, `Evaluation`, `Samples`, `Checkpoints`, `Numerics`, `Tracking`. `PATHS` gives each of their fields a short
name, by which `replace`, sweeps and `--set` reach it.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

from pydantic import BeforeValidator, Field, PlainSerializer, PlainValidator, TypeAdapter

from workbench import data as _data
from workbench import models as _models
from workbench.algorithms import ALGORITHMS, USER_DEFINED, Algorithm
from workbench.base.display import facts_html
from workbench.base.errors import InvalidExperiment, UnknownParameter, in_words, suggestion
from workbench.base.units import is_count
from workbench.base.user_code import UserFunction, as_user_function, required_arguments
from workbench.base.validation import (
    LARGEST_COUNT,
    WRITTEN,
    Count,
    CountOrRamp,
    FromZero,
    LargeCount,
    Line,
    LineOrNothing,
    Positive,
    PositiveFactors,
    Ramp,
    Real,
    Seed,
    Share,
    Text,
    TrueOrFalse,
    checked_value,
    function_or,
    is_factor,
    known,
    refused,
)
from workbench.data import LARGEST_MASKED_SHARE, DataSource
from workbench.models import ModelSource
from workbench.record.columns import NAME, reserved_names
from workbench.sparsity import Static
from workbench.sparsity import from_json as sparsity_from_json

if TYPE_CHECKING:
    from torch import nn

    from workbench.data.source import Reading

BATCH_COUPLING = ("keep", "gather", "allow")
ON_SPIKE = ("skip", "rewind")
LARGEST_WINDOW = 100_000
"""Most steps over which a running median is taken: the device holds them."""
PRECISIONS = ("auto", "fp32", "bf16")
MUON_SCALES = ("adamw_rms", "spectral")
LR_SCHEDULES = ("linear", "cosine", "constant", "wsd", "inverse_sqrt")
DEFAULT_STEPS = 1000
LENGTHS = ("steps", "epochs", "tokens")
"""The length of a training: one of them is given."""


def _described(from_json: Callable[[Any], Any], make: Callable[[Any], Any]) -> PlainValidator:
    """Return the check of a value that may be given as its JSON."""
    return PlainValidator(
        lambda value: from_json(value) if isinstance(value, Mapping) and "type" in value else make(value)
    )


def _sparsity(value: Any) -> Any:
    if value is not None and not isinstance(value, Static):
        raise refused(
            "describes no pattern. Write sparsity=wb.sparsity.Dynamic(sparsity=0.9, block=16), or None for dense "
            "weights."
        )
    return value


def _loss(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, str | int | None):
        raise refused(
            "is neither a name, an index nor a function of the outputs and the batch. Give one of these, or None for "
            "the only scalar that forward returns."
        )
    return value


def _metrics(value: Any) -> Any:
    """Return functions by name as `UserFunction`s; each has a name of its own."""
    if value is None:
        return None
    functions = {name: as_user_function(metric) for name, metric in value.items()} if isinstance(value, Mapping) else {}
    if not isinstance(value, Mapping) or not all(isinstance(each, UserFunction) for each in functions.values()):
        raise refused(
            "does not map names to functions. Write, for instance, "
            'metrics={"accuracy": lambda outputs, batch: (correct.sum(), correct.numel())}.'
        )
    for name in functions:
        _require_metric_name(name, "a metric")
    return functions or None


def _require_metric_name(name: Any, what: str) -> None:
    """Raise unless evaluations can log a number by this name."""
    if not isinstance(name, str) or not NAME.fullmatch(name) or name in reserved_names():
        raise refused(
            "has {name}, which is no name for {what}. Choose a word of letters, digits, '-' and '_' that no "
            "recorded column has ({taken}).",
            name=repr(name),
            what=what,
            taken=", ".join(reserved_names()),
        )


def _held_out_sets(value: Any) -> Any:
    """Return further held-out sets by name: fractions of masked positions, or descriptions of text."""
    if value is None:
        return None
    example = 'also={"masked_30": 0.3, "manuals": wb.data.corpus("manuals.txt")}'
    if not isinstance(value, Mapping):
        raise refused("does not map names to held-out sets. Write, for instance, {example}.", example=example)
    sets: dict[str, Any] = {}
    for name, given in value.items():
        _require_metric_name(name, "a held-out set")
        if isinstance(given, int | float) and not isinstance(given, bool):
            if not 0 < given <= LARGEST_MASKED_SHARE:
                raise refused(
                    "gives {name} {share}, and a fraction of masked positions lies above 0 and is at most {largest}.",
                    name=repr(name),
                    share=given,
                    largest=LARGEST_MASKED_SHARE,
                )
            sets[name] = float(given)
            continue
        described = isinstance(given, Mapping) and "type" in given
        sets[name] = _data.from_json(given) if described else _data.as_data(given)
        if sets[name].is_user_defined:
            raise refused(
                "has {name}, a dataset of yours, and further sets are text (wb.data.corpus, wb.data.hub) or fractions "
                "of masked positions. Evaluate a checkpoint on it when the run has ended: run.evaluate(my_dataset).",
                name=repr(name),
            )
    return sets or None


def _clip_norm(value: Any) -> Any:
    """Return a limit, limits by pattern, or None."""
    if value is None:
        return None
    limits = list(value.items()) if isinstance(value, Mapping) else [("*", value)]
    are_limits = all(isinstance(pattern, str) and is_factor(limit) and limit > 0 for pattern, limit in limits)
    if not limits or not are_limits:
        raise refused(
            "is no limit of a norm. Give a finite number greater than 0, such a limit for each group of parameters "
            "({example}), or None to clip nothing.",
            example='clip_norm={"*embed*": 0.1, "*": 1.0}',
        )
    return dict(limits) if isinstance(value, Mapping) else float(value)


def _patterns(value: Any) -> Any:
    """Return patterns of parameter names."""
    if value is None:
        return None
    patterns = (value,) if isinstance(value, str) else value
    is_list = isinstance(patterns, list | tuple) and len(patterns) > 0
    if not is_list or not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise refused(
            "is no list of patterns of parameter names. Write, for instance, {example}.", example='adamw=["*.wpe.*"]'
        )
    return tuple(patterns)


def _spans(value: Any) -> Any:
    """Return the first and the end step of training by pattern."""
    if value is None:
        return None
    spans = dict(value) if isinstance(value, Mapping) else {}
    pairs = [tuple(span) if isinstance(span, list | tuple) else () for span in spans.values()]
    are_steps = all(
        len(pair) == 2
        and is_count(pair[0] + 1 if isinstance(pair[0], int) else None)
        and (pair[1] is None or (is_count(pair[1]) and pair[1] > pair[0]))
        for pair in pairs
    )
    if not pairs or not are_steps or not all(isinstance(pattern, str) for pattern in spans):
        raise refused(
            "does not map patterns of parameter names to steps. Write, for instance, {example}: a first step, counted "
            "from 0, and an end after it or None.",
            example='trained_during={"bert.*": (100, None), "*embed*": (0, 500)}',
        )
    return dict(zip(spans, pairs, strict=True))


def _callbacks(value: Any) -> Any:
    """Return functions of one argument as `UserFunction`s."""
    functions = tuple(map(as_user_function, value)) if isinstance(value, list | tuple) else ()
    fits = isinstance(value, list | tuple) and all(isinstance(each, UserFunction) for each in functions)
    if not fits or any(len(required_arguments(f.function)) > 1 for f in functions if f.function is not None):
        raise refused(
            "is no list of functions of one argument. Write, for instance, {example}.",
            example="callbacks=[lambda state: state.step % 100 or print(state.metrics['loss'])]",
        )
    return functions


def _prompts(value: Any) -> Any:
    is_list = isinstance(value, list | tuple) and len(value) > 0
    if not is_list or not all(isinstance(prompt, str) and prompt.strip() for prompt in value):
        raise refused('is no list of texts. Write prompts=["Hello! I am"].')
    return tuple(value)


def _elsewhere(word: str) -> str | None:
    """Return where a parameter belongs: `"Write optimizer=wb.Optimizer(weight_decay=…)."`."""
    if word not in PATHS:
        return None
    group, name = PATHS[word][0], PATHS[word][-1]
    if len(PATHS[word]) == 1:
        return f"It is a field of the experiment. Write wb.Experiment({name}=…)."
    if group == "numerics":  # whose class is no name of everyday
        return f'It is a field of its {group}. Write {group}={{"{name}": …}}.'
    return f"It is a field of its {group}. Write {group}=wb.{GROUPS[group].__name__}({name}=…)."


Model = Annotated[ModelSource, _described(_models.from_json, _models.as_model), WRITTEN]
Data = Annotated[DataSource, _described(_data.from_json, _data.as_data), WRITTEN]
Sparsity = Annotated[Static | None, _described(sparsity_from_json, _sparsity), WRITTEN]


@checked_value(_elsewhere)
class Optimizer:
    """The change of weights by gradients: the algorithm, its schedule and its constants."""

    algorithm: Annotated[
        str | Callable[[list[dict[str, Any]]], Any] | UserFunction, function_or(known(ALGORITHMS)), WRITTEN
    ] = "adamw"
    """`adamw`, `lamb` (arXiv:1904.00962), `muon` (orthogonalised updates of hidden matrices, AdamW for the rest), or
    `sgd` with momentum 0.9. A callable takes a list of parameter groups (`params`, `names`, `lr`, `weight_decay`) and
    returns a `torch.optim.Optimizer` over them."""
    warmup_steps: FromZero | None = None
    """Steps of linear warm-up from 0; `None` takes a tenth of the experiment's `steps`."""
    lr_schedule: Annotated[str | Callable[[int], float] | UserFunction, function_or(known(LR_SCHEDULES)), WRITTEN] = (
        "linear"
    )
    """Decay after the warm-up: `linear` or `cosine` to zero at `steps`, `wsd` (constant, then linear to zero in the
    last fifth of the steps), `inverse_sqrt` of the step, or `constant`. A callable gives the multiple of
    `learning_rate` for each step (from 0), without a warm-up."""
    schedule_steps: Count | None = None
    """Steps over which warm-up and decay are laid; None takes the experiment's `steps`. Give those of the training that
    `run.resume(steps=…)` will make of it: the rate then goes on without a leap."""
    muon_scale: Annotated[str, PlainValidator(known(MUON_SCALES))] = "adamw_rms"
    """Size of Muon's updates: `adamw_rms` has the root mean square of AdamW's, so that one rate suits both
    (arXiv:2502.16982). `spectral` is the rate times sqrt(max(1, outputs / inputs)) in every direction, so that one rate
    suits every width (arXiv:2310.17813)."""
    adamw_rate: Positive | None = None
    """Peak rate of the parameters that AdamW updates beside Muon; `None` takes the experiment's `learning_rate`."""
    parameters: Annotated[tuple[str, ...] | None, BeforeValidator(_patterns)] = None
    """Patterns (`fnmatch`) of the names of the matrices that Muon updates, all of them; AdamW updates the others. None
    takes what the model multiplies by, but for tables and output heads. Of what a pattern matches, only trained
    parameters of two dims are matrices."""
    adamw: Annotated[tuple[str, ...] | None, BeforeValidator(_patterns)] = None
    """Patterns of parameters that AdamW updates beside Muon, whatever they are; they go before `parameters`."""
    fused_projections: PositiveFactors | None = None
    """Number of equal matrices that a parameter holds side by side along its outputs, by pattern of its name (3 for
    queries, keys and values), each of which Muon orthogonalises alone. Those that a model splits apart are found."""
    rate_scale: PositiveFactors | None = None
    """Multiple of `learning_rate` by pattern of the parameter's name (`fnmatch`); the first pattern that matches
    counts, and a parameter that none matches has 1."""
    decay_scale: PositiveFactors | None = None
    """Multiple of `weight_decay` by pattern, for AdamW and Muon."""
    eps_scale: PositiveFactors | None = None
    """Multiple of AdamW's `eps` by pattern."""
    grad_norm_scale: PositiveFactors | None = None
    """Multiple by pattern with which gradients count in the global norm, for AdamW and Muon: a parameter that holds c
    times another one counts as that one if its multiple is c. `wb.models.scaling` computes all four."""
    betas: tuple[Share, Share] = (0.9, 0.98)
    eps: Positive = 1e-8
    weight_decay: Annotated[Real, Field(ge=0)] = 0.01
    """Weight decay of AdamW; not applied to biases and normalisation weights (tensors of fewer than two dims)."""
    clip_norm: Annotated[float | Mapping[str, float] | None, PlainValidator(_clip_norm)] = 1.0
    """Limit of the gradient's global norm over all parameters, each tied parameter once; `None` clips nothing. A
    mapping gives limits by pattern of the parameter's name: the parameters for which a pattern is the first that
    matches are a group, whose own norm is limited, and those that none matches are not clipped."""
    trained_during: Annotated[
        Mapping[str, tuple[int, int | None]] | None, PlainValidator(_spans), PlainSerializer(lambda spans: spans)
    ] = None
    """Steps in which parameters are trained, by pattern of their name: `(first, end)`, counted from 0, with None for an
    open end; the first pattern that matches counts, and a parameter that none matches is always trained. In other steps
    a parameter, its decay and its optimiser state stay as they are, and its gradient counts in no norm. It is computed
    nevertheless, so that plans are priced as if all were trained."""
    ema_decay: Annotated[Positive, Field(lt=1)] | None = None
    """Decay of an exponential moving average of the trained weights, taken after each update: the first one copies
    them, as `torch.optim.swa_utils.AveragedModel` does. Evaluations, samples and exports then use the average; training
    and `grad_norm` do not. Checkpoints hold both. Buffers are those of the training."""

    def __post_init__(self) -> None:
        for name in ("warmup_steps", "schedule_steps") if isinstance(self.lr_schedule, UserFunction) else ():
            if getattr(self, name) is not None:
                raise InvalidExperiment(
                    f"{name}={getattr(self, name)} is given, and lr_schedule is a callable, which decides the rate "
                    f"of every step itself. Leave {name} out, and let the callable warm up and decay."
                )
        folded = [name for name in ("decay_scale", "eps_scale", "grad_norm_scale") if getattr(self, name) is not None]
        rule = self.record.widths
        needed = {name: getattr(self, name) for name in (rule.settings if rule else ())}
        if folded and (rule is None or needed != rule.settings):
            rules = {name: each.widths for name, each in ALGORITHMS.items() if each.widths is not None}
            known_for = [f"{name}{_with(each.settings)}" for name, each in rules.items()]
            raise InvalidExperiment(
                f"The optimizer is {self.name}{_with(needed)}, and {', '.join(folded)} can be given for "
                f"{', and for '.join(known_for)}: the rules of wb.models.scaling are derived from these updates, and "
                'their factors are wrong for others. Use optimizer="adamw", take all factors of '
                'wb.models.scaling(base, target, algorithm="muon"), or give a rate_scale of your own and nothing else '
                "of the rule."
            )
        defaults = {each.name: each.default for each in dataclasses.fields(self)}
        for owner, record in ALGORITHMS.items():
            others = [name for name in record.options if name not in self.record.options]
            if named := ", ".join(name for name in others if getattr(self, name) != defaults[name]):
                raise InvalidExperiment(
                    f"The optimizer is {self.name}, and {named} can be given for {owner} alone. Use "
                    f'optimizer=wb.Optimizer("{owner}", …), or leave {named} out.'
                )
        for pattern, number in (self.fused_projections or {}).items():
            if number != int(number):
                raise InvalidExperiment(
                    f"fused_projections gives {pattern!r} {number:g} projections, and a matrix holds a whole number of "
                    "them. Give 3 for queries, keys and values."
                )

    @property
    def name(self) -> str:
        """Name of the algorithm, or of the callable that builds it."""
        return self.algorithm.name if isinstance(self.algorithm, UserFunction) else str(self.algorithm)

    @property
    def record(self) -> Algorithm:
        """Record of the algorithm, by which plans, costs and ranks know it."""
        return USER_DEFINED if isinstance(self.algorithm, UserFunction) else ALGORITHMS[str(self.algorithm)]


def _with(settings: Mapping[str, Any]) -> str:
    """Return `" with muon_scale='spectral'"`, or nothing for no settings."""
    return f" with {', '.join(f'{name}={value!r}' for name, value in settings.items())}" if settings else ""


@checked_value(_elsewhere)
class Evaluation:
    """When and on what the loss of a model on held-out samples is computed while it trains.

    The loss is computed before the first step, every `every` steps and after the last one.
    """

    every: Count = 100
    """Steps between two evaluations."""
    samples: Count = 2048
    """Held-out samples of each evaluation; `data` with fewer items is used whole."""
    masked_share: Annotated[Positive, Field(le=LARGEST_MASKED_SHARE)] | None = None
    """Fraction of the positions of a held-out sample that a masked model predicts. None takes BERT's 0.15 whatever
    `data.masked_share` is, so that runs with other masks compare; give the share of the training to see how far a model
    generalises."""
    data: Data | None = None
    """Held-out data, of the same kinds and with the same fields as the experiment's `data`; by default about 5 % of the
    documents of its text. One of the texts of a mixture is read as far as training does not read it."""
    metrics: Annotated[
        Mapping[str, Callable[[Any, Mapping[str, Any]], Any] | UserFunction] | None,
        PlainValidator(_metrics),
        PlainSerializer(lambda metrics: metrics and {name: metric.to_json() for name, metric in metrics.items()}),
    ] = None
    """Functions by name that evaluations compute beside the loss. Each is given the outputs of forward and the batch,
    and returns a sum and a count over the samples; the metric is the quotient over the whole set."""
    also: Annotated[
        Mapping[str, Any] | None,
        PlainValidator(_held_out_sets),
        PlainSerializer(
            lambda sets: (
                sets and {name: each if isinstance(each, float) else each.to_json() for name, each in sets.items()}
            )
        ),
    ] = None
    """Further held-out sets by name, whose mean losses are logged as metrics of these names. A number is the fraction
    of positions to predict in the same samples, such as that of the training, with whose loss it then compares; data
    are other text, of which as many samples are read."""


@checked_value(_elsewhere)
class Samples:
    """Prompts that a model answers while it trains: a causal model continues them, a masked model fills `[MASK]`.

    Samples are written before the first step, every `every` steps and after the last one.
    """

    prompts: Annotated[tuple[str, ...], BeforeValidator(_prompts)]
    every: Count = 200
    """Steps between two samples."""
    tokens: Count = 40
    """Tokens that a causal model writes after each prompt."""
    seed: Seed | None = 0
    """Seed of the random numbers with which tokens are drawn among the 50 most probable ones, the same at every step;
    `None` takes the most probable token each time."""


@checked_value(_elsewhere)
class Checkpoints:
    """When checkpoints are written, and how many of them are kept."""

    every: Count | None = None
    """Steps between checkpoints; `None` writes only one, at the end or when the run is stopped."""
    keep: FromZero = 3
    """Number of complete checkpoints to keep; older ones are deleted as new ones are written. 0 writes none."""


@checked_value(_elsewhere)
class Numerics:
    """Choices of how numbers are computed that devices and plans leave open."""

    compile: TrueOrFalse | None = None
    """Compile each block type once with `torch.compile`; `None` does so on GPUs only."""
    deterministic: TrueOrFalse = False
    """Use only kernels that give the same bits every time, so that a resumed run on GPUs repeats the curve of an
    unbroken one exactly. Usually slower; an operation without such a kernel ends the run. CPUs do not need it."""
    stop_on_non_finite: TrueOrFalse = True
    """End the run as failed at the first step whose loss or gradient norm is NaN or infinite, before a checkpoint of
    its weights is written. False trains on."""
    spike_factor: Annotated[Real, Field(gt=1)] | None = None
    """Multiple of the running median from which a step's loss or gradient norm is a spike; a step that is not finite is
    one, too. None looks for no spikes."""
    on_spike: Annotated[str, PlainValidator(known(ON_SPIKE))] = "skip"
    """Treatment of a spike: `skip` leaves out its update; `rewind` goes back to the last checkpoint and trains on with
    the samples after the spike (PaLM, arXiv:2204.02311, section 5.1), or skips it if there is no checkpoint yet."""
    spike_window: Annotated[Count, Field(le=LARGEST_WINDOW)] = 100
    """Number of last steps, spikes left out, over which the median is taken; no step is a leap before there are so
    many."""
    spike_limit: Count = 10
    """Number of spikes that a run may have; one more ends it as failed."""
    batch_coupling: Annotated[str, PlainValidator(known(BATCH_COUPLING))] = "keep"
    """Treatment of a loss that compares samples of one batch: `keep` compares all of them, gathered over micro-batches
    and replicas or in one micro-batch on one replica; `gather` does so even where nothing tells that samples are
    compared, as for a large model; `allow` divides it like any other, so that the loss compares the samples of one
    micro-batch."""


TRACKERS = ("wandb", "trackio")
"""Services that track runs, by their package; `workbench.runs.tracking.tracker` has their classes."""


@checked_value(_elsewhere)
class Tracking:
    """The record of a run on disk and at a tracker, Weights & Biases or Trackio.

    Examples:
        >>> wb.Tracking(project="bert-scaling", tags=("trial",), tracker="trackio")
        Tracking(project='bert-scaling', tags=('trial',), tracker='trackio')
    """

    log_every: Count = 1
    """Steps between two logged ones."""
    norms_every: Count | None = None
    """Steps between two records of the norms of weights, gradients and updates by parameter (`run.norms()`), which are
    made of the first and the last step as well; None makes none."""
    project: LineOrNothing = "workbench"
    """Project of the tracker; an empty name switches tracking off."""
    tags: tuple[Text, ...] = ()
    tracker: Annotated[str, PlainValidator(known(TRACKERS))] = "wandb"
    """Service that tracks the run: `wandb`, or `trackio` (`pip install trackio`)."""


def _one_length(value: Any) -> Any:
    if isinstance(value, Mapping):
        raise refused(
            "changes with the step, and a model is captured for one length. Train at the first length, export the run, "
            "and go on from wb.models.pretrained(folder) at the next."
        )
    return value


@checked_value(_elsewhere)
class Experiment:
    """A model, its data, and the optimisation that trains the one on the other.

    `model` is one of `wb.models.…`, or any callable that returns an `nn.Module`; `data` is one of `wb.data.…`, a
    dataset whose items are dicts of tensors, map-style or iterable, or a callable that returns one. Callables and
    datasets become a `UserModel` and a `UserData`. The model must return its loss: as `.loss`, `["loss"]`, the
    first item of a tuple, or the only scalar of what it returns; `loss` chooses among several.

    One *step* consumes `global_batch` samples (sequences of `seq_len` tokens for text) over all devices, however a
    plan divides them. Losses are means over the whole global batch, so that curves do not depend on the plan.

    The length of the training is one of `steps`, `epochs` and `tokens`. Tokens are converted to steps, rounded up;
    epochs are counted by `resolved`, as `wb.launch` does.

    Raises `InvalidExperiment` for values that can never train, before anything is computed.
    """

    model: Model
    data: Data
    steps: Count | None = None
    """Steps of the training; 1,000 unless `epochs` or `tokens` is given, None while epochs have not been counted."""
    epochs: Annotated[Positive, Field(le=LARGEST_COUNT)] | None = None
    """Passes over the data instead of `steps`; fractions are allowed."""
    tokens: LargeCount | None = None
    """Tokens to train on instead of `steps`, counted as `seq_len` for each sample."""
    global_batch: Annotated[CountOrRamp, WRITTEN] = 64
    """Samples of a step, or a table of them by the step from which they hold, counted from 0: `{0: 32, 1000: 64}`."""
    seq_len: Annotated[Count, BeforeValidator(_one_length)] = 128
    """Tokens per sample. A user-defined dataset decides the length itself: give it here, since it counts tokens."""
    learning_rate: Positive = 1e-4
    optimizer: Annotated[
        Optimizer, BeforeValidator(lambda given: given if is_group("optimizer", given) else Optimizer(given))
    ] = Optimizer()
    """An `Optimizer`, or just its algorithm: `"lamb"`, or a callable that builds it."""
    precision: Annotated[str, PlainValidator(known(PRECISIONS))] = "auto"
    """`fp32`, `bf16` (autocast over fp32 weights), or `auto`: bf16 on GPUs, fp32 on CPUs."""
    seed: Seed = 0
    loss: Annotated[
        str | int | Callable[[Any, Mapping[str, Any]], Any] | UserFunction | None, function_or(_loss), WRITTEN
    ] = None
    """Loss among what forward returns: its name, its index, or a function of the outputs and the batch that returns a
    scalar. `None` takes `.loss`, `["loss"]`, the first item of a tuple, or else the only scalar."""
    sparsity: Sparsity = None
    """Blocks of weights that are absent: `wb.sparsity.Dynamic(...)` or `wb.sparsity.Static(...)`; `None` is dense."""
    evaluation: Evaluation | None = None
    """Compute the loss on held-out samples while training; text gives up about 5 % of its documents for them."""
    samples: Samples | None = None
    """Let the model write text while it trains. Only for text, which has a tokeniser."""
    checkpoints: Checkpoints = Checkpoints()
    numerics: Numerics = Numerics()
    tracking: Tracking = Tracking()
    callbacks: Annotated[
        tuple[Callable[[Any], None] | UserFunction, ...],
        PlainValidator(_callbacks),
        PlainSerializer(lambda functions: [function.to_json() for function in functions]),
    ] = ()
    """Functions that are called after each step, on every rank, with a `workbench.execution.step_log.StepView`: its
    step, its metrics and copies of the weights. They may log scalars, ask for a checkpoint, and stop the training."""
    name: Line | None = None
    """Name of the run directory, and of the run for people; by default that of the model."""

    REPLACED: ClassVar[frozenset[str]] = frozenset()
    """Short names that `replace` takes, which an error of another function points to."""

    def __post_init__(self) -> None:
        if self.name is None:
            object.__setattr__(self, "name", self.model.name)
        object.__setattr__(self, "steps", _steps(self))
        _check_parts(self)
        if self.steps is not None:
            _check_steps(self, self.steps)
        limit = self.model.max_positions
        if limit is not None and self.seq_len > limit:
            longer = f", or build the model with max_positions={self.seq_len}" if self.model.pretrained is None else ""
            raise InvalidExperiment(
                f"seq_len={self.seq_len} is longer than the {limit} positions of {self.model.name}. "
                f"Shorten it to at most {limit}{longer}."
            )

    def _repr_html_(self) -> str:
        values = {name: (value_of(self, name), path) for name, path in PATHS.items() if name != "name"}
        rows = [
            (name, str(getattr(value, "name", value)))
            for name, (value, path) in values.items()
            if value is not None and (len(path) == 1 or value != getattr(GROUPS[path[0]], path[1], None))
        ]
        return facts_html(str(self.name), rows)

    @property
    def reading(self) -> Reading:
        """The data as this experiment reads them.

        It is made anew for each use: a reading remembers the digest of its files, which may change between two.
        """
        return self.data.reads(self)

    @property
    def total_steps(self) -> int:
        """Steps of the training; raises `InvalidExperiment` where epochs have not been counted."""
        if self.steps is None:
            raise InvalidExperiment(
                f"The steps of epochs={self.epochs:g} are not known until the samples are counted. Count them: "
                "experiment.resolved()."
            )
        return self.steps

    @property
    def schedule_steps(self) -> int:
        """Steps over which the schedule of the rate is laid."""
        return self.optimizer.schedule_steps or self.total_steps

    @property
    def warmup(self) -> int:
        """Steps of warm-up, with the default resolved."""
        given = self.optimizer.warmup_steps
        return self.schedule_steps // 10 if given is None else given

    @property
    def batches(self) -> Ramp:
        """Samples of each step."""
        return self.global_batch if isinstance(self.global_batch, Ramp) else Ramp(((0, self.global_batch),))

    @property
    def largest_batch(self) -> int:
        """Samples of the largest step, for which memory is planned."""
        return self.batches.largest

    @property
    def tokens_per_step(self) -> int:
        """Tokens of the largest step."""
        return self.largest_batch * self.seq_len

    @property
    def total_samples(self) -> int:
        """Samples of the whole training."""
        return self.samples_before(self.total_steps)

    def samples_before(self, step: int) -> int:
        """Return the samples of the first `step` steps."""
        return self.batches.sum_before(step)

    @property
    def eval_data(self) -> DataSource | None:
        """Held-out data of the evaluation, None without one or where a part of the text is held out."""
        return None if self.evaluation is None else self.evaluation.data

    @property
    def metrics(self) -> Mapping[str, Any]:
        """Functions by name that evaluations compute beside the loss; none without an evaluation."""
        return (self.evaluation and self.evaluation.metrics) or {}

    @property
    def held_out_sets(self) -> dict[str, Experiment]:
        """The further held-out sets of the evaluation by name, each as an experiment that is evaluated on it alone."""
        sets: dict[str, Experiment] = {}
        for name, given in ((self.evaluation and self.evaluation.also) or {}).items():
            change = {"eval_masked_share" if isinstance(given, float) else "eval_data": given}
            alone = self.replace(eval_also=None, metrics=None, samples=None, **change)
            sets[name] = counted(alone, self.steps)
        return sets

    def build(self) -> nn.Module:
        """Build the model in train mode, on the ambient device, as each rank and each capture of it does.

        Python's, NumPy's and torch's generators are seeded with `seed` meanwhile, and restored afterwards.
        """
        from workbench.data.datasets import seeded

        with seeded(self.seed):
            return self.factory()()

    def factory(self, loads: bool = True) -> Callable[[], nn.Module]:
        """Return what builds the model; `loads=False` leaves out pretrained weights that a checkpoint will replace."""
        build: Callable[[], nn.Module] = self.model.build
        if isinstance(self.model, _models.Pretrained):
            build = partial(self.model.build, loads, self.data.pad_id if self.model.lacks_padding else None)
        if not self.data.separates_documents:
            return build
        is_causal = self.reading.objective == "clm"
        return partial(_models.attending_within_documents, build, self.model.name, is_causal)

    def replace(self, **changes: Any) -> Experiment:
        """Return this experiment with other values, each by its short name, such as `weight_decay=0.1`.

        A changed model renames it unless `name` is given. The steps of epochs are counted anew if they may differ.
        """
        if "model" in changes and "name" not in changes and self.name == self.model.name:
            changes["name"] = None
        steps = self.steps
        if any(changes.get(name) is not None for name in LENGTHS):
            changes = {**dict.fromkeys(LENGTHS), **changes}
        elif self.epochs is not None or self.tokens is not None:
            changes["steps"] = None
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        changed = Experiment(**{**fields, **_grouped(fields, changes)})
        if changed.epochs is not None and self.epochs == changed.epochs and not _COUNTED_FROM & changes.keys():
            return counted(changed, steps)
        return changed

    def resolved(self) -> Experiment:
        """Return this experiment with its length in steps: the samples of epochs are counted, text is tokenised for it.

        Raises `DataError` for data that cannot be counted, and `InvalidExperiment` for a schedule that does not fit.
        """
        if self.steps is not None or self.epochs is None:
            return self
        samples = round(self.epochs * self.reading.samples_per_epoch())
        return counted(self, max(1, self.batches.steps_for(samples)))

    @staticmethod
    def of(**values: Any) -> Experiment:
        """Return the experiment of values by their short names, such as `weight_decay=0.1`."""
        return Experiment(**_grouped({}, values))

    def to_json(self) -> dict[str, Any]:
        """Return a description that a person can read and from which `from_json` rebuilds the experiment.

        The user's callables and datasets are described by name and source only: the objects themselves travel to
        the workers in `code/` of the run directory.
        """
        return cast(dict[str, Any], _ADAPTER.dump_python(self, mode="json"))

    @staticmethod
    def from_json(value: Mapping[str, Any], code: Mapping[str, Any] = MappingProxyType({})) -> Experiment:
        """Rebuild an experiment; `code` supplies the user-defined objects, which the JSON only names, by short name."""
        if not isinstance(value, Mapping) or not {"model", "data", "optimizer"} <= value.keys():
            raise InvalidExperiment(
                "This JSON describes no experiment: it is no object with a model, data and an optimizer. Give what "
                "experiment.to_json() returned, or experiment.json of a run directory."
            )
        described: dict[str, Any] = {
            name: dict(item) if name in GROUPS and item else item for name, item in value.items()
        }
        for name, own in code.items():
            *group, last = PATHS[name]
            holder = described[group[0]] if group else described
            if own is None or not holder:
                continue
            # The object with the name and the source that its JSON says.
            said = holder[last]
            if name == "model":
                holder[last] = _models.from_json(said, factory=own)
            elif name in ("data", "eval_data"):
                holder[last] = _data.from_json(said, dataset=own)
            elif name == "metrics":
                holder[last] = {metric: as_user_function(item, own.get(metric)) for metric, item in said.items()}
            elif name == "callbacks":
                holder[last] = [as_user_function(*pair) for pair in zip(said, own, strict=True)]
            else:
                holder[last] = as_user_function(said, own)
        steps = None
        if described.get("epochs") is not None or described.get("tokens") is not None:
            steps = described.pop("steps", None)  # as it was counted, so that the data need not be here
        return counted(Experiment(**described), steps)


_ADAPTER = TypeAdapter(Experiment)
GROUPS: Mapping[str, type] = {
    "optimizer": Optimizer,
    "evaluation": Evaluation,
    "samples": Samples,
    "checkpoints": Checkpoints,
    "numerics": Numerics,
    "tracking": Tracking,
}
"""Fields of an experiment that hold several values."""
_SHORT: Mapping[tuple[str, ...], str] = {
    ("optimizer", "algorithm"): "optimizer",
    ("evaluation", "every"): "eval_every",
    ("evaluation", "samples"): "eval_samples",
    ("evaluation", "masked_share"): "eval_masked_share",
    ("evaluation", "data"): "eval_data",
    ("evaluation", "also"): "eval_also",
    ("samples", "every"): "sample_every",
    ("samples", "tokens"): "sample_tokens",
    ("samples", "seed"): "sample_seed",
    ("checkpoints", "every"): "checkpoint_every",
    ("checkpoints", "keep"): "keep_checkpoints",
}
"""Short names that are not the name of the field."""
PATHS: Mapping[str, tuple[str, ...]] = {
    _SHORT.get(path, path[-1]): path
    for field in dataclasses.fields(Experiment)
    for path in (
        [(field.name, part.name) for part in dataclasses.fields(GROUPS[field.name])]
        if field.name in GROUPS
        else [(field.name,)]
    )
}
"""Fields that lead to a value, by its short name: `("optimizer", "weight_decay")` of `weight_decay`."""
Experiment.REPLACED = frozenset(PATHS)
USER_PARTS = ("model", "data", "eval_data", "lr_schedule", "loss", "optimizer", "metrics", "callbacks")
"""Short names of what may be user-defined, whose code travels to the workers in `code/<name>.pkl`."""
_COUNTED_FROM = {"model", "data", "seq_len", "global_batch", "evaluation", "eval_samples", "eval_data"}
"""Values that the number of steps of an epoch depends on."""


def value_of(experiment: Experiment, name: str) -> Any:
    """Return a value by its short name, or a group by its own; None where the value that holds it is None."""
    value: Any = experiment
    for part in PATHS.get(name, (name,)):
        value = None if value is None else getattr(value, part)
    return value


def values_by_name(described: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values in the JSON of an experiment by their short names, and all else in it as it is."""
    values: dict[str, Any] = {}
    for field, value in described.items():
        if field in GROUPS and isinstance(value, Mapping):
            values |= {_SHORT.get((field, part), part): item for part, item in value.items()}
        else:
            values[field] = value
    return values


def json_value(experiment: Experiment, name: str, value: Any) -> Any:
    """Return how the JSON of an experiment writes a value that `replace` gave it by its short name."""
    described = experiment.to_json()
    return (described if is_group(name, value) else values_by_name(described)).get(name)


def user_parts(experiment: Experiment) -> dict[str, Any]:
    """Return the user-defined objects in an experiment, by short name; None for one that is only described."""
    parts: dict[str, Any] = {}
    for name in USER_PARTS:
        value = value_of(experiment, name)
        if isinstance(value, UserFunction):
            parts[name] = value.function
        elif isinstance(value, _models.UserModel):
            parts[name] = value.factory
        elif isinstance(value, _data.UserData | _data.Mixture) and value.is_user_defined:
            parts[name] = value.dataset_or_factory
        elif name == "callbacks" and value:
            parts[name] = None if any(each.function is None for each in value) else [each.function for each in value]
        elif isinstance(value, Mapping) and name == "metrics":
            functions = {metric: function.function for metric, function in value.items()}
            parts[name] = None if None in functions.values() else functions
    return parts


def counted(experiment: Experiment, steps: Any) -> Experiment:
    """Return a copy of an experiment in epochs that knows its steps; None leaves them unknown."""
    if steps is None or experiment.epochs is None:
        return experiment
    if not is_count(steps) or steps > LARGEST_COUNT:
        raise InvalidExperiment(f"steps={steps!r} must be a whole number from 1 to {LARGEST_COUNT:,}.")
    known_length = copy.copy(experiment)
    object.__setattr__(known_length, "steps", steps)
    _check_steps(known_length, steps)
    return known_length


def is_group(name: str, value: Any) -> bool:
    """Return True if a value is a whole group, as itself or as JSON; the optimiser's may be just its algorithm."""
    if name != "optimizer":
        return name in GROUPS
    return isinstance(value, Optimizer) or (isinstance(value, Mapping) and "type" not in value)


def _grouped(fields: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of `Experiment` for values by short names; `fields` are those of the experiment they change."""
    grouped: dict[str, Any] = {}
    for name, value in sorted(changes.items(), key=lambda change: not is_group(*change)):
        if name not in PATHS and name not in GROUPS:
            hint = suggestion(name, {*PATHS, *GROUPS})
            raise UnknownParameter(f"Experiment has no parameter {name!r}. {hint}")
        if is_group(name, value) or len(PATHS[name]) == 1:
            grouped[name] = value
            continue
        field, part = PATHS[name]
        holder = grouped.get(field, fields.get(field))
        if dataclasses.is_dataclass(holder):
            holder = {each.name: getattr(holder, each.name) for each in dataclasses.fields(holder)}
        if holder is not None or value is not None:
            grouped[field] = {**(holder or {}), part: value}
    return grouped


def _steps(experiment: Experiment) -> int | None:
    """Return the number of steps, None if epochs must be counted first; raises unless at most one length is given."""
    given = [name for name in LENGTHS if getattr(experiment, name) is not None]
    if len(given) > 1:
        raise InvalidExperiment(
            f"The length of the training is given {len(given)} times: "
            f"{' and '.join(f'{name}={getattr(experiment, name)!r}' for name in given)}. Give one of them.",
            parameter=given[-1],
        )
    if experiment.tokens is None:
        return experiment.steps if given else DEFAULT_STEPS
    steps = experiment.batches.steps_for(math.ceil(experiment.tokens / experiment.seq_len))
    if steps > LARGEST_COUNT:
        raise InvalidExperiment(
            f"tokens={experiment.tokens:,} are {steps:,} steps, which must be at most {LARGEST_COUNT:,}. Give fewer.",
            parameter="tokens",
        )
    return steps


def _check_parts(experiment: Experiment) -> None:
    """Raise `InvalidExperiment` unless the parts fit together: evaluation, samples and data, spikes and checkpoints."""
    data, held_out = experiment.data, experiment.eval_data
    if experiment.evaluation is not None and held_out is None and data.is_user_defined:
        raise InvalidExperiment(
            f"evaluation is given, but a user-defined dataset ({data.name}) is not split. "
            "Give held-out samples: evaluation=wb.Evaluation(data=my_validation_dataset).",
            parameter="eval_data",
        )
    if held_out is not None and data.is_user_defined and not held_out.is_user_defined:
        raise InvalidExperiment(
            f"The evaluation's data is the text {held_out.name}, but data is a user-defined dataset ({data.name}), "
            "which has another tokeniser or none. Give a dataset with the same fields as the evaluation's data.",
            parameter="eval_data",
        )
    # Further held-out sets have names of their own, and suit the data.
    further = (experiment.evaluation and experiment.evaluation.also) or {}
    if both := sorted(further.keys() & experiment.metrics.keys()):
        raise InvalidExperiment(
            f"{', '.join(both)} is a metric and a held-out set of the evaluation. Give one of them another name.",
            parameter="eval_also",
        )
    if further and data.is_user_defined:
        raise InvalidExperiment(
            f"also has the held-out sets {', '.join(further)}, and data is a user-defined dataset ({data.name}), which "
            "has neither masks nor a tokeniser. Leave also out, and evaluate a checkpoint on another dataset when the "
            "run has ended: run.evaluate(my_dataset).",
            parameter="eval_also",
        )
    shares = {name: given for name, given in further.items() if isinstance(given, float)}
    if shares and experiment.reading.labelled_share() == 1:
        raise InvalidExperiment(
            f"also={shares} are fractions of masked positions, and {experiment.model.name} on {data.name} predicts "
            "every position of its labels. Give text, such as wb.data.corpus(...), or leave them out.",
            parameter="eval_also",
        )
    # An average of the weights, samples and rewinding each ask something of the rest.
    if experiment.optimizer.ema_decay is not None and experiment.sparsity is not None:
        raise InvalidExperiment(
            f"ema_decay={experiment.optimizer.ema_decay} averages weights, and sparsity takes blocks of them away and "
            "back, whose averages would be of different steps. Give one of the two.",
            parameter="ema_decay",
        )
    if experiment.samples is not None and data.is_user_defined:
        raise InvalidExperiment(
            f"samples need a tokeniser, and data is a user-defined dataset ({data.name}), which has none. "
            "Train on text (wb.data.corpus or wb.data.hub), or remove samples.",
            parameter="samples",
        )
    numerics, checkpoints = experiment.numerics, experiment.checkpoints
    rewinds = numerics.spike_factor is not None and numerics.on_spike == "rewind"
    if rewinds and (checkpoints.every is None or not checkpoints.keep):
        raise InvalidExperiment(
            "on_spike='rewind' goes back to the last checkpoint, and none is written while the run trains. Give "
            "checkpoints=wb.Checkpoints(every=100), or on_spike='skip'.",
            parameter="on_spike",
        )


def _check_steps(experiment: Experiment, steps: int) -> None:
    """Raise `InvalidExperiment` unless each step has a learning rate, and at most one update of a sparse pattern."""
    schedule, warmup = experiment.optimizer.lr_schedule, experiment.optimizer.warmup_steps
    if isinstance(schedule, UserFunction) and schedule.function is not None:
        for step in sorted({0, steps // 2, steps - 1}):
            try:
                factor = schedule(step)
            except Exception as error:
                raise InvalidExperiment(
                    f"lr_schedule raised {in_words(error, f' for step {step}')}. It is called with the number of the "
                    "step, from 0, and must return the multiple of learning_rate."
                ) from error
            if not is_factor(factor):
                raise InvalidExperiment(
                    f"lr_schedule returned {factor!r} for step {step}. It must return a number of at least 0: the "
                    "multiple of learning_rate for that step."
                )
    length = experiment.optimizer.schedule_steps or steps
    if warmup is not None and warmup > length:
        of_what = "experiment" if length == steps else "schedule"
        raise InvalidExperiment(
            f"warmup_steps={warmup} lies outside the {length} steps of the {of_what}. "
            f"Choose 0 to {length}, or None for a tenth."
        )
    if schedule in ("linear", "cosine", "wsd") and length < steps:
        raise InvalidExperiment(
            f"schedule_steps={length:,} lets the rate be 0 for the last {steps - length:,} of the {steps:,} steps. "
            f"Give at least {steps:,}, leave it out, or train at most {length:,} steps."
        )
    for pattern, (first, _) in (experiment.optimizer.trained_during or {}).items():
        if first >= steps:
            raise InvalidExperiment(
                f"trained_during trains {pattern!r} from step {first:,} on, and the experiment has {steps:,} steps, "
                "counted from 0. Begin earlier, or freeze these parameters: requires_grad_(False) in the model."
            )
    updates = getattr(experiment.sparsity, "updates", 0)
    if updates > steps:
        raise InvalidExperiment(
            f"updates={updates:,} of the pattern are more than the {steps:,} steps of the experiment. "
            f"Choose at most {steps:,} updates, or train longer."
        )
