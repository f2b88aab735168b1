"""Browser tests need Chromium (`apt-get install chromium`) and pytest-playwright; without either they skip,
and the last lines of pytest say so."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import lab  # noqa: E402
from small_run import SmallRun  # noqa: E402

from tests.patience import PATIENCE_S  # noqa: E402

REPOSITORY = HERE.parents[1]
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


REMEDIES = {
    "pytest-playwright is not installed": "pip install pytest-playwright",
    "there is no Chromium on this machine": "sudo apt-get install chromium",
}
SKIPPED = pytest.StashKey[int]()


def _missing() -> str | None:
    no_playwright, no_chromium = REMEDIES
    if importlib.util.find_spec("pytest_playwright") is None:
        return no_playwright
    return no_chromium if CHROMIUM is None else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    missing, ours = _missing(), [item for item in items if HERE in item.path.parents]
    config.stash[SKIPPED] = len(ours) if missing else 0
    if missing:
        for item in ours:
            item.add_marker(pytest.mark.skip(reason=missing))


@pytest.fixture(scope="session")
def browser_type_launch_args(browser_type_launch_args: dict[str, Any]) -> dict[str, Any]:
    return {**browser_type_launch_args, "executable_path": CHROMIUM, "args": lab.CHROMIUM_ARGUMENTS}


@pytest.fixture(scope="session")
def browser_context_args(browser_context_args: dict[str, Any]) -> dict[str, Any]:
    return {**browser_context_args, "viewport": {"width": 1400, "height": 1000}}


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lab.Server]:
    """Start a JupyterLab; its kernels keep runs in `runs` beside the notebooks."""
    root = tmp_path_factory.mktemp("lab")
    environment = {"PYTHONPATH": str(REPOSITORY), "WORKBENCH_RUNS": str(root / "runs"), "OMP_NUM_THREADS": "1"}
    with lab.jupyterlab(root, environment) as running:
        yield running


def spin() -> None:
    while True:
        pass


@pytest.fixture
def busy() -> Iterator[None]:
    """Keep every core busy."""
    processes = [multiprocessing.get_context("fork").Process(target=spin) for _ in range(os.cpu_count() or 1)]
    for process in processes:
        process.start()
    yield
    for process in processes:
        process.kill()
        process.join()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """Save a screenshot of a failed test's page before anything is cleaned up."""
    report = yield
    page = getattr(item, "funcargs", {}).get("lab_page")
    if report.when == "call" and report.failed and page is not None:
        item.funcargs["picture"](page, f"failed-{getattr(item, 'originalname', item.name)}")
        report.sections.append(("Browser console", "\n".join(page.said[-30:])))
    return report


@pytest.fixture(scope="session")
def context(browser: Any, browser_context_args: dict[str, Any]) -> Iterator[Any]:
    """Open the pages of all tests in one context, which caches JupyterLab's scripts and what they compile to."""
    with browser.new_context(**browser_context_args) as one:
        yield one


@pytest.fixture
def page(context: Any) -> Iterator[Any]:
    """Open a page that waits with the patience of all tests for anything that must happen."""
    page = context.new_page()
    page.set_default_timeout(1e3 * PATIENCE_S)
    yield page
    context.set_offline(False)
    page.close()


@pytest.fixture
def lab_page(page: Any, server: lab.Server, picture: Any) -> Iterator[Any]:  # noqa: ARG001
    """Open a page that reaches the server only; `page.refused` lists other requests, `page.said` what it logged.

    Requests are observed and not intercepted, because Chromium caches nothing of a page whose requests are.

    Kernels end with the test: one whose dashboard goes on would take time from the tests that follow. What our pages
    have stored in the browser is forgotten.
    """
    page.refused, page.said = [], []
    page.on("console", lambda message: "jupytext" in message.text or page.said.append(message.text[:500]))

    def observe(request: Any) -> None:
        if not request.url.startswith((server.url, "data:", "blob:", "file:")):
            page.refused.append(request.url)

    page.on("request", observe)
    yield page
    if page.url.startswith(server.url):
        page.evaluate("() => localStorage.clear()")
    page.goto("about:blank")
    lab.end_kernels(server)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], SmallRun]]:
    """Start a small run; those that go on are stopped after the test, so that no dashboard follows them any more."""
    runs: list[SmallRun] = []

    def begin(name: str) -> SmallRun:
        runs.append(SmallRun(tmp_path / name))
        return runs[-1]

    yield begin
    for run in runs:
        run.end("stopped")


SCREENSHOTS = Path(os.environ.get("WORKBENCH_SCREENSHOTS") or REPOSITORY / "reports" / "screenshots")
TAKEN: list[Path] = []


@pytest.fixture
def picture() -> Any:
    """Save a screenshot of a page, or of a part of it, in `reports/screenshots` or the folder `WORKBENCH_SCREENSHOTS`.

    Those that the documentation shows have the names of its files in `docs/pictures`.
    """

    def take(shown: Any, name: str) -> None:
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        TAKEN.append(SCREENSHOTS / f"{name}.png")
        shown.screenshot(path=str(TAKEN[-1]))

    return take


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> Iterator[None]:
    """Print where the screenshots are; at the very end, what was not tested and the one command that is missing."""
    yield
    if TAKEN:
        names = ", ".join(sorted({path.name for path in TAKEN}))
        terminalreporter.write_line(f"{len(set(TAKEN))} screenshots to look at in {SCREENSHOTS}: {names}")
    missing, count = _missing(), config.stash.get(SKIPPED, 0)
    if missing and count:
        terminalreporter.section(f"{count} BROWSER TESTS DID NOT RUN", sep="!", red=True, bold=True)
        words = f"JupyterLab was not driven, because {missing}. To have these tests: {REMEDIES[missing]}"
        terminalreporter.write_line(words, red=True, bold=True)
