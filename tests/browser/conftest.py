"""Browser tests need Chromium (`apt-get install chromium`) and pytest-playwright; without either they skip."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import lab  # noqa: E402

REPOSITORY = HERE.parents[1]
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = None
    if importlib.util.find_spec("pytest_playwright") is None:
        missing = "pytest-playwright is not installed"
    elif CHROMIUM is None:
        missing = "no Chromium on this machine (apt-get install chromium)"
    if missing:
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=missing))


@pytest.fixture(scope="session")
def browser_type_launch_args(browser_type_launch_args: dict[str, Any]) -> dict[str, Any]:
    return {**browser_type_launch_args, "executable_path": CHROMIUM, "args": lab.CHROMIUM_ARGUMENTS}


@pytest.fixture(scope="session")
def browser_context_args(browser_context_args: dict[str, Any]) -> dict[str, Any]:
    return {**browser_context_args, "viewport": {"width": 1400, "height": 1000}}


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lab.Server]:
    with lab.jupyterlab(tmp_path_factory.mktemp("lab"), {"PYTHONPATH": str(REPOSITORY)}) as running:
        yield running


@pytest.fixture
def lab_page(page: Any, server: lab.Server) -> Any:
    """A page that reaches the server alone; `page.refused` lists what else it asked for."""
    page.refused = []

    def route(request: Any) -> None:
        if request.request.url.startswith((server.url, "data:", "blob:")):
            request.continue_()
        else:
            page.refused.append(request.request.url)
            request.abort()

    page.context.route("**/*", route)
    return page


@pytest.fixture
def picture() -> Any:
    """Keep a screenshot in `reports/screenshots`, or where `WORKBENCH_SCREENSHOTS` says, for a person to look at."""
    folder = Path(os.environ.get("WORKBENCH_SCREENSHOTS") or REPOSITORY / "reports" / "screenshots")

    def take(page: Any, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=str(folder / f"{name}.png"))

    return take
