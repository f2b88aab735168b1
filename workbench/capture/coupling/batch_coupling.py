"""Operations through which the samples of a batch influence one another, found by following the batch dim.

A loss that compares samples (in-batch contrast) or multiplies means over the batch (load balancing) has another value
when the batch is cut into micro-batches or replicas. Each value of the graph is independent of the batch, has one row
per sample along a known dim, is a sum over samples, or is unknown. An operation that certainly mixes samples is
reported. After one that this module does not know nothing is certain: its line is kept, and numbers decide whether
that operation keeps the samples apart (`workbench.capture.coupling.division`). Numbers see one branch only, so the
graph is followed a second time as if it did: what bends a mean over the batch then is reported, too.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx

from workbench.base.user_code import line_of_node
from workbench.capture.export.observed_forward import ITEM, Recording
from workbench.capture.export.opaque import OpaqueCall, call_of, record_again
from workbench.capture.export.varying import (
    MOST_BRANCHES,
    is_check,
    is_guard,
    other_numbers,
    place_of,
    text_of,
    texts_of,
)
from workbench.capture.losses import OVER_ELEMENTS, OVER_LABELS, Quotient
from workbench.capture.operations import (
    MOVED,
    TABLES,
    Dataflow,
    ancestors,
    arguments_of,
    copy_nodes,
    dtype_of,
    is_random,
    moved_dim,
    mutated_arguments,
    names,
    op_name,
    reachable,
    retarget,
    schema_of,
    shape_of,
    sizes_of,
    storage_of,
)

Shape = tuple[int, ...]
NONE, SUM, UNKNOWN, SELECTED, OF_SUM, OF_COUNT, EXTREME, DECIDED = -1, -2, -3, -4, -5, -6, -7, -8
"""States other than the index of the batch dim: independent of the batch, summed over the samples, not known, elements
of all samples that a mask chose, a function of a sum over fields of the batch, whole numbers or truth values made of a
count over the samples that the model computes, the largest or smallest value of all samples, and what such a value or
a truth about all samples decides."""

_PRODUCTS = names("matmul mm bmm linear addmm baddbmm")
_SUMS = names("sum mean")
_SOFTMAXES = names("softmax _softmax log_softmax _log_softmax")
_NORMALISATIONS = _SOFTMAXES | names("logsumexp var std var_mean linalg_vector_norm norm")
SELECTIONS = names("argmax argmin amax amin any all max min")
_BENDS = names(
    "gt lt ge le eq ne isin bucketize searchsorted clamp clamp_min clamp_max relu relu6 leaky_relu hardtanh threshold "
    "hardsigmoid hardswish abs sign sgn floor ceil round trunc frac fmod remainder floor_divide maximum minimum fmax "
    "fmin max min index index_select embedding gather select one_hot"
)
"""Operations that depend on a value piece by piece: the numbers of a few samples may lie on one piece."""
_PUT_TOGETHER = names("add sub rsub cat stack copy index_put select_scatter slice_scatter index_copy index_add")
"""Operations that may put single samples beside others."""
_RUNNING = names("cumsum cumprod logcumsumexp cummax cummin")
_FINITE_CHECKS = names("isnan isinf isfinite")
"""Questions to a loss whose answer is the same for every loss that training goes on with."""
_RECURRENT = names("lstm gru rnn_tanh rnn_relu")
_CELLS = names("lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell")
_OVER_CLASSES = names(OVER_LABELS)
_LOSSES = _OVER_CLASSES | names(OVER_ELEMENTS)
RESHAPES = names("view reshape flatten unflatten _unsafe_view squeeze")
_SAME_DIMS = _SOFTMAXES | names(
    "clone contiguous to _to_copy detach alias dropout feature_dropout type_as slice lift_fresh_copy getitem one_hot "
    "detach_ float"
)
_ELEMENTWISE = names(
    "__and __or __xor bitwise_and bitwise_or bitwise_xor logical_and logical_or masked_fill copy where fill zero"
)
"""Operations on each element by itself that torch does not tag as such, or not in each of their forms."""
COUNTS = names("histc bincount")
LINEAR = names(
    "add sub rsub neg mul div sum mean reshape view flatten unsqueeze squeeze select slice expand permute transpose "
    "cat stack unbind index getitem clone contiguous to _to_copy detach alias lift_fresh_copy matmul mm linear cumsum"
)
_FIRST_DIM = names(
    "group_norm batch_norm instance_norm scaled_dot_product_attention conv1d conv2d conv3d "
    "convolution conv_transpose1d conv_transpose2d conv_transpose3d max_pool1d max_pool2d max_pool3d avg_pool1d "
    "avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d pad constant_pad_nd im2col "
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_bicubic2d "
    "upsample_trilinear3d pixel_shuffle pixel_unshuffle grid_sampler grid_sampler_2d"
)
"""Operations that keep the samples apart if they are the first dim of an operand and of the result."""
_BEFORE_LAST = {"scaled_dot_product_attention": 2, "triu": 2, "tril": 2}
"""Operations that work along the last dims only -> how many."""
_BESIDE_DIM = MOVED | _RUNNING | names("topk sort argsort split split_with_sizes chunk glu")
_BY_POSITION = MOVED | names(
    "linear matmul mm addmm bmm softmax _softmax log_softmax _log_softmax logsumexp linalg_vector_norm norm sum mean "
    "layer_norm rms_norm embedding clone contiguous to _to_copy detach alias dropout type_as getitem float "
    "scaled_dot_product_attention split chunk cat stack slice cross_entropy_loss nll_loss_nd mse_loss"
)
"""Operations beside the pointwise ones whose rules look at the position of the batch dim, and not at its elements."""
_ALONG_DIMS = names("roll flip")
_GATHERS = names("gather take_along_dim scatter scatter_add scatter_reduce")
_ONE_OPERAND = names("expand_as type_as")
"""Operations whose further operands decide no value."""
MADE_ANEW = names("zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty")
"""Operations that take a shape and a type from their operand, but no value."""
_POSITIONS = names("arange eye linspace")
"""Operations whose rows differ without a batch."""
_SHAPES = names("view reshape unsqueeze squeeze expand to _to_copy contiguous clone detach alias flatten unflatten")


@dataclass(frozen=True)
class Coupling:
    """Result of following the batch dim."""

    lines: tuple[str, ...] = ()
    """Each operation that certainly mixes samples on the way to the loss: its name and its line."""
    quotients: tuple[Quotient, ...] = ()
    """Divisions by a sum over fields of the batch, which is to be that of the global batch."""
    unknown: str = ""
    """The first operation after which it is not known whether samples mix, with its line; empty if it is known."""


class BatchWalk:
    """A walk over the nodes of one graph in order, with the rules by which operations hand on the batch dim.

    The batch dim of a tensor has `groups` × samples × any number of elements, in this order: one group, unless the
    whole batch comes several times, as in `cat([x, y])`, or a slower dim was merged with it.
    """

    def __init__(self, flow: Dataflow, needed: set[fx.Node], means: frozenset[fx.Node]) -> None:
        self._flow, self._needed, self._means = flow, needed, means
        self._states: dict[fx.Node, int] = {}
        self._coupled: list[fx.Node] = []
        self._doubtful: list[fx.Node] = []
        self._quotients: list[Quotient] = []
        self._totals: set[fx.Node] = set()
        self._shares: set[fx.Node] = set()
        self._sharing: defaultdict[fx.Node, list[fx.Node]] = defaultdict(list)
        self._running: set[fx.Node] = set()
        self.groups: dict[fx.Node, int] = {}
        """Groups in the batch dim of each node that has one."""
        self._dims_of_outputs: dict[fx.Node, list[int]] = {}
        self._samples = {shape_of(node)[0] for node in flow.order if node.op == "placeholder" and shape_of(node)}
        self._size = max(self._samples, default=1)

    def follow(self) -> None:
        """Give each node its state, and note what mixes samples."""
        for node in self._flow.order:
            self._states[node] = self._state(node)
            self._note_running(node)
            # The gradient of each row is divided by how often the batch has looked it up.
            if schema_of(node) and _name(node) in TABLES and arguments_of(node)["scale_grad_by_freq"]:
                self._coupled.append(node)
            # A value that was divided once by a sum over fields of the batch has a mean as its sum over samples.
            shared = [source for source in node.all_input_nodes if source in self._shares]
            is_share = len(shared) == 1 and _name(node) in ("mul", "div", "neg", "sum", *RESHAPES)
            if is_share or any(quotient.node is node for quotient in self._quotients):
                self._shares.add(node)
            elif self._states[node] == SUM:
                # A sum over samples may grow with their number, unless it is a mean or was divided by a count.
                if any(self._states[source] == SUM for source in node.all_input_nodes):
                    grows = any(source in self._totals for source in node.all_input_nodes)
                else:
                    is_mean = _name(node) in _LOSSES and arguments_of(node).get("reduction") != 2
                    grows = _name(node) != "mean" and not is_mean
                if grows:
                    self._totals.add(node)
            self._sharing[storage_of(node)].append(node)
            for written in mutated_arguments(node) if "norm" not in _name(node) else ():  # running averages
                self._write(storage_of(written), node)

    def coupling(self, loss: fx.Node) -> Coupling:
        self.follow()
        unknown = [node for node in self._flow.order if node in self._needed and self._states[node] == UNKNOWN]
        lost = [node for node in unknown if all(self._states[source] != UNKNOWN for source in node.all_input_nodes)]
        if self._states[loss] == SUM and not any(node in self._needed for node in self._doubtful):
            lost = [loss] if loss in self._totals else []
        elif not lost:
            lost = [node for node in self._doubtful if node in self._needed] or [loss]
        lines = tuple(dict.fromkeys(self._described(node) for node in self._coupled if node in self._needed))
        return Coupling(lines, tuple(self._quotients), described(lost[0]) if lost else "")

    def _described(self, node: fx.Node) -> str:
        """Return what mixes samples, in words."""
        return described(node)

    def _write(self, owner: fx.Node, node: fx.Node) -> None:
        """Give everything that shares memory with a written value the state of what was written."""
        state = self._states[node]
        for other in self._sharing[owner]:
            if self._states[other] == state or state == NONE:
                continue
            is_alike = len(shape_of(other)) == len(shape_of(node)) and other.op != "get_attr"
            is_new = self._states[other] == NONE and state >= 0 and is_alike
            self._states[other] = state if is_new and shape_of(other)[state] == shape_of(node)[state] else UNKNOWN

    def _mixing(self, node: fx.Node) -> int:
        self._coupled.append(node)
        return UNKNOWN

    def _of(self, nodes: Iterable[fx.Node]) -> set[int]:
        """Return the states of those nodes that depend on the batch."""
        return {self._states[node] for node in nodes} - {NONE}

    def _note_positions(self, node: fx.Node, dim: int) -> None:
        """Remember an operation that treats samples by their position in the batch, as weights `arange(batch)` do."""
        for source in node.all_input_nodes:
            at = dim - len(shape_of(node)) + len(shape_of(source))
            if self._states[source] == NONE and at >= 0 and shape_of(source)[at] > 1:
                made = reachable([source], lambda each: [] if _name(each) == "expand" else each.all_input_nodes)
                if any(_name(each) in _POSITIONS and self._samples & set(shape_of(each)) for each in made):
                    self._doubtful.append(node)

    def _note_running(self, node: fx.Node) -> None:
        """Remember whole numbers that count over the samples so far; a comparison of these mixes the samples.

        As the indices of rows they may undo one another, as those of a dropless mixture of experts do.
        """
        if any(source in self._running for source in node.all_input_nodes):
            if is_float(node) or is_truth(node):
                self._coupled += [node] * self._is_elementwise(node, _name(node))
            else:
                self._running.add(node)
        elif _name(node) in _RUNNING and node.op == "call_function":
            [source] = node.all_input_nodes
            state = self._states[source]
            if state >= 0 and int(arguments_of(node)["dim"]) % len(shape_of(source)) == state:
                if is_float(node):
                    self._coupled.append(node)
                else:
                    self._running.add(node)

    def _is_same_in_each_step(self, made: Iterable[fx.Node]) -> bool:
        """Return True if numbers in the graph make these values alone, and nothing has written to them."""
        return not any(
            each.op != "call_function"
            or is_random(each)
            or any(map(mutated_arguments, self._sharing[storage_of(each)]))
            for each in made
        )

    # Rules

    def _state(self, node: fx.Node) -> int:
        """Return how the result of an operation holds the samples of the batch, and note the groups in its dim."""
        state, groups = self._placed(node)
        self.groups[node] = groups
        size = shape_of(node)[state] if 0 <= state < len(shape_of(node)) else 0
        return UNKNOWN if isinstance(size, int) and size % (groups * self._size) else state

    def _placed(self, node: fx.Node) -> tuple[int, int]:
        """Return the state of a node and the groups in its batch dim."""
        name, inputs = _name(node), node.all_input_nodes
        rows = [source for source in inputs if self._states[source] >= 0]
        if node.op != "call_function" or not rows or len(rows) < len([s for s in inputs if self._states[s] != NONE]):
            return self._by_rule(node), 1
        state, groups = self._states[rows[0]], {self.groups[source] for source in rows}
        if name == "cat" and rows == inputs:
            dim = arguments_of(node)["dim"] % len(shape_of(node))
            if {self._states[source] for source in rows} == {dim}:
                return dim, sum(self.groups[source] for source in arguments_of(node)["tensors"])
        if name in RESHAPES and all(isinstance(size, int) for size in shape_of(node)):
            return _reshaped(shape_of(rows[0]), state, self.groups[rows[0]], self._size, shape_of(node))
        if name in ("chunk", "split", "slice") and arguments_of(node)["dim"] % len(shape_of(rows[0])) == state:
            part = _groups_of_part(node, shape_of(rows[0])[state], self.groups[rows[0]])
            return (state, part) if part else (UNKNOWN, 1)
        if (of_output := self._of_output(node)) is not None:
            return of_output, 1
        state = self._by_rule(node)
        is_by_position = torch.Tag.pointwise in getattr(node.target, "tags", ()) or name in _BY_POSITION
        if state >= 0 and (len(groups) > 1 or (groups != {1} and not is_by_position)):
            return UNKNOWN, 1
        return state, max(groups)

    def _by_rule(self, node: fx.Node) -> int:
        """Return the state of the result of an operation on values with the whole batch once in their dim."""
        if node.op == "placeholder":
            return 0 if shape_of(node) else NONE
        states = [self._states[source] for source in node.all_input_nodes]
        name = _name(node)
        if name in MADE_ANEW and all(isinstance(size, int) for size in shape_of(node)):
            return NONE
        if node.op != "call_function" or UNKNOWN in states:
            return UNKNOWN if UNKNOWN in states else NONE
        if all(state == NONE for state in states):
            return NONE
        if not all(isinstance(size, int) for source in (node, *node.all_input_nodes) for size in shape_of(source)):
            return self._of_selections(node, name, states)
        if SUM in states or OF_SUM in states or OF_COUNT in states:
            return self._of_sums(node, name)
        return self._of_rows(node, name) if (state := self._of_output(node)) is None else state

    def _of_output(self, node: fx.Node) -> int | None:
        """Return the state of one of several results of an operation whose batch dims differ; None for other nodes."""
        source, index = (*node.args, None, None)[:2]
        dims = self._dims_of_outputs.get(source) if _name(node) == "getitem" else None  # type: ignore[arg-type]
        return dims[index] if dims is not None and isinstance(index, int) else None

    def _of_selections(self, node: fx.Node, name: str, states: list[int]) -> int:
        """Return the state of an operation on what a mask chose: how many elements are of a sample is not known."""
        if node in self._means or name in COUNTS:
            return SUM
        if SUM in states:
            return self._mixing(node) if self._is_elementwise(node, name) and is_float(node) else UNKNOWN
        if name == "index" or (SELECTED in states and self._is_elementwise(node, name)):
            return SELECTED
        if name == "sym_size" and states == [SELECTED]:
            return SUM  # the number of chosen elements
        if name in _SUMS and states == [SELECTED]:
            dims, rank = arguments_of(node).get("dim"), len(shape_of(node.args[0]))
            reduced = {dim % rank for dim in ([dims] if isinstance(dims, int) else dims or range(rank))}
            if all(isinstance(shape_of(node.args[0])[dim], int) for dim in reduced):
                return SELECTED
            return SUM if name == "sum" else self._mixing(node)  # divided by the number of a micro-batch alone
        return UNKNOWN

    def _is_elementwise(self, node: fx.Node, name: str) -> bool:
        is_tagged = torch.Tag.pointwise in getattr(node.target, "tags", ())
        return is_tagged or name in _ELEMENTWISE or name in ("to", "_to_copy", "clone", "detach")

    def _of_sums(self, node: fx.Node, name: str) -> int:
        """Return the state of an operation on sums over the samples: linear ones give sums, others mix samples."""
        varying = [source for source in node.all_input_nodes if self._states[source] != NONE]
        if name in _FINITE_CHECKS:
            return NONE
        is_fixed_choice = name in ("where", "masked_fill") and not any(is_truth(source) for source in varying)
        is_sum = (name in LINEAR or is_fixed_choice) and all(self._states[source] == SUM for source in varying)
        is_product = name in ("mul", "div", *_PRODUCTS)
        if is_sum and (not is_product or (len(varying) == 1 and (name != "div" or node.args[0] in varying))):
            return SUM
        if name == "div" and len(varying) == 2 and self._is_quotient(node):
            return self._states[varying[0]]
        is_field = node in self._flow.recomputable and len(varying) == 1 and not shape_of(node)
        if is_field and isinstance(node.meta.get("val"), torch.Tensor):
            return OF_SUM
        if any(is_float(source) for source in varying if self._states[source] in (SUM, OF_SUM)):
            return self._mixing(node) if isinstance(node.meta.get("val"), torch.Tensor) else UNKNOWN
        if not self._is_elementwise(node, name):
            return UNKNOWN  # counts that choose rows, as the offsets of a mixture of experts do
        return self._mixing(node) if is_float(node) else OF_COUNT

    def _is_quotient(self, node: fx.Node) -> bool:
        """Return True, and remember it, if a sum over samples or a row of each is divided by a sum over fields."""
        dividend, divisor = node.args[:2]
        total: Any = divisor
        if self._states[dividend] in (UNKNOWN, SELECTED, OF_SUM) or divisor not in self._flow.recomputable:  # type: ignore[index]
            return False
        while _name(total) not in _SUMS:
            varying = [source for source in total.all_input_nodes if self._states[source] != NONE]
            if len(varying) != 1 or shape_of(varying[0]) or self._states[varying[0]] not in (SUM, OF_SUM):
                return False
            [total] = varying
        if shape_of(divisor) or (_name(total) == "mean" and total is not divisor):
            return False
        if ancestors([total]) & {quotient.node for quotient in self._quotients}:
            return False  # a total of shares, each of which is one of the whole batch
        self._quotients.append(Quotient(node, total, divisor))  # type: ignore[arg-type]
        return True

    def _of_rows(self, node: fx.Node, name: str) -> int:
        """Return the state of an operation on values with one row per sample."""
        if name in _RULES and not (name in ("max", "min") and len(node.all_input_nodes) > 1):
            return _RULES[name](self, node, name)
        if (self._is_elementwise(node, name) and name not in _SAME_DIMS) or name in ("max", "min"):
            return _aligned(self, node, name)
        [first, *others] = node.all_input_nodes
        state, before, after = self._states[first], shape_of(first), shape_of(node)
        if state == NONE and name in _ONE_OPERAND:
            return NONE
        if state == NONE or (name not in _ONE_OPERAND and any(self._states[o] not in (NONE, state) for o in others)):
            return UNKNOWN
        if name in _BEFORE_LAST and state < len(before) - _BEFORE_LAST[name]:
            return state
        if name in _ALONG_DIMS:
            dims = arguments_of(node)["dims"]
            return self._mixing(node) if state in {dim % len(before) for dim in dims or [state]} else state
        if name in _SAME_DIMS:
            return state
        if name in _FIRST_DIM:
            return 0 if state == 0 and len(after) == len(before) and after[0] == before[0] else UNKNOWN
        moved = moved_dim(node, state) if name in _BESIDE_DIM else None
        return UNKNOWN if moved is None else moved


def _reshaped(before: Shape, state: int, groups: int, samples: int, after: Shape) -> tuple[int, int]:
    """Return the dim of a reshaped tensor that holds the whole batch, and the groups in it: as few as can be."""
    outer = math.prod(before[:state]) * groups  # elements that vary more slowly than the sample
    found = []
    for dim, size in enumerate(after):
        slower = math.prod(after[:dim])
        if slower and outer % slower == 0 and slower * size % (outer * samples) == 0:
            found.append((outer // slower, dim))
    fewest, dim = min(found, default=(1, UNKNOWN))
    return dim, fewest


def _groups_of_part(node: fx.Node, size: int, groups: int) -> int:
    """Return the groups in a part along a batch dim of a size; 0 if it may be a part of one group."""
    given = arguments_of(node)
    if _name(node) in ("chunk", "split"):
        parts = given["chunks"] if _name(node) == "chunk" else size / given["split_size"]
        return int(groups // parts) if groups % parts == 0 else 0
    start, end, step = given["start"] or 0, given["end"], given["step"]
    if not all(isinstance(each, int) for each in (size, start, step, *([] if end is None else [end]))):
        return 0
    first, last = (slice(start, end).indices(size))[:2]
    is_of_groups = step == 1 and first % (size // groups) == 0 and last % (size // groups) == 0
    return (last - first) // (size // groups) if is_of_groups else 0


def is_float(node: fx.Node) -> bool:
    dtype = dtype_of(node)
    return dtype is not None and (dtype.is_floating_point or dtype.is_complex)


def is_truth(node: fx.Node) -> bool:
    return dtype_of(node) == torch.bool


def _normalised(walk: BatchWalk, node: fx.Node, _name: str) -> int:
    """Return the batch dim of a normalisation along the last dims, which mixes samples if the batch is one of them."""
    given, state = arguments_of(node), walk._states[node.all_input_nodes[0]]
    if state == NONE or walk._of(node.all_input_nodes[1:]):
        return UNKNOWN
    is_along = state >= len(shape_of(node)) - len(given["normalized_shape"])
    return walk._mixing(node) if is_along else state


def _recurrent(walk: BatchWalk, node: fx.Node, _name: str) -> int:
    """Return the batch dim of a recurrent layer's sequence, and note that of its states, which have layers first."""
    given = arguments_of(node)
    sequence = node.all_input_nodes[0]
    dim, state = 0 if given.get("batch_first") else 1, walk._states[sequence]
    states = [source for source in pytree.tree_leaves(given.get("hx")) if isinstance(source, fx.Node)]
    if "batch_sizes" in given or len(shape_of(sequence)) != 3 or any(walk._states[s] not in (NONE, 1) for s in states):
        return UNKNOWN
    if state not in (dim, NONE):
        return walk._mixing(node) if state == 1 - dim else UNKNOWN
    walk._dims_of_outputs[node] = [dim, 1, 1]
    return dim


def _repeated(walk: BatchWalk, node: fx.Node, name: str) -> int:
    """Return the batch dim of a repetition: of each element by a number, or of the whole along other dims."""
    given, source = arguments_of(node), node.all_input_nodes[0]
    state, rank = walk._states[source], len(shape_of(source))
    if name == "repeat_interleave":
        is_by_number = isinstance(given.get("repeats"), int) and len(node.all_input_nodes) == 1
        return state if is_by_number and (isinstance(given["dim"], int) or rank == 1) else UNKNOWN
    times = given["repeats" if name == "repeat" else "dims"]
    place = state + max(0, len(times) - rank)
    return place if len(times) < rank - state or times[len(times) - rank + state] == 1 else UNKNOWN


def _cat(walk: BatchWalk, node: fx.Node, name: str) -> int:
    """Return the batch dim of operands with the same dims that are joined, gathered or scattered along another one."""
    states = walk._of(node.all_input_nodes)
    if (given := arguments_of(node)["dim"]) is None:
        return UNKNOWN
    dim = given % len(shape_of(node))
    if name in ("gather", "take_along_dim") and walk._states[node.args[0]] == dim:  # type: ignore[index]
        return _chosen(walk, node, dim, node.all_input_nodes[1])
    if len(states) != 1 or (name in _GATHERS and dim in states):
        return UNKNOWN
    [state] = states
    walk._note_positions(node, state)
    if name == "stack":
        return state + int(dim <= state)
    return state if dim != state else UNKNOWN


def _index(walk: BatchWalk, node: fx.Node, name: str) -> int:
    """Return the batch dim of what indices choose: rows of a table, elements within each sample, or whole samples."""
    arguments = arguments_of(node)
    source, rank = arguments["self"], len(shape_of(arguments["self"]))
    if name == "index":
        given = {dim: index for dim, index in enumerate(arguments["indices"]) if index is not None}
    else:
        given = {int(arguments["dim"] % rank): arguments["index"]}
    if any(dtype_of(index) in (torch.bool, torch.uint8) for index in given.values()):
        return UNKNOWN
    places = max(len(shape_of(index)) for index in given.values())  # dims of the result that the indices make
    first = min(given) if max(given) - min(given) == len(given) - 1 else 0
    state = walk._states[source]
    if state >= 0 and state not in given:
        if any(walk._states[index] != NONE for index in given.values()):
            return walk._mixing(node)  # the elements of each sample are chosen by all samples
        kept = [dim for dim in range(rank) if dim not in given].index(state)
        return kept if kept < first else kept + places
    others = {places - len(shape_of(i)) + walk._states[i] for i in given.values() if walk._states[i] != NONE}
    if state == NONE:
        return first + others.pop() if len(others) == 1 and min(others) >= 0 else UNKNOWN
    chosen = _chosen(walk, node, state, given[state])
    if chosen < 0 or others - {chosen + places - len(shape_of(given[state]))}:
        return min(chosen, UNKNOWN)
    return first + places - len(shape_of(given[state])) + chosen


def _bags(walk: BatchWalk, node: fx.Node, _name: str) -> int:
    """Return the batch dim of bags of one length, as a table of indices with a row for each sample makes them."""
    given = arguments_of(node)
    indices, offsets, weights = given["indices"], given["offsets"], given["per_sample_weights"]
    if walk._states[given["weight"]] != NONE or any(
        walk._states.get(e, NONE) not in (NONE, 0) for e in (indices, weights)
    ):
        return UNKNOWN
    made, elements, bags = ancestors([offsets]), math.prod(shape_of(indices)), math.prod(shape_of(offsets))
    if not bags or bags % walk._size or not walk._is_same_in_each_step(made):
        return UNKNOWN
    if not _numbers(offsets, made).equal(torch.arange(0, elements, max(1, elements // bags))):
        return UNKNOWN
    walk._dims_of_outputs[node] = [0, UNKNOWN, 0, UNKNOWN]  # the second and the fourth are for the backward
    return 0


def _chosen(walk: BatchWalk, node: fx.Node, dim: int, index: fx.Node) -> int:
    """Return the dim of an index that goes through the samples in their order, if it chooses along a batch dim.

    Every other order mixes them, at any size: `x[torch.randperm(len(x))]`, `x[partner]`. What is computed from
    positions and fields may stay within each sample (`flat[torch.arange(batch) * length + last]`): it is unknown.
    """
    [source, *_] = node.all_input_nodes
    size, state, made = shape_of(source)[dim], walk._states[index], ancestors([index])
    is_of_positions = any(_name(each) in _POSITIONS for each in made)
    if walk.groups.get(source, 1) > 1 or not shape_of(index) or (state != NONE and (state < 0 or is_of_positions)):
        return UNKNOWN
    if not walk._is_same_in_each_step(made):
        return walk._mixing(node)
    sample = _numbers(index, made) % size // (size // walk._size)
    found = [at for at in range(sample.dim()) if bool((sample == _samples_along(sample, at, walk._size)).all())]
    if walk._size == 1 and not all(_name(each) in _SHAPES or _is_range(each) for each in made):
        return UNKNOWN  # one sample has one order
    return found[0] if found else walk._mixing(node)


def _is_range(node: fx.Node) -> bool:
    given = arguments_of(node)
    return _name(node) == "arange" and (given.get("start") or 0, given.get("step", 1)) == (0, 1)


def _samples_along(like: torch.Tensor, dim: int, samples: int) -> torch.Tensor:
    """Return the sample at each position of a tensor that holds the whole batch along a dim; -1 if it cannot."""
    size = like.shape[dim]
    at = torch.full((size,), -1) if size % samples else torch.arange(size) // (size // samples)
    return at.view([-1 if each == dim else 1 for each in range(like.dim())])


def _numbers(node: fx.Node, made: set[fx.Node]) -> torch.Tensor:
    """Return the value of a tensor that numbers in the graph make alone."""
    values, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    copy_nodes(values, (each for each in node.graph.nodes if each in made), copies)
    values.output(copies[node])
    code = fx.GraphModule({}, values)
    retarget(code, torch.device("cpu"))
    with torch.no_grad(), torch.device("cpu"):
        result: torch.Tensor = code()
    return result


def _aligned(walk: BatchWalk, node: fx.Node, name: str) -> int:
    """Return the batch dim of a pointwise operation or a broadcast, whose arguments are aligned at their last dims.

    The tensors that `broadcast_tensors` returns all have the same shape.
    """
    shape = node.meta["val"][0].shape if name == "broadcast_tensors" else shape_of(node)
    found = {
        len(shape) - len(shape_of(source)) + state
        for source in node.all_input_nodes
        if (state := walk._states[source]) != NONE
    }
    if len(found) == 2 and all(shape[dim] > 1 for dim in found):
        return walk._mixing(node)  # each row of the one against each row of the other
    if len(found) != 1 or min(found) < 0:
        return UNKNOWN
    [dim] = found
    if name != "broadcast_tensors":
        walk._note_positions(node, dim)
    return dim


def _product(walk: BatchWalk, node: fx.Node, name: str) -> int:
    left, right = node.args[1:3] if name in ("addmm", "baddbmm") else node.args[:2]
    if name in ("addmm", "baddbmm") and walk._states[node.args[0]] != NONE:  # type: ignore[index]
        return UNKNOWN
    if (
        name not in ("addmm", "baddbmm")
        and len(node.all_input_nodes) > 2
        and any(walk._states[s] != NONE for s in node.all_input_nodes[2:])
    ):
        return UNKNOWN
    one, other = (walk._states.get(side, NONE) for side in (left, right))  # type: ignore[arg-type]
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
    return walk._mixing(node) if is_outer else UNKNOWN


def _einsum(walk: BatchWalk, node: fx.Node, _name: str) -> int:
    equation, operands = str(node.args[0]).replace(" ", ""), node.args[1]
    terms, _, result = equation.partition("->")
    batch = {
        term[walk._states[operand]]
        for term, operand in zip(terms.split(","), operands, strict=True)  # type: ignore[arg-type]
        if walk._states[operand] != NONE and "." not in equation and result
    }
    if len(batch) == 2 and batch <= set(result):
        return walk._mixing(node)
    if len(batch) != 1:
        return UNKNOWN
    [letter] = batch
    return result.index(letter) if letter in result else SUM


def _loss(walk: BatchWalk, node: fx.Node, name: str) -> int:
    given = arguments_of(node)
    states = walk._of(node.all_input_nodes)
    rank = len(shape_of(node.all_input_nodes[0]))
    class_dim = min(1, rank - 1)
    if name in _OVER_CLASSES and walk._states[node.all_input_nodes[0]] == class_dim:
        return walk._mixing(node)
    if len(states) != 1:
        return UNKNOWN
    return states.pop() if given.get("reduction") == 0 else SUM


def _reduction(walk: BatchWalk, node: fx.Node, name: str) -> int:
    given = arguments_of(node)
    source = node.all_input_nodes[0]
    state, rank = walk._states[source], len(shape_of(source))
    dims = given.get("dim")
    dims = [dims] if isinstance(dims, int) else (list(dims) if dims else list(range(rank)))
    reduced = {dim % rank for dim in dims} if rank else set()
    if state not in reduced:
        keeps = given.get("keepdim") or name in _SAME_DIMS
        return state if keeps else state - sum(dim < state for dim in reduced)
    is_one_sample = shape_of(source)[state] == 1
    if name in _SUMS or is_one_sample:
        return SUM
    return UNKNOWN if name in SELECTIONS else walk._mixing(node)


def described(node: fx.Node) -> str:
    """Return the name of an operation, or that of the user's code which it runs, with its line."""
    call = call_of(node)
    return f"{_name(node) if call is None else call.label}{line_of_node(node).where}"


def _name(node: fx.Node) -> str:
    """Return the name of an operation, in place or not."""
    return op_name(node).rstrip("_") or op_name(node)


_RULES: dict[str, Callable[[BatchWalk, fx.Node, str], int]] = {
    **dict.fromkeys(_PRODUCTS, _product),
    **dict.fromkeys(_LOSSES, _loss),
    **dict.fromkeys(_SUMS | _NORMALISATIONS | SELECTIONS, _reduction),
    **dict.fromkeys(names("layer_norm rms_norm"), _normalised),
    **dict.fromkeys(_RECURRENT, _recurrent),
    **dict.fromkeys(_CELLS, lambda walk, node, _: 0 if walk._of(node.all_input_nodes) <= {0} else UNKNOWN),
    **dict.fromkeys(names("repeat repeat_interleave tile"), _repeated),
    "einsum": _einsum,
    "embedding": lambda walk, node, _: (
        walk._states[node.all_input_nodes[-1]]
        if walk._states[node.all_input_nodes[0]] == NONE
        else _chosen(walk, node, 0, node.all_input_nodes[-1])
    ),
    **dict.fromkeys(names("embedding_bag _embedding_bag"), _bags),
    "broadcast_tensors": _aligned,
    **dict.fromkeys(names("index index_select"), _index),
    **dict.fromkeys(names("cat stack") | _GATHERS, _cat),
}


def batch_norms(flow: Dataflow, loss: fx.Node) -> int:
    """Return the number of BatchNorm operations that normalise by the statistics of a micro-batch.

    Those of code that runs as written count by the operations of a run, in which an InstanceNorm is the BatchNorm of
    one sample that has the channels of all.
    """
    needed = ancestors([loss]) & set(flow.order)
    recorded = [call.recording for node in needed if (call := call_of(node)) is not None and call.recording is not None]
    nodes: Any = [*needed, *(node for recording in recorded for node in recording.flow.order)]
    norms = [node for node in nodes if _name(node) in ("batch_norm", "native_batch_norm", "cudnn_batch_norm")]
    return sum(bool(arguments_of(node)["training"]) for node in norms if shape_of(node.args[0])[0] != 1)


# Means over the batch that the loss bends or chooses by: a second walk, behind the first operation without a rule.
#
# Comparisons of numbers may see one branch only: `torch.where(loss > 1, …)`, free nats and `if loss > 1` are linear on
# either side, and differ where micro-batches lie on both. So the graph is followed a second time as if every unknown
# operation kept the samples apart, also through the recordings of code that runs as written. What bends a mean there,
# or hands it to Python, counts as coupling.


def batch_coupling(flow: Dataflow, loss: fx.Node, means: Iterable[fx.Node] = ()) -> Coupling:
    """Follow the batch dim to the loss; `means` are the losses that the runtime divides by the labels of all."""
    needed, of_all = ancestors([loss]), frozenset(means)
    found = BatchWalk(flow, needed, of_all).coupling(loss)
    if found.lines or not found.unknown:
        return found
    walk = _AssumingWalk(flow, needed, of_all)
    walk.behind = f"behind {found.unknown}"
    assumed = walk.coupling(loss)
    return Coupling(assumed.lines, assumed.quotients, found.unknown)


class _AssumingWalk(BatchWalk):
    """A walk that takes each operation without a rule for one that keeps the samples apart.

    Its batch dim is the one that grows with those of its operands; where that is not known, the one of the same size.
    A number for all samples is taken for a mean, apart from the largest and the smallest. Only operations on such
    numbers are reported, and of the largest and smallest those that bend it or choose by it: whether rows meet rows of
    other samples, and whether they are shifted or scaled by an extreme one, is decided by numbers.
    """

    def __init__(self, flow: Dataflow, needed: set[fx.Node], means: frozenset[fx.Node]) -> None:
        super().__init__(flow, needed, means)
        self._given: dict[fx.Node, int] = {}
        """States of the tensors that a recorded call was given."""
        self._samples_in: dict[fx.Node, frozenset[int]] = {}
        """Samples that a node is computed from, for those in a loop over the samples: `loss(x[0]) + loss(x[1])`."""
        self._apart: set[fx.Node] = set()
        """Lists with one tensor for each sample."""
        self.behind = ""
        """Words for the first operation without a rule."""
        self._places_of: dict[fx.Node, str] = {}
        """Words for the code that an operation of a recording is in."""
        self._is_recorded = False
        """True for the operations of a call, of which Python reads numbers."""
        self._without_rule: list[fx.Node] = []

    def _described(self, node: fx.Node) -> str:
        place = self._places_of.get(node, self.behind)
        return f"{super()._described(node)}, on what may be a number of all samples {place}"

    def _mixing(self, node: fx.Node) -> int:
        return super()._mixing(node) if any(self._states[each] < NONE for each in node.all_input_nodes) else UNKNOWN

    def _state(self, node: fx.Node) -> int:
        if node in self._given:
            return self._given[node]
        if (call := call_of(node)) is not None and call.recording is not None:
            return _inside(self, node, call)
        if node.target is ITEM:
            # What Python computes with may decide by all samples if it is a mean, their rows, or a number of them.
            read: Any = node.args[0]
            state = self._states[read]
            if is_float(read):
                is_row = 0 <= state < len(shape_of(read)) and shape_of(read)[state] > 1
                decides = is_row or state in (SUM, OF_SUM, EXTREME, DECIDED)
            else:
                decides = state in (OF_COUNT, DECIDED) and not self._is_recorded
            self._coupled += [node] * decides
        if self._is_recorded and op_name(node) in ("sym_size", "sym_numel") and node.args[0] not in self._samples_in:
            return NONE if self._states[node.args[0]] == NONE else OF_COUNT  # type: ignore[index]
        sample = self._sample_of(node)
        if sample is not None or node in self._apart:
            if sample is not None:
                self._samples_in[node] = frozenset([sample])
            self.groups[node] = 1
            return NONE
        if any(self._states[source] in (EXTREME, DECIDED) for source in node.all_input_nodes):
            return self._of_extremes(node)
        return self._of_others(node)

    def _of_others(self, node: fx.Node) -> int:
        state, inputs = super()._state(node), node.all_input_nodes
        if any(source in self._samples_in for source in inputs):
            if state == NONE:
                return self._of_loop(node)
            # One sample chooses for others, scales or shifts them: `torch.where(flag[0], …)`, `losses + flag[0]`.
            is_single = any(source in self._samples_in and self._states[source] == NONE for source in inputs)
            name, has_rows = op_name(node).rstrip("_"), any(self._states[source] >= 0 for source in inputs)
            is_put = name in _PUT_TOGETHER and not (has_rows and name in ("add", "sub", "rsub"))
            self._coupled += [node] * (is_single and not is_put and is_float(node))
        return self._assumed(node) if state == UNKNOWN and node.op == "call_function" else state

    def _of_extremes(self, node: fx.Node) -> int:
        """Return the state of an operation on the largest or smallest value of all samples, or on what it decides."""
        name, inputs = op_name(node).rstrip("_"), node.all_input_nodes
        held = {source: self._states[source] for source in inputs if self._states[source] in (EXTREME, DECIDED)}
        self.groups[node] = 1
        if name in MADE_ANEW or name in _FINITE_CHECKS:
            return NONE
        decides = DECIDED in held.values()
        if is_float(node) and (decides or name in _BENDS):
            return self._mixing(node)
        # What it does to the others is as if it were a constant.
        self._states |= dict.fromkeys(held, NONE)
        state = self._of_others(node)
        self._states |= held
        if state == NONE:
            return DECIDED if decides or name in _BENDS else EXTREME
        return self._mixing(node) if name in _BENDS else state

    # Code that runs as written

    def _followed(self, node: fx.Node, recording: Recording) -> _AssumingWalk:
        """Return a walk through the operations of a call."""
        inner = _AssumingWalk(recording.flow, set(recording.flow.order), frozenset())
        inner._samples, inner._size, inner._is_recorded = self._samples, self._size, True
        for given, tensor in zip(recording.given, node.args[1], strict=True):  # type: ignore[arg-type]
            inner._given[given] = self._states[tensor]
            inner.groups[given] = self.groups[tensor]
            if tensor in self._samples_in:
                inner._samples_in[given] = self._samples_in[tensor]
        inner.follow()
        self._places_of |= inner._places_of
        return inner

    def _readers(self, read: fx.Node) -> frozenset[int] | None:
        """Return the samples that decide a number that Python reads; all of the batch, or none."""
        value: Any = read.args[0]
        if self._states[value] != NONE:
            return frozenset(range(self._size)) if self._size > 1 else frozenset([0, 1])
        return self._samples_in.get(value)

    def _beside(self, samples: frozenset[int]) -> list[str]:
        """Return the operations that are not those of single samples among the given ones."""
        nodes = (n for n in self._flow.order if len(samples) > 1 or self._samples_in.get(n) != samples)
        return sorted(text_of(each) for each in nodes if each.target is not ITEM)

    # A loop over the samples

    def _sample_of(self, node: fx.Node) -> int | None:
        """Return the sample that an operation takes out of the batch by its index; None for other operations."""
        source: Any = node.args[0] if node.args else None
        if node.op != "call_function" or not isinstance(source, fx.Node):
            return None
        name, state, shape = op_name(node), self._states[source], shape_of(source)
        if name == "getitem":
            return node.args[1] if source in self._apart else None  # type: ignore[return-value]
        if state < 0 or name not in ("select", "slice", "unbind", "split", "chunk"):
            return None
        given = arguments_of(node)
        if given["dim"] % len(shape) != state or shape[state] != self._size or self._size == 1:
            return None
        at = given["index"] if name == "select" else (given["start"] or 0) if name == "slice" else None
        if at is not None:  # a number that a value gives, as in `x[y.argmax()]`, is a node
            is_one = isinstance(at, int) and (name == "select" or shape_of(node)[state] == 1)
            return int(at % self._size) if is_one else None
        if len(node.meta["val"]) == self._size:
            self._apart.add(node)
        return None

    def _of_loop(self, node: fx.Node) -> int:
        """Return the state of a result of single samples: of one, a sum over several, or rows that are put together."""
        name, found = op_name(node).rstrip("_"), [self._samples_in.get(source) for source in node.all_input_nodes]
        samples = frozenset().union(*(each for each in found if each))
        if name in MADE_ANEW:
            return NONE
        if len(samples) == 1 or (name in ("cat", "stack") and len(samples) < self._size):
            self._samples_in[node] = samples
            return NONE
        if name in ("mul", "div", *_PRODUCTS):
            return super()._mixing(node)  # of two samples
        if name in ("cat", "stack") and shape_of(node):
            dim = int(arguments_of(node)["dim"] % len(shape_of(node)))
            return dim if shape_of(node)[dim] % self._size == 0 else self._assumed(node)
        return SUM if name in LINEAR else self._assumed(node)

    def _write(self, owner: fx.Node, node: fx.Node) -> None:
        """Let memory that a loop writes sample by sample hold what is not known to be apart."""
        if samples := self._samples_in.get(node):
            for other in self._sharing[owner]:
                if self._states[other] == NONE:
                    self._samples_in[other] = self._samples_in.get(other, samples) | samples
                    if len(self._samples_in[other]) > 1:
                        self._states[other] = UNKNOWN
        super()._write(owner, node)

    # Operations without a rule

    def _assumed(self, node: fx.Node) -> int:
        value, inputs = node.meta.get("val"), node.all_input_nodes
        self._without_rule.append(node)
        if (name := op_name(node).rstrip("_")) in SELECTIONS:
            [source, *_] = inputs
            if _name(source) in _FINITE_CHECKS:
                return NONE
            extreme = DECIDED if name in ("any", "all", "argmax", "argmin") else EXTREME
            if isinstance(value, (list, tuple)):
                self._dims_of_outputs[node] = [extreme, DECIDED]
            return extreme
        if isinstance(value, (list, tuple)):
            self._dims_of_outputs[node] = dims = self._places(node, value)
            return next((dim for dim in dims if dim >= 0), UNKNOWN)
        if (of_output := self._of_output(node)) is not None:
            return of_output
        if not isinstance(value, torch.Tensor):
            return UNKNOWN
        if name == "nanmean":
            return super()._mixing(node)  # it divides by a count of the values
        if not all(isinstance(size, int) for size in value.shape):
            return SELECTED
        if any(not isinstance(size, int) for source in inputs for size in shape_of(source)) and not value.shape:
            return SUM
        return self._places(node, [value])[0]

    def _growing(self, node: fx.Node) -> dict[fx.Node, int]:
        """Return the dim along which each operand grows with the batch.

        `zeros_like(x)` grows with `x`. Where positions say to which of its rows others are added, as in a graph for
        each sample, they may be those of the same sample; where labels alone do, they are of all samples.
        """
        growing = {source: self._states[source] for source in node.all_input_nodes}
        for made in (source for source in growing if _name(source) in MADE_ANEW):
            like = next(iter(made.all_input_nodes), made)
            if shape_of(like) == shape_of(made) and any(_name(each) in _POSITIONS for each in ancestors([node])):
                growing[made] = self._states[like]
        return {source: state for source, state in growing.items() if state >= 0}

    def _places(self, node: fx.Node, values: Sequence[Any]) -> list[int]:
        """Return the state of each tensor that an operation returns."""
        rows = [source for source in node.all_input_nodes if self._states[source] >= 0]
        shapes = [sizes_of(value) for value in values]
        larger = _shapes_of_more_samples(node, self._growing(node))
        is_known = bool(larger) and len(rows) == len([s for s in node.all_input_nodes if self._states[s] != NONE])
        places = []
        for index, shape in enumerate(shapes):
            if not all(isinstance(size, int) for size in shape):
                places.append(SELECTED)
                continue
            grown = larger[index] if larger and len(larger[index]) == len(shape) else shape
            at = ((self._states[source], shape_of(source)) for source in rows)
            same = (d for d, of in at if d < len(shape) and isinstance(of[d], int) and shape[d] == of[d])
            dims = [dim for dim, (less, more) in enumerate(zip(shape, grown, strict=True)) if less != more]
            is_of_all = not shape or (is_known and not dims) or op_name(node).rstrip("_") in COUNTS
            unplaced = SUM if is_of_all else next(same, UNKNOWN)
            places.append(dims[0] if len(dims) == 1 else unplaced)
        return places


def _inside(around: _AssumingWalk, node: fx.Node, call: OpaqueCall) -> int:
    """Follow the operations that a call was recorded to run, and note the states of what it returns.

    Where Python reads a number, the call is recorded again with another one. If that changes what it does, all
    samples must not decide it; what a counter, a parameter or a draw decides is followed on both sides.
    """
    assert call.recording is not None
    # Outside of the export, torch may run other kernels: what is compared is recorded there.
    drawn = [None, 0, 1] if call.draws_on_host else [None] if call.recording.reads else []
    recordings = [each for high in drawn if isinstance(each := record_again(call, {}, high), Recording)]
    recordings = recordings or [call.recording]
    held = enumerate(call.places)
    fixed = {at for at, place in held if place.table != "_parameters" and at not in call.written}
    tensors: Any = list(enumerate(node.args[1]))[len(call.places) :]  # type: ignore[arg-type]
    # A mask of ones that forward makes, where the batch has none, is the same in every step.
    fixed |= {at for at, t in tensors if all(n.op == "call_function" and not is_random(n) for n in ancestors([t]))}
    natural = {place_of(read) for read in recordings[0].reads}
    tried, found, dims, first = set[Any](), list[fx.Node](), list[int](), None
    alike, shown = dict[Any, fx.Node](), set[Any]()  # lines whose other numbers make no difference, or show their use
    for recording in recordings:  # which grow
        walk = around._followed(node, recording)
        returned = [walk._states[n] if walk.groups.get(n, 1) == 1 else UNKNOWN for n in recording.returned]
        if first is None:
            first, dims = walk, returned
            found += walk._coupled
        else:  # numbers were compared on the first side only
            known = {text_of(each) for each in first._flow.order}
            found += [*walk._coupled, *(each for each in walk._without_rule if text_of(each) not in known)]
            pairs = zip(recordings[0].returned, recording.returned, strict=False)
            found += [n for one, n in pairs if n in walk._totals and one not in first._totals]
            dims = [one if one == other else UNKNOWN for one, other in zip(dims, returned, strict=False)]
        for at, read in enumerate(recording.reads):
            samples = walk._readers(read)
            is_whole = not isinstance(read.meta["val"], (bool, float)) and read.meta.get("is_asked", True)
            for number in other_numbers(recording, fixed, at, samples):
                line = place_of(read)[:-1]
                place = (*line, str(number))
                if place in tried or (place in natural and not samples) or number == read.meta["val"]:
                    continue
                tried.add(place)
                other = (
                    record_again(call, recording.answered(at, number)) if len(tried) < MOST_BRANCHES else TimeoutError()
                )
                if isinstance(other, Exception):
                    shown |= {line} if is_check(other) or isinstance(other, RuntimeError) else set()
                    found += [read] * (isinstance(number, bool) and not is_check(other))
                elif texts_of(other) == texts_of(recording):
                    alike |= {line: read} if is_whole else {}
                elif not samples:
                    recordings.append(other)
                    shown.add(line)
                elif is_guard(recording, other, read):
                    shown.add(line)
                else:
                    beside = [around._followed(node, each)._beside(samples) for each in (recording, other)]
                    found += [read] * (beside[0] != beside[1])
    # A whole number that makes no difference may be compared with any other: `n % 37 == 5`.
    found += [read for line, read in alike.items() if line not in shown]
    if node in around._needed:
        around._coupled += found
        around._needed |= set(found)
        places = dict.fromkeys(found, f"in {call.label or 'its forward'}, which runs as written")
        around._places_of |= {**places, **around._places_of}
    around.groups[node] = 1
    around._dims_of_outputs[node] = dims
    return next((dim for dim in dims if dim >= 0), UNKNOWN)


def _shapes_of_more_samples(node: fx.Node, rows: Mapping[fx.Node, int]) -> list[tuple[int, ...]]:
    """Return the shapes that an operation would return for three times as many samples; empty if that is not known."""

    def given(source: fx.Node) -> Any:
        value = source.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return value
        size = [3 * each if dim == rows.get(source) else each for dim, each in enumerate(value.shape)]
        return torch.empty(size, dtype=value.dtype, device="meta")

    if not rows or call_of(node) is not None or op_name(node).rstrip("_") in RESHAPES:
        return []
    try:
        with torch.no_grad():
            result = node.target(*fx.map_arg(node.args, given), **fx.map_arg(node.kwargs, given))  # type: ignore[operator]
    except Exception:  # such as an operation with a size among its arguments, or one that reads values
        return []
    results = result if isinstance(result, (list, tuple)) else [result]
    return [tuple(each.shape) if isinstance(each, torch.Tensor) else () for each in results]
