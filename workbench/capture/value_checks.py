"""Checks of values in forward: `assert not torch.isnan(loss)`, `if labels.max() >= n: raise`.

Capture runs forward once, on tensors without values, and takes such checks as passed. Each is a note of the plan, so
that nobody relies on it in silence.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from workbench.capture.source_lines import line_at
from workbench.capture.torch_internals import patched


@contextlib.contextmanager
def passed_checks() -> Iterator[dict[str, None]]:
    """Take every check of a tensor's values as passed while a model is exported.

    A check is an `assert`, or an `if` that ends in `raise`. Yields the sentences on them, once each, as keys.
    """
    notes: dict[str, None] = {}

    def passing(original: Callable[[Any], bool], is_known: bool) -> Callable[[Any], bool]:
        def truth(value: Any) -> bool:
            if is_known:
                with contextlib.suppress(Exception):  # the size of a selection, or a number taken out of a tensor
                    return bool(original(value))
            frame = sys._getframe(1)
            checks = _checks(frame.f_code.co_filename)
            outcomes = {outcome for first, last, outcome in checks if first <= frame.f_lineno <= last}
            if len(outcomes) != 1 or (outcome := outcomes.pop()) is None:
                return bool(original(value))
            where = line_at(frame.f_code.co_filename, frame.f_lineno).where
            note = f"The check{where} depends on the values of tensors: training goes on as if it passed in every step."
            notes[note] = None
            return outcome

        return truth

    with (
        patched(torch.Tensor, "__bool__", passing(torch.Tensor.__bool__, is_known=False)),
        patched(torch.SymBool, "__bool__", passing(torch.SymBool.__bool__, is_known=True)),
    ):
        yield notes


@functools.cache
def _checks(file: str) -> tuple[tuple[int, int, bool | None], ...]:
    """Return first line, last line and passing outcome of the condition of each check in a file."""
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return ()
    tried = (statement for node in ast.walk(tree) if isinstance(node, ast.Try) for statement in node.body)
    # The failure of a check in a `try` may be a way of branching.
    caught = {id(node) for statement in tried for node in ast.walk(statement)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) or (isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise)):
            outcomes = _outcomes(node.test, isinstance(node, ast.Assert))
            outcome = outcomes.pop() if len(outcomes) == 1 and id(node) not in caught else None
            found.append((node.test.lineno, node.test.end_lineno or node.test.lineno, outcome))
    return tuple(found)


def _outcomes(test: ast.expr, wanted: bool) -> set[bool]:
    """Return the truths that the operands of `not`, `and` and `or` need, so that the whole condition is `wanted`."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _outcomes(test.operand, not wanted)
    if isinstance(test, ast.BoolOp):
        return set().union(*(_outcomes(operand, wanted) for operand in test.values))
    is_python = isinstance(test, ast.Compare) and all(isinstance(op, (ast.Is, ast.IsNot)) for op in test.ops)
    return set() if is_python else {wanted}
