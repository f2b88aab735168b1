"""The facts on which a loss depends, and whether the losses of several runs may be compared.

A loss is a mean over labels. Its value depends on the vocabulary among which a label is chosen, on how much of the
context is hidden, on how long the context is, and on the samples themselves. Where two runs differ in one of these,
the lower loss says nothing about the better model.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from workbench.record.rundir import RunDir, read_json, read_record

MASKED_SHARE = 0.15
"""Masked share of data whose description does not say it, and of held-out samples by default (arXiv:1810.04805)."""
SHOWN_VALUES = 3
"""Largest number of different values of one fact in a sentence."""
SHOWN_FACTS = 4
"""Largest number of facts in a sentence."""
Facts = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class LossBasis:
    """Facts on which the losses of one run depend, each as (what, value) in words."""

    training: Facts
    held_out: Facts
    training_masked: float | None = None
    """Share of the positions of a training sample that a masked model predicts; None for other objectives."""
    held_out_masked: float | None = None
    held_out_samples: str | None = None
    """Fingerprint of the held-out samples; None where it was not recorded."""

    def of(self, held_out: bool) -> Facts:
        """Return the facts of the held-out loss or of the training loss."""
        return self.held_out if held_out else self.training

    @property
    def held_out_in_words(self) -> str | None:
        """Return what makes a held-out loss lower or higher than the training loss of the same model; None if nothing.

        Fewer masks leave more context, and dropout is training's alone.
        """
        words = []
        if self.held_out_masked is not None and self.training_masked not in (None, self.held_out_masked):
            easier = "easier" if self.held_out_masked < self.training_masked else "harder"
            shares = (f"{100 * share:.3g} %" for share in (self.held_out_masked, self.training_masked))
            words.append("masked at {} where training masks {}, which is {}".format(*shares, easier))
        if dict(self.training).get("dropout", "0") != "0":
            words.append("without dropout")
        return ", ".join(words) or None


def loss_basis(experiment: Mapping[str, Any], coupled: bool = False) -> LossBasis:
    """Return the facts on which the losses of a run depend, from the JSON of its experiment.

    `coupled` says that its loss compares the samples of a batch, so that the size of the batch decides it as well.
    """
    model, data = _part(experiment, "model"), _part(experiment, "data")
    evaluation = _part(experiment, "evaluation")
    mixed = data
    if data.get("type") == "mixture":  # whose sources have one tokeniser and one objective
        data = {**data["parts"][0], "masked_share": _mixed_masked_share(data)}
    is_text = "vocab_size" in data
    objective = data.get("objective") or _objective(model)
    masked = is_text and objective in ("mlm", "mlm_nsp", "seq2seq")
    training_masked = float(data.get("masked_share") or MASKED_SHARE) if masked else None
    held_out_masked = float(evaluation.get("masked_share") or MASKED_SHARE) if masked else None
    if objective == "seq2seq":  # whose held-out samples have the shapes of training
        held_out_masked = training_masked
    first = {"loss function": _loss_function(experiment, objective)}
    rest = {"sequence length": str(experiment.get("seq_len"))}
    rest |= {"samples of one loss": str(experiment.get("global_batch"))} if coupled else {}
    if is_text:
        first["vocabulary"] = f"{data['vocab_size']:,} tokens"
        given = data.get("tokenizer") or data.get("tokenizer_file")
        accents = " without accents" if data.get("strip_accents") else ""
        rest["text of the tokeniser"] = str(given or _source(data)) + accents
        rest |= {"masks": "whole words"} if data.get("whole_words") else {}
    training = {**first, **_masking(training_masked), **rest, "data": _source(mixed)}
    if (dropout := model.get("dropout")) is not None:
        training["dropout"] = f"{dropout:g}"
    held_out = {**first, **_masking(held_out_masked), **rest, "held-out set": _held_out_set(mixed, evaluation)}
    return LossBasis(tuple(training.items()), tuple(held_out.items()), training_masked, held_out_masked)


def read_loss_basis(run: RunDir) -> LossBasis | None:
    """Return the facts on which the losses of a run depend; None if its files do not tell.

    Whether its loss compares the samples of a batch stands in its plan.
    """
    try:
        coupled = run.plan.exists() and bool(read_json(run.plan).get("coupled"))
        samples = read_record(run.environment).get("held_out_fingerprint") if run.environment.exists() else None
        return replace(loss_basis(read_record(run.experiment), coupled), held_out_samples=samples)
    except (AttributeError, ArithmeticError, LookupError, OSError, TypeError, ValueError):  # files that say anything
        return None


def why_not_compared(bases: Iterable[LossBasis | None], held_out: bool | Sequence[bool]) -> str | None:
    """Return why the losses of some runs do not compare, as one sentence; None if they do.

    Args:
        bases: the facts on which the losses depend; a run of which they are unknown is left out.
        held_out: whether the held-out losses are compared, for all runs or for each.
    """
    bases = list(bases)
    each = [held_out] * len(bases) if isinstance(held_out, bool) else list(held_out)
    known = [(basis, is_held_out) for basis, is_held_out in zip(bases, each, strict=True) if basis is not None]
    if len({is_held_out for _, is_held_out in known}) > 1:
        return "These losses do not compare: some are held-out losses and some are training losses."
    facts = [dict(basis.of(is_held_out)) for basis, is_held_out in known]
    differing = []
    for what in dict.fromkeys(what for fact in facts for what in fact):
        values = list(dict.fromkeys(fact.get(what, "none") for fact in facts))
        if len(values) > 1:
            differing.append(f"{what} ({_listed(values)})")
    samples = {basis.held_out_samples for basis, is_held_out in known if is_held_out} - {None}
    if not differing and len(samples) > 1:
        return (
            "These losses do not compare: the held-out samples are not the same, although they are described alike. "
            "The data were changed between the runs: evaluate both on the same, run.evaluate(data)."
        )
    if not differing:
        return None
    if len(differing) > SHOWN_FACTS:
        differing[SHOWN_FACTS - 1 :] = [f"{len(differing) - SHOWN_FACTS + 1} other things"]
    *first, last = differing
    return f"These losses do not compare: the runs differ in {', '.join(first) + ' and ' * bool(first)}{last}."


def _listed(values: Sequence[str]) -> str:
    shown = list(values[:SHOWN_VALUES])
    if len(values) > SHOWN_VALUES:
        return f"{', '.join(shown)}, and {len(values) - SHOWN_VALUES} more"
    return f"{', '.join(shown[:-1])} and {shown[-1]}"


def _part(experiment: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = experiment.get(name)
    return value if isinstance(value, Mapping) else {}


def _objective(model: Mapping[str, Any]) -> str | None:
    """Return the objective of a named model, as `workbench.models.Model.objective` does; None for a user's."""
    family = model.get("family")
    if family is None:
        return str(model["task"]) if model.get("type") == "pretrained" else None
    return "clm" if family != "bert" else "mlm_nsp" if model.get("next_sentence") else "mlm"


OBJECTIVES = {
    "clm": "next token",
    "mlm": "masked tokens",
    "mlm_nsp": "masked tokens and next sentence",
    "seq2seq": "hidden spans",
    "classification": "class of a text",
}


def _loss_function(experiment: Mapping[str, Any], objective: str | None) -> str:
    loss = experiment.get("loss")
    words = OBJECTIVES.get(str(objective), "the model's own")
    if isinstance(loss, Mapping):  # a user's function
        return f"{words}, {loss.get('name')}"
    return words if loss is None else f"{words}, {loss} of the outputs"


def _masking(share: float | None) -> dict[str, str]:
    return {} if share is None else {"masked share": f"{100 * share:.3g} %"}


def _mixed_masked_share(mixture: Mapping[str, Any]) -> float:
    """Return the mean masked share of a mixture, by its first weights."""
    shares = [float(part.get("masked_share") or MASKED_SHARE) for part in mixture["parts"]]
    return float(sum(map(operator.mul, mixture["weights"], shares)) / sum(mixture["weights"]))


def _mixed(mixture: Mapping[str, Any], weights: Sequence[float]) -> str:
    """Return the sources of a mixture with their shares, which do not depend on the order in which they are given."""
    total = sum(weights)
    named = sorted(zip(map(_source, mixture["parts"]), weights, strict=True))
    return " + ".join(f"{100 * weight / total:.4g} % {source}" for source, weight in named if weight)


def _source(data: Mapping[str, Any]) -> str:
    """Return what tells the samples of two sources apart, whatever their order and their masks."""
    if data.get("type") == "mixture":
        later = [f", from step {step:,} on {_mixed(data, weights)}" for step, weights in data["changes"]]
        return _mixed(data, data["weights"]) + "".join(later)
    ignored = {"type", "vocab_size", "objective", "masked_share", "tokenizer", "tokenizer_file", "whole_words"}
    ignored |= {"strip_accents", "streaming", "shuffle_buffer"}
    parts = [str(value) for name, value in data.items() if name not in ignored and value is not None]
    return " ".join(parts) or "unknown"


def _held_out_set(data: Mapping[str, Any], evaluation: Mapping[str, Any]) -> str:
    own = evaluation.get("data")
    if isinstance(own, Mapping):  # of a source of the mixture, training reads the rest
        words = f"{'a part of ' if own in data.get('parts', ()) else ''}{_source(own)}"
    elif data.get("type") == "mixture":
        words = f"parts of {_mixed(data, [data['weights'], *(weights for _, weights in data['changes'])][-1])}"
    else:
        words = f"a part of {_source(data)}"
    return f"{evaluation.get('samples')} samples of {words}"
