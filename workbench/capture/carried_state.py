"""Buffers that carry a value from one forward to the next: forward writes them, and what they hold reaches its loss.

A queue of keys, a codebook of averages or a running centre takes something of every batch: where the batch is divided,
each micro-batch meets another state, and replicas part. A counter or a power iteration takes nothing of the batch, and
advances once per micro-batch. The running averages of BatchNorm are read by evaluations only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.utils._pytree as pytree
from torch import fx, nn

from workbench.capture.batch_coupling import MADE_ANEW, described
from workbench.capture.dataflow import Dataflow
from workbench.capture.opaque import call_of
from workbench.capture.operations import (
    ancestors,
    arguments_of,
    is_random,
    mutated_arguments,
    op_name,
    reachable,
    shape_of,
    storage_of,
)
from workbench.capture.source_lines import line_of_node

_OVERWRITES = ("copy_", "fill_", "zero_")
"""Operations that leave nothing of what their first operand held."""


@dataclass(frozen=True)
class CarriedState:
    """The buffers through which a forward depends on those before it."""

    of_samples: tuple[str, ...] = ()
    """Name of each buffer that takes something of the batch, with the operation that writes it."""
    of_forwards: tuple[str, ...] = ()
    """Name of each buffer whose next value is known without the batch, with the operation that writes it."""


def carried_state(flow: Dataflow, loss: fx.Node, names: Mapping[int, str], model: str) -> CarriedState:
    """Return the state that a captured forward carries; `names` has the buffers' names by the ids of their tensors.

    Raises `CaptureError` for a tensor of the model that is no buffer: no checkpoint has it.
    """
    reads: defaultdict[int, list[fx.Node]] = defaultdict(list)
    for node, tensor in flow.tensors.items():
        if not isinstance(tensor, nn.Parameter):
            reads[id(tensor)].append(node)
    needed = ancestors([loss])
    found: dict[bool, list[str]] = {True: [], False: []}
    for identity, nodes in reads.items():
        writers = sorted((w for node in nodes for w in flow.writers.get(node, ())), key=flow.order.__getitem__)
        users = [(user, node) for node in nodes for user in node.users if user in needed]
        if writers and any(_reads(user, [node]) for user, node in users) and _reaches(flow, loss, nodes, writers):
            if identity not in names:
                raise line_of_node(writers[-1]).error(
                    model,
                    f"writes to the tensor {nodes[0].target}{line_of_node(writers[-1]).where}, which is no buffer, and "
                    "the next forward computes with it: no checkpoint would hold it. Register it: "
                    "self.register_buffer('state', tensor).",
                )
            name = names[identity]
            takes = any(_takes_of_batch(writer) for writer in writers)
            found[takes].append(f"the buffer {name}, written by {described(writers[-1])}")
    return CarriedState(tuple(found[True]), tuple(found[False]))


def _reaches(flow: Dataflow, loss: fx.Node, reads: list[fx.Node], writers: list[fx.Node]) -> bool:
    """Return True if the loss depends on what a buffer held before this forward."""
    old, holders = set(reads), set(reads)
    """Nodes whose values depend on it, and owners of memory that hold it."""
    for node in flow.order:
        if node.op != "call_function" or op_name(node) in MADE_ANEW:
            continue
        sources = [source for source in node.all_input_nodes if source in old or storage_of(source) in holders]
        is_whole = node in writers and op_name(node) in _OVERWRITES and shape_of(node.args[0]) == shape_of(reads[0])
        if is_whole and not any(source in old and source is not node.args[0] for source in sources):
            holders -= set(reads)
            old -= set(reads)
        elif _reads(node, sources):
            old.add(node)
            holders |= {storage_of(written) for written in mutated_arguments(node)}
    return loss in old


def _reads(node: fx.Node, sources: list[fx.Node]) -> bool:
    """Return True if an operation computes with one of its operands, and does not only update it."""
    if (call := call_of(node)) is not None:
        given = pytree.tree_leaves(node.args[1])
        unread = {given[at] for at in set(call.written) - set(call.read_again)}
        return any(source not in unread for source in sources)
    if op_name(node) == "batch_norm" and arguments_of(node)["training"]:
        return any(source not in node.args[3:5] for source in sources)
    return bool(sources)


def _takes_of_batch(writer: fx.Node) -> bool:
    """Return True if the value that is written depends on fields of the batch or on random numbers."""

    def sources(node: fx.Node) -> Any:
        return () if node.op == "call_function" and op_name(node) in MADE_ANEW else node.all_input_nodes

    return any(node.op == "placeholder" or is_random(node) for node in reachable([writer], sources))
