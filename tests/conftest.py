"""What holds for every test."""

import atexit
import gc
import os
import shutil
import sys

import pytest
from hypothesis import settings

from tests import durations, unsteady, workers
from tests.exhaustive import EXHAUSTIVE

sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]  # jsonschema would build its grammar for two seconds
# Looking for GPUs must not touch CUDA: processes are forked from this one.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
gc.disable()  # until all tests are imported, because collecting meanwhile takes a fifth of that time


def pytest_addoption(parser: pytest.Parser) -> None:
    durations.pytest_addoption(parser)
    unsteady.pytest_addoption(parser)
    workers.pytest_addoption(parser)


def pytest_configure(config: pytest.Config) -> None:
    durations.pytest_configure(config)
    unsteady.pytest_configure(config)
    workers.pytest_configure(config)


def pytest_collection_finish() -> None:
    gc.freeze()  # what was imported is not looked at again
    gc.enable()
    atexit.register(gc.unfreeze)  # otherwise extension modules would say that these objects leak


def pytest_unconfigure() -> None:
    shutil.rmtree(HOME, ignore_errors=True)


# The same examples are drawn each time, so that a run fails for what was changed. `make test-exhaustive` draws others.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("new", deadline=None)
# A run that is tracked starts two more processes and draws a page when it ends. The tests of tracking ask for it.
os.environ["WANDB_MODE"] = "disabled"
HOME = workers.own_home()
settings.load_profile("new" if EXHAUSTIVE else "same")


@pytest.fixture(autouse=True)
def _patched_code_stores_nothing(request: pytest.FixtureRequest) -> None:
    """Let a test that patches something neither read what was captured before nor store what it captures."""
    if "monkeypatch" in request.fixturenames and not getattr(request.module, "READS_CAPTURES", False):
        from workbench.capture import captured_model

        monkeypatch = request.getfixturevalue("monkeypatch")
        monkeypatch.setattr(captured_model, "stored", lambda _key, make, *_of_json: make())
