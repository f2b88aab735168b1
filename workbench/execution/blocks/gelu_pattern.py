"""GELU that a model writes out in elementary operations becomes PyTorch's operation before a block is compiled.

GPT-2 and models after it in Hugging Face's library (`gelu_new`) compute 0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³))).
The compiler fuses that, and its tanh and a backward of one operation after another are then the bottleneck of the
kernels. PyTorch's GELU with `approximate="tanh"` is the same function (arXiv:1606.08415), and
`workbench.execution.blocks.compiled` computes it and its derivative in few instructions.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import fx
from torch.fx.subgraph_rewriter import replace_pattern_with_filters

_ATEN = torch.ops.aten
_VIEWS = (_ATEN.view.default, _ATEN.reshape.default)
_PRODUCTS = (_ATEN.mm.default, _ATEN.addmm.default, _ATEN.linear.default, _ATEN.matmul.default)


def use_gelu(code: fx.GraphModule) -> fx.GraphModule:
    """Return the code with `gelu` in the place of what it writes out, where only matrix products read the result.

    Autocast computes the third power in fp32 and so the result too; products round it to bf16, as `gelu` does.
    """
    if not code.graph.find_nodes(op="call_function", target=_ATEN.tanh.default):
        return code
    rewritten = fx.GraphModule(code, copy.deepcopy(code.graph))
    replaced = replace_pattern_with_filters(rewritten, _written_out, _gelu, match_filters=[_only_products_read])
    for [gelu] in (one.replacements for one in replaced):
        gelu.meta = dict(gelu.all_input_nodes[0].meta)
    return rewritten


def _written_out(value: Any) -> Any:
    cubic = _ATEN.add.Tensor(value, _ATEN.mul.Tensor(_ATEN.pow.Tensor_Scalar(value, 3.0), 0.044715))
    share = _ATEN.add.Tensor(_ATEN.tanh.default(_ATEN.mul.Tensor(cubic, math.sqrt(2 / math.pi))), 1.0)
    return _ATEN.mul.Tensor(_ATEN.mul.Tensor(value, 0.5), share)


def _gelu(value: Any) -> Any:
    return _ATEN.gelu.default(value, approximate="tanh")


def _only_products_read(match: Any, _: fx.Graph, __: fx.Graph) -> bool:
    [result] = match.returning_nodes
    return _is_read_by_products(result)


def _is_read_by_products(node: fx.Node) -> bool:
    return all(
        user.target in _PRODUCTS or (user.target in _VIEWS and _is_read_by_products(user)) for user in node.users
    )
