"""Functions that are called after each step see the training, and change nothing in it but what they ask for."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import workbench as wb
from tests.distributed import real_worker
from tests.distributed.harness import Division, launch, trainer_of
from tests.distributed.test_optimizer_values import MICRO, experiment, graph, model
from workbench.base.errors import InvalidExperiment, UnknownParameter
from workbench.execution.step_log import StepView, Weights
from workbench.experiment import Experiment, user_parts
from workbench.runs.run import Run

STEPS, STOPPED = 8, 4


def watch(state: StepView) -> None:
    """Keep the weights, ask for a checkpoint and log at even steps, and stop before the end."""
    if state.step % 2:
        return
    weights = dict(state.parameters)
    wb.log_scalar("weight_norm", sum(weight.square().sum() for weight in weights.values()).sqrt())
    wb.log_scalar("loss_seen", state.metrics["loss"])
    if state.step == 2:
        if state.is_main:
            torch.save(weights, state.folder / "weights.pt")
        with pytest.raises(UnknownParameter, match="has no parameter 'head'"):
            state.parameters["head"]
        state.checkpoint()
    for weight in weights.values():
        weight.zero_()
    torch.manual_seed(0)
    if state.step == STOPPED:
        state.stop()


class Two:
    def __call__(self, one: Any, two: Any) -> None:
        raise AssertionError((one, two))


class Holding:
    """A callback that cannot be pickled."""

    def __init__(self, lock: Any) -> None:
        self.lock = lock

    def __call__(self, state: StepView) -> None:
        self.lock.acquire(timeout=state.step)


def asked(**changes: Any) -> Experiment:
    return real_worker.experiment(steps=STEPS, warmup_steps=1, lr_schedule="constant", log_every=3, **changes)


def test_a_callback_sees_weights_and_figures_logs_asks_for_a_checkpoint_and_stops(tmp_path: Path) -> None:
    stages = real_worker.plan(asked(), pipeline=2)
    watched = Run(real_worker.trained(tmp_path / "watched", asked(callbacks=[watch]), stages).path)
    left_alone = Run(real_worker.trained(tmp_path / "alone", asked().replace(log_every=1, steps=STOPPED), stages).path)
    history, plain = watched.history(), left_alone.history()
    assert watched.status.state == "stopped"
    assert history.step.tolist() == [2, 3, 4], "rows of steps in which something is logged, beside every third"
    assert history.loss.tolist() == plain.loss[1:].tolist()
    np.testing.assert_allclose(history["loss_seen"], [plain.loss[1], np.nan, plain.loss[3]], rtol=1e-6)
    assert sorted(path.name for path in watched.directory.checkpoints.iterdir()) == ["step-00000002", "step-00000004"]
    watched.export(tmp_path / "exported", step=2)
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    seen = torch.load(watched.path / "weights.pt")
    assert all(torch.equal(seen[name], exported[name]) for name in seen)
    norm = torch.stack([weight.square().sum() for weight in seen.values()]).sum().sqrt()
    assert history["weight_norm"][0] == pytest.approx(float(norm), rel=1e-6)


def stop_early(state: StepView) -> None:
    if state.step == STOPPED:
        state.stop()


def test_a_training_that_is_asked_to_stop_evaluates_its_last_weights_once(
    tmp_path: Path,
) -> None:
    """As often as one whose last step that is; one that evaluates at this step anyway does so once, too."""
    losses = []
    for name, changes in (
        ("stopped", {"callbacks": [stop_early]}),
        ("due", {"callbacks": [stop_early], "eval_every": STOPPED}),
        ("ended", {"steps": STOPPED}),
    ):
        given = asked(evaluation=wb.Evaluation(every=100, samples=8, data=real_worker.Words())).replace(**changes)
        run = real_worker.trained(tmp_path / name, given, real_worker.plan(given, data=2))
        events = [json.loads(line) for line in run.events.read_text().splitlines()]
        [evaluation] = [event for event in events if event["type"] == "evaluation" and event["step"] > 0]
        assert evaluation["step"] == STOPPED
        losses.append(evaluation["loss"])
    assert losses == [losses[0]] * 3


def weights_seen(_rank: int) -> list[dict[str, torch.Tensor]]:
    divisions = (Division(pipeline=2), Division(data=2, zero=3), Division(tensor=2))
    return [dict(Weights(trainer_of(experiment(), model(), graph(), division, MICRO))) for division in divisions]


def test_weights_are_whole_on_every_rank_under_every_division() -> None:
    for seen in launch(weights_seen, 2, ahead=graph):
        assert seen.keys() == dict(model().named_parameters()).keys()
        assert all(torch.equal(seen[name], parameter) for name, parameter in model().named_parameters())


def test_callbacks_travel_as_user_code_and_what_is_none_is_refused() -> None:
    given = asked(callbacks=[watch])
    described = Experiment.from_json(given.to_json())
    assert user_parts(described)["callbacks"] is None, "a description has no code"
    assert Experiment.from_json(given.to_json(), user_parts(given)).callbacks == given.callbacks
    for wrong in (watch, [1], [Two()], "watch"):
        with pytest.raises(InvalidExperiment, match="is no list of functions of one argument"):
            asked(callbacks=wrong)
    lock = threading.Lock()
    with pytest.raises(InvalidExperiment, match="The callbacks cannot be sent to the workers"):
        wb.runs.prepare(asked(callbacks=[Holding(lock)]), real_worker.plan(asked()))
