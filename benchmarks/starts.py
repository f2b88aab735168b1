"""Where the seconds of a start go: a model that is new to the node, the same again, and ten steps as a grid's cell has.

    python benchmarks/starts.py --out starts.json --gpus 2 opt-125m gpt3-1.3b
    python benchmarks/starts.py --out starts.json --gpus 2 --variant WORKBENCH_FORK_GPU_RANKS=0 opt-125m
    python benchmarks/starts.py --out starts.json                                  # prints what a file holds

Every round starts one Python after another, one for each variant (a setting of the environment, beside none), in
the opposite order every second round; each plans its row and launches it twice. The very first launch of a file is
cold: its blocks are measured, and nothing has been compiled. Seconds are the clock's, from the events of the run, and
count from the record that its processes are being started: `asked` is what lay between `wb.launch` and that record.
`probes` are the seconds from the start of the processes that measured the model's blocks to the end of each phase.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import machine
import options

import workbench as wb
from workbench.base.machine import cache_home
from workbench.record.event_log import read_events
from workbench.record.rundir import read_object

Row = dict[str, Any]
ROWS = {
    "opt-125m": lambda: _experiment(
        wb.models.opt(hidden_size=768, num_layers=12, num_heads=12, name="opt-125m"), 64, 1024
    ),
    "gpt3-1.3b": lambda: _experiment(wb.models.gpt3(), 32, 2048),
    "tiny": lambda: _experiment(
        wb.models.gpt2(hidden_size=64, num_layers=2, num_heads=4, vocab_size=300, max_positions=64), 16, 64, 300
    ),
}


def _experiment(model: Any, batch: int, length: int, vocabulary: int = 50257) -> wb.Experiment:
    return wb.Experiment(
        model=model,
        data=wb.data.corpus(os.environ.get("TEXT", "demo"), vocab_size=vocabulary),
        global_batch=batch,
        seq_len=length,
        steps=10,
        checkpoints=wb.Checkpoints(keep=0),
        tracking=wb.Tracking(project=""),
    )


def main() -> None:
    parser = options.parser(__doc__)
    parser.add_argument("rows", nargs="*", choices=[[], *ROWS])
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--variant", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--once", metavar="ROW", help=argparse.SUPPRESS)
    asked = options.parsed(parser)
    if asked.once:
        print(json.dumps(_launched(asked.once, asked.gpus)))
        return
    content: Row = json.loads(asked.out.read_text()) if asked.out.exists() else {"starts": [], "launches": []}
    content["starts"].append(machine.described() | {"load": os.getloadavg()[0]})
    for name in ["tiny"] if asked.tiny else asked.rows:
        for round_ in range(1 if asked.tiny else asked.rounds):
            for variant in ["", *asked.variant][:: -1 if round_ % 2 else 1]:
                content["launches"] += _of_a_process(name, round_, variant, asked.gpus)
                asked.out.write_text(json.dumps(content, indent=1) + "\n")
    print(table(content["launches"]))


def _of_a_process(row: str, round_: int, variant: str, gpus: int) -> list[Row]:
    command = [sys.executable, __file__, "--once", row, "--gpus", str(gpus)]
    environment = os.environ | dict([variant.split("=", 1)] if variant else [])
    told = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    about = {"row": row, "round": round_, "variant": variant}
    return [about | launch for launch in json.loads(told.splitlines()[-1])]


def _launched(row: str, gpus: int) -> list[Row]:
    experiment = ROWS[row]()
    here = wb.measure.local_cluster()
    cluster = here if here.device.type == "cpu" else here.resized(gpus)
    found = []
    for launch in range(2):
        begun = time.time()
        plan = wb.plan(experiment, cluster, pipeline=1, tensor=1)
        planned = time.time()
        run = wb.launch(experiment, plan=plan)
        run.wait()
        probes = [read_object(file) for file in (cache_home() / "blocks").glob("*.json")] if not launch else []
        measured = [each["seconds"] for each in probes if experiment.model.name in each["models"]]
        found.append({"launch": launch, "planned_s": planned - begun, "probes": measured, **_seconds(run, planned)})
    return found


def _seconds(run: wb.Run, asked: float) -> Row:
    events = read_events(run.directory.events)
    states = {event["state"]: event["time"] for event in events if event["type"] == "status"}
    origin = states["starting"]
    steps = [event["time"] for event in events if event["type"] == "step"]
    ended = next((event["time"] for event in events if event["type"] == "end"), None)
    return {
        "state": run.status.state,
        "asked_s": origin - asked,
        "phases": {
            event["name"]: {"at_s": event["time"] - origin, "took_s": event["seconds"]}
            for event in events
            if event["type"] == "phase"
        },
        "first_step_s": steps[0] - origin if steps else None,
        "step_ms": statistics.median(run.history().step_ms[3:]) if len(steps) > 4 else None,
        "last_step_s": steps[-1] - origin if steps else None,
        "end_s": ended and ended - origin,
        "finished_s": states[run.status.state] - origin,
        "whole_s": time.time() - asked,
    }


def table(launches: list[Row]) -> str:
    """Return a line for each launch: its phases at the second when each ended, and how long each took."""
    lines = [
        "| row | variant | round, launch | planned | phases, ended at (took) | first step | last to end | to finished |"
    ]
    lines += ["|---|---|---|--:|---|--:|--:|--:|"]
    for each in launches:
        phases = ", ".join(f"{name} {at['at_s']:.1f} ({at['took_s']:.1f})" for name, at in each["phases"].items())
        ends = [None, None]
        if each["end_s"] is not None:
            ends = [each["end_s"] - each["last_step_s"], each["finished_s"] - each["end_s"]]
        numbers = [f"{each['asked_s'] + each['first_step_s']:.1f}"] if each["first_step_s"] is not None else ["none"]
        numbers += ["none" if number is None else f"{number:.1f}" for number in ends]
        where = f"{each['round']}, {each['launch']}" + ("" if each["state"] == "finished" else f": {each['state']}")
        cells = [each["row"], each["variant"] or "as it is", where, f"{each['planned_s']:.1f}", phases, *numbers]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
