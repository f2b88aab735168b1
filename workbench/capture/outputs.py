"""The values that forward returns: outputs that a user's metrics read in evaluations, and the loss among them.

The tensors that a metric reads become values of the graph. The structure that held them (tuple, dict, dataclass) is
kept without them, and is filled again with the values of each micro-batch.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from workbench.base.errors import CaptureError, InvalidExperiment, in_words
from workbench.base.tensors import TensorSpec, spec_of
from workbench.capture.operations import reachable
from workbench.record.columns import log_scalar

Metric = Callable[..., Any]
"""Function of the outputs and the batch that returns a sum and a count."""
TOLERANCE = 1e-2
"""Relative difference that is taken for rounding between a metric of some samples and the sum of its parts."""


@dataclass(frozen=True)
class Slot:
    """Place of a tensor in what forward returned."""

    index: int
    spec: TensorSpec


@dataclass(frozen=True)
class Outputs:
    """The tensors of what forward returned that are computed in an evaluation."""

    template: Any = dataclasses.field(repr=False)
    """Structure of what forward returned, with a `Slot` for each tensor."""
    values: Mapping[int, str]
    """Index of a slot -> the value of the graph that fills it."""

    @property
    def names(self) -> tuple[str, ...]:
        """Values of the graph, each once."""
        return tuple(dict.fromkeys(self.values.values()))

    def rebuilt(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return what forward returned, for the tensors of `names`; those that nothing reads have no values."""
        by_name = dict(zip(self.names, tensors, strict=True))

        def filled(slot: Slot) -> torch.Tensor:
            if (name := self.values.get(slot.index)) is not None:
                return by_name[name]
            return torch.empty(slot.spec.shape, dtype=getattr(torch, slot.spec.dtype), device="meta")

        return mapped(self.template, Slot, filled)


def mapped(value: Any, leaf: type, function: Callable[[Any], Any]) -> Any:
    """Return a structure with `function` of each instance of `leaf`; objects that are no structure become None."""
    if isinstance(value, leaf):
        return function(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, Slot)):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        if isinstance(value, Mapping):  # an output class of transformers
            return type(value)(**{name: mapped(item, leaf, function) for name, item in fields.items()})
        result = copy.copy(value)
        for name, item in fields.items():
            object.__setattr__(result, name, mapped(item, leaf, function))
        return result
    if isinstance(value, Mapping):
        return {key: mapped(item, leaf, function) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [mapped(item, leaf, function) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value if isinstance(value, (str, bool, int, float)) else None


def flattened(result: Any) -> tuple[Any, list[torch.Tensor]]:
    """Return what forward returned with a `Slot` for each tensor, and the tensors."""
    tensors: list[torch.Tensor] = []

    def slot(tensor: torch.Tensor) -> Slot:
        tensors.append(tensor)
        sizes = tuple(size if isinstance(size, int) else 1 for size in tensor.shape)  # 1: it depends on values
        return Slot(len(tensors) - 1, TensorSpec("", sizes, str(tensor.dtype).removeprefix("torch.")))

    return mapped(result, torch.Tensor, slot), tensors


def slots_of(template: Any) -> list[Slot]:
    """Return the slots of a template, in order."""
    found: list[Slot] = []
    mapped(template, Slot, found.append)
    return found


def sum_and_count(name: str, metric: Metric, outputs: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return a metric's sum and count as a tensor of two; raise `InvalidExperiment` for anything else."""
    result = metric(outputs, batch)

    def is_number(value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            return value.ndim == 0 and not value.is_complex()
        return isinstance(value, Real) or getattr(value, "shape", None) == ()

    is_pair = isinstance(result, (tuple, list)) and len(result) == 2
    if not is_pair or not all(map(is_number, result)):
        raise InvalidExperiment(
            f"The metric {name!r} returned {_described(result)} instead of two scalars. Return the sum and the count "
            "over the samples of the batch, for instance (correct.sum(), correct.numel())."
        )
    return torch.stack([torch.as_tensor(value).detach().double() for value in result])


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}" if value.ndim else "one scalar"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)} ({', '.join(map(_described, value))})"
    return "None" if value is None else f"{type(value).__name__} {value!r}"[:80]


def read_by(metrics: Mapping[str, Metric], template: Any, batch: Mapping[str, TensorSpec]) -> dict[int, str]:
    """Return the slots that the metrics read, each with the name of a metric, by running them on made-up values.

    Raises `InvalidExperiment` for a metric that fails, does not return two scalars, or does not add up over samples.
    """
    slots = slots_of(template)
    samples = next(iter(batch.values())).shape[0]
    batched = all(spec.shape[:1] == (samples,) for spec in (*batch.values(), *(s.spec for s in slots if s.spec.shape)))
    tried = min(samples, 2) if batched else samples
    fields = {key: _made_up(spec, tried if batched else None) for key, spec in batch.items()}
    tensors = {slot.index: _made_up(slot.spec, tried if batched else None) for slot in slots}
    read: dict[int, str] = {}
    for name, metric in metrics.items():
        whole, seen = _tried(name, metric, template, tensors, fields)
        read |= dict.fromkeys(seen - set(read), name)
        if batched and tried == 2:
            ones = [_tried(name, metric, template, _sample(tensors, at), _sample(fields, at))[0] for at in (0, 1)]
            if not torch.allclose(whole, ones[0] + ones[1], rtol=TOLERANCE, atol=1e-6, equal_nan=True):
                (total, count), (totals, counts) = whole.tolist(), (ones[0] + ones[1]).tolist()
                raise InvalidExperiment(
                    f"The metric {name!r} does not add up over samples: two made-up samples give ({total:.4g}, "
                    f"{count:.4g}) together and ({totals:.4g}, {counts:.4g}) one by one. Return a sum over the samples "
                    "and the number of what was summed, not a mean."
                )
    return read


def _tried(
    name: str,
    metric: Metric,
    template: Any,
    tensors: Mapping[int, torch.Tensor],
    batch: Mapping[str, torch.Tensor],
) -> tuple[torch.Tensor, set[int]]:
    """Return a metric of made-up outputs, and the slots that it reads."""
    outputs = mapped(template, Slot, lambda slot: tensors[slot.index])
    try:
        reads = _Reads({id(tensor): index for index, tensor in tensors.items()})
        with torch.random.fork_rng(devices=[]), torch.no_grad(), reads:
            return sum_and_count(name, metric, outputs, dict(batch)), reads.seen
    except InvalidExperiment:
        raise
    except Exception as error:
        fields = ", ".join(f"{key} {list(value.shape)}" for key, value in batch.items())
        returned = ", ".join(str(list(value.shape)) for value in tensors.values())
        raise InvalidExperiment(
            f"The metric {name!r} raised {in_words(error)}. It was tried on outputs of the shapes "
            f"{returned} and a batch of {fields}: see that it runs on such tensors."
        ) from error


def _sample(tensors: Mapping[Any, torch.Tensor], sample: int) -> dict[Any, torch.Tensor]:
    return {key: value[sample : sample + 1] if value.ndim else value for key, value in tensors.items()}


def _made_up(spec: TensorSpec, samples: int | None) -> torch.Tensor:
    """Return a tensor of zeros and ones, or of fractions, that draws no random numbers."""
    shape = spec.shape if samples is None or not spec.shape else (samples, *spec.shape[1:])
    dtype = getattr(torch, spec.dtype)
    numbers = torch.arange(math.prod(shape)).reshape(shape)
    if dtype.is_floating_point or dtype.is_complex:
        return (numbers % 7 / 7).to(dtype)
    return (numbers % 2).to(dtype)


class _Reads(TorchFunctionMode):
    """Notes which of some tensors are read; `slots` maps the `id` of each to its slot."""

    def __init__(self, slots: Mapping[int, int]) -> None:
        super().__init__()
        self._slots, self.seen = slots, set[int]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= {self._slots[id(leaf)] for leaf in tree_leaves((args, kwargs)) if id(leaf) in self._slots}
        return func(*args, **(kwargs or {}))


# The loss among the values that forward returns: found, or chosen by the experiment's `loss`.

LossChoice = str | int | Callable[..., Any] | None
"""Name or index of the loss in what forward returns, or a callable of the outputs and the batch; None finds it."""
Path = tuple[str | int, ...]
MAX_DEPTH = 4
"""Depth to which the returned tuples, dicts and dataclasses are searched for scalars."""


def find_loss(result: Any, choice: LossChoice, batch: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """Return the scalar to minimise.

    Without a choice it is `.loss`, `["loss"]`, the output itself, the first item of a tuple if no other scalar in
    it applies parameters that the first does not, or else the only scalar that a gradient reaches, wherever it stands.

    The scalars of a dict beside the loss are logged (`log_scalar`): of `(loss, {"accuracy": …})` that forward or a
    callable choice returns, and of a dict that holds the loss itself. What has dims in such a dict of forward is left
    to metrics.

    Args:
        result: what forward returned.
        batch: the arguments of forward, for a choice that is a callable.
        name: the model's name in errors.

    Raises:
        CaptureError: there is no such scalar, or there are several; names them and the `loss=` that chooses each.
        InvalidExperiment: a scalar in a dict beside the loss cannot be logged.
    """
    if callable(choice):
        result = choice(result, batch)
        loss, beside = result if _has_dict_beside(result) else (result, {})
        for key, value in beside.items():
            log_scalar(key, *value) if isinstance(value, tuple) else log_scalar(key, value)
        return _checked(loss, result, batch, name)
    named = result.get("loss", _MISSING) if isinstance(result, Mapping) else getattr(result, "loss", _MISSING)
    if choice is not None:
        loss = _checked(_chosen(result, choice, name), result, batch, name)
    elif named is not _MISSING:
        loss = _checked(named, result, batch, name)
    else:
        loss = result[0] if isinstance(result, (tuple, list)) and result else result
        candidates = _candidates(result)
        is_first = _is_scalar(loss) and loss.ndim == 0
        if not is_first or any(_is_apart(loss, other) for other in candidates.values()):
            if len(candidates) > 1:
                raise CaptureError(
                    f"{name} returned {len(candidates)} scalars that could be its loss. Choose one in the experiment: "
                    f"{', or '.join(_as_choice(path) for path in candidates)}; or combine them in a function of the "
                    "outputs and the batch."
                )
            loss = _checked(next(iter(candidates.values()), loss), result, batch, name)
    beside = result[1] if _has_dict_beside(result) else result if type(result) is dict else {}
    for key, value in beside.items():
        if isinstance(value, torch.Tensor) and not value.ndim and value is not loss and not value.is_complex():
            log_scalar(key, value)
    return loss  # type: ignore[no-any-return]


def _has_dict_beside(result: Any) -> bool:
    """Return True for a loss and a dict."""
    is_pair = isinstance(result, (tuple, list)) and len(result) == 2
    return is_pair and isinstance(result[0], torch.Tensor) and type(result[1]) is dict


_MISSING = object()


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1 and value.is_floating_point()


def _checked(loss: Any, result: Any, batch: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    if _is_scalar(loss):
        return loss  # type: ignore[no-any-return]
    if loss is None and result is not None:
        raise CaptureError(
            f"{name} returned no loss for a batch of {', '.join(batch)}. Most models compute it where they are given "
            f"labels: add the field to the items of the dataset."
        )
    if isinstance(loss, float | int | torch.SymFloat | torch.SymInt) and not isinstance(loss, bool):
        raise CaptureError(
            f"{name} returned a number of Python's where its loss should be, through which no gradient goes. Let "
            "forward return the tensor itself, without .item() or float()."
        )
    returned = spec_of("loss", loss).shape if isinstance(loss, torch.Tensor) else type(loss).__name__
    raise CaptureError(
        f"{name} returned {returned} where its loss should be. Let forward return a scalar loss (alone, or anywhere in "
        f"a tuple, dict or dataclass), or make one with loss=lambda outputs, batch: … in the experiment."
    )


def _candidates(result: Any) -> dict[Path, torch.Tensor]:
    """Return the scalars in what forward returned; only those that a gradient reaches, if it reaches any.

    Tensors of one element but with dims are left out: at a micro-batch of 1, logits may be such.
    """
    scalars: dict[int, tuple[Path, torch.Tensor]] = {}
    for path, value in _leaves(result, ()):
        if _is_scalar(value) and value.ndim == 0:
            scalars.setdefault(id(value), (path, value))
    learned = {path: value for path, value in scalars.values() if value.requires_grad}
    return learned or dict(scalars.values())


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    items: Iterator[tuple[Any, Any]] = iter(())
    if isinstance(value, Mapping):
        items = iter(value.items())
    elif isinstance(value, (tuple, list)):
        items = enumerate(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
    else:
        yield path, value
    for key, item in items:
        if len(path) < MAX_DEPTH:
            yield from _leaves(item, (*path, key))


def _is_apart(first: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if a scalar applies parameters in steps of its own, as the second loss of a GAN does.

    Parts of the first, functions of these and measures of what the first is computed from do not.
    """
    own = {step for step in _history([other.grad_fn], _history([first.grad_fn])) if step.next_functions}
    leaves = (source for step in own for source, _ in step.next_functions if source is not None)
    return any(not source.next_functions for source in leaves)


def _history(steps: Iterable[Any], known: Set[Any] = frozenset()) -> set[Any]:
    """Return the steps of autograd that `steps` follow from, without those that are `known`."""

    def new(found: Iterable[Any]) -> list[Any]:
        return [step for step in found if step is not None and step not in known]

    return reachable(new(steps), lambda step: new(source for source, _ in step.next_functions))


def _as_choice(path: Path) -> str:
    """Return the `loss=…` that chooses the scalar at a path."""
    if len(path) == 1:
        return f"loss={path[0]!r}"
    return f"loss=lambda outputs, batch: outputs{''.join(f'[{key!r}]' for key in path)}"


def _chosen(result: Any, choice: Any, name: str) -> Any:
    """Return what `choice` takes out of `result`; raise `CaptureError` if there is no such entry."""
    is_sequence = isinstance(result, (tuple, list))
    if isinstance(choice, str) and isinstance(result, Mapping) and choice in result:
        return result[choice]
    if isinstance(choice, str) and not isinstance(result, (Mapping, torch.Tensor)) and hasattr(result, choice):
        return getattr(result, choice)
    if isinstance(choice, int) and is_sequence and -len(result) <= choice < len(result):
        return result[choice]
    candidates = ", ".join(_as_choice(path) for path in _candidates(result) if path)
    if isinstance(result, (tuple, list, Mapping)):
        returned = f"a {type(result).__name__} of {len(result)} entries"
    else:
        returned = f"a {type(result).__name__}"
    advice = f"Give one of its scalars: {candidates}." if candidates else "Leave loss out if forward returns it alone."
    raise CaptureError(f"The experiment chooses loss={choice!r}, and {name} returned {returned} without it. {advice}")
