"""What holds for every test."""

import os

from hypothesis import settings

# `make test` draws the same examples each time, so that it fails for what was changed; `make test-all` draws new ones.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("new", deadline=None)
settings.load_profile("new" if os.environ.get("WORKBENCH_TEST_ALL") == "1" else "same")
