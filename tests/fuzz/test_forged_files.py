"""Forged files: a run that lies breaks nobody, and nothing that it says is believed in silence.

The checksums of these files are right and their contents are not: values of wrong types and out of range, huge counts
and sizes, fields of a later version, nesting, and in the place of a file a folder, a link, a pipe, a socket or a hole
of gigabytes. One small finished run is forged in one place at a time, beside a sound one. Everything that reads runs is
then asked, in a process that may take one GiB: an answer is as before, or the lie is told.
"""

from __future__ import annotations

import json
import math
import os
import random
import resource
import shutil
import socket
import struct
import subprocess
import sys
import traceback
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.exhaustive import EXHAUSTIVE
from tests.logs import append_event
from tests.patience import PATIENCE_S
from workbench.base.errors import WorkbenchError
from workbench.lab import handlers
from workbench.lab.handlers import RunIndex
from workbench.record import step_table
from workbench.record.events import is_event
from workbench.record.rundir import RunDir, event_line, write_json, write_record
from workbench.record.step_table import LOGGED
from workbench.runs.registry import list_runs, load_run

CASES = 300 if EXHAUSTIVE else 15
STEPS, BLOCK_ROWS = 40, 16
MEMORY_BYTES = 2**30
DEAD = {"pid": 2**22 + 1, "created": 0.0}
LIES: tuple[Any, ...] = (
    *(None, True, -1, 0, 7, 2**31, 10**9, 10**12, 2**53 + 1, 2**63, 10**40, 10**400, 0.5, 1e308, -1e308),
    *(float("nan"), float("inf"), "", "x", "1", "\x00", "\ud800", "../../../etc/passwd", [], [[]], {}, {"a": 1}),
    *([None], ["step"], ["step", "step"], [float("nan")] * 3, "x" * 10**5),
)
"""What stands in the place of a value."""


def write_run(folder: Path) -> RunDir:
    """Write a run of 40 steps that has finished, with every type of event."""
    run = RunDir(folder)
    write_record(run.experiment, {"name": folder.name, "steps": STEPS, "model": {"type": "bert"}, "tracking": {}})
    write_record(run.environment, {"gpus": [{"uuid": "GPU-1", "index": 0}], "packages": {}})
    write_json(run.launcher, {"supervisor": DEAD, "plan": {"world": 1}, "devices": ["cpu"]})
    write_json(run.rank(0), {**DEAD, "rank": 0, "stage": 0, "device": "CPU process 0"})
    write_json(run.labels, {"tags": ["a"], "notes": "n", "archived": False})
    write_json(run.checkpoint(20) / "complete.json", {"step": 20})
    run.log(0).parent.mkdir()
    run.log(0).write_text("some words\n")
    append_event(run.events, "status", state="starting", message="")
    append_event(run.events, "start", devices=1, world=1, resumed_from=None)
    for step in range(1, STEPS + 1):
        append_event(run.events, "step", step=step, loss=7.0 / step, seconds=0.5 * step, tokens=8 * step, step_ms=500)
    counts = {"tokens": 8.0, "samples": 8.0, "flops": 1.0, "seconds": 20.0, "eval_seconds": 0.1}
    append_event(run.events, "evaluation", step=STEPS, loss=0.5, metrics={"accuracy": 0.5}, **counts)
    append_event(run.events, "samples", step=STEPS, samples=[{"prompt": "a", "text": "b"}], seconds=0.1)
    shown = {"weight": "w", "pattern": ["#.", ".#"], "prune_ratio": 0.1, "update": 0}
    blocks = {"blocks": 4, "present": 2, "explored": 2, "moved": 0}
    append_event(run.events, "sparsity", step=STEPS, tokens=8.0, flops=1.0, seconds=1.0, **blocks, **shown)
    append_event(run.events, "memory", rank=0, stage=0, device="cpu", peak_bytes=2**20)
    append_event(run.events, "checkpoint", step=20, path="step-00000020", seconds=0.1)
    samples = {"names": ["CPU"], "shares": [0.5], "used_bytes": [7]}
    append_event(run.events, "device", device_type="cpu", **samples)
    append_event(run.events, "end", steps=STEPS, seconds=20.0)
    append_event(run.events, "status", state="finished", message="40 steps.")
    return run


BELIEVABLE = ", which may be true"
"""Says that a lie has the type and the range of a truth, so that it can only be believed."""


# Forgeries: each changes one thing in a run


def _header(fields: Any) -> bytes:
    """Return a header with a right checksum."""
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<8sII", b"WBsteps1", len(text), zlib.crc32(text)) + text


def _tail_rows(first: int, names: list[str], rows: list[dict[str, float]]) -> bytes:
    data = b""
    for number, row in enumerate(rows, first):
        values = struct.pack(f"<{len(names)}d", *(row.get(name, step_table.UNKNOWN) for name in names))
        data += values + struct.pack("<Q", zlib.crc32(values, number & 0xFFFF_FFFF))
    return data


def _block(first: int, names: list[str], rows: int, **more: Any) -> bytes:
    """Return a block with right checksums, whose figures are those of no run."""
    columns = [np.full(rows, 3.0 if name == "step" else 99.0).tobytes() for name in names]
    head = {"first": first, "rows": rows, "names": names, "crc32": [zlib.crc32(values) for values in columns]}
    return _header({**head, **more}) + b"".join(columns)


def _split(tail: bytes) -> tuple[dict[str, Any], bytes]:
    length = struct.unpack_from("<8sII", tail)[1]
    return json.loads(tail[16 : 16 + length]), tail[16 + length :]


def lie_in_the_tail(run: RunDir, dice: random.Random) -> str:
    fields, rows = _split(run.steps_tail.read_bytes())
    name = dice.choice([*fields, "version"])
    fields[name] = lie = dice.choice([each for each in LIES if each != fields.get(name)])
    run.steps_tail.write_bytes(_header(fields) + rows)
    return f"{name}={lie!r:.40}"


def lie_in_a_block(run: RunDir, dice: random.Random) -> str:
    whole = run.steps.read_bytes()
    fields, columns = _split(whole)
    name = dice.choice([*fields, "version", "dtype"])
    fields[name] = lie = dice.choice([each for each in LIES if each != fields.get(name)])
    run.steps.write_bytes(_header(fields) + columns)
    return f"{name}={lie!r:.40}"


def another_block(run: RunDir, dice: random.Random) -> str:
    """Append a block of a later version, or one that contradicts the rows of the tail."""
    names = dice.choice([list(LOGGED), ["step", "loss"], ["step", *(f"x{number}" for number in range(300))]])
    more = dice.choice([{}, {"version": 2}, {"dtype": "float32"}])
    first = dice.choice([0, 1, 32, 33, 2**40])
    with run.steps.open("ab") as file:
        file.write(_block(first, names, dice.choice([1, 5, 8]), **more))
    return f"first={first} {more}"


def odd_header(run: RunDir, dice: random.Random) -> str:
    file, names = dice.choice([run.steps_tail, run.steps]), [f"n{number}" for number in range(100_000)]
    header: Any = dice.choice(
        [
            {},
            [],
            None,
            5,
            "x",
            b"[" * 10**5,
            b"{" * 10**5,
            b"1" * 10**5,
            b"",
            b"\xff" * 80,
            {"first": 0, "names": names},
        ]
    )
    file.write_bytes(_header(header) + file.read_bytes()[16:])
    return f"{file.name} {header!r:.40}"


def lie_in_a_row(run: RunDir, dice: random.Random) -> str:
    fields, rows = _split(run.steps_tail.read_bytes())
    step = dice.choice([-1.0, 0.5, 1e300, float("inf"), float("-inf"), float("nan"), 2.0**60])
    last = [{"step": step, "loss": 5.0, "time": dice.choice([-1e300, 1e300, float("inf"), 5.0])}]
    count = len(rows) // (8 * (len(fields["names"]) + 1))
    run.steps_tail.write_bytes(_header(fields) + rows + _tail_rows(fields["first"] + count, fields["names"], last))
    return f"step={step}"


def magic_words(run: RunDir, dice: random.Random) -> str:
    word = dice.choice([b"WBsteps1", b"WBsteps1" + struct.pack("<I", 2**20), b"WBsteps1" + b"\xff" * 8])
    with run.steps.open("ab") as file:
        file.write(word * (800_000 // len(word)))
    return repr(word)


def hole(run: RunDir, dice: random.Random) -> str:
    """Let a file grow to gigabytes that take no room."""
    files = [run.steps_tail, run.steps, run.events, run.experiment, run.labels, run.log(0), run.environment]
    file, size = dice.choice(files), dice.choice([3 * 10**9, 30 * 10**9])
    os.truncate(file, size)
    return f"{file.name} of {size:,} bytes"


def huge_block(run: RunDir, dice: random.Random) -> str:
    """Append a block whose columns are a hole of gigabytes, with their right checksums."""
    rows, names = dice.choice([(2**16, 2000), (2**28, 1), (10**6, 200)]), ["step"]
    names += [f"x{number}" for number in range(1, rows[1])]
    header = _header({"first": STEPS, "rows": rows[0], "names": names, "crc32": [0] * len(names)})
    with run.steps.open("ab") as file:
        file.write(header)
        os.truncate(run.steps, file.tell() + 8 * rows[0] * rows[1])
    return f"{rows}"


def lie_in_an_event(run: RunDir, dice: random.Random) -> str:
    lines = run.events.read_bytes().splitlines(keepends=True)
    at = dice.randrange(len(lines))
    event = json.loads(lines[at])
    del event["crc32"]
    name = dice.choice([name for name in event if name != "type"])
    inner = event[name] if isinstance(event[name], list | dict) and event[name] and dice.random() < 0.5 else None
    lie = dice.choice([each for each in LIES if each not in ("", "x", "\x00", "1", "\ud800", event[name])])
    if isinstance(inner, dict):
        inner[dice.choice(list(inner))] = lie
    elif inner is not None:
        inner[dice.randrange(len(inner))] = lie
    else:
        event[name] = lie
    believable = event["type"] == "device" or is_event(event)  # nobody can know, but nothing breaks
    lines[at] = event_line(event.pop("type"), **event)
    run.events.write_bytes(b"".join(lines))
    return f"{name}={lie!r:.40}{BELIEVABLE * believable}"


def odd_line(run: RunDir, dice: random.Random) -> str:
    body = dice.choice(
        [b"[" * 10**5, b"5", b"[]", b'{"type": 5', b'{"type": "end"', b'{"a": ' * 10**5, b'{"x": ' + b"1" * 5000]
    )
    with run.events.open("ab") as file:
        file.write(b'%s, "crc32": "%08x"}\n' % (body, zlib.crc32(body)))
    return f"{body!r:.40}"


def lie_in_a_record(run: RunDir, dice: random.Random) -> str:
    file = dice.choice([run.experiment, run.environment, run.launcher, run.rank(0), run.labels, run.error(0)])
    value = json.loads(file.read_bytes()) if file.exists() else {"rank": 0, "type": "E", "message": "m", "time": 1.0}
    value.pop("crc32_of_record", None)
    name = dice.choice(list(value))
    lie = value[name] = dice.choice(LIES)
    (write_record if file in (run.experiment, run.environment, run.error(0)) else write_json)(file, value)
    return f"{file.name}: {name}={lie!r:.40}"


def in_place_of_a_file(run: RunDir, dice: random.Random) -> str:
    records = [run.experiment, run.environment, run.launcher, run.rank(0), run.labels, run.log(0), run.events]
    file = dice.choice([run.steps_tail, run.steps, run.events, *records])
    file.unlink()
    kinds = ("folder", "link to itself", "link outside", "link to /dev/zero", "pipe", "socket", "link to the sound run")
    kind = dice.choice(kinds)
    if kind == "folder":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "socket":
        folder = os.open(file.parent, os.O_RDONLY)
        with socket.socket(socket.AF_UNIX) as listener:  # an address has at most 108 bytes
            listener.bind(f"/proc/self/fd/{folder}/{file.name}")
        os.close(folder)
    else:
        targets = {"link to itself": file, "link outside": Path("/etc/passwd"), "link to /dev/zero": Path("/dev/zero")}
        file.symlink_to(targets.get(kind, run.path.parent / "sound" / file.relative_to(run.path)))
    return f"{file.name} is a {kind}"


def in_place_of_a_folder(run: RunDir, dice: random.Random) -> str:
    folder = dice.choice([run.ranks, run.logs, run.checkpoints, run.errors])
    shutil.rmtree(folder, ignore_errors=True)
    kind = dice.choice(["file", "pipe", "link to itself", "link outside", "odd names"])
    if kind == "file":
        folder.write_text("x")
    elif kind == "pipe":
        os.mkfifo(folder)
    elif kind == "odd names":
        for name in ("step-²", "step-" + "9" * 200, "step-", "step--1", "².json", "x.json"):
            (folder / name).mkdir(parents=True)
            (folder / name / "complete.json").write_text("{}")
    else:
        folder.symlink_to(folder if kind == "link to itself" else run.path.parent / "sound" / folder.name)
    return f"{folder.name} is a {kind}"


FORGERIES = (
    *(lie_in_the_tail, lie_in_a_block, another_block, odd_header, lie_in_a_row, magic_words, hole, huge_block),
    *(lie_in_an_event, lie_in_an_event, odd_line, lie_in_a_record, in_place_of_a_file, in_place_of_a_file),
    in_place_of_a_folder,
)


# What is asked


def row_in_words(run: Any) -> str:
    row = run.row()
    return str({name: value for name, value in row.items() if name not in ("tags", "notes", "archived", "path")})


VIEWS: dict[str, Callable[[Any], Any]] = {
    "row": row_in_words,
    "repr": lambda run: repr(run) and run._repr_html_() and "",
    "history": lambda run: [run.history()[name].tolist() for name in ("step", "loss", "gpu_hours")],
    "table": lambda run: repr(run.history()) and run.history()._repr_html_() and "",
    "events": lambda run: [(event["type"], event["time"]) for event in run.events()],
    "milestones": lambda run: len(run.milestones()),
    "evaluations": lambda run: str(run.evaluations().metrics) if len(run.evaluations()) else "",
    "samples": lambda run: repr(run.samples()) + run.samples()._repr_html_(),
    "patterns": lambda run: repr(run.patterns()),
    "utilization": lambda run: str(run.utilization().share.tolist()),
    "logs": lambda run: run.logs(0, None)[-1000:] + run.logs(),
    "checkpoints": lambda run: [each.step for each in run.checkpoints],
    "error": lambda run: str(run.error()),
    "labels": lambda run: bool(run.labels) and "",
    "config": lambda run: run.config and "",
    "environment": lambda run: run.environment and "",
}


BLANK = ("", "[]", [])
"""What a view shows of a file that is gone."""


def asked(run: RunDir, before: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return how everything that reads a run answers: `as before`, `told`, or what is wrong; and the answers."""
    answers, told = dict[str, Any](), False
    try:
        rows = {row["name"]: row for row in RunIndex().read([run.path.parent])["rows"]}
        json.dumps(rows, allow_nan=False)
        if rows["sound"]["losses"][-1][1] != 0.175:
            return "silent wrong: the sidebar's row of the sound run", {}
        table = list_runs(run.path.parent, sort="loss")
        if not any(line.split()[0] == "sound" for line in repr(table).splitlines() if "0.5 held-out" in line):
            return f"silent wrong: {table!r}", {}
        shown = next((row for row in table.rows() if row["name"] == "forged"), None)
        told = shown is None or bool(shown["damaged_lines"]) or "cannot be read" in shown["message"]
        for name, show in VIEWS.items():
            try:
                answers[name] = show(load_run(run.path))
            except WorkbenchError as error:
                answers[name], told = str(error), True
        history = None if isinstance(answers["history"], str) else load_run(run.path).history()
        told = told or (history is not None and bool(history.missing or "damaged" in repr(history)))
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"in line {last.lineno} of {Path(last.filename).name}"
        return f"raw {type(error).__name__}: {str(error)[:100]} {where}", {}
    changed = [name for name in before if answers[name] != before[name] and answers[name] not in BLANK]
    told = told or any("cannot be read" in str(answers[name]) for name in changed)
    if not changed or told:
        return "told" if told else "as before", answers
    return f"silent wrong: {changed[0]} was {str(before[changed[0]])[-200:]}, now {str(answers[changed[0]])[-200:]}", {}


def main(folder: Path, cases: range) -> None:
    """Print what happens in each case, one a line; takes at most one GiB more than the libraries do."""
    step_table.BLOCK_ROWS, handlers.READING_S = BLOCK_ROWS, math.inf
    runs = folder / "runs"
    write_run(runs / "sound")
    whole = write_run(folder / "whole" / "forged")
    run = RunDir(runs / "forged")
    shutil.copytree(whole.path, run.path)
    _, before = asked(run, {})
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY_BYTES, resource.RLIM_INFINITY))
    for number in cases:
        shutil.rmtree(run.path)
        shutil.copytree(whole.path, run.path)
        step_table._WRITERS.clear()
        dice, forge = random.Random(f"forgery {number}"), FORGERIES[number % len(FORGERIES)]
        what = forge(run, dice)
        print(f"{number}\t{forge.__name__}: {what!a}\t", end="", flush=True)
        print(f"{asked(run, {} if what.endswith(BELIEVABLE) else before)[0]!a}", flush=True)


@pytest.mark.representative
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it limits memory as Linux does")
def test_no_lie_is_believed_in_silence_and_none_breaks_what_reads_runs(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.fuzz.test_forged_files", str(tmp_path), str(CASES)]
    environment = {**os.environ, "PYTHONPATH": str(root), "WORKBENCH_HOME": str(tmp_path / "home")}
    process = subprocess.run(
        command, env=environment, cwd=root, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    cases = [line.split("\t") for line in process.stdout.splitlines()]
    assert [len(case) for case in cases] == [3] * CASES, f"{cases[-1:]} {process.stderr[-2000:]}"
    problems = [case for case in cases if case[2] not in ("'as before'", "'told'")]
    assert not problems, f"{len(problems)} problems:\n" + "\n".join(map("\t".join, problems))
    counts = Counter(case[2] for case in cases)
    assert counts["'told'"] > CASES / 2, f"most forgeries did nothing: {counts}"


if __name__ == "__main__":
    main(Path(sys.argv[1]), range(int(sys.argv[2])))
