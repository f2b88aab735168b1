"""What holds for every test."""

import gc
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

from tests import durations, unsteady, worlds
from tests.exhaustive import EXHAUSTIVE
from workbench.machine import cache_home

sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]  # jsonschema would build its grammar for two seconds
gc.disable()  # until all tests are imported, because collecting meanwhile takes a fifth of that time


def pytest_addoption(parser: pytest.Parser) -> None:
    durations.pytest_addoption(parser)
    unsteady.pytest_addoption(parser)


def pytest_configure(config: pytest.Config) -> None:
    durations.pytest_configure(config)
    unsteady.pytest_configure(config)
    if getattr(config.option, "numprocesses", None):  # only in the controller of several workers
        worlds.serve()


def pytest_collection_finish() -> None:
    gc.freeze()  # what was imported is not looked at again
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # otherwise extension modules would say that these objects leak
    shutil.rmtree(HOME, ignore_errors=True)


# The same examples are drawn each time, so that a run fails for what was changed. `make test-exhaustive` draws others.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("new", deadline=None)
# A run that is tracked starts two more processes and draws a page when it ends. The tests of tracking ask for it.
os.environ["WANDB_MODE"] = "disabled"
# Tests run beside each other. In a cache folder of its own, a process's runs do not queue for the devices of another's,
# or of the user's; what takes long to make is shared.
HOME = Path(tempfile.mkdtemp(prefix="workbench-tests-"))
for made in ("calibrations", "devices", "texts", "tokens"):
    (cache_home() / made).mkdir(parents=True, exist_ok=True)
    (HOME / made).symlink_to(cache_home() / made)
os.environ["WORKBENCH_HOME"] = str(HOME)
settings.load_profile("new" if EXHAUSTIVE else "same")
