"""The loss among the values that forward returns: found, or chosen by the experiment's `loss`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any

import torch

from workbench.capture.graph import spec_of
from workbench.capture.operations import reachable
from workbench.columns import log_scalar
from workbench.errors import CaptureError

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
    loss = _returned_loss(result, choice, batch, name)
    beside = result[1] if _has_dict_beside(result) else result if type(result) is dict else {}
    for key, value in beside.items():
        if isinstance(value, torch.Tensor) and not value.ndim and value is not loss and not value.is_complex():
            log_scalar(key, value)
    return loss


def _has_dict_beside(result: Any) -> bool:
    """Return True for a loss and a dict."""
    is_pair = isinstance(result, (tuple, list)) and len(result) == 2
    return is_pair and isinstance(result[0], torch.Tensor) and type(result[1]) is dict


def _returned_loss(result: Any, choice: LossChoice, batch: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    if choice is not None:
        return _checked(_chosen(result, choice, name), result, batch, name)
    named = result.get("loss", _MISSING) if isinstance(result, Mapping) else getattr(result, "loss", _MISSING)
    if named is not _MISSING:
        return _checked(named, result, batch, name)
    first = result[0] if isinstance(result, (tuple, list)) and result else result
    candidates = _candidates(result)
    if _is_scalar(first) and first.ndim == 0 and not any(_is_apart(first, other) for other in candidates.values()):
        return first  # type: ignore[no-any-return]
    if len(candidates) > 1:
        raise CaptureError(
            f"{name} returned {len(candidates)} scalars that could be its loss. Choose one in the experiment: "
            f"{', or '.join(_as_choice(path) for path in candidates)}; or combine them in a function of the outputs "
            f"and the batch."
        )
    return _checked(next(iter(candidates.values()), first), result, batch, name)


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
