"""The sparse weights of one rank, masked or block-sparse, and the moves of their patterns.

`MaskedWeights` are exact under every plan: weights are multiplied by their mask after each update and gradients before
it, on whatever shard a rank holds. The products then compute what they would without the absent blocks.
`BlockSparseWeights` have no absent blocks that could differ from zero. At the rare updates of a pattern, each rank
gathers the whole weight and computes the same new pattern from it, in either case.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod

import torch
import torch.distributed as dist
from torch import fx, nn

from workbench.capture import Block, Graph
from workbench.cost.sparse_matrices import products_with, sparse_matrices
from workbench.execution.blocks.rewriting import GraphRewriter
from workbench.execution.parallel.mesh import MeshCoordinate
from workbench.experiment import Experiment
from workbench.optimizers.parameters import WholeTensors, local
from workbench.sparsity import Dynamic, Static
from workbench.sparsity.kernels.index import BlockIndex, move
from workbench.sparsity.kernels.operators import block_sparse_linear
from workbench.sparsity.pattern import block_sums, expanded, initial, is_explored, is_present, moved, uniform

# Captured blocks that multiply by sparse weights without the absent blocks of these.
#
# A block-sparse parameter is compact: [stored blocks, block, block]. An index says where its blocks belong; it is a
# further buffer of each captured block that multiplies by the weight. The index changes in place when the pattern
# moves, so that compiled code and CUDA graphs stay valid.

INDEX = "_index."
"""First letters of the names of index buffers; the weight's name follows."""


def initial_pattern(
    sparsity: Static, seed: int, name: str, shape: tuple[int, int], device: torch.device
) -> torch.Tensor:
    """Return the pattern with which a weight begins, the same on every device."""
    return initial(shape, sparsity.block, sparsity.kept(prod(shape) // sparsity.block**2), f"{seed}/{name}", device)


@dataclass(frozen=True)
class BlockSparseParameters:
    """The parameters of one rank that are stored without their absent blocks, and where their blocks belong."""

    shapes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Shapes of all sparse weights of the model, whichever rank holds them."""
    indices: Mapping[str, BlockIndex] = field(default_factory=dict)
    """Index of each weight of this rank, by name; a pattern moves by overwriting its `data`."""

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """Indices by the names of the buffers that the rewritten blocks read."""
        return {INDEX + name: index.data for name, index in self.indices.items()}

    def rewritten(self, graph: Graph) -> Graph:
        """Return a graph of the model, for training or evaluation, whose blocks multiply by the stored blocks."""
        codes: dict[tuple[str, tuple[int, ...]], fx.GraphModule] = {}
        blocks = []
        for block in graph.blocks:
            positions = tuple(at for at, name in enumerate(block.parameters) if name in self.shapes)
            if not positions:
                blocks.append(block)
                continue
            key = (block.block_type, positions)
            if key not in codes:
                codes[key] = self._rewritten_code(block, positions)
            buffers = (*block.buffers, *(INDEX + block.parameters[at] for at in positions))
            block_type = f"{block.block_type}, block-sparse {positions}"
            blocks.append(replace(block, block_type=block_type, buffers=buffers, code=codes[key]))
        return replace(graph, blocks=tuple(blocks))

    def _rewritten_code(self, block: Block, positions: tuple[int, ...]) -> fx.GraphModule:
        """Return the block's code with an index for each weight at `positions` after its buffers."""
        rewriter = GraphRewriter(block.code)
        copies = rewriter.copies
        products = {node: (product, name) for node, product, name in products_with(block, self.shapes)}
        indices: dict[str, fx.Node] = {}
        arguments = [node for node in block.code.graph.nodes if node.op == "placeholder"]
        last_buffer = arguments[len(block.parameters) + len(block.buffers) - 1]

        def rule(node: fx.Node) -> fx.Node:
            if node not in products:
                return rewriter.copy(node)
            product, name = products[node]
            value, weight = copies[product.value], copies[product.weight]
            bias = None if product.bias is None else copies[product.bias]
            rows, cols = self.shapes[name]
            return rewriter.call(
                multiply_by_stored_blocks, value, weight, indices[name], bias, rows, cols, product.transposed
            )

        for node in block.code.graph.nodes:
            copies[node] = rule(node)
            copies[node].meta = dict(node.meta)
            if node is last_buffer:
                for number, position in enumerate(positions):
                    indices[block.parameters[position]] = rewriter.graph.placeholder(f"index_{number}")
        return rewriter.finish()


DENSE = BlockSparseParameters()
"""No parameters: all are stored whole."""


def multiply_by_stored_blocks(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    index: torch.Tensor,
    bias: torch.Tensor | None,
    rows: int,
    cols: int,
    transposed: bool,
) -> torch.Tensor:
    """Multiply by a compact weight [rows, cols], as the linear layer or, transposed, the `addmm` that it replaces."""
    layout = BlockIndex(rows, cols, weight.shape[1], weight.shape[0], index)
    return block_sparse_linear(hidden, weight, layout, bias, transposed)


# Patterns and their moves

BLOCKS_TOGETHER = 2**22
"""Largest number of blocks of several weights whose patterns move together: 160 MB of scores and hashes on a CPU."""


class SparseWeights(ABC):
    """The patterns of this rank's sparse weights, and their moves.

    All ranks of the data- and tensor-parallel axes must call a method in the same order.
    """

    def __init__(
        self,
        experiment: Experiment,
        graph: Graph,
        parameters: Mapping[str, nn.Parameter],
        whole: WholeTensors,
        coordinate: MeshCoordinate,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        assert experiment.sparsity is not None
        self.sparsity: Static = experiment.sparsity
        self._seed, self._steps = experiment.seed, experiment.total_steps
        self._whole, self._coordinate, self._optimizer = whole, coordinate, optimizer
        shapes = sparse_matrices(graph, self.sparsity)
        self.names = tuple(shapes)
        """Names of all sparse weights of the model, in its order."""
        self._parameters = {name: parameters[name] for name in shapes if name in parameters}
        self._updates = {step: number for number, step in enumerate(self.sparsity.update_steps(self._steps))}
        self._moved = dict.fromkeys(self._parameters, 0)
        self._growth: dict[str, torch.Tensor] = {}
        self._masks: dict[str, torch.Tensor] = {}
        """Mask of each weight whose absent blocks are stored, as this rank holds it."""
        self.patterns: dict[str, torch.Tensor] = {}
        """Pattern of each whole weight of this rank; a loaded checkpoint overwrites it in place."""
        for name, parameter in self._parameters.items():
            self.patterns[name] = initial_pattern(self.sparsity, self._seed, name, shapes[name], parameter.device)
        self.restore_patterns()
        self.mask_weights()
        if self.sparsity.rescaled:
            for name, pattern in self.patterns.items():
                share = self.sparsity.kept(pattern.numel()) / pattern.numel()
                # A sum over `share` of the inputs then has the variance that the dense weight gives it.
                local(self._parameters[name].detach()).mul_(share**-0.5)

    @abstractmethod
    def restore_patterns(self) -> None:
        """Follow patterns that a checkpoint has overwritten, before weights and optimiser state are read from it."""

    @torch.no_grad()
    def mask_weights(self) -> None:
        """Set the weights of absent blocks to zero, if they are stored."""
        for name, mask in self._masks.items():
            local(self._parameters[name].detach()).mul_(mask)

    @torch.no_grad()
    def mask_gradients(self, step: int) -> None:
        """Set the gradients of absent blocks to zero, if they are stored; `step` counts from 0.

        Also compute the sizes of the gradients before, if blocks are to regrow after this step by them.
        """
        if step + 1 in self._updates and isinstance(self.sparsity, Dynamic) and self.sparsity.regrow == "gradient":
            self._growth = {name: self._sizes(name, parameter.grad) for name, parameter in self._parameters.items()}
        for name, mask in self._masks.items():
            gradient = self._parameters[name].grad
            if gradient is not None:
                local(gradient).mul_(mask)

    @abstractmethod
    def _follow(self, name: str, parameter: nn.Parameter, present_RC: torch.Tensor, stayed_RC: torch.Tensor) -> None:
        """Let a weight and its optimiser state follow a pattern that has just moved; the regrown begin at zero."""

    def is_due(self, step: int) -> bool:
        """Return True if the pattern moves after the update of `step`, which counts from 0."""
        return step + 1 in self._updates

    @torch.no_grad()
    def move(self, step: int) -> None:
        """Prune and regrow blocks of every weight; the regrown begin at zero, without optimiser state."""
        assert isinstance(self.sparsity, Dynamic)
        ratio = self.sparsity.ratio(step + 1, self._steps)
        if self._coordinate.data_mesh.device_type == "cuda":
            torch.cuda.synchronize()  # offloaded moments may still be on their way to the host
        for names in self._of_one_shape(self.patterns):
            patterns = torch.stack([self.patterns[name] for name in names])
            sizes = torch.stack([self._sizes(name, self._parameters[name]) for name in names])
            if self._growth:
                growth = torch.stack([self._growth.pop(name) for name in names])
            else:
                keys = [f"{self._seed}/{name}/{self._updates[step + 1]}" for name in names]
                growth = uniform(keys, patterns.shape[1:], patterns.device)
            result = moved(patterns, sizes, growth, round(ratio * int(is_present(patterns[0]).sum())))
            for name, pattern, stayed in zip(names, result.patterns, result.stayed, strict=True):
                self.patterns[name].copy_(pattern)
                self._moved[name] = result.moved
                self._follow(name, self._parameters[name], is_present(pattern), stayed)

    def counts(self, owned: Collection[str]) -> dict[str, int]:
        """Return the numbers of blocks, summed over the sparse weights of the whole model (a collective of all ranks).

        `explored` are or once were `present`; the last update pruned as many as it `moved` and let them regrow. `owned`
        are the weights that this pipeline rank counts: other ranks may hold a tied weight too.
        """
        total = torch.zeros(4, dtype=torch.int64, device=self._coordinate.data_mesh.device_type)
        if self._coordinate.data_rank == self._coordinate.tensor_rank == 0:
            for names in self._of_one_shape(owned):
                patterns = torch.stack([self.patterns[name] for name in names])
                total[0] += patterns.numel()
                total[1] += is_present(patterns).sum()
                total[2] += is_explored(patterns).sum()
                total[3] += sum(self._moved[name] for name in names)
        dist.all_reduce(total)
        return dict(zip(("blocks", "present", "explored", "moved"), total.tolist(), strict=True))

    def _of_one_shape(self, chosen: Collection[str]) -> Iterator[list[str]]:
        """Yield the names of weights of one shape, at most `BLOCKS_TOGETHER` blocks at a time."""
        shapes: dict[torch.Size, list[str]] = {}
        for name, pattern in self.patterns.items():
            if name in chosen:
                shapes.setdefault(pattern.shape, []).append(name)
        for shape, names in shapes.items():
            number = max(1, BLOCKS_TOGETHER // shape.numel())
            yield from (names[start : start + number] for start in range(0, len(names), number))

    def _state(self, parameter: nn.Parameter) -> Iterator[torch.Tensor]:
        """Yield the optimiser state that has one value for each element of a parameter, perhaps on the host."""
        for value in self._optimizer.state.get(parameter, {}).values():
            if value.shape == parameter.shape:
                yield value

    def _sizes(self, name: str, tensor: torch.Tensor | None) -> torch.Tensor:
        """Return the sum of absolute values of each block of the whole of a tensor that is stored like the weight.

        Ranks that compute the same tensor each for itself may differ in the last bits, so one decides for all.
        """
        if tensor is None:
            return torch.zeros(self.patterns[name].shape, device=self.patterns[name].device)
        sizes = block_sums(self._whole.all_gathered(name, tensor.detach()), self.sparsity.block)
        if self._coordinate.tensor > 1:
            dist.broadcast(sizes, group=self._coordinate.tensor_group, group_src=0)
        return sizes


class MaskedWeights(SparseWeights):
    """Dense weights whose absent blocks are kept at zero."""

    @torch.no_grad()
    def restore_patterns(self) -> None:
        self._masks = {name: self._mask(name, is_present(pattern)) for name, pattern in self.patterns.items()}

    def _follow(self, name: str, parameter: nn.Parameter, present_RC: torch.Tensor, stayed_RC: torch.Tensor) -> None:
        stayed = self._mask(name, stayed_RC)
        for value in self._state(parameter):
            shard = local(value)
            shard.mul_(stayed.to(shard.device))
        self._masks[name] = self._mask(name, present_RC)
        local(parameter.detach()).mul_(self._masks[name])

    def _mask(self, name: str, blocks_RC: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of a mask of the weight, True where its block is."""
        mask = expanded(blocks_RC, self.sparsity.block)
        return self._whole.as_stored(name, mask, self._parameters[name]).contiguous()


class BlockSparseWeights(SparseWeights):
    """Weights without absent blocks: these are neither stored nor multiplied, and have neither gradient nor state."""

    def restore_patterns(self) -> None:
        for name, pattern in self.patterns.items():
            new = BlockIndex.from_mask(is_present(pattern), self.sparsity.block)
            self._whole.indices[name].data.copy_(new.data)

    def _follow(self, name: str, parameter: nn.Parameter, present_RC: torch.Tensor, stayed_RC: torch.Tensor) -> None:
        del stayed_RC
        old = self._whole.indices[name]
        new = BlockIndex.from_mask(present_RC, self.sparsity.block)
        for value in (parameter.detach(), *self._state(parameter)):
            value.copy_(move(value.to(old.data.device), old, new))
        old.data.copy_(new.data)  # what compiled code and CUDA graphs read
