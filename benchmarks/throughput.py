"""Our planner's choice against the strongest peers that we can write, interleaved on the same GPUs.

    python benchmarks/throughput.py --gpus 4 --out throughput.json large scaled
    python benchmarks/throughput.py --gpus 2 --out tiny.json --tiny large            # on CPUs, to see that it runs
    python benchmarks/throughput.py --out throughput.json                            # prints what a file holds

Three things happen in this order, and each is written to the file when it is there:

1. Our plans of all rows, with their predicted step time and memory.
2. A sweep of each peer of each row: micro-batches in growing order until one does not fit, without checkpointing, with
   every second layer and with every layer checkpointed. Checkpointing is tried at micro-batches that do not fit
   without, since it can only cost time elsewhere. The fastest of a peer's sweep competes.
3. Rounds. In each round every contender is built, warmed up, timed and freed once; every second round has the opposite
   order, so that a machine that slows down slows all contenders alike. Contenders of one round share their processes,
   unless one runs out of memory; those of a library have their own. Every step's time is written.

Batches are for 4 GPUs; on another number they are larger or smaller with it, so that a GPU has as much to do. Random
tokens, dropout 0.1, AdamW and clipping included. A row's limit of memory is enforced on all contenders. The peers'
compiler is PyTorch's own, without what we change.

`--plan 2,1,0,16,selective,tensor=2` adds a forced plan of ours (pipeline, data, ZeRO, micro-batch, checkpointing, then
by name whatever else `wb.plan` takes), `--peer fsdp,64` a peer without options as it is written, at that micro-batch
and unswept, `--ablate ddp,fsdp` the peers whose names begin so without one of their options after another and without
all, at the winner's micro-batch, and `--deterministic` the planner's choice with deterministic kernels. `--skip
deepspeed,megatron` leaves out the peers whose names begin so. `--profile` writes where a step in a row of three goes
on every rank, by phase and by type of kernel, and every kernel of it into a file beside the raw one. The same command
goes on where it stopped.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import by_hand
import contenders
import machine
from contenders import ROWS, Turn

import workbench as wb
from workbench.base.machine import end_elastic_launch
from workbench.base.units import GIB
from workbench.execution.blocks.cuda_graphs import NCCL_SETTING
from workbench.execution.build import CUBLAS_SETTING
from workbench.runs.launching.supervisor import ALLOCATOR, GROWING

DETERMINISTIC = "ours, deterministic"
POLL_S = 0.2
"""Seconds between two looks for results."""
FORMAT = 2
"""Version of the raw file. Files of the first, a bare list, came from peers without options, in rounds of one order."""


def main() -> None:
    arguments = _arguments()
    raw = _opened(arguments.out)
    if arguments.rows:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what was launched is ended, too
        try:
            _refuse(arguments)
        except ValueError as error:
            raise SystemExit(str(error)) from None
        raw["starts"].append(machine.described() | {"command": sys.argv[1:], "gpus": arguments.gpus})
        bench = Bench(arguments, raw)
        for name in arguments.rows:
            bench.predict(name)
        for name in arguments.rows:
            bench.sweep(name)
            bench.compare(name)
    print(report(raw))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=1, help="processes, one a GPU (or a CPU core where there is none)")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a contender in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sweep-steps", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=10, help="after which one contender is given up")
    parser.add_argument("--out", type=Path, default=Path("throughput.json"))
    parser.add_argument("--plan", action="append", default=[], help=by_hand.SYNTAX)
    parser.add_argument("--peer", action="append", default=[], help="kind,micro_batch")
    parser.add_argument("--skip", default="", help="peers or libraries to leave out, by comma: deepspeed,megatron-tp4")
    parser.add_argument("--ablate", default="", help="peers or libraries to time without their options, by comma: ddp")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="small models, of no interest but to see that this runs")
    parser.add_argument("rows", nargs="*", metavar="ROW", help=", ".join(ROWS))
    return parser.parse_args()


def _refuse(arguments: argparse.Namespace) -> None:
    """Raise `ValueError` for a row or a peer that does not exist or cannot run here, before any process starts."""
    for option in ("gpus", "steps", "rounds", "sweep_steps"):
        if getattr(arguments, option) < 1:
            raise ValueError(f"--{option.replace('_', '-')} {getattr(arguments, option)} is not at least 1.")
    for name in arguments.rows:
        if name not in ROWS:
            raise ValueError(f"There is no row {name!r}. The rows are {', '.join(ROWS)}.")
    for text in arguments.peer:
        kind, size = by_hand.peer(text)
        contenders.family_of(kind)
        for name in arguments.rows:
            if not contenders.fits(kind, arguments.gpus):
                raise ValueError(f"{kind} does not run on {arguments.gpus} devices. Give --gpus another number.")
            samples = ROWS[name].at(arguments.gpus, arguments.tiny).global_batch
            replicas = contenders.replicas_of(kind, arguments.gpus)
            if samples % (replicas * size):
                raise ValueError(
                    f"The {samples} samples of {name} do not divide among {replicas} replicas of {kind} into "
                    f"micro-batches of {size}. Give a divisor of {samples // replicas}."
                )
    for name in arguments.rows:
        for kind in _kept(name, arguments.skip):
            try:
                contenders.family_of(kind)
            except ValueError as error:
                raise ValueError(f"{error} Or leave it out: --skip {kind}.") from None


def _kept(name: str, skip: str) -> list[str]:
    """Return the peers of a row without those that `--skip` names, alone or by the beginning of their names."""
    return [kind for kind in ROWS[name].peers if not kind.startswith(_names(skip))]


def _names(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


class Bench:
    """One start of the command: what it was told, and the raw file that it fills."""

    def __init__(self, arguments: argparse.Namespace, raw: dict[str, Any]) -> None:
        self.arguments, self.raw = arguments, raw
        self.start = len(raw["starts"]) - 1

    def predict(self, name: str) -> None:
        """Plan ours for a row and write the predictions."""
        cluster = replace(wb.measure.local_cluster(), gpus=self.arguments.gpus, gpus_per_node=self.arguments.gpus)
        wanted = {"ours": ROWS[name].ours} | {f"ours {text}": by_hand.degrees(text) for text in self.arguments.plan}
        written = self.raw["predictions"].setdefault(name, {})
        for label, fixed in wanted.items():
            if label not in written:
                begun = time.time()
                with machine.Clocks(self.arguments.gpus) as clocks:
                    plan = wb.plan(ROWS[name].at(self.arguments.gpus, self.arguments.tiny), cluster, **fixed)
                written[label] = {
                    "date": machine.now(),
                    "gpus": clocks.between(begun, time.time(), busy=True),
                    "start": self.start,
                    "plan": plan.describe(),
                    "step_ms": plan.prediction.step_ms,
                    "peak_gib": plan.peak_bytes / GIB,
                    "json": replace(plan, candidates=()).to_json(),
                }
                self._write()

    def sweep(self, name: str) -> None:
        """Time every micro-batch and every checkpointing of each peer of a row."""
        for base in _kept(name, self.arguments.skip):
            if not contenders.fits(base, self.arguments.gpus):
                continue
            strong = contenders.strongest(base)
            for option in contenders.checkpointing(base):
                kind = "+".join(part for part in (strong, option) if part)
                if any(
                    "error" in entry for entry in self.raw["sweeps"] if (entry["row"], entry["kind"]) == (name, kind)
                ):
                    continue
                largest = max((entry["micro_batch"] for entry in self._fitted(name, base)), default=0)
                sizes = [size for size in self._sizes(name, kind) if size > largest]
                turns = [Turn(f"{kind}, {size}", kind, size) for size in sizes]
                for turn, found in self._launched(name, turns, self.arguments.sweep_steps):
                    said = {"row": name, "peer": base, "kind": kind, "micro_batch": turn.micro_batch}
                    self._note("sweeps", said, found)

    def compare(self, name: str) -> None:
        """Time all contenders of a row, in rounds."""
        turns = list(self._contenders(name))
        for number in range(self.arguments.rounds):
            ordered = list(enumerate(turns if number % 2 == 0 else turns[::-1]))
            waiting = [(position, turn) for position, turn in ordered if not self._done(name, turn.label, number)]
            profile = self.arguments.profile and number == 0
            for _, group in itertools.groupby(waiting, key=lambda item: contenders.company(item[1].kind)):
                together = list(group)
                while together:
                    for _, found in self._launched(name, [turn for _, turn in together], self.arguments.steps, profile):
                        position, turn = together.pop(0)
                        said = {"row": name, "contender": turn.label, "round": number, "position": position}
                        self._note("measurements", said, found)

    def _done(self, name: str, label: str, number: int) -> bool:
        """Return whether a contender has its time of this round, or has failed and is not tried again."""
        known = [entry for entry in self.raw["measurements"] if (entry["row"], entry["contender"]) == (name, label)]
        return any(entry["round"] == number or "error" in entry for entry in known)

    def _contenders(self, name: str) -> Iterator[Turn]:
        for label, entry in self.raw["predictions"][name].items():
            yield Turn(f"{label}: {entry['plan']}", "ours", plan=entry["json"])
        if self.arguments.deterministic:
            chosen = self.raw["predictions"][name]["ours"]
            yield Turn(f"{DETERMINISTIC}: {chosen['plan']}", "ours", plan=chosen["json"], deterministic=True)
        for kind, size in dict.fromkeys([*self._peers(name), *map(by_hand.peer, self.arguments.peer)]):
            yield Turn(f"{kind}, {size}", kind, size)

    def _peers(self, name: str) -> Iterator[tuple[str, int]]:
        """Yield the fastest of each peer's sweep and, if asked, the same without its options."""
        for base in _kept(name, self.arguments.skip):
            timed = self._fitted(name, base)
            if not timed:
                continue
            best = min(timed, key=lambda entry: statistics.median(entry["step_ms"]))
            yield best["kind"], best["micro_batch"]
            if base.startswith(_names(self.arguments.ablate)):
                for kind in contenders.ablations(base, best["kind"]):
                    yield kind, best["micro_batch"]

    def _sizes(self, name: str, kind: str) -> list[int]:
        experiment = ROWS[name].at(self.arguments.gpus, self.arguments.tiny)
        samples = experiment.global_batch // contenders.replicas_of(kind, self.arguments.gpus)
        sizes = [size for size in ROWS[name].sizes(self.arguments.tiny) if samples % size == 0]
        return sizes or [samples]

    def _fitted(self, name: str, base: str) -> list[dict[str, Any]]:
        """Return what the sweep of a peer has timed."""
        entries = [entry for entry in self.raw["sweeps"] if (entry["row"], entry["peer"]) == (name, base)]
        return [entry for entry in entries if "error" not in entry]

    def _launched(
        self, name: str, turns: Sequence[Turn], steps: int, profile: bool = False
    ) -> Iterator[tuple[Turn, dict[str, Any]]]:
        """Yield what was found of each turn; the first that fails ends the launch, and no later one is tried."""
        if not turns:
            return
        asked = {
            "row": name,
            "tiny": self.arguments.tiny,
            "turns": [asdict(turn) for turn in turns],
            "steps": steps,
            "limit_gib": None if self.arguments.tiny else ROWS[name].ours.get("memory_limit_gib"),
            "profile": profile,
        }
        with tempfile.TemporaryDirectory() as name_of, machine.Clocks(self.arguments.gpus) as clocks:
            folder = Path(name_of)
            (folder / "turns.json").write_text(json.dumps(asked))
            waiting = list(turns)
            for line in self._run(folder, turns[0]):
                found = json.loads(line)
                for file in folder.glob("kernels-*"):
                    shutil.move(file, self._beside(name, waiting[0], file))
                yield waiting.pop(0), found | {"gpus": clocks.between(*found["timed"])}
            if waiting:
                yield waiting[0], {"error": _failure(folder, self.arguments.minutes)}

    def _beside(self, name: str, turn: Turn, file: Path) -> Path:
        """Return where the kernels of a profiled step stay, beside the raw file."""
        label = re.sub(r"[^A-Za-z0-9+.]+", "-", turn.label).strip("-")
        return self.arguments.out.with_name(f"{self.arguments.out.stem}-{name}-{label}-{file.name}")

    def _run(self, folder: Path, turn: Turn) -> Iterator[str]:
        """Start the processes and yield their results until they end, or until one takes too long."""
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        command += [str(self.arguments.gpus), contenders.__file__, str(folder)]
        with (folder / "log").open("w") as log:
            settings = self._environment(turn)
            process = subprocess.Popen(command, stdout=log, stderr=log, env=settings, start_new_session=True)
        try:
            seen, ended, deadline = 0, False, time.monotonic() + self.arguments.minutes * 60
            while not ended and time.monotonic() < deadline:
                ended = process.poll() is not None
                results = (folder / "results").read_text().split("\n")[:-1] if (folder / "results").exists() else []
                for line in results[seen:]:
                    yield line
                    deadline = time.monotonic() + self.arguments.minutes * 60
                seen = len(results)
                time.sleep(0 if ended else POLL_S)
        finally:
            end_elastic_launch(process)

    def _environment(self, turn: Turn) -> dict[str, str]:
        """Return the settings of our runs' processes, which everybody gets, and those that a library's users set."""
        settings = dict([(ALLOCATOR[0], GROWING), NCCL_SETTING])
        settings |= dict([CUBLAS_SETTING]) if self.arguments.deterministic else {}
        return settings | contenders.environment(turn.kind) | os.environ

    def _note(self, part: str, said: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        entry = {**said, "start": self.start, "date": machine.now(), **found}
        self.raw[part].append(entry)
        self._write()
        shown = entry.get("error") or f"{statistics.median(entry['step_ms']):,.1f} ms"
        print(" ".join(str(value) for value in said.values()), shown, sep=": ", flush=True)

    def _write(self) -> None:
        beside = self.arguments.out.with_name(f"{self.arguments.out.name}.{os.getpid()}")
        beside.write_text(json.dumps(self.raw, indent=1) + "\n")
        beside.replace(self.arguments.out)


def _failure(folder: Path, minutes: float) -> str:
    """Return what went wrong in a launch; print the end of its output unless memory ran out."""
    errors = [json.loads(path.read_text()) for path in sorted(folder.glob("error-*"))]
    errors.sort(key=lambda error: not error["out_of_memory"])
    if not errors or not errors[0]["out_of_memory"]:
        print("".join((folder / "log").read_text().splitlines(keepends=True)[-40:]), file=sys.stderr, flush=True)
    return errors[0]["sentence"] if errors else f"no result within {minutes:g} minutes, or its processes were ended"


def _opened(out: Path) -> dict[str, Any]:
    """Return what an earlier start wrote, or an empty file of this format."""
    if not out.exists():
        return {"format": FORMAT, "starts": [], "predictions": {}, "sweeps": [], "measurements": []}
    raw = json.loads(out.read_text())
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise SystemExit(f"{out} was written by an earlier version of this command. Give --out another name.")
    return raw


def report(raw: Mapping[str, Any]) -> str:
    """Return a line for each contender, then the ratios of each row."""
    lines = []
    for row in dict.fromkeys(entry["row"] for entry in raw["measurements"]):
        entries = [entry for entry in raw["measurements"] if entry["row"] == row]
        rounds: dict[str, dict[int, float]] = {}
        for label in dict.fromkeys(entry["contender"] for entry in entries):
            runs = [entry for entry in entries if entry["contender"] == label]
            failed = next((entry["error"] for entry in runs if "error" in entry), None)
            if failed:
                lines.append(f"{row:14} {label}: {failed}")
                continue
            rounds[label] = {entry["round"]: statistics.median(entry["step_ms"]) for entry in runs}
            tokens = runs[0]["tokens_per_step"] / statistics.median(rounds[label].values()) * 1e3
            memory = f", {runs[0]['peak_gib']:.1f} GiB" if "peak_gib" in runs[0] else ""
            lines.append(f"{row:14} {label}: {_spread(rounds[label])}, {tokens:,.0f} tokens/s{memory}")
        lines.extend(f"{row:14} {line}" for line in [*_ratios(rounds), *_utilisation(row, raw, rounds)])
    return "\n".join(lines)


def _ratios(rounds: Mapping[str, Mapping[int, float]]) -> Iterator[str]:
    """Yield the planner's choice and our best over the best peer: the median over rounds, and its range."""
    median = {label: statistics.median(times.values()) for label, times in rounds.items()}
    peers = {label: ms for label, ms in median.items() if not label.startswith("ours")}
    ours = {label: ms for label, ms in median.items() if label.startswith("ours")}
    if not peers or not ours:
        return
    best = min(peers, key=peers.__getitem__)
    chosen = next((label for label in ours if label.startswith("ours:")), None)
    for words, label in (("planner's choice", chosen), ("our best", min(ours, key=ours.__getitem__))):
        if label is not None:
            shared = sorted(set(rounds[label]) & set(rounds[best]))
            ratios = [rounds[best][number] / rounds[label][number] for number in shared]
            if ratios:
                spread = f"{min(ratios):.3f} to {max(ratios):.3f} in {len(ratios)} rounds"
                yield f"{words} / best peer ({best}) = {statistics.median(ratios):.3f} ({spread})"
    for label, ms in peers.items():
        if label != best:
            yield f"best peer / {label} = {ms / peers[best]:.3f}"
        for option in label.partition(",")[0].split("+")[1:]:
            without = label.replace(f"+{option}", "", 1)
            if without in peers:
                yield f"{option} makes {without} {peers[without] / ms:.3f} times as fast"


def _utilisation(row: str, raw: Mapping[str, Any], rounds: Mapping[str, Mapping[int, float]]) -> Iterator[str]:
    """Yield the share of the GPUs' peak of each contender, by the FLOPs of a step whose head runs at labels only."""
    plan = raw["predictions"][row]["ours"]["json"]
    experiment = ROWS[row].at(plan["cluster"]["gpus"], tiny=False)
    peak = plan["cluster"]["device"]["peak_flops"].get(plan["precision"])
    if plan["global_batch"] != experiment.global_batch or peak is None:  # a tiny row, or CPUs
        return
    is_partial = experiment.reading.labelled_share() < 1
    needed = wb.analysis.sample_flops(experiment).at_labels * experiment.global_batch if is_partial else None
    flops = plan["flops_per_step"] if needed is None else needed
    for label, times in rounds.items():
        share = flops / (statistics.median(times.values()) / 1e3) / peak / plan["cluster"]["gpus"]
        yield f"MFU of {label.partition(':')[0]} by the FLOPs of a head at labels only = {share:.1%}"


def _spread(times: Mapping[int, float]) -> str:
    values = list(times.values())
    return f"{statistics.median(values):,.1f} ms ({min(values):,.1f} to {max(values):,.1f})"


if __name__ == "__main__":
    main()
