"""The cost of one block type: its operations run on the meta device, their trace, and what follows from that.

That is kernels, memory, and all-reduces over the tensor axis. Matrix products and attention are kernels as they are,
and memory-bound operations are fused. A compiler fuses those that lie between the same matrix products. A fused kernel
reads what enters the group and writes what leaves it or is saved for the backward; without a compiler each operation is
a group of its own.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from workbench.base.tensors import TensorSpec
from workbench.base.user_code import line_of_node
from workbench.capture.blocks.attention import as_read, fused_operands
from workbench.capture.blocks.recomputation import supported_mode
from workbench.capture.blocks.tensor_parallel import BlockSharding
from workbench.capture.export.opaque import call_of
from workbench.capture.graph import Block, Graph
from workbench.capture.losses import OVER_ELEMENTS, OVER_LABELS, find_rowwise_head
from workbench.capture.operations import GROUPED_MATMUL, is_replayable, names, op_name, schema_of
from workbench.cost.profile import ACCUMULATE_BYTES, ATTENTION, DENSE, GEMM, STREAM, BlockTypeCost, Kernel, RelativeTime
from workbench.strategy import RECOMPUTE

# The cost of one operation: its FLOPs, the tensors that autograd saves, and the casts that autocast inserts.
#
# Each operation runs once on the meta device (shapes without storage), forward and backward, under torch's own FLOP
# counter and saved-tensor hooks. Three things that the meta device cannot tell are written down here: the precision
# that autocast chooses, the tensors that fused attention kernels save, and how the device's dropout saves its mask.

META = torch.device("meta")

# torch's autocast lists (docs.pytorch.org/docs/stable/amp.html#autocast-op-reference). Operations in neither list take
# the promoted type of their inputs.
LOW_PRECISION = names(
    "linear matmul mm bmm addmm addbmm baddbmm mv addmv einsum conv1d conv2d conv3d convolution conv_transpose1d "
    "conv_transpose2d conv_transpose3d scaled_dot_product_attention prelu"
) | {GROUPED_MATMUL}
FULL_PRECISION = names(
    f"{OVER_LABELS} {OVER_ELEMENTS} layer_norm native_layer_norm rms_norm group_norm softmax log_softmax nll_loss "
    "cosine_embedding_loss pow exp log log2 log10 log1p expm1 rsqrt reciprocal sum prod cumsum cumprod norm dist cdist "
    "softplus acos asin cosh sinh tan erfinv logsumexp renorm"
) - {"binary_cross_entropy"}  # which autocast refuses
CPU_KEEPS_DTYPE = names("layer_norm softmax log_softmax rms_norm group_norm sum pow exp log norm")
"""Operations of `FULL_PRECISION` that a CPU runs in the dtype of their inputs."""

WEIGHTED_LOSSES = names("binary_cross_entropy binary_cross_entropy_with_logits cross_entropy_loss nll_loss nll_loss_nd")
"""Losses with weights as their third and fourth argument, which have no gradient."""
FUSED_ATTENTION = "scaled_dot_product_attention"


class Products(NamedTuple):
    """The times of the three products of a linear layer."""

    forward: RelativeTime = DENSE
    to_input: RelativeTime = DENSE
    """Gradient to the input."""
    to_weight: RelativeTime = DENSE
    """Gradient to the weight."""


@dataclass(frozen=True)
class Settings:
    """The precision, device type and compilation that a graph is priced for."""

    precision: str
    device_type: str
    compiled: bool


@dataclass
class Operation:
    """One operation that ran on the meta device, with its cost for the shapes of its inputs."""

    name: str
    """Name of the operator, such as `linear`."""
    node: str
    """Name of the node in the block's code."""
    outputs: Any
    inputs: list[torch.Tensor]
    """Input tensors after autocast's casts."""
    casts: list[tuple[torch.Tensor, torch.Tensor]]
    """(source, copy) of each cast that autocast inserted for this operation."""
    family: str
    """`gemm`, `attention`, `stream` (memory-bound) or `view` (no work)."""
    share: float = 1.0
    """Share of the work that one tensor-parallel rank does, or that the labelled rows take."""
    forward_flops: float = 0.0
    backward_flops: float = 0.0
    recomputed_bytes: int = 0
    """Bytes that exist during its backward only: an opaque call's second forward keeps them."""
    saved: list[torch.Tensor] = field(default_factory=list)
    hidden_results: list[torch.Tensor] = field(default_factory=list)
    """Results besides `outputs`, which only the backward reads."""
    differentiable: list[bool] = field(default_factory=list)
    """True for each of `inputs` that a gradient flows to."""

    @property
    def output_tensors(self) -> list[torch.Tensor]:
        return tensors_in(self.outputs)

    @property
    def sources(self) -> list[torch.Tensor]:
        """Tensors that the operation and its casts read."""
        return [*self.inputs, *(source for source, _ in self.casts)]

    @property
    def needed_backward_flops(self) -> float:
        """FLOPs of the backward without the attention scores that fused kernels recompute."""
        if self.family == "attention":
            return 2 * self.forward_flops if self.backward_flops else 0
        return self.backward_flops if self.family == "gemm" else 0


def identity(tensor: torch.Tensor) -> int:
    """Return a number that is equal for tensors that share memory."""
    return int(tensor.untyped_storage()._cdata)


def storage_bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def tensors_in(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


class OperationRunner:
    """Runs the operations of one block on meta tensors."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.gradients: set[int] = set()
        """Identities of tensors that have a gradient; those that operations return are added."""
        self.weights: set[int] = set()
        """Identities of the block's parameters and buffers."""
        self.weight_copies: dict[int, torch.Tensor] = {}
        """Autocast's copies of weights, by their identity."""
        self._copies: dict[tuple[object, ...], torch.Tensor] = {}

    def run(self, node: fx.Node, args: Any, kwargs: Any) -> Operation:
        """Run one node and return its cost."""
        name, settings = op_name(node), self._settings
        args, kwargs = tree_map(_on_meta, (args, dict(kwargs)))
        args, kwargs, made = self._autocast(name, args, kwargs)
        self.gradients |= {identity(copy) for source, copy in made if identity(source) in self.gradients}
        tensors = tensors_in((args, kwargs))
        ran = Operation(name, node.name, None, tensors, made, "stream")
        ran.differentiable = [identity(t) in self.gradients and t.is_floating_point() for t in tensors]
        if name == FUSED_ATTENTION:
            _run_attention(ran, args, kwargs, settings)
            ran.outputs = as_read(ran.outputs, *args[:3])
            if any(ran.differentiable):
                self.gradients.add(identity(ran.outputs))
        else:
            _run_on_meta(ran, node, args, kwargs, self.gradients)
        if name in ("dropout", "native_dropout") and settings.device_type == "cuda" and ran.saved:
            mask = torch.empty(tensors[0].shape, dtype=torch.bool, device=META)
            ran.saved = [] if settings.compiled else [mask]  # compiled code draws the mask again
        return ran

    def runs_in_fp32(self, node: fx.Node, args: Any, kwargs: Any) -> bool:
        """Return True if a node that does not run under autocast would run in fp32."""

        def widened(value: Any) -> Any:
            is_low = isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16
            return value.float() if is_low else value

        try:
            OperationRunner(replace(self._settings, precision="fp32")).run(node, *tree_map(widened, (args, kwargs)))
        except Exception:
            return False
        return True

    def by_shape(self, node: fx.Node, args: Any, kwargs: Any) -> Operation:
        """Return the cost of a node that does not run without values: that of reading and writing its tensors.

        Its results have the shapes that export found. What it saves for the backward is taken for its inputs.
        """
        inputs = tensors_in(tree_map(_on_meta, (args, dict(kwargs))))
        outputs = tree_map(_without_values, node.meta["val"])
        ran = Operation(op_name(node), node.name, outputs, inputs, [], "stream")
        ran.differentiable = [identity(t) in self.gradients and t.is_floating_point() for t in inputs]
        if any(ran.differentiable):
            ran.saved = [tensor for tensor, yes in zip(inputs, ran.differentiable, strict=True) if yes]
            self.gradients |= {identity(tensor) for tensor in ran.output_tensors if tensor.is_floating_point()}
        return ran

    def _autocast(self, name: str, args: Any, kwargs: Any) -> Any:
        """Return the arguments as autocast passes them on, and the copies that it makes.

        A weight is copied once per forward; an activation for each use, or once if compiled.
        """
        made: list[tuple[torch.Tensor, torch.Tensor]] = []
        wanted, on_cpu = None, self._settings.device_type == "cpu"
        if self._settings.precision == "bf16" and name in LOW_PRECISION:
            wanted = torch.bfloat16
        elif self._settings.precision == "bf16" and name in FULL_PRECISION - (CPU_KEEPS_DTYPE if on_cpu else set()):
            wanted = torch.float32

        def cast(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not value.is_floating_point():
                return value
            if wanted is None or value.dtype in (wanted, torch.float64):
                return value
            key = (identity(value), wanted, tuple(value.shape), value.stride())
            if key in self._copies:
                return self._copies[key]
            copy, is_weight = torch.empty(value.shape, dtype=wanted, device=META), identity(value) in self.weights
            if is_weight or self._settings.compiled:
                self._copies[key] = copy
            if is_weight:
                self.weight_copies[identity(copy)] = copy
            made.append((value, copy))
            return copy

        return *tree_map(cast, (args, kwargs)), made


def _on_meta(value: Any) -> Any:
    return META if isinstance(value, torch.device) else value


ASSUMED_SIZE = 16
"""Number, and size of a tensor, that stands for one that only values tell, such as the rows of an image's patches."""


def _without_values(value: Any) -> Any:
    """Return a tensor of export on the meta device; numbers and sizes that only values tell are `ASSUMED_SIZE`."""
    if isinstance(value, torch.Tensor):
        shape = [size if isinstance(size, int) else ASSUMED_SIZE for size in value.shape]
        return torch.empty(shape, dtype=value.dtype, device=META)
    if isinstance(value, torch.SymBool):
        return True
    if isinstance(value, torch.SymFloat):
        return float(ASSUMED_SIZE)
    return ASSUMED_SIZE if isinstance(value, torch.SymInt) else value


def _run_on_meta(ran: Operation, node: fx.Node, args: Any, kwargs: Any, gradients: set[int]) -> None:
    """Run forward and backward on the meta device, count FLOPs, and note the tensors that autograd saves."""
    weighted = (*args[2:4], *map(kwargs.get, ("weight", "pos_weight"))) if ran.name in WEIGHTED_LOSSES else ()
    fixed = {id(weight) for weight in weighted}
    leaves: list[torch.Tensor] = []
    original: dict[int, torch.Tensor] = {}

    def leaf(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        fresh = value.detach()
        if identity(value) in gradients and value.is_floating_point() and id(value) not in fixed:
            fresh.requires_grad_()
            leaves.append(fresh)
        original[id(fresh)] = value
        return fresh

    inputs = tree_map(leaf, (args, kwargs))
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.detach())
        return tensor

    assert callable(node.target)
    schema = schema_of(node)
    mutates = schema is not None and schema.is_mutable
    watched = torch.enable_grad() if leaves and not mutates else torch.no_grad()
    with FlopCounterMode(display=False) as counter, watched:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            outputs = _called(node.target, *inputs)
        ran.forward_flops = counter.get_total_flops()
        ends = [o for o in tensors_in(outputs) if o.requires_grad]
        if ends:
            torch.autograd.grad(ends, leaves, [torch.empty_like(o) for o in ends], allow_unused=True)
        ran.backward_flops = counter.get_total_flops() - ran.forward_flops
    if (call := call_of(node)) is not None:  # its backward runs the forward again
        ran.forward_flops, ran.backward_flops = call.flops, 3 * call.flops * bool(ends)
        ran.recomputed_bytes = call.recomputed_bytes * bool(ends)
    ran.saved = saved
    ran.outputs = tree_map(lambda v: v.detach() if isinstance(v, torch.Tensor) else v, outputs)
    gradients.update(identity(o) for o in ends)
    shared = {identity(t) for t in ran.inputs}
    if ran.forward_flops:
        ran.family = "gemm"
    elif ran.output_tensors and all(identity(o) in shared for o in ran.output_tensors) and not mutates:
        ran.family = "view"


def _called(target: Any, args: Any, kwargs: Any) -> Any:
    """Call the target; `torch.cond` takes its longer branch, because nobody knows how often each is taken.

    A selection by a mask, which the meta device has no kernel for, keeps everything.
    """
    if target is torch.ops.aten.masked_select.default:
        return torch.broadcast_tensors(*args)[0].flatten().clone()
    if target is torch.ops.higher_order.cond:
        _, *branches, operands = args
        return _OnMeta(max(branches, key=lambda code: len(code.graph.nodes))).run(*operands)
    return target(*args, **kwargs)


class _OnMeta(fx.Interpreter):
    """An interpreter that runs code on meta tensors, whatever devices the code names."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().call_function(target, *tree_map(_on_meta, (args, kwargs)))

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        return value.to(META) if isinstance(value, torch.Tensor) else value


def _run_attention(ran: Operation, args: Any, kwargs: Any, settings: Settings) -> None:
    """Note the cost of scaled dot-product attention as the device runs it.

    CUDA: flash or memory-efficient kernels save query, key, value, output and one fp32 log-sum-exp per row
    (FlashAttention-2, arXiv:2307.08691). A boolean mask becomes a bias in the dtype of the computation and selects the
    memory-efficient kernel. Operands of other shapes become those of `fused_operands`. CPU: flash without dropout;
    with dropout the explicit softmax, whose scores, probabilities and dropout mask are all saved. The backward
    recomputes the scores and takes 2.5 times the forward's FLOPs.
    """
    query, key, value = args[:3]
    mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
    dropout = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
    is_masked, gqa = mask is not None, bool(kwargs.get("enable_gqa"))
    query, key, value = fused_operands(query, key, value, settings.device_type, query.dtype, is_masked, gqa)
    batch, heads, rows, _ = query.shape
    columns, width = key.shape[-2], value.shape[-1]
    shapes = (tuple(query.shape), (batch, heads, *key.shape[2:]), (batch, heads, *value.shape[2:]))
    ran.forward_flops = sdpa_flop_count(*shapes)
    ran.family = "attention"
    out = torch.empty((batch, rows, heads, width), dtype=query.dtype, device=META).transpose(1, 2)
    ran.outputs = out
    if not any(ran.differentiable):
        return
    if settings.device_type == "cpu" and dropout:
        scores = (batch, heads, rows, columns)
        ran.backward_flops = 2 * ran.forward_flops
        ran.outputs = torch.empty((batch, heads, rows, width), dtype=query.dtype, device=META)
        # The CPU computes in fp32. It saves query and key scaled, and of the scores softmax, noise and their product.
        values = [torch.empty_like(t, dtype=torch.float32) for t in (query, key)]
        values.append(value if value.dtype == torch.float32 else torch.empty_like(value, dtype=torch.float32))
        ran.saved = [*values, *(torch.empty(scores, dtype=torch.float32, device=META) for _ in range(3))]
        return
    ran.backward_flops = 2.5 * ran.forward_flops  # five products, with that which recomputes the scores, beside two
    rows_lse = torch.empty((batch, heads, rows), dtype=torch.float32, device=META)
    ran.saved = [query, key, value, out, rows_lse]
    ran.hidden_results = [rows_lse]
    if mask is not None:
        ran.saved.append(torch.empty(mask.shape, dtype=query.dtype, device=META) if mask.dtype == torch.bool else mask)


# The trace of one block, run operation by operation on the meta device: its values, and those its backward needs.

_RANDOM = frozenset({"dropout", "native_dropout"})
"""Operations whose own work, a random mask, depends on none of their inputs."""


@dataclass(frozen=True)
class RowSelection:
    """The operations of a block that run over labelled rows only, and the share of the rows that have a label."""

    operations: frozenset[str] = frozenset()
    share: float = 1.0

    @staticmethod
    def of(block: Block, labelled_share: float) -> RowSelection:
        part = find_rowwise_head(block)
        rows = None if part is None else part.rows_to_compute(math.ceil(labelled_share * part.rows))
        return RowSelection() if part is None or rows is None else RowSelection(frozenset(part.reads), rows / part.rows)


@dataclass
class Value:
    """One piece of memory inside a block; steps count the block's operations, and -1 stands for its arguments."""

    tensor: torch.Tensor
    born: int
    """Step that makes it."""
    last_use: int
    batched: bool
    """True if its size grows with the micro-batch."""
    weight: bool = False
    gradient: bool = False
    first_saved: int | None = None
    """First step that saves it for the backward."""
    share: float = 1.0
    """Share that one tensor-parallel rank, or a selection of rows, holds of it."""
    uses: set[int] = field(default_factory=set)

    @property
    def nbytes(self) -> float:
        return storage_bytes(self.tensor) * self.share

    @property
    def elements(self) -> float:
        return self.tensor.numel() * self.share


class BlockTrace:
    """One block run on meta tensors: its operations in order, and every value by the `identity` of its memory.

    `divide` then says which share of each operation and value one tensor-parallel rank has.
    """

    def __init__(
        self, graph: Graph, block: Block, received: tuple[torch.dtype, ...], settings: Settings, rows: RowSelection
    ) -> None:
        self.block, self.settings, self.samples = block, settings, graph.micro_batch
        self.runner = OperationRunner(settings)
        self.values: dict[int, Value] = {}
        self.operations: list[Operation] = []
        self.of_node: dict[str, list[torch.Tensor]] = {}
        """Tensors that each node of the block's code returned, by the node's name."""
        self.sent: tuple[torch.dtype, ...] = ()
        self.division = BlockSharding()
        self.priced_by_shape: dict[str, None] = {}
        """Operations whose cost only the shapes of their results tell, with their lines, as keys."""
        self.relative: Mapping[str, Products] = {}
        """Times of the three products of a node, by its name, over those with a dense weight; see `leave_out`."""
        self._model, self._rows = graph.model, rows
        self._run(graph, received)
        self.divide(BlockSharding(), 1)

    def divide(self, division: BlockSharding, degree: int) -> None:
        """Set every share to that of one of `degree` tensor-parallel ranks."""
        self.division, self.relative = division, {}
        rows = self._rows if not division.divided else RowSelection()  # a divided head runs over all of its rows
        for value in self.values.values():
            value.share = 1.0
        for position, value in enumerate(self._weight_arguments()):
            if position in division.parameters:
                value.share = 1 / degree
        for step, ran in enumerate(self.operations):
            selects, divided = ran.node in rows.operations, ran.node in division.divided
            ran.share = 1 / degree if divided else rows.share if selects else 1.0
            for tensor in ran.output_tensors:
                value = self.values[identity(tensor)]
                if ran.node in division.sharded or (selects and value.born == step):
                    value.share = ran.share
            for tensor in (*ran.saved, *ran.hidden_results):
                if (selects or divided) and self.is_internal(tensor, step):
                    self.values[identity(tensor)].share = ran.share
            for source, copy in ran.casts:
                self.values[identity(copy)].share = self.values[identity(source)].share

    def leave_out(self, stored: Mapping[str, float], relative: Mapping[str, Products]) -> None:
        """Set every share to that of weights whose absent blocks are not stored.

        `stored` is the share of its blocks that a parameter stores, by name; `relative` are the times of the products
        with it, by node. `divide` undoes this.
        """
        self.divide(BlockSharding(), 1)
        self.relative = relative
        for name, value in zip(self.block.parameters, self._weight_arguments(), strict=False):
            value.share = stored.get(name, 1.0)
        for ran in self.operations:
            for source, copy in ran.casts:
                self.values[identity(copy)].share = self.values[identity(source)].share

    def _weight_arguments(self) -> list[Value]:
        """Return the parameters in the block's order, then the buffers."""
        return [value for value in self.values.values() if value.weight and value.born == -1]

    def is_internal(self, tensor: torch.Tensor, step: int) -> bool:
        """Return True if the step made the tensor (a mask, a log-sum-exp) and does not return it."""
        value = self.values.get(identity(tensor))
        outputs = {identity(output) for output in self.operations[step].output_tensors}
        return value is not None and value.born == step and identity(tensor) not in outputs

    @cached_property
    def recomputed(self) -> set[int]:
        """Steps that full activation checkpointing repeats: those that a value depends on which the backward reads.

        The last product of a block that ends in a residual addition is not among them.
        """
        needed = {key for key, value in self.values.items() if value.first_saved is not None and not value.weight}
        steps = set()
        for step, ran in reversed(list(enumerate(self.operations))):
            copies = {identity(copy): identity(source) for source, copy in ran.casts}
            internal = [] if ran.name in _RANDOM else [t for t in ran.saved if self.is_internal(t, step)]
            made = {identity(tensor) for tensor in (*ran.output_tensors, *ran.hidden_results, *internal)} - set(copies)
            if made & needed:
                steps.add(step)
                needed |= {identity(tensor) for tensor in ran.sources}
            needed |= {source for copy, source in copies.items() if copy in needed}
        return steps

    def _run(self, graph: Graph, received: tuple[torch.dtype, ...]) -> None:
        env: dict[fx.Node, Any] = {}
        arguments = iter(self._arguments(graph, received))
        for node in self.block.code.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(arguments)
            elif node.op == "get_attr":
                env[node] = getattr(self.block.code, str(node.target))
            elif node.op == "call_function":
                env[node] = self._step(node, env)
            elif node.op == "output":
                sends = tensors_in(fx.node.map_arg(node.args[0], env.__getitem__))
                self.sent = tuple(send.dtype for send in sends)
                for value in (self.values[identity(send)] for send in sends):
                    value.last_use = len(self.operations)
                    value.uses.add(len(self.operations))
            self.of_node[node.name] = tensors_in(env.get(node))

    def _arguments(self, graph: Graph, received: tuple[torch.dtype, ...]) -> Iterable[torch.Tensor]:
        for name in self.block.parameters:
            yield self._argument(graph.parameters[name], weight=True, gradient=name not in graph.frozen)
        for name in self.block.buffers:
            yield self._argument(graph.buffers[name], weight=True)
        for name, dtype in zip(self.block.receives, received, strict=True):
            yield self._argument(graph.values[name], dtype, batched=True, gradient=name in graph.differentiated)
        for name in self.block.inputs:
            yield self._argument(graph.batch[name], batched=True)
        for _ in self.block.counts:
            yield self._argument(TensorSpec("count", (), "float32"))

    def _argument(
        self,
        spec: TensorSpec,
        dtype: torch.dtype | None = None,
        *,
        weight: bool = False,
        batched: bool = False,
        gradient: bool = False,
    ) -> torch.Tensor:
        tensor = torch.empty(spec.shape, dtype=dtype or getattr(torch, spec.dtype), device=META)
        self.values[identity(tensor)] = Value(tensor, -1, -1, batched, weight, gradient)
        if gradient:
            self.runner.gradients.add(identity(tensor))
        if weight:
            self.runner.weights.add(identity(tensor))
        return tensor

    def _step(self, node: fx.Node, env: Mapping[fx.Node, Any]) -> Any:
        lookup: Callable[[fx.Node], Any] = env.__getitem__
        args: Any = fx.node.map_arg(node.args, lookup)
        kwargs: Any = fx.node.map_arg(node.kwargs, lookup)
        if op_name(node) == "getitem":
            return args[0][args[1]]
        try:
            ran = self.runner.run(node, args, kwargs)
        except Exception as error:
            # It ran at capture: what it does not run in here are autocast's dtypes, or it needs values.
            if self.settings.precision == "bf16" and self.runner.runs_in_fp32(node, args, kwargs):
                line, reason = line_of_node(node), str(error).partition("\n")[0].rstrip(".")
                raise line.error(
                    f"{self._model}:",
                    f"{op_name(node)}{line.where} cannot run in bf16: {reason}. Under autocast it is given bf16: cast "
                    "what it reads in forward (.float()), or train with precision='fp32'.",
                ) from error
            ran = self.runner.by_shape(node, args, kwargs)
            self.priced_by_shape[f"{op_name(node)}{line_of_node(node).where}"] = None
        step = len(self.operations)
        self.operations.append(ran)
        for source, copy in ran.casts:
            read, made = self._value(source, step), self._value(copy, step)
            made.batched, made.gradient, made.weight = read.batched, read.gradient, read.weight
        batched = any(self._value(tensor, step).batched for tensor in ran.inputs)
        for tensor in ran.sources:
            value = self._value(tensor, step, batched=batched)
            value.last_use = step
            value.uses.add(step)
        for tensor in ran.output_tensors:
            value = self._value(tensor, step, batched=batched)
            value.gradient |= identity(tensor) in self.runner.gradients
        for tensor in ran.saved:
            value = self._value(tensor, step, batched=batched)
            value.first_saved = step if value.first_saved is None else min(value.first_saved, step)
        return ran.outputs

    def _value(self, tensor: torch.Tensor, step: int, *, batched: bool = False) -> Value:
        return self.values.setdefault(identity(tensor), Value(tensor, step, step, batched))


# The cost of a traced block.


def block_type_cost(trace: BlockTrace) -> BlockTypeCost:
    """Return the cost of the traced block on one of the tensor-parallel ranks that it was divided over."""
    samples, values = trace.samples, trace.values
    forward, backward = kernels(trace)
    saved = [value for value in values.values() if value.first_saved is not None and not value.weight]
    saved_bytes = sum(value.nbytes for value in saved)
    copies = [v for key, v in values.items() if v.first_saved is not None and key in trace.runner.weight_copies]
    cast = [values[identity(source)] for ran in trace.operations for source, _ in ran.casts]
    # All-reduces of a forward, and True where recomputation repeats them; those of a backward.
    steps = [step for step, ran in enumerate(trace.operations) if ran.node in trace.division.reduced]
    reduced: list[tuple[float, bool]] = []
    for step, elements in zip(steps, trace.division.forward_elements, strict=True):
        result = trace.operations[step].output_tensors[0]
        # The trace keeps every row of a selection by values, whose own number of rows is not known.
        count = elements if isinstance(elements, int) else result.numel()
        reduced.append((count * result.element_size() / samples, step in trace.recomputed))
    backward_reduced: list[float] = []
    for name in dict.fromkeys(name for read in trace.division.entering.values() for name in read):
        tensor = trace.of_node[name][0]
        if identity(tensor) in trace.runner.gradients:  # they are summed in the dtype that they have
            is_cast = trace.settings.precision == "bf16" and tensor.dtype == torch.float32
            size = torch.bfloat16.itemsize if is_cast and name in trace.division.multiplied else tensor.element_size()
            backward_reduced.append(tensor.numel() * size / samples)
    # Results of products and attention that the backward needs, which selective checkpointing keeps.
    products: dict[int, float] = {}
    for step in sorted(trace.recomputed):
        ran = trace.operations[step]
        if ran.family in (GEMM, ATTENTION):
            products |= {identity(t): values[identity(t)].nbytes for t in ran.output_tensors}
        if ran.family == ATTENTION:
            products |= {identity(t): storage_bytes(t) * ran.share for t in ran.hidden_results}
    modes = tuple(mode for mode in RECOMPUTE if is_replayable(trace.block.code, mode))
    # A head that runs over labelled rows has another length in every batch and cannot be captured as a CUDA graph.
    has_labelled_rows = find_rowwise_head(trace.block) is not None and not trace.division.divided
    return BlockTypeCost(
        block_type=trace.block.block_type,
        forward=tuple(forward),
        backward=tuple(backward),
        model_flops=sum(ran.forward_flops for ran in trace.operations) / samples,
        model_backward_flops=sum(ran.needed_backward_flops for ran in trace.operations) / samples,
        saved_bytes=saved_bytes / samples,
        workspace_bytes=max(0, _peak_bytes(trace) - saved_bytes) / samples,
        weight_copy_bytes=sum(value.nbytes for value in copies),
        cast_elements=sum(value.elements for value in cast if value.weight),
        products_bytes=sum(products.values()) / samples,
        forward_reduced_bytes=tuple(nbytes for nbytes, _ in reduced),
        recompute_reduced_bytes=tuple(nbytes for nbytes, recomputed in reduced if recomputed),
        backward_reduced_bytes=tuple(backward_reduced),
        capturable=() if has_labelled_rows else modes,
        runs_as=tuple((mode, supported_mode(trace.block.code, mode)) for mode in RECOMPUTE),
    )


def _peak_bytes(trace: BlockTrace) -> float:
    """Return the most bytes that exist at any step of the block's forward, or of its backward."""
    end = len(trace.operations)
    saved, forward, gradients = ([0.0] * (end + 2) for _ in range(3))  # changes from step to step

    def exists(total: list[float], first: int, last: int, nbytes: float) -> None:
        if max(first, 0) <= last:
            total[max(first, 0)] += nbytes
            total[last + 1] -= nbytes

    for value in trace.values.values():
        if value.weight:
            continue
        nbytes, last = value.nbytes, value.last_use
        if value.first_saved is not None:
            exists(saved, value.first_saved, end, nbytes)
            kept_from = max(value.born, value.first_saved)
            if kept_from <= last + 1:
                last = end
            else:
                exists(forward, kept_from, end, nbytes)
        exists(forward, value.born, last, nbytes)
        if value.gradient:
            exists(gradients, value.born, value.last_use, nbytes)
    recomputed = [*(ran.recomputed_bytes for ran in trace.operations), 0]
    steps = zip(accumulate(forward), accumulate(saved), accumulate(gradients), recomputed, strict=False)
    return max(max(alive, kept + gradient + again) for alive, kept, gradient, again in steps)


# Its kernels, with memory-bound operations in groups that are fused.

CAST_BYTES = 6
"""Bytes read and written per weight element to cast it from fp32 to bf16, or its gradient back."""


@dataclass
class _FusionGroup:
    """Memory-bound operations that run as one kernel."""

    inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)
    saved: dict[int, torch.Tensor] = field(default_factory=dict)
    steps: set[int] = field(default_factory=set)
    differentiable: bool = False
    embedding_elements: float = 0.0
    """Elements of embedding tables of which rows are read; their gradients are dense."""

    def absorb(self, other: _FusionGroup) -> None:
        self.inputs |= other.inputs
        self.outputs |= other.outputs
        self.saved |= other.saved
        self.steps |= other.steps
        self.differentiable |= other.differentiable
        self.embedding_elements += other.embedding_elements


def kernels(trace: BlockTrace) -> tuple[list[Kernel], list[Kernel]]:
    """Return the kernels of the block's forward and of its backward, for the division that the trace has."""
    builder = _KernelBuilder(trace)
    for step, ran in enumerate(trace.operations):
        if ran.family in (GEMM, ATTENTION):
            builder.add_product(ran, recomputed=step in trace.recomputed)
        builder.add_weight_casts(ran)
    for group in _fusion_groups(trace):
        builder.add_stream(group)
    trained = [value for key, value in trace.values.items() if key in trace.runner.weights and value.gradient]
    elements = sum(value.elements for value in trained)
    if elements:
        builder.backward.append(Kernel(STREAM, 0, 0, ACCUMULATE_BYTES * elements, len(trained)))
    return builder.forward, builder.backward


class _KernelBuilder:
    """The kernels found so far, and the memory traffic of those to come."""

    def __init__(self, trace: BlockTrace) -> None:
        self._trace = trace
        self.forward: list[Kernel] = []
        self.backward: list[Kernel] = []

    def add_product(self, ran: Operation, *, recomputed: bool) -> None:
        samples, values = self._trace.samples, self._trace.values
        batched, fixed = self._traffic([*ran.inputs, *ran.output_tensors])
        flops = ran.share * ran.forward_flops / samples
        relative = self._trace.relative.get(ran.node, Products())
        self.forward.append(Kernel(ran.family, flops, batched, fixed, recomputed=recomputed, relative=relative.forward))
        if not ran.backward_flops:
            return
        launches = max(1, round(ran.backward_flops / ran.forward_flops)) if ran.family == GEMM else 1
        flops = ran.share * ran.backward_flops / samples
        inputs = [values[identity(tensor)] for tensor in ran.inputs]
        for_weights = 1 if ran.family == GEMM and any(value.weight and value.gradient for value in inputs) else 0
        for count, times in ((launches - for_weights, relative.to_input), (for_weights, relative.to_weight)):
            if count:
                each = count / launches * flops
                self.backward.append(Kernel(ran.family, each, batched * count, fixed * count, count, relative=times))

    def add_weight_casts(self, ran: Operation) -> None:
        sources = [self._trace.values[identity(source)] for source, _ in ran.casts]
        weights = [value for value in sources if value.weight]
        trained = [value for value in weights if value.gradient]
        for values, kernels in ((weights, self.forward), (trained, self.backward)):
            if values:
                traffic = CAST_BYTES * sum(value.elements for value in values)
                kernels.append(Kernel(STREAM, 0, 0, traffic, 1 if self._trace.settings.compiled else len(values)))

    def add_stream(self, group: _FusionGroup) -> None:
        values, recomputed = self._trace.values, bool(group.steps & self._trace.recomputed)
        reads = [tensor for key, tensor in group.inputs.items() if key not in group.outputs]
        # An output that only the group itself reads stays in registers.
        writes = [
            tensor
            for key, tensor in group.outputs.items()
            if values[key].first_saved is not None or values[key].uses - group.steps
        ]
        batched, fixed = self._traffic(reads + writes)
        if group.embedding_elements:
            batched += sum(t.numel() * t.element_size() for t in writes) / self._trace.samples
        self.forward.append(Kernel(STREAM, 0, batched, fixed, recomputed=recomputed))
        gradients = [t for t in [*reads, *writes] if values[identity(t)].gradient]
        if group.differentiable or gradients:
            saved = [tensor for key, tensor in group.saved.items() if not values[key].weight]
            batched, fixed = self._traffic([*gradients, *saved])
            reduces = any(values[identity(t)].weight for t in gradients)
            self.backward.append(Kernel(STREAM, 0, batched, fixed + 4 * group.embedding_elements, 2 if reduces else 1))

    def _traffic(self, tensors: Iterable[torch.Tensor]) -> tuple[float, float]:
        """Return bytes per sample of batched tensors, and bytes of the others; a broadcast tensor counts once."""
        batched = fixed = 0.0
        for tensor in tensors:
            value = self._trace.values[identity(tensor)]
            nbytes = value.share * min(tensor.numel() * tensor.element_size(), storage_bytes(tensor))
            if value.batched:
                batched += nbytes / self._trace.samples
            else:
                fixed += nbytes
        return batched, fixed


def _fusion_groups(trace: BlockTrace) -> list[_FusionGroup]:
    """Return the memory-bound operations in groups: those at the same depth of products that feed each other."""
    made_by: dict[int, _FusionGroup] = {}
    depth: dict[int, int] = defaultdict(int)
    groups: list[_FusionGroup] = []

    def group_for(inputs: list[torch.Tensor], level: int) -> _FusionGroup:
        """Return the group that the operation joins, with other groups that it connects merged into it."""
        near = [made_by[identity(t)] for t in inputs if identity(t) in made_by and depth[identity(t)] == level]
        if not (trace.settings.compiled and near):
            groups.append(_FusionGroup())
            return groups[-1]
        group = near[0]
        for other in near[1:]:
            if other is not group:
                group.absorb(other)
                made_by.update(dict.fromkeys(other.outputs, group))
                groups[:] = [each for each in groups if each is not other]
        return group

    def join(inputs: list[torch.Tensor], outputs: list[torch.Tensor], step: int, level: int) -> _FusionGroup:
        group = group_for(inputs, level)
        group.inputs |= {identity(t): t for t in inputs}
        group.outputs |= {identity(t): t for t in outputs}
        group.steps.add(step)
        for tensor in outputs:
            made_by[identity(tensor)] = group
            depth[identity(tensor)] = level
        return group

    for step, ran in enumerate(trace.operations):
        level = max((depth[identity(t)] for t in ran.sources), default=0)
        for source, copy in ran.casts:
            if not trace.values[identity(source)].weight:
                join([source], [copy], step, depth[identity(source)])
        if ran.family == STREAM:
            looks_up = ran.name == "embedding"
            group = join(ran.inputs[1:] if looks_up else ran.inputs, ran.output_tensors, step, level)
            group.saved |= {identity(t): t for t in ran.saved}
            group.differentiable |= bool(ran.backward_flops) or any(ran.differentiable)
            group.embedding_elements += ran.inputs[0].numel() * ran.share if looks_up else 0
        elif ran.family != "view":
            for tensor in ran.output_tensors:
                depth[identity(tensor)] = level + 1
    return groups
