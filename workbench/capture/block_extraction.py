"""Groups of nodes of an exported graph -> functional `Block`s; equal computations share one `code`."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import fx, nn

from workbench.capture.block_boundaries import NodeGroup
from workbench.capture.context_managers import restore_regions
from workbench.capture.dataflow import Dataflow
from workbench.capture.export import Exported
from workbench.capture.graph import Block
from workbench.capture.losses import MeanLoss, OwnMean, Quotient, emit_sum_over_count
from workbench.capture.opaque import call_of
from workbench.capture.operations import tensor_at


class BlockExtractor:
    """Makes blocks of groups of nodes; holds the code of each block type, and the constants met on the way."""

    def __init__(
        self,
        exported: Exported,
        flow: Dataflow,
        names: Mapping[int, str],
        losses: Sequence[MeanLoss | Quotient | OwnMean],
        outputs: Collection[fx.Node] = (),
    ) -> None:
        """Take the graph and its facts; `names` are the canonical names of parameters and buffers by `id`."""
        self._exported = exported
        self._flow = flow
        self._names = names
        self._outputs = dict.fromkeys(outputs)
        self._losses = {mean.node: index for index, mean in enumerate(losses)}
        names_of_counts = {MeanLoss: "count", Quotient: "total", OwnMean: "ratio"}
        self._counted = [names_of_counts[type(mean)] for mean in losses]
        self._codes: dict[str, fx.GraphModule] = {}
        self.constants: dict[str, torch.Tensor] = {}
        """Tensors that the model's forward creates from Python numbers; they have no name in the model."""

    def extract(self, index: int, group: NodeGroup, group_of: Mapping[fx.Node, int]) -> Block:
        """Return the block of one group; `group_of` gives the index of the group that computes a node."""
        flow, loss = self._flow, self._exported.loss
        inside = set(group.nodes)
        recomputed = [node for node in self._outputs if loss in inside and node not in group_of]
        needed = (flow.recomputable_sources((*group.nodes, *recomputed)) | set(recomputed)) - inside
        read = {source for node in group.nodes for source in node.all_input_nodes} - inside
        read -= flow.recomputable | flow.views
        receives = [node for node in flow.order if node in read and node.op == "call_function"]
        read_later = [n for n in group.nodes if any(group_of.get(user, -1) > index for user in n.users)]
        results = {loss, *self._outputs, *read_later}
        sends = [node for node in group.nodes if node in results] + recomputed
        returned = [n.name for n in sends if n is not loss and n not in read_later]
        names = {node: self._name(node) for node in flow.order if node in needed and node in flow.tensors}
        is_parameter = {name: isinstance(flow.tensors[node], nn.Parameter) for node, name in names.items()}
        parameters = tuple(name for name, yes in is_parameter.items() if yes)
        buffers = tuple(name for name, yes in is_parameter.items() if not yes)
        inputs = [n for n in flow.order if n.op == "placeholder" and n in needed]
        counts = [index for node, index in self._losses.items() if node in inside or node in needed]
        graph, root = fx.Graph(), nn.Module()
        by_name = {name: graph.placeholder(f"p{i}") for i, name in enumerate((*parameters, *buffers))}
        copies = {node: by_name[name] for node, name in names.items()}
        copies |= {node: graph.placeholder(f"r{i}") for i, node in enumerate(receives)}
        copies |= {node: graph.placeholder(f"b_{node.target}") for node in inputs}
        divisors = {count: graph.placeholder(f"{self._counted[count]}{count}") for count in counts}
        for node, placeholder in (*copies.items(), *((loss, divisor) for divisor in divisors.values())):
            placeholder.meta = {"val": node.meta["val"]}
        for node in flow.order:
            if node not in copies and (node in inside or node in needed):
                self._copy(node, graph, root, copies)
                if node in self._losses:
                    copies[node] = emit_sum_over_count(graph, copies[node], divisors[self._losses[node]])
        graph.output(tuple(self._sent(node, graph, copies) for node in sends))
        restore_regions(graph)
        block_type = digest(graph, root, [at for at, node in enumerate(sends) if node.name in returned])
        if block_type not in self._codes:
            graph.lint()
            self._codes[block_type] = fx.GraphModule(root, graph)
        return Block(
            index=index,
            name=group.name,
            block_type=block_type,
            cost_type=digest(graph, root, of_cost=True),
            parameters=parameters,
            buffers=buffers,
            receives=tuple(node.name for node in receives),
            inputs=tuple(str(node.target) for node in inputs),
            counts=tuple(counts),
            sends=tuple(node.name for node in sends),
            returned=tuple(returned),
            code=self._codes[block_type],
        )

    def _copy(self, node: fx.Node, graph: fx.Graph, root: nn.Module, copies: dict[fx.Node, fx.Node]) -> None:
        """Append a copy of a node to a block's graph; the graph that an attribute holds becomes a child of `root`."""
        if node.op == "get_attr":
            name = str(node.target).replace(".", "_")
            root.add_module(name, tensor_at(self._exported.module, str(node.target)))
            copies[node] = graph.get_attr(name)
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)

    def _sent(self, node: fx.Node, graph: fx.Graph, copies: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """Return what a block sends for a node: a copy if it shares memory with a parameter, which ZeRO 3 frees."""
        if node not in self._flow.aliases:
            return copies[node]
        clone = graph.call_function(torch.ops.aten.clone.default, (copies[node],))
        clone.meta = dict(node.meta)
        return clone

    def _name(self, node: fx.Node) -> str:
        tensor = self._flow.tensors[node]
        if id(tensor) in self._names:
            return self._names[id(tensor)]
        name = f"_constant.{node.target}"
        self.constants[name] = tensor
        return name


def digest(graph: fx.Graph, root: nn.Module, returned: Sequence[int] = (), of_cost: bool = False) -> str:
    """Return a hash of operations, constants, wiring, shapes and types: equal for layers that compute the same.

    `returned` are the positions of the sent values that no later block reads. With `of_cost`, it is equal for layers
    that cost the same: their numbers may differ, such as the rates of stochastic depth, and opaque calls of other
    modules of one class may compute something else.
    """
    position = {node: index for index, node in enumerate(graph.nodes)}
    lines = [f"{line_of_digest(node, root, position, of_cost)} {_shape(node.meta.get('val'))}" for node in graph.nodes]
    lines += [f"returned {list(returned)}"] if returned else []
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def line_of_digest(
    node: fx.Node,
    root: nn.Module,
    position: Mapping[fx.Node, int],
    of_cost: bool = False,
    given: tuple[Any, Any] | None = None,
) -> str:
    """Return an operation with its arguments as text that other processes share; `position` numbers the nodes.

    `given` are arguments in place of its own, but for those of an opaque call.
    """
    own = _arguments(node, of_cost), node.kwargs
    written = (_canonical(each, position, of_cost) for each in (own if given is None or call_of(node) else given))
    return f"{node.op} {_target(node, root)} {' '.join(written)}"


def _target(node: fx.Node, root: nn.Module) -> str:
    if node.op == "placeholder":
        return str(node.target).rstrip("0123456789")
    if node.op == "get_attr":  # the graph of an operation (a branch of `torch.cond`), with the graphs inside that one
        modules = tensor_at(root, str(node.target)).modules()
        return "\n".join(str(getattr(module, "code", "")) for module in modules)
    if isinstance(node.target, FunctionType):
        return f"{node.target.__module__}.{node.target.__qualname__}"
    return str(node.target)


def _arguments(node: fx.Node, of_cost: bool) -> Any:
    """Return a node's arguments; those of an opaque call name it in a way that other processes share."""
    call = call_of(node)
    return node.args if call is None else (call.cost_digest if of_cost else call.digest, *node.args[1:])


def _canonical(value: Any, position: Mapping[fx.Node, int], of_cost: bool) -> str:
    """Return arguments as text that does not depend on the names of nodes or on the device.

    With `of_cost`, it does not depend on the values of numbers either, but for those that save an operation.
    """

    def leaf(item: Any) -> Any:
        if isinstance(item, fx.Node):
            return f"%{position[item]}"
        if of_cost and isinstance(item, float) and item not in (0.0, 1.0):
            return "number"
        return "device" if isinstance(item, torch.device) else item

    if isinstance(value, Mapping):
        return str({key: _canonical(item, position, of_cost) for key, item in value.items()})
    return str(fx.node.map_aggregate(value, leaf))


def _shape(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {value.dtype}"
    if isinstance(value, (tuple, list)):
        return str([_shape(item) for item in value])
    return type(value).__name__
