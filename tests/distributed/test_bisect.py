"""`wb.bisect` names the block where a fault begins, and calls right plans rounding, on real ranks and in numbers."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import workbench as wb
from tests.distributed.faulty_tracer import FAULTS, doubled_shard, flipped_shard, lone_replica
from tests.distributed.own_machine import own_machine
from tests.distributed.real_worker import experiment, plan
from workbench import cli
from workbench.analysis import bisection
from workbench.analysis.bisection import extent
from workbench.analysis.deviation import (
    GRADIENT,
    OUTPUT,
    SAME,
    UPDATE,
    Deviation,
    Distance,
    Key,
    Row,
    compared,
    distances,
    first_fault,
    from_json,
    judged,
    to_json,
)
from workbench.analysis.plain_loop import Rounding
from workbench.base.errors import InvalidArgument, PlanInfeasible, PlanMismatch
from workbench.planning.plan import Plan

ASKED = experiment(learning_rate=1e-3, warmup_steps=1)
Faults = tuple[list[Deviation | None], list[Deviation | None]]
NAMES = ("embeddings", "layer.0", "layer.1", "head")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    yield from own_machine(tmp_path, monkeypatch)


def in_bf16(chosen: Plan) -> Plan:
    return dataclasses.replace(chosen, precision="bf16")


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    """Return where the fault of each planted and of each right plan begins, after two steps.

    One referee knows the right numbers of all.
    """
    pipelined, replicated, sharded = plan(ASKED, pipeline=2), plan(ASKED, data=2), plan(ASKED, data=2, zero=3)
    interleaved = plan(ASKED, pipeline=2, schedule="interleaved", chunks=2, recompute="full")
    divided = {lone_replica: replicated, flipped_shard: sharded, doubled_shard: plan(ASKED, data=2, zero=1)}
    planted = [*(divided.get(each, pipelined) for each in FAULTS), in_bf16(pipelined)]
    right = [pipelined, plan(ASKED, tensor=2), sharded, in_bf16(interleaved), in_bf16(sharded)]
    workers = ["faulty_tracer"] * len(planted) + [bisection.EXAMINER] * len(right)
    with pytest.MonkeyPatch.context() as patch:
        for _ in own_machine(tmp_path_factory.mktemp("machine"), patch):
            results, reference, _ = bisection.compared(ASKED, [*planted, *right], 2, workers=workers)
    assert reference == "float64"
    found = [result["fault"] and from_json(result["fault"]) for result in results]
    return found[: len(planted)], found[len(planted) :]


def test_a_planted_fault_is_named_to_step_block_and_tensor(faults: Faults) -> None:
    found, _ = faults
    places = [fault and (fault.step, fault.part, fault.block_name, fault.rank) for fault in found]
    head, layer = "cls.predictions", "bert.encoder.layer.1"
    assert places == [
        (1, "gradient", head, 1),  # of the scaled stage, the block whose gradients come first
        (2, "output", layer, 1),
        (1, "output", layer, 1),
        (1, "output", layer, 1),
        (1, "update", layer, 1),
        (1, "gradient", head, 1),
        (1, "weights", layer, 1),
        (1, "gradient", layer, 1),
        (1, "gradient", head, 1),  # the same scale in bf16, below the noise of single elements
    ]
    assert [fault and fault.ranks for fault in found] == [(1,)] * len(found)
    scaled, _, _, _, faster, *_, doubled, scaled_in_bf16 = found
    for fault in (scaled, faster, scaled_in_bf16):
        assert fault is not None
        assert fault.factor == pytest.approx(1.01, abs=2e-3)
    assert doubled is not None
    assert "differs from the reference on rank 1 by" in extent(doubled, "plan A", "one device")
    assert scaled_in_bf16 is not None
    assert scaled_in_bf16.size < 6 * scaled_in_bf16.noise


def test_right_plans_of_both_precisions_are_called_rounding(faults: Faults) -> None:
    """Each of five plans is as near to one device as roundings explain, and so is every pair of them."""
    assert faults[1] == [None] * 5


@pytest.mark.usefixtures("machine")
def test_the_command_tells_plans_apart_that_draw_other_dropout_and_leaves_no_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plans = [plan(ASKED, pipeline=2).save(tmp_path / "a"), plan(ASKED, data=2, micro_batch=4).save(tmp_path / "b")]
    monkeypatch.setattr(cli, "experiment_from", lambda *_: ASKED)
    done = CliRunner().invoke(cli.app, ["bisect", "bert", *map(str, plans), "--steps", "1"], env={"COLUMNS": "300"})
    assert done.exit_code == 0, done.output
    assert "differ by the size of their micro-batches" in done.output
    assert "Apart from that they differ by rounding." in done.output
    assert not list((tmp_path / "runs").glob(".bisection-*"))


@pytest.mark.usefixtures("machine")
def test_what_cannot_be_compared_is_refused_before_a_process_starts(tmp_path: Path) -> None:
    right, other = plan(ASKED), plan(ASKED.replace(global_batch=16))
    with pytest.raises(InvalidArgument, match="steps=0 lies outside 1 to 40"):
        wb.bisect(ASKED, right, right, steps=0)
    with pytest.raises(PlanMismatch, match="global_batch=16"):
        wb.bisect(ASKED, right, other)
    large = dataclasses.replace(right, stages=(dataclasses.replace(right.stages[0], parameters=10**9),))
    with pytest.raises(PlanInfeasible, match="fewer layers"):
        wb.bisect(ASKED, right, large)
    assert not (tmp_path / "runs").exists()


def rows_of(
    scales: dict[int, float], size: float = 1e-2, part: int = GRADIENT, elements: int = 4096, blocks: int = 4
) -> list[Row]:
    """Return a tensor of each block whose errors are independent: of repetitions, and of a plan with these scales."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for block in range(blocks):
        right = torch.randn(elements, generator=generator)

        def repeated(scale: float = 0.0, right: torch.Tensor = right) -> Distance:
            error = size * torch.randn(elements, generator=generator)
            return Distance.of(right * (1 + scale) + error, right, right)

        noise = tuple(repeated() for _ in range(3))
        rows.append(Row((0, part, block, "weight", -1), 0, elements, repeated(scales.get(block, 0.0)), noise, ()))
    return rows


def test_a_scale_below_the_noise_of_elements_is_found_by_its_projection() -> None:
    assert first_fault(judged(rows_of({}), "A", NAMES)) is None
    fault = first_fault(judged(rows_of({1: 1e-2, 0: 1e-2}), "A", NAMES))
    assert fault is not None
    assert (fault.block_name, fault.measure) == ("layer.0", "scale"), "the backward comes to the later block first"
    assert fault.factor == pytest.approx(1.01, abs=1e-3)
    assert fault.size < 2 * fault.noise


def test_a_small_tensor_before_the_fault_is_part_of_it() -> None:
    rows = [*rows_of({1: 1e-2})[:2], *rows_of({2: 7e-4})[2:]]
    found = judged(rows, "A", NAMES)
    assert [each.block for each in found if each.excess > 1] == [1]
    fault = first_fault(found)
    assert fault is not None
    assert fault.block == 2


def test_a_wrong_update_is_named_where_it_is_though_a_right_one_before_it_lies_near_its_bound() -> None:
    rows = [*rows_of({0: 7e-4}, part=UPDATE)[:1], *rows_of({1: 1e-1}, part=UPDATE)[1:]]
    found = judged(rows, "A", NAMES)
    assert 0.5 < max(each.excess for each in found if each.block == 0) < 1
    fault = first_fault(found)
    assert fault is not None
    assert fault.block == 1


def test_a_block_of_another_rank_is_no_part_of_a_fault() -> None:
    rows = [*rows_of({1: 1e-2})[:2], *(dataclasses.replace(row, rank=1) for row in rows_of({2: 7e-4})[2:])]
    fault = first_fault(judged(rows, "A", NAMES))
    assert fault is not None
    assert (fault.block, fault.rank) == (1, 0)


def test_masks_of_minus_infinity_are_equal_and_other_infinities_are_faults() -> None:
    mask = torch.tensor([0.0, -math.inf, 1.0])
    assert Distance.of(mask, mask, mask) == SAME
    assert Distance.of(torch.tensor([0.0, math.nan, 1.0]), mask, mask).size == math.inf


def test_the_rounding_of_a_weight_that_an_update_hardly_moves_is_no_fault() -> None:
    """The gain of a LayerNorm begins at 1, and the smallest change of its update may choose the next number."""
    key: Key = (0, UPDATE, 0, "model.gain", -1)
    before = {"model.gain": torch.ones(4)}
    right = torch.ones(4) - 1e-3
    rounded, wrong = right.clone(), right.clone()
    rounded[2] = torch.nextafter(right[2], torch.tensor(2.0))
    wrong[2] += 1e-5
    for value, is_fault in ((rounded, False), (wrong, True)):
        [found] = judged(
            [Row(key, 0, 4, distances({key: right}, {key: value}, before)[key], (SAME, SAME), (SAME,))], "A", NAMES
        )
        assert (found.excess > 1) == is_fault


def test_gains_that_fsdp2_rounds_alike_are_no_fault() -> None:
    """Weights that begin at 1 round to bf16 in one direction, so that the errors of elements do not cancel."""
    generator = torch.Generator().manual_seed(0)
    value, gain = torch.rand(64, 256, generator=generator), torch.full((256,), 0.9899)

    def excess(bf16_weights: bool) -> float:
        repeated = [Rounding(2.0**-9, seed, bf16_weights=bf16_weights).of_weight(gain) for seed in (0, 1)]
        found, *noise = (Distance.of(value * each, value * gain, value * gain) for each in (gain.bfloat16(), *repeated))
        [judgement] = judged([Row((0, OUTPUT, 0, "x", 0), 0, value.numel(), found, tuple(noise), ())], "A", NAMES)
        return judgement.excess

    assert excess(True) < 0.5
    assert excess(False) > 1


def test_a_difference_is_told_in_the_measure_that_failed() -> None:
    found = first_fault(judged(rows_of({1: 4e-4}, size=1e-3), "A", NAMES))
    assert found is not None
    assert found.measure == "scale"
    said = extent(found, "plan A", "one device")
    assert re.search(r"differs from the reference on rank 0 in its projection on it, by \+0.000\d+ of it", said)


def test_numbers_that_no_rank_has_are_a_fault_and_survive_json() -> None:
    key, value = (0, OUTPUT, 2, "hidden", 0), torch.ones(2)
    other: Key = (0, UPDATE, 3, "model.weight", -1)
    rows = compared({key: value, other: value}, [], [{other: SAME}], lambda _rank, at: at[2])
    fault = first_fault(judged(rows, "B", NAMES))
    assert fault is not None
    assert (fault.block_name, fault.tensor, fault.size) == ("layer.1", "hidden", math.inf)
    assert from_json(to_json(fault)) == fault
