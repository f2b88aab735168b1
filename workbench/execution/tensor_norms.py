"""Norms of each parameter, its gradient and its update, and a histogram of their elements for each layer.

A rank measures the elements that it counts: its shards, and of what several ranks hold whole, those of the first of
them. The sums over all ranks are the figures of whole tensors, under every plan. Nothing here runs in a step that is
not due.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from workbench.optimizers.parameters import local
from workbench.record.columns import NORMS

if TYPE_CHECKING:
    from collections.abc import Iterator

CHUNK = 16 << 20
"""Elements that are measured at once: their copy is all the memory of a device that a record needs."""
EXPONENTS = 256
"""Bins of a histogram: the exponents of fp32, 0 for zeros (and what is below 2**-126), 255 for what is not finite."""


class Measured(NamedTuple):
    """The figures of one step over whole tensors, in order of names and layers."""

    norms: Mapping[str, list[float]]
    """Norm of each parameter (`weights`), its gradient and its update; of a gradient and an update NaN if the step does
    not train the parameter."""
    counts: Mapping[str, list[list[int]]]
    """Elements of each layer by their binary exponent."""


class TensorNorms:
    """The measurement of one rank. `before_update`, `after_update` and `measured` are called in this order."""

    def __init__(
        self,
        every: int,
        steps: int,
        parameters: Mapping[str, nn.Parameter],
        counted: Collection[str],
        layers: Mapping[str, int],
        device: torch.device,
    ) -> None:
        """`layers` has the number of the layer of each trained parameter of the model, in the order of all ranks.

        `parameters` are those of this rank by name, and `counted` the names of those whose elements it counts.
        """
        self._every, self._steps, self._device = every, steps, device
        self._parameters = {name: parameters[name] for name in layers if name in counted}
        self._layers, self._places = layers, {name: place for place, name in enumerate(layers)}
        self._before: dict[str, torch.Tensor] = {}
        self.spent_s = 0.0
        """Seconds that the last step spent on its record."""

    def is_due(self, step: int) -> bool:
        """Return True if the update that makes `step` completed steps is measured."""
        return step == 1 or step % self._every == 0 or step == self._steps

    @torch.no_grad()
    def before_update(self) -> None:
        """Measure weights and gradients, which the optimiser may write over, and copy the weights to the host."""
        with self._timed(begins=True):
            shape = len(NORMS), len(self._layers)
            self._squares = torch.zeros(shape, dtype=torch.float64, device=self._device)
            self._trained = torch.zeros(shape[1], dtype=torch.float64, device=self._device)
            num_layers = 1 + max(self._layers.values(), default=-1)
            self._counts = torch.zeros(shape[0], num_layers, EXPONENTS, dtype=torch.int64, device=self._device)
            for name, parameter in self._parameters.items():
                weight = local(parameter.detach())
                self._add("weights", name, _parts(weight))
                if parameter.grad is not None:
                    self._add("gradients", name, _parts(local(parameter.grad)))
                    self._trained[self._places[name]] = 1.0
                    pins = weight.device.type == "cuda"
                    copy = torch.empty(weight.shape, dtype=weight.dtype, device="cpu", pin_memory=pins)
                    self._before[name] = copy.copy_(weight, non_blocking=pins)

    @torch.no_grad()
    def after_update(self) -> None:
        """Measure the difference of the weights to those before the update."""
        with self._timed():
            for name, before in self._before.items():
                pairs = zip(_parts(local(self._parameters[name].detach())), _parts(before), strict=True)
                self._add("updates", name, (now - then.to(now.device, non_blocking=True) for now, then in pairs))
            self._before = {}

    def measured(self) -> Measured:
        """Return the figures over all ranks; a collective."""
        with self._timed():
            if dist.is_initialized() and dist.get_world_size() > 1:
                for total in (self._squares, self._trained, self._counts):
                    dist.all_reduce(total)
            norms = self._squares.sqrt()
            norms[1:, self._trained == 0] = torch.nan
            return Measured(
                dict(zip(NORMS, norms.tolist(), strict=True)), dict(zip(NORMS, self._counts.tolist(), strict=True))
            )

    def _add(self, what: str, name: str, parts: Any) -> None:
        row, place, layer = list(NORMS).index(what), self._places[name], self._layers[name]
        for part in parts:
            values = part.float()
            self._squares[row, place] += torch.linalg.vector_norm(values, dtype=torch.float64).square()
            exponents = (values.view(torch.int32) >> 23) & 0xFF
            self._counts[row, layer] += torch.bincount(exponents, minlength=EXPONENTS)

    @contextmanager
    def _timed(self, begins: bool = False) -> Iterator[None]:
        """Add the time of the device and the host to `spent_s`, which the first part of a record begins anew."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        started = time.perf_counter()
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.spent_s = (0.0 if begins else self.spent_s) + time.perf_counter() - started


def _parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the elements of a tensor in flat chunks; those of complex numbers are their two parts."""
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return list(torch.split(real.reshape(-1), CHUNK))
