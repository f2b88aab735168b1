"""Observations that only a run of the user's own code gives, since an export has no values and runs forward once.

What forward keeps for the next one outside of buffers, and the operations of code that export cannot follow.
"""

from __future__ import annotations

import contextlib
import ctypes
import difflib
import dis
import functools
import gc
import io
import math
import operator
import sys
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakTensorKeyDictionary

from workbench.base.errors import CaptureError, in_words
from workbench.base.user_code import SourceLine, is_users, line_of_running_code
from workbench.capture.operations import Dataflow, names

# What forward keeps for the next forward: capture runs it once, so that each step would start as the first one did.
#
# Who holds it does not matter. The objects that the model and the user's code reach are compared with what they held
# before; a tensor that is alive after a forward whose results were dropped is held by something else. If anything is
# kept, forward runs twice without values, and the second one must compute the same from the same parameters, buffers
# and batch. What is kept to look at (an attention map) is harmless, and so is what is made alike in every step (a table
# of positions that is made once).

DEPTH = 4
"""Number of lists, dicts and objects inside one another that are searched for a generator."""
MOST_ITEMS = 1_000
"""Items of a list, dict or object above which none of them is searched: a table of data, not a state."""
MOST_HOLDERS = 20_000
"""Objects that are searched for a state, at most."""
Number = int | float
_PLAIN = (int, float, complex, str, bytes, type(None))
_SEARCHED = frozenset({"types", "collections", "functools", "_thread", "argparse", "dataclasses"})
"""Modules of Python's own library whose objects may hold a state."""
_TABLES = frozenset(vars(nn.Module()))
"""Attributes that every module has."""


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


@dataclass(frozen=True)
class _Holder:
    """An object that forward may write to."""

    value: Any
    place: str
    is_attribute: bool = False
    """True if its entries are attributes of `place`, or names of a module if that is empty."""
    names: tuple[str, ...] | None = None
    """The entries that count; None for all."""
    is_table: bool = False
    """True for the parameters or buffers of a module."""

    def at(self, key: Any) -> str:
        """Return the expression of an entry that a user would write."""
        if isinstance(self.value, CellType):
            return self.place
        return f"{self.place}.{key}".lstrip(".") if self.is_attribute else f"{self.place}[{key!r}]"

    def content(self) -> dict[Any, Any]:
        """Return what it holds now, by attribute, key or position."""
        value = self.value
        if isinstance(value, (list, deque)):
            return dict(enumerate(value))
        if isinstance(value, set):
            return {id(item): item for item in value}
        if isinstance(value, CellType):
            try:
                return {"": value.cell_contents}
            except ValueError:  # it is not filled
                return {}
        if isinstance(value, type):
            return {key: item for key, item in vars(value).items() if not key.startswith("__")}
        entries = value if isinstance(value, dict) else _slots(value)
        return dict(entries) if self.names is None else {name: entries[name] for name in self.names if name in entries}

    def restore(self, content: dict[Any, Any]) -> None:
        """Let it hold this again, and nothing else."""
        value, now = self.value, self.content()
        if now.keys() == content.keys() and all(now[key] is item for key, item in content.items()):
            return
        if isinstance(value, (list, deque, set)):
            value.clear()
            (value.update if isinstance(value, set) else value.extend)(content.values())
        elif isinstance(value, CellType):
            value.cell_contents = content.get("")
        elif isinstance(value, dict):
            for key in now.keys() - content.keys():
                del value[key]
            value.update(content)
        else:
            owner: Any = type if isinstance(value, type) else object  # a class may have a `__setattr__` of its own
            for key in now.keys() - content.keys():
                owner.__delattr__(value, key)
            for key, item in content.items():
                if now.get(key, MISSING) is not item:
                    owner.__setattr__(value, key, item)


def _slots(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in _slot_names(type(value)) if hasattr(value, name)}


def _slot_names(owner: type) -> tuple[str, ...]:
    declared = (vars(each).get("__slots__", ()) for each in owner.__mro__)
    names = (name for slots in declared for name in ((slots,) if isinstance(slots, str) else slots))
    return tuple(name for name in names if not name.startswith("__"))


@dataclass(frozen=True)
class Change:
    """An entry that forward has changed."""

    holder: _Holder
    key: Any
    old: Any
    new: Any

    @property
    def place(self) -> str:
        return self.holder.at(self.key)

    @property
    def is_number(self) -> bool:
        """True if a number has become another one."""
        return all(isinstance(each, Number) and not isinstance(each, bool) for each in (self.old, self.new))

    @property
    def now(self) -> Any:
        """Return what the entry holds at present."""
        return self.holder.content().get(self.key, MISSING)

    def set(self, value: Any) -> None:
        """Let the entry hold another value."""
        self.holder.restore({**self.holder.content(), self.key: value})


MISSING: Any = type("Missing", (), {"__repr__": lambda _: "nothing"})()
"""Stands for what is not held."""


class Held:
    """The contents of the objects that a model and its code reach, at one moment.

    These are the attributes of its modules and tensors, the user's classes, functions with their closures, defaults and
    globals, and lists, dicts and objects in turn.
    """

    def __init__(self, model: nn.Module, function: Any = None) -> None:
        self._holders: list[tuple[_Holder, dict[Any, Any]]] = []
        self._seen: dict[int, Any] = {}
        self._to_search: deque[tuple[Any, str]] = deque()
        self.has_iterators = False
        """True if something is held that gives another item each time."""
        for path, module in model.named_modules():
            self._to_search.append((module, f"self.{path}" if path else "self"))
        for owner in dict.fromkeys(each for module in model.modules() for each in type(module).__mro__):
            self._to_search.append((owner, owner.__name__))
        self._to_search.append((function, "the loss"))
        while self._to_search and len(self._holders) < MOST_HOLDERS:
            value, place = self._to_search.popleft()
            if not isinstance(value, (*_PLAIN, torch.dtype, torch.device)) and id(value) not in self._seen:
                self._seen[id(value)] = value  # kept, so that no other object gets its id
                self._search(value, place)

    def _search(self, value: Any, place: str) -> None:
        self.has_iterators |= hasattr(type(value), "__next__")
        parts = next((parts for types, parts in _PARTS.items() if isinstance(value, types)), ())
        self._to_search += ((getattr(value, part, None), place) for part in parts)
        if isinstance(value, nn.Module):
            self._hold(_Holder(vars(value), place, is_attribute=True), vars(value).keys() - _TABLES)
            for table in (value._parameters, value._buffers):
                if isinstance(table, dict):  # that of a scripted module is none
                    self._hold(_Holder(table, place, is_attribute=True, is_table=True))
        elif isinstance(value, FunctionType):
            if is_users(value.__code__.co_filename):
                self._search_function(value, place)
        elif isinstance(value, type):
            if value is not object and is_users(getattr(sys.modules.get(value.__module__), "__file__", None) or ""):
                self._hold(_Holder(value, value.__name__, is_attribute=True))
        elif isinstance(value, (list, deque, set, dict)):
            self._hold(_Holder(value, place))
        elif isinstance(value, tuple):
            self._to_search += ((item, f"{place}[{at}]") for at, item in enumerate(value[:MOST_ITEMS]))
        elif _is_searched(value):
            if isinstance(own := getattr(value, "__dict__", None), dict):
                self._hold(_Holder(own, place, is_attribute=True))
            if _slot_names(type(value)):
                self._hold(_Holder(value, place, is_attribute=True))

    def _search_function(self, function: FunctionType, place: str) -> None:
        named = tuple({name for code in _codes(function.__code__) for name in code.co_names})
        space = function.__globals__
        modules = [(name, space[name]) for name in named if isinstance(space.get(name), ModuleType)]
        self._hold(_Holder(space, "", is_attribute=True, names=named))
        for name, module in modules:
            if is_users(getattr(module, "__file__", None) or "built in"):
                self._hold(_Holder(vars(module), name, is_attribute=True, names=named))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._hold(_Holder(cell, name))
        self._hold(_Holder(function.__dict__, place, is_attribute=True))

    def _hold(self, holder: _Holder, searched: Collection[Any] | None = None) -> None:
        self._holders.append((holder, content := holder.content()))
        if len(content) <= MOST_ITEMS:
            keys = content if searched is None else searched
            self._to_search += ((content[key], holder.at(key)) for key in keys)

    def changes(self) -> list[Change]:
        """Return where another thing is held now; that a table holds another tensor in place of one does not count."""
        found = []
        for holder, content in self._holders:
            now = holder.content()
            for key in content.keys() | now.keys():
                old, new = content.get(key, MISSING), now.get(key, MISSING)
                is_stand_in = holder.is_table and isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor)
                if not is_stand_in and not _same(old, new):
                    found.append(Change(holder, key, old, new))
        return sorted(found, key=lambda each: each.place)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the tensors that are held now, each with its place."""
        for holder, _ in self._holders:
            items = holder.content().items()
            yield from ((holder.at(key), item) for key, item in items if isinstance(item, torch.Tensor))

    def restore(self) -> None:
        """Let every object hold what it held, and nothing else."""
        for holder, content in self._holders:
            holder.restore(content)


_PARTS: dict[Any, tuple[str, ...]] = {
    MethodType: ("__func__", "__self__"),
    FunctionType: ("__defaults__", "__kwdefaults__", "__wrapped__"),
    functools.partial: ("func", "args", "keywords"),
    (staticmethod, classmethod): ("__func__",),
    property: ("fget",),
}
"""Parts of callables that are searched."""


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _is_searched(value: Any) -> bool:
    root = type(value).__module__.partition(".")[0]
    if isinstance(value, ModuleType) or (root == "torch" and not isinstance(value, torch.Tensor)):
        return False
    return root in _SEARCHED or root not in sys.stdlib_module_names


def _same(old: Any, new: Any) -> bool:
    if old is new:
        return True
    if type(old) is not type(new):
        return False
    if isinstance(old, tuple):
        return len(old) == len(new) and all(map(_same, old, new))
    return isinstance(old, _PLAIN) and bool(old == new or (old != old and new != new))


# Two forwards in a row: does the second one compute the same?


class Kept(CaptureError):
    """A forward leaves something that changes what the next one computes, and that no checkpoint would hold."""


@dataclass(frozen=True)
class _Content:
    """The value in a piece of memory, as the expression that it was computed by."""

    memory: torch.UntypedStorage
    digest: int
    made: int | None = None
    """The forward that computed it from parameters, buffers, the batch or random numbers; None for what is constant."""
    kept: tuple[int, SourceLine] | None = None
    """Memory that an earlier forward left, and the line that read it for this."""


class Expressions(TorchDispatchMode):
    """Follows by which operations the tensors of several forwards were computed, and from what.

    Two tensors of equal digests were computed by equal operations, with equal numbers, from the same parameters,
    buffers, fields of the batch and draws of one forward. The digest of what an earlier forward has left is another.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._contents: dict[int, _Content] = {}
        self.forward = 0
        self.operations: list[tuple[int, SourceLine]] = []
        """Digest of each operation of this forward with its numbers, but not its tensors, and its line."""
        self._drawn = 0

    def begin(self, given: Mapping[str, torch.Tensor]) -> None:
        """Begin a forward that is given these tensors: parameters, buffers and the batch, by name."""
        self.forward += 1
        self.operations, self._drawn = [], 0
        for name, tensor in given.items():
            if tensor.layout == torch.strided:
                self._set(tensor, hash(name), self.forward, None)

    def digest(self, tensor: torch.Tensor) -> tuple[int, bool, tuple[int, SourceLine] | None]:
        """Return the digest of a tensor, whether it depends on anything but constants, and what it was kept from."""
        if tensor.layout != torch.strided:
            return hash((str(tensor.layout), id(tensor))), True, None
        key = int(tensor.untyped_storage()._cdata)
        if key not in self._contents:
            held = _bytes(tensor)
            self._set(tensor, hash(("constant", key if held is None else held)), None, None)
        content = self._contents[key]
        digest, kept = content.digest, content.kept
        if content.made not in (None, self.forward):
            digest, kept = hash(("kept", digest)), kept or (key, line_of_running_code())
        geometry = map(_text, (*tensor.shape, *tensor.stride(), tensor.storage_offset(), tensor.dtype))
        return hash((digest, *geometry)), content.made is not None, kept

    def follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note that an operation returned `result`."""
        leaves = pytree.tree_leaves((args, kwargs))
        operation, tensors = [str(func)], [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        operation += [_text(leaf) for leaf in leaves if not isinstance(leaf, torch.Tensor)]
        found = [self.digest(tensor) for tensor in tensors]
        is_drawn = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        made = self.forward if is_drawn or any(depends for _, depends, _ in found) else None
        kept = next((each for _, _, each in found if each is not None), None)
        self.operations.append((hash(tuple(operation)), line_of_running_code()))
        # A draw differs from other draws of this forward. Operations are not counted: what the first forward has
        # computed from constants, and remembers, the second one does not compute again.
        self._drawn += is_drawn
        number = self._drawn if is_drawn else 0
        digest = hash((*operation, number, *(each for each, _, _ in found)))
        given = {int(tensor.untyped_storage()._cdata) for tensor in tensors if tensor.layout == torch.strided}
        schema = getattr(func, "_schema", None)
        formals = schema.arguments if schema is not None else ()
        values = dict(zip((formal.name for formal in formals), args, strict=False)) | dict(kwargs)
        is_written = (formal for formal in formals if formal.alias_info is not None and formal.alias_info.is_write)
        written = pytree.tree_leaves([values.get(formal.name) for formal in is_written])
        for at, leaf in enumerate([*written, *pytree.tree_leaves(result)]):
            if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided:
                continue
            if at < len(written) or int(leaf.untyped_storage()._cdata) not in given:
                self._set(leaf, hash((digest, at)), made, kept)

    def _set(self, tensor: torch.Tensor, digest: int, made: int | None, kept: tuple[int, SourceLine] | None) -> None:
        storage = tensor.untyped_storage()
        self._contents[int(storage._cdata)] = _Content(storage, digest, made, kept)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "namespace", "") != "prim":  # a question for a device, asked as often as it is not remembered
            self.follow(func, args, kwargs or {}, result)
        return result


class _Opaque(TorchFunctionMode):
    """Tells `Expressions` of opaque calls, whose results without values are computed from nothing."""

    def __init__(self, expressions: Expressions) -> None:
        super().__init__()
        self._expressions = expressions

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "workbench.opaque" in str(func):
            call, *tensors = args
            self._expressions.follow(func, (call.partition(" ")[2], *tensors), {}, result)
        return result


def _text(leaf: Any) -> str:
    if isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return "symbol"
    return repr(leaf) if isinstance(leaf, (*_PLAIN, torch.dtype, torch.device, torch.layout)) else type(leaf).__name__


def _bytes(tensor: torch.Tensor) -> bytes | None:
    """Return the bytes of a small tensor that holds values on the CPU, which forward may make anew each time."""
    storage = tensor.untyped_storage()
    is_small = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.device.type == "cpu" and storage.nbytes() < 2**20
    if not is_small:
        return None
    return ctypes.string_at(storage.data_ptr(), storage.nbytes()) if storage.nbytes() else b""


LATER = (*range(2, 13), 100, 1_000, 10_000, 100_000, 1_000_000)
"""Numbers of forwards after which a number that forward changes is tried."""
MORE_FORWARDS = 10
"""Number of forwards in a row that must compute the same where forward changes what is no number."""
MOST_DECISIONS = 16
"""Places at which code may decide by such numbers, of which the other outcome is tried."""
_MOST_COMPARISONS = 10_000
"""Comparisons of one forward with an outcome that is not its own, above which it may never end."""


_OURS = str(Path(__file__).parents[2])


class Watch:
    """Notes what is decided by numbers while code runs, and lets some decisions have the other outcome.

    It sees comparisons of numbers that are computed from its own. Those that Python converts, as `int(number)` does,
    are no longer its own: `escaped` has the line.
    """

    def __init__(self, others: Collection[Any] = ()) -> None:
        """`others` are keys of `places`."""
        self._others, self._left = others, _MOST_COMPARISONS
        self.places: dict[Any, SourceLine] = {}
        """Instruction that decides -> its line."""
        self.escaped: SourceLine | None = None

    def number(self, value: Any) -> Any:
        """Return a number whose comparisons are noted; other values as they are."""
        watched = _WATCHED.get(type(value))
        if watched is None:
            return value
        made = watched(value)
        made.watch = self
        return made

    def decide(self, outcome: bool) -> bool:
        if (key := self._place()) is None:
            return outcome
        self.places.setdefault(key, line_of_running_code())
        self._left -= key in self._others
        if self._left < 0:
            raise RuntimeError("more comparisons than a forward has")
        return outcome != (key in self._others)

    def escape(self) -> None:
        if self._place() is not None:
            self.escaped = self.escaped or line_of_running_code()

    def _place(self) -> tuple[CodeType, int] | None:
        """Return the instruction that asks; None for one of this package, or that stores something under a key."""
        frame: Any = sys._getframe(3)  # over this method, `decide` or `escape`, and the number's own operator
        code, at = frame.f_code, frame.f_lasti
        is_key = code.co_code[at] == dis.opmap["STORE_SUBSCR"]
        return None if is_key or code.co_filename.startswith(_OURS) else (code, at)


def _watched(base: Any) -> Any:
    """Return a class of numbers that tell their `watch` of comparisons."""

    def computing(name: str) -> Callable[..., Any]:
        def compute(self: Any, *others: Any) -> Any:
            found = getattr(base, name)(self, *others)
            if found is NotImplemented and base is int and isinstance(others[0], float):
                found = getattr(float, name)(base.__float__(self), *others)
            return self.watch.number(found)

        return compute

    def comparing(name: str) -> Callable[..., Any]:
        def compare(self: Any, *others: Any) -> Any:
            found = getattr(base, name)(self, *others)
            return found if found is NotImplemented else self.watch.decide(found)

        return compare

    def escaping(name: str) -> Callable[..., Any]:
        def escape(self: Any) -> Any:
            self.watch.escape()
            return getattr(base, name)(self)

        return escape

    binary = names("add sub mul truediv floordiv mod pow and or xor lshift rshift")
    members = dict[str, Any]()
    for how, each in (
        (computing, binary | {f"r{name}" for name in binary} | names("neg pos abs round")),
        (comparing, names("eq ne lt le gt ge bool")),
        (escaping, names("int float hash trunc")),
    ):
        members |= {f"__{name}__": how(f"__{name}__") for name in each if hasattr(base, f"__{name}__")}
    return type(f"Watched{base.__name__}", (base,), members)


_WATCHED = {each: _watched(each) for each in (int, float)}
_WATCHED |= {watched: watched for watched in _WATCHED.values()}


def decided_by(numbers: Sequence[Change], differs: Callable[[], bool]) -> SourceLine | None:
    """Return a line at which code decides by numbers that it has changed, to another result; None if there is none.

    `differs` runs the code, and says whether it computes something else than before. The numbers are those of a later
    run. Where code compares them, it runs again with the other outcome. Of `0.5 * number` a whole number is not told:
    the code runs with real numbers, too.
    """
    tried = [(each, frozenset[Any]()) for each in (None, float)]
    for to, others in tried:  # which grow
        watch = Watch(others)
        for each in numbers:
            later = each.old + 2 * (each.new - each.old)
            each.set(watch.number(later if to is None else to(later)))
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                is_other = differs()
        except Exception:  # a turn of a loop, or a place in a list, is no real number
            is_other = to is None
        if is_other and others:
            return next((line for key, line in watch.places.items() if key in others), SourceLine())
        if watch.escaped is not None and to is None:
            return watch.escaped
        for key, line in watch.places.items():
            if (more := (to, others | {key})) not in tried:
                if len(tried) > MOST_DECISIONS:
                    return line
                tried.append(more)
    return None


def refuse_kept(
    model: nn.Module,
    name: str,
    run: Callable[[Mapping[str, torch.Tensor]], Any],
    batch: Mapping[str, torch.Tensor],
    held: Held,
    changed: Sequence[Change],
    shapes: Any,
) -> tuple[str, ...]:
    """Return a sentence on numbers that forward changes without a difference to later ones.

    `run` is a forward, which changes what `held` holds, and `shapes` the `ShapeEnv` of its export. Raises `Kept` if the
    second forward in a row computes something else than the first one from the same parameters, buffers and batch;
    names what is kept and the line that reads it.
    """
    # A forward without values, whose parameters and buffers are the same in each.
    mode, expressions = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True), Expressions()
    Results = tuple[list[Any], list[tuple[int, SourceLine]]]

    def without_values(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
        return {key: mode.from_tensor(each, static_shapes=True) for key, each in tensors.items() if each is not None}

    tables = [
        (path, table, dict(table), without_values(table))
        for path, module in model.named_modules()
        for table in (module._parameters, module._buffers)
    ]
    given = {f"self.{path}.{key}": tensor for path, *_, own in tables for key, tensor in own.items()}
    recurrent = [module for module in model.modules() if isinstance(module, nn.RNNBase)]

    def computed() -> Results:
        fields = without_values({field: tensor.clone() for field, tensor in batch.items()})
        expressions.begin({**given, **fields})
        try:
            for _, table, _, stand_ins in tables:
                table.update(stand_ins)
            for module in recurrent:  # which reads its parameters from a list of its own
                vars(module)["_flat_weights"] = [getattr(module, name, None) for name in module._flat_weights_names]
            with mode, expressions, _Opaque(expressions):
                results = run(fields)
        finally:  # buffers are kept by checkpoints: `carried_state` has them
            for _, table, own, _ in tables:
                table.update({key: tensor for key, tensor in own.items() if tensor is not None})
        tensors = (leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, torch.Tensor))
        return [expressions.digest(tensor) for tensor in tensors], expressions.operations

    def difference(later: Results) -> SourceLine | None:
        """Return the line of the first operation that differs, or that one of the two does not have."""
        if [digest for digest, *_ in later[0]] == [digest for digest, *_ in first[0]]:
            return None
        # Operations that the later one lacks say least: it may remember constants that the first one has computed.
        here, there = ([digest for digest, _ in operations] for operations in (first[1], later[1]))
        compared = difflib.SequenceMatcher(None, here, there, autojunk=False)
        steps = [step for step in compared.get_opcodes() if step[0] != "equal"]
        new = [later[1][begin][1] for *_, begin, end in steps if end > begin]
        gone = [first[1][begin][1] for _, begin, end, *_ in steps if end > begin]
        return (new or gone or [SourceLine()])[0]

    # Two forwards in a row.
    numbers = [each for each in changed if each.is_number]
    try:
        first = computed()
    except Exception as error:  # outside of an export, it asks for a value, for instance
        where = ", ".join(each.place for each in changed) or "something"
        return (f"The forward changes {where}. Whether the next one reads it is not known: {in_words(error)}.",)
    of_tensors = [(key, vars(tensor)) for key, tensor in given.items()]
    known = [(f"{key}.{name}", value) for key, named in of_tensors for name, value in named.items()]
    known = [*held.tensors(), *tensors_in(held.changes()), *known]
    strided = (pair for pair in known if isinstance(pair[1], torch.Tensor) and pair[1].layout == torch.strided)
    places = {int(tensor.untyped_storage()._cdata): place for place, tensor in strided}
    values = [each.now for each in numbers]
    sizes = {id(each.holder): len(each.holder.content()) for each in changed}
    second = computed()
    if (line := difference(second)) is not None:
        if kept := next((kept for *_, kept in second[0] if kept is not None), None):
            raise kept_tensor(name, places.get(kept[0], "a place outside of it"), kept[1])
        raise kept_number(name, ", ".join(each.place for each in changed) or "something outside of it", line)
    # What grows and is no number, such as a list whose length is read: a few forwards more.
    holders = (each.holder for each in changed)
    grows = ", ".join(dict.fromkeys(each.place for each in holders if len(each.content()) > sizes[id(each)]))
    for _ in range(MORE_FORWARDS if grows or held.has_iterators else 0):
        if (line := difference(computed())) is not None:
            raise kept_number(name, grows or "something outside of it", line)
    # Forwards from the numbers that later ones will have; one that the second forward left alone is no counter.
    numbers = [each for each, value in zip(numbers, values, strict=True) if each.now != value]
    for count in LATER if numbers else ():
        held.restore()
        for each in numbers:
            each.set(each.old + count * (each.new - each.old))
        try:
            found = computed()
        except Exception:  # such as a table that ends
            found = [], []
        if (line := difference(found)) is not None:
            raise kept_number(name, ", ".join(each.place for each in numbers), line)

    notes: tuple[str, ...] = ()
    if grows:
        notes = (
            f"The forward changes {grows}, which stays as it was at capture. It made no difference to the next "
            f"{MORE_FORWARDS + 1} forwards; a branch that a later one would take is never taken.",
        )
    if numbers:
        held.restore()
        if (line := decided_by(numbers, lambda: difference(computed()) is not None)) is not None:
            raise kept_number(name, ", ".join(each.place for each in numbers), line)
        notes += (
            f"The forward changes {', '.join(each.place for each in numbers)}, which stays as it was at capture: none "
            "of its values makes a difference to what is computed.",
        )
    return notes


def kept_tensor(model: str, place: str, line: SourceLine) -> Kept:
    return Kept(
        f"{model} keeps a tensor in {place} and computes with it in the next forward{line.where}. Outside of buffers "
        "it would start every step as the constructor left it. Register it, self.register_buffer('state', "
        "torch.zeros(8)), and write to it in place, self.state.copy_(new); what belongs to samples is a field of the "
        "batch.",
        file=line.file,
        line=line.number,
    )


def kept_number(model: str, places: str, line: SourceLine) -> Kept:
    return Kept(
        f"The forward of {model} changes {places} and computes with it{line.where}, and capture would repeat its "
        "present value in every step. Register it as a buffer, self.register_buffer('count', torch.zeros(())), change "
        "it in place, self.count += 1, and let torch.where choose by it.",
        file=line.file,
        line=line.number,
    )


def tensors_in(changed: Sequence[Change]) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the tensors that are held where something has changed, each with its place."""

    def search(value: Any, place: str, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
        if isinstance(value, torch.Tensor):
            yield place, value
        elif depth and not isinstance(value, _PLAIN):
            for inner, item in items_of(value, place) or ():
                yield from search(item, inner, depth - 1)

    for each in changed:
        yield from search(each.new, each.place, DEPTH)


@contextlib.contextmanager
def new_objects_alone() -> Iterator[None]:
    """Let the garbage collector look at what is made inside a `with` block alone, which takes it milliseconds."""
    is_mine = not gc.get_freeze_count()
    if is_mine:
        gc.freeze()
    try:
        yield
    finally:
        if is_mine:
            gc.unfreeze()


def are_left(made: Sequence[weakref.ref[torch.Tensor]]) -> bool:
    """Return True if somebody holds one of these tensors, and not only itself."""
    if any(each() is not None for each in made):
        gc.collect()
    return any(each() is not None for each in made)


def forget(made: Sequence[weakref.ref[torch.Tensor]]) -> None:
    """Take the tensors that are alive yet out of what holds them, where that is not among what `Held` restores."""
    for each in made:
        for holder in gc.get_referrers(tensor) if (tensor := each()) is not None else ():
            if isinstance(holder, dict):
                for key in list(holder):
                    if holder[key] is tensor:
                        del holder[key]
            elif isinstance(holder, (list, deque)):
                for at in reversed(range(len(holder))):
                    if holder[at] is tensor:
                        del holder[at]
            elif isinstance(holder, CellType):
                del holder.cell_contents
            elif hasattr(holder, "cache_clear"):
                holder.cache_clear()


# The operations that user's code runs, recorded as a graph with their shapes: what is known where no export is.
#
# Code that export cannot follow runs on random tensors before it becomes an opaque call. The recording has the branches
# that such a run took. Where the code takes a number from a tensor (`loss.item()`, `if loss > 1`), it has an operation,
# and another run may be given another number there, which shows the other branch.

_NUMBER = torch.ops.aten._local_scalar_dense.default
ITEM = torch.ops.aten.item.default
"""Operation of a recording that stands for everything that hands the value of a tensor to Python."""
_READS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__}
"""Methods that hand values to Python without an operation."""
_NUMBERS = names("item tolist numpy __bool__ __int__ __float__ __index__ __complex__ equal is_nonzero allclose")
"""Names of functions that hand a number to Python; one that is read inside of another function stays there."""
_SIZES: set[Any] = {torch.Tensor.shape.__get__, torch.Tensor.size, torch.Tensor.__len__, torch.Tensor.unbind}  # type: ignore[attr-defined]
_SIZES |= {torch.Tensor.numel, torch.Tensor.nelement, torch.numel, torch.unbind}
"""Functions that hand sizes to Python, which are values where values decide them."""
_HARMLESS = {
    *(torch.Tensor.__format__, torch.Tensor.__repr__),
    *(getattr(owner, name) for owner in (torch, torch.Tensor) for name in ("isfinite", "isnan", "isinf")),
}
"""Functions that print values, or ask what has the same answer for every loss that training goes on with."""


_TORCH = str(Path(torch.__file__).parent)
_CALLS = (__file__, f"{_TORCH}/_tensor.py", f"{_TORCH}/overrides.py")
"""Files between the code that asks for a size and the mode that is told."""
_SIZE = torch.ops.aten.sym_size.int


def _is_read_by_torch() -> bool:
    """Return True if a module of torch hands a number to Python: a size that its kernels believe, and no choice.

    Another number in its place would let a kernel write outside of its memory, as that of an LSTM does.
    """
    frame: Any = sys._getframe(2)
    while frame is not None and (frame.f_code.co_filename == __file__ or frame.f_code.co_filename.startswith(_TORCH)):
        if frame.f_code.co_filename.startswith(f"{_TORCH}/nn/"):
            return True
        frame = frame.f_back
    return False


def _has_size_of_values(func: Any, args: Sequence[Any]) -> bool:
    """Return True if the first size of what an operation returns depends on values, as that of a selection does."""
    if torch.Tag.dynamic_output_shape not in getattr(func, "tags", ()):
        return False
    masks = (torch.bool, torch.uint8)  # an index of whole numbers gives as many rows as it has
    return "index" not in str(func) or any(each is not None and each.dtype in masks for each in args[1])


@dataclass(frozen=True)
class Recording:
    """The operations that one run of a call consisted of."""

    flow: Dataflow
    given: tuple[fx.Node, ...]
    """The tensors that the call was given, in order."""
    returned: tuple[fx.Node, ...]
    """The tensors that it returned, and the new values of the buffers that it wrote."""
    reads: tuple[fx.Node, ...]
    """The operations that handed a number to Python, or a list of whole ones, in order; their value is what it got."""
    answers: Mapping[int, Any]
    """Numbers that the first reads were given in place of the tensors' own."""

    def answered(self, at: int, number: Any) -> dict[int, Any]:
        """Return the numbers for the same reads as here, and another one for the read `at`."""
        return {place: read.meta["val"] for place, read in enumerate(self.reads[:at])} | {at: number}


class Recorder(TorchDispatchMode):
    """Counts the FLOPs of code that runs inside a `with` block, and records its operations if it is given tensors.

    torch's `FlopCounterMode` puts hooks on modules, under which they can take no derivatives.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        compiles: bool,
        given: Sequence[torch.Tensor] | None = None,
        answers: Mapping[int, Any] | None = None,
        most: float = math.inf,
    ) -> None:
        """`compiles` says that the code compiles a part of itself, in which operations are not seen.

        `answers` are the numbers that Python is handed in place of the tensors' own, by their order. With these, more
        than `most` operations raise `RuntimeError`, since a number may be that of the turns of a loop.
        """
        super().__init__()
        self._answers, self._reads, self._left = answers or {}, list[fx.Node](), most
        self._sizes: dict[fx.Node, frozenset[int]] = {}
        """Sizes that values decide, of those operations that have some among what they were computed from."""
        self.function = "item"
        """Name of the function of torch that runs."""
        self.flops, self._compiles = 0.0, compiles
        self._graph, self._nodes, self._is_on = fx.Graph(), WeakTensorKeyDictionary(), given is not None
        self._given = [self._graph.placeholder(f"given_{at}") for at in range(len(given or ()))]
        for tensor, node in zip(given or (), self._given, strict=True):
            self._set(tensor, node)

    def ignore_compile_internals(self) -> bool:  # type: ignore[override]
        return self._compiles

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = args, kwargs
        result = func(*args, **kwargs)
        if (formula := flop_registry.get(getattr(func, "_overloadpacket", func))) is not None:
            self.flops += formula(*args, **kwargs, out_val=result)
        if self._is_on:
            self._left -= 1
            if self._left < 0:
                raise RuntimeError("more operations than a branch has")
            is_read = isinstance(result, (bool, int, float))
            if is_read and func is not _NUMBER:  # such as `torch.equal`
                args = (torch.empty((), dtype=torch.bool),)
                self._set(args[0], self._call(func, *given))
            if is_read:
                return self.read(args[0], result)
            node = self._call(func, args, kwargs)
            self._set(result, node)
            sizes = frozenset[int]().union(*(self._sizes.get(each, ()) for each in node.all_input_nodes))
            if _has_size_of_values(func, args):
                made = result[0] if isinstance(result, (list, tuple)) else result
                sizes |= set(made.shape[:1])
            if sizes:
                of_outputs = node.users if isinstance(result, (list, tuple)) else ()
                self._sizes |= dict.fromkeys([node, *of_outputs], sizes)
        return result

    def read(self, tensor: torch.Tensor | fx.Node, value: Any) -> Any:
        """Note that Python takes a value from a tensor, and return it, or the one to be given in its place."""
        node = self._call(ITEM, (tensor,), {})
        if self.function in _NUMBERS and not _is_read_by_torch():
            value = self._answers.get(len(self._reads), value)
            self._reads.append(node)
        node.meta["val"] = value
        return value

    def read_sizes(self, tensor: torch.Tensor, result: Any) -> Any:
        """Return what a function said of the size of a tensor, with those that values decide as they are to be."""
        sizes = self._sizes.get(self._nodes.get(tensor), frozenset())
        frame: Any = sys._getframe(2)
        while frame.f_code.co_filename in _CALLS:
            frame = frame.f_back
        if not sizes & set(tensor.shape) or frame.f_code.co_filename.startswith(_TORCH):
            return result

        def read(dim: int | None, size: int, is_asked: bool = True) -> int:
            """Return the size of a dim, or of all together."""
            target, args = (_SIZE, (tensor, dim)) if dim is not None else (torch.ops.aten.sym_numel.default, (tensor,))
            node = self._call(target, args, {})
            node.meta["val"] = torch.empty((), dtype=torch.long, device="meta")
            found = int(self.read(node, size))
            next(iter(node.users)).meta["is_asked"] = is_asked
            return found

        if isinstance(result, torch.Size):
            return _Shape(result, sizes, read)
        if isinstance(result, int):
            return read(tensor.shape.index(result) if result in sizes & set(tensor.shape) else None, result)
        if len(result) in sizes:  # the rows, as for a loop
            result = result[: read(0, len(result), False)]
            self._reads[-1].meta["is_loop"] = True
        return result

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Record inside a `with` block; it is entered beside the mode, since some reads of values are no operations."""
        with self, contextlib.nullcontext() if self._compiles else _Methods(self):
            yield

    def recording(self, returned: Sequence[torch.Tensor]) -> Recording:
        """Return what was recorded of code that returned these tensors."""
        results = tuple(self._node(tensor) for tensor in returned)
        order = {node: at for at, node in enumerate(self._graph.nodes)}
        none: frozenset[fx.Node] = frozenset()
        return Recording(
            Dataflow(order, {}, none, none, none, none, {}),
            tuple(self._given),
            results,
            tuple(self._reads),
            self._answers,
        )

    def _call(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> fx.Node:
        leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
        nodes = [self._node(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        plain = [
            leaf if isinstance(leaf, (fx.Node, *fx.node.base_types)) or leaf is None else str(leaf) for leaf in nodes
        ]
        taken = pytree.tree_unflatten(plain, structure)
        node = self._graph.create_node("call_function", func, *taken)
        line = line_of_running_code()
        node.meta["stack_trace"] = f'File "{line.file}", line {line.number}\n  {line.text}' if line.file else ""
        return node

    def _node(self, tensor: torch.Tensor) -> fx.Node:
        """Return the node of a tensor; one that the code found elsewhere is a constant."""
        node = self._nodes.get(tensor)
        if node is None:
            node = self._graph.create_node("get_attr", "constant")
            self._set(tensor, node)
        return node  # type: ignore[no-any-return]

    def _set(self, result: Any, node: fx.Node) -> None:
        """Note that an operation returned a tensor, or several in a list."""
        if isinstance(result, torch.Tensor):
            self._nodes[result] = node
            with contextlib.suppress(RuntimeError):  # a nested tensor has no shape
                node.meta["val"] = torch.empty(result.shape, dtype=result.dtype, device="meta")
        elif isinstance(result, (list, tuple)):
            values = []
            for at, each in enumerate(result):
                item = self._graph.call_function(operator.getitem, (node, at))
                self._set(each, item)
                values.append(item.meta.get("val"))
            node.meta["val"] = values
        else:
            node.meta["val"] = result


class _Shape(tuple[int, ...]):
    """The shape of a tensor, of which code asks a size that values decide, or takes them all, as `n, d = x.shape`."""

    _sizes: Collection[int]
    _read: Callable[..., int]

    def __new__(cls, shape: Sequence[int], sizes: Collection[int], read: Callable[..., int]) -> _Shape:
        self = super().__new__(cls, shape)
        self._sizes, self._read = sizes, read
        return self

    def __getitem__(self, at: Any) -> Any:
        size = super().__getitem__(at)
        return self._read(range(len(self))[at], size) if isinstance(size, int) and size in self._sizes else size

    def __iter__(self) -> Iterator[int]:
        sizes = enumerate(super().__iter__())
        return (self._read(dim, size, False) if size in self._sizes else size for dim, size in sizes)

    def numel(self) -> int:
        return math.prod(self)


class _Methods(TorchFunctionMode):
    """Tells a recorder of methods that are no operations."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.data.__get__:  # type: ignore[attr-defined]
            return args[0].detach()  # with the version of the tensor, so that writes are noticed
        recorder, before = self._recorder, self._recorder._is_on
        recorder._is_on, recorder.function = before and func not in _HARMLESS, getattr(func, "__name__", "")
        try:
            result = func(*args, **(kwargs or {}))
        finally:
            recorder._is_on, recorder.function = before, "item"
        if not before:
            return result
        if func in _SIZES:
            return recorder.read_sizes(args[0], result)
        if func not in _READS:
            return result
        if args[0].is_floating_point() or args[0].is_complex():
            recorder._call(ITEM, (args[0],), {})
            return result
        is_list = func is torch.Tensor.tolist
        taken = result if is_list else result.tolist()
        given = recorder.read(args[0], taken)
        if given is taken:
            return result
        return given if is_list else sys.modules["numpy"].array(given, dtype=result.dtype)
