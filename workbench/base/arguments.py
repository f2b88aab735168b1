"""Decorators of functions: checks of what a user passes, by the parameters and their annotations; and a cache."""

from __future__ import annotations

import functools
import inspect
import math
import os
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Annotated, Any, Concatenate, ParamSpec, TypeVar

from workbench.base.errors import InvalidArgument, UnknownParameter, suggestion

P = ParamSpec("P")
R = TypeVar("R")
Owner = TypeVar("Owner")
LARGEST_INTEGER = 2**63 - 1
"""Largest whole number that files, tensors and operating systems store."""


@dataclass(frozen=True)
class Between:
    """Limits of a number, or of how many values a list has: `Annotated[int, Between(1, 10_000)]`."""

    least: float
    most: float


Pixels = Annotated[int, Between(1, 10_000)]
"""Width or height of a picture."""
Magnification = Annotated[float, Between(0.1, 20)]
"""Pixels of a picture for each pixel of its figure."""
MOST_CURVES = 500
"""Largest number of runs in one figure: more can neither be told apart nor be drawn by a browser."""
WORDS = {
    "Experiment": "an Experiment, such as wb.Experiment(model=…, data=…)",
    "Plan": "a Plan, such as wb.plan(experiment)",
    "Run": "a Run, such as wb.load_run(name)",
    "Sweep": "a Sweep, such as wb.sweeps.load_sweep(name)",
    "Cluster": 'a Cluster, such as wb.Cluster.of("h200", gpus=4)',
    "Profile": "a Profile, such as wb.planning.profile(experiment)",
    "Diverged": "a rule, such as wb.sweeps.diverged(above=6.5, after=500)",
    "str": "text",
    "Path": "a path",
    "PathLike": "a path",
    "int": "a whole number",
    "float": "a number",
    "bool": "True or False",
    "NoneType": "None",
    "Sequence": "a list of these",
    "Iterable": "several of these",
    "list": "a list",
    "Mapping": "a dict",
}
"""Descriptions of the types of parameters, by the name of the type."""


def checked_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function answer an unknown keyword with the nearest known one instead of a bare `TypeError`."""
    parameters = inspect.signature(function).parameters.values()
    known = {p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY and p.name != "self"}
    for parameter in (p for p in parameters if p.kind is p.VAR_KEYWORD):  # the keys of the `TypedDict` in `Unpack[…]`
        holder = types.SimpleNamespace(__annotations__={"unpacked": parameter.annotation})
        hint = typing.get_type_hints(holder, function.__globals__)["unpacked"]
        if typing.get_origin(hint) is not typing.Unpack:
            raise AssertionError(f"{function.__qualname__} takes any keyword; there is nothing to check")
        [keywords] = typing.get_args(hint)
        known = known - {parameter.name} | keywords.__required_keys__ | keywords.__optional_keys__
    name = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for word in kwargs:
            if word not in known:  # it may be a value of one of the arguments, such as the steps of an experiment
                given = (type(one) for one in [*args, *kwargs.values()])
                holders = (one.__name__.lower() for one in given if word in getattr(one, "REPLACED", ()))
                hints = (f"It is a value of the {one}: give {one}.replace({word}=…)." for one in holders)
                hint = next(hints, None) or suggestion(word, known)
                raise UnknownParameter(f"{name} has no parameter {word!r}. {hint}")
        return function(*args, **kwargs)

    return checked


def checked_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function answer an argument of a wrong type, or an unknown keyword, with a `WorkbenchError`.

    The annotations of the parameters say which types are right. Where the name of a type is imported for type checkers
    only, every class of that name is taken for it. NaN, and whole numbers beyond 64 bits, are refused as well.
    """
    signature = inspect.signature(function)
    free = any(p.kind is p.VAR_KEYWORD and "Unpack" not in str(p.annotation) for p in signature.parameters.values())
    inner = function if free else checked_keywords(function)
    kinds = functools.cache(lambda name: _resolved(signature.parameters[name], function))

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return inner(*args, **kwargs)  # raises, and names the keyword
        for name, value in given.items():
            check(function.__qualname__, name, value, kinds(name))
        return inner(*args, **kwargs)

    return checked


def _resolved(parameter: inspect.Parameter, function: Callable[..., Any]) -> Any:
    """Return the type that a parameter is annotated with; `Any` without one, and for `*` and `**`."""
    variadic = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    if variadic or parameter.annotation is parameter.empty:
        return Any
    if not isinstance(parameter.annotation, str):
        return parameter.annotation
    names: dict[str, Any] = {}
    while True:
        try:
            return eval(parameter.annotation, function.__globals__, names)
        except NameError as error:
            name = str(error.name)
            names[name] = _ByName(name, (), {})


class _ByName(type):
    """The type of classes that stand for those that a module imports for type checkers only, which go by their name."""

    def __instancecheck__(cls, value: Any) -> bool:
        return any(base.__name__ == cls.__name__ for base in type(value).__mro__)


def check(callee: str, name: str, value: Any, kind: Any) -> None:
    """Raise `InvalidArgument` unless a value is of the type that the annotation names."""
    if not fits(value, kind):
        if typing.get_origin(kind) in (Sequence, Iterable) and isinstance(value, list | tuple):
            for number, item in enumerate(value):  # name the one that is wrong
                check(callee, f"{name}[{number}]", item, *typing.get_args(kind)[:1])
        try:
            text = repr(value)
        except Exception:  # of a user's class
            text = f"<{type(value).__name__}>"
        text = text if len(text) <= 80 else f"{text[:80]}…"
        *others, last = dict.fromkeys(_words(kind))
        listed = f"{', '.join(others)} or {last}" if others else last
        raise InvalidArgument(f"{callee} cannot use {name}={text}. Give {listed}.")


def fits(value: Any, kind: Any) -> bool:
    """Return True if a value is of the type that an annotation names."""
    origin = typing.get_origin(kind)
    if origin is Annotated:
        base, *limits = typing.get_args(kind)
        if not fits(value, base):
            return False
        size = len(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
        between = [limit for limit in limits if isinstance(limit, Between) and isinstance(size, Real)]
        return all(limit.least <= size <= limit.most for limit in between)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, one) for one in typing.get_args(kind))
    if kind is None or kind is types.NoneType:
        return value is None
    if kind is bool:
        return isinstance(value, bool) or type(value).__name__ in ("bool", "bool_")
    if kind in (int, float):
        if isinstance(value, bool) or not isinstance(value, Integral if kind is int else Real):
            return False
        if isinstance(value, Integral):
            return abs(int(value)) <= LARGEST_INTEGER
        return not math.isnan(float(value))
    if origin in (Sequence, Iterable):  # a text is no container of its letters
        if isinstance(value, str | bytes) or not isinstance(value, origin):
            return False
        [item] = typing.get_args(kind) or [Any]
        return not isinstance(value, Sequence) or all(fits(one, item) for one in value)
    kind = origin or kind
    if kind is Any or not isinstance(kind, type):
        return True
    if not isinstance(value, kind):
        return False
    return not (isinstance(value, str | os.PathLike) and "\0" in os.fspath(value))  # no file can have such a name


def _words(kind: Any) -> Iterator[str]:
    """Yield the descriptions of the types in an annotation."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        for one in typing.get_args(kind):
            yield from _words(one)
        return
    if typing.get_origin(kind) is Annotated:
        base, *limits = typing.get_args(kind)
        between = next(limit for limit in limits if isinstance(limit, Between))
        if base in (int, float):
            yield f"{WORDS[base.__name__]} from {between.least:,} to {between.most:,}"
        else:
            *_, last = dict.fromkeys(_words(base))
            yield f"{last}, {between.most:,} at most"
        return
    name = str(getattr(typing.get_origin(kind) or kind, "__name__", kind))
    yield WORDS.get(name, name)


def memoised(
    method: Callable[Concatenate[Owner, P], R],
) -> Callable[Concatenate[Owner, P], R]:
    """Cache the results of a method in its object, by its hashable arguments.

    `functools.cache` would keep the object itself alive: a search prices hundreds of options, whose matrices must be
    freed as soon as it has weighed them.
    """

    name = f"_results_of_{method.__name__}"

    @functools.wraps(method)
    def cached(self: Owner, /, *args: P.args, **kwargs: P.kwargs) -> R:
        results: dict[Any, R] = vars(self).setdefault(name, {})
        key = (args, tuple(kwargs.items())) if kwargs else args
        try:
            return results[key]
        except KeyError:
            results[key] = result = method(self, *args, **kwargs)
            return result

    return cached
