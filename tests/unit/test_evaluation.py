"""Held-out samples, metrics and samples of text: where they come from, what is refused, what is shown of them."""

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import workbench as wb
from tests.logs import append_event
from workbench.analysis.contrast import contrast_curves
from workbench.analysis.curve import Curve
from workbench.base.errors import DataError, InvalidExperiment
from workbench.capture import capture, spec_of
from workbench.capture.captured_model import CapturedModel, capture_for_evaluation
from workbench.capture.outputs import flattened
from workbench.data import data_fingerprint, held_out, held_out_fingerprint
from workbench.data.store import TokenStore, document_runs, split, split_of_stream
from workbench.execution.between_steps import drawn
from workbench.figures.curves_view import loss_curves
from workbench.figures.panels_view import panel_names, panels
from workbench.planning.runnable import check_runnable
from workbench.record.history import HistoryTail
from workbench.record.rundir import RunDir
from workbench.runs.tracking.rows import Row, RowTail
from workbench.runs.tracking.wandb_tracker import _samples_table as wandb_table
from workbench.widgets.dashboard import samples_at, samples_table

BERT = wb.models.bert(vocab_size=200, hidden_size=16, num_layers=2, num_heads=2, max_positions=64)
CAUSAL = wb.models.opt(vocab_size=300, hidden_size=16, num_layers=2, num_heads=2, max_positions=64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for index in range(120):
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
    training, evaluation = asked.data.reads(asked).dataset().samples.store, held_out(asked).samples.store
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
    prints = {held_out_fingerprint(experiment(folder, seed=seed, steps=7 + seed)) for seed in (0, 5)}
    assert len(prints) == 1
    assert held_out_fingerprint(experiment(folder, seq_len=16)) not in prints
    assert held_out_fingerprint(experiment(folder, evaluation=None)) is None


def test_without_evaluation_the_samples_are_those_of_the_whole_text(folder):
    plain, split = experiment(folder, evaluation=None), experiment(folder)
    own = experiment(folder, eval_data=wb.data.corpus(folder, vocab_size=200))
    batches = [asked.data.reads(asked).dataset().__getitems__(range(8))["input_ids"] for asked in (plain, own, split)]
    assert torch.equal(batches[0], batches[1])
    assert not torch.equal(batches[0], batches[2])


def test_other_text_is_read_with_the_tokeniser_of_the_training_text(folder, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("Birds sing in tree 5. Document 3 says so.\n" * 100)
    asked = experiment(folder, eval_data=wb.data.corpus(other, vocab_size=200))
    ids = held_out(asked)[0]["input_ids"].tolist()
    assert "birds" in asked.data.reads(asked).text_tokenizer().decode(ids)


def test_further_sets_are_the_same_samples_with_other_masks_or_other_text(folder, tmp_path):
    (tmp_path / "other.txt").write_text("Birds sing in tree 5.\n\n" * 100)
    other = wb.data.corpus(tmp_path / "other.txt")
    asked = experiment(folder, evaluation=wb.Evaluation(samples=16, also={"masked_40": 0.4, "other": other}))
    sets = asked.held_out_sets
    assert list(sets) == ["masked_40", "other"]
    assert wb.Experiment.from_json(asked.to_json()).held_out_sets == sets
    assert sets["other"].eval_data == other
    assert sets["masked_40"].eval_data is None
    first, masked = held_out(asked)[3], held_out(sets["masked_40"])[3]
    hidden = [each["labels"] != -100 for each in (first, masked)]
    assert [int(each.sum()) for each in hidden] == [5, 13]
    shown = ~(hidden[0] | hidden[1])
    assert first["input_ids"][shown].tolist() == masked["input_ids"][shown].tolist()
    assert data_fingerprint(asked) != data_fingerprint(asked.replace(eval_also=None))


def test_further_sets_that_cannot_be_evaluated_are_refused(folder):
    for sets, said in (
        ({"a b": 0.3}, "no name for a held-out set"),
        ({"loss": 0.3}, "no name for a held-out set"),
        ({"more": 1.5}, "gives 'more' 1.5, and a fraction of masked positions lies above 0"),
        ({"mine": dataset(4)}, r"run\.evaluate\(my_dataset\)"),
        ([0.3], "does not map names to held-out sets"),
    ):
        with pytest.raises(InvalidExperiment, match=said):
            wb.Evaluation(also=sets)
    both = wb.Evaluation(also={"known": 0.3}, metrics={"known": torch.add})
    with pytest.raises(InvalidExperiment, match="known is a metric and a held-out set"):
        experiment(folder, evaluation=both)
    for sets in ({"more": 0.3}, {"other": wb.data.corpus(folder)}):
        with pytest.raises(InvalidExperiment, match="which has neither masks nor a tokeniser"):
            wb.Experiment(build, dataset(8), evaluation=wb.Evaluation(data=dataset(8), also=sets))
    causal = wb.models.opt(vocab_size=200, hidden_size=16, num_layers=2, num_heads=2, max_positions=64)
    with pytest.raises(InvalidExperiment, match="predicts every position of its labels"):
        experiment(folder).replace(model=causal, evaluation=wb.Evaluation(also={"more": 0.3}))


def test_a_text_that_is_too_small_is_refused_with_a_way_out(folder, tmp_path):
    with pytest.raises(DataError, match=r"5,000 held-out samples of 29 tokens need 145,000 of the .* more than half"):
        held_out(experiment(folder, evaluation=wb.Evaluation(samples=5000)))
    with pytest.raises(DataError, match=r"2 documents of 80 tokens, too few to hold out 40 tokens in samples of 40"):
        split(store_of(tmp_path, [58, 22]), "small", 1, 40)


def store_of(folder, sizes):
    """Write a tokenised text with documents of these sizes."""
    starts = np.cumsum([0, *sizes[:-1]])
    ids = np.random.default_rng(0).integers(0, 60000, sum(sizes)).astype(np.uint16)
    edges, hashes = document_runs(ids, starts, len(ids))
    ids.tofile(folder / "tokens.bin")
    starts.astype(np.int64).tofile(folder / "documents.bin")
    np.save(folder / "runs.npy", np.stack([edges.astype(np.uint64), np.append(hashes, np.uint64(0))]))
    return TokenStore(folder, len(ids), len(sizes), 60000, 0.0)


def positions(part):
    """Return the tokens of the text that a part of it has."""
    return np.concatenate([np.arange(begin, end) for begin, end in zip(part.starts, part.ends, strict=True)])


UNEQUAL = {
    "two files": [270_000, 730_000],
    "one document": [500_000],
    "a huge document behind small ones": [100] * 2000 + [800_000],
    "a huge document before small ones": [800_000] + [100] * 2000,
    "giant rows": [30] * 9000 + [40_000] * 3 + [30] * 9000,
    "each twice as long": [2**power * 2000 for power in range(8)],
    "few": [9000] * 60,
    "one of many is long": [100] * 9500 + [50_000],
}


@pytest.mark.parametrize("samples", [16, 3000])
@pytest.mark.parametrize("kind", UNEQUAL)
def test_long_documents_are_held_out_in_pieces_at_the_asked_share_and_from_each_of_them(kind, samples, tmp_path):
    sizes, width = UNEQUAL[kind], 64
    store = store_of(tmp_path, sizes)
    parts = split(store, kind, samples, width)
    asked = max(0.05, samples * width / store.tokens)
    assert asked <= parts.held_out.tokens / store.tokens < asked + 0.01
    segments = sorted(
        (begin, end)
        for each in (parts.training, parts.held_out)
        for begin, end in zip(each.starts, each.ends, strict=True)
    )
    assert [begin for begin, _ in segments] == [0, *(end for _, end in segments[:-1])], (
        "no token is in both, or neither"
    )
    is_held = np.zeros(store.tokens, bool)
    for begin, end in zip(parts.held_out.starts, parts.held_out.ends, strict=True):
        is_held[begin:end] = True
    for begin, size in zip(store.document_starts, sizes, strict=True):
        own = is_held[begin : begin + size]
        if size > store.tokens / 10:
            assert own.mean() == pytest.approx(asked, rel=0.3)
        if size > store.tokens / 50:
            assert own.any()
        if size < store.tokens / 200:
            assert own.all() or not own.any(), "short documents are not cut"
    again = split(store, kind, samples, width)
    assert np.array_equal(again.held_out.starts, parts.held_out.starts)
    if samples > 16:
        assert is_held[positions(split(store, kind, 16, width).held_out)].all(), "more samples, more of the same"
    assert f"{parts.documents[1]:,} of {len(sizes):,} document" in str(parts)


def test_of_many_documents_the_runs_with_the_lowest_hashes_are_held_out_whole(tmp_path):
    sizes = np.random.default_rng(1).integers(50, 3000, 400).tolist()
    store = store_of(tmp_path, sizes)
    edges, hashes = store.runs
    expected, tokens = [], 0
    for run in sorted(range(len(hashes)), key=lambda run: hashes[run]):
        if tokens < 0.05 * store.tokens:
            tokens += edges[run + 1] - edges[run]
            expected += range(edges[run], edges[run + 1])
    parts = split(store, "many", 4, 64)
    found = [
        t for begin, end in zip(parts.held_out.starts, parts.held_out.ends, strict=True) for t in range(begin, end)
    ]
    assert found == sorted(expected)
    assert parts.documents[1] == 0
    assert " whole of 400 documents" in str(parts)


@pytest.mark.parametrize(
    ("sizes", "end"), [([900_000, 100_000], 262_144), ([1000] * 900, 262_000), ([100] * 200 + [500_000], 262_144)]
)
def test_a_stream_holds_out_its_share_of_the_beginning_whatever_document_goes_on_behind_it(sizes, end, tmp_path):
    store = store_of(tmp_path, sizes)
    parts = split_of_stream(lambda _: store, "text", 16, 64)
    assert parts.among == end
    assert 0.05 * end <= parts.held_out.tokens < 0.07 * end
    assert parts.held_out.ends[-1] <= end
    assert parts.training.ends[-1] == store.tokens
    assert "of the first 262 k tokens are held out" in str(parts)


def test_what_is_held_out_of_long_documents_is_said_by_the_data_and_the_plan(tmp_path):
    """A folder of two files is two documents, whatever empty lines stand in them."""
    for name, words, lines in (("a", "Birds sing in tree", 300), ("b", "Set the option to", 900)):
        (tmp_path / f"{name}.txt").write_text("\n\n".join(f"{words} {line}." for line in range(lines)))
    for model, options in ((BERT, {"vocab_size": 200}), (CAUSAL, {"vocab_size": 300, "shuffle_buffer": 64})):
        asked = experiment(tmp_path).replace(model=model, data=wb.data.corpus(tmp_path, **options))
        prepared = asked.data.reads(asked).prepare()
        assert " tokens are held out (" in prepared.held_out
        assert "parts of 2 of 2 documents" in prepared.held_out
        assert prepared.held_out.removesuffix(".") in repr(prepared)
        said, compared = prepared.held_out.split(" 0 of ")
        assert compared.endswith("stands in the text that training reads, too.")
        assert asked.data.reads(asked).note() == f"Of {prepared.name}, {said}"
        tokeniser = asked.data.reads(asked).text_tokenizer()
        held = [tokeniser.decode(ids) for ids in held_out(asked).__getitems__(range(16))["input_ids"].tolist()]
        assert {kind for kind in ("tree", "option") if any(kind in text for text in held)} == {"tree", "option"}
    assert asked.data.reads(asked).note() in wb.plan(asked).notes
    whole = experiment(tmp_path, evaluation=None)
    assert whole.data.reads(whole).prepare().held_out == ""


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
        other.data.reads(other).check()
    few = wb.Experiment(build, dataset(8), evaluation=wb.Evaluation(data=dataset(1)), global_batch=4, seq_len=3)
    plan = wb.plan(few, micro_batch=2)
    with pytest.raises(DataError, match=r"1 held-out samples, fewer than the 2 of one micro-batch"):
        check_runnable(few, plan, None, progress=False)


def test_the_experiment_with_its_evaluation_and_its_samples_survives_json(folder):
    asked = experiment(folder, eval_data=wb.data.corpus(folder, vocab_size=200))
    for each in (asked, sampling(folder, ["Birds"], tokens=7, seed=None)):
        assert wb.Experiment.from_json(each.to_json()) == each
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
    both = contrast_curves([curve("a", -0.1), curve("b", 0.1)])
    assert {standing.best for standing in both.standings} == {"b"}  # b has the higher training loss
    without = Curve("c", curve("c", 0.3).columns)
    assert {standing.best for standing in contrast_curves([curve("a", -0.1), without]).standings} == {"a"}


def test_a_contrast_says_which_losses_are_not_finite_and_until_where_a_run_that_ends_in_them_is_compared():
    one, other = (Curve(name, dict(curve(name).columns)) for name in "ab")
    other.columns["loss"][[10, 11]] = np.nan
    said = contrast_curves([one, other])
    assert said.draws == ("2 of 100 losses of b are not finite and left out.",)
    other.columns["loss"][70:] = np.inf
    said = contrast_curves([one, other])
    assert said.draws == (
        "32 of 100 losses of b are not finite and left out, and none after step 70 is: it is compared until there.",
    )
    assert said.draws[0] in repr(said)
    assert {standing.at for standing in said.standings if standing.axis == "tokens"} == {64 * 70}


SIZES = {"vocab_size": 320, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "max_positions": 32}


def sampling(folder, prompts, model=None, objective=None, **changes) -> wb.Experiment:
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
        CapturedModel(asked, 2).check_between_steps(asked, cuts=(), tensor=1, loss_samples=None)

    with pytest.raises(DataError, match=r"has \d+ tokens, and the model reads 16 \(seq_len\)"):
        check_between_steps(sampling(folder, ["birds sing in tree 7. " * 20]))
    masked = wb.models.bert(**SIZES)
    with pytest.raises(DataError, match=r"has no \[MASK\]"):
        check_between_steps(sampling(folder, ["Birds sing."], masked))
    with pytest.raises(InvalidExperiment, match=r"OnlyLoss returned \[\]\. Let forward return its logits"):
        check_between_steps(sampling(folder, ["Birds"], OnlyLoss, "clm"))
    check_between_steps(sampling(folder, ["Birds [MASK]", "all [MASK] sing"], masked))


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


def test_masked_prompts_pass_through_the_model_at_their_own_length(folder):
    asked = sampling(folder, ["Birds"], wb.models.bert(**SIZES))
    prompts = asked.data.reads(asked).encoded(["a [MASK]", "[MASK]", "b [MASK]"])
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
    snapshot = SimpleNamespace(name="one", texts=tail.texts, look=None)
    assert "&lt;sing&gt; 5" in samples_at([snapshot], lambda _: 7.0)
    assert "&lt;sing&gt; 10" in samples_at([snapshot], lambda _: math.inf)
    assert "tree 75.0%, bird 12.5%" in samples_at([snapshot], lambda _: 0.0)
    assert samples_table([snapshot]).count("&lt;sing&gt;") == 3
    append_event(events, "start", devices=1, resumed_from="checkpoints/step-00000005")
    tail.read()
    assert tail.texts.steps == [0, 5]


def test_weights_and_biases_gets_a_table(tmp_path):
    rows = RowTail(RunDir(written(tmp_path).parent)).backlog
    [table] = wandb_table(next(row for row in rows if row.samples)).values()
    assert table.columns == ["step", "prompt", "what the model wrote"]
    assert table.data[1] == [0, "a [MASK]", "tree 75.0%, bird 12.5%"]
    assert wandb_table(Row(0, {})) == {}


@dataclasses.dataclass
class Returned:
    loss: torch.Tensor
    logits: torch.Tensor
    details: dict


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Returned:
        hidden = self.first(x).tanh()
        logits = self.second(hidden)
        details = {"hidden": [hidden], "seen": labels, "cache": object(), "twice": 2 * labels}
        return Returned(functional.cross_entropy(logits, labels), logits, details)


BATCH = {"x": torch.zeros(4, 3), "labels": torch.zeros(4, dtype=torch.int64)}
SPECS = {name: spec_of(name, value) for name, value in BATCH.items()}


def captured(**metrics):
    model = Classifier()
    return capture_for_evaluation(model, capture(model, SPECS), metrics)


def correct(outputs, batch):
    return (outputs.logits.argmax(-1) == batch["labels"]).sum(), len(batch["labels"])


def test_only_what_metrics_read_is_computed_and_the_structure_is_rebuilt():
    graph = captured(
        correct=correct, seen=lambda outputs, _: (outputs.details["twice"].sum(), outputs.details["seen"].numel())
    )
    assert len(graph.outputs.names) == 3
    values = [torch.full(graph.values[name].shape, float(index)) for index, name in enumerate(graph.outputs.names)]
    rebuilt = graph.outputs.rebuilt(values)
    assert isinstance(rebuilt, Returned)
    assert torch.equal(rebuilt.logits, values[graph.outputs.names.index(graph.outputs.values[1])])
    assert rebuilt.details["hidden"][0].is_meta
    assert rebuilt.details["cache"] is None


def test_outputs_of_every_structure_are_flattened():
    template, tensors = flattened((torch.zeros(1), [{"a": torch.ones(2)}, 3, "text"], None))
    assert [tensor.numel() for tensor in tensors] == [1, 2]
    assert template[1][1:] == [3, "text"]


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        (lambda outputs, _: outputs.logits.sum(), "one scalar instead of two scalars"),
        (lambda outputs, _: (outputs.logits.sum(-1), 4), r"a tensor of shape \[2\], int 4"),
        (lambda outputs, _: (outputs.logits.sum(), "many"), "str 'many'"),
        (lambda *_: None, "returned None"),
        (lambda outputs, _: (outputs.logits.mean(), 1), "does not add up over samples"),
        (lambda outputs, _: (outputs.scores.sum(), 1), "raised AttributeError: 'Returned' object has no attribute"),
        (
            lambda outputs, batch: (outputs.loss * len(batch["x"]), len(batch["x"])),
            "reads a loss that forward returned",
        ),
    ],
    ids=["one value", "a tensor", "a text", "nothing", "a mean", "an error", "the loss"],
)
def test_a_metric_that_cannot_be_summed_is_refused(metric, said):
    with pytest.raises(InvalidExperiment, match=said) as caught:
        captured(own=metric)
    assert "'own'" in str(caught.value)


def classifying(**changes) -> wb.Experiment:
    fields = {"model": Classifier, "data": [BATCH], "eval_data": [BATCH], "evaluation": wb.Evaluation()}
    return wb.Experiment.of(**{**fields, **changes})


def test_metrics_with_a_taken_name_are_refused():
    for name in ("loss", "two words", 3):
        with pytest.raises(InvalidExperiment, match="is no name for a metric"):
            classifying(metrics={name: correct})
    for metrics in (correct, {"correct": 3}):
        with pytest.raises(InvalidExperiment, match="does not map names to functions"):
            classifying(metrics=metrics)


def test_metrics_survive_the_way_through_json():
    asked = classifying(metrics={"correct": correct})
    value = asked.to_json()
    assert value["evaluation"]["metrics"]["correct"]["name"] == "correct"
    again = wb.Experiment.from_json(
        value, {"model": Classifier, "data": [BATCH], "eval_data": [BATCH], "metrics": {"correct": correct}}
    )
    assert again.metrics["correct"].function is correct
    assert classifying().to_json()["evaluation"]["metrics"] is None


def test_a_metric_has_its_curve_and_its_panel(tmp_path):
    events = tmp_path / "events.jsonl"
    append_event(events, "start", devices=1, resumed_from=None)
    shared = {"tokens": 10.0, "samples": 1.0, "flops": 1.0, "seconds": 1.0}
    for step in (0, 5):
        metrics = {"correct": 0.25 * (step + 1), "rare": None if step else 3.0}
        append_event(events, "evaluation", step=step, loss=2.0, eval_seconds=1.0, metrics=metrics, **shared)
    for step in range(1, 7):
        append_event(events, "step", step=step, loss=2.0, tokens_per_s=5.0, **shared)
    tail = HistoryTail(events)
    history = tail.read()
    assert tail.evaluations["correct"].tolist() == [0.25, 1.5]
    assert np.isnan(tail.evaluations["rare"][1])
    curves = [Curve("one", history, evaluations=tail.evaluations), Curve("without", history)]
    assert panel_names(curves) == ["tokens_per_s", "correct", "rare"]
    figure = panels(curves, x="step")
    assert [annotation.text for annotation in figure.layout.annotations] == ["Tokens/s", "correct", "rare"]
    drawn = [trace for trace in figure.data if trace.mode == "lines+markers" and len(trace.x)]
    assert list(drawn[0].y) == [0.25, 1.5]
    assert drawn[1].y[0] == 3.0
    assert len(drawn) == 2
    [line] = [trace for trace in loss_curves(curves[:1], x="step", y="correct").data if trace.meta == "line"]
    assert list(line.y) == [0.25, 1.5]
