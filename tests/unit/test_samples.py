"""Samples of text: what is refused before any process starts, how tokens are drawn, and how the text is shown."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import workbench as wb
from workbench.capture.captured_model import CapturedModel
from workbench.errors import DataError, InvalidExperiment
from workbench.execution.samples import drawn
from workbench.planning import runnable
from workbench.rundir import append_event
from workbench.runs.records.history import HistoryTail
from workbench.runs.tracking.recorder import samples_table as wandb_table
from workbench.widgets.dashboard import samples_at, samples_table

SIZES = {"vocab_size": 320, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "max_positions": 32}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for index in range(20):
        (folder / f"{index}.txt").write_text(
            f"Document {index} says that {index} birds sing in tree {index % 7}.\n" * 9
        )
    return folder


@pytest.fixture(autouse=True)
def home(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path_factory.getbasetemp() / "home"))


def experiment(folder, prompts, model=None, objective=None, **changes) -> wb.Experiment:
    data = wb.data.corpus(folder, vocab_size=300, objective=objective)
    fields = {"model": model or wb.models.gpt2(**SIZES), "data": data, "seq_len": 16, "global_batch": 4}
    return wb.Experiment.of(**fields, samples=wb.Samples(prompts, **changes))


class OnlyLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(300, 8), nn.Linear(8, 300)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.table(input_ids)).flatten(0, 1), labels.flatten())


def test_prompts_that_a_model_cannot_answer_are_refused(folder):
    def check_between_steps(asked: wb.Experiment) -> None:
        plan = SimpleNamespace(stages=(), tensor=1, gathered_samples=None)
        runnable.check_between_steps(asked, plan, CapturedModel(asked, 2))

    with pytest.raises(DataError, match=r"has \d+ tokens, and the model reads 16 \(seq_len\)"):
        check_between_steps(experiment(folder, ["birds sing in tree 7. " * 20]))
    masked = wb.models.bert(**SIZES)
    with pytest.raises(DataError, match=r"has no \[MASK\]"):
        check_between_steps(experiment(folder, ["Birds sing."], masked))
    with pytest.raises(InvalidExperiment, match=r"OnlyLoss returned \[\]\. Let forward return its logits"):
        check_between_steps(experiment(folder, ["Birds"], OnlyLoss, "clm"))
    check_between_steps(experiment(folder, ["Birds [MASK]", "all [MASK] sing"], masked))


@pytest.mark.parametrize("prompts", ["Hello", [], [""], [3], None])
def test_prompts_that_are_no_texts_are_refused(prompts):
    with pytest.raises(InvalidExperiment, match="is no list of texts"):
        wb.Samples(prompts)


def test_values_that_make_no_samples_are_refused():
    for changes, said in (({"every": 0}, "every"), ({"tokens": 0}, "tokens"), ({"seed": -1}, "seed")):
        with pytest.raises(InvalidExperiment, match=f"Samples.{said}"):
            wb.Samples(["Hello"], **changes)
    items = [{"x": torch.zeros(2)}]
    with pytest.raises(InvalidExperiment, match="has none"):
        wb.Experiment(model=OnlyLoss, data=items, samples=wb.Samples(["Hello"]))
    with pytest.raises(InvalidExperiment, match=r"is no Samples\. Write samples=wb\.Samples"):
        wb.Experiment(model=OnlyLoss, data=wb.data.corpus("demo"), samples=["Hello"])


def test_samples_survive_the_way_through_json(folder):
    asked = experiment(folder, ["Birds"], tokens=7, seed=None)
    assert wb.Experiment.from_json(asked.to_json()) == asked


def test_masked_prompts_pass_through_the_model_at_their_own_length(folder):
    asked = experiment(folder, ["Birds"], wb.models.bert(**SIZES))
    prompts = asked.data.encoded(asked, ["a [MASK]", "[MASK]", "b [MASK]"])
    groups = prompts.groups(40, 16)
    assert sorted(at for group in groups for at in group.prompts) == [0, 1, 2]
    for group in groups:
        assert {len(prompts.ids[at]) for at in group.prompts} == {group.length}
    assert [prompts.token(prompts.ids[1][at]) for at in prompts.masks(1)] == ["[MASK]"]


def test_tokens_are_drawn_as_often_as_they_are_probable():
    logits = torch.tensor([0.5, 0.2, 0.3]).log().double()
    draws = [drawn(logits, int(2**63 * (index + 0.5) / 100)) for index in range(100)]
    assert [draws.count(token) for token in range(3)] == [50, 20, 30]
    many = torch.zeros(200).double()
    many[7] = 1.0
    assert drawn(many, 0) == 7
    assert len({drawn(many, int(2**63 * (index + 0.5) / 500)) for index in range(500)}) == 50


def written(tmp_path):
    events = tmp_path / "events.jsonl"
    append_event(events, "start", devices=1, resumed_from=None)
    for step in (0, 5, 10):
        samples = [
            {"prompt": "Birds", "text": f" <sing> {step}"},
            {"prompt": "a [MASK]", "masks": [[["tree", 0.75], ["bird", 0.125]]]},
        ]
        append_event(events, "samples", step=step, samples=samples, seconds=1.0)
    return events


def test_the_text_at_the_step_under_the_pointer_is_shown(tmp_path):
    events = written(tmp_path)
    tail = HistoryTail(events)
    tail.read()
    snapshot = SimpleNamespace(name="one", texts=tail.texts)
    assert "&lt;sing&gt; 5" in samples_at([snapshot], lambda _: 7.0)
    assert "&lt;sing&gt; 10" in samples_at([snapshot], lambda _: math.inf)
    assert "tree 75.0%, bird 12.5%" in samples_at([snapshot], lambda _: 0.0)
    assert samples_table([snapshot]).count("&lt;sing&gt;") == 3
    append_event(events, "start", devices=1, resumed_from="checkpoints/step-00000005")
    tail.read()
    assert tail.texts.steps == [0, 5]


def test_weights_and_biases_gets_a_table(tmp_path):
    tail = HistoryTail(written(tmp_path))
    tail.read()
    [table] = wandb_table(list(tail.texts)).values()
    assert table.columns == ["step", "prompt", "what the model wrote"]
    assert table.data[1] == [0, "a [MASK]", "tree 75.0%, bird 12.5%"]
    assert wandb_table([]) == {}
