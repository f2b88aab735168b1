"""A Python number that forward changes is frozen at capture: refused where forward computes with it, else mentioned."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from workbench.base.errors import CaptureError
from workbench.capture import Graph, capture, spec_of

BATCH = {"x": torch.zeros(2, 4), "y": torch.zeros(2, 4)}


class Changing(nn.Module):
    """A layer that keeps numbers, of which the subclasses change one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale, self.calls, self.state, self.rates = 1.0, 0, {"step": 0}, [0.5, 0.25]
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.change()
        scale = self.scale * self.rates[0] * (1 + self.state["step"]) * (1 + self.count)
        if self.calls > 1000:
            scale = scale * 2
        return functional.mse_loss(self.layer(x) * scale, y)

    def change(self) -> None:
        """Change nothing."""


class Scale(Changing):
    def change(self) -> None:
        self.scale *= 0.99


class InADict(Changing):
    def change(self) -> None:
        self.state["step"] += 1


class InAList(Changing):
    def change(self) -> None:
        self.rates[0] /= 2


class Counts(Changing):
    def change(self) -> None:
        self.calls += 1


class Watched(Changing):
    seen = 0

    def change(self) -> None:
        self.state["seen"] = self.state.get("seen", self.seen) + 1
        Watched.seen += 1


class Buffer(Changing):
    def change(self) -> None:
        self.count += 1


def captured(model: nn.Module) -> Graph:
    return capture(model, {name: spec_of(name, value) for name, value in BATCH.items()}, name="model")


@pytest.mark.parametrize(
    ("made", "place"), [(Scale, "self.scale"), (InADict, r"self.state\['step'\]"), (InAList, r"self.rates\[0\]")]
)
def test_a_number_that_forward_changes_and_computes_with_is_refused(made: type[Changing], place: str) -> None:
    model = made()
    before = (model.scale, dict(model.state), list(model.rates))
    with pytest.raises(CaptureError, match=rf"changes {place} and computes with it.*register_buffer"):
        captured(model)
    assert (model.scale, model.state, model.rates) == before, "the user's model is as it was"
    inner = nn.ModuleDict({"inner": made()})

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = inner

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.parts["inner"](x=x, y=y)
            return result

    with pytest.raises(CaptureError, match=f"self.parts.inner.{place.removeprefix('self.')} and computes"):
        captured(Outer())


COUNTS = {"forwards": 0}


class Counter:
    forwards = 0


class InAnObject(Changing):
    def change(self) -> None:
        self.counter.forwards += 1
        self.scale = 1 + self.counter.forwards / 10

    def __init__(self) -> None:
        super().__init__()
        self.counter = Counter()


class InAGlobal(Changing):
    def change(self) -> None:
        COUNTS["forwards"] += 1
        self.scale = 1 + COUNTS["forwards"] / 10


class OnTheClass(Changing):
    def change(self) -> None:
        OnTheClass.forwards = getattr(OnTheClass, "forwards", 0) + 1
        self.scale = 1 + OnTheClass.forwards / 10


class AsWritten(Changing):
    """Changes a number in code that export cannot follow."""

    def change(self) -> None:
        if self.layer(self.count.expand(4)).isfinite().all():
            self.average = 0.9 * getattr(self, "average", 1.0) + 0.2
            self.scale = self.average * 1.5


@pytest.mark.parametrize(
    ("made", "place"),
    [
        (InAnObject, "self.counter.forwards"),
        (InAGlobal, r"COUNTS\['forwards'\]"),
        (OnTheClass, "OnTheClass.forwards"),
        (AsWritten, "self.average, self.scale"),
    ],
)
def test_a_number_outside_of_the_attributes_is_refused_as_well(made: type[Changing], place: str) -> None:
    with pytest.raises(CaptureError, match=rf"changes .*{place}.* and computes with it.*register_buffer"):
        captured(made())
    assert COUNTS["forwards"] == Counter.forwards == 0
    assert not hasattr(OnTheClass, "forwards"), "numbers are as they were"


def test_a_counter_that_a_later_forward_branches_on_is_refused_with_that_line() -> None:
    with pytest.raises(CaptureError, match=rf"changes self\.calls and computes with it at {__file__}:\d+ .*scale \* 2"):
        captured(Counts())


def test_a_counter_is_mentioned_and_numbers_that_stay_are_not() -> None:
    assert captured(Changing()).notes == ()
    [note] = captured(Watched()).notes
    assert "Watched.seen" in note
    assert Watched.seen == 0
    assert note.endswith("none of its values makes a difference to what is computed.")


def computed_offsets(length: int) -> torch.Tensor:
    return torch.arange(length).mul(2).sub(length).float()


remembered_offsets = functools.lru_cache(computed_offsets)


def offsets(length: int) -> torch.Tensor:
    """Constants of several operations, remembered except while torch compiles, as in `transformers`."""
    return (computed_offsets if torch.compiler.is_compiling() else remembered_offsets)(length)


class Remembers(Changing):
    """Notes its problem once, as classifiers of `transformers` do, and draws after constants that it remembers."""

    problem: str | None = None

    def change(self) -> None:
        self.problem = self.problem or "regression"

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        drawn = functional.dropout(super().forward(x + offsets(4), y).expand(4), 0.5, True)
        return drawn.sum()


class RemembersAndCounts(Remembers, Scale):
    def change(self) -> None:
        Remembers.change(self)
        Scale.change(self)


def test_draws_after_constants_that_forward_remembers_are_those_of_every_forward() -> None:
    remembered_offsets.cache_clear()
    assert captured(Remembers()).notes == ()


def test_the_line_that_computes_with_a_number_is_named_beside_constants_that_forward_remembers() -> None:
    remembered_offsets.cache_clear()
    with pytest.raises(CaptureError, match=r"self\.scale and computes with it at .*`scale = self\.scale"):
        captured(RemembersAndCounts())


class Decides(Changing):
    """Counts, and computes with twice its loss where `decides` says so."""

    seen: list[int]

    def __init__(self, decides: Callable[[Any], Any], as_written: bool = False) -> None:
        super().__init__()
        self.decides, self.as_written, self.numbers, self.seen = decides, as_written, itertools.count(), []
        self.ticks = 0

    def change(self) -> None:
        self.ticks += 1
        if self.as_written and torch.rand(()) > 2:
            self.count.zero_()
        self.scale = 2.0 if self.decides(self) else 1.0


DECISIONS: dict[str, Callable[[Any], Any]] = {
    "one value": lambda self: self.ticks == 5,
    "a late value": lambda self: self.ticks == 2_500,
    "a remainder": lambda self: self.ticks % 50 == 25,
    "a share": lambda self: 0.5 * self.ticks == 14.5,
    "a set": lambda self: self.ticks in {17, 18},
    "a list": lambda self: self.ticks in [17, 18],
    "int": lambda self: int(self.ticks) == 25,
    "a root": lambda self: math.sqrt(self.ticks) == 7,
    "a table": lambda self: {25: True}.get(self.ticks),
    "two branches": lambda self: self.ticks > 30 and self.ticks % 7 == 3,
    "the length of a list": lambda self: self.seen.append(1) or len(self.seen) == 5,
    "an iterator": lambda self: next(self.numbers) == 4,
}


@pytest.mark.parametrize("as_written", [False, True])
@pytest.mark.parametrize("how", DECISIONS)
def test_a_branch_that_one_later_forward_takes_is_refused_with_its_line(how: str, as_written: bool) -> None:
    model = Decides(DECISIONS[how], as_written)
    with pytest.raises(CaptureError, match=rf"changes .* and computes with it at {__file__}:\d+"):
        captured(model)
    assert (model.ticks, model.scale, model.seen) == (0, 1.0, [])


@pytest.mark.parametrize("as_written", [False, True])
def test_numbers_that_decide_what_is_printed_and_logged_are_fine(
    as_written: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    log = dict[int, str]()

    def prints(self: Any) -> None:
        log[self.ticks] = "seen"
        if self.ticks % 100 == 0:
            print(f"step {self.ticks:05d}")

    captured(Decides(prints, as_written))
    assert capsys.readouterr().out == ""
    assert not log


def test_the_buffer_that_the_refusal_recommends_is_captured() -> None:
    assert captured(Buffer()).notes == ()
