"""Under every plan, the loss and gradients of the unmodified model equal those of plain PyTorch on the whole batch."""

from __future__ import annotations

import pytest
import torch

from tests.distributed import zoo
from tests.distributed.harness import coordinate, forced_plan, launch
from workbench.capture import capture, spec_of
from workbench.execution.blocks.context import StepContext
from workbench.execution.build import build_stage
from workbench.execution.parallel.sharding import full
from workbench.execution.trainer import Trainer
from workbench.experiment import Experiment

TOLERANCE = 1e-5


def reference(name: str, batch: dict[str, torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    """Run one forward and backward of plain PyTorch over the whole batch."""
    torch.manual_seed(0)
    model = zoo.MODELS[name]().train()
    output = model(**batch)
    loss = output[0] if isinstance(output, tuple) else output.loss
    loss.backward()
    return loss.item(), {key: p.grad for key, p in model.named_parameters() if p.grad is not None}


def compare(
    _rank: int, name: str, degrees: dict[str, int], zero: int, recompute: str, schedule: str
) -> dict[str, float]:
    pipeline, data = degrees["pipeline"], degrees["data"]
    micro_batch, num_microbatches = 2, 4
    batch = zoo.batch(name, micro_batch * num_microbatches * data)
    torch.manual_seed(0)
    model = zoo.MODELS[name]().train()
    specs = {key: spec_of(key, value[:micro_batch]) for key, value in batch.items()}
    graph = capture(model, specs, name=name)
    plan = forced_plan(
        graph,
        pipeline=pipeline,
        data=data,
        zero=zero,
        micro_batch=micro_batch,
        num_microbatches=num_microbatches,
        recompute=recompute,
        schedule=schedule,
    )
    here = coordinate(pipeline, data)
    context = StepContext(seed=0, device=torch.device("cpu"))
    stage = build_stage(plan, here, model, graph, context)
    experiment = Experiment(model=zoo.MODELS[name], data=lambda: None, steps=1, global_batch=plan.global_batch)
    trainer = Trainer(experiment, plan, graph, stage, context, here)
    size = micro_batch * num_microbatches
    mine = {key: value[here.data_rank * size : (here.data_rank + 1) * size] for key, value in batch.items()}
    part = trainer.gradients(0, mine)
    torch.distributed.all_reduce(part)

    expected_loss, expected = reference(name, batch)
    scale = max(gradient.abs().max().item() for gradient in expected.values())
    worst = 0.0
    for key, parameter in stage.model_parameters().items():
        assert parameter.grad is not None, f"{key} received no gradient"
        got = full(parameter.grad)
        worst = max(worst, ((got - expected[key]).norm() / max(expected[key].norm().item(), 1e-4 * scale)).item())
    spread = torch.tensor([worst])
    torch.distributed.all_reduce(spread, op=torch.distributed.ReduceOp.MAX)
    return {"loss": abs(part.item() - expected_loss) / abs(expected_loss), "gradient": spread.item()}


def assert_equal_to_plain_pytorch(
    name: str, pipeline: int, data: int = 1, zero: int = 0, recompute: str = "none", schedule: str = "1f1b"
) -> None:
    found = launch(compare, pipeline * data, name, {"pipeline": pipeline, "data": data}, zero, recompute, schedule)
    assert found["loss"] <= TOLERANCE, found
    assert found["gradient"] <= TOLERANCE, found


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_bert_pipeline_equals_plain_pytorch(stages: int) -> None:
    assert_equal_to_plain_pytorch("bert", pipeline=stages)


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_bert_pipeline_times_data_equals_plain_pytorch(zero: int) -> None:
    assert_equal_to_plain_pytorch("bert", pipeline=2, data=2, zero=zero)


@pytest.mark.parametrize("zero", [0, 3])
def test_bert_data_parallel_alone_equals_plain_pytorch(zero: int) -> None:
    assert_equal_to_plain_pytorch("bert", pipeline=1, data=2, zero=zero)


def test_recomputing_activations_changes_no_gradient() -> None:
    assert_equal_to_plain_pytorch("bert", pipeline=2, recompute="full")


def test_recomputing_under_fsdp_changes_no_gradient() -> None:
    assert_equal_to_plain_pytorch("bert", pipeline=1, data=2, zero=3, recompute="full")


def test_the_gpipe_schedule_equals_plain_pytorch() -> None:
    assert_equal_to_plain_pytorch("bert", pipeline=2, schedule="gpipe")


@pytest.mark.parametrize("name", ["gpt2", "albert", "t5", "skips"])
def test_other_architectures_equal_plain_pytorch(name: str) -> None:
    assert_equal_to_plain_pytorch(name, pipeline=2)
