"""Named configurations build the published architectures, and callables that build no model are refused."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pickle
import re

import pytest
import torch
from torch import nn

import workbench as wb
from workbench import models
from workbench.base.errors import InvalidExperiment, UnknownParameter

TINY = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 90, "max_positions": 24}
NAMED = {
    "BertForPreTraining": models.bert(**TINY),
    "BertForMaskedLM": models.bert(**TINY, next_sentence=False),
    "MegatronBertForPreTraining": models.bert(**TINY, layout="pre_ln"),
    "MegatronBertForMaskedLM": models.bert(**TINY, layout="pre_ln", next_sentence=False),
    "GPT2LMHeadModel": models.gpt2(**TINY),
    "OPTForCausalLM": models.opt(**TINY),
}
FIRST_QUERY = r"(layer|h|layers)\.0\.(attention\.self\.query|attn\.c_attn|self_attn\.q_proj)\.weight$"
"""Name of the first layer's query weight, in every family."""
named = pytest.mark.parametrize("architecture", NAMED)


def batch_for(model: models.Model) -> dict[str, torch.Tensor]:
    ids = torch.arange(2 * 24).reshape(2, 24) % model.vocab_size
    batch = {"input_ids": ids, "labels": ids}
    if model.objective == "mlm_nsp":
        batch |= {"token_type_ids": torch.zeros_like(ids), "next_sentence_label": torch.tensor([0, 1])}
    return batch


@named
def test_a_named_model_builds_its_architecture_at_its_size_in_train_mode(architecture):
    model = NAMED[architecture]
    module = model.build()
    assert type(module).__name__ == architecture
    assert module.training
    assert module.get_input_embeddings().weight.shape == (90, 32)
    assert module.config.num_hidden_layers == 2
    assert module.config.use_cache is False


@named
def test_the_whole_sequence_trains_and_nothing_is_said(architecture, capfd, recwarn):
    model = NAMED[architecture]
    loss = model.build()(**batch_for(model)).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert capfd.readouterr() == ("", "")
    assert not recwarn.list


@named
def test_the_decoder_is_tied_to_the_embedding_on_meta_too(architecture):
    for device in ("cpu", "meta"):
        with torch.device(device):
            module = NAMED[architecture].build()
        assert module.get_output_embeddings().weight is module.get_input_embeddings().weight
        assert {p.device.type for p in module.parameters()} == {device}


@named
def test_a_named_model_survives_json_and_pickle(architecture):
    model = NAMED[architecture]
    assert models.from_json(json.loads(json.dumps(model.to_json()))) == model
    assert pickle.loads(pickle.dumps(model)) == model


@named
def test_the_initial_weights_deviate_as_the_initializer_range_says(architecture):
    for deviation in (0.02, 0.12):
        torch.manual_seed(0)
        module = dataclasses.replace(NAMED[architecture], initializer_range=deviation).build()
        assert module.get_input_embeddings().weight.std().item() == pytest.approx(deviation, rel=0.1)
        (first,) = (p for name, p in module.named_parameters() if re.search(FIRST_QUERY, name))
        assert first.std().item() == pytest.approx(deviation, rel=0.1)


@pytest.mark.parametrize("make", [models.bert, models.bert_large, models.gpt2, models.opt])
def test_every_named_model_takes_an_initializer_range_and_its_json_holds_it(make):
    assert make().initializer_range == 0.02
    model = make(initializer_range=0.12)
    assert models.from_json(json.loads(json.dumps(model.to_json()))).initializer_range == 0.12
    before = {name: value for name, value in make().to_json().items() if name != "initializer_range"}
    assert models.from_json(before) == make()  # The description without the field.


@pytest.mark.parametrize("wrong", [0, -0.02, math.nan, math.inf, "0.02", True, None])
def test_an_initializer_range_that_starts_no_model_is_refused(wrong):
    for make in (models.bert, models.bert_large, models.gpt2, models.opt):
        with pytest.raises(InvalidExperiment, match=f"initializer_range={wrong!r} "):
            make(initializer_range=wrong)


def test_dropout_zero_makes_the_forward_repeatable():
    for model in (models.bert(**TINY, dropout=0.0), models.gpt2(**TINY, dropout=0.0), models.opt(**TINY, dropout=0.0)):
        module, batch = model.build(), batch_for(model)
        assert module(**batch).loss.item() == module(**batch).loss.item()


@pytest.mark.parametrize(
    ("model", "millions"),
    [
        (models.bert_large(), 336),
        (models.bert(hidden_size=1920, num_layers=54, num_heads=30), 2457),
        (models.gpt2(), 124.4),
        (models.opt(), 125.2),
        (models.gpt3(), 1316),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_published_sizes_have_their_published_parameter_counts(model, millions):
    with torch.device("meta"):
        module = model.build()
    assert sum(p.numel() for p in module.parameters()) == pytest.approx(millions * 1e6, rel=2e-3)


def test_names_tell_sizes():
    assert models.bert(hidden_size=1920, num_layers=54, num_heads=30).name == "bert-54x1920"
    assert models.bert_large().name == "bert-large"
    assert models.gpt3("6.7B").name == "gpt3-6.7b"


def test_heads_that_do_not_divide_the_hidden_size_are_answered_with_sizes_that_do():
    with pytest.raises(InvalidExperiment, match="100 is not divisible by num_heads=12") as caught:
        models.bert(hidden_size=100, num_heads=12)
    assert "hidden_size=96" in str(caught.value)
    assert "num_heads=10" in str(caught.value)


@pytest.mark.parametrize("wrong", [{"num_layers": 0}, {"vocab_size": 3.5}, {"dropout": 1.0}, {"layout": "sandwich"}])
def test_a_value_that_makes_no_model_is_refused(wrong):
    with pytest.raises(InvalidExperiment, match=str(next(iter(wrong.values())))):
        models.bert(**wrong)


def test_a_misspelt_parameter_is_answered_with_the_nearest():
    with pytest.raises(UnknownParameter, match="Did you mean 'hidden_size'"):
        models.bert(hiden_size=64)


class Net(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)


def build_net() -> nn.Module:
    return Net().eval()


@pytest.mark.parametrize(
    ("factory", "name"),
    [(build_net, "build_net"), (Net, "Net"), (functools.partial(Net, width=8), "Net"), (lambda: Net(), "model")],
)
def test_any_callable_that_returns_a_module_is_a_model(factory, name):
    model = models.as_model(factory)
    assert model.name == name
    assert model.is_user_defined
    assert model.objective is None
    assert isinstance(model.build(), Net)
    assert model.build().training
    assert models.as_model(model) is model


def test_a_custom_model_keeps_its_source_and_honours_meta():
    model = models.as_model(build_net)
    assert "return Net().eval()" in model.source
    with torch.device("meta"):
        assert model.build().layer.weight.is_meta


def test_a_described_custom_model_shows_itself_and_refuses_to_build():
    described = models.from_json(json.loads(json.dumps(models.as_model(build_net).to_json())))
    assert (described.name, described.source) == ("build_net", models.as_model(build_net).source)
    with pytest.raises(InvalidExperiment, match="Only the description of build_net"):
        described.build()
    assert isinstance(models.from_json(described.to_json(), factory=build_net).build(), Net)


def broken() -> nn.Module:
    return nn.Linear(4, -1 // 0)


def test_a_factory_that_raises_is_reported_with_its_line():
    with pytest.raises(InvalidExperiment, match=r"broken\(\) raised ZeroDivisionError.*test_models.py, line \d+"):
        models.as_model(broken).build()


def test_a_factory_that_returns_no_module_is_told_so():
    with pytest.raises(InvalidExperiment, match="returned a int instead"):
        models.as_model(lambda: 3).build()


def test_a_built_module_is_refused_since_every_rank_builds_its_own():
    with pytest.raises(InvalidExperiment, match="Pass a callable that builds it"):
        models.as_model(Net())


@pytest.mark.parametrize("value", ["bert-large", 3, None])
def test_what_cannot_build_a_model_is_refused(value):
    with pytest.raises(InvalidExperiment, match="callable that builds it"):
        models.as_model(value)


def test_a_factory_that_needs_arguments_is_told_to_bind_them():
    with pytest.raises(InvalidExperiment, match=r"needs in_features, out_features.*functools\.partial"):
        models.as_model(nn.Linear)


@pytest.mark.parametrize(
    ("module", "typed", "meant"), [(wb, "lunch", "launch"), (wb.models, "bert_larg", "bert_large")]
)
def test_a_mistyped_name_is_answered_with_the_nearest_one(module, typed, meant):
    with pytest.raises(AttributeError, match=f"has no {typed!r}. Did you mean {meant!r}"):
        getattr(module, typed)
    assert not hasattr(module, "_nothing_of_the_kind")
