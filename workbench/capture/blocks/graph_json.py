"""A captured `Graph` as JSON, and back: a file of it is read without executing anything that it names.

Operations are named, and found again among those of torch; tensors without values are shapes, types and strides. The
lines of operations are kept, and not the modules and the passes that export noted on them. What cannot be written so
raises `NotWritten`: opaque calls, which run the user's own code, operations of the user's or of other libraries, and
sizes that depend on values.
"""

from __future__ import annotations

import base64
import dataclasses
import operator
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from workbench.base.display import cell_name
from workbench.base.tensors import TensorSpec
from workbench.capture.export.opaque import OPAQUE
from workbench.capture.graph import Block, Graph, LabelCount, SampleDim, ScalarValue
from workbench.capture.operations import LOGS
from workbench.capture.outputs import Outputs, Slot
from workbench.capture.torch_internals import (
    HigherOrderOperator,
    OpOverload,
    enter_autocast,
    exit_autocast,
    set_grad_enabled,
)

LARGEST_TENSOR = 1 << 20
"""Bytes of all constants of a graph up to which it is written."""
_SPACES = ("aten", "prims", "workbench")
"""Namespaces of operations that no user defines."""
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "getitem": operator.getitem,
    "enter_autocast": enter_autocast,
    "exit_autocast": exit_autocast,
    "is_grad_enabled": torch.is_grad_enabled,
    "set_grad_enabled": set_grad_enabled,
}
"""Functions other than operations that captured code calls."""
_SETTINGS = (torch.dtype, torch.layout, torch.memory_format)
_LINE = re.compile(r'  File "([^"\n]+)"(, line \d+, in \S+\n.*)', re.DOTALL)
"""The text in which export notes the line of an operation."""


class NotWritten(ValueError):
    """A graph, or something in it, has no form as JSON."""


def written(graph: Graph, device: torch.device) -> dict[str, Any]:
    """Return a graph that was captured for a model on a device as JSON, without the `loss` that it was given.

    Raises `NotWritten`, also if what is read back is not the same.
    """
    writer = _Writer(device)
    json = writer.graph(graph)
    again = _Writer(device).graph(read(json, device, graph.loss_choice))
    if again != json:
        raise NotWritten("it is read otherwise than it was written")
    return json


def read(json: Any, device: torch.device, loss: Any) -> Graph:
    """Return the graph of `written` for a model on a device; raises anything if it was damaged."""
    return _Reader(device).graph(json, loss)


@dataclass
class _Writer:
    device: torch.device
    left: int = LARGEST_TENSOR
    """Bytes of constants that may still be written."""

    def graph(self, graph: Graph) -> dict[str, Any]:
        codes = {block.block_type: self.code(block.code) for block in graph.blocks}
        return {
            **{name: self.value(getattr(graph, name)) for name in _PLAIN_FIELDS},
            "blocks": [[self.value(getattr(block, name)) for name in _BLOCK_FIELDS] for block in graph.blocks],
            "codes": codes,
            "label_counts": [
                [list(c.inputs), self.code(c.code), None if c.of_total is None else self.code(c.of_total), c.is_ratio]
                for c in graph.label_counts
            ],
            "constants": {name: self.tensor(constant) for name, constant in graph.constants.items()},
            "outputs": None if graph.outputs is None else self.value(graph.outputs),
        }

    def code(self, code: fx.GraphModule) -> dict[str, Any]:
        if type(code.graph._codegen) is not fx.graph.CodeGen:
            raise NotWritten("a branch has arguments of its own")
        at = {node: index for index, node in enumerate(code.graph.nodes)}
        modules, tensors = dict[str, Any](), dict[str, Any]()
        for name, child in code.named_children():
            if not isinstance(child, fx.GraphModule):
                raise NotWritten(f"{name} is no code")
            modules[name] = self.code(child)
        for name, tensor in (*code.named_parameters(recurse=False), *code.named_buffers(recurse=False)):
            tensors[name] = self.tensor(tensor)
        return {"nodes": [self.node(node, at) for node in at], "modules": modules, "tensors": tensors}

    def node(self, node: fx.Node, at: Mapping[fx.Node, int]) -> list[Any]:
        trace, meta = node.meta.get("stack_trace"), dict[str, Any]()
        if "val" in node.meta:
            meta["val"] = self.value(node.meta["val"])
        if trace:
            line = _LINE.fullmatch(trace)
            meta["line"] = [cell_name(line[1]) or line[1], line[2]] if line else [trace]
        if LOGS in node.meta:
            meta["logs"] = True
        target = node.target if node.op != "call_function" else self.target(node.target)
        return [node.op, node.name, target, self.value(node.args, at), self.value(node.kwargs, at), meta]

    def target(self, target: Any) -> list[str]:
        if isinstance(target, OpOverload) and target.namespace in _SPACES and target is not OPAQUE:
            return ["op", target.namespace, target._schema.name.partition("::")[2], target._overloadname]
        if isinstance(target, HigherOrderOperator):
            return ["higher", target.name()]
        for name, function in _FUNCTIONS.items():
            if target is function:
                return ["function", name]
        raise NotWritten(f"{target} is no operation of torch")

    def value(self, value: Any, at: Mapping[fx.Node, int] | None = None) -> Any:
        of_type = type(value)
        if value is None or of_type in (bool, int, float, str):
            return value
        if isinstance(value, fx.Node) and at is not None:
            return ["node", at[value]]
        if isinstance(value, torch.Tensor):
            return self.shape(value)
        if isinstance(value, torch.device):
            return ["device", self.named(value)]
        if isinstance(value, _SETTINGS):
            return ["torch", str(value).removeprefix("torch.")]
        if of_type is complex:
            return ["complex", value.real, value.imag]
        if isinstance(value, slice):
            return ["slice", *(self.value(each, at) for each in (value.start, value.stop, value.step))]
        if of_type in _VALUES.values():
            fields = [getattr(value, each.name) for each in dataclasses.fields(value)]
            return [of_type.__name__, *(self.value(each, at) for each in fields)]
        if isinstance(value, frozenset):
            return ["frozenset", *sorted(value)]
        if of_type is tuple or isinstance(value, list):
            return ["tuple" if of_type is tuple else "list", *(self.value(each, at) for each in value)]
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            items = [[each.name, self.value(getattr(value, each.name), at)] for each in dataclasses.fields(value)]
            return ["dataclass", of_type.__module__, of_type.__qualname__, *items]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return ["namedtuple", of_type.__module__, of_type.__qualname__, *(self.value(each, at) for each in value)]
        if of_type is dict or isinstance(value, fx.immutable_collections.immutable_dict):
            return ["dict", *([self.value(key, at), self.value(each, at)] for key, each in value.items())]
        raise NotWritten(f"it holds {of_type.__module__}.{of_type.__qualname__}")

    def shape(self, tensor: torch.Tensor) -> list[Any]:
        """Return what is known of a tensor without values."""
        is_known = isinstance(tensor, FakeTensor) and tensor.layout == torch.strided
        if not is_known or not all(type(each) is int for each in (*tensor.shape, *tensor.stride())):
            raise NotWritten("sizes depend on values")
        dtype = str(tensor.dtype).removeprefix("torch.")
        return ["tensor", list(tensor.shape), list(tensor.stride()), dtype, self.named(tensor.device)]

    def named(self, device: torch.device) -> str:
        return "model" if device == self.device else str(device)

    def tensor(self, tensor: torch.Tensor) -> Any:
        """Return a tensor with its values."""
        is_plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided and not tensor.requires_grad
        if not is_plain or tensor.is_meta or tensor.nbytes > self.left or tensor.is_quantized:
            raise NotWritten("its constants are too large, or have no values")
        self.left -= tensor.nbytes
        octets = tensor.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        coded = base64.b64encode(octets.numpy().tobytes()).decode()
        return [list(tensor.shape), str(tensor.dtype).removeprefix("torch."), self.named(tensor.device), coded]


@dataclass
class _Reader:
    device: torch.device
    mode: FakeTensorMode = field(default_factory=lambda: FakeTensorMode(allow_non_fake_inputs=True))

    def graph(self, json: Any, loss: Any) -> Graph:
        codes = {block_type: self.code(code) for block_type, code in json["codes"].items()}
        blocks = []
        for fields in json["blocks"]:
            given = dict(zip(_BLOCK_FIELDS, map(self.value, fields), strict=True))
            blocks.append(Block(**given, code=codes[given["block_type"]]))
        counts = [
            LabelCount(tuple(inputs), self.code(code), None if of_total is None else self.code(of_total), is_ratio)
            for inputs, code, of_total, is_ratio in json["label_counts"]
        ]
        return Graph(
            **{name: self.value(json[name]) for name in _PLAIN_FIELDS},
            blocks=tuple(blocks),
            label_counts=tuple(counts),
            constants={name: self.tensor(constant) for name, constant in json["constants"].items()},
            outputs=self.value(json["outputs"]),
            loss_choice=loss,
        )

    def code(self, json: Any) -> fx.GraphModule:
        root, graph, nodes = nn.Module(), fx.Graph(), list[fx.Node]()
        for name, child in json["modules"].items():
            root.add_module(name, self.code(child))
        for name, tensor in json["tensors"].items():
            root.register_buffer(name, self.tensor(tensor))
        for op, name, target, args, kwargs, meta in json["nodes"]:
            found: Any = target if op != "call_function" else self.target(*target)
            node = graph.create_node(op, found, self.value(args, nodes), self.value(kwargs, nodes), name)
            if "val" in meta:
                node.meta["val"] = self.value(meta["val"])
            if line := meta.get("line"):
                node.meta["stack_trace"] = line[0] if len(line) == 1 else f'  File "{_file(line[0])}"{line[1]}'
            if "logs" in meta:
                node.meta[LOGS] = True
            nodes.append(node)
        graph.lint()
        return fx.GraphModule(root, graph)

    def target(self, form: str, *names: str) -> Any:
        if form == "op":
            space, name, overload = names
            if space not in _SPACES:
                raise ValueError(space)
            found = getattr(getattr(getattr(torch.ops, space), name), overload or "default")
            if not isinstance(found, OpOverload) or found is OPAQUE:
                raise ValueError(name)
            return found
        if form == "higher":
            found = getattr(torch.ops.higher_order, names[0])
            if not isinstance(found, HigherOrderOperator):
                raise ValueError(names)
            return found
        return _FUNCTIONS[names[0]]

    def value(self, json: Any, nodes: list[fx.Node] | None = None) -> Any:
        if not isinstance(json, list):
            return json
        form, *items = json
        if form == "node":
            assert nodes is not None
            return nodes[items[0]]
        if form == "tensor":
            shape, stride, dtype, device = items
            empty = torch.empty_strided(shape, stride, dtype=self.dtype(dtype), device="meta")
            return FakeTensor(self.mode, empty, self.placed(device))
        if form == "device":
            return self.placed(items[0])
        if form == "torch":
            found = getattr(torch, items[0])
            if not isinstance(found, _SETTINGS):
                raise ValueError(items)
            return found
        if form == "complex":
            return complex(*items)
        if form == "frozenset":
            return frozenset(items)
        if form in ("dataclass", "namedtuple"):
            return self.structure(form, *items)
        if form == "dict":
            return {self.value(key, nodes): self.value(each, nodes) for key, each in items}
        values = [self.value(each, nodes) for each in items]
        if form in _VALUES:
            return _VALUES[form](*values)
        if form == "slice":
            return slice(*values)
        return tuple(values) if form == "tuple" else {"list": values}[form]

    def structure(self, form: str, module: str, name: str, *items: Any) -> Any:
        """Return what forward returned, with slots: an object of a class that this process has imported."""
        of_type: Any = sys.modules[module]
        for part in name.split("."):
            of_type = vars(of_type)[part]
        if form == "namedtuple":
            if not (issubclass(of_type, tuple) and hasattr(of_type, "_fields")):
                raise ValueError(name)
            return of_type(*map(self.value, items))
        if not (isinstance(of_type, type) and dataclasses.is_dataclass(of_type)):
            raise ValueError(name)
        fields = {key: self.value(each) for key, each in items}
        if issubclass(of_type, Mapping):  # an output class of transformers
            return of_type(**fields)
        made = object.__new__(of_type)
        for key, each in fields.items():
            object.__setattr__(made, key, each)
        return made

    def placed(self, device: str) -> torch.device:
        return self.device if device == "model" else torch.device(device)

    @staticmethod
    def dtype(name: str) -> torch.dtype:
        found = getattr(torch, name)
        if not isinstance(found, torch.dtype):
            raise ValueError(name)
        return found

    def tensor(self, json: Any) -> torch.Tensor:
        shape, dtype, device, coded = json
        octets = torch.frombuffer(bytearray(base64.b64decode(coded)) or bytearray(1), dtype=torch.uint8)
        empty = torch.empty(shape, dtype=self.dtype(dtype))
        return (octets.view(empty.dtype).reshape(shape) if empty.nbytes else empty).to(self.placed(device))


def _file(name: str) -> str:
    """Return the name that Python has for a file now; a cell of a notebook is known by its number."""
    import linecache

    return name if "/" in name else next((file for file in linecache.cache if cell_name(file) == name), name)


_VALUES: dict[str, Any] = {each.__name__: each for each in (TensorSpec, SampleDim, ScalarValue, Slot, Outputs)}
_APART = {"blocks", "label_counts", "constants", "outputs", "loss_choice", "tower_and_tail"}
_PLAIN_FIELDS = tuple(each.name for each in dataclasses.fields(Graph) if each.name not in _APART)
_BLOCK_FIELDS = tuple(each.name for each in dataclasses.fields(Block) if each.name != "code")
