"""The kernel that a Jupyter server prepares while the launcher shows our cards: the click on a card finds it imported.

There is at most one, for the folder that the launcher shows. It is a kernel of the server like any other, which a
notebook gets with its session, and it ends with the server, after minutes in which nobody looked at the cards, and when
memory runs short. What a notebook gets is what a new kernel would be: one whose environment, folder or imported files
would be others is ended, and the notebook starts its own.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import psutil
from IPython import get_ipython
from jupyter_core.utils import ensure_async
from tornado.ioloop import IOLoop, PeriodicCallback

import workbench
from workbench.base.errors import WorkbenchError
from workbench.runs.launching import fork_server

KERNEL = "python3"
"""Kernel of the templates, by the name of its specification."""
SESSION_NAME = "JPY_SESSION_NAME"
"""Environment variable with the path of a kernel's notebook."""
IDLE_S = 600.0
"""Seconds after the cards were last looked at from which the kernel is ended."""
LOOK_S = 20.0
"""Seconds between two looks whether the kernel should go on waiting."""
HAND_OVER_S = 60.0
"""Longest wait in s of a click for the answer of an idle kernel, which comes after 0.1 s on an idle machine."""
LEAST_BYTES = 3 << 30
"""Memory that must be available for a kernel to be prepared: it and the server of its ranks take some 1 GiB."""
SHORT_BYTES = 1 << 30
"""Available memory below which a kernel that waits is ended."""


# In the kernel

_sources = dict[str, tuple[str, int]]()


def prepare() -> None:
    """Import what the notebooks of the templates use, while another process imports what ranks on CPUs need."""
    from workbench.execution.build import preload
    from workbench.figures.figure import Figure, picture
    from workbench.runs.launching.launcher import import_ahead
    from workbench.widgets.live_widget import packed_plotly

    gc.disable()  # collecting while importing takes a fifth of the time
    try:
        import_ahead()
        for name in workbench.__all__:
            getattr(workbench, name)
        preload({})
        picture(Figure())
        packed_plotly()
    finally:
        gc.collect()
        gc.freeze()  # otherwise each collection behind the click would look at a million imported objects again
        atexit.register(gc.unfreeze)  # otherwise the kernel would say at its end that these objects leak
        gc.enable()
    _sources.update(fork_server.sources())


def hand_over(session_name: str) -> None:
    """Be the kernel of a notebook from now on; raise `WorkbenchError` if a new kernel would import other files."""
    os.environ[SESSION_NAME] = session_name
    get_ipython().user_ns["__session__"] = session_name  # as ipykernel does at its start
    if not fork_server.is_current(_sources, [entry or os.getcwd() for entry in sys.path]):
        raise WorkbenchError("Files were changed after they were imported.")


# In the server


@dataclass
class _Waiting:
    """A kernel that nobody uses yet."""

    kernel_id: str
    folder: str
    environment: dict[str, str]
    is_imported: bool = False


class PreparedKernel:
    """The kernel of a server that waits for a click, if there is one."""

    def __init__(self, settings: Mapping[str, Any], log: logging.Logger) -> None:
        """`settings` are those of the server's web application, which hold its managers."""
        self._kernels, self._sessions = settings["kernel_manager"], settings["session_manager"]
        self._contents, self._log = settings["contents_manager"], log
        self._lock = asyncio.Lock()
        self._waiting: _Waiting | None = None
        self._asked_at = 0.0
        self._look = PeriodicCallback(self._end_if_unwanted, 1e3 * LOOK_S)
        # A gateway's kernels run elsewhere, with another environment and other folders.
        self._is_possible = type(self._kernels).__module__.startswith("jupyter_server.services.kernels")

    async def prepare(self, path: str) -> None:
        """Let a kernel wait for a notebook in the folder `path` of the server's files, unless memory is short."""
        async with self._lock:
            self._asked_at = time.monotonic()
            folder = await ensure_async(self._contents.get_kernel_path(path=path))
            waiting = self._waiting
            if waiting is not None and (waiting.kernel_id not in self._kernels or waiting.folder != folder):
                await self._end()
            if self._waiting is not None or not self._is_possible or available_bytes() < LEAST_BYTES:
                return
            environment = self._sessions.get_kernel_env(path)
            kernel_id = await self._kernels.start_kernel(path=folder, kernel_name=KERNEL, env=dict(environment))
            waiting = self._waiting = _Waiting(kernel_id, folder, environment)
            self._look.start()

            def imported(is_done: bool) -> None:
                waiting.is_imported = is_done
                if not is_done:  # a kernel of another Python, which has no Workbench, is none to wait for
                    self._is_possible = False
                    IOLoop.current().add_callback(self._end_if_unwanted)

            # Once a kernel has answered, what is sent to it comes in the order in which it is sent.
            started: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            self._ask(kernel_id, "kernel_info_request", {}, started.set_result)
            try:
                await asyncio.wait_for(started, HAND_OVER_S)
            except TimeoutError:
                await self._end()
            else:
                self._execute(kernel_id, "prepare()", imported)

    async def hand_over(self, path: str) -> bool:
        """Make the waiting kernel that of the notebook `path`, with a session; False if the notebook must start one."""
        async with self._lock:
            waiting, name = self._waiting, PurePosixPath(path).name
            if waiting is None or waiting.kernel_id not in self._kernels:
                return False
            try:
                environment = self._sessions.get_kernel_env(path, name)
                session_name = environment[SESSION_NAME]
                folder = await ensure_async(self._contents.get_kernel_path(path=path))
                is_same = waiting.folder == folder and _others(environment) == _others(waiting.environment)
                if is_same and await self._handed_over(waiting, session_name):
                    await ensure_async(
                        self._sessions.create_session(
                            path=path, name=name, type="notebook", kernel_name=KERNEL, kernel_id=waiting.kernel_id
                        )
                    )
                    self._forget()
                    return True
            except Exception:
                self._log.warning("The prepared kernel could not be handed over.", exc_info=True)
            await self._end()
            return False

    async def _handed_over(self, waiting: _Waiting, session_name: str) -> bool:
        """Tell the kernel and all that describes it which notebook it has; False if it is not what a new one would be.

        A kernel that still imports, which it does for some seconds, answers after that, and is not waited for.
        """
        manager = self._kernels.get_kernel(waiting.kernel_id)
        answered: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._execute(waiting.kernel_id, f"hand_over({session_name!r})", answered.set_result)
        if waiting.is_imported and not await asyncio.wait_for(answered, HAND_OVER_S):
            return False
        manager.update_env(env={SESSION_NAME: session_name})  # for when it is restarted
        file = Path(manager.connection_file)
        file.write_text(json.dumps({**json.loads(file.read_text()), "jupyter_session": session_name}, indent=2))
        return True

    def _execute(self, kernel_id: str, call: str, then: Callable[[bool], None]) -> None:
        """Let the kernel call a function of this module, and `then` one with True if it raised nothing."""
        code = f"import {__name__} as _prepared; _prepared.{call}; del _prepared"
        flags = {"silent": True, "store_history": False, "allow_stdin": False, "stop_on_error": False}
        self._ask(kernel_id, "execute_request", {"code": code, "user_expressions": {}, **flags}, then)

    def _ask(self, kernel_id: str, message_type: str, content: dict[str, Any], then: Callable[[bool], None]) -> None:
        manager = self._kernels.get_kernel(kernel_id)
        channel = manager.connect_shell()

        def answered(parts: list[Any]) -> None:
            _, message = manager.session.feed_identities(parts)
            answer = manager.session.deserialize(message)["content"]
            if answer["status"] != "ok":
                self._log.info("The prepared kernel says: %s", answer.get("evalue"))
            channel.close()
            then(answer["status"] == "ok")

        channel.on_recv(answered)
        manager.session.send(channel, message_type, content)

    async def _end_if_unwanted(self) -> None:
        is_idle = time.monotonic() - self._asked_at > IDLE_S
        async with self._lock:
            if is_idle or not self._is_possible or available_bytes() < SHORT_BYTES:
                await self._end()

    async def _end(self) -> None:
        waiting = self._forget()
        if waiting is not None and waiting.kernel_id in self._kernels:
            await ensure_async(self._kernels.shutdown_kernel(waiting.kernel_id, now=True))

    def _forget(self) -> _Waiting | None:
        waiting, self._waiting = self._waiting, None
        self._look.stop()
        return waiting


def _others(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a library may have read while it was imported."""
    return {name: value for name, value in environment.items() if name != SESSION_NAME}


def available_bytes() -> int:
    """Return the memory that new processes may take, on this machine or in its container."""
    available = [int(psutil.virtual_memory().available)]
    with contextlib.suppress(OSError, ValueError):  # not a container, or one without a limit ("max")
        group = Path("/sys/fs/cgroup")
        cached = re.search(r"^inactive_file (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
        used = int((group / "memory.current").read_text()) - int(cached[1] if cached else 0)
        available.append(int((group / "memory.max").read_text()) - used)
    return min(available)
