"""Block-sparse products beside dense and masked dense ones: time of forward and backward, and where sparse breaks even.

    python benchmarks/sparse_kernels.py --out sparse_kernels.json             # everything, on one GPU
    python benchmarks/sparse_kernels.py --profile --out sparse_profile.json   # one layer, product by product
    python benchmarks/sparse_kernels.py --fit sparse_kernels_*.json           # the constants of the cost model
    TRITON_INTERPRET=1 python benchmarks/sparse_kernels.py --rehearse --out rehearsal.json    # on a CPU

All tensors are bf16, without bias. A contender's forward, and its forward with backward (gradients to input and
weight), are captured as CUDA graphs, so that the host's time does not count. The contenders of one layer run in turns
over several rounds; each figure is the median of the rounds. The file is written after every layer. What does not fit
into `--seconds` is named in it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from workbench.cost.hardware import Cluster, Device
from workbench.cost.profile import break_even_sparsity
from workbench.cost.sparse_matrices import none_and_all_stored, relative_times
from workbench.sparsity.kernels import BlockIndex, block_sparse_linear, to_compact, to_dense

BLOCKS = (64, 32, 16)
SPARSITIES = (0.8, 0.9, 0.95)
GOALS = {64: 1.5, 32: 1.2}
"""Speed-up over dense, forward and backward, at sparsity 0.9 in the feed-forward layers of scaled BERT."""
ROUNDS = 7
TIMES = ("forward_ms", "backward_ms")


@dataclass(frozen=True)
class Layer:
    """A linear layer: its weight is [rows, cols]."""

    name: str
    rows: int
    cols: int


LAYERS = (
    Layer("scaled BERT, feed-forward in", 7680, 1920),
    Layer("scaled BERT, feed-forward out", 1920, 7680),
    Layer("scaled BERT, attention", 1920, 1920),
    Layer("BERT-Base, feed-forward in", 3072, 768),
    Layer("BERT-Base, feed-forward out", 768, 3072),
    Layer("BERT-Base, attention", 768, 768),
    Layer("BERT-Medium, feed-forward in", 2048, 512),
    Layer("BERT-Medium, attention", 512, 512),
)


@dataclass(frozen=True)
class Settings:
    """Sizes and limits of one call."""

    device: str
    tokens: int
    rounds: int
    deadline: float
    layers: tuple[Layer, ...] = LAYERS
    sparsities: tuple[float, ...] = SPARSITIES
    blocks: tuple[int, ...] = BLOCKS


Forward = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Contender:
    """One way to compute a layer; `forward(hidden, weight)` has a gradient unless `trains` is false."""

    forward: Forward
    weight: Tensor
    index: BlockIndex | None = None
    trains: bool = True

    def row(self, hidden: Tensor) -> dict[str, Any]:
        """Return the bytes of the weight, and the difference from the masked dense product relative to its norm."""
        row: dict[str, Any] = {}
        if self.weight.layout != torch.strided:
            return row
        row["weight_bytes"] = self.weight.nbytes
        if self.index is not None:
            row["index_bytes"] = self.index.data.nbytes
            expected = functional.linear(hidden[:256], to_dense(self.weight, self.index)).float()
            found = self.forward(hidden[:256], self.weight).float()
            row["difference"] = float((found - expected).norm() / expected.norm())
        return row


Label = dict[str, Any]
"""Name of a contender with its block and sparsity, as a row has them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("sparse_kernels.json"))
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--seconds", type=float, default=420, help="start nothing new after this time")
    parser.add_argument("--profile", action="store_true", help="time each product and each configuration of one layer")
    parser.add_argument("--rehearse", action="store_true", help="tiny layers in the interpreter, to try the code")
    parser.add_argument("--fit", type=Path, nargs="+", help="print the cost model's constants by such files")
    arguments = parser.parse_args()
    if arguments.fit:
        print(*fitted([json.loads(path.read_text()) for path in arguments.fit]), sep="\n")
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = Settings(device, arguments.tokens, ROUNDS, time.monotonic() + arguments.seconds)
    if arguments.rehearse:
        settings = _tiny(settings)
    elif device == "cpu":
        print("There is no GPU here, so that nothing is measured. Predicted:")
        print(*predictions(), sep="\n")
        return
    facts = {name: importlib.metadata.version(name) for name in ("torch", "triton")}
    machine = torch.cuda.get_device_name() if device == "cuda" else "CPU, in the interpreter: times mean nothing"
    report: dict[str, Any] = {"machine": machine, **facts, "tokens": settings.tokens, "dtype": "bf16", "rows": []}
    write = partial(_write, arguments.out, report)
    try:
        (profile if arguments.profile else compare)(settings, report, write)
    except Exception as error:
        report["error"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        write()
    print(f"Written to {arguments.out}.")


def predictions() -> list[str]:
    """Return one line per layer and block with the predicted speed-up at sparsity 0.9 and the break-even sparsity."""
    return [
        f"{layer.name}, block {block}, {name}: {_speed_up(layer, block, device):.2f} × dense at 0.9, faster than dense "
        f"from sparsity {break_even_sparsity(none_and_all_stored(block, [(layer.rows, layer.cols)]), device):.2f}"
        for name in ("h100", "h200")
        for device in [Cluster.of(name, gpus=1).device]
        for layer in LAYERS
        for block in BLOCKS
    ]


def _speed_up(layer: Layer, block: int, device: Device) -> float:
    times = relative_times(block, layer.rows, layer.cols, 0.1)
    return 3 / sum(time.on(device) for time in times)


def fitted(reports: Sequence[dict[str, Any]]) -> list[str]:
    """Return the parts of each product's time by block (`StoredProduct`), and how far they are from the measured steps.

    Times are over a third of the layer's dense step. The forward reads inputs and writes outputs, the gradient to the
    input the other way round, and the gradient to the weight reads both, in times that the device's bandwidth gives.
    Least squares of relative errors find the forward first, as which the gradient to the input is computed, and then
    what is left of the backward.
    """
    lines = []
    for block in BLOCKS:
        values, devices = [], []
        for report in reports:
            device = _device(report)
            dense = {row["layer"]: row["step_ms"] / 3 for row in report["rows"] if row["contender"] == "dense"}
            found = [row for row in report["rows"] if row["contender"] == "block-sparse" and row["block"] == block]
            devices += [device.name] * len(found)
            for row in found:
                moved = [device.flops_per_byte / row[name] for name in ("rows", "cols")]
                times = [row[name] / dense[row["layer"]] for name in TIMES]
                values.append((*moved, 1 - row["sparsity"], *times))
        outputs, inputs, stored, forward, backward = torch.tensor(values, dtype=torch.double).T
        parts = torch.stack([stored, outputs, inputs], 1)
        ones = torch.ones(len(values), 1, dtype=torch.double)
        product = torch.linalg.lstsq(parts / forward[:, None], ones).solution
        to_input = (parts[:, [0, 2, 1]] @ product).squeeze(1)
        reads = torch.stack([stored, outputs + inputs], 1)
        left = (1 - to_input / backward)[:, None]
        gradient = torch.linalg.lstsq(reads / backward[:, None], left).solution
        errors = ((parts @ product + reads @ gradient).squeeze(1) + to_input) / (forward + backward) - 1
        numbers = [[float(f"{value:.3g}") for value in each.flatten().tolist()] for each in (product, gradient)]
        lines.append(f"block {block}: product {numbers[0]}, gradient to the weight {numbers[1]}")
        for name in dict.fromkeys(devices):
            of = errors[torch.tensor([device == name for device in devices])]
            lines.append(
                f"    {len(of)} steps on {name}: error {of.square().mean().sqrt():.1%} rms, "
                f"{of.min():+.0%} to {of.max():+.0%}"
            )
    return lines


def _device(report: dict[str, Any]) -> Device:
    """Return the device of the hardware table that a report was measured on; an H100 for what is not in it."""
    return Cluster.of("h200" if "H200" in report["machine"] else "h100", gpus=1).device


def compare(settings: Settings, report: dict[str, Any], write: Callable[[], None]) -> None:
    """Measure all layers, print each as a table, and add goals and break-even sparsities to the report."""
    report |= {"break_even": [], "left_out": [], "failed": []}
    for layer in settings.layers:
        if time.monotonic() > settings.deadline:
            report["left_out"].append(layer.name)
            continue
        rows = measured(layer, settings, report["failed"])
        report["rows"] += rows
        report["break_even"] += break_even(layer, rows, _device(report))
        write()
        _print_table(layer, rows)
    print("\nSparsity from which block-sparse is faster than dense, forward and backward")
    for row in report["break_even"]:
        found = "unknown" if row["measured"] is None else f"{row['measured']:.2f}"
        print(f"{row['layer']:32} block {row['block']:2}: measured {found}, predicted {row['predicted']:.2f}")
    report["goals"] = list(goals(report["rows"]))
    for row in report["goals"]:
        print(f"{row['layer']}, block {row['block']} at 0.9: {row['speed_up']:.2f} × dense, goal {row['goal']}")
    for text in report["failed"]:
        print(f"Not measured: {text}")
    for name in report["left_out"]:
        print(f"Left out for lack of time: {name}")
    write()


def measured(layer: Layer, settings: Settings, failed: list[str]) -> list[dict[str, Any]]:
    """Return a row for each contender of a layer, timed in turns with the others."""
    hidden = torch.randn(settings.tokens, layer.cols, device=settings.device, dtype=torch.bfloat16)
    gradient = torch.randn(settings.tokens, layer.rows, device=settings.device, dtype=torch.bfloat16)
    rows: list[dict[str, Any]] = []
    calls: list[dict[str, Callable[[], Any]]] = []
    for label, build in contenders(layer, settings):
        name = " ".join(str(value) for value in (layer.name, *label.values()) if value is not None)
        if time.monotonic() > settings.deadline:
            failed.append(f"{name}: no time was left")
            continue
        try:
            contender = build()
            row = {"layer": layer.name, "rows": layer.rows, "cols": layer.cols, **label, **contender.row(hidden)}
            forward = partial(_forward, contender, hidden)
            if contender.trains:
                step = _captured(partial(_step, contender, hidden, gradient), settings.device)
                calls.append({"forward_ms": _captured(forward, settings.device), "step_ms": step})
            else:
                forward()
                calls.append({"forward_ms": forward})
        except Exception as error:  # the other contenders are still worth measuring
            traceback.print_exc(limit=-2)  # short, because the end of the output may be all that is kept
            failed.append(f"{name}: {error}")
            continue
        rows.append(row)
    times = iter(_in_turns([call for each in calls for call in each.values()], settings))
    for row, each in zip(rows, calls, strict=True):
        for name in each:
            samples = next(times)
            row |= {name: statistics.median(samples), f"{name}_rounds": [round(each, 5) for each in samples]}
        if "step_ms" in row:
            row["backward_ms"] = row["step_ms"] - row["forward_ms"]
    return rows


def contenders(layer: Layer, settings: Settings) -> Iterator[tuple[Label, Callable[[], Contender]]]:
    """Yield dense, masked dense, block-sparse of every block and sparsity, and the forward of PyTorch's BSR."""
    torch.manual_seed(0)
    dense = (torch.randn(layer.rows, layer.cols, device=settings.device) * layer.cols**-0.5).bfloat16()
    mask = torch.rand(layer.rows, layer.cols, device=settings.device) > 0.9
    yield _label("dense"), lambda: Contender(functional.linear, dense)
    yield (
        _label("masked dense"),
        lambda: Contender(lambda hidden, weight: functional.linear(hidden, weight * mask), dense),
    )
    for block in settings.blocks:
        for sparsity in settings.sparsities:
            index = BlockIndex.from_mask(random_pattern(layer, block, sparsity).to(settings.device), block)
            compact = to_compact(dense, index)
            yield _label("block-sparse", block, sparsity), partial(Contender, partial(_sparse, index), compact, index)
            if settings.device == "cuda" and sparsity == 0.9:
                yield _label("PyTorch BSR", block, sparsity), partial(_bsr, to_dense(compact, index), block)


def _label(name: str, block: int | None = None, sparsity: float | None = None) -> Label:
    return {"contender": name, "block": block, "sparsity": sparsity}


def _bsr(masked: Tensor, block: int) -> Contender:
    return Contender(functional.linear, masked.to_sparse_bsr((block, block)), trains=False)


def random_pattern(layer: Layer, block: int, sparsity: float) -> Tensor:
    """Return a random mask of blocks with exactly this share of false entries, rounded."""
    shape = (layer.rows // block, layer.cols // block)
    count = shape[0] * shape[1]
    kept = max(1, round((1 - sparsity) * count))
    mask = torch.zeros(count, dtype=torch.bool)
    mask[torch.randperm(count)[:kept]] = True
    return mask.view(shape)


def _sparse(index: BlockIndex, hidden: Tensor, weight: Tensor) -> Tensor:
    return block_sparse_linear(hidden, weight, index)


def _forward(contender: Contender, hidden: Tensor) -> None:
    with torch.no_grad():
        contender.forward(hidden, contender.weight)


def _step(contender: Contender, hidden: Tensor, gradient: Tensor) -> None:
    inputs = hidden.detach().requires_grad_(), contender.weight.detach().requires_grad_()
    torch.autograd.grad(contender.forward(*inputs), inputs, gradient)


@dataclass(frozen=True)
class Captured:
    """A call as a CUDA graph. The graph reads the memory of the call's tensors, but does not keep them: this does."""

    graph: torch.cuda.CUDAGraph
    call: Callable[[], Any]

    def __call__(self) -> None:
        self.graph.replay()


def _captured(call: Callable[[], Any], device: str) -> Callable[[], Any]:
    """Return the call as a CUDA graph, after it has run twice, so that its kernels are compiled and chosen."""
    if device == "cpu":
        call()
        return call
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return Captured(graph, call)


def _in_turns(calls: list[Callable[[], Any]], settings: Settings) -> list[list[float]]:
    """Return the milliseconds of each call over the rounds; every round runs all calls, each for about 5 ms."""
    repeats = [max(1, min(100, int(5 / max(_milliseconds(call, 1, settings.device), 0.01)))) for call in calls]
    samples: list[list[float]] = [[] for _ in calls]
    for number in range(settings.rounds):
        order = range(len(calls)) if number % 2 == 0 else reversed(range(len(calls)))
        for place in order:
            samples[place].append(_milliseconds(calls[place], repeats[place], settings.device))
    return samples


def _milliseconds(call: Callable[[], None], repeats: int, device: str) -> float:
    if device == "cpu":
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    call()
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / repeats


def break_even(layer: Layer, rows: list[dict[str, Any]], device: Device) -> list[dict[str, Any]]:
    """Return, for each block, the measured and the predicted sparsity at which sparse and dense take the same time.

    The time of a step is a line in the share of stored blocks, fitted to the measured sparsities; beyond these it is an
    extrapolation, and the row says so.
    """
    dense = next((row["step_ms"] for row in rows if row["contender"] == "dense"), None)
    found = []
    for block in BLOCKS:
        points = [(1 - row["sparsity"], row["step_ms"]) for row in rows if row["block"] == block and "step_ms" in row]
        at = None
        if dense is not None and len(points) >= 2:
            slope, fixed = statistics.linear_regression(*zip(*points, strict=True))
            at = min(1.0, max(0.0, 1 - (dense - fixed) / slope)) if slope > 0 else None
        inside = at is not None and min(SPARSITIES) <= at <= max(SPARSITIES)
        predicted = break_even_sparsity(none_and_all_stored(block, [(layer.rows, layer.cols)]), device)
        found.append(
            {"layer": layer.name, "block": block, "measured": at, "extrapolated": not inside, "predicted": predicted}
        )
    return found


def goals(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the speed-ups that have a goal."""
    dense = {row["layer"]: row["step_ms"] for row in rows if row["contender"] == "dense"}
    for row in rows:
        is_named = row["layer"].startswith("scaled BERT, feed-forward") and row["sparsity"] == 0.9
        if is_named and row["contender"] == "block-sparse" and row["block"] in GOALS and row["layer"] in dense:
            speed_up = dense[row["layer"]] / row["step_ms"]
            yield {"layer": row["layer"], "block": row["block"], "speed_up": speed_up, "goal": GOALS[row["block"]]}


def profile(settings: Settings, report: dict[str, Any], write: Callable[[], None]) -> None:
    """Time every product of one layer at sparsity 0.9, with all configurations of its kernel."""
    from workbench.sparsity.kernels import triton_kernels

    layer = settings.layers[0]
    hidden = torch.randn(settings.tokens, layer.cols, device=settings.device, dtype=torch.bfloat16)
    gradient = torch.randn(settings.tokens, layer.rows, device=settings.device, dtype=torch.bfloat16)
    for block in BLOCKS:
        if time.monotonic() > settings.deadline:
            print(f"Left out for lack of time: block {block}")
            continue
        torch.manual_seed(0)
        index = BlockIndex.from_mask(random_pattern(layer, block, 0.9).to(settings.device), block)
        weight = torch.randn(index.num_blocks, block, block, device=settings.device, dtype=torch.bfloat16)
        sections = index.sections
        calls: dict[str, tuple[Any, Callable[[], Any]]] = {
            "forward": (
                triton_kernels.product_kernel,
                partial(triton_kernels.product, weight, sections.by_row, hidden, None, False),
            ),
            "gradient to the input": (
                triton_kernels.product_kernel,
                partial(triton_kernels.product, weight, sections.by_column, gradient, None, True),
            ),
            "gradient to the weight": (
                triton_kernels.weight_gradient_kernel,
                partial(triton_kernels.weight_gradient, gradient, hidden, sections, block),
            ),
            "gradient to the weight, a dense product whose absent blocks are dropped": (
                triton_kernels.weight_gradient_kernel,
                lambda index=index: to_compact(gradient.T @ hidden, index),
            ),
        }
        flops = 2 * settings.tokens * index.num_blocks * block**2
        for name, (kernel, call) in calls.items():
            kernel.configs_timings = {}
            [times] = _in_turns([_captured(call, settings.device)], settings)
            milliseconds = statistics.median(times)
            configs = {str(config): timing[0] for config, timing in kernel.configs_timings.items()}
            row = {"layer": layer.name, "block": block, "product": name, "ms": milliseconds, "configs_ms": configs}
            report["rows"].append(row | {"tflop_per_s": flops / milliseconds / 1e9})
            print(f"block {block}, {name}: {milliseconds:.3f} ms, {flops / milliseconds / 1e9:.0f} TFLOP/s", flush=True)
            for config, milliseconds in sorted(configs.items(), key=lambda pair: pair[1]):
                print(f"    {milliseconds:.3f} ms  {config}")
            write()


def _tiny(settings: Settings) -> Settings:
    if os.environ.get("TRITON_INTERPRET") != "1" and settings.device == "cpu":
        raise SystemExit("A rehearsal on a CPU needs the environment variable TRITON_INTERPRET=1.")
    layers = tuple(replace(layer, rows=layer.rows // 15, cols=layer.cols // 15) for layer in LAYERS[:1])
    return replace(settings, tokens=128, rounds=1, layers=layers, sparsities=(0.8, 0.9), blocks=BLOCKS[:1])


def _print_table(layer: Layer, rows: list[dict[str, Any]]) -> None:
    dense = next((row for row in rows if row["contender"] == "dense"), None)
    print(f"\n{layer.name}: weight [{layer.rows}, {layer.cols}]")
    print(f"{'':14} {'block':>5} {'sparsity':>8} {'forward ms':>11} {'backward ms':>12} {'over dense':>11}")
    for row in rows:
        step, base = (row.get("step_ms"), dense and dense["step_ms"])
        speed_up = f"{base / step:.2f} ×" if step and base else "-"
        backward = f"{row['backward_ms']:.3f}" if step else "-"
        name, block, sparsity = row["contender"], row["block"] or "", row["sparsity"] or ""
        print(
            f"{name:14} {block:>5} {sparsity:>8} {row['forward_ms']:>11.3f} {backward:>12} {speed_up:>11}", flush=True
        )


def _write(path: Path, report: dict[str, Any]) -> None:
    """Write the report as JSON with one row a line, so that what is left of a file that was cut off can be read."""
    fields = (f"{json.dumps(name)}: {_lines(value)}" for name, value in report.items())
    partial_file = path.with_suffix(".partial")
    partial_file.write_text("{\n" + ",\n".join(fields) + "\n}\n")
    partial_file.replace(path)


def _lines(value: Any) -> str:
    return "[\n" + ",\n".join(map(json.dumps, value)) + "\n]" if isinstance(value, list) else json.dumps(value)


if __name__ == "__main__":
    main()
