"""Simulate the L2 cache under the weight gradient of a block-sparse layer, for several divisions of the tokens.

    python benchmarks/sparse_gradient_cache.py --out benchmarks/results/sparse_gradient_cache.json

It measures nothing. Programs walk their tokens at the speed that their bytes allow, a little uneven, and start as
others end. The cache replaces what was used least recently, in pieces of 64 bytes of a row. The result is what is read
from memory.
"""

from __future__ import annotations

import heapq
import json
import random
from collections import OrderedDict
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import options

MULTIPROCESSORS, TOKENS, ROWS, COLS, KEPT = 132, 16384, 7680, 1920, 0.1
STEP, GROUP_COLUMNS = 64, 128
"""Tokens of a step of a program, and columns that it gathers."""
PIECE_COLUMNS = 32
"""Columns of a piece of 64 bytes, which memory reads at once."""
FULL_STEP_BYTES = 2 * STEP * (GROUP_COLUMNS + 16)
FIXED_SHARE = 0.35
"""Share of a full step's time that a step takes whatever its bytes; an assumption."""
CLUSTER_SPEEDS = (1.06, 0.95)
"""Step times of multiprocessors in clusters of 18 and of 16, which share a link to the cache; an assumption."""


@dataclass(frozen=True)
class Program:
    """One program: the pieces of a row that it reads in each step, its bytes a step, and its steps."""

    pieces: tuple[tuple[str, int], ...]
    step_bytes: int
    first: int
    steps: int


def programs(block: int, parts: int, height: int = ROWS) -> list[Program]:
    """Return the programs of a random pattern in the order in which they start."""
    generator = random.Random(0)
    lines: list[list[int]] = [[] for _ in range(COLS // block)]
    blocks = height // block * len(lines)
    for place in sorted(generator.sample(range(blocks), round(blocks * KEPT))):
        lines[place % len(lines)].append(place // len(lines))
    size = GROUP_COLUMNS // block
    groups = [(column, line[at : at + size]) for column, line in enumerate(lines) for at in range(0, len(line), size)]
    steps = -(-TOKENS // parts // STEP)
    return [
        Program(
            (*_pieces("shared", column, block), *(piece for row in rows for piece in _pieces("gathered", row, block))),
            2 * STEP * block * (1 + len(rows)),
            first,
            min(steps, TOKENS // STEP - first),
        )
        for first in range(0, TOKENS // STEP, steps)
        for column, rows in groups
    ]


def _pieces(matrix: str, place: int, block: int) -> list[tuple[str, int]]:
    return [(matrix, column // PIECE_COLUMNS) for column in range(place * block, (place + 1) * block, PIECE_COLUMNS)]


def memory_bytes(queue: list[Program], resident: int, cache_bytes: float) -> int:
    """Return the bytes that are read from memory, with `resident` programs on each multiprocessor at a time."""
    generator, piece_bytes = random.Random(1), 2 * STEP * PIECE_COLUMNS
    cache: OrderedDict[tuple[str, int, int], None] = OrderedDict()
    waiting, read = iter(queue), 0
    speeds = cycle([CLUSTER_SPEEDS[0]] * 72 + [CLUSTER_SPEEDS[1]] * 60)
    started = zip(waiting, speeds, range(resident * MULTIPROCESSORS), strict=False)
    events = [(0.0, number, speed, program, 0) for program, speed, number in started]
    heapq.heapify(events)
    while events:
        now, number, speed, program, step = heapq.heappop(events)
        for matrix, column in program.pieces:
            key = (matrix, column, program.first + step)
            if key not in cache:
                read += piece_bytes
                if len(cache) * piece_bytes >= cache_bytes:
                    cache.popitem(last=False)
            cache[key] = None
            cache.move_to_end(key)
        now += speed * (FIXED_SHARE + (1 - FIXED_SHARE) * program.step_bytes / FULL_STEP_BYTES)
        now += 0.1 * generator.uniform(-1, 1)
        if step + 1 < program.steps:
            heapq.heappush(events, (now, number, speed, program, step + 1))
        elif following := next(waiting, None):
            heapq.heappush(events, (now, number, speed, following, 0))
    return read


def main() -> None:
    parser = options.parser(__doc__)
    parser.set_defaults(out=Path("sparse_gradient_cache.json"))
    asked = options.parsed(parser)
    print(f"Weight [{ROWS}, {COLS}], {KEPT:.0%} of the blocks stored, {TOKENS:,} tokens in bf16; nothing is measured.")
    rows = []
    divisions = ((64, 6, 3), (32, 3, 3), (16, 2, 4), (16, 4, 4), (16, 8, 4), (16, 15, 4))
    for block, parts, resident in divisions[: 1 if asked.tiny else None]:
        queue = programs(block, parts, 128 if asked.tiny else ROWS)
        row = {"block": block, "parts": parts, "both_inputs_gb": 2 * TOKENS * (ROWS + COLS) / 1e9}
        for cache_mb in (25, 40):
            row[f"read_gb_with_{cache_mb}_mb_cache"] = memory_bytes(queue, resident, 1e6 * cache_mb) / 1e9
        row["sums_of_parts_gb"] = 8 * parts * round(ROWS * COLS * KEPT) / 1e9
        rows.append({name: round(value, 3) for name, value in row.items()})
        print(", ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    asked.out.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    print(f"Written to {asked.out}.")


if __name__ == "__main__":
    main()
