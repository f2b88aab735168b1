"""Packed sequences during an export: between modules, padded ones of a fixed shape stand for them.

A packed sequence has as many rows as the lengths say, and no export knows these. So `pack_padded_sequence` leaves the
sequence padded, a recurrent module that is given it is one opaque call, which packs and pads again, and
`pad_packed_sequence` cuts what it returns to as many steps as the longest sequence has, in the graph.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils import rnn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from workbench.capture.torch_internals import VF, patched

PACKED = "packed sequences"
"""Target of the search for opaque calls: the recurrent modules that are given packed sequences."""


@contextlib.contextmanager
def padded_sequences(model: nn.Module, valued: nn.Module | None, make: Callable[..., Any]) -> Iterator[None]:
    """Let padded sequences stand for packed ones while a model is exported; `make` is `opaque_call` for each module."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(patched(rnn, "_packed_sequence_init", Padded))
        stack.enter_context(patched(VF, "_pack_padded_sequence", _pack))
        stack.enter_context(patched(VF, "_pad_packed_sequence", _pad))
        for path, module in model.named_modules():
            if isinstance(module, nn.RNNBase):
                twin = None if valued is None else valued.get_submodule(path)
                stack.enter_context(patched(module, "forward", _recurrent(path, module, twin, make)))
        yield


class Padded(PackedSequence):
    """Padded sequences in place of a packed one, whose shape only `pad_packed_sequence` may read: it is another."""

    @property
    def data(self) -> Any:
        return self._seen(0)

    @property
    def batch_sizes(self) -> Any:
        return self._seen(1)

    def __iter__(self) -> Any:
        raise TypeError("a packed sequence is taken apart")

    def _seen(self, field: int) -> Any:
        if sys._getframe(2).f_code is not pad_packed_sequence.__code__:
            raise TypeError("a packed sequence is read without pad_packed_sequence")
        return tuple.__getitem__(self, field)


def _pack(value: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the padded sequences, steps first, and how many of them have each step; the longest come first."""
    value = value.transpose(0, 1) if batch_first else value
    steps = torch.arange(value.shape[0], device=lengths.device)
    return value, (lengths[None, :] > steps[:, None]).sum(1)


def _lengths(sizes: torch.Tensor, count: int) -> torch.Tensor:
    """Return the lengths of `count` sequences, given how many have each step."""
    return (sizes[None, :] > torch.arange(count, device=sizes.device)[:, None]).sum(1)


def _pad(
    value: torch.Tensor, sizes: torch.Tensor, batch_first: bool, padding: float, steps: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sequences with as many steps as the longest has, or as `total_length` says, and their lengths."""
    lengths = _lengths(sizes, value.shape[1])
    if padding:
        is_there = torch.arange(value.shape[0], device=value.device)[:, None] < lengths.to(value.device)[None, :]
        value = torch.where(is_there.reshape(*is_there.shape, *(1,) * (value.ndim - 2)), value, padding)
    if sys._getframe(1).f_locals["total_length"] is None:
        value = value[(sizes > 0).to(value.device)]
    elif steps > value.shape[0]:
        rest = value.new_full((steps - value.shape[0], *value.shape[1:]), padding)
        value = torch.cat([value, rest])
    return value.transpose(0, 1) if batch_first else value, lengths


def _recurrent(path: str, module: nn.RNNBase, valued: nn.Module | None, make: Callable[..., Any]) -> Any:
    """Return a forward that is one opaque call if it is given a packed sequence."""
    original = module.forward

    @functools.wraps(original)
    def forward(value: Any, hx: Any = None) -> Any:
        if not isinstance(value, PackedSequence):
            return original(value, hx)
        data, sizes, *indices = map(functools.partial(tuple.__getitem__, value), range(4))
        known = (None, lambda shape: torch.full(shape, data.shape[1]))
        called = make(path, functools.partial(_run, original), module, valued, known)
        padded, hidden = called(data, sizes, hx, *indices)
        return Padded(padded, sizes, *indices), hidden

    return forward


def _run(forward: Any, data: torch.Tensor, sizes: torch.Tensor, hx: Any, *indices: torch.Tensor | None) -> Any:
    """Pack sequences, run a recurrent module over them, and return what it returns, padded, and its last states."""
    lengths = _lengths(sizes.cpu(), data.shape[1])
    found, hidden = forward(PackedSequence(*VF._pack_padded_sequence(data, lengths, False), *indices), hx)
    padded, _ = VF._pad_packed_sequence(found.data, found.batch_sizes, False, 0.0, data.shape[0])
    return padded, hidden
