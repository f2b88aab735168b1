"""Damaged files: no mutation of a run, a checkpoint or a token cache gives a wrong result or a bare traceback.

One small run that failed at step 40 of 60, with two checkpoints, is damaged in one random place at a time. Everything
that reads it is then asked. An answer is as before, or the damage is told: by a `WorkbenchError`, by a count of damaged
lines or missing steps, or by a checkpoint that is passed over.
"""

from __future__ import annotations

import json
import logging
import random
import re
import shutil
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import workbench as wb
from tests.exhaustive import EXHAUSTIVE
from tests.logs import append_event
from tests.unit.figure_values import plan as hand_made_plan
from tests.unit.test_runs import DEAD
from tests.unit.test_runs_event_damage import delete, digit, flip, insert
from tests.unit.test_runs_tampering import small
from workbench.base.errors import WorkbenchError
from workbench.data import data_fingerprint
from workbench.execution.blocks.sparse_weights import BlockSparseParameters
from workbench.execution.checkpoint import save_load
from workbench.execution.checkpoint.files import requested_checkpoint, step_of
from workbench.execution.checkpoint.model_export import describe_model
from workbench.execution.checkpoint.save_load import CheckpointExtras, CheckpointStore, TrainingProgress
from workbench.planning.plan import Plan
from workbench.record.history import final_loss
from workbench.record.rundir import RunDir, check_unedited, read_record, write_json, write_record
from workbench.runs.environment import environment
from workbench.runs.launching import launcher, processes
from workbench.runs.launching.launcher import Attempt

MUTATIONS = 3000 if EXHAUSTIVE else 300
STEPS, TRAINED, SAVED = 60, 40, (20, 40)
FINAL_LOSS = final_loss(range(1, TRAINED + 1), [7.0 / step for step in range(1, TRAINED + 1)])
FAILURE = "rank 0 (stage 0): RuntimeError: no more"
PREDICTED = ("candidates", "prediction", "cluster")
"""Fields of a plan that determine nothing: what the planner thought of the machine."""
LEAVES = (None, True, -1, 0, 10**9, 0.5, 1e308, "", "x", [], {}, [None], "../../../etc/passwd")


def _cut(data: bytes, dice: random.Random) -> bytes:
    return data[: dice.randrange(len(data))]


def _grow(data: bytes, dice: random.Random) -> bytes:
    return data + dice.randbytes(dice.randint(1, 50))


def _zeros(data: bytes, dice: random.Random) -> bytes:
    place = dice.randrange(len(data))
    return data[:place] + bytes(len(data[place : place + 64])) + data[place + 64 :]


def _empty(_data: bytes, _dice: random.Random) -> bytes:
    return b""


def _remove(_data: bytes, _dice: random.Random) -> None:
    return None


def _lines(data: bytes, dice: random.Random) -> bytes:
    """Drop, repeat or swap lines."""
    lines = data.splitlines(keepends=True)
    first, second = dice.randrange(len(lines)), dice.randrange(len(lines))
    match dice.randrange(3):
        case 0:
            del lines[first]
        case 1:
            lines.insert(second, lines[first])
        case 2:
            lines[first], lines[second] = lines[second], lines[first]
    return b"".join(lines)


def _value(data: bytes, dice: random.Random) -> bytes:
    """Replace or remove one value anywhere in a JSON file."""
    value = json.loads(data)
    place, key = value, dice.choice(list(value) or [0]) if isinstance(value, dict) else 0
    while isinstance(place, dict | list) and place:
        key = dice.choice(list(place) if isinstance(place, dict) else range(len(place)))
        inner = place[key]
        if not isinstance(inner, dict | list) or not inner or dice.random() < 0.3:
            break
        place = inner
    if isinstance(place, dict) and dice.random() < 0.3:
        del place[key]
    elif place:
        place[key] = dice.choice(LEAVES)
    return json.dumps(value, indent=2).encode()


ANY = (flip, digit, delete, insert, _cut, _grow, _zeros, _empty, _remove)
ALSO = {".json": (_value,) * 4, ".jsonl": (_lines,) * 4}


class World:
    """A run of two checkpoints, its token cache, and the answers that it gives while it is whole."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.text = folder / "corpus.txt"
        self.text.write_text("\n\n".join(f"The {i} quick brown foxes jump over {i * i} lazy dogs." for i in range(300)))
        self.experiment = small(self.text, steps=STEPS)
        self.plan = replace(hand_made_plan(2, 8, microbatches=1), seq_len=16, precision="fp32")
        self.fingerprint = data_fingerprint(self.experiment)
        machine = environment()
        patch.setattr(launcher, "environment", lambda: machine)  # asking git and the driver takes longer
        patch.setattr(processes, "strays", lambda _: [])  # they are looked for among all processes of the machine
        patch.setattr(launcher, "start_attempt", self._launched)
        patch.setattr(save_load, "create_state", lambda _: None)
        patch.setattr(save_load, "entries", lambda _: self.entries)
        patch.setattr(dist, "new_group", lambda **_: dist.group.WORLD)  # each of its own would keep threads to the end
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
        self.weights = {name: weight.detach() for name, weight in self.model.named_parameters()}
        self.moments = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}
        self.entries = [(f"model.{name}", name, weight) for name, weight in self.weights.items()]
        self.entries += [(f"optim.{name}.exp_avg", name, moment) for name, moment in self.moments.items()]
        self.launched: list[Any] = []
        self.views: dict[str, Any] = {}
        self.events: list[str] = []
        self.damaged = Path()
        """File that is damaged now."""
        self.run = self._written()
        self.cache = next((folder / "home" / "tokens").glob("*/facts.json")).parent
        self.whole = folder / "whole"
        for name, path in (("run", self.run.path), ("cache", self.cache)):
            shutil.copytree(path, self.whole / name)

    def _launched(self, attempt: Attempt, *_: Any, **_keywords: Any) -> RunDir:
        """Write the run directory as `launch` does, and start nothing."""
        if attempt.resume is None:
            attempt = replace(attempt, directory=self.folder / "runs" / "clone")
            shutil.rmtree(self.folder / "runs" / "clone", ignore_errors=True)
        run = launcher.write_attempt(attempt)
        self.launched.append((attempt.experiment.to_json(), decisive(attempt.plan)))
        return run

    def _written(self) -> RunDir:
        directory = self.folder / "runs" / "small"
        facts = {"data_fingerprint": self.fingerprint}
        run = launcher.write_attempt(Attempt(self.experiment, self.plan, directory, provenance=facts))
        write_json(run.launcher, {"supervisor": DEAD, "plan": {"world": 2}, "devices": ["cpu"]})
        write_json(run.rank(0), {**DEAD, "rank": 0, "stage": 0, "device": "CPU process 0"})
        error = {"rank": 0, "stage": 0, "type": "RuntimeError", "message": "no more", "traceback": "T", "time": 1.0}
        write_record(run.error(0), error)
        run.log(0).write_text("some words\nTraceback (most recent call last):\n")
        append_event(run.events, "status", state="starting", message="")
        append_event(run.events, "start", devices=2, world=2, parameters=10, resumed_from=None)
        for step in range(1, TRAINED + 1):
            figures = {
                "loss": 7.0 / step,
                "grad_norm": 1.0,
                "seconds": 0.5 * step,
                "tokens": 128 * step,
                "step_ms": 500,
            }
            append_event(run.events, "step", step=step, **figures)
            if step in SAVED:
                self._save(run, step)
                append_event(run.events, "checkpoint", step=step, path=str(run.checkpoint(step)), seconds=0.1)
        append_event(run.events, "memory", rank=0, stage=0, device="cpu", peak_bytes=2**20)
        append_event(run.events, "status", state="failed", message=FAILURE)
        write_json(run.resume, {"checkpoint": str(run.checkpoint(SAVED[0])), "step": SAVED[0]})
        return run

    def checkpoints(self, run: RunDir) -> CheckpointStore:
        trainer = SimpleNamespace(
            plan=self.plan,
            optimizer=None,
            stages=SimpleNamespace(
                shardings={}, compact=BlockSparseParameters(), model_buffers=dict, model_parameters=dict
            ),
            graph=SimpleNamespace(parameters=self.weights),
            coordinate=SimpleNamespace(
                data=1, tensor=1, data_rank=0, tensor_rank=0, devices_per_stage=1, rank_in_stage=0
            ),
            context=SimpleNamespace(device=torch.device("cpu")),
            sparse_weights=None,
            average=None,
        )
        extras = CheckpointExtras(describe_model(self.model)[0])
        return CheckpointStore(trainer, run, extras=extras)  # type: ignore[arg-type]

    def _save(self, run: RunDir, step: int) -> None:
        self._fill(float(step))
        checkpoints = self.checkpoints(run)
        checkpoints.save(TrainingProgress(step, 0.5 * step))
        checkpoints.finish()

    def _fill(self, value: float) -> None:
        for _, _, tensor in self.entries:
            tensor.fill_(value)

    def restore(self) -> None:
        for name, path in (("run", self.run.path), ("cache", self.cache)):
            shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(self.whole / name, path)

    # What may be asked

    def shown(self) -> str | None:
        """Return which views of the run silently show something else than while it was whole, if any does.

        Three kinds of damage have nothing that could tell: to what a process printed, to the order of whole events, and
        the loss of whole events that no other event counts, such as that of the last step.
        """
        run = wb.load_run(self.run.path)
        found, events = {name: _said(show, run) for name, show in VIEWS.items()}, [str(event) for event in run.events()]
        if not self.views:
            self.views, self.events = found, events
        changed = {name: each for name, each in found.items() if each != self.views[name]}
        told = run.row()["damaged_lines"] or run.history().missing
        told = told or any(
            isinstance(each, WorkbenchError) or word in each for each in changed.values() for word in TOLD
        )
        printed = [name for name in ("logs", "error") if self.damaged.suffix == ".log"]
        in_order = ("events", "milestones", "repr", "page", "list", *(("summary",) if self.ends_early() else ()))
        ordered = [name for name in in_order if set(events) <= set(self.events)]
        unknown = [name for name, each in changed.items() if _is_blanked(self.views[name], each)]
        silent = [name for name in changed if name not in (*unknown, *printed, *ordered)]
        return f"views {silent}: {changed[silent[0]][-200:]}" if silent and not told else None

    def curve(self) -> str | None:
        """Return what is silently wrong in the curve or the state, if anything is."""
        run = wb.load_run(self.run.path)
        history, facts = run.history(), run.row()
        wrong = history.loss != 7.0 / history.step
        if wrong.any() or not np.all(np.diff(history.step) > 0):
            return f"losses of the steps {history.step[wrong]}"
        told = (
            facts["damaged_lines"] or history.missing or facts["message"] != "rank 0 (stage 0): RuntimeError: no more"
        )
        seen = len(history), facts["state"], facts["step"], history.final_loss
        whole = seen == (TRAINED, "failed", TRAINED, FINAL_LOSS)
        return None if told or whole or self.ends_early() else f"{seen}"

    def ends_early(self) -> bool:
        """Return True if the last step's whole line is gone, as if the run had died before it wrote it."""
        return wb.load_run(self.run.path).history().step.tolist() == list(range(1, TRAINED))

    def description(self) -> str | None:
        """Return what a rank would silently train otherwise, if anything."""
        check_unedited(self.run)
        found = {"plan": decisive(Plan.load(self.run.plan)), "experiment": read_record(self.run.experiment)}
        wanted = {"plan": decisive(self.plan), "experiment": json.loads(json.dumps(self.experiment.to_json()))}
        differing = [name for name in found if found[name] != wanted[name]]
        _ = wb.load_run(self.run.path).experiment
        start = requested_checkpoint(self.run)
        if start not in (self.run.checkpoint(SAVED[0]), None) and start.exists():
            differing.append("resume.json")
        return f"{differing}" if differing else None

    def exported(self) -> str | None:
        """Return what is silently wrong in an export, if anything."""
        to = self.folder / "exported"
        shutil.rmtree(to, ignore_errors=True)
        run = wb.load_run(self.run.path)
        run.export(to)
        from safetensors.torch import load_file

        step = run.checkpoints[-1].step
        wrong = [name for name, weight in load_file(to / "model.safetensors").items() if not (weight == step).all()]
        return f"weights {wrong[:3]} of step {step}" if wrong else None

    def cloned(self) -> str | None:
        """Return what a clone would silently train otherwise, if anything."""
        return self._would_train(wb.load_run(self.run.path).clone)

    def resumed(self) -> str | None:
        """Return what is silently wrong in a continuation, if anything; it changes the run directory."""
        wrong = self._would_train(wb.load_run(self.run.path).resume)
        start = requested_checkpoint(self.run)
        assert start is not None
        self._fill(-1.0)
        rejected: list[Path] = []
        progress, used = self.checkpoints(self.run).load_newest(start, lambda path, _: rejected.append(path))
        step = progress.step
        if step != step_of(used) or (step != SAVED[-1] and start == used and start.name == "step-00000040"):
            return f"step {step} of {used}"
        different = [key for key, _, tensor in self.entries if not (tensor == step).all()]
        return wrong or (f"{different[:3]} of step {step}" if different else None)

    def _would_train(self, start: Callable[[], Any]) -> str | None:
        start()
        experiment, plan = self.launched[-1]
        if experiment != self.experiment.to_json() or plan != decisive(self.plan):
            return "another experiment or plan"
        return None

    def tokens(self) -> str | None:
        """Return what is silently wrong in the samples, if anything."""
        return None if data_fingerprint(self.experiment) == self.fingerprint else "other samples"


VIEWS: dict[str, Callable[[wb.Run], Any]] = {
    "repr": repr,
    "page": lambda run: run._repr_html_(),
    "list": lambda run: _own_row(repr(wb.list_runs(run.path.parent))),
    "error": lambda run: str(run.error()),
    "logs": lambda run: run.logs(),
    "events": lambda run: repr(run.events()),
    "milestones": lambda run: repr(run.milestones()),
    "evaluations": lambda run: repr(run.evaluations()),
    "samples": lambda run: repr(run.samples()),
    "utilization": lambda run: repr(run.utilization()),
    "environment": lambda run: repr(run.environment),
    "summary": lambda run: repr(wb.runs.summary([run])),
}
"""Everything that shows a run without a figure."""
TOLD = ("damaged", "No rank left an error file", "vanished")
"""Words by which a view says that a file is not what was written."""
BLANK = ("", "[]", "{}", "None")
"""What a view shows of a file that is gone: nothing."""


def _is_blanked(before: Any, after: Any) -> bool:
    """Return True if a view shows nothing, or `–` in each line in which it showed something else."""
    old, new = str(before).splitlines(), str(after).splitlines()
    unknown = [was == now or now.endswith("–") for was, now in zip(old, new, strict=False)]
    return after in BLANK or (len(old) == len(new) > 1 and all(unknown))


def _own_row(table: str) -> str:
    """Return the run's row of the table of runs, without its age."""
    return str([re.split(r"  +", line)[:-1] for line in table.split("\n") if "small" in line])


def _said(show: Callable[[wb.Run], Any], run: wb.Run) -> Any:
    """Return what a view shows, or the error with which it ends."""
    try:
        return show(run)
    except WorkbenchError as error:
        return error


def decisive(plan: Plan) -> dict[str, Any]:
    """Return what of a plan determines the training."""
    return {name: value for name, value in json.loads(json.dumps(plan.to_json())).items() if name not in PREDICTED}


def answered(ask: Callable[[], Any]) -> str:
    """Return how a question was answered: `as before`, `told`, or what is wrong."""
    try:
        wrong = ask()
    except WorkbenchError:
        return "told"
    return "as before" if not isinstance(wrong, str) else wrong


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("world")
    logging.getLogger("c10d-NullHandler-dcp_logger").setLevel(logging.INFO)  # it formats a line for each tensor
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_HOME", str(folder / "home"))
        patch.setenv("WORKBENCH_RUNS", str(folder / "runs"))
        patch.setenv("WANDB_MODE", "disabled")
        patch.chdir(folder)
        yield World(folder, patch)
    dist.destroy_process_group()


def _files(world: World) -> list[Path]:
    inside = [path for root in (world.run.path, world.cache) for path in sorted(root.rglob("*")) if path.is_file()]
    return [path for path in inside if path.stat().st_size]


@pytest.mark.parametrize("first", [pytest.param(0, marks=pytest.mark.representative), 1, 2, 3])
def test_no_damage_is_silent_and_none_ends_in_a_traceback(first: int, world: World) -> None:
    world.restore()  # the last question of the test before may have left an attempt, whose files are not there later
    damaged = _files(world)
    assert len(damaged) >= 20, damaged
    of_run = (world.shown, world.curve, world.description, world.exported, world.cloned, world.resumed)
    of_cache = (world.tokens, world.resumed)
    counts: Counter[str] = Counter()
    problems = []
    for number in (-1, *range(first, MUTATIONS, 4)):
        world.restore()
        dice = random.Random(f"damage {number}")  # each on its own: a longer file elsewhere changes no other mutation
        name, questions = "nothing", (*of_run[:-1], *of_cache)
        if number >= 0:
            file = damaged[number % len(damaged)]
            mutate = dice.choice((*ANY, *ALSO.get(file.suffix, ())))
            questions = of_cache if file.parent == world.cache else of_run
            world.damaged = file
            changed = mutate(file.read_bytes(), dice)
            file.unlink() if changed is None else file.write_bytes(changed)
            name = f"mutation {number}, {mutate.__name__} of {file.relative_to(world.folder)}"
        outcomes = set()
        for ask in questions:
            try:
                outcome = answered(ask)
            except Exception as error:
                last = traceback.extract_tb(error.__traceback__)[-1]
                outcome = f"raw {type(error).__name__}: {str(error)[:100]} in line {last.lineno} of {last.filename}"
            if outcome not in ("as before", "told"):
                problems.append(f"{name}: {ask.__name__}: {outcome}")
                outcome = "raw tracebacks" if outcome.startswith("raw ") else "silent wrong"
            outcomes.add(outcome)
        worst = next(each for each in ("raw tracebacks", "silent wrong", "told", "as before") if each in outcomes)
        assert number >= 0 or outcomes == {"as before"}, problems
        counts[worst] += number >= 0
    shown = ", ".join(f"{counts[each]} {each}" for each in ("as before", "told", "silent wrong", "raw tracebacks"))
    print(f"\n{MUTATIONS // 4} mutations of {len(damaged)} files: {shown}")
    assert not problems, f"{len(problems)} problems: \n" + "\n".join(problems)
    assert counts["told"] > MUTATIONS / 32, "most mutations did nothing"


def test_another_word_in_an_error_is_told(world: World) -> None:
    world.restore()
    assert "no more" in str(wb.load_run(world.run.path).error())
    file = world.run.error(0)
    file.write_text(file.read_text().replace("no more", "no less"))
    error = str(wb.load_run(world.run.path).error())
    assert "no less" not in error
    assert "The error files 0.json are damaged" in error
    world.restore()
