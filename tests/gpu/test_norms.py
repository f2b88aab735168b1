"""On a GPU, norms are those of PyTorch's own sums, with our kernels of AdamW and Muon and with CUDA graphs."""

from __future__ import annotations

import math

import pytest

from tests.distributed.harness import launch
from tests.distributed.test_every_plan import Case
from tests.gpu.machine import DEVICE, together
from tests.gpu.test_cuda_graphs import EXPERIMENT, MUON, STEPS, batch_for, trainer_of
from workbench.execution.tensor_norms import TensorNorms
from workbench.execution.trainer import layers_of

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="there are no CUDA graphs on a CPU")


@together("norms")
@pytest.mark.parametrize("graphs", [False, True], ids=["launched", "replayed"])
@pytest.mark.parametrize("algorithm", ["adamw", "muon"])
def test_norms_are_those_of_copies_of_the_weights(algorithm: str, graphs: bool) -> None:
    found, right = launch(_measured, 1, algorithm, graphs, device=DEVICE)
    for what, norms in right.items():
        assert found[what] == pytest.approx(norms, rel=1e-5, nan_ok=True), what


def _measured(_rank: int, algorithm: str, graphs: bool) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    trainer = trainer_of(Case(), graphs, experiment=MUON if algorithm == "muon" else EXPERIMENT)
    parameters, layers = trainer.stages.model_parameters(), layers_of(trainer.graph)
    device = trainer.context.device
    norms = trainer.tensor_norms = TensorNorms(STEPS, STEPS, parameters, set(parameters), layers, device)
    for step in range(STEPS - 1):
        trainer.step(step, batch_for(trainer, step))
    scalars = trainer.measure(STEPS - 1, batch_for(trainer, STEPS - 1))
    before = {name: parameters[name].detach().double() for name in layers}
    gradients = [parameters[name].grad for name in layers]
    right = {
        "weights": [float(weight.norm()) for weight in before.values()],
        "gradients": [math.nan if each is None else float(each.double().norm()) for each in gradients],
    }
    trainer.update(STEPS - 1, scalars)
    moved = {name: float((parameters[name].detach().double() - weight).norm()) for name, weight in before.items()}
    right["updates"] = [
        math.nan if gradient is None else moved[name] for name, gradient in zip(layers, gradients, strict=True)
    ]
    return dict(norms.measured().norms), right
