"""A captured block as a module that runs: its weights, their bf16 copies, its seeds and activation checkpointing."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import fx, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import workbench.capture.export.rewrites
import workbench.sparsity.kernels.operators  # noqa: F401  (both register their operations)
from workbench.capture import Block, operations
from workbench.capture.blocks.recomputation import supported_mode
from workbench.capture.blocks.tensor_parallel import BlockSharding
from workbench.execution.blocks.cuda_graphs import BlockInputs
from workbench.execution.blocks.loss_runners import LabelledRows, Runner
from workbench.execution.blocks.rewriting import GraphRewriter, has_active_dropout
from workbench.execution.blocks.sparse_weights import multiply_by_stored_blocks
from workbench.execution.blocks.step_context import StepContext, Values
from workbench.execution.blocks.tensor_parallel import parallel_embedding
from workbench.execution.gradients import GradientAccumulator


@dataclass(frozen=True)
class BlockProgram:
    """The code of one block for training or for evaluation, and how it is run."""

    block: Block
    run: Runner
    recompute: str = "none"
    """Activation checkpointing that the plan asks for."""
    division: BlockSharding = field(default_factory=BlockSharding)
    compiled: bool = False
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Tensors read in place of the module's buffers of these names: evaluation has unnamed constants of its own."""
    copied: frozenset[str] | None = None
    """Parameters whose bf16 copies the code may read; None for all that have copies."""

    @property
    def mode(self) -> str:
        """Activation checkpointing that the code supports."""
        return supported_mode(self.block.code, self.recompute)


class BlockModule(nn.Module):
    """One block: `forward(shared, values) -> sends`, with values in the order `Block.receives`, `Block.inputs`.

    `run` receives the seeds it needs after all other arguments. If the tensor-parallel part of a block draws random
    numbers, its devices seed their generators differently, and `run` is given the seed they have in common, for what
    they must draw alike. A compiled block with dropout is then given its device's seed
    (`workbench.execution.blocks.rewriting`).
    """

    def __init__(
        self,
        program: BlockProgram,
        parameters: Mapping[str, nn.Parameter],
        buffers: Mapping[str, torch.Tensor],
        context: StepContext,
    ) -> None:
        """`parameters` are those that only this block uses; it borrows the others that it reads from its stage."""
        super().__init__()
        block = program.block
        self._context = context
        self.weight_copies: Mapping[str, torch.Tensor] = {}
        """bf16 copies that are read in place of parameters (`WeightCopies`)."""
        self.use(program)
        self._static: tuple[list[torch.Tensor], list[nn.Parameter | None], list[torch.Tensor]] | None = None
        """Arguments of a captured block that are the same in every step: weights, their owners, buffers."""
        self.exclusive_parameters = {name: f"p{i}" for i, name in enumerate(block.parameters) if name in parameters}
        """The model's names of the block's own parameters -> attributes of this module."""
        self.borrowed_parameters = tuple(name for name in block.parameters if name not in parameters)
        """The model's names of the stage's shared parameters that the block reads."""
        self.model_buffers = {name: f"b{i}" for i, name in enumerate(block.buffers)}
        """The model's names of the block's buffers -> attributes of this module."""
        for name, attribute in self.exclusive_parameters.items():
            self.register_parameter(attribute, parameters[name])
        for name, attribute in self.model_buffers.items():
            self.register_buffer(attribute, buffers[name], persistent=False)

    def use(self, program: BlockProgram) -> None:
        """Run this code from now on, over the same parameters and buffers."""
        self.program, self.block = program, program.block
        self.recompute = "none" if program.compiled else program.mode
        """Checkpointing around the code; compiled code has its recomputation inside."""
        is_replayable_code = program.compiled and operations.is_replayable(program.block.code, program.mode)
        self.is_capturable = is_replayable_code and not isinstance(program.run, LabelledRows)
        """True if every step launches the same kernels, so that a CUDA graph can replay them."""
        self._is_random = any(operations.is_random(node) for node in program.block.code.graph.nodes)
        self._has_device_seed = program.division.random
        self._hashes_dropout = program.compiled and has_active_dropout(program.block.code)

    def forward(self, shared: Mapping[str, torch.Tensor], values: Values) -> Values:
        context = self._context
        # A denominator is one number for the step, or a vector with one for each micro-batch.
        each = (context.loss_denominators[index] for index in self.block.counts)
        denominators = tuple(value[context.microbatch] if value.ndim else value for value in each)
        seed = context.block_seed(self.block.index) if self._is_random else None
        run, loss = self.program.run, self.selecting_loss
        if loss is not None and loss in context.label_counts:
            # Chosen now: when the block is recomputed, the context names another micro-batch.
            run = cast(LabelledRows, run).for_labels(context.label_counts[loss][context.microbatch])
        if context.cuda_graphs is not None and self.is_capturable:
            if self._static is None:  # nothing replaces the parameters of a stage that uses CUDA graphs
                attributes = [self.exclusive_parameters.get(name) for name in self.block.parameters]
                owners = [None if attribute is None else getattr(self, attribute) for attribute in attributes]
                self._static = self._read_weights(shared), owners, self._read_buffers()
            inputs = BlockInputs(*self._static, (*values, *denominators), tuple(self._seeds(seed)))
            return context.cuda_graphs.forward(self.block.index, context.microbatch, run, inputs)
        arguments: tuple[Any, ...] = (run, seed, shared, *values, *denominators)
        if self.recompute == "none":
            return cast(Values, self._compute(*arguments))
        return cast(Values, checkpointed(self.recompute, self._compute, *arguments))

    @property
    def selecting_loss(self) -> int | None:
        """The mean loss (an index into `Graph.label_counts`) by whose labels the block selects rows, or None."""
        run = self.program.run
        return self.block.counts[run.part.count] if isinstance(run, LabelledRows) else None

    def _compute(self, run: Runner, seed: int | None, shared: Mapping[str, torch.Tensor], *values: torch.Tensor) -> Any:
        device = self._context.device
        seeds = (torch.full((), number, dtype=torch.int64, device=device) for number in self._seeds(seed))
        return run(*self._read_weights(shared), *self._read_buffers(), *values, *seeds)

    def _read_weights(self, shared: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        own = {name: getattr(self, attribute) for name, attribute in self.exclusive_parameters.items()}
        copied = self.program.copied
        copies = {name: copy for name, copy in self.weight_copies.items() if copied is None or name in copied}
        weights = {**shared, **own, **copies}
        return [weights[name] for name in self.block.parameters]

    def _read_buffers(self) -> list[torch.Tensor]:
        constants = self.program.constants
        return [
            constants[name] if name in constants else getattr(self, self.model_buffers[name])
            for name in self.block.buffers
        ]

    def _seeds(self, seed: int | None) -> Iterator[int]:
        """Seed this device's generator and yield the seeds for `run`; do nothing for a deterministic block."""
        if seed is None:
            return
        context = self._context
        own = context.device_seed(seed) if self._has_device_seed else seed
        on_gpu, index = context.device.type == "cuda", context.device.index or 0
        (torch.cuda.default_generators[index] if on_gpu else torch.default_generator).manual_seed(own)
        if self._has_device_seed:
            yield seed
        if self._hashes_dropout:
            yield own


# Activation checkpointing: store everything, nothing, or only the results of expensive operations.
#
# Selective checkpointing stores the results of matrix products, convolutions and attention, and recomputes the rest
# (norms, activations, dropout). The idea is from Korthikanti et al., arXiv:2205.05198; here, as in torch, the choice is
# made per operation.

aten = torch.ops.aten
_PRODUCTS = operations.overloads("mm addmm bmm baddbmm convolution") | {
    torch.ops.workbench.grouped_mm.default,
    torch.ops.workbench.block_sparse_product.default,
    torch.ops._c10d_functional.all_reduce.default,
    torch.ops._c10d_functional.wait_tensor.default,
}
"""Matrix products, and the all-reduces that sum partial products over tensor-parallel devices."""
_ATTENTION: dict[Any, int] = {
    aten._scaled_dot_product_flash_attention.default: 3,
    aten._scaled_dot_product_flash_attention_for_cpu.default: 3,
    aten._scaled_dot_product_efficient_attention.default: 5,
    aten._scaled_dot_product_cudnn_attention.default: 5,
}
"""Attention kernels, with the position of the dropout rate among their arguments."""


def checkpointed(mode: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return `function(*arguments)` and recompute its intermediate results in the backward.

    `mode` is "full" or "selective". `function` must seed its own random numbers: no generator state is saved.
    """
    options: dict[str, Any] = {"context_fn": _selective_contexts} if mode == "selective" else {}
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False, **options)


def checkpointed_when_compiled(mode: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what `checkpointed` returns, inside compiled code: the compiler saves and replays the random numbers."""
    if mode == "full":
        return checkpoint(function, *arguments, use_reentrant=False)
    return checkpoint(function, *arguments, use_reentrant=False, context_fn=_selective_contexts_when_compiled)


def _policy(replays_random: bool, _context: Any, operation: Any, *arguments: Any, **_: Any) -> CheckpointPolicy:
    """Decide whether an operation's results are stored.

    In eager mode, attention with dropout is recomputed: if it were skipped, the later draws of the recomputation would
    differ from those of the forward.
    """
    if operation in _PRODUCTS:
        return CheckpointPolicy.MUST_SAVE
    if operation in _ATTENTION:
        position = _ATTENTION[operation]
        rate = arguments[position] if len(arguments) > position else 0.0
        if replays_random or not rate:
            return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


_selective_contexts = functools.partial(create_selective_checkpoint_contexts, functools.partial(_policy, False))
_selective_contexts_when_compiled = functools.partial(
    create_selective_checkpoint_contexts, functools.partial(_policy, True)
)


# Weights in bf16: copies made once per step, and blocks whose weights arrive in bf16.
#
# FSDP2 all-gathers weights in bf16. Autocast casts only the operands of matrix products: norms, added biases and
# embedding tables are read in fp32. A block with bf16 weights alone would continue in bf16 wherever no operation forces
# fp32, for example in the whole residual stream of a GPT or a ViT. The same model would then train with other numbers
# under ZeRO 1 to 3, and each layer would be compiled for two input types. Therefore weights that only matrix products
# read stay bf16, and the others are cast back to fp32; rows of an embedding table are cast after the lookup
# (`match_autocast_types`).
#
# Stages held by neither FSDP2 nor `DistributedDataParallel` have copies (`WeightCopies`). Plain autocast casts the
# weights of matrix products in every micro-batch, and compiled code stores each cast for its backward: 2 bytes per
# weight for each micro-batch in flight. Here the blocks read bf16 copies instead, and the copies' gradients are added
# to those of the fp32 weights as soon as all of a block have arrived. The numbers equal autocast's to the last bit.
# Where a step makes each gradient once and the optimiser reads bf16, gradients stay as they are
# (`WeightCopies.keep_gradients`).

PRODUCTS = {
    *operations.names("linear matmul mm bmm addmm baddbmm conv1d conv2d conv3d convolution"),
    operations.GROUPED_MATMUL,
}
"""Names of the operations whose operands autocast casts to bf16."""
VIEWS = operations.names("t transpose permute view reshape unsqueeze squeeze")
"""Names of the operations that may lie between a weight and the product that reads it."""


def read_only_by_products(code: fx.GraphModule, count: int) -> list[bool]:
    """Return, for each of the first `count` arguments, True if only matrix products read it or its views."""
    arguments = [node for node in code.graph.nodes if node.op == "placeholder"][:count]
    return [bool(node.users) and _feeds_only_products(node) for node in arguments]


def _feeds_only_products(node: fx.Node) -> bool:
    return all(
        is_product(user) or (operations.op_name(user) in VIEWS and _feeds_only_products(user)) for user in node.users
    )


def is_product(node: fx.Node) -> bool:
    return operations.op_name(node) in PRODUCTS or node.target is multiply_by_stored_blocks


def match_autocast_types(code: fx.GraphModule, num_weights: int) -> fx.GraphModule:
    """Rewrite `code` so that its first `num_weights` arguments may be bf16 although it was captured with fp32."""
    weights = code.graph.find_nodes(op="placeholder")[:num_weights]
    for_products = read_only_by_products(code, num_weights)
    others = (weight for weight, only in zip(weights, for_products, strict=True) if not only)
    fp32 = {weight for weight in others if operations.dtype_of(weight) == torch.float32}
    if not fp32:
        return code
    rewriter = GraphRewriter(code)
    casts: dict[fx.Node, fx.Node] = {}

    def operand(source: fx.Node) -> fx.Node:
        if source in fp32 and source not in casts:
            casts[source] = rewriter.call(torch.ops.aten.to.dtype, rewriter.copies[source], torch.float32)
        return casts.get(source, rewriter.copies[source])

    def rule(node: fx.Node) -> fx.Node:
        looks_up = node.target in (operations.EMBEDDING, parallel_embedding) and node.args[0] in fp32
        copied = rewriter.copy(node, None if looks_up or is_product(node) else operand)
        return rewriter.call(torch.ops.aten.to.dtype, copied, torch.float32) if looks_up else copied

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
            block = module.block
            products_only = read_only_by_products(codes[block.block_type], len(block.parameters))
            for name, for_products in zip(block.parameters, products_only, strict=True):
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
            # Autograd knows how many copies this backward will reach, and says so only while it runs (private of torch
            # 2.11 to 2.13).
            if not this._arrived:
                this._expected = sum(map(torch._C._will_engine_execute_node, this._edges))
            this._arrived.append(copy)
            if len(this._arrived) == this._expected:
                arrived, this._arrived = this._arrived, []
                gradients = [each.grad for each in arrived if each.grad is not None]
                this._accumulator.add([this._weights[each] for each in arrived], gradients)
                for each in arrived:
                    each.grad = None

        for copy in self._weights:
            copy.register_post_accumulate_grad_hook(on_gradient)
