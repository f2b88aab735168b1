"""Models as strangers hand them over, small, each with a batch: libraries' own, losses that compare samples, odd code.

`benchmarks/any_model.py` trains each in several divisions and compares it with plain PyTorch. DETR's losses need scipy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers as tf
from torch import nn
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.data import default_collate

from tests.distributed import test_opaque_modules as opaque_models
from tests.distributed import test_parameter_views as views
from tests.unit.coupled_models import COUPLED, WEIGHTED, samples_for

Batch = dict[str, torch.Tensor]
VOCAB, WIDTH, SEQ = 64, 16, 16
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@dataclass(frozen=True)
class Handed:
    """A model, and a function that makes a batch of a number of samples for it."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]


class Given(nn.Module):
    """A model of a library that is called with arguments of its own and asked for the loss."""

    def __init__(self, model: nn.Module, **arguments: Any) -> None:
        super().__init__()
        self.model = model
        self.arguments = arguments

    def loss(self, **fields: Any) -> Any:
        return self.model(**fields, **self.arguments).loss


class Speech(Given):
    def forward(self, input_values: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.loss(input_values=input_values, labels=labels)


class Detector(Given):
    """A detector of `transformers`, whose labels are a list with a dict for each image."""

    def forward(self, pixel_values: torch.Tensor, classes: torch.Tensor, boxes: torch.Tensor) -> Any:
        labels = [{"class_labels": c, "boxes": b} for c, b in zip(classes, boxes, strict=True)]
        return self.loss(pixel_values=pixel_values, labels=labels)


class Video(Given):
    def forward(self, pixel_values: torch.Tensor, bool_masked_pos: torch.Tensor) -> Any:
        return self.loss(pixel_values=pixel_values, bool_masked_pos=bool_masked_pos)


class Codec(Given):
    def forward(self, input_values: torch.Tensor) -> Any:
        found = self.model(input_values=input_values, **self.arguments).audio_values
        return functional.l1_loss(found, input_values)


class EarlyExit(nn.Module):
    """Layers after which a confident batch leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
            if self.head(x).softmax(-1).amax(-1).mean() > 0.99:
                break
        return functional.cross_entropy(self.head(x), labels)


class Mapped(nn.Module):
    """Per-sample norms by `torch.vmap`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        x = torch.vmap(lambda row: row / (1 + row.norm()))(x)
        return functional.cross_entropy(self.head(x), labels)


class PhysicsInformed(nn.Module):
    """The residual of u'' = -u in the forward: second derivatives of the network by its input."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(1, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)
        )

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        t = t.requires_grad_()
        u = self.net(t)
        [first] = torch.autograd.grad(u.sum(), t, create_graph=True)
        [second] = torch.autograd.grad(first.sum(), t, create_graph=True)
        return (second + u).square().mean()


class Flexible(nn.Module):
    """Two layers of FlexAttention with a causal mask and a bias by distance."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query, key, value = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
            mask = create_block_mask(
                lambda _b, _h, to, of: to >= of, None, None, x.shape[1], x.shape[1], device=x.device
            )
            mixed = flex_attention(
                query, key, value, score_mod=lambda score, _b, _h, to, of: score - 0.1 * (to - of), block_mask=mask
            )
            return x + self.out(mixed.transpose(1, 2).flatten(2))

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(self.Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class PackedLSTM(nn.Module):
    """Padded sequences, packed, and unpacked to as many steps as the longest has."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, input_ids: torch.Tensor, lengths: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.tokens(input_ids), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        out, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        last = out[torch.arange(len(out), device=out.device), lengths - 1]
        return functional.cross_entropy(self.head(last), labels)


class Recommender(nn.Module):
    """Bags of categories in four tables, and the products of their sums with dense features (DLRM)."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(VOCAB, WIDTH, mode=mode) for mode in ("sum", "mean", "max", "sum"))
        self.dense = nn.Linear(8, WIDTH)
        self.head = nn.Sequential(nn.Linear(WIDTH + 10, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))

    def forward(self, categories: torch.Tensor, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        dense = self.dense(x)
        bags = [table(categories[:, index]) for index, table in enumerate(self.tables)]
        rows = torch.stack([dense, *bags], 1)
        one, other = torch.tril_indices(5, 5, -1)
        products = (rows @ rows.mT)[:, one, other]
        scores = self.head(torch.cat([dense, products], 1)).squeeze(1)
        return functional.binary_cross_entropy_with_logits(scores, (labels > 2).float())


class MessagePassing(nn.Module):
    """A graph in each sample; the nodes of all samples stand in one tensor, and edges name rows of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor, edges: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        count, nodes, _ = x.shape
        first = torch.arange(count, device=x.device)[:, None] * nodes
        source, target = ((edges[:, end] + first).flatten() for end in range(2))
        rows = x.flatten(0, 1)
        for layer in self.layers:
            rows = rows + torch.zeros_like(rows).index_add(0, target, layer(rows)[source])
        return functional.cross_entropy(self.head(rows.view(count, nodes, -1).mean(1)), labels)


class CountedLookups(nn.Module):
    """A table that divides the gradient of each row by how often the batch names it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH, scale_grad_by_freq=True)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def wav2vec2() -> nn.Module:
    return Speech(
        tf.Wav2Vec2ForCTC(
            tf.Wav2Vec2Config(
                vocab_size=12, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
                conv_dim=(8, 8), conv_stride=(4, 2), conv_kernel=(8, 3), num_conv_pos_embeddings=4,
                num_conv_pos_embedding_groups=2, hidden_dropout=0.0, activation_dropout=0.0, attention_dropout=0.0,
                feat_proj_dropout=0.0, final_dropout=0.0, layerdrop=0.0, mask_time_prob=0.0, ctc_loss_reduction="mean",
            )
        )
    )  # fmt: skip


def _resnet_backbone() -> Any:
    return tf.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1], layer_type="basic",
        out_features=["stage4"],
    )  # fmt: skip


def detr() -> nn.Module:
    return Detector(
        tf.DetrForObjectDetection(
            tf.DetrConfig(
                use_timm_backbone=False, use_pretrained_backbone=False, backbone=None,
                backbone_config=_resnet_backbone(), d_model=WIDTH, encoder_layers=2, decoder_layers=2,
                encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32,
                num_queries=6, num_labels=4, dropout=0.0, auxiliary_loss=True,
            )
        )
    )  # fmt: skip


def rt_detr() -> nn.Module:
    return Detector(
        tf.RTDetrForObjectDetection(
            tf.RTDetrConfig(
                backbone_config=tf.RTDetrResNetConfig(
                    embedding_size=8, hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1], layer_type="basic",
                    out_features=["stage2", "stage3", "stage4"],
                ),
                encoder_hidden_dim=WIDTH, encoder_in_channels=[16, 16, 16], encoder_ffn_dim=32,
                encoder_attention_heads=2, d_model=WIDTH, num_queries=8, decoder_in_channels=[16, 16, 16],
                decoder_ffn_dim=32, decoder_attention_heads=2, decoder_layers=2, num_denoising=0, num_labels=4,
                dropout=0.0, encoder_layers=1,
            )
        )
    )  # fmt: skip


def longformer() -> nn.Module:
    return tf.LongformerForMaskedLM(
        tf.LongformerConfig(
            vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
            max_position_embeddings=SEQ + 4, attention_window=[4, 4], pad_token_id=1, **_NO_DROPOUT,
        )
    )  # fmt: skip


def video_mae() -> nn.Module:
    return Video(
        tf.VideoMAEForPreTraining(
            tf.VideoMAEConfig(
                image_size=16, patch_size=8, num_frames=4, hidden_size=WIDTH, num_hidden_layers=2,
                num_attention_heads=2, intermediate_size=32, decoder_hidden_size=WIDTH, decoder_num_hidden_layers=2,
                decoder_num_attention_heads=2, decoder_intermediate_size=32, **_NO_DROPOUT,
            )
        )
    )  # fmt: skip


def encodec() -> nn.Module:
    return Codec(
        tf.EncodecModel(
            tf.EncodecConfig(
                hidden_size=WIDTH, num_filters=4, upsampling_ratios=[4, 2], num_lstm_layers=1, codebook_size=32,
                codebook_dim=WIDTH, target_bandwidths=[24.0], sampling_rate=8000,
            )
        )
    )  # fmt: skip


def bloom() -> nn.Module:
    return tf.BloomForCausalLM(
        tf.BloomConfig(
            vocab_size=VOCAB, hidden_size=WIDTH, n_layer=2, n_head=2, hidden_dropout=0.0, attention_dropout=0.0,
            use_cache=False,
        )
    )  # fmt: skip


def reformer() -> nn.Module:
    return tf.ReformerModelWithLMHead(
        tf.ReformerConfig(
            vocab_size=VOCAB, hidden_size=WIDTH, attention_head_size=8, num_attention_heads=2, feed_forward_size=32,
            attn_layers=["local", "lsh"], axial_pos_shape=[4, 4], axial_pos_embds_dim=[8, 8], lsh_attn_chunk_length=4,
            local_attn_chunk_length=4, num_buckets=2, num_hashes=1, max_position_embeddings=SEQ, is_decoder=True,
            use_cache=False, hidden_dropout_prob=0.0, lsh_attention_probs_dropout_prob=0.0,
            local_attention_probs_dropout_prob=0.0, hash_seed=0,
        )
    )  # fmt: skip


def switch() -> nn.Module:
    return tf.SwitchTransformersForConditionalGeneration(
        tf.SwitchTransformersConfig(
            vocab_size=VOCAB, d_model=WIDTH, d_kv=8, d_ff=32, expert_capacity=64, num_layers=2,
            num_sparse_encoder_layers=1, num_decoder_layers=2, num_sparse_decoder_layers=1, num_heads=2, num_experts=4,
            router_jitter_noise=0.0, dropout_rate=0.0, decoder_start_token_id=0, use_cache=False,
        )
    )  # fmt: skip


def _spread(model: nn.Module) -> nn.Module:
    """Add noise to weights from which one gradient would be 10^6 times as large as most, and hide their differences."""
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def _normal(*shape: int) -> Callable[[int], torch.Tensor]:
    return lambda count: torch.randn(count, *shape)


def _whole(high: int, *shape: int, low: int = 0) -> Callable[[int], torch.Tensor]:
    return lambda count: torch.randint(low, high, (count, *shape))


def _chosen(share: int, width: int) -> Callable[[int], torch.Tensor]:
    """Masks that are true at every `share`-th position, shifted from sample to sample."""
    return lambda count: (torch.arange(width) + torch.arange(count)[:, None]) % share == 0


def _ones(count: int) -> torch.Tensor:
    return torch.ones(count, SEQ, dtype=torch.long)


def _boxes(count: int) -> torch.Tensor:
    return 0.3 + 0.2 * torch.rand(count, 2, 4)


def _fields(**fields: Callable[[int], torch.Tensor]) -> Callable[[int], Batch]:
    return lambda count: {name: make(count) for name, make in fields.items()}


_TOKENS = _whole(VOCAB, SEQ, low=2)
_TEXT = _fields(input_ids=_TOKENS, labels=_TOKENS)
_ROWS = _fields(x=_normal(8), labels=_whole(5))
_WIDE_ROWS = _fields(x=_normal(WIDTH), labels=_whole(5))
_SEQUENCES = _fields(x=_normal(views.LENGTH, 8), labels=_whole(5))
_OBJECTS = _fields(pixel_values=_normal(3, 64, 64), classes=_whole(4, 2), boxes=_boxes)
_VIDEOS = _fields(pixel_values=_normal(4, 3, 16, 16), bool_masked_pos=_chosen(2, 8))

MODELS: Mapping[str, Handed] = {
    **{
        name: Handed(build, lambda count, name=name: default_collate(samples_for(name, count)))
        for name, build in {**COUPLED, **WEIGHTED}.items() if name != "a sum"
    },
    "Wav2Vec2ForCTC": Handed(wav2vec2, _fields(input_values=_normal(160), labels=_whole(12, 3, low=1))),
    "DETR with its loss": Handed(lambda: _spread(detr()), _OBJECTS),
    "RT-DETR with its loss": Handed(lambda: _spread(rt_detr()), _OBJECTS),
    "Longformer": Handed(longformer, _TEXT),
    "VideoMAE": Handed(lambda: _spread(video_mae()), _VIDEOS),
    "EnCodec": Handed(encodec, _fields(input_values=_normal(1, 64))),
    "Bloom": Handed(bloom, _TEXT),
    "Reformer": Handed(reformer, _TEXT),
    "Switch": Handed(switch, _fields(input_ids=_TOKENS, attention_mask=_ones, labels=_TOKENS)),
    "a custom autograd.Function": Handed(opaque_models.OwnFunction, _ROWS),
    "reentrant checkpointing": Handed(opaque_models.Reentrant, _ROWS),
    "FlexAttention": Handed(Flexible, _TEXT),
    "a packed LSTM": Handed(
        PackedLSTM, _fields(input_ids=_TOKENS, lengths=_whole(SEQ, low=4), labels=_whole(5))
    ),
    "a packed LSTM of fixed length": Handed(opaque_models.Packed, _ROWS),
    "a physics-informed network": Handed(PhysicsInformed, _fields(t=_normal(1))),
    "early exit": Handed(EarlyExit, _WIDE_ROWS),
    "torch.vmap": Handed(Mapped, _WIDE_ROWS),
    "bags of categories (DLRM)": Handed(
        Recommender, _fields(categories=_whole(VOCAB, 4, 3), x=_normal(8), labels=_whole(5))
    ),
    "messages in a graph for each sample": Handed(
        MessagePassing, _fields(x=_normal(6, WIDTH), edges=_whole(6, 2, 10), labels=_whole(5))
    ),
    "an embedding with scale_grad_by_freq": Handed(CountedLookups, _TEXT),
    "Perceiver": Handed(views.Perceiver, _SEQUENCES),
    "a DETR decoder": Handed(views.ObjectQueries, _SEQUENCES),
}  # fmt: skip
