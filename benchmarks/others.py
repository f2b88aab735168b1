"""Models that no constant of the cost model was fitted on, with data of their shapes: as a user would hand them over.

Sizes are those of known models, weights are random. `prediction.py` predicts and measures them (`OTHERS` there).
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

Sample = dict[str, torch.Tensor]
IGNORED = -100


class Tokens(Dataset[Sample]):
    """Random tokens; a share of the labels stands: the last ones, as answers to questions do, or scattered ones."""

    def __init__(self, vocabulary: int, length: int, labelled: float = 1.0, *, scattered: bool = False) -> None:
        self.vocabulary, self.length, self.labelled, self.scattered = vocabulary, length, labelled, scattered

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> Sample:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(0, self.vocabulary, (self.length,), generator=generator)
        place = torch.rand(self.length, generator=generator) if self.scattered else torch.linspace(1, 0, self.length)
        return {"input_ids": ids, "labels": ids.masked_fill(place >= self.labelled, IGNORED)}


class Images(Dataset[Sample]):
    """Noise of 224 × 224 in a thousand classes."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> Sample:
        generator = torch.Generator().manual_seed(index)
        pixels = torch.randn(3, 224, 224, generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(0, 1000, (), generator=generator)}


def llama_1b() -> nn.Module:
    """Llama 3.2 1B: rotary positions, grouped queries, a gated feed-forward layer, a vocabulary of 128 k, tied."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128256,
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            use_cache=False,
        )
    )


def mixture() -> nn.Module:
    """Two of eight experts for each token, 1.2 B parameters."""
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=32000,
            hidden_size=1024,
            intermediate_size=3584,
            num_hidden_layers=12,
            num_attention_heads=16,
            num_key_value_heads=4,
            num_local_experts=8,
            max_position_embeddings=2048,
            use_cache=False,
        )
    )


def vit_huge() -> nn.Module:
    """ViT-H/14."""
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=1280,
            num_hidden_layers=32,
            num_attention_heads=16,
            intermediate_size=5120,
            image_size=224,
            patch_size=14,
            num_labels=1000,
        )
    )


def resnet_152() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig(depths=[3, 8, 36, 3], num_labels=1000))


def t5_large() -> nn.Module:
    """An encoder and a decoder of 24 layers; every layer adds the same learned bias to its attention's scores."""
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=32128,
            d_model=1024,
            d_kv=64,
            d_ff=4096,
            num_layers=24,
            num_heads=16,
            decoder_start_token_id=0,
            use_cache=False,
        )
    )


def modernbert_large() -> nn.Module:
    """Layers with and without a window of attention in turn."""
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    return ModernBertForMaskedLM(
        ModernBertConfig(
            vocab_size=50368,
            hidden_size=1024,
            intermediate_size=2624,
            num_hidden_layers=28,
            num_attention_heads=16,
            max_position_embeddings=2048,
        )
    )


class _Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, width = hidden.shape
        parts = self.qkv(self.before(hidden)).view(batch, length, 3, self.heads, -1).unbind(2)
        query, key, value = (part.transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return hidden + self.feed(self.between(hidden))


class ByHand(nn.Module):
    """A decoder as people write it at home: 24 layers of 1536, fine-tuned on answers, a third of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50304, 1536), nn.Embedding(1024, 1536)
        self.layers = nn.ModuleList(_Layer(1536, 12) for _ in range(24))
        self.norm, self.head = nn.LayerNorm(1536), nn.Linear(1536, 50304, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(self.norm(hidden))[:, :-1]
        return functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
