"""From a captured `Graph` to its `Profile`: each kind of block is priced once, on the meta device.

The only module of this room, with `ops`, that imports torch at its top.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.experimental import _config as symbolic_sizes
from torch.utils._pytree import tree_flatten

from workbench.capture.dataflow import is_replayable
from workbench.capture.graph import Block, Graph
from workbench.capture.labelled import labelled_part
from workbench.capture.tensor_parallel import Division, Sharding, plan_tensor
from workbench.capture.writes import users_line
from workbench.cost.device import Device
from workbench.cost.operations import META, Casts, Ran, Settings, identity, op_name, run, storage_bytes
from workbench.cost.profile import (
    ACCUMULATE_BYTES,
    ATTENTION,
    GEMM,
    RECOMPUTE,
    STREAM,
    BlockCost,
    BlockTypeCost,
    DividedCosts,
    Kernel,
    Profile,
)
from workbench.errors import CaptureError
from workbench.tensors import TensorSpec

TENSOR_DEGREES = (2, 4, 8)
"""Tensor-parallel degrees that are priced: within a node."""
UNDIVIDED = 0.2
"""Share of a model's arithmetic that may stay whole on every device: with more, the degree is not offered."""
CAST_BYTES = 6
"""Per weight element: read fp32 and write bf16, or back."""


def profile_graph(
    graph: Graph,
    device: Device,
    precision: str,
    *,
    compiled: bool,
    labelled_share: float = 1.0,
    deterministic: bool = False,
) -> Profile:
    """What each block of a captured model costs under `precision` (`fp32`, or `bf16` autocast over fp32 weights).

    `device` says which kernels there are (`cuda` or `cpu`), not how fast: `Profile.at` prices any device of
    that kind. `compiled`: blocks run through torch.compile, which fuses operations bound by memory. `labelled_share`:
    of the labels, how many are not ignored on average; a head that needs only their rows is priced for these.
    `deterministic`: what measurements of it must be, see `Profile`.
    """
    settings = Settings(precision, device.type, compiled)
    dtypes = {name: getattr(torch, spec.dtype) for name, spec in graph.batch.items()}
    kinds: dict[tuple[object, ...], int] = {}
    costs: list[BlockTypeCost] = []
    results: list[tuple[torch.dtype, ...]] = []
    walks: list[tuple[int, _Walk]] = []
    blocks = []
    seen: set[str] = set()
    for index, block in enumerate(graph.blocks):
        received = tuple(dtypes[name] for name in block.receives)
        key = (received, *graph.variant(block))
        if key not in kinds:
            kinds[key] = len(costs)
            # A selection by a mask is priced as if it kept everything.
            with symbolic_sizes.patch(meta_nonzero_assume_all_nonzero=True):  # type: ignore[attr-defined]
                walk = _Walk(graph, block, received, settings, _Rows.of(block, labelled_share))
            walks.append((index, walk))
            costs.append(walk.cost())
            results.append(walk.sent)
        dtypes |= dict(zip(block.sends, results[kinds[key]], strict=True))
        kept = set(block.receives) if graph.learned & set(block.sends) else set()  # else it has no backward
        fresh = [graph.values[name] for name in block.receives if name in kept - seen]
        seen |= kept
        blocks.append(BlockCost(block.name, kinds[key], block.parameters, _per_sample(fresh, graph)))
    cuts = range(len(graph.blocks) + 1)
    return Profile(
        model=graph.model,
        signature=graph.signature,
        precision=precision,
        device_type=device.type,
        compiled=compiled,
        block_types=tuple(costs),
        blocks=tuple(blocks),
        parameters={name: spec.numel for name, spec in graph.parameters.items()},
        frozen=graph.frozen,
        crossing_bytes=tuple(_per_sample((graph.values[name] for name in graph.crossing(cut)), graph) for cut in cuts),
        divided=_divided(graph, walks, costs),
        labelled_share=labelled_share,
        deterministic=deterministic,
        code=hashlib.sha256("".join(block.block_type for block in graph.blocks).encode()).hexdigest()[:16],
    )


def _divided(
    graph: Graph, walks: Sequence[tuple[int, _Walk]], whole: Sequence[BlockTypeCost]
) -> dict[int, DividedCosts]:
    """What one device computes and holds for each degree that divides most of the model's arithmetic."""
    found = {}
    flops = _nominal_flops(graph, walks, whole)
    for degree in TENSOR_DEGREES:
        division = plan_tensor(graph, degree)
        for index, walk in walks:
            walk.divide(division.blocks[index], degree)
        kinds = tuple(walk.cost() for _, walk in walks)
        if _product_flops(graph, walks, kinds) <= flops * (1 / degree + UNDIVIDED):
            sizes = {name: _part(spec, division.parameters.get(name)) for name, spec in graph.parameters.items()}
            found[degree] = DividedCosts(kinds, sizes)
    return found


def _nominal_flops(graph: Graph, walks: Sequence[tuple[int, _Walk]], kinds: Sequence[BlockTypeCost]) -> float:
    """Forward FLOPs of the whole model for one sample, labelled or not."""
    blocks = Counter(block.block_type for block in graph.blocks)
    pairs = zip(walks, kinds, strict=True)
    return sum(kind.model_flops * blocks[graph.blocks[index].block_type] for (index, _), kind in pairs)


def _product_flops(graph: Graph, walks: Sequence[tuple[int, _Walk]], kinds: Sequence[BlockTypeCost]) -> float:
    """Forward FLOPs of one device for one sample."""
    blocks = Counter(block.block_type for block in graph.blocks)
    each = (sum(kernel.flops for kernel in kind.forward) for kind in kinds)
    return sum(flops * blocks[graph.blocks[index].block_type] for (index, _), flops in zip(walks, each, strict=True))


def _part(spec: TensorSpec, sharding: Sharding | None) -> int:
    """Elements of a parameter on the device that holds most of it."""
    if sharding is None:
        return spec.numel
    return spec.numel // spec.shape[sharding.dim] * sharding.size(0)


def _per_sample(specs: Iterable[TensorSpec], graph: Graph) -> float:
    return sum(spec.nbytes for spec in specs) / graph.micro_batch


_DRAWN = frozenset({"dropout", "native_dropout"})
"""Operations whose own work, a mask, depends on none of their inputs."""


@dataclass(frozen=True)
class _Rows:
    """The operations of a block that run over labelled rows only, and the share of the rows that is."""

    operations: frozenset[str] = frozenset()
    share: float = 1.0

    @staticmethod
    def of(block: Block, labelled_share: float) -> _Rows:
        part = labelled_part(block)
        kept = None if part is None else part.kept(math.ceil(labelled_share * part.rows))
        return _Rows() if part is None or kept is None else _Rows(frozenset(part.reads), kept / part.rows)


@dataclass
class _Value:
    """One piece of memory inside a block."""

    tensor: torch.Tensor
    born: int
    last_use: int
    batched: bool
    weight: bool = False
    gradient: bool = False
    first_saved: int | None = None
    share: float = 1.0
    """What one device of a tensor-parallel axis, or a selection of rows, holds of it."""

    @property
    def nbytes(self) -> float:
        return storage_bytes(self.tensor) * self.share


@dataclass
class _Group:
    """Operations bound by memory that run as one kernel (one each, unless compiled)."""

    inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)
    saved: dict[int, torch.Tensor] = field(default_factory=dict)
    steps: set[int] = field(default_factory=set)
    differentiable: bool = False
    gathered: float = 0.0
    """Elements of embedding tables that it reads rows of: their gradients are dense."""


class _Walk:
    """One block, operation by operation, on meta tensors."""

    def __init__(
        self, graph: Graph, block: Block, received: tuple[torch.dtype, ...], settings: Settings, rows: _Rows
    ) -> None:
        self._samples = graph.micro_batch
        self._model = graph.model
        self._kind = block.block_type
        self._block = block
        self._settings = settings
        self._casts = Casts(reuse=settings.compiled)
        self._values: dict[int, _Value] = {}
        self._uses: dict[int, set[int]] = defaultdict(set)
        self._gradients: set[int] = set()
        self._weights: set[int] = set()
        self._steps: list[tuple[str, Ran]] = []
        self.sent: tuple[torch.dtype, ...] = ()
        self._division, self._degree = Division(), 1
        self._of_node: dict[str, list[torch.Tensor]] = {}
        self._rows = rows
        self._run(graph, block, received)
        self._again = self._needed_again()
        self.divide(Division(), 1)

    def divide(self, division: Division, degree: int) -> None:
        """From now on, `cost` is that of one device of a tensor-parallel axis."""
        self._division, self._degree = division, degree
        part = 1 / degree
        rows = self._rows if not division.divided else _Rows()  # a divided head runs over all of them
        for value in self._values.values():
            value.share = 1.0
        for position, (key, value) in enumerate(self._weights_in_order()):
            if position in division.parameters:
                self._values[key].share = value.share = part
        for step, (_, ran) in enumerate(self._steps):
            selects = ran.node in rows.operations
            ran.share = part if ran.node in division.divided else rows.share if selects else 1.0
            own = [
                tensor
                for tensor in _tensors(ran.outputs)
                if ran.node in division.sharded or (selects and self._values[identity(tensor)].born == step)
            ]
            shares = selects or ran.node in division.divided
            kept = [t for t in (*ran.saved, *ran.own_results) if shares and self._born(t, step)]
            for tensor in [*own, *kept]:
                self._values[identity(tensor)].share = ran.share
            for source, copy in ran.casts:
                self._values[identity(copy)].share = self._values[identity(source)].share

    def _weights_in_order(self) -> list[tuple[int, _Value]]:
        """Parameters as `Block.parameters` lists them, then buffers."""
        return [(key, value) for key, value in self._values.items() if value.weight and value.born == -1]

    def _born(self, tensor: torch.Tensor, step: int) -> bool:
        """Is it an operation's own work (a mask, a log-sum-exp), not one of its inputs or results?"""
        value = self._values.get(identity(tensor))
        outputs = {identity(output) for output in _tensors(self._steps[step][1].outputs)}
        return value is not None and value.born == step and identity(tensor) not in outputs

    def _forward_reduced(self) -> list[tuple[float, bool]]:
        """Per sample, the bytes that each all-reduce of a forward sums over the tensor-parallel axis; is it needed
        again where the block is recomputed?"""
        steps = [step for step, (_, ran) in enumerate(self._steps) if ran.node in self._division.reduced]
        found = []
        for step, elements in zip(steps, self._division.forward_elements, strict=True):
            size = _tensors(self._steps[step][1].outputs)[0].element_size()
            found.append((elements * size / self._samples, step in self._again))
        return found

    def _backward_reduced(self) -> tuple[float, ...]:
        """As `_forward_reduced`, of a backward."""
        sources = dict.fromkeys(name for names in self._division.entering.values() for name in names)
        asked = [name for name in sources if identity(self._of_node[name][0]) in self._gradients]
        return tuple(self._entering_bytes(name) / self._samples for name in asked)

    def _entering_bytes(self, name: str) -> int:
        """Of a whole value's gradient, in the type in which it is summed."""
        tensor = self._of_node[name][0]
        is_cast = self._settings.precision == "bf16" and tensor.dtype == torch.float32
        is_cast = is_cast and name in self._division.multiplied
        return tensor.numel() * (torch.bfloat16.itemsize if is_cast else tensor.element_size())

    def cost(self) -> BlockTypeCost:
        forward, backward = self._kernels()
        saved = [v for v in self._values.values() if v.first_saved is not None and not v.weight]
        copies = sum(
            v.nbytes for k, v in self._values.items() if v.first_saved is not None and k in self._casts.weights
        )
        held = sum(v.nbytes for v in saved)
        reduced = self._forward_reduced()
        return BlockTypeCost(
            block_type=self._kind,
            forward=tuple(forward),
            backward=tuple(backward),
            model_flops=sum(ran.forward_flops for _, ran in self._steps) / self._samples,
            model_backward_flops=sum(_needed_backward(ran) for _, ran in self._steps) / self._samples,
            saved_bytes=held / self._samples,
            workspace_bytes=max(0, self._peak(len(self._steps)) - held) / self._samples,
            weight_copy_bytes=copies,
            cast_elements=sum(value.tensor.numel() * value.share for value in self._cast_weights()),
            products_bytes=self._products_bytes() / self._samples,
            forward_reduced_bytes=tuple(nbytes for nbytes, _ in reduced),
            recompute_reduced_bytes=tuple(nbytes for nbytes, again in reduced if again),
            backward_reduced_bytes=self._backward_reduced(),
            capturable=self._recordable(),
        )

    def _recordable(self) -> tuple[str, ...]:
        """A part that runs over labelled rows is as long as there are labels."""
        if labelled_part(self._block) is not None and not self._division.divided:
            return ()
        return tuple(kind for kind in RECOMPUTE if is_replayable(self._block.code, kind))

    # Running

    def _run(self, graph: Graph, block: Block, received: tuple[torch.dtype, ...]) -> None:
        env: dict[fx.Node, Any] = {}
        arguments = iter(self._arguments(graph, block, received))
        for node in block.code.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(arguments)
            elif node.op == "get_attr":
                env[node] = getattr(block.code, str(node.target))
            elif node.op == "call_function":
                env[node] = self._step(node, env)
            elif node.op == "output":
                sends = [env[leaf] for leaf in tree_flatten(node.args[0])[0]]
                self._finish([send for send in sends if isinstance(send, torch.Tensor)])
            self._of_node[node.name] = _tensors(env.get(node))

    def _arguments(self, graph: Graph, block: Block, received: tuple[torch.dtype, ...]) -> Iterable[torch.Tensor]:
        for name in block.parameters:
            yield self._enter(graph.parameters[name], weight=True, gradient=name not in graph.frozen)
        for name in block.buffers:
            yield self._enter(graph.buffers[name], weight=True)
        for name, dtype in zip(block.receives, received, strict=True):
            yield self._enter(graph.values[name], dtype, batched=True, gradient=name in graph.learned)
        for name in block.inputs:
            yield self._enter(graph.batch[name], batched=True)
        for _ in block.counts:
            yield self._enter(TensorSpec("count", (), "float32"))

    def _enter(
        self,
        spec: TensorSpec,
        dtype: torch.dtype | None = None,
        *,
        weight: bool = False,
        batched: bool = False,
        gradient: bool = False,
    ) -> torch.Tensor:
        tensor = torch.empty(spec.shape, dtype=dtype or getattr(torch, spec.dtype), device=META)
        self._values[identity(tensor)] = _Value(tensor, -1, -1, batched, weight, gradient)
        if gradient:
            self._gradients.add(identity(tensor))
        if weight:
            self._weights.add(identity(tensor))
        return tensor

    def _refused(self, node: fx.Node, name: str, error: Exception) -> CaptureError:
        """What ran in fp32 when it was captured does not run in the types that autocast would give it."""
        line, reason = users_line(node), str(error).partition("\n")[0].rstrip(".")
        precision = self._settings.precision
        way_out = (
            "Under autocast it is given bf16: cast what it reads in forward (.float()), or train with precision='fp32'."
            if precision == "bf16"
            else "Replace it by operations that have a backward in this precision."
        )
        return CaptureError(
            f"{self._model}: {name}{line.where} cannot run in {precision}: {reason}. {way_out}",
            model=self._model,
            operation=name,
            precision=precision,
            file=line.file,
            line=line.number,
        )

    def _step(self, node: fx.Node, env: Mapping[fx.Node, Any]) -> Any:
        lookup: Callable[[fx.Node], Any] = env.__getitem__
        args: Any = fx.node.map_arg(node.args, lookup)
        kwargs: Any = fx.node.map_arg(node.kwargs, lookup)
        name = op_name(node)
        if name == "getitem":
            return args[0][args[1]]
        try:
            ran = run(
                node,
                args,
                kwargs,
                gradients=self._gradients,
                weights=self._weights,
                casts=self._casts,
                settings=self._settings,
            )
        except (RuntimeError, TypeError) as error:
            raise self._refused(node, name, error) from error
        step = len(self._steps)
        self._steps.append((name, ran))
        for source, copy in ran.casts:
            self._value(copy, step, like=self._value(source, step))
        batched = any(self._value(tensor, step).batched for tensor in ran.inputs)
        for tensor in self._sources(ran):
            value = self._value(tensor, step, batched=batched)
            value.last_use = step
            self._uses[identity(tensor)].add(step)
        for tensor in _tensors(ran.outputs):
            value = self._value(tensor, step, batched=batched)
            value.gradient |= identity(tensor) in self._gradients
        for tensor in ran.saved:
            value = self._value(tensor, step, batched=batched)
            value.first_saved = step if value.first_saved is None else min(value.first_saved, step)
        return ran.outputs

    def _value(self, tensor: torch.Tensor, step: int, *, batched: bool = False, like: _Value | None = None) -> _Value:
        key = identity(tensor)
        if key not in self._values:
            self._values[key] = _Value(tensor, step, step, batched)
            if like is not None:
                self._values[key].batched = like.batched
                self._values[key].gradient = like.gradient
                self._values[key].weight = like.weight
        return self._values[key]

    def _finish(self, sends: list[torch.Tensor]) -> None:
        self.sent = tuple(send.dtype for send in sends)
        for send in sends:
            self._values[identity(send)].last_use = len(self._steps)
            self._uses[identity(send)].add(len(self._steps))

    # Memory

    def _peak(self, steps: int) -> float:
        """Largest sum of what is held at any moment of the block's forward, or of its backward."""
        values = [value for value in self._values.values() if not value.weight]
        forward = [
            sum(
                v.nbytes
                for v in values
                if v.born <= k and (k <= v.last_use or (v.first_saved is not None and v.first_saved <= k))
            )
            for k in range(steps + 1)
        ]
        backward = [
            sum(v.nbytes for v in values if v.first_saved is not None and v.first_saved <= k)
            + sum(v.nbytes for v in values if v.gradient and v.born <= k <= v.last_use)
            for k in range(steps + 1)
        ]
        return max(forward + backward)

    def _needed_again(self) -> set[int]:
        """The steps that some value depends on which the backward reads: those that checkpointing runs again.

        The last product of a block that ends in a sum is none of them.
        """
        needed = {key for key, value in self._values.items() if value.first_saved is not None and not value.weight}
        steps = set()
        for step, (name, ran) in reversed(list(enumerate(self._steps))):
            copies = {identity(copy): identity(source) for source, copy in ran.casts}
            own = [] if name in _DRAWN else [tensor for tensor in ran.saved if self._born(tensor, step)]
            made = {identity(tensor) for tensor in (*_tensors(ran.outputs), *ran.own_results, *own)} - set(copies)
            if made & needed:
                steps.add(step)
                needed |= {identity(tensor) for tensor in self._sources(ran)}
            needed |= {source for copy, source in copies.items() if copy in needed}
        return steps

    def _products_bytes(self) -> float:
        kept: dict[int, float] = {}
        for step, (_, ran) in enumerate(self._steps):
            if step not in self._again:
                continue
            if ran.family in (GEMM, ATTENTION):
                kept |= {identity(t): self._values[identity(t)].nbytes for t in _tensors(ran.outputs)}
            if ran.family == ATTENTION:
                kept |= {identity(t): storage_bytes(t) * ran.share for t in ran.own_results}
        return sum(kept.values())

    # Time

    def _kernels(self) -> tuple[list[Kernel], list[Kernel]]:
        forward: list[Kernel] = []
        backward: list[Kernel] = []
        for step, (_, ran) in enumerate(self._steps):
            if ran.family in (GEMM, ATTENTION):
                self._matrix_kernels(ran, forward, backward, step in self._again)
            self._weight_casts(ran, forward, backward)
        for group in self._groups():
            self._stream_kernels(group, forward, backward)
        trained = sum(v.tensor.numel() * v.share for k, v in self._values.items() if k in self._weights and v.gradient)
        if trained:
            launches = sum(1 for k in self._weights if self._values[k].gradient)
            backward.append(Kernel(STREAM, 0, 0, ACCUMULATE_BYTES * trained, launches))
        return forward, backward

    def _matrix_kernels(self, ran: Ran, forward: list[Kernel], backward: list[Kernel], again: bool) -> None:
        batched, fixed = self._traffic([*ran.inputs, *_tensors(ran.outputs)])
        flops = ran.share * ran.forward_flops / self._samples
        forward.append(Kernel(ran.family, flops, batched, fixed, again=again))
        if ran.backward_flops:
            launches = max(1, round(ran.backward_flops / ran.forward_flops)) if ran.family == GEMM else 1
            back = ran.share * ran.backward_flops / self._samples
            weights = 1 if ran.family == GEMM and any(self._is_trained(tensor) for tensor in ran.inputs) else 0
            for count, of_weights in ((launches - weights, False), (weights, True)):
                if count:
                    share = count / launches
                    backward.append(Kernel(ran.family, share * back, batched * count, fixed * count, count, of_weights))

    def _is_trained(self, tensor: torch.Tensor) -> bool:
        """A weight with a gradient, or autocast's copy of one."""
        value = self._values[identity(tensor)]
        return value.weight and value.gradient

    def _cast_weights(self) -> Iterator[_Value]:
        """What autocast casts for this block's products; a weight once."""
        sources = (self._values[identity(source)] for _, ran in self._steps for source, _ in ran.casts)
        return (value for value in sources if value.weight)

    def _weight_casts(self, ran: Ran, forward: list[Kernel], backward: list[Kernel]) -> None:
        sources = [self._values[identity(source)] for source, _ in ran.casts]
        weights = [value for value in sources if value.weight]
        trained = [value for value in weights if value.gradient]
        for values, kernels in ((weights, forward), (trained, backward)):
            if values:
                traffic = CAST_BYTES * sum(value.tensor.numel() * value.share for value in values)
                kernels.append(Kernel(STREAM, 0, 0, traffic, 1 if self._settings.compiled else len(values)))

    def _groups(self) -> list[_Group]:
        """Stream operations, joined where a compiler fuses them: at the same depth of matrix products."""
        made_by: dict[int, _Group] = {}
        depth: dict[int, int] = defaultdict(int)
        groups: list[_Group] = []
        for step, (name, ran) in enumerate(self._steps):
            level = max((depth[identity(t)] for t in self._sources(ran)), default=0)
            for source, copy in ran.casts:
                if not self._values[identity(source)].weight:
                    self._join(groups, made_by, depth, [source], [copy], [], step, depth[identity(source)])
            outputs = _tensors(ran.outputs)
            if ran.family == STREAM:
                gathers = name == "embedding"
                inputs = ran.inputs[1:] if gathers else ran.inputs
                group = self._join(groups, made_by, depth, inputs, outputs, ran.saved, step, level)
                group.differentiable |= bool(ran.backward_flops) or any(ran.differentiable)
                group.gathered += ran.inputs[0].numel() * ran.share if gathers else 0
            elif ran.family != "view":
                for tensor in outputs:
                    depth[identity(tensor)] = level + 1
        return groups

    def _sources(self, ran: Ran) -> list[torch.Tensor]:
        return [*ran.inputs, *(source for source, _ in ran.casts)]

    def _join(
        self,
        groups: list[_Group],
        made_by: dict[int, _Group],
        depth: dict[int, int],
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
        saved: list[torch.Tensor],
        step: int,
        level: int,
    ) -> _Group:
        near = [made_by[identity(t)] for t in inputs if identity(t) in made_by and depth[identity(t)] == level]
        if self._settings.compiled and near:
            group = near[0]
            for other in near[1:]:
                if other is not group:
                    _merge(group, other, made_by)
                    groups[:] = [g for g in groups if g is not other]
        else:
            group = _Group()
            groups.append(group)
        group.inputs |= {identity(t): t for t in inputs}
        group.outputs |= {identity(t): t for t in outputs}
        group.saved |= {identity(t): t for t in saved}
        group.steps.add(step)
        for tensor in outputs:
            made_by[identity(tensor)] = group
            depth[identity(tensor)] = level
        return group

    def _stream_kernels(self, group: _Group, forward: list[Kernel], backward: list[Kernel]) -> None:
        reads = [t for k, t in group.inputs.items() if k not in group.outputs]
        writes = [t for k, t in group.outputs.items() if self._escapes(k, group)]
        batched, fixed = self._traffic(reads + writes)
        gathered = sum(t.numel() * t.element_size() for t in writes) / self._samples if group.gathered else 0.0
        forward.append(Kernel(STREAM, 0, batched + gathered, fixed, again=bool(group.steps & self._again)))
        flows = [t for t in [*reads, *writes] if self._values[identity(t)].gradient]
        if group.differentiable or flows:
            kept = [t for k, t in group.saved.items() if not self._values[k].weight]
            batched, fixed = self._traffic([*flows, *kept])
            reduces = any(self._values[identity(t)].weight for t in flows)
            backward.append(Kernel(STREAM, 0, batched, fixed + 4 * group.gathered, 2 if reduces else 1))

    def _escapes(self, key: int, group: _Group) -> bool:
        """Must an output of the group be written? Not when only the group itself reads it."""
        return self._values[key].first_saved is not None or bool(self._uses[key] - group.steps)

    def _traffic(self, tensors: Iterable[torch.Tensor]) -> tuple[float, float]:
        """Bytes per sample of batched tensors, and bytes of the others; a broadcast counts once."""
        batched = fixed = 0.0
        for tensor in tensors:
            share = self._values[identity(tensor)].share
            nbytes = share * min(tensor.numel() * tensor.element_size(), storage_bytes(tensor))
            if self._values[identity(tensor)].batched:
                batched += nbytes / self._samples
            else:
                fixed += nbytes
        return batched, fixed


def _needed_backward(ran: Ran) -> float:
    """FLOPs of a product's backward; of attention's, without the scores that its kernels compute again."""
    if ran.family == ATTENTION:
        return 2 * ran.forward_flops if ran.backward_flops else 0
    return ran.backward_flops if ran.family == GEMM else 0


def _merge(group: _Group, other: _Group, made_by: dict[int, _Group]) -> None:
    group.inputs |= other.inputs
    group.outputs |= other.outputs
    group.saved |= other.saved
    group.steps |= other.steps
    group.differentiable |= other.differentiable
    group.gathered += other.gathered
    for key in other.outputs:
        made_by[key] = group


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]
