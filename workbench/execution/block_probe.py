"""What one block of each kind takes on this device, as training runs it: run in a process of its own by `runs.probing`.

    python -m workbench.execution.block_probe FOLDER NUMBER HELPER HELPERS

It imports what it needs and waits for the request in FOLDER, captures and compiles for the micro-batch that it guesses,
then waits for the file that tells probe NUMBER which one to measure. HELPER 0 is the probe; each of the HELPERS others
only compiles some kinds of blocks for it, from the last kind on, and leaves them in the compiler's cache, where the
probe finds them.

Blocks are compiled and run in the model's order, each kind at most `MAX_BLOCKS_PER_TYPE` times (a 54-layer model runs four layers),
with random weights and a random batch. Between two blocks stand identities that note the time, forward and backward,
and what the allocator holds, so that a block is seen between its real neighbours. The result has one entry a kind,
named by the index of its first block.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import pickle
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from workbench.capture import Block, Graph, build_meta, capture
from workbench.capture.tensor_sharding import BlockSharding
from workbench.cost.correction import BlockMeasurement
from workbench.errors import root_exception
from workbench.execution.blocks.block_module import BlockModule
from workbench.execution.blocks.context import StepContext
from workbench.execution.blocks.labelled_head import LabelCounter
from workbench.execution.build import prepare_compiler, runners
from workbench.execution.deterministic import use_deterministic_kernels
from workbench.execution.random_batch import random_batch, repeated
from workbench.measure.probe_request import MAX_BLOCKS_PER_TYPE, MICRO_BATCH, REQUEST, RESULT, ProbeRequest
from workbench.rundir import read_json, write_json
from workbench.tensors import TensorSpec
from workbench.units import GIB

SUSTAINED_S = 2.0
"""The device is kept busy for so long, as training keeps it: its clocks fall under load. The second half counts."""
FEWEST, MOST = 6, 400
SINGLE = 3
"""Rounds on an idle device that count, after one that does not."""
AHEAD = 1.2
"""A device that a round keeps busy for less than so many times what it takes the host waits before the round."""
FREE_SHARE = 0.5
"""Of a GPU's memory, at least; with less, something else runs there and would disturb the times."""
CYCLES_PER_S = 1.8e9
HEAD_START_S = 0.03
"""The device first sleeps, so that the host is ahead and the times are the device's own."""

Note = Callable[[str], None]
"""Told what has just been done."""


@dataclass
class _Moment:
    """Between two blocks: when, what is held, and the most that was held since the last moment."""

    event: Any
    held: int
    peak: int
    begun: float
    ended: float
    """When the host came, and when it had taken this down."""


class _Log:
    """Moments of one forward and backward, by the position in the chain at which they were noted."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.forward: list[_Moment] = []
        self.backward: dict[int, _Moment] = {}
        self.lowest: int | None = None
        """The first position whose block has a backward: it ends with the whole."""

    def note(self) -> _Moment:
        begun = time.perf_counter()
        if self._device.type != "cuda":
            return _Moment(_HostEvent(), 0, 0, begun, begun)
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        held, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return _Moment(event, held, peak, begun, time.perf_counter())

    def device_s(self) -> float:
        """From the first moment to the last, once the device has come there."""
        _wait(self._device)
        elapsed_ms: float = self.forward[0].event.elapsed_time(self.backward[0].event)
        return 1e-3 * elapsed_ms


class _HostEvent:
    """The two methods of a CUDA event, for a device that computes while its host waits."""

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def elapsed_time(self, later: _HostEvent) -> float:
        return 1e3 * (later._at - self._at)


class _Boundary(torch.autograd.Function):
    """Identity; its backward notes that the block at `position` has finished its own."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, log: _Log, position: int) -> torch.Tensor:
        ctx.log, ctx.position = log, position
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.log.backward[ctx.position] = ctx.log.note()
        return gradients[0], None, None


def _silent(done: str) -> None:
    pass


class Probe:
    """Captured for one micro-batch."""

    def __init__(self, request: ProbeRequest, micro_batch: int, device: torch.device, note: Note | None = None) -> None:
        note = note or _silent
        self.micro_batch = micro_batch
        self._device = device
        model = build_meta(request.build)
        note("built")
        specs = {name: spec.batched(micro_batch) for name, spec in request.samples.items()}
        self._graph = capture(model, specs, name="probed")
        note("captured")
        self._blocks = chosen(self._graph)
        self._chain = _Chain(self._graph, self._blocks, request, device)
        self._batch = _batch(request, micro_batch, device)

    def compile(self) -> None:
        with _turn(self._device, fcntl.LOCK_SH):
            self._chain.run(self._batch)
            _wait(self._device)

    def compile_some(self, helper: int, helpers: int) -> None:
        """Each of the helpers takes others of the kinds; the probe itself begins with the first."""
        firsts: dict[tuple[object, ...], int] = {}
        for index in self._blocks:
            firsts.setdefault(self._graph.variant(self._graph.blocks[index]), index)
        mine = list(firsts.values())[:0:-1][helper - 1 :: helpers]
        with _turn(self._device, fcntl.LOCK_SH):
            for index in mine:
                self._chain.run_alone(index, self._batch)
            _wait(self._device)

    def measure(self) -> list[BlockMeasurement]:
        with _turn(self._device, fcntl.LOCK_EX):
            rounds = _sustained(lambda: self._chain.run(self._batch), self._device)
        return _summary(self._graph, self._blocks, rounds, self.micro_batch)


def _batch(request: ProbeRequest, micro_batch: int, device: torch.device) -> dict[str, torch.Tensor]:
    if request.examples is not None:
        return repeated(request.examples, micro_batch, device)
    return random_batch(
        request.samples, micro_batch, vocab_size=request.vocab_size, labelled_share=request.labelled, device=device
    )


@dataclass(frozen=True)
class _Rounds:
    """What was noted in rounds of a chain."""

    single: list[_Log]
    """Begun on an idle device, where the host need not wait."""
    sustained: list[_Log]
    """One after the other for `SUSTAINED_S`, the device as busy as the host lets it be: those of the second half."""
    clock_mhz: int | None
    """See `BlockMeasurement`."""


def _sustained(run: Callable[[], _Log], device: torch.device) -> _Rounds:
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
        # Ahead of the round instead of between its kernels, where the times would be the host's. A device that need not
        # wait must not: resting, it keeps clocks that training does not see.
        _sleep(device, lacking_s)
        logs.append(run())
    busy_at = clock_mhz(device)
    _wait(device)
    return _Rounds(single[1:], logs[rounds // 2 :], busy_at)


def clock_mhz(device: torch.device) -> int | None:
    """At which the device runs now; None for a CPU, or where NVML does not say."""
    with contextlib.suppress(Exception):
        return torch.cuda.clock_rate(device) if device.type == "cuda" else None
    return None


def _sleep(device: torch.device, seconds: float) -> None:
    if device.type == "cuda" and seconds:
        torch.cuda._sleep(int(seconds * CYCLES_PER_S))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def chosen(graph: Graph) -> list[int]:
    """The blocks that run: of each kind the first `MAX_BLOCKS_PER_TYPE`; what differs in its gradients is another kind."""
    seen: Counter[tuple[object, ...]] = Counter()
    found = []
    for block in graph.blocks:
        kind = graph.variant(block)
        seen[kind] += 1
        if seen[kind] <= MAX_BLOCKS_PER_TYPE:
            found.append(block.index)
    return found


class _Chain:
    """The chosen blocks with weights of their own.

    One that is passed over hands on what it receives where it would send the like (so that the blocks before it have a
    backward), else what the last of its kind sent.
    """

    def __init__(self, graph: Graph, chain: list[int], request: ProbeRequest, device: torch.device) -> None:
        self._graph, self._device = graph, device
        self._bf16 = request.precision == "bf16"
        self._context = StepContext(0, device)
        self._finished = graph.last_uses(0, len(graph.blocks))
        codes = {block.block_type: block.code for block in graph.blocks}
        ready = runners(graph, codes, device, request.compiled, "none")
        blocks = [graph.blocks[index] for index in chain]
        uses = Counter(name for block in blocks for name in block.parameters)
        self._parameters = {name: _parameter(graph.parameters[name], name not in graph.frozen, device) for name in uses}
        if request.compiled:
            for parameter in self._parameters.values():
                torch._dynamo.mark_static_address(parameter, guard=False)
        buffers = {name: _buffer(spec, device) for name, spec in graph.buffers.items()}
        for name, value in graph.constants.items():
            buffers[name] = _buffer(_spec(name, value), device) if value.is_meta else value.detach().to(device)
        own = {name: parameter for name, parameter in self._parameters.items() if uses[name] == 1}
        self._shared = {name: parameter for name, parameter in self._parameters.items() if uses[name] > 1}
        self._modules = {
            block.index: BlockModule(
                block,
                ready[block.block_type],
                own,
                buffers,
                self._context,
                "none",
                BlockSharding(),
                compiled=request.compiled,
            )
            for block in blocks
        }
        selecting = (module.selecting_loss for module in self._modules.values())
        counted = {index: graph.label_counts[index] for index in selecting if index is not None}
        self._counter = LabelCounter(counted, graph.micro_batch)
        self._context.loss_denominators = [torch.ones((), device=device) for _ in graph.label_counts]

    def run(self, batch: Mapping[str, torch.Tensor]) -> _Log:
        """One forward and backward of the chain."""
        log = _Log(self._device)
        self._context.label_counts = self._counter.count(batch)
        log.forward.append(log.note())
        with self._autocast():
            loss = self._forward(batch, log)
        loss.float().sum().backward()
        log.backward[0] = log.note()
        return log

    def run_alone(self, index: int, batch: Mapping[str, torch.Tensor]) -> None:
        """One block's forward and backward, on made-up values that look to the compiler like those of the chain."""
        block, module, log = self._graph.blocks[index], self._modules[index], _Log(self._device)
        received = (_bounded(self._made_up(name), log, 0) for name in block.receives)
        borrowed = {name: self._shared[name] for name in module.borrowed_parameters}
        self._context.label_counts = self._counter.count(batch)
        with self._autocast():
            sends = module(borrowed, (*received, *(batch[name] for name in block.inputs)))
        ends = [value for value in sends if value.requires_grad]
        if ends:
            torch.autograd.backward(ends, [torch.ones_like(value) for value in ends])

    def _made_up(self, name: str) -> torch.Tensor:
        spec = self._graph.values[name]
        value = torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device=self._device)
        return value.requires_grad_(name in self._graph.differentiated)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self._device.type, torch.bfloat16) if self._bf16 else contextlib.nullcontext()

    def _forward(self, batch: Mapping[str, torch.Tensor], log: _Log) -> torch.Tensor:
        values: dict[str, torch.Tensor] = {}  # the later one was made, the later it stands
        last_of: dict[tuple[object, ...], tuple[torch.Tensor, ...]] = {}
        position = 0
        for block, finished in zip(self._graph.blocks, self._finished, strict=True):
            module, kind = self._modules.get(block.index), self._graph.variant(block)
            if module is not None:
                received = (_bounded(values[name], log, position) for name in block.receives)
                borrowed = {name: self._shared[name] for name in module.borrowed_parameters}
                last_of[kind] = module(borrowed, (*received, *(batch[name] for name in block.inputs)))
                if log.lowest is None and any(value.requires_grad for value in last_of[kind]):
                    log.lowest = position
                position += 1
                values |= dict(zip(block.sends, last_of[kind], strict=True))
            else:
                passed = _passed_on([value for name, value in values.items() if name in block.receives], last_of[kind])
                values |= dict(zip(block.sends, passed, strict=True))
            for name in finished:
                del values[name]
            if module is not None:
                log.forward.append(log.note())
        return values[self._graph.loss]


def _passed_on(received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """For each that is sent, the last that is received and looks the same; itself, where there is none left."""
    left = list(received)
    found = []
    for value in sent:
        alike = [index for index, other in enumerate(left) if _looks(other) == _looks(value)]
        found.append(left.pop(alike[-1]) if alike else value)
    return found


def _looks(value: torch.Tensor) -> tuple[object, ...]:
    return value.shape, value.dtype, value.requires_grad


def _bounded(value: torch.Tensor, log: _Log, position: int) -> torch.Tensor:
    return _Boundary.apply(value, log, position) if value.requires_grad else value


def _parameter(spec: TensorSpec, trained: bool, device: torch.device) -> nn.Parameter:
    value = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device).normal_(0, 0.02)
    parameter = nn.Parameter(value, requires_grad=trained)
    if trained:
        parameter.grad = torch.zeros_like(value)  # from the second micro-batch on, gradients are added
    return parameter


def _buffer(spec: TensorSpec, device: torch.device) -> torch.Tensor:
    """Zeros where a number may index, ones elsewhere: a mask that hides nothing, a variance that divides by one."""
    dtype = getattr(torch, spec.dtype)
    make = torch.ones if dtype.is_floating_point or dtype == torch.bool else torch.zeros
    return make(spec.shape, dtype=dtype, device=device)


def _spec(name: str, value: torch.Tensor) -> TensorSpec:
    return TensorSpec(name, tuple(value.shape), str(value.dtype).removeprefix("torch."))


def _summary(graph: Graph, chain: list[int], rounds: _Rounds, micro_batch: int) -> list[BlockMeasurement]:
    """Medians over the rounds and over the blocks of a kind, but for its first where there are others: what stands
    before a first one is of another kind. The host's times are those of the single round in which it was fastest: what
    else runs there, as other probes that still compile, only slows it down."""
    positions: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for position, index in enumerate(chain):
        positions[graph.variant(graph.blocks[index])].append(position)
    found = []
    for places in positions.values():
        counted = places[1:] or places
        seen = [_of_block(graph, chain, position, log) for position in counted for log in rounds.sustained]
        host = [_medians(_host_of_block(chain, position, log) for position in counted) for log in rounds.single]
        forward, backward, held, workspace = _medians(seen)
        host_forward, host_backward = min(host, key=sum)
        found.append(
            BlockMeasurement(
                chain[places[0]],
                micro_batch,
                forward,
                backward,
                held,
                workspace,
                host_forward,
                host_backward,
                rounds.clock_mhz,
            )
        )
    return found


def _medians(rows: Iterable[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(statistics.median(column) for column in zip(*rows, strict=True))


def _moments(chain: list[int], position: int, log: _Log) -> tuple[_Moment, _Moment, _Moment | None, _Moment | None]:
    """Around a block's forward, and around its backward."""
    before, after = log.forward[position], log.forward[position + 1]
    # A block that receives nothing differentiable notes nothing: its backward is part of the one before the next note.
    begun = after if position == len(chain) - 1 else log.backward.get(position + 1)
    return before, after, begun, log.backward.get(0 if position == log.lowest else position)


def _host_of_block(chain: list[int], position: int, log: _Log) -> tuple[float, float]:
    """Milliseconds that the host is busy with a block's forward and backward; on a CPU, no more than with computing."""
    before, after, begun, ended = _moments(chain, position, log)
    if isinstance(before.event, _HostEvent):
        return 0.0, 0.0
    backward = 0.0 if begun is None or ended is None else ended.begun - begun.ended
    return 1e3 * (after.begun - before.ended), 1e3 * backward


def _of_block(graph: Graph, chain: list[int], position: int, log: _Log) -> tuple[float, float, float, float]:
    before, after, begun, ended = _moments(chain, position, log)
    forward = before.event.elapsed_time(after.event)
    held, workspace = after.held - before.held, after.peak - after.held
    backward = 0.0
    if begun is not None and ended is not None:
        backward = begun.event.elapsed_time(ended.event)
        gradients = 4 * sum(graph.parameters[name].numel for name in _trained(graph, graph.blocks[chain[position]]))
        workspace = max(workspace, ended.peak - after.held - gradients)
    return forward, backward, float(held), float(max(0, workspace))


def _trained(graph: Graph, block: Block) -> list[str]:
    return [name for name in block.parameters if name not in graph.frozen]


@contextlib.contextmanager
def _turn(device: torch.device, kind: int) -> Iterator[None]:
    """BlockProbes on the same device compile side by side (`LOCK_SH`), then measure one after the other (`LOCK_EX`)."""
    which = torch.cuda.get_device_properties(device).uuid if device.type == "cuda" else "cpu"
    name = f"workbench-probe-{os.getuid()}-{which}.lock"
    with (Path(tempfile.gettempdir()) / name).open("w") as file:
        fcntl.flock(file, kind)
        yield


class _Clock:
    """Seconds from this process's start until each thing was done."""

    def __init__(self) -> None:
        self._begun = psutil.Process().create_time()
        self.seconds: dict[str, float] = {}

    def note(self, done: str) -> None:
        self.seconds[done] = round(time.time() - self._begun, 2)


def main() -> None:
    folder, (number, helper, helpers) = Path(sys.argv[1]), map(int, sys.argv[2:])
    clock = _Clock()
    clock.note("imported")
    device = _device(number)
    request: ProbeRequest = pickle.loads(_awaited(folder / REQUEST).read_bytes())
    clock.note("asked")
    if request.deterministic:
        use_deterministic_kernels()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if request.precision == "bf16" else "highest")
        free, total = torch.cuda.mem_get_info(device)
        if free < FREE_SHARE * total:
            raise SystemExit(f"the GPU is in use: {free / GIB:.0f} of {total / GIB:.0f} GiB are free")
    if helper:
        Probe(request, request.micro_batches[number], device).compile_some(helper, helpers)
        return
    probe = _guessed(request, request.micro_batches[number], device, clock.note)
    micro_batch = int(read_json(_awaited(folder / f"{number}{MICRO_BATCH}")))
    clock.note("told")
    if probe is None or probe.micro_batch != micro_batch:
        del probe
        _forget(device)
        probe = Probe(request, micro_batch, device)
        probe.compile()
    found = probe.measure()
    clock.note("measured")
    write_json(folder / f"{number}{RESULT}", {"blocks": [one.to_json() for one in found], "seconds": clock.seconds})


def _device(number: int) -> torch.device:
    """The probe's own: GPUs take turns. CUDA starts beside the import of the compiler; each takes a second or more."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", number % torch.cuda.device_count())
    torch.cuda.set_device(device)
    starting = threading.Thread(target=torch.cuda.synchronize)
    starting.start()
    prepare_compiler()
    starting.join()
    return device


def _guessed(request: ProbeRequest, micro_batch: int, device: torch.device, note: Note) -> Probe | None:
    """A probe for the micro-batch that most likely will be asked for; None where the device has no room for it."""
    try:
        probe = Probe(request, micro_batch, device, note)
        probe.compile()
    except Exception as error:
        if isinstance(root_exception(error), torch.OutOfMemoryError):
            return None
        raise
    note("compiled")
    return probe


def _forget(device: torch.device) -> None:
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _awaited(file: Path) -> Path:
    """`file`, once it is there."""
    parent = os.getppid()
    while not file.exists():
        if os.getppid() != parent:
            raise SystemExit("whoever asked is gone")
        time.sleep(0.02)
    return file


if __name__ == "__main__":
    main()
