"""A forward as text that another process can compare: its operations with their numbers, and their wiring.

A plan stores it, and each rank compares what it has captured. The two may have been captured for another number of
samples, so that sizes may be larger in proportion.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import fx

    from workbench.capture.graph import Block, Graph
    from workbench.capture.source_lines import SourceLine

_NUMBER = re.compile(r"(?<![\w.%-])-?\d+(?![\w.])")
"""A whole number in the text of an opaque call: no node (`%3`), and no part of a name or of a fraction."""
_SIZES = frozenset({"size", "shape", "split_size", "split_sizes", "repeats", "output_size", "start", "end", "length"})
"""Names of the arguments of operations that may grow with the number of samples."""


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


def computation_of(graph: Graph, described: object) -> Computation:
    """Return what the forward of a captured model computes; `described` says what it is made of."""
    import torch

    values = (node.meta.get("val") for block in graph.blocks for node in block.code.graph.nodes)
    tensor = next(value for value in values if isinstance(value, torch.Tensor))
    named = sorted(f"{name} {spec.shape}" for name, spec in graph.parameters.items())
    origin = _digest(json.dumps([described, torch.__version__, tensor.device.type], sort_keys=True, default=str))
    return Computation(origin, graph.micro_batch, _digest(" ".join(named)), tuple(word for word, _ in _words(graph)))


def line_of_operation(graph: Graph, index: int) -> SourceLine:
    """Return the line of the operation of that index in `computation_of`; of the last one before it that has a line."""
    from workbench.capture.source_lines import SourceLine, line_of_node

    nodes = [node for _, node in list(_words(graph))[: index + 1] if node is not None]
    lines = (line for node in reversed(nodes) if (line := line_of_node(node)).file)
    return next(lines, SourceLine())


def _digest(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


def _words(graph: Graph) -> Iterator[tuple[str, fx.Node | None]]:
    """Yield each operation as a hash, with its sizes behind it, and its node."""
    made = {name: index for index, name in enumerate(name for block in graph.blocks for name in block.sends)}
    types: dict[str, int] = {}
    for block in graph.blocks:
        reads = [made[name] for name in block.receives]
        is_new = block.block_type not in types
        known = types.setdefault(block.block_type, len(types))
        yield f"{known} {_digest(str((block.parameters, reads, block.inputs)))}", None
        yield from _of_block(block) if is_new else ()


def _of_block(block: Block) -> Iterator[tuple[str, fx.Node]]:
    from workbench.capture.block_extraction import line_of_digest
    from workbench.capture.opaque import call_of

    position = {node: index for index, node in enumerate(block.code.graph.nodes)}
    for node in block.code.graph.nodes:
        sizes: list[int] = []
        text = line_of_digest(node, block.code, position, given=_without_sizes(node, sizes))
        if call_of(node) is not None:  # whose shapes stand in its text
            sizes += map(int, _NUMBER.findall(text))
            text = _NUMBER.sub("size", text)
        yield ":".join([_digest(text), *map(str, sizes)]), node


def _without_sizes(node: fx.Node, sizes: list[int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a node without the sizes among them, which are appended to `sizes`."""
    from torch.fx.node import map_aggregate

    from workbench.capture.operations import schema_of

    def taken(value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            sizes.append(value)
            return "size"
        return value

    schema = schema_of(node)
    formals = [formal.name for formal in schema.arguments] if schema is not None else []
    args = [map_aggregate(arg, taken) if name in _SIZES else arg for arg, name in zip(node.args, formals, strict=False)]
    kwargs = {name: map_aggregate(arg, taken) if name in _SIZES else arg for name, arg in node.kwargs.items()}
    return (*args, *node.args[len(args) :]), kwargs
