"""Opaque calls: what `torch.export` cannot follow runs as the user's own code, as one operation of the graph.

A call is of a module's forward, a custom `autograd.Function`, `ctc_loss` or a selection by a mask. Its operation takes
the tensors among the arguments, and the parameters and buffers of the module. The forward keeps no graph; the backward
runs the code again, from the random numbers and buffers that the forward found, and differentiates it. Buffers
that the code writes are arguments as copies and results with their new values, so that the graph writes them once. No
result shares memory with an argument.

Export needs the shapes of the results: the code runs three times with the model's own values (if it can be built here;
otherwise with random ones) on random arguments, and must return the same shapes.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import sys
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from threading import Thread
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from workbench.base.errors import CaptureError, in_words
from workbench.base.user_code import SourceLine, line_of_running_code
from workbench.capture.export.aliasing import OneName, Registered, memory_of
from workbench.capture.export.observed_forward import (
    MORE_FORWARDS,
    Change,
    Held,
    Kept,
    Recorder,
    Recording,
    decided_by,
    kept_number,
    kept_tensor,
    tensors_in,
)
from workbench.capture.export.varying import (
    default_states,
    drawn_from,
    extreme_draws,
    fresh_draws_refused,
    own_states,
)
from workbench.capture.operations import scalar_tensor
from workbench.capture.torch_internals import alone, derivable, detect_fake_mode, differentiable, originals
from workbench.data.datasets import untouched_generators
from workbench.record.columns import log_again, logging_scalars

Value = torch.Tensor | Callable[[tuple[int, ...]], torch.Tensor] | None
"""A tensor, a function that makes it of a shape, or None for random numbers."""
FLEX_ATTENTION = "FlexAttention does not run while a model is exported"
"""Reason of opaque calls that run it."""
_library = torch.library.Library("workbench", "FRAGMENT")
_library.define("opaque(str call, Tensor[] inputs) -> Tensor[]", tags=(torch.Tag.nondeterministic_seeded,))
OPAQUE = torch.ops.workbench.opaque.default
_calls: weakref.WeakValueDictionary[str, OpaqueCall] = weakref.WeakValueDictionary()
_serials = itertools.count()


class NotOpaque(CaptureError):
    """A call cannot become opaque: its results have no fixed shapes, or it writes to what it is given."""


@dataclass(frozen=True)
class _Place:
    """The place where a module holds a tensor: a key of its `_parameters`, its `_buffers` or its other attributes."""

    module: nn.Module
    table: str
    key: str

    def entries(self) -> dict[str, Any]:
        return vars(self.module) if self.table == "" else vars(self.module)[self.table]

    def value(self) -> torch.Tensor:
        return self.entries()[self.key]  # type: ignore[no-any-return]


@dataclass(eq=False)
class OpaqueCall:
    """One call of user's code in a captured forward, and what is known about its results."""

    label: str
    """Path of the module, or name of the function."""
    function: Callable[..., Any]
    modules: tuple[nn.Module, ...]
    """The module whose forward is called, and all inside it."""
    reason: str
    """Why export could not follow it: one clause."""
    line: SourceLine
    path: str = ""
    """Path of the module; empty for the whole model and for functions."""
    registered: Registered | None = None
    """The parameters and buffers of the modules, which the code may read by other names."""
    outside: Registered | None = None
    """The parameters and buffers of the whole model, whose present values the operation is not given."""
    places: list[_Place] = field(default_factory=list)
    arguments: Any = None
    """Structure of `(args, kwargs)`, and its leaves, where None stands for a tensor."""
    leaves: list[Any] = field(default_factory=list)
    results: Any = None
    result_leaves: list[Any] = field(default_factory=list)
    specs: list[tuple[tuple[int, ...], torch.dtype]] = field(default_factory=list)
    """Shape and type of each tensor that is returned."""
    written: list[int] = field(default_factory=list)
    """Indices into `places` of the buffers that the code writes."""
    read_again: list[int] = field(default_factory=list)
    """Entries of `written` on whose former values the results depend, unlike on running averages of BatchNorm."""
    kept: list[Change] = field(default_factory=list)
    """Changes that the code made to what it and its modules reach, but for their buffers."""
    has_iterators: bool = False
    """True if they reach something that gives another item each time."""
    takes_derivatives: bool = False
    """True if forward itself needs a graph, since it takes derivatives."""
    flops: float = 0.0
    """FLOPs of one forward."""
    recomputed_bytes: int = 0
    """Bytes that the backward's second forward keeps for a moment; 0 if they could not be counted."""
    training: list[bool] = field(default_factory=list)
    """True for each of `modules` that was in train mode."""
    recording: Recording | None = None
    """The operations of a run on random arguments."""
    tried: tuple[list[torch.Tensor], list[Callable[[], Value]], torch.device, bool] | None = None
    """Arguments of that run: their shapes, their values while the model lives, the device, and how others are drawn."""
    draws_on_host: bool = False
    """True if the code draws from Python's or NumPy's generator."""
    has_other_names: bool = False
    """True if the code read one of `registered` by another name."""

    @property
    def compiles(self) -> bool:
        """True if the code compiles a part of itself, which torch leaves out where a mode sees every operation."""
        return self.reason == FLEX_ATTENTION

    @property
    def digest(self) -> str:
        """Text that tells the call from others, and is the same in every process."""
        return f"{self.label} {self.specs} {self.written} {self.training[:1]}"

    @property
    def cost_digest(self) -> str:
        """Text that is equal for calls that cost the same: of modules of one class."""
        called = type(self.modules[0]).__qualname__ if self.modules else self.label
        return f"{called} {self.specs} {self.flops} {self.recomputed_bytes} {self.training[:1]}"

    def compute(
        self,
        tensors: Sequence[torch.Tensor],
        then: Callable[[list[torch.Tensor]], None] | None = None,
        before: Callable[[Any], bool] | None = None,
    ) -> tuple[Any, list[torch.Tensor], list[torch.Tensor]]:
        """Run the code; return what it returned, the tensors in it, and the written buffers' new values.

        `then` is given these tensors while the modules hold `tensors`: a backward may run code of the modules again.
        With `before`, the code runs again in a row, from the same tensors, as often as `before` says so, which is given
        what the code has returned.
        """
        given = list(tensors)
        for index in self.written:
            given[index] = tensors[index].detach().clone()
        values = iter(given[len(self.places) :])
        leaves = [next(values) if leaf is _TENSOR else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.arguments)
        with self._placed(given), _by_any_name(self), alone(), differentiable(), contextlib.ExitStack() as stack:
            held = None
            if self.modules and (self.recording is None or before is not None):
                stack.callback((held := Held(self.modules[0])).restore)
            versions, before_it = list(map(_version, given)), dict[int, torch.Tensor]()
            if self.recording is None:  # BatchNorm writes to its running averages and leaves their version as it was
                held_by = zip(self.places, given, strict=False)
                buffers = {at: value for at, (place, value) in enumerate(held_by) if place.table == "_buffers"}
                dense = {at: v for at, v in buffers.items() if v.layout == torch.strided and memory_of(v) is not None}
                before_it = {at: value.clone() for at, value in dense.items()}
            result = self.function(*args, **kwargs)
            if held is not None:
                self.kept, self.has_iterators = held.changes(), held.has_iterators
            while before is not None and before(result):
                for index in self.written:
                    self.places[index].entries()[self.places[index].key] = tensors[index].detach().clone()
                result = self.function(*args, **kwargs)
            after = [place.value() for place in self.places]
            changed = [at for at, tensor in enumerate(given) if _version(tensor) != versions[at]]
            changed += [at for at, tensor in enumerate(after) if tensor is not given[at]]
            changed += [at for at, value in before_it.items() if not torch.equal(value, given[at])]
            outputs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            if then is not None:
                then(outputs)
        found = set(changed)
        if self.recording is None:  # a layer that one run drops may write to its statistics in the next
            self.written = sorted({*self.written, *found})
        elif found - set(self.written):
            raise RuntimeError(f"{self.label} wrote to a tensor that it did not write to when it was captured.")
        return result, outputs, [after[index] for index in self.written if index < len(after)]

    @contextlib.contextmanager
    def _placed(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Let the modules hold `tensors`; afterwards every attribute that the code set is as before."""
        tables = ("_parameters", "_buffers")
        before = [(vars(m), dict(vars(m)), [dict(vars(m)[table]) for table in tables]) for m in self.modules]
        try:
            for place, tensor in zip(self.places, tensors, strict=False):
                place.entries()[place.key] = tensor
            for module, is_training in zip(self.modules, self.training, strict=False):
                vars(module)["training"] = is_training
                if isinstance(module, nn.RNNBase):  # on a GPU it would move the rank's weights into storage of its own
                    vars(module)["flatten_parameters"] = lambda: None
            yield
        finally:
            for attributes, copied, entries in before:
                attributes.clear()
                attributes.update(copied)
                for table, held in zip(tables, entries, strict=True):
                    attributes[table].clear()
                    attributes[table].update(held)

    def _leaves(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return tensors that require gradients, but for buffers and those without a gradient."""
        buffers = {at for at, place in enumerate(self.places) if place.table == "_buffers"}
        return [
            tensor.detach().requires_grad_(_has_gradient(tensor) and at not in buffers)
            for at, tensor in enumerate(tensors)
        ]

    def _try(
        self,
        given: Sequence[torch.Tensor],
        values: Sequence[Value],
        device: torch.device,
        seed: int,
        centred: bool,
        grad: bool,
    ) -> None:
        """Run the code on real tensors and note its results; raise `NotOpaque` if an earlier run had others."""
        torch.manual_seed(seed)
        tensors = [_real(t, v, device, seed, centred) for t, v in zip(given, values, strict=True)]
        with torch.set_grad_enabled(grad):
            if grad:
                tensors = self._leaves(tensors)
            recorder = Recorder(self.compiles, tensors if seed == _SEEDS[-1] else None)
            with recorder.watching():
                result, outputs, new = self.compute(tensors)
        if any(tensor.grad is not None for tensor in tensors if tensor.is_leaf):
            raise NotOpaque(f"{self.label} calls backward, which adds to gradients before the step's own backward.")
        self.flops = recorder.flops
        if seed == _SEEDS[-1]:
            self.recording = recorder.recording([*outputs, *new])
            # The tensors with values are the model's, whose memory this does not hold.
            kept: list[Callable[[], Value]] = [
                weakref.ref(v) if isinstance(v, torch.Tensor) else functools.partial(_itself, v) for v in values
            ]
            sizes = [[size if isinstance(size, int) else 0 for size in each.shape] for each in given]
            shapes = [torch.empty(size, dtype=t.dtype, device="meta") for size, t in zip(sizes, given, strict=True)]
            self.tried = shapes, kept, device, centred
        num_places = len(self.places)
        for index in self.written:
            is_buffer = index < num_places and self.places[index].table == "_buffers"
            if not is_buffer:
                raise NotOpaque(f"{self.label} writes to a tensor that it is given.")
        specs = [(tuple(t.shape), t.dtype) for t in outputs]
        if self.specs and specs != self.specs:
            raise NotOpaque(f"the shapes of what {self.label} returns depend on the values of tensors.")
        leaves, self.results = pytree.tree_flatten(result)
        if any(hasattr(leaf, "__dataclass_fields__") for leaf in leaves):  # tensors in it are hidden from `pytree`
            raise NotOpaque(f"{self.label} returns a type that cannot be taken apart.")
        self.result_leaves = [_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.specs = specs

    def _results(
        self, tensors: Sequence[torch.Tensor], before: Callable[[Any], bool] | None = None
    ) -> list[torch.Tensor]:
        """Run the code with the same random numbers each time, and return the tensors that it returns."""
        torch.manual_seed(0)
        _seed_host(0)
        given = [tensor.clone() for tensor in tensors]
        with torch.set_grad_enabled(self.takes_derivatives):
            return self.compute(self._leaves(given) if self.takes_derivatives else given, before=before)[1]

    def _examine(self, tensors: Sequence[torch.Tensor]) -> None:
        """Note which written buffers the code reads again, and the bytes of its second forward, on given tensors.

        Raises `Kept` if what the code keeps changes the results of its next run.
        """
        before = self._results(tensors) if self.kept or self.written or self.has_iterators else []
        _refuse_kept(self, tensors, before)

        def is_read(changed: Sequence[int]) -> bool:
            """Run the code with other values in some of the buffers that it writes."""
            given = list(tensors)
            for index in changed:
                # Of all numbers -1 alone would stay as it is, and of integers none.
                given[index] = 1.25 * given[index] + 0.25 if given[index].is_floating_point() else 1 - given[index]
            try:
                pairs = zip(self._results(given), before, strict=True)
                return any(not torch.equal(one, other) for one, other in pairs)
            except Exception:  # a value that the code does not take, such as another position in a queue
                return True

        if self.written and is_read(self.written):
            self.read_again = [index for index in self.written if is_read([index])] or list(self.written)
        self.recomputed_bytes = _recomputed_bytes(self, self._leaves(tensors))

    def _own_states(self) -> dict[str, Any]:
        return own_states(self.modules[0]) if self.modules else {}

    def probe(self, given: Sequence[torch.Tensor], values: Sequence[Value], device: torch.device) -> None:
        """Run the code on real tensors of the shapes of `given` and note its results; raise `NotOpaque`."""
        failure: list[Exception] = []

        def run() -> None:  # in a thread of its own, the modes that export has entered are not active
            # A new thread starts with the first GPU as its current device.
            current = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
            with current, originals(), untouched_generators(device), fresh_draws_refused(self.label):
                before, on_host = self._own_states(), default_states()
                for grad, centred in itertools.product((False, True), (True, False)):
                    try:
                        self.takes_derivatives = grad
                        self.specs, self.written, self.recording = [], [], None
                        left = set[bytes]()
                        for seed in _SEEDS:
                            self._try(given, values, device, seed, centred, grad)
                            left.add(torch.get_rng_state().numpy().tobytes())
                        if len(left) < len(_SEEDS) and self.path:
                            raise NotOpaque(f"{self.label} seeds torch's generator for what is drawn after it, too.")
                        self.draws_on_host = bool(drawn_from(on_host, default_states()))
                        failure.clear()
                        self._examine([_real(*pair, device, 0, centred) for pair in zip(given, values, strict=True)])
                        if source := drawn_from(before, self._own_states()):
                            raise NotOpaque(
                                f"{self.label} draws from {source}, and its second run, in the backward, would draw "
                                "other numbers. Draw from the default generator of torch, Python or NumPy."
                            )
                        return
                    except (NotOpaque, Kept) as error:
                        failure[:] = [error]
                        return
                    except Exception as error:  # the first says why the code does not run
                        failure[:] = failure or [error]

        thread = Thread(target=run)
        thread.start()
        thread.join()
        if failure:
            error = failure[0]
            if isinstance(error, (NotOpaque, Kept)):
                raise error
            raise NotOpaque(f"{self.label} does not run alone on random values ({in_words(error)}).") from error


def record_again(call: OpaqueCall, answers: Mapping[int, Any], drawn: int | None = None) -> Recording | Exception:
    """Record a call again, with other numbers where Python reads them, by the order of the reads.

    With `drawn`, Python's and NumPy's first draws give their smallest (0) or largest (1) numbers. Returns what the run
    raised, if it did.
    """
    assert call.tried is not None
    assert call.recording is not None
    given, values, device, centred = call.tried
    most = _MOST_TIMES * len(call.recording.flow.order) + _MOST_MORE
    results: list[Recording | Exception] = []

    def run() -> None:
        random_numbers = untouched_generators(device), extreme_draws(drawn)
        with originals(), contextlib.ExitStack() as stack, torch.set_grad_enabled(call.takes_derivatives):
            for each in random_numbers:
                stack.enter_context(each)
            torch.manual_seed(_SEEDS[-1])
            tensors = [_real(t, v(), device, _SEEDS[-1], centred) for t, v in zip(given, values, strict=True)]
            tensors = call._leaves(tensors) if call.takes_derivatives else tensors
            if call.modules:
                stack.callback(Held(call.modules[0]).restore)
            recorder = Recorder(call.compiles, tensors, answers, most)
            try:
                with recorder.watching():
                    _, outputs, new = call.compute(tensors)
                results.append(recorder.recording([*outputs, *new]))
            except Exception as error:
                results.append(error)

    thread = Thread(target=run)
    thread.start()
    thread.join()
    return results[0]


def _itself(value: Value) -> Value:
    return value


def _by_any_name(call: OpaqueCall) -> contextlib.AbstractContextManager[Any]:
    """Let the code read what its modules hold now by any name, if it does so in a run before it becomes opaque."""
    registered, outside, is_tried = call.registered, call.outside, call.recording is None
    if registered is None or not (is_tried or call.has_other_names):
        return contextlib.nullcontext()
    if not is_tried:
        return OneName(registered.known)

    def present(tensor: torch.Tensor) -> torch.Tensor:
        now = registered.present(tensor, computed=False)
        call.has_other_names |= now is not tensor
        if now is tensor and outside is not None and (owner := outside.owner_of(tensor)):
            raise NotOpaque(f"{call.label} reads {owner}, a parameter or buffer outside of it, by another name.")
        return now

    return OneName(present)


def _refuse_kept(call: OpaqueCall, tensors: Sequence[torch.Tensor], before: Sequence[torch.Tensor]) -> None:
    """Raise `Kept` if another run in a row over the same tensors returns anything but `before`."""
    # A recurrent module that is called in the middle of an export is given tensors without values.
    is_known = any(isinstance(tensor, FakeTensor) for tensor in tensors)
    if is_known or not (call.kept or call.has_iterators):
        return
    grows = call.has_iterators or any(not each.holder.is_attribute for each in call.kept)
    left, is_read = (MORE_FORWARDS if grows else 0) + 1, False
    read: list[tuple[str, SourceLine]] = []
    known: dict[int | None, str] = {}

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        if not read and memory_of(tensor) in known:
            read.append((known[memory_of(tensor)], line_of_running_code()))
        return tensor

    def differs(later: Sequence[torch.Tensor]) -> bool:
        return len(before) != len(later) or not all(map(torch.equal, before, later))

    def again(result: Any) -> bool:
        """Seed the next run, unless that was the last one or it has returned something else."""
        nonlocal left, is_read
        left -= 1
        is_read = differs([leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)])
        known.update((memory_of(tensor), place) for place, tensor in tensors_in(call.kept))
        torch.manual_seed(0)
        _seed_host(0)
        return left >= 0 and not is_read

    with OneName(noted):
        call._results(tensors, again)
    inside = f"self.{call.path}." if call.path else "self."
    if is_read and read:
        raise kept_tensor(call.label, read[0][0].replace("self.", inside, 1), read[0][1])
    numbers = [each for each in call.kept if each.is_number]
    line = call.line if is_read else None
    if numbers and not is_read:
        try:
            line = decided_by(numbers, lambda: differs(call._results(tensors)))
        finally:
            for each in numbers:
                each.set(each.old)
    if line is not None:
        places = ", ".join(each.place.replace("self.", inside, 1) for each in call.kept)
        raise kept_number(call.label, places, line)


def _recomputed_bytes(call: OpaqueCall, leaves: list[torch.Tensor]) -> int:
    """Return the bytes of what a forward with a graph keeps, but for `leaves`, which it is given; 0 if it fails."""
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            call.compute(leaves)
    except Exception:  # such as a forward that a graph stops
        return 0
    given = {tensor.untyped_storage().data_ptr() for tensor in leaves}
    return sum(storage.nbytes() for address, storage in kept.items() if address not in given)


_TENSOR = object()
"""Stands for a tensor among the leaves of a structure."""
_MOST_TIMES, _MOST_MORE = 3, 300
"""Operations that another branch may have: a multiple of those of the first, and a few more."""
_SEEDS = (0, 1, 2)
"""Seeds of the runs before a call becomes opaque; the last one, which knows what the code writes, is recorded."""


def _real(
    given: torch.Tensor,
    value: Value,
    device: torch.device,
    seed: int,
    centred: bool,
) -> torch.Tensor:
    """Return a tensor with values of the shape of `given`: `value`, or that for each sample, if there is one.

    Others are random numbers around zero, or from 0.1 to 0.9 (such as the sizes of boxes) if they are not `centred`.
    Whole numbers are zero then, a valid index and class, or else 1 and above, such as lengths. Sizes that depend on
    values are 0. Masks are true at every second, third or fourth position of their last dim, so that a selection by one
    has as many items in each row, and another number for each seed.
    """
    shape = tuple(size if isinstance(size, int) else 0 for size in given.shape)
    value = value(shape) if callable(value) else value
    if value is not None:
        return value.detach().expand(shape).to(device, copy=True)
    if given.dtype == torch.bool and shape:
        return (torch.arange(shape[-1], device=device) % (2 + seed) == 0).expand(shape).clone()
    if not _has_gradient(given):
        return torch.full(shape, 0 if centred else 1 + seed, dtype=given.dtype, device=device)
    # Drawn on the host, so that the runs on a GPU have the same numbers.
    drawn = 0.5 * torch.randn(shape, dtype=given.dtype) if centred else 0.1 + 0.8 * torch.rand(shape, dtype=given.dtype)
    return drawn.to(device)


# The operation


def opaque_call(
    label: str,
    function: Callable[..., Any],
    module: nn.Module | None = None,
    valued: nn.Module | None = None,
    known: Sequence[Value] = (),
    *,
    reason: str,
    line: SourceLine,
    search: Any,
) -> Callable[..., Any]:
    """Return a function that puts one operation into the graph that is being exported, in place of `function`.

    `valued` is the module, or a twin of it whose tensors have values. `known` are the values of the first tensors among
    the arguments, where random ones would not do. `search` has the `model` that is
    exported, and its `calls` collect what was called.
    """
    path = "" if module is None or module is search.model else label
    registered = None if module is None else Registered(module, label)
    outside = None if module is None else Registered(search.model, label)
    inside = () if module is None else tuple(module.modules())
    places = [
        _Place(owner, table, key)
        for owner in inside
        for table in ("_parameters", "_buffers", "")
        for key, value in (vars(owner)[table] if table else vars(owner)).items()
        if isinstance(value, torch.Tensor)
    ]
    twins = {} if valued is None else dict(zip(inside, valued.modules(), strict=True))
    held = [replace(place, module=twins[place.module]).value() if twins else None for place in places]

    def logging(*args: Any, **kwargs: Any) -> Any:
        """Run the function; return what it does, and the arguments of its calls of `log_scalar`."""
        with logging_scalars() as logged:
            result = function(*args, **kwargs)
        return result, tuple((scalar.name, scalar_tensor(scalar.value), scalar.reduce) for scalar in logged)

    @functools.wraps(function)  # export names the batch's fields by the signature of the model's forward
    def called(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        if any(callable(leaf) and not isinstance(leaf, (type, torch.Tensor)) for leaf in leaves):
            # Its parameters would be no arguments of the operation, and get no gradient.
            raise NotOpaque(f"{label} is given a module or a function, whose parameters it may use.")
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        call = OpaqueCall(label, logging, inside, reason, line, path, registered, outside, places, structure)
        call.leaves = [_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        call.training = [owner.training for owner in inside]
        own = [place.value() for place in places]
        given = [*own, *tensors]
        device = next((v.device for v in held if v is not None), torch.device("cpu"))
        call.probe(given, [*held, *known, *[None] * (len(tensors) - len(known))], device)
        handle = f"{next(_serials)} {label}"
        search.calls.append(call)
        _calls[handle] = call
        for index in call.written:
            given[index] = given[index].clone()
        returned = OPAQUE(handle, given)
        outputs, new = returned[: len(call.specs)], returned[len(call.specs) :]
        for index, value in zip(call.written, new, strict=True):
            own[index].copy_(value)
        values = iter(outputs)
        filled = [next(values) if leaf is _TENSOR else leaf for leaf in call.result_leaves]
        result, logged = pytree.tree_unflatten(filled, call.results)
        for scalar in logged:
            log_again(*scalar)
        return result

    return called


def call_of(node: fx.Node) -> OpaqueCall | None:
    """Return the call that a node of a captured graph stands for, None for other nodes."""
    return _calls[str(node.args[0])] if node.target is OPAQUE else None


def keep_calls(graph: fx.Graph) -> None:
    """Let the nodes hold their calls: a call lives as long as a graph that can run it."""
    for node in graph.find_nodes(op="call_function", target=OPAQUE):
        node.meta["opaque"] = call_of(node)


def is_opaque(code: fx.GraphModule) -> bool:
    """Return True if a block's code has an opaque call: it is neither compiled nor divided nor in a CUDA graph."""
    return bool(opaque_calls(code.graph))


def opaque_calls(graph: fx.Graph) -> list[OpaqueCall]:
    """Return the opaque calls of a graph, in order."""
    return [call for node in graph.nodes if (call := call_of(node)) is not None]


def _device_of(tensors: Sequence[torch.Tensor]) -> torch.device:
    """Return the device of a call, whose lengths may be on the host."""
    return next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), torch.device("cpu"))


def _version(tensor: torch.Tensor) -> tuple[int, int]:
    """Return what changes if a tensor is written, or if another one is assigned to its `.data`."""
    return tensor._version, tensor.untyped_storage()._cdata if tensor.layout == torch.strided else 0


def _has_gradient(tensor: torch.Tensor) -> bool:
    """Return True for a tensor of real or complex numbers, which may have a gradient."""
    return tensor.is_floating_point() or tensor.is_complex()


class _Shapes(torch.autograd.Function):
    """The operation on tensors without values."""

    @staticmethod
    def forward(ctx: Any, call: OpaqueCall, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(*tensors)
        device = _device_of(tensors)
        outputs = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in call.specs]
        results = (*outputs, *(torch.empty_like(tensors[index]) for index in call.written))
        ctx.mark_non_differentiable(*(r for r in results if not _has_gradient(r)), *results[len(outputs) :])
        return results

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        needed = zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=True)
        return None, *(torch.empty_like(tensor) if needs else None for tensor, needs in needed)


class _Run(torch.autograd.Function):
    """The operation: runs the user's code without a graph, and again with one in the backward."""

    @staticmethod
    def forward(ctx: Any, call: OpaqueCall, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        device = _device_of(tensors)
        ctx.call, ctx.device, ctx.random = call, device, _generator_state(device)
        ctx.autocast = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        given = call._leaves(tensors) if call.takes_derivatives else tensors
        with torch.set_grad_enabled(call.takes_derivatives), derivable(), _seeded(ctx.random, device):
            _, outputs, new = call.compute(given)
        shapes = [tuple(output.shape) for output in outputs]
        if shapes != [shape for shape, _ in call.specs]:
            raise CaptureError(
                f"{call.label} returned tensors of the shapes {shapes}, and {[s for s, _ in call.specs]} when it "
                "was captured. Let the shapes that it returns not depend on the values of tensors."
            )
        taken = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        results = []
        for result in (*outputs, *new):
            own = result.detach()
            own = own.clone() if own.untyped_storage().data_ptr() in taken else own
            taken.add(own.untyped_storage().data_ptr())
            results.append(own)
        ctx.mark_non_differentiable(*(r for r in results if not _has_gradient(r)), *results[len(outputs) :])
        return tuple(results)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        call, device, needed = ctx.call, ctx.device, ctx.needs_input_grad[1:]
        leaves = [t.detach().requires_grad_(needs) for t, needs in zip(ctx.saved_tensors, needed, strict=True)]
        enabled, dtype = ctx.autocast

        def differentiate(outputs: list[torch.Tensor]) -> None:
            pairs = [(o, g) for o, g in zip(outputs, gradients, strict=False) if g is not None and o.requires_grad]
            if pairs:
                torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])

        now = _generator_state(device)
        _set_generator_state(ctx.random, device)
        try:
            with torch.enable_grad(), torch.autocast(device.type, dtype, enabled), _seeded(ctx.random, device):
                call.compute(leaves, differentiate)
        finally:
            _set_generator_state(now, device)
        # Zeros where nothing was computed from a parameter in this step: replicas expect a gradient of each.
        found = (leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves)
        return None, *(gradient if needs else None for gradient, needs in zip(found, needed, strict=True))


def _dispatch(handle: str, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    is_symbolic = torch.compiler.is_exporting() or any(tensor.is_meta for tensor in inputs)
    return list((_Shapes if is_symbolic else _Run).apply(_calls[handle], *inputs))


_library.impl("opaque", _dispatch, "Autograd")


# Random numbers


def _generator_state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_generator_state(state: torch.Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


_common_seed: ContextVar[int | None] = ContextVar("seed of Python's and NumPy's generators in calls", default=None)


@contextlib.contextmanager
def same_numbers(model: nn.Module, calls: Sequence[OpaqueCall]) -> Iterator[None]:
    """Let Python's and NumPy's generators give the same numbers to each of `calls` and to its module in `model`."""
    modules, paths = dict(model.named_modules()), {call.label for call in calls if call.modules}
    called = [modules[path] for path in sorted(paths & modules.keys())]
    hooks = [module.register_forward_pre_hook(lambda *_: _seed_host(0)) for module in called]
    token = _common_seed.set(0)
    try:
        yield
    finally:
        _common_seed.reset(token)
        for hook in hooks:
            hook.remove()


def _seed_host(seed: int) -> None:
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed)


@contextlib.contextmanager
def _seeded(state: torch.Tensor, device: torch.device) -> Iterator[None]:
    """Seed Python's and NumPy's generators, and the CPU's beside a GPU, by the device's; restore them afterwards."""
    fixed, numpy = _common_seed.get(), sys.modules.get("numpy")
    if fixed is None:  # a forward without values draws none, and reads none of the state
        fixed = 0 if detect_fake_mode() else zlib.crc32(state.numpy().tobytes())
    python, arrays = random.getstate(), numpy.random.get_state() if numpy is not None else None
    host = torch.get_rng_state() if device.type == "cuda" else None
    _seed_host(fixed)
    if host is not None:
        torch.default_generator.manual_seed(fixed)
    try:
        yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(arrays)
        if host is not None:
            torch.set_rng_state(host)
