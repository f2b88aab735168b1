"""PyTorch's compiler (Inductor): how it is configured for blocks, and what is changed in their code before it compiles.

Importing this module imports Inductor, which takes seconds; a rank that compiles nothing leaves it out.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch import config as functorch
from torch._inductor import config
from torch._inductor.async_compile import maybe_warm_pool
from torch._inductor.choices import InductorChoices
from torch._inductor.codecache import torch_key
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.decomposition import decompositions, fast_random_decomps
from torch._inductor.inductor_prims import force_stride_order
from torch._inductor.runtime.cache_dir_utils import triton_cache_dir
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.runtime.triton_compat import HAS_TRITON, triton_key
from torch.fx.subgraph_rewriter import replace_pattern_with_filters

from workbench.capture.blocks.block_extraction import digest
from workbench.execution.blocks.loss_runners import Runner
from workbench.execution.blocks.rewriting import GraphRewriter

LONGEST_ROW = 2048
"""Largest number of elements per row that a kernel keeps in registers. Inductor's own limit is 1,024: it reads longer
rows twice and computes everything fused into them twice."""


class LongRowChoices(InductorChoices):
    """Inductor's choices, except that reductions (LayerNorm) keep rows of up to `LONGEST_ROW` elements in registers."""

    @staticmethod
    def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
        inner = features.get_reduction_hint() == ReductionHint.INNER
        if config.triton.persistent_reductions and inner and not cooperative_reduction:
            numel = features.reduction_numel
            if numel.is_number and int(numel) <= LONGEST_ROW:
                return True
        return bool(InductorChoices.should_use_persistent_reduction(features, cooperative_reduction))

    def uuid(self) -> str:
        """Return a part of the key under which Inductor caches compiled code."""
        return f"workbench: rows of {LONGEST_ROW}"


_ATEN = torch.ops.aten
_VIEWS = (_ATEN.view.default, _ATEN.reshape.default)
_PRODUCTS = (_ATEN.mm.default, _ATEN.addmm.default)
GELU, GELU_BACKWARD = _ATEN.gelu.default, _ATEN.gelu_backward.default
LOW_PRECISION = (torch.bfloat16, torch.float16)
"""Dtypes for which GELU is computed as written here: its kernels read and write so little in these dtypes that the
error function, about 30 instructions, would be their bottleneck."""
_STOCK = {operation: decompositions[operation] for operation in (GELU, GELU_BACKWARD)}
# Coefficients of Abramowitz and Stegun 7.1.26, the highest power first, and its p; GELU takes erf(x / sqrt(2)). Powers
# of e become those of 2, for which GPUs have an instruction.
_TAIL = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
_HALF_TAIL = tuple(factor / 2 for factor in _TAIL)
_TAIL_SCALE = 0.3275911 / math.sqrt(2)
_BELL_SCALE = -0.5 * math.log2(math.e)
# GELU by a hyperbolic tangent (arXiv:1606.08415), as 1 / (1 + e^-2y).
_TANH_SCALE, _TANH_CUBE = 2 * math.sqrt(2 / math.pi), 0.044715
_TANH_POWER = -math.log2(math.e) * _TANH_SCALE


def prepare() -> None:
    """Configure the compiler for the rest of this process.

    An early call starts the compiler's helper processes, which import torch themselves, before a compilation waits for
    them.
    """
    config.inductor_choices_class = LongRowChoices
    # With this setting a recomputation draws from the generator state that its forward found, which `StepContext`
    # seeds. By default, on GPUs, the compiler uses generators of its own that are seeded once for all steps: masks
    # would depend on the number of steps this process has trained.
    functorch.graphsafe_rng_functionalization = False
    if torch.are_deterministic_algorithms_enabled():
        config.deterministic = True  # kernels chosen by their speed could add up in another order
    decompositions.update({GELU: _gelu, GELU_BACKWARD: _gelu_backward})
    config.post_grad_custom_post_pass = FuseBackward()
    fast_random_decomps.cache_clear()  # it caches a copy of `decompositions`
    if torch.cuda.is_available():
        # Inductor would set it with the first kernel that it compiles itself, to a folder of this device. Kernels that
        # were compiled before, or for another device of the node, were not found then.
        os.environ.setdefault("TRITON_CACHE_DIR", triton_cache_dir(0))
        maybe_warm_pool()


def load_digests() -> None:
    """Compute the digests of torch's and Triton's files, by which compiled code is found: once for what is forked."""
    torch_key()
    if HAS_TRITON:
        triton_key()


def _gelu(value: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    """Compute GELU (Hendrycks and Gimpel, 2016) of bf16 and fp16 in fp32; for fp32 use Inductor's decomposition."""
    if value.dtype not in LOW_PRECISION:
        plain: torch.Tensor = _STOCK[GELU](value, approximate=approximate)
        return plain
    wide = value.float()
    if approximate == "tanh":
        return (wide * _tanh_share(wide)).to(value.dtype)
    polynomial, bell = _tail(wide, _HALF_TAIL, 0)
    return (torch.where(wide > 0, wide, 0) - wide.abs() * polynomial * bell).to(value.dtype)


def _gelu_backward(gradient: torch.Tensor, value: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    if value.dtype not in LOW_PRECISION:
        plain: torch.Tensor = _STOCK[GELU_BACKWARD](gradient, value, approximate=approximate)
        return plain
    wide = value.float()
    if approximate == "tanh":
        share, square = _tanh_share(wide), wide * wide
        slope = share + wide * share * (1 - share) * (_TANH_SCALE + 3 * _TANH_SCALE * _TANH_CUBE * square)
    else:
        # This computes the same numbers as the forward by other operations. If GELU is recomputed beside its backward,
        # the compiler would otherwise store what they share in fp32: as much memory as two of the bf16 tensors.
        polynomial, bell = _tail(wide, _TAIL, -1)
        excess = bell * (math.sqrt(2 / math.pi) * wide.abs() - polynomial)
        slope = torch.where(wide < 0, -excess, 1 + excess)
    return (gradient.float() * slope).to(value.dtype)


def _tail(value: torch.Tensor, factors: Sequence[float], power: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a polynomial, and exp(-value^2 / 2) times 2 to the power `power`.

    With `_HALF_TAIL` and 0, or `_TAIL` and -1, their product is the share of a normal distribution beyond the absolute
    value (Abramowitz and Stegun, 7.1.26), with an error below 5e-7 in fp32. On an H200, a square root's reciprocal and
    a power of 2 take fewer instructions than a division and an exponential.
    """
    root = torch.rsqrt(1 + _TAIL_SCALE * value.abs())
    near = root * root
    polynomial = factors[0] * near + factors[1]
    for factor in factors[2:]:
        polynomial = polynomial * near + factor
    return polynomial * near, torch.exp2(_BELL_SCALE * value * value + power)


def _tanh_share(value: torch.Tensor) -> torch.Tensor:
    """Return (1 + tanh(u)) / 2, with u by GELU's approximation, as 1 / (1 + exp(-2 u))."""
    power = value * (_TANH_POWER + _TANH_POWER * _TANH_CUBE * value * value)
    root = torch.rsqrt(1 + torch.exp2(power))
    return root * root


# Fusions of a layer's backward.
#
# A linear layer over (samples, positions, features) multiplies a view of two dims. Inductor computes what it reads
# in two dims too, and then finds neither of two fusions: with the kernel before it, such as the backward of a LayerNorm
# whose gradient a dropout masks, and with the sum over all rows that is the gradient of a bias. Each costs another pass
# over a tensor of the size of the activations.

FEWEST_SUMS = 1 << 16
"""Number of sums, samples times features, below which the compiler sums rows as it does: with fewer, a GPU of more than
a hundred multiprocessors has too little to do at once."""


class FuseBackward(CustomGraphPass):
    """Computes what a product reads through a view in its own shape, and sums it sample by sample if there are many.

    The numbers stay the same, except that sums in fp32 add up in another order.
    """

    def __call__(self, graph: fx.Graph) -> None:
        for view in (node for target in _VIEWS for node in graph.find_nodes(op="call_function", target=target)):
            # An elementwise result on a GPU with more than two dims of known sizes, contiguous in memory
            made = view.args[0]
            value = made.meta.get("val")
            if torch.Tag.pointwise not in getattr(made.target, "tags", ()) or not isinstance(value, torch.Tensor):
                continue
            is_known = all(isinstance(size, int) for size in value.shape)
            if not (is_known and value.device.type == "cuda" and value.dim() > 2 and value.is_contiguous()):
                continue
            if set(made.users) != {view} or not _is_multiplied(view):
                continue
            with graph.inserting_after(made):
                stored = graph.call_function(force_stride_order, (made, list(value.stride())))
            stored.meta = dict(made.meta)
            view.replace_input_with(made, stored)

            # Sums over all of its rows become sums over each sample's and one over the samples, unless that would leave
            # a GPU with too little to do, or partial sums were rounded.
            if value.shape[-1:] != view.meta["val"].shape[1:] or value.shape[0] * value.shape[-1] < FEWEST_SUMS:
                continue
            for total in [user for user in view.users if user.target is _ATEN.sum.dim_IntList]:
                if list(total.args[1]) != [0] or total.meta["val"].dtype != torch.float32:
                    continue
                inner = list(range(1, value.dim() - 1))
                with graph.inserting_before(total):
                    by_sample = graph.call_function(_ATEN.sum.dim_IntList, (stored, inner), total.kwargs)
                    by_sample.meta = {"val": _ATEN.sum.dim_IntList(value, inner, **total.kwargs)}
                    again = graph.call_function(_ATEN.sum.dim_IntList, (by_sample, *total.args[1:]), total.kwargs)
                again.meta = dict(total.meta)
                total.replace_all_uses_with(again)
                graph.erase_node(total)
        graph.lint()

    def uuid(self) -> Any:
        """Return a part of the key under which Inductor caches compiled code."""
        return get_hash_for_files((__file__,))


def _is_multiplied(node: fx.Node) -> bool:
    """Return True if a matrix product reads the node or its transpose."""
    return any(
        user.target in _PRODUCTS or (user.target is _ATEN.permute.default and _is_multiplied(user))
        for user in node.users
    )


# GELU as GPT-2 and models after it write it out (`gelu_new` in Hugging Face's library), in elementary operations:
# 0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³))). The compiler fuses that, and its tanh and a backward operation by
# operation are then the bottleneck of the kernels. PyTorch's GELU with `approximate="tanh"` is the same function
# (arXiv:1606.08415), and `_gelu` above computes it and its derivative in few instructions.

_READERS = (*_PRODUCTS, _ATEN.linear.default, _ATEN.matmul.default)
"""Matrix products as captured blocks have them, which the compiler decomposes to `_PRODUCTS`."""


def use_gelu(code: fx.GraphModule) -> fx.GraphModule:
    """Return the code with `gelu` in the place of what it writes out, where only matrix products read the result.

    Autocast computes the third power in fp32 and so the result too; products round it to bf16, as `gelu` does.
    """
    if not code.graph.find_nodes(op="call_function", target=_ATEN.tanh.default):
        return code
    rewritten = fx.GraphModule(code, copy.deepcopy(code.graph))
    filters = [lambda match, _, __: _is_read_by_products(match.returning_nodes[0])]
    replaced = replace_pattern_with_filters(rewritten, _written_out, _one_operation, match_filters=filters)
    for [gelu] in (one.replacements for one in replaced):
        gelu.meta = dict(gelu.all_input_nodes[0].meta)
    return rewritten


def _written_out(value: Any) -> Any:
    cubic = _ATEN.add.Tensor(value, _ATEN.mul.Tensor(_ATEN.pow.Tensor_Scalar(value, 3.0), 0.044715))
    share = _ATEN.add.Tensor(_ATEN.tanh.default(_ATEN.mul.Tensor(cubic, math.sqrt(2 / math.pi))), 1.0)
    return _ATEN.mul.Tensor(_ATEN.mul.Tensor(value, 0.5), share)


def _one_operation(value: Any) -> Any:
    return _ATEN.gelu.default(value, approximate="tanh")


def _is_read_by_products(node: fx.Node) -> bool:
    return all(user.target in _READERS or (user.target in _VIEWS and _is_read_by_products(user)) for user in node.users)


# One compiled code for blocks that differ in numbers only, such as the rates of stochastic depth. The compiler takes
# numbers for constants, and would compile a Swin of 24 layers 24 times. The numbers in which blocks differ become an
# argument of their code here: a tensor of one dim.

_TAKES_TENSORS = (_ATEN.add.Tensor, _ATEN.sub.Tensor, _ATEN.mul.Tensor, _ATEN.div.Tensor)
"""Operations whose second argument is a number or a tensor."""


def finish_alike(
    codes: Mapping[str, fx.GraphModule],
    finish: Callable[[str, fx.GraphModule], Runner],
    device: torch.device,
) -> dict[str, Runner]:
    """Return what `finish` makes of each code, by block type.

    It is called once for codes that differ in numbers only, where tensors can stand for them.
    """
    alike: dict[str, list[str]] = {}
    for block_type, code in codes.items():
        alike.setdefault(digest(code.graph, code, of_cost=True), []).append(block_type)
    found: dict[str, Runner] = {}
    for first, *others in alike.values():
        of_each = [list(codes[block_type].graph.nodes) for block_type in (first, *others)]
        places = _different_numbers(of_each) if others else []
        if not places:
            found |= {block_type: finish(block_type, codes[block_type]) for block_type in (first, *others)}
            continue
        run = finish(first, _with_argument(codes[first], [of_each[0][at] for at in places]))
        arguments = len(codes[first].graph.find_nodes(op="placeholder"))
        for block_type, nodes in zip((first, *others), of_each, strict=True):
            numbers = torch.tensor([nodes[at].args[1] for at in places], dtype=torch.float64, device=device)
            found[block_type] = _bound(run, arguments, numbers)
    return found


def _different_numbers(of_each: Sequence[Sequence[fx.Node]]) -> list[int]:
    """Return the places of the nodes whose numbers differ; none if one of them cannot be a tensor."""
    places = []
    for at, nodes in enumerate(zip(*of_each, strict=True)):
        numbers = [_numbers(node) for node in nodes]
        if any(each != numbers[0] for each in numbers):
            node = nodes[0]
            if node.target not in _TAKES_TENSORS or len(numbers[0]) > 1 or not isinstance(node.args[1], float):
                return []
            places.append(at)
    return places


def _numbers(node: fx.Node) -> list[float]:
    found: list[float] = []

    def note(leaf: Any) -> Any:
        if isinstance(leaf, float):
            found.append(leaf)
        return leaf

    fx.node.map_aggregate((node.args, node.kwargs), note)
    return found


def _with_argument(code: fx.GraphModule, takers: Sequence[fx.Node]) -> fx.GraphModule:
    """Return the code with a last argument, from which `takers` take their numbers in this order."""
    rewriter = GraphRewriter(code)

    def rule(node: fx.Node) -> fx.Node:
        if node not in takers:
            return rewriter.copy(node)
        number = rewriter.call(_ATEN.select.int, rewriter.new_argument, 0, takers.index(node))
        copied = rewriter.copy(node)
        copied.args = (copied.args[0], number, *copied.args[2:])
        return copied

    return rewriter.rewrite(rule, "numbers")


def _bound(run: Runner, arguments: int, numbers: torch.Tensor) -> Runner:
    """Return a runner that has its numbers, which follow the captured arguments; a seed may come behind them."""

    def bound(*values: Any) -> tuple[torch.Tensor, ...]:
        return run(*values[:arguments], numbers, *values[arguments:])

    return bound
