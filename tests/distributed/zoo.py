"""Small unmodified models with batches that make equivalence hard: uneven label counts, padding, ties, skips."""

from __future__ import annotations

import torch
import transformers as tf
from torch import nn

VOCAB, SEQ = 96, 16


def bert_pretraining(dropout: float = 0.0) -> nn.Module:
    return tf.BertForPreTraining(
        tf.BertConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=SEQ,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
    )


def gpt2() -> nn.Module:
    return tf.GPT2LMHeadModel(
        tf.GPT2Config(
            vocab_size=VOCAB,
            n_embd=32,
            n_layer=4,
            n_head=4,
            n_positions=SEQ,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        )
    )


def albert() -> nn.Module:
    return tf.AlbertForMaskedLM(
        tf.AlbertConfig(
            vocab_size=VOCAB,
            embedding_size=16,
            hidden_size=32,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=SEQ,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def t5() -> nn.Module:
    return tf.T5ForConditionalGeneration(
        tf.T5Config(
            vocab_size=VOCAB,
            d_model=32,
            num_layers=3,
            num_decoder_layers=3,
            num_heads=4,
            d_kv=8,
            d_ff=64,
            dropout_rate=0.0,
            use_cache=False,
            decoder_start_token_id=0,
            pad_token_id=0,
        )
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
        return nn.functional.cross_entropy(logits, labels) + 0.1 * (logits**2).mean(), logits


MODELS = {"bert": bert_pretraining, "gpt2": gpt2, "albert": albert, "t5": t5, "skips": Skips}


def batch(name: str, size: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """A global batch; the share of labels grows with the sample, so that micro-batch means differ from the whole."""
    generator = torch.Generator().manual_seed(seed)
    if name == "skips":
        return {
            "x": torch.randn(size, 8, generator=generator),
            "y": torch.randn(size, 4, generator=generator),
            "labels": torch.randint(0, 5, (size,), generator=generator),
        }
    ids = torch.randint(1, VOCAB, (size, SEQ), generator=generator)
    labels = torch.randint(1, VOCAB, (size, SEQ), generator=generator)
    share = (torch.arange(size).float() + 1) / (size + 1)
    labels[torch.rand(size, SEQ, generator=generator) > share[:, None]] = -100
    fields = {"input_ids": ids, "labels": labels}
    if name == "bert":
        mask = torch.ones_like(ids)
        mask[1::2, SEQ - 3 :] = 0
        fields = {
            "input_ids": ids,
            "attention_mask": mask,
            "token_type_ids": (torch.arange(SEQ) > SEQ // 2).long().expand(size, SEQ).contiguous(),
            "labels": labels,
            "next_sentence_label": torch.randint(0, 2, (size,), generator=generator),
        }
    return fields
