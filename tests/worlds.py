"""The process from which the ranks of gloo worlds are forked: one for all workers of a test run.

It has imported what ranks need, and captured the BERT of many tests. Where one process collects the tests and forks
its workers, the server is forked from it too. The fork server of `multiprocessing` can only be started anew, and serves
only the process that started it: its private fields are set here alone.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
from multiprocessing import connection, forkserver, resource_tracker

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

OUTERMOST = (" in <module>\n", " in _run_module_as_main\n", "  ...\n")
"""Ends of the stack of a main thread: of a script, of one that is forked from pytest, of one of too many frames."""


def preload() -> None:
    """Let the fork server of this process, which starts when it is first needed, import what ranks need."""
    multiprocessing.set_forkserver_preload(list(PRELOADED))


def serve() -> None:
    """Fork the server from this process, for the workers that it forks afterwards."""
    resource_tracker.ensure_running()
    listener = socket.socket(socket.AF_UNIX)
    address = connection.arbitrary_address("AF_UNIX")
    listener.bind(address)
    listener.listen()
    alive, held = os.pipe()  # the server ends when no process holds the other end
    if os.fork() == 0:
        os.close(held)
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)  # warnings of ranks would stand between the dots
        os.dup2(nothing, 2)
        try:
            forkserver.main(listener.detach(), alive, PRELOADED)
        finally:
            os._exit(0)
    listener.close()
    os.close(alive)
    server = forkserver._forkserver
    server._forkserver_address, server._forkserver_alive_fd = address, held
    server.ensure_running = resource_tracker.ensure_running  # it would wait for a child, which the server is of another
