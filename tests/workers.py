"""Tests run in processes that are forked when all of them are collected: `python -m pytest --workers 4 …`.

Collecting imports all that tests need, which takes fifteen seconds of a core, and minutes where Python has compiled
nothing yet. Workers that are started one by one would each do so. A worker takes one file at a time, in the order of
the collection. The gloo worlds of all workers are forked from one server (`tests.worlds`).
"""

from __future__ import annotations

import itertools
import os
import shutil
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from workbench.base.machine import cache_home

CONTEXT = get_context("fork")
NUMBER = struct.Struct("H")
"""How a file's number is written into the queue: a pipe, of which each read is of one worker alone."""
SHARED = {made: cache_home() / made for made in ("calibrations", "devices", "texts", "tokens")}
"""Folders of the cache that take long to fill, so that all processes and the user share them."""


def own_home() -> Path:
    """Give this process a cache folder of its own, in which its runs do not queue for the devices of another's."""
    home = Path(tempfile.mkdtemp(prefix="workbench-tests-"))
    for name, folder in SHARED.items():
        folder.mkdir(parents=True, exist_ok=True)
        (home / name).symlink_to(folder)
    os.environ["WORKBENCH_HOME"] = str(home)
    return home


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=0, metavar="N", help="run tests in N processes, by files")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.workers:
        config.pluginmanager.register(_Workers(config.option.workers), "workbench-workers")


class _Workers:
    """The plugin of the process that collects, forks and reports."""

    def __init__(self, number: int) -> None:
        self.number = number

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        """Let torch compute in one thread from here on, and in all workers.

        The threads of a parallel region do not survive a fork: where modules of tests had computed in two, as on a
        machine with two whole cores, a worker that computed in parallel waited for a thread for ever.
        """
        import torch

        torch.set_num_threads(1)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.config.option.collectonly or session.testsfailed:
            return None  # pytest's own loop says what could not be collected
        files = [list(items) for _, items in itertools.groupby(session.items, key=lambda item: item.path)]
        queue, filled = os.pipe()
        os.write(filled, b"".join(NUMBER.pack(number) for number in range(len(files))))
        os.close(filled)
        # All workers have their folders in the one that pytest cleans up.
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        if terminal := session.config.pluginmanager.get_plugin("terminalreporter"):
            terminal.showfspath = False  # results of several files follow each other
        if worlds := sys.modules.get("tests.worlds"):  # some of these tests need it
            worlds.serve()
        sys.stdout.flush()
        running: dict[Connection, BaseProcess] = {}
        numbers = itertools.count()

        def start(first: Sequence[pytest.Item] = ()) -> None:
            """Fork a worker that begins with these tests."""
            ours, theirs = CONTEXT.Pipe(duplex=False)
            process = CONTEXT.Process(target=_work, args=(session, first, files, queue, theirs, next(numbers)))
            process.start()
            theirs.close()
            running[ours] = process

        try:
            for _ in range(self.number):
                start()
            self._report(session, running, start)
        finally:
            os.close(queue)
            for process in running.values():
                process.terminate()
        return True

    def _report(
        self,
        session: pytest.Session,
        running: dict[Connection, BaseProcess],
        start: Callable[[Sequence[pytest.Item]], None],
    ) -> None:
        """Hand on what workers tell until each has said that it has ended.

        The test at which a worker dies has failed, and another worker goes on with the rest of its file.
        """
        hook, at = session.config.hook, dict[Connection, str]()
        items = {item.nodeid: index for index, item in enumerate(session.items)}
        while running:
            for connection in wait(list(running)):
                assert isinstance(connection, Connection)
                try:
                    message = connection.recv()
                except EOFError:
                    process = running.pop(connection)
                    process.join()
                    words = f"a worker ended with exit code {process.exitcode}"
                    if connection not in at:
                        raise session.Interrupted(f"{words} before its first test") from None
                    index = items[at[connection]]
                    item = session.items[index]
                    failed = pytest.TestReport(item.nodeid, item.location, {}, "failed", f"{words}.", "call")
                    hook.pytest_runtest_logreport(report=failed)
                    start(
                        list(
                            itertools.takewhile(lambda each, of=item: each.path == of.path, session.items[index + 1 :])
                        )
                    )
                    continue
                if message is None:
                    running.pop(connection).join()
                    continue
                name, told = message
                if name == "pytest_runtest_logstart":
                    at[connection] = told["nodeid"]
                else:
                    told = {"report": hook.pytest_report_from_serializable(config=session.config, data=told)}
                getattr(hook, name)(**told)
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)


class _Teller:
    """The plugin of a worker, which sends what its tests report."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self.config, self.connection = config, connection

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self.connection.send(("pytest_runtest_logstart", {"nodeid": nodeid, "location": location}))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.connection.send(("pytest_runtest_logreport", data))


def _work(
    session: pytest.Session,
    first: Sequence[pytest.Item],
    files: Sequence[list[pytest.Item]],
    queue: int,
    connection: Connection,
    number: int,
) -> None:
    """Run the tests of one file after another until the queue is empty; `first` come before these."""
    config = session.config
    manager, home = config.pluginmanager, own_home()
    manager.unregister(name="terminalreporter")
    manager.register(_Teller(config, connection))
    capture: Any = manager.get_plugin("capturemanager")
    capture.stop_global_capturing()  # into files that the other workers write too
    capture.start_global_capturing()
    factory: Any = config._tmp_path_factory  # type: ignore[attr-defined]
    factory._basetemp = factory.getbasetemp() / f"worker-{number}"
    factory._basetemp.mkdir()
    tests = itertools.chain(first, _taken(files, queue))
    item = next(tests, None)
    while item is not None:
        following = next(tests, None)  # tells which fixtures the next test does not share
        config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        item = following
    capture.stop_global_capturing()
    shutil.rmtree(home, ignore_errors=True)
    connection.send(None)


def _taken(files: Sequence[list[pytest.Item]], queue: int) -> Iterator[pytest.Item]:
    while taken := os.read(queue, NUMBER.size):
        yield from files[NUMBER.unpack(taken)[0]]
