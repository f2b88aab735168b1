"""Small models that each exercise one rule of capture, their batches, and an interpreter of captured graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from tests.distributed import zoo
from tests.exhaustive import EXHAUSTIVE
from workbench.capture import Graph, capture, spec_of

Batch = dict[str, torch.Tensor]


class Net(nn.Module):
    """A stem, four residual layers and a head; the models below change one thing about it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4))
        self.head = nn.Linear(16, 5)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.stem(x)))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.logits(x), labels)


class PreActivation(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv2(functional.relu_(self.norm2(self.conv1(functional.relu_(self.norm1(x))))))


class OverwritesItsInput(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        functional.relu_(x.view_as(x))
        return x + self.conv1(x)


class ResStage(nn.Module):
    def __init__(self, width: int, depth: int, layer: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.project = nn.Conv2d(width // 2, width, 1)
        self.layers = nn.ModuleList(layer(width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.project(x)
        for layer in self.layers:
            x = layer(x)
        return x


class ResNet(nn.Module):
    """Lists in lists, as Swin and the ResNets of `transformers` have them."""

    def __init__(self, layer: Callable[[int], nn.Module] = PreActivation) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.stages = nn.Sequential(ResStage(8, 2, layer), ResStage(16, 3, layer))
        self.head = nn.Linear(16, 5)

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.head(self.stages(self.stem(pixels)).mean((2, 3))), labels)


class CalledByName(Net):
    """A model that calls `layer.forward`, as SqueezeBERT does: no hook sees the layers themselves."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer.forward(x)
        return x


class NoGradStatistic(Net):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            with torch.no_grad():
                scale = layer[0].weight.abs().mean() + x.abs().mean()
            x = x + layer(x) / scale
        return x


class NoGradHalf(Net):
    """Frozen lower layers, with one nested region that is not."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for layer in self.layers[:2]:
                x = x + layer(x)
            with torch.enable_grad():
                y = self.layers[2](x)
        return x + y + self.layers[3](x)


class NoGradBuffers(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(16))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def body(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
            self.steps += 1
        return super().body(x - self.average)


class AssignedBuffer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(16))

    def body(self, x: torch.Tensor) -> torch.Tensor:
        before = self.average
        self.average = 0.9 * before + 0.1 * x.detach().mean(0)
        return super().body(x - before)


class NoGradNoise(Net):
    """Noise that depends on no parameter and must still be drawn once."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            noise = functional.dropout(x, 0.5)
        hidden = self.body(self.stem(x + noise))
        return functional.cross_entropy(self.head(hidden), labels) + (hidden[:, :8] * noise).mean()


class AutocastForward(Net):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x, labels)


class Constants(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", torch.arange(16.0) / 16, persistent=False)
        self.plain = torch.linspace(0, 1, 16)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return super().body(x * torch.tensor([1.0, 2.0] * 8) + self.positions + self.plain) + torch.tensor(0.5)


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.stem.requires_grad_(False)
        self.layers[1].requires_grad_(False)


class WritesLearned(Frozen):
    """A trained value is written into a frozen one, which is then read by its first name."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        x.view(-1).mul_(self.layers[0](x.clone()).view(-1))
        return x + self.layers[2](x)


class OneLayer(nn.Module):
    """One layer used four times, in no list of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, 16), nn.Linear(16, 5)
        self.layer = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for _ in range(4):
            x = self.layer(x)
        return functional.cross_entropy(self.head(x), labels)


class SharedNorm(Net):
    """The same BatchNorm before the first and after the last layer: its statistics have one home."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(super().body(self.norm(x)))


class UpdatesAfterTheLoss(Net):
    """A model whose last layer returns the loss; a buffer update follows that belongs to no layer."""

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 5)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return functional.cross_entropy(self.linear(x), labels)

    def __init__(self) -> None:
        super().__init__()
        self.layers.append(self.Last())
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers[:-1]:
            x = layer(x)
        loss = self.layers[-1](x, labels)
        self.steps += 1
        return loss


class Weighted(Net):
    """A weighted mean and a negative log-likelihood, under autocast; label 0 is ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.tensor([3.0, 1.0, 0.5, 2.0, 0.1]))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.body(self.stem(x)))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            weighted = functional.cross_entropy(logits, labels, weight=self.weight, ignore_index=0)
        return weighted + functional.nll_loss(functional.log_softmax(logits, -1), labels, ignore_index=0)


class Smoothed(Weighted):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.body(self.stem(x)))
        return functional.cross_entropy(logits, labels, weight=self.weight, ignore_index=0, label_smoothing=0.1)


class LayerDrop(Net):
    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.layerdrop = rate

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.training and torch.rand([]) < self.layerdrop:
                continue
            x = x + layer(x)
        return x


class Codebook(Net):
    """A vector quantisation whose codebook has the name of an attribute of `GraphModule` and is the head's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Embedding(5, 16)
        self.head = nn.Linear(16, 5, bias=False)
        self.head.weight = self.code.weight

    def body(self, x: torch.Tensor) -> torch.Tensor:
        x = super().body(x)
        nearest = self.code((x[:, None] - self.code.weight).square().sum(-1).argmin(-1))
        return x + (nearest - x).detach() + functional.mse_loss(nearest, x.detach())


class LoopsOverExperts(Net):
    """A mixture of experts that selects the rows of each expert in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 3)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def body(self, x: torch.Tensor) -> torch.Tensor:
        x = super().body(x)
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows, rank = torch.where(chosen == index)
            out[rows] += expert(x[rows]) * weights[rows, rank, None]
        return x + out


class Checks(Net):
    """Checks of values that raise, in the ways that models write them."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if labels is not None and labels.max() >= 5:
            raise ValueError(f"{labels.max()} is no class.")
        if (labels < 0).any() or x.abs().max().item() > 100:
            raise ValueError("x or labels are out of range.")
        loss = super().forward(x, labels)
        assert not torch.isnan(loss), "The loss is not a number."
        return loss


SMALL: dict[str, Callable[[], nn.Module]] = {
    model_class.__name__: model_class
    for model_class in (
        CalledByName,
        NoGradStatistic,
        NoGradHalf,
        NoGradBuffers,
        AssignedBuffer,
        NoGradNoise,
        AutocastForward,
        Constants,
        Frozen,
        OneLayer,
        SharedNorm,
        UpdatesAfterTheLoss,
        Weighted,
        Smoothed,
        LayerDrop,
        Codebook,
        LoopsOverExperts,
        Checks,
    )
}
IMAGES: dict[str, Callable[[], nn.Module]] = {"ResNet": ResNet, "Overwrites": lambda: ResNet(OverwritesItsInput)}
ALWAYS = ("bert", "gpt2", "albert", "t5", "electra-discriminator", *zoo.BY_HAND)
"""Models of the zoo that are always tested; the others only in `make test-exhaustive`."""
ROUNDED = ("llama", "qwen3", "mixtral", "electra-discriminator", "Smoothed")
"""Models that are equal up to rounding: a causal mask becomes a flag, a mean over a selection a quotient."""
MODELS: dict[str, Callable[[], nn.Module]] = {
    **{name: make for name, make in zoo.MODELS.items() if name in ALWAYS or EXHAUSTIVE},
    "bert with dropout": lambda: zoo.bert_pretraining(0.1),
    **SMALL,
    **IMAGES,
}


def batch_for(name: str, size: int = 4, seed: int = 0) -> Batch:
    if name in zoo.MODELS or name.startswith("bert"):
        return zoo.batch(name.partition(" ")[0], size, seed)
    generator = torch.Generator().manual_seed(seed)
    shape = (size, 3, 8, 8) if name in IMAGES else (size, 8)
    labels = torch.arange(size) % 5
    return {"pixels" if name in IMAGES else "x": torch.randn(shape, generator=generator), "labels": labels}


def captured(model: nn.Module, batch: Batch, name: str = "model") -> Graph:
    return capture(model, {key: spec_of(key, value) for key, value in batch.items()}, name=name)


def interpret(graph: Graph, model: nn.Module, batch: Batch, counts: list[torch.Tensor] | None = None) -> torch.Tensor:
    """Run a graph, block after block over a table of values, and return the loss."""
    parameters = dict(model.named_parameters())
    buffers = {**dict(model.named_buffers()), **graph.constants}
    counts = counts or [count.code(*(batch[name] for name in count.inputs)).float() for count in graph.label_counts]
    values: Batch = {}
    for block in graph.blocks:
        sent = block.code(
            *(parameters[name] for name in block.parameters),
            *(buffers[name] for name in block.buffers),
            *(values[name] for name in block.receives),
            *(batch[name] for name in block.inputs),
            *(counts[index] for index in block.counts),
        )
        values |= dict(zip(block.sends, sent, strict=True))
    return values[graph.loss]


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    output = model(**batch)
    if isinstance(output, torch.Tensor):
        return output
    return output[0] if isinstance(output, tuple) else output["loss"]


def copies(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = make().train()
    return model, copy.deepcopy(model)
