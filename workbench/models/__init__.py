"""Named configurations of `transformers` models, and the user's own callables; configuration only.

Nothing here is a model: a `Model` or `CustomModel` knows how to build one, so that every rank can, and
carries what the other rooms ask (objective, vocabulary, positions).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from workbench.errors import InvalidExperiment, checked_keywords, suggestion
from workbench.models._custom import CustomModel, as_model
from workbench.models._named import LAYOUTS, Model
from workbench.models._source import ModelSource

__all__ = [
    "CustomModel",
    "Model",
    "ModelSource",
    "as_model",
    "bert",
    "bert_large",
    "from_json",
    "gpt2",
    "gpt3",
    "gpt3_1p3b",
    "opt",
]


@checked_keywords
def bert(
    hidden_size: int = 768,
    num_layers: int = 12,
    num_heads: int = 12,
    intermediate_size: int | None = None,
    vocab_size: int = 30522,
    max_positions: int = 512,
    dropout: float = 0.1,
    layout: str = "post_ln",
    next_sentence: bool = True,
    initializer_range: float = 0.02,
    name: str | None = None,
) -> Model:
    """BERT (arXiv:1810.04805) of any size, trained on masked words and, with `next_sentence`, on sentence pairs.

    `layout="post_ln"` is BERT as published (`BertForPreTraining`); `"pre_ln"` normalises before each
    sub-layer (`MegatronBertForPreTraining`), which Megatron-LM (arXiv:1909.08053) found necessary for BERTs
    deeper than Large. `intermediate_size` defaults to four times `hidden_size`. The published layout
    attends through scaled-dot-product kernels; the pre-LayerNorm model of `transformers` only has the
    explicit softmax, whose scores take memory quadratic in the sequence length. `initializer_range` is the
    standard deviation of the initial weights; BERT's 0.02 suits widths near 1024, and a narrow model learns
    sooner with one near 1/sqrt(`hidden_size`).

    Raises `InvalidExperiment` when the sizes cannot make a model.
    """
    if layout not in LAYOUTS:
        raise InvalidExperiment(
            f"layout={layout!r} is not a layout of BERT. {suggestion(str(layout), LAYOUTS)}", layout=layout
        )
    return Model(
        name=name or f"bert-{num_layers}x{hidden_size}",
        family="bert",
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        intermediate_size=4 * hidden_size if intermediate_size is None else intermediate_size,
        vocab_size=vocab_size,
        max_positions=max_positions,
        dropout=dropout,
        layout=layout,
        next_sentence=next_sentence,
        initializer_range=initializer_range,
    )


@checked_keywords
def bert_large(
    vocab_size: int = 30522,
    max_positions: int = 512,
    dropout: float = 0.1,
    layout: str = "post_ln",
    next_sentence: bool = True,
    initializer_range: float = 0.02,
    name: str = "bert-large",
) -> Model:
    """BERT-Large (arXiv:1810.04805): 24 layers, hidden size 1024, 16 heads; 335 M parameters. See `bert`."""
    return bert(
        hidden_size=1024,
        num_layers=24,
        num_heads=16,
        vocab_size=vocab_size,
        max_positions=max_positions,
        dropout=dropout,
        layout=layout,
        next_sentence=next_sentence,
        initializer_range=initializer_range,
        name=name,
    )


@checked_keywords
def gpt2(
    hidden_size: int = 768,
    num_layers: int = 12,
    num_heads: int = 12,
    intermediate_size: int | None = None,
    vocab_size: int = 50257,
    max_positions: int = 1024,
    dropout: float = 0.1,
    initializer_range: float = 0.02,
    name: str | None = None,
) -> Model:
    """GPT-2 (`GPT2LMHeadModel`) of any size; the defaults are the smallest published one, 124 M parameters.

    `initializer_range` as for `bert`; the projections that end a residual branch start smaller, as published.
    """
    return Model(
        name=name or f"gpt2-{num_layers}x{hidden_size}",
        family="gpt2",
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        intermediate_size=4 * hidden_size if intermediate_size is None else intermediate_size,
        vocab_size=vocab_size,
        max_positions=max_positions,
        dropout=dropout,
        initializer_range=initializer_range,
    )


@checked_keywords
def opt(
    hidden_size: int = 768,
    num_layers: int = 12,
    num_heads: int = 12,
    intermediate_size: int | None = None,
    vocab_size: int = 50272,
    max_positions: int = 2048,
    dropout: float = 0.1,
    initializer_range: float = 0.02,
    name: str | None = None,
) -> Model:
    """OPT (`OPTForCausalLM`, arXiv:2205.01068) of any size, pre-LayerNorm; the defaults are OPT-125M.

    `initializer_range` as for `bert`; `transformers` calls it `init_std` here.
    """
    return Model(
        name=name or f"opt-{num_layers}x{hidden_size}",
        family="opt",
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        intermediate_size=4 * hidden_size if intermediate_size is None else intermediate_size,
        vocab_size=vocab_size,
        max_positions=max_positions,
        dropout=dropout,
        initializer_range=initializer_range,
    )


GPT3_SIZES: Mapping[str, tuple[int, int, int]] = {
    "125M": (12, 768, 12),
    "350M": (24, 1024, 16),
    "760M": (24, 1536, 16),
    "1.3B": (24, 2048, 16),
    "2.7B": (32, 2560, 32),
    "6.7B": (32, 4096, 32),
    "13B": (40, 5120, 40),
    "175B": (96, 12288, 96),
}
"""Layers, hidden size and heads of GPT-3 (arXiv:2005.14165, table 2.1).

The table prints 24 heads of 128 for the 1.3B model, which do not make its hidden size of 2048, and 5140
for the 13B model, which its 40 heads of 128 do not make: 16 heads and 5120 are what the community trains.
"""


@checked_keywords
def gpt3(size: str = "1.3B", dropout: float = 0.1, max_positions: int = 2048) -> Model:
    """GPT-3 (arXiv:2005.14165) in one of its published sizes, as a `GPT2LMHeadModel` with dense attention."""
    if size not in GPT3_SIZES:
        raise InvalidExperiment(
            f"GPT-3 has no size {size!r}. {suggestion(str(size), GPT3_SIZES)}", size=size, known=tuple(GPT3_SIZES)
        )
    num_layers, hidden_size, num_heads = GPT3_SIZES[size]
    return gpt2(
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        max_positions=max_positions,
        dropout=dropout,
        name=f"gpt3-{size.lower()}",
    )


@checked_keywords
def gpt3_1p3b(dropout: float = 0.1, max_positions: int = 2048) -> Model:
    """GPT-3 XL: 24 layers, hidden size 2048, 16 heads of 128; 1.3 B parameters."""
    return gpt3("1.3B", dropout=dropout, max_positions=max_positions)


def from_json(value: Mapping[str, Any], factory: Callable[[], Any] | None = None) -> Model | CustomModel:
    """Rebuild what `to_json` described; `factory` supplies the user's callable, which JSON only names.

    Without it a custom model still shows its name and source, and refuses to build.
    """
    fields = dict(value)
    if fields.pop("type") == "custom":
        return CustomModel(factory=factory, name=fields["name"], source=fields["source"])
    return Model(**fields)
