"""Accelerate's launcher for the ranks of one node, whose rendezvous store only this machine can reach.

    python -m workbench.execution.local_launch ARGUMENTS      # those of `accelerate launch`

The store that torch opens by itself listens on every address of the machine and asks nobody who they are. Whoever
reaches it could give the ranks other addresses to talk to, and ranks unpickle what they receive from each other.
"""

from __future__ import annotations

import datetime
import functools
import logging
import os
import socket
import sys

import psutil
from torch.distributed import TCPStore, run  # type: ignore[attr-defined]  # torch exports the first implicitly
from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

LOOPBACK = "127.0.0.1"
BACKEND = "loopback"
"""Name of the rendezvous, for `--rdzv_backend`."""
TIMEOUT_S = 600
"""Seconds that the store waits for a rank; torch's own rendezvous waits as long."""


@functools.cache  # it has to live as long as the process
def loopback_store() -> TCPStore:
    """Return the server of this process's store, which listens on a free port of the loopback interface."""
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
    """Run `accelerate launch`, with the store and gloo on the loopback interface."""
    from accelerate.commands.launch import launch_command, launch_command_parser

    for interface, addresses in psutil.net_if_addrs().items():
        if any(each.address == LOOPBACK for each in addresses):  # `lo` on Linux
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    rendezvous_handler_registry.register(BACKEND, LoopbackRendezvous)
    run.logger.setLevel(logging.ERROR)  # it warns that the address it was given has no use
    launch_command(launch_command_parser().parse_args(["--rdzv_backend", BACKEND, *arguments]))


if __name__ == "__main__":
    main(sys.argv[1:])
