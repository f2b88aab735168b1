"""Questions about an exported graph: what is free of parameters, what mutates, what aliases what."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn

from workbench.capture.division import DROPOUT

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_READ_BACK = (
    *("ctc_loss", "histc", "multinomial", "lstm", "gru", "rnn_", "grouped_mm"),
    *("linalg_", "cholesky", "logdet", "slogdet", "inverse", "lstsq", "triangular_solve", "svd"),
)
"""In the names of operations whose host may look at lengths, at factorisations that failed, or that keep random numbers
of their own (cuDNN's recurrent layers)."""
_NORMS = ("linalg_vector_norm", "linalg_norm", "linalg_matmul", "linalg_vecdot", "linalg_cross", "linalg_diagonal")
"""Which do not."""
_RATES = ("p", "dropout", "dropout_p")
"""What operations that can draw dropout call its rate."""
_WITH_STATISTICS = ("batch_norm", "instance_norm")
"""What they write to, their schemas do not say."""
_MAYBE_VIEWS = frozenset({"aten::reshape", "aten::contiguous", "aten::to", "aten::dropout"})


def tensor_at(module: nn.Module, target: str) -> Any:
    """What a `get_attr` node of that target reads."""
    value: Any = module
    for part in target.split("."):
        value = getattr(value, part)
    return value


def is_random(node: fx.Node) -> bool:
    """Whether the node draws random numbers (attention, a recurrent layer or a dropout: at a rate above 0)."""
    if _schema(node) is None or torch.Tag.nondeterministic_seeded not in node.target.tags:  # type: ignore[union-attr]
        return False
    given = _arguments(node)
    rates = [given[name] for name in _RATES if name in given]
    return all(rates) and given.get("train") is not False


def draws_again(code: fx.GraphModule, recompute: str) -> bool:
    """Whether a backward under such activation checkpointing draws random numbers a second time. Selective
    checkpointing keeps attention's results; compiled dropouts compute their masks."""
    passed_over = (DROPOUT, ATTENTION) if recompute == "selective" else (DROPOUT,)
    drawn = (node.target for node in code.graph.nodes if is_random(node))
    return recompute != "none" and any(target not in passed_over for target in drawn)


def is_replayable(code: fx.GraphModule, recompute: str) -> bool:
    """Whether what a block launches in one step it launches in all, whatever the numbers: only then can a CUDA graph
    stand for it. Some operations read numbers back to know what to launch (those of torch that are known to are listed;
    one that is missing ends a run as it is recorded); of those that others have registered nobody knows; and of random
    numbers only those of a seeded generator can be recorded."""
    return not draws_again(code, recompute) and not any(_may_read_back(node) for node in code.graph.nodes)


def _may_read_back(node: fx.Node) -> bool:
    schema = _schema(node)
    if schema is None:
        return False
    space, name = schema.name.split("::")
    if space == "aten" and name in ("index", "index_put", "index_put_"):
        chosen = [index for index in pytree.tree_leaves(node.args[1]) if isinstance(index, fx.Node)]
        return any(index.meta["val"].dtype in (torch.bool, torch.uint8) for index in chosen)
    tags = node.target.tags  # type: ignore[union-attr]
    if torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags:
        return True
    return space not in ("aten", "prims") or (name not in _NORMS and any(word in name for word in _READ_BACK))


def _schema(node: fx.Node) -> Any:
    if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema
    return None


def _arguments(node: fx.Node) -> dict[str, Any]:
    """An operation's arguments by name, defaults filled in."""
    formal = _schema(node).arguments
    defaults = {argument.name: argument.default_value for argument in formal}
    return defaults | dict(zip(defaults, node.args, strict=False)) | node.kwargs


def mutates(node: fx.Node) -> tuple[fx.Node, ...]:
    """The arguments that the node writes to."""
    schema = _schema(node)
    if schema is None:
        return ()
    if any(word in schema.name for word in _WITH_STATISTICS) and schema.name != "aten::_batch_norm_no_update":
        return tuple(arg for arg in node.args[3:5] if isinstance(arg, fx.Node) and _training(node))
    if not schema.is_mutable:
        return ()
    given = _arguments(node)
    written = [given[formal.name] for formal in schema.arguments if _is_written(formal)]
    return tuple(leaf for leaf in pytree.tree_leaves(written) if isinstance(leaf, fx.Node))


def _is_written(formal: Any) -> bool:
    """An argument or a result of a schema."""
    return formal.alias_info is not None and bool(formal.alias_info.is_write)


def _training(node: fx.Node) -> bool:
    return len(node.args) > 5 and bool(node.args[5])


def storage_of(node: fx.Node) -> fx.Node:
    """The node that owns the memory which `node` may be a view of (conservative: follows first arguments)."""
    while True:
        source = _viewed(node)
        if not isinstance(source, fx.Node):
            return node
        node = source


def _viewed(node: fx.Node) -> Any:
    """What the result of an operation may be a view of."""
    if node.target is operator.getitem:
        return node.args[0]
    schema = _schema(node)
    if schema is None:
        return None
    if any(_is_written(result) for result in schema.returns):
        return next(iter(mutates(node)), None)
    aliasing = any(result.alias_info is not None for result in schema.returns)
    return node.args[0] if node.args and (aliasing or schema.name in _MAYBE_VIEWS) else None


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
