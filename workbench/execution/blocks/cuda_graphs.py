"""Capture the kernels of blocks in CUDA graphs and replay them, so that the host launches each block in one call.

Launching a layer of BERT kernel by kernel takes a host milliseconds, and a GPU may run the kernels in one: with small
micro-batches, small models or tensor parallelism the GPU waits. The first `WARM_UP_STEPS` steps run normally (they
compile). In the next step every forward and backward of a block is captured for its micro-batch and launched; later
steps replay these graphs. All graphs share one memory pool, in which a later graph uses what an earlier one leaves,
because every step runs in the order of the captured one. The accumulation of weight gradients is part of the graphs.
The numbers equal those of blocks that are launched kernel by kernel, to the last bit.

Graphs cannot be combined with FSDP2, which moves weights between steps, or with `DistributedDataParallel`, which must
see every gradient arrive. The gradients of a block's own weights lie in one buffer per dtype, which replicas reduce
(`workbench.execution.gradients`) once the block's last backward of a step has been launched.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from workbench.base.errors import WorkbenchError
from workbench.execution.gradients import GradientAccumulator

WARM_UP_STEPS = 2
"""Steps before the captured one: the first compiles everything, the second fills all caches."""

ALIGNMENT = 64
"""Gradients in a buffer begin at multiples of this many elements, so that kernels may use wide loads."""

NCCL_SETTING = "NCCL_GRAPH_REGISTER", "0"
"""Environment variable and value that keep NCCL from registering the memory of captured collectives.

Expandable segments may map that memory anew, and illegal accesses are known to follow
(github.com/NVIDIA/Megatron-LM/issues/5474).
"""

OptionalTensor = torch.Tensor | None
Run = Callable[..., tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class BlockInputs:
    """The arguments of a block's forward."""

    weights: Sequence[torch.Tensor]
    """The block's parameters, or copies that it reads in their place."""
    owners: Sequence[nn.Parameter | None]
    """The parameters that the weights' gradients are added to; None for parameters that other blocks read too."""
    buffers: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]
    seeds: Sequence[int]
    """The last arguments, passed as int64 scalars."""


@dataclass
class BlockGradients:
    """The gradients of one block's own weights in one step."""

    parameters: list[nn.Parameter] = field(default_factory=list)
    buffers: list[torch.Tensor] = field(default_factory=list)
    """Flat buffers that hold these gradients contiguously."""
    num_backwards: int = 0
    """Number of micro-batches whose backward has been launched."""

    def allocate(self, parameters: Sequence[nn.Parameter]) -> None:
        """Give each parameter an uninitialised gradient, in one new buffer per dtype."""
        by_dtype: defaultdict[torch.dtype, list[nn.Parameter]] = defaultdict(list)
        for parameter in parameters:
            by_dtype[parameter.dtype].append(parameter)
        for group in by_dtype.values():
            sizes = [-(-parameter.numel() // ALIGNMENT) * ALIGNMENT for parameter in group]
            buffer = group[0].new_empty(sum(sizes))
            self.buffers.append(buffer)
            for parameter, part in zip(group, buffer.split(sizes), strict=True):
                part[parameter.numel() :].zero_()
                parameter.grad = part[: parameter.numel()].view_as(parameter)


class CudaGraphs:
    """The CUDA graphs of one rank.

    The trainer announces each step and blocks pass their forward; autograd calls the backwards. On a CPU nothing is
    captured, and every step runs as a warm-up step does.
    """

    def __init__(self, device: torch.device, num_microbatches: int) -> None:
        self.device = device
        self.on_last_backward: Callable[[Sequence[nn.Parameter], Sequence[torch.Tensor]], None] | None = None
        """Called after a block's last backward of a step with its parameters and the buffers of their gradients."""
        self.num_microbatches = num_microbatches
        self._step = 0
        self._is_disabled = device.type != "cuda"
        self.accumulator = GradientAccumulator(compiles=not self._is_disabled)
        self._forwards: dict[tuple[int, int], _BlockMicroBatch] = {}
        self._gradients: dict[int, BlockGradients] = {}
        self.output_addresses: set[int] = set()
        """Addresses of graphs' results, which are the same in every step."""
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        """A tensor that makes autograd track a block with trained weights but no differentiable values."""

    def begin_step(self) -> None:
        """Prepare a step; call it before the step's first forward."""
        self._step += 1
        if not self.replays:  # releases the gradients of the previous step
            self._forwards, self._gradients = {}, {}
        if self.captures:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # the graphs' pool takes the memory that earlier steps needed
            self._stream = torch.cuda.Stream(self.device)
            self._pool = torch.cuda.graph_pool_handle()

    @property
    def captures(self) -> bool:
        return not self._is_disabled and self._step == WARM_UP_STEPS + 1

    @property
    def replays(self) -> bool:
        return not self._is_disabled and self._step > WARM_UP_STEPS + 1

    def forward(self, block: int, micro_batch: int, run: Run, inputs: BlockInputs) -> tuple[torch.Tensor, ...]:
        """Run a block's forward; the caller has seeded the random-number generator for it."""
        key = block, micro_batch
        if not self.replays:
            gradients = self._gradients.setdefault(block, BlockGradients())
            self._forwards[key] = _BlockMicroBatch(self, gradients)
        # Autograd sees the values, and the weights that other blocks read too.
        shared = (w for w, owner in zip(inputs.weights, inputs.owners, strict=True) if owner is None)
        outputs: tuple[torch.Tensor, ...] = _GraphedBlock.apply(
            self.anchor, self._forwards[key], run, inputs, *shared, *inputs.values
        )
        return outputs

    def capture(self, launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Capture what `launch` launches in a graph, without running it; raise `WorkbenchError` if that fails."""
        graph = torch.cuda.CUDAGraph()
        launching = torch.cuda.current_stream(self.device)
        # Beginning a capture writes the seed that all graphs read, on the capturing stream (`capture_prologue` of
        # torch 2.11). It must wait until the graph launched last has drawn its random numbers with its own seed.
        self._stream.wait_stream(launching)
        try:
            with torch.cuda.stream(self._stream):
                # Only this thread's calls count: other threads may make calls that would end a capture, as NCCL's
                # watchdog does when it queries events.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    launch()
                except BaseException:
                    with contextlib.suppress(RuntimeError):
                        graph.capture_end()
                    raise
                graph.capture_end()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise WorkbenchError(
                f"The kernels of a block could not be captured in a CUDA graph: {reason}. Plan without CUDA graphs: "
                f"wb.plan(experiment, cuda_graphs=False)."
            ) from None
        launching.wait_stream(self._stream)
        return graph

    def release(self) -> None:
        """Destroy the graphs; no step may follow.

        NCCL ends a communicator only when all graphs that hold its collectives are destroyed (`commDestroySync`).
        """
        for block in self._forwards.values():
            for captured in (block._forward, block._backward):
                if captured is not None:
                    captured.graph.reset()
        self._forwards, self._gradients = {}, {}

    def is_output(self, tensor: torch.Tensor) -> bool:
        """Return True if a graph has made the tensor."""
        return tensor.data_ptr() in self.output_addresses


class _StaticTensor:
    """A tensor that has the same memory of the pool in every step, without keeping that memory from later captures.

    A graph replays kernels with the addresses that they were captured with. What it reads must therefore be copied to
    where its inputs lay then, and what it returns lies where it lay then, until another replay overwrites it.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.address = tensor.data_ptr()
        spans = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        size = (1 + spans) * tensor.element_size() if tensor.numel() else 0
        # Private of torch 2.11 to 2.13: a tensor at an address, which does not own the pool's memory.
        storage = torch._C._construct_storage_from_data_pointer(self.address, tensor.device, size)
        self.tensor = tensor.new_empty(0).set_(storage, 0, tensor.shape, tensor.stride())

    def fill(self, value: OptionalTensor) -> None:
        """Write `value` to the memory, unless it lies there; write zeros for None."""
        if value is None:
            self.tensor.zero_()
        elif value.data_ptr() != self.address:
            _without_expanded_dims(self.tensor).copy_(_without_expanded_dims(value))


@dataclass
class _CapturedGraph:
    """A captured forward or backward with its inputs and outputs in static memory."""

    graph: torch.cuda.CUDAGraph
    inputs: Sequence[_StaticTensor | None]
    seeds: Sequence[_StaticTensor]
    outputs: Sequence[_StaticTensor | None]
    new_gradients: Sequence[tuple[nn.Parameter, OptionalTensor]] = ()
    """Parameters whose gradients this graph initialises, with these gradients."""

    def replay(self, inputs: Sequence[OptionalTensor], seeds: Sequence[int] = ()) -> None:
        for static, value in zip(self.inputs, inputs, strict=True):
            if static is not None:
                static.fill(value)
            else:
                assert value is None, "a gradient arrived that was missing when the backward was captured"
        for static, seed in zip(self.seeds, seeds, strict=True):
            static.tensor.fill_(seed)
        self.graph.replay()
        for parameter, gradient in self.new_gradients:
            parameter.grad = gradient

    @property
    def results(self) -> list[OptionalTensor]:
        return [None if static is None else static.tensor.detach() for static in self.outputs]


@dataclass
class _PendingBackward:
    """The autograd edges of a forward whose backward is still to come."""

    outputs: list[GradientEdge | None]
    weights: list[tuple[torch.Tensor, nn.Parameter]]
    """Trained weights that no other block reads, with the parameters that their gradients are added to."""
    inputs: list[GradientEdge | None]
    """Edges of shared weights and values."""


class _BlockMicroBatch:
    """One block in one micro-batch: its captured forward and backward."""

    def __init__(self, graphs: CudaGraphs, gradients: BlockGradients) -> None:
        self._graphs = graphs
        self._gradients = gradients
        self._forward: _CapturedGraph | None = None
        self._backward: _CapturedGraph | None = None
        self._pending: _PendingBackward | None = None
        self._differentiable: list[bool] = []

    def forward(self, run: Run, inputs: BlockInputs) -> tuple[list[torch.Tensor], list[bool]]:
        """Return the results, and for each of them True if it depends on trained parameters."""
        if self._graphs.replays:
            assert self._forward is not None
            self._forward.replay(inputs.values, inputs.seeds)
            return [r for r in self._forward.results if r is not None], self._differentiable
        outputs: Sequence[Any]
        if self._graphs.captures:
            self._forward, outputs = self._capture(partial(self._compute, run, inputs), inputs.values, inputs.seeds)
        else:
            seeds = [torch.full((), seed, dtype=torch.int64, device=self._graphs.device) for seed in inputs.seeds]
            outputs = self._compute(run, inputs, inputs.values, seeds)
        self._differentiable = [output.requires_grad for output in outputs]
        return [output.detach() for output in outputs], self._differentiable

    def _capture(
        self, compute: Callable[..., Sequence[Any]], given: Sequence[OptionalTensor], seeds: Sequence[int] = ()
    ) -> tuple[_CapturedGraph, list[Any]]:
        """Capture `compute(inputs, seeds)`, launch the graph with what is given, and return it with its results."""
        launched: list[Any] = []
        before = len(self._gradients.parameters)

        def launch() -> None:
            inner: list[OptionalTensor] = []
            for value in given:
                if value is None or self._graphs.is_output(value):  # where an earlier graph has left it
                    inner.append(None if value is None else value.detach())
                else:  # new memory, which is filled before each replay
                    options: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
                    inner.append(torch.empty_strided(value.shape, value.stride(), **options))
            numbers = [torch.empty((), dtype=torch.int64, device=self._graphs.device) for _ in seeds]
            launched.extend((inner, numbers, compute(inner, numbers)))

        graph = self._graphs.capture(launch)
        inner, numbers, results = launched
        self._graphs.output_addresses.update(result.data_ptr() for result in results if result is not None)
        new = [(parameter, parameter.grad) for parameter in self._gradients.parameters[before:]]
        captured = _CapturedGraph(graph, _static(inner), _static(numbers), _static(results), new)
        captured.replay(given, seeds)
        return captured, list(results)

    def _compute(
        self, run: Run, inputs: BlockInputs, values: Sequence[torch.Tensor], seeds: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        # The weights become new leaves because autograd remembers on which stream others read a weight.
        weights = [weight.detach().requires_grad_(weight.requires_grad) for weight in inputs.weights]
        pairs = zip(values, inputs.values, strict=True)
        with torch.enable_grad():
            inner = [
                _InputEdge.apply(self._graphs.anchor, v) if given.requires_grad else v.detach() for v, given in pairs
            ]
            outputs = run(*weights, *inputs.buffers, *inner, *seeds)
        own = [(w, o) for w, o in zip(weights, inputs.owners, strict=True) if o is not None and w.requires_grad]
        shared = [w for w, owner in zip(weights, inputs.owners, strict=True) if owner is None]
        self._pending = _PendingBackward(_edges(outputs), own, _edges([*shared, *inner]))
        return outputs

    def backward(self, gradients: Sequence[OptionalTensor], is_external: Sequence[bool]) -> list[OptionalTensor]:
        """Return gradients of the differentiable inputs; `is_external` marks the inputs that no graph has made."""
        if all(gradient is None for gradient in gradients):
            self._pending = None
            return [None] * len(is_external)
        if self._graphs.replays:
            assert self._backward is not None, "its backward was not captured"
            self._backward.replay(gradients)
            results = self._backward.results
        else:
            pending, self._pending = self._pending, None
            assert pending is not None
            if self._graphs.captures:
                differentiate = partial(self._differentiate, pending)
                self._backward, results = self._capture(lambda inner, _: differentiate(inner), gradients)
            else:
                results = self._differentiate(pending, gradients)
        mine, on_last = self._gradients, self._graphs.on_last_backward
        mine.num_backwards += 1
        if mine.num_backwards % self._graphs.num_microbatches == 0 and on_last is not None:
            on_last(mine.parameters, mine.buffers)
        if self._backward is None:
            return results
        # Receivers outside of graphs may keep their gradient beyond this step's use of the memory, or send it.
        pairs = zip(results, is_external, strict=True)
        return [result.clone() if result is not None and external else result for result, external in pairs]

    def _differentiate(self, pending: _PendingBackward, gradients: Sequence[OptionalTensor]) -> list[OptionalTensor]:
        """Return gradients of shared weights and values; add those of the block's own weights to their parameters."""
        pairs = zip(pending.outputs, gradients, strict=True)
        outputs, given = zip(*((e, g) for e, g in pairs if e is not None and g is not None), strict=True)
        inputs = [edge for edge in pending.inputs if edge is not None]
        weights = [get_gradient_edge(weight) for weight, _ in pending.weights]
        results = torch.autograd.grad(outputs, [*weights, *inputs], given, allow_unused=True)
        of_weights = zip(pending.weights, results[: len(weights)], strict=True)
        arrived = [(owner, gradient) for (_, owner), gradient in of_weights if gradient is not None]
        self._gradients.parameters += [owner for owner, _ in arrived if owner.grad is None]
        self._graphs.accumulator.add(
            [owner for owner, _ in arrived], [gradient for _, gradient in arrived], self._gradients.allocate
        )
        of_inputs = iter(results[len(weights) :])
        return [None if edge is None else next(of_inputs) for edge in pending.inputs]


def _without_expanded_dims(tensor: torch.Tensor) -> torch.Tensor:
    """Return an expanded tensor as it was before the expansion."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim]:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _edges(tensors: Sequence[torch.Tensor]) -> list[GradientEdge | None]:
    return [get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in tensors]


def _static(tensors: Sequence[OptionalTensor]) -> list[Any]:
    return [None if tensor is None else _StaticTensor(tensor) for tensor in tensors]


class _InputEdge(torch.autograd.Function):
    """The value where a block begins: an edge whose gradient can be requested and that does not keep the value."""

    @staticmethod
    def forward(_ctx: Any, _anchor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.detach()

    @staticmethod
    def backward(_ctx: Any, *_gradients: OptionalTensor) -> Any:
        raise AssertionError("autograd is asked for the gradient of this edge, and goes no further")


class _GraphedBlock(torch.autograd.Function):
    """One block in one micro-batch as a single operation for autograd, in warm-up, captured and replayed steps."""

    @staticmethod
    def forward(
        ctx: Any, _anchor: torch.Tensor, block: _BlockMicroBatch, run: Run, inputs: BlockInputs, *given: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.block = block
        ctx.is_external = [not block._graphs.is_output(tensor) for tensor in given]
        ctx.set_materialize_grads(False)
        outputs, differentiable = block.forward(run, inputs)
        pairs = zip(outputs, differentiable, strict=True)
        ctx.mark_non_differentiable(*(output for output, trained in pairs if not trained))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: OptionalTensor) -> Any:
        return None, None, None, None, *ctx.block.backward(gradients, ctx.is_external)
