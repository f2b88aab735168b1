"""Blocks whose weights come in bf16, as FSDP2 gathers them, computing in the types that autocast would choose.

Autocast casts what matrix products read; norms, biases that are added, and tables it reads in fp32. A block that is
given all of them in bf16 goes on in bf16 where nothing else says so: the residual stream of a GPT or a ViT, from its
embedding on, through every layer. Then the same model would learn by other numbers under another plan, and a layer be
compiled twice, for both types of what it receives. So what only products read stays bf16, and the rest is cast back to
fp32: rows of a table once they are looked up.
"""

from __future__ import annotations

import torch
from torch import fx

from workbench.capture.division import EMBEDDING
from workbench.execution.blocks.tensor_parallel import parallel_embedding
from workbench.execution.blocks.weight_copies import is_product, read_by_products

aten = torch.ops.aten


def read_as_autocast_reads(code: fx.GraphModule, weights: int) -> fx.GraphModule:
    """`code`, whose first `weights` arguments are its weights, for such as are bf16 where they were fp32."""
    arguments = [node for node in code.graph.nodes if node.op == "placeholder"][:weights]
    products = read_by_products(code, weights)
    wide = {node for node, only in zip(arguments, products, strict=True) if not only and _is_fp32(node)}
    if not wide:
        return code
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    cast: dict[fx.Node, fx.Node] = {}

    def widened(value: fx.Node) -> fx.Node:
        return graph.call_function(aten.to.dtype, (value, torch.float32))

    def as_read(source: fx.Node) -> fx.Node:
        if source in wide and source not in cast:
            cast[source] = widened(copies[source])
        return cast.get(source, copies[source])

    for node in code.graph.nodes:
        looks_up = node.target in (EMBEDDING, parallel_embedding) and node.args[0] in wide
        copies[node] = graph.node_copy(node, copies.__getitem__ if looks_up or is_product(node) else as_read)
        if looks_up:
            copies[node] = widened(copies[node])
    graph.lint()
    return fx.GraphModule(dict(code.named_children()) | dict(code.named_buffers()), graph)


def _is_fp32(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype == torch.float32
