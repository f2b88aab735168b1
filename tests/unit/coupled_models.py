"""Models whose losses compare the samples of a batch, and others that divide by weights of their own, with samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers as tf
from torch import nn
from torch.nn import functional

VOCAB, WIDTH, SEQ = 64, 16, 8
_GENERATOR = torch.Generator().manual_seed(0)
_TEXT = {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2}
_VISION = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
_INNER = {"intermediate_size": 32}


class ReturnsLoss(nn.Module):
    """A two-tower model of `transformers` that is asked for its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, pixel_values: torch.Tensor) -> Any:
        output = self.model(
            input_ids=input_ids, attention_mask=attention_mask, pixel_values=pixel_values, return_loss=True
        )
        return output.loss


def hf_clip() -> nn.Module:
    text = _TEXT | _INNER | {"max_position_embeddings": SEQ, "eos_token_id": 1, "bos_token_id": 0}
    return ReturnsLoss(tf.CLIPModel(tf.CLIPConfig(text_config=text, vision_config=_VISION | _INNER, projection_dim=12)))


def hf_siglip() -> nn.Module:
    text = _TEXT | _INNER | {"max_position_embeddings": SEQ}
    return ReturnsLoss(tf.SiglipModel(tf.SiglipConfig(text_config=text, vision_config=_VISION | _INNER)))


class TwoTower(nn.Module):
    """Attention over sequences that have the batch second, and a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleList(nn.MultiheadAttention(WIDTH, 2) for _ in range(2))
        self.logit_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        one, other = (
            functional.normalize(layer(value.transpose(0, 1), value.transpose(0, 1), value.transpose(0, 1))[0].mean(0))
            for layer, value in zip(self.attention, (x, y), strict=True)
        )
        scores = self.logit_scale.exp() * one @ other.T
        here = torch.arange(len(x), device=x.device)
        return (functional.cross_entropy(scores, here) + functional.cross_entropy(scores.T, here)) / 2


class Dice(nn.Module):
    """Dice over all pixels of the batch, of logits that are enlarged."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 1, 3, stride=2, padding=1)

    def forward(self, pixels: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
        logits = functional.interpolate(self.conv(pixels), scale_factor=2, mode="bilinear", align_corners=False)
        chance = logits.sigmoid()
        return 1 - (2 * (chance * masks).sum() + 1) / (chance.sum() + masks.sum() + 1)


class Regression(nn.Module):
    """Three residual layers and a head; `loss` compares their outputs with a target."""

    def __init__(self, loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)
        self.loss = loss

    def forward(self, x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).relu()
        return self.loss(self.head(x), y, w)


class Mixup(nn.Module):
    """Mixes each sample with that at the other end of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 5))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.layers(0.7 * x + 0.3 * x.flip(0))
        loss = functional.cross_entropy
        return 0.7 * loss(logits, labels) + 0.3 * loss(logits, labels.flip(0))


class SupCon(nn.Module):
    """Supervised contrast (arXiv:2004.11362) of two views."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8))

    def forward(self, x: torch.Tensor, y: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        features = functional.normalize(self.encoder(torch.cat([x, y])), dim=-1)
        scores = features @ features.T / 0.5
        both = torch.cat([labels, labels])
        others = ~torch.eye(len(both), dtype=torch.bool, device=x.device)
        same = ((both[:, None] == both[None]) & others).float()
        log_chance = scores - (scores.exp() * others).sum(1, keepdim=True).log()
        return -((same * log_chance).sum(1) / same.sum(1)).mean()


class BarlowTwins(nn.Module):
    """Cross-correlation of two views' features (arXiv:2103.03230), normalised over the batch by BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        one, other = self.norm(self.encoder(x)), self.norm(self.encoder(y))
        correlation = one.T @ other / len(x)
        return (correlation - torch.eye(8, device=x.device)).square().sum()


class Reader(nn.Module):
    """Reads each sequence by a recurrent layer; `loss` is given its last states, logits and the labels."""

    def __init__(self, loss: Callable[..., torch.Tensor], kind: str = "LSTM", **options: Any) -> None:
        super().__init__()
        self.layer = getattr(nn, kind)(WIDTH, WIDTH, **options)
        self.head = nn.Linear(WIDTH * (1 + options.get("bidirectional", False)), 5)
        self.loss, self.is_cell, self.batch_first = loss, kind.endswith("Cell"), options.get("batch_first", False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.is_cell:
            state: Any = None
            for step in x.unbind(1):
                state = self.layer(step, state)
            last = state[0] if isinstance(state, tuple) else state
        else:
            states = self.layer(x if self.batch_first else x.transpose(0, 1))[0]
            last = states[:, -1] if self.batch_first else states[-1]
        return self.loss(last, self.head(last), labels)


class Capacity(nn.Module):
    """A mixture of four experts, each of which takes a quarter of the batch's tokens: the first that chose it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.gate, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, 4), nn.Linear(WIDTH, VOCAB)
        self.experts = nn.Parameter(0.3 * torch.randn(4, WIDTH, WIDTH))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids).flatten(0, 1)
        chances = self.gate(x).softmax(-1)
        chosen = functional.one_hot(chances.argmax(-1), 4)
        has_room = chosen * (chosen.cumsum(0) <= len(x) // 4)
        x = x + torch.einsum("td,edf,te->tf", x, self.experts, has_room * chances)
        return functional.cross_entropy(self.head(x), labels.flatten())


class DecisionTransformer(nn.Module):
    """Three tokens a step, a padding mask that is repeated for them, and a mean over what is no padding."""

    def __init__(self, selects: bool) -> None:
        super().__init__()
        self.embed = nn.ModuleList(nn.Linear(size, WIDTH) for size in (1, 4, 2))
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, 2)
        self.selects = selects

    def forward(
        self, returns: torch.Tensor, states: torch.Tensor, actions: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        fields = zip(self.embed, (returns, states, actions), strict=True)
        x = torch.stack([embed(field) for embed, field in fields], 2).flatten(1, 2)
        x = self.layer(x, src_key_padding_mask=mask.repeat_interleave(3, 1) == 0)
        found = self.head(x.unflatten(1, (-1, 3))[:, :, 1])
        if self.selects:
            kept = mask.flatten() > 0
            return (found.flatten(0, 1)[kept] - actions.flatten(0, 1)[kept]).square().mean()
        return ((found - actions).square().mean(-1) * mask).sum() / mask.sum()


def rmse(found: torch.Tensor, y: torch.Tensor, _w: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(found, y).sqrt()


def weighted_mean(found: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return ((found - y).square() * w).sum() / w.sum()


def clamped_weighted_mean(found: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return ((found - y).square() * w).sum() / w.sum().clamp(min=1)


def shares(found: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    counted = w > 0.5
    share = w / (w.sum() + 1e-3)
    return ((found - y).square() * share).sum() + ((found - y).abs() * counted).sum() / max_of_one(counted.sum())


def max_of_one(number: torch.Tensor) -> torch.Tensor:
    return torch.maximum(number, torch.ones_like(number))


def total(found: torch.Tensor, y: torch.Tensor, _w: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(found, y, reduction="sum")


COUPLED: Mapping[str, Callable[[], nn.Module]] = {
    "Hugging Face's CLIP": hf_clip,
    "Hugging Face's SigLIP": hf_siglip,
    "two towers with a temperature": TwoTower,
    "Dice over the batch": Dice,
    "RMSE": lambda: Regression(rmse),
    "mixup by flip": Mixup,
    "SupCon": SupCon,
    "a sum": lambda: Regression(total),
}
GATHERED: Mapping[str, Callable[[], nn.Module]] = {
    "Barlow Twins": BarlowTwins,
    **{name: make for name, make in COUPLED.items() if name not in ("mixup by flip", "a sum")},
}
"""Models whose loss compares samples behind the last layer."""
WEIGHTED: Mapping[str, Callable[[], nn.Module]] = {
    "a weighted mean": lambda: Regression(weighted_mean),
    "a weighted mean, clamped": lambda: Regression(clamped_weighted_mean),
    "shares, and a count of at least one": lambda: Regression(shares),
}


def samples_for(name: str, count: int = 16) -> list[dict[str, torch.Tensor]]:
    """Return samples for a model of `COUPLED` or `WEIGHTED`, or of the kind that the name tells."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(count, *shape, generator=generator)

    if name.startswith("Hugging"):
        tokens = torch.randint(2, VOCAB - 1, (count, SEQ), generator=generator)
        tokens[:, -1] = 1
        batch = {"input_ids": tokens, "attention_mask": torch.ones(count, SEQ, dtype=torch.long)}
        batch["pixel_values"] = normal(3, 8, 8)
    elif name == "Barlow Twins":
        batch = {"x": normal(WIDTH), "y": normal(WIDTH)}
    elif name.startswith("two towers"):
        batch = {"x": normal(SEQ, WIDTH), "y": normal(SEQ, WIDTH)}
    elif name.startswith("Dice"):
        batch = {"pixels": normal(3, 8, 8), "masks": (normal(1, 8, 8) > 0.3).float()}
    elif name.startswith("sequences"):
        batch = {"x": normal(SEQ, WIDTH), "labels": torch.arange(count) % 5}
    elif name.startswith("tokens"):
        batch = {key: torch.randint(0, VOCAB, (count, SEQ), generator=generator) for key in ("ids", "labels")}
    elif name.startswith("episodes"):
        batch = {"returns": normal(SEQ, 1), "states": normal(SEQ, 4), "actions": normal(SEQ, 2)}
        batch["mask"] = (torch.arange(SEQ) >= torch.arange(count)[:, None] % 5).float()
    elif name.startswith("mixup"):
        batch = {"x": normal(WIDTH), "labels": torch.arange(count) % 5}
    elif name == "SupCon":
        batch = {"x": normal(WIDTH), "y": normal(WIDTH), "labels": torch.arange(count) % 3}
    else:
        batch = {"x": normal(WIDTH), "y": normal(1), "w": normal(1).abs() / 3}
    return [{key: field[index] for key, field in batch.items()} for index in range(count)]
