"""`torch.export` of an unmodified model, reduced to what a training step needs.

Only this module imports `torch.export`. A non-strict export runs the model's own Python once on fake tensors, so a
failure has a traceback through the user's code, and errors quote the last line of it.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import logging
import re
import sys
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils.rnn import PackedSequence

from workbench.base.errors import CaptureError, WorkbenchError, first_line, in_words
from workbench.base.tensors import TensorSpec
from workbench.base.user_code import SourceLine, line_at, line_of_frames, line_of_node
from workbench.capture.export.aliasing import Registered
from workbench.capture.export.observed_forward import (
    Change,
    Held,
    Kept,
    are_left,
    forget,
    new_objects_alone,
    refuse_kept,
)
from workbench.capture.export.opaque import FLEX_ATTENTION, keep_calls
from workbench.capture.export.opaque_search import PACKED_SHAPE, OpaqueSearch, depends_on_values
from workbench.capture.export.varying import (
    Drawn,
    drawn_from,
    fresh_draws_refused,
    host_states,
    refused_draw,
    stopped_at_draw,
)
from workbench.capture.operations import inline_regions, scalar_tensor, schema_of
from workbench.capture.outputs import LossChoice, find_loss, flattened
from workbench.capture.torch_internals import (
    DERIVATIVE,
    SYMBOLIC_SHAPES_LOG,
    exportable,
    lean,
    members_renamed,
    patched,
    remove_checks,
    rename_in_stacks,
)
from workbench.record.columns import logging_scalars


@dataclass(frozen=True)
class Exported:
    """A flat ATen graph whose `get_attr` tensors are the model's own parameters and buffers."""

    module: fx.GraphModule
    trained: frozenset[str]
    """Names of the parameters that the loss is differentiated by."""
    notes: tuple[str, ...] = ()
    """Sentences on what was left out of the graph."""
    template: Any = None
    """Structure of what forward returned, with a `Slot` for each tensor, where that was asked for."""
    logged: tuple[tuple[str, str], ...] = ()
    """Name and reduction of each call of `log_scalar`, in order."""

    @property
    def loss(self) -> fx.Node:
        """The node of the loss, which is another one after a rewrite of `loss += aux`."""
        return self.module.graph.output_node().all_input_nodes[0]

    @property
    def returned(self) -> tuple[fx.Node, ...]:
        """The nodes of the tensors in `template`, by the index of their slots."""
        [output] = self.module.graph.find_nodes(op="output")
        values: Any = output.args[0]
        return tuple(values[1:])

    @property
    def scalars(self) -> tuple[tuple[str, str, fx.Node], ...]:
        """Name, reduction and node of each call of `log_scalar`; the nodes are the last of those that are returned."""
        nodes = self.returned[-len(self.logged) :] if self.logged else ()
        return tuple((*named, node) for named, node in zip(self.logged, nodes, strict=True))


def load_export() -> None:
    """Import what torch imports when it exports for the first time, which is half of the time of a small capture."""
    torch.export.export(torch.nn.Identity(), (torch.empty(1, device="meta"),))


def export(
    search: OpaqueSearch, batch: Mapping[str, TensorSpec], loss: LossChoice, returns: bool, logs: bool = False
) -> Exported:
    """Export `model(**batch)` of the model in `search`, on the device of its parameters.

    `loss` chooses among what forward returns. With `returns`, the graph computes all that forward returns, and if it
    `logs`, the scalars that forward logs. `search` has the calls that are opaque already, and others become so one
    after the other where export cannot follow them.

    Raises:
        CaptureError: the model cannot be exported; names the line of the user's code that stops it.
    """
    model = search.model
    device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
    failure: CaptureError | None = None
    while True:
        try:
            exported = _export_on(device, search, batch, loss, returns, logs)
        except (Drawn, Kept):
            raise
        except CaptureError as error:
            failure = failure or error
            if search.adds(error):
                continue
            if reason := next(reversed(search.refused.values()), ""):
                said = f"{failure} It cannot run as it is either: {reason}"
                raise type(failure)(said, **failure.facts) from failure.__cause__
            raise failure from failure.__cause__
        break
    return replace(exported, notes=(*exported.notes, *search.notes))


def _export_on(
    device: torch.device,
    search: OpaqueSearch,
    batch: Mapping[str, TensorSpec],
    choice: LossChoice,
    returns: bool,
    logs: bool,
) -> Exported:
    model, name, example = search.model, search.name, _example(batch, device)
    templates: list[Any] = [None]
    registered, trained = Registered(model, name), list[tuple[frozenset[str], tuple[str, ...]]]()
    made, changed = list[weakref.ref[torch.Tensor]](), list[Change]()
    shapes, is_kept = [None], False

    def loss_of(result: Any, batch: Mapping[str, torch.Tensor]) -> Any:
        nonlocal is_kept
        changed[:] = held.changes()  # export restores attributes when forward has returned
        given: Any = next(iter(batch.values()))
        shapes[0], is_kept = given.fake_mode.shape_env, registered.have_new_attributes(given)
        loss, tensors = find_loss(result, choice, batch, name), list[torch.Tensor]()
        trained.append(registered.trained(loss))
        if returns:
            templates[0], tensors = flattened(result)
        tensors += [scalar_tensor(scalar.value) for scalar in logged if logs]
        return (loss, *tensors) if returns or tensors else loss

    with (
        search.applied(),
        torch.enable_grad(),
        exportable(model, name, loss_of),
        registered.followed(model, made),
        passed_checks() as checks,
        members_renamed(model, name) as renamed,
        _quiet_failure(),
        logging_scalars() as logged,
    ):
        held = Held(model, getattr(choice, "function", None))
        before = host_states(model)
        try:
            with fresh_draws_refused(name), lean("following its forward"), new_objects_alone():
                program = torch.export.export(model, (), example, strict=False)
                is_kept = is_kept or bool(changed) or held.has_iterators or are_left(made)
        except WorkbenchError:
            raise
        except Exception as error:
            raise explained(error, model, name, batch) from error
        finally:
            held.restore()
        if source := drawn_from(before, host_states(model)):
            try:
                with stopped_at_draw(model, name):
                    torch.export.export(model, (), example, strict=False)
            except CaptureError as error:
                if line_at(str(error.facts.get("file", "")), 0).is_of_library:  # it runs as written
                    raise
                raise Drawn(str(error), **error.facts) from None
            raise Drawn(str(refused_draw(source, SourceLine(), name)))
        # What forward keeps, wherever it is held: does the next forward read it?
        notes, found = tuple[str, ...](), (templates[0], trained[-1], [*logged])

        def forward(fields: Mapping[str, torch.Tensor]) -> Any:
            logged.clear()
            return model(**fields)

        try:
            if is_kept:
                notes = refuse_kept(model, name, forward, example, held, changed, shapes[0])
        finally:
            held.restore()
            changed.clear()
            forget(made)
        templates[0], trained[-1], logged[:] = found
    module = _plain(program, name, renamed)
    named = tuple((scalar.name, scalar.reduce) for scalar in logged if logs)
    registered.refuse_constants(module)
    notes = (*checks, *trained[-1][1], *notes)
    return Exported(module, trained[-1][0], notes, templates[0], named)


def _plain(program: torch.export.ExportedProgram, name: str, renamed: Mapping[str, str]) -> fx.GraphModule:
    """Return the graph without checks, with `with` blocks inlined, and members under their own names."""
    refuse_unpriced(program.graph, name)
    with lean("putting its graph together"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "A model attribute .* requires gradient")  # a note of the plan says more
        module = remove_checks(program.module(check_guards=False))
    rename_in_stacks(module.graph, renamed)
    inline_regions(module)
    keep_calls(module.graph)
    for node in module.graph.nodes:
        schema = schema_of(node)
        names = [argument.name for argument in schema.arguments] if schema is not None else []
        # `sparse=True` of embeddings is ignored: neither an all-reduce nor AdamW takes that form of a gradient.
        if "sparse" in names[: len(node.args)] and node.args[at := names.index("sparse")] is True:
            node.update_arg(at, False)
    return module


def _example(batch: Mapping[str, TensorSpec], device: torch.device) -> dict[str, torch.Tensor]:
    """Return a batch of zeros, which are valid indices and labels."""
    return {
        name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device=device) for name, spec in batch.items()
    }


@contextlib.contextmanager
def _quiet_failure() -> Iterator[None]:
    """Discard what a failing export writes to stderr: dumped graphs would bury the one sentence of our error."""
    log = logging.getLogger(SYMBOLIC_SHAPES_LOG)
    level = log.level
    log.setLevel(logging.ERROR)
    written = io.StringIO()
    try:
        with contextlib.redirect_stderr(written), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The tensor attributes? .* assigned during export")  # by recurrent layers
            yield
        sys.stderr.write(written.getvalue())
    finally:
        log.setLevel(level)


# Checks of values in forward: `assert not torch.isnan(loss)`, `if labels.max() >= n: raise`.
#
# Capture runs forward once, on tensors without values, and takes such checks as passed. Each is a note of the plan, so
# that nobody relies on it in silence.


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
            frame = sys._getframe(1)  # the code that asks whether a value is true
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


# Why an export failed, in one sentence that names the line of the model's code and a way out.

WITHOUT_META = frozenset({"istft"})
"""Operations that torch 2.13 exports although they read values, which a tensor of the meta device has not."""
_DERIVATIVES = frozenset({"_jvp_increment_nesting", "_grad_increment_nesting", "_make_dual.default"})
"""Names of what export leaves of derivatives that it does not follow."""


def explained(error: Exception, model: nn.Module, name: str, batch: Mapping[str, TensorSpec]) -> CaptureError:
    """Return the `CaptureError` that says why an export failed, and what to do.

    Its fact `reason` says why a call of what failed would be opaque, where that can be told.
    """
    line = line_of_frames(traceback.extract_tb(error.__traceback__))
    fields = ", ".join(f"{key} {list(spec.shape)}" for key, spec in batch.items())
    said, facts = str(error), dict[str, str]()
    # Features of torch that export does not know are told by the frames of the failure: their errors say other things.
    frames = list(traceback.walk_tb(error.__traceback__))
    files = [frame.f_code.co_filename.replace("\\", "/") for frame, _ in frames]
    held = (value for frame, _ in frames for value in frame.f_locals.values())
    scripted = [path for path, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    if any("flex_attention" in file for file in files):
        message = (
            f"it calls FlexAttention{line.where}, which capture cannot follow. Call scaled_dot_product_attention with "
            f"an attn_mask instead (attn_implementation='sdpa' of a transformers model)."
        )
        facts["reason"] = FLEX_ATTENTION
    elif "ctc_loss" in said:
        message = (
            f"the memory that the CTC loss{line.where} needs depends on the values of the lengths. Register a function "
            f"that calls it by torch.library.custom_op, with register_fake and register_autograd."
        )
        facts["reason"] = "the memory of a CTC loss depends on values"
    elif any(isinstance(value, PackedSequence) for value in held) or any(f.endswith("nn/utils/rnn.py") for f in files):
        message = (
            f"the shape of a packed sequence{line.where} depends on the values of the lengths. Give the padded "
            f"sequence to the recurrent layer, and take the last states by x[torch.arange(len(x)), lengths - 1]."
        )
        facts["reason"] = PACKED_SHAPE
    elif scripted:
        message = (
            f"torch.jit.script compiled {f'its module {scripted[0]}' if scripted[0] else 'it'}, which torch.export "
            "cannot follow. Give the module as it was before torch.jit.script; compile=True of the experiment compiles "
            "it."
        )
    # The others are told by their message.
    elif depends_on_values(error) and re.search(r"\breturn .*(\bfloat\(|\.item\()", line.text):
        message = (
            f"what it returns{line.where} is a number of Python's, through which no gradient goes. Return the tensor "
            "itself, without .item() or float()."
        )
    elif depends_on_values(error):
        way = (
            "Replace a branch by torch.where or torch.cond and a selection by a mask, or decide before training."
            if not line.caller
            else "The line is a library's: put the call that leads to it into a module of your own that returns "
            "tensors of fixed shapes, such as the loss, and it runs as written."
        )
        message = f"what it does{line.where or ' in its forward'} depends on the values of a tensor. {way}"
    elif "unexpected keyword" in (reason := first_line(error)) or ("missing" in reason and "argument" in reason):
        message = f"{reason}. The batch has the fields {fields}: let forward take exactly these as keyword arguments."
    elif "fake tensor in the exported program" in reason:
        message = (
            f"its forward computes with a tensor{line.where} that an earlier forward left outside of the model, such "
            "as in a global. Register it, self.register_buffer('state', torch.zeros(8)), and write to it in place, "
            "self.state.copy_(new)."
        )
    elif "copy__default" in said and "nn_module_stack" in said:
        message = (
            "it assigns one of its buffers to another, which torch.export does not follow. Copy the values: "
            "self.previous.copy_(self.current) in place of self.previous = self.current."
        )
    elif "on the same device" in said or "found two different devices" in said:
        message = (
            f"tensors of two devices meet{line.where}. Make tensors in forward where its inputs are, "
            f"torch.arange(…, device=x.device), and register those made in the constructor as buffers."
        )
    else:
        why = in_words(error, line.where)
        message = f"{why}. It was called with {fields}: see that model(**batch) runs on such a batch."
        if "cuda devices" in said or "CUDA enabled" in said:
            message += " A plan chooses the devices of the model and the batch: leave .cuda() out of forward."
    return line.error(name, f"cannot be captured: {message}", **facts)


def refuse_unpriced(graph: fx.Graph, name: str) -> None:
    """Raise `CaptureError` for an operation that is exported but runs on no meta tensors, and for transforms.

    Of `torch.vmap` and of derivatives in forward mode, export leaves the bookkeeping in the graph, cut in pieces. The
    module around either runs as written.
    """
    for node in graph.nodes:
        operation = getattr(node.target, "_opname", "")
        if operation in WITHOUT_META:
            line = line_of_node(node)
            said = (
                f"calls torch.{operation}{line.where}, which PyTorch cannot run without values, so that its shapes "
                "and its cost are unknown. Put it into a module of your own, which then runs as written."
            )
            reason = f"torch.{operation} does not run without values"
        elif node.op == "call_function" and getattr(node.target, "__name__", "") == "_vmap_increment_nesting":
            line = line_of_node(node)
            said = (
                f"calls torch.vmap{line.where}, whose operations cannot be divided into blocks. Write the dims that it "
                "maps over by broadcasting, for a mask i[:, None] >= i[None, :]."
            )
            reason = "the operations of torch.vmap cannot be divided into blocks"
        elif node.op == "call_function" and getattr(node.target, "__name__", "") in _DERIVATIVES:
            line = line_of_node(node)
            said = (
                f"takes a derivative{line.where} by torch.func or in forward mode, whose operations cannot be divided "
                "into blocks. Put it into a module of your own, which then runs as written."
            )
            reason = DERIVATIVE
        else:
            continue
        inside = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
        raise line.error(name, said, inside=inside, reason=reason)
