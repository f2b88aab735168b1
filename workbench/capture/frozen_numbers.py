"""Python numbers that forward changes: capture runs forward once, and repeats the numbers of that run in every step.

Attributes may hold them, also in lists, dicts and plain objects, and so may the model's classes and the globals of the
user's code that the methods of these read.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

from torch import fx, nn

from workbench.capture.kept_tensors import DEPTH, items_of
from workbench.capture.source_lines import is_users
from workbench.errors import CaptureError

Number = int | float


@dataclass(frozen=True)
class Numbers:
    """The Python numbers that the forward of a model may change, at one moment."""

    values: Mapping[str, Number]
    """Number by the expression that a user would write: `self.layer.state['step']`."""
    holders: Mapping[str, tuple[Any, Any]]
    """Module, object, list or dict that holds the number, and its attribute, key or index there."""

    @staticmethod
    def of(model: nn.Module) -> Numbers:
        """Return the present numbers of a model."""
        found: dict[str, tuple[Number, Any, Any]] = {}
        seen: set[int] = set()

        def search(holder: Any, key: Any, value: Any, place: str, depth: int) -> None:
            if isinstance(value, Number):
                if not isinstance(holder, (tuple, set)):
                    found[place] = value, holder, key
            elif depth and id(value) not in seen and _may_change(value):
                seen.add(id(value))
                items = items_of(value, place) or ()
                keys = list(value) if isinstance(value, dict) else None
                for at, (inner, item) in enumerate(items):
                    name = keys[at] if keys is not None else inner.rpartition(".")[2]
                    search(value, at if isinstance(value, (list, tuple)) else name, item, inner, depth - 1)

        for path, module in model.named_modules():
            prefix = f"self.{path}" if path else "self"
            for name, value in vars(module).items():
                if not name.startswith("_") and name != "training":
                    search(module, name, value, f"{prefix}.{name}", DEPTH)
        for holder, name, value, place in _shared(model):
            search(holder, name, value, place, DEPTH)
        return Numbers({place: each[0] for place, each in found.items()}, {p: each[1:] for p, each in found.items()})

    def changes_to(self, later: Numbers) -> Numbers:
        """Return the later numbers that differ, with those that were not there before."""
        changed = {place: n for place, n in later.values.items() if place not in self.values or self.values[place] != n}
        return Numbers(changed, {place: later.holders[place] for place in changed})

    def known_in(self, earlier: Numbers) -> Numbers:
        """Return these numbers without those that were not there earlier."""
        return replace(self, values={place: n for place, n in self.values.items() if place in earlier.values})

    @contextmanager
    def held_by(self, model: nn.Module) -> Iterator[None]:
        """Return a context in which the model has these numbers; afterwards it has its own again."""
        own = Numbers.of(model)
        for place, number in self.values.items():  # an export may put a copy of a list or dict in its place
            _set(*own.holders.get(place, self.holders[place]), number)
        try:
            yield
        finally:
            own.restore(model)

    def restore(self, model: nn.Module) -> None:
        """Give the model these numbers again, and no others."""
        present = Numbers.of(model)
        for place, (holder, key) in present.holders.items():
            if place in self.values:
                if present.values[place] != self.values[place]:
                    _set(holder, key, self.values[place])
            elif isinstance(holder, dict):
                del holder[key]
            elif not isinstance(holder, list):
                delattr(holder, key)

    def __str__(self) -> str:
        return ", ".join(self.values)


def _may_change(value: Any) -> bool:
    """Return True for what may hold numbers that forward changes: objects of a library's classes are left out."""
    if isinstance(value, (list, tuple, set, dict)):
        return True
    module = sys.modules.get(type(value).__module__)
    return module is not None and is_users(getattr(module, "__file__", None) or "")


def _shared(model: nn.Module) -> Iterator[tuple[Any, str, Any, str]]:
    """Return what the user's classes of modules hold, and the globals that their methods read, with holder and name."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    for kind in sorted(kinds, key=lambda kind: kind.__qualname__):
        methods = [each for each in vars(kind).values() if isinstance(each, FunctionType)]
        methods = [each for each in methods if is_users(each.__code__.co_filename)]
        if not methods:
            continue
        yield from ((kind, name, value, f"{kind.__name__}.{name}") for name, value in vars(kind).items())
        names = dict.fromkeys(name for each in methods for name in each.__code__.co_names)
        space = methods[0].__globals__
        yield from ((space, name, space[name], name) for name in names if name in space)


def _set(holder: Any, key: Any, number: Number) -> None:
    if isinstance(holder, (list, dict)):
        holder[key] = number
    else:
        setattr(holder, key, number)


def note_of_changes(changed: Numbers, known: Numbers, first: fx.Graph, second: fx.Graph, model: str) -> tuple[str, ...]:
    """Return a sentence on numbers that forward changes and whose new values make no difference to the next forward.

    There is none on numbers that forward makes anew: `known` were there before. `first` and `second` are two captures
    in a row. Raises `CaptureError` if they differ.
    """
    if _text(first) != _text(second):
        raise CaptureError(
            f"The forward of {model} changes {changed} and computes with it, and capture would repeat its present "
            "value in every step. Register it as a buffer, self.register_buffer('count', torch.zeros(())), and change "
            "it in place: self.count += 1."
        )
    if not (known_ones := changed.known_in(known)).values:
        return ()
    return (
        f"The forward changes {known_ones}, which stays as it was at capture. Its next value made no difference; a "
        "branch that a later value would take is never taken.",
    )


def _text(graph: fx.Graph) -> str:
    return "\n".join(f"{node.op} {node.target} {node.args} {node.kwargs}" for node in graph.nodes)
