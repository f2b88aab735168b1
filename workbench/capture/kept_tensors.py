"""Tensors that forward keeps on its modules outside of buffers: capture runs forward once, so each step starts without.

Attributes, lists, dicts and plain objects may hold them. What forward keeps and never computes with again (an attention
map to look at) is harmless, and so is what it makes alike in every step (a table of positions that is made once).
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.capture.source_lines import SourceLine, line_of_frames
from workbench.data._datasets import untouched_generators

MOST_ITEMS = 1_000
"""Items of a list, dict or object above which it is not searched: a table of data, not a state."""
DEPTH = 4
"""Number of lists, dicts and objects inside one another that are searched."""
_TABLES = ("_parameters", "_buffers", "_modules")


class Held:
    """The tensors that the modules of a model hold outside of parameters and buffers, and what holds them."""

    def __init__(self, model: nn.Module) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        """Tensor by the expression that a user would write: `self.layer.state["h"]`."""
        self._contents: list[tuple[Any, Any]] = []
        self._seen: set[int] = set()
        for path, module in model.named_modules():
            if type(module).__module__.startswith("torch."):
                continue
            for name, value in vars(module).items():
                if name not in _TABLES and not name.startswith(("_forward", "_backward", "_state_dict", "_load_state")):
                    self._search(value, f"self.{path}.{name}" if path else f"self.{name}", DEPTH)

    def _search(self, value: Any, place: str, depth: int) -> None:
        if isinstance(value, torch.Tensor):
            if not isinstance(value, nn.Parameter):
                self.tensors[place] = value
        elif depth and id(value) not in self._seen and (items := items_of(value, place)) is not None:
            self._seen.add(id(value))
            content = value if isinstance(value, (list, dict, set)) else _entries(value)
            self._contents.append((value, copy.copy(content)))
            for inner, item in items:
                self._search(item, inner, depth - 1)

    def new_in(self, later: Held) -> dict[str, torch.Tensor]:
        """Return the tensors that were not held before."""
        before = {id(tensor) for tensor in self.tensors.values()}
        return {place: tensor for place, tensor in later.tensors.items() if id(tensor) not in before}

    def restore(self) -> None:
        """Give every list, dict and object what it held; attributes of modules are restored by the export itself."""
        for value, content in self._contents:
            if isinstance(value, list):
                value[:] = content
            elif isinstance(value, (dict, set)):
                value.clear()
                value.update(content)
            elif isinstance(content, dict):
                _entries(value).clear()
                _entries(value).update(content)


def _entries(value: Any) -> Any:
    return value if isinstance(value, tuple) else vars(value)


def items_of(value: Any, place: str) -> Iterator[tuple[str, Any]] | None:
    """Return what a list, dict or plain object holds, each with its place; None for anything else."""
    if isinstance(value, (list, tuple, set)):
        return ((f"{place}[{at}]", item) for at, item in enumerate(value)) if len(value) <= MOST_ITEMS else None
    if isinstance(value, dict):
        return ((f"{place}[{key!r}]", item) for key, item in value.items()) if len(value) <= MOST_ITEMS else None
    is_code = isinstance(value, (nn.Module, type, ModuleType, FunctionType, MethodType))
    if is_code or not hasattr(value, "__dict__") or type(value).__module__.startswith("torch"):
        return None
    return ((f"{place}.{name}", item) for name, item in vars(value).items())


def read_again(
    model: nn.Module, batch: Mapping[str, torch.Tensor], loss_of: Callable[[Any], torch.Tensor]
) -> tuple[str, SourceLine] | None:
    """Return the first tensor that one forward of the model keeps and the next one's loss depends on, and the line.

    Two forwards of a copy of the model run as written. Returns None if there is none, or if they cannot run.
    """
    try:
        model = copy.deepcopy(model)
        with untouched_generators(), torch.enable_grad():
            before = Held(model)
            with _Tainted([*model.parameters(), *model.buffers(), *batch.values()]) as first:
                model(**batch)
            kept = {place: t for place, t in before.new_in(Held(model)).items() if first.has(t)}
            if not kept:
                return None
            with _Tainted(kept.values(), kept) as second:
                loss = loss_of(model(**batch))
    except Exception:  # such as a model of the meta device that reads values
        return None
    return second.first if second.has(loss) else None


class _Tainted(TorchDispatchMode):
    """Follows which tensors are computed from some, or drawn at random, by the memory that they lie in."""

    supports_higher_order_operators = True

    def __init__(self, tensors: Any, places: Mapping[str, torch.Tensor] | None = None) -> None:
        super().__init__()
        self._storages = {_key(tensor): tensor.untyped_storage() for tensor in tensors}
        self._places = None if places is None else {_key(tensor): place for place, tensor in places.items()}
        self.first: tuple[str, SourceLine] | None = None
        """The first of the tensors that an operation read, and its line."""

    def has(self, tensor: torch.Tensor) -> bool:
        return _key(tensor) in self._storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        read = next((tensor for tensor in given if self.has(tensor)), None)
        is_drawn = self._places is None and torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        if read is not None or is_drawn:
            for leaf in pytree.tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self._storages[_key(leaf)] = leaf.untyped_storage()
        if self.first is None and self._places is not None and read is not None and _key(read) in self._places:
            self.first = self._places[_key(read)], line_of_frames(traceback.extract_stack())
        return result


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
