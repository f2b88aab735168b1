"""`torch.export` of an unmodified model, cleaned to what a training step needs.

The only module that imports `torch.export`. Non-strict export runs the model's own Python once on fake
tensors, so a failure has a Python traceback through the user's code; the last line of theirs is quoted.
"""

from __future__ import annotations

import contextlib
import functools
import io
import linecache
import logging
import random
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
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
    """Export `model(**batch)`; raises `CaptureError` naming the user's line that stops it.

    A model on the meta device whose forward meets tensors of the CPU (a table from NumPy, `torch.arange` of no device)
    is given memory there, which nobody writes to.
    """
    device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
    try:
        return _exported(model, batch, name, device)
    except CaptureError as error:
        if not any(p.is_meta for p in model.parameters()) or not _mixes_devices(str(error.__cause__)):
            raise
    _leave_meta(model)
    return _exported(model, batch, name, torch.device("cpu"))


def _exported(model: nn.Module, batch: Mapping[str, TensorSpec], name: str, device: torch.device) -> Exported:
    example = example_batch(batch, device)
    with contextlib.ExitStack() as stack:
        for patch in (_returning_its_loss(model, name, batch), _custom_functions_refused(name), _hooks_refused(name)):
            stack.enter_context(patch)
        stack.enter_context(_derivatives_refused(name))
        for patch in (_inert_layerdrop(model), _numbers_in_the_graph(), _masks_unread(), _quiet_failure()):
            stack.enter_context(patch)
        drawn = _generators()
        try:
            program = torch.export.export(model, (), example, strict=False)
        except CaptureError:
            raise
        except Exception as error:
            raise _explained(error, name, batch) from error
        if _generators() != drawn:
            raise CaptureError(
                f"The forward of {name} draws from Python's or NumPy's random numbers, which capture would fix for "
                f"good. Draw from torch's: torch.rand(…), and choose by torch.where.",
                model=name,
            )
    module = _without_checks(program.module(check_guards=False))
    open_regions(module)
    _make_gradients_dense(module)
    return Exported(module, _loss_node(module))


def _generators() -> tuple[Any, ...]:
    """The states of the random numbers that are not torch's."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), repr(numpy.random.get_state()) if numpy is not None else ""


def _mixes_devices(message: str) -> bool:
    return "on the same device" in message or "found two different devices" in message


def _leave_meta(model: nn.Module) -> None:
    """Put every tensor of a model on the CPU, tied ones as one; without numbers, so that no memory is touched."""
    found: dict[int, torch.Tensor] = {}
    for module in model.modules():
        held = {**vars(module), **module._parameters, **module._buffers}
        for key, value in held.items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                setattr(module, key, found.setdefault(id(value), _empty_on_cpu(value)))


def _empty_on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_like(tensor, device="cpu", requires_grad=False)
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


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


def _make_gradients_dense(module: fx.GraphModule) -> None:
    """Ignore `sparse=True` of embeddings: the gradient is the same, and no reduction or AdamW takes a sparse one."""
    for node in module.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            names = [argument.name for argument in node.target._schema.arguments]
            place = names.index("sparse") if "sparse" in names else len(node.args)
            if place < len(node.args):
                node.update_arg(place, False)
    module.recompile()


def _loss_node(module: fx.GraphModule) -> fx.Node:
    [output] = [node for node in module.graph.nodes if node.op == "output"]
    [loss] = output.all_input_nodes
    return loss  # type: ignore[no-any-return]


@contextlib.contextmanager
def _returning_its_loss(model: nn.Module, name: str, batch: Mapping[str, TensorSpec]) -> Iterator[None]:
    """Let forward return its loss alone: export knows few of the types that it may come in (caches, dataclasses)."""
    forward = model.forward
    own = vars(model).get("forward")

    @functools.wraps(forward)
    def returning_its_loss(*args: Any, **kwargs: Any) -> torch.Tensor:
        return _loss_of(forward(*args, **kwargs), name, batch)

    object.__setattr__(model, "forward", returning_its_loss)
    try:
        yield
    finally:
        object.__delattr__(model, "forward")
        if own is not None:
            object.__setattr__(model, "forward", own)


def _loss_of(result: Any, name: str, batch: Mapping[str, TensorSpec]) -> torch.Tensor:
    """The scalar that training minimises: `.loss`, `["loss"]`, the first of a tuple, or the output itself."""
    if isinstance(result, Mapping) and "loss" in result:
        loss = result["loss"]
    elif hasattr(result, "loss"):
        loss = result.loss
    elif isinstance(result, (tuple, list)) and result:
        loss = result[0]
    else:
        loss = result
    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.is_floating_point():
        return loss
    if loss is None and result is not None:
        raise CaptureError(
            f"{name} returned no loss for a batch of {', '.join(batch)}. Most models compute it where they are given "
            f"labels: add the field to the items of the dataset.",
            model=name,
        )
    found = spec_of("loss", loss).shape if isinstance(loss, torch.Tensor) else type(result).__name__
    raise CaptureError(
        f"{name} returned {found} where its loss should be. Let forward return a scalar loss: as `.loss`, "
        f'`["loss"]`, the first item of a tuple, or alone.',
        model=name,
    )


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
def _hooks_refused(name: str) -> Iterator[None]:
    """Refuse `Tensor.register_hook` in forward: export forgets the hook, and with it what it does to the gradient."""
    original = torch.Tensor.register_hook

    def refusing(tensor: torch.Tensor, hook: Any) -> Any:
        file, number, text = _users_frame(traceback.extract_stack()[:-1])
        if not file:
            return original(tensor, hook)
        raise CaptureError(
            f"{name} registers a hook on a tensor at {file}:{number} (`{text}`), which torch.export would silently "
            f"drop. To scale a gradient by c, write c * x + ((1 - c) * x).detach().",
            model=name,
            file=file,
            line=number,
        )

    setattr(torch.Tensor, "register_hook", refusing)  # noqa: B010
    try:
        yield
    finally:
        setattr(torch.Tensor, "register_hook", original)  # noqa: B010


@contextlib.contextmanager
def _derivatives_refused(name: str) -> Iterator[None]:
    """Refuse `torch.autograd.grad` in forward, which export cannot follow, before it says so in words of its own."""
    original = torch.autograd.grad

    def refusing(*_args: Any, **_kwargs: Any) -> Any:
        file, number, text = _users_frame(traceback.extract_stack()[:-1])
        where = f" at {file}:{number} (`{text}`)" if file else ""
        raise CaptureError(
            f"{name} takes a derivative in its forward{where}, and torch.export cannot follow torch.autograd.grad. "
            f"Write the derivative as operations.",
            model=name,
            file=file,
            line=number,
        )

    setattr(torch.autograd, "grad", refusing)  # noqa: B010
    try:
        yield
    finally:
        setattr(torch.autograd, "grad", original)  # noqa: B010


def refuse_backward_hooks(model: nn.Module, name: str) -> None:
    """Refuse hooks that a backward through the original parameters and modules would call: blocks have neither."""
    on_parameters = ("_backward_hooks", "_post_accumulate_grad_hooks")
    on_modules = ("_backward_hooks", "_backward_pre_hooks")
    parameters = [
        key for key, tensor in model.named_parameters() if any(getattr(tensor, h, None) for h in on_parameters)
    ]
    modules = [key or "itself" for key, module in model.named_modules() if any(getattr(module, h) for h in on_modules)]
    for what, names in (("parameter", parameters), ("module", modules)):
        if names:
            raise CaptureError(
                f"{name} has a backward hook on the {what} {names[0]}, which would never be called. Write what it does "
                f"to the gradient into forward: c * x + ((1 - c) * x).detach() scales it by c; a c of zeros and ones "
                f"masks it.",
                model=name,
                **{what: names[0]},
            )


@contextlib.contextmanager
def _masks_unread() -> Iterator[None]:
    """Let `nn.Transformer` take a mask as it comes, without looking in its values whether it is the causal one.

    It asks in order to give attention a hint; the mask itself is applied either way.
    """
    module = torch.nn.modules.transformer
    detect = module._detect_is_causal_mask

    def unread(_mask: Any, is_causal: bool | None = None, _size: int | None = None) -> bool:
        return is_causal is True

    setattr(module, "_detect_is_causal_mask", unread)  # noqa: B010
    try:
        yield
    finally:
        setattr(module, "_detect_is_causal_mask", detect)  # noqa: B010


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
    elif _mixes_devices(reason):
        message = (
            f"tensors of two devices meet{where}. Make tensors in forward where its inputs are, "
            f"torch.arange(…, device=x.device), and register those made in the constructor as buffers."
        )
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
    theirs = [f for f in frames if not f.filename.startswith((*_LIBRARIES, own, "<frozen", "<string>"))]
    modelling = [f for f in frames if f"{'transformers'}/models" in f.filename.replace("\\", "/")]
    for candidates in (theirs, modelling):
        inside = [f for f in candidates if f.name not in ("<module>",)]
        if inside:
            frame = inside[-1]
            text = frame.line or linecache.getline(frame.filename, frame.lineno or 0).strip()
            return frame.filename, frame.lineno or 0, text
    return "", 0, ""
