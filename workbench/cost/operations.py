"""The cost of one operation: its FLOPs, the tensors that autograd saves, and the casts that autocast inserts.

Each operation runs once on the meta device (shapes without storage), forward and backward, under torch's own FLOP
counter and saved-tensor hooks. Three things that the meta device cannot tell are written down here: the precision that
autocast chooses, the tensors that fused attention kernels save, and how the device's dropout saves its mask.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from workbench.capture.opaque import call_of
from workbench.capture.operations import GROUPED_MATMUL, names, op_name, schema_of

META = torch.device("meta")

# torch's autocast lists (docs.pytorch.org/docs/stable/amp.html#autocast-op-reference). Operations in neither list take
# the promoted type of their inputs.
LOW_PRECISION = names(
    "linear matmul mm bmm addmm addbmm baddbmm mv addmv einsum conv1d conv2d conv3d convolution conv_transpose1d "
    "conv_transpose2d conv_transpose3d scaled_dot_product_attention prelu"
) | {GROUPED_MATMUL}
FULL_PRECISION = names(
    "layer_norm native_layer_norm rms_norm group_norm softmax log_softmax cross_entropy_loss nll_loss nll_loss_nd "
    "mse_loss l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy_with_logits cosine_embedding_loss pow exp "
    "log log2 log10 log1p expm1 rsqrt reciprocal sum prod cumsum cumprod norm dist cdist softplus acos asin cosh sinh "
    "tan erfinv logsumexp renorm"
)
CPU_KEEPS_DTYPE = names("layer_norm softmax log_softmax rms_norm group_norm sum pow exp log norm")
"""Operations of `FULL_PRECISION` that a CPU runs in the dtype of their inputs."""

WEIGHTED_LOSSES = names("binary_cross_entropy binary_cross_entropy_with_logits cross_entropy_loss nll_loss nll_loss_nd")
"""Losses with weights as their third and fourth argument, which have no gradient."""
FUSED_ATTENTION = "scaled_dot_product_attention"


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
    own_results: list[torch.Tensor] = field(default_factory=list)
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
            if any(ran.differentiable):
                self.gradients.add(identity(ran.outputs))
        else:
            _run_on_meta(ran, node, args, kwargs, self.gradients)
        if name in ("dropout", "native_dropout") and settings.device_type == "cuda" and ran.saved:
            mask = torch.empty(tensors[0].shape, dtype=torch.bool, device=META)
            ran.saved = [] if settings.compiled else [mask]  # compiled code draws the mask again
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
    memory-efficient kernel. CPU: flash without dropout; with dropout the explicit softmax, whose scores, probabilities
    and dropout mask are all saved. The backward recomputes the scores and takes 2.5 times the forward's FLOPs.
    """
    query, key, value = args[:3]
    mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
    dropout = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
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
    ran.backward_flops = 2.5 * ran.forward_flops
    rows_lse = torch.empty((batch, heads, rows), dtype=torch.float32, device=META)
    ran.saved = [query, key, value, out, rows_lse]
    ran.own_results = [rows_lse]
    if mask is not None:
        ran.saved.append(torch.empty(mask.shape, dtype=query.dtype, device=META) if mask.dtype == torch.bool else mask)
