"""Captures of models on disk: what was captured once for a model is read by later plans, and by the ranks of a run.

A file is found by a digest of everything that its content depends on (`key_of`), and it lists what else the capture
read: the files of the libraries that were loaded, and variables of the environment. One that differs by now is not
used. Neither is one that was damaged, or that another user could have written. What cannot be told is not stored:
the model is captured then, as it is with `fresh`. The files are JSON, and reading one executes nothing.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import hashlib
import io
import json
import os
import stat
import sys
import sysconfig
import tempfile
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar, cast

import psutil
import torch
from torch import nn

from workbench.base.code_identity import bindings, fingerprint, put_into_libraries
from workbench.base.machine import cache_home
from workbench.base.user_code import is_users
from workbench.capture.torch_internals import patched, settings_of_export

T = TypeVar("T")
MOST_BYTES = 256 * 2**20
"""Size of all files, from which on those that were used longest ago are deleted."""
_SEAL_BYTES = 32
"""Bytes of the digest of its content with which a file begins."""
_CLOCKS_S = 2
"""Seconds by which the clocks of processes and of files may differ."""
_VARIABLES = ("TORCH_", "PYTORCH_", "TRANSFORMERS_", "ATEN_")
"""Beginnings of the names of variables that libraries read when they are imported."""
_OF_DEVICES = ("TORCH_NCCL", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NVML_BASED_CUDA_CHECK")
"""Beginnings of the names of those that say how devices are used: a rank on a GPU has others than the kernel."""
_NAMESPACES = ("torch", "torch.functional", "torch.nn.functional", "torch.linalg", "torch.special", "torch.fft")
"""Modules of torch whose functions a forward calls."""
_TABLES = ("_parameters", "_buffers", "_modules")
_is_fresh = ContextVar("captures are not read", default=False)


def folder() -> Path:
    """Return the folder of the files."""
    return cache_home() / "captures"


@contextlib.contextmanager
def captured_anew() -> Iterator[None]:
    """Capture every model anew inside a `with` block, and replace what is stored of it."""
    token = _is_fresh.set(True)
    try:
        yield
    finally:
        _is_fresh.reset(token)


def patches(model: nn.Module) -> list[Any]:
    """Return what the user put in place of functions of torch, of transformers and of the packages of a model."""
    packages = {type(module).__module__.partition(".")[0] for module in model.modules()} - {"__main__"}
    return put_into_libraries(packages | {"torch", "transformers"})


def key_of(model: nn.Module, functions: Sequence[Any], described: Any) -> str | None:
    """Return a digest of all that a capture of a built model depends on, or None if something cannot be told.

    It covers what the model's modules hold, but of parameters and buffers only names, shapes and types; the code of
    their classes and of `functions`; `described`, which is JSON; versions, and settings of torch that a forward reads.
    """
    try:
        return _key_of(model, functions, described)
    except Exception:  # objects of the user may raise anything where they are looked at
        return None


def _key_of(model: nn.Module, functions: Sequence[Any], described: Any) -> str | None:
    own, names = list[Any](), dict[int, str]()
    described_model = list[Any]()
    for path, module in model.named_modules():
        attributes = {key: _without_ids(value) for key, value in vars(module).items() if key not in _TABLES}
        own += [type(module), attributes]
        described_model.append([path, f"{type(module).__module__}.{type(module).__qualname__}", sorted(attributes)])
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    own += {type(tensor) for _, tensor in tensors} - {torch.Tensor, nn.Parameter}
    for name, tensor in tensors:
        first = names.setdefault(id(tensor), name)
        device = "cpu" if tensor.is_meta else tensor.device.type  # where capture moves it
        facts = (tuple(tensor.shape), tensor.dtype, tensor.layout, tensor.requires_grad, device)
        described_model.append([name, first, type(tensor).__name__, *map(str, facts)])
        if tensor.layout == torch.strided:
            described_model[-1].append(list(tensor.stride()))
    found = fingerprint([*own, *functions])
    if found is None or torch.overrides._get_current_function_mode_stack():
        return None
    place = device_of(model)
    on = torch.cuda.get_device_name(place) if place.type == "cuda" else place.type
    classes = {base for module in model.modules() for base in type(module).__mro__}
    homes = sorted({*_NAMESPACES, *(each.__module__ for each in classes)} & sys.modules.keys())
    libraries = [name for name in homes if not is_users(getattr(sys.modules[name], "__file__", None) or "")]
    called = [[name, bindings(sys.modules[name])] for name in libraries]
    called += sorted([f"{c.__module__}.{c.__qualname__}", bindings(c)] for c in classes if c.__module__ in libraries)
    parts = [found, called, described_model, described, on, settings_of_export(), _versions()]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _without_ids(value: Any) -> Any:
    """Return the hooks of a module without the numbers by which they are removed, which a process counts."""
    if type(value) is OrderedDict and all(type(key) is int for key in value):
        return list(value.values())
    return value


def device_of(model: nn.Module) -> torch.device:
    """Return the device that a model is captured on: the CPU for one on the meta device."""
    device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
    return torch.device("cpu") if device.type == "meta" else device


def _versions() -> list[Any]:
    """Return the versions of Python and torch, the names of all that is installed, and variables of libraries."""
    places = [Path(entry) for entry in sys.path if entry.endswith("-packages")]
    installed = [sorted(os.listdir(place)) for place in places if place.is_dir()]
    distributions = [[name for name in names if not name.startswith("__pycache__")] for names in installed]
    variables = {key: value for key, value in os.environ.items() if key.startswith(_VARIABLES)}
    variables = {key: value for key, value in variables.items() if not key.startswith(_OF_DEVICES)}
    versions = [sys.version, torch.__version__, torch.version.git_version, _own_code()]
    return [*versions, distributions, sorted(variables.items())]


@functools.cache
def _own_code() -> str:
    """Return a digest of the code that captures: a checkout is another one after each edit, under one version."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def stored(
    key: str | None,
    make: Callable[[], T],
    as_json: Callable[[T], Any],
    from_json: Callable[[Any], T],
    lacks_values: Callable[[T], bool] | None = None,
    told: Callable[[str], None] | None = None,
) -> T:
    """Return what `make` returns, read from the file of a key if there is one, and written to it otherwise.

    `as_json` may raise `ValueError` for what has no form as JSON; `from_json` raises anything for what was damaged.
    `lacks_values` is given for a model without values: a result of which it is true is read for such models only.
    `told` is given the seal of the file that holds the result, under which `answered` stores what is found of it.
    """
    if key is None:
        return make()
    apart, tell = f"{key}-shapes", told or str
    for name in () if _is_fresh.get() else (key,) if lacks_values is None else (key, apart):
        with contextlib.suppress(Exception):  # such as a file that was cut: the model is captured
            content, seal = _read(name)
            result = from_json(content)
            tell(seal)
            return result
    with _watched() as seen:
        result = make()
    if not seen.files:
        with contextlib.suppress(ValueError, OSError):
            name = apart if lacks_values is not None and lacks_values(result) else key
            tell(_write(name, as_json(result), seen.variables))
    return result


def answered(seal: str, question: str, find: Callable[[], str | None]) -> str | None:
    """Return what `find` answers to a question about a stored result, which is asked once of each.

    The file of an answer is named by the seal of the result, which is a digest of all that the answer depends on. An
    answer None is not stored, nor one about a result that is not stored itself, whose seal is empty.
    """
    file = folder() / f"{seal}-{question}.txt"
    if seal and not _is_fresh.get():
        with contextlib.suppress(OSError, ValueError):
            if _is_private(folder()):
                known = file.read_text()
                os.utime(file)
                return known
    answer = find()
    if seal and answer is not None:
        with contextlib.suppress(OSError):
            _put(file, answer.encode())
    return answer


# What a capture reads beside the model: modules of libraries, variables of the environment, files


@dataclass
class _Seen:
    variables: dict[str, str | None] = field(default_factory=dict)
    """Digest of the value of each variable of the environment that was read; None for one that was not set."""
    files: bool = False
    """True if the user's code looked at a file, or any code opened one that is no code."""


@contextlib.contextmanager
def _watched() -> Iterator[_Seen]:
    """Note what is read inside a `with` block."""
    seen = _Seen()
    environment: Any = type(os.environ)
    value_of, thread = environment.__getitem__, threading.get_ident()

    def noted(self: Any, key: Any) -> Any:
        reader = _reader()
        if reader and not reader.startswith(_TORCH):
            seen.variables[str(key)] = _variable(str(key))
        return value_of(self, key)

    def looking(function: Callable[..., Any]) -> Callable[..., Any]:
        def looked(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread and (reader := _reader()) not in ("", __file__):
                path = args[0] if args else "."
                is_own = reader.startswith(_TORCH) and not reader.endswith("serialization.py")  # the compiler's cache
                is_opened = function in opening and not is_own and isinstance(path, str | os.PathLike)
                seen.files |= is_users(reader) or (is_opened and _is_data(path))
            return function(*args, **kwargs)

        return looked

    opening = (builtins.open, io.open)
    owners: list[tuple[Any, str]] = [(builtins, "open"), (io, "open"), (os, "stat"), (os, "listdir"), (os, "scandir")]
    with contextlib.ExitStack() as stack:
        stack.enter_context(patched(environment, "__getitem__", noted))
        for owner, name in owners:
            stack.enter_context(patched(owner, name, looking(getattr(owner, name))))
        yield seen


_STANDARD, _TORCH = sysconfig.get_path("stdlib"), str(Path(torch.__file__).parent)


def _reader() -> str:
    """Return the file of the code that called Python's own library; nothing for a library that is being imported.

    A library such as networkx, which torch imports at the first export of a process, copies the whole environment then.
    """
    reader, frame = "", cast(FrameType | None, sys._getframe(2))
    while frame is not None and frame.f_code is not stored.__code__:
        file = frame.f_code.co_filename
        if file.startswith("<frozen importlib"):
            return ""
        if not reader and (not file.startswith(("<frozen", _STANDARD)) or "-packages" in file):
            reader = file
            if is_users(file):
                break
        frame = frame.f_back
    return reader


def _is_data(path: str | os.PathLike[str]) -> bool:
    """Return True for a path that is no code, and that is not a library's."""
    name = os.fspath(path)
    return isinstance(name, str) and not name.endswith((".py", ".pyc")) and name[:1] != "<" and is_users(name)


def _variable(name: str) -> str | None:
    """Return a digest of a variable, whose value may be a secret; None if it is not set."""
    value = os.environ._data.get(os.environ.encodekey(name))  # type: ignore[attr-defined]
    return None if value is None else hashlib.sha256(value).hexdigest()[:16]


def _libraries() -> dict[str, tuple[Any, ...]]:
    """Return file, size and times of every module that is loaded, but for the user's in Python."""
    found = dict[str, tuple[Any, ...]]()
    for name, module in list(sys.modules.items()):
        file = getattr(getattr(module, "__spec__", None), "origin", None)
        if type(file) is str and os.sep in file and not (file.endswith(".py") and is_users(file)):
            found[name] = (file, *_facts_of(file))
    return found


def _facts_of(file: str) -> tuple[int, ...]:
    try:
        at = os.stat(file)
    except OSError:
        return ()
    return at.st_size, at.st_mtime_ns, at.st_ctime_ns


def _is_edited_meanwhile(libraries: Mapping[str, Sequence[Any]]) -> bool:
    """Return True if a file was changed since this process may have imported it."""
    return any(max(facts[2:], default=_started_ns()) >= _started_ns() for facts in libraries.values())


@functools.cache
def _started_ns() -> int:
    """Return a time before which this process had imported nothing, nor the one that it was forked from."""
    process = psutil.Process()
    started, command = process.create_time(), process.cmdline()
    for parent in process.parents():
        if parent.cmdline() != command:
            break
        started = parent.create_time()
    return int((started - _CLOCKS_S) * 1e9)


# Files


def _read(key: str) -> tuple[Any, str]:
    """Return the content of a file and its seal; raises `ValueError` or `OSError` if it must not be used."""
    if not _is_private(folder()):
        raise ValueError("others may write to the folder")
    file = folder() / f"{key}.json.z"
    octets = file.read_bytes()
    content = json.loads(_unsealed(octets))
    libraries, loaded = {name: tuple(facts) for name, facts in content["libraries"].items()}, _libraries()
    if content["key"] != key or any((file, *_facts_of(file)) != (file, *facts) for file, *facts in libraries.values()):
        raise ValueError("a library has changed")
    common = libraries.keys() & loaded.keys()
    if any(libraries[name] != loaded[name] for name in common) or _is_edited_meanwhile(loaded):
        raise ValueError("a library was edited since it was imported, or another one was")
    if any(_variable(name) != digest for name, digest in content["variables"].items()):
        raise ValueError("a variable has changed")
    with contextlib.suppress(OSError):
        os.utime(file)
    return content["result"], octets[:_SEAL_BYTES].hex()


def _write(key: str, result: Any, variables: Mapping[str, str | None]) -> str:
    """Store a result and return the seal of its file, which is empty if it was not stored."""
    libraries = _libraries()
    if _is_edited_meanwhile(libraries):
        return ""
    folder().mkdir(parents=True, exist_ok=True, mode=0o700)
    if not _is_private(folder()):
        return ""
    content = {"key": key, "libraries": libraries, "variables": variables, "result": result}
    octets = _sealed(json.dumps(content, separators=(",", ":")).encode())
    _put(folder() / f"{key}.json.z", octets)
    _evict()
    return octets[:_SEAL_BYTES].hex()


def _put(file: Path, octets: bytes) -> None:
    """Write a file of the folder whole, or not at all."""
    handle, name = tempfile.mkstemp(dir=folder(), suffix=".part")
    try:
        with os.fdopen(handle, "wb") as part:
            part.write(octets)
        os.replace(name, file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _sealed(octets: bytes) -> bytes:
    packed = zlib.compress(octets, 1)
    return hashlib.sha256(packed).digest() + packed


def _unsealed(octets: bytes) -> bytes:
    if hashlib.sha256(octets[_SEAL_BYTES:]).digest() != octets[:_SEAL_BYTES]:
        raise ValueError("the file was damaged")
    return zlib.decompress(octets[_SEAL_BYTES:])


def _is_private(place: Path) -> bool:
    """Return True if nobody but this user can write to a folder."""
    if not hasattr(os, "getuid"):
        return True
    at = place.lstat()
    return stat.S_ISDIR(at.st_mode) and at.st_uid == os.getuid() and not at.st_mode & 0o022


def _evict() -> None:
    """Delete the files that were used longest ago, until all are at most `MOST_BYTES`."""
    files = list[tuple[float, int, str]]()
    for entry in os.scandir(folder()):
        with contextlib.suppress(OSError):
            at = entry.stat(follow_symlinks=False)
            files.append((at.st_mtime, at.st_size, entry.path))
    total = sum(size for _, size, _ in files)
    for used, size, path in sorted(files):
        is_left = path.endswith(".part") and used < time.time() - 3600  # by a process that was ended
        if total > MOST_BYTES or is_left:
            with contextlib.suppress(OSError):
                os.unlink(path)
                total -= size
