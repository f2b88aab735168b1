"""Numbers that differ from step to step although the code is the same: draws, and those that choose a branch.

An export would make a number that was drawn a constant of every step. An opaque call runs its code twice, and only the
default generators of torch, Python and NumPy give the second run the numbers of the first.
"""

from __future__ import annotations

import contextlib
import dis
import os
import random
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import fx, nn

from workbench.base.errors import CaptureError
from workbench.base.user_code import SourceLine, is_of_model, is_users, line_at
from workbench.capture.export.observed_forward import DEPTH, Recording, items_of
from workbench.capture.operations import ancestors, descendants, is_random, names, op_name
from workbench.capture.torch_internals import patched

_SOURCES = ("random.py", "secrets.py", "uuid.py")
"""Files of Python's own library that draw for those who call them."""
_TABLES = ("_parameters", "_buffers", "_modules")
_SEED = random.Random.seed


class Drawn(CaptureError):
    """The user's own code draws from Python's or NumPy's generators, and can draw from torch's instead."""


def default_states() -> dict[str, Any]:
    """Return the states of Python's and NumPy's default generators by name, in a form that can be compared."""
    numpy = sys.modules.get("numpy")
    states: dict[str, Any] = {"Python's random numbers": random.getstate()}
    return states if numpy is None else states | {"NumPy's random numbers": repr(numpy.random.get_state())}


def host_states(model: nn.Module) -> dict[str, Any]:
    """Return the states of the default generators and of all that `own_states` finds."""
    return default_states() | own_states(model)


def own_states(model: nn.Module) -> dict[str, Any]:
    """Return the state of each other generator that the modules of a model or the user's code of them hold.

    The keys are expressions that a user would write: `self.layer.rng`, `RNG`.
    """
    found: dict[str, Any] = {}
    seen: set[int] = set()
    numpy = sys.modules.get("numpy.random")
    types = (random.Random, torch.Generator, *((numpy.Generator, numpy.RandomState) if numpy is not None else ()))

    def search(value: Any, place: str, depth: int) -> None:
        if isinstance(value, (str, int, float, torch.Tensor, type(None))) or id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, types):
            found[place] = _state(value)
        elif isinstance(value, FunctionType) and is_users(value.__code__.co_filename):
            cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=False)
            for name, cell in cells:
                with contextlib.suppress(ValueError):  # a cell that is not filled yet
                    search(cell.cell_contents, name, depth)
            members = [(name, value.__globals__[name]) for name in value.__code__.co_names if name in value.__globals__]
            for name, member in members:
                search(member, name, depth)
                if isinstance(member, ModuleType) and is_users(getattr(member, "__file__", None) or "built in"):
                    inner = (n for n in value.__code__.co_names if n in vars(member))
                    for attribute in inner:
                        search(vars(member)[attribute], f"{name}.{attribute}", depth)
        elif depth and (items := items_of(value, place)) is not None:
            for inner_place, item in items:
                search(item, inner_place, depth - 1)

    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in _TABLES:
                search(value, f"self.{path}.{name}" if path else f"self.{name}", DEPTH)
    for owner in {each for module in model.modules() for each in type(module).__mro__}:
        for name, value in vars(owner).items():
            if not isinstance(value, type):
                search(getattr(value, "__func__", value), f"{owner.__name__}.{name}", DEPTH)
    default = {id(vars(random)["_inst"]), *([] if numpy is None else [id(numpy.mtrand._rand)])}
    return {place: state for place, state in found.items() if state[0] not in default}


def _state(generator: Any) -> tuple[int, Any]:
    """Return the identity of a generator, and its state in a form that can be compared."""
    if isinstance(generator, random.Random):
        return id(generator), None if isinstance(generator, random.SystemRandom) else generator.getstate()
    if isinstance(generator, torch.Generator):
        return id(generator), generator.get_state().numpy().tobytes()
    bits = getattr(generator, "bit_generator", generator)
    return id(generator), repr(bits.state if hasattr(bits, "state") else bits.get_state())


def drawn_from(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Return the first generator whose state is another one; empty if there is none."""
    return next((name for name, state in after.items() if name in before and before[name] != state), "")


def refused_draw(source: str, line: SourceLine, model: str) -> CaptureError:
    """Return the error that says what a source of random numbers would become."""
    return line.error(
        model,
        f"draws from {source}{line.where}, and capture would repeat the drawn numbers in every step. Draw from "
        "torch's: torch.rand(…), and choose by torch.where.",
        reason=f"capture would repeat what it draws from {source}",
    )


@contextlib.contextmanager
def fresh_draws_refused(model: str) -> Iterator[None]:
    """Refuse, inside a `with` block, what the user's code draws from the system or from a generator without a seed.

    Other threads of the process, such as one that displays how long a capture takes, draw what they like.
    """
    capturing = threading.get_ident()

    def refusing(draw: Callable[..., Any]) -> Callable[..., Any]:
        def drawn(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != capturing:
                return draw(*args, **kwargs)
            frame: Any = sys._getframe(1)
            while frame is not None and Path(frame.f_code.co_filename).name in _SOURCES:
                frame = frame.f_back
            is_seeded = draw is _SEED and [*args[1:], *kwargs.values()] not in ([], [None])
            if frame is not None and is_of_model(frame.f_code.co_filename) and not is_seeded:
                line = line_at(frame.f_code.co_filename, frame.f_lineno)
                raise refused_draw("the system's random numbers, or from a generator without a seed", line, model)
            return draw(*args, **kwargs)

        return drawn

    system: Any = random
    with contextlib.ExitStack() as stack:
        for owner, name in ((system, "_urandom"), (os, "urandom"), (random.Random, "seed"), (torch, "seed")):
            stack.enter_context(patched(owner, name, refusing(vars(owner)[name])))
        yield


@contextlib.contextmanager
def stopped_at_draw(model: nn.Module, name: str) -> Iterator[None]:
    """Raise `CaptureError` at the first line inside a `with` block, of the user's or a model's code, that draws."""
    before, latest = host_states(model), dict[FrameType, int]()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not is_of_model(frame.f_code.co_filename):
            return None
        if event != "call" and (source := drawn_from(before, host_states(model))):
            raise refused_draw(source, line_at(frame.f_code.co_filename, latest.get(frame, frame.f_lineno)), name)
        latest[frame] = frame.f_lineno
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(previous)


_FORCED, _WORDS = 64, 624
"""Words of a Mersenne Twister that are set, and those of its state. The others are random, so that a draw that rejects
ends."""


@contextlib.contextmanager
def extreme_draws(high: int | None) -> Iterator[None]:
    """Let Python's and NumPy's first draws be the smallest numbers (0) or the largest ones (1), or as ever (None)."""
    if high is None:
        yield
        return
    word, rest = (_LARGEST if high else 0), random.Random(0)
    words = [word] * _FORCED + [rest.getrandbits(32) for _ in range(_WORDS - _FORCED)]
    random.setstate((3, (*words, 0), None))
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(("MT19937", words, 0))
    yield


def _untempered(number: int) -> int:
    """Return the word of a Mersenne Twister's state that gives a number of 32 bits (doi:10.1145/272991.272995)."""
    number ^= number >> 18
    number ^= number << 15 & 0xEFC60000
    found = number
    for _ in range(7):
        found = number ^ (found << 7 & 0x9D2C5680)
    number = found
    for _ in range(3):
        found = number ^ found >> 11
    return found & 0xFFFFFFFF


_LARGEST = _untempered(0xFFFFFFFF)


# The other branches of code that runs as written.
#
# A recording has the branches that one run took. Each number that Python read in it may have been another one in
# another step or for another micro-batch, so the code is recorded again with other numbers
# (`workbench.capture.coupling.batch_coupling`).

MOST_BRANCHES = 64
"""Most numbers that are tried in one call; a branch behind the last one counts as unknown."""
_WHOLE, _REAL = (*range(10), 99, 999, 100_003), (0.0, 1e30, -1e30)
"""Other numbers that code is given: small ones and those before 100 and 1,000 for what it does in every tenth step, and
a prime, which is no multiple and still no size too large."""
_OF_SAMPLES = (0, 1, 2, 99, 100_003, -1)
"""Other numbers that code is given where samples decide one, which tell what it is for: a wrong size fails."""
_SELECTS = names("index masked_select nonzero where index_select gather")
_PUTS = names(
    "index_put index_put_ index_put_impl_ _index_put_impl_ masked_scatter masked_scatter_ index_add index_add_"
)


def other_numbers(
    recording: Recording, fixed: Collection[int], at: int, samples: Collection[int] | None
) -> tuple[Any, ...]:
    """Return other numbers that a read may give; none if it was answered or its number is always the same.

    `samples` decide the number. A real number of theirs is no choice, but what the code computes with. `fixed` are the
    tensors, by the order in which they were given, that no step changes.
    """
    read = recording.reads[at]
    value = read.meta["val"]
    if at <= max(recording.answers, default=-1) or not (samples or _may_change(read, recording, fixed)):
        return ()
    if isinstance(value, bool):
        return (not value,)
    if samples and (len(samples) == 1 or isinstance(value, float)):
        return ()
    if isinstance(value, list):
        return tuple(_with_first(value, number) for number in _OF_SAMPLES)
    return (_OF_SAMPLES if samples else _WHOLE) if isinstance(value, int) else _REAL


def _with_first(values: list[Any], number: int) -> list[Any]:
    """Return a list, or lists in it, with another first number; of truths, with the other truth for 0."""
    if not values:
        return values
    [first, *others] = values
    if isinstance(first, list):
        return [_with_first(first, number), *others]
    return [(bool(number) if isinstance(first, bool) else number), *others]


def _may_change(read: fx.Node, recording: Recording, fixed: Collection[int]) -> bool:
    """Return True if a number without samples may be another one in another step."""
    made = ancestors([read])
    same = {given for at, given in enumerate(recording.given) if at in fixed}
    return any(is_random(each) or (each.op == "placeholder" and each not in same) for each in made)


def place_of(read: fx.Node) -> tuple[Any, ...]:
    """Return the line of a read, the operation that made the number, and the number."""
    value: Any = read.args[0]
    return read.meta["stack_trace"], op_name(value), str(value.args[1:]), str(read.meta["val"])


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
    if error.__traceback__ is None:
        return False
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

    So is a loop over the rows of a selection, each of which selects and writes.
    What it does is done for the elements that the mask selects, and written to their places.
    """
    at = recording.reads.index(read)
    longer = max((recording, other), key=lambda each: len(each.flow.order))
    if at >= len(longer.reads):
        return False
    if read.meta.get("is_loop"):  # over the experts that have tokens: a turn selects and puts
        shorter = recording if longer is other else other
        turns = Counter(map(text_of, longer.flow.order)) - Counter(map(text_of, shorter.flow.order))
        used = {op_name(each) for each in longer.flow.order if text_of(each) in turns}
        return bool(used & _SELECTS) and bool(used & _PUTS)
    masks = {n for n in ancestors([longer.reads[at]]) if _is_mask(n)}
    used = {name for mask in masks for name in (op_name(user) for user in {*mask.users, *descendants(mask)})}
    return bool(used & _SELECTS) and bool(used & _PUTS)


def _is_mask(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype == torch.bool and value.dim() > 0
