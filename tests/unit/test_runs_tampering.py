"""Files of a run, a plan or a checkpoint that hold something else than was written are refused with a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from workbench.base.errors import CheckpointError, DataError, PlanMismatch
from workbench.data import data_fingerprint
from workbench.execution.checkpoint.files import DamagedCheckpoint, digest_of, read_manifest
from workbench.experiment import Experiment
from workbench.planning.plan import Plan
from workbench.planning.planner import plan as make_plan
from workbench.record.rundir import RunDir, check_unedited, read_json, write_json
from workbench.runs.launching.launcher import Attempt, write_attempt


def small(text: Path, **changes: Any) -> Experiment:
    sizes = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 128, "max_positions": 16}
    fields = {"steps": 4, "global_batch": 8, "seq_len": 16, "precision": "fp32", **changes}
    return Experiment.of(
        model=wb.models.bert(**sizes), data=wb.data.corpus(text, vocab_size=128), name="small", **fields
    )


TEXT = "\n\n".join(f"The {i} quick brown foxes jump over {i * i} lazy dogs." for i in range(300))


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path / "runs"))
    file = tmp_path / "corpus.txt"
    file.write_text(TEXT)
    return file


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    folder = tmp_path_factory.mktemp("planned")
    (folder / "corpus.txt").write_text(TEXT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_HOME", str(folder))
        return make_plan(small(folder / "corpus.txt"), wb.Cluster.of("h200", gpus=2))


def started(text: Path, plan: Plan) -> RunDir:
    """Return a run that has a checkpoint of step 2."""
    asked = small(text)
    run = write_attempt(Attempt(asked, plan, provenance={"data_fingerprint": data_fingerprint(asked)}))
    facts = {"step": 2, "seconds": 1.0, "signature": plan.signature, "files": {}}
    write_json(run.checkpoint(2) / "complete.json", {**facts, "digest": digest_of(facts)})
    return run


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("num_microbatches", 1, "samples a step"),
        ("micro_batch", 1, "samples a step"),
        ("data", 7, "samples a step"),
        ("micro_batch", 0, "whole number from 1"),
        ("micro_batch", "2", "micro_batch: Input should be a valid integer"),
        ("schedule", "none", "no schedule"),
        ("block_names", [], "each of the 0 blocks"),
        ("stages", [], "0 stages"),
    ],
)
def test_a_plan_whose_numbers_contradict_each_other_is_refused(plan: Plan, field: str, value: Any, words: str) -> None:
    stored = json.loads(json.dumps(plan.to_json()))
    assert Plan.from_json(stored) == plan
    if stored[field] == value:
        value = 2 * value
    with pytest.raises(PlanMismatch, match=words):
        Plan.from_json({**stored, field: value})


def test_a_text_that_has_changed_is_refused_until_the_change_is_accepted(text: Path, plan: Plan) -> None:
    run, before = started(text, plan), text.read_text()
    text.write_text(before.replace("quick", "slow"))
    with pytest.raises(DataError, match="accept_changed_data=True"):
        write_attempt(Attempt(small(text), plan, resume=run.path))
    with pytest.raises(DataError, match="has changed since"):  # the number of steps does not hide it
        write_attempt(Attempt(small(text, steps=6), plan, resume=run.path))
    text.write_text(before)
    write_attempt(Attempt(small(text, steps=6), plan, resume=run.path))
    text.write_text(before.replace("quick", "slow"))
    write_attempt(Attempt(small(text), plan, resume=run.path, provenance={"accepted_changed_data": True}))
    assert read_json(run.environment)["accepted_changed_data"] is True


def test_an_edited_experiment_or_plan_is_refused_with_what_changed(text: Path, plan: Plan) -> None:
    run = started(text, plan)
    check_unedited(run)
    written = run.experiment.read_text()
    run.experiment.write_text(written.replace('"learning_rate": 0.0001', '"learning_rate": 0.0003'))
    with pytest.raises(PlanMismatch, match=r"learning_rate of experiment\.json: 0\.0001, now 0\.0003"):
        wb.load_run(run.path).resume()
    run.experiment.write_text(written)
    check_unedited(run)
    write_json(run.plan, {**read_json(run.plan), "micro_batch": 3})
    with pytest.raises(PlanMismatch, match=r"micro_batch of plan\.json"):
        check_unedited(run)
    facts = read_json(run.plan)
    slower = [{**facts["stages"][0], "backward_ms": 9}]
    write_json(run.plan, {**facts, "micro_batch": plan.micro_batch, "stages": slower})
    with pytest.raises(PlanMismatch, match=r"stages\[0\]\.backward_ms of plan\.json: [\d.e-]+, now 9\. Undo"):
        check_unedited(run)
    run.started.write_text("[")
    with pytest.raises(PlanMismatch, match=r"started\.json"):
        check_unedited(run)


ODD = ("[" * 100_000, '{"a":' * 100_000, "[" * 300 + "]" * 300, "5", "null", '"x"', "[]", "{}", "9" * 6000, "", "\x00")


@pytest.mark.parametrize(
    "name", ["labels.json", "launcher.json", "wandb.json", "tracker.json", "remote.json", "ranks/0.json"]
)
def test_a_file_of_another_program_breaks_no_list_of_runs(text: Path, plan: Plan, name: str) -> None:
    run = wb.load_run(started(text, plan).path)
    (run.path / name).parent.mkdir(exist_ok=True)
    odd = [content.encode() for content in ODD] + [b"\xff\xfe{}"]
    for field in ("tags", "notes", "supervisor", "workers", "plan", "project", "id", "pid", "rank"):
        odd += [json.dumps({field: value}).encode() for value in (None, 5, [], {"a": 1}, [[5]])]
    for content in odd:
        (run.path / name).write_bytes(content)
        listed = wb.list_runs(run.path.parent)
        assert run.name in repr(listed), content[:40]
        assert run.name in repr(run) + listed._repr_html_() + run._repr_html_()


def test_a_checkpoint_of_another_step_than_its_name_says_is_damaged(text: Path, plan: Plan) -> None:
    path = started(text, plan).checkpoint(2)
    facts = read_manifest(path)
    for edited in ({**facts, "step": 4}, {**facts, "seconds": 9.0}, [], 5):
        write_json(path / "complete.json", edited)
        with pytest.raises(DamagedCheckpoint, match="does not hold what was written"):
            read_manifest(path)
    write_json(path / "complete.json", facts)
    with pytest.raises(CheckpointError, match="of step 2, and its name says 3"):
        read_manifest(path.rename(path.with_name("step-00000003")))
