"""Errors for people: what happened, with numbers, then the way out.

Every exception that a user can meet is a `WorkbenchError` (a `ValueError`, so that `except ValueError`
keeps working) and carries its facts as attributes. Our own invariants are plain `assert`s.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class WorkbenchError(ValueError):
    """Base of every error meant for the user; `facts` holds the numbers that the sentence quotes."""

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.facts = facts

    def __reduce__(self) -> Any:
        return (_rebuild, (type(self), str(self), self.facts))


def _rebuild(kind: type[WorkbenchError], message: str, facts: dict[str, Any]) -> WorkbenchError:
    return kind(message, **facts)


class UnknownParameter(WorkbenchError):
    """A keyword that the callee does not have."""


class InvalidExperiment(WorkbenchError):
    """An experiment that cannot be trained as it is written."""


class DataError(WorkbenchError):
    """A corpus or dataset that cannot feed the experiment."""


class CaptureError(WorkbenchError):
    """A model that cannot be captured; `facts['line']` is the line of the user's code that stops it."""


class PlanInfeasible(WorkbenchError):
    """No plan fits, or the one that was given cannot run here."""


class PlanMismatch(WorkbenchError):
    """A plan made for another model, batch or cluster."""


class RunExists(WorkbenchError):
    """The run directory is taken."""


class RunNotFound(WorkbenchError):
    """There is no run at that path or under that name."""


class RunFailed(WorkbenchError):
    """A worker died; carries its rank, its stage and its own traceback."""


class CheckpointError(WorkbenchError):
    """A checkpoint that is missing, torn, or of another model."""


def suggestion(word: str, known: Iterable[str]) -> str:
    """`"Did you mean 'global_batch'?"`, or the list of what there is when nothing is close."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if close:
        return f"Did you mean {close[0]!r}?"
    return "Known names: " + ", ".join(names) + "."


def checked_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Answer an unknown keyword with the nearest known one instead of Python's bare `TypeError`."""
    signature = inspect.signature(function)
    parameters = signature.parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        raise AssertionError(f"{function.__qualname__} takes any keyword; there is nothing to check")
    known = {p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY and p.name != "self"}
    name = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for word in kwargs:
            if word not in known:
                raise UnknownParameter(
                    f"{name} has no parameter {word!r}. {suggestion(word, known)}", parameter=word, callee=name
                )
        return function(*args, **kwargs)

    return checked
