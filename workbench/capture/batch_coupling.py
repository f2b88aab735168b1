"""Operations through which the samples of a batch influence one another, found by following the batch dim.

A loss that compares samples (in-batch contrast) or multiplies means over the batch (load balancing) has another value
when the batch is cut into micro-batches or replicas. Each value of the graph is independent of the batch, has one row
per sample along a known dim, is a sum over samples, or is unknown. Only an operation that certainly mixes samples is
reported: after one that this module does not know, nothing is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from workbench.capture.dataflow import Dataflow
from workbench.capture.operations import ancestors, arguments_of, schema_of, shape_of
from workbench.capture.source_lines import line_of_node

NONE, SUM, UNKNOWN = -1, -2, -3
"""States other than the index of the batch dim: independent of the batch, summed over the samples, not known."""
_REDUCTIONS = ("sum", "mean")
_NORMALISATIONS: tuple[str, ...] = (
    "softmax",
    "_softmax",
    "log_softmax",
    "_log_softmax",
    "logsumexp",
    "var",
    "std",
    "var_mean",
)
_NORMALISATIONS += ("linalg_vector_norm", "norm")
_SELECTIONS = ("argmax", "argmin", "amax", "amin", "any", "all")
_LOSSES: tuple[str, ...] = (
    "cross_entropy_loss",
    "nll_loss_nd",
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "kl_div",
)
_LOSSES += ("binary_cross_entropy", "binary_cross_entropy_with_logits")
_OVER_CLASSES = ("cross_entropy_loss", "nll_loss_nd")
_PRODUCTS = ("matmul", "mm", "bmm")
_SAME_DIMS: tuple[str, ...] = (
    "clone",
    "contiguous",
    "to",
    "_to_copy",
    "detach",
    "detach_",
    "alias",
    "dropout",
    "dropout_",
    "type_as",
)
_SAME_DIMS += ("slice", "lift_fresh_copy", "feature_dropout", "softmax", "_softmax", "log_softmax", "_log_softmax")
_LINEAR: tuple[str, ...] = (
    "add",
    "sub",
    "rsub",
    "neg",
    "mul",
    "div",
    "sum",
    "mean",
    "reshape",
    "view",
    "unsqueeze",
    "squeeze",
    "select",
)
_LINEAR += ("expand", "clone", "to", "_to_copy", "detach", "alias", "getitem", "permute", "transpose", "cat", "stack")
_LINEAR += ("slice", "contiguous", "matmul", "mm", "linear", "lift_fresh_copy", "flatten", "unbind", "index")
_FIRST_DIM: tuple[str, ...] = (
    "layer_norm",
    "group_norm",
    "rms_norm",
    "scaled_dot_product_attention",
    "batch_norm",
    "instance_norm",
)
_FIRST_DIM += ("conv1d", "conv2d", "conv3d", "convolution", "max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "pad")


def coupled_lines(flow: Dataflow, loss: fx.Node) -> tuple[str, ...]:
    """Return, for each operation that certainly mixes samples on the way to the loss, its name and its line."""
    return _Follower(flow, ancestors([loss])).coupled()


class _Follower:
    """The state of every node of one graph, in order."""

    def __init__(self, flow: Dataflow, needed: set[fx.Node]) -> None:
        self._flow, self._needed = flow, needed
        self._states: dict[fx.Node, int] = {}
        self._coupled: list[fx.Node] = []

    def coupled(self) -> tuple[str, ...]:
        for node in self._flow.order:
            self._states[node] = self._state(node)
        lines = (f"{_name(node)}{line_of_node(node).where}" for node in self._coupled if node in self._needed)
        return tuple(dict.fromkeys(lines))

    def _state(self, node: fx.Node) -> int:
        if node.op == "placeholder":
            return 0 if shape_of(node) else NONE
        states = [self._states[source] for source in node.all_input_nodes]
        if node.op != "call_function" or UNKNOWN in states:
            return UNKNOWN if UNKNOWN in states else NONE
        if all(state == NONE for state in states):
            return NONE
        if not all(isinstance(size, int) for source in (node, *node.all_input_nodes) for size in shape_of(source)):
            return UNKNOWN  # a selection by values: which rows are of which sample is not known
        name = _name(node)
        if SUM in states:
            return self._of_sums(node, name, states)
        return self._of_rows(node, name)

    def _of_sums(self, node: fx.Node, name: str, states: list[int]) -> int:
        """Return the state of an operation on sums over the samples: linear ones give sums, others mix samples."""
        others = [state for state in states if state != NONE]
        is_sum = name in _LINEAR and all(state == SUM for state in others)
        factors = [s for s in node.all_input_nodes if self._states[s] != NONE]
        if is_sum and (name not in ("mul", "div", *_PRODUCTS, "linear") or len(factors) == 1):
            return SUM if not (name == "div" and node.args[0] not in factors) else self._mixing(node)
        divisor = node.args[1] if name == "div" else None
        if isinstance(divisor, fx.Node) and divisor in self._flow.recomputable and self._states[divisor] == SUM:
            return self._states[node.args[0]]  # type: ignore[index]  # a count of its own: see docs/models.md
        dtype = node.meta["val"].dtype if isinstance(node.meta.get("val"), torch.Tensor) else None
        return UNKNOWN if dtype is None or not dtype.is_floating_point else self._mixing(node)

    def _mixing(self, node: fx.Node) -> int:
        self._coupled.append(node)
        return UNKNOWN

    def _of_rows(self, node: fx.Node, name: str) -> int:
        """Return the state of an operation on values with one row per sample."""
        if name in _PRODUCTS or name == "linear":
            return self._product(node, name)
        if name == "einsum":
            return self._einsum(node)
        if name in _LOSSES:
            return self._loss(node, name)
        if name in (*_REDUCTIONS, *_NORMALISATIONS, *_SELECTIONS):
            return self._reduction(node, name)
        if name == "embedding":
            weight, indices = node.all_input_nodes[0], node.all_input_nodes[-1]
            return self._states[indices] if self._states[weight] == NONE else UNKNOWN
        if name == "cat":
            states = {self._states[s] for s in node.all_input_nodes}
            dim = arguments_of(node)["dim"] % len(shape_of(node))
            return states.pop() if len(states) == 1 and dim not in states else UNKNOWN
        tags = getattr(node.target, "tags", ())
        if torch.Tag.pointwise in tags:
            return self._aligned(node)
        [first, *others] = node.all_input_nodes
        state, shape = self._states[first], shape_of(first)
        is_shape_only = name in (
            "expand_as",
            "type_as",
            "index",
        )  # the others decide no value, or choose within a sample
        if state == NONE or (not is_shape_only and any(self._states[o] not in (NONE, state) for o in others)):
            return UNKNOWN
        return _MOVES[name](node, state, shape) if name in _MOVES else UNKNOWN

    def _aligned(self, node: fx.Node) -> int:
        """Return the batch dim of a pointwise operation, whose arguments are aligned at their last dims."""
        found = {
            len(shape_of(node)) - len(shape_of(source)) + state
            for source in node.all_input_nodes
            if (state := self._states[source]) != NONE
        }
        if len(found) == 2 and all(shape_of(node)[dim] > 1 for dim in found):
            return self._mixing(node)  # each row of the one against each row of the other
        return found.pop() if len(found) == 1 else UNKNOWN

    def _product(self, node: fx.Node, name: str) -> int:
        left, right = node.args[:2]
        if len(node.all_input_nodes) > 2 and any(self._states[s] != NONE for s in node.all_input_nodes[2:]):
            return UNKNOWN
        one, other = (self._states.get(side, NONE) for side in (left, right))  # type: ignore[arg-type]
        rank, other_rank, result = len(shape_of(left)), len(shape_of(right)), len(shape_of(node))
        if name == "linear" and other != NONE:
            other = {0: 1, 1: 0}[other]  # the second argument of `linear` is transposed
        if rank < 2 or other_rank < 2:
            return UNKNOWN
        if other == NONE:
            return UNKNOWN if one == rank - 1 else one + result - rank
        if one == NONE:
            return UNKNOWN if other == other_rank - 2 else other + result - other_rank
        if one == rank - 1 and other == other_rank - 2:
            return SUM
        if one + result - rank == other + result - other_rank and one < rank - 2:
            return one + result - rank
        is_outer = one == rank - 2 and other == other_rank - 1
        return self._mixing(node) if is_outer else UNKNOWN

    def _einsum(self, node: fx.Node) -> int:
        equation, operands = str(node.args[0]).replace(" ", ""), node.args[1]
        terms, _, result = equation.partition("->")
        batch = {
            term[self._states[operand]]
            for term, operand in zip(terms.split(","), operands, strict=True)  # type: ignore[arg-type]
            if self._states[operand] != NONE and "." not in equation and result
        }
        if len(batch) == 2 and batch <= set(result):
            return self._mixing(node)
        if len(batch) != 1:
            return UNKNOWN
        [letter] = batch
        return result.index(letter) if letter in result else SUM

    def _loss(self, node: fx.Node, name: str) -> int:
        given = arguments_of(node)
        states = {self._states[s] for s in node.all_input_nodes} - {NONE}
        rank = len(shape_of(node.all_input_nodes[0]))
        class_dim = min(1, rank - 1)
        if name in _OVER_CLASSES and self._states[node.all_input_nodes[0]] == class_dim:
            return self._mixing(node)
        if len(states) != 1:
            return UNKNOWN
        return states.pop() if given.get("reduction") == 0 else SUM

    def _reduction(self, node: fx.Node, name: str) -> int:
        given = arguments_of(node)
        source = node.all_input_nodes[0]
        state, rank = self._states[source], len(shape_of(source))
        dims = given.get("dim")
        dims = [dims] if isinstance(dims, int) else (list(dims) if dims else list(range(rank)))
        reduced = {dim % rank for dim in dims} if rank else set()
        if state not in reduced:
            keeps = given.get("keepdim") or name in _SAME_DIMS
            return state if keeps else state - sum(dim < state for dim in reduced)
        is_one_sample = shape_of(source)[state] == 1
        if name in _REDUCTIONS or is_one_sample:
            return SUM
        return UNKNOWN if name in _SELECTIONS else self._mixing(node)


def _name(node: fx.Node) -> str:
    schema = schema_of(node)
    if schema is None:
        return str(getattr(node.target, "__name__", node.target))
    name = str(schema.name).rpartition("::")[2]
    return name.rstrip("_") if not name.endswith("__") else name


def _permuted(node: fx.Node, state: int, shape: tuple[int, ...]) -> int:
    dims = [dim % len(shape) for dim in arguments_of(node)["dims"]]
    return dims.index(state)


def _transposed(node: fx.Node, state: int, shape: tuple[int, ...]) -> int:
    given = arguments_of(node)
    one, other = (given.get(name, index) % len(shape) for index, name in enumerate(("dim0", "dim1")))
    return {one: other, other: one}.get(state, state)  # type: ignore[no-any-return]


def _matrix_transposed(_node: fx.Node, state: int, shape: tuple[int, ...]) -> int:
    rank = len(shape)
    return {rank - 2: rank - 1, rank - 1: rank - 2}.get(state, state)


def _reshaped(node: fx.Node, state: int, shape: tuple[int, ...]) -> int:
    """Return where the batch dim goes, which stays the slowest varying part of the dim that it is merged into."""
    result = shape_of(node)
    if not all(isinstance(size, int) for size in (*shape, *result)):
        return UNKNOWN
    before = math.prod(shape[:state])
    for dim in range(len(result)):
        if math.prod(result[:dim]) == before and (result[dim] > 1 or shape[state] == 1):
            return dim
    return UNKNOWN


def _unsqueezed(node: fx.Node, state: int, shape: tuple[int, ...]) -> int:
    return state + (arguments_of(node)["dim"] % (len(shape) + 1) <= state)  # type: ignore[no-any-return]


def _selected(node: fx.Node, state: int, shape: tuple[int, ...]) -> int:
    dim = arguments_of(node)["dim"] % len(shape)
    return UNKNOWN if dim == state else state - (dim < state)


def _same(_node: fx.Node, state: int, _shape: tuple[int, ...]) -> int:
    return state


def _same_beside_dim(node: fx.Node, state: int, shape: tuple[int, ...]) -> int:
    return UNKNOWN if arguments_of(node).get("dim", 0) % len(shape) == state else state


def _first(node: fx.Node, state: int, shape: tuple[int, ...]) -> int:
    return 0 if state == 0 and len(shape_of(node)) == len(shape) else UNKNOWN


def _expanded(node: fx.Node, state: int, shape: tuple[int, ...]) -> int:
    return state + len(shape_of(node)) - len(shape)


def _indexed(node: fx.Node, state: int, shape: tuple[int, ...]) -> int:
    """Return 0 for a selection of one position per sample, `x[torch.arange(batch), positions]`."""
    result = shape_of(node)
    return 0 if state == 0 and result and result[0] == shape[0] else UNKNOWN


_MOVES: Mapping[str, Callable[[fx.Node, int, tuple[int, ...]], int]] = {
    **dict.fromkeys(_SAME_DIMS, _same),
    **dict.fromkeys(_FIRST_DIM, _first),
    **dict.fromkeys(("view", "reshape", "flatten", "unflatten", "_unsafe_view", "squeeze"), _reshaped),
    "permute": _permuted,
    "transpose": _transposed,
    "expand_as": _expanded,
    **dict.fromkeys(("t", "numpy_T", "mT", "matrix_H", "adjoint"), _matrix_transposed),
    **dict.fromkeys(("topk", "sort", "cumsum", "split", "split_with_sizes", "chunk"), _same_beside_dim),
    "getitem": _same,
    "one_hot": _same,
    "unsqueeze": _unsqueezed,
    "select": _selected,
    "expand": _expanded,
    "index": _indexed,
}


def batch_norms(flow: Dataflow, loss: fx.Node) -> int:
    """Return the number of BatchNorm operations that normalise by the statistics of a micro-batch."""
    training: Any = [node for node in ancestors([loss]) & set(flow.order) if _name(node) == "batch_norm"]
    return sum(bool(arguments_of(node)["training"]) for node in training)
