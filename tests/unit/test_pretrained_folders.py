"""Folders of pretrained weights that lack some, hold others, or hold what nobody can train: each is told."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import BertConfig

import workbench as wb
from workbench.base.errors import DataError, InvalidExperiment

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 40}
WEIGHT = "bert.encoder.layer.0.output.dense.weight"
Weights = dict[str, torch.Tensor]


def folder(to: Path, change: Callable[[Weights], Any] = lambda _: None, kind: str = "MaskedLM", **written: Any) -> Path:
    """Write a BERT whose weights and configuration are changed."""
    module = getattr(transformers, f"AutoModelFor{kind}").from_config(BertConfig(**SIZES, max_position_embeddings=16))
    module.save_pretrained(to)
    weights = load_file(to / "model.safetensors")
    change(weights)
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    (to / "config.json").write_text(json.dumps({**json.loads((to / "config.json").read_text()), **written}))
    return to


def without(part: str) -> Callable[[Weights], None]:
    return lambda weights: [weights.pop(name) for name in list(weights) if part in name]


def with_value(value: float) -> Callable[[Weights], None]:
    return lambda weights: weights[WEIGHT].__setitem__((3, 4), value)


REFUSED: Mapping[str, tuple[Callable[[Weights], Any], str]] = {
    "one weight": (without(WEIGHT), r"lacks 1 of the 42 weights .*new=\['bert\.encoder\.layer\.0\.output\.dense"),
    "a layer": (without("layer.1."), r"lacks 16 of the 42 weights that its architecture has \(bert.encoder.layer.1"),
    "the head": (without("cls."), r"lacks \d+ of the 42 weights .*cls\.predictions"),
    "more": (lambda weights: weights.update(strange=torch.ones(2)), r"holds 1 .* does not have \(strange\).*unused="),
    "whole numbers": (lambda weights: weights.update({WEIGHT: weights[WEIGHT].int()}), "as whole numbers or truth"),
    "truth values": (lambda weights: weights.update({WEIGHT: weights[WEIGHT] > 0}), "as whole numbers or truth"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_weights_that_a_folder_lacks_or_that_are_nobodys_are_refused_before_a_process_starts(
    tmp_path: Path, what: str
) -> None:
    change, words = REFUSED[what]
    with pytest.raises(InvalidExperiment, match=words):
        wb.models.pretrained(folder(tmp_path / "model", change)).check_weights()


def test_what_was_accepted_by_name_begins_at_random_and_the_rest_is_that_of_the_folder(tmp_path: Path) -> None:
    def change(weights: Weights) -> None:
        without("layer.1.")(weights)
        weights["strange"] = torch.ones(2)

    path = folder(tmp_path / "model", change)
    model = wb.models.pretrained(path, new=["bert.encoder.layer.1.*"], unused=["strange"])
    model.check_weights()
    assert wb.models.from_json(model.to_json()) == model
    plain = transformers.AutoModelForMaskedLM.from_pretrained(path)
    built = model.build().state_dict()
    same = [torch.equal(value, built[name]) for name, value in plain.state_dict().items() if "layer.1." not in name]
    assert all(same)
    with pytest.raises(InvalidExperiment, match="matches none of the 16 weights"):
        wb.models.pretrained(path, new=["bert.encoder.layer.7.*"], unused=["strange"]).check_weights()


@pytest.mark.parametrize(("kind", "task", "labels"), [("MaskedLM", None, 3), ("SequenceClassification", "mlm", None)])
def test_a_head_of_another_task_begins_at_random_unasked(
    tmp_path: Path, kind: str, task: str | None, labels: int | None
) -> None:
    wb.models.pretrained(folder(tmp_path / "model", kind=kind), task, labels).check_weights()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_told_by_its_name(tmp_path: Path, value: float) -> None:
    path = folder(tmp_path / "model", with_value(value))
    with pytest.raises(InvalidExperiment, match=rf"holds {WEIGHT} with 1 of 512 values that are NaN or infinite"):
        wb.models.pretrained(path).build()


@pytest.mark.parametrize(
    "written",
    [
        *({"num_hidden_layers": number} for number in (-1, 0, 10**6)),
        *({name: 10**9} for name in ("pad_token_id", "vocab_size", "num_labels", "hidden_size", "num_attention_heads")),
        {"num_attention_heads": -2},
        {"text_config": {"num_hidden_layers": 10**6}},
    ],
    ids=str,
)
def test_a_number_that_no_model_has_is_refused_before_anything_is_made_of_it(
    tmp_path: Path, written: dict[str, Any]
) -> None:
    with pytest.raises(InvalidExperiment, match=r"=-?[\d,]+, which must lie between -?[\d,]+ and [\d,]+\."):
        wb.models.pretrained(folder(tmp_path / "model", **written))


def test_a_pickle_that_names_code_is_refused_without_advice_to_run_it(tmp_path: Path) -> None:
    path = folder(tmp_path / "model")
    (path / "model.safetensors").unlink()
    torch.save({"a": print}, path / "pytorch_model.bin")
    with pytest.raises(InvalidExperiment, match="names code besides tensors, and none is run") as refused:
        wb.models.pretrained(path).check_weights()
    assert "weights_only" not in str(refused.value)


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "added_tokens.json"])
def test_an_id_that_no_vocabulary_has_is_refused_before_a_table_of_all_ids_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home"))
    path, far = tmp_path / "tokens", 10**9
    path.mkdir()
    vocabulary = {"type": "WordLevel", "vocab": {"a": 0, "b": far}, "unk_token": "a"}
    written = {
        "tokenizer.json": {"version": "1.0", "added_tokens": [], "model": vocabulary},
        "tokenizer_config.json": {"added_tokens_decoder": {str(far): {"content": "b"}}},
        "added_tokens.json": {"b": far},
    }
    (path / "config.json").write_text("{}")
    (path / file).write_text(json.dumps(written[file]))
    (tmp_path / "text.txt").write_text("a b a\n" * 100)
    with pytest.raises(DataError, match="gives 'b' the id 1,000,000,000, and ids up to"):
        wb.data.corpus(tmp_path / "text.txt", tokenizer=path)
