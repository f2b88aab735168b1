"""What a model computes, as a value: a `Graph` of `Block`s.

A block is one repeated module (a layer) or the run of operations between two such. It is *functional*:
its code takes parameters, buffers, values of earlier blocks and batch inputs as arguments and returns
the values that later blocks need, so that identical layers share one piece of code.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from workbench.tensors import TensorSpec
from workbench.units import count, gib

if TYPE_CHECKING:
    import torch
    from torch import fx


@dataclass(frozen=True)
class Block:
    """One atom of partitioning. Arguments of `code`, in order: parameters, buffers, receives, inputs, counts."""

    index: int
    name: str
    """The module path that it came from (`bert.encoder.layer.0`), or `first … last` where it spans several."""
    block_type: str
    """Digest of the computation and its shapes; equal kinds share one `code`."""
    parameters: tuple[str, ...]
    """Canonical parameter names, in `code`'s order; tied parameters go by one name everywhere."""
    buffers: tuple[str, ...]
    receives: tuple[str, ...]
    """Values computed by earlier blocks."""
    inputs: tuple[str, ...]
    """Fields of the batch."""
    counts: tuple[int, ...]
    """Indices into `Graph.label_counts` of the loss normalisers that the block divides by."""
    sends: tuple[str, ...]
    """Values that later blocks read, then the loss if this block computes it."""
    code: fx.GraphModule = field(repr=False, compare=False)
    """`code(*parameters, *buffers, *receives, *inputs, *counts) -> tuple of sends`; nodes carry `meta["val"]`."""


@dataclass(frozen=True)
class LabelCount:
    """Normaliser of one mean-reduced loss: the labels that count in the whole global batch.

    `code(**batch)` returns how many labels of this (part of the) batch are not ignored.
    """

    inputs: tuple[str, ...]
    code: fx.GraphModule = field(repr=False, compare=False)


@dataclass(frozen=True)
class Graph:
    """A captured model at one micro-batch size; holds no weights and touches no device."""

    model: str
    signature: str
    """Digest of parameter names, shapes and blocks: what a plan is made for."""
    micro_batch: int
    blocks: tuple[Block, ...]
    batch: Mapping[str, TensorSpec]
    """The batch fields that the model takes, at `micro_batch`."""
    values: Mapping[str, TensorSpec]
    """Everything that some block sends, by name."""
    parameters: Mapping[str, TensorSpec]
    """By canonical name: the first name in the model's own order."""
    buffers: Mapping[str, TensorSpec]
    ties: Mapping[str, tuple[str, ...]]
    """Canonical name -> its other names."""
    loss: str
    label_counts: tuple[LabelCount, ...]
    frozen: frozenset[str] = frozenset()
    """Parameters that get no gradient: `requires_grad=False`, or only used under `no_grad` or behind `detach`."""
    learned: frozenset[str] = frozenset()
    """Values that a gradient has to come back to, for the sake of some parameter before them; the loss too."""
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)
    """Unnamed tensors that forward made from Python numbers; empty of values on the meta device."""

    @property
    def parameter_count(self) -> int:
        return sum(spec.numel for spec in self.parameters.values())

    @property
    def block_types(self) -> tuple[str, ...]:
        """The distinct kinds, in order of first appearance."""
        return tuple(dict.fromkeys(block.block_type for block in self.blocks))

    def variant(self, block: Block) -> tuple[object, ...]:
        """Equal for blocks that compute the same, and the same gradients: of one kind, some may be frozen."""
        trained = tuple(name not in self.frozen for name in block.parameters)
        return block.block_type, trained, tuple(name in self.learned for name in block.receives)

    def block_parameters(self, first: int, end: int) -> dict[str, TensorSpec]:
        """Parameters that blocks `first` … `end - 1` need; a tied one counts once."""
        names = dict.fromkeys(name for block in self.blocks[first:end] for name in block.parameters)
        return {name: self.parameters[name] for name in names}

    def crossing(self, cut: int) -> tuple[str, ...]:
        """Values that must be sent if a stage ends before block `cut`: made earlier, read at or after it."""
        made = [name for block in self.blocks[:cut] for name in block.sends]
        read = {name for block in self.blocks[cut:] for name in block.receives}
        return tuple(name for name in made if name in read)

    def finished(self, first: int, end: int) -> tuple[tuple[str, ...], ...]:
        """For each of blocks `first` … `end - 1`, what is in nobody's use after it: no later one of them reads it, it
        is not sent on, and it is not the loss."""
        last = {name: block.index for block in self.blocks[first:end] for name in (*block.receives, *block.sends)}
        for name in (*self.crossing(end), self.loss):
            last.pop(name, None)
        return tuple(tuple(name for name, at in last.items() if at == index) for index in range(first, end))

    def __repr__(self) -> str:
        frozen = sum(self.parameters[name].numel for name in self.frozen)
        trained = f" ({count(self.parameter_count - frozen)} trained)" if frozen else ""
        return (
            f"Graph({self.model}: {count(self.parameter_count)} parameters{trained}, {len(self.blocks)} blocks of "
            f"{len(self.block_types)} types, micro-batch {self.micro_batch})"
        )

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{b.index}</td><td>{html.escape(b.name)}</td><td><code>{b.block_type[:8]}</code></td>"
            f"<td style='text-align:right'>{count(sum(self.parameters[p].numel for p in b.parameters))}</td>"
            f"<td style='text-align:right'>{gib(sum(self.values[v].nbytes for v in b.sends))}</td></tr>"
            for b in self.blocks
        )
        return (
            f"<b>{html.escape(repr(self))}</b><table><tr><th>block</th><th>module</th><th>type</th>"
            f"<th>parameters</th><th>sends</th></tr>{rows}</table>"
        )


def spec_of(name: str, value: torch.Tensor | Any) -> TensorSpec:
    """The `TensorSpec` of a real, meta or fake tensor."""
    return TensorSpec(name, tuple(int(size) for size in value.shape), str(value.dtype).removeprefix("torch."))
