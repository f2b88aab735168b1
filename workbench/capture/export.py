"""`torch.export` of an unmodified model, cleaned to what a training step needs.

The only module that imports `torch.export`. Non-strict export runs the model's own Python once on fake
tensors, so a failure has a Python traceback through the user's code; the last line of theirs is quoted.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import logging
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn

from workbench.capture.graph import spec_of
from workbench.capture.regions import open_regions
from workbench.errors import CaptureError
from workbench.tensors import TensorSpec

_CHECKS = ("_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain")
_LIBRARIES = tuple(
    str(Path(path)) for path in {sys.prefix, sys.base_prefix, str(Path(torch.__file__).parent)} if path != "/"
)


@dataclass(frozen=True)
class Exported:
    """A flat ATen graph whose `get_attr` tensors are the model's own parameters and buffers."""

    module: fx.GraphModule
    loss: fx.Node


def example_batch(batch: Mapping[str, TensorSpec], device: torch.device) -> dict[str, torch.Tensor]:
    """Zeros in the batch's shapes: every label is class 0, every index is valid."""
    return {
        name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device=device) for name, spec in batch.items()
    }


def export(model: nn.Module, batch: Mapping[str, TensorSpec], name: str) -> Exported:
    """Export `model(**batch)`; raises `CaptureError` naming the user's line that stops it."""
    device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
    example = example_batch(batch, device)
    with _custom_functions_refused(name), _inert_layerdrop(model), _numbers_in_the_graph(), _quiet_failure():
        try:
            program = torch.export.export(model, (), example, strict=False)
        except CaptureError:
            raise
        except Exception as error:
            raise _explained(error, name, batch) from error
    assert program.call_spec.out_spec is not None
    module = _without_checks(program.module(check_guards=False))
    open_regions(module)
    return Exported(module, _loss_node(module, program.call_spec.out_spec, name))


def _without_checks(module: Any) -> fx.GraphModule:
    """Drop the guards and metadata assertions that export adds; keep every mutation of a buffer."""
    module._forward_pre_hooks.clear()
    module._forward_pre_hooks_with_kwargs.clear()
    for node in list(module.graph.nodes):
        guard = node.op == "call_module" and node.target == "_guards_fn"
        check = node.op == "call_function" and any(word in str(node.target) for word in _CHECKS)
        if guard or check:
            module.graph.erase_node(node)
    module.recompile()
    return module  # type: ignore[no-any-return]


def _loss_node(module: fx.GraphModule, out_spec: pytree.TreeSpec, name: str) -> fx.Node:
    """The scalar that training minimises: `.loss`, `["loss"]`, the first of a tuple, or the output itself."""
    [output] = [node for node in module.graph.nodes if node.op == "output"]
    leaves, _ = pytree.tree_flatten(output.args[0])
    result = pytree.tree_unflatten(leaves, out_spec)
    if isinstance(result, Mapping) and "loss" in result:
        loss = result["loss"]
    elif hasattr(result, "loss"):
        loss = result.loss
    elif isinstance(result, (tuple, list)) and result:
        loss = result[0]
    else:
        loss = result
    value = loss.meta.get("val") if isinstance(loss, fx.Node) else None
    if (
        not isinstance(loss, fx.Node)
        or not isinstance(value, torch.Tensor)
        or value.numel() != 1
        or not value.is_floating_point()
    ):
        found = spec_of("loss", value).shape if isinstance(value, torch.Tensor) else type(result).__name__
        raise CaptureError(
            f"{name} returned {found} where its loss should be. Let forward return a scalar loss: as `.loss`, "
            f'`["loss"]`, the first item of a tuple, or alone.',
            model=name,
        )
    return loss


@contextlib.contextmanager
def _custom_functions_refused(name: str) -> Iterator[None]:
    """Refuse `autograd.Function`: export keeps its forward and silently drops its backward.

    A model with one would train with wrong gradients and never say so.
    """
    original = torch.autograd.Function.__dict__["apply"]

    def refusing(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.startswith("torch.") and not cls.__module__.startswith("torch.utils.checkpoint"):
            return original.__get__(None, cls)(*args, **kwargs)
        file, number, text = _users_frame(traceback.extract_stack()[:-1])
        raise CaptureError(
            f"{name} uses the custom autograd function {cls.__name__} at {file}:{number} (`{text}`), whose backward "
            f"torch.export would silently drop. Register it with torch.library.custom_op and register_autograd, or "
            f"write it with differentiable operations.",
            model=name,
            file=file,
            line=number,
        )

    setattr(torch.autograd.Function, "apply", classmethod(refusing))  # noqa: B010
    try:
        yield
    finally:
        setattr(torch.autograd.Function, "apply", original)  # noqa: B010


@contextlib.contextmanager
def _inert_layerdrop(model: nn.Module) -> Iterator[None]:
    """Let `torch.rand([]) < layerdrop` be a constant False where every layerdrop is 0, which is exact.

    The comparison is data-dependent and stops the capture of OPT and BART before transformers 5.20.
    """
    if any(getattr(module, "layerdrop", 0) for module in model.modules()):
        yield
        return
    rand = torch.rand

    def constant(*size: Any, **kwargs: Any) -> Any:
        if size in (([],), ((),), (torch.Size([]),)):
            return torch.ones((), **kwargs) if kwargs else 1.0
        return rand(*size, **kwargs)

    setattr(torch, "rand", constant)  # noqa: B010
    try:
        yield
    finally:
        setattr(torch, "rand", rand)  # noqa: B010


@contextlib.contextmanager
def _numbers_in_the_graph() -> Iterator[None]:
    """Let `torch.tensor(0.0)` be an operation that makes the number, not a constant whose value the meta device drops.

    Masks of `transformers` before 5.20 are built from one, and a mask that is not known cannot be seen to mask nothing.
    Whole numbers stay constants: DeBERTa slices by one, and export knows the size of a slice by a constant only.
    """
    tensor = torch.tensor

    def known(data: Any, **kwargs: Any) -> Any:
        if isinstance(data, float) and set(kwargs) <= {"dtype", "device"}:
            return torch.full((), data, **kwargs)
        return tensor(data, **kwargs)

    setattr(torch, "tensor", known)  # noqa: B010
    try:
        yield
    finally:
        setattr(torch, "tensor", tensor)  # noqa: B010


@contextlib.contextmanager
def _quiet_failure() -> Iterator[None]:
    """Where export fails, keep the graphs that it dumps to stderr from burying the one sentence that we raise."""
    log = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    level = log.level
    log.setLevel(logging.ERROR)
    dumped = io.StringIO()
    try:
        with contextlib.redirect_stderr(dumped):
            yield
        sys.stderr.write(dumped.getvalue())
    finally:
        log.setLevel(level)


def _explained(error: Exception, name: str, batch: Mapping[str, TensorSpec]) -> CaptureError:
    file, number, text = _users_frame(_frames(error.__traceback__))
    where = f" at {file}:{number} (`{text}`)" if file else ""
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "").rstrip(".")
    kind = type(error).__name__
    fields = ", ".join(f"{key} {list(spec.shape)}" for key, spec in batch.items())
    if _depends_on_values(kind, reason):
        message = (
            f"what it does{where or ' in its forward'} depends on the values of a tensor. Replace a branch by "
            f"torch.where or torch.cond and a selection by a mask, or decide before training."
        )
    elif "unexpected keyword" in reason or ("missing" in reason and "argument" in reason):
        message = f"{reason}. The batch has the fields {fields}: let forward take exactly these as keyword arguments."
    else:
        message = f"{kind}{where}: {reason}. It was called with {fields}: see that model(**batch) runs on such a batch."
    return CaptureError(
        f"{name} cannot be captured: {message}", model=name, file=file, line=number, reason=reason, fields=fields
    )


def _depends_on_values(kind: str, reason: str) -> bool:
    return "datadependent" in kind.lower() or any(word in reason.lower() for word in ("data-dependent", "unbacked"))


def _frames(trace: TracebackType | None) -> traceback.StackSummary:
    return traceback.extract_tb(trace)


def _users_frame(frames: Sequence[traceback.FrameSummary]) -> tuple[str, int, str]:
    """The innermost frame in code that is neither installed nor ours; else the innermost of `transformers`."""
    own = str(Path(__file__).parent.parent)
    theirs = [f for f in frames if not f.filename.startswith((*_LIBRARIES, own, "<frozen"))]
    modelling = [f for f in frames if f"{'transformers'}/models" in f.filename.replace("\\", "/")]
    for candidates in (theirs, modelling):
        inside = [f for f in candidates if f.name not in ("<module>",)]
        if inside:
            frame = inside[-1]
            text = frame.line or linecache.getline(frame.filename, frame.lineno or 0).strip()
            return frame.filename, frame.lineno or 0, text
    return "", 0, ""
