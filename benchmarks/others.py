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


def qwen3_600m() -> nn.Module:
    """Qwen3 0.6B: queries and keys are normalised per head, heads are wider than the hidden size divides."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=151936,
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            use_cache=False,
        )
    )


def gemma2_600m() -> nn.Module:
    """Gemma 2, half as deep as 2B and two thirds as wide: windows in every other layer, capped logits."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    return Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=64000,
            hidden_size=1536,
            intermediate_size=6144,
            num_hidden_layers=14,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=192,
            sliding_window=512,
            max_position_embeddings=2048,
            use_cache=False,
        )
    )


def pythia_410m() -> nn.Module:
    """Pythia 410M: attention and feed-forward layer side by side, rotary positions in a quarter of each head."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    return GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=50304,
            hidden_size=1024,
            intermediate_size=4096,
            num_hidden_layers=24,
            num_attention_heads=16,
            max_position_embeddings=2048,
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


def bart_large() -> nn.Module:
    """An encoder and a decoder of 12 layers; every decoder layer reads the encoder's last states."""
    from transformers import BartConfig, BartForConditionalGeneration

    return BartForConditionalGeneration(BartConfig(use_cache=False))


def deberta_v3_base() -> nn.Module:
    """DeBERTa-v3: scores add content to position and position to content, and no kernel fuses them."""
    from transformers import DebertaV2Config, DebertaV2ForMaskedLM

    return DebertaV2ForMaskedLM(
        DebertaV2Config(
            vocab_size=128100,
            hidden_size=768,
            intermediate_size=3072,
            num_hidden_layers=12,
            num_attention_heads=12,
            relative_attention=True,
            pos_att_type=["p2c", "c2p"],
            position_buckets=256,
            norm_rel_ebd="layer_norm",
            share_att_key=True,
            type_vocab_size=0,
        )
    )


def swin_large() -> nn.Module:
    """Swin-L: attention in shifted windows, four resolutions."""
    from transformers import SwinConfig, SwinForImageClassification

    return SwinForImageClassification(
        SwinConfig(embed_dim=192, depths=[2, 2, 18, 2], num_heads=[6, 12, 24, 48], num_labels=1000)
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


def olmo2_1b() -> nn.Module:
    """OLMo 2 1B: norms behind attention and feed-forward layer, queries and keys normalised over all heads."""
    from transformers import Olmo2Config, Olmo2ForCausalLM

    return Olmo2ForCausalLM(
        Olmo2Config(
            vocab_size=100352,
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=16,
            max_position_embeddings=4096,
            use_cache=False,
        )
    )


def falcon_1b() -> nn.Module:
    """Falcon 1B: one key and value for all heads, attention and feed-forward layer side by side, no biases, tied."""
    from transformers import FalconConfig, FalconForCausalLM

    return FalconForCausalLM(
        FalconConfig(
            vocab_size=50304,
            hidden_size=2048,
            num_hidden_layers=24,
            num_attention_heads=32,
            multi_query=True,
            parallel_attn=True,
            alibi=False,
            bias=False,
            max_position_embeddings=2048,
            use_cache=False,
        )
    )


def phi_1b() -> nn.Module:
    """Phi 1.5: attention and feed-forward layer side by side, with biases; rotary positions in half of each head."""
    from transformers import PhiConfig, PhiForCausalLM

    return PhiForCausalLM(
        PhiConfig(
            vocab_size=51200,
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=24,
            num_attention_heads=32,
            max_position_embeddings=2048,
            use_cache=False,
        )
    )


def roberta_large() -> nn.Module:
    """RoBERTa Large, whose positions are counted from what is no padding."""
    from transformers import RobertaConfig, RobertaForMaskedLM

    return RobertaForMaskedLM(
        RobertaConfig(
            vocab_size=50265,
            hidden_size=1024,
            num_hidden_layers=24,
            num_attention_heads=16,
            intermediate_size=4096,
            max_position_embeddings=514,
            type_vocab_size=1,
        )
    )


def granite_2b() -> nn.Module:
    """Granite 3 2B: a Llama whose embeddings, residual branches, scores and logits have multipliers."""
    from transformers import GraniteConfig, GraniteForCausalLM

    return GraniteForCausalLM(
        GraniteConfig(
            vocab_size=49155,
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=40,
            num_attention_heads=32,
            num_key_value_heads=8,
            embedding_multiplier=12.0,
            residual_multiplier=0.22,
            attention_multiplier=0.015625,
            logits_scaling=8.0,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            use_cache=False,
        )
    )


def convnext_large() -> nn.Module:
    """ConvNeXt-L: depthwise convolutions of 7 × 7, norms over channels, four resolutions."""
    from transformers import ConvNextConfig, ConvNextForImageClassification

    return ConvNextForImageClassification(
        ConvNextConfig(depths=[3, 3, 27, 3], hidden_sizes=[192, 384, 768, 1536], num_labels=1000)
    )


def albert_xlarge() -> nn.Module:
    """ALBERT xlarge: 24 layers that share one layer's weights, embeddings narrower than the layers."""
    from transformers import AlbertConfig, AlbertForMaskedLM

    return AlbertForMaskedLM(
        AlbertConfig(
            vocab_size=30000,
            embedding_size=128,
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=24,
            num_attention_heads=16,
        )
    )


def olmoe() -> nn.Module:
    """Four of 16 narrow experts for each token, 1.0 B parameters."""
    from transformers import OlmoeConfig, OlmoeForCausalLM

    return OlmoeForCausalLM(
        OlmoeConfig(
            vocab_size=50304,
            hidden_size=1024,
            intermediate_size=1024,
            num_hidden_layers=16,
            num_attention_heads=16,
            num_experts=16,
            num_experts_per_tok=4,
            max_position_embeddings=2048,
            use_cache=False,
        )
    )


def gpt2_medium() -> nn.Module:
    """GPT-2 Medium as the library has it: one product for queries, keys and values, stored transposed."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_embd=1024, n_layer=24, n_head=16, use_cache=False))


def beit_large() -> nn.Module:
    """BEiT Large: every layer has a learned bias of its own for each pair of patches."""
    from transformers import BeitConfig, BeitForImageClassification

    return BeitForImageClassification(
        BeitConfig(
            hidden_size=1024,
            num_hidden_layers=24,
            num_attention_heads=16,
            intermediate_size=4096,
            use_relative_position_bias=True,
            num_labels=1000,
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
