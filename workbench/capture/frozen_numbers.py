"""Python numbers that forward changes: capture runs forward once, and repeats the numbers of that run in every step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from workbench.errors import CaptureError

Number = int | float


@dataclass(frozen=True)
class Numbers:
    """The Python numbers that the modules of a model hold as attributes, also in lists and dicts, at one moment."""

    values: Mapping[tuple[str, str, Any], Number]
    """Number by path of its module, attribute, and key or index in the attribute (None for a bare number)."""

    @staticmethod
    def of(model: nn.Module) -> Numbers:
        """Return the present numbers of a model."""
        return Numbers(
            {
                (path, attribute, key): number
                for path, module in model.named_modules()
                for attribute, value in vars(module).items()
                if not attribute.startswith("_") and attribute != "training"
                for key, number in _numbers_in(value)
            }
        )

    def changes_to(self, later: Numbers) -> Numbers:
        """Return the later numbers that differ."""
        return Numbers({place: n for place, n in later.values.items() if self.values.get(place, n) != n})

    @contextmanager
    def held_by(self, model: nn.Module) -> Iterator[None]:
        """Return a context in which the model has these numbers instead of its own."""
        own = {place: number for place, number in Numbers.of(model).values.items() if place in self.values}
        _assign(model, self.values)
        try:
            yield
        finally:
            _assign(model, own)

    def __str__(self) -> str:
        places = (f"{path}.{name}" if path else name for path, name, _ in self.values)
        return ", ".join(dict.fromkeys(f"self.{place}" for place in places))


def _numbers_in(value: Any) -> Iterator[tuple[Any, Number]]:
    items = value.items() if type(value) is dict else enumerate(value) if type(value) is list else [(None, value)]
    return ((key, item) for key, item in items if isinstance(item, Number))


def _assign(model: nn.Module, values: Mapping[tuple[str, str, Any], Number]) -> None:
    for (path, attribute, key), number in values.items():
        module = model.get_submodule(path)
        if key is None:
            setattr(module, attribute, number)
        else:
            getattr(module, attribute)[key] = number


def note_of_changes(changed: Numbers, first: fx.Graph, second: fx.Graph, model: str) -> str:
    """Return a sentence on numbers that forward changes and whose new values make no difference to the next forward.

    `first` and `second` are two captures in a row. Raises `CaptureError` if they differ.
    """
    if _text(first) != _text(second):
        raise CaptureError(
            f"The forward of {model} changes {changed} and computes with it, and capture would repeat its present "
            "value in every step. Register it as a buffer, self.register_buffer('count', torch.zeros(())), and change "
            "it in place: self.count += 1."
        )
    return (
        f"The forward changes {changed}, which stays as it was at capture. Its next value made no difference; a branch "
        "that a later value would take is never taken."
    )


def _text(graph: fx.Graph) -> str:
    return "\n".join(f"{node.op} {node.target} {node.args} {node.kwargs}" for node in graph.nodes)
