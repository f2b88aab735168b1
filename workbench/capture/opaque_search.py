"""The choice of the call that becomes opaque when an export fails: the innermost that can, by the failure's frames."""

from __future__ import annotations

import contextlib
import functools
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from workbench.capture.export_errors import PACKED_SHAPE, depends_on_values
from workbench.capture.opaque import NotOpaque, OpaqueCall, opaque_call
from workbench.capture.packed_sequences import PACKED, padded_sequences
from workbench.capture.selections import SELECTION, Selections, opaque_selections, selections_of
from workbench.capture.source_lines import FORWARD, SourceLine, line_at, line_of_frames
from workbench.capture.torch_internals import DERIVATIVE, patched
from workbench.errors import CaptureError, in_words

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
_factories: weakref.WeakKeyDictionary[nn.Module, Callable[[], nn.Module]] = weakref.WeakKeyDictionary()


def built_by(model: nn.Module, factory: Callable[[], nn.Module]) -> nn.Module:
    """Return the model, and remember what built it without values."""
    _factories[model] = factory
    return model


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
        if self.model not in _factories:
            return None if any(tensor.is_meta for tensor in tensors) else self.model
        if sum(tensor.nbytes for tensor in tensors) > MOST_BYTES:
            return None
        return _factories[self.model]().train()

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
        for each in self._alike(target):
            self.chosen[each] = reason, line
        return True

    def _candidates(self, frames: list[Any]) -> list[Target]:
        """Return the targets that the frames of a failure lie in, the outermost first."""
        paths = {id(vars(module)): path for path, module in self.model.named_modules()}
        found: list[Target] = []
        inside = False
        for frame, _ in frames:
            inside = inside or frame.f_code.co_name == FORWARD
            owner = frame.f_locals.get("self")
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

    def _alike(self, target: Target) -> list[Target]:
        """Return the target and the modules of its class, which fail alike; torch's own classes hold anything."""
        if not isinstance(target, str) or target in ("", SELECTION, PACKED, *_FUNCTIONS):
            return [target]
        kind = type(self.model.get_submodule(target))
        if kind.__module__.startswith("torch."):
            return [target]
        alike = [path for path, module in self.model.named_modules() if type(module) is kind and path]
        return [path for path in alike if path == target or path not in self.refused]

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Let every chosen call be opaque inside a `with` block."""
        self.calls.clear()
        with contextlib.ExitStack() as stack:
            for target, (reason, line) in self.chosen.items():
                make = functools.partial(opaque_call, reason=reason, line=line, calls=self.calls)
                stack.enter_context(self._opaque(target, make))
            yield

    def _opaque(self, target: Target, make: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the calls of a target are opaque; `make` is `opaque_call` for one of them."""
        if target == SELECTION:
            return opaque_selections(self.selections, self.calls)  # type: ignore[no-any-return]
        if target == PACKED:
            return padded_sequences(self.model, self.valued, make)
        if isinstance(target, type):
            if issubclass(target, nn.Module):
                return patched(target, "forward", _of_instances(target, make))
            return patched(target, "apply", staticmethod(make(_label(target), _Applied(target))))
        if target in _FUNCTIONS:
            return patched(functional, target, make(target, _FUNCTIONS[target]))
        module = self.model.get_submodule(target)
        valued = None if self.valued is None else self.valued.get_submodule(target)
        return patched(module, "forward", make(target or self.name, module.forward, module, valued))

    @property
    def notes(self) -> list[str]:
        """A sentence on each opaque call, once for calls of one line."""
        whole = [call for call in self.calls if call.modules[:1] == (self.model,)]
        undivided = [f"{call.label} is one block, which has one pipeline stage: {_undivided(call)}." for call in whole]
        by_line: dict[tuple[str, str], list[str]] = {}
        for call in self.calls:
            by_line.setdefault((call.line.where, call.reason), []).append(call.label)
        return [
            f"{_listed(labels)} run{'s' * (len(set(labels)) == 1)} as written, as {len(labels)} opaque operation"
            f"{'s' * (len(labels) > 1)} that {'are' if len(labels) > 1 else 'is'} not compiled, divided or captured in "
            f"a CUDA graph, and the backward computes {'them' if len(labels) > 1 else 'it'} again: {reason}{where}."
            for (where, reason), labels in by_line.items()
        ] + undivided


@dataclass(frozen=True)
class _Applied:
    """Applies a custom autograd function as it stands when it is called, not as capture replaced it."""

    function: type

    def __call__(self, *args: Any) -> Any:
        return self.function.apply(*args)  # type: ignore[attr-defined]


def _of_instances(kind: type, make: Callable[..., Any]) -> Any:
    """Return a forward for a class of modules whose every call is opaque."""
    original: Any = vars(kind)["forward"]

    @functools.wraps(original)
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return make(_label(kind), functools.partial(original, module), module)(*args, **kwargs)

    return forward


def _undivided(call: OpaqueCall) -> str:
    """Return why a model that runs as written as a whole cannot be cut into stages, or how it could be."""
    if call.reason == DERIVATIVE:
        return (
            "in the middle of the forward, the derivative goes back through all layers, and a stage hands on values, "
            "but not the graph that a derivative needs"
        )
    if call.reason == _VALUES:
        return (
            "which layers run is known only from values that they compute, and the stages exchange the same values in "
            "every micro-batch. If the choice concerns one part alone, put that into a module of its own"
        )
    return "put the code that export cannot follow into a module of its own"


def _listed(labels: list[str]) -> str:
    names = list(dict.fromkeys(labels))
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more like it"


def _label(target: Target) -> str:
    return target.__qualname__ if isinstance(target, type) else str(target)


def _of_torch(function: type) -> bool:
    return function.__module__.startswith("torch.") or function is torch.autograd.Function
