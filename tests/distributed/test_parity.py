"""`wb.parity` finds what is planted, calls right divisions rounding, and its reference is a plain loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import workbench as wb
from tests.distributed import zoo
from tests.distributed.faulty_parity import PLANTED
from tests.distributed.harness import coordinate, forced_plan, launch
from tests.distributed.own_machine import own_machine
from tests.distributed.real_worker import experiment, plan
from tests.exhaustive import EXHAUSTIVE
from tests.unit import capture_models
from workbench.analysis.bisection import examined
from workbench.analysis.deviation import GRADIENT, LOSS, OUTPUT
from workbench.analysis.parity import Parity, compared_with_plain
from workbench.analysis.plain_loop import PlainLoop, Rounding, SameDraws, trained
from workbench.base.errors import DataError, InvalidArgument, PlanInfeasible
from workbench.capture import capture, spec_of
from workbench.execution.build import build_model
from workbench.experiment import Experiment
from workbench.planning.plan import Plan

ASKED = experiment(learning_rate=1e-3, warmup_steps=1)
STEPS = 2
Planted = tuple[str, Plan]


def planted_cases() -> list[Planted]:
    """Return a fault, or none, with the plan in which it is planted."""
    stages = plan(ASKED, pipeline=2)
    replicas = [plan(ASKED, data=2, zero=zero) for zero in range(4)]
    alone = plan(ASKED)
    cases = [
        *(("scaled", each) for each in (stages, *replicas)),
        ("scaled everywhere", plan(ASKED, tensor=2)),
        *(("scaled bias", each) for each in (stages, replicas[1])),
        *(("transposed shard", each) for each in replicas[1:]),
        *(("transposed update", each) for each in (replicas[1], replicas[3])),
        *(("micro-batch twice", each) for each in (alone, stages, replicas[0])),
        *(("micro-batch dropped", each) for each in (stages, replicas[3])),
        *(("other mask", each) for each in (stages, replicas[0], replicas[3])),
        *(("own labels", each) for each in (replicas[0], replicas[2])),
        *(("no decay", each) for each in (alone, replicas[1])),
        ("other clipping", replicas[0]),
        *(("other start", each) for each in (alone, stages, replicas[2])),
        *((name, stages) for name in ("stale weights", "low precision", "wrong attention", "other rate")),
        ("lone replica", replicas[0]),
        ("wrong capture", alone),
    ]
    if not EXHAUSTIVE:  # each fault once
        cases = list({name: (name, each) for name, each in reversed(cases)}.values())
    cases += [("right", each) for each in (alone, stages, replicas[0], replicas[3], plan(ASKED, tensor=2))]
    return [(name, dataclasses.replace(each)) for name, each in cases]  # by which its comparisons are found


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        yield from own_machine(tmp_path_factory.mktemp("machine"), patch)


@pytest.fixture(scope="module")
def found(machine: Path) -> tuple[list[Planted], Parity]:
    cases = planted_cases()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PLANTED, ",".join(name for name, _ in cases))
        result = compared_with_plain(examined(ASKED, STEPS), [each for _, each in cases], STEPS, worker="faulty_parity")
    assert not result.failed
    assert not list((machine / "runs").glob(".parity-*"))
    return cases, result


def test_each_planted_fault_is_found_and_no_right_division_is_called_one(found: tuple[list[Planted], Parity]) -> None:
    """Faults in dropout masks show beside one device that draws the same, all others beside plain PyTorch, too."""
    cases, result = found
    for name, each in cases:
        mine = {one.beside: one.is_fault for one in result.comparisons if one.plan is each}
        assert any(mine.values()) == (name != "right"), (name, each.division())
        assert mine["plain PyTorch"] == (name not in ("right", "other mask")), (name, each.division())
    scaled = next(one for one in result.comparisons if one.plan is dict(reversed(cases))["scaled"])
    assert scaled.begins is not None
    assert scaled.begins.factor == pytest.approx(1.01, abs=1e-3)


def test_the_table_and_the_figure_show_each_division_beside_its_bound(found: tuple[list[Planted], Parity]) -> None:
    _, result = found
    assert not result.is_equal
    assert "differ from the reference by more than rounding. It begins at " in result.verdict
    assert result._repr_html_().count("<tr>") >= len(result.comparisons)
    assert "FAULT: " in repr(result)
    assert "rounding: " in repr(result)
    figure = wb.figures.parity_figure(result)
    right = [trace for trace in figure.data if str(trace.name).startswith("differs by rounding")]
    bounds = [trace for trace in figure.data if trace.name == "bound of rounding"]
    assert [list(trace.y) for trace in bounds] == [[1.0, 1.0]] * 2
    sound = [each for each in result.comparisons if not each.is_fault]
    pairs = [(each.loss_differences, each.loss_bounds) for each in sound]
    pairs += [(each.gradient_differences, each.gradient_bounds) for each in sound]
    shares = [max(0.001, value / bound) for pair in pairs for value, bound in zip(*pair, strict=True)]
    assert [share for trace in right for share in trace.y] == pytest.approx(shares)
    assert max(shares) < 1
    assert max(share for trace in figure.data if trace not in (*right, *bounds) for share in trace.y) > 1
    assert len({trace.name for trace in figure.data}) == len({each.division for each in result.faults}) + 2


def test_a_fault_leads_on_to_bisect(found: tuple[list[Planted], Parity]) -> None:
    _, result = found
    bisected = result.bisect(progress=False)
    assert bisected.plans[1] == result.faults[0].division
    assert not bisected.is_fault, "nothing is planted in the ranks of a bisection"
    right = tuple(each for each in result.comparisons if not each.is_fault)
    with pytest.raises(InvalidArgument, match="There is no fault to look for"):
        dataclasses.replace(result, comparisons=right).bisect()


@pytest.mark.usefixtures("machine")
def test_every_division_of_small_models_is_plain_pytorch() -> None:
    """All models of the tests in the exhaustive run; one whose statistics are those of micro-batches in every other."""
    models = capture_models.MODELS if EXHAUSTIVE else {"resnet": zoo.resnet}
    for name, make in models.items():
        asked = Experiment.of(model=make, data=Rows(name), steps=9, global_batch=8, name="small")
        result = wb.parity(asked, steps=2, progress=False)
        assert result.is_equal, (name, result)
        assert len({each.division for each in result.comparisons}) + len(result.left_out) == 15, name
        if name == "resnet":
            without_tensors = ["tensor=2, micro_batch=2", "tensor=2, recompute=selective, micro_batch=2"]
            assert [choices for choices, _ in result.left_out] == without_tensors
            assert result.notes


@pytest.mark.usefixtures("machine")
def test_documents_that_are_read_apart_are_plain_pytorch_under_every_kind_of_division() -> None:
    """A masked model whose mask is added to scores, and a causal one whose kernel takes it."""
    draw = np.random.default_rng(0)
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta"]
    texts = [" ".join(draw.choice(words, int(draw.integers(1, 30)))) + f" {number}" for number in range(200)]
    sizes: dict[str, Any] = {"num_layers": 2, "num_heads": 2, "vocab_size": 400, "max_positions": 32}
    models = {
        "causal": wb.models.gpt2(32, **sizes),
        "masked": wb.models.bert(32, **sizes, next_sentence=False, layout="pre_ln"),
    }
    for model in models.values() if EXHAUSTIVE else [models["causal"]]:
        text = wb.data.documents(texts, vocab_size=400, separate_documents=True, progress=False)
        asked = Experiment.of(model=model, data=text, seq_len=32, global_batch=8, steps=9, precision="fp32")
        two = wb.measure.local_cluster(2)
        plans = [
            wb.plan(asked, two, pipeline=2, micro_batch=2),
            wb.plan(asked, two, tensor=2, recompute="full"),
            wb.plan(asked, two, data=2, zero=3, recompute="selective"),
        ]
        result = wb.parity(asked, plans, steps=2, progress=False)
        assert result.is_equal, result


class Rows:
    """The samples of a model of the tests."""

    def __init__(self, name: str) -> None:
        self.rows = capture_models.batch_for(name, 64)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: field[index] for name, field in self.rows.items()}


class Drawn(Rows):
    """Samples that are others each time they are read."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = super().__getitem__(index)
        return {**sample, "x": sample["x"] + np.random.default_rng().normal()}


def test_what_cannot_be_compared_is_refused_before_a_process_starts(machine: Path) -> None:
    right, other = plan(ASKED), dataclasses.replace(plan(ASKED), precision="bf16")
    before = list((machine / "runs").glob("*"))
    for wrong, words in (
        ({"plans": [right], "steps": 0}, "steps=0 lies outside 1 to 40"),
        ({"plans": []}, "plans is empty"),
        ({"plans": [right, other]}, "several precisions, bf16 and fp32"),
        ({"devices": "tpu"}, "devices='tpu' is neither"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            wb.parity(ASKED, **wrong)
    slow = dataclasses.replace(right, flops_per_step=10**14)
    with pytest.raises(PlanInfeasible, match="3 steps of 8 samples under 1 division are 300 TFLOP"):
        wb.parity(ASKED, [slow])
    assert list((machine / "runs").glob("*")) == before


@pytest.mark.usefixtures("machine")
def test_data_that_are_drawn_at_each_reading_are_refused() -> None:
    asked = Experiment.of(model=zoo.Skips, data=Drawn("skips"), steps=9, global_batch=8)
    with pytest.raises(DataError, match="gives other samples each time it is read, in x"):
        wb.parity(asked, [wb.plan(asked, wb.measure.local_cluster(1))], progress=False)


# The reference itself, beside a loop that is written out


class Uneven(nn.Module):
    """A mean over labels of which samples have different numbers, statistics of a batch, dropout and other draws."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.head = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = functional.dropout(self.norm(self.layer(x)), 0.2, self.training)
        return functional.cross_entropy(self.head(hidden + 0 * torch.randn_like(hidden)), labels, ignore_index=-1)


def _looped(_rank: int) -> tuple[float, float]:
    """Return the largest relative differences of the loop's loss and gradients, accumulated over micro-batches."""
    asked = Experiment.of(model=Uneven, data=lambda: None, steps=9, global_batch=8)
    generator = torch.Generator().manual_seed(0)
    batch = {"x": torch.randn(8, 8, generator=generator), "labels": torch.tensor([0, 1, 2, -1, 4, -1, -1, 0])}
    model: Any = build_model(Uneven, 0, torch.device("cpu"), asked.seed)
    graph = capture(Uneven().train(), {name: spec_of(name, field[:4]) for name, field in batch.items()})
    alone = forced_plan(graph, pipeline=1, micro_batch=4, num_microbatches=2)
    loop = PlainLoop(
        asked, alone, graph, coordinate(1, 1), torch.device("cpu"), torch.float64, micro_batch=4, modes=[SameDraws]
    )
    numbers = trained(loop, [(batch, {})], Rounding())

    model.double()
    total = 0.0
    for first in (0, 4):
        hidden = model.norm(model.layer(batch["x"][first : first + 4].double())) / (1 - 0.2)
        labels = batch["labels"][first : first + 4]
        loss = functional.cross_entropy(model.head(hidden), labels, ignore_index=-1, reduction="sum") / 5
        loss.backward()
        total += loss.item()
    gradients = [
        (numbers[0, GRADIENT, 0, name, -1] - parameter.grad).norm().item() / parameter.grad.norm().item()
        for name, parameter in model.named_parameters()
        if name != "layer.bias"  # whose gradient is zero before a normalisation
    ]
    return abs(float(numbers[0, OUTPUT, 0, LOSS, -1]) / total - 1), max(gradients)


def test_the_loop_accumulates_means_over_uneven_labels_as_one_that_is_written_out() -> None:
    of_loss, of_gradients = launch(_looped, 1)
    assert of_loss < 1e-6, "the loss is reported in fp32"
    assert of_gradients < 1e-12


def test_a_sample_is_given_the_same_random_numbers_in_any_batch() -> None:
    def drawn(samples: int) -> list[torch.Tensor]:
        with SameDraws():
            x = torch.zeros(samples, 3, 40)
            kept = functional.dropout(x + 1, 0.25)
            slopes = functional.rrelu(x - 1, 0.1, 0.3, training=True)
            return [
                torch.rand_like(x),
                torch.randn(samples, 7),
                torch.rand(samples, 1, 1),
                kept,
                slopes,
                torch.rand(()),
            ]

    whole, part = drawn(8), drawn(2)
    torch.manual_seed(1)
    for one, other, again in zip(whole, part, drawn(2), strict=True):
        assert torch.equal(one[:2] if one.ndim else one, other)
        assert torch.equal(other, again)
    assert torch.equal(whole[3], torch.full((8, 3, 40), 1 / 0.75))
    torch.testing.assert_close(whole[4], torch.full((8, 3, 40), -0.2))
    assert len(whole[0].unique()) > 30
