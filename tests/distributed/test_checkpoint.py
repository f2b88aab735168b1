"""A run that was interrupted and resumed continues as if it had not been interrupted."""

from __future__ import annotations

import dataclasses
import errno
import io
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.nn import functional

from tests.distributed import real_worker
from tests.distributed.harness import AtGate
from tests.distributed.real_worker import Ranks, curve, directory, experiment, plan, trained
from tests.exhaustive import EXHAUSTIVE
from tests.patience import PATIENCE_S, Gate, eventually
from workbench.base.errors import CheckpointError, PlanMismatch
from workbench.execution.checkpoint import model_export
from workbench.execution.checkpoint.files import (
    COMPLETE,
    DamagedCheckpoint,
    complete_checkpoints,
    digest_of,
    find_damage,
    prune,
    read_manifest,
)
from workbench.execution.checkpoint.model_export import export_checkpoint
from workbench.experiment import Experiment
from workbench.planning.plan import Plan
from workbench.record.event_log import read_events
from workbench.record.rundir import RunDir, read_json, write_json
from workbench.runs.run import Run

STEPS, EVERY = 18, 4
KILLS = 12 if EXHAUSTIVE else 2
DIVISIONS: dict[str, tuple[str, dict[str, int]]] = {
    "pipeline": ("fp32", {"pipeline": 2}),
    "pipeline in bf16": ("bf16", {"pipeline": 2}),
    "three replicas": ("fp32", {"data": 3, "zero": 0}),
    "two replicas": ("fp32", {"data": 2, "zero": 0}),
    "four replicas in bf16": ("bf16", {"data": 4, "zero": 0, "micro_batch": 1}),
    "two stages of three replicas": ("fp32", {"pipeline": 2, "data": 3, "zero": 0}),
    "two shards": ("fp32", {"data": 2, "zero": 3}),
    "three shards in bf16": ("bf16", {"data": 3, "zero": 3}),
    "two shards that recompute some blocks": ("bf16", {"data": 2, "zero": 3}),
}
DEFAULT = tuple(DIVISIONS) if EXHAUSTIVE else ("pipeline in bf16", "three replicas")


def killed_and_resumed(path: Path, asked: Experiment, chosen: Plan, kills: int, seed: int) -> tuple[RunDir, list[int]]:
    """Train to the end, killed with SIGKILL as often as asked, each time at a random step of those that are left.

    When the ranks are killed they are in that step or in one of the next few, and not at the end.
    """
    draw, killed_at, gate = random.Random(seed), [0], Gate(path.with_suffix(".gate"))
    asked = asked.replace(callbacks=[AtGate(gate.file)])
    run = directory(path, asked, chosen)
    for number in range(kills):
        left = STEPS - killed_at[-1]
        step = min(killed_at[-1] + draw.randint(1, max(1, left // (kills - number + 1))), STEPS - 2)
        gate.open(min(step + 2, STEPS - 2))
        ranks = Ranks(run, chosen.world)
        real_worker.reach(run, step)
        ranks.kill(first=draw.randrange(chosen.world))
        killed_at.append(real_worker.last_step(run))
        saved = complete_checkpoints(run.checkpoints)
        run = directory(path, asked, chosen, saved[-1] if saved else None)
    gate.open()
    Ranks(run, chosen.world).wait()
    return run, killed_at


class Noisy(nn.Module):
    """A layer that cannot be exported: it branches on a value. Dropout and Python's generator make it random."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.dropout(self.linear(x), 0.2) * (0.5 + random.random())
        return x + (y if float(self.linear.weight.detach().norm()) > 0 else y.tanh())


class NoisyWords(nn.Module):
    """A masked language model of such layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(real_worker.VOCAB, 32)
        self.layers = nn.ModuleList(Noisy(32) for _ in range(4))
        self.head = nn.Linear(32, real_worker.VOCAB)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class ComparedWords(nn.Module):
    """Two views of each text that differ by dropout, and a loss that compares them with those of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(real_worker.VOCAB, 32)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.3)) for _ in range(3))
        self.head = nn.Linear(32, 16)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(torch.cat([input_ids, labels.clamp(min=0)]))
        for layer in self.layers:
            x = x + layer(x)
        one, other = functional.normalize(self.head(x.mean(1)), dim=-1).chunk(2)
        return functional.cross_entropy(10 * one @ other.T, torch.arange(len(one), device=one.device))


ODD = [(model, {"data": 2, "zero": 3}) for model in (ComparedWords, NoisyWords)]
if EXHAUSTIVE:
    ODD += [
        (ComparedWords, {"data": 2, "zero": 0}),
        *((model, {"pipeline": 2}) for model in (ComparedWords, NoisyWords)),
    ]


@pytest.mark.parametrize(("model", "degrees"), ODD)
def test_a_gathered_loss_and_opaque_layers_are_the_same_to_the_last_bit_in_a_run_that_was_killed(
    model: type[nn.Module], degrees: dict[str, int], tmp_path: Path
) -> None:
    asked = experiment(model=model, steps=STEPS, global_batch=8)
    chosen = plan(asked, **degrees)
    assert chosen.gathers if model is ComparedWords else any("as written" in note for note in chosen.notes)
    unbroken = curve(trained(tmp_path / "unbroken", asked, chosen))
    assert unbroken[1] != unbroken[STEPS]
    saving = asked.replace(checkpoint_every=EVERY)
    run, killed_at = killed_and_resumed(tmp_path / "killed", saving, chosen, 1, seed=4)
    assert curve(run) == unbroken, f"killed at {killed_at}"


@pytest.mark.parametrize("division", [pytest.param(DEFAULT[0], marks=pytest.mark.representative), *DEFAULT[1:]])
def test_a_run_killed_at_random_steps_has_the_loss_curve_of_an_unbroken_one_to_the_last_bit(
    division: str, tmp_path: Path
) -> None:
    precision, degrees = DIVISIONS[division]
    asked = experiment(steps=STEPS, global_batch=12, precision=precision)
    chosen = plan(asked, **degrees)
    if "recompute some" in division:
        stages = (dataclasses.replace(stage, recompute="selective", recompute_first=2) for stage in chosen.stages)
        chosen = dataclasses.replace(chosen, stages=tuple(stages))
        assert chosen.recompute == "mixed"
    unbroken = curve(trained(tmp_path / "unbroken", asked, chosen))
    assert len(unbroken) == STEPS
    saving = asked.replace(checkpoint_every=EVERY)
    run, killed_at = killed_and_resumed(tmp_path / "killed", saving, chosen, KILLS, seed=len(division))
    assert curve(run) == unbroken, f"killed at {killed_at}"


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Train twelve steps on one process, with a checkpoint every three steps."""
    asked = experiment(steps=12, checkpoint_every=3)
    return trained(tmp_path_factory.mktemp("unbroken"), asked, plan(asked))


def test_the_last_checkpoints_stay_and_each_knows_its_files(unbroken: RunDir) -> None:
    kept = complete_checkpoints(unbroken.checkpoints)
    assert [path.name for path in kept] == ["step-00000006", "step-00000009", "step-00000012"]
    for path in kept:
        files = read_manifest(path)["files"]
        assert files.keys() == {file.name for file in path.iterdir()} - {COMPLETE}
        assert find_damage(path, files) is None
    written = [event for event in read_events(unbroken.events) if event["type"] == "checkpoint"]
    assert [event["step"] for event in written] == [3, 6, 9, 12]


LEGS: dict[str, list[dict[str, int]]] = {
    "stages": [{"pipeline": 4}, {"pipeline": 2, "data": 2, "zero": 0}, {}, {"data": 2, "zero": 3}],
    "tensors": [{"tensor": 2}, {}],
    "tensors and shards": [{"data": 2, "zero": 3}, {"tensor": 2, "data": 2, "zero": 3}, {"pipeline": 2, "tensor": 2}],
}
if not EXHAUSTIVE:
    del LEGS["tensors and shards"]


@pytest.mark.parametrize("legs", LEGS)
def test_a_run_goes_on_under_one_plan_after_another(legs: str, unbroken: RunDir, tmp_path: Path) -> None:
    """Optimiser, learning rate, position in the data and dropout equal those of the run that never stopped.

    Dropout is off under tensor parallelism, where shards draw their own masks.
    """
    dropout = 0.1 if legs == "stages" else 0.0
    asked, gate = experiment(steps=12, checkpoint_every=3, dropout=dropout), Gate(tmp_path / "gate")
    whole = unbroken if dropout else trained(tmp_path / "whole", asked, plan(asked))
    asked = asked.replace(callbacks=[AtGate(gate.file)])
    run, saved = RunDir(tmp_path / "run"), None
    for number, degrees in enumerate(LEGS[legs]):
        gate.open(3 * number + 3)
        chosen = plan(asked, **degrees)
        run = directory(run.path, asked, chosen, saved)
        ranks = Ranks(run, chosen.world)
        if number < len(LEGS[legs]) - 1:
            saved = run.checkpoint(3 * number + 3)
            eventually(lambda path=saved: path in complete_checkpoints(path.parent))
            ranks.kill(first=0)
        else:
            gate.open()
            ranks.wait()
    real_worker.assert_goes_on(run, whole)


def copied(unbroken: RunDir, path: Path) -> RunDir:
    shutil.copytree(unbroken.checkpoints, path / "checkpoints")
    return directory(
        path, experiment(steps=12, checkpoint_every=3), plan(experiment()), path / "checkpoints/step-00000012"
    )


def damaged(run: RunDir, how: str, step: int) -> None:
    path = run.checkpoint(step)
    data = max(path.glob("*.distcp"), key=lambda file: file.stat().st_size)
    if how == "truncated":
        data.write_bytes(data.read_bytes()[:-100])
    elif how == "flipped":
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
    elif how == "missing":
        (path / ".metadata").unlink()
    else:
        (path / COMPLETE).write_text("{")


@pytest.mark.parametrize("how", ["truncated", "flipped", "missing", "torn"])
def test_any_damage_to_a_checkpoint_is_found(how: str, unbroken: RunDir, tmp_path: Path) -> None:
    run = copied(unbroken, tmp_path)
    damaged(run, how, 12)
    with pytest.raises(CheckpointError):
        export_checkpoint(run.checkpoint(12), tmp_path / "model")


def test_a_damaged_checkpoint_is_passed_over_for_the_last_good_one(unbroken: RunDir, tmp_path: Path) -> None:
    run = copied(unbroken, tmp_path)
    damaged(run, "flipped", 12)
    damaged(run, "truncated", 9)
    Ranks(run, 1).wait()
    events = read_events(run.events)
    problems = [event for event in events if event["type"] == "checkpoint_problem"]
    assert [event["step"] for event in problems] == [12, 9]
    assert "does not hold what was written" in problems[0]["message"]
    assert "bytes instead of" in problems[1]["message"]
    [start] = [event for event in events if event["type"] == "start"]
    assert start["resumed_from"] == str(run.checkpoint(6))
    assert "skipped a checkpoint" in run.log(0).read_text()
    shown = Run(run.path)._repr_html_()
    assert "The checkpoint step-00000012 is damaged" in shown
    assert "Training goes on from step-00000006" in shown
    assert curve(run) == {step: row for step, row in curve(unbroken).items() if step > 6}
    assert [path.name for path in complete_checkpoints(run.checkpoints)][-1] == "step-00000012"
    assert find_damage(run.checkpoint(12), read_manifest(run.checkpoint(12))["files"]) is None


def test_a_run_of_user_defined_dataset_resumes_from_the_code_that_it_kept(
    unbroken: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))  # of the dataset's class
    shutil.copytree(unbroken.path, tmp_path / "run")
    for folder in ("ranks", "logs"):
        shutil.rmtree(tmp_path / "run" / folder)
    with pytest.raises(PlanMismatch, match="signature another"):
        Run(tmp_path / "run").resume(dataclasses.replace(plan(experiment()), signature="another"))
    with pytest.warns(UserWarning, match="so that the rate leaps") as told:
        run = Run(tmp_path / "run").resume(steps=14).wait(PATIENCE_S)
    rates = run.history().learning_rate
    assert f"it is {rates[12]:.3g} at step 13, after {rates[11]:.3g}. To go on" in str(told[0].message)
    assert told[0].filename == __file__
    assert run.status.state == "finished"
    assert list(curve(run.directory)) == list(range(1, 15))


def test_without_any_good_checkpoint_the_run_fails_and_says_why(unbroken: RunDir, tmp_path: Path) -> None:
    run = copied(unbroken, tmp_path)
    for step in (6, 9, 12):
        damaged(run, "truncated", step)
    ranks = Ranks(run, 1)
    ranks.processes[0].join(PATIENCE_S)
    message = read_json(run.error(0))["message"]
    assert "No checkpoint in" in message
    assert "bytes instead of" in message


def test_a_save_that_fails_is_reported_and_training_goes_on(unbroken: RunDir, tmp_path: Path) -> None:
    asked = experiment(steps=12, checkpoint_every=3)
    run = directory(tmp_path, asked, plan(asked))
    run.checkpoint(3).write_text("in the way")
    Ranks(run, 1).wait()
    [problem] = [event for event in read_events(run.events) if event["type"] == "checkpoint_problem"]
    assert problem["step"] == 3
    assert "NotADirectoryError" in problem["message"]
    assert "The checkpoint of step 3 could not be written: " in Run(run.path)._repr_html_()
    assert curve(run) == curve(unbroken)
    assert [event["step"] for event in read_events(run.events) if event["type"] == "checkpoint"] == [6, 9, 12]


def test_a_last_save_that_fails_fails_the_run(tmp_path: Path) -> None:
    asked = experiment(steps=3, warmup_steps=0)
    run = directory(tmp_path, asked, plan(asked))
    run.checkpoint(3).write_text("in the way")
    ranks = Ranks(run, 1)
    ranks.processes[0].join(PATIENCE_S)
    assert ranks.processes[0].exitcode == 1
    assert "The checkpoint of step 3 could not be written" in read_json(run.error(0))["message"]


def test_pruning_spares_what_a_later_attempt_may_need(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for step in (2, 4, 6, 8, 10):
        run.checkpoint(step).mkdir(parents=True)
        if step != 4:
            write_json(run.checkpoint(step) / COMPLETE, {})
    prune(run.checkpoints, keep=2, step=8)
    left = sorted(int(path.name[5:]) for path in run.checkpoints.iterdir())
    assert left == [6, 8, 10], "10 is of an attempt that went further; 4 was never finished"


def test_an_export_loads_in_transformers_with_tied_weights_once(unbroken: RunDir, tmp_path: Path) -> None:
    import transformers
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    files = export_checkpoint(unbroken.checkpoint(12), tmp_path / "model")
    assert [file.name for file in files] == ["config.json", "model.safetensors"]
    with safe_open(files[1], "pt") as stored:
        exported = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    assert "cls.predictions.decoder.weight" not in exported
    dcp_to_torch_save(unbroken.checkpoint(12), tmp_path / "by-torch.pt")
    by_torch = torch.load(tmp_path / "by-torch.pt", weights_only=True)
    model, report = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert type(model) is transformers.BertForMaskedLM
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
    loaded = dict(model.named_parameters())
    assert exported.keys() == loaded.keys()
    for name, tensor in exported.items():
        assert torch.equal(tensor, by_torch[f"model.{name}"]), name
        assert torch.equal(tensor, loaded[name]), name
    with pytest.raises(CheckpointError, match="holds a model already"):
        export_checkpoint(unbroken.checkpoint(12), tmp_path / "model")


def test_a_run_exports_its_last_checkpoint_or_the_one_that_is_asked_for(unbroken: RunDir, tmp_path: Path) -> None:
    run = Run(unbroken.path)
    weights = []
    for number, step in enumerate((None, 12, 9)):
        files = run.export(tmp_path / str(number), step)
        with safe_open(files[1], "pt") as stored:
            weights.append(stored.get_tensor("cls.predictions.bias"))
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 7\. There are 6, 9, 12"):
        run.export(tmp_path / "seven", step=7)


@pytest.mark.parametrize("exists", [False, True])
def test_an_export_to_a_full_disk_leaves_nothing_and_tells_the_way_out(
    unbroken: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool
) -> None:
    to = tmp_path / "exported"
    if exists:
        to.mkdir()
        (to / "README").touch()

    def full(_: Any, to: Path, **__: Any) -> None:
        (to / "model.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.save_torch_state_dict", full)
    with pytest.raises(CheckpointError, match=r"cannot be written to .*exported: No space left on device\. Free some"):
        Run(unbroken.path).export(to)
    assert [path.name for path in to.glob("*")] == ["README"] * exists


def test_a_large_model_is_exported_as_several_files(
    unbroken: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    export_checkpoint(unbroken.checkpoint(12), tmp_path / "one")
    monkeypatch.setattr(model_export, "FILE_BYTES", 60_000)
    files = export_checkpoint(unbroken.checkpoint(12), tmp_path / "several")
    assert sum(file.suffix == ".safetensors" for file in files) > 2
    one, several = (transformers.BertForMaskedLM.from_pretrained(tmp_path / name) for name in ("one", "several"))
    for (name, expected), found in zip(one.named_parameters(), several.parameters(), strict=True):
        assert torch.equal(found, expected), name


@pytest.mark.representative
def test_an_index_that_names_code_is_not_executed(unbroken: RunDir, tmp_path: Path) -> None:
    run = copied(unbroken, tmp_path)
    path = run.checkpoint(12)
    (path / ".metadata").write_bytes(pickle.dumps(Bomb(str(tmp_path / "executed"))))
    manifest = read_manifest(path)
    edited = {**manifest, "files": {}}
    write_json(path / COMPLETE, {**edited, "digest": digest_of(edited)})
    with pytest.raises(CheckpointError, match="does not belong there"):
        export_checkpoint(path, tmp_path / "model")
    assert not (tmp_path / "executed").exists()


class Named:
    """Pickle `getattr(…)`, as Python before 3.11.4 pickles members of enumerations and an attacker anything else."""

    def __init__(self, owner: type, name: str) -> None:
        self.owner, self.name = owner, name

    def __reduce__(self) -> Any:
        return getattr, (self.owner, self.name)


def test_members_of_enumerations_are_read_however_python_writes_them_and_nothing_else_is_reached() -> None:
    def read(owner: type, name: str) -> Any:
        return model_export._IndexUnpickler(io.BytesIO(pickle.dumps(Named(owner, name)))).load()

    assert read(_MEM_FORMAT_ENCODING, "TORCH_CHANNELS_LAST") is _MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST
    for owner, name in ((torch.Size, "__subclasses__"), (_MEM_FORMAT_ENCODING, "__init_subclass__")):
        with pytest.raises(DamagedCheckpoint, match="does not belong there"):
            read(owner, name)


class Bomb:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (open, (self.path, "w"))
