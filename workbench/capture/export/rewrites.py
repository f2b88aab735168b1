"""Rewrites of an exported graph, in place, before it is cut into blocks: each computes what the model wrote.

In-place writes go where they are safe, numbers become valid under bf16 autocast, attention and grouped products run on
their fast kernels.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import register_flop_formula

from workbench.base.user_code import line_of_node
from workbench.capture.operations import (
    ATTENTION,
    arguments_of,
    copy_nodes,
    dtype_of,
    is_random,
    mutated_arguments,
    names,
    op_name,
    passes_gradient,
    reachable,
    regions_of,
    replace_call,
    retarget,
    schema_of,
    shape_of,
    storage_of,
    tensor_at,
)
from workbench.capture.torch_internals import grouped_mm_kernel


def rewrite(module: fx.GraphModule, name: str) -> None:
    """Rewrite an exported graph of the model `name`, in place; raises `CaptureError` if it writes to a parameter."""
    place_buffer_updates(module, name)
    keep_read_values(module)
    simplify_attention(module)
    unify_grouped_matmuls(module)
    write_to_results_of_their_own(module)
    clamp_to_bf16_range(module)
    cast_written_values(module)


# In-place writes, and what makes an fp32 capture valid under bf16 autocast.

LARGEST = torch.finfo(torch.bfloat16).max
_WRITE_VALUES = names(
    "index_add index_copy index_put index_reduce masked_scatter scatter scatter_add scatter_reduce lerp"
)
"""Operations, in place or not, whose first operand and values must have one type."""
_VALUES = ("source", "src", "values", "end")
"""Argument names of the values that these operations write."""


def place_buffer_updates(module: fx.GraphModule, name: str) -> None:
    """Move each buffer update, which export puts at the end of the graph, to just after the last read of the old value.

    The update of a buffer by itself is removed: the operation before it wrote in place. Writes to batch fields go to
    copies: every block that reads a field repeats the write, so that on the field itself it would happen several
    times.

    Raises:
        CaptureError: forward writes to a parameter, which an optimiser step on another device would not see.
    """
    fields = {storage_of(argument) for node in module.graph.nodes for argument in mutated_arguments(node)}
    for field in [node for node in module.graph.nodes if node.op == "placeholder" and node in fields]:
        with module.graph.inserting_after(field):
            copy = module.graph.call_function(torch.ops.aten.clone.default, (field,))
        copy.meta = dict(field.meta)
        field.replace_all_uses_with(copy, delete_user_cb=lambda user, copy=copy: user is not copy)
    owners = {node: storage_of(node) for node in module.graph.nodes}
    for node in list(module.graph.nodes):
        for written in mutated_arguments(node):
            owner = owners[written]
            if owner.op == "get_attr" and isinstance(tensor_at(module, str(owner.target)), nn.Parameter):
                line = line_of_node(node)
                way = "Make it a buffer, or compute a new tensor from it and leave the parameter to the optimiser."
                if line.is_of_library:
                    way = (
                        "The line is a library's: give the module a class of your own that overrides the method that "
                        "writes, or set the option of the model that leaves the write out."
                    )
                raise line.error(name, f"writes to its parameter {owner.target} in forward{line.where}. {way}")
        if node.target is not torch.ops.aten.copy_.default or node.args[0].op != "get_attr" or node.users:
            continue
        buffer, value = node.args[:2]
        if owners[value] is buffer:
            module.graph.erase_node(node)
            continue
        readers = {value} | {
            other for other in owners if other is not node and any(owners[s] is buffer for s in other.all_input_nodes)
        }
        next(other for other in reversed(module.graph.nodes) if other in readers).append(node)


def keep_read_values(module: fx.GraphModule) -> None:
    """Let operations with a gradient read copies of buffers that forward writes, in place.

    The backward reads what they read, when a later write of this forward, or of the next micro-batch's in a pipeline,
    has replaced it: `out = v / self.avg; self.avg = 0.9 * self.avg + 0.1 * v` in plain PyTorch makes a new tensor.
    """
    nodes = list(module.graph.nodes)
    written = {storage_of(argument) for node in nodes for argument in mutated_arguments(node)}
    written = {owner for owner in written if owner.op == "get_attr"}
    targets = {str(owner.target) for owner in written}
    parameters = [n for n in nodes if n.op == "get_attr" and isinstance(tensor_at(module, str(n.target)), nn.Parameter)]
    trained = reachable(parameters, lambda node: filter(passes_gradient, node.users)) if written else set()
    for node in nodes:
        if node not in trained or node.op != "call_function" or mutated_arguments(node):
            continue
        for source in node.all_input_nodes:
            owner = storage_of(source)
            if owner.op == "get_attr" and str(owner.target) in targets and storage_of(node) is not owner:
                with module.graph.inserting_before(node):
                    copied = module.graph.call_function(torch.ops.aten.clone.default, (source,))
                copied.meta = dict(source.meta) | {"stack_trace": node.meta.get("stack_trace")}
                if "nn_module_stack" in node.meta:
                    copied.meta["nn_module_stack"] = node.meta["nn_module_stack"]
                node.replace_input_with(source, copied)


def write_to_results_of_their_own(module: fx.GraphModule) -> None:
    """Let pointwise operations that write into an intermediate result return another one, as `x += y` does for numbers.

    What writes in place is recomputed in full or not at all (`supported_mode`), and a residual added in place is in
    every layer of some models. Views of what is written would not see the new result, so that those stay as they are.
    So do writes to some rows, of which another result would be a copy of all, and writes in another region than what
    their target holds was made in: under `no_grad` a write leaves the target its gradient, and another result would
    have none.
    """
    regions = defaultdict[fx.Node, set[Any]](set)  # of the writes that stay, by the owner of the memory
    for node in list(module.graph.nodes):
        schema, written = schema_of(node), mutated_arguments(node)
        for each in written:
            regions[storage_of(each)].add(regions_of(node))
        if schema is None or len(written) != 1 or written[0] is not node.args[0] or is_random(node):
            continue
        target, source = _returning(node), written[0]
        others = [user for user in source.users if user is not node]
        owner = of_owner = storage_of(source)  # perhaps another node, of which `source` is the only view
        while of_owner is not source and len(of_owner.users) == 1:
            of_owner = next(iter(of_owner.users))
        is_result = of_owner is source and owner.op == "call_function" and dtype_of(source) is not None
        is_result &= regions[owner] | {regions_of(owner)} == {regions_of(node)}
        if target is None or not is_result or any(storage_of(user) is owner for user in others):
            continue
        with module.graph.inserting_before(node):
            new = module.graph.call_function(target, node.args, dict(node.kwargs))
            cast = module.graph.call_function(torch.ops.aten.to.other, (new, source))  # types are those of autocast
        new.meta, cast.meta = dict(node.meta), dict(node.meta)
        node.replace_all_uses_with(cast)
        module.graph.erase_node(node)
        order = {each: at for at, each in enumerate(module.graph.nodes)}
        for user in others:
            if order[user] > order[cast]:
                user.replace_input_with(source, cast)


def _returning(node: fx.Node) -> Any:
    """Return the pointwise operation that computes what `node` writes in place and returns it, if torch has it."""
    schema, target = schema_of(node), node.target
    if schema is None or not isinstance(target, torch._ops.OpOverload) or not op_name(node).endswith("_"):
        return None
    packet = getattr(getattr(torch.ops, target.namespace), op_name(node)[:-1], None)
    found = getattr(packet, target._overloadname, None)
    if found is None or found._schema.is_mutable or torch.Tag.pointwise not in found.tags:
        return None
    named = [[(each.name, str(each.type)) for each in each_schema.arguments] for each_schema in (found._schema, schema)]
    return found if named[0] == named[1] else None


def clamp_to_bf16_range(module: fx.GraphModule) -> None:
    """Bring constants that only fp32 holds into the range of bf16, in place."""

    def clamped(value: Any) -> Any:
        if isinstance(value, float) and math.isfinite(value) and abs(value) > LARGEST:
            return math.copysign(LARGEST, value)
        return value

    for node in module.graph.nodes:
        if node.op == "call_function" and dtype_of(node) == torch.float32:
            node.args, node.kwargs = tree_map(clamped, (node.args, dict(node.kwargs)))


def cast_written_values(module: fx.GraphModule) -> None:
    """Cast the values that operations write into a tensor to that tensor's type, in place."""
    for node in list(module.graph.nodes):
        if schema_of(node) is None or op_name(node).rstrip("_") not in _WRITE_VALUES:
            continue
        given, target = arguments_of(node), node.args[0]
        values: Any = next((given[name] for name in _VALUES if name in given), None)
        dtype = dtype_of(values)
        if dtype is None or not dtype.is_floating_point or values is target or dtype != dtype_of(target):
            continue
        with module.graph.inserting_before(node):
            cast = module.graph.call_function(torch.ops.aten.to.other, (values, target))
        cast.meta = {**node.meta, "val": values.meta["val"]}
        node.replace_input_with(values, cast)


# Rewrites that let attention run on its fast kernels: written-out attention is fused, useless masks are removed.
#
# Exported `transformers` models carry a mask even where every position may be attended, because they do not look at its
# values under tracing; a mask keeps scaled-dot-product attention off its flash kernels. Some models write attention out
# as matmul, softmax, dropout, matmul, which stores scores quadratic in the sequence length. Some append keys and values
# to an empty cache. All are rewritten to what they compute. A mask that depends on the batch stays.

aten = torch.ops.aten
Writers = Mapping[fx.Node, Sequence[fx.Node]]
"""Owner of memory -> the operations that write to it in place."""
_MASKED_BELOW = -1e9
"""Largest number with which additive masks forbid a position."""


def simplify_attention(module: fx.GraphModule) -> None:
    """Fuse written-out attention and remove masks that mask nothing, in place."""
    graph = module.graph
    for node in graph.find_nodes(op="call_function", target=aten.dropout.default):
        if node.args[1] == 0:  # without it, the patterns below are the same for every rate
            _replace_by(node, node.args[0])
    writers = defaultdict[fx.Node, list[fx.Node]](list)
    for node in graph.nodes:
        for written in mutated_arguments(node):
            writers[storage_of(written)].append(node)
    for node in graph.find_nodes(op="call_function", target=aten.cat.default):
        # Keys and values of `transformers` models, which append to a cache by default. A copy that is written, or whose
        # source is, stays one.
        filled = [tensor for tensor in node.args[0] if shape_of(tensor) != (0,)]
        is_same = len(filled) == 1 and dtype_of(filled[0]) == dtype_of(node)
        if is_same and not writers.keys() & {node, storage_of(filled[0])}:
            _replace_by(node, filled[0])
    known = dict[fx.Node, _Mask | None]()
    for node in graph.find_nodes(op="call_function", target=aten.matmul.default):
        _fuse(node, writers, known)
    for node in graph.find_nodes(op="call_function", target=ATTENTION):
        _add_head_dim(graph, node)
        mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
        if isinstance(mask, fx.Node) and mask not in known:
            known[mask] = _constant_mask(mask, node, writers)
        if isinstance(mask, fx.Node) and (of_mask := known[mask]) is not None and of_mask.is_causal is not None:
            dropout = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
            node.args = (*node.args[:3], None, dropout, of_mask.is_causal)
            replaced = ("attn_mask", "dropout_p", "is_causal")
            node.kwargs = {name: item for name, item in node.kwargs.items() if name not in replaced}

    def is_impure(node: fx.Node) -> bool:
        schema = schema_of(node)
        return node.op in ("placeholder", "output") or (schema is not None and schema.is_mutable)

    graph.eliminate_dead_code(is_impure_node=is_impure)


def _replace_by(node: fx.Node, other: Any) -> None:
    node.replace_all_uses_with(other)
    node.graph.erase_node(node)


def _fuse(output: fx.Node, writers: Writers, known: dict[fx.Node, _Mask | None]) -> None:
    """Replace `dropout(softmax(query @ keyᵀ * scale + mask)) @ value` by one operation.

    The pattern is read backwards from its last product; where anything differs from it, nothing is replaced. `known`
    has the masks that were looked at.
    """

    def is_step(node: Any, *targets: Any) -> bool:
        """Return True for a call of a target with one user, in the same regions (`no_grad`) as the product."""
        is_call = isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets
        return is_call and len(node.users) == 1 and not node.kwargs and regions_of(node) == regions_of(output)

    weights: Any
    value: Any
    weights, value = output.args[:2]
    dropout, scale, mask = 0.0, 1.0, None
    if is_step(weights, aten.dropout.default):
        dropout = float(weights.args[1]) if weights.args[2] else 0.0
        weights = weights.args[0]
    if not is_step(weights, aten.softmax.int) or weights.args[1] not in (-1, 3) or len(weights.args) > 2:
        return
    scores = weights.args[0]
    if is_step(scores, aten.add.Tensor):
        shape = shape_of(scores)
        scores, mask = scores.args[:2]
        if len(shape_of(mask)) < 2 or shape_of(scores) != shape:  # a kernel takes no vector, and enlarges nothing
            return
        if isinstance(mask, fx.Node) and mask not in known:
            known[mask] = _constant_mask(mask, output, writers)
        if not isinstance(mask, fx.Node) or (of_mask := known[mask]) is None or not of_mask.is_added:
            return
    if is_step(scores, aten.div.Tensor, aten.mul.Tensor) and isinstance(scores.args[1], int | float):
        scale = 1 / scores.args[1] if scores.target is aten.div.Tensor else float(scores.args[1])
        scores = scores.args[0]
    if not is_step(scores, aten.matmul.default):
        return
    query, transposed = scores.args[:2]
    if not is_step(transposed, aten.transpose.int) or {dim % 4 for dim in transposed.args[1:3]} != {2, 3}:
        return
    key = transposed.args[0]
    shapes = [shape_of(node) for node in (query, key, value)]
    # Products broadcast samples and heads; attention kernels do not.
    if any(len(shape) != 4 for shape in shapes) or len({shape[:2] for shape in shapes}) > 1:
        return
    replace_call(output, ATTENTION, (query, key, value, mask, dropout), {"scale": scale})


def _add_head_dim(graph: fx.Graph, attention: fx.Node) -> None:
    """Give attention on three dims a fourth, of one head, which kernels and the rest of this package expect."""

    def viewed(operand: Any, operation: Any) -> Any:
        if len(shape_of(operand)) < 3:
            return operand
        view = graph.call_function(operation, (operand, 1))
        value = operand.meta["val"]
        changed = value.unsqueeze(1) if operation is aten.unsqueeze.default else value.squeeze(1)
        view.meta = {**attention.meta, "val": changed}
        return view

    if any(len(shape_of(operand)) != 3 for operand in attention.args[:3]):
        return
    with graph.inserting_before(attention):
        attention.args = tuple(viewed(operand, aten.unsqueeze.default) for operand in attention.args)
        if "attn_mask" in attention.kwargs:
            attention.update_kwarg("attn_mask", viewed(attention.kwargs["attn_mask"], aten.unsqueeze.default))
    attention.meta = {**attention.meta, "val": attention.meta["val"].unsqueeze(1)}
    with graph.inserting_after(attention):
        result = viewed(attention, aten.squeeze.dim)
    attention.replace_all_uses_with(result, delete_user_cb=lambda user: user is not result)


@dataclass(frozen=True)
class _Mask:
    """A mask that needs numbers in the graph alone."""

    is_added: bool
    """True if attention may add it to scores as it stands.

    A kernel takes truths as what may be attended, and no other whole numbers. In its backward, a row of which all is
    masked by a large number has other probabilities than those of the forward, since they vanish beside that number.
    """
    is_causal: bool | None
    """False if it masks nothing, True for the causal mask, None for every other."""


def _constant_mask(mask: fx.Node, reader: fx.Node, writers: Writers) -> _Mask | None:
    """Return what is known of a constant mask, None for every other."""
    if not (needed := _constants(mask, reader, writers)):
        return None
    # Its value is computed on the CPU, whatever device it was captured for.
    values, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    copy_nodes(values, (node for node in mask.graph.nodes if node in needed), copies)
    values.output(copies[mask])
    code = fx.GraphModule({}, values)
    retarget(code, torch.device("cpu"))
    with torch.no_grad(), torch.device("cpu"):
        allowed: torch.Tensor = code()
    is_added = False
    if allowed.dtype != torch.bool:
        masked = allowed <= _MASKED_BELOW
        is_added = allowed.is_floating_point() and not bool((masked & allowed.isfinite()).all(-1).any())
        allowed = allowed == 0
        if not bool((allowed | masked).all()):
            return _Mask(is_added, None)
    if allowed.dim() < 2:
        return _Mask(is_added, None)
    causal = torch.ones(allowed.shape[-2:], dtype=torch.bool).tril()
    if bool(allowed.all()):
        return _Mask(is_added, False)
    return _Mask(is_added, True if bool((allowed == causal).all()) else None)


def _constants(node: fx.Node, reader: fx.Node, writers: Writers) -> set[fx.Node]:
    """Return the operations that make a node, and write into it, if they need numbers in the graph alone.

    The result is empty if one of them draws at random, or writes after the node was read.
    """

    def sources(each: fx.Node) -> Iterable[fx.Node]:
        return (*each.all_input_nodes, *writers.get(each, ()))

    found = reachable([node], sources)
    is_constant = all(
        each.op == "call_function" and each < reader and not is_random(each) and "empty" not in op_name(each)
        for each in found
    )
    return found if is_constant else set()


# Grouped matrix products: one operation for mixtures of experts whose rows are sorted by expert.
#
# Once it is traced, `transformers` uses torch's grouped product for bf16 weights only. Under autocast the weights are
# still fp32, and its fallback multiplies in fp32, one expert after the other, while the host waits for the number of
# rows of each. Such products become `workbench::grouped_mm`, which autocast knows. It runs torch's kernel
# (`torch.nn.functional.grouped_mm`) where the device has one, and that loop elsewhere.
#
# Dims in names: S rows, K input features, N output features, E experts.

aten = torch.ops.aten
FALLBACK = "transformers.grouped_mm_fallback.default"
ALIGNED = 8
"""Number of bf16 elements in 16 bytes, at multiples of which torch's kernel needs the rows of its matrices to begin."""
CAPABILITY = (8, 0)
"""Lowest CUDA compute capability that has torch's kernel."""


@torch.library.custom_op("workbench::grouped_mm", mutates_args=())
def grouped_mm(rows_SK: torch.Tensor, weights_EKN: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """Multiply rows `ends[e - 1]` to `ends[e]` by matrix e: (S, K) and (E, K, N) -> (S, N)."""
    if _has_kernel(rows_SK, weights_EKN):
        return grouped_mm_kernel(rows_SK, weights_EKN, ends_E)
    product_SN = rows_SK.new_zeros(rows_SK.shape[0], weights_EKN.shape[2])
    for expert, rows in _groups(ends_E):
        torch.mm(rows_SK[rows], weights_EKN[expert], out=product_SN[rows])
    return product_SN


@torch.library.custom_op("workbench::grouped_outer", mutates_args=())
def grouped_outer(left_SK: torch.Tensor, right_SN: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """Return `leftᵀ @ right` of each expert's rows, its matrix's gradient: (S, K) and (S, N) -> (E, K, N)."""
    if _has_kernel(left_SK, right_SN):
        return grouped_mm_kernel(left_SK.t(), right_SN, ends_E)
    outer_EKN = left_SK.new_zeros(ends_E.shape[0], left_SK.shape[1], right_SN.shape[1])
    for expert, rows in _groups(ends_E):
        torch.mm(left_SK[rows].t(), right_SN[rows], out=outer_EKN[expert])
    return outer_EKN


def _has_kernel(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.device.type != "cuda" or left.dtype != torch.bfloat16 or not hasattr(torch.nn.functional, "grouped_mm"):
        return False
    aligned = all(size % ALIGNED == 0 for size in (left.shape[1], *right.shape[1:]))
    return aligned and torch.cuda.get_device_capability(left.device) >= CAPABILITY


def _groups(ends_E: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """Yield each expert that has rows, with these."""
    start = 0
    for expert, end in enumerate(ends_E.tolist()):
        if end > start:
            yield expert, slice(start, end)
        start = end


@grouped_mm.register_fake
def _(rows_SK: torch.Tensor, weights_EKN: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
    return rows_SK.new_empty(rows_SK.shape[0], weights_EKN.shape[2])


@grouped_outer.register_fake
def _(left_SK: torch.Tensor, right_SN: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    return left_SK.new_empty(ends_E.shape[0], left_SK.shape[1], right_SN.shape[1])


def _keep(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient_SN: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
    rows_SK, weights_EKN, ends_E = ctx.saved_tensors
    gradient_SN = gradient_SN.contiguous()
    of_rows = of_weights = None
    if ctx.needs_input_grad[0]:
        of_rows = grouped_mm(gradient_SN, weights_EKN.transpose(1, 2), ends_E)
    if ctx.needs_input_grad[1]:
        if weights_EKN.stride(2) == 1:
            of_weights = grouped_outer(rows_SK, gradient_SN, ends_E)
        else:  # the gradient must have the layout of the weights, which are stored transposed
            of_weights = grouped_outer(gradient_SN, rows_SK, ends_E).transpose(1, 2)
    return of_rows, of_weights, None


grouped_mm.register_autograd(_backward, setup_context=_keep)
for _device_type in ("cuda", "cpu"):
    grouped_mm.register_autocast(_device_type, torch.bfloat16)


@register_flop_formula(torch.ops.workbench.grouped_mm)
def _flops_of_product(rows: tuple[int, int], weights: tuple[int, int, int], *_: Any, **__: Any) -> int:
    return 2 * rows[0] * rows[1] * weights[2]


@register_flop_formula(torch.ops.workbench.grouped_outer)
def _flops_of_outer(left: tuple[int, int], right: tuple[int, int], *_: Any, **__: Any) -> int:
    return 2 * left[0] * left[1] * right[1]


def unify_grouped_matmuls(module: fx.GraphModule) -> None:
    """Make every grouped product of rows (2 dims) with matrices (3 dims) `workbench::grouped_mm`, in place.

    A product with a bias or an output type of its own is left as it is.
    """
    for node in list(module.graph.nodes):
        if not (str(node.target) == FALLBACK or node.target is aten._grouped_mm.default):
            continue
        rows, weights, ends, *others = arguments_of(node).values()
        is_plain = all(isinstance(operand, fx.Node) for operand in (rows, weights, ends)) and not any(
            value is not None for value in others
        )
        if not is_plain or (len(shape_of(rows)), len(shape_of(weights))) != (2, 3):
            continue
        source = rows
        # A cast to the type that rows have in the capture would undo the type that autocast gives them.
        while source.target is aten.to.dtype and dtype_of(source.args[0]) == dtype_of(source):
            source = source.args[0]
        replace_call(node, torch.ops.workbench.grouped_mm.default, (source, weights, ends))
        if not rows.users:
            module.graph.erase_node(rows)
