"""The choice of the call that becomes opaque when an export fails: the innermost that can, by the failure's frames.

Two kinds of code need more than that: selections by a mask, and packed sequences.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import rnn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from workbench.base.errors import CaptureError, in_words
from workbench.base.user_code import FORWARD, SourceLine, line_at, line_of_frames
from workbench.capture.export.opaque import NotOpaque, OpaqueCall, opaque_call
from workbench.capture.torch_internals import DERIVATIVE, VF, alone, patched
from workbench.data.datasets import untouched_generators

_FUNCTIONS = {"ctc_loss": functional.ctc_loss}
"""Functions of `torch.nn.functional` that no export can follow."""
SIZES = "one of its layers uses a size or a number that depends on the values in another"
"""Reason of opaque calls around two layers."""
_VALUES = "what it does depends on the values of a tensor"
MOST = 64
"""Largest number of exports of one model that are tried."""
Target = str | type
"""Path of a module, class of modules that forward makes, custom autograd function, name of one of `_FUNCTIONS`, or
`SELECTION` for every selection by a mask."""


MOST_BYTES = 2 << 30
"""Largest size of a model that is built with its values, to run a part of it."""
FACTORIES: weakref.WeakKeyDictionary[nn.Module, Callable[[], nn.Module]] = weakref.WeakKeyDictionary()


@dataclass
class OpaqueSearch:
    """The calls of one model that are opaque so far, and those that were tried and cannot be."""

    model: nn.Module
    name: str
    examples: Mapping[str, torch.Tensor] | None = None
    chosen: dict[Target, tuple[str, SourceLine]] = field(default_factory=dict)
    """Target -> why export could not follow it, and the line."""
    refused: dict[Target, str] = field(default_factory=dict)
    calls: list[OpaqueCall] = field(default_factory=list)
    attempts: int = 0

    @functools.cached_property
    def valued(self) -> nn.Module | None:
        """The model if its tensors have values, or a twin on the CPU; None if that would be too large."""
        tensors = (*self.model.parameters(), *self.model.buffers())
        if self.model not in FACTORIES:
            return None if any(tensor.is_meta for tensor in tensors) else self.model
        if sum(tensor.nbytes for tensor in tensors) > MOST_BYTES:
            return None
        return FACTORIES[self.model]().train()

    @functools.cached_property
    def selections(self) -> Selections:
        """The selections by a mask that take as many items of each example."""
        return {} if self.valued is None or self.examples is None else selections_of(self.valued, self.examples)

    def adds(self, error: CaptureError) -> bool:
        """Choose the call that failed, so that another export may pass it; return False if there is none."""
        self.attempts += 1
        if any(isinstance(module, torch.jit.ScriptModule) for module in self.model.modules()):
            return False  # compiled code holds its own parameters, and computes with no others
        cause = error.__cause__ if not isinstance(error, NotOpaque) and error.__cause__ is not None else error
        frames = list(traceback.walk_tb(cause.__traceback__))
        candidates = self._candidates(frames) or error.facts.get("inside", [])
        default = _VALUES if depends_on_values(cause) else f"torch.export failed with {in_words(cause)}"
        reason = error.facts.get("reason", default)
        is_of_size = not isinstance(error, NotOpaque) and (depends_on_values(cause) or reason == SIZES)
        if is_of_size and self.selections:
            candidates = [*candidates, SELECTION]
        if reason == PACKED_SHAPE:
            candidates = [*candidates, PACKED]
        line = line_of_frames(traceback.extract_tb(cause.__traceback__))
        line = line if line.file else line_at(str(error.facts.get("file", "")), int(error.facts.get("line", 0)))
        if isinstance(error, NotOpaque):
            inner = next((target for target in reversed(candidates) if target in self.chosen), None)
            if inner is not None:
                reason, line = self.chosen.pop(inner)
                self.refused[inner] = str(error)
        target = next((t for t in reversed(candidates) if t not in self.refused and t not in self.chosen), None)
        if target is None or self.attempts > MOST:
            return False
        alike = [target]
        if isinstance(target, str) and target not in ("", SELECTION, PACKED, *_FUNCTIONS):
            # Modules of the same class fail alike; torch's own classes (`Sequential`) hold anything.
            failed = type(self.model.get_submodule(target))
            if not failed.__module__.startswith("torch."):
                paths = [path for path, module in self.model.named_modules() if type(module) is failed and path]
                alike = [path for path in paths if path == target or path not in self.refused]
        for each in alike:
            self.chosen[each] = reason, line
        return True

    def _candidates(self, frames: list[Any]) -> list[Target]:
        """Return the targets that the frames of a failure lie in, the outermost first."""
        paths = {id(vars(module)): path for path, module in self.model.named_modules()}
        found: list[Target] = []
        inside = False
        for frame, _ in frames:
            inside = inside or frame.f_code.co_name == FORWARD
            arguments = frame.f_code.co_varnames[: frame.f_code.co_argcount]
            owner = frame.f_locals.get(arguments[0] if arguments else "self")
            function = frame.f_locals.get("cls")
            if not inside:
                continue
            if isinstance(owner, nn.Module) and id(vars(owner)) in paths:
                found.append(paths[id(vars(owner))])
            elif isinstance(owner, nn.Module) and not _of_torch(type(owner)):  # a loss that forward has made
                found.append(type(owner))
            elif frame.f_code.co_name == "apply" and isinstance(function, type) and not _of_torch(function):
                found.append(function)
            else:
                found += [name for name, each in _FUNCTIONS.items() if frame.f_code is each.__code__]
            if frame.f_code.co_name == "called":
                label = frame.f_locals.get("label")
                found += [t for t in self.chosen if (_label(t) or self.name) == label]
        return list(dict.fromkeys(found))

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Let every chosen call be opaque inside a `with` block."""
        self.calls.clear()
        with contextlib.ExitStack() as stack:
            for target, (reason, line) in self.chosen.items():
                make = functools.partial(opaque_call, reason=reason, line=line, search=self)
                stack.enter_context(self._opaque(target, make))
            yield

    def _opaque(self, target: Target, make: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the calls of a target are opaque; `make` is `opaque_call` for one of them."""
        if target == SELECTION:
            return opaque_selections(self.selections, self)  # type: ignore[no-any-return]
        if target == PACKED:
            return padded_sequences(self.model, self.valued, make)
        if isinstance(target, type):
            if issubclass(target, nn.Module):  # made by forward itself: every instance of the class
                original: Any = vars(target)["forward"]

                @functools.wraps(original)
                def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                    return make(_label(target), functools.partial(original, module), module)(*args, **kwargs)

                return patched(target, "forward", forward)
            return patched(target, "apply", staticmethod(make(_label(target), _Applied(target))))
        if target in _FUNCTIONS:
            return patched(functional, target, make(target, _FUNCTIONS[target]))
        module = self.model.get_submodule(target)
        valued = None if self.valued is None else self.valued.get_submodule(target)
        return patched(module, "forward", make(target or self.name, module.forward, module, valued))

    @property
    def notes(self) -> list[str]:
        """A sentence on each opaque call, once for calls of one line."""
        by_line: dict[tuple[str, str], list[str]] = {}
        for call in self.calls:
            by_line.setdefault((call.line.where, call.reason), []).append(call.label)
        found = []
        for (where, reason), labels in by_line.items():
            first, *others = dict.fromkeys(labels)
            many = len(labels) > 1
            found.append(
                f"{first}{f' and {len(others)} more like it' if others else ''} run{'s' * (not others)} as written, as "
                f"{len(labels)} opaque operation{'s' * many} that {'are' if many else 'is'} not compiled, divided or "
                f"captured in a CUDA graph, and the backward computes {'them' if many else 'it'} again: "
                f"{reason}{where}."
            )
        # Why a model that runs as written as a whole cannot be cut into stages, or how it could be.
        why = {
            DERIVATIVE: "in the middle of the forward, the derivative goes back through all layers, and a stage hands "
            "on values, but not the graph that a derivative needs",
            _VALUES: "which layers run is known only from values that they compute, and the stages exchange the same "
            "values in every micro-batch. If the choice concerns one part alone, put that into a module of its own",
        }
        for call in self.calls:
            if call.modules[:1] == (self.model,):
                way = why.get(call.reason, "put the code that export cannot follow into a module of its own")
                found.append(f"{call.label} is one block, which has one pipeline stage: {way}.")
        return found


@dataclass(frozen=True)
class _Applied:
    """Applies a custom autograd function as it stands when it is called, not as capture replaced it."""

    function: type

    def __call__(self, *args: Any) -> Any:
        return self.function.apply(*args)  # type: ignore[attr-defined]


def depends_on_values(error: BaseException) -> bool:
    """Return True if export failed because something depends on the values of a tensor."""
    reason, error_type = str(error).lower(), type(error).__name__.lower()
    is_named = "datadependent" in error_type or "dynamicoutputshape" in error_type
    return is_named or "data-dependent" in reason or "unbacked" in reason


def _label(target: Target) -> str:
    return target.__qualname__ if isinstance(target, type) else str(target)


def _of_torch(function: type) -> bool:
    return function.__module__.startswith("torch.") or function is torch.autograd.Function


# Selections by a mask (`x[mask]`), whose size depends on values: how many items they take is learnt from examples.
#
# A masked autoencoder hides the same number of patches of each sample and gives what is left a fixed shape. No export
# knows that number. So forward runs once over a few samples of the data; a selection that takes as many items of each
# of them becomes an opaque call with that many. A micro-batch of which it takes another number in all ends the run.
# One with that number has its items where the whole batch has them, also where its samples differ among themselves.

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


def opaque_selections(selections: Selections, search: OpaqueSearch) -> Any:
    """Return a context in which the selections are opaque; `search.calls` collects them."""

    def selected(key: Key, values: torch.Tensor, mask: torch.Tensor) -> Any:
        if key not in selections:
            return None
        example, taken = selections[key]
        reason = (
            f"how many items it takes depends on values (it took {taken:,} of each sample that was tried, and must)"
        )
        line = line_of_frames(traceback.extract_stack())
        call = opaque_call(SELECTION, _taken, known=[None, example], reason=reason, line=line, search=search)
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
            caller: FrameType = sys._getframe(1)  # the line that selects
            key = (caller.f_code.co_filename, caller.f_lineno, values.shape[1:], index.shape[1:])
            if (result := select(key, values, index)) is not None:
                return result
        return original(values, index)

    return patched(torch.Tensor, "__getitem__", getitem)


# Packed sequences during an export: between modules, padded ones of a fixed shape stand for them.
#
# A packed sequence has as many rows as the lengths say, and no export knows these. So `pack_padded_sequence` leaves the
# sequence padded, a recurrent module that is given it is one opaque call, which packs and pads again, and
# `pad_packed_sequence` cuts what it returns to as many steps as the longest sequence has, in the graph.

PACKED_SHAPE = "the shape of a packed sequence depends on values"
"""Reason of opaque calls that are given packed sequences."""
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
        # Frame 1 is the property that was read, and 2 its reader.
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
    # Frame 1 is torch's `pad_packed_sequence`, which passes a number of steps whether or not it was asked for.
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
        count = int(data.shape[1])  # the call keeps this function, which must not keep a tensor of the export
        known = (None, lambda shape: torch.full(shape, count))
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
