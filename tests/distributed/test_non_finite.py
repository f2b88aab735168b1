"""A loss or gradient that is not finite is traced to its step, its stage and its block, under every kind of plan."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

from tests.distributed.harness import launch
from tests.distributed.real_worker import Ranks, curve, directory, plan
from tests.distributed.test_every_plan import MICRO_BATCH, Case, part_of, plan_of, trainer_of
from tests.exhaustive import exhaustive
from tests.patience import PATIENCE_S
from workbench.base.errors import NonFiniteLoss
from workbench.capture import capture, spec_of
from workbench.execution.checkpoint.files import complete_checkpoints, step_of
from workbench.execution.checkpoint.model_export import export_checkpoint
from workbench.execution.observation import BACKWARD, BATCH, FORWARD, WEIGHT, Origin, locate, with_origin
from workbench.experiment import Experiment
from workbench.optimizers.parameters import local
from workbench.record.rundir import read_json
from workbench.runs.run import Run

WIDTH, BROKEN = 16, 2
PAIRS = (
    Case(pipeline=2),
    Case(data=2, num_microbatches=2),
    Case(data=2, zero=3, num_microbatches=2),
    Case(tensor=2, num_microbatches=2),
    Case(pipeline=2, chunks=2, schedule="interleaved", recompute="full"),
)
QUARTETS = (
    Case(pipeline=2, data=2, zero=2),
    Case(pipeline=2, data=2, zero=3, recompute="full"),
    Case(pipeline=2, tensor=2),
)


class Layer(nn.Module):
    """A residual layer that divides by a field of the batch, or takes the root of its square."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.breaks, self.up, self.down = breaks, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, divisor: torch.Tensor, root: torch.Tensor) -> torch.Tensor:
        x = x + self.down(functional.gelu(self.up(x)))
        return (x * root[:, None]).square().sqrt() / divisor[:, None] if self.breaks else x


class Fragile(nn.Module):
    """The layer `BROKEN` is infinite where `divisor` is 0, and has no gradient where `root` is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, WIDTH)
        self.layers = nn.ModuleList(Layer(index == BROKEN) for index in range(4))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Any, divisor: Any, root: Any, labels: Any) -> torch.Tensor:
        mask = torch.full((WIDTH,), -torch.inf, device=x.device).where(x.sum(-1, keepdim=True) == torch.inf, 0.0)
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x, divisor, root) + mask
        return functional.cross_entropy(self.head(x), labels)


def fields(size: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, labels = torch.randn(size, 8, generator=generator), torch.arange(size) % 5
    return {"x": x, "divisor": torch.ones(size), "root": torch.ones(size), "labels": labels}


def _located(_rank: int, cases: tuple[Case, ...]) -> list[str]:
    """Break one step of each plan in four ways; return what was found wrong."""
    torch.manual_seed(0)
    model, wrong = Fragile(), []
    specs = {key: spec_of(key, value) for key, value in fields(MICRO_BATCH).items()}
    graph = capture(model, specs, name="fragile")
    [broken] = [block.index for block in graph.blocks if f"layers.{BROKEN}" in block.name]
    for case in cases:
        chosen = plan_of(graph, case)
        trainer = trainer_of(copy.deepcopy(model), graph, chosen)
        whole, last = fields(chosen.global_batch), chosen.global_batch - 1
        stage = next(stage.index for stage in chosen.stages if broken < stage.end_block)

        def find(changed: str, value: float, trainer=trainer, whole=whole, last=last) -> tuple[Origin | None, str]:
            batch = {**whole, changed: whole[changed].clone()}
            batch[changed][last] = value
            part = part_of(trainer, batch)
            result = trainer.step(1, part)
            assert not result.scalars[:2].isfinite().all()
            trainer.step(2, part_of(trainer, whole))  # is launched before the scalars of step 1 are read
            return locate(trainer, 1, part, trainer.count_labels_on_host(part))

        trainer.step(0, part_of(trainer, whole))
        weights = {name: weight.detach().clone() for name, weight in trainer.stages.model_parameters().items()}
        micro_batch = last // MICRO_BATCH
        name, count = graph.blocks[broken].name, len(graph.blocks)
        for changed, value, place in (("divisor", 0.0, FORWARD), ("root", 0.0, BACKWARD)):
            origin, sentence = find(changed, value)
            if origin != Origin(place, broken, name, stage, count, micro_batch):
                wrong.append(f"{case}: {changed} gives {origin}: {sentence}")
            now = trainer.stages.model_parameters()
            if any((local(now[name]) != local(weight)).any() for name, weight in weights.items()):
                wrong.append(f"{case}: the weights moved after a step that was not finite")
        origin, _ = find("x", torch.nan)
        if origin is None or (origin.source, origin.block, origin.micro_batch) != (BATCH, 0, micro_batch):
            wrong.append(f"{case}: a batch with NaN gives {origin}")
        origin, sentence = locate(trainer, 1, (part := part_of(trainer, whole)), trainer.count_labels_on_host(part))
        if origin is not None or "second pass over the step is finite" not in sentence:
            wrong.append(f"{case}: a good step gives {origin}")
        with torch.no_grad():
            for key, weight in trainer.stages.model_parameters().items():
                if key == f"layers.{BROKEN}.down.weight":
                    weight.mul_(torch.nan)
        origin, _ = locate(trainer, 1, part, trainer.count_labels_on_host(part))
        if origin is None or (origin.source, origin.block) != (WEIGHT, broken):
            wrong.append(f"{case}: a weight of NaN gives {origin}")
    return wrong


def _without_labels(_rank: int) -> str:
    specs = {key: spec_of(key, value) for key, value in fields(MICRO_BATCH).items()}
    graph = capture(model := Fragile(), specs, name="fragile")
    chosen = plan_of(graph, Case(data=2, num_microbatches=2))
    trainer = trainer_of(model, graph, chosen)
    part = dict(part_of(trainer, fields(chosen.global_batch)))
    part["labels"] = torch.full_like(part["labels"], -100)
    loss, norm, *_ = trainer.step(0, part).scalars.tolist()
    error = NonFiniteLoss("diverged", step=1, loss=loss, grad_norm=norm)
    return str(with_origin(error, trainer, lambda _: iter([(part, trainer.count_labels_on_host(part))])))


def test_a_batch_in_which_no_label_counts_is_called_that_and_no_divergence() -> None:
    said = launch(_without_labels, 2)
    assert said.startswith("Step 1 has loss nan, because none of its batch's labels counts")


def test_the_block_is_found_under_every_kind_of_plan_and_the_weights_stay() -> None:
    assert launch(_located, 2, PAIRS) == []


@exhaustive
def test_the_block_is_found_where_plans_are_combined() -> None:
    assert launch(_located, 4, QUARTETS) == []


class Fields:
    """Items of the fragile model; item `broken` divides by 0."""

    def __init__(self, broken: int) -> None:
        self._fields, self._broken = fields(64), broken

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        item = {name: values[index] for name, values in self._fields.items()}
        return {**item, "divisor": torch.tensor(float(index != self._broken))}


def test_a_run_that_diverges_names_step_stage_and_block_and_keeps_the_checkpoint_before(tmp_path: Path) -> None:
    asked = Experiment.of(
        model=Fragile, data=Fields(-1), steps=8, global_batch=8, seq_len=8, checkpoint_every=1, name="fragile"
    )
    order = asked.data.reads(asked).dataset()
    [broken] = [int(i) for i in range(64) if (order[37]["x"] == Fields(-1)[i]["x"]).all()]  # of step 5
    chosen = plan(asked, pipeline=2)
    run = directory(tmp_path / "run", asked, chosen)
    (run.code / "model.pkl").write_bytes(cloudpickle.dumps(Fragile))
    (run.code / "data.pkl").write_bytes(cloudpickle.dumps(Fields(broken)))
    ranks = Ranks(run, 2)
    for process in ranks.processes:
        process.join(PATIENCE_S)
    assert [process.exitcode for process in ranks.processes] == [1, 1], run.log(0).read_text()
    failed = Run(run.path)
    [name] = [name for name in chosen.block_names if f"layers.{BROKEN}" in name]
    block = chosen.block_names.index(name)
    stage = next(stage.index for stage in chosen.stages if block < stage.end_block)
    error = read_json(run.error(stage))
    assert error["type"] == "NonFiniteLoss"
    wanted = {"step": 5, "source": "forward", "block": block, "block_name": name, "stage": stage, "micro_batch": 2}
    assert wanted.items() <= error["facts"].items()
    assert "Step 5 has loss " in error["message"]
    assert f"It arose in the forward of block {name}" in error["message"]
    assert max(curve(run)) == 5
    reason = failed.error()
    assert reason is not None
    assert (reason.facts["stage"], reason.facts["type"]) == (stage, "NonFiniteLoss")
    assert f"block {name}" in str(reason)
    last = complete_checkpoints(run.checkpoints)[-1]
    assert step_of(last) == 4
    [weights] = [file for file in export_checkpoint(last, tmp_path / "model") if file.suffix == ".safetensors"]
    assert all(bool(tensor.isfinite().all()) for tensor in load_file(weights).values())
