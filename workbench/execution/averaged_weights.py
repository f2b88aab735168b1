"""The moving average of a rank's trained weights, and the swap that lets evaluations compute with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from workbench.execution.parallel.sharding import local


class AveragedWeights:
    """An exponential moving average of weights, sharded as they are: `torch.optim.swa_utils.get_ema_multi_avg_fn`."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        """`parameters` are those of the rank, after sharding; the trained ones among them are averaged."""
        self._decay = decay
        self._parameters = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        self.values = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        """The averages by name, each like its parameter."""

    @property
    def _shards(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        averages = [local(value) for value in self.values.values()]
        return averages, [local(parameter.detach()) for parameter in self._parameters.values()]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take the weights after step `step` (from 0) into the average; the first ones become the average."""
        averages, weights = self._shards
        if averages:
            torch._foreach_lerp_(averages, weights, 1.0 - self._decay if step else 1.0)

    @torch.no_grad()
    def restart(self) -> None:
        """Let the present weights be the average."""
        for average, weight in zip(*self._shards, strict=True):
            average.copy_(weight)

    @contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """Let parameters hold the averages meanwhile; their own values are kept where the averages were."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        averages, _ = self._shards
        for average, parameter in zip(averages, self._parameters.values(), strict=True):
            weight, kept = local(parameter.detach()), average.clone()
            average.copy_(weight)
            weight.copy_(kept)  # which changes the parameter's version, so that its bf16 copy is made anew
