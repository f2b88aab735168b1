"""Small unmodified models with batches that make equivalence hard: uneven label counts, padding, ties, skips.

`MODELS` maps a name to what builds the model; `batch(name, size)` makes a batch for it. Dropout is off by default.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as tf
from torch import nn
from torch.nn import functional

VOCAB, SEQ, CLASSES = 96, 16, 5
LAYERS, HIDDEN, HEADS, INNER = 4, 32, 4, 64
Batch = dict[str, torch.Tensor]


def _sizes(**changes: Any) -> dict[str, Any]:
    """Sizes under the names that most configurations of `transformers` give them."""
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": INNER,
        "max_position_embeddings": SEQ,
    }
    return sizes | changes


def _without_dropout(rate: float = 0.0) -> dict[str, float]:
    return {"hidden_dropout_prob": rate, "attention_probs_dropout_prob": rate}


def bert_pretraining(dropout: float = 0.0) -> nn.Module:
    return tf.BertForPreTraining(tf.BertConfig(**_sizes(), **_without_dropout(dropout)))


def bert_half_frozen() -> nn.Module:
    """A BERT whose lower layers and embedding are frozen; the decoder of the head is the embedding."""
    model = bert_pretraining()
    model.bert.embeddings.requires_grad_(False)
    for layer in model.bert.encoder.layer[:2]:
        layer.requires_grad_(False)
    return model


def roberta() -> nn.Module:
    config = tf.RobertaConfig(**_sizes(max_position_embeddings=SEQ + 2), **_without_dropout(), pad_token_id=0)
    return tf.RobertaForMaskedLM(config)


def electra() -> nn.Module:
    return tf.ElectraForMaskedLM(tf.ElectraConfig(**_sizes(), **_without_dropout(), embedding_size=16))


def electra_discriminator() -> nn.Module:
    return tf.ElectraForPreTraining(tf.ElectraConfig(**_sizes(), **_without_dropout(), embedding_size=16))


def albert() -> nn.Module:
    return tf.AlbertForMaskedLM(tf.AlbertConfig(**_sizes(), **_without_dropout(), embedding_size=16))


def _deberta_sizes() -> dict[str, Any]:
    relative = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0}
    return _sizes(**_without_dropout(), **relative)


def deberta() -> nn.Module:
    return tf.DebertaForMaskedLM(tf.DebertaConfig(**_deberta_sizes()))


def deberta_v2() -> nn.Module:
    more = {"position_buckets": 4, "norm_rel_ebd": "layer_norm", "share_att_key": True, "conv_kernel_size": 3}
    return tf.DebertaV2ForMaskedLM(tf.DebertaV2Config(**_deberta_sizes(), **more))


def gpt2() -> nn.Module:
    sizes = {"vocab_size": VOCAB, "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_positions": SEQ}
    return tf.GPT2LMHeadModel(tf.GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False))


def opt() -> nn.Module:
    sizes = _sizes(ffn_dim=INNER, word_embed_proj_dim=16)
    sizes.pop("intermediate_size")
    return tf.OPTForCausalLM(tf.OPTConfig(**sizes, dropout=0.0, attention_dropout=0.0, use_cache=False))


def gpt_neox() -> nn.Module:
    return tf.GPTNeoXForCausalLM(
        tf.GPTNeoXConfig(**_sizes(), hidden_dropout=0.0, attention_dropout=0.0, use_cache=False)
    )


def llama() -> nn.Module:
    return tf.LlamaForCausalLM(tf.LlamaConfig(**_sizes(num_key_value_heads=2), use_cache=False))


def mistral() -> nn.Module:
    """Fewer keys than queries, a window of attention, and the cache that its configuration has by default."""
    return tf.MistralForCausalLM(tf.MistralConfig(**_sizes(num_key_value_heads=2), sliding_window=4))


def qwen3() -> nn.Module:
    return tf.Qwen3ForCausalLM(tf.Qwen3Config(**_sizes(num_key_value_heads=2, head_dim=8)))


def gemma2() -> nn.Module:
    """Layers with and without a window in turn, scores and logits capped by tanh."""
    return tf.Gemma2ForCausalLM(tf.Gemma2Config(**_sizes(num_key_value_heads=2, head_dim=8), sliding_window=4))


def mixtral() -> nn.Module:
    """Two of four experts for each token."""
    return tf.MixtralForCausalLM(tf.MixtralConfig(**_sizes(num_key_value_heads=2), num_local_experts=4))


def modernbert() -> nn.Module:
    tokens = {f"{name}_token_id": index for index, name in enumerate(("pad", "bos", "eos", "cls", "sep"))}
    return tf.ModernBertForMaskedLM(tf.ModernBertConfig(**_sizes(), **tokens))


def mamba() -> nn.Module:
    """A state-space model: a scan over the sequence, convolutions along it, no attention."""
    sizes = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "state_size": 4}
    return tf.MambaForCausalLM(tf.MambaConfig(**sizes))


def t5() -> nn.Module:
    return tf.T5ForConditionalGeneration(
        tf.T5Config(
            vocab_size=VOCAB,
            d_model=HIDDEN,
            num_layers=3,
            num_decoder_layers=3,
            num_heads=HEADS,
            d_kv=8,
            d_ff=INNER,
            dropout_rate=0.0,
            use_cache=False,
            decoder_start_token_id=0,
            pad_token_id=0,
        )
    )


def bart() -> nn.Module:
    layers = {f"{half}_layers": 3 for half in ("encoder", "decoder")}
    heads = {f"{half}_attention_heads": HEADS for half in ("encoder", "decoder")}
    inner = {f"{half}_ffn_dim": INNER for half in ("encoder", "decoder")}
    return tf.BartForConditionalGeneration(
        tf.BartConfig(
            vocab_size=VOCAB,
            d_model=HIDDEN,
            max_position_embeddings=SEQ,
            dropout=0.0,
            attention_dropout=0.0,
            activation_dropout=0.0,
            use_cache=False,
            **layers,
            **heads,
            **inner,
        )
    )


def vit() -> nn.Module:
    sizes = {**_sizes(), "image_size": 16, "patch_size": 4, "num_labels": CLASSES}
    for word in ("vocab_size", "max_position_embeddings"):
        sizes.pop(word)
    return tf.ViTForImageClassification(tf.ViTConfig(**sizes, **_without_dropout()))


def swin() -> nn.Module:
    return tf.SwinForImageClassification(
        tf.SwinConfig(
            image_size=16,
            patch_size=2,
            embed_dim=8,
            depths=[2, 2],
            num_heads=[2, 2],
            window_size=4,
            num_labels=CLASSES,
            drop_path_rate=0.0,
        )
    )


def resnet() -> nn.Module:
    return tf.ResNetForImageClassification(
        tf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic", num_labels=CLASSES)
    )


class Skips(nn.Module):
    """A value used far from where it was made, two inputs, a branch that returns a tuple of losses."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 24), nn.Linear(4, 24)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(24, 24), nn.GELU()) for _ in range(6))
        self.head = nn.Linear(48, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = self.left(x) + self.right(y)
        hidden = first
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        logits = self.head(torch.cat([first, hidden], dim=-1))
        return functional.cross_entropy(logits, labels) + 0.1 * (logits**2).mean(), logits


class UNet(nn.Module):
    """Skips from each layer down to its opposite on the way up: several values cross every cut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.down = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4))
        self.up = nn.ModuleList(nn.Sequential(nn.Linear(32, 16), nn.GELU()) for _ in range(4))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden, kept = self.stem(x), []
        for layer in self.down:
            hidden = layer(hidden)
            kept.append(hidden)
        for layer in self.up:
            hidden = layer(torch.cat([hidden, kept.pop()], dim=-1))
        return {"loss": functional.cross_entropy(self.head(hidden), labels)}


class TwoStreams(nn.Module):
    """Layers of two inputs and two outputs, keyword-only arguments with defaults, buffers, an auxiliary loss."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.across, self.along = nn.Linear(16, 16), nn.Linear(16, 16)
            self.register_buffer("scale", torch.linspace(0.5, 1.5, 16))

        def forward(self, left: torch.Tensor, *, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return left + torch.tanh(self.across(right)) * self.scale, right + torch.tanh(self.along(left))

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 16), nn.Linear(4, 16)
        self.layers = nn.ModuleList(self.Layer() for _ in range(6))
        self.heads = nn.ModuleDict({"label": nn.Linear(16, CLASSES), "value": nn.Linear(16, 8)})
        self.register_buffer("weights", torch.tensor([1.0, 0.3]))

    def forward(
        self, *, x: torch.Tensor, y: torch.Tensor, labels: torch.Tensor, temperature: float = 2.0
    ) -> dict[str, Any]:
        left, right = self.left(x), self.right(y)
        for layer in self.layers:
            left, right = layer(left, right=right)
        logits, values = self.heads["label"](left) / temperature, self.heads["value"](right)
        parts = torch.stack([functional.cross_entropy(logits, labels), functional.mse_loss(values, x)])
        return {"loss": (parts * self.weights).sum(), "parts": parts, "logits": logits}


class TiedEverywhere(nn.Module):
    """One matrix in the stem, in every other layer and, transposed, in the head; and a whole layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(6))
        self.layers[5] = self.layers[0]
        for index in (1, 3):
            self.layers[index + 1].weight = self.layers[1].weight
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = self.norm(hidden + functional.gelu(layer(hidden)))
        logits = functional.linear(hidden, self.embedding.weight)
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


HUGGING_FACE: dict[str, Callable[[], nn.Module]] = {
    "bert": bert_pretraining,
    "roberta": roberta,
    "electra": electra,
    "electra-discriminator": electra_discriminator,
    "albert": albert,
    "deberta": deberta,
    "deberta-v2": deberta_v2,
    "gpt2": gpt2,
    "opt": opt,
    "gpt-neox": gpt_neox,
    "llama": llama,
    "mistral": mistral,
    "qwen3": qwen3,
    "gemma2": gemma2,
    "mixtral": mixtral,
    "modernbert": modernbert,
    "mamba": mamba,
    "t5": t5,
    "bart": bart,
    "vit": vit,
    "swin": swin,
    "resnet": resnet,
}
BY_HAND: dict[str, Callable[[], nn.Module]] = {
    "skips": Skips,
    "unet": UNet,
    "two-streams": TwoStreams,
    "tied-everywhere": TiedEverywhere,
}
MODELS: dict[str, Callable[[], nn.Module]] = {**HUGGING_FACE, **BY_HAND}
IMAGES = ("vit", "swin", "resnet")
PRETRAINED_AS_BERT = ("bert", "bert-half-frozen", "bert-dropout")
PADDED = (
    *PRETRAINED_AS_BERT,
    "roberta",
    "electra",
    "electra-discriminator",
    "deberta",
    "deberta-v2",
    "opt",
    "modernbert",
    "t5",
    "bart",
)
"""Names of models whose batch has an attention mask, with 0 to 8 positions of padding."""
NORMALISED_BY_BATCH = ("resnet",)
"""Names of models with BatchNorm, whose statistics are those of a micro-batch: the reference accumulates gradients."""


def batch(name: str, size: int, seed: int = 0) -> Batch:
    """Return a global batch whose share of labels grows with the sample, so that means over micro-batches differ."""
    generator = torch.Generator().manual_seed(seed)
    if name in IMAGES:
        pixels = torch.randn(size, 3, 16, 16, generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(0, CLASSES, (size,), generator=generator)}
    if name in ("skips", "unet", "two-streams"):
        fields = {
            "x": torch.randn(size, 8, generator=generator),
            "y": torch.randn(size, 4, generator=generator),
            "labels": torch.randint(0, CLASSES, (size,), generator=generator),
        }
        return {key: value for key, value in fields.items() if key != "y" or name != "unet"}
    return _text(name, size, generator)


def _text(name: str, size: int, generator: torch.Generator) -> Batch:
    ids = torch.randint(1, VOCAB, (size, SEQ), generator=generator)
    labels = torch.randint(1, VOCAB, (size, SEQ), generator=generator)
    share = (torch.arange(size).float() + 1) / (size + 1)
    labels[torch.rand(size, SEQ, generator=generator) > share[:, None]] = -100
    mask = (torch.arange(SEQ) < SEQ - 2 * (torch.arange(size)[:, None] % 5)).long()
    fields = {"input_ids": ids} | ({"attention_mask": mask} if name in PADDED else {})
    if name in PRETRAINED_AS_BERT:
        fields["token_type_ids"] = (torch.arange(SEQ) > SEQ // 2).long().expand(size, SEQ).contiguous()
    fields["labels"] = (labels >= 0).float() if name == "electra-discriminator" else labels
    if name in PRETRAINED_AS_BERT:
        fields["next_sentence_label"] = torch.randint(0, 2, (size,), generator=generator)
    return fields
