"""What holds for every test."""

import gc
import os

from hypothesis import settings

gc.disable()  # until all tests are imported, because collecting meanwhile takes a fifth of that time


def pytest_collection_finish() -> None:
    gc.freeze()  # what was imported is not looked at again
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # otherwise extension modules would say that these objects leak


# `make test` draws the same examples each time, so that it fails for what was changed; `make test-all` draws new ones.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("new", deadline=None)
# A run that is tracked starts two more processes and draws a page when it ends. The tests of tracking ask for it.
os.environ["WANDB_MODE"] = "disabled"
settings.load_profile("new" if os.environ.get("WORKBENCH_TEST_ALL") == "1" else "same")
