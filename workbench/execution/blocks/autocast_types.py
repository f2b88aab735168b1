"""Make blocks whose weights arrive in bf16 compute in the types that autocast would choose.

FSDP2 all-gathers weights in bf16. Autocast casts only the operands of matrix products: norms, added biases and
embedding tables are read in fp32. A block with bf16 weights alone would continue in bf16 wherever no operation forces
fp32, for example in the whole residual stream of a GPT or a ViT. The same model would then train with other numbers
under ZeRO 1 to 3, and each layer would be compiled for two input types. Therefore weights that only matrix products
read stay bf16, and the others are cast back to fp32; rows of an embedding table are cast after the lookup.
"""

from __future__ import annotations

import torch
from torch import fx

from workbench.capture.operations import EMBEDDING, dtype_of
from workbench.execution.blocks.graph_rewriter import GraphRewriter
from workbench.execution.blocks.tensor_parallel import parallel_embedding
from workbench.execution.blocks.weight_copies import is_product, read_only_by_products


def match_autocast_types(code: fx.GraphModule, num_weights: int) -> fx.GraphModule:
    """Rewrite `code` so that its first `num_weights` arguments may be bf16 although it was captured with fp32."""
    weights = code.graph.find_nodes(op="placeholder")[:num_weights]
    for_products = read_only_by_products(code, num_weights)
    others = (weight for weight, only in zip(weights, for_products, strict=True) if not only)
    fp32 = {weight for weight in others if dtype_of(weight) == torch.float32}
    if not fp32:
        return code
    rewriter = GraphRewriter(code)
    casts: dict[fx.Node, fx.Node] = {}

    def to_fp32(value: fx.Node) -> fx.Node:
        return rewriter.call(torch.ops.aten.to.dtype, value, torch.float32)

    def operand(source: fx.Node) -> fx.Node:
        if source in fp32 and source not in casts:
            casts[source] = to_fp32(rewriter.copies[source])
        return casts.get(source, rewriter.copies[source])

    def rule(node: fx.Node) -> fx.Node:
        looks_up = node.target in (EMBEDDING, parallel_embedding) and node.args[0] in fp32
        copied = rewriter.copy(node, None if looks_up or is_product(node) else operand)
        return to_fp32(copied) if looks_up else copied

    return rewriter.rewrite(rule)
