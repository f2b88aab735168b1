"""Tests run in processes that are forked when all of them are collected: `python -m pytest --workers 4 …`.

Collecting imports all that tests need, which takes fifteen seconds of a core, and minutes where Python has compiled
nothing yet. Workers that are started one by one would each do so. A worker takes one file at a time, in the order of
the collection. The gloo worlds of all workers are forked from one server (`tests.worlds`).
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import shutil
import struct
import sys
import tempfile
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

from workbench.machine import cache_home

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
        context, running = multiprocessing.get_context("fork"), {}
        try:
            for number in range(self.number):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(session, files, queue, theirs, number))
                process.start()
                theirs.close()
                running[ours] = process
            os.close(queue)
            self._report(session, running)
        finally:
            for process in running.values():
                process.terminate()
        return True

    def _report(self, session: pytest.Session, running: dict[Any, Any]) -> None:
        """Hand on what workers tell until each has said that it has ended."""
        hook, at = session.config.hook, dict.fromkeys(running, "its first test")
        while running:
            for connection in wait(list(running)):
                try:
                    message = connection.recv()
                except EOFError:
                    running[connection].join()
                    code = running[connection].exitcode
                    raise session.Interrupted(f"a worker ended with exit code {code} at {at[connection]}") from None
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
    session: pytest.Session, files: Sequence[list[pytest.Item]], queue: int, connection: Connection, number: int
) -> None:
    """Run the tests of one file after another until the queue is empty."""
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
    tests = _taken(files, queue)
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
