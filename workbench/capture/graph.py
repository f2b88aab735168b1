"""The value that capture returns: a `Graph` of `Block`s, which says what a model computes.

A block is one repeated module (a layer) or the run of operations between two such. It is *functional*: its code takes
parameters, buffers, values of earlier blocks and batch inputs as arguments and returns the values that later blocks
need, so that identical layers share one piece of code.
"""

from __future__ import annotations

import hashlib
import html
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from workbench.base.display import html_table
from workbench.base.tensors import TensorSpec
from workbench.base.units import count, gib

if TYPE_CHECKING:
    import torch
    from torch import fx, nn

    from workbench.capture.outputs import Outputs


@dataclass(frozen=True)
class Block:
    """The smallest unit that a stage can consist of; its fields are in the order of the arguments of `code`."""

    index: int
    name: str
    """Path of the module that it came from (`bert.encoder.layer.0`), or `first … last` if it spans several."""
    block_type: str
    """Digest of the computation and its shapes; blocks of one type share one `code`."""
    cost_type: str
    """The same, but equal for layers that cost the same: see `workbench.capture.blocks.block_extraction.digest`."""
    parameters: tuple[str, ...]
    """Canonical parameter names, in `code`'s order; tied parameters go by one name everywhere."""
    buffers: tuple[str, ...]
    """Buffer names, in `code`'s order."""
    receives: tuple[str, ...]
    """Values computed by earlier blocks."""
    inputs: tuple[str, ...]
    """Fields of the batch."""
    counts: tuple[int, ...]
    """Indices into `Graph.label_counts` of the loss normalisers that the block divides by."""
    sends: tuple[str, ...]
    """Values that later blocks read, and the loss if this block computes it."""
    returned: tuple[str, ...] = ()
    """Values of `sends` that no later block reads: forward returned them beside the loss (`Graph.outputs`), or logs
    them (`Graph.scalars`)."""
    code: fx.GraphModule = field(repr=False, compare=False, kw_only=True)
    """`code(*parameters, *buffers, *receives, *inputs, *counts) -> tuple of sends`; nodes carry `meta["val"]`."""

    @property
    def parameter_nodes(self) -> dict[fx.Node, str]:
        """The arguments of `code` that are parameters, in order, with the parameters' names."""
        return dict(zip(self.code.graph.find_nodes(op="placeholder"), self.parameters, strict=False))


@dataclass(frozen=True)
class LabelCount:
    """Divisor of one mean-reduced loss: the number of labels that count in the whole global batch."""

    inputs: tuple[str, ...]
    """Fields of the batch that `code` takes."""
    code: fx.GraphModule = field(repr=False, compare=False)
    """`code(**inputs)` returns the number of labels in this batch, or part of a batch, that are not ignored."""
    of_total: fx.GraphModule | None = field(default=None, repr=False, compare=False)
    """`of_total(count of the global batch)` returns the divisor, where that is another number than the count."""
    is_ratio: bool = False
    """True if blocks are given the divisor over that of their micro-batch alone, with which they multiply the loss."""

    def divisor(self, total: torch.Tensor) -> torch.Tensor:
        """Return what the loss is divided by, given the count of the global batch."""
        return total if self.of_total is None else self.of_total(total)


@dataclass(frozen=True)
class SampleDim:
    """Place of the samples in a value: dim `dim` holds `groups` × samples × any number of elements, in this order."""

    name: str
    dim: int
    groups: int = 1


@dataclass(frozen=True)
class ScalarValue:
    """One call of `workbench.log_scalar` in a captured forward."""

    name: str
    reduce: str
    value: str
    """Value of the graph that the call was given, computed for each micro-batch."""
    count: int | None
    """The mean loss (an index into `Graph.label_counts`) by whose labels micro-batches are weighted; None: equally."""


@dataclass(frozen=True)
class Graph:
    """A captured model at one micro-batch size; holds no weights and touches no device."""

    model: str
    signature: str
    """Digest of parameter names, shapes and types and of the batch's fields, which a plan must match."""
    micro_batch: int
    blocks: tuple[Block, ...]
    batch: Mapping[str, TensorSpec]
    """The batch fields that the model takes, at `micro_batch`."""
    values: Mapping[str, TensorSpec]
    """Values that blocks send, by name."""
    parameters: Mapping[str, TensorSpec]
    """Parameters by canonical name: the first name in the model's own order."""
    buffers: Mapping[str, TensorSpec]
    ties: Mapping[str, tuple[str, ...]]
    """Canonical name of a tied parameter -> its other names."""
    loss: str
    label_counts: tuple[LabelCount, ...]
    frozen: frozenset[str] = frozenset()
    """Parameters that get no gradient: `requires_grad=False`, or only used under `no_grad` or behind `detach`."""
    differentiated: frozenset[str] = frozenset()
    """Values, the loss included, that need a gradient because some trained parameter lies before them."""
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)
    """Unnamed tensors that forward made from Python numbers; empty of values on the meta device."""
    coupled: tuple[str, ...] = ()
    """Operations, with their lines, through which the samples of a batch influence one another's loss."""
    unknown_coupling: str = ""
    """The first operation, with its line, after which it is not known whether samples mix; empty if it is known."""
    gathered: tuple[SampleDim, ...] = ()
    """Values that the last block reads of the samples of all micro-batches together; none if it runs over each."""
    notes: tuple[str, ...] = ()
    """Sentences on what capture did that a user may not expect."""
    notes_if_divided: tuple[str, ...] = ()
    """Sentences that hold where a step has several micro-batches or replicas."""
    notes_if_accumulated: tuple[str, ...] = ()
    """Sentences that hold where a replica has several micro-batches."""
    loss_choice: Any = field(default=None, repr=False, compare=False)
    """The `loss` that capture was given, so that the model is captured again in the same way."""
    outputs: Outputs | None = field(default=None, repr=False, compare=False)
    """Structure and values that forward returned beside its loss, where an evaluation reads them."""
    scalars: tuple[ScalarValue, ...] = ()
    """Calls of `workbench.log_scalar`, where they were asked for."""
    tower_and_tail: Callable[[], Graph] | None = field(default=None, repr=False, compare=False)
    """Returns this graph with the part of its loss that compares samples as the last block, without another export;
    raises `CaptureError`. None if no operation mixes samples as far as is known."""

    @property
    def parameter_count(self) -> int:
        return sum(spec.numel for spec in self.parameters.values())

    @property
    def block_types(self) -> tuple[str, ...]:
        """Distinct block types, in order of first appearance."""
        return tuple(dict.fromkeys(block.block_type for block in self.blocks))

    def variant(self, block: Block) -> tuple[object, ...]:
        """Return a key that is equal for blocks of one cost that compute the same gradients (some may be frozen)."""
        trained = tuple(name not in self.frozen for name in block.parameters)
        return block.cost_type, trained, tuple(name in self.differentiated for name in block.receives)

    def block_parameters(self, first: int, end: int) -> dict[str, TensorSpec]:
        """Return the parameters that blocks `first` … `end - 1` need; a tied one counts once."""
        names = dict.fromkeys(name for block in self.blocks[first:end] for name in block.parameters)
        return {name: self.parameters[name] for name in names}

    def crossing(self, cut: int, with_outputs: bool = True) -> tuple[str, ...]:
        """Return the values that a stage which ends before block `cut` sends: made before it, read at or after it.

        The last stage receives the outputs, which are left out without `with_outputs`.
        """
        made = [name for block in self.blocks[:cut] for name in block.sends]
        read = {name for block in self.blocks[cut:] for name in block.receives}
        if self.outputs is not None and with_outputs:
            read |= set(self.outputs.names)
        return tuple(name for name in made if name in read)

    def last_uses(self, first: int, end: int) -> tuple[tuple[str, ...], ...]:
        """Return, for each of blocks `first` … `end - 1`, the values that can be freed after it.

        These are neither read by a later one of the blocks, nor sent on, nor the loss or another output.
        """
        last = {name: block.index for block in self.blocks[first:end] for name in (*block.receives, *block.sends)}
        for name in (*self.crossing(end), self.loss, *(() if self.outputs is None else self.outputs.names)):
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
        def words(block: Block) -> tuple[str, ...]:
            held = count(sum(self.parameters[name].numel for name in block.parameters))
            sent = gib(sum(self.values[name].nbytes for name in block.sends))
            return str(block.index), block.name, block.block_type[:8], held, sent

        table = html_table(("block", "module", "type", "parameters", "sends"), map(words, self.blocks))
        return f"<b>{html.escape(repr(self))}</b>{table}"


def signature(model: nn.Module, batch: Mapping[str, TensorSpec]) -> str:
    """Return a digest of the parameters' names, shapes and types and of the batch's fields without the micro-batch.

    It needs no export: a plan carries it, so that a plan made for another model is refused at once.
    """
    lines = [f"{name} {tuple(p.shape)} {p.dtype}" for name, p in model.named_parameters()]
    lines += [f"{name} {spec.shape[1:]} {spec.dtype}" for name, spec in batch.items()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Computation:
    """The operations of a forward for a number of samples."""

    origin: str
    """Digest of the experiment's model, loss and seed, of the version of torch and of the type of the device.

    Of another origin, the operations may be others for good reason.
    """
    samples: int
    parameters: str
    """Digest of the parameters' names and shapes in any order."""
    operations: tuple[str, ...]
    """A word for each operation of a block, or for a block that computes what an earlier one does."""

    def first_difference(self, other: Computation) -> int | None:
        """Return the index of the first operation that differs, apart from sizes in proportion to the samples.

        Returns None if there is none, or if the two are of other origins.
        """
        if self.origin != other.origin or self.operations == other.operations:
            return None
        pairs = zip(self.operations, other.operations, strict=False)
        for index, (mine, others) in enumerate(pairs):
            if mine != others and not self._in_proportion(mine, others, other.samples):
                return index
        lengths = len(self.operations), len(other.operations)
        return min(lengths) if lengths[0] != lengths[1] else None

    def _in_proportion(self, mine: str, others: str, samples: int) -> bool:
        (operation, *sizes), (other, *theirs) = mine.split(":"), others.split(":")
        if operation != other or len(sizes) != len(theirs):
            return False
        pairs = ((int(a), int(b)) for a, b in zip(sizes, theirs, strict=True))
        return all(a == b or a * samples == b * self.samples for a, b in pairs)
