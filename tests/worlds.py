"""The process from which the ranks of gloo worlds are forked: one for all workers of a test run.

It has imported what ranks need, and captured the BERT of many tests. That takes ten seconds of a core, so that the
workers of pytest-xdist share the one that their controller starts. The fork server of `multiprocessing` serves whoever
knows its address, but offers no function by which a process that it did not start may learn it: its private fields are
read and set here alone.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

ADDRESS, KEY = "WORKBENCH_TEST_FORK_SERVER", "WORKBENCH_TEST_FORK_SERVER_KEY"
"""Environment variables by which workers find the server; later versions of Python ask for a key."""
PRELOADED = (
    "tests.distributed.zoo",
    "tests.distributed.test_every_plan",
    "workbench.execution.worker",
    "transformers.models.bert.modeling_bert",
    # What a capture or a compilation imports when it is first needed takes longer than that of a small model.
    "torch.export._trace",
    "torch._inductor.compile_fx",
    "torch._dynamo.backends.distributed",
    "workbench.cost.graph_profiler",
    "workbench.execution.blocks.compiled",
    "workbench.planning.search",
    "tests.distributed.one_bert",
)


def serve() -> None:
    """Start the server, and tell its address to all processes that this one starts.

    Where Python has not compiled torch yet, which takes longer than to import it, wait until the server has: otherwise
    every worker would do so at the same time.
    """
    multiprocessing.set_forkserver_preload(list(PRELOADED))
    forkserver.ensure_running()
    torch = importlib.util.find_spec("torch")
    if torch is not None and torch.cached and not Path(torch.cached).exists():
        first = multiprocessing.get_context("forkserver").Process(target=int)
        first.start()
        first.join()
    server = forkserver._forkserver
    os.environ[ADDRESS] = server._forkserver_address
    os.environ[KEY] = getattr(server, "_forkserver_authkey", b"").hex()


def find() -> None:
    """Fork this process's ranks from the server of the test run, or from one of its own if it is not part of one."""
    multiprocessing.set_forkserver_preload(list(PRELOADED))
    if ADDRESS not in os.environ:
        return
    server = forkserver._forkserver
    server._forkserver_address = os.environ[ADDRESS]
    server._forkserver_authkey = bytes.fromhex(os.environ[KEY])
    _, server._forkserver_alive_fd = os.pipe()  # a server ends with the processes that hold the other end of its own
    server.ensure_running = resource_tracker.ensure_running
