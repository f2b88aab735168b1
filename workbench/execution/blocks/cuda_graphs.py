"""Blocks as CUDA graphs: what a host launches for a block, kernel by kernel, recorded once and then launched as one.

For a layer of BERT a host needs milliseconds to launch what a GPU may run in one: in small micro-batches, small models
and under tensor parallelism the GPU waits. The first steps run as ever (they compile). In the next one every forward
and backward of a block is recorded for its micro-batch (CUDA's stream capture) and launched; from then on it is
launched again. All graphs share one pool of memory: what one of them leaves, a later one uses, since every step comes
in the order of the recorded one. Weights' gradients are added up as part of the graphs. The numbers are those of a
block that is not recorded, to the last bit.

Not under FSDP2, which moves weights from step to step, nor under `DistributedDataParallel`, which would want to see
every gradient come. The gradients of a block's own weights lie in one buffer, which replicas average (`averaging`) once
the block's last backward of a step is launched.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from workbench.errors import WorkbenchError
from workbench.execution.blocks.gradient_accumulation import Sums

REHEARSALS = 2
"""Steps before the recorded one: in the first everything is compiled, in the second all caches are there."""

ALIGNED = 64
"""Elements at whose multiples the gradients of a buffer begin, so that kernels may read many bytes at a time."""

BUFFERS = "NCCL_GRAPH_REGISTER", "0"
"""Otherwise NCCL registers what recorded collectives read and write, whose memory expandable segments may map anew:
illegal accesses are known (github.com/NVIDIA/Megatron-LM/issues/5474)."""

Maybe = torch.Tensor | None
Run = Callable[..., tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class Inputs:
    """What a block's forward takes."""

    weights: Sequence[torch.Tensor]
    """Its parameters, or copies of them that it reads in their place."""
    owners: Sequence[nn.Parameter | None]
    """Whose gradients the weights' are added to; None for parameters that other blocks read too."""
    buffers: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]
    seeds: Sequence[int]
    """Given to it last, as int64 scalars."""

    @property
    def differentiable(self) -> tuple[torch.Tensor, ...]:
        """What autograd is given: what others read too, and the values."""
        shared = (w for w, owner in zip(self.weights, self.owners, strict=True) if owner is None)
        return (*shared, *self.values)


@dataclass
class Gradients:
    """Of a block's own weights."""

    parameters: list[nn.Parameter] = field(default_factory=list)
    buffers: list[torch.Tensor] = field(default_factory=list)
    """All that they lie in, one after the other, and nothing else."""
    backwards: int = 0
    """Launched so far."""

    def make(self, parameters: Sequence[nn.Parameter]) -> None:
        """Gradients, not filled, for such as have none."""
        by_dtype: defaultdict[torch.dtype, list[nn.Parameter]] = defaultdict(list)
        for parameter in parameters:
            by_dtype[parameter.dtype].append(parameter)
        for together in by_dtype.values():
            sizes = [-(-parameter.numel() // ALIGNED) * ALIGNED for parameter in together]
            buffer = together[0].new_empty(sum(sizes))
            self.buffers.append(buffer)
            for parameter, part in zip(together, buffer.split(sizes), strict=True):
                part[parameter.numel() :].zero_()
                parameter.grad = part[: parameter.numel()].view_as(parameter)
        self.parameters += parameters


class CudaGraphs:
    """The graphs of one rank. Told of each step and given each block's forward; backwards come to it by autograd."""

    def __init__(self, device: torch.device, num_microbatches: int) -> None:
        self.device = device
        self.finished: Callable[[Sequence[nn.Parameter], Sequence[torch.Tensor]], None] | None = None
        """Told what a block's last backward of a step leaves: parameters, and the buffers of their gradients."""
        self._num_microbatches = num_microbatches
        self._step = 0
        self._idle = device.type != "cuda"
        self.sums = Sums(compiles=not self._idle)
        self._cells: dict[tuple[int, int], _Cell] = {}
        self._gradients: dict[int, Gradients] = {}
        self._produced: set[int] = set()
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        """Makes autograd follow a block none of whose values it follows: its weights may be trained."""

    def begin_step(self) -> None:
        """Before the first forward of a step."""
        self._step += 1
        if not self.replays:  # nothing holds the gradients of the step before
            self._cells, self._gradients = {}, {}
        if self.records:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # the pool takes what the steps before needed
            self._stream = torch.cuda.Stream(self.device)
            self._pool = torch.cuda.graph_pool_handle()

    @property
    def forwards(self) -> int:
        """Of a step, by block and micro-batch."""
        return len(self._cells)

    @property
    def records(self) -> bool:
        return not self._idle and self._step == REHEARSALS + 1

    @property
    def replays(self) -> bool:
        return not self._idle and self._step > REHEARSALS + 1

    def forward(self, block: int, micro_batch: int, run: Run, inputs: Inputs) -> tuple[torch.Tensor, ...]:
        """A block's forward; the generator of random numbers has been seeded for it."""
        key = block, micro_batch
        if not self.replays:
            gradients = self._gradients.setdefault(block, Gradients())
            self._cells[key] = _Cell(self, gradients)
        found: tuple[torch.Tensor, ...] = _Replayed.apply(
            self.anchor, self._cells[key], run, inputs, *inputs.differentiable
        )
        return found

    def recorded(self, launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """What `launch` launches, as a graph that has not run. Raises `WorkbenchError` where it cannot be recorded."""
        graph = torch.cuda.CUDAGraph()
        launching = torch.cuda.current_stream(self.device)
        # Beginning a capture writes the seed that all graphs read, on the capturing stream (torch 2.11's
        # `capture_prologue`): not before the graph launched last has drawn with its own.
        self._stream.wait_stream(launching)
        try:
            with torch.cuda.stream(self._stream), _capture(graph, self._pool):
                launch()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise WorkbenchError(
                f"What a block launches could not be recorded as a CUDA graph: {reason}. Plan without, "
                f"wb.plan(experiment, cuda_graphs=False)."
            ) from None
        launching.wait_stream(self._stream)
        return graph

    def note_backward(self, gradients: Gradients) -> None:
        """One of a block's micro-batches has been launched."""
        gradients.backwards += 1
        if gradients.backwards % self._num_microbatches == 0 and self.finished is not None:
            self.finished(gradients.parameters, gradients.buffers)

    def note(self, tensors: Sequence[Maybe]) -> None:
        """Results of graphs, which every step finds where they are now."""
        self._produced.update(tensor.data_ptr() for tensor in tensors if tensor is not None)

    def produced(self, tensor: torch.Tensor) -> bool:
        return tensor.data_ptr() in self._produced


@contextlib.contextmanager
def _capture(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    # Of this thread alone: others may do what would end a capture, as NCCL's watchdog, which asks for events.
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        yield
    except BaseException:
        with contextlib.suppress(RuntimeError):
            graph.capture_end()
        raise
    graph.capture_end()


class _Place:
    """Where the pool has a tensor in every step. It does not keep the memory from graphs that are recorded later."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.address = tensor.data_ptr()
        spans = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        size = (1 + spans) * tensor.element_size() if tensor.numel() else 0
        storage = torch._C._construct_storage_from_data_pointer(self.address, tensor.device, size)
        self.tensor = tensor.new_empty(0).set_(storage, 0, tensor.shape, tensor.stride())

    def fill(self, value: Maybe) -> None:
        if value is None:
            self.tensor.zero_()
        elif value.data_ptr() != self.address:
            _once(self.tensor).copy_(_once(value))


@dataclass
class _Recording:
    """A forward or a backward."""

    graph: torch.cuda.CUDAGraph
    inputs: Sequence[_Place | None]
    seeds: Sequence[_Place]
    outputs: Sequence[_Place | None]
    begun: Sequence[tuple[nn.Parameter, Maybe]] = ()
    """Parameters whose gradients it makes anew, with those."""

    def run(self, inputs: Sequence[Maybe], seeds: Sequence[int] = ()) -> None:
        for place, value in zip(self.inputs, inputs, strict=True):
            if place is not None:
                place.fill(value)
            else:
                assert value is None, "a gradient that did not come when the backward was recorded"
        for place, seed in zip(self.seeds, seeds, strict=True):
            place.tensor.fill_(seed)
        self.graph.replay()
        for parameter, gradient in self.begun:
            parameter.grad = gradient

    @property
    def results(self) -> list[Maybe]:
        return [None if place is None else place.tensor.detach() for place in self.outputs]


@dataclass
class _Computed:
    """A forward whose backward is still to come: the ends and beginnings of what autograd has of it."""

    ends: list[GradientEdge | None]
    weights: list[tuple[torch.Tensor, nn.Parameter]]
    """Trained ones that no other block reads, and whose gradients theirs are added to."""
    others: list[GradientEdge | None]


class _Cell:
    """A block in one micro-batch."""

    def __init__(self, graphs: CudaGraphs, gradients: Gradients) -> None:
        self._graphs = graphs
        self._gradients = gradients
        self._forward: _Recording | None = None
        self._backward: _Recording | None = None
        self._computed: _Computed | None = None
        self._differentiable: list[bool] = []

    def forward(self, run: Run, inputs: Inputs) -> tuple[list[torch.Tensor], list[bool]]:
        """Results, and which of them depend on what is trained."""
        if self._graphs.replays:
            assert self._forward is not None
            self._forward.run(inputs.values, inputs.seeds)
            return [r for r in self._forward.results if r is not None], self._differentiable
        if self._graphs.records:
            outputs = self._record_forward(run, inputs)
        else:
            seeds = [torch.full((), seed, dtype=torch.int64, device=self._graphs.device) for seed in inputs.seeds]
            outputs = self._compute(run, inputs, inputs.values, seeds)
        self._differentiable = [output.requires_grad for output in outputs]
        return [output.detach() for output in outputs], self._differentiable

    def _record_forward(self, run: Run, inputs: Inputs) -> Sequence[torch.Tensor]:
        held: list[Any] = []

        def launch() -> None:
            values = [self._input(value) for value in inputs.values]
            seeds = [torch.empty((), dtype=torch.int64, device=self._graphs.device) for _ in inputs.seeds]
            held.extend((values, seeds, self._compute(run, inputs, values, seeds)))

        graph = self._graphs.recorded(launch)
        values, seeds, outputs = held
        self._graphs.note(outputs)
        self._forward = _Recording(graph, _places(values), _places(seeds), _places(outputs))
        self._forward.run(inputs.values, inputs.seeds)
        return tuple(outputs)

    def _input(self, value: torch.Tensor) -> torch.Tensor:
        """As a graph reads it: where an earlier graph left it, or in a place of its own that is filled before."""
        if self._graphs.produced(value):
            return value.detach()
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)

    def _compute(
        self, run: Run, inputs: Inputs, values: Sequence[torch.Tensor], seeds: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        # Leaves of their own: autograd remembers for a weight on which stream others read it.
        weights = [weight.detach().requires_grad_(weight.requires_grad) for weight in inputs.weights]
        pairs = zip(values, inputs.values, strict=True)
        with torch.enable_grad():
            inner = [_Entry.apply(self._graphs.anchor, v) if given.requires_grad else v.detach() for v, given in pairs]
            outputs = run(*weights, *inputs.buffers, *inner, *seeds)
        own = [(w, o) for w, o in zip(weights, inputs.owners, strict=True) if o is not None and w.requires_grad]
        shared = [w for w, owner in zip(weights, inputs.owners, strict=True) if owner is None]
        self._computed = _Computed(_edges(outputs), own, _edges([*shared, *inner]))
        return outputs

    def backward(self, gradients: Sequence[Maybe], outside: Sequence[bool]) -> list[Maybe]:
        """Of what autograd was given; `outside`: what no graph has made."""
        if all(gradient is None for gradient in gradients):
            self._computed = None
            return [None] * len(outside)
        results = self._launch_backward(gradients)
        self._graphs.note_backward(self._gradients)
        return results if self._backward is None else _handed_out(results, outside)

    def _launch_backward(self, gradients: Sequence[Maybe]) -> list[Maybe]:
        if self._graphs.replays:
            assert self._backward is not None, "its backward was not recorded"
            self._backward.run(gradients)
            return self._backward.results
        computed, self._computed = self._computed, None
        assert computed is not None
        if self._graphs.records:
            return self._record_backward(computed, gradients)
        return self._derive(computed, gradients)

    def _record_backward(self, computed: _Computed, gradients: Sequence[Maybe]) -> list[Maybe]:
        held: list[Any] = []
        before = len(self._gradients.parameters)

        def launch() -> None:
            inner = [None if gradient is None else self._input(gradient) for gradient in gradients]
            held.extend((inner, self._derive(computed, inner)))

        graph = self._graphs.recorded(launch)
        inner, results = held
        self._graphs.note(results)
        begun = [(parameter, parameter.grad) for parameter in self._gradients.parameters[before:]]
        self._backward = _Recording(graph, _places(inner), (), _places(results), begun)
        self._backward.run(gradients)
        return list(results)

    def _derive(self, computed: _Computed, gradients: Sequence[Maybe]) -> list[Maybe]:
        """Gradients of the others; those of the weights are added up."""
        pairs = zip(computed.ends, gradients, strict=True)
        ends, given = zip(*((e, g) for e, g in pairs if e is not None and g is not None), strict=True)
        asked = [edge for edge in computed.others if edge is not None]
        weights = [get_gradient_edge(weight) for weight, _ in computed.weights]
        found = torch.autograd.grad(ends, [*weights, *asked], given, allow_unused=True)
        come = [
            (owner, g) for (_, owner), g in zip(computed.weights, found[: len(weights)], strict=True) if g is not None
        ]
        self._graphs.sums.give([owner for owner, _ in come], [g for _, g in come], self._gradients.make)
        others = iter(found[len(weights) :])
        return [None if edge is None else next(others) for edge in computed.others]


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """An expanded tensor as it was before."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim]:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _edges(tensors: Sequence[torch.Tensor]) -> list[GradientEdge | None]:
    """Where autograd has them; none of what it does not follow."""
    return [get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in tensors]


def _handed_out(results: Sequence[Maybe], outside: Sequence[bool]) -> list[Maybe]:
    """What goes to others than graphs is copied: they may keep it for longer, or send it."""
    pairs = zip(results, outside, strict=True)
    return [result.clone() if result is not None and out else result for result, out in pairs]


def _places(tensors: Sequence[Maybe]) -> list[Any]:
    return [None if tensor is None else _Place(tensor) for tensor in tensors]


class _Entry(torch.autograd.Function):
    """A value where a block begins: an edge whose gradient can be asked for, and which does not keep the value."""

    @staticmethod
    def forward(_ctx: Any, _anchor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.detach()

    @staticmethod
    def backward(_ctx: Any, *_gradients: Maybe) -> Any:
        raise AssertionError("autograd is asked for the gradient of this edge, and goes no further")


class _Replayed(torch.autograd.Function):
    """A cell to autograd, whatever it does meanwhile."""

    @staticmethod
    def forward(
        ctx: Any, _anchor: torch.Tensor, cell: _Cell, run: Run, inputs: Inputs, *given: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.cell = cell
        ctx.outside = [not cell._graphs.produced(tensor) for tensor in given]
        ctx.set_materialize_grads(False)
        outputs, differentiable = cell.forward(run, inputs)
        pairs = zip(outputs, differentiable, strict=True)
        ctx.mark_non_differentiable(*(output for output, trained in pairs if not trained))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Maybe) -> Any:
        return None, None, None, None, *ctx.cell.backward(gradients, ctx.outside)
