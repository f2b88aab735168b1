"""`torch.export` of an unmodified model, reduced to what a training step needs.

Only this module imports `torch.export`. A non-strict export runs the model's own Python once on fake tensors, so a
failure has a traceback through the user's code, and errors quote the last line of it.
"""

from __future__ import annotations

import contextlib
import io
import logging
import random
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from workbench.capture.context_managers import inline_regions
from workbench.capture.export_errors import explained, refuse_unpriced
from workbench.capture.frozen_numbers import Held, Numbers, note_of_changes, read_again
from workbench.capture.opaque import keep_calls
from workbench.capture.opaque_search import OpaqueSearch
from workbench.capture.operations import scalar_tensor, schema_of
from workbench.capture.outputs import LossChoice, find_loss, flattened
from workbench.capture.torch_internals import (
    SYMBOLIC_SHAPES_LOG,
    exportable,
    members_renamed,
    remove_checks,
    rename_in_stacks,
    without_traces,
)
from workbench.capture.value_checks import passed_checks
from workbench.columns import logging_scalars
from workbench.errors import CaptureError, WorkbenchError
from workbench.tensors import TensorSpec


@dataclass(frozen=True)
class Exported:
    """A flat ATen graph whose `get_attr` tensors are the model's own parameters and buffers."""

    module: fx.GraphModule
    loss: fx.Node
    notes: tuple[str, ...] = ()
    """Sentences on what was left out of the graph."""
    template: Any = None
    """Structure of what forward returned, with a `Slot` for each tensor, where that was asked for."""
    logged: tuple[tuple[str, str], ...] = ()
    """Name and reduction of each call of `log_scalar`, in order."""
    keeps_tensors: bool = False
    """True if forward left a tensor on its modules, outside of buffers, that was not there before."""

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
        except CaptureError as error:
            failure = failure or error
            if search.adds(error):
                continue
            if reason := next(reversed(search.refused.values()), ""):
                said = f"{failure} It cannot run as it is either: {reason}"
                raise type(failure)(said, **failure.facts) from failure.__cause__
            raise failure from failure.__cause__
        if exported.keeps_tensors or any(call.keeps_tensors for call in search.calls):
            _refuse_kept_tensors(search, batch, loss)
        return replace(exported, notes=(*exported.notes, *search.notes))


def _export_on(
    device: torch.device,
    search: OpaqueSearch,
    batch: Mapping[str, TensorSpec],
    choice: LossChoice,
    returns: bool,
    logs: bool,
    numbers: Numbers | None = None,
) -> Exported:
    """Export on a device; `numbers` replace those that the modules hold, in a second export of the same model."""
    model, name, example = search.model, search.name, _example(batch, device)
    templates: list[Any] = [None]
    held, after = Numbers.of(model), list[Numbers]()
    tensors_before, kept = Held(model), dict[str, torch.Tensor]()

    def loss_of(result: Any, batch: Mapping[str, torch.Tensor]) -> Any:
        after.append(Numbers.of(model))  # export restores them when forward has returned
        kept.update(tensors_before.new_in(Held(model)))
        loss, tensors = find_loss(result, choice, batch, name), list[torch.Tensor]()
        if returns:
            templates[0], tensors = flattened(result)
        tensors += [scalar_tensor(scalar.value) for scalar in logged if logs]
        return (loss, *tensors) if returns or tensors else loss

    with (
        search.applied(),
        without_traces(model),
        exportable(model, name, loss_of),
        passed_checks() as checks,
        members_renamed(model, name) as renamed,
        _quiet_failure(),
        logging_scalars() as logged,
        (numbers or Numbers({}, {})).held_by(model),
    ):
        before = _random_states()
        try:
            program = torch.export.export(model, (), example, strict=False)
        except WorkbenchError:
            raise
        except Exception as error:
            raise explained(error, model, name, batch) from error
        finally:
            tensors_before.restore()
        if _random_states() != before:
            raise CaptureError(
                f"The forward of {name} draws from Python's or NumPy's random numbers, and capture would repeat the "
                f"drawn numbers in every step. Draw from torch's: torch.rand(…), and choose by torch.where."
            )
    module = _module_of(program, renamed, name)
    [output] = module.graph.find_nodes(op="output")
    named = tuple((scalar.name, scalar.reduce) for scalar in logged if logs)
    values: Any = output.args[0] if returns or named else output.all_input_nodes
    notes, changed = tuple(checks), held.changes_to(after[-1])
    if numbers is None and changed.values:
        second = _export_on(device, search, batch, choice, returns, logs, changed)
        notes = (*notes, *note_of_changes(changed, held, module.graph, second.module.graph, name))
    return Exported(module, values[0], notes, templates[0], named, bool(kept))


def _module_of(program: torch.export.ExportedProgram, renamed: Mapping[str, str], name: str) -> fx.GraphModule:
    """Return the graph of an export, prepared for capture; `renamed` are members that had other names meanwhile."""
    refuse_unpriced(program.graph, name)
    module = remove_checks(program.module(check_guards=False))
    rename_in_stacks(module.graph, renamed)
    inline_regions(module)
    keep_calls(module.graph)
    _make_gradients_dense(module)
    return module


def _example(batch: Mapping[str, TensorSpec], device: torch.device) -> dict[str, torch.Tensor]:
    """Return a batch of zeros, which are valid indices and labels."""
    return {
        name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device=device) for name, spec in batch.items()
    }


def _refuse_kept_tensors(search: OpaqueSearch, batch: Mapping[str, TensorSpec], choice: LossChoice) -> None:
    """Raise `CaptureError` if the loss depends on a tensor that an earlier forward kept outside of buffers."""
    model = search.model if search.valued is None else search.valued
    example = _example(batch, next((parameter.device for parameter in model.parameters()), torch.device("cpu")))
    found = read_again(model, example, lambda result: find_loss(result, choice, example, search.name))
    if found is not None:
        place, line = found
        raise line.error(
            search.name,
            f"keeps a tensor in {place} and computes with it in the next forward{line.where}. Outside of buffers it "
            "would start every step as the constructor left it. Register it, self.register_buffer('state', "
            "torch.zeros(8)), and write to it in place, self.state.copy_(new); what belongs to samples is a field of "
            "the batch.",
        )


def _random_states() -> tuple[Any, ...]:
    """Return the states of Python's and NumPy's random number generators, in a form that can be compared."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), repr(numpy.random.get_state()) if numpy is not None else ""


def _make_gradients_dense(module: fx.GraphModule) -> None:
    """Ignore `sparse=True` of embeddings: neither an all-reduce nor AdamW takes the sparse form of the gradient."""
    for node in module.graph.nodes:
        schema = schema_of(node)
        names = [argument.name for argument in schema.arguments] if schema is not None else []
        if "sparse" in names[: len(node.args)]:
            node.update_arg(names.index("sparse"), False)


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
