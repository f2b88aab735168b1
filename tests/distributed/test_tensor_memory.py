"""A rank of a tensor-parallel axis holds its shard of each weight and no memory of the rest."""

from __future__ import annotations

import pytest

from tests.distributed.harness import launch
from tests.distributed.test_every_plan import Case, captured, plan_of, trainer_of


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_a_shard_of_a_weight_keeps_no_memory_of_the_rest(name: str) -> None:
    for key, held, needed in launch(_memory, 2, name):
        assert held == needed, f"{key}: {held} bytes are allocated for {needed}"


def _memory(_rank: int, name: str) -> list[tuple[str, int, int]]:
    model, graph = captured(name)
    stage = trainer_of(model, graph, plan_of(graph, Case(tensor=2))).stages
    divided = [(key, p) for key, p in stage.model_parameters().items() if key in stage.shardings]
    assert divided
    return [(key, parameter.untyped_storage().nbytes(), parameter.nbytes) for key, parameter in divided]
