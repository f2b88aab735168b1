"""The kernel that waits for a click: it is what a new one would be, there is one at most, and it outlives nothing."""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from jupyter_client.blocking.client import BlockingKernelClient

from tests.patience import PATIENCE_S, Clock, eventually
from tests.unit.test_lab import ask, jupyter_server
from workbench.base.errors import WorkbenchError
from workbench.lab import prepared_kernel
from workbench.lab.prepared_kernel import IDLE_S, LEAST_BYTES, SHORT_BYTES, PreparedKernel
from workbench.runs.launching import fork_server, launcher
from workbench.runs.launching.processes import SUPERVISOR
from workbench.runs.launching.supervisor import AHEAD

SEEN = """json.dumps({
    "cwd": os.getcwd(), "path": sys.path, "names": sorted(get_ipython().user_ns), "session": __session__,
    "count": get_ipython().execution_count, "visited": list(map(str, _dh)), "environment": dict(os.environ),
})"""
SET_BY_IMPORTS = "TORCHINDUCTOR_CACHE_DIR"
"""Environment variable that torch sets where a model is captured, as the notebook's own call would."""


def in_kernel(root: Path, kernel: str, expression: str) -> Any:
    """Return the JSON that an expression makes in a kernel."""
    client = BlockingKernelClient(connection_file=str(root / ".jupyter" / "RUNTIME" / f"kernel-{kernel}.json"))
    client.load_connection_file()
    client.start_channels(iopub=False, stdin=False, hb=False, control=False)  # a busy kernel's heart beats late
    try:
        asked = {"answer": f"(lambda json, os, sys: {expression})(*map(__import__, ('json', 'os', 'sys')))"}
        reply = client.execute("", silent=True, user_expressions=asked, reply=True, timeout=PATIENCE_S)
        answer = reply["content"]["user_expressions"]["answer"]
        assert answer["status"] == "ok", answer
        return json.loads(eval(answer["data"]["text/plain"]))
    finally:
        client.stop_channels()


def clicked(url: str, folder: str) -> tuple[str, str] | None:
    """Prepare a kernel and click on a card; return the notebook and the kernel, None if that was not given.

    It is not if one of its files was changed meanwhile, as in a checkout in which somebody works.
    """
    for _ in range(2):  # a page that shows the cards again
        assert ask(f"{url}/workbench/kernel", {"folder": folder}) == (200, {})
    (kernel,) = [each["id"] for each in ask(f"{url}/api/kernels")[1]]
    _, copied = ask(f"{url}/workbench/notebooks", {"template": "sweep", "folder": folder})
    return (copied["path"], kernel) if ask(f"{url}/workbench/session", copied)[1]["given"] else None


def test_a_click_gets_the_prepared_kernel_which_is_as_a_new_one_would_be(tmp_path: Path) -> None:
    with jupyter_server(tmp_path) as (url, root):
        (root / "mine").mkdir()
        path, kernel = eventually(lambda: clicked(url, "mine"))
        (session,) = ask(f"{url}/api/sessions")[1]
        assert (session["path"], session["kernel"]["id"]) == (path, kernel)
        body = {"path": path, "type": "notebook", "name": Path(path).name, "kernel": {"name": "python3"}}
        assert ask(f"{url}/api/sessions", body)[1]["id"] == session["id"], "the page finds the session of its notebook"
        modules = in_kernel(tmp_path, kernel, "json.dumps(sorted(sys.modules))")
        used = {"torch.export", "transformers.modeling_utils", "plotly.graph_objs", "anywidget", "matplotlib.figure"}
        assert used <= set(modules), "none of them costs processor time behind the click"
        frozen = in_kernel(tmp_path, kernel, "json.dumps(__import__('gc').get_freeze_count())")
        assert frozen > 100_000, "no collection behind the click looks at what was imported"

        other = ask(f"{url}/api/sessions", {**body, "path": "mine/other.ipynb", "name": "other.ipynb"})[1]["kernel"][
            "id"
        ]
        seen, new = (in_kernel(tmp_path, each, SEEN) for each in (kernel, other))
        for each in (seen, new):  # the server may have it from a test that captured a model
            each["environment"].pop(SET_BY_IMPORTS, None)
        notebooks = [str(root / path), str(root / "mine" / "other.ipynb")]
        assert [each["environment"].pop("JPY_SESSION_NAME") for each in (seen, new)] == notebooks
        assert [each.pop("session") for each in (seen, new)] == notebooks
        environments = [each.pop("environment") for each in (seen, new)]
        assert dict(environments[0].items() ^ environments[1].items()) == {}
        assert seen == new
        files = [tmp_path / ".jupyter" / "RUNTIME" / f"kernel-{each}.json" for each in (kernel, other)]
        assert [json.loads(file.read_text())["jupyter_session"] for file in files] == notebooks
        assert [file.stat().st_mode & 0o777 for file in files] == [0o600, 0o600]

        assert ask(f"{url}/workbench/session", {"path": path}) == (200, {"given": False}), "it is used"
        assert ask(f"{url}/workbench/kernel", {"folder": ""}) == (200, {}), "the next is prepared again"
        (waiting,) = {each["id"] for each in ask(f"{url}/api/kernels")[1]} - {kernel, other}
        process = in_kernel(tmp_path, kernel, "json.dumps(os.getpid())")
        assert ask(f"{url}/api/kernels/{kernel}/restart", {})[0] == 200
        again = in_kernel(tmp_path, kernel, SEEN)
        assert (again["cwd"], again["session"]) == (seen["cwd"], notebooks[0]), "it is restarted for its notebook"
        left = [process, *(in_kernel(tmp_path, each, "json.dumps(os.getpid())") for each in (waiting, kernel, other))]
    eventually(lambda: not any(map(psutil.pid_exists, left)), lambda: left)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Import a module from a file, as a prepared kernel has done, and return the file."""
    file = tmp_path / "library" / "prepared_module.py"
    file.parent.mkdir()
    file.write_text("")
    monkeypatch.syspath_prepend(str(file.parent))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JPY_SESSION_NAME", "")
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setattr(prepared_kernel, "get_ipython", lambda: SimpleNamespace(user_ns={}))
    importlib.import_module("prepared_module")
    own = {"prepared_module": fork_server.sources()["prepared_module"]}
    monkeypatch.setattr(prepared_kernel, "_sources", own)
    yield file
    del sys.modules["prepared_module"]


def test_a_kernel_is_not_given_if_a_file_that_it_imported_was_changed(module: Path) -> None:
    prepared_kernel.hand_over("/a.ipynb")
    assert os.environ["JPY_SESSION_NAME"] == "/a.ipynb"
    os.utime(module, ns=(1, 1))
    with pytest.raises(WorkbenchError, match="changed"):
        prepared_kernel.hand_over("/a.ipynb")


def test_a_kernel_is_not_given_if_its_folder_has_a_module_of_that_name_now(module: Path, tmp_path: Path) -> None:
    (tmp_path / module.name).write_text("")
    with pytest.raises(WorkbenchError, match="changed"):
        prepared_kernel.hand_over("/a.ipynb")


class Kernels(dict[str, str]):
    """The kernels of a server, of which none is a process; each is in a folder."""

    async def start_kernel(self, path: str, **_: Any) -> str:
        self[name := f"kernel {self.started}"] = path
        self.started += 1
        return name

    started = 0

    async def shutdown_kernel(self, name: str, **_: Any) -> None:
        del self[name]

    def get_kernel(self, _name: str) -> Any:
        """Return a kernel that answers what it is asked for its own sake, and executes nothing."""
        channel = SimpleNamespace(on_recv=lambda then: vars(channel).update(then=then), close=lambda: None)

        def send(_channel: Any, message_type: str, _content: Any) -> None:
            if message_type == "kernel_info_request":
                asyncio.get_running_loop().call_soon(channel.then, [])

        session = SimpleNamespace(send=send, feed_identities=lambda parts: ([], parts))
        session.deserialize = lambda _: {"content": {"status": "ok"}}
        return SimpleNamespace(connect_shell=lambda: channel, session=session)


Kernels.__module__ = "jupyter_server.services.kernels.of_the_test"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> tuple[PreparedKernel, Kernels, Clock, list[int]]:
    """Return a server's prepared kernel, all of its kernels, its clock, and its available memory."""
    kernels, clock, memory = Kernels(), Clock(), [LEAST_BYTES]
    monkeypatch.setattr(prepared_kernel, "available_bytes", lambda: memory[0])
    monkeypatch.setattr(prepared_kernel, "time", clock)
    contents = SimpleNamespace(get_kernel_path=lambda path: path)
    sessions = SimpleNamespace(get_kernel_env=lambda path, name=None: {"JPY_SESSION_NAME": path})  # noqa: ARG005
    managers = {"kernel_manager": kernels, "session_manager": sessions, "contents_manager": contents}
    return PreparedKernel(managers, logging.getLogger()), kernels, clock, memory


Server = tuple[PreparedKernel, Kernels, Clock, list[int]]


def of(work: Callable[[], Any]) -> None:
    asyncio.run(work())


def test_one_kernel_waits_at_most_in_the_folder_that_was_shown_last(server: Server) -> None:
    prepared, kernels, _, _ = server

    async def look() -> None:
        await asyncio.gather(*(prepared.prepare("") for _ in range(5)))
        assert kernels == {"kernel 0": ""}
        await prepared.prepare("mine")
        assert kernels == {"kernel 1": "mine"}
        del kernels["kernel 1"]  # the user shut it down
        await prepared.prepare("mine")
        assert kernels == {"kernel 2": "mine"}

    of(look)


def test_no_kernel_waits_where_memory_is_short(server: Server) -> None:
    prepared, kernels, _, memory = server

    async def look() -> None:
        memory[0] = LEAST_BYTES - 1
        await prepared.prepare("")
        assert kernels == {}
        memory[0] = LEAST_BYTES
        await prepared.prepare("")
        memory[0] = SHORT_BYTES
        await prepared._end_if_unwanted()
        assert len(kernels) == 1
        memory[0] = SHORT_BYTES - 1
        await prepared._end_if_unwanted()
        assert kernels == {}

    of(look)


def test_a_kernel_waits_for_minutes_after_the_last_look_at_the_cards(server: Server) -> None:
    prepared, kernels, clock, _ = server

    async def look() -> None:
        await prepared.prepare("")
        clock.now += IDLE_S
        await prepared.prepare("")
        clock.now += IDLE_S
        await prepared._end_if_unwanted()
        assert len(kernels) == 1
        clock.now += 1
        await prepared._end_if_unwanted()
        assert kernels == {}
        assert not prepared._look.is_running()

    of(look)


def test_a_notebook_in_another_folder_or_environment_starts_its_own_kernel(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared, kernels, _, _ = server

    async def look() -> None:
        assert not await prepared.hand_over("mine/a.ipynb")
        await prepared.prepare("")
        assert not await prepared.hand_over("mine/a.ipynb")
        assert kernels == {}
        await prepared.prepare("mine/a.ipynb")  # the folder that the fake contents return for the notebook
        changed = {"JPY_SESSION_NAME": "", "OMP_NUM_THREADS": "7"}
        monkeypatch.setattr(prepared._sessions, "get_kernel_env", lambda *_: changed)
        assert not await prepared.hand_over("mine/a.ipynb")
        assert kernels == {}

    of(look)


def test_a_kernel_that_waits_takes_no_memory_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: pytest.fail("CUDA was asked"))
    asked = list[tuple[str, ...]]()
    client = SimpleNamespace(start_ahead=lambda *command, **_: asked.append(command))
    monkeypatch.setattr(fork_server, "client", lambda: client)
    launcher.import_ahead()
    assert asked == [(SUPERVISOR, AHEAD, "cuda", "2")]
