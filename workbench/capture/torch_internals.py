"""Everything in this room that reaches into torch: its private names, and the functions that capture replaces.

Written for torch 2.13. `tests/unit/test_capture_refusals.py` fails if one of the names is gone.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch._guards import detect_fake_mode
from torch.amp.autocast_mode import _enter_autocast as enter_autocast
from torch.amp.autocast_mode import _exit_autocast as exit_autocast
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.symbolic_shapes import uninteresting_files
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from workbench.base.display import Say, waiting
from workbench.base.errors import CaptureError
from workbench.base.user_code import is_of_model, line_of_frames, line_of_running_code

__all__ = [
    "VF",
    "HigherOrderOperator",
    "OpOverload",
    "detect_fake_mode",
    "enter_autocast",
    "exit_autocast",
    "grouped_mm_kernel",
    "set_grad_enabled",
]
HigherOrderOperator = torch._ops.HigherOrderOperator
"""Class of operations on code, such as `torch.cond`."""
OpOverload = torch._ops.OpOverload
"""Class of the torch operations that an exported graph calls."""
set_grad_enabled = torch._C._set_grad_enabled
profiler: Any = torch._C._profiler
"""Names of the settings of torch's profiler and of its events."""
_autograd: Any = torch._C._autograd
profiling: Any = _autograd
"""Functions that begin and end what torch's profiler sees."""
VF: Any = torch._VF
"""Functions of torch without Python code, among them those on packed sequences."""
grouped_mm_kernel = torch._grouped_mm
"""Grouped matrix product of bf16 matrices on GPUs."""
SYMBOLIC_SHAPES_LOG = "torch.fx.experimental.symbolic_shapes"
"""Name of the logger that dumps graphs when an export fails."""
_CHECKS = ("_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain")
"""Parts of the names of the assertions that export adds."""
DERIVATIVE = "torch.export cannot follow a derivative in forward"
"""Reason of opaque calls that take derivatives."""
_DATA: Any = torch.Tensor.data
"""Attribute of tensors, as `torch_function` sees it."""
_OF_UNIFORM: dict[str, Callable[[float], bool | None]] = {
    "lt": lambda rate: False if rate <= 0 else True if rate >= 1 else None,
    "le": lambda rate: False if rate < 0 else True if rate >= 1 else None,
    "gt": lambda rate: True if rate < 0 else False if rate >= 1 else None,
    "ge": lambda rate: True if rate <= 0 else False if rate >= 1 else None,
}
"""Comparison of a uniform number in [0, 1) with a rate -> its outcome; None if that is drawn."""
PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
MODULE_HOOKS = ("_backward_hooks", "_backward_pre_hooks")


_active: list[tuple[Any, str, Any]] = []
"""Replacements that are in force, the innermost last: owner, name, and what puts the original back."""


@contextlib.contextmanager
def seen_allocations() -> Iterator[list[tuple[int, int]]]:
    """See what torch's allocator for CPUs hands out to this thread in a `with` block and gets back, by its profiler.

    The list holds addresses and bytes, which are negative for what is given back, in the order of time when the block
    ends. It stays empty where another profiler runs.
    """
    seen: list[tuple[int, int]] = []
    if profiling._profiler_enabled():
        yield seen
        return
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it writes two lines for each block
    config = profiler.ProfilerConfig(
        profiler.ProfilerState.KINETO, False, True, False, False, False, profiler._ExperimentalConfig()
    )
    activities = {profiler.ProfilerActivity.CPU}
    profiling._prepare_profiler(config, activities)
    profiling._enable_profiler(config, activities)
    try:
        yield seen
    finally:
        left: list[Any] = list(profiling._disable_profiler().experimental_event_tree())
        found = []
        while left:
            event = left.pop()
            left += event.children
            if event.tag == profiler._EventType.Allocation and event.extra_fields.device.type == "cpu":
                found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
        found.sort(key=operator.itemgetter(0))
        seen += [(address, size) for _, address, size in found]


def num_dispatch_modes() -> int:
    """Return how many modes see the operations of torch now: fewer than before, while one of them runs an operation."""
    return int(torch._C._len_torch_dispatch_stack() + torch._ops._len_torch_dispatch_stack_pre_dispatch())


@contextlib.contextmanager
def originals() -> Iterator[None]:
    """Undo every replacement of `patched` inside a `with` block: the user's code runs as without capture.

    Modes of the export that are those of a thread are not active in another; those before dispatch are hidden here, and
    so is the tracer that counts calls of modules: code that raises in one would leave it inside that module.
    """
    undone = []
    for owner, name, back in reversed(_active):
        undone.append((owner, name, vars(owner)[name]))
        back()
    empty = torch._ops._ModeStackStateForPreDispatch()
    call: Any = nn.Module.__call__
    if call.__code__.co_filename == fx._symbolic_trace.__file__:
        call = call.__wrapped__
    try:
        with (
            patched(torch._ops, "_mode_stack_state_for_pre_dispatch", empty),
            patched(nn.Module, "__call__", call),
            # Export has every module tell it of buffers that are assigned to, which it knows as tensors without values.
            patched(nn.modules.module, "_global_buffer_registration_hooks", {}),
        ):
            yield
    finally:
        for owner, name, new in reversed(undone):
            (type if isinstance(owner, type) else object).__setattr__(owner, name, new)


@contextlib.contextmanager
def patched(owner: Any, name: str, new: Any) -> Iterator[None]:
    """Replace `owner.name` by `new` inside a `with` block.

    Raises `AttributeError` if `owner` has no such attribute, even an inherited one.
    """
    getattr(owner, name)
    base: Any = type if isinstance(owner, type) else object  # a model may have a `__setattr__` of its own
    is_own = name in vars(owner)
    before = vars(owner).get(name)

    def back() -> None:
        if is_own:
            base.__setattr__(owner, name, before)
        else:
            base.__delattr__(owner, name)

    base.__setattr__(owner, name, new)
    _active.append((owner, name, back))
    try:
        yield
    finally:
        _active.pop()
        back()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Hide the other processes from libraries that ask `accelerate` for them, inside a `with` block.

    Losses of detectors average their number of boxes over all processes: the stages that do not compute the loss would
    be waited for, and the step combines the losses of replicas itself.
    """
    state = sys.modules.get("accelerate.state")
    with contextlib.nullcontext() if state is None else patched(state.PartialState, "_shared_state", {}):
        yield


@contextlib.contextmanager
def derivable() -> Iterator[None]:
    """Let forward take every kind of derivative inside a `with` block.

    A custom function switches forward-mode derivatives off, and `torch.func` fails where there are hooks on what is
    saved for a backward, as checkpointing has them.
    """
    hooks = []
    while (top := _autograd._top_saved_tensors_default_hooks(False)) is not None:
        hooks.append(top)
        _autograd._pop_saved_tensors_default_hooks()
    try:
        with torch.autograd.forward_ad._set_fwd_grad_enabled(True):
            yield
    finally:
        for pack, unpack in reversed(hooks):
            _autograd._push_saved_tensors_default_hooks(pack, unpack)


@contextlib.contextmanager
def differentiable() -> Iterator[None]:
    """Let FlexAttention have its backward on a CPU, too, inside a `with` block.

    PyTorch refuses it there, because it generates no kernel for it. What runs without `torch.compile` needs none.
    """
    flex = sys.modules.get("torch.nn.attention.flex_attention")
    with contextlib.nullcontext() if flex is None else patched(flex, "_validate_device", lambda *_: None):
        yield


@contextlib.contextmanager
def forgotten_by_dynamo() -> Iterator[None]:
    """Let Dynamo forget, after a `with` block, what code it was asked to compile inside.

    Code that runs where a mode sees every operation is skipped, and it would be from then on: the user's compiled
    functions would stay as they are written, and `torch.cond` would fail.
    """
    from torch._dynamo import convert_frame, eval_frame  # take seconds to import, as an export does anyway

    asked, known = list[Any](), convert_frame.input_codes

    class Noted:
        def add(self, code: Any, *more: Any) -> None:
            asked.append(code)
            known.add(code, *more)

        def __getattr__(self, name: str) -> Any:
            return getattr(known, name)

    try:
        with patched(convert_frame, "input_codes", Noted()):
            yield
    finally:
        for code in asked:
            eval_frame.reset_code(code)  # type: ignore[attr-defined]


@contextlib.contextmanager
def lean(words: str) -> Iterator[None]:
    """Leave out of an export what nobody reads, half of its time, inside a `with` block, and show what it is at.

    After each of its passes, fx generates and compiles the Python code of the whole graph; here it does when the code
    is called. Of each operation it notes the line of every caller, some 100 frames; here the one of `line_of_node`.
    """
    compiling = patched(fx.GraphModule, "recompile", _compiled_when_called)
    with waiting(words) as say, compiling, patched(fx.proxy, "CapturedTraceback", _Lines(say)):
        yield


_recompile = fx.GraphModule.recompile


def _compiled_when_called(module: Any) -> None:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        _recompile(self)
        return type(self).forward(self, *args, **kwargs)

    if hasattr(codegen := module.graph._codegen, "pytree_info"):
        module._in_spec, module._out_spec = codegen.pytree_info.in_spec, codegen.pytree_info.out_spec
    type(module).forward = forward


class _Lines:
    """The innermost line of a `forward`, the last one that fx keeps of a traceback, for each operation."""

    def __init__(self, say: Say) -> None:
        self._say, self._operations = say, 0

    def extract(self, **_: Any) -> _Lines:
        return self

    def summary(self) -> traceback.StackSummary:
        self._operations += 1
        self._say(f"{self._operations:,} operations")
        frame: Any = sys._getframe(1)
        while frame is not None:
            file, name = frame.f_code.co_filename, frame.f_code.co_name
            if (name == "forward" or file.endswith("torch/__init__.py")) and file not in uninteresting_files():
                return traceback.StackSummary.from_list([(file, frame.f_lineno, name, None)])
            frame = frame.f_back
        return traceback.StackSummary()


@contextlib.contextmanager
def exportable(model: nn.Module, name: str, loss_of: Callable[..., Any]) -> Iterator[None]:
    """Replace functions of torch, and `model.forward`, while a model is exported.

    Some replacements refuse what export would silently drop or cannot follow (`_refusals`). The others let it follow
    more.

    Args:
        loss_of: returns the loss, or a tuple that begins with it, given what `forward` returned and its keyword
            arguments as `batch`.
    """
    forward, make, limit = model.forward, torch.tensor, symbolic_shapes._constrain_range_for_size

    # Export knows few of the types in which models return their loss: it is given the loss alone.
    @functools.wraps(forward)
    def forward_loss(*args: Any, **kwargs: Any) -> Any:
        with _Followed(name):
            return loss_of(forward(*args, **kwargs), batch=kwargs)

    # `nn.Transformer` reads the values of its mask for a hint only.
    def is_causal(_mask: Any, is_causal: bool | None = None, _size: int | None = None) -> bool:
        return is_causal is True

    # A float becomes an operation, since a constant loses its value on meta. `transformers` before 5.20 builds masks
    # from such constants, and a mask without values cannot be seen to mask nothing. Integers stay constants: DeBERTa
    # slices by one, and export knows the size of a slice by a constant only.
    def tensor(data: Any, **kwargs: Any) -> Any:
        if isinstance(data, float) and set(kwargs) <= {"dtype", "device"}:
            return torch.full((), data, **kwargs)
        return make(data, **kwargs)

    # A selection of the whole batch may be larger than a micro-batch, whose size must not decide `if len(x[mask]) > 4`.
    def with_any_size(size: Any, min: Any = None, **_: Any) -> None:
        limit(size, min)

    # Export forgets inference mode, and keeps the gradient that it should not have.
    def enter(mode: Any) -> None:
        mode._as_grad_mode = torch.set_grad_enabled(not mode.mode)
        mode._as_grad_mode.__enter__()

    def leave(mode: Any, *error: Any) -> None:
        mode._as_grad_mode.__exit__(*error)

    replacements: list[tuple[Any, str, Any]] = [
        (model, "forward", forward_loss),
        (torch.inference_mode, "__enter__", enter),
        (torch.inference_mode, "__exit__", leave),
        (symbolic_shapes, "_constrain_range_for_size", with_any_size),
        *_refusals(name),
        (torch, "tensor", tensor),
        (torch.nn.modules.transformer, "_detect_is_causal_mask", is_causal),
        (sys.modules["torch.distributed"], "is_initialized", lambda: False),  # as in `alone`
    ]
    with alone(), contextlib.ExitStack() as stack:
        for replacement in replacements:
            stack.enter_context(patched(*replacement))
        yield


class _Followed(TorchFunctionMode):
    """Gives export what it cannot follow in another form, and refuses draws from a generator of the user's own.

    `tensor.data` becomes `tensor.detach()`, and to assign to it is refused. A comparison of `torch.rand(())`, which is
    in [0, 1), with a rate that decides it alone (`torch.rand([]) < 0.0` of a model without layer drop) is a constant.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name, self._drawn = name, WeakTensorKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _DATA.__get__:
            return args[0].detach()
        if func == _DATA.__set__:
            line = line_of_running_code()
            raise line.error(
                self._name,
                f"cannot be captured: it puts another tensor in place of one of its own{line.where}. Compute with the "
                "new value in place of assigning it: for weight.data = torch.renorm(weight.data, 2, 0, 1.0), give "
                "torch.renorm(weight, 2, 0, 1.0) to the function that uses it.",
            )
        own = (kwargs or {}).get("generator")
        if own is not None and own is not torch.default_generator:
            line = line_of_running_code()
            raise line.error(
                self._name,
                f"draws from a torch.Generator of its own{line.where}, whose state no checkpoint holds. Leave "
                "generator= out: torch's default generator is seeded in each step.",
            )
        if len(args) == 2 and isinstance(args[1], (int, float)) and args[0] in self._drawn:
            of_rate = _OF_UNIFORM.get(getattr(func, "__name__", "").strip("_"))
            if of_rate is not None and (outcome := of_rate(args[1])) is not None:
                return torch.tensor(outcome)
        if func is torch.Tensor.random_ and len(args) == 3:  # an operation that fx writes with a keyword of Python
            return args[0].copy_(torch.randint_like(*args))
        result = func(*args, **(kwargs or {}))
        if func is torch.rand and result.ndim == 0:
            self._drawn[result] = None
        return result


@contextlib.contextmanager
def members_renamed(model: nn.Module, name: str) -> Iterator[dict[str, str]]:
    """Rename members of a model that are called as an attribute of `GraphModule` (`code`, `graph`) during an export.

    Yields new name -> name. Raises `CaptureError` for a parameter or buffer of such a name.
    """
    for key in (*model._parameters, *model._buffers):
        if hasattr(fx.GraphModule, key):
            raise CaptureError(
                f"{name} has a parameter or buffer called {key}, a name that torch.export uses itself. Give it another "
                f"name."
            )
    members = dict(model._modules)
    names = {f"{key}_member" if hasattr(fx.GraphModule, key) else key: key for key in members}
    renamed = {new: key for new, key in names.items() if new != key}
    for key in renamed.values():
        object.__setattr__(model, key, members[key])
    if renamed:
        model._modules = {new: members[key] for new, key in names.items()}
    try:
        yield renamed
    finally:
        if renamed:
            model._modules = members
        for key in renamed.values():
            object.__delattr__(model, key)


def settings_of_export() -> list[str]:
    """Return the settings of torch that a forward, or an export of it, may read."""
    backends = torch.backends
    sdpa = [name for name in dir(backends.cuda) if name.endswith("_sdp_enabled")]
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    values = [
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_float32_matmul_precision(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.__future__.get_overwrite_module_params_on_conversion(),
        *(getattr(backends.cuda, name)() for name in sdpa),
        *(getattr(backends.mkldnn, name, None) for name in ("enabled", "deterministic", "allow_tf32")),
        *(getattr(backends.cudnn, name, None) for name in ("enabled", "benchmark", "deterministic", "allow_tf32")),
        backends.mha.get_fastpath_enabled(),
        *((torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in devices),
        torch.cuda.is_available(),
        torch.compiler.config.force_disable_caches if hasattr(torch.compiler, "config") else None,
    ]
    return list(map(str, values))


def rename_in_stacks(graph: fx.Graph, renamed: Mapping[str, str]) -> None:
    """Give modules their own names again in what export noted on the operations."""

    def restored(path: str) -> str:
        first, dot, rest = path.partition(".")
        return f"{renamed.get(first, first)}{dot}{rest}"

    for node in graph.nodes if renamed else ():
        stack = node.meta.get("nn_module_stack") or {}
        node.meta["nn_module_stack"] = {key: (restored(path), kind) for key, (path, kind) in stack.items()}


def _refusals(name: str) -> list[tuple[Any, str, Any]]:
    """Return functions of torch that refuse the user's calls, each with its owner and name.

    Export keeps the forward of an autograd function from outside torch and drops its backward, so that the model would
    train with wrong gradients. It drops hooks on tensors and on what is saved for a backward, gradients that forward
    itself adds to parameters, and seeds. It cannot follow derivatives.
    """
    original_apply, original_hook = vars(torch.autograd.Function)["apply"], torch.Tensor.register_hook
    saved_hooks, seeds = torch.autograd.graph.saved_tensors_hooks, ("manual_seed", "set_rng_state")
    original_enter = saved_hooks.__enter__

    def refused(call: str, way: str, reason: str) -> CaptureError:
        line = line_of_frames(traceback.extract_stack())
        return line.error(name, f"{call}{line.where}{way}", reason=reason)

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.startswith("torch.utils.checkpoint"):
            raise refused(
                "checkpoints activations",
                " in the reentrant way, whose backward torch.export would drop. Pass use_reentrant=False, or leave "
                "checkpointing to the plan, which adds it where memory is short.",
                "torch.export would drop the backward of reentrant checkpointing",
            )
        if cls.__module__.startswith(("torch.", "workbench.capture.")):
            return original_apply.__get__(None, cls)(*args, **kwargs)
        raise refused(
            f"uses the custom autograd function {cls.__name__}",
            ", whose backward torch.export would silently drop. Register it with torch.library.custom_op and "
            "register_autograd, or write it with differentiable operations.",
            "torch.export would drop the backward of a custom autograd function",
        )

    def register_hook(tensor: torch.Tensor, hook: Any) -> Any:
        if not line_of_frames(traceback.extract_stack()).file:
            return original_hook(tensor, hook)
        raise refused(
            "registers a hook on a tensor",
            ", which torch.export would silently drop. To scale a gradient by c, write c * x + ((1 - c) * x).detach().",
            "torch.export would drop a hook on a tensor",
        )

    def grad(*_args: Any, **_kwargs: Any) -> Any:
        raise refused(
            "takes a derivative in its forward",
            ", and torch.export cannot follow torch.autograd.grad. Write the derivative as operations.",
            DERIVATIVE,
        )

    def backward(*_args: Any, **_kwargs: Any) -> Any:
        raise refused(
            "calls backward in its forward",
            ", which adds to gradients of parameters before the step's own backward does. Add what is differentiated "
            "to the loss that forward returns.",
            "torch.export would drop a backward in forward",
        )

    def enter(hooks: Any) -> None:
        if type(hooks) is saved_hooks or not type(hooks).__module__.startswith("torch."):  # of checkpointing, say
            raise refused(
                "hooks what is saved for the backward",
                ", which torch.export would silently drop.",
                "torch.export would drop hooks on what is saved for the backward",
            )
        original_enter(hooks)

    def seeding(original: Any) -> Any:
        def seeded(*args: Any, **kwargs: Any) -> Any:
            if not is_of_model(sys._getframe(1).f_code.co_filename):  # Dynamo, which restores what it found
                return original(*args, **kwargs)
            raise refused(
                "sets the state of torch's default generator in its forward",
                ", and capture would draw other numbers in each step. Draw what is the same in every step in the "
                "constructor, and register it as a buffer.",
                "capture would draw other numbers in each step than those of a seed that forward sets",
            )

        return seeded

    return [
        (torch.autograd.Function, "apply", classmethod(apply)),
        (torch.Tensor, "register_hook", register_hook),
        (torch.autograd, "grad", grad),
        *((owner, "backward", backward) for owner in (torch.Tensor, torch.autograd)),
        (saved_hooks, "__enter__", enter),
        *(
            (owner, each, seeding(getattr(owner, each)))
            for each in seeds
            for owner in (torch, torch.random, torch.cuda)
        ),
    ]


def remove_checks(module: Any) -> fx.GraphModule:
    """Remove the guards and assertions that a `lean` export adds; every mutation of a buffer stays."""
    module._forward_pre_hooks.clear()
    module._forward_pre_hooks_with_kwargs.clear()
    for node in list(module.graph.nodes):
        is_guard = node.op == "call_module" and node.target == "_guards_fn"
        is_check = node.op == "call_function" and any(word in str(node.target) for word in _CHECKS)
        if is_guard or is_check:
            module.graph.erase_node(node)
    for part in module.modules():  # branches, whose code tells blocks apart
        if part is not module and isinstance(part, fx.GraphModule):
            _recompile(part)
    return module  # type: ignore[no-any-return]


def refuse_backward_hooks(model: nn.Module, name: str) -> None:
    """Raise `CaptureError` if a parameter or a module has a hook that its backward would call: blocks have neither."""
    members = [("parameter", PARAMETER_HOOKS, *named) for named in model.named_parameters()]
    members += [("module", MODULE_HOOKS, *named) for named in model.named_modules()]
    for what, hooks, key, member in members:
        if any(getattr(member, each, None) for each in hooks):
            raise CaptureError(
                f"{name} has a backward hook on the {what} {key or 'itself'}, which would never be called. Write what "
                f"it does to the gradient into forward: c * x + ((1 - c) * x).detach() scales it by c; a c of zeros "
                f"and ones masks it."
            )
