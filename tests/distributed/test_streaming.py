"""Text that is tokenised while it trains gives the run of the stored text, under every plan and after kills.

Datasets that can only be iterated go on after kills, too.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import workbench as wb
from tests.distributed import real_worker
from tests.distributed.harness import AtGate, launch
from tests.distributed.real_worker import Ranks, curve, directory, plan, trained
from tests.distributed.word_stream import SEQ, WordStream
from tests.exhaustive import EXHAUSTIVE
from tests.patience import Gate, eventually
from workbench.execution.checkpoint.files import complete_checkpoints, read_manifest
from workbench.execution.feeding import TrainingSamples
from workbench.experiment import Experiment
from workbench.record.event_log import read_events
from workbench.record.rundir import RunDir
from workbench.runs.run import Run

BUFFER, BATCH, STEPS = 24, 8, 30
PLANS: dict[str, dict[str, int]] = {
    "two stages": {"pipeline": 2},
    "ZeRO 1": {"data": 2, "zero": 1},
    "ZeRO 2": {"data": 2, "zero": 2},
    "ZeRO 3": {"data": 2, "zero": 3},
    "two stages of two shards": {"pipeline": 2, "data": 2, "zero": 1},
}
DEFAULT = tuple(PLANS) if EXHAUSTIVE else ("two stages of two shards",)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "numbers.txt"
    lines = [f"Document {i}: the square of {i} is {i * i}.\nIts cube is {i**3}." for i in range(160)]
    path.write_text("\n\n".join(["\n".join(lines[:40]), *lines[40:]]))  # the first document is long, and is cut
    return path


def asked(text: Path, streaming: bool, **changes: Any) -> Experiment:
    """An OPT of two layers that reads the text in the order of a stream, for more than one epoch."""
    sizes = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 400, "max_positions": SEQ}
    data = wb.data.corpus(text, vocab_size=400, streaming=streaming, shuffle_buffer=BUFFER)
    fields: dict[str, Any] = {
        "steps": STEPS,
        "global_batch": BATCH,
        "seq_len": SEQ,
        "learning_rate": 3e-3,
        "project": "",
    }
    fields["evaluation"] = wb.Evaluation(every=7, samples=8)
    return wb.Experiment.of(model=wb.models.opt(**sizes), data=data, **{**fields, **changes})


@pytest.fixture(scope="module")
def stored(text: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    experiment = asked(text, streaming=False)
    return trained(tmp_path_factory.mktemp("stored"), experiment, plan(experiment))


@pytest.fixture(scope="module")
def killed(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kill a streamed run on one device with SIGKILL, and return the checkpoint that it had written."""
    experiment = asked(text, streaming=True, checkpoint_every=5)
    return killed_after_checkpoint(tmp_path_factory.mktemp("killed") / "run", experiment, {})


def killed_after_checkpoint(path: Path, experiment: Experiment, degrees: dict[str, int]) -> Path:
    """Start a run under a plan, kill it after its first checkpoint, that of step 5, and return the checkpoint."""
    gate, chosen = Gate(path.with_suffix(".gate"), open_to=6), plan(experiment, **degrees)
    run = directory(path, experiment.replace(callbacks=[AtGate(gate.file)]), chosen)
    ranks = Ranks(run, chosen.world)
    [checkpoint] = eventually(lambda: complete_checkpoints(run.checkpoints))
    ranks.kill(first=0)
    (run.code / "callbacks.pkl").unlink()  # the run goes on without a gate
    return checkpoint


def continued(killed: Path, path: Path, experiment: Experiment, degrees: dict[str, int]) -> RunDir:
    """Go on from the checkpoint under a plan, in a directory with the events of the killed run."""
    shutil.copytree(killed.parent.parent, path)
    chosen = plan(experiment, **degrees)
    run = directory(path, experiment, chosen, path / "checkpoints" / killed.name)
    Ranks(run, chosen.world).wait()
    return run


def test_a_streamed_run_killed_with_9_has_the_curve_of_the_stored_text_to_the_last_bit(
    text: Path, stored: RunDir, killed: Path, tmp_path: Path
) -> None:
    manifest = read_manifest(killed)
    assert manifest["stream_state"]["first"] <= BATCH * manifest["step"] < manifest["stream_state"]["first"] + BUFFER
    run = continued(killed, tmp_path / "run", asked(text, streaming=True, checkpoint_every=5), {})
    assert curve(run) == curve(stored)
    evaluations = [
        {event["step"]: event["loss"] for event in read_events(of.events) if event["type"] == "evaluation"}
        for of in (run, stored)
    ]
    assert evaluations[0] == evaluations[1]
    assert "parts of 1 of 121 documents" in Run(run.path)._repr_html_()


@pytest.mark.parametrize("division", DEFAULT)
def test_a_streamed_run_goes_on_under_every_plan_as_that_of_the_stored_text(
    division: str, text: Path, stored: RunDir, killed: Path, tmp_path: Path
) -> None:
    run = continued(killed, tmp_path / "run", asked(text, streaming=True), PLANS[division])
    real_worker.assert_goes_on(run, stored)


def read_by(rank: int, experiment: Experiment, state: Any, first: int, end: int, skipped: int = 0) -> Any:
    """Return what every rank reads of some steps as the worker does it, and the state of the stream after them.

    `skipped` samples were left out before, after spikes.
    """
    world = torch.distributed.get_world_size()
    coordinate: Any = SimpleNamespace(data=world, data_rank=rank)
    samples = TrainingSamples(experiment, coordinate, torch.device("cpu"))
    samples.go_on(state, skipped)
    graph = SimpleNamespace(batch={})
    trainer: Any = SimpleNamespace(graph=graph, count_labels_on_host=lambda _: None)
    windows = []
    for step, (batch, _) in enumerate(samples.batches(trainer, first), first):
        windows.append(batch["input_ids"].tolist())
        if step == end - 1:
            break
    everyone: list[Any] = [None] * world
    torch.distributed.all_gather_object(everyone, windows)
    by_step = zip(*everyone, strict=True)
    return [window for shares in by_step for share in shares for window in share], samples.stream_state(end)


@pytest.mark.representative
def test_no_sample_is_lost_or_seen_twice_when_two_replicas_go_on_after_one(text: Path) -> None:
    experiment = asked(text, streaming=True, steps=10**6, evaluation=None)
    stored = asked(text, streaming=False, steps=10**6, evaluation=None)
    windows = stored.data.reads(stored).samples_per_epoch()
    middle, end = windows // 2 // BATCH, windows // BATCH
    one, state = launch(read_by, 1, experiment, None, 0, middle)
    assert state["first"] > 0, "the checkpoint is after the first chunk"
    two, _ = launch(read_by, 2, experiment, state, middle, end + 1)
    three, after = launch(read_by, 1, experiment, state, middle, middle + 2, 3 * BATCH)
    dataset = stored.data.reads(stored).dataset()
    read_last = range((middle + 3) * BATCH, (middle + 5) * BATCH)
    assert three == [row.tolist() for row in dataset.__getitems__(read_last)["input_ids"]]
    assert after["first"] <= read_last.stop < after["first"] + BUFFER, "a resumption begins with the samples after them"
    expected = [row.tolist() for row in dataset.__getitems__(range(windows))["input_ids"]]
    seen = one + two
    of_epoch = sorted(seen[: end * BATCH])
    assert of_epoch == sorted(expected[: end * BATCH])
    rest = sorted(seen[end * BATCH :])
    assert rest == sorted(
        row.tolist() for row in dataset.__getitems__(range(end * BATCH, (end + 1) * BATCH))["input_ids"]
    )


@pytest.mark.representative
def test_a_mixture_of_streams_is_that_of_stored_texts_when_two_replicas_go_on_after_one(
    text: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.txt"
    other.write_text("\n".join(f"Line {i} has {i % 7} apples." for i in range(300)))

    def mixed(streaming: bool) -> Experiment:
        one, two = (
            wb.data.corpus(path, vocab_size=400, streaming=streaming, shuffle_buffer=buffer)
            for path, buffer in ((text, BUFFER), (other, 10))
        )
        return asked(text, streaming, steps=40).replace(data=wb.data.mixture([(one, 0.7), (two, 0.3)]))

    streamed, wanted = mixed(streaming=True), mixed(streaming=False).reading.dataset()
    one, state = launch(read_by, 1, streamed, None, 0, 15)
    assert min(source["first"] for source in state["sources"]) > 0, "neither source is read from its beginning"
    two, _ = launch(read_by, 2, streamed, state, 15, 40)
    assert one + two == [row.tolist() for row in wanted.__getitems__(range(40 * BATCH))["input_ids"]]


def test_an_iterable_dataset_killed_with_9_goes_on_to_the_last_bit(tmp_path: Path) -> None:
    experiment = real_worker.experiment(data=WordStream(), steps=16, checkpoint_every=5)
    chosen = plan(experiment)
    whole = trained(tmp_path / "whole", experiment, chosen)
    checkpoint = killed_after_checkpoint(tmp_path / "killed", experiment, {})
    manifest = read_manifest(checkpoint)
    state = manifest["stream_state"]
    assert 0 < state["first"] <= BATCH * manifest["step"] < state["first"] + 32
    assert state["dataset_state"] == ({"read": state["item"]} if state["item"] else None)
    run = trained(tmp_path / "killed", experiment, chosen, checkpoint)
    assert curve(run) == curve(whole)
    assert len(curve(run)) == 16


def test_no_item_is_lost_or_seen_twice_when_two_replicas_go_on_after_one() -> None:
    experiment = real_worker.experiment(data=WordStream(), steps=10**6)
    one, state = launch(read_by, 1, experiment, None, 0, 5)
    two, _ = launch(read_by, 2, experiment, state, 5, 25)
    seen = [window[0] for window in one + two]
    assert state["item"] == 32
    for step in range(25):
        numbers = range(step * BATCH, (step + 1) * BATCH)
        assert sorted(seen[step * BATCH : (step + 1) * BATCH]) == sorted(1 + number % 50 for number in numbers)
