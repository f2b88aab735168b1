"""Selections by a mask (`x[mask]`), whose size depends on values: how many items they take is learnt from examples.

A masked autoencoder hides the same number of patches of each sample and gives what is left a fixed shape. No export
knows that number. So forward runs once over a few samples of the data; a selection that takes as many items of each of
them becomes an opaque call with that many. A micro-batch of which it takes another number in all ends the run. One with
that number has its items where the whole batch has them, also where its samples differ among themselves.
"""

from __future__ import annotations

import copy
import sys
import traceback
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch
from torch import nn

from workbench.capture.opaque import OpaqueCall, opaque_call
from workbench.capture.source_lines import line_of_frames
from workbench.capture.torch_internals import alone, patched
from workbench.data._datasets import untouched_generators

SELECTION = "x[mask]"
"""Label of the opaque calls."""
SAMPLES = 4
"""Number of examples that forward runs over."""
Key = tuple[str, int, torch.Size, torch.Size]
Selections = Mapping[Key, tuple[torch.Tensor, int]]
"""Line, and shapes of a sample of the values and of its mask -> the mask of an example, and how many items it takes."""


def selections_of(model: nn.Module, examples: Mapping[str, torch.Tensor]) -> Selections:
    """Return the selections of a forward over examples that take as many items of each, but not all.

    A mask that hides nothing in the examples (of text without padding) may hide something in others. The model is as
    before. The result is empty if its forward raises, or if it cannot be copied.
    """
    device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
    batch = {name: field[:SAMPLES].to(device) for name, field in examples.items()}
    found: dict[Key, list[torch.Tensor]] = {}

    def observed(key: Key, _values: torch.Tensor, mask: torch.Tensor) -> None:
        found.setdefault(key, []).extend(mask)

    try:
        trial = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
        with torch.no_grad(), untouched_generators(device), alone(), patched_selections(observed):
            trial(**batch)
    except Exception:  # no copy can be made, or the forward needs another device or samples of other values
        return {}
    selections = {}
    for key, [mask, *others] in found.items():
        taken = int(mask.sum())
        if others and 0 < taken < mask.numel() and all(int(other.sum()) == taken for other in others):
            selections[key] = mask, taken
    return selections


def opaque_selections(selections: Selections, calls: list[OpaqueCall]) -> Any:
    """Return a context in which the selections are opaque; `calls` collects them."""

    def selected(key: Key, values: torch.Tensor, mask: torch.Tensor) -> Any:
        if key not in selections:
            return None
        example, taken = selections[key]
        reason = (
            f"how many items it takes depends on values (it took {taken:,} of each sample that was tried, and must)"
        )
        line = line_of_frames(traceback.extract_stack())
        call = opaque_call(SELECTION, _taken, known=[None, example], reason=reason, line=line, calls=calls)
        return call(values, mask)

    return patched_selections(selected)


def _taken(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return values[mask]


def patched_selections(select: Callable[[Key, torch.Tensor, torch.Tensor], Any]) -> Any:
    """Return a context in which `x[mask]` is what `select` returns, or as ever if that is None."""
    original: Any = torch.Tensor.__getitem__

    def getitem(values: torch.Tensor, index: Any) -> Any:
        is_mask = isinstance(index, torch.Tensor) and index.dtype == torch.bool and index.ndim > 1
        if is_mask and values.shape[: index.ndim] == index.shape:
            caller: FrameType = sys._getframe(1)
            key = (caller.f_code.co_filename, caller.f_lineno, values.shape[1:], index.shape[1:])
            if (result := select(key, values, index)) is not None:
                return result
        return original(values, index)

    return patched(torch.Tensor, "__getitem__", getitem)
