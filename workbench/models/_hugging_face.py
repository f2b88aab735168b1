"""From a `Model` to the module of `transformers`: the only file that imports it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import transformers

if TYPE_CHECKING:
    from torch import nn

    from workbench.models._named import Model


def build(model: Model) -> nn.Module:
    """The module in train mode; quiet, since nothing that `transformers` warns of is the user's doing."""
    with _quiet():
        module = {"bert": _bert, "gpt2": _gpt2, "opt": _opt}[model.family](model)
    return cast("nn.Module", module.train())


def _bert(model: Model) -> Any:
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
        # transformers has only the explicit softmax for this architecture.
        # Samples are packed: no padding id, or its forward looks for padding in the values of each batch.
        config = transformers.MegatronBertConfig(**sizes, pad_token_id=None)
        if model.next_sentence:
            return transformers.MegatronBertForPreTraining(config)
        return transformers.MegatronBertForMaskedLM(config)
    config = transformers.BertConfig(**sizes, attn_implementation="sdpa")
    return transformers.BertForPreTraining(config) if model.next_sentence else transformers.BertForMaskedLM(config)


def _gpt2(model: Model) -> Any:
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
        bos_token_id=0,  # only generation reads them; the defaults may lie outside a small vocabulary
        eos_token_id=0,
        use_cache=False,
        attn_implementation="sdpa",
    )
    module: Any = transformers.GPT2LMHeadModel(config)
    module.loss_type = "ForCausalLM"  # its default, which it does not find by its class name and then warns of
    return module


def _opt(model: Model) -> Any:
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
        pad_token_id=None,  # packed samples hold no padding, and a padding row would never be trained
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return transformers.OPTForCausalLM(config)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    logging = transformers.utils.logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
