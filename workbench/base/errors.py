"""Errors for users: each says what happened, with numbers, and then the remedy.

Every exception that a user can meet is a `WorkbenchError` (a `ValueError`, so that `except ValueError`
keeps working). The sentence is the error; `facts` carries what code reads. Our own invariants are plain `assert`s.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from typing import Any

import lazy_loader

_TO_AUTHORS = re.compile(r"\b(file|open|report|submit|raise|create)\b.*\b(issue|bug)s?\b", re.IGNORECASE)
"""Sentences of a library that ask its users to write to its authors, for whom an error of ours is no news."""
LONGEST = 10_000
"""Letters of a message: a name of a million letters is no help."""


def _shortened(message: str) -> str:
    message = re.sub(r"(\S{200})\S{300,}(\S{20})", r"\1…\2", message)  # a name, of which the sentence goes on
    return message if len(message) <= LONGEST else f"{message[: LONGEST // 2]} … {message[-LONGEST // 2 :]}"


class WorkbenchError(ValueError):
    """Base class of every error meant for the user; `facts` holds those values of the message that code reads."""

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message if len(message) <= LONGEST else _shortened(message))
        self.facts = facts

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython prints for this error."""
        from workbench.base.display import in_notebook

        return in_notebook(self)


class UnknownParameter(WorkbenchError):
    """A keyword that the called function does not have."""


class InvalidArgument(WorkbenchError):
    """An argument of a wrong type, or outside of its range."""


class InvalidExperiment(WorkbenchError):
    """An experiment that cannot be trained as it is written; `facts['parameter']` is the field, if it is one alone."""


class DataError(WorkbenchError):
    """A corpus or dataset that cannot feed the experiment."""


class CaptureError(WorkbenchError):
    """A model that cannot be captured; `facts['line']` is the line of the user's code that stops it."""


class PlanInfeasible(WorkbenchError):
    """A request that no plan satisfies, or a plan that cannot run on the cluster.

    If memory is what lacks, `facts` holds the `needed_bytes` and `offered_bytes` of the fullest device.
    """


class PlanMismatch(WorkbenchError):
    """A plan that was made for another model, batch or cluster."""


class RunExists(WorkbenchError):
    """A run directory that another run uses."""


class RunNotFound(WorkbenchError):
    """A path or name under which there is no run."""


class RunFailed(WorkbenchError):
    """A run whose worker died; carries the rank, the stage and the traceback of the worker."""


class CheckpointError(WorkbenchError):
    """A checkpoint that is missing, damaged, or of another model."""


class NonFiniteLoss(WorkbenchError):
    """A training whose loss or gradient norm is not a finite number; carries the step and both values."""


class LossSpikes(WorkbenchError):
    """A training with more loss spikes than its experiment allows."""


def root_exception(error: BaseException) -> BaseException:
    """Return the first of several exceptions that were raised because of each other: the one to report.

    While an exception leaves compiled code, the compiler of torch 2.11 and 2.13 still traces the generator by which
    torch formats the traceback, and raises its own `Unsupported`. That one has no cause, only a context.
    """
    is_compilers = type(error).__name__ == "Unsupported"
    cause = error.__cause__ or (error.__context__ if is_compilers else None)
    return error if cause is None else root_exception(cause)


def message_of(error: BaseException) -> str:
    """Return the message of an exception, or that it has none because its own `__str__` raises.

    A key that is not there is called that, and a library's request to file an issue is left out.
    """
    if isinstance(error, KeyError) and type(error).__str__ is KeyError.__str__ and len(error.args) == 1:
        [key] = error.args
        return key if isinstance(key, str) and " " in key else f"there is no key {key!r}"
    try:
        said = str(error)
    except Exception as failure:
        return f"its message cannot be read, because {type(error).__name__}.__str__ raises {type(failure).__name__}"
    if isinstance(error, WorkbenchError):
        return said
    lines = said.splitlines()
    for at, line in enumerate(lines):
        if _TO_AUTHORS.search(line):
            lines[at] = " ".join(each for each in re.split(r"(?<=[.!?])\s+", line) if not _TO_AUTHORS.search(each))
    return "\n".join(lines)


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, without the full stop; its class where it has none."""
    lines = (line.strip() for line in message_of(error).splitlines())
    return next(filter(None, lines), type(error).__name__).rstrip(".")


def in_words(error: BaseException, where: str = "") -> str:
    """Return the class of an exception, where it was raised, and the first line of its message."""
    name, said = type(error).__name__, first_line(error)
    return f"{name}{where}" + (f": {said}" if said != name else " without a message")


ELSEWHERE = {
    **dict.fromkeys(("lr", "max_lr"), "learning_rate"),
    **dict.fromkeys(("batch", "batch_size", "global_batch_size", "train_batch_size"), "global_batch"),
    **dict.fromkeys(("max_steps", "num_steps", "train_steps", "iterations"), "steps"),
    **dict.fromkeys(("num_epochs", "num_train_epochs"), "epochs"),
    **dict.fromkeys(("max_length", "max_seq_length", "sequence_length", "block_size"), "seq_len"),
    **dict.fromkeys(("max_grad_norm", "grad_clip", "gradient_clip_val"), "clip_norm"),
    **dict.fromkeys(("micro_batch_size", "per_device_train_batch_size"), "micro_batch"),
    **dict.fromkeys(("tp", "tensor_parallel", "tensor_model_parallel_size"), "tensor"),
    **dict.fromkeys(("pp", "pipeline_parallel", "pipeline_model_parallel_size"), "pipeline"),
    **dict.fromkeys(("dp", "data_parallel"), "data"),
    **dict.fromkeys(("gradient_checkpointing", "activation_checkpointing"), "recompute"),
}
"""Names of parameters in other libraries (PyTorch Lightning, transformers, Megatron-LM), and ours of the same thing."""


def suggestion(word: object, known: Iterable[str]) -> str:
    """Return `"Did you mean 'global_batch'?"`, or the list of known names if none is close to a word or means it."""
    names = sorted(known)
    close = difflib.get_close_matches(str(word)[:100], names, n=1, cutoff=0.6)
    if (ours := ELSEWHERE.get(str(word))) in names:
        return f"Did you mean {ours!r}?"
    if close:
        return f"Did you mean {close[0]!r}?"
    return "Known names: " + ", ".join(names) + "."


def lazy_names(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package whose public names stand in its `__init__.pyi`.

    Each name is imported when it is first used; an unknown one is answered with the nearest known one. The arguments
    are the package's `__name__` and `__file__`.
    """
    imported, listed, known = lazy_loader.attach_stub(package, file)

    def get(name: str) -> Any:
        if name in known or name.startswith("_"):
            return imported(name)
        raise AttributeError(f"{package} has no {name!r}. {suggestion(name, known)}", name=name)

    return get, listed, known
