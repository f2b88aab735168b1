"""Facts about a whole exported graph: what can be recomputed anywhere, what is needed, what is written in place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.utils._pytree as pytree
from torch import fx, nn
from torch.multiprocessing.reductions import StorageWeakRef

from workbench.capture.operations import ancestors, is_random, mutated_arguments, reachable, storage_of, tensor_at


@dataclass(frozen=True)
class Dataflow:
    """Facts about one exported graph that cutting it into blocks needs."""

    order: Mapping[fx.Node, int]
    """Position of every node."""
    tensors: Mapping[fx.Node, torch.Tensor]
    """Parameter, buffer or constant that each `get_attr` node reads."""
    recomputable: frozenset[fx.Node]
    """Nodes that depend on the batch and on constants only and draw no random numbers: every block may compute them."""
    views: frozenset[fx.Node]
    """Views of parameters that depend on nothing else that is computed: every block that reads one makes it again."""
    aliases: frozenset[fx.Node]
    """All nodes whose result shares memory with a parameter, which sharding frees when a block has run."""
    live: frozenset[fx.Node]
    """Nodes that the loss, another output or a mutation needs."""
    writers: Mapping[fx.Node, tuple[fx.Node, ...]]
    """Storage owner -> nodes that write to it, in order."""

    def identity(self, owner: fx.Node) -> int:
        """Return a number that is equal for two reads of one buffer or parameter."""
        return id(self.tensors.get(owner, owner))

    def recomputable_sources(self, nodes: Iterable[fx.Node]) -> set[fx.Node]:
        """Return the recomputable nodes, views and attributes that `nodes` need, and the in-place writes to these."""

        def sources(node: fx.Node) -> Iterator[fx.Node]:
            for source in node.all_input_nodes:
                if source in self.recomputable or source in self.views or source.op == "get_attr":
                    yield source
                    yield from (w for w in self.writers.get(storage_of(source), ()) if w in self.recomputable)

        return reachable((source for node in nodes for source in sources(node)), sources)


def analyse_dataflow(module: fx.GraphModule, loss: fx.Node, outputs: Iterable[fx.Node] = ()) -> Dataflow:
    """Return the facts about an exported graph whose loss and other outputs are computed by the given nodes."""
    nodes = list(module.graph.nodes)
    writers: defaultdict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in nodes:
        for written in mutated_arguments(node):
            writers[storage_of(written)].append(node)
    tensors = {
        node: value
        for node in nodes
        if node.op == "get_attr" and isinstance(value := tensor_at(module, str(node.target)), torch.Tensor)
    }
    excluded: set[fx.Node] = set()
    while True:
        recomputable = _recomputable(nodes, tensors, writers, excluded)
        # A storage that some other node writes to belongs to one place, and so does all that reads it.
        bound = {o for o, by in writers.items() if o in recomputable and any(w not in recomputable for w in by)}
        if not bound:
            break
        excluded |= bound
    views, aliases = _parameter_views(nodes, tensors, writers, recomputable)
    return Dataflow(
        order={node: index for index, node in enumerate(nodes)},
        tensors=tensors,
        recomputable=frozenset(recomputable),
        views=frozenset(views),
        aliases=frozenset(aliases),
        live=frozenset(ancestors([loss, *outputs, *(node for node in nodes if mutated_arguments(node))])),
        writers={owner: tuple(nodes) for owner, nodes in writers.items()},
    )


def _recomputable(
    nodes: list[fx.Node],
    tensors: Mapping[fx.Node, torch.Tensor],
    writers: Mapping[fx.Node, list[fx.Node]],
    excluded: set[fx.Node],
) -> set[fx.Node]:
    """Return the recomputable nodes if nothing that lies in the `excluded` storages is."""
    included: set[fx.Node] = set()
    written = {id(tensors[owner]) for owner in writers if owner in tensors}
    for node in nodes:
        if storage_of(node) in excluded:
            continue
        if node in tensors:
            is_included = not isinstance(tensors[node], nn.Parameter) and id(tensors[node]) not in written
        elif node.op == "call_function":
            is_included = all(source in included for source in node.all_input_nodes) and not is_random(node)
        else:
            is_included = node.op == "placeholder"
        if is_included:
            included.add(node)
    return included


def _parameter_views(
    nodes: list[fx.Node],
    tensors: Mapping[fx.Node, torch.Tensor],
    writers: Mapping[fx.Node, list[fx.Node]],
    recomputable: set[fx.Node],
) -> tuple[set[fx.Node], set[fx.Node]]:
    """Return the `views` and `aliases` of `Dataflow`.

    The fake tensors of the export tell what shares memory, also for operations that do not declare it (`einsum`).
    """
    parameters = {s for node, tensor in tensors.items() if isinstance(tensor, nn.Parameter) for s in _storages(node)}
    written = {storage for owner in writers for storage in _storages(owner)}
    views: set[fx.Node] = set()
    aliases = {node for node in nodes if node.op == "call_function" and parameters & _storages(node)}
    for node in nodes:
        is_fixed = all(s in recomputable or s in tensors or s in views for s in node.all_input_nodes)
        if node in aliases and is_fixed and not is_random(node) and not written & _storages(node):
            views.add(node)
    return views, aliases


def _storages(node: fx.Node) -> set[StorageWeakRef]:
    """Return the memory of the fake tensors that a node returns."""
    leaves = pytree.tree_leaves(node.meta.get("val"))
    strided = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided)
    return {StorageWeakRef(leaf.untyped_storage()) for leaf in strided}
