"""User-defined code: pickled for other processes, with the path from which they import; what it computes; its lines.

Pickle sends classes and functions of modules by their name, so that other processes import their files, which may have
been edited since. `functions_of` tells what they hold in this process, and whether two processes hold the same.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import hashlib
import importlib.util
import inspect
import json
import linecache
import os
import re
import sys
import sysconfig
import textwrap
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

from workbench.display import place
from workbench.errors import CaptureError, InvalidExperiment, in_words
from workbench.machine import current_folder

if TYPE_CHECKING:
    from torch import fx

LONGEST_LAMBDA = 60
"""Letters of a lambda's text that name it."""


def pickled(name: str, value: Any) -> bytes:
    """Pickle an object: by value if a notebook cell defined it, by reference if a module of the user did.

    Raises `InvalidExperiment` if the object cannot be pickled; `name` says what it is.
    """
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        raise InvalidExperiment(
            f"The {name} cannot be sent to the workers: {in_words(error)}. Let it build what it needs "
            "when it is called (open files, connections, locks) instead of capturing it."
        ) from error


@dataclass(frozen=True)
class UserFunction:
    """A callable of the user that an experiment holds: an optimiser or a learning-rate schedule."""

    function: Callable[..., Any] | None = field(repr=False)
    """The callable; None if it was only read from the description of a run."""
    name: str = ""
    source: str | None = field(default=None, repr=False, compare=False)
    """Source code of the callable, if Python can find it."""

    def __post_init__(self) -> None:
        if self.function is not None and not self.name:
            object.__setattr__(self, "name", name_of(self.function))
            object.__setattr__(self, "source", source_of(self.function))

    @property
    def is_loaded(self) -> bool:
        """Return True unless only the description of the callable is here."""
        return self.function is not None

    def __call__(self, *arguments: Any) -> Any:
        if self.function is None:
            raise InvalidExperiment(
                f"Only the description of {self.name} is here, not the callable itself. Give it to the experiment "
                "again: experiment.replace(…)."
            )
        return self.function(*arguments)

    def to_json(self) -> dict[str, Any]:
        return {"type": "user_defined", "name": self.name, "source": self.source}


def as_user_function(value: Any, function: Callable[..., Any] | None = None) -> Any:
    """Wrap a callable, or the description of one with its `function`, in a `UserFunction`; return others unchanged."""
    if isinstance(value, UserFunction):
        return value
    if isinstance(value, Mapping) and value.get("type") == "user_defined":
        return UserFunction(function, value["name"], value["source"])
    return UserFunction(value) if callable(value) else value


def innermost(function: Callable[..., Any]) -> Any:
    """Return what `functools.partial` objects bind."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a callable, or of its type."""
    inner = innermost(function)
    return str(getattr(inner, "__name__", None) or type(inner).__name__)


def telling_name(function: Callable[..., Any]) -> str:
    """Return a name for tables that tells a callable from others of its code, by the plain values that it is bound to.

    `functools.partial(build, width=32)` and a function in whose closure `width` is 32 are `build(width=32)`. A lambda
    is named by the variable that it was assigned to, or else by its own text.
    """
    bound: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        with contextlib.suppress(TypeError, ValueError):
            bound = {**inspect.signature(function.func).bind_partial(*function.args).arguments, **bound}
        bound, function = {**function.keywords, **bound}, function.func
    name = name_of(function)
    if isinstance(function, FunctionType):
        bound |= inspect.getclosurevars(function).nonlocals
        if name == "<lambda>":
            parameters = inspect.signature(function).parameters.values()
            bound |= {each.name: each.default for each in parameters if each.default is not each.empty}
            name = _lambda_name(function)
    plain = ", ".join(f"{key}={value}" for key, value in bound.items() if isinstance(value, bool | int | float | str))
    if not plain:
        return name
    return f"{name}; {plain}" if name.startswith("lambda ") else f"{name}({plain})"


def _lambda_name(function: FunctionType) -> str:
    """Return the variable that a lambda was assigned to, or its text; `lambda` where its source cannot be found."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)).strip().rstrip(","))
    except (OSError, TypeError, SyntaxError):
        return "lambda"
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Lambda)]
    if len(found) > 1:
        own = (function.__code__.co_code, function.__code__.co_names, function.__code__.co_varnames)
        codes = {node: compile(ast.Expression(node), "lambda", "eval").co_consts[0] for node in found}
        constants = function.__code__.co_consts
        found = [
            node
            for node, code in codes.items()
            if (code.co_code, code.co_names, code.co_varnames) == own and code.co_consts == constants
        ]
    if not found:
        return "lambda"
    for statement in ast.walk(tree):
        if isinstance(statement, ast.Assign) and statement.value is found[0]:
            return ast.unparse(statement.targets[0])
    found[0].args.defaults = []  # they are named with their values
    text = ast.unparse(found[0])
    return text if len(text) <= LONGEST_LAMBDA else f"{text[: LONGEST_LAMBDA - 1]}…"


def source_of(function: Callable[..., Any]) -> str | None:
    """Return the source code of a callable, if Python can find it."""
    try:
        return inspect.getsource(innermost(function))
    except (OSError, TypeError):
        return None


def required_arguments(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the arguments without a default; none for built-ins that have no signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return tuple(p.name for p in parameters if p.default is p.empty and p.kind not in variadic)


def user_path() -> Iterable[str]:
    """Return `sys.path` without Python's own folders, so that modules beside a notebook can be imported in workers."""
    python = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    standard = tuple(str(Path(path)) for path in python)
    here = current_folder()
    entries = [os.path.normpath(here / entry) for entry in sys.path]
    package = str(Path(__file__).resolve().parents[1])
    users = [entry for entry in entries if not entry.startswith(standard) and not entry.endswith(".zip")]
    return dict.fromkeys([*users, *(() if package.startswith(standard) else (package,))])


# Code that decides what is computed


@dataclass(frozen=True)
class Function:
    """A function of the user, as it stands in memory: what it computes, and its line."""

    digest: str
    """Hash of its compiled code, the same for other comments, names of files and numbers of lines."""
    file: str
    line: int
    qualname: str
    """Name of the function in its file, such as `Net.forward`."""
    module: str
    """The module that defined it: another than that of its class for a method that was replaced."""


def functions_of(value: Any) -> dict[str, Function]:
    """Return the functions of the user that a callable refers to, by module and name.

    Classes, functions, bound arguments and what they name in turn are followed, but installed libraries are not. Of a
    class count the methods that some function names, and those that Python and torch call.
    """
    walk = _Walk()
    walk.visit(value)
    while walk.methods():
        pass
    return walk.found


class _Walk:
    """A walk over code; `found` grows."""

    def __init__(self) -> None:
        self.found: dict[str, Function] = {}
        self._seen: dict[int, Any] = {}
        self._classes: list[type] = []
        self._names = {"forward"}

    def visit(self, value: Any, name: str = "") -> None:
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value  # kept, so that no other object gets its id
        if isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self.visit(part)
        elif isinstance(value, MethodType):
            self.visit(value.__func__)
            self.visit(value.__self__)
        elif isinstance(value, FunctionType):
            self._function(value, name)
        elif isinstance(value, (staticmethod, classmethod)):
            self.visit(value.__func__, name)
        elif isinstance(value, property):
            for accessor in (value.fget, value.fset):
                self.visit(accessor, name)
        elif isinstance(value, type):
            if _is_users(value.__module__):
                self._classes.append(value)
                for base in value.__bases__:
                    self.visit(base)
        elif isinstance(value, (list, tuple, set, frozenset)):
            for item in value:
                self.visit(item)
        elif isinstance(value, Mapping):
            for item in value.values():
                self.visit(item)
        elif (wrapped := inspect.getattr_static(value, "__wrapped__", None)) is not None:
            self.visit(wrapped, name)  # of a cached function, for instance
        elif not isinstance(value, (ModuleType, str, bytes, int, float, complex, type(None))):
            self.visit(type(value))

    def methods(self) -> bool:
        """Visit the methods that something has named by now; return False if there are no more."""
        before = len(self._seen)
        for each in list(self._classes):
            for name, member in list(vars(each).items()):
                is_function = isinstance(member, (FunctionType, staticmethod, classmethod, property))
                if is_function and (name in self._names or name.startswith("__")):
                    self.visit(member, f"{each.__module__}.{each.__qualname__}.{name}")
        return len(self._seen) > before

    def _function(self, function: FunctionType, name: str) -> None:
        if (wrapped := getattr(function, "__wrapped__", None)) is not None:
            self.visit(wrapped, name)
        code = function.__code__
        if _is_installed(code.co_filename):
            return
        name = name or f"{function.__module__}.{function.__qualname__}"
        loader = getattr(getattr(sys.modules.get(function.__module__), "__spec__", None), "loader", None)
        if loader is None or type(loader) is SourceFileLoader:  # others, such as pytest's, compile something else
            while name in self.found:
                name += "'"
            place = code.co_filename, code.co_firstlineno, code.co_qualname
            self.found[name] = Function(_code_digest(code), *place, str(function.__module__))
        self._names |= (named := {each for inner in _nested(code) for each in inner.co_names})
        read = {each.argval for inner in _nested(code) for each in dis.get_instructions(inner) if each.opname in _READS}
        for each in sorted(read & function.__globals__.keys()):
            self._named(function.__globals__[each], named)
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # it is empty
                self.visit(cell.cell_contents)
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.visit(default)

    def _named(self, value: Any, names: Iterable[str]) -> None:
        """Visit a global of a function; of a module, the functions that `names` name, a replaced one included."""
        if not isinstance(value, ModuleType):
            self.visit(value)
            return
        for name in sorted(names):
            member = vars(value).get(name)
            if isinstance(member, (FunctionType, type)):
                self.visit(member)
            elif isinstance(member, ModuleType) and _is_users(member.__name__):
                self._named(member, names)


_READS = ("LOAD_GLOBAL", "LOAD_NAME")
_PACKAGE = str(Path(__file__).parent)


@functools.cache
def _installed_roots() -> tuple[str, ...]:
    """Return the folders of Python, its libraries and this package, and that of torch, which may lie elsewhere."""
    torch = importlib.util.find_spec("torch")
    libraries = [str(Path(torch.origin).parent)] if torch is not None and torch.origin else []
    folders = {str(Path(path)) for path in (sys.prefix, sys.base_prefix, _PACKAGE, *libraries)}
    return (*(folder for folder in folders if folder != "/"), "<frozen", "<string>", "<attrs", "<__array")


def _is_installed(file: str | None) -> bool:
    """Return True for a file of an installed library or of this package, and for what has no file, as built-ins."""
    return not file or file.startswith(_installed_roots())


def _is_users(module: str) -> bool:
    return module == "__main__" or not _is_installed(getattr(sys.modules.get(module), "__file__", None))


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _code_digest(code: CodeType) -> str:
    return hashlib.sha256(repr(_of_code(code)).encode()).hexdigest()[:16]


def _of_code(code: CodeType) -> tuple[Any, ...]:
    """Return what a code object computes, without its docstring, its file and its lines."""
    constants = [_of_constant(value) for value in code.co_consts]
    if code.co_consts and isinstance(code.co_consts[0], str):
        constants[0] = None  # a docstring is the first constant, and so is None without one
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    return code.co_code, constants, names, code.co_argcount, code.co_kwonlyargcount, code.co_flags


def _of_constant(value: Any) -> Any:
    if isinstance(value, CodeType):
        return _of_code(value)
    if isinstance(value, frozenset):  # whose order differs between processes
        return sorted(map(repr, value))
    return [_of_constant(item) for item in value] if isinstance(value, tuple) else value


FUNCTIONS = "functions.json"
"""File in `code/` with the functions of each user-defined part, as they were when the run was started."""


def functions_json(
    functions: Mapping[str, Mapping[str, Function]], more: Mapping[str, Any] = MappingProxyType({})
) -> bytes:
    """Return the content of `FUNCTIONS`, with the parts of another one."""
    parts = {
        part: {name: list(vars(each).values()) for name, each in of_part.items()} for part, of_part in functions.items()
    }
    return json.dumps({**more, **parts, "python": sys.implementation.cache_tag}).encode()


def read_functions(code: Path) -> dict[str, dict[str, Function]]:
    """Return the functions of each part that `functions_json` wrote; none without its file, or for another Python."""
    try:
        found = json.loads((code / FUNCTIONS).read_bytes())
        if found.pop("python") != sys.implementation.cache_tag:
            return {}
        return {part: {name: Function(*each) for name, each in of_part.items()} for part, of_part in found.items()}
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return {}


def changed_on_disk(functions: Mapping[str, Function]) -> list[str]:
    """Return the functions that their files hold otherwise by now, each with its place; nothing is executed.

    What the main module defines is pickled itself, but for methods that it replaced in classes of other modules.
    """
    files: dict[str, dict[str, set[str]] | None] = {}  # digests by name of each function in a file; None without it
    for file in {each.file for each in functions.values()}:
        found = dict[str, set[str]]()
        try:
            code = compile(Path(file).read_bytes(), file, "exec", dont_inherit=True)
            for function in _nested(code):
                found.setdefault(function.co_qualname, set()).add(_code_digest(function))
            files[file] = found
        except OSError:
            files[file] = None
        except (SyntaxError, ValueError):  # it is being edited
            files[file] = {}
    return [
        f"{name} at {place(each.file, each.line)}"
        for name, each in functions.items()
        if not name.startswith("__main__.")
        and (
            each.module == "__main__"
            or ((known := files[each.file]) is not None and each.digest not in known.get(each.qualname, ()))
        )
    ]


def changed_between(before: Mapping[str, Function], now: Mapping[str, Function]) -> list[str]:
    """Return the functions that have another code in `now`, each with its place; those in one of both do not count."""
    return [
        f"{name} at {place(now[name].file, now[name].line)}"
        for name, function in before.items()
        if name in now and now[name].digest != function.digest
    ]


# Lines of the user's code, for errors that say where a model stops capture.

FORWARD = "forward_loss"
"""Name of the function of this package that calls the model's forward while it is exported."""
_LIBRARY_MODELS = re.compile(r"/(?:transformers|(?:site|dist)-packages/[^/]+)/models/")
"""Files of installed libraries that hold models."""


@dataclass(frozen=True)
class SourceLine:
    """A line of the model's code; without a file if it is not known."""

    file: str = ""
    number: int = 0
    text: str = ""
    caller: str = ""
    """The user's line that led to it, `file:number`, if it is in a library."""

    @property
    def where(self) -> str:
        """The line as a part of a sentence, `" at file:number (`text`)"`; empty if it is not known."""
        caller = f", called from {self.caller}" if self.caller else ""
        return f" at {place(self.file, self.number)} (`{self.text}`{caller})" if self.file else ""

    @property
    def is_of_library(self) -> bool:
        """True if the line is in an installed library."""
        return bool(self.file) and not is_users(self.file)

    def error(self, model: str, message: str, **facts: Any) -> CaptureError:
        """Return a `CaptureError` that blames this line; the message continues the model's name."""
        return CaptureError(f"{model} {message}", file=self.file, line=self.number, **facts)


def line_of_node(node: fx.Node) -> SourceLine:
    """Return the innermost line that export noted for an operation."""
    lines = re.findall(r'File "([^"]+)", line (\d+)[^\n]*\n\s*([^\n]*)', node.stack_trace or "")
    return SourceLine(lines[-1][0], int(lines[-1][1]), lines[-1][2]) if lines else SourceLine()


def line_of_frames(frames: Iterable[traceback.FrameSummary]) -> SourceLine:
    """Return the innermost line inside forward that is the user's, or in a model of an installed library.

    Lines outside of forward, as those that called capture, are left out. A line of a library comes with the user's
    line that led to it.
    """
    every = list(frames)
    inside = [
        index for index, frame in enumerate(every) if frame.name == FORWARD and frame.filename.startswith(_PACKAGE)
    ]
    model = [frame for frame in every[inside[-1] + 1 if inside else 0 :] if frame.name != "<module>"]
    users = [f for f in model if is_users(f.filename)]
    candidates = [f for f in model if f in users or _is_of_library_model(f.filename)]
    if not candidates:
        return SourceLine()
    frame = candidates[-1]
    line = line_at(frame.filename, frame.lineno or 0, frame.line)
    if frame in users or not users:
        return line
    return replace(line, caller=place(users[-1].filename, users[-1].lineno or 0))


def line_of_running_code() -> SourceLine:
    """Return the innermost line of the code that calls this which is the user's, or in a model of a library."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_of_model(file):
            return line_at(file, frame.f_lineno)
        frame = frame.f_back
    return SourceLine()


@functools.cache
def is_users(file: str) -> bool:
    """Return True for a file that is neither an installed library's nor of this package."""
    return not file or not _is_installed(file)


def is_of_model(file: str) -> bool:
    """Return True for a file that is the user's, or has a model of an installed library."""
    return is_users(file) or _is_of_library_model(file)


@functools.cache
def _is_of_library_model(file: str) -> bool:
    return bool(_LIBRARY_MODELS.search(file.replace("\\", "/")))


def line_at(file: str, number: int, text: str | None = None) -> SourceLine:
    """Return a line of a file, with its text."""
    return SourceLine(file, number, text or linecache.getline(file, number).strip())
