"""Accelerate's launcher for the ranks of one node, whose rendezvous store only this machine can reach.

    python -m workbench.execution.local_launch ARGUMENTS      # those of `accelerate launch`

The store that torch opens by itself listens on every address of the machine and asks nobody who they are. Whoever
reaches it could give the ranks other addresses to talk to, and ranks unpickle what they receive from each other.

Ranks are forked from this process, which imports the worker once for all of them: those imports take most of the time
in which a run starts. CUDA does not survive a fork. So torch is told how many GPUs there are, and where an import has
initialised CUDA's driver all the same, or `$WORKBENCH_FORK_GPU_RANKS` is 0, ranks on GPUs are new processes.
"""

from __future__ import annotations

import argparse
import atexit
import ctypes
import datetime
import functools
import gc
import importlib
import logging
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    gc.disable()  # until the imports are done, because collecting meanwhile takes a fifth of their time

import psutil
import torch.multiprocessing
from accelerate.commands import launch
from torch.distributed import TCPStore, run  # type: ignore[attr-defined]  # torch exports the first implicitly
from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from workbench.record.rundir import RunDir, read_object

LOOPBACK = "127.0.0.1"
BACKEND = "loopback"
"""Name of the rendezvous, for `--rdzv_backend`."""
FORKED = "forked"
"""First argument of this file where torchrun executes it in a rank that it forked."""
PR_SET_PDEATHSIG = 1
"""Number of the option of Linux's `prctl` that names a signal for the death of the parent."""
FORKS_GPU_RANKS = "WORKBENCH_FORK_GPU_RANKS"
"""Environment variable: with 0, ranks on GPUs are new processes."""
TIMEOUT_S = 600
"""Seconds that the store waits for a rank; torch's own rendezvous waits as long."""


@functools.cache  # it has to live as long as the process
def loopback_store() -> TCPStore:
    """Return the server of this process's store."""
    return new_loopback_store()


def new_loopback_store() -> TCPStore:
    """Return the server of a store that listens on a free port of the loopback interface, for as long as it lives."""
    listener = socket.create_server((LOOPBACK, 0))
    return TCPStore(
        LOOPBACK,
        listener.getsockname()[1],
        is_master=True,
        timeout=datetime.timedelta(seconds=TIMEOUT_S),
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),  # without a socket, torch binds one to every address
    )


def loopback_interface() -> str:
    """Return the name of the loopback interface, which is `lo` on Linux; "" where there is none."""
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, addresses in interfaces if any(each.address == LOOPBACK for each in addresses)), "")


class LoopbackRendezvous(StaticTCPRendezvous):
    """The rendezvous of one node over a store that listens on the loopback interface."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        store = loopback_store()
        super().__init__(LOOPBACK, store.port, 0, 1, parameters.run_id, TIMEOUT_S)
        self._store = store  # the method of the base class opens a store only where there is none

    def get_backend(self) -> str:
        """Return the name under which torch's registry knows this rendezvous."""
        return BACKEND


def main(arguments: list[str]) -> None:
    """Run `accelerate launch`, with the store and gloo on the loopback interface.

    Ranks that are forked find imported here what each of them needs. Of several ranks, torchrun forks them, whose
    options `--run-path` and `--start-method` Accelerate's parser does not know but hands on. One rank is
    started by a function of Accelerate's launcher, which is replaced.
    """
    if interface := loopback_interface():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    rendezvous_handler_registry.register(BACKEND, LoopbackRendezvous)
    run.logger.setLevel(logging.ERROR)  # it warns that the address it was given has no use
    parsed = launch.launch_command_parser().parse_args(["--rdzv_backend", BACKEND, *arguments])
    experiment = read_object(RunDir(Path(*parsed.training_script_args)).experiment)
    if preload(parsed.training_script, experiment, os.environ.get("ACCELERATE_USE_CPU") == "true"):
        rank = (str(os.getpid()), parsed.training_script, *parsed.training_script_args)
        gc.freeze()  # otherwise each rank's first collection would copy the pages of every object that it shares
        atexit.register(gc.unfreeze)  # otherwise a launcher that fails would say that these objects leak
        parsed.module, parsed.run_path, parsed.start_method = False, True, "fork"
        # Once it is told to end, torchrun reads no more of what ranks return, and each waits until it has: for 30 s. So
        # it dies of the signal, as the launcher of one rank does, and the ranks save, and leave.
        parsed.signals_to_handle = "SIGQUIT"
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        parsed.training_script, parsed.training_script_args = __file__, [FORKED, *rank]
        launch.simple_launcher = _fork_one
        launch.is_bf16_available = lambda *_: True  # its question to CUDA would not survive the fork; the ranks ask too
        context = torch.multiprocessing
        context.start_processes = _reporting(context.start_processes)  # type: ignore[attr-defined]  # exported implicitly
    gc.enable()
    launch.launch_command(parsed)


def preload(worker: str, experiment: Mapping[str, Any], on_cpu: bool) -> bool:
    """Import what ranks need, and return True if they can be forked from this process.

    `worker` is the ranks' module, and `experiment` the JSON of the run's, empty where it is not known yet.
    """
    if not on_cpu:
        if os.environ.get(FORKS_GPU_RANKS) == "0":
            return False
        # Torch would ask NVML, whose files are closed in what is forked from here, and then the driver. Private, and so
        # named since torch 2.1.
        torch.cuda._cached_device_count = len(os.environ["CUDA_VISIBLE_DEVICES"].split(","))
    from workbench.execution import build

    if can_fork := on_cpu or build.cuda_is_untouched():
        importlib.import_module(worker)
        build.preload(experiment)
        if not on_cpu:
            build.preload_compiler()
            torch.cuda.is_available()  # as torchrun asks
            can_fork = build.cuda_is_untouched()
    if not can_fork:
        print("Ranks are new processes: an import has initialised CUDA's driver, which does not survive a fork.")
    return can_fork


def _reporting(start: Callable[..., Any]) -> Callable[..., Any]:
    """Return `start_processes`, whose context prints the exit code of each rank, in the order in which they end.

    torchrun reports one failure of processes that it forked. The others matter: a rank that a signal killed, or that
    called `os._exit`, leaves no error of its own, and the rank that notices its silence may be the one reported.
    """

    def started(*args: Any, **kwargs: Any) -> Any:
        context = start(*args, **kwargs)
        join, told = context.join, set[int]()

        def joined(*args: Any, **kwargs: Any) -> Any:
            for rank, process in enumerate(context.processes):
                if process.exitcode is not None and rank not in told:
                    told.add(rank)
                    print(f"rank: {rank}\nexitcode: {process.exitcode}", file=sys.stderr, flush=True)
            return join(*args, **kwargs)

        context.join = joined
        return context

    return started


def _fork_one(parsed: argparse.Namespace) -> None:
    """Run the only rank as `accelerate.commands.launch.simple_launcher` does, in a process that is forked."""
    command, environment = launch.prepare_simple_launcher_cmd_env(parsed)
    os.environ.update(environment)
    process = multiprocessing.get_context("fork").Process(target=_run_forked, args=parsed.training_script_args)
    process.start()
    process.join()
    print(f"rank: 0\nexitcode: {process.exitcode}", file=sys.stderr, flush=True)
    if process.exitcode:
        raise subprocess.CalledProcessError(process.exitcode, command)


def _run_forked(_: str, launcher: str, module: str, directory: str) -> None:
    """Run a rank in a process that was forked, which begins like one that was not, and does not outlive its work."""
    os.setsid()  # a signal to the launcher's group is not for the ranks
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # torchrun's handlers were inherited
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_PDEATHSIG, 0)  # torch asks for SIGINT when the launcher dies, but the ranks are to train on
    sys.argv = [module, directory]
    sys.modules.pop(module, None)  # `runpy` warns of a module that was imported; what it imports is what takes time
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        # torchrun's part of this process now waits for the launcher, and would do so for ever if that is gone.
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(launcher):
            os._exit(1)


if __name__ == "__main__":
    if sys.argv[1] == FORKED:
        _run_forked(*sys.argv[1:])
    else:
        main(sys.argv[1:])
        # What `os._exit` below leaves out; private, and so named since Python 3.
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(0)  # freeing every object of the imported libraries takes as long as importing half of them
