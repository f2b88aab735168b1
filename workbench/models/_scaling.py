"""The width and depth rule: initial weights and learning rates of a large model from those tuned on a small one."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.errors import InvalidExperiment
from workbench.models._named import Model
from workbench.tables import html_table, text_table
from workbench.validation import factor_of

EMBEDDING, VECTOR, HIDDEN = "embedding", "bias or norm", "hidden matrix"
ATTENTION_OUTPUT, FEED_FORWARD_OUTPUT = "output of attention", "output of feed-forward"
OUTPUT_BIAS, READ_OUT_NORM, READ_OUT = "bias of a residual branch", "norm before the read-out", "read-out"

PATTERNS: Mapping[str, Mapping[str, str]] = {
    "bert": {
        "*embeddings*": EMBEDDING,
        "cls.predictions.transform.LayerNorm.*": READ_OUT_NORM,
        "*.output.dense.bias": OUTPUT_BIAS,
        "*.attention.output.dense.weight": ATTENTION_OUTPUT,
        "*.output.dense.weight": FEED_FORWARD_OUTPUT,
        "*.bias": VECTOR,
        "*.ln.weight": VECTOR,
        "*.LayerNorm.weight": VECTOR,
        "cls.seq_relationship.weight": READ_OUT,
        "*": HIDDEN,
    },
    "gpt2": {
        "transformer.w?e.weight": EMBEDDING,
        "transformer.ln_f.*": READ_OUT_NORM,
        "*.c_proj.bias": OUTPUT_BIAS,
        "*.attn.c_proj.weight": ATTENTION_OUTPUT,
        "*.mlp.c_proj.weight": FEED_FORWARD_OUTPUT,
        "*.bias": VECTOR,
        "*.ln_?.weight": VECTOR,
        "*": HIDDEN,
    },
    "opt": {
        "model.decoder.embed_*": EMBEDDING,
        "model.decoder.final_layer_norm.*": READ_OUT_NORM,
        "*.out_proj.bias": OUTPUT_BIAS,
        "*.fc2.bias": OUTPUT_BIAS,
        "*.out_proj.weight": ATTENTION_OUTPUT,
        "*.fc2.weight": FEED_FORWARD_OUTPUT,
        "*.bias": VECTOR,
        "*layer_norm.weight": VECTOR,
        "*": HIDDEN,
    },
}
"""Role of the parameters of each family by pattern of the name (`fnmatch`); the first pattern that matches counts."""


@dataclass(frozen=True)
class Rule:
    """Factors of the parameters that one pattern names, relative to the base model."""

    pattern: str
    role: str
    initial: float
    """Multiple of the base model's initial values."""
    rate: float
    """Multiple of the base model's learning rate."""


@dataclass(frozen=True, repr=False)
class Scaling:
    """Factors of initial values and learning rates for a model whose recipe was tuned on another width and depth."""

    base: Model
    model: Model
    """The target, with the `initial_scale` that the rule gives; train this one."""
    rules: tuple[Rule, ...]

    @property
    def rate_scale(self) -> dict[str, float]:
        """Return the `rate_scale` of an experiment with `model` and with the learning rate of the base model."""
        return {rule.pattern: rule.rate for rule in self.rules}

    def __repr__(self) -> str:
        return f"{self._title()}\n{text_table(self._cells())}"

    def _repr_html_(self) -> str:
        head, *body = self._cells()
        return f"<p><b>{html.escape(self._title())}</b></p>{html_table(head, body)}"

    def _title(self) -> str:
        wide, deep = self.model.hidden_size / self.base.hidden_size, self.model.num_layers / self.base.num_layers
        return f"{self.model.name} from {self.base.name}: {wide:.4g} times as wide, {deep:.4g} times as deep"

    def _cells(self) -> list[tuple[str, ...]]:
        head = ("parameters", "role", "initial values ×", "learning rate ×")
        return [head, *((r.pattern, r.role, f"{r.initial:.4g}", f"{r.rate:.4g}") for r in self.rules)]


def scaling(base: Model, target: Model, *, depth_rule: bool = True) -> Scaling:
    """Return how `target` starts and learns with the recipe that was tuned on the smaller `base`.

    With w the ratio of the widths and m that of the depths: hidden matrices start 1/sqrt(w) and learn 1/w times as
    fast (μP for Adam, arXiv:2203.03466, table 8), the logits are multiplied by 1/w, and the residual branches by 1/m
    (CompleteP, arXiv:2505.01618, table 1). The multipliers are folded into the initial values and rates of the last
    parameter before them: under Adam c·f(θ) trains as f(θ') with θ' and its rate c times as large (arXiv:2203.03466,
    lemma J.1). So the model stays as it is, and `rate_scale` and `initial_scale` say everything. With
    `depth_rule=False` m is 1: only the widths count.

    The target's `initializer_range` becomes that of the base. Raises `InvalidExperiment` for models of two families,
    layouts or head sizes, for other depths of a post-LayerNorm BERT, and for models that are no `wb.models.…`.
    """
    _check_pair(base, target, depth_rule)
    started = dataclasses.replace(target, initializer_range=base.initializer_range, initial_scale=None)
    rules = tuple(
        Rule(pattern, role, *_factors(role, base, target, depth_rule))
        for pattern, role in PATTERNS[target.family].items()
        if _occurs(pattern, target)
    )
    own = _own_factors(base, [rule.pattern for rule in rules])
    initial = {rule.pattern: rule.initial * own[rule.pattern] for rule in rules}
    return Scaling(base, dataclasses.replace(started, initial_scale=initial), rules)


def at_width(model: Model, width: int) -> Model:
    """Return the model at another hidden size, with heads of the same size and a feed-forward in proportion.

    Raises `InvalidExperiment` if the width is not a multiple of the head size, or if the model is no `wb.models.…`.
    """
    _check_models(model)
    head = model.hidden_size // model.num_heads
    if width < head or width % head:
        raise InvalidExperiment(
            f"A width of {width} does not divide into heads of {head} dims, which {model.name} has. Give a multiple "
            f"of {head}, such as {head * max(1, round(width / head))}.",
            width=width,
            head=head,
        )
    return dataclasses.replace(
        model,
        name=f"{model.family}-{model.num_layers}x{width}",
        hidden_size=width,
        num_heads=width // head,
        intermediate_size=max(1, model.intermediate_size * width // model.hidden_size),
    )


def _factors(role: str, base: Model, target: Model, depth_rule: bool) -> tuple[float, float]:
    """Return the factors of the initial values and of the learning rate of the parameters of one role."""
    width, deeper = target.hidden_size / base.hidden_size, target.num_layers / base.num_layers
    inner = target.intermediate_size / base.intermediate_size
    depth = deeper if depth_rule else 1.0
    # GPT-2 itself starts its outputs at 1/sqrt(2 L) of the others (transformers does); this undoes what that adds.
    published = math.sqrt(deeper) if target.family == "gpt2" else 1.0
    return {
        EMBEDDING: (1.0, 1.0),
        VECTOR: (1.0, 1.0),
        HIDDEN: (width**-0.5, 1 / width),
        ATTENTION_OUTPUT: (published * width**-0.5 / depth, 1 / (width * depth)),
        FEED_FORWARD_OUTPUT: (published * inner**-0.5 / depth, 1 / (inner * depth)),
        OUTPUT_BIAS: (1 / depth, 1 / depth),
        READ_OUT_NORM: (1 / width, 1 / width),
        READ_OUT: (1 / width, 1 / width),
    }[role]


def _occurs(pattern: str, model: Model) -> bool:
    """Return True if a model has parameters of this pattern of its family."""
    if pattern == "cls.seq_relationship.weight":
        return model.next_sentence
    return not (model.family == "bert" and pattern == f"*.{'ln' if model.layout == 'post_ln' else 'LayerNorm'}.weight")


def _own_factors(base: Model, patterns: list[str]) -> dict[str, float]:
    """Return the base model's own initial factor of each pattern; raise `InvalidExperiment` if it has several."""
    if base.initial_scale is None:
        return dict.fromkeys(patterns, 1.0)
    import torch

    with torch.device("meta"):
        names = [name for name, _ in dataclasses.replace(base, initial_scale=None).build().named_parameters()]
    found: dict[str, set[float]] = {pattern: set() for pattern in patterns}
    numbered = {pattern: float(index) for index, pattern in enumerate(patterns)}
    for name in names:
        found[patterns[int(factor_of(name, numbered))]].add(factor_of(name, base.initial_scale))
    for pattern, factors in found.items():
        if len(factors) > 1:
            raise InvalidExperiment(
                f"initial_scale of {base.name} gives the parameters {pattern!r} different factors "
                f"({', '.join(f'{factor:.4g}' for factor in sorted(factors))}), and the rule has one for all of them. "
                f"Use the patterns of the rule: {', '.join(patterns)}.",
                pattern=pattern,
            )
    return {pattern: factors.pop() if factors else 1.0 for pattern, factors in found.items()}


def _check_models(*models: Any) -> None:
    for model in models:
        if not isinstance(model, Model):
            raise InvalidExperiment(
                f"The rule knows the roles of the parameters of wb.models.bert, gpt2 and opt, and not those of "
                f"{getattr(model, 'name', type(model).__name__)}. Give such models, or write rate_scale yourself.",
                model=str(getattr(model, "name", model)),
            )


def _check_pair(base: Model, target: Model, depth_rule: bool) -> None:
    _check_models(base, target)
    if not isinstance(depth_rule, bool):
        raise InvalidExperiment(f"depth_rule={depth_rule!r} is neither True nor False. Give one of them.")
    for field in ("family", "layout"):
        ours, theirs = getattr(base, field), getattr(target, field)
        if ours != theirs:
            raise InvalidExperiment(
                f"{base.name} has the {field} {ours!r} and {target.name} {theirs!r}; a recipe carries over between "
                f"models that differ in width and depth alone. Give both the same {field}.",
                base=ours,
                target=theirs,
            )
    head = base.hidden_size // base.num_heads
    if target.hidden_size != head * target.num_heads:
        raise InvalidExperiment(
            f"The heads of {base.name} have {head} dims and those of {target.name} "
            f"{target.hidden_size // target.num_heads}. The rule keeps the head size, so that attention scores stay "
            f"as they are: give {target.name} a hidden_size that is num_heads times {head}, such as "
            f"num_heads={max(1, round(target.hidden_size / head))} and "
            f"hidden_size={head * max(1, round(target.hidden_size / head))}.",
            base=head,
            target=target.hidden_size // target.num_heads,
        )
    if depth_rule and target.family == "bert" and target.layout == "post_ln" and base.num_layers != target.num_layers:
        raise InvalidExperiment(
            f"{base.name} has {base.num_layers} layers and {target.name} {target.num_layers}, and the depth rule "
            'holds for models that normalise before each sub-layer. Give both layout="pre_ln", the same depth, or '
            "depth_rule=False.",
            base=base.num_layers,
            target=target.num_layers,
        )
