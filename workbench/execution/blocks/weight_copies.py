"""Weights in bf16: copies made once per step, and blocks whose weights arrive in bf16.

FSDP2 all-gathers weights in bf16. Autocast casts only the operands of matrix products: norms, added biases and
embedding tables are read in fp32. A block with bf16 weights alone would continue in bf16 wherever no operation forces
fp32, for example in the whole residual stream of a GPT or a ViT. The same model would then train with other numbers
under ZeRO 1 to 3, and each layer would be compiled for two input types. Therefore weights that only matrix products
read stay bf16, and the others are cast back to fp32; rows of an embedding table are cast after the lookup
(`match_autocast_types`).

Stages held by neither FSDP2 nor `DistributedDataParallel` have copies (`WeightCopies`). Plain autocast casts the
weights of matrix products in every micro-batch, and compiled code stores each cast for its backward: 2 bytes per weight
for each micro-batch in flight. Here the blocks read bf16 copies instead, and the copies' gradients are added to those
of the fp32 weights as soon as all of a block have arrived. The numbers equal autocast's to the last bit. Where a step
makes each gradient once and the optimiser reads bf16, gradients stay as they are (`WeightCopies.keep_gradients`).
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import fx, nn
from torch.autograd.graph import get_gradient_edge

from workbench.capture.operations import EMBEDDING, GROUPED_MATMUL, dtype_of, names, op_name
from workbench.execution.blocks.block_module import BlockModule
from workbench.execution.blocks.block_sparse import multiply_by_stored_blocks
from workbench.execution.blocks.gradient_accumulation import GradientAccumulator
from workbench.execution.blocks.graph_rewriter import GraphRewriter
from workbench.execution.blocks.tensor_parallel import parallel_embedding

PRODUCTS = {*names("linear matmul mm bmm addmm baddbmm conv1d conv2d conv3d convolution"), GROUPED_MATMUL}
"""Names of the operations whose operands autocast casts to bf16."""
VIEWS = names("t transpose permute view reshape unsqueeze squeeze")
"""Names of the operations that may lie between a weight and the product that reads it."""


def read_only_by_products(code: fx.GraphModule, count: int) -> list[bool]:
    """Return, for each of the first `count` arguments, True if only matrix products read it or its views."""
    arguments = [node for node in code.graph.nodes if node.op == "placeholder"][:count]
    return [bool(node.users) and _feeds_only_products(node) for node in arguments]


def _feeds_only_products(node: fx.Node) -> bool:
    return all(is_product(user) or (op_name(user) in VIEWS and _feeds_only_products(user)) for user in node.users)


def is_product(node: fx.Node) -> bool:
    return op_name(node) in PRODUCTS or node.target is multiply_by_stored_blocks


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


class WeightCopies:
    """The bf16 copies of one stage's weights; constructing them makes the stage's blocks read the copies."""

    def __init__(
        self,
        modules: Sequence[BlockModule],
        parameters: Mapping[str, nn.Parameter],
        codes: Mapping[str, fx.GraphModule],
        accumulator: GradientAccumulator,
    ) -> None:
        """`parameters` are the stage's, by the model's names; `codes` is the code that runs, by block type."""
        uses = Counter(name for module in modules for name in module.block.parameters)
        copies: dict[str, torch.Tensor] = {}
        for module in modules:
            names = module.block.parameters
            products_only = read_only_by_products(codes[module.block.block_type], len(names))
            for name, for_products in zip(names, products_only, strict=True):
                weight = parameters[name]
                # A weight that several blocks read (a tied embedding) is left to autocast, which adds the gradients of
                # all blocks in fp32 before it adds their sum to those of other micro-batches.
                if for_products and uses[name] == 1 and weight.dtype == torch.float32:
                    copies[name] = weight.detach().to(torch.bfloat16).requires_grad_(weight.requires_grad)
        self.copies = {parameters[name]: copy.detach() for name, copy in copies.items()}
        """The copy of each parameter that has one."""
        for module in modules:
            module.weight_copies = {name: copies[name] for name in module.block.parameters if name in copies}
        self._transfers = [
            GradientTransfer(
                [(copy, parameters[name]) for name, copy in module.weight_copies.items() if copy.requires_grad],
                accumulator,
            )
            for module in modules
        ]

    def keep_gradients(self) -> None:
        """Keep gradients in bf16, as the backward makes them, instead of adding them to others in fp32."""
        for weight in self.copies:
            weight.grad_dtype = torch.bfloat16

    @torch.no_grad()
    def refresh(self, copied: Mapping[nn.Parameter, int]) -> None:
        """Copy the weights' present values; call it before the first forward of each step.

        `copied` names weights whose copies the optimiser has written, with their version then: an operation that
        changes a weight in place, such as loading a checkpoint, gives it another.
        """
        stale = {weight: copy for weight, copy in self.copies.items() if copied.get(weight) != weight._version}
        if stale:
            torch._foreach_copy_([*stale.values()], [*stale])


class GradientTransfer:
    """Adds the gradients of one block's copies to its weights when the last of them has arrived."""

    def __init__(self, copies: Sequence[tuple[torch.Tensor, nn.Parameter]], accumulator: GradientAccumulator) -> None:
        self._weights = dict(copies)
        self._edges = [get_gradient_edge(copy).node for copy in self._weights]
        self._accumulator = accumulator
        self._arrived: list[torch.Tensor] = []
        self._expected = 0
        # A strong reference would make each copy hold itself through its hook, a cycle that Python cannot collect.
        transfer = weakref.ref(self)

        def on_gradient(copy: torch.Tensor) -> None:
            this = transfer()
            assert this is not None
            this._receive(copy)

        for copy in self._weights:
            copy.register_post_accumulate_grad_hook(on_gradient)

    def _receive(self, copy: torch.Tensor) -> None:
        if not self._arrived:  # autograd knows how many copies this backward will reach
            self._expected = sum(map(torch._C._will_engine_execute_node, self._edges))
        self._arrived.append(copy)
        if len(self._arrived) == self._expected:
            arrived, self._arrived = self._arrived, []
            gradients = [copy.grad for copy in arrived if copy.grad is not None]
            self._accumulator.add([self._weights[copy] for copy in arrived], gradients, _allocate)
            for copy in arrived:
                copy.grad = None


def _allocate(weights: Sequence[nn.Parameter]) -> None:
    for weight in weights:
        weight.grad = torch.empty_like(weight)
