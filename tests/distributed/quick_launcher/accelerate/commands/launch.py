"""Stand-in for `accelerate launch` of one process: becomes the worker without loading torch, which takes seconds.

Tests of sweeps start a dozen runs, and what they state does not depend on Accelerate. `test_launch.py` uses the real
one.
"""

import os
import sys

worker = sys.argv[sys.argv.index("-m") :]
os.execv(sys.executable, [sys.executable, *worker])
