"""The planner's predictions against measurements: first written down, then measured, then compared.

    python benchmarks/prediction.py predict plans.json                 # on the GPU machine, or --device h200 --gpus 4
    python benchmarks/prediction.py measure plans.json                 # one after the other; goes on where it stopped
    python benchmarks/prediction.py report plans.json                  # the table, and how far predictions lie
    python benchmarks/prediction.py predict plans.json --gpus 1 --set unknown     # a plan each of models nothing knows

Which plans: every case (a model, a batch, a memory limit) contributes the planner's choice and, in turn, the best
plans with one thing changed (`VARIATIONS`; each case goes on in the list where the one before stopped, so that all
cases together go through it), as many as `--per-case` says. A variation that does not fit, or is the choice itself,
is passed over. `--plan scaled:2,1,0,8,none,tensor=2` adds one by hand: pipeline, data, ZeRO, micro-batch,
checkpointing, then by name whatever else `wb.plan` takes. `--cases` also takes `OTHERS`, models that nothing was fitted
on; predicted one by one, each begins elsewhere in the list with `--turn`. `--set` plans what `SETS` lists instead, all
of it or some `--cases`. Cases that a file lacks are added to it, and what it has stays as it is.

`--earlier FILE ...` gives each prediction an interval that is meant to hold in 90 %: as wide, up and down by the same
factor, as that share of the plans in these files needed it (split conformal prediction, section 1 of
https://arxiv.org/abs/2107.07511). It covers what moved those: machines, clocks and power, hosts, unknown models.

Batches are for 4 GPUs; for another number they are larger or smaller with it, so that a GPU has as much to do.

A measured step is the median of `--steps` after warm-up: random tokens, dropout 0.1, AdamW and clipping included. Where
those differ by more than `SPREAD`, as many again are taken, up to `MOST_TURNS` times, and the median is that of all.
Peak memory is the allocator's, of the fullest device; a memory limit is enforced. A plan that fails is a row that says
so. A plan that is said not to fit is run all the same, under the limit that it is said to exceed.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import itertools
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import by_hand
import others

import workbench as wb
from workbench.base.errors import PlanInfeasible, WorkbenchError
from workbench.base.machine import end_elastic_launch
from workbench.base.units import GIB
from workbench.planning.plan import Plan
from workbench.planning.search import what_if
from workbench.runs.launching.supervisor import ALLOCATOR, GROWING

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A model and its batch, with or without a limit on memory."""

    model: Callable[[], Any]
    seq_len: int
    batch_of_4: int
    """Samples a step on 4 GPUs."""
    memory_limit_gib: float | None = None
    data: Any = None
    """Of a model that somebody hands over; ours train on text."""
    sparsity: wb.sparsity.Static | None = None
    steps: int = 1000
    """Length of the training that the learning rate warms up for."""

    def global_batch(self, gpus: int) -> int:
        return self.batch_of_4 * gpus // 4


def _scaled() -> Any:
    return wb.models.bert(hidden_size=1920, num_layers=54, num_heads=30)


def _bert_4_8b() -> Any:
    return wb.models.bert(hidden_size=2560, num_layers=60, num_heads=40)


def _bert_medium() -> Any:
    return wb.models.bert(hidden_size=512, num_layers=8, num_heads=8, dropout=0.0)


def _bert_base() -> Any:
    return wb.models.bert(hidden_size=768, num_layers=12, num_heads=12, dropout=0.0)


def _tiny() -> Any:
    return wb.models.bert(hidden_size=64, num_layers=6, num_heads=4, vocab_size=1024, max_positions=64)


CASES = {
    "large": Case(wb.models.bert_large, 512, 512),
    "gpt-1.3b": Case(wb.models.gpt3, 2048, 64),
    "gpt-1.3b-32gib": Case(wb.models.gpt3, 2048, 64, 32),
    "scaled": Case(_scaled, 512, 256),
    "scaled-32gib": Case(_scaled, 512, 256, 32),
    "4.8b": Case(_bert_4_8b, 512, 256),
    "4.8b-32gib": Case(_bert_4_8b, 512, 256, 32),
}
OTHERS = {
    "llama-1b": Case(lambda: others.llama_1b, 2048, 64, data=others.Tokens(128256, 2048)),
    "mixture": Case(lambda: others.mixture, 1024, 64, data=others.Tokens(32000, 1024)),
    "vit-huge": Case(lambda: others.vit_huge, 257, 512, data=others.Images()),
    "resnet-152": Case(lambda: others.resnet_152, 1, 1024, data=others.Images()),
    "t5-large": Case(lambda: others.t5_large, 512, 256, data=others.Tokens(32128, 512)),
    "modernbert-large": Case(
        lambda: others.modernbert_large, 1024, 256, data=others.Tokens(50368, 1024, 0.3, scattered=True)
    ),
    "by-hand": Case(lambda: others.ByHand, 1024, 128, data=others.Tokens(50304, 1024, 0.33)),
    "qwen3-600m": Case(lambda: others.qwen3_600m, 1024, 64, data=others.Tokens(151936, 1024)),
    "gemma2-600m": Case(lambda: others.gemma2_600m, 1024, 32, data=others.Tokens(64000, 1024)),
    "pythia-410m": Case(lambda: others.pythia_410m, 1024, 64, data=others.Tokens(50304, 1024)),
    "bart-large": Case(lambda: others.bart_large, 512, 128, data=others.Tokens(50265, 512)),
    "deberta-v3-base": Case(
        lambda: others.deberta_v3_base, 512, 128, data=others.Tokens(128100, 512, 0.15, scattered=True)
    ),
    "swin-large": Case(lambda: others.swin_large, 1, 512, data=others.Images()),
    "olmo2-1b": Case(lambda: others.olmo2_1b, 2048, 64, data=others.Tokens(100352, 2048)),
    "falcon-1b": Case(lambda: others.falcon_1b, 1024, 128, data=others.Tokens(50304, 1024)),
    "phi-1b": Case(lambda: others.phi_1b, 1024, 128, data=others.Tokens(51200, 1024)),
    "roberta-large": Case(lambda: others.roberta_large, 512, 256, data=others.Tokens(50265, 512, 0.15, scattered=True)),
    "granite-2b": Case(lambda: others.granite_2b, 2048, 32, data=others.Tokens(49155, 2048)),
    "convnext-large": Case(lambda: others.convnext_large, 1, 512, data=others.Images()),
    "albert-xlarge": Case(lambda: others.albert_xlarge, 512, 128, data=others.Tokens(30000, 512, 0.15, scattered=True)),
    "olmoe": Case(lambda: others.olmoe, 1024, 128, data=others.Tokens(50304, 1024)),
    "gpt2-medium": Case(lambda: others.gpt2_medium, 1024, 128, data=others.Tokens(50257, 1024)),
    "beit-large": Case(lambda: others.beit_large, 1, 512, data=others.Images()),
}
"""Models that nothing was fitted on, handed over as a user would."""


def _sparse(model: Callable[[], Any], batch_of_4: int, block: int, sparsity: float = 0.9) -> Case:
    return Case(model, 128, batch_of_4, sparsity=wb.sparsity.Static(sparsity=sparsity, block=block), steps=100)


SPARSE = {
    "medium": Case(_bert_medium, 128, 4096, steps=100),
    **{f"medium-sparse-{block}": _sparse(_bert_medium, 4096, block) for block in (16, 32)},
    "base": Case(_bert_base, 128, 2048, steps=100),
    **{f"base-sparse-{block}": _sparse(_bert_base, 2048, block) for block in (16, 32, 64)},
    **{
        f"base-sparse-{block}-at-{percent}": _sparse(_bert_base, 2048, block, percent / 100)
        for block, percent in ((32, 80), (32, 95), (16, 95), (64, 80))
    },
}
"""BERT-Medium and BERT-Base with dense weights, and with most of their encoder's blocks absent; without dropout, so
that losses can be compared."""
TRIAL = {
    "tiny": Case(_tiny, 64, 16),
    "tiny-sparse": Case(_tiny, 64, 16, sparsity=wb.sparsity.Static(sparsity=0.5, block=16), steps=100),
}
"""Of no interest but to see on any machine that this runs."""
KNOWN = CASES | OTHERS | SPARSE | TRIAL

EXCEEDS = "exceeds"
"""Beside the choices of a plan: the share by which it is to need more memory than its limit offers."""
_PLAIN = {"recompute": "none", "offload_optimizer": False, "cuda_graphs": False}
_BOTH_FORMS = ({"block_sparse": False}, {"block_sparse": True})
"""Plans of which the form of the weights is all that differs."""
_LAUNCHED, _CAPTURED = ({"micro_batch": 512, "cuda_graphs": graphs} for graphs in (False, True))
SETS: dict[str, dict[str, tuple[Mapping[str, Any], ...]]] = {
    "unknown": {
        "llama-1b": ({}, {**_PLAIN, "micro_batch": 4, EXCEEDS: 0.05}),
        "vit-huge": ({"recompute": "full"},),
        "by-hand": ({"offload_optimizer": True},),
        "pythia-410m": ({"cuda_graphs": True, "micro_batch": 2},),
        "modernbert-large": ({"recompute": "selective"},),
        "resnet-152": ({"cuda_graphs": True},),
        "t5-large": ({},),
        "qwen3-600m": ({"recompute": "selective"},),
        "gemma2-600m": ({"offload_optimizer": True},),
        "mixture": ({},),
        "bart-large": ({},),
        "deberta-v3-base": ({},),
        "swin-large": ({},),
    },
    "unseen": {
        "olmo2-1b": ({}, {"zero": 3, "pipeline": 1, "tensor": 1}),
        "granite-2b": ({}, {"zero": 0, "pipeline": 1, "tensor": 2}),
        "falcon-1b": ({}, {"zero": 2, "pipeline": 1, "tensor": 1, "recompute": "selective"}),
        "phi-1b": ({"pipeline": 2, "data": 1, "tensor": 1}, {"zero": 1, "pipeline": 1, "tensor": 1, "micro_batch": 8}),
        "roberta-large": ({}, {"pipeline": 2, "data": 1, "tensor": 1}),
    },
    "unseen-one": {
        "convnext-large": ({},),
        "olmoe": ({},),
        "gpt2-medium": ({"recompute": "full"},),
        "albert-xlarge": ({},),
        "beit-large": ({"micro_batch": 32},),
    },
    "sparse": {"medium": ({},), "medium-sparse-16": _BOTH_FORMS, "medium-sparse-32": _BOTH_FORMS},
    "sparse-base": {
        "base": ({}, _LAUNCHED),
        "base-sparse-32": ({}, *(way | form for way in (_CAPTURED, _LAUNCHED) for form in _BOTH_FORMS)),
        "base-sparse-16": tuple(_CAPTURED | form for form in _BOTH_FORMS),
        **{
            name: (_CAPTURED | {"block_sparse": True},)
            for name in SPARSE
            if name.startswith("base-sparse") and name not in ("base-sparse-32", "base-sparse-16")
        },
    },
    "trial": {
        "tiny": ({}, {**_PLAIN, "data": 2, "zero": 0, "micro_batch": 4, EXCEEDS: 0.05}),
        "tiny-sparse": ({"block_sparse": False},),
    },
}
"""Cases, the most telling first, and what each of their plans is told; the planner chooses the rest."""

HELD = 0.9
"""The share of plans in whose interval of `--earlier` the measurement is meant to lie."""
SPREAD = 0.05
"""Between the slowest and the fastest step, over the median."""
MOST_TURNS = 4
KEPT_BYTES = 256 << 20
"""Processes that keep more than this of one plan measure no other. (Libraries keep workspaces, as in a first plan.)"""
SLOWEST = 1.5
"""Over the choice's step time: nobody would consider what takes longer."""

VARIATIONS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("ZeRO 3", {"zero": 3, "pipeline": 1}),
    ("a pipeline of all devices, 1F1B", {"data": 1, "tensor": 1, "schedule": "1f1b"}),
    ("full checkpointing", {"recompute": "full"}),
    ("replicas without sharding", {"zero": 0, "pipeline": 1, "tensor": 1}),
    ("tensor parallelism", {"tensor": 2}),
    ("half and half", {"pipeline": 2, "tensor": 1, "schedule": "1f1b"}),
    ("selective checkpointing", {"recompute": "selective"}),
    ("an interleaved pipeline", {"schedule": "interleaved"}),
    ("ZeRO 1", {"zero": 1}),
    ("small micro-batches", {"micro_batch": 4}),
    ("optimiser state on the host", {"offload_optimizer": True}),
    ("ZeRO 2", {"zero": 2}),
)


def main() -> None:
    arguments = _arguments()
    if arguments.verb == "predict":
        _predict(arguments)
    elif arguments.verb == "measure":
        _measure(arguments)
    elif arguments.verb == "worker":
        _worker(arguments)
    else:
        print(report(_read(arguments.file)))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in ("predict", "measure", "report", "worker"):
        verbs.add_parser(verb).add_argument("file", type=Path)
    predict, measure, _, worker = verbs.choices.values()
    predict.add_argument("--cases", nargs="+", choices=KNOWN, help="default: those of --set, or the first seven")
    predict.add_argument("--set", choices=SETS, help="the plans of this set, and none by VARIATIONS")
    predict.add_argument("--per-case", type=int, default=4)
    predict.add_argument("--turn", type=int, default=0, help="where in VARIATIONS the first case begins")
    predict.add_argument("--device", help="plan for a device of the hardware table, not for this machine")
    predict.add_argument("--gpus", type=int, default=4)
    predict.add_argument("--earlier", type=Path, nargs="+", default=[], help="files whose errors give intervals")
    predict.add_argument("--plan", action="append", default=[], help=f"case:{by_hand.SYNTAX}")
    measure.add_argument("--steps", type=int, default=6)
    measure.add_argument("--timeout-s", type=float, default=300)
    measure.add_argument("--budget-s", type=float, default=float("inf"), help="start no further plan after so long")
    measure.add_argument("--again", action="store_true", help="measure anew what failed")
    worker.add_argument("--indices", type=int, nargs="+", required=True)
    worker.add_argument("--steps", type=int, required=True)
    return parser.parse_args()


# Predicting


def _predict(arguments: argparse.Namespace) -> None:
    content: Row = {"predicted": _now(), "rule": __doc__, "rows": []}
    if arguments.file.exists():
        content = _read(arguments.file)
    rows = content["rows"]
    factors = _factors([row for file in arguments.earlier for row in _read(file)["rows"]])
    turn = arguments.turn
    for name in arguments.cases or SETS.get(arguments.set, CASES):
        if any(row["case"] == name for row in rows):
            raise SystemExit(f"{arguments.file} has {name}: predictions are written once. Choose another name.")
        made = time.perf_counter()
        try:
            chosen, turn = _chosen(name, KNOWN[name], arguments, turn)
        except Exception as error:
            if not arguments.set:
                raise
            traceback.print_exc()
            chosen = []
            rows.append({"case": name, "why": "", "error": f"not planned: {type(error).__name__}: {error}"})
        rows += [_with_intervals(_row(name, why, plan), factors) for why, plan in chosen]
        print(f"{name}: {len(chosen)} plans in {time.perf_counter() - made:.1f} s", flush=True)
        for why, plan in chosen:
            print(f"  {why}: {plan.describe()}", flush=True)
        _write(arguments.file, content)
    print(f"{len(rows)} predictions in {arguments.file}")


def _chosen(name: str, case: Case, arguments: argparse.Namespace, turn: int) -> tuple[list[tuple[str, Plan]], int]:
    cluster = _cluster(arguments)
    experiment = _experiment(case, cluster.gpus)
    costs = wb.planning.profile(experiment, None if cluster == wb.measure.local_cluster() else cluster)

    def planned(limit_gib: float | None = case.memory_limit_gib, **fixed: Any) -> Plan:
        return what_if(
            costs,
            global_batch=experiment.global_batch,
            seq_len=case.seq_len,
            cluster=cluster,
            memory_limit_gib=limit_gib,
            **fixed,
        )

    if arguments.set:
        return [_asked(dict(choices), planned) for choices in SETS[arguments.set][name]], turn
    found = [("the planner's choice", planned())]
    tried = 0
    for why, fixed in itertools.islice(itertools.cycle(VARIATIONS), turn, turn + len(VARIATIONS)):
        if len(found) == arguments.per_case:
            break
        tried += 1
        try:
            plan = planned(**fixed)
        except PlanInfeasible:
            continue
        as_asked = all(getattr(plan, key) == value for key, value in fixed.items())
        worth_it = plan.prediction.step_ms <= SLOWEST * found[0][1].prediction.step_ms
        if as_asked and worth_it and plan.division() not in {other.division() for _, other in found}:
            found.append((why, plan))
    for text in arguments.plan:
        case_name, degrees = text.split(":")
        if case_name == name:
            found.append((f"by hand: {degrees}", planned(**by_hand.degrees(degrees))))
    return found, (turn + tried) % len(VARIATIONS)


def _asked(choices: dict[str, Any], planned: Callable[..., Plan]) -> tuple[str, Plan]:
    """What was asked of a plan, and the plan; one that is to exceed its limit is refused by the planner first."""
    share = choices.pop(EXCEEDS, 0.0)
    plan = planned(**choices)
    why = ", ".join(f"{name}={value}" for name, value in choices.items()) or "the planner's choice"
    if not share:
        return why, plan
    limit_gib = plan.peak_bytes / (1 + share) / GIB
    try:
        fitting = planned(limit_gib, **choices)
    except PlanInfeasible:
        return f"{why}; {EXCEEDS} its limit by {share:.0%}", replace(plan, memory_limit_bytes=int(limit_gib * GIB))
    raise RuntimeError(f"Under a limit of {limit_gib:.2f} GiB the planner found a plan that fits: {fitting.describe()}")


def _cluster(arguments: argparse.Namespace) -> wb.Cluster:
    if arguments.device is not None:
        return wb.Cluster.of(arguments.device, gpus=arguments.gpus)
    here = wb.measure.local_cluster()
    return here if here.device.type == "cpu" else here.resized(arguments.gpus)


def _experiment(case: Case, gpus: int) -> wb.Experiment:
    model = case.model()
    data = wb.data.corpus("demo", vocab_size=model.vocab_size) if case.data is None else case.data
    batch = case.global_batch(gpus)
    return wb.Experiment(
        model=model, data=data, steps=case.steps, global_batch=batch, seq_len=case.seq_len, sparsity=case.sparsity
    )


def _row(name: str, why: str, plan: Plan) -> Row:
    return {
        "case": name,
        "why": why,
        "predicted": _now(),
        "memory_limit_gib": plan.memory_limit_bytes and plan.memory_limit_bytes / GIB,
        "division": plan.division(),
        "predicted_ms": plan.prediction.step_ms,
        "predicted_gib": plan.peak_bytes / GIB,
        "plan": {**plan.to_json(), "candidates": []},
    }


def _factors(earlier: list[Row]) -> dict[str, float]:
    """By unit, the factor within which a prediction is meant to be right; none where nothing was measured earlier."""
    factors = {}
    for unit in ("ms", "gib"):
        errors = sorted(abs(math.log1p(_error(row, unit))) for row in earlier if f"measured_{unit}" in row)
        place = math.ceil(HELD * (len(errors) + 1))  # the plan to come is one of them, none more probable than another
        if errors and place > len(errors):
            raise SystemExit(f"--earlier: {len(errors)} measured plans are too few for intervals of {HELD:.0%}.")
        if errors:
            factors[unit] = math.exp(errors[place - 1])
    return factors


def _with_intervals(row: Row, factors: Mapping[str, float]) -> Row:
    return row | {
        f"interval_{unit}": [row[f"predicted_{unit}"] / factor, row[f"predicted_{unit}"] * factor]
        for unit, factor in factors.items()
    }


# Measuring


def _measure(arguments: argparse.Namespace) -> None:
    """Plans one after the other in the same processes, each with process groups of its own.

    Processes that failed, took too long or kept memory of a plan are replaced: no plan sees what another one broke. A
    plan that fails where others ran before it has a second try, in new processes.
    """
    begun = time.monotonic()
    rows = _read(arguments.file)["rows"]
    planned = [index for index, row in enumerate(rows) if "plan" in row and "measured_ms" not in row]
    left = [index for index in planned if "error" not in rows[index] or arguments.again]
    exceeding = {index for index in left if EXCEEDS in rows[index]["why"]}
    left.sort(key=exceeding.__contains__)  # last, because no plan is measured in processes that ran out of memory
    while left and time.monotonic() - begun <= arguments.budget_s:
        workers = _Workers(arguments, left, Plan.from_json(rows[left[0]]["plan"]).world)
        try:
            while left and time.monotonic() - begun <= arguments.budget_s:
                print(f"{left[0]} {rows[left[0]]['case']}: {rows[left[0]]['division']} …", flush=True)
                found = workers.measured(left[0])
                if found is None or ("error" in found and not workers.new and left[0] not in exceeding):
                    print(f"  {found['error']}" if found else "  memory was left over", flush=True)
                    print("  … in new processes", flush=True)
                    break
                _record(arguments.file, left.pop(0), found)
        finally:
            workers.stop()
    if left:
        print(f"out of time before plan {left[0]}; run `measure` again to go on")
    print(report(_read(arguments.file)))


def _record(file: Path, index: int, found: Row) -> None:
    content = _read(file)
    row = {key: value for key, value in content["rows"][index].items() if key != "error"}
    content["rows"][index] = row | {key: value for key, value in found.items() if key != "machine"}
    machine = found.get("machine")
    if machine is not None:
        content["machine"] = content.get("machine") or machine
        content["rows"][index]["measured"] = machine["measured"]  # perhaps later, on another machine of the kind
    _write(file, content)
    print(f"  {_outcome(content['rows'][index])}", flush=True)


class _Workers:
    """Processes that measure the plans of `indices` in that order, each when its gate opens."""

    def __init__(self, arguments: argparse.Namespace, indices: list[int], world: int) -> None:
        from workbench.execution.blocks.cuda_graphs import NCCL_SETTING

        self._file, self._timeout_s = arguments.file, arguments.timeout_s
        self._log = arguments.file.with_suffix(f".{indices[0]}.log")
        self._first = self._last = indices[0]
        for index in indices:
            for file in (_gate(self._file, index), _result(self._file, index)):
                file.unlink(missing_ok=True)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}"]
        command += [__file__, "worker", str(arguments.file), "--steps", str(arguments.steps)]
        command += ["--indices", *map(str, indices)]
        as_launched = {ALLOCATOR[0]: GROWING, NCCL_SETTING[0]: NCCL_SETTING[1]}
        environment = {"OMP_NUM_THREADS": "1", **as_launched, **os.environ}
        with self._log.open("w") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)

    def measured(self, index: int) -> Row | None:
        """What came of a plan; None if the processes left before it, as they do when memory was left over."""
        self._last = index
        result, deadline = _result(self._file, index), time.monotonic() + self._timeout_s
        _gate(self._file, index).touch()
        try:
            while not result.exists():
                code = self._process.poll()
                if code == 0:
                    return None
                if code is not None and not result.exists():
                    return {"error": f"exit status {code}: {_last_error(self._log)}; see {self._log.name}"}
                if time.monotonic() > deadline:
                    self.stop()
                    return {"error": f"no result after {self._timeout_s:.0f} s; see {self._log.name}"}
                time.sleep(0.05)
        finally:
            _gate(self._file, index).unlink()
        found: Row = json.loads(result.read_text())
        result.unlink()
        if "error" in found:
            self.stop()
        return found

    @property
    def new(self) -> bool:
        """Whether no plan ran before the last one."""
        return self._last == self._first

    def stop(self) -> None:
        end_elastic_launch(self._process)


def _gate(file: Path, index: int) -> Path:
    return file.with_suffix(f".{index}.gate")


def _result(file: Path, index: int) -> Path:
    return file.with_suffix(f".{index}.json")


def _last_error(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    errors = [line for line in lines if "Error" in line and "ChildFailedError" not in line]
    return errors[-1][-300:] if errors else "no traceback"


def _outcome(row: Row) -> str:
    if "error" in row:
        return str(row["error"])
    return f"{row['measured_ms']:.1f} ms, predicted {row['predicted_ms']:.1f} ({_error(row, 'ms'):+.1%})"


def _worker(arguments: argparse.Namespace) -> None:
    """One rank of every plan, in turn; rank 0 writes the results."""
    import torch
    import torch._inductor.compile_fx  # what takes long to import, before the gate
    import torch.distributed as dist
    import training  # noqa: F401
    import transformers  # noqa: F401

    from workbench.base.errors import root_exception

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    meeting = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, is_master=False)
    rows = _read(arguments.file)["rows"]
    for index in arguments.indices:
        while not _gate(arguments.file, index).exists():
            time.sleep(0.02)
        if on_gpu:
            torch.cuda.set_device(device)
            torch.set_float32_matmul_precision("high")
        store = dist.PrefixStore(f"plan{index}", meeting)
        dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=world)
        try:
            found = _timed(rows[index], arguments.steps, device)
        except Exception as error:
            cause = root_exception(error)
            if not isinstance(cause, torch.OutOfMemoryError):
                raise
            _write(_result(arguments.file, index), {"error": f"out of memory: {str(cause).splitlines()[0]}"})
            os._exit(1)  # the other ranks wait for this one
        is_clean = _is_clean(device)
        dist.destroy_process_group()
        if rank == 0:
            _write(_result(arguments.file, index), found | {"machine": _machine()})
        if not is_clean:
            return


def _is_clean(device: Any) -> bool:
    """Whether nothing of the last plan is left on any rank's device."""
    import torch
    import torch.distributed as dist

    torch._dynamo.reset()
    gc.collect()
    kept = torch.zeros((), device=device)
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()  # type: ignore[attr-defined]
        torch.cuda.empty_cache()
        kept += torch.cuda.memory_allocated()
    dist.all_reduce(kept, op=dist.ReduceOp.MAX)
    print(f"kept: {kept.item() / GIB:.3f} GiB", flush=True)
    return kept.item() <= KEPT_BYTES


def _timed(row: Row, steps: int, device: Any) -> Row:
    import torch
    import torch.distributed as dist
    from training import random_batch, trainer_for

    from workbench.execution.block_probe import clock_mhz
    from workbench.execution.blocks.cuda_graphs import WARM_UP_STEPS

    started = time.perf_counter()
    plan = Plan.from_json(row["plan"])
    experiment = _experiment(KNOWN[row["case"]], plan.world)
    if device.type == "cuda":
        whole = torch.cuda.get_device_properties(device).total_memory
        limit = whole if row["memory_limit_gib"] is None else row["memory_limit_gib"] * GIB
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / whole), device)
    trainer = trainer_for(experiment, plan, device)
    batch = random_batch(experiment, trainer.samples, trainer.coordinate.data_rank, device)
    gc.collect()
    losses: list[float] = []

    def timed(step: int) -> float:
        _wait(device)
        begun = time.perf_counter()
        scalars = trainer.step(step, batch).scalars
        _wait(device)
        elapsed = time.perf_counter() - begun
        losses.append(float(scalars[0]))
        return elapsed

    timed(0)
    first_s = time.perf_counter() - started
    warm = WARM_UP_STEPS + 1 if plan.cuda_graphs else 2
    for step in range(1, warm):
        timed(step)
    times: list[float] = []
    for _ in range(MOST_TURNS):
        times += [timed(warm + len(times) + step) for step in range(steps)]
        if not _on_any_rank(max(times) - min(times) > SPREAD * statistics.median(times), device):
            break
    found: Row = {
        "measured_ms": 1e3 * statistics.median(times),
        "measured_ms_all": [1e3 * seconds for seconds in times],
        "losses": losses,
        "start_to_first_step_s": first_s,
    }
    if device.type == "cuda":
        peaks = [torch.zeros(2, device=device) for _ in range(dist.get_world_size())]
        own = [float(torch.cuda.max_memory_allocated()), float(torch.cuda.max_memory_reserved())]
        dist.all_gather(peaks, torch.tensor(own, device=device))
        found["measured_gib"] = max(peak[0].item() for peak in peaks) / GIB
        found["allocated_gib_of_ranks"] = [peak[0].item() / GIB for peak in peaks]
        found["expandable_segments"] = any(segment.get("is_expandable") for segment in torch.cuda.memory_snapshot())
        found["reserved_gib_of_ranks"] = [peak[1].item() / GIB for peak in peaks]
        found["allocator_retries"] = torch.cuda.memory_stats()["num_alloc_retries"]
        trainer.step(warm + len(times), batch)
        clocks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(clocks, clock_mhz(device))
        found["clocks_mhz_of_ranks"] = clocks  # while one more step runs; under the power limit they fall
        _wait(device)
    return found


def _on_any_rank(seen: bool, device: Any) -> bool:
    import torch
    import torch.distributed as dist

    flag = torch.tensor(float(seen), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


def _wait(device: Any) -> None:
    import torch
    import torch.distributed as dist

    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def _machine() -> dict[str, str]:
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = f"{gpus} × {torch.cuda.get_device_name(0)}" if gpus else "CPU"
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    if gpus:
        import pynvml

        pynvml.nvmlInit()
        versions["driver"] = pynvml.nvmlSystemGetDriverVersion()
    return {"devices": names} | versions | {"measured": _now()}


# Reporting


def _error(row: Row, unit: str) -> float:
    return float(row[f"predicted_{unit}"] / row[f"measured_{unit}"] - 1)


def report(content: Row) -> str:
    """A line for each plan, then the errors in all and how far each chosen plan is from the fastest measured."""
    rows = content["rows"]
    machine = content.get("machine") or {}
    lines = [
        ", ".join(f"{key} {value}" for key, value in machine.items()) or "nothing measured yet",
        "",
        "| case | plan | why | ms predicted | measured | error | GiB predicted | measured | error |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|",
        *map(_line, rows),
        "",
        *_errors(rows),
        *_choices(rows),
        *_pipelines(rows),
        *_sparse_losses(rows),
        *_break_even(rows),
    ]
    return "\n".join(lines)


def _pipelines(rows: list[Row]) -> Iterator[str]:
    """How near pipelines of all devices come to the best replicas' rate less the bubble, (p - 1) / (m + p - 1)."""
    for row in rows:
        plan = row.get("plan", {"pipeline": 1})
        alone = plan["pipeline"] > 1 and plan["data"] == plan["tensor"] == 1 and plan["schedule"] == "1f1b"
        replicas = [
            other["measured_ms"]
            for other in rows
            if other["case"] == row["case"] and "measured_ms" in other and other["plan"]["pipeline"] == 1
        ]
        if alone and replicas and "measured_ms" in row:
            bubble = (plan["pipeline"] - 1) / (plan["num_microbatches"] + plan["pipeline"] - 1)
            share = min(replicas) / (1 - bubble) / row["measured_ms"]
            yield f"{row['case']}: {row['division']}: {share:.3f} of (the fastest without stages × {1 - bubble:.3f})"


def _sparse_losses(rows: list[Row]) -> Iterator[str]:
    """How far the losses of block-sparse weights are from those of masked ones, over the steps that both took."""
    trained = [row for row in rows if "losses" in row]
    for row, other in itertools.permutations(trained, 2):
        if row["case"] == other["case"] and row["plan"]["block_sparse"] > other["plan"]["block_sparse"]:
            pairs = list(zip(row["losses"], other["losses"], strict=False))
            largest = max(abs(sparse / masked - 1) for sparse, masked in pairs)
            first, last = pairs[0][1], pairs[-1][1]
            yield (
                f"{row['case']}: block-sparse losses differ from masked ones by at most {largest:.2%} in {len(pairs)} "
                f"steps, which took the masked loss from {first:.3f} to {last:.3f}"
            )


def _break_even(rows: list[Row]) -> Iterator[str]:
    """The sparsity from which stored blocks train faster than dense weights, where two sparsities were measured.

    The time of a step is a line in the share of stored blocks.
    """
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        sparsity = KNOWN[row["case"]].sparsity if row["case"] in KNOWN else None
        if sparsity is not None and row.get("plan", {}).get("block_sparse"):
            groups.setdefault((row["case"].split("-")[0], sparsity.block), []).append(row)
    for (model, block), stored in groups.items():
        dense = [row for row in rows if row["case"] == model and row.get("plan", {}).get("cuda_graphs") is False]
        for kind in ("measured_ms", "predicted_ms"):
            points = [(1 - _sparsity(row), row[kind]) for row in stored if kind in row]
            steps = [row[kind] for row in dense if kind in row]
            if len({share for share, _ in points}) > 1 and steps:
                slope, fixed = statistics.linear_regression(*zip(*points, strict=True))
                at = 1 - (min(steps) - fixed) / slope
                found = "never faster than dense" if at >= 1 else f"faster than dense from a sparsity of {at:.2f}"
                yield f"{model} with stored blocks of {block}: {found}, {kind.removesuffix('_ms')}"


def _sparsity(row: Row) -> float:
    pattern = KNOWN[row["case"]].sparsity
    assert pattern is not None
    return pattern.sparsity


def _line(row: Row) -> str:
    if "plan" not in row:
        return f"| {row['case']} | | | {row['error']} | | | | | |"
    cells = [row["case"], row["division"], row["why"], f"{row['predicted_ms']:.1f}"]
    if "measured_ms" in row:
        cells += [f"{row['measured_ms']:.1f}", f"{_error(row, 'ms'):+.1%}", f"{row['predicted_gib']:.1f}"]
        has_memory = "measured_gib" in row
        cells += [f"{row['measured_gib']:.1f}", f"{_error(row, 'gib'):+.1%}"] if has_memory else ["", ""]
    else:
        cells += [row.get("error", "not measured"), "", f"{row['predicted_gib']:.1f}", "", ""]
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def _errors(rows: list[Row]) -> Iterator[str]:
    exceeding = [row for row in rows if EXCEEDS in row["why"]]
    fitting = [row for row in rows if row not in exceeding]
    for unit, what in (("ms", "step time"), ("gib", "peak memory")):
        errors = [abs(_error(row, unit)) for row in fitting if f"measured_{unit}" in row]
        if errors:
            median, largest = statistics.median(errors), max(errors)
            yield f"{what}: {len(errors)} of {len(fitting)} plans, median error {median:.1%}, largest {largest:.1%}"
        given = [row for row in fitting if f"measured_{unit}" in row and f"interval_{unit}" in row]
        if given:
            low, high = (given[0][f"interval_{unit}"][side] / given[0][f"predicted_{unit}"] for side in (0, 1))
            inside = [
                each[0] <= row[f"measured_{unit}"] <= each[1] for row in given if (each := row[f"interval_{unit}"])
            ]
            yield f"{what}: {sum(inside)} of {len(given)} in their interval ({low:.3f} to {high:.3f} of the prediction)"
    failed = [row for row in fitting if "error" in row]
    yield f"failed: {len(failed)} of {len(fitting)}"
    memory = sum("out of memory" in row["error"] for row in failed)
    yield f"out of memory in a plan said to fit: {memory}"
    for row in exceeding:
        did = "it ran" if "measured_ms" in row else row.get("error", "not measured")
        yield f"{row['case']}: said not to fit into {row['memory_limit_gib']:.1f} GiB ({row['division']}): {did}"


def _choices(rows: list[Row]) -> Iterator[str]:
    for case in dict.fromkeys(row["case"] for row in rows):
        timed = [row for row in rows if row["case"] == case and "measured_ms" in row]
        chosen = next((row for row in timed if row["why"] == "the planner's choice"), None)
        if chosen is not None:
            fastest = min(timed, key=lambda row: row["measured_ms"])
            behind = chosen["measured_ms"] / fastest["measured_ms"] - 1
            yield f"{case}: the chosen plan is {behind:.1%} behind the fastest measured ({fastest['division']})"


def _now() -> str:
    return f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC"


def _read(file: Path) -> Row:
    content: Row = json.loads(file.read_text())
    return content


def _write(file: Path, content: Row) -> None:
    """Whole or not at all."""
    beside = file.with_suffix(".part")
    beside.write_text(json.dumps(content, indent=1) + "\n")
    beside.replace(file)


if __name__ == "__main__":
    try:
        main()
    except WorkbenchError as error:
        raise SystemExit(str(error)) from error
