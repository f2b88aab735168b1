"""Before the first update, a captured graph is compared with its model: every fault is refused, and nothing else."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import workbench as wb
from tests.distributed import zoo
from tests.distributed.harness import CPU, LINK
from tests.unit.capture_models import MODELS, Batch, Net, batch_for, captured
from workbench.base.errors import CaptureError
from workbench.capture import Graph, stored_captures
from workbench.capture.captured_model import CapturedModel
from workbench.capture.coupling import division
from workbench.capture.coupling.division import check_graph
from workbench.capture.operations import op_name
from workbench.cost.hardware import Cluster
from workbench.execution import comparison
from workbench.execution.comparison import check_numbers, copied

READS_CAPTURES = True
COMPARES = "workbench.capture.captured_model.check_graph"


class Attending(Net):
    """Attention, a norm, a mask that hides nothing in the first samples, and a target without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.classes = nn.LayerNorm(16), nn.Embedding(5, 16)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.norm(super().body(x)).view(-1, 1, 4, 4)
        return functional.scaled_dot_product_attention(tokens, tokens, tokens, is_causal=True).flatten(1)

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        logits = self.logits(x.masked_fill(mask < 0.5, 0.0))
        with torch.no_grad():
            target = self.classes(labels)
        loss = functional.cross_entropy(logits, labels, label_smoothing=0.1)
        return loss + (target * self.classes.weight[labels]).mean() + self.head.weight.square().mean()


def batch_of(count: int, trial: int) -> Batch:
    mask = torch.ones(count, 8)
    return {**batch_for("Net", count, trial), "mask": mask if trial == 0 else mask.tril()}


Operation = Callable[..., Any]
FAULTS: dict[str, tuple[str, Callable[[Operation], Operation]]] = {
    "a gradient is dropped": ("layer_norm", lambda op: lambda *given: op(*given).detach()),
    "a gradient of one parameter is dropped": ("linear", lambda op: lambda x, w, b: op(x, w, b.detach())),
    "a gradient is doubled": ("gelu", lambda op: lambda x: 2 * op(x) - op(x).detach()),
    "a loss is scaled": ("cross_entropy_loss", lambda op: lambda *given: 1.001 * op(*given)),
    "a residual is left out": ("add", lambda _: lambda _, other: other),
    "a function is approximated": ("gelu", lambda _: lambda x: x * (1.702 * x).sigmoid()),
    "attention reads what follows": (
        "scaled_dot_product_attention",
        lambda op: lambda q, k, v, *_, **__: op(q, k, v),
    ),
    "a mask is left out that hides nothing in the first samples": ("masked_fill", lambda _: lambda x, *_: x),
    "an option of the loss is left out": ("cross_entropy_loss", lambda op: lambda *given: op(*given[:4])),
    "a value that is written is another one": ("embedding", lambda op: lambda w, at: op(w, at.flip(0))),
    "a gradient goes where forward lets none": ("_set_grad_enabled", lambda _: lambda _: None),
    "a norm has another epsilon": ("layer_norm", lambda op: lambda x, s, w, b, *_: op(x, s, w, b, 1e-2, False)),
}
"""Faults of a capture: an operation, and what computes another result in its place."""


def planted(graph: Graph, name: str, fault: Callable[[Operation], Operation]) -> Graph:
    """Let all operations of a name in a graph compute something else."""
    codes = {id(block.code): block.code for block in graph.blocks}.values()
    nodes = [node for code in codes for node in code.graph.nodes if op_name(node) == name]
    assert nodes
    for node in nodes:
        node.target = fault(node.target)
        node.target.__name__ = "planted"
    for code in codes:
        code.recompile()
    return graph


@pytest.mark.parametrize("how", FAULTS)
def test_a_fault_of_a_capture_is_refused(how: str) -> None:
    torch.manual_seed(0)
    model = Attending()
    assert check_graph(captured(model, batch_of(4, 0)), copied(model), batch_of) == ""
    with pytest.raises(CaptureError, match="does not compute the model's loss: 4 samples have the loss"):
        check_graph(planted(captured(model, batch_of(4, 0)), *FAULTS[how]), copied(model), batch_of)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("a gradient is doubled", "All values that they make are equal, so that they differ in what has a gradient"),
        ("attention reads what follows", "They part in norm … classes, which computes with what was fixed"),
        ("a mask is left out that hides nothing in the first samples", r"They part in stem \(Linear\), which"),
    ],
)
def test_the_block_is_named_in_which_a_graph_and_its_model_part(how: str, said: str) -> None:
    torch.manual_seed(0)
    model = Attending()
    with pytest.raises(CaptureError, match=said):
        check_graph(planted(captured(model, batch_of(4, 0)), *FAULTS[how]), copied(model), batch_of)


class Normalised(Net):
    """A weight that is computed from others, and an attribute of its module: no leaf, which Python copies not."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.utils.weight_norm(nn.Linear(16, 5))


RIGHT = ("bert with dropout", "mixtral", "resnet", "NoGradBuffers", "Frozen", "tied-everywhere")


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize("name", [*RIGHT, "Normalised", "Noisy"])
def test_a_right_capture_is_not_refused(name: str) -> None:
    """Among these are dropout, drawn noise, experts, BatchNorm, buffers, frozen and tied weights."""

    class Noisy(Net):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            return super().body(x + torch.rand(x.shape[0], 1) * torch.randn_like(x))

    make = {**zoo.MODELS, **MODELS, "Normalised": Normalised, "Noisy": Noisy}[name]
    torch.manual_seed(0)
    model = make().train()
    graph = captured(model, batch_for(name, 2))
    assert check_graph(graph, copied(model), lambda count, trial: batch_for(name, count, trial)) == ""


def experiment_of(model: Callable[[], nn.Module] = Attending) -> wb.Experiment:
    batch = batch_of(16, 0)
    data = [{name: field[at] for name, field in batch.items()} for at in range(16)]
    return wb.Experiment.of(model=model, data=data, steps=1, global_batch=8, seq_len=1)


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], CapturedModel]:
    """Does what the first rank does with a model that was too large for the planner, whose captures it stores."""
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(stored_captures, "_libraries", dict)
    experiment = experiment_of()
    plan = wb.plan(experiment, Cluster(CPU, 2, 2, LINK, LINK), data=2, micro_batch=4)
    monkeypatch.setattr(division, "ALWAYS_FLOPS", 0)

    def checked() -> CapturedModel:
        torch.manual_seed(0)
        model = Attending()
        found, before = CapturedModel(experiment, 4, model), copy.deepcopy(model.state_dict())
        check_numbers(experiment, plan, found, model)
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
        return found

    return checked


def test_a_capture_is_compared_once(
    check: Callable[[], CapturedModel], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check()
    said = r"Compared the captured graph with the model itself: equal loss and gradients of 4 samples, in .* s\.\n"
    assert re.fullmatch(said, capsys.readouterr().out)
    with monkeypatch.context() as patch:  # whatever it would say, it is not asked again
        patch.setattr(COMPARES, None)
        check()
    assert capsys.readouterr().out == ""
    # A capture of other content is another one, though it is stored under the same key.
    monkeypatch.setattr(stored_captures, "_libraries", lambda: {"a": (__file__, 0)})
    check()
    assert re.fullmatch(said, capsys.readouterr().out)


def test_a_graph_that_differs_is_refused_again_and_again(
    check: Callable[[], CapturedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = division.check_graph
    monkeypatch.setattr(
        COMPARES,
        lambda graph, *given: right(planted(graph, *FAULTS["a residual is left out"]), *given),
    )
    for _ in range(2):
        with pytest.raises(
            CaptureError,
            match=r"not compute the model's loss: 4 samples .* Nothing was updated\. If there is nothing",
        ):
            check()


@pytest.mark.parametrize(
    ("name", "value", "said", "asked_again"),
    [
        ("MOST_COMPARED", {"cpu": 0}, r"0 GFLOP a forward and 1.43 k parameters take too long", True),
        ("free_bytes", lambda _: 2**10, r"it needs about .* of cpu memory, of which 1.0 KiB are free", True),
        ("copied", lambda _: 1 / 0, r"it failed, and the run goes on without: ZeroDivisionError", False),
    ],
)
def test_a_run_goes_on_that_cannot_be_compared(
    check: Callable[[], CapturedModel],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    value: Any,
    said: str,
    asked_again: bool,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(comparison, name, value)
        check()
    line = capsys.readouterr().out
    assert re.match(f"Not comparing the captured graph with the model itself: {said}", line)
    check()  # what failed will fail again; there may be more time or memory another time
    assert ("Compared" in capsys.readouterr().out) == asked_again


def test_two_samples_are_compared_where_the_micro_batch_takes_too_long(
    check: Callable[[], CapturedModel], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    flops = division.forward_flops(captured(Attending(), batch_of(4, 0)))
    monkeypatch.setattr(comparison, "PER_PARAMETER", 0)
    monkeypatch.setattr(comparison, "MOST_COMPARED", {"cpu": 0.75 * comparison.PER_FORWARD * flops})
    check()
    assert "equal loss and gradients of 2 samples" in capsys.readouterr().out
