"""`Model`: one configuration of a `transformers` architecture, as a value. The only importer of `transformers`."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, cast

from workbench.errors import InvalidExperiment, suggestion
from workbench.units import is_count

if TYPE_CHECKING:
    from torch import nn

LAYOUTS = ("post_ln", "pre_ln")
SIZES = ("hidden_size", "num_layers", "num_heads", "intermediate_size", "vocab_size", "max_positions")
LARGEST_SIZE, LARGEST_SIZES = 2**24, {"num_layers": 10_000}
"""Largest sizes of a model; a larger one would only keep the planner busy."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A transformer of a known family (`bert`, `gpt2`, `opt`) at one size.

    Raises `InvalidExperiment` for sizes that cannot make a model.
    """

    name: str
    family: str
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    vocab_size: int
    """Rows of the embedding; the token ids of the data must be smaller."""
    max_positions: int
    dropout: float
    layout: str = "pre_ln"
    """Position of the normalisation: `post_ln` after each residual sum, `pre_ln` before each sub-layer."""
    next_sentence: bool = False
    """True for a BERT that is also trained to tell true continuations from random ones."""
    initializer_range: float = 0.02
    """Standard deviation of the initial weights."""
    initial_scale: Mapping[str, float] | None = None
    """Multiple of the initial values by pattern of the parameter's name (`fnmatch`); the first pattern that matches
    counts, and a parameter that none matches has 1. `wb.models.scaling` computes it."""
    is_user_defined: ClassVar[bool] = False
    is_loaded: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for field in SIZES:
            value = getattr(self, field)
            most = LARGEST_SIZES.get(field, LARGEST_SIZE)
            if not is_count(value) or value > most:
                raise InvalidExperiment(
                    f"{field}={value!r} must be a whole number from 1 to {most:,}.", parameter=field, value=value
                )
        if not isinstance(self.name, str) or not self.name or not self.name.isprintable():
            raise InvalidExperiment(f"name={self.name!r} is not a name. Give a text of one line.", parameter="name")
        if self.layout not in LAYOUTS:
            raise InvalidExperiment(
                f"layout={self.layout!r} is not a layout of BERT. {suggestion(str(self.layout), LAYOUTS)}",
                layout=self.layout,
            )
        if self.hidden_size % self.num_heads:
            raise InvalidExperiment(
                f"hidden_size={self.hidden_size} is not divisible by num_heads={self.num_heads}. "
                f"Give hidden_size={self.num_heads * max(1, round(self.hidden_size / self.num_heads))}, or "
                f"num_heads={_nearest_divisor(self.hidden_size, self.num_heads)}.",
                hidden_size=self.hidden_size,
                num_heads=self.num_heads,
            )
        dropout: Any = self.dropout
        if isinstance(dropout, bool) or not isinstance(dropout, Real) or not 0 <= cast(float, dropout) < 1:
            raise InvalidExperiment(
                f"dropout={dropout!r} is not a probability below 1. Give 0 to switch dropout off.",
                dropout=dropout,
            )
        deviation: Any = self.initializer_range
        if isinstance(deviation, bool) or not isinstance(deviation, int | float) or not 0 < deviation <= 1000:
            raise InvalidExperiment(
                f"initializer_range={deviation!r} must be a number above 0 and at most 1000. Give 0.02, or about "
                "1/sqrt(hidden_size) for a narrow model.",
                parameter="initializer_range",
                value=deviation,
            )
        if self.initial_scale is not None:
            object.__setattr__(self, "initial_scale", _checked_scales(self.initial_scale))

    @property
    def objective(self) -> str:
        """Training objective (`mlm_nsp`, `mlm` or `clm`), from which data choose the fields of a sample."""
        if self.family != "bert":
            return "clm"
        return "mlm_nsp" if self.next_sentence else "mlm"

    def build(self) -> nn.Module:
        """Return the module in train mode, with fresh weights, on the ambient device.

        Under `with torch.device("meta")` nothing is allocated. Input and output embeddings are one parameter, as in
        `transformers`, whose warnings are silenced: the user can do nothing about them.
        """
        with _quiet():
            module = {"bert": _bert, "gpt2": _gpt2, "opt": _opt}[self.family](self)
        if self.initial_scale is not None:
            _scale_initial_values(module, self.initial_scale, self.name)
        return cast("nn.Module", module.train())

    def to_json(self) -> dict[str, Any]:
        return {"type": "named", **dataclasses.asdict(self)}


def _nearest_divisor(number: int, wanted: int) -> int:
    """Return the divisor of a number that is nearest to `wanted`, the smaller one of two."""
    near = (divisor for distance in range(wanted) for divisor in (wanted - distance, wanted + distance))
    return next(divisor for divisor in near if number % divisor == 0)


def initial_factor(name: str, scales: Mapping[str, float]) -> float:
    """Return the factor of the first pattern (`fnmatch`) that matches a parameter's name, or 1."""
    return next((factor for pattern, factor in scales.items() if fnmatch.fnmatchcase(name, pattern)), 1.0)


def _checked_scales(scales: Any) -> dict[str, float]:
    numbers = isinstance(scales, Mapping) and all(
        isinstance(name, str) and isinstance(factor, int | float) and not isinstance(factor, bool)
        for name, factor in scales.items()
    )
    if not numbers or not all(0 <= factor < math.inf for factor in scales.values()):
        raise InvalidExperiment(
            f"initial_scale={scales!r} does not map patterns of parameter names to finite numbers of at least 0. "
            'Write, for instance, initial_scale={"*.output.dense.weight": 0.2}.',
            parameter="initial_scale",
        )
    return dict(scales)


def _scale_initial_values(module: Any, scales: Mapping[str, float], model: str) -> None:
    """Multiply the initial values; raise `InvalidExperiment` for a pattern that matches no parameter."""
    import torch

    names = [name for name, _ in module.named_parameters()]
    unused = [pattern for pattern in scales if not fnmatch.filter(names, pattern)]
    if unused:
        raise InvalidExperiment(
            f"initial_scale has the pattern {unused[0]!r}, which matches none of the {len(names)} parameters of "
            f"{model}, such as {names[0]} and {names[-1]}. Remove or correct it.",
            parameter="initial_scale",
            pattern=unused[0],
        )
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            factor = initial_factor(name, scales)
            if factor != 1:
                parameter.mul_(factor)


def _bert(model: Model) -> Any:
    import transformers

    sizes = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "intermediate_size": model.intermediate_size,
        "max_position_embeddings": model.max_positions,
        "hidden_dropout_prob": model.dropout,
        "attention_probs_dropout_prob": model.dropout,
        "initializer_range": model.initializer_range,
        "use_cache": False,
    }
    if model.layout == "pre_ln":
        # transformers has only the explicit softmax for this architecture. Samples are packed: with a padding id, its
        # forward would look for padding in the values of each batch.
        config = transformers.MegatronBertConfig(**sizes, pad_token_id=None)
        if model.next_sentence:
            return transformers.MegatronBertForPreTraining(config)
        return transformers.MegatronBertForMaskedLM(config)
    config = transformers.BertConfig(**sizes, attn_implementation="sdpa")
    return transformers.BertForPreTraining(config) if model.next_sentence else transformers.BertForMaskedLM(config)


def _gpt2(model: Model) -> Any:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=model.vocab_size,
        n_embd=model.hidden_size,
        n_layer=model.num_layers,
        n_head=model.num_heads,
        n_inner=model.intermediate_size,
        n_positions=model.max_positions,
        resid_pdrop=model.dropout,
        embd_pdrop=model.dropout,
        attn_pdrop=model.dropout,
        initializer_range=model.initializer_range,
        bos_token_id=0,  # Only generation reads these ids, and the defaults may exceed a small vocabulary.
        eos_token_id=0,
        use_cache=False,
        attn_implementation="sdpa",
    )
    module: Any = transformers.GPT2LMHeadModel(config)
    module.loss_type = "ForCausalLM"  # This is the default, but transformers fails to derive it and warns.
    return module


def _opt(model: Model) -> Any:
    import transformers

    config = transformers.OPTConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        word_embed_proj_dim=model.hidden_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        ffn_dim=model.intermediate_size,
        max_position_embeddings=model.max_positions,
        dropout=model.dropout,
        attention_dropout=model.dropout,
        layerdrop=0.0,
        init_std=model.initializer_range,
        do_layer_norm_before=True,
        pad_token_id=None,  # Packed samples hold no padding, and a padding row would never be trained.
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return transformers.OPTForCausalLM(config)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    import transformers

    logging = transformers.utils.logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
