"""Descriptions of models: named configurations of `transformers`, pretrained weights, and user-defined callables.

A `Model`, a `Pretrained` or a `UserModel` is no module but knows how to build one, so that every rank can build its
own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

from workbench.base.arguments import checked_arguments
from workbench.base.errors import InvalidExperiment, suggestion
from workbench.base.validation import Line, checked_items
from workbench.models._documents import attending_within_documents as attending_within_documents
from workbench.models._named import Model as Model
from workbench.models._pretrained import Pretrained as Pretrained
from workbench.models._scaling import Rule as Rule
from workbench.models._scaling import Scaling as Scaling
from workbench.models._scaling import scaling
from workbench.models._user_model import UserModel as UserModel
from workbench.models._user_model import as_model as as_model

__all__ = ["bert", "bert_large", "gpt2", "gpt3", "opt", "pretrained", "scaling"]


ModelSource = Model | Pretrained | UserModel
"""A description of a model, from which every rank builds the same module."""


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    """Answer an unknown name with the nearest known one."""
    raise AttributeError(f"workbench.models has no {name!r}. {suggestion(name, __all__)}", name=name)


class ModelOptions(TypedDict, total=False):
    """Options that every named model takes, each with a default of its family."""

    intermediate_size: int | None
    """Width of the feed-forward layers; defaults to four times `hidden_size`."""
    vocab_size: int
    """Rows of the embedding."""
    max_positions: int
    """Longest sequence, in tokens."""
    dropout: float
    """Dropout probability of hidden states and attention; 0.1 by default."""
    initializer_range: float
    """Standard deviation of the initial weights. The default of 0.02 suits widths near 1024; a narrow model learns
    sooner with a value near 1/sqrt(`hidden_size`)."""
    initial_scale: Mapping[str, float] | None
    """Multiple of the initial values by pattern of the parameter's name; `wb.models.scaling` computes it."""
    name: str | None
    """Name for tables and run directories; by default the family and its sizes, such as `bert-12x768`."""


class BertOptions(ModelOptions, total=False):
    """Options of a BERT."""

    layout: str
    """Position of the normalisation: `post_ln` (default) or `pre_ln`."""
    next_sentence: bool
    """Train on sentence pairs as well as on masked words; True by default."""


@checked_arguments
def bert(hidden_size: int = 768, num_layers: int = 12, num_heads: int = 12, **options: Unpack[BertOptions]) -> Model:
    """Describe a BERT (arXiv:1810.04805) of any size; vocabulary 30522 and 512 positions unless `options` differ.

    `layout="post_ln"` is BERT as published (`BertForPreTraining`); `"pre_ln"` normalises before each sub-layer
    (`MegatronBertForPreTraining`), which Megatron-LM (arXiv:1909.08053) found necessary for BERTs deeper than Large.
    The published layout attends through scaled-dot-product kernels; the pre-LayerNorm model of `transformers` has
    only the explicit softmax, whose scores take memory quadratic in the sequence length. The other options are
    `ModelOptions` and `next_sentence`.

    Raises `InvalidExperiment` when the sizes cannot make a model.
    """
    defaults: BertOptions = {"vocab_size": 30522, "max_positions": 512, "layout": "post_ln", "next_sentence": True}
    return _model("bert", hidden_size, num_layers, num_heads, {**defaults, **options})


@checked_arguments
def bert_large(**options: Unpack[BertOptions]) -> Model:
    """Describe BERT-Large (arXiv:1810.04805): 24 layers, hidden size 1024, 16 heads; 335 M parameters. See `bert`."""
    named: BertOptions = {"name": "bert-large", **options}
    return bert(hidden_size=1024, num_layers=24, num_heads=16, **named)


@checked_arguments
def gpt2(hidden_size: int = 768, num_layers: int = 12, num_heads: int = 12, **options: Unpack[ModelOptions]) -> Model:
    """Describe a GPT-2 (`GPT2LMHeadModel`) of any size; the defaults are the smallest published one, 124 M parameters.

    The projections that end a residual branch start with smaller weights than `initializer_range`, as published.
    """
    defaults: ModelOptions = {"vocab_size": 50257, "max_positions": 1024}
    return _model("gpt2", hidden_size, num_layers, num_heads, {**defaults, **options})


@checked_arguments
def opt(hidden_size: int = 768, num_layers: int = 12, num_heads: int = 12, **options: Unpack[ModelOptions]) -> Model:
    """Describe an OPT (`OPTForCausalLM`, arXiv:2205.01068) of any size, pre-LayerNorm; the defaults are OPT-125M."""
    defaults: ModelOptions = {"vocab_size": 50272, "max_positions": 2048}
    return _model("opt", hidden_size, num_layers, num_heads, {**defaults, **options})


def _model(family: str, hidden_size: int, num_layers: int, num_heads: int, options: Mapping[str, Any]) -> Model:
    fields = {"dropout": 0.1, **options}
    if fields.get("intermediate_size") is None:
        fields["intermediate_size"] = 4 * hidden_size
    if fields.get("name") is None:
        fields["name"] = f"{family}-{num_layers}x{hidden_size}"
    return Model(family=family, hidden_size=hidden_size, num_layers=num_layers, num_heads=num_heads, **fields)


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

The table prints 24 heads of 128 for the 1.3B model, which do not make its hidden size of 2048, and 5140 for the 13B
model, which its 40 heads of 128 do not make. The usual replacements are 16 heads and 5120.
"""


@checked_arguments
def gpt3(size: str = "1.3B", dropout: float = 0.1, max_positions: int = 2048) -> Model:
    """Describe GPT-3 (arXiv:2005.14165) in one of its published sizes, as a `GPT2LMHeadModel` with dense attention.

    The default, GPT-3 XL, has 24 layers, hidden size 2048 and 16 heads of 128; 1.3 B parameters.
    """
    if size not in GPT3_SIZES:
        raise InvalidExperiment(f"GPT-3 has no size {size!r}. {suggestion(str(size), GPT3_SIZES)}")
    num_layers, hidden_size, num_heads = GPT3_SIZES[size]
    name = f"gpt3-{size.lower()}"
    return gpt2(hidden_size, num_layers, num_heads, max_positions=max_positions, dropout=dropout, name=name)


class PretrainedOptions(TypedDict, total=False):
    """Options of a pretrained model."""

    frozen: Sequence[str]
    """Patterns (`fnmatch`) of the parameters that training leaves as they are, such as `"bert.embeddings.*"`."""
    new: Sequence[str]
    """Patterns of weights that the folder should hold and does not, and which may begin at random."""
    unused: Sequence[str]
    """Patterns of weights in the folder that no model of its architecture has, and which may be left out."""
    dropout: float | None
    """Dropout inside the model; that of its configuration by default."""
    name: Line | None
    """Name for tables and run directories; by default that of the folder, and the task."""


@checked_arguments
def pretrained(
    folder_or_name: str | Path,
    task: str | None = None,
    labels: int | None = None,
    revision: str | None = None,
    **options: Unpack[PretrainedOptions],
) -> Pretrained:
    """Describe a model of `transformers` with its weights: an export of a run, a folder, or a name of the hub.

    `task` is what it learns from now on: `mlm`, `mlm_nsp`, `clm` or `seq2seq` on text, or `classification`, for which
    `labels` is the number of classes. By default both are those of the folder. What its architecture does not have,
    such as a new head or one of another number of classes, begins with fresh weights, which the experiment's seed
    decides. What its architecture has and its files lack, and what they hold besides, is refused when a run starts,
    unless `new` and `unused` name it. So are weights that are whole numbers, and values that are not finite. Rates
    by group are the optimiser's `rate_scale`. Every rank loads the weights, in fp32, at the start of a run; one that
    goes on from a checkpoint does not need the folder. No code from the folder is executed.

    Raises `InvalidExperiment` for a folder or name without a model, for numbers in its `config.json` that no model has,
    and for a task that does not suit it.
    """
    from workbench.models._pretrained import described

    checked = checked_items(PretrainedOptions, options, InvalidExperiment)
    return described(folder_or_name, task, labels, revision, **checked)


def from_json(value: Mapping[str, Any], factory: Callable[[], Any] | None = None) -> Model | Pretrained | UserModel:
    """Rebuild the model that `to_json` described; `factory` supplies the user's callable, which JSON only names.

    Without it, a user-defined model shows its name and source, and raises `InvalidExperiment` when it is built.
    """
    fields = dict(value)
    model_type = fields.pop("type")
    if model_type == "user_defined":
        return UserModel(factory=factory, name=fields["name"], source=fields["source"])
    if model_type == "pretrained":
        return Pretrained.from_json(fields)
    return Model(**fields)
