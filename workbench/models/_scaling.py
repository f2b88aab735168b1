"""The width and depth rule: the initial weights and the optimiser of a large model from those tuned on a small one."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.algorithms import ALGORITHMS, WidthRule
from workbench.base.display import html_table, text_table
from workbench.base.errors import InvalidExperiment
from workbench.base.validation import factor_of
from workbench.models._named import Model

EMBEDDING, LOGITS_BIAS, READ_OUT_NORM, READ_OUT = "embedding", "bias of logits", "norm before the read-out", "read-out"
BLOCK_VECTOR, VECTOR = "bias or norm of a block", "bias or norm outside of the blocks"
BLOCK_MATRIX, MATRIX = "hidden matrix of a block", "hidden matrix outside of the blocks"
ATTENTION_OUTPUT, FEED_FORWARD_OUTPUT = "output of attention", "output of feed-forward"
OUTPUT_BIAS = "bias of a residual branch"
OUTPUTS = (ATTENTION_OUTPUT, FEED_FORWARD_OUTPUT)
MATRICES = (BLOCK_MATRIX, MATRIX, *OUTPUTS)
"""Roles of the hidden matrices, which Muon orthogonalises."""
WITHOUT_DECAY = (LOGITS_BIAS, READ_OUT_NORM, BLOCK_VECTOR, VECTOR, OUTPUT_BIAS)

PATTERNS: Mapping[str, Mapping[str, str]] = {
    "bert": {
        "*embeddings*": EMBEDDING,
        "cls.predictions.transform.LayerNorm.*": READ_OUT_NORM,
        "cls.predictions.bias": LOGITS_BIAS,
        "cls.seq_relationship.bias": LOGITS_BIAS,
        "cls.seq_relationship.weight": READ_OUT,
        "*.output.dense.bias": OUTPUT_BIAS,
        "*.attention.output.dense.weight": ATTENTION_OUTPUT,
        "*.output.dense.weight": FEED_FORWARD_OUTPUT,
        "*.layer.*.bias": BLOCK_VECTOR,
        "*.layer.*.ln.weight": BLOCK_VECTOR,
        "*.layer.*.LayerNorm.weight": BLOCK_VECTOR,
        "*.layer.*": BLOCK_MATRIX,
        "bert.encoder.ln.*": VECTOR,
        "*.bias": VECTOR,
        "*": MATRIX,
    },
    "gpt2": {
        "transformer.w?e.weight": EMBEDDING,
        "transformer.ln_f.*": READ_OUT_NORM,
        "*.c_proj.bias": OUTPUT_BIAS,
        "*.attn.c_proj.weight": ATTENTION_OUTPUT,
        "*.mlp.c_proj.weight": FEED_FORWARD_OUTPUT,
        "*.bias": BLOCK_VECTOR,
        "*.ln_?.weight": BLOCK_VECTOR,
        "*": BLOCK_MATRIX,
    },
    "opt": {
        "model.decoder.embed_*": EMBEDDING,
        "model.decoder.final_layer_norm.*": READ_OUT_NORM,
        "*.out_proj.bias": OUTPUT_BIAS,
        "*.fc2.bias": OUTPUT_BIAS,
        "*.out_proj.weight": ATTENTION_OUTPUT,
        "*.fc2.weight": FEED_FORWARD_OUTPUT,
        "*.bias": BLOCK_VECTOR,
        "*layer_norm.weight": BLOCK_VECTOR,
        "*": BLOCK_MATRIX,
    },
}
"""Role of the parameters of each family by pattern of the name (`fnmatch`); the first pattern that matches counts."""
OF_NEXT_SENTENCES = ("cls.seq_relationship.bias", "cls.seq_relationship.weight")
OF_OTHER_LAYOUT = {"post_ln": ("*.layer.*.ln.weight", "bert.encoder.ln.*"), "pre_ln": ("*.layer.*.LayerNorm.weight",)}


@dataclass(frozen=True)
class Rule:
    """Factors of the parameters that one pattern names, relative to the base model, with a multiplier folded in."""

    pattern: str
    role: str
    multiplier: float
    """Multiple of what the parameter adds to the activations; a model without the rule has 1."""
    initial: float
    """Multiple of the base model's initial values."""
    rate: float
    """Multiple of the base model's learning rate."""
    decay: float
    """Multiple of the weight decay; tensors of one dim have none."""
    eps: float
    """Multiple of AdamW's epsilon."""


@dataclass(frozen=True, repr=False)
class Scaling:
    """Factors of initial values and of the optimiser for a model whose recipe was tuned on another width and depth."""

    base: Model
    model: Model
    """The target, with the `initial_scale` that the rule gives; train this one."""
    rules: tuple[Rule, ...]
    algorithm: str = "adamw"
    """Optimiser that the factors are for: `adamw`, or `muon` with the scale of the spectral norm."""
    notes: tuple[str, ...] = ()
    """Sentences on how the rule and the initial values of the base model were combined."""

    @property
    def optimizer(self) -> dict[str, Any]:
        """Return the values of `wb.Optimizer` for `model` by name; the others are those of the base model.

        Those of Muon have its `muon_scale` among them, without which the rates would be wrong.
        """
        return {
            **(rule.settings if (rule := ALGORITHMS[self.algorithm].widths) else {}),
            "rate_scale": {rule.pattern: rule.rate for rule in self.rules},
            "decay_scale": {rule.pattern: rule.decay for rule in self.rules},
            "eps_scale": {rule.pattern: rule.eps for rule in self.rules},
            "grad_norm_scale": {rule.pattern: rule.multiplier for rule in self.rules},
        }

    def __repr__(self) -> str:
        return "\n".join((self._title(), text_table(self._cells()), *self.notes))

    def _repr_html_(self) -> str:
        head, *body = self._cells()
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        return f"<p><b>{html.escape(self._title())}</b></p>{html_table(head, body)}{notes}"

    def _title(self) -> str:
        wide, deep = self.model.hidden_size / self.base.hidden_size, self.model.num_layers / self.base.num_layers
        return f"{self.model.name} from {self.base.name}: {wide:.4g} times as wide, {deep:.4g} times as deep"

    def _cells(self) -> list[tuple[str, ...]]:
        head = ("parameters", "role", "multiplier", "initial values ×", "rate ×", "decay ×", "eps ×")
        cells: list[tuple[str, ...]] = [head]
        for rule in self.rules:
            decay = "none" if rule.role in WITHOUT_DECAY else f"{rule.decay:.4g}"
            numbers = [f"{number:.4g}" for number in (rule.multiplier, rule.initial, rule.rate)]
            cells.append((rule.pattern, rule.role, *numbers, decay, f"{rule.eps:.4g}"))
        return cells


def scaling(base: Model, target: Model, *, depth_rule: bool | None = None, algorithm: str = "adamw") -> Scaling:
    """Return how `target` starts and learns with the recipe of AdamW or Muon that was tuned on the smaller `base`.

    With w the ratio of the widths and m that of the depths (table 1 of CompleteP, arXiv:2505.01618, at α = 1): hidden
    matrices start 1/sqrt(w) times as large, learn 1/w times as fast and decay w times as much; residual branches are
    multiplied by 1/m and the logits by 1/w; and AdamW's epsilon is divided by w, and by w m in the blocks. With
    `depth_rule=False` m is 1: only the widths count (μP, arXiv:2203.03466, table 8). `None` is True for AdamW.

    With `algorithm="muon"` hidden matrices start 1/sqrt(w) times as large, and learn and decay as those of the base:
    updates of one spectral norm, up to the ratio of outputs to inputs, change activations by as much at every width
    (arXiv:2310.17813). AdamW's part of the rule is the same for all other parameters. `depth_rule=None` is False.

    The multipliers are folded into the last parameters before them, with everything that makes the two identical under
    AdamW (`_folded`). So the model stays as it is, and its `initial_scale` and `Scaling.optimizer` say everything.

    Smaller initial values that the base model gives its residual outputs, such as GPT-2's 1/sqrt(2 L) of its own depth,
    are constants of the recipe as all others are: the target has the same, and a note says what that comes to.

    The target's `initializer_range` becomes that of the base. Raises `InvalidExperiment` for models of two families,
    layouts or head sizes, for other depths of a post-LayerNorm BERT, and for models that are no `wb.models.…`.
    """
    known = {name: record.widths for name, record in ALGORITHMS.items() if record.widths is not None}
    if algorithm not in list(known):  # which a value that has no hash is not, either
        raise InvalidExperiment(
            f"algorithm={algorithm!r} has no rule: one is known for {' and '.join(map(repr, known))}. Give one of "
            "them, or write rate_scale yourself."
        )
    widths = known[algorithm]
    depth_rule = widths.counts_depth if depth_rule is None else depth_rule
    _check_pair(base, target, depth_rule)
    absent = () if target.family != "bert" else OF_OTHER_LAYOUT[target.layout]
    absent = absent if target.next_sentence else (*absent, *OF_NEXT_SENTENCES)
    patterns = {pattern: role for pattern, role in PATTERNS[target.family].items() if pattern not in absent}
    rules = tuple(
        _folded(pattern, role, base, target, depth_rule, known[algorithm]) for pattern, role in patterns.items()
    )
    own = _own_factors(base, list(patterns))
    initial: dict[str, float] = {}
    notes: dict[str, None] = {}
    for rule in rules:
        factor = own[rule.pattern]
        if rule.role in OUTPUTS:
            factor *= _published(base)
            if factor != 1 and target.num_layers != base.num_layers:
                branches = f", and multiplies its residual branches by {rule.multiplier:.4g}"
                branches = branches if rule.multiplier != 1 else ""
                note = (
                    f"{base.name} starts its residual outputs at {factor:.4g} of the other matrices, and so does "
                    f"{target.name}: the rule keeps what the base has{branches}. Do not divide by sqrt(2 L) "
                    f"of its {target.num_layers} layers too."
                )
                notes[note] = None
            factor /= _published(target)
        initial[rule.pattern] = rule.initial * factor
    started = dataclasses.replace(target, initializer_range=base.initializer_range, initial_scale=initial)
    return Scaling(base, started, rules, algorithm, tuple(notes))


def _folded(pattern: str, role: str, base: Model, target: Model, depth_rule: bool, rule: WidthRule) -> Rule:
    """Return the factors of the parameters of one role, with their multiplier c folded in.

    c W and W' = c W are the same function, and the gradient of W is c times that of W'. AdamW moves W by
    rate · g / (|g| + eps) + rate · decay · W, so that W' moves as c W does if its rate is c times that of W, its
    epsilon 1/c and its decay 1/c times that of W; and its gradient counts c times in the global norm. So it is with
    Muon's update, rate · U Vᵀ + rate · decay · W, which does not depend on the size of the gradient either.
    """
    width = target.hidden_size / base.hidden_size
    inner = target.intermediate_size / base.intermediate_size
    depth = target.num_layers / base.num_layers if depth_rule else 1.0
    # The epsilon falls as the gradients do: with the width, and in the blocks with the depth too. The published code
    # (EleutherAI/nanoGPT-mup) divides that of all parameters by both.
    multiplier, initial, rate, decay, eps = {
        EMBEDDING: (1.0, 1.0, 1.0, 1.0, 1 / width),
        LOGITS_BIAS: (1.0, 1.0, 1.0, 1.0, 1.0),
        VECTOR: (1.0, 1.0, 1.0, 1.0, 1 / width),
        BLOCK_VECTOR: (1.0, 1.0, 1.0, 1.0, 1 / (width * depth)),
        MATRIX: (1.0, width**-0.5, 1 / width, width, 1 / width),
        BLOCK_MATRIX: (1.0, width**-0.5, 1 / width, width, 1 / (width * depth)),
        ATTENTION_OUTPUT: (1 / depth, width**-0.5, 1 / width, width, 1 / (width * depth)),
        FEED_FORWARD_OUTPUT: (1 / depth, inner**-0.5, 1 / inner, inner, 1 / (width * depth)),
        OUTPUT_BIAS: (1 / depth, 1.0, 1.0, 1.0, 1 / (width * depth)),
        READ_OUT_NORM: (1 / width, 1.0, 1.0, 1.0, 1 / width),
        READ_OUT: (1 / width, 1.0, 1.0, 1.0, 1 / width),
    }[role]
    if rule.matrices_as_base and role in MATRICES:
        rate, decay, eps = 1.0, 1.0, 1.0
    return Rule(
        pattern, role, multiplier, initial * multiplier, rate * multiplier, decay / multiplier, eps / multiplier
    )


def _published(model: Model) -> float:
    """Return the factor of the residual outputs that a family starts with by itself: 1/sqrt(2 L) in GPT-2."""
    return (2 * model.num_layers) ** -0.5 if model.family == "gpt2" else 1.0


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
                f"Use the patterns of the rule: {', '.join(patterns)}."
            )
    return {pattern: factors.pop() if factors else 1.0 for pattern, factors in found.items()}


def _check_pair(base: Model, target: Model, depth_rule: bool) -> None:
    for model in (base, target):
        if not isinstance(model, Model):
            raise InvalidExperiment(
                f"The rule knows the roles of the parameters of wb.models.bert, gpt2 and opt, and not those of "
                f"{getattr(model, 'name', type(model).__name__)}. Give such models, or write rate_scale yourself."
            )
    if not isinstance(depth_rule, bool):
        raise InvalidExperiment(f"depth_rule={depth_rule!r} is neither True nor False. Give one of them.")
    for field in ("family", "layout"):
        ours, theirs = getattr(base, field), getattr(target, field)
        if ours != theirs:
            raise InvalidExperiment(
                f"{base.name} has the {field} {ours!r} and {target.name} {theirs!r}; a recipe carries over between "
                f"models that differ in width and depth alone. Give both the same {field}."
            )
    head = base.hidden_size // base.num_heads
    if target.hidden_size != head * target.num_heads:
        raise InvalidExperiment(
            f"The heads of {base.name} have {head} dims and those of {target.name} "
            f"{target.hidden_size // target.num_heads}. The rule keeps the head size, so that attention scores stay "
            f"as they are: give {target.name} a hidden_size that is num_heads times {head}, such as "
            f"num_heads={max(1, round(target.hidden_size / head))} and "
            f"hidden_size={head * max(1, round(target.hidden_size / head))}."
        )
    if depth_rule and target.family == "bert" and target.layout == "post_ln" and base.num_layers != target.num_layers:
        raise InvalidExperiment(
            f"{base.name} has {base.num_layers} layers and {target.name} {target.num_layers}, and the depth rule "
            'holds for models that normalise before each sub-layer. Give both layout="pre_ln", the same depth, or '
            "depth_rule=False."
        )
