"""Which of several exceptions, each raised because of another, is the one to report."""

from __future__ import annotations


def innermost(error: BaseException) -> BaseException:
    """The exception that the pipeline's own `RuntimeError` was raised from.

    While one leaves compiled code, torch formats its traceback with a generator, at which the compiler, still watching,
    takes offence: its own exception then stands before the one that matters (torch 2.11 and 2.13).
    """
    offended = type(error).__name__ == "Unsupported"
    cause = error.__cause__ or (error.__context__ if offended else None)
    return error if cause is None else innermost(cause)
