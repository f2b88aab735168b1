"""The server from which a process's runs are forked, so that only the first of them imports what its ranks need.

The first supervisor that a process starts is a new one. Before it starts its ranks it imports what they need, and then
leaves a copy of itself behind: the server. It holds nothing of the user's and has computed nothing. The supervisors of
later runs are forked from it, and fork their launchers in turn. `Client.start_ahead` starts a server before the first
run is launched, so that it imports while the process that launches still plans. The supervisor of a sweep or grid is
served by the same server, whether it was forked from it or left it. The server ends with the last process that it
serves, and is never needed: where there is none, or where a new process would be another one, a new process is started.

The fork server of `multiprocessing`, with the same imports as its preload, would take over the loop of requests alone,
and the first run's first step came 7 to 17 % later with it (4.8 to 5.0 s, interleaved with 4.3 to 4.7 s, on two cores);
those of later runs came at the same time. It does not show the command line by which a run's processes are found, does
not notice that a file it has imported was edited, serves the process alone that started it, and a kernel that ends
waits for its children.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NoReturn

import psutil

from workbench.record.events import ProcessRecord
from workbench.record.rundir import process_alive, process_record
from workbench.runs.launching import processes

LATE = (
    *("CUDA_VISIBLE_DEVICES", "JPY_SESSION_NAME", "NCCL_", "PYTEST_CURRENT_TEST", "PYTHONPATH"),
    *("TORCHINDUCTOR_CACHE_DIR", "TRACKIO_", "WANDB_", "WORKBENCH_"),
)
"""Beginnings of the names of variables that are read when they are used: their values need not be the server's.

Any other may have been read by a library while it was imported, as `OMP_NUM_THREADS` is.
"""
INHERITED = ("Umask:", "Groups:", "Cpus_allowed:", "Mems_allowed:")
"""Lines of `/proc/self/status` with what a new process inherits from the one that starts it."""
ROOM = " " * (2 * 4096 + 1024)
"""Last argument of a supervisor that may leave a server: room for the command lines of those that are forked from it.

The longest has two paths, of at most 4,096 bytes each.
"""
ANSWER_S = 10.0
"""Seconds that a launch waits for the server, which answers in some 20 ms."""
AHEAD_S = 60.0
"""Seconds that a launch waits for a server that was started ahead: it is done before a new process would be."""
LOOK_S = 1.0
"""Seconds between two looks whether the process that the server serves still lives."""
WAIT_S = 0.02
OF_RANKS = ("ACCELERATE_USE_CPU", "OMP_NUM_THREADS")
"""Variables of ranks that libraries read when they are imported, and that a launch sets by its plan."""
SOCKET = 3
"""Descriptor of the socket by which a process that was forked reaches the server that serves it."""


@dataclass
class Forked:
    """A process that was forked from this one."""

    pid: int
    returncode: int | None = None
    """Exit code, negative for a signal; None until `wait` has seen the process end."""

    def wait(self, timeout: float) -> int | None:
        """Return the exit code as soon as the process has ended, or None after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                break
            else:
                time.sleep(WAIT_S)
        return self.returncode


def fork(command: Sequence[str], environment: Mapping[str, str], ranks: str | None = None, **place: Any) -> Forked:
    """Run `python -m MODULE …` in a session of its own, without starting Python anew where this process can be forked.

    `place` are the arguments of `_enter`. With `ranks`, what `kind_of_ranks` returns, the process is served by the
    server at the other end of the socket in `place`.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if pid := os.fork():
        return Forked(pid)
    try:
        # An interrupt of a terminal goes to its whole foreground group: a session of one's own is out of its reach.
        # Handlers are those of the process that was forked, which may ignore what ends this one.
        os.setsid()
        for number, handler in ((signal.SIGTERM, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
            signal.signal(number, handler)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _enter(**place)
        if not _name(command):
            os.execve(command[0], list(command), dict(environment))
        _replace_environment(environment)
        if ranks is not None:
            client().connect(socket.socket(fileno=SOCKET), ranks)
        _, _, module, *sys.argv[1:] = command
        # What follows runs as if Python had been started for the module, with all imports done.
        sys.modules.pop(module, None)  # `runpy` warns of a module that was imported
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        leave(0)
    except SystemExit as error:
        leave(error.code if isinstance(error.code, int) else int(error.code is not None))
    except BaseException:
        traceback.print_exc()
        leave(1)


def leave(code: int) -> NoReturn:
    """End this process; freeing every object of the imported libraries takes as long as importing half of them."""
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    os._exit(code)


def _enter(
    directory: str | None = None, path: Sequence[str] = (), log: str | None = None, server: int | None = None
) -> None:
    """Take a working directory, a module search path and a file for the output, by default this process's own.

    Of the descriptors that were open, a process keeps that of the socket to its server as `SOCKET`.
    """
    _redirect(log)
    if server is not None:
        os.dup2(server, SOCKET)
        os.set_inheritable(SOCKET, False)
    _close_from(SOCKET + (server is not None))
    if directory is not None:
        os.chdir(directory)
        sys.path[:] = path
        importlib.invalidate_caches()
        if "numpy" in sys.modules:  # a new process has a state of its own
            sys.modules["numpy"].random.seed()


def _redirect(log: str | None) -> None:
    """Read nothing, and print to a file if one is given."""
    descriptor = os.open(os.devnull, os.O_RDONLY)
    os.dup2(descriptor, 0)
    os.close(descriptor)
    if log is not None:
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)


def _close_from(first: int, kept: Collection[int] = ()) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) >= first and int(name) not in kept:
            with contextlib.suppress(OSError):  # that of the listing
                os.close(int(name))


def _replace_environment(environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def _name(command: Sequence[str]) -> bool:
    """Show another command line for this process, by which a run's processes are found; False without room for it."""
    with contextlib.suppress(OSError, ValueError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])  # the memory that /proc/self/cmdline shows
        text = b"\0".join(map(os.fsencode, command)) + b"\0"
        if end - start >= len(ROOM):
            ctypes.memmove(start, text.ljust(end - start - 1) + b"\0", end - start)
            return True
    return False


def leave_server(environment: Mapping[str, str], import_ahead: Callable[[], None], is_served: bool = False) -> None:
    """Import what runs need, and leave a server, if the process that started this one has asked for it.

    With `is_served` the server serves this process too, and is left for it alone if nobody else has asked.
    """
    served, ours = dict[socket.socket, ProcessRecord](), None
    if stat.S_ISSOCK(os.fstat(0).st_mode):
        served[socket.socket(fileno=os.dup(0))] = process_record(os.getppid())
    if is_served:
        ours, given = _pair()
        served[given] = process_record(os.getpid())
    if not served:
        return
    own = dict(os.environ)
    _replace_environment(environment)  # before anything reads it
    gc.disable()  # collecting while importing takes a fifth of the time
    with contextlib.suppress(Exception):  # the launcher tells what is wrong
        import_ahead()
    set_by_imports = {
        name: value
        for name, value in os.environ.items()
        if environment.get(name) != value and not name.startswith(LATE)
    }
    gc.freeze()  # otherwise the first collection of a fork would copy the pages of every object that it shares
    gc.enable()
    if child := os.fork():
        os.waitpid(child, 0)
        _redirect(None)
        for each in served:
            each.close()
        _replace_environment({**own, **set_by_imports})
        if ours is not None:
            client().connect(ours, kind_of_ranks(environment))
        return
    with contextlib.suppress(BaseException):
        _name([sys.executable, "-m", __name__])
        os.setsid()
        if os.fork() == 0:  # a child of nobody's: what ends the supervisor and its children does not reach it
            _serve(served, set_by_imports)
    os._exit(0)


def _pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a connection to a server."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _serve(served: dict[socket.socket, ProcessRecord], set_by_imports: Mapping[str, str]) -> None:
    """Fork a process for each request, until every process that asks has ended."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    _redirect(os.devnull)
    _close_from(SOCKET, kept={each.fileno() for each in served})
    own_path = {os.getcwd(), *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    python_path = [entry for entry in sys.path if entry not in own_path]
    os.chdir("/")
    imported = sources()

    def answer(asking: socket.socket) -> bool:
        """Fork what is asked for, and return True, or False if the process that asks has ended."""
        message = asking.recv(2**20)
        if not message:
            return False
        request = json.loads(message)
        request["path"] += python_path
        request["environment"] |= set_by_imports
        pid = 0
        if is_current(imported, request["path"]):
            theirs, ours = _pair()
            pid = fork(**request, server=theirs.fileno() if request.get("ranks") else None).pid
            theirs.close()
            if request.get("ranks"):
                with contextlib.suppress(psutil.NoSuchProcess):  # it has ended already
                    served[ours] = process_record(pid)
                    ours.send(b"ready")
        asking.send(str(pid).encode())
        return True

    for each in served:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            each.send(b"ready")
    while served:
        asking = select.select(list(served), [], [], LOOK_S)[0]
        # A process that one of them had forked may hold its socket.
        ended = [] if asking else [each for each, process in served.items() if not process_alive(process)]
        for each in asking:
            with contextlib.suppress(Exception):  # what goes wrong for one of them must not matter to the others
                if answer(each):
                    continue
            ended.append(each)
        for each in ended:
            del served[each]
            each.close()


def sources() -> dict[str, tuple[str, int]]:
    """Return file and time of change of every module that was imported."""
    specs = [spec for module in list(sys.modules.values()) if (spec := getattr(module, "__spec__", None)) is not None]
    return {spec.name: (spec.origin, os.stat(spec.origin).st_mtime_ns) for spec in specs if spec.has_location}


def is_current(imported: Mapping[str, tuple[str, int]], path: Sequence[str]) -> bool:
    """Return True if a new process with this module search path would import the same files."""
    try:
        if any(os.stat(file).st_mtime_ns != changed for file, changed in imported.values()):
            return False
    except OSError:
        return False
    for name, (file, _) in imported.items():
        if "." not in name:
            spec = PathFinder.find_spec(name, path)
            if spec is not None and spec.origin not in (None, file):
                return False
    return True


class Client:
    """The end of a process that launches runs: it asks a server, which may not be there yet, or no more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._facts: Mapping[str, Any] = {}
        self._is_ready = False
        self._is_ahead = False

    @property
    def is_served(self) -> bool:
        """Return True if there is a server, as far as is known."""
        return self._socket is not None

    def connect(self, server: socket.socket, ranks: str) -> None:
        """Ask this server, which has this process's environment and serves runs of these `ranks`, from now on."""
        server.settimeout(ANSWER_S)
        self._socket, self._facts = server, _facts(os.environ, ranks)
        with contextlib.suppress(OSError):
            self._is_ready = bool(server.recv(2**10))  # it is there, or notes which files it has imported

    def start_ahead(self, module: str, *arguments: str, environment: Mapping[str, str], ranks: str) -> None:
        """Start a module that leaves a server and ends, unless there is one; the first launch waits for that server."""
        if not self.is_served:
            self.start(module, *arguments, log=Path(os.devnull), environment=environment, ranks=ranks)
            self._is_ahead = True

    def start(
        self,
        module: str,
        *arguments: str,
        log: Path,
        environment: Mapping[str, str],
        ranks: str,
        is_served: bool = False,
    ) -> int:
        """Start a module as `processes.start_detached` does and return its pid; it need not import what ranks need.

        `ranks` is what `kind_of_ranks` returns for the run's. The server, if there is one, serves a process that
        launches runs in its turn, `is_served`.
        """
        facts = _facts(environment, ranks)
        with self._lock:
            served = {"ranks": ranks} if is_served else {}
            pid = self._forked(module, arguments, log, environment, served) if facts == self._facts else None
            if pid is not None:
                return pid
            given = None
            if self._socket is None or facts != self._facts:
                self._forget()
                self._socket, given = _pair()
                self._socket.settimeout(ANSWER_S)
                self._facts = facts
            room = () if given is None else (ROOM,)
            process = processes.start_detached(
                module, *arguments, *room, log=log, environment=environment, stdin=given or subprocess.DEVNULL
            )
            if given is not None:
                given.close()
        threading.Thread(target=process.wait, name=f"reap {process.pid}", daemon=True).start()
        return process.pid

    def _forked(
        self,
        module: str,
        arguments: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        served: Mapping[str, str],
    ) -> int | None:
        wait_s = AHEAD_S if self._is_ahead else 0
        if self._socket is None or not (self._is_ready or select.select([self._socket], [], [], wait_s)[0]):
            return None
        with contextlib.suppress(OSError, ValueError):
            directory = os.getcwd()
            request = {
                "command": [sys.executable, "-m", module, *arguments],
                "environment": dict(environment),
                "directory": directory,
                "path": [*([] if sys.flags.safe_path else [directory]), *environment["PYTHONPATH"].split(os.pathsep)],
                "log": str(log.absolute()),
                **served,
            }
            self._is_ready = self._is_ready or bool(self._socket.recv(2**10))
            self._socket.send(json.dumps(request).encode())
            if pid := int(self._socket.recv(2**10)):
                return pid
        self._forget()
        return None

    def _forget(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket, self._is_ready, self._is_ahead = None, False, False


def kind_of_ranks(environment: Mapping[str, str]) -> str:
    """Return what libraries read of this environment of ranks when they are imported: a device type, a thread count."""
    return " ".join(environment.get(name, "") for name in OF_RANKS)


def _facts(environment: Mapping[str, str], ranks: str) -> dict[str, Any]:
    """Return what a process has from its start and keeps, as far as it can differ between two of one kernel."""
    status = Path("/proc/self/status").read_text().splitlines()
    return {
        "executable": sys.executable,
        "environment": {name: value for name, value in environment.items() if not name.startswith((*LATE, *OF_RANKS))},
        "ranks": ranks,
        "status": [line for line in status if line.startswith(INHERITED)],
        "limits": Path("/proc/self/limits").read_text(),
        "nice": os.nice(0),
    }


@functools.cache
def _client(_process: int) -> Client:
    return Client()


def client() -> Client:
    """Return the client of this process; one that was forked from it has another."""
    return _client(os.getpid())
