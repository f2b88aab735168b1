"""Pretrained weights that are trained on: text, classes, frozen parts and rates by group, beside a plain loop."""

from __future__ import annotations

import csv
import json
import random
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

import workbench as wb
from tests.distributed import real_worker
from tests.distributed.documents import executed
from workbench.base.errors import DataError, InvalidExperiment
from workbench.data.tokenizer import folder_of, other_tokens
from workbench.record.rundir import read_json
from workbench.runs.run import Run

ROWS = [
    {"text": f"{word} {n} of the {word}", "label": kind}
    for n in range(24)
    for word, kind in (("good", "yes"), ("bad", "no"))
]
SIZES = {"vocab_size": 300, "max_positions": 32, "dropout": 0.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a BERT that was trained for a few steps here, with its tokeniser."""
    root = tmp_path_factory.mktemp("pretrained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_HOME", str(root / "home"))
        (root / "text.txt").write_text("\n\n".join(row["text"] for row in ROWS * 4))
        experiment = wb.Experiment(
            model=wb.models.bert(32, 3, 2, **SIZES),
            data=wb.data.corpus(root / "text.txt", vocab_size=300),
            steps=2,
            global_batch=4,
            seq_len=16,
            checkpoints=wb.Checkpoints(every=2),
        )
        run = wb.runs.debug(experiment, real_worker.plan(experiment), directory=root / "run", progress=False)
        run.export(root / "model")
    return root / "model"


def fine_tuning(folder: Path, **changes: Any) -> wb.Experiment:
    rows = changes.pop("data", None) or wb.data.classification(ROWS, folder, length=16)
    model = wb.models.pretrained(folder, labels=2, frozen=["bert.embeddings.*"])
    optimizer = wb.Optimizer(lr_schedule="constant", warmup_steps=0, rate_scale={"bert.*": 0.1}, weight_decay=0.0)
    fields = {"steps": 4, "global_batch": 8, "seq_len": 16, "learning_rate": 1e-2, **changes}
    return wb.Experiment(model=model, data=rows, optimizer=optimizer, **fields)


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("stages", [1, 2])
def test_fine_tuning_a_new_head_is_that_of_a_plain_loop(folder: Path, tmp_path: Path, stages: int) -> None:
    experiment = fine_tuning(folder)
    model = experiment.build()
    assert torch.equal(
        model.bert.encoder.layer[1].output.dense.weight, loaded(folder).bert.encoder.layer[1].output.dense.weight
    )
    dataset, losses = experiment.data.reads(experiment).dataset(), []
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert {name.split(".")[1] for name, _ in trained} == {"encoder", "pooler", "weight", "bias"}
    groups = [
        {"params": [p for n, p in trained if n.startswith("bert.") == is_body], "lr": rate}
        for is_body, rate in ((True, 1e-3), (False, 1e-2))
    ]
    update = torch.optim.AdamW(groups, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.0)
    for step in range(4):
        batch = dataset.collate([dataset[index] for index in range(8 * step, 8 * step + 8)])
        loss = model(**batch).loss
        losses.append(loss.item())
        update.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([parameter for _, parameter in trained], 1.0)
        update.step()
    run = Run(real_worker.trained(tmp_path / "run", experiment, real_worker.plan(experiment, pipeline=stages)).path)
    assert run.history().loss.tolist() == pytest.approx(losses, abs=2e-5)
    run.export(tmp_path / "tuned")
    pipeline = transformers.pipeline("text-classification", str(tmp_path / "tuned"))
    tuned = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "tuned")
    answer = pipeline("good 3 of the good", top_k=None)
    shares = tuned(**pipeline.tokenizer("good 3 of the good", return_tensors="pt")).logits.softmax(-1)[0].tolist()
    expected = dict(zip(experiment.data.class_names, shares, strict=True))
    assert {each["label"]: each["score"] for each in answer} == pytest.approx(expected, abs=1e-5)
    assert set(expected) == {"no", "yes"}
    again = wb.models.pretrained(tmp_path / "tuned")
    assert (again.task, again.labels) == ("classification", 2)
    assert wb.Experiment.from_json(experiment.to_json(), {"data": experiment.data.dataset_or_factory}) == experiment


@pytest.mark.usefixtures("home")
def test_a_run_goes_on_and_is_planned_after_its_pretrained_folder_has_gone(folder: Path, tmp_path: Path) -> None:
    own = shutil.copytree(folder, tmp_path / "own")
    # A part of a set keeps its tokeniser and the names of its classes.
    part = torch.utils.data.Subset(wb.data.classification(ROWS, own, length=16), range(40))
    experiment = fine_tuning(own, data=part, checkpoints=wb.Checkpoints(every=2))
    whole = wb.runs.debug(experiment, real_worker.plan(experiment), directory=tmp_path / "whole", progress=False)
    shutil.rmtree(own)
    shutil.rmtree(tmp_path / "home")  # with the tokeniser's files in the cache
    described = wb.Experiment.from_json(read_json(whole.directory.experiment), {"data": part})
    assert described.model == experiment.model
    plan = real_worker.plan(described, pipeline=2)
    middle = whole.checkpoints[0].path
    run = Run(real_worker.trained(tmp_path / "on", described, plan, middle).path)
    assert run.history().loss.tolist() == pytest.approx(whole.history().loss[2:].tolist(), abs=2e-5)
    whole.export(tmp_path / "tuned")
    assert transformers.AutoConfig.from_pretrained(tmp_path / "tuned").id2label == {0: "no", 1: "yes"}
    for start in (lambda: wb.launch(described, plan), lambda: wb.sweep(described, learning_rate=[1e-3]), whole.clone):
        with pytest.raises(InvalidExperiment, match=r"starts from the weights in .*own, and no file .* is there any"):
            start()


def loaded(folder: Path) -> Any:
    return transformers.AutoModelForMaskedLM.from_pretrained(folder)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home"))


@pytest.mark.usefixtures("home")
@pytest.mark.representative
def test_pretraining_goes_on_from_the_weights_of_a_folder(folder: Path, tmp_path: Path) -> None:
    text = wb.data.documents([row["text"] for row in ROWS * 8], tokenizer=folder, progress=False)
    model = wb.models.pretrained(folder)
    assert (model.task, model.vocab_size, model.max_positions) == ("mlm_nsp", 300, 32)
    experiment = wb.Experiment(model=model, data=text, steps=2, global_batch=4, seq_len=16, learning_rate=1e-9)
    batch = experiment.data.reads(experiment).dataset()
    batch = batch.collate([batch[index] for index in range(4)])
    original = transformers.AutoModelForPreTraining.from_pretrained(folder)
    run = wb.runs.debug(experiment, real_worker.plan(experiment), directory=tmp_path / "run", progress=False)
    assert run.history().loss[0] == pytest.approx(original(**batch).loss.item(), abs=1e-5)


@pytest.mark.usefixtures("home")
def test_text_and_rows_are_read_with_the_tokens_that_the_weights_were_trained_with(
    folder: Path, tmp_path: Path
) -> None:
    texts = [row["text"] for row in ROWS * 8]
    other = wb.data.documents([text[::-1] for text in texts], vocab_size=200, progress=False)
    kept = fine_tuning(folder).replace(model=wb.models.pretrained(folder), data=other, optimizer=wb.Optimizer())
    with pytest.raises(DataError, match="would be read with a vocabulary that is trained on it") as refused:
        kept.data.reads(kept).check()
    given = re.findall('tokenizer="(.*)"', str(refused.value))[0]
    right = kept.replace(data=wb.data.documents(texts, tokenizer=given, progress=False))
    right.data.reads(right).check()
    batch = right.data.reads(right).dataset()
    original = transformers.AutoTokenizer.from_pretrained(folder)
    assert original.decode(batch[0]["input_ids"]).startswith("[CLS]")
    mirror = shutil.copytree(
        other.reads(kept.replace(model=wb.models.bert(32, 1, 1, **SIZES))).tokenizer_folder(), tmp_path / "other"
    )
    for data in (
        wb.data.documents(texts, tokenizer=mirror, progress=False),
        wb.data.classification(ROWS, mirror, length=16),
    ):
        experiment = fine_tuning(folder, data=data)
        experiment = experiment if data.__class__.__name__ == "LabelledTexts" else kept.replace(data=data)
        with pytest.raises(
            DataError, match=r"\d+ of its \d+ ids stand for other tokens there, such as \d+ is '.*' instead of"
        ):
            experiment.data.reads(experiment).check()
    # The tokeniser beside the weights may be given as an object as well, and with tokens beyond those of the folder.
    original.add_tokens(["brandnew"])
    more = kept.replace(data=wb.data.documents(texts, tokenizer=original, progress=False))
    assert not other_tokens(folder_of(more.data.tokenizer), str(folder))


@pytest.mark.usefixtures("home")
def test_classes_have_the_numbers_that_the_head_and_the_training_gave_them(folder: Path, tmp_path: Path) -> None:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=2, id2label={0: "yes", 1: "no"}, label2id={"yes": 0, "no": 1}
    )
    model.save_pretrained(tmp_path / "head")
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "head")
    experiment = fine_tuning(tmp_path / "head")
    with pytest.raises(DataError, match=r"which goes on, yes, no. Give labels=\['yes', 'no'\]"):
        experiment.data.reads(experiment).check()
    rows = wb.data.classification(ROWS, tmp_path / "head", length=16, labels=["yes", "no"])
    right = fine_tuning(tmp_path / "head", data=rows)
    right.data.reads(right).check()
    batch = rows[0] | {"labels": torch.tensor(0)}
    assert rows[0]["labels"] == 0
    loss = right.build().eval()(**{name: field[None] for name, field in batch.items()}).loss
    assert loss.item() == pytest.approx(model.eval()(**{n: field[None] for n, field in rows[0].items()}).loss.item())
    held_out = wb.data.classification([ROWS[0], {"text": "so 2", "label": "maybe"}], folder, length=16)
    evaluated = fine_tuning(folder, evaluation=wb.Evaluation(data=held_out))
    with pytest.raises(DataError, match="eval_data has the classes maybe, yes, and data no, yes"):
        evaluated.data.reads(evaluated).check()
    named = fine_tuning(tmp_path / "head", data=wb.data.classification(ROWS, folder, length=16, labels=["no", "yes"]))
    rows = named.data._labelled_texts
    rows.labels = ("0", "1")
    assert "goes on with its classes yes, no, and" in named.data.reads(named).note()


def causal(to: Path, has_padding: bool, **said: int) -> Path:
    """Write a GPT-2 whose configuration names no padding unless `said` does, with a tokeniser that may have some."""
    words = ["<end>", "<pad>", "<unk>", "good", "bad", "of", "the", *map(str, range(24))]
    library = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    library.pre_tokenizer = Whitespace()
    names = {"eos_token": "<end>", "unk_token": "<unk>", **({"pad_token": "<pad>"} if has_padding else {})}
    transformers.PreTrainedTokenizerFast(tokenizer_object=library, **names).save_pretrained(to)
    sizes = {"vocab_size": len(words), "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32}
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    torch.manual_seed(0)
    config = transformers.GPT2Config(**sizes, **dropouts, bos_token_id=0, eos_token_id=0, initializer_range=0.2, **said)
    transformers.GPT2LMHeadModel(config).save_pretrained(to)
    return to


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("has_padding", [True, False], ids=["own token", "end token"])
def test_a_causal_model_reads_the_class_before_the_padding_also_when_exported(
    tmp_path: Path, has_padding: bool
) -> None:
    folder = causal(tmp_path / "gpt", has_padding)
    rows = [{**row, "text": f"{row['text']} of the" * (1 + number % 3)} for number, row in enumerate(ROWS)]
    optimizer = wb.Optimizer(lr_schedule="constant", warmup_steps=0, weight_decay=0.0)
    experiment = wb.Experiment(
        model=wb.models.pretrained(folder, labels=2),
        data=wb.data.classification(rows, folder, length=16),
        optimizer=optimizer,
        steps=4,
        global_batch=8,
        seq_len=16,
        learning_rate=1e-2,
        checkpoints=wb.Checkpoints(every=4),
    )
    pad = 1 if has_padding else 0
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2, pad_token_id=pad)
    plain.load_state_dict(experiment.build().state_dict())
    dataset, losses = experiment.data.reads(experiment).dataset(), []
    update = torch.optim.AdamW(plain.train().parameters(), lr=1e-2, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.0)
    for step in range(4):
        loss = plain(**dataset.collate([dataset[index] for index in range(8 * step, 8 * step + 8)])).loss
        losses.append(loss.item())
        update.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        update.step()
    run = wb.runs.debug(experiment, real_worker.plan(experiment), directory=tmp_path / "run", progress=False)
    assert run.history().loss.tolist() == pytest.approx(losses, abs=2e-5)
    run.export(tmp_path / "tuned")
    reader = transformers.AutoTokenizer.from_pretrained(tmp_path / "tuned")
    tuned = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "tuned").eval()
    assert reader.pad_token_id == tuned.config.pad_token_id == pad
    encoded = reader([row["text"] for row in rows], padding=True, return_tensors="pt")
    together = tuned(input_ids=encoded["input_ids"], attention_mask=encoded["attention_mask"]).logits
    for logits, row in zip(together, rows, strict=True):
        assert torch.allclose(tuned(reader(row["text"], return_tensors="pt")["input_ids"]).logits[0], logits, atol=1e-5)
    if has_padding:
        contradictory = experiment.replace(
            model=wb.models.pretrained(causal(tmp_path / "two", True, pad_token_id=2), labels=2)
        )
        with pytest.raises(DataError, match=r"is filled with the id 1, and .* that is not its own padding, 2"):
            contradictory.data.reads(contradictory).check()
        # Rows of one's own say by their mask which id fills them.
        own = [dict(experiment.data.dataset_or_factory[index]) for index in range(16)]
        assert experiment.replace(data=own).build().config.pad_token_id == pad


@pytest.mark.usefixtures("home")
def test_rows_of_a_file_of_a_dataset_and_of_a_list_are_the_same(folder: Path, tmp_path: Path) -> None:
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["text", "label"])
        writer.writeheader()
        writer.writerows(ROWS)
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
    sources = (ROWS, tmp_path / "rows.csv", datasets.Dataset.from_list(ROWS, features=features))
    sets = [wb.data.classification(source, folder, length=8) for source in sources]
    reader = transformers.AutoTokenizer.from_pretrained(folder)
    for rows in sets:
        assert (len(rows), rows.labels) == (48, ("no", "yes"))
        assert [rows[n]["labels"].item() for n in range(4)] == [1, 0, 1, 0]
        for index in (0, 17):
            expected = reader(ROWS[index]["text"], padding="max_length", truncation=True, max_length=8)
            assert {name: field.tolist() for name, field in rows[index].items() if name != "labels"} == dict(expected)
    pairs = wb.data.classification(
        [{"a": "good 1", "b": "bad 2", "c": n} for n in (10, 9)], folder, text="a", pair="b", label="c"
    )
    assert pairs.labels == ("9", "10"), "numbers are sorted as numbers"
    assert pairs[0]["token_type_ids"].sum() > 2


@pytest.mark.usefixtures("home")
def test_what_cannot_be_loaded_or_read_is_refused_with_a_way_out(folder: Path, tmp_path: Path) -> None:
    for words, arguments in (
        (r"There is no model of transformers at .*nothing", (tmp_path / "nothing",)),
        ("needs labels, the number of classes", (folder, "classification")),
        ("labels are of classification", (folder, "mlm", 2)),
    ):
        with pytest.raises(InvalidExperiment, match=words):
            wb.models.pretrained(*arguments)
    with pytest.raises(InvalidExperiment, match=r"matches none of the \d+ parameters"):
        wb.models.pretrained(folder, frozen=["roberta.*"]).build()
    with pytest.raises(InvalidExperiment, match=r"holds \d+ parameters of other shapes than its config.json says"):
        wb.models.pretrained(resized(folder, tmp_path / "resized", hidden_size=16)).build()
    gpt = transformers.GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=2)
    gpt.save_pretrained(tmp_path / "mixed")
    (tmp_path / "mixed/model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(InvalidExperiment, match=r"lacks \d+ of the \d+ weights that its architecture has"):
        wb.models.pretrained(tmp_path / "mixed", "clm").build()
    for words, rows in (
        ("Row 0 of rows has no 'label'. It has: text", [{"text": "a"}]),
        ("is empty", []),
        ("has the label 'maybe', which is none of no, yes", [{"text": "a", "label": "maybe"}]),
    ):
        with pytest.raises(DataError, match=words):
            wb.data.classification(rows, folder, labels=["no", "yes"])


def resized(folder: Path, to: Path, **changes: Any) -> Path:
    """Copy a model's folder, and change its `config.json`."""
    shutil.copytree(folder, to)
    (to / "config.json").write_text(json.dumps({**json.loads((to / "config.json").read_text()), **changes}))
    return to


@pytest.mark.usefixtures("home")
def test_a_head_of_as_many_classes_goes_on_and_one_of_others_begins_anew(folder: Path, tmp_path: Path) -> None:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3)
    model.save_pretrained(tmp_path / "three")
    goes_on, anew = (wb.models.pretrained(tmp_path / "three", labels=labels).build() for labels in (None, 5))
    assert torch.equal(goes_on.classifier.weight, model.classifier.weight)
    assert anew.classifier.weight.shape == (5, 32)
    assert torch.equal(anew.bert.pooler.dense.weight, model.bert.pooler.dense.weight)


def test_the_template_fine_tunes_a_pair_and_its_accuracies_are_those_of_a_plain_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = executed("fine_tuning", tmp_path, monkeypatch, preset="rehearsal")
    scope: dict[str, Any] = {"csv": csv, "random": random, "re": re, "Path": Path, "rows": None}
    scope |= {"corpus": str(tmp_path / "addresses"), "text_column": "text", "label_column": "label"}
    scope["chosen"] = {"sentences": 400}
    exec(document.cell("def rows_of_corpus").source, scope)
    train, held_out = scope["train_rows"], scope["held_out_rows"]
    assert scope["labels"] == ["earlier", "later"]
    assert not {row["text"] for row in train} & {row["text"] for row in held_out}

    tuned = [run for run in document.runs if run.experiment.model.name.endswith("-mini") and "seed=" in run.name]
    ends: dict[str, list[float]] = {}
    for run in tuned:
        ends.setdefault(run.experiment.model.name, []).append(float(run.evaluations()["accuracy"][-1]))
    assert {name: len(values) for name, values in ends.items()} == {"bert-large-mini": 2, "bert-scaled-mini": 2}
    [best] = {file.parent for file in (tmp_path / "runs").rglob("exported") if "seed=" in file.parent.name}
    assert wb.load_run(best).evaluations()["accuracy"][-1] == max(map(max, ends.values()))
    answers = transformers.pipeline("text-classification", str(best / "exported"))
    said = answers([row["text"] for row in held_out], truncation=True, max_length=16)
    right = sum(answer["label"] == row["label"] for answer, row in zip(said, held_out, strict=True))
    assert right / len(held_out) == pytest.approx(max(map(max, ends.values())))

    [curves] = document.figures("figure = wb.figures.seed_bands")
    means = {trace["name"]: trace for trace in curves["data"] if trace["meta"] == "mean"}
    for name, values in ends.items():
        assert means[name]["mode"] == "lines+markers"
        assert document.printed("titles =").count(f"| {name} |") == 1
        assert f"{sum(values) / 2:.1%}" in document.printed("titles =")
        assert f"{name} classifies {sum(values) / 2:.1%}" in document.printed("told = []")
    assert "At equal tokens" not in document.printed("told = []")
    assert "accuracy at equal tokens" in document.printed("told = []")
    assert "Held-out accuracy" in str(document.cell('compared = wb.contrast(runs, y="accuracy")').outputs)


def tiny(path: str) -> torch.nn.Module:
    model = torch.nn.Linear(4, 1)
    model.load_state_dict(torch.load(path))
    return model


def test_planning_a_model_that_loads_weights_warns_of_nothing(tmp_path: Path) -> None:
    import functools

    from workbench.capture import build_meta

    torch.save(torch.nn.Linear(4, 1).state_dict(), tmp_path / "weights.pt")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = build_meta(functools.partial(tiny, str(tmp_path / "weights.pt")))
    assert not [str(each.message) for each in caught]
    assert next(model.parameters()).is_meta
