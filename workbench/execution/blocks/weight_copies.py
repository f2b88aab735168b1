"""bf16 copies of weights, made once a step: for stages whose weights neither FSDP2 nor `DistributedDataParallel` holds.

Under autocast every micro-batch casts the weights of its matrix products, and what is compiled keeps the copies for its
backward: 2 bytes a weight for each micro-batch in flight. Here blocks are given bf16 copies; their gradients are added
to those of the fp32 weights as soon as a block's are there. The numbers are autocast's, to the last bit. (9 layers of
BERT-1920 on an H200, 4 micro-batches of 16 × 512 tokens: 188.5 → 185.2 ms a step.)
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import fx, nn
from torch.autograd.graph import get_gradient_edge

from workbench.execution.blocks.gradient_accumulation import Sums
from workbench.execution.parallel.stage import BlockModule, StageModule

PRODUCTS = frozenset(
    {
        *("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "grouped_mm"),
        *("conv1d", "conv2d", "conv3d", "convolution"),
    }
)
"""Operations whose operands autocast casts to bf16."""
VIEWS = frozenset({"t", "transpose", "permute", "view", "reshape", "unsqueeze", "squeeze"})


def read_by_products(code: fx.GraphModule, count: int) -> list[bool]:
    """Of each of the first `count` arguments: do matrix products read it, or views of it, and nothing else?"""
    arguments = [node for node in code.graph.nodes if node.op == "placeholder"][:count]
    return [bool(node.users) and _only_products(node) for node in arguments]


def _only_products(node: fx.Node) -> bool:
    return all(is_product(user) or (_name(user) in VIEWS and _only_products(user)) for user in node.users)


def is_product(node: fx.Node) -> bool:
    return _name(node) in PRODUCTS


def _name(node: fx.Node) -> str:
    return node.target._opname if isinstance(node.target, torch._ops.OpOverload) else ""


class Halves:
    """The bf16 copies of one stage's weights, which its blocks read from then on."""

    def __init__(self, stage: StageModule, codes: Mapping[str, fx.GraphModule], sums: Sums) -> None:
        """`codes`: what runs, by kind of block."""
        parameters = stage.named()
        read = {module: _read(module, codes) for module in stage.block_modules()}
        uses = Counter(name for module in read for name in module.block.parameters)
        # What several blocks read (a tied embedding) gets gradients from all of them, which autocast adds up in fp32
        # before it adds the sum to those of other micro-batches.
        weights = {
            name: parameters[name]
            for names in read.values()
            for name in names
            if uses[name] == 1 and parameters[name].dtype == torch.float32
        }
        copies = {name: _copy(weight) for name, weight in weights.items()}
        self._weights: list[torch.Tensor] = list(weights.values())
        self._copies = [copy.detach() for copy in copies.values()]
        for module, names in read.items():
            module.halves = {name: copies[name] for name in names if name in copies}
        self._handovers = [
            Handover([(copy, weights[name]) for name, copy in module.halves.items() if copy.requires_grad], sums)
            for module in read
        ]

    @torch.no_grad()
    def refresh(self) -> None:
        """After the weights have changed: before a step's first forward."""
        if self._copies:
            torch._foreach_copy_(self._copies, self._weights)


def _read(module: BlockModule, codes: Mapping[str, fx.GraphModule]) -> list[str]:
    """The block's parameters that only matrix products read."""
    names = module.block.parameters
    found = read_by_products(codes[module.block.block_type], len(names))
    return [name for name, products in zip(names, found, strict=True) if products]


def _copy(weight: nn.Parameter) -> torch.Tensor:
    """A leaf."""
    return weight.detach().to(torch.bfloat16).requires_grad_(weight.requires_grad)


class Handover:
    """Gives the gradients of one block's copies to its weights when the last of them has come."""

    def __init__(self, copies: Sequence[tuple[torch.Tensor, nn.Parameter]], sums: Sums) -> None:
        self._weights = dict(copies)
        self._ends = [get_gradient_edge(copy).node for copy in self._weights]
        self._sums = sums
        self._come: list[torch.Tensor] = []
        self._expected = 0
        handover = weakref.ref(self)  # otherwise copies would hold themselves, in a way that Python cannot see through

        def arrived(copy: torch.Tensor) -> None:
            found = handover()
            assert found is not None
            found._arrived(copy)

        for copy in self._weights:
            copy.register_post_accumulate_grad_hook(arrived)

    def _arrived(self, copy: torch.Tensor) -> None:
        if not self._come:  # how many this backward will reach, autograd knows
            self._expected = sum(map(torch._C._will_engine_execute_node, self._ends))
        self._come.append(copy)
        if len(self._come) == self._expected:
            come, self._come = self._come, []
            gradients = [copy.grad for copy in come if copy.grad is not None]
            self._sums.give([self._weights[copy] for copy in come], gradients, _begin)
            for copy in come:
                copy.grad = None


def _begin(weights: Sequence[nn.Parameter]) -> None:
    for weight in weights:
        weight.grad = torch.empty_like(weight)
