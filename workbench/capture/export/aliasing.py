"""The tensors that are trained: the leaves of the loss's autograd graph, and other names of parameters and buffers.

A list, a closure or a global may hold a registered parameter too, and an attribute its `.data` or a view of it. Export
knows a tensor by its place in the model's tables alone, and makes a constant of all others. So forward is given the
registered tensor, or a view of it, wherever it reads such a memory by another name.
"""

from __future__ import annotations

import functools
import traceback
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from workbench.base.errors import CaptureError
from workbench.base.user_code import SourceLine, line_of_frames, line_of_node
from workbench.capture.operations import tensor_at
from workbench.capture.torch_internals import num_dispatch_modes, patched

Present = Callable[[], torch.Tensor]
"""Returns the tensor that stands for a registered one now: while a model is exported, one without values."""
MOVED: weakref.WeakKeyDictionary[nn.Module, dict[int, torch.Tensor]] = weakref.WeakKeyDictionary()
"""Module -> id of each tensor of its model -> the meta tensor that stood there, which others may still hold."""
_TABLES = frozenset(vars(nn.Module()))
"""Attributes that every module has: its tables of parameters, buffers, modules and hooks."""


class Registered:
    """The parameters and buffers of a model, found by their memory."""

    def __init__(self, model: nn.Module, name: str) -> None:
        self._name = name
        self._owners: defaultdict[int, list[tuple[torch.Tensor, str, Present]]] = defaultdict(list)
        self.names: dict[int, str] = {}
        """Id of a registered tensor -> its first name."""
        self._found: dict[int, tuple[torch.Tensor, Present]] = {}
        """Tensors that are registered or views of such, by id, each with what stands for it."""
        self.unregistered: dict[int, tuple[torch.Tensor, SourceLine]] = {}
        """Tensors that need a gradient and are in no table of the model, with the line that reads them first."""
        moved = MOVED.get(model, {})
        self._has_moved = bool(moved)
        for path, module in model.named_modules():
            for table in (module._parameters, module._buffers):
                for key, tensor in list(table.items()):
                    if tensor is None or id(tensor) in self.names:
                        continue
                    present = functools.partial(table.__getitem__, key)
                    for each in (tensor, moved.get(id(tensor))):
                        if each is not None:
                            self.names[id(each)] = f"{path}.{key}" if path else key
                            self._found[id(each)] = each, present
                            if (memory := memory_of(each)) is not None:
                                self._owners[memory].append((each, self.names[id(each)], present))

    def owner_of(self, tensor: torch.Tensor) -> str:
        """Return the name of the parameter or buffer whose memory a tensor lies in; empty if there is none."""
        owners = self._owners.get(memory_of(tensor) or 0, ())
        return next((name for _, name, _ in owners), "")

    def known(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what stands for a registered tensor now, or for a view of one that was found before, or itself."""
        return self._found[id(tensor)][1]() if id(tensor) in self._found else tensor

    def present(self, tensor: torch.Tensor, computed: bool = True) -> torch.Tensor:
        """Return what stands for a tensor now: a registered one, a view of it, or itself.

        With `computed`, it may have been computed from a registered one. Raises `CaptureError` for that, and for a view
        that cannot be made again.
        """
        if id(tensor) in self._found:
            return self.known(tensor)
        owners = self._owners.get(memory_of(tensor) or 0, ())
        sources = [each for each in leaves(tensor) if id(each) in self.names] if computed or owners else []
        for each, _, present in owners:
            if (view := view_like(tensor, each)) is not None:
                self._found[id(tensor)] = tensor, functools.partial(_viewed, view, present, bool(sources))
                return self.known(tensor)
        if owners or sources:
            line = line_of_frames(traceback.extract_stack())
            name = self.names[id(sources[0])] if sources else self.owner_of(tensor)
            what = "is a part of the memory of" if owners else "was computed, when the model was built, from"
            raise line.error(
                self._name,
                f"reads a tensor{line.where} that {what} {name} and would not follow its updates. Compute it in "
                f"forward from self.{name}.",
            )
        if tensor.is_meta and self._has_moved:  # held by an object or a closure, where `move_meta_to_cpu` does not look
            zeros: list[torch.Tensor] = []

            def move() -> None:  # in a thread of its own, the modes that export has entered are not active
                zeros.append(torch.zeros_like(tensor, device="cpu", requires_grad=tensor.requires_grad))

            thread = Thread(target=move)
            thread.start()
            thread.join()
            self._found[id(tensor)] = tensor, functools.partial(zeros.__getitem__, 0)
            tensor = self.known(tensor)
        if computed and tensor.requires_grad and id(tensor) not in self.unregistered:
            self.unregistered[id(tensor)] = tensor, line_of_frames(traceback.extract_stack())
        return tensor

    def have_new_attributes(self, like: torch.Tensor) -> bool:
        """Return True if forward has set an attribute on what stands for a registered tensor."""
        known = vars(like).keys()
        now = ((each, present()) for owners in self._owners.values() for each, _, present in owners)
        return any(
            not key.startswith("_") and key not in known and key not in vars(each)
            for each, stand_in in now
            for key in vars(stand_in)
        )

    def refuse_constants(self, module: fx.GraphModule) -> None:
        """Raise `CaptureError` if an exported graph holds a registered tensor's memory as a constant."""
        for node in module.graph.find_nodes(op="get_attr"):
            value = tensor_at(module, str(node.target))
            if isinstance(value, torch.Tensor) and id(value) not in self.names and (owner := self.owner_of(value)):
                line = line_of_node(next(iter(node.users), node))
                raise line.error(
                    self._name,
                    f"reads {owner} by another name{line.where} in code that torch.export runs by itself, and would "
                    f"not follow its updates. Give it to that code as an argument, self.{owner}.",
                )

    @contextmanager
    def followed(self, model: nn.Module, made: list[weakref.ref[torch.Tensor]]) -> Iterator[None]:
        """Let the forward of `model` read registered tensors by any name inside a `with` block.

        `made` gets a reference to each tensor that forward computes, which lives as long as somebody holds it.
        """
        forward = model.forward

        @functools.wraps(forward)
        def followed(*args: Any, **kwargs: Any) -> Any:
            tables = [(module._buffers, dict(module._buffers)) for module in model.modules()]
            with OneName(self.present, made):
                result = forward(*args, **kwargs)
            # Export follows `self.mean = new` for a buffer, but not an assignment to the table itself.
            for table, before in tables:
                for key, buffer in before.items():
                    if buffer is not None and isinstance(new := table.get(key), torch.Tensor) and new is not buffer:
                        if new.shape != buffer.shape:
                            raise CaptureError(
                                f"The forward of {self._name} gives its buffer {key} the shape {list(new.shape)} in "
                                f"place of {list(buffer.shape)}. Register it with the shape that it keeps."
                            )
                        buffer.copy_(new.detach())
                        table[key] = buffer
            return result

        with patched(model, "forward", followed):
            yield

    def trained(self, loss: torch.Tensor) -> tuple[frozenset[str], tuple[str, ...]]:
        """Return the names of the parameters that a loss is differentiated by, and a sentence on each other tensor."""
        now = {id(present()): name for owners in self._owners.values() for _, name, present in owners}
        found = leaves(loss)
        others = (self.unregistered[id(leaf)] for leaf in found if id(leaf) in self.unregistered)
        notes = tuple(
            f"A tensor of shape {list(tensor.shape)}{line.where} requires a gradient and is no parameter of "
            f"{self._name}: it stays as it is, as with an optimizer of model.parameters(). To train it, register "
            "it: self.gain = nn.Parameter(…), or nn.ParameterList([…])."
            for tensor, line in others
        )
        return frozenset(now[id(leaf)] for leaf in found if id(leaf) in now), notes


def move_meta_to_cpu(model: nn.Module) -> None:
    """Replace every meta tensor of a model by one on the CPU: parameters without values, so that no memory is touched.

    Buffers and other tensors become zeros. Tied tensors stay tied. Tensors in lists, tuples and dictionaries are
    replaced, too, but for views of what is registered, and for what was computed from it: `Registered` knows them.
    """
    registered = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_meta}
    memories = {memory_of(tensor) for tensor in registered.values()}
    moved: dict[int, torch.Tensor] = {}

    def on_cpu(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_meta:
            if id(value) not in moved:
                is_leaf = value.is_leaf and value.requires_grad
                if id(value) not in registered and memory_of(value) in memories:
                    return value
                if not is_leaf and value.requires_grad and any(id(leaf) in registered for leaf in leaves(value)):
                    return value
                if isinstance(value, nn.Parameter):
                    empty = torch.empty_like(value, device="cpu", requires_grad=False)
                    moved[id(value)] = nn.Parameter(empty, requires_grad=value.requires_grad)
                else:  # zeros, which are valid indices: blocks are measured with the constants among them
                    moved[id(value)] = torch.zeros_like(value, device="cpu", requires_grad=is_leaf)
            return moved[id(value)]
        if type(value) not in (list, tuple, dict):
            return value
        items = value.values() if isinstance(value, dict) else value
        if all(new is old for new, old in zip(map(on_cpu, items), items, strict=True)):
            return value  # itself, which other modules may hold
        if isinstance(value, dict):
            return {key: on_cpu(item) for key, item in value.items()}
        return type(value)(map(on_cpu, value))

    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for key, value in list(table.items()):  # the table of a scripted module is no dictionary, and has no update
                table[key] = on_cpu(value)
        for key, value in list(vars(module).items()):
            if key not in _TABLES and isinstance(value, (torch.Tensor, list, tuple, dict)):
                vars(module)[key] = on_cpu(value)
    if registered:
        before = {id(moved[old]): tensor for old, tensor in registered.items()}
        MOVED.update((module, before) for module in model.modules())


def leaves(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the leaves of the autograd graph of a tensor: what its gradient is taken by."""
    if tensor.grad_fn is None:
        return [tensor] if tensor.requires_grad else []
    found, seen, to_visit = list[torch.Tensor](), set[Any](), [tensor.grad_fn]
    while to_visit:
        node: Any = to_visit.pop()
        if node not in seen:
            seen.add(node)
            found += [node.variable] if hasattr(node, "variable") else []
            to_visit += [following for following, _ in node.next_functions if following is not None]
    return found


def memory_of(tensor: torch.Tensor) -> int | None:
    """Return a number that is equal for tensors in the same memory; None for those without, and in an export.

    It is the address, which arrays of NumPy share too, and without values that of torch's own record of the memory.
    """
    if tensor.layout != torch.strided or tensor.is_nested or isinstance(tensor, FakeTensor):
        return None
    try:
        storage = tensor.untyped_storage()
    except NotImplementedError:  # inside of `torch.vmap`
        return None
    return (0 if tensor.is_meta else storage.data_ptr()) or -int(storage._cdata)


class OneName(TorchFunctionMode):
    """Gives functions of torch what stands for those of their arguments that are no tensors of the export."""

    def __init__(
        self, present: Callable[[torch.Tensor], torch.Tensor], made: list[weakref.ref[torch.Tensor]] | None = None
    ) -> None:
        super().__init__()
        self._present, self._made, self._depth = present, made, num_dispatch_modes()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # In a branch of `torch.cond`, `refuse_constants` looks what is read. Functions that no mode sees, such as
        # `torch.from_numpy`, lead into the modes of the export, whose calls are none of the model's.
        if torch.compiler.is_dynamo_compiling() or num_dispatch_modes() < self._depth:
            return func(*args, **(kwargs or {}))
        named = {key: self._given(value) for key, value in (kwargs or {}).items()}
        result = func(*map(self._given, args), **named)
        if self._made is not None:
            results = result if isinstance(result, (list, tuple)) else (result,)
            given = set(map(id, args))  # what returns its argument has made nothing
            tensors = (each for each in results if isinstance(each, torch.Tensor) and id(each) not in given)
            self._made += map(weakref.ref, tensors)
        return result

    def _given(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value if isinstance(value, FakeTensor) else self._present(value)
        if type(value) in (list, tuple):
            items = [self._given(item) for item in value]
            is_same = all(new is old for new, old in zip(items, value, strict=True))
            return value if is_same else type(value)(items)
        return value


def _viewed(view: Callable[[torch.Tensor], torch.Tensor], present: Present, has_gradient: bool) -> torch.Tensor:
    return view(present() if has_gradient else present().detach())


def view_like(alias: torch.Tensor, owner: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return the function that makes a view as `alias` is one of `owner`; None if that is not known.

    It slices and permutes dims where that does it, since a rank may have an owner in another layout.
    """
    if alias.dtype != owner.dtype or alias.is_conj() != owner.is_conj() or alias.is_neg() != owner.is_neg():
        return None
    first = rest = int(alias.storage_offset() - owner.storage_offset())
    # Where the view starts in each dim of the owner: an element lies at the sum of its indices times their strides.
    starts = [0] * owner.ndim
    for dim in sorted(range(owner.ndim), key=owner.stride, reverse=True):
        if owner.shape[dim] > 1 and owner.stride(dim):
            starts[dim], rest = divmod(rest, owner.stride(dim))
    fits = not rest and all(start < size for start, size in zip(starts, owner.shape, strict=True))
    # The dim of the owner that each dim of the view runs along, and its step.
    chosen: list[int | slice] = list(starts)
    kept = [dim for dim in range(alias.ndim) if alias.shape[dim] > 1 and alias.stride(dim)]
    of_dim: dict[int, int] = {}
    for dim in sorted(kept, key=alias.stride, reverse=True):
        for of in sorted(set(range(owner.ndim)) - set(of_dim.values()), key=owner.stride, reverse=True):
            step, uneven = divmod(alias.stride(dim), max(1, owner.stride(of)))
            last = starts[of] + (alias.shape[dim] - 1) * step
            if step and not uneven and last < owner.shape[of]:
                of_dim[dim] = of
                whole = (starts[of], last, step) == (0, owner.shape[of] - 1, 1)
                chosen[of] = slice(None) if whole else slice(starts[of], last + 1, step)
                break
    if fits and len(of_dim) == len(kept):
        order = sorted(of_dim.values())
        moved = [order.index(of_dim[dim]) for dim in kept]

        def by_dims(tensor: torch.Tensor) -> torch.Tensor:
            view = tensor[tuple(chosen)] if any(each != slice(None) for each in chosen) else tensor
            view = view.permute(moved) if moved != sorted(moved) else view
            for dim in range(alias.ndim):
                view = view if dim in kept else view.unsqueeze(dim)
            return view.expand(alias.shape) if view.shape != alias.shape else view

        return by_dims
    reach = sum((size - 1) * stride for size, stride in zip(alias.shape, alias.stride(), strict=True))
    if owner.is_contiguous() and alias.numel() and 0 <= first < owner.numel() - reach:
        return lambda tensor: tensor.reshape(-1)[first:].as_strided(alias.shape, alias.stride())  # from its own start
    return None
