"""The identity of user-defined code: the functions that a callable refers to, and the values that they read.

Pickle sends classes and functions of modules by their name, so that other processes import their files, which may have
been edited since. `identity` tells what they hold in this process. By it, processes are compared with each other and
with the files on disk.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import enum
import functools
import hashlib
import importlib
import importlib.util
import inspect
import itertools
import json
import os
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.machinery import SourceFileLoader
from pathlib import Path, PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, NamedTuple

from workbench.base.display import place
from workbench.base.user_code import is_users, name_of, stored_name

FUNCTIONS = "functions.json"
"""File in `code/` with the identity of each user-defined part in the process that started the run."""
IMPORTED = "imported.json"
"""File in `code/` with the same of the first rank of the run, which had imported the code and run none of it."""
LEAVES, DEPTH = 64, 3
"""Entries of a dict or object, and levels of them, up to which each value is a definition of its own."""
LONG = 64
"""Items from which on a list of plain values is hashed as a whole."""
LEAST_HASH = 2**31
"""Size from which on a number may be a hash, and none that is chosen, such as a number of hash functions."""
FEW = 4
"""Numbers of an array that are shown."""
LONGEST_TEXT = 60
"""Letters of a value in words."""


@dataclass(frozen=True)
class Definition:
    """A function of the user, or a value that user-defined code reads, as it stands in memory."""

    digest: str
    """Hash of a value, or of a function's compiled code: the same for other comments, names of files and lines."""
    file: str = field(compare=False)
    line: int = field(compare=False)
    """0 for a value."""
    qualname: str
    """Name in its file: `Net.forward`, `RATE`, `Net.scale`, `CONFIG['rate']`, `schedule(rate)` for a default."""
    module: str
    """The module that defined it: another than that of its class for a method that was replaced."""
    text: str | None = field(default=None, compare=False)
    """A value in words; None for a function."""
    is_steady: bool = False
    """True for a plain value that none of the functions seems to write."""
    is_certain: bool = field(default=False, compare=False)
    """True for a value that other processes must have, too (`compared_with_files`)."""


def identity(value: Any, *, held: bool = True) -> dict[str, Definition]:
    """Return every definition of the user that decides what a callable computes, by module and name.

    Two callables with equal results compute the same under the same versions of installed libraries, as far as this is
    known without running them. The result is the same in every process. It takes milliseconds, and about a second for
    each gigabyte of tensors and arrays. No code of the user's is executed, but for the import of modules that a
    function would import when it is called.

    Covered are, transitively: functions, classes with their bases and attributes, methods, closures, defaults,
    decorators, bound arguments, and what functions read of the modules that they name: numbers, text, containers,
    enums, dataclasses, objects, arrays and tensors by value, modules and functions of libraries by name. Of a class
    count the members that some function names (in text, too, for `getattr`), special methods, and what overrides a
    member of a library's class. `held=False` leaves out the values that bound arguments and callable objects hold,
    which pickle sends along.

    Not covered are: code of installed libraries; names that are put together when the code runs
    (`getattr(self, f"layer{i}")`); what is read from files, the environment, the clock or generators when it runs; and
    the content of what cannot be taken apart, of which the type counts (locks, open files, generators, most types of
    extension modules), or the name of its file (arrays that are mapped into memory).
    """
    walk = _Walk(held)
    walk.visit(value)
    return walk.definitions()


def fingerprint(values: Iterable[Any]) -> str | None:
    """Return a hash of all that some callables and objects of the user compute with.

    It is the same in every process. Beyond `identity`, every member of a class counts and all that the user's modules
    define, so that names which are put together when the code runs are covered. The lines of functions count, since
    sentences about a model name them. Functions that the user put in place of a library's count where the library's
    class is one of the values. The result is None if something cannot be told: a value of which the type alone is
    known, names that are looked up by text (`eval`, `globals`), or the clock.
    """
    walk, digests = _Walk(held=True, whole=True), list[str]()
    for value in values:
        walk.visit(value)
        digests.append(walk.digest_of(value))
    found = walk.definitions()
    if walk.is_uncertain:
        return None
    words = [f"{name} {each.digest} {place(each.file, each.line) if each.line else ''}" for name, each in found.items()]
    return _hashed(sys.implementation.cache_tag or "", *digests, *sorted(words))


def put_into_libraries(packages: Iterable[str]) -> list[Any]:
    """Return the functions and classes of the user that modules of installed packages hold, as a patch leaves them.

    Registers of functions are seen, too: dicts, and objects that hold one, among the globals of a module. It takes some
    ten milliseconds, for thousands of modules.
    """
    roots, found, homes = {*packages}, dict[int, Any](), dict[str, bool]()

    def look(value: Any) -> None:
        home = value.__module__ if type(value) is type else value.__code__.co_filename
        if homes.get(home) is None:
            homes[home] = _is_put_into(value)
        if homes[home] or (type(value) is FunctionType and value.__dict__ and _is_put_into(value)):
            found[id(value)] = value

    for name, module in list(sys.modules.items()):
        is_asked = name.partition(".")[0] in roots and type(module) is ModuleType
        if not is_asked or name.startswith(_COMPILERS) or _is_users_module(name):
            continue
        for value in list(vars(module).values()):
            of_type = type(value)
            if of_type is FunctionType or of_type is type:
                look(value)
            elif of_type in _HOLDERS or of_type.__module__ == name:
                held = [value] if of_type in _HOLDERS else [*vars(of_type).values(), *_attributes(value).values()]
                registers = [each.values() for each in held if type(each) in _HOLDERS]
                for each in list(itertools.chain.from_iterable(registers)):
                    if type(each) is FunctionType or type(each) is type:
                        look(each)
    return list(found.values())


def bindings(owner: type | ModuleType) -> dict[str, str]:
    """Return what a module or a class of a library calls by each name, and its plain values: a patch changes one.

    Functions that another function of a library made are left out: `transformers` leaves one in `nn.Module`.
    """
    found = dict[str, str]()
    plain = [each for each in _PLAIN if each is not str or _is_a(owner, type)]  # `transformers` draws a module's text
    for name, value in list(vars(owner).items()):
        function = value.__func__ if type(value) in (staticmethod, classmethod) else value
        if _is_a(function, (FunctionType, BuiltinFunctionType, type)):
            if "<locals>" not in (named := _named(function)):
                found[name] = named
        elif type(value) in plain and not name.startswith("__"):
            found[name] = repr(value)
    return found


def _is_put_into(value: Any) -> bool:
    """Return True for a function, a method or a class of the user, which a library holds."""
    if type(value) is FunctionType:
        own = value.__code__.co_filename
        return (is_users(own) and own[0] != "<") or _is_put_into(vars(value).get("__wrapped__"))
    if type(value) in (staticmethod, classmethod, MethodType):
        return _is_put_into(value.__func__)
    return type(value) is type and _is_of_user(value)


_READS = ("LOAD_GLOBAL", "LOAD_NAME")
_CHANGING = frozenset({"append", "extend", "insert", "add", "update", "setdefault", "pop", "clear", "remove"})
"""Names of methods that change a container."""
_HOLDERS = (dict, OrderedDict)
"""Types of the registers in a module's globals."""
_COMPILERS = tuple(f"torch.{each}" for each in ("_inductor", "_dynamo", "distributed", "testing", "onnx", "_export"))
"""Packages of torch whose functions no forward calls."""
_BY_TEXT = frozenset({"eval", "exec", "globals", "__import__"})
"""Builtins that find what they need by text."""
_OF_PROCESS = frozenset(
    {"get_rank", "get_world_size", "get_node_local_rank", "process_index", "local_process_index", "device_count"}
    | {"get_num_threads", "cpu_count", "getpid", "gethostname", "mem_get_info"}
)
"""Names of functions and attributes that say something else in another process."""
_UNSTEADY = frozenset({"time", "datetime", "secrets", "uuid", "importlib"})
"""Modules whose functions return something else each time, or import by text."""
_NOT_READ = frozenset({"_abc_impl", "__doc__", "__module__", "__dict__", "__weakref__"})
"""Members of a class that no code reads."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CODE = (FunctionType, staticmethod, classmethod, property, functools.cached_property)
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)


class _Walk:
    """A walk over code and the values that it reads, without recursion: chains of calls may be long."""

    def __init__(self, held: bool, whole: bool = False) -> None:
        self._held, self._whole = held, whole
        self.is_uncertain = False
        """True if the type alone of something counts, or code looks names up by text."""
        self._found: dict[str, Definition] = {}
        self._waiting: list[tuple[Any, str]] = []
        self._seen: dict[int, Any] = {}
        self._classes: list[type] = []
        self._names = {"forward"}
        self._written: set[str] = set()
        """Names of globals and attributes that some function writes."""
        self._changing: set[str] = set()
        """Names of globals that some function reads which changes a container."""
        self._digests = _Digests()

    def visit(self, value: Any, name: str = "") -> None:
        """Let a value wait until it is searched for code; `name` is that of a function in its class."""
        if type(value) not in _PLAIN and id(value) not in self._seen:
            self._seen[id(value)] = value  # kept, so that no other object gets its id
            self._waiting.append((value, name))

    def definitions(self) -> dict[str, Definition]:
        """Follow all that waits, and return what was found."""
        before = -1
        while before < len(self._seen):
            before = len(self._seen)
            while self._waiting:
                self._follow(*self._waiting.pop())
            for each in list(self._classes):
                self._members(each)
        return {name: replace(each, is_steady=self._is_steady(each)) for name, each in self._found.items()}

    def digest_of(self, value: Any) -> str:
        """Return the hash of a value."""
        digest, is_known = self._digests.of(value)
        self.is_uncertain |= not is_known
        return digest

    def _is_steady(self, each: Definition) -> bool:
        root, bracket, _ = each.qualname.partition("[")
        written = self._written | (self._changing if bracket else set())
        return each.is_steady and not {root, root.rpartition(".")[2]} & written

    def _follow(self, value: Any, name: str) -> None:
        of_type = type(value)
        if issubclass(of_type, functools.partial):
            self._bound(
                f"{name_of(value)}()", {**{str(at): each for at, each in enumerate(value.args)}, **value.keywords}
            )
            for part in (value.func, *value.args, *value.keywords.values()):
                self.visit(part)
        elif issubclass(of_type, MethodType):
            self._bound(f"{type(value.__self__).__qualname__}()", value.__self__)
            self.visit(value.__func__)
            self.visit(value.__self__)
        elif of_type is FunctionType:
            self._function(value, name)
        elif of_type in (staticmethod, classmethod):
            self.visit(value.__func__, name)
        elif of_type is property:
            for accessor in (value.fget, value.fset):
                self.visit(accessor, name)
        elif of_type is functools.cached_property:
            self.visit(value.func, name)
        elif issubclass(of_type, type):
            if _is_of_user(value):
                bases = [_named(base) for base in value.__bases__]
                self._add(value.__module__, value.__qualname__, _hashed(*bases), f"a class of {', '.join(bases)}")
                self._classes.append(value)
                for base in (*value.__bases__, of_type):
                    self.visit(base)
            elif self._whole and _named(value).partition(".")[0] not in sys.stdlib_module_names:
                for base in value.__mro__:
                    for member in list(vars(base).values()):
                        if _is_put_into(member):
                            self.visit(member)
        elif issubclass(of_type, (*_CONTAINERS, MappingProxyType)):
            items = _items(value)
            if _holds_code(items):
                for item in reversed(items):
                    self.visit(item)
            self.visit(of_type)
        elif of_type is not ModuleType:
            wrapped = inspect.getattr_static(value, "__wrapped__", None)  # of a cached function, for instance
            if wrapped is not None:
                self.visit(wrapped, name)
            elif callable(value) and of_type is not BuiltinFunctionType:
                self._bound(f"{of_type.__qualname__}()", value)
            self.visit(of_type)
            if of_type.__module__.partition(".")[0] not in sys.stdlib_module_names:
                self.visit(list(_attributes(value).values()))

    def _members(self, owner: type) -> None:
        """Visit the members of a class that count by now."""
        libraries = [base for base in owner.__mro__ if base is not object and not _is_of_user(base)]
        for name, member in list(vars(owner).items()):
            is_special, is_code = name.startswith("_") and name.endswith("_"), _is_a(member, _CODE)
            overrides = any(name in vars(base) for base in libraries) and (is_code or not name.startswith("_"))
            counts = name in self._names or (self._whole and name not in _NOT_READ)
            if (is_special and is_code) or counts or overrides:
                qualname = f"{owner.__qualname__}.{name}"
                if is_code or _is_a(member, type):
                    self.visit(member, f"{owner.__module__}.{qualname}")
                elif not is_special:
                    self._read(owner.__module__, qualname, member)

    def _function(self, function: FunctionType, name: str) -> None:
        wrapped = getattr(function, "__wrapped__", None)
        if wrapped is not None and id(wrapped) not in self._seen:  # which has the name, and its decorator another
            self._waiting.append((function, name))
            self.visit(wrapped, name)
            return
        code, module, own = function.__code__, str(function.__module__), function.__qualname__
        cells = dict[str, Any]()
        for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # it is empty
                cells[variable] = cell.cell_contents
        if not _is_code_of_user(function):  # a decorator of a library, perhaps around a function of the user
            for content in cells.values():
                if _is_a(content, (*_CONTAINERS, MappingProxyType, FunctionType, MethodType, functools.partial)):
                    self.visit(content)
            return
        name = name or f"{module}.{own}"
        loader = getattr(getattr(sys.modules.get(module), "__spec__", None), "loader", None)
        if (
            self._whole or loader is None or type(loader) is SourceFileLoader
        ):  # others, such as pytest's, compile something else
            while name in self._found:
                name, own = f"{name}'", f"{own}'"
            at = code.co_filename, code.co_firstlineno, code.co_qualname
            digest = _code_digest(code, with_lines=self._whole)
            self._found[name] = Definition(digest, *at, module)
        # What it names, may write, reads and imports
        facts = _facts(code)
        named, read = set(facts.named), set(facts.read)
        if "globals" in read:
            read |= named
        self.is_uncertain |= not (_BY_TEXT.isdisjoint(read) and _OF_PROCESS.isdisjoint(named))
        self._names |= named
        self._written |= facts.written
        if facts.changes:
            self._changing |= read
        for variable in sorted(read & function.__globals__.keys()):
            value = function.__globals__[variable]
            self._read(module, variable, value)
            if _is_a(value, ModuleType):
                self._of_module(value, named)
        for imported in _imported(facts.imports, function.__globals__.get("__package__") or ""):
            self._of_module(imported, named)
        # What it is bound to
        parameters = code.co_varnames[: code.co_argcount]
        defaults = dict(zip(reversed(parameters), reversed(function.__defaults__ or ()), strict=False))
        for parameter, value in {**defaults, **(function.__kwdefaults__ or {})}.items():
            self._read(module, f"{own}({parameter})", value)
        for variable, value in {**cells, **vars(function)}.items():
            if variable != "__wrapped__":
                self._read(module, f"{own}.{variable}", value)

    def _of_module(self, module: ModuleType, named: set[str]) -> None:
        """Take up what `named` names of a module; of a library's, only functions that the user replaced."""
        is_of_user = _is_users_module(module.__name__)
        self.is_uncertain |= module.__name__ in _UNSTEADY
        if self._whole and is_of_user and module.__name__ != "__main__":  # names may be put together
            named = {name for name in vars(module) if not name.startswith("__")}
        for name in sorted(named & vars(module).keys()):
            member = vars(module)[name]
            if _is_a(member, ModuleType):
                if member is not module and _is_users_module(member.__name__):
                    self._of_module(member, named - {name})
            elif is_of_user:
                self._read(module.__name__, name, member)
            elif _is_a(member, (FunctionType, type)):
                self.visit(member)

    def _read(self, module: str, name: str, value: Any) -> None:
        """Take up a value that code reads, and the code in it. A function under its own name has that definition."""
        if f"{module}.{name}" not in self._found:
            if _is_a(value, (BuiltinFunctionType, type)):
                self.is_uncertain |= value.__module__ in _UNSTEADY
            if not (_is_a(value, (FunctionType, type)) and _named(value) == f"{module}.{name}"):
                for leaf, part, text, may_change in _leaves(name, value, DEPTH):
                    is_steady = type(part) in _PLAIN and not may_change
                    self._add(module, leaf, self.digest_of(part), text, is_steady)
            self.visit(value)

    def _bound(self, name: str, value: Any) -> None:
        """Take up what a callable is bound to."""
        if self._held:
            while name in self._found:
                name += "'"
            for leaf, part, text, _ in _leaves(name, value, DEPTH):
                self._add("", leaf, self.digest_of(part), text)

    def _add(self, module: str, name: str, digest: str, text: str, is_steady: bool = False) -> None:
        file = getattr(sys.modules.get(module), "__file__", None) or ""
        key = f"{module}.{name}" if module else name
        self._found.setdefault(key, Definition(digest, file, 0, name, module, text, is_steady))


class _Facts(NamedTuple):
    """Names in the code of a function and of those inside it."""

    named: frozenset[str]
    """Globals, attributes, and text that may name one."""
    read: frozenset[str]
    """Globals that it reads."""
    written: frozenset[str]
    """Globals and attributes that it writes."""
    changes: bool
    """True if it may change a container."""
    imports: tuple[tuple[int, str, tuple[str, ...]], ...]
    """Level, module and names of each import that it executes."""


@functools.lru_cache(maxsize=4096)
def _facts(code: CodeType) -> _Facts:
    named, read, written, imports, changes = set[str](), set[str](), set[str](), [], False
    for inner in _nested(code):
        named |= {*inner.co_names}
        named |= {each for each in inner.co_consts if type(each) is str and each.isidentifier()}
        before: list[Any] = [0, ()]  # level and names stand before the instruction
        for each in dis.get_instructions(inner):
            if each.opname in _READS:
                read.add(each.argval)
            elif each.opname in ("STORE_GLOBAL", "STORE_ATTR"):
                written.add(each.argval)
            elif each.opname in ("STORE_SUBSCR", "DELETE_SUBSCR"):
                changes = True
            elif each.opname == "IMPORT_NAME":
                imports.append((before[0], each.argval, before[1] or ()))
            before = [before[1], each.argval]
    changes = changes or bool(_CHANGING & named)
    return _Facts(frozenset(named), frozenset(read), frozenset(written), changes, tuple(imports))


def _imported(imports: Iterable[tuple[int, str, tuple[str, ...]]], package: str) -> Iterator[ModuleType]:
    """Yield the modules of the user that a function of a package imports when it is called."""
    for level, module, names in imports:
        with contextlib.suppress(Exception, SystemExit):  # the function itself will tell
            name = importlib.util.resolve_name("." * level + module, package) if level else module
            root = name.partition(".")[0]
            spec = getattr(sys.modules.get(root), "__spec__", None) or importlib.util.find_spec(root)
            folders = list(getattr(spec, "submodule_search_locations", None) or ())
            file = getattr(spec, "origin", None) or next(iter(folders), "")  # a package without an __init__.py
            if file and is_users(file):
                found = importlib.import_module(name)
                yield sys.modules[root]
                yield found
                for inner in names:
                    if not hasattr(found, inner):
                        yield importlib.import_module(f"{name}.{inner}")


def _is_users_module(module: str) -> bool:
    file = getattr(sys.modules.get(module), "__file__", None)
    return module == "__main__" or (bool(file) and is_users(file))


def _is_of_user(of_type: type) -> bool:
    return _is_users_module(of_type.__module__)


def _is_code_of_user(function: FunctionType) -> bool:
    """Return True for code of the user's, that of a text included: `python -c`, or a call of `exec` or `eval`.

    Libraries make code from texts as well. What `dataclass` makes for the user's classes follows from their fields.
    """
    code = function.__code__
    if code.co_filename != "<string>":
        return is_users(code.co_filename)
    home = function.__globals__.get("__file__")
    return not code.co_qualname.startswith("__create_fn__") and (type(home) is not str or is_users(home))


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if _is_a(constant, CodeType):
            yield from _nested(constant)


def _code_digest(code: CodeType, with_lines: bool = False) -> str:
    lines = [(inner.co_firstlineno, inner.co_linetable) for inner in _nested(code)] if with_lines else ""
    return hashlib.sha256(f"{_of_code(code)!r}{lines or ''}".encode()).hexdigest()[:16]


_HAS_DOCSTRING = 0x4000000
"""Flag of code with a docstring, from Python 3.13 on; before, the first constant is one or None."""


def _of_code(code: CodeType) -> tuple[Any, ...]:
    """Return what a code object computes, without its docstring, its file and its lines."""
    constants = [_of_constant(value) for value in code.co_consts]
    has_docstring = sys.version_info < (3, 13) or code.co_flags & _HAS_DOCSTRING
    if has_docstring and code.co_consts and _is_a(code.co_consts[0], str):
        constants[0] = None
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    flags = code.co_flags & ~_HAS_DOCSTRING
    return code.co_code, constants, names, code.co_argcount, code.co_kwonlyargcount, flags


def _of_constant(value: Any) -> Any:
    if _is_a(value, CodeType):
        return _of_code(value)
    if _is_a(value, frozenset):  # whose order differs between processes
        return sorted(map(repr, value))
    return [_of_constant(item) for item in value] if _is_a(value, tuple) else value


# Values


def _leaves(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any, str, bool]]:
    """Yield the parts of a value: name, part, words, and True for the attributes of an object, which may change."""
    entries = dict[str, Any]()
    if type(value) is dict and len(value) <= LEAVES and all(type(key) is str for key in value):
        entries = {f"{name}[{key!r}]": item for key, item in value.items()}
    elif _is_of_user(type(value)) and not _is_a(value, (type, enum.Enum, *_CONTAINERS)):
        entries = {f"{name}.{key}": item for key, item in _attributes(value).items()}
    if not entries or not depth or len(entries) > LEAVES:
        yield name, value, _in_words(value), False
        return
    names = [each.removeprefix(name) for each in entries]
    yield name, (type(value), *names), f"{_an(type(value).__name__)} of {', '.join(names)}", True
    for inner, item in entries.items():
        for leaf, part, text, may_change in _leaves(inner, item, depth - 1):
            yield leaf, part, text, may_change or type(value) is not dict


class _Digests:
    """Hashes of values, equal in every process, each computed once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[str, bool]] = {}
        self._alive: list[Any] = []

    def of(self, value: Any) -> tuple[str, bool]:
        """Return the hash of a value, and False if only the type counts of something in it."""
        of_type = type(value)
        if of_type in _PLAIN:
            return _hashed(of_type.__name__, hex(value) if of_type is int else repr(value)), True
        if id(value) not in self._known:
            self._alive.append(value)  # so that no other object gets its id
            self._known[id(value)] = "inside of itself", True
            try:
                found, is_known = self._taken_apart(value)
            except Exception:  # proxies, mocks and types of extension modules may raise anything; nesting has an end
                found, is_known = [], False
            self._known[id(value)] = _hashed(_named(of_type), *found), is_known
        return self._known[id(value)]

    def _all(self, *parts: Any) -> tuple[list[str], bool]:
        digests = [self.of(part) for part in parts]
        return [found for found, _ in digests], all(is_known for _, is_known in digests)

    def _taken_apart(self, value: Any) -> tuple[Iterable[str], bool]:
        """Return what a value consists of beside its type, as text, and True if that is all of it."""
        of_type = type(value)
        attributes = _attributes(value)
        if _is_a(value, enum.Enum):
            return [value.name], True
        if of_type in (list, tuple, dict) and len(value) >= LONG:
            with contextlib.suppress(TypeError, ValueError, RecursionError):  # it holds more than plain values
                return [json.dumps(value)], True
        # Code, by its name
        if _is_a(value, ModuleType):
            return [value.__name__], True
        if _is_a(value, FunctionType):
            return [_named(value), _code_digest(value.__code__) if _is_code_of_user(value) else ""], True
        if _is_a(value, type):
            return [_named(value)], True
        if _is_a(value, (MethodType, BuiltinFunctionType)):
            owner = value.__self__
            found, is_known = ([], True) if owner is None or _is_a(owner, (ModuleType, type)) else self._all(owner)
            return [_named(value), *found], is_known
        if _is_a(value, functools.partial):
            return self._all(value.func, value.args, dict(value.keywords))
        if (wrapped := inspect.getattr_static(value, "__wrapped__", None)) is not None:
            return self._all(wrapped)
        # Numbers
        if hasattr(of_type, "untyped_storage"):
            return [str(value.dtype), str(tuple(value.shape)), str(value.requires_grad), _bytes_of_tensor(value)], True
        if hasattr(of_type, "__array_interface__"):
            described = [str(value.dtype.descr), str(value.shape)]
            if (file := getattr(value, "filename", None)) is not None:  # it may be larger than the memory
                return [*described, str(file), str(value.offset)], True
            if not value.dtype.hasobject:
                return [*described, hashlib.sha256(value.tobytes()).hexdigest()], True
            found, is_known = self._all(value.tolist())
            return [*described, *found], is_known
        # Containers, and what classes derived from them hold beside
        for builtin in _CONTAINERS:
            if issubclass(of_type, builtin):
                items = list(builtin.__iter__(value))
                found, is_known = self._all(*items, *(dict.values(value) if builtin is dict else ()))
                more, are_known = self._all(attributes) if attributes else ([], True)
                in_order = sorted(found) if builtin in (set, frozenset) else found
                return [str(len(items)), *in_order, *more], is_known and are_known
        for plain in (str, bytes, int, float, complex):
            if issubclass(of_type, plain):
                return self._all(plain(value), attributes)
        # Objects: those of the user by their attributes, those of libraries if their attributes, or what they say for
        # their pickle, are all of them
        if _is_of_user(of_type):
            return self._all(attributes)
        library = of_type.__module__.partition(".")[0]
        found, is_known = list[str](), False
        if attributes and all(getattr(of_type, each, None) is getattr(object, each, None) for each in _PICKLED):
            # What an object notes of its hash (`_original_object_hash` of transformers) is another in every process.
            noted = {k for k, v in attributes.items() if type(v) is int and "hash" in k and abs(v) >= LEAST_HASH}
            found, is_known = self._all({k: v for k, v in attributes.items() if k not in noted})
        elif library in sys.stdlib_module_names or library in _SAY_THEIR_CONTENT:
            reduced = value.__reduce_ex__(4)
            items = [] if _is_a(reduced, str) else [list(each) for each in reduced[3:5] if each is not None]
            found, is_known = self._all(*([reduced] if _is_a(reduced, str) else reduced[:3]), *items)
        return (found, True) if is_known else ([str(getattr(value, "__name__", ""))], False)


_PICKLED = ("__reduce_ex__", "__reduce__", "__getstate__")
_SAY_THEIR_CONTENT = ("numpy", "torch", "pandas", "tokenizers")
"""Libraries whose extension types give their content to pickle, and quickly, beside Python's own."""


def _is_a(value: Any, types: Any) -> bool:
    """Return what `isinstance` does, without asking the value, which may raise or say something else."""
    return issubclass(type(value), types)


def _items(value: Any) -> list[Any]:
    """Return what a container holds, without the keys of a dict; classes derived from it are not asked."""
    if type(value) is MappingProxyType:
        return list(value.values())
    builtin = next(each for each in _CONTAINERS if _is_a(value, each))
    return list(dict.values(value) if builtin is dict else builtin.__iter__(value))


def _holds_code(items: Iterable[Any]) -> bool:
    """Return False for plain values, tensors and arrays, and dicts and lists of these: the items of a dataset, say."""
    types = set(map(type, items))
    if types <= {dict, list, tuple}:
        inner = (each.values() if type(each) is dict else each for each in items)
        types = set(map(type, itertools.chain.from_iterable(inner)))
    return any(each not in _PLAIN and each.__module__ not in ("torch", "numpy") for each in types)


def _hashed(*words: str) -> str:
    return hashlib.sha256("\0".join(words).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _named(value: Any) -> str:
    """Return the module and the name of a class or function."""
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", "")
    return f"{stored_name(str(getattr(value, '__module__', '')))}.{name}"


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes that an object holds itself."""
    found = dict[str, Any]()
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        for slot in (slots,) if _is_a(slots, str) else tuple(slots):
            with contextlib.suppress(Exception):
                found[slot] = object.__getattribute__(value, slot)
    with contextlib.suppress(Exception):
        found |= object.__getattribute__(value, "__dict__")
    found.pop("__dict__", None)
    found.pop("__weakref__", None)
    return found


def _bytes_of_tensor(tensor: Any) -> str:
    if tensor.device.type == "meta":
        return ""
    data = tensor.detach().cpu()
    data = data.int_repr() if data.is_quantized else data if str(data.layout) == "torch.strided" else data.to_dense()
    octets = data.resolve_conj().resolve_neg().contiguous().reshape(-1).view(sys.modules["torch"].uint8)
    return hashlib.sha256(octets.numpy()).hexdigest()


def _in_words(value: Any) -> str:
    """Return a value itself if it is plain and short, else its type and size."""
    of_type, text = type(value), ""
    with contextlib.suppress(Exception):
        if _is_a(value, (FunctionType, BuiltinFunctionType, type)):
            text = _named(value)
        elif _is_a(value, ModuleType):
            text = f"module {value.__name__}"
        elif of_type in _PLAIN or (of_type in (list, tuple, dict, set) and {*map(type, value)} <= {*_PLAIN}):
            text = repr(sorted(value, key=repr) if of_type is set else value)
        elif _is_a(value, enum.Enum):
            text = f"{of_type.__name__}.{value.name}"
        elif _is_a(value, PurePath):
            text = repr(str(value))
        elif hasattr(of_type, "shape") and hasattr(of_type, "dtype"):
            is_short = len(value.shape) <= 1 and sum(value.shape) <= FEW
            text = f"{_an(of_type.__name__)} of {tuple(value.shape)}, {value.dtype}"
            if is_short:
                given = value.reshape(-1).tolist()
                numbers = [f"{each:.6g}" if type(each) in (int, float) else str(each) for each in given]
                text = f"[{', '.join(numbers)}]" if value.shape else numbers[0]
        elif hasattr(of_type, "__len__"):
            text = f"{_an(of_type.__name__)} of {len(value):,}"
    text = text or _an(of_type.__name__)
    return text if len(text) <= LONGEST_TEXT else f"{text[: LONGEST_TEXT - 1]}…"


def _an(noun: str) -> str:
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"


# Identities in a run directory, and what differs between two of them


def identities_json(
    parts: Mapping[str, Mapping[str, Definition]], more: Mapping[str, Any] = MappingProxyType({})
) -> bytes:
    """Return the content of `FUNCTIONS` or `IMPORTED`, with the parts of another one."""
    rows = {
        part: {name: list(vars(each).values()) for name, each in definitions.items()}
        for part, definitions in parts.items()
    }
    return json.dumps({**more, **rows, "python": sys.implementation.cache_tag}).encode()


def read_identities(file: Path) -> dict[str, dict[str, Definition]]:
    """Return the identity of each part that `identities_json` wrote; none without its file, or for another Python."""
    try:
        found = json.loads(file.read_bytes())
        if found.pop("python") != sys.implementation.cache_tag:
            return {}
        return {part: {name: Definition(*each) for name, each in rows.items()} for part, rows in found.items()}
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return {}


def steady_digests(code: Path) -> dict[str, str]:
    """Return a hash of the identity of each part in the folder `code/` of a run, for another run of the same code.

    What was another in the process that started the run and in its first rank is left out.
    """
    launched, imported = read_identities(code / FUNCTIONS), read_identities(code / IMPORTED)
    digests = dict[str, str]()
    for part, definitions in imported.items():
        alike = {name for name, each in definitions.items() if launched.get(part, {}).get(name, each) == each}
        words = [f"{name} {definitions[name].digest}" for name in sorted(alike)]
        digests[part] = _hashed(sys.implementation.cache_tag or "", *words)
    return digests


def compared_with_files(definitions: Mapping[str, Definition], imported_after: float) -> dict[str, Definition]:
    """Return the definitions, with marks at those values that other processes must have, too.

    They are written down in their files as they are, or they are plain, written down or computed from others, and their
    file was modified later than `imported_after`, in Unix seconds. Another value may have been set from elsewhere.
    """
    marked = dict(definitions)
    for name, each in definitions.items():
        if each.text is not None and each.file and (found := _InFile.read(each.file)) is not None:
            is_literal = found.written.get(each.qualname, ("", "", 0))[0] == each.digest
            is_edited = each.is_steady and found.modified > imported_after
            is_bound = each.qualname in found.written or each.qualname in found.computed
            marked[name] = replace(each, is_certain=is_literal or (is_edited and is_bound))
    return marked


def changed_on_disk(definitions: Mapping[str, Definition]) -> list[str]:
    """Return a clause for each definition that its file holds otherwise by now; nothing is executed.

    Functions are compared by their code, and values with a mark if the file writes them down. What the main module
    defines is pickled itself, but for methods that it replaced in classes of other modules.
    """
    changed = list[str]()
    for name, each in definitions.items():
        if name.startswith("__main__.") or not each.file:
            continue
        found = _InFile.read(each.file)
        if each.text is None:
            known = None if found is None else found.functions.get(each.qualname, ())
            if each.module == "__main__" or (known is not None and each.digest not in known):
                changed.append(f"{name} at {place(each.file, each.line)} is not what its file holds")
        elif found is not None and each.qualname in found.written:
            digest, text, line = found.written[each.qualname]
            if each.is_certain and digest != each.digest:
                changed.append(f"{name} at {place(each.file, line)} {_is(text, each.text, ' in its file')}")
    return changed


def changed_between(before: Mapping[str, Definition], now: Mapping[str, Definition]) -> list[str]:
    """Return a clause for each definition that differs between two processes, of which one may have run the code.

    Functions count that both have, values with a mark, and plain ones that the file writes down as they are now.
    """
    changed = list[str]()
    for name, each in before.items():
        other = now.get(name)
        if other is None or other.digest == each.digest:
            continue
        if each.text is None or other.text is None:
            changed.append(f"{name} at {place(other.file, other.line)} has other code now")
        elif each.is_steady:
            digest, _, line = _written(other)
            if each.is_certain or digest == other.digest:
                where = f" at {place(other.file, line)}" if line else f" of {other.file}" if other.file else ""
                changed.append(f"{name}{where} {_is(other.text, each.text)}")
    return changed


def changed_since(
    before: Mapping[str, Definition], now: Mapping[str, Definition], elsewhere: Mapping[str, Definition]
) -> tuple[list[str], list[str]]:
    """Return clauses for what differs between two processes that have imported the code and not run it.

    The second list holds values that no edit need have changed: paths, and those of which a third process had another
    at the time of the first, `elsewhere`, since the clock, a random number or the order of a set is another in each.
    """
    changed, unsteady = list[str](), list[str]()
    for name in {**before, **now}:
        old, new = before.get(name), now.get(name)
        if old is None or new is None:
            one = old or new
            if one is not None and one.text is None:
                is_new = "is new" if old is None else "is gone"
                changed.append(f"{name} at {place(one.file, one.line)} {is_new}")
        elif old.digest != new.digest and (new.text is None or old.text is None):
            changed.append(f"{name} at {place(new.file, new.line)} has other code now")
        elif old.digest != new.digest:
            third, text = elsewhere.get(name), new.text or ""
            is_path = text.startswith(("'", '"')) and os.sep in text and not _written(new)[0]
            values = unsteady if is_path or (third is not None and third.digest != old.digest) else changed
            values.append(f"{name}{f' of {new.file}' if new.file else ''} {_is(new.text, old.text)}")
    return changed, unsteady


def _written(each: Definition) -> tuple[str, str, int]:
    """Return digest, words and line of what the file writes down for a value; the line alone if it computes it."""
    found = _InFile.read(each.file) if each.file else None
    if found is None:
        return "", "", 0
    return found.written.get(each.qualname, ("", "", found.computed.get(each.qualname, 0)))


def _is(now: str | None, before: str | None, where: str = "") -> str:
    """Say in a clause how a value differs."""
    return f"is {now}{where}, and was {before}" if now != before else f"has another content{where}, as {now} before"


def and_more(changed: list[str]) -> str:
    """Return how many clauses follow the first one."""
    return f", and {len(changed) - 1} more" if len(changed) > 1 else ""


def way_out(part: str) -> str:
    """Say what to do about the code of a part that was edited since its run was started."""
    said = (
        "Undo the edit to go on with the code that was started. To train the edited code, restart the kernel or "
        "importlib.reload the module, and make the experiment anew: wb.launch(experiment) trains it from the start, "
        "wb.runs.debug(experiment, run.plan, resume=run) from the last checkpoint."
    )
    return f"{said} run.resume(accept_changed_data=True) goes on with edited data." if part == "data" else said


@dataclass(frozen=True)
class _InFile:
    """The functions of a file, and the values that it writes down, without importing it."""

    modified: float
    functions: Mapping[str, set[str]]
    """Digests of the functions of each name."""
    written: Mapping[str, tuple[str, str, int]]
    """Digest, words and line of each value that is written as a literal, and nowhere else in the file."""
    computed: Mapping[str, int]
    """Line of each value that is computed from others once, without a call or a look-up."""

    @staticmethod
    def read(file: str) -> _InFile | None:
        """Return what a file holds, nothing while it cannot be compiled, or None if there is no such file."""
        try:
            at = os.stat(file)
            return _InFile._parsed(file, at.st_mtime_ns, at.st_size)
        except OSError:
            return None

    @staticmethod
    @functools.lru_cache
    def _parsed(file: str, modified_ns: int, _: int) -> _InFile:
        functions, written, computed = dict[str, set[str]](), dict[str, tuple[str, str, int]](), dict[str, int]()
        source = Path(file).read_bytes()
        with contextlib.suppress(SyntaxError, ValueError):  # it is being edited
            for function in _nested(compile(source, file, "exec", dont_inherit=True)):
                functions.setdefault(function.co_qualname, set()).add(_code_digest(function))
            tree, digests = ast.parse(source), _Digests()
            for name, value, line in _bindings(tree.body, "", _set_globally(tree)):
                if not any(isinstance(node, _UNCERTAIN) for node in ast.walk(value)):
                    computed[name] = line
                with contextlib.suppress(ValueError, TypeError, SyntaxError, RecursionError):
                    for leaf, part, text, _ in _leaves(name, ast.literal_eval(value), DEPTH):
                        written[leaf] = digests.of(part)[0], text, line
        return _InFile(modified_ns / 1e9, functions, written, computed)


_UNCERTAIN = (ast.Call, ast.Subscript, ast.Await, ast.Lambda, ast.comprehension)
"""Expressions that may have another value in another process, such as the clock or a variable of the environment."""


def _set_globally(tree: ast.Module) -> set[str]:
    return {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}


def _bindings(body: Iterable[ast.stmt], prefix: str, excluded: set[str]) -> Iterator[tuple[str, ast.expr, int]]:
    """Yield name, expression and line of what a scope binds a name to once, and of the defaults of its functions."""
    statements = list(body)
    scopes = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    bound = Counter[str]()
    waiting: list[ast.AST] = list(statements)
    while waiting:
        node = waiting.pop()
        if isinstance(node, scopes):
            bound[node.name] += 1
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            bound[node.id] += 1
        if not isinstance(node, (*scopes, ast.Lambda)):
            waiting += ast.iter_child_nodes(node)
    for statement in statements:
        pairs = list[tuple[str, ast.expr | None]]()
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            [target] = statement.targets
            pairs = [(target.id, statement.value)] if isinstance(target, ast.Name) else []
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            pairs = [(statement.target.id, statement.value)]
        elif isinstance(statement, scopes) and bound[statement.name] == 1:
            if isinstance(statement, ast.ClassDef):
                yield from _bindings(statement.body, f"{prefix}{statement.name}.", set())
                continue
            given = statement.args
            places = [*given.posonlyargs, *given.args]
            positional = zip(reversed(places), reversed(given.defaults), strict=False)
            named = zip(given.kwonlyargs, given.kw_defaults, strict=True)
            pairs = [(f"{statement.name}({each.arg})", default) for each, default in (*positional, *named)]
        for name, value in pairs:
            if value is not None and bound[name.partition("(")[0]] == 1 and name not in excluded:
                yield f"{prefix}{name}", value, statement.lineno
