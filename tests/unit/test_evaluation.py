"""Held-out samples: which text they come from, what is refused, and what figures make of their losses."""

from pathlib import Path

import numpy as np
import pytest
import torch

import workbench as wb
from workbench.analysis.contrast import contrast
from workbench.analysis.curve import Curve
from workbench.data import held_out
from workbench.errors import DataError, InvalidExperiment
from workbench.figures.curves_view import loss_curves
from workbench.planning.runnable import check_runnable
from workbench.rundir import append_event
from workbench.runs.records.history import HistoryTail

BERT = wb.models.bert(vocab_size=200, hidden_size=16, num_layers=2, num_heads=2, max_positions=64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for index in range(60):
        (folder / f"{index}.txt").write_text(
            f"Document {index} says that {index} birds sing in tree {index % 7}.\n" * 20
        )
    return folder


@pytest.fixture(autouse=True)
def home(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path_factory.getbasetemp() / "home"))


def experiment(folder, **changes) -> wb.Experiment:
    fields = {"steps": 200, "global_batch": 4, "seq_len": 32, "evaluation": wb.Evaluation(every=10, samples=16)}
    return wb.Experiment.of(model=BERT, data=wb.data.corpus(folder, vocab_size=200), **{**fields, **changes})


def test_training_reads_no_held_out_document(folder):
    asked = experiment(folder)
    training, evaluation = asked.data.dataset(asked).samples.store, held_out(asked).samples.store
    read, kept = (
        {(begin, end) for begin, end in zip(part.starts, part.ends, strict=True)} for part in (training, evaluation)
    )
    edges = sorted(read | kept)
    assert len(edges) == len(read) + len(kept)
    assert [begin for begin, _ in edges] == [0, *(end for _, end in edges[:-1])], "nothing is in both, or in neither"
    assert training.tokens + evaluation.tokens == training.store.tokens
    assert evaluation.tokens >= 16 * 29
    whole = training.store
    starts = [training.document_starts, evaluation.document_starts]
    assert sum(map(len, starts)) == whole.documents
    for stream in (training, evaluation):
        first, begin = stream.starts[1], (stream.ends - stream.starts)[0]
        assert first in whole.document_starts
        assert begin in stream.document_starts
        assert stream.ids[begin + np.arange(5)].tolist() == whole.ids[first : first + 5].tolist()


def test_held_out_samples_are_the_same_for_every_seed_and_length(folder):
    first = held_out(experiment(folder))
    second = held_out(experiment(folder, seed=5, steps=7, global_batch=8, learning_rate=1.0))
    for name, field in first.__getitems__(range(16)).items():
        assert torch.equal(field, second.__getitems__(range(16))[name])
    labels = first.__getitems__(range(16))["labels"]
    assert ((labels >= 0).sum(1) == round(0.15 * 32)).all()


def test_without_evaluation_the_samples_are_those_of_the_whole_text(folder):
    plain, split = experiment(folder, evaluation=None), experiment(folder)
    own = experiment(folder, eval_data=wb.data.corpus(folder, vocab_size=200))
    batches = [asked.data.dataset(asked).__getitems__(range(8))["input_ids"] for asked in (plain, own, split)]
    assert torch.equal(batches[0], batches[1])
    assert not torch.equal(batches[0], batches[2])


def test_other_text_is_read_with_the_tokeniser_of_the_training_text(folder, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("Birds sing in tree 5. Document 3 says so.\n" * 100)
    asked = experiment(folder, eval_data=wb.data.corpus(other, vocab_size=200))
    ids = held_out(asked)[0]["input_ids"].tolist()
    assert "birds" in asked.data.tokenizer(asked).decode(ids)


def test_a_text_that_is_too_small_or_of_one_document_is_refused(folder, tmp_path):
    with pytest.raises(DataError, match=r"5,000 held-out samples of 29 tokens need 145,000 of the .* more than half"):
        held_out(experiment(folder, evaluation=wb.Evaluation(samples=5000)))
    one = tmp_path / "one.txt"
    one.write_text("\n".join(f"Paragraph {index} of one document." for index in range(2000)))
    with pytest.raises(DataError, match=r"1 document of .* too few to hold out"):
        held_out(experiment(one))


def dataset(size: int, name: str = "x") -> list[dict[str, torch.Tensor]]:
    class Items(list):
        pass

    return Items({name: torch.full((3,), float(index))} for index in range(size))


def build() -> torch.nn.Module:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.mse_loss(self.layer(x), x)

    return Model()


def test_held_out_items_come_in_their_order():
    asked = wb.Experiment(build, dataset(8), evaluation=wb.Evaluation(samples=10, data=dataset(40)))
    assert held_out(asked).__getitems__(range(10))["x"][:, 0].tolist() == [4.0 * index for index in range(10)]
    assert len(held_out(asked.replace(eval_samples=2048))) == 40


def test_bad_evaluations_are_refused_before_anything_starts():
    with pytest.raises(InvalidExperiment, match="every=0 must be 1 or more"):
        wb.Evaluation(every=0)
    with pytest.raises(InvalidExperiment, match=r"Give held-out samples: evaluation=wb.Evaluation\(data="):
        wb.Experiment(build, dataset(8), evaluation=wb.Evaluation())
    with pytest.raises(InvalidExperiment, match=r"evaluation=100 is no Evaluation\. Write evaluation=wb\.Evaluation"):
        wb.Experiment(build, dataset(8), evaluation=100)
    other = wb.Experiment(build, dataset(8), evaluation=wb.Evaluation(data=dataset(4, "y")))
    with pytest.raises(DataError, match=r"eval_data has the fields y \[3\] float32, and data has x \[3\] float32"):
        other.data.check(other)
    few = wb.Experiment(build, dataset(8), evaluation=wb.Evaluation(data=dataset(1)), global_batch=4, seq_len=3)
    plan = wb.plan(few, micro_batch=2)
    with pytest.raises(DataError, match=r"1 held-out samples, fewer than the 2 of one micro-batch"):
        check_runnable(few, plan, None, progress=False)


def test_the_experiment_and_its_evaluation_survive_json(folder):
    asked = experiment(folder, eval_data=wb.data.corpus(folder, vocab_size=200))
    assert wb.Experiment.from_json(asked.to_json()) == asked
    assert wb.Experiment.from_json(experiment(folder, evaluation=None).to_json()).evaluation is None


def evaluated(path: Path, *steps: int, loss: float = 5.0) -> None:
    for step in steps:
        facts = {"tokens": 64 * step, "samples": 2 * step, "flops": 10.0 * step, "seconds": 1.0 * step}
        append_event(path, "evaluation", step=step, loss=loss - step / 10, eval_seconds=0.5, **facts)


def test_evaluations_after_the_checkpoint_of_a_resumption_are_replaced(tmp_path):
    events = tmp_path / "events.jsonl"
    append_event(events, "start", devices=2, world=2, resumed_from=None)
    evaluated(events, 0, 5, 10)
    append_event(events, "start", devices=2, world=2, resumed_from="checkpoints/step-00000005")
    tail = HistoryTail(events)
    tail.read()
    assert tail.evaluations.step.tolist() == [0, 5]
    evaluated(events, 10, loss=7.0)
    tail.read()
    assert tail.evaluations.eval_loss.tolist() == [5.0, 4.5, 6.0]
    assert tail.evaluations.gpu_hours[1] == pytest.approx(2 * 5 / 3600)


def curve(name: str, shift: float = 0.0) -> Curve:
    step = np.arange(1.0, 101)
    columns = {"step": step, "tokens": 64 * step, "loss": 6 - step / 50 + shift}
    at = np.arange(0.0, 101, 10)
    held = {"step": at, "tokens": 64 * at, "eval_loss": 6.1 - at / 50 - shift, "perplexity": np.exp(6.1 - at / 50)}
    return Curve(name, columns, evaluations=held)


def test_held_out_losses_have_markers_in_front_of_a_pale_training_loss():
    figure = loss_curves([curve("a")])
    roles = {trace.meta: trace for trace in figure.data}
    assert roles["evaluation"].y.tolist() == pytest.approx((6.1 - np.arange(0, 101, 10) / 50).tolist())
    assert roles["evaluation"].line.color != roles["line"].line.color
    menu = figure.layout.updatemenus[0].buttons[1].args[0]["x"]
    assert len(menu[list(roles).index("evaluation")]) == 11
    assert "lines+markers" in {trace.mode for trace in loss_curves([curve("a")], y="eval_loss").data}


def test_runs_are_contrasted_by_their_held_out_losses_where_all_have_them():
    both = contrast([curve("a", -0.1), curve("b", 0.1)])
    assert {standing.best for standing in both.standings} == {"b"}  # b has the higher training loss
    without = Curve("c", curve("c", 0.3).columns)
    assert {standing.best for standing in contrast([curve("a", -0.1), without]).standings} == {"a"}
