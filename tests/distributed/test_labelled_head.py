"""Heads that run on labelled rows only give plain PyTorch's loss and gradients under every plan."""

from __future__ import annotations

import copy
import functools

import torch

from tests.distributed import zoo
from tests.distributed.harness import launch, plain_step, unlike_plain
from tests.distributed.test_every_plan import MICRO_BATCH, TOLERANCE, Case, captured_once, plan_of, trainer_of
from workbench.execution.blocks.loss_runners import LabelledRows
from workbench.execution.trainer import Trainer


def batch_of(name: str, size: int) -> zoo.Batch:
    """Return a batch with 15 % of its labels, none in the first micro-batch and all in the second; GPT-2 has all."""
    batch = zoo.batch(name, size)
    generator = torch.Generator().manual_seed(1)
    share = torch.full((size, 1), 0.15 if name != "gpt2" else 1.0)
    if name != "gpt2":
        share[:MICRO_BATCH], share[MICRO_BATCH : 2 * MICRO_BATCH] = 0, 1
    is_labelled = torch.rand(size, zoo.SEQ, generator=generator) < share
    batch["labels"] = torch.randint(1, zoo.VOCAB, (size, zoo.SEQ), generator=generator).masked_fill(~is_labelled, -100)
    return batch


def row_counts(trainer: Trainer) -> set[int | None]:
    """Return the numbers of rows over which this rank's heads have run."""
    runners = (module.program.run for stage in trainer.stages.stages for module in stage.block_modules())
    return {rows for run in runners if isinstance(run, LabelledRows) for rows in run._runners}


def _capture(names: list[str]) -> None:
    for name in names:
        captured_once(name)


def _measured(_rank: int, cases: list[tuple[str, Case]]) -> list[tuple[float, float, set[int | None]]]:
    found = []
    for name, case in cases:
        model, graph = captured_once(name)
        plan = plan_of(graph, case)
        batch = batch_of(name, plan.global_batch)
        plain = plain_step(model, batch)
        trainer = trainer_of(copy.deepcopy(model), graph, plan)
        errors = unlike_plain(trainer, batch, *plain)
        of_ranks: list[set[int | None]] = [set()] * case.world
        torch.distributed.all_gather_object(of_ranks, row_counts(trainer))
        found.append((*errors, set().union(*of_ranks)))
    return found


def assert_equal_to_plain_pytorch(*cases: tuple[str, Case]) -> list[set[int | None]]:
    """Return the numbers of rows that each case ran over, after comparing loss and gradients."""
    [world] = {case.world for _, case in cases}
    found = launch(_measured, world, list(cases), ahead=functools.partial(_capture, [name for name, _ in cases]))
    wrong = [(case, error) for case, error in zip(cases, found, strict=True) if not max(error[:2]) <= TOLERANCE]
    assert not wrong, wrong
    return [rows for _, _, rows in found]


def test_heads_over_labelled_rows_equal_plain_pytorch_in_one_process_recomputed_or_not() -> None:
    how = (("1f1b", "none"), ("1f1b", "selective"), ("gpipe", "full"))  # GPipe: all forwards, then all backwards
    cases = [("bert", Case(schedule=schedule, recompute=recompute)) for schedule, recompute in how]
    *masked, causal = assert_equal_to_plain_pytorch(*cases, ("gpt2", Case()))
    assert masked[0] == masked[1] == masked[2]
    assert {2, None} < masked[0], "2 of 32 rows without labels, all rows with all labels, and some numbers in between"
    assert causal == {None}, "all of GPT-2's rows are labelled"


def test_heads_over_labelled_rows_equal_plain_pytorch_on_two_devices() -> None:
    plans = (
        Case(pipeline=2),
        Case(data=2, num_microbatches=2),
        Case(data=2, num_microbatches=2, zero=3, recompute="full"),
    )
    cases = [*(("bert", case) for case in plans), ("t5", plans[0]), ("bart", plans[1])]
    for rows in assert_equal_to_plain_pytorch(*cases):
        assert {2, None} < rows


def test_a_head_divided_over_its_vocabulary_runs_over_all_rows() -> None:
    assert assert_equal_to_plain_pytorch(("bert", Case(tensor=2))) == [set()]
