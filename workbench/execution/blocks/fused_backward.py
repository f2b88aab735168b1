"""A pass over the compiler's graphs, after which Inductor fuses more of a layer's backward into fewer kernels.

A linear layer over (samples, positions, features) multiplies a view of two dims. Inductor computes what the view reads
in two dims too, and then finds neither of two fusions: with the kernel before it, such as the backward of a LayerNorm
whose gradient a dropout masks, and with the sum over all rows that is the gradient of a bias. Each costs another pass
over a tensor of the size of the activations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.inductor_prims import force_stride_order

_ATEN = torch.ops.aten
_VIEWS = (_ATEN.view.default, _ATEN.reshape.default)
_PRODUCTS = (_ATEN.mm.default, _ATEN.addmm.default)
FEWEST_SUMS = 1 << 16
"""Number of sums, samples times features, below which the compiler sums rows as it does: with fewer, a GPU of more than
a hundred multiprocessors has too little to do at once."""


class FuseBackward(CustomGraphPass):
    """Computes what a product reads through a view in its own shape, and sums it sample by sample if there are many.

    The numbers stay the same, except that sums in fp32 add up in another order.
    """

    def __call__(self, graph: fx.Graph) -> None:
        for target in _VIEWS:
            for view in graph.find_nodes(op="call_function", target=target):
                made = view.args[0]
                if _is_pointwise(made) and set(made.users) == {view} and _is_multiplied(view):
                    _compute_in_its_shape(made, view)
        graph.lint()

    def uuid(self) -> Any:
        """Return a part of the key under which Inductor caches compiled code."""
        return get_hash_for_files((__file__,))


def _is_pointwise(node: fx.Node) -> bool:
    """Return True for an elementwise result on a GPU with more than two dims of known sizes, contiguous in memory."""
    value = node.meta.get("val")
    if torch.Tag.pointwise not in getattr(node.target, "tags", ()) or not isinstance(value, torch.Tensor):
        return False
    is_known = all(isinstance(size, int) for size in value.shape)
    return is_known and value.device.type == "cuda" and value.dim() > 2 and value.is_contiguous()


def _is_multiplied(node: fx.Node) -> bool:
    """Return True if a matrix product reads the node or its transpose."""
    return any(
        user.target in _PRODUCTS or (user.target is _ATEN.permute.default and _is_multiplied(user))
        for user in node.users
    )


def _compute_in_its_shape(made: fx.Node, view: fx.Node) -> None:
    graph, value = view.graph, made.meta["val"]
    with graph.inserting_after(made):
        stored = graph.call_function(force_stride_order, (made, list(value.stride())))
    stored.meta = dict(made.meta)
    view.replace_input_with(made, stored)
    sums = value.shape[0] * value.shape[-1]
    if value.shape[-1:] == view.meta["val"].shape[1:] and sums >= FEWEST_SUMS:
        for user in list(view.users):
            if _is_sum_over_rows(user):
                _sum_by_sample(user, stored)


def _is_sum_over_rows(node: fx.Node) -> bool:
    """Return True for a sum over the first dim whose partial sums are not rounded."""
    is_sum = node.target is _ATEN.sum.dim_IntList
    return is_sum and list(node.args[1]) == [0] and node.meta["val"].dtype == torch.float32  # type: ignore[arg-type]


def _sum_by_sample(total: fx.Node, rows: fx.Node) -> None:
    """Replace a sum over all rows by a sum over each sample's and one over the samples."""
    graph, value = total.graph, rows.meta["val"]
    with graph.inserting_before(total):
        inner = (rows, list(range(1, value.dim() - 1)))
        by_sample = graph.call_function(_ATEN.sum.dim_IntList, inner, total.kwargs)
        by_sample.meta = {"val": _ATEN.sum.dim_IntList(value, inner[1], **total.kwargs)}
        again = graph.call_function(_ATEN.sum.dim_IntList, (by_sample, *total.args[1:]), total.kwargs)
    again.meta = dict(total.meta)
    total.replace_all_uses_with(again)
    graph.erase_node(total)
