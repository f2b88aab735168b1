"""Losses as means over the *global* batch, whatever the micro-batches.

The mean of micro-batch means is not the mean over the batch when the number of labels differs (masked language
modelling). Each mean-reduced loss over labels, or over a selection that the batch makes, becomes a sum divided by a
count that the runtime supplies. The count of labels is itself a small graph over the batch, taken from the model.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx

from workbench.base.errors import InvalidExperiment
from workbench.capture.blocks.tensor_parallel import product_of
from workbench.capture.export.exporting import Exported
from workbench.capture.graph import Block, Graph, LabelCount
from workbench.capture.operations import (
    LOGS,
    Dataflow,
    ancestors,
    arguments_of,
    copy_nodes,
    descendants,
    dtype_of,
    is_random,
    mutated_arguments,
    op_name,
    overloads,
    regions_of,
    restore_regions,
    retarget,
    shape_of,
    storage_of,
)
from workbench.record.columns import WEIGHTED, WEIGHTS

aten = torch.ops.aten
_MEAN, _SUM = 1, 2
"""Numbers that torch gives to a loss's reductions."""
OVER_LABELS = "cross_entropy_loss nll_loss_nd"
"""Losses over class labels."""
OVER_ELEMENTS = (
    "mse_loss l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy binary_cross_entropy_with_logits"
)
"""Losses over every element: micro-batches count equally many, unless the batch selects some (ELECTRA's)."""
_OVER_LABELS, _OVER_ELEMENTS = overloads(OVER_LABELS), overloads(OVER_ELEMENTS)


@dataclass(frozen=True)
class MeanLoss:
    """A mean-reduced loss whose labels come from the batch alone."""

    node: fx.Node
    target: fx.Node
    weight: fx.Node | None
    """One weight per class: the mean divides by the weights of the labels instead of their number."""
    ignore_index: int | None
    """Label that does not count; None if every element of the target counts. For a mean over the elements that a mask
    of the batch chose, the target is the mask, and this is 0."""


@dataclass(frozen=True)
class Quotient:
    """A division by a sum over fields of the batch, as in `(loss * w).sum() / w.sum().clamp(min=1)`."""

    node: fx.Node
    total: fx.Node
    """The sum."""
    divisor: fx.Node
    """The number by which is divided, made of the sum."""


@dataclass(frozen=True)
class MicroBatchMean:
    """A product of a mean loss with 1, which a scalar reads in place of the loss: the mean of its micro-batch alone.

    The loss is divided by the labels of the global batch; the runtime supplies what to multiply that with instead of 1.
    """

    node: fx.Node
    of: MeanLoss | Quotient


def normaliser(loss: MeanLoss | Quotient) -> tuple[object, ...]:
    """Return a key that is equal for losses which are divided by the same number."""
    if isinstance(loss, Quotient):
        return loss.total, loss.divisor
    return loss.target, loss.weight, loss.ignore_index


def mean_losses(flow: Dataflow) -> tuple[MeanLoss, ...]:
    """Return the means over integer labels, or over selected elements, that the batch determines."""
    losses, known = [], _OVER_LABELS | _OVER_ELEMENTS
    for node in flow.order:
        if node.target is aten.mean.default and (mask := _mask_of(node, flow)) is not None:
            losses.append(MeanLoss(node, mask, None, 0))
        if node.target not in known:
            continue
        given = arguments_of(node)
        target, weight = _before_broadcast(given["target"]), given.get("weight")
        if given["reduction"] != _MEAN or target not in flow.recomputable:
            continue
        if node.target in _OVER_ELEMENTS:
            if any(not isinstance(size, int) for size in shape_of(target)) and _is_alike(target, given["self"]):
                losses.append(MeanLoss(node, target, None, None))
        elif not target.meta["val"].is_floating_point() and (weight is None or weight in flow.recomputable):
            losses.append(MeanLoss(node, target, weight, int(given["ignore_index"])))
    return tuple(losses)


def _mask_of(mean: fx.Node, flow: Dataflow) -> fx.Node | None:
    """Return the mask, made of fields of the batch, that chose the elements of a mean: `(x - y)[mask].square().mean()`.

    The first dim of what a mask chose has a size of its own, by which the selection is found again.
    """
    chosen = [size for size in shape_of(mean.args[0]) if not isinstance(size, int)]
    for node in ancestors([mean]) if len(chosen) == 1 else ():
        if node.target is aten.index.Tensor and str(shape_of(node)[0]) == str(chosen[0]):
            masks = [index for index in node.args[1] if index is not None]  # type: ignore[union-attr]
            if len(masks) == 1 and masks[0] in flow.recomputable and dtype_of(masks[0]) == torch.bool:
                return masks[0]  # type: ignore[return-value]
    return None


def _before_broadcast(target: fx.Node) -> fx.Node:
    """Return the target as it was before the loss function broadcast it with the prediction, if that changed no size.

    `torch.nn.functional.mse_loss` and its kin broadcast both first, so that the target seems to depend on the model.
    """
    source: Any = target.args[0] if target.target is operator.getitem else None
    if source is None or source.target is not aten.broadcast_tensors.default:
        return target
    before: fx.Node = source.args[0][target.args[1]]
    return before if _is_alike(before, target) else target


def _is_alike(one: fx.Node, other: fx.Node) -> bool:
    """Return True if two tensors have as many dims, of the same sizes where both are known."""
    sizes = zip(shape_of(one), shape_of(other), strict=False)
    is_same = all(size == its for size, its in sizes if isinstance(size, int) and isinstance(its, int))
    return is_same and len(shape_of(one)) == len(shape_of(other))


def emit_sum_over_count(graph: fx.Graph, loss: fx.Node, count: fx.Node) -> fx.Node:
    """Make the mean loss, which was copied to the end of `graph`, a sum, and return the sum over `count`.

    A quotient is divided by `count` in place of its own divisor, and a `MicroBatchMean` multiplied with it.
    """
    if loss.target in (aten.div.Tensor, aten.mul.Tensor):
        loss.update_arg(1, count)
        return loss
    if loss.target is aten.mean.default:
        per_choice = math.prod(size for size in shape_of(loss.args[0]) if isinstance(size, int))
        loss.target, meta = aten.sum.default, dict(count.meta)
        count = graph.call_function(aten.mul.Tensor, (count, per_choice))
        count.meta = meta
    else:
        given = arguments_of(loss) | {"reduction": _SUM}
        loss.kwargs = {"log_target": given.pop("log_target")} if "log_target" in given else {}  # which goes by name
        loss.args = tuple(given.values())
    quotient = graph.call_function(aten.div.Tensor, (loss, count))
    quotient.meta = dict(loss.meta)
    return quotient


def label_count(module: fx.GraphModule, flow: Dataflow, loss: MeanLoss | Quotient | MicroBatchMean) -> LabelCount:
    """Return the graph `batch -> number (or weight) of the labels that count` of one loss."""
    if isinstance(loss, MicroBatchMean):
        return replace(label_count(module, flow, loss.of), is_ratio=True)
    if isinstance(loss, Quotient):
        ends = [loss.total]
    else:
        ends = [loss.target] if loss.weight is None else [loss.target, loss.weight]
    graph = fx.Graph()
    needed = {*ends} | flow.recomputable_sources(ends)
    inputs = [node for node in flow.order if node.op == "placeholder" and node in needed]
    copies = {node: graph.placeholder(str(node.target)) for node in inputs}
    copy_nodes(graph, (node for node in flow.order if node in needed), copies)
    if isinstance(loss, Quotient):
        total = copies[loss.total]
    else:  # how much each label counts, summed
        target = copies[loss.target]
        if loss.ignore_index is None:
            counted = graph.call_function(aten.ones_like.default, (target,))
        else:
            counted = graph.call_function(aten.ne.Scalar, (target, loss.ignore_index))
        if loss.weight is not None:  # of its class; an ignored label is no class, and looks up the first
            label = graph.call_function(aten.mul.Tensor, (target, counted))
            weight = graph.call_function(aten.index.Tensor, (copies[loss.weight], [label]))
            counted = graph.call_function(aten.mul.Tensor, (weight, counted))
        total = graph.call_function(aten.sum.default, (counted,))
    graph.output(total)
    restore_regions(graph)
    of_total = None
    if isinstance(loss, Quotient) and loss.total is not loss.divisor:  # the graph `total -> divisor`
        after = fx.Graph()
        copies = {loss.total: after.placeholder("total")}
        needed = {loss.divisor} | flow.recomputable_sources([loss.divisor])
        needed -= flow.recomputable_sources([loss.total])
        copy_nodes(after, (node for node in flow.order if node in needed), copies)
        after.output(copies[loss.divisor])
        of_total = fx.GraphModule(module, after)
    return LabelCount(tuple(str(node.target) for node in inputs), fx.GraphModule(module, graph), of_total)


# The part of a block that need only run on labelled rows: a vocabulary head and its cross-entropy.
#
# A row whose label is `ignore_index` adds nothing to the loss and gets no gradient from it. So every operation that
# computes each row from that row alone, between the last one that mixes rows (or draws random numbers) and the
# cross-entropy, may run on the labelled rows only: the loss and every gradient are the same.
#
# Analysis only: `workbench.execution.blocks.loss_runners` rewrites the blocks.

ROW_STEPS = 16
"""Number of row counts a head is compiled for, at most: rows are kept in multiples of a sixteenth of all."""
MAX_ROW_FRACTION = 0.75
"""Largest fraction of the rows for which picking them is worth its cost; above, all rows are computed."""

CROSS_ENTROPY = aten.cross_entropy_loss.default
MEAN = aten.mean.dim
BINARY = overloads("add.Tensor sub.Tensor mul.Tensor div.Tensor")
_NORMS = overloads("layer_norm rms_norm")
_VIEWS = overloads("view reshape _unsafe_view flatten.using_ints unflatten.int unsqueeze squeeze.dim slice.Tensor")
"""Operations that are row-wise if they only merge or split the dims of the rows (a slice: if it keeps everything)."""
_ELEMENTWISE = overloads(
    "gelu relu silu tanh sigmoid neg exp sqrt rsqrt pow.Tensor_Scalar mul.Scalar add.Scalar alias clone contiguous "
    "to.dtype to.dtype_layout dropout"
)
"""Operations on each element by itself; a dropout counts if its rate is 0."""


@dataclass(frozen=True)
class RowwiseHead:
    """The operations of one block type that may run on the labelled rows alone, by their names in `Block.code`."""

    count: int
    """Position in `Block.counts` of the number of labels, which the loss is divided by."""
    rows: int
    """Number of all rows, labelled or not."""
    ignore_index: int
    target: str
    """Operation that holds the label of each row."""
    loss: str
    """The cross-entropy."""
    reads: Mapping[str, tuple[str, ...]]
    """Operation, in order -> its operands that have rows; it reads the others whole. The loss is the last."""
    views: frozenset[str]
    """Operations among these that leave every row as it is."""

    def rows_to_compute(self, labels: int) -> int | None:
        """Return how many rows to compute for a micro-batch with so many labels; None for all rows, in their order."""
        count = math.ceil(max(1, math.ceil(labels * ROW_STEPS / self.rows)) * self.rows / ROW_STEPS)
        return count if count <= MAX_ROW_FRACTION * self.rows else None


def find_rowwise_head(block: Block) -> RowwiseHead | None:
    """Return the row-wise head of a block with the most rows; None if there is none with a matrix product in it."""
    nodes = list(block.code.graph.nodes)
    if not block.counts or any(mutated_arguments(node) for node in nodes):
        return None
    placeholders = [node for node in nodes if node.op == "placeholder"]
    counts = placeholders[len(placeholders) - len(block.counts) :]
    losses = block.code.graph.find_nodes(op="call_function", target=CROSS_ENTROPY)
    heads = (_head(node, nodes, counts) for node in losses)
    return max((head for head in heads if head is not None), key=lambda head: head.rows, default=None)


def _head(loss: fx.Node, nodes: list[fx.Node], counts: list[fx.Node]) -> RowwiseHead | None:
    """Return the row-wise head that ends in `loss`; `counts` are the placeholders of the numbers of labels."""
    given = arguments_of(loss)
    logits, target = given["self"], given["target"]
    users: list[Any] = [user.args[1] for user in loss.users if user.target is aten.div.Tensor]
    divisors: list[fx.Node] = [divisor for divisor in users if divisor in counts and "count" in str(divisor.target)]
    if not divisors or given["reduction"] != _SUM or given["weight"] is not None or given["label_smoothing"]:
        return None
    rows = _row_count(logits)
    if rows is None or len(shape_of(logits)) != 2 or shape_of(target) != (rows,) or rows < ROW_STEPS:
        return None
    if any(regions_of(node) or is_random(node) for node in (loss, *descendants(loss))):
        return None
    reads: dict[fx.Node, tuple[fx.Node, ...]] = {loss: (logits,)}
    for node in reversed(nodes[: nodes.index(loss)]):
        if node.users and all(node in reads.get(user, ()) for user in node.users):
            operands = _row_operands(node, rows)
            if operands:
                reads[node] = operands
    members = [node for node in nodes if node in reads]
    if not any(product_of(node) for node in members):
        return None
    return RowwiseHead(
        count=counts.index(divisors[0]),
        rows=rows,
        ignore_index=int(given["ignore_index"]),
        target=target.name,
        loss=loss.name,
        reads={node.name: tuple(operand.name for operand in reads[node]) for node in members},
        views=frozenset(node.name for node in members if node.target in _VIEWS),
    )


def _row_operands(node: fx.Node, rows: int) -> tuple[fx.Node, ...]:
    """Return the operands that an operation reads row by row; none if it may mix rows."""
    if node.op != "call_function" or _row_count(node) != rows or regions_of(node) or is_random(node):
        return ()
    product = product_of(node)
    if product is not None:
        by_row, whole = [product.value], [product.weight, *([product.bias] if product.bias is not None else [])]
        possible = len(shape_of(product.weight)) == 2 and len(shape_of(product.bias)) <= 1
    elif node.target in BINARY:
        operands = [arg for arg in node.args if isinstance(arg, fx.Node)]
        by_row = [arg for arg in operands if shape_of(arg)[:-1] == shape_of(node)[:-1]]
        whole = [arg for arg in operands if arg not in by_row]
        # A bias, a norm's weight or a scalar is the same for every row.
        possible = all(size == 1 for arg in whole for size in shape_of(arg)[:-1])
    elif not node.all_input_nodes:
        return ()
    else:
        by_row, whole = list(node.all_input_nodes[:1]), list(node.all_input_nodes[1:])
        arguments: Any = node.args
        given = shape_of(by_row[0])
        if node.target in _VIEWS:
            possible = shape_of(node)[-1] == given[-1] and (
                node.target is not aten.slice.Tensor or shape_of(node) == given
            )
        elif node.target in _ELEMENTWISE:
            possible = shape_of(node) == given and "memory_format" not in node.kwargs
        elif node.target in _NORMS:
            possible = list(arguments[1]) == [given[-1]]
        else:
            is_mean = node.target is MEAN and list(arguments[1]) in ([-1], [len(given) - 1])
            possible = is_mean and arguments[2:3] == (True,)
    if not possible or any(_row_count(operand) != rows or operand in whole for operand in by_row):
        return ()
    return tuple(by_row)


def _row_count(node: Any) -> int | None:
    """Return the number of rows of a tensor: the product of all its dims but the last."""
    shape = shape_of(node)
    return math.prod(shape[:-1]) if len(shape) > 1 and all(isinstance(size, int) for size in shape) else None


# Labels counted in each micro-batch of a batch, by the code that `workbench.capture.losses` found.


def labelled_share(graph: Graph, examples: Mapping[str, torch.Tensor]) -> float:
    """Return the largest share of labelled rows, of those that a head computes, in any micro-batch of `examples`.

    `examples` is a batch on the host; its first samples come again where they do not fill the last micro-batch. The
    share is 1 where no block may skip rows without a label.
    """
    samples = len(next(iter(examples.values())))
    filled = torch.arange(math.ceil(samples / graph.micro_batch) * graph.micro_batch) % samples
    batch = {name: field[filled] for name, field in examples.items()}
    shares = []
    for block in graph.blocks:
        if (part := find_rowwise_head(block)) is not None:
            count = on_device(graph.label_counts[block.counts[part.count]], torch.device("cpu"))
            labels = count_labels(count, batch, graph.micro_batch)
            shares.append(int(labels.max()) / part.rows)
    return max(shares, default=1.0)


def on_device(count: LabelCount, device: torch.device) -> LabelCount:
    """Return a copy whose code runs on a device."""
    return replace(
        count,
        code=code_on(count.code, device),
        of_total=None if count.of_total is None else code_on(count.of_total, device),
    )


def code_on(code: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """Return captured code that runs on a device: itself, or a copy if it was captured for another one."""
    arguments = pytree.tree_leaves([(node.args, node.kwargs) for node in code.graph.nodes])
    devices = [leaf for leaf in arguments if isinstance(leaf, torch.device)]
    devices += [tensor.device for tensor in (*code.parameters(), *code.buffers())]
    if all(each == device for each in devices):
        return code
    code = copy.deepcopy(code).to(device)
    retarget(code, device)
    return code


def count_labels(count: LabelCount, batch: Mapping[str, torch.Tensor], micro_batch: int) -> torch.Tensor:
    """Return the number of labels that count in each micro-batch of `batch`.

    The code runs once per micro-batch, because capture may have fixed the sizes that it accepts.
    """
    samples = len(next(iter(batch.values())))
    parts = [slice(first, first + micro_batch) for first in range(0, samples, micro_batch)]
    return torch.stack([count.code(*(batch[name][part] for name in count.inputs)) for part in parts])


# The scalars that a forward logs (`workbench.log_scalar`), as values of the exported graph.
#
# A scalar is what the model's code computes for one micro-batch. What is computed for scalars alone runs where its
# last operand is made, so that no stage sends a value for it that it need not, and tensor parallelism treats it apart:
# see `LOGS`. Where a scalar reads a mean loss, which the runtime divides by the labels of the global batch, it reads
# the mean of its micro-batch instead.


@dataclass(frozen=True)
class Scalar:
    """One call of `log_scalar`, with the node of its value."""

    name: str
    reduce: str
    node: fx.Node
    loss: MeanLoss | Quotient | None = None
    """The mean loss by whose labels a mean weights micro-batches; None weights them equally."""
    micro_batch_means: tuple[MicroBatchMean, ...] = ()


def scalars_of(
    exported: Exported, flow: Dataflow, losses: Sequence[MeanLoss | Quotient], outputs: Iterable[fx.Node]
) -> tuple[Scalar, ...]:
    """Return what forward logs, and prepare the graph for it; `losses` are divided by labels of the global batch.

    A mean that is computed from mean losses over the same labels is weighted by these. Of a quotient whose divisor the
    batch alone decides, both are summed. Other means, such as a sum of means over different labels, are weighted
    equally, and those losses are those of the global batch, so that such a sum is exact.
    """
    if not exported.scalars:
        return ()
    reductions: dict[str, str] = {}
    for name, reduce, _ in exported.scalars:
        how = "a weight" if reduce in (WEIGHTED, WEIGHTS) else f"reduce={reduce!r}"
        if reductions.setdefault(name, how) != how:
            raise InvalidExperiment(
                f"The scalar {name!r} is logged with {reductions[name]} and with {how}. Give all calls the same, or "
                "two names."
            )
    needed = ancestors([exported.loss, *outputs])
    of_loss = [loss for loss in losses if loss.node in needed]
    scalars = []
    quotients = [_quotient(node, flow) if reduce == "mean" else None for _, reduce, node in exported.scalars]
    whole = {name for (name, *_), each in zip(exported.scalars, quotients, strict=True) if each is None}
    for (name, reduce, node), quotient in zip(exported.scalars, quotients, strict=True):
        before = ancestors([node])
        read = [loss for loss in of_loss if loss.node in before]
        if quotient is not None and name not in whole and not read:
            scalars += [Scalar(name, how, _copy(each)) for how, each in zip((WEIGHTED, WEIGHTS), quotient, strict=True)]
        elif not read or len({normaliser(loss) for loss in read}) > 1:
            scalars.append(Scalar(name, reduce, node))
        else:
            path = before & {later for loss in read for later in descendants(loss.node)}
            copy, means = _with_micro_batch_means(node, [each for each in flow.order if each in path], read)
            scalars.append(Scalar(name, reduce, copy, read[0], means))
    _move_to_operands(exported.module.graph, flow, needed, [scalar.node for scalar in scalars])
    return tuple(scalars)


def _quotient(node: fx.Node, flow: Dataflow) -> tuple[fx.Node, fx.Node] | None:
    """Return the dividend and the divisor of a logged quotient whose divisor the batch alone decides."""
    while op_name(node) in ("detach", "clone", "alias", "to", "_to_copy"):
        node = node.all_input_nodes[0]
    operands = node.all_input_nodes
    if node.target is not aten.div.Tensor or node.args != tuple(operands) or node.kwargs:
        return None
    is_of_batch = operands[1] in flow.recomputable and not any(map(shape_of, operands))
    return (operands[0], operands[1]) if is_of_batch else None


def _copy(node: fx.Node) -> fx.Node:
    """Return a copy of a value that is logged, which is no other scalar's."""
    graph = node.graph
    with graph.inserting_before(graph.output_node()):
        copy = graph.call_function(aten.clone.default, (node,))
    copy.meta = dict(node.meta)
    return copy


def _with_micro_batch_means(
    node: fx.Node, path: Sequence[fx.Node], losses: Sequence[MeanLoss | Quotient]
) -> tuple[fx.Node, tuple[MicroBatchMean, ...]]:
    """Return a copy of a node that reads the means of a micro-batch in place of `losses`, and these means.

    `path` has the nodes between.
    """
    graph, copies, means = node.graph, dict[fx.Node, fx.Node](), []
    with graph.inserting_before(graph.output_node()):
        for loss in losses:
            # A node of its own: the loss's is divided by the labels of the whole batch, and this one by its own.
            copies[loss.node] = graph.call_function(aten.mul.Tensor, (loss.node, 1.0))
            copies[loss.node].meta = dict(loss.node.meta)
            means.append(MicroBatchMean(copies[loss.node], loss))
        for each in path:
            copies[each] = graph.node_copy(each, lambda source: copies.get(source, source))
    return copies[node], tuple(means)


def _move_to_operands(graph: fx.Graph, flow: Dataflow, needed: set[fx.Node], scalars: Collection[fx.Node]) -> None:
    """Move what only scalars need to just after its last operand, as a part of that one's module."""
    kept = needed | ancestors(node for node in graph.nodes if mutated_arguments(node))
    own = ancestors(scalars) - kept
    written = set(flow.writers)
    for node in list(graph.nodes):
        if node not in own or node.op != "call_function":
            continue
        node.meta[LOGS] = True
        operands = {source for source in node.all_input_nodes if source.op == "call_function"}
        if not operands or is_random(node) or any(storage_of(source) in written for source in node.all_input_nodes):
            continue
        last = next(each for each in reversed(graph.nodes) if each in operands)
        last.append(node)
        if "nn_module_stack" in last.meta:
            node.meta["nn_module_stack"] = last.meta["nn_module_stack"]
