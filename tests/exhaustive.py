"""Whether this is `make test-exhaustive`: every model, plan and combination, where other runs take a few of each."""

import os

import pytest

EXHAUSTIVE = os.environ.get("WORKBENCH_TEST_EXHAUSTIVE") == "1"
exhaustive = pytest.mark.skipif(not EXHAUSTIVE, reason="make test-exhaustive runs it")
