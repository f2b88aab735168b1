"""`Model`: one configuration of a `transformers` architecture, as a value."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

from pydantic import Field, PlainValidator

from workbench.base.arguments import checked_arguments
from workbench.base.errors import InvalidExperiment
from workbench.base.validation import (
    Factors,
    Line,
    Positive,
    Share,
    TrueOrFalse,
    Whole,
    checked_value,
    factor_of,
    known,
)

if TYPE_CHECKING:
    from torch import nn

LAYOUTS = ("post_ln", "pre_ln")
MOST_LAYERS = 1_000
"""Largest number of layers: that of DeepNet (arXiv:2203.00555). One of 10,000 is not even built in a minute."""
Size = Annotated[Whole, Field(ge=1, le=2**24)]
"""A size of a model; a larger one would only keep the planner busy."""


@checked_value()
class Model:
    """A transformer of a known family (`bert`, `gpt2`, `opt`) at one size.

    Raises `InvalidExperiment` for sizes that cannot make a model.
    """

    name: Line
    family: str
    hidden_size: Size
    num_layers: Annotated[Whole, Field(ge=1, le=MOST_LAYERS)]
    num_heads: Size
    intermediate_size: Size
    vocab_size: Size
    """Rows of the embedding; the token ids of the data must be smaller."""
    max_positions: Size
    dropout: Share
    layout: Annotated[str, PlainValidator(known(LAYOUTS))] = "pre_ln"
    """Position of the normalisation: `post_ln` after each residual sum, `pre_ln` before each sub-layer."""
    next_sentence: TrueOrFalse = False
    """True for a BERT that is also trained to tell true continuations from random ones."""
    initializer_range: Annotated[Positive, Field(le=1000)] = 0.02
    """Standard deviation of the initial weights."""
    initial_scale: Factors | None = None
    """Multiple of the initial values by pattern of the parameter's name (`fnmatch`); the first pattern that matches
    counts, and a parameter that none matches has 1. `wb.models.scaling` computes it."""
    is_user_defined: ClassVar[bool] = False
    is_loaded: ClassVar[bool] = True
    pretrained: ClassVar[None] = None

    def __post_init__(self) -> None:
        if self.hidden_size % (heads := self.num_heads):
            near = (divisor for distance in range(heads) for divisor in (heads - distance, heads + distance))
            raise InvalidExperiment(
                f"hidden_size={self.hidden_size} is not divisible by num_heads={self.num_heads}. "
                f"Give hidden_size={self.num_heads * max(1, round(self.hidden_size / self.num_heads))}, or "
                f"num_heads={next(divisor for divisor in near if self.hidden_size % divisor == 0)}."
            )

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
        sizes = {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "max_position_embeddings": self.max_positions,
            "use_cache": False,
        }
        with quiet():
            module = {"bert": _bert, "gpt2": _gpt2, "opt": _opt}[self.family](self, sizes)
        if self.initial_scale is not None:
            _scale_initial_values(module, self.initial_scale, self.name)
        return cast("nn.Module", module.train())

    def to_json(self) -> dict[str, Any]:
        return {"type": "named", **vars(self)}


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
        )
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            factor = factor_of(name, scales)
            if factor != 1:
                parameter.mul_(factor)


def _bert(model: Model, sizes: dict[str, Any]) -> Any:
    import transformers

    sizes |= {"intermediate_size": model.intermediate_size, "initializer_range": model.initializer_range}
    sizes |= {"hidden_dropout_prob": model.dropout, "attention_probs_dropout_prob": model.dropout}
    if model.layout == "pre_ln":
        # transformers has only the explicit softmax for this architecture. Samples are packed: with a padding id, its
        # forward would look for padding in the values of each batch.
        config = transformers.MegatronBertConfig(**sizes, pad_token_id=None)
        if model.next_sentence:
            return transformers.MegatronBertForPreTraining(config)
        return transformers.MegatronBertForMaskedLM(config)
    config = transformers.BertConfig(**sizes, attn_implementation="sdpa")
    return transformers.BertForPreTraining(config) if model.next_sentence else transformers.BertForMaskedLM(config)


def _gpt2(model: Model, sizes: dict[str, Any]) -> Any:
    import transformers

    config = transformers.GPT2Config(
        **sizes,
        n_inner=model.intermediate_size,
        resid_pdrop=model.dropout,
        embd_pdrop=model.dropout,
        attn_pdrop=model.dropout,
        initializer_range=model.initializer_range,
        bos_token_id=0,  # Only generation reads these ids, and the defaults may exceed a small vocabulary.
        eos_token_id=0,
        attn_implementation="sdpa",
    )
    module: Any = transformers.GPT2LMHeadModel(config)
    module.loss_type = "ForCausalLM"  # This is the default, but transformers fails to derive it and warns.
    return module


def _opt(model: Model, sizes: dict[str, Any]) -> Any:
    import transformers

    config = transformers.OPTConfig(
        **sizes,
        word_embed_proj_dim=model.hidden_size,
        ffn_dim=model.intermediate_size,
        dropout=model.dropout,
        attention_dropout=model.dropout,
        layerdrop=0.0,
        init_std=model.initializer_range,
        do_layer_norm_before=True,
        pad_token_id=None,  # Packed samples hold no padding, and a padding row would never be trained.
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="sdpa",
    )
    return transformers.OPTForCausalLM(config)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the warnings and progress bars of `transformers`; raise `InvalidExperiment` where it cannot build."""
    import transformers

    if sys.flags.optimize > 1:
        raise InvalidExperiment(
            "Python runs with -OO, or PYTHONOPTIMIZE=2, which removes docstrings, and transformers builds no model "
            "without them. Start it without, or with -O."
        )

    logging = transformers.utils.logging
    before, shows_progress = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if shows_progress:
            logging.enable_progress_bar()


# The size of a model as scaling laws count it.


@checked_arguments
def parameters_without_embeddings(model: Model) -> int:
    """Return the number of a model's parameters without its embedding tables: those of tokens, positions, segments.

    A read-out that shares the table of the tokens is not counted either. Kaplan et al. (arXiv:2001.08361) count so,
    because the losses of models of different depth lie on one curve only then.
    """
    return _count(dataclasses.replace(model, initial_scale=None))


@functools.lru_cache(maxsize=256)
def _count(model: Model) -> int:
    import torch

    with torch.device("meta"):
        module = model.build()
    tables = {id(part.weight) for part in module.modules() if isinstance(part, torch.nn.Embedding)}
    return sum(each.numel() for each in module.parameters() if id(each) not in tables)
