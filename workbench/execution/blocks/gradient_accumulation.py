"""Gradients added to those of earlier micro-batches: a block's weights together.

PyTorch adds a bf16 tensor to an fp32 one in a kernel for each, without its wide loads: at 2.2 of an H200's 4.3 TB/s
(BERT of width 2560, two devices under tensor parallelism: 15 of 180 ms a step of eight micro-batches). What the
compiler makes of the same list is one kernel. The numbers are the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import fx, nn

WORTH_COMPILING = 4 << 20
"""Elements of a block, at least: PyTorch adds fewer in 20 µs, and a kernel takes a second or more to compile."""


class Sums:
    """Of one rank. `compiles`: in a kernel of the compiler's for each list of shapes that is worth it, from its first
    use on."""

    def __init__(self, compiles: bool) -> None:
        self._compiles = compiles
        self._compiled: dict[Hashable, Callable[..., None]] = {}

    @torch.no_grad()
    def give(
        self,
        weights: Sequence[nn.Parameter],
        gradients: Sequence[torch.Tensor],
        begin: Callable[[Sequence[nn.Parameter]], None],
    ) -> None:
        """Add to the gradients of weights, which `begin` makes, not filled, where there are none yet."""
        firsts = [(w, gradient) for w, gradient in zip(weights, gradients, strict=True) if w.grad is None]
        later = [(w.grad, gradient) for w, gradient in zip(weights, gradients, strict=True) if w.grad is not None]
        if firsts:
            begin([weight for weight, _ in firsts])
            made = [weight.grad for weight, _ in firsts if weight.grad is not None]
            torch._foreach_copy_(made, [gradient for _, gradient in firsts])  # twice as fast as `copy_` between dtypes
        if later:
            self._add([earlier for earlier, _ in later], [gradient for _, gradient in later])

    def _add(self, into: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        if not self._compiles or sum(tensor.numel() for tensor in into) < WORTH_COMPILING:
            torch._foreach_add_(into, values)
            return
        tensors = into + values
        key = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors)
        if key not in self._compiled:
            self._compiled[key] = torch.compile(_additions(len(into)), dynamic=False, fullgraph=True)
        self._compiled[key](*tensors)


def _additions(count: int) -> fx.GraphModule:
    """A graph module of its own, since the compiler keeps one cache for each."""
    graph = fx.Graph()
    into, values = ([graph.placeholder(f"{name}{index}") for index in range(count)] for name in ("into", "value"))
    graph.call_function(torch.ops.aten._foreach_add_.List, (into, values))
    graph.output(())
    return fx.GraphModule(nn.Module(), graph)
