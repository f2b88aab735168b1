"""Atoms of an exported graph -> functional `Block`s; equal computations share one `code`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import fx, nn

from workbench.capture.atoms import Atom
from workbench.capture.dataflow import Dataflow, tensor_at
from workbench.capture.graph import Block
from workbench.capture.losses import MeanLoss, emit_sum_over_count
from workbench.capture.regions import close_regions


class Lifter:
    """Turns atoms into blocks, one after the other, remembering the code of each kind."""

    def __init__(
        self,
        module: fx.GraphModule,
        flow: Dataflow,
        loss: fx.Node,
        names: Mapping[int, str],
        losses: Sequence[MeanLoss],
    ) -> None:
        self._module = module
        self._flow = flow
        self._loss = loss
        self._names = names
        self._losses = {mean.node: index for index, mean in enumerate(losses)}
        self._codes: dict[str, fx.GraphModule] = {}
        self.constants: dict[str, torch.Tensor] = {}
        """Tensors that the model's forward creates from Python numbers; they have no name in the model."""

    def lift(self, index: int, atom: Atom, home: Mapping[fx.Node, int]) -> Block:
        """One block; `home` says which atom computes a node."""
        flow = self._flow
        inside = set(atom.nodes)
        needed = flow.with_free_sources(atom.nodes) - inside
        receives = _received(atom.nodes, inside, flow)
        sends = [n for n in atom.nodes if any(home.get(user, -1) > index for user in n.users) or n is self._loss]
        attributes = [n for n in flow.order if n in needed and n in flow.tensors]
        parameters = _distinct(self._name(n) for n in attributes if isinstance(flow.tensors[n], nn.Parameter))
        buffers = _distinct(self._name(n) for n in attributes if not isinstance(flow.tensors[n], nn.Parameter))
        inputs = [n for n in flow.order if n.op == "placeholder" and n in needed]
        counts = [self._losses[n] for n in atom.nodes if n in self._losses]

        graph, root = fx.Graph(), nn.Module()
        copies: dict[fx.Node, fx.Node] = {}
        by_name = {name: graph.placeholder(f"p{i}") for i, name in enumerate((*parameters, *buffers))}
        for node in attributes:
            placeholder = by_name[self._name(node)]
            placeholder.meta = {"val": node.meta["val"]}
            copies[node] = placeholder
        for i, node in enumerate(receives):
            copies[node] = graph.placeholder(f"r{i}")
            copies[node].meta = {"val": node.meta["val"]}
        for node in inputs:
            copies[node] = graph.placeholder(f"b_{node.target}")
            copies[node].meta = {"val": node.meta["val"]}
        divisors = {count: graph.placeholder(f"count{count}") for count in counts}
        for node in divisors.values():
            node.meta = {"val": self._loss.meta["val"]}
        for node in flow.order:
            if node in copies or not (node in inside or node in needed):
                continue
            if node.op == "get_attr":
                root.add_module(str(node.target).replace(".", "_"), tensor_at(self._module, str(node.target)))
                copies[node] = graph.get_attr(str(node.target).replace(".", "_"))
                continue
            copies[node] = graph.node_copy(node, lambda source: copies[source])
            if node in self._losses:
                copies[node] = emit_sum_over_count(graph, copies[node], divisors[self._losses[node]])
        graph.output(tuple(copies[node] for node in sends))
        close_regions(graph)
        block_type = digest(graph, root)
        code = self._codes.setdefault(block_type, _code(graph, root))
        return Block(
            index=index,
            name=atom.name,
            block_type=block_type,
            parameters=parameters,
            buffers=buffers,
            receives=tuple(node.name for node in receives),
            inputs=tuple(str(node.target) for node in inputs),
            counts=tuple(counts),
            sends=tuple(node.name for node in sends),
            code=code,
        )

    def _name(self, node: fx.Node) -> str:
        tensor = self._flow.tensors[node]
        if id(tensor) in self._names:
            return self._names[id(tensor)]
        name = f"_constant.{node.target}"
        self.constants[name] = tensor
        return name


def _received(nodes: Iterable[fx.Node], inside: set[fx.Node], flow: Dataflow) -> list[fx.Node]:
    found = {
        source
        for node in nodes
        for source in node.all_input_nodes
        if source not in inside and source not in flow.free and source.op == "call_function"
    }
    return [node for node in flow.order if node in found]


def _distinct(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


def _code(graph: fx.Graph, root: nn.Module) -> fx.GraphModule:
    graph.lint()
    return fx.GraphModule(root, graph)


def digest(graph: fx.Graph, root: nn.Module) -> str:
    """A hash of operations, constants, wiring and shapes: equal for layers that compute the same."""
    position = {node: index for index, node in enumerate(graph.nodes)}
    lines = [
        f"{node.op} {_target(node, root)} {_canonical(node.args, position)} {_canonical(node.kwargs, position)} "
        f"{_shape(node.meta.get('val'))}"
        for node in graph.nodes
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _target(node: fx.Node, root: nn.Module) -> str:
    if node.op == "placeholder":
        return str(node.target).rstrip("0123456789")
    if node.op == "get_attr":
        return _code_text(tensor_at(root, str(node.target)))
    if isinstance(node.target, FunctionType):
        return f"{node.target.__module__}.{node.target.__qualname__}"
    return str(node.target)


def _code_text(module: Any) -> str:
    """The operations of a graph inside an operation (`torch.cond`'s branches), and of the graphs inside that one."""
    return "\n".join(str(getattr(inner, "code", "")) for inner in module.modules())


def _canonical(value: Any, position: Mapping[fx.Node, int]) -> str:
    def leaf(item: Any) -> Any:
        if isinstance(item, fx.Node):
            return f"%{position[item]}"
        return "device" if isinstance(item, torch.device) else item

    if isinstance(value, Mapping):
        return str({key: _canonical(item, position) for key, item in value.items()})
    return str(fx.node.map_aggregate(value, leaf))


def _shape(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {value.dtype}"
    if isinstance(value, (tuple, list)):
        return str([_shape(item) for item in value])
    return type(value).__name__
