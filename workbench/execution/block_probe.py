"""The processes that measure the blocks of a model on this device; `workbench.measure.block_probes` starts the first.

    python -m workbench.execution.block_probe FOLDER NAMED

That process imports what the probes need, for a NAMED model (1) transformers as well, waits for the request in FOLDER
and forks a probe for each micro-batch. A probe captures and compiles for the expected micro-batch, and then waits for
the file that tells it the micro-batch to measure. Its helpers only compile some block types, from the last one on, so
that the probe finds them in the compiler's cache.

Blocks run in the model's order, each type at most `MAX_BLOCKS_PER_TYPE` times (a 54-layer model runs four layers), with
random weights and a random batch. Identities between the blocks note time and memory in forward and backward, so that a
block is measured between its real neighbours. The result has one entry per block type, identified by its first block.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import itertools
import multiprocessing
import os
import pickle
import signal
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from workbench.base.errors import WorkbenchError, root_exception
from workbench.base.machine import available_cores
from workbench.base.tensors import TensorSpec
from workbench.base.units import GIB
from workbench.capture import Graph, build_meta, capture
from workbench.capture.coupling.division import random_batch, repeated
from workbench.capture.export.opaque import is_opaque
from workbench.cost.profile import BlockMeasurement
from workbench.execution.blocks.block_module import BlockModule, BlockProgram
from workbench.execution.blocks.loss_runners import LabelCounter
from workbench.execution.blocks.step_context import StepContext, Timestamp
from workbench.execution.build import (
    cuda_is_untouched,
    preload,
    preload_compiler,
    prepare_compiler,
    runners,
    use_deterministic_kernels,
)
from workbench.measure.block_probes import (
    HELPERS,
    MAX_BLOCKS_PER_TYPE,
    MICRO_BATCH,
    PHASES,
    REQUEST,
    RESULT,
    ProbeRequest,
    has_nvidia_gpus,
)
from workbench.record.rundir import read_json, write_json

SUSTAINED_S = 2.0
"""Seconds that the device is kept busy, as in training, because its clocks fall under load; the second half counts.
Captured rounds are replayed as long: while they are captured the device rests, and its clocks rise."""
FEWEST, MOST = 6, 400
"""Least and largest number of sustained rounds."""
SINGLE = 3
"""Rounds on an idle device that count, after one that warms up."""
AHEAD = 1.2
"""Ratio of device time to host time below which the device waits before a round, so that the host stays ahead."""
FREE_SHARE = 0.5
"""Least free share of a GPU's memory; with less, another program runs there and would disturb the times."""
CYCLES_PER_S = 1.8e9
"""Clock that turns seconds into the cycles of `torch.cuda._sleep`."""
HEAD_START_S = 0.03
"""Seconds that the device sleeps first, so that the host is ahead and the times are the device's own."""

NotePhase = Callable[[str], None]
"""Function that is told the name of each phase that ended."""


@dataclass
class _Moment:
    """The state between two blocks."""

    at: Timestamp
    held: int
    """Bytes allocated."""
    peak: int
    """Most bytes allocated since the moment before."""
    begun: float
    """Host time in seconds when it came here."""
    ended: float
    """Host time in seconds when this had been noted."""


class _Log:
    """The moments of one forward and backward, by position in the chain of blocks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.forward: list[_Moment] = []
        self.backward: dict[int, _Moment] = {}
        self.lowest: int | None = None
        """First position whose block has a backward, which ends with the whole backward."""

    def note(self) -> _Moment:
        begun = time.perf_counter()
        at, held, peak = Timestamp.now(self._device), 0, 0
        if self._device.type == "cuda":
            held, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        return _Moment(at, held, peak, begun, time.perf_counter())

    def device_s(self) -> float:
        """Wait for the device and return the seconds from the first moment to the last."""
        _wait(self._device)
        return self.backward[0].at.seconds_since(self.forward[0].at)


class _Boundary(torch.autograd.Function):
    """An identity whose backward notes that the block at `position` has finished its backward."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, log: _Log, position: int) -> torch.Tensor:
        ctx.log, ctx.position = log, position
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.log.backward[ctx.position] = ctx.log.note()
        return gradients[0], None, None


class Probe:
    """A model captured for one micro-batch, whose blocks it compiles and measures on a device."""

    def __init__(
        self, request: ProbeRequest, micro_batch: int, device: torch.device, note: NotePhase | None = None
    ) -> None:
        note = note or (lambda _: None)
        self.micro_batch = micro_batch
        self._request, self._device = request, device
        model = build_meta(request.build)
        note("built")
        specs = {name: spec.batched(micro_batch) for name, spec in request.samples.items()}
        self._graph = capture(model, specs, name="probed", loss=request.loss, examples=request.examples)
        note("captured")
        self._blocks = sampled_blocks(self._graph)

    # Both are made with the first run: this process may start CUDA while it captures.

    @functools.cached_property
    def _chain(self) -> _Chain:
        return _Chain(self._graph, self._blocks, self._request, self._device)

    @functools.cached_property
    def _batch(self) -> Mapping[str, torch.Tensor]:
        request, size, device = self._request, self.micro_batch, self._device
        if request.examples is not None:
            return repeated(request.examples, size, device)
        vocab_size, share = request.vocab_size, request.labelled
        return random_batch(request.samples, size, vocab_size=vocab_size, labelled_share=share, device=device)

    def compile(self) -> None:
        with _device_lock(self._device, fcntl.LOCK_SH):
            self._chain.run(self._batch)
            _wait(self._device)

    def compile_some(self, helper: int, helpers: int) -> None:
        """Compile the block types of one helper; helpers begin with the last type, the probe with the first."""
        firsts: dict[tuple[object, ...], int] = {}
        for index in self._blocks:
            firsts.setdefault(self._graph.variant(self._graph.blocks[index]), index)
        mine = list(firsts.values())[:0:-1][helper - 1 :: helpers]
        with _device_lock(self._device, fcntl.LOCK_SH):
            for index in mine:
                self._chain.run_alone(index, self._batch)
            _wait(self._device)

    def measure(self) -> list[BlockMeasurement]:
        with _device_lock(self._device, fcntl.LOCK_EX):
            single, sustained, mhz = _sustained(lambda: self._chain.run(self._batch), self._device)
            measurements = _summary(self._graph, self._blocks, single, sustained, self.micro_batch)
            replayed = self._replayed(measurements)
        return [replace(measurement, clock_mhz=mhz, replayed=replayed) for measurement in measurements]

    def _replayed(self, measurements: Sequence[BlockMeasurement]) -> float:
        """Return the ratio of a CUDA graph's time to that of the same blocks launched; 1 if none can be captured.

        The graph holds the blocks before the first that plans launch, such as a head over labelled rows. That one would
        make the ratio too small: its launches may take the host longer than the device, and a graph has no host.
        """
        count = self._chain.num_capturable
        if self._device.type != "cuda" or count == 0:
            return 1.0
        launched = launched_s(self._graph, self._blocks[:count], measurements)
        torch.cuda.empty_cache()  # the graph has a memory pool of its own
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(self._device)
        try:
            stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(stream):
                self._chain.run_first(
                    count, self._batch
                )  # gradients are accumulated on the stream of their first forward
                self._chain.run_first(count, self._batch)
            with torch.cuda.graph(graph, stream=stream):
                self._chain.run_first(count, self._batch)
            graph.replay()
            ends = [Timestamp.now(self._device)]
            for _ in range(max(FEWEST, min(MOST, round(SUSTAINED_S / launched)))):
                graph.replay()
                ends.append(Timestamp.now(self._device))
            _wait(self._device)
        except (RuntimeError, WorkbenchError):  # out of memory, or code that does not run in a capture
            traceback.print_exc()
            return 1.0
        seconds = [end.seconds_since(begin) for begin, end in itertools.pairwise(ends)]
        return statistics.median(seconds[len(seconds) // 2 :]) / launched


def _sustained(run: Callable[[], _Log], device: torch.device) -> tuple[list[_Log], list[_Log], int | None]:
    """Run a chain many times; return the logs of single and of sustained rounds, and the device's clock at the end.

    Single rounds begin on an idle device, so that the host does not wait for it. Sustained ones are those of the second
    half of `SUSTAINED_S`, when the device is as busy as the host lets it be.
    """
    single, hosts_s = [], []
    for _ in range(1 + SINGLE):
        _wait(device)
        begun = time.perf_counter()
        single.append(run())
        hosts_s.append(time.perf_counter() - begun)
    _wait(device)
    host_s = min(hosts_s)
    _sleep(device, AHEAD * host_s)
    round_s = run().device_s()
    lacking_s = max(0.0, AHEAD * host_s - round_s)
    rounds = min(MOST, max(FEWEST, round(SUSTAINED_S / max(host_s, round_s))))
    _sleep(device, HEAD_START_S)
    logs = []
    for _ in range(rounds):
        # A device that would wait for its host waits before the round, not between kernels, where the times would be
        # the host's. One that need not wait must not, because a rested device clocks higher than in training.
        _sleep(device, lacking_s)
        logs.append(run())
    busy_at = clock_mhz(device)
    _wait(device)
    return single[1:], logs[rounds // 2 :], busy_at


def clock_mhz(device: torch.device) -> int | None:
    """Return the device's clock at this moment; None for a CPU, or if NVML does not tell."""
    with contextlib.suppress(Exception):
        return torch.cuda.clock_rate(device) if device.type == "cuda" else None
    return None


def _sleep(device: torch.device, seconds: float) -> None:
    if device.type == "cuda" and seconds:
        # Torch's own spinning kernel, private for want of a public one: it keeps the device busy, and the clock up.
        torch.cuda._sleep(int(seconds * CYCLES_PER_S))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def sampled_blocks(graph: Graph) -> list[int]:
    """Return the blocks to run: the first `MAX_BLOCKS_PER_TYPE` of each type, types that differ in gradients apart."""
    count: Counter[tuple[object, ...]] = Counter()
    sampled = []
    for block in graph.blocks:
        variant = graph.variant(block)
        count[variant] += 1
        if count[variant] <= MAX_BLOCKS_PER_TYPE:
            sampled.append(block.index)
    return sampled


class _ProbeContext(StepContext):
    """A step in which all blocks have one seed, as a capture of several blocks requires."""

    def block_seed(self, _block: int) -> int:
        return self.seed


class _Chain:
    """The sampled blocks in order, with weights of their own.

    A block that is skipped hands on a received value in place of each value of the same shape that it would send, so
    that the blocks before it have a backward; for other values it repeats what the last block of its type sent.
    """

    def __init__(self, graph: Graph, chain: list[int], request: ProbeRequest, device: torch.device) -> None:
        self._graph, self._device = graph, device
        self._bf16 = request.precision == "bf16"
        self._context = _ProbeContext(0, device)
        self._finished = graph.last_uses(0, len(graph.blocks))
        codes = {block.block_type: block.code for block in graph.blocks}
        ready = runners(graph, codes, device, request.compiled, "none")
        blocks = [graph.blocks[index] for index in chain]
        uses = Counter(name for block in blocks for name in block.parameters)
        self._parameters: dict[str, nn.Parameter] = {}
        for name in uses:
            spec = graph.parameters[name]
            # As GPT-2 begins. Products of zeros draw less power, and a GPU would run them at a higher clock.
            value = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device).normal_(0, 0.02)
            self._parameters[name] = nn.Parameter(value, requires_grad=name not in graph.frozen)
            if name not in graph.frozen:
                self._parameters[name].grad = torch.zeros_like(value)  # accumulated from the second micro-batch on
        if request.compiled:
            for parameter in self._parameters.values():
                # As `build` does for the weights of a training, so that the same code is compiled.
                torch._dynamo.mark_static_address(parameter, guard=False)
        buffers = {name: _buffer(spec, device) for name, spec in graph.buffers.items()}
        for name, value in graph.constants.items():
            spec = TensorSpec(name, tuple(value.shape), str(value.dtype).removeprefix("torch."))
            buffers[name] = _buffer(spec, device) if value.is_meta else value.detach().to(device)
        own = {name: parameter for name, parameter in self._parameters.items() if uses[name] == 1}
        self._shared = {name: parameter for name, parameter in self._parameters.items() if uses[name] > 1}
        self._modules = {
            block.index: BlockModule(
                BlockProgram(block, ready[block.block_type], compiled=request.compiled and not is_opaque(block.code)),
                own,
                buffers,
                self._context,
            )
            for block in blocks
        }
        selecting = (module.selecting_loss for module in self._modules.values())
        counted = {index: graph.label_counts[index] for index in selecting if index is not None}
        self._counter = LabelCounter(counted, graph.micro_batch)
        self._context.loss_denominators = [torch.ones((), device=device) for _ in graph.label_counts]

    @property
    def num_capturable(self) -> int:
        """Number of blocks, from the first on, that a plan could capture in CUDA graphs."""
        return len([*itertools.takewhile(lambda module: module.is_capturable, self._modules.values())])

    def run(self, batch: Mapping[str, torch.Tensor]) -> _Log:
        """Run one forward and backward of the chain."""
        log = _Log(self._device)
        self._context.label_counts = self._counter.count(batch)
        log.forward.append(log.note())
        with self._autocast():
            loss = self._forward(batch, log, len(self._modules))[self._graph.loss]
        loss.float().sum().backward()
        log.backward[0] = log.note()
        return log

    def run_first(self, count: int, batch: Mapping[str, torch.Tensor]) -> None:
        """Run forward and backward of the first `count` blocks; the gradients of what they send are ones."""
        with self._autocast():
            values = self._forward(batch, _Log(self._device), count)
        ends = [value for value in values.values() if value.requires_grad]
        torch.autograd.backward(ends, [torch.ones_like(value) for value in ends])

    def run_alone(self, index: int, batch: Mapping[str, torch.Tensor]) -> None:
        """Run one block's forward and backward on zeros that look to the compiler like the values of the chain."""
        block, module, log = self._graph.blocks[index], self._modules[index], _Log(self._device)
        received = []
        for name in block.receives:
            spec = self._graph.values[name]
            value = torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device=self._device)
            received.append(_bounded(value.requires_grad_(name in self._graph.differentiated), log, 0))
        borrowed = {name: self._shared[name] for name in module.borrowed_parameters}
        self._context.label_counts = self._counter.count(batch)
        with self._autocast():
            sends = module(borrowed, (*received, *(batch[name] for name in block.inputs)))
        ends = [value for value in sends if value.requires_grad]
        if ends:
            torch.autograd.backward(ends, [torch.ones_like(value) for value in ends])

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self._device.type, torch.bfloat16) if self._bf16 else contextlib.nullcontext()

    def _forward(self, batch: Mapping[str, torch.Tensor], log: _Log, count: int) -> dict[str, torch.Tensor]:
        """Return the values that are left behind the first `count` blocks of the chain."""
        values: dict[str, torch.Tensor] = {}  # in the order in which they were made
        last_of: dict[tuple[object, ...], tuple[torch.Tensor, ...]] = {}
        position = 0
        for block, finished in zip(self._graph.blocks, self._finished, strict=True):
            module, variant = self._modules.get(block.index), self._graph.variant(block)
            if module is not None:
                received = (_bounded(values[name], log, position) for name in block.receives)
                borrowed = {name: self._shared[name] for name in module.borrowed_parameters}
                last_of[variant] = module(borrowed, (*received, *(batch[name] for name in block.inputs)))
                if log.lowest is None and any(value.requires_grad for value in last_of[variant]):
                    log.lowest = position
                position += 1
                values |= dict(zip(block.sends, last_of[variant], strict=True))
            else:
                # In place of each value, the last unused one of those received that looks the same, or else itself
                unused = [value for name, value in values.items() if name in block.receives]
                for name, value in zip(block.sends, last_of[variant], strict=True):
                    look = (value.shape, value.dtype, value.requires_grad)
                    alike = [at for at, v in enumerate(unused) if (v.shape, v.dtype, v.requires_grad) == look]
                    values[name] = unused.pop(alike[-1]) if alike else value
            for name in finished:
                del values[name]
            if module is not None:
                log.forward.append(log.note())
                if position == count < len(self._modules):
                    break
        return values


def _bounded(value: torch.Tensor, log: _Log, position: int) -> torch.Tensor:
    return _Boundary.apply(value, log, position) if value.requires_grad else value


def _buffer(spec: TensorSpec, device: torch.device) -> torch.Tensor:
    """Return zeros for integers, which may index, else ones: masks hide nothing, variances divide by 1."""
    dtype = getattr(torch, spec.dtype)
    make = torch.ones if dtype.is_floating_point or dtype == torch.bool else torch.zeros
    return make(spec.shape, dtype=dtype, device=device)


def _summary(
    graph: Graph, chain: list[int], single: list[_Log], sustained: list[_Log], micro_batch: int
) -> list[BlockMeasurement]:
    """Return the medians over rounds and blocks of each type.

    The first block of a type is left out if there are others, because it follows a block of another type. The host's
    times are those of the single round in which they were shortest: other processes, such as probes that still compile,
    only lengthen them.
    """
    positions_of: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for position, index in enumerate(chain):
        positions_of[graph.variant(graph.blocks[index])].append(position)
    measurements = []
    for positions in positions_of.values():
        counted = positions[1:] or positions
        device = [_figures(graph, chain, position, log)[:4] for position in counted for log in sustained]
        host = [_medians(_figures(graph, chain, position, log)[4:] for position in counted) for log in single]
        forward_ms, backward_ms, held_bytes, workspace_bytes = _medians(device)
        forward_host_ms, backward_host_ms = min(host, key=sum)
        measurements.append(
            BlockMeasurement(
                first_block=chain[positions[0]],
                micro_batch=micro_batch,
                forward_ms=forward_ms,
                backward_ms=backward_ms,
                held_bytes=held_bytes,
                workspace_bytes=workspace_bytes,
                forward_host_ms=forward_host_ms,
                backward_host_ms=backward_host_ms,
            )
        )
    return measurements


def launched_s(graph: Graph, blocks: Sequence[int], measurements: Sequence[BlockMeasurement]) -> float:
    """Return the seconds of forward and backward of these blocks by what was measured of them.

    The cost model multiplies these times by the ratio of the replayed blocks' time to them. The rounds' own time would
    not do: with small micro-batches, a host that falls behind somewhere in each round makes them longer, but not the
    medians of the blocks, and the ratio would take the host's delay off blocks that never had it.
    """
    ms = {graph.variant(graph.blocks[one.first_block]): one.forward_ms + one.backward_ms for one in measurements}
    return sum(ms[graph.variant(graph.blocks[index])] for index in blocks) / 1e3


def _medians(rows: Iterable[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(statistics.median(column) for column in zip(*rows, strict=True))


def _figures(graph: Graph, chain: list[int], position: int, log: _Log) -> tuple[float, ...]:
    """Return a block's forward_ms, backward_ms, held_bytes, workspace_bytes, forward_host_ms and backward_host_ms.

    The host's times are 0 on a CPU, which also computes.
    """
    before, after = log.forward[position], log.forward[position + 1]
    # A block that receives nothing differentiable notes no moment: its backward counts to the one before the next note.
    begun = after if position == len(chain) - 1 else log.backward.get(position + 1)
    ended = log.backward.get(0 if position == log.lowest else position)
    host = (0.0, 0.0) if before.at.event is None else (1e3 * (after.begun - before.ended), 0.0)
    forward_ms, backward_ms = 1e3 * after.at.seconds_since(before.at), 0.0
    held, workspace = after.held - before.held, after.peak - after.held
    if begun is not None and ended is not None:
        backward_ms = 1e3 * ended.at.seconds_since(begun.at)
        host = host[0], 0.0 if before.at.event is None else 1e3 * (ended.begun - begun.ended)
        trained = [name for name in graph.blocks[chain[position]].parameters if name not in graph.frozen]
        gradients = 4 * sum(graph.parameters[name].numel for name in trained)
        workspace = max(workspace, ended.peak - after.held - gradients)
    return forward_ms, backward_ms, float(held), float(max(0, workspace)), *host


@contextlib.contextmanager
def _device_lock(device: torch.device, operation: int) -> Iterator[None]:
    """Let probes of one device compile side by side (`LOCK_SH`) and measure one after the other (`LOCK_EX`)."""
    which = torch.cuda.get_device_properties(device).uuid if device.type == "cuda" else "cpu"
    name = f"workbench-probe-{os.getuid()}-{which}.lock"
    with (Path(tempfile.gettempdir()) / name).open("w") as file:
        fcntl.flock(file, operation)
        yield


def main() -> None:
    folder, named = Path(sys.argv[1]), sys.argv[2] == "1"
    begun = psutil.Process().create_time()
    if has_nvidia_gpus():
        # NVML and CUDA's driver, which torch would ask, are for the probes. Private, and so named since torch 2.1.
        torch.cuda._cached_device_count = 1
        preload_compiler()
    if named:
        preload({})
    torch.cuda._cached_device_count = None
    gc.freeze()  # otherwise each probe's first collection would copy the pages of every object that it shares
    seconds = {"imported": round(time.time() - begun, 2)}
    request = _request(folder)
    seconds["asked"] = round(time.time() - begun, 2)
    sizes = len(request.micro_batches)
    helpers = max(0, min(HELPERS, available_cores() // (2 * sizes) - 1)) if request.compiled else 0
    # Code of the user's was imported to read the request; it may have started CUDA, which does not survive a fork.
    context = multiprocessing.get_context("fork") if cuda_is_untouched() else multiprocessing.get_context("spawn")
    probes = [context.Process(target=_run, args=(folder, slot, begun, seconds)) for slot in range(sizes)]
    for process in probes:
        process.start()
    for slot, helper in itertools.product(range(sizes), range(1, helpers + 1)):
        context.Process(target=_help, args=(folder, slot, helper, helpers)).start()
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    for slot, process in enumerate(probes):
        process.join()
        if not (folder / f"{slot}{RESULT}").exists():  # a signal has ended it
            write_json(folder / f"{slot}{RESULT}", {"reason": f"exit status {process.exitcode}"})


def _end_with(parent: int) -> None:
    """End this process and all probes as soon as the process that plans is gone."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


def _request(folder: Path) -> ProbeRequest:
    """Wait for the request and return it; in a process that was forked, the user's modules are imported already."""
    request: ProbeRequest = pickle.loads(_wait_for_file(folder / REQUEST).read_bytes())
    return request


def _help(folder: Path, slot: int, helper: int, helpers: int) -> None:
    request = _request(folder)
    with _starting(request, slot) as device:
        probe = Probe(request, request.micro_batches[slot], device)
    probe.compile_some(helper, helpers)


def _run(folder: Path, slot: int, begun: float, seconds: dict[str, float]) -> None:
    """Measure the blocks as probe number `slot`, and write what was measured, or why nothing was."""

    def note(phase: str) -> None:
        """Note the seconds from the start of the probes to the end of a phase."""
        seconds[phase] = round(time.time() - begun, 2)
        write_json(folder / f"{slot}{PHASES}", seconds)

    try:
        blocks = [vars(measurement) for measurement in _measured(folder, slot, note)]
    except BaseException as error:
        reason = traceback.format_exception_only(error)[-1].strip().removeprefix("SystemExit: ")[:200]
        write_json(folder / f"{slot}{RESULT}", {"reason": reason})
        raise
    note("measured")
    write_json(folder / f"{slot}{RESULT}", {"blocks": blocks})


def _measured(folder: Path, slot: int, note: NotePhase) -> list[BlockMeasurement]:
    request, probe = _request(folder), None
    with _starting(request, slot) as device:
        probe = Probe(request, request.micro_batches[slot], device, note)
    try:
        probe.compile()
        note("compiled")
    except Exception as error:
        if not isinstance(root_exception(error), torch.OutOfMemoryError):
            raise
        probe = None
    micro_batch = int(read_json(_wait_for_file(folder / f"{slot}{MICRO_BATCH}")))
    note("assigned")
    if probe is None or probe.micro_batch != micro_batch:
        del probe
        torch._dynamo.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        probe = Probe(request, micro_batch, device)
        probe.compile()
    return probe.measure()


@contextlib.contextmanager
def _starting(request: ProbeRequest, slot: int) -> Iterator[torch.device]:
    """Start the device of a probe, and the compiler, while the body of the `with` statement captures the model."""
    if request.deterministic:
        use_deterministic_kernels()
    if not torch.cuda.is_available():
        yield torch.device("cpu")
        return
    device = torch.device("cuda", slot % torch.cuda.device_count())  # probes are spread over the GPUs
    starting = threading.Thread(target=torch.cuda.synchronize, args=(device,))
    starting.start()
    yield device
    starting.join()
    torch.cuda.set_device(device)
    prepare_compiler()
    torch.set_float32_matmul_precision("high" if request.precision == "bf16" else "highest")
    free, total = torch.cuda.mem_get_info(device)
    if free < FREE_SHARE * total:
        raise SystemExit(f"the GPU is in use: {free / GIB:.0f} of {total / GIB:.0f} GiB are free")


def _wait_for_file(file: Path) -> Path:
    """Return `file` once it exists; end this process if the one that started it is gone."""
    parent = os.getppid()
    while not file.exists():
        if os.getppid() != parent:
            raise SystemExit("the process that started this probe is gone")
        time.sleep(0.02)
    return file


if __name__ == "__main__":
    main()
