"""The other branches of code that runs as written: which numbers show them, and what tells two branches apart.

A recording has the branches that one run took. Each number that Python read in it may have been another one in another
step or for another micro-batch, so the code is recorded again with other numbers (`workbench.capture.batch_coupling`).
"""

from __future__ import annotations

import dis
import traceback
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from workbench.capture.observed_forward import Recording
from workbench.capture.opaque import OpaqueCall
from workbench.capture.operations import ancestors, descendants, is_random, names, op_name
from workbench.user_code import is_of_model

MOST_BRANCHES = 64
"""Most numbers that are tried in one call; a branch behind the last one counts as unknown."""
_WHOLE, _REAL = (*range(10), 99, 999, 100_003), (0.0, 1e30, -1e30)
"""Other numbers that code is given: small ones and those before 100 and 1,000 for what it does in every tenth step, and
a prime, which is no multiple and still no size too large."""
_SELECTS = names("index masked_select nonzero where index_select gather")
_PUTS = names(
    "index_put index_put_ index_put_impl_ _index_put_impl_ masked_scatter masked_scatter_ index_add index_add_"
)


def other_numbers(recording: Recording, call: OpaqueCall, at: int, samples: Collection[int] | None) -> tuple[Any, ...]:
    """Return other numbers that a read may give; none if it was answered or its number is always the same.

    `samples` decide the number. A real number of theirs is no choice, but what the code computes with.
    """
    read = recording.reads[at]
    value = read.meta["val"]
    if at <= max(recording.answers, default=-1) or not (samples or _may_change(read, recording, call)):
        return ()
    if isinstance(value, bool):
        return (not value,)
    if samples and (len(samples) == 1 or isinstance(value, float)):
        return ()
    return _WHOLE if isinstance(value, int) else _REAL


def _may_change(read: fx.Node, recording: Recording, call: OpaqueCall) -> bool:
    """Return True if a number without samples may be another one in another step."""
    made = ancestors([read])
    fixed = {
        given
        for at, given in enumerate(recording.given[: len(call.places)])
        if call.places[at].table != "_parameters" and at not in call.written
    }
    return any(is_random(each) or (each.op == "placeholder" and each not in fixed) for each in made)


def place_of(read: fx.Node) -> tuple[Any, ...]:
    """Return the line of a read, the operation that made the number, and the number."""
    value: Any = read.args[0]
    return read.meta["stack_trace"], op_name(value), str(value.args[1:]), read.meta["val"]


def text_of(node: fx.Node) -> str:
    """Return an operation with its numbers and its shape, and without the names of its operands."""
    value = node.meta.get("val")
    shape = tuple(value.shape) if isinstance(value, torch.Tensor) else ""
    args = fx.node.map_arg((node.args, dict(node.kwargs)), lambda _: None)
    return f"{node.target} {args} {shape}"


def texts_of(recording: Recording) -> str:
    """Return what a recording consists of, without the numbers that Python read."""
    return "\n".join(f"{n.name} {n.target} {n.args} {n.kwargs}" for n in recording.flow.order)


def is_check(error: Exception) -> bool:
    """Return True if the user's or a model's code raised an error itself: training does not go on with that."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    last = next(trace for trace in _traces(error) if trace.tb_frame is frame)
    code = frame.f_code
    raises = code.co_code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return is_of_model(code.co_filename) and raises


def _traces(error: Exception) -> list[Any]:
    found, trace = [], error.__traceback__
    while trace is not None:
        found.append(trace)
        trace = trace.tb_next
    return found[::-1]


def is_guard(recording: Recording, other: Recording, read: fx.Node) -> bool:
    """Return True for `if mask.any(): x[mask] = …`: without a true element, the branch would write nothing.

    What it does is done for the elements that the mask selects, and written to their places.
    """
    at = recording.reads.index(read)
    longer = max((recording, other), key=lambda each: len(each.flow.order))
    if at >= len(longer.reads):
        return False
    masks = {n for n in ancestors([longer.reads[at]]) if _is_mask(n)}
    used = {name for mask in masks for name in (op_name(user) for user in {*mask.users, *descendants(mask)})}
    return bool(used & _SELECTS) and bool(used & _PUTS)


def _is_mask(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype == torch.bool and value.dim() > 0
