"""The width and depth rule: what it multiplies; `tests/distributed/test_scaling_rule.py` trains by it."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch.utils.data import Dataset

import workbench as wb
from benchmarks.coordinate_check import CHANGE, HIDDEN, READ_OUT, STREAM, WIDTHS, Sizes, coordinate_check, draw, drift
from workbench import models
from workbench.base.errors import InvalidExperiment
from workbench.base.validation import factor_of
from workbench.capture.blocks.hidden_matrices import hidden_matrices
from workbench.models import Model, Scaling, scaling

SMALL = {"vocab_size": 90, "max_positions": 24, "dropout": 0.0, "initializer_range": 0.1}
BERT = {**SMALL, "layout": "pre_ln", "next_sentence": False}
PAIRS = {
    "bert": (models.bert(32, 2, 4, **BERT), models.bert(64, 6, 8, **BERT)),
    "bert with next sentences": (
        models.bert(32, 2, 4, **SMALL, layout="pre_ln"),
        models.bert(64, 6, 8, **SMALL, layout="pre_ln"),
    ),
    "gpt2": (models.gpt2(32, 2, 4, **SMALL), models.gpt2(64, 6, 8, **SMALL)),
    "opt": (models.opt(32, 2, 4, **SMALL), models.opt(64, 6, 8, **SMALL)),
}
RESIDUAL_OUTPUTS = (".output.dense", ".c_proj", ".out_proj", ".fc2")
OUTPUT_WEIGHTS = ("attention.output.dense.weight", "attn.c_proj.weight")


def built(model: Model) -> torch.nn.Module:
    torch.manual_seed(0)
    return model.build()


@pytest.mark.parametrize("family", PAIRS)
def test_every_pattern_of_the_rule_names_parameters_and_matrices_alone_learn_more_slowly(family):
    base, target = PAIRS[family]
    rule = scaling(base, target)
    module = built(rule.model)  # It refuses a pattern of initial_scale that matches nothing.
    rates = rule.optimizer["rate_scale"]
    assert all(set(factors) == set(rule.model.initial_scale) for factors in rule.optimizer.values())
    for name, parameter in module.named_parameters():
        rate = factor_of(name, rates)
        is_hidden = parameter.ndim == 2 and "embed" not in name and ".w" not in name.replace(".weight", "")
        if is_hidden:
            assert rate == pytest.approx(1 / 6 if any(f"{o}." in name for o in RESIDUAL_OUTPUTS) else 1 / 2), name
        elif parameter.ndim == 2:
            assert rate == 1, name
        else:
            assert rate in (1, 1 / 2, 1 / 3), name


def test_hidden_matrices_start_narrower_and_embeddings_as_in_the_base_model():
    rule = scaling(models.bert(32, 2, 4, **BERT), models.bert(128, 4, 16, **BERT | {"initializer_range": 0.02}))
    module = built(rule.model)
    layer = module.bert.encoder.layer[0]
    deviations = {
        "embedding": (module.bert.embeddings.word_embeddings.weight, 0.1),
        "query": (layer.attention.self.query.weight, 0.1 / 2),
        "output": (layer.output.dense.weight, 0.1 / 2 / 2),
    }
    for name, (weight, expected) in deviations.items():
        assert weight.std().item() == pytest.approx(expected, rel=0.05), name
    assert module.cls.predictions.transform.LayerNorm.weight.unique().tolist() == [0.25]


def test_without_the_depth_rule_a_deeper_model_of_the_same_width_keeps_every_factor():
    base, deeper = models.bert(32, 2, 4, **BERT), models.bert(32, 6, 4, **BERT)
    rule = scaling(base, deeper, depth_rule=False)
    assert all(set(factors.values()) == {1.0} for factors in (rule.model.initial_scale, *rule.optimizer.values()))
    assert min(scaling(base, deeper).optimizer["rate_scale"].values()) == pytest.approx(1 / 3)


def test_a_model_scaled_to_its_own_size_is_the_model():
    base = models.bert(32, 2, 4, **BERT)
    rule = scaling(base, base)
    assert all(set(factors.values()) == {1.0} for factors in (rule.model.initial_scale, *rule.optimizer.values()))
    plain, scaled = built(base).state_dict(), built(rule.model).state_dict()
    assert all(torch.equal(plain[name], scaled[name]) for name in plain)


def test_initial_scales_of_the_base_model_are_kept():
    own = {"*.output.dense.weight": 0.5}
    base, target = models.bert(32, 2, 4, **BERT, initial_scale=own), models.bert(64, 2, 8, **BERT)
    rule = scaling(base, target)
    plain = scaling(dataclasses.replace(base, initial_scale=None), target)
    for name in ("bert.encoder.layer.0.attention.output.dense.weight", "bert.encoder.layer.1.output.dense.weight"):
        halved = factor_of(name, rule.model.initial_scale)
        assert halved == pytest.approx(factor_of(name, plain.model.initial_scale) / 2)
    assert rule.optimizer == plain.optimizer
    assert not rule.notes, "of equal depth nothing is to be told"
    apart = dataclasses.replace(base, initial_scale={"*query.weight": 0.5})
    with pytest.raises(InvalidExperiment, match=r"gives the parameters '\*\.layer\.\*' different factors \(0.5, 1\)"):
        scaling(apart, target)


@pytest.mark.parametrize("depth_rule", [True, False])
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_smaller_residual_outputs_of_the_base_are_kept_as_they_are_and_the_rule_says_so(family, depth_rule):
    """GPT-2 starts its outputs at 1/sqrt(2 L) of its own depth by itself, BERT by an `initial_scale` of its base."""
    small = {"*.output.dense.weight": 1 / 2} if family == "bert" else None
    base, target = dataclasses.replace(PAIRS[family][0], initial_scale=small), PAIRS[family][1]
    rule = scaling(base, target, depth_rule=depth_rule)
    output = next(p for n, p in built(rule.model).named_parameters() if n.endswith(OUTPUT_WEIGHTS))
    assert output.std().item() == pytest.approx(0.1 / 2**0.5 / 2 / (3 if depth_rule else 1), rel=0.05)
    (note,) = rule.notes
    assert note in repr(rule)
    assert f"{base.name} starts its residual outputs at 0.5 of the other matrices" in note
    assert ("multiplies its residual branches by 0.3333" in note) == depth_rule
    assert "Do not divide by sqrt(2 L) of its 6 layers too" in note
    assert not scaling(*PAIRS["opt"]).notes


def test_the_factors_of_the_rule_are_refused_for_optimisers_without_a_rule():
    rule = scaling(*PAIRS["bert"])
    for other in ("sgd", "lamb", "muon", lambda groups: torch.optim.RAdam(groups)):
        with pytest.raises(InvalidExperiment, match=r"decay_scale, eps_scale, grad_norm_scale can be given for adamw"):
            wb.Optimizer(other, **rule.optimizer)
    assert wb.Optimizer("sgd", rate_scale=rule.optimizer["rate_scale"]).rate_scale
    with pytest.raises(InvalidExperiment, match="algorithm='lamb' has no rule: one is known for 'adamw' and 'muon'"):
        scaling(*PAIRS["bert"], algorithm="lamb")


@pytest.mark.parametrize("family", PAIRS)
def test_under_muon_hidden_matrices_start_narrower_and_learn_as_in_the_base_model(family):
    base, target = PAIRS[family]
    rule, of_adamw = scaling(base, target, algorithm="muon"), scaling(base, target, depth_rule=False)
    chosen = wb.Optimizer("muon", **rule.optimizer)
    assert chosen.muon_scale == "spectral"
    experiment = wb.Experiment(model=rule.model, data=wb.data.corpus("demo", vocab_size=90), seq_len=16)
    matrices = hidden_matrices(wb.planning.graph(experiment))
    assert rule.model == of_adamw.model, "initial values do not depend on the optimiser"
    for name, _ in built(rule.model).named_parameters():
        factors = [factor_of(name, rule.optimizer[field]) for field in ("rate_scale", "decay_scale")]
        if name in matrices:
            assert factors == [1.0, 1.0], name
        else:
            expected = [factor_of(name, of_adamw.optimizer[field]) for field in ("rate_scale", "decay_scale")]
            assert factors == expected, name
    outputs = [
        r for r in scaling(base, target, algorithm="muon", depth_rule=True).rules if r.role.startswith("output of")
    ]
    assert outputs
    assert {(r.multiplier, r.rate, r.decay) for r in outputs} == {(1 / 3, 1 / 3, 3.0)}


def test_pairs_that_differ_in_more_than_size_are_refused_with_a_way_out():
    base = models.bert(32, 2, 4, **BERT)
    with pytest.raises(InvalidExperiment, match=r"num_heads=8 and hidden_size=64"):
        scaling(base, models.bert(64, 2, 4, **BERT))
    with pytest.raises(InvalidExperiment, match=r"the family 'bert' and .* 'gpt2'"):
        scaling(base, models.gpt2(32, 2, 4))
    published = BERT | {"layout": "post_ln"}
    with pytest.raises(InvalidExperiment, match=r"the layout 'pre_ln' and .* 'post_ln'"):
        scaling(base, models.bert(32, 2, 4, **published))
    with pytest.raises(InvalidExperiment, match=r"has 2 layers and .* 4"):
        scaling(models.bert(32, 2, 4, **published), models.bert(32, 4, 4, **published))
    with pytest.raises(InvalidExperiment, match=r"wb\.models\.bert, gpt2 and opt"):
        scaling(base, models.as_model(lambda: None))


def test_initial_scales_are_checked_and_survive_json():
    model = models.gpt2(32, 2, 4, initial_scale={"*.c_proj.weight": 0.1})
    assert models.from_json(json.loads(json.dumps(model.to_json()))) == model
    for wrong in ({"*": -1.0}, {"*": float("nan")}, {1: 1.0}, [1.0], {"*": True}):
        with pytest.raises(InvalidExperiment, match="initial_scale="):
            models.gpt2(32, 2, 4, initial_scale=wrong)
    with pytest.raises(InvalidExperiment, match=r"'\*c_porj\*', which matches none of the 28 parameters of gpt2-2x32"):
        models.gpt2(32, 2, 4, initial_scale={"*c_porj*": 1.0}).build()


def test_the_table_of_a_rule_shows_every_factor():
    rule = scaling(*PAIRS["bert"])
    assert isinstance(rule, Scaling)
    assert "2 times as wide, 3 times as deep" in repr(rule)
    assert len(repr(rule).splitlines()) == 2 + len(rule.rules)
    assert rule._repr_html_().count("<tr>") == 1 + len(rule.rules)


@pytest.fixture(scope="module")
def checks() -> dict[str, tuple[Sizes, Sizes]]:
    """Coordinate checks over four steps: of widths 64, 128 and 256, and of depths 2 to 54 at width 32."""
    ids = torch.randint(90, (64, 12), generator=torch.Generator().manual_seed(0))
    items = [{"input_ids": row, "labels": row} for row in ids]
    experiment = wb.Experiment(
        model=models.bert(64, 2, 8, **BERT), data=items_of(items), seq_len=12, global_batch=8, learning_rate=5e-3
    )
    narrow = models.bert(32, 2, 4, **BERT | {"initializer_range": 0.05})
    return {
        "width": coordinate_check(experiment, "width", WIDTHS),
        "depth": coordinate_check(experiment.replace(model=narrow, learning_rate=1e-3), "depth", (2, 6, 18, 54)),
    }


def items_of(items: list[dict[str, torch.Tensor]]) -> Dataset[dict[str, torch.Tensor]]:
    class Items(Dataset[dict[str, torch.Tensor]]):
        def __len__(self) -> int:
            return len(items)

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return items[index]

    return Items()


def test_with_the_rule_activations_do_not_drift_with_the_width_and_without_it_they_do(checks):
    with_rule, without = checks["width"]
    for step in range(5):
        assert abs(drift(with_rule, HIDDEN, step)) < 0.1, step
        assert drift(without, HIDDEN, step) > 0.4, step
    for step in range(1, 5):
        assert abs(drift(with_rule, CHANGE.format(HIDDEN), step)) < 0.1, step
        assert drift(without, CHANGE.format(HIDDEN), step) > 0.4, step
    assert drift(with_rule, READ_OUT) < 0.2
    assert drift(without, READ_OUT) > 0.4


def test_with_the_rule_the_residual_stream_and_its_change_do_not_grow_with_the_depth_and_without_it_they_do(checks):
    """Fresh branches of 1/m add up to 1/sqrt(m), and fade beside the embeddings; what is learned stays level."""
    with_rule, without = checks["depth"]
    for step in range(5):
        assert -0.25 < drift(with_rule, STREAM, step) < 0.05, step
        assert drift(without, STREAM, step) > 0.45, step
    for step in range(1, 5):
        assert abs(drift(with_rule, CHANGE.format(STREAM), step)) < 0.2, step
        assert drift(without, CHANGE.format(STREAM), step) > 0.75, step


@pytest.mark.parametrize(
    ("axis", "values", "part"), [("width", [64, 128, 256], HIDDEN), ("depth", [2, 6, 18, 54], STREAM)]
)
def test_the_coordinate_check_draws_a_line_for_each_step_and_says_the_drift(checks, axis, values, part):
    with_rule, without = checks[axis]
    figure = draw(axis, with_rule, without)
    assert len(figure.data) == 2 * (5 + 4 + 5), "nothing has changed before the first step"
    assert list(figure.data[0].x) == values
    titles = [note.text for note in figure.layout.annotations if "drift" in (note.text or "")]
    assert len(titles) == 6
    assert f"{part}, drift {drift(without, part):+.2f}" in titles[1]
    assert f"change of the {part}, drift {drift(with_rule, CHANGE.format(part)):+.2f}" in titles[2]
