"""Axes of a sweep: values of an experiment with those to try, checked by building every experiment of the grid."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any

from workbench.data import UserData
from workbench.data import from_json as data_from_json
from workbench.errors import InvalidExperiment, UnknownParameter, suggestion
from workbench.experiment import GROUPS, PATHS, Experiment, json_value
from workbench.models import UserModel
from workbench.sparsity import TYPES as SPARSITIES
from workbench.sparsity import from_json as sparsity_from_json
from workbench.user_code import UserFunction, innermost, source_of, telling_name

OTHERWISE = {
    "seed": "Give the number of seeds: seeds=3",
    "name": "Runs of a sweep are named after their values",
    "tags": "Give the tags to the experiment",
    "project": "Give the project to the experiment",
    "tracking": "Give the tracking to the experiment",
}
"""Values of an experiment that are no axes, and what to do instead."""
PLAN_FREE = frozenset(
    {"learning_rate", "warmup_steps", "lr_schedule", "betas", "eps", "weight_decay", "steps", "log_every"}
    | {"rate_scale", "decay_scale", "eps_scale", "grad_norm_scale"}
    | {"epochs", "tokens", "checkpoint_every", "keep_checkpoints", "checkpoints", "stop_on_non_finite"}
    | {"spike_factor", "on_spike", "spike_window", "spike_limit"}
)
"""Values of an experiment that change no plan; runs that differ in no other value share one."""
LARGEST_GRID = 10_000
Choice = Mapping[str, int]
"""Position of the chosen value on each axis, by the axis' name."""


@dataclasses.dataclass(frozen=True)
class Axes:
    """The axes of a sweep with their values, of one experiment."""

    experiment: Experiment
    values: Mapping[str, Sequence[Any]]

    def __post_init__(self) -> None:
        for name, values in self.values.items():
            _check_axis(name, values)
        if not self.values:
            raise InvalidExperiment("A sweep needs an axis. Give one, such as learning_rate=[1e-4, 3e-4].")
        named = {name: tuple(_named(name, value) for value in values) for name, values in self.values.items()}
        object.__setattr__(self, "values", named)
        size = len(list(itertools.islice(self.choices(), LARGEST_GRID + 1)))
        if size > LARGEST_GRID:
            raise InvalidExperiment(f"The axes have more than {LARGEST_GRID:,} combinations. Give fewer values.")
        for choice in self.choices():
            self.experiment_of(choice)
        for name, values in self.values.items():
            written = [json.dumps(value, sort_keys=True, default=str) for value in self.json_values(name)]
            twice = [value for value, text in zip(values, written, strict=True) if written.count(text) > 1]
            if twice:
                raise InvalidExperiment(f"{name} has the value {twice[0]!r} more than once. Give each value once.")

    def choices(self) -> Iterator[dict[str, int]]:
        """Return every combination of values, the last axis first."""
        ranges = (range(len(values)) for values in self.values.values())
        return (dict(zip(self.values, positions, strict=True)) for positions in itertools.product(*ranges))

    def experiment_of(self, choice: Choice, **changes: Any) -> Experiment:
        """Return the experiment with the chosen values and `changes`; raises `InvalidExperiment` for bad values."""
        chosen = {name: self.values[name][position] for name, position in choice.items()}
        return self.experiment.replace(**chosen, **changes)

    def json_values(self, name: str) -> list[Any]:
        """Return the values of an axis as `Experiment.to_json` writes them."""
        first = dict.fromkeys(self.values, 0)
        one_axis = ({**first, name: position} for position in range(len(self.values[name])))
        given = zip(one_axis, self.values[name], strict=True)
        return [json_value(self.experiment_of(choice), name, value) for choice, value in given]


def _named(axis: str, value: Any) -> Any:
    """Return a value of an axis; a function or class of the user gets a name that tells it from others of its code."""
    if not isinstance(innermost(value), FunctionType | type):
        return value
    name = telling_name(value)
    if axis == "model":
        return UserModel(value, name)
    return UserData(value, name) if axis in ("data", "eval_data") else UserFunction(value, name, source_of(value))


def _check_axis(name: str, values: Any) -> None:
    if name not in PATHS and name not in GROUPS:
        hint = suggestion(name, {*PATHS, *GROUPS})
        raise UnknownParameter(f"Experiment has no parameter {name!r} to sweep. {hint}")
    if name in OTHERWISE:
        raise InvalidExperiment(f"{name} is no axis of a sweep. {OTHERWISE[name]}.")
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise InvalidExperiment(f"{name}={values!r} is not a list of values. Write {name}=[{values!r}].")
    if not len(values):
        raise InvalidExperiment(f"{name}=[] has no value. Give at least one, or leave the axis out.")


def label(value: Any) -> Any:
    """Return a value of an axis, as JSON, for tables and figures: itself if it is plain, else a short text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping) and value.get("type") in SPARSITIES:
        return sparsity_from_json(value).label
    if isinstance(value, Mapping) and value.get("type") == "mixture":
        return data_from_json(value).name
    if isinstance(value, Mapping):
        return str(value.get("name") or ", ".join(f"{key}={item}" for key, item in value.items()))
    return ", ".join(map(str, value)) if isinstance(value, Sequence) else str(value)
