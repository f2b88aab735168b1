"""Runs a command several times beside busy loops, or on few cores, and says how long each took and whether it passed.

    python -m tests.under_load --times 3 --loops 4 -- make test
    python -m tests.under_load --cores 1 -- make test

A run passes here only without an unsteady test.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence

from tests.unsteady import ALLOWED


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=1, help="how often the command runs")
    parser.add_argument("--loops", type=int, default=0, help="busy loops beside it")
    parser.add_argument("--cores", type=int, help="cores that the command and the loops share; all by default")
    parser.add_argument("command", nargs="+")
    asked = parser.parse_args(arguments)
    if asked.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: asked.cores])
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(asked.loops)]
    ended = []
    try:
        for time_ in range(1, asked.times + 1):
            began = time.monotonic()
            code = subprocess.run(asked.command, env={**os.environ, ALLOWED: "0"}, check=False).returncode
            ended.append(code)
            verdict = "passed" if code == 0 else f"failed with exit code {code}"
            where = f"beside {asked.loops} busy loops on {len(os.sched_getaffinity(0))} cores"
            took = f"{verdict} after {time.monotonic() - began:.0f} s"
            print(f"Run {time_} of {asked.times} {where}: {took}", flush=True)
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    return int(any(ended))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
