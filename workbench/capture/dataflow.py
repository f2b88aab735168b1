"""Questions about an exported graph: what is free of parameters, what mutates, what aliases what."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

_RANDOM = ("dropout", "rand", "bernoulli", "multinomial", "normal")


def tensor_at(module: nn.Module, target: str) -> Any:
    """What a `get_attr` node of that target reads."""
    value: Any = module
    for part in target.split("."):
        value = getattr(value, part)
    return value


def is_random(node: fx.Node) -> bool:
    """Whether the node draws random numbers (an attention counts only with a dropout above 0)."""
    if node.op != "call_function":
        return False
    name = str(node.target)
    if "scaled_dot_product" in name:
        rate = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
        return bool(rate)
    if "dropout" in name:
        return len(node.args) < 3 or (bool(node.args[1]) and bool(node.args[2]))
    return any(word in name for word in _RANDOM) and "layer_norm" not in name and "batch_norm" not in name


def _schema(node: fx.Node) -> Any:
    if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema
    return None


def mutates(node: fx.Node) -> tuple[fx.Node, ...]:
    """The arguments that the node writes to."""
    schema = _schema(node)
    if schema is None:
        return ()
    if "batch_norm" in schema.name and schema.name != "aten::_batch_norm_no_update":
        return tuple(arg for arg in node.args[3:5] if isinstance(arg, fx.Node) and _training(node))
    if not schema.is_mutable:
        return ()
    return tuple(
        arg
        for arg, formal in zip(node.args, schema.arguments, strict=False)
        if formal.alias_info is not None and formal.alias_info.is_write and isinstance(arg, fx.Node)
    )


def _training(node: fx.Node) -> bool:
    return len(node.args) > 5 and bool(node.args[5])


def storage_of(node: fx.Node) -> fx.Node:
    """The node that owns the memory which `node` may be a view of (conservative: follows first arguments)."""
    while True:
        schema = _schema(node)
        aliasing = schema is not None and any(r.alias_info is not None for r in schema.returns)
        maybe_view = schema is not None and schema.name in ("aten::reshape", "aten::contiguous", "aten::to")
        source = node.args[0] if node.args else None
        if not (aliasing or maybe_view) or not isinstance(source, fx.Node):
            return node
        node = source


@dataclass(frozen=True)
class Dataflow:
    """Facts about one exported graph that splitting needs."""

    order: Mapping[fx.Node, int]
    tensors: Mapping[fx.Node, torch.Tensor]
    """What each `get_attr` of a tensor reads."""
    free: frozenset[fx.Node]
    """Depends only on the batch and constants, and draws nothing: may be computed again anywhere."""
    live: frozenset[fx.Node]
    """Needed for the loss or for a mutation."""
    writers: Mapping[fx.Node, tuple[fx.Node, ...]]
    """Storage owner -> nodes that write to it, in order."""

    def identity(self, owner: fx.Node) -> int:
        """Equal for two reads of one buffer or parameter."""
        return id(self.tensors.get(owner, owner))

    def with_free_sources(self, nodes: Iterable[fx.Node]) -> set[fx.Node]:
        """The free nodes and attributes that `nodes` need, with the in-place writes that belong to them."""
        needed: set[fx.Node] = set()
        stack = list(nodes)
        while stack:
            for source in stack.pop().all_input_nodes:
                if source in needed or not (source in self.free or source.op == "get_attr"):
                    continue
                needed.add(source)
                stack.append(source)
                writes = [w for w in self.writers.get(storage_of(source), ()) if w in self.free and w not in needed]
                needed.update(writes)
                stack.extend(writes)
        return needed


def writes_arguments(code: fx.GraphModule) -> bool:
    """Whether a block's code changes a buffer that it is given: running it twice is not running it once."""
    nodes = code.graph.nodes
    return any(storage_of(written).op == "placeholder" for node in nodes for written in mutates(node))


def analyse(module: fx.GraphModule, loss: fx.Node) -> Dataflow:
    nodes = list(module.graph.nodes)
    writers: defaultdict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in nodes:
        for written in mutates(node):
            writers[storage_of(written)].append(node)
    tensors = {
        node: value
        for node in nodes
        if node.op == "get_attr" and isinstance(value := tensor_at(module, str(node.target)), torch.Tensor)
    }
    free = _free_nodes(nodes, tensors, writers, bound=set())
    bound: set[fx.Node] = set()
    while tainted := _written_from_outside(free, writers):
        bound |= tainted
        free = _free_nodes(nodes, tensors, writers, bound)
    live = _ancestors([loss, *(node for node in nodes if mutates(node))])
    return Dataflow(
        order={node: index for index, node in enumerate(nodes)},
        tensors=tensors,
        free=frozenset(free),
        live=frozenset(live),
        writers={owner: tuple(found) for owner, found in writers.items()},
    )


def _free_nodes(
    nodes: list[fx.Node],
    tensors: Mapping[fx.Node, torch.Tensor],
    writers: Mapping[fx.Node, list[fx.Node]],
    bound: set[fx.Node],
) -> set[fx.Node]:
    free: set[fx.Node] = set()
    written = {id(tensors[owner]) for owner in writers if owner in tensors}
    for node in nodes:
        if storage_of(node) in bound:
            continue
        if node.op == "placeholder":
            free.add(node)
        elif node in tensors:
            if not isinstance(tensors[node], nn.Parameter) and id(tensors[node]) not in written:
                free.add(node)
        elif node.op == "call_function" and all(i in free for i in node.all_input_nodes) and not is_random(node):
            free.add(node)
    return free


def _written_from_outside(free: set[fx.Node], writers: Mapping[fx.Node, list[fx.Node]]) -> set[fx.Node]:
    """Free storages that some node which is not free writes to: they belong to one place after all."""
    return {owner for owner, found in writers.items() if owner in free and any(w not in free for w in found)}


def _ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    seen: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(node.all_input_nodes)
    return seen
