"""How long tests take: what the short run leaves out, which files start first, and which tests have grown too long.

`durations.json` holds the seconds of every test of half a second or more, measured in a whole run. Where a test uses
fixtures of its file or of the session, a second number is what these took, whichever test was the first to need them: a
test is as long as its own seconds and its part of those that it shares.

    python -m pytest tests/unit/test_data.py --record-durations      # records those of one file anew
    make durations                                                   # those of all files
"""

from __future__ import annotations

import fcntl
import json
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

FILE = Path(__file__).with_name("durations.json")
ROOT = FILE.parents[1]
LONG_S = 2.0
"""Seconds from which a test is left out of the short run, unless it is marked `representative`."""
RECORDED_S = 0.5
"""Seconds from which a test is recorded."""
UNRECORDED_S = 0.1
"""Seconds that a test without a record counts when files are ordered."""
COMPARED_S = 1.0
"""Seconds from which a recorded test tells how fast this run is; shorter ones vary too much."""
COMPARED_TESTS = 10
"""Number of such tests from which their median is trusted."""
MARK = "representative"
TAKEN = "seconds"
"""Name under which a report carries how long its test took."""


class Duration(NamedTuple):
    """The seconds of a test, and those of the fixtures that it shares with others."""

    own: float
    shared: float = 0.0


def read(file: Path) -> dict[str, Duration]:
    """Return the recorded duration of each test, by its node id; nothing where there is no record."""
    recorded = json.loads(file.read_text() or "{}") if file.exists() else {}
    return {test: Duration(*(value if isinstance(value, list) else [value])) for test, value in recorded.items()}


def write(file: Path, measured: Mapping[str, Duration], collected: Iterable[str]) -> None:
    """Record what was measured, keep what was not run, and forget tests that the collected files no longer hold."""
    there = set(collected)
    files = {test.partition("::")[0] for test in there}

    def is_known(test: str) -> bool:
        path = test.partition("::")[0]
        return test in there if path in files else (ROOT / path).exists()

    with file.open("a") as lock:  # the run of JupyterLab's tests may end at the same time
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept = {test: duration for test, duration in read(file).items() if is_known(test)}
        merged = {test: each for test, each in {**kept, **measured}.items() if max(each) >= RECORDED_S}
        lines = [f"{json.dumps(test)}: {_written(each)}" for test, each in sorted(merged.items())]
        file.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _written(duration: Duration) -> str:
    own, shared = (round(seconds, 1) for seconds in duration)
    return str([own, shared] if shared >= RECORDED_S else own)


def lengths(durations: Mapping[str, Duration]) -> dict[str, float]:
    """Return the seconds of each test, with equal parts of a file's fixtures for the tests that share them."""
    users = Counter((test.partition("::")[0], each.shared) for test, each in durations.items())
    return {
        test: each.own + each.shared / users[test.partition("::")[0], each.shared] for test, each in durations.items()
    }


def total(durations: Iterable[Duration]) -> float:
    """Return the seconds of tests of one file, whose shared fixtures are made once."""
    every = list(durations)
    return sum(each.own for each in every) + max((each.shared for each in every), default=0.0)


def slowness(measured: Mapping[str, Duration], recorded: Mapping[str, Duration]) -> float:
    """Return how many times slower this run is than the recorded one, at least 1: the median over the tests of both."""
    then = {test: each.own for test, each in recorded.items() if test in measured and each.own >= COMPARED_S}
    ratios = [measured[test].own / seconds for test, seconds in then.items()]
    return max(1.0, statistics.median(ratios)) if len(ratios) >= COMPARED_TESTS else 1.0


def in_order(files: Mapping[str, float]) -> list[str]:
    """Return files by falling seconds, so that no worker begins a long one when the others have nothing left to do."""
    return sorted(files, key=lambda file: (-files[file], file))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("durations")
    group.addoption("--short", action="store_true", help=f"leave out tests recorded to take over {LONG_S:g} s")
    group.addoption("--record-durations", nargs="?", const=str(FILE), metavar="FILE", help="record how long tests take")


def pytest_configure(config: pytest.Config) -> None:
    if (file := config.option.record_durations) and not file.endswith(".json"):
        raise pytest.UsageError(f"--record-durations would overwrite {file}. Give the tests before this option.")
    config.addinivalue_line("markers", f"{MARK}: stays in the short run although it takes over {LONG_S:g} s")
    config.pluginmanager.register(Durations(config), "workbench-durations")


class Durations:
    """The plugin of one pytest process: it selects, orders and times tests, and compares them with their records."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.recorded = read(FILE)
        self.lengths = lengths(self.recorded)
        self.measured: dict[str, Duration] = {}
        """Duration of each test that passed."""
        self.in_short_run: set[str] = set()
        """Tests that are recorded as short or not at all, without those that have the mark."""
        self.collected: set[str] = set()
        self.left_out: list[str] = []
        self._shared: dict[tuple[str, str, int], float] = {}
        """Seconds of each fixture that several tests share: where it is defined, its name, number of its parameter."""
        self._running = ""
        self._took: dict[str, float] = defaultdict(float)
        """Seconds of each test's own phases in this process, without shared fixtures."""

    def _record(self, test: str) -> Duration:
        return self.recorded.get(test, Duration(UNRECORDED_S))

    def is_long(self, item: pytest.Item) -> bool:
        return self.lengths.get(item.nodeid, UNRECORDED_S) > LONG_S

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        self.collected.add(item.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.config.option.short:
            long = [item for item in items if self.is_long(item) and item.get_closest_marker(MARK) is None]
            self.left_out = [item.nodeid for item in long]
            if long:
                self.config.hook.pytest_deselected(items=long)
                kept = {item.nodeid for item in items}.difference(self.left_out)
                items[:] = [item for item in items if item.nodeid in kept]
        files = self._by_file(item.nodeid for item in items)
        place = {file: index for index, file in enumerate(in_order(files))}
        items.sort(key=lambda item: place[item.nodeid.partition("::")[0]])

    def _by_file(self, tests: Iterable[str]) -> dict[str, float]:
        """Return the recorded seconds of the tests of each file."""
        files = defaultdict[str, list[Duration]](list)
        for test in tests:
            files[test.partition("::")[0]].append(self._record(test))
        return {file: total(durations) for file, durations in files.items()}

    # In the process that runs tests

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running = nodeid

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> Generator[None, Any, Any]:
        started = time.perf_counter()
        try:
            return (yield)
        finally:
            if fixturedef.scope != "function":
                seconds = time.perf_counter() - started
                self._shared[fixturedef.baseid or "", fixturedef.argname, request.param_index] = seconds
                self._took[self._running] -= seconds

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        self._took[item.nodeid] += call.duration
        if call.when == "teardown":
            shared = sum(self._shared.get(key, 0.0) for key in _shared_fixtures(item))
            item.user_properties.append((TAKEN, (self._took.pop(item.nodeid), shared)))
        return (yield)

    # In the process that reports

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.measured[report.nodeid] = Duration(report.duration)
            if MARK not in report.keywords and self.lengths.get(report.nodeid, UNRECORDED_S) <= LONG_S:
                self.in_short_run.add(report.nodeid)
        if report.when == "teardown" and report.nodeid in self.measured:
            self.measured[report.nodeid] = Duration(*dict(report.user_properties)[TAKEN])

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        if self.config.option.record_durations:
            whole_files = not any("::" in argument for argument in self.config.args)
            collected = self.collected if whole_files else ()
            write(Path(self.config.option.record_durations), self.measured, collected)

    def grown(self) -> dict[str, float]:
        """Return the tests that are too long for the short run by now, and their seconds.

        The limit grows with the slowness of this run. It is no verdict, because some tests slow down more than others
        on a busy machine: who reads of one records it, and the short run leaves it out.
        """
        limit = LONG_S * slowness(self.measured, self.recorded)
        measured = lengths(self.measured)
        return {test: measured[test] for test in sorted(self.in_short_run) if measured[test] > limit}

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        say = terminalreporter.write_line
        grown = {} if self.config.option.record_durations else self.grown()
        if grown:
            say(f"{len(grown)} tests took over {LONG_S:g} s, more than was recorded of them:", bold=True)
            for test, seconds in grown.items():
                say(f"{seconds:6.1f} s  {test}")
            files = " ".join(sorted({test.partition("::")[0] for test in grown}))
            say(
                "Make them shorter. If what they state is worth the time, record them, and the short run leaves them "
                f"out: python -m pytest {files} --record-durations"
            )
        if self.left_out:
            minutes = sum(self._by_file(self.left_out).values()) / 60
            say(
                f"{len(self.left_out)} tests of over {LONG_S:g} s did not run ({minutes:.0f} minutes of one process). "
                "All of them: make test-all. Those of one file: python -m pytest FILE.",
                bold=True,
            )


def _shared_fixtures(item: pytest.Item) -> list[tuple[str, str, int]]:
    """Return the keys of the fixtures of a test that others may use too, as `Durations._shared` has them."""
    definitions = item._fixtureinfo.name2fixturedefs  # type: ignore[attr-defined]
    indices = getattr(getattr(item, "callspec", None), "indices", {})
    return [
        (one[-1].baseid or "", name, indices.get(name, 0))
        for name, one in definitions.items()
        if one[-1].scope != "function"
    ]
