"""The part of a loss that compares samples, cut off where each sample still has rows of its own.

What lies before the cut (the towers of CLIP) runs over micro-batches. Its results are gathered over the micro-batches
and replicas of a step, and the rest, the tail, runs over the whole batch (GradCache, arXiv:2101.06983).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import torch
from torch import fx

from workbench.base.errors import CaptureError
from workbench.capture.blocks.block_extraction import NodeGroup
from workbench.capture.coupling.batch_coupling import NONE, BatchWalk, described
from workbench.capture.export.opaque import call_of
from workbench.capture.graph import Graph, SampleDim
from workbench.capture.losses import MeanLoss
from workbench.capture.operations import (
    LOGS,
    MOVED,
    Dataflow,
    ancestors,
    arguments_of,
    descendants,
    is_random,
    mutated_arguments,
    op_name,
    shape_of,
    storage_of,
)

TAIL = "gathered loss"
"""Name of the block that computes the tail."""


def split_tail(
    flow: Dataflow,
    loss: fx.Node,
    means: Iterable[MeanLoss],
    outputs: Collection[fx.Node],
    groups: Sequence[NodeGroup],
    model: str,
    in_training: bool,
) -> tuple[tuple[NodeGroup, ...], tuple[SampleDim, ...]]:
    """Return the groups of a graph with its tail as the last one, and the values that it reads of each sample.

    The tail computes the loss and `outputs`. The graph was captured with two samples or more. BatchNorm outside of
    layers belongs to the tail also where it was not captured `in_training`, so that both graphs are cut alike. Raises
    `CaptureError` unless the tail is a part of the last group, so that no layer is computed over the whole batch.
    """
    walk = _RowWalk(flow, ancestors([loss, *outputs]), frozenset(mean.node for mean in means))
    computed = [node for group in groups for node in group.nodes]
    mixing = (node for node in walk.mixing(computed, loss) if LOGS not in node.meta)
    tail = {*mixing, *(node for node in outputs if node in computed)}
    if not in_training:
        tail |= {node for node in groups[-1].nodes if op_name(node) == "batch_norm"}
    for node in list(tail):
        tail |= descendants(node).intersection(computed)
    for node in reversed(groups[-1].nodes):  # what is computed from parameters alone (a temperature), and views
        users = [user for user in node.users if user in flow.live]
        is_light = walk.state(node) == NONE or op_name(node) in MOVED
        if node not in tail and is_light and users and tail.issuperset(users):
            tail.add(node)
    first = next((node for node in computed if node in tail), loss)
    obstacle, at = _obstacle(flow, tail, computed, groups)
    first = at or first
    if obstacle:  # fields of the batch may be mixed before any parameter is read, which says more
        of_fields = flow.recomputable & ancestors([first])
        mixed = (node for node in flow.order if node in of_fields and walk.state(node) < NONE)
        mixers = (node for node in mixed if all(walk.state(source) >= NONE for source in node.all_input_nodes))
        if (mixer := next(mixers, None)) is not None:
            obstacle, first = "its first layers are given mixtures of samples, which other replicas have", mixer
    sources = dict.fromkeys(source for node in computed if node in tail for source in node.all_input_nodes)
    read = [s for s in sources if s in set(computed) - tail]
    if not obstacle and not any(s.meta["val"].is_floating_point() for s in read if shape_of(s)):
        obstacle = "its first operation compares samples"
    if not obstacle and any(walk.state(source) < 0 or not shape_of(source) for source in read):
        obstacle = "it mixes values of each sample with others"
    if obstacle:
        raise CaptureError(f"The samples of {model} cannot be gathered: {obstacle} ({described(first)}).")
    *before, last = groups
    rest = tuple(node for node in last.nodes if node not in tail)
    kept = [*before, NodeGroup(last.name, rest)] if rest else before
    rows = tuple(SampleDim(source.name, walk.state(source), walk.groups[source]) for source in read)
    return (*kept, NodeGroup(TAIL, tuple(node for node in last.nodes if node in tail))), rows


def _obstacle(
    flow: Dataflow, tail: set[fx.Node], computed: list[fx.Node], groups: Sequence[NodeGroup]
) -> tuple[str, fx.Node | None]:
    """Return the reason why a tail cannot run apart from what lies before it, and the operation; empty if it can."""
    if not tail.issubset(groups[-1].nodes):
        return "a layer before its loss may compare samples", None
    for node in (each for each in computed if each in tail):
        if call_of(node) is not None:
            return "its loss runs as written in part", node
        if is_random(node):
            return "its loss draws random numbers", node
    towers = [node for node in computed if node not in tail]
    read = {flow.identity(storage_of(used)) for node in towers for used in (node, *node.all_input_nodes)}
    for node in computed:
        for written in map(storage_of, mutated_arguments(node)):
            if node not in tail and written in flow.tensors:
                return "a layer updates a buffer, which would happen twice", node
            if node in tail and flow.identity(written) in read:
                return "its loss writes to a value of a layer", node
    return "", None


class _RowWalk(BatchWalk):
    """Finds the operations that mix samples, and those whose results have no rows of samples."""

    def state(self, node: fx.Node) -> int:
        """Return the batch dim of a node, or a negative number without one."""
        return self._states[node]

    def mixing(self, computed: Iterable[fx.Node], loss: fx.Node) -> list[fx.Node]:
        """Return the nodes that mix samples, and those without rows of samples that depend on the batch."""
        self.coupling(loss)
        marked = {*self._coupled, *self._doubtful}
        return [
            node
            for node in computed
            if self._states[node] < NONE
            or node in marked
            or node not in self._needed
            or (op_name(node) == "batch_norm" and arguments_of(node)["training"])
        ]


# Rows of samples, joined over micro-batches and parted again.


def join_rows(rows: SampleDim, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the value of the whole batch, given those of its micro-batches in order."""
    apart = [part.unflatten(rows.dim, (rows.groups, -1)) for part in parts]
    return torch.cat(apart, rows.dim + 1).flatten(rows.dim, rows.dim + 1)


def part_rows(rows: SampleDim, whole: torch.Tensor, parts: int) -> list[torch.Tensor]:
    """Return the micro-batches of a value of the whole batch: the inverse of `join_rows`."""
    apart = whole.unflatten(rows.dim, (rows.groups, -1)).chunk(parts, rows.dim + 1)
    return [part.flatten(rows.dim, rows.dim + 1) for part in apart]


def with_tail_of(part: Graph, whole: Graph) -> Graph:
    """Return the graph of a micro-batch with the tail of the graph of the whole batch as its last block.

    Raises `CaptureError` if the two graphs differ in more than the number of samples.
    """
    [*_, of_part], [*_, tail] = part.blocks, whole.blocks
    alike = [(g.gathered, [b.name for b in g.blocks], [c.inputs for c in g.label_counts]) for g in (part, whole)]
    read = [(block.parameters, block.receives, block.inputs, block.counts) for block in (of_part, tail)]
    if alike[0] != alike[1] or read[0] != read[1]:
        raise CaptureError(
            f"The samples of {part.model} cannot be gathered: its forward computes otherwise with {whole.micro_batch} "
            f"samples than with {part.micro_batch}."
        )
    own = {name: f"{name} of {TAIL}" for name in whole.constants}
    tail = replace(tail, buffers=tuple(own.get(name, name) for name in tail.buffers))
    return replace(
        part,
        blocks=(*part.blocks[:-1], tail),
        constants={**part.constants, **{own[name]: value for name, value in whole.constants.items()}},
        buffers={**part.buffers, **{own[name]: whole.buffers[name] for name in own}},
    )
