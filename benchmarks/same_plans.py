"""Check that a change to the planner moved no plan: the same searches under two checkouts, compared number by number.

    PYTHONPATH=<old checkout> python benchmarks/same_plans.py dump old.json
    PYTHONPATH=<new checkout> python benchmarks/same_plans.py dump new.json
    python benchmarks/same_plans.py compare old.json new.json      # exit code 1 if anything differs

Nothing here is measured: clusters come from the hardware table, and the CPU is a value that is written below, so that
two machines print the same numbers.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

GIB = 1 << 30
IGNORED = {"format", "cluster", "basis", "signature"}
"""Keys of a plan that are text, or that say what the search was given."""
FORGOTTEN = {"weight_ms"}
"""Keys of the old plans alone: the part of a backward that a zero-bubble schedule delayed."""
ADDED = {"num_microbatches", "gathers", "coupled"}
"""Keys of the new plans and candidates alone."""


@dataclass(frozen=True)
class Case:
    """One search: a model and a batch on a cluster, with what a user fixed."""

    model: str
    seq_len: int
    global_batch: int
    cluster: str
    gpus: int
    memory_limit_gib: float | None = None
    fixed: dict[str, Any] = field(default_factory=dict, hash=False)
    compiled: bool = True
    explained: bool = False
    """Also dump what the explanation's searches found."""

    def __str__(self) -> str:
        limit = f", {self.memory_limit_gib} GiB" if self.memory_limit_gib else ""
        eager = "" if self.compiled else ", not compiled"
        fixed = "".join(f", {name}={value!r}" for name, value in self.fixed.items())
        return f"{self.model} ({self.global_batch} × {self.seq_len}) on {self.gpus} {self.cluster}{limit}{eager}{fixed}"


CASES = [
    Case("bert-large", 512, 512, "h200", 4, explained=True),
    Case("bert-large", 512, 512, "h200", 2, 8.0),
    Case("bert-large", 512, 512, "h200", 4, fixed={"pipeline": 2, "schedule": "interleaved", "chunks": 2}),
    Case("bert-large", 512, 512, "h200", 4, fixed={"pipeline": 2, "zero": 1, "micro_batch": 4}),
    Case("bert-large", 512, 512, "h200", 4, fixed={"schedule": "gpipe", "pipeline": 4}),
    Case("bert-large", 512, 512, "h200", 2, fixed={"cuda_graphs": True}),
    Case("bert-large", 512, 512, "h200", 2, fixed={"cuda_graphs": False}),
    Case("bert-large", 512, 500, "rtx-4090", 8),
    Case("bert-large", 512, 64, "v100", 16),
    Case("bert-large", 512, 512, "h200", 4, compiled=False, fixed={"schedule": "1f1b"}),
    Case("bert-large", 512, 512, "cpu", 2, compiled=False, fixed={"schedule": "1f1b"}),
    Case("scaled", 512, 256, "h200", 4, explained=True),
    Case("scaled", 512, 256, "h200", 4, 32.0, explained=True),
    Case("scaled", 512, 256, "h200", 4, 20.0),
    Case("scaled", 512, 256, "h200", 2, 24.0, fixed={"offload_optimizer": True}),
    Case("scaled", 512, 256, "h200", 4, fixed={"tensor": 2}),
    Case("scaled", 512, 256, "h200", 4, fixed={"data": 4, "zero": 3}),
    Case("scaled", 512, 256, "h200", 4, fixed={"recompute": "full"}),
    Case("scaled", 512, 256, "h200", 4, fixed={"recompute": "selective", "micro_batch": 16}),
    Case("scaled", 512, 256, "h200", 1),
    Case("scaled", 512, 256, "rtx-4090", 4),
    Case("scaled", 512, 256, "a100-40gb", 16),
    Case("scaled", 512, 4096, "h200", 1024),
    Case("scaled", 512, 256, "h200", 2, 6.0),
    Case("gpt3-1.3b", 1024, 64, "h200", 2, explained=True),
    Case("gpt3-1.3b", 1024, 64, "h200", 8),
    Case("gpt3-1.3b", 1024, 512, "h100", 64),
    Case("gpt3-1.3b", 1024, 64, "l40s", 8),
    Case("gpt3-1.3b", 1024, 64, "rtx-3090", 4, fixed={"schedule": "interleaved"}),
    Case("gpt3-1.3b", 1024, 64, "rtx-3090", 2),
    Case("gpt3-1.3b", 1024, 64, "h200", 4, fixed={"pipeline": 4, "chunks": 3}),
    Case("gpt3-1.3b", 1024, 64, "h200", 4, fixed={"tensor": 4, "offload_optimizer": False}),
    Case("gpt3-1.3b", 1024, 64, "h200", 4, fixed={"pipeline": 3}),
    Case("gpt3-1.3b", 1024, 30, "h200", 8, fixed={"data": 8}),
    Case("gpt2", 256, 128, "a10", 8),
    Case("gpt2", 256, 128, "cpu", 4, compiled=False, fixed={"schedule": "1f1b"}, explained=True),
    Case("gpt2", 256, 128, "cpu", 4, compiled=False, fixed={"schedule": "gpipe", "recompute": "none"}),
    Case("gpt2", 256, 128, "h200", 4, compiled=False, fixed={"schedule": "interleaved", "pipeline": 2}),
    Case("opt", 256, 128, "rtx-5090", 4),
    Case("opt", 256, 96, "a100", 2, 4.0),
    Case("opt", 256, 128, "cpu", 2, compiled=False, fixed={"schedule": "1f1b"}),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("dump", "compare"))
    parser.add_argument("files", nargs="+", type=Path, help="the file to write, or the two to compare")
    parser.add_argument("--only", default="", help="dump the cases whose description contains this text")
    asked = parser.parse_args()
    if asked.action == "dump":
        cases = [case for case in CASES if asked.only in str(case)]
        asked.files[0].write_text(json.dumps({str(case): outcome(case) for case in cases}, indent=1))
        return 0
    old, new = (json.loads(file.read_text()) for file in asked.files)
    shared = old.keys() & new.keys()
    differences = [line for case in old if case in shared for line in compared(case, old[case], new[case])]
    print(*differences[:60], sep="\n")
    print(f"{len(shared)} searches compared, {len(differences)} numbers or verdicts differ.")
    return 1 if differences or not shared else 0


def outcome(case: Case) -> dict[str, Any]:
    """Return the plan, the table's rows and the explanation of one search, or its refusal."""
    from workbench.base.errors import WorkbenchError
    from workbench.planning.planner import weigh
    from workbench.planning.prediction import timeline
    from workbench.planning.request import Request

    costs, cluster = profile_of(case.model, case.seq_len, case.cluster, case.compiled), cluster_of(case)
    limit = None if case.memory_limit_gib is None else int(case.memory_limit_gib * GIB)
    try:
        batch = {"global_batch": case.global_batch, "seq_len": case.seq_len}
        request = Request(**batch, cluster=cluster, memory_limit_bytes=limit, **fixed_of(Request, case.fixed))
        plans = weigh(costs, costs.precision, request)
    except WorkbenchError as error:
        return {"error": type(error).__name__, "message": str(error)}
    rows = [line for line in repr(plans).splitlines() if line[:1].isdigit()]
    found = {"plan": written(plans.best), "searched": plans.searched, "rows": rows}
    found["described"] = plans.best.describe()
    others = [plans[number] for number in (1, len(plans) // 8) if number < len(plans) and fits(plans.rows[number])]
    found["others"] = [{**written(plan), "candidates": len(plan.candidates)} for plan in others]
    found["simulated_ms"] = timeline(plans.best).step_ms
    if case.explained:
        from workbench.planning.explanation import explain

        told = explain(plans.best)
        found["changes"] = {c.constraint: [c.gain, c.plan.prediction.step_ms, c.set_by_user] for c in told.changes}
        found["binding"] = told.binding
    return found


def written(plan: Any) -> dict[str, Any]:
    """Return a plan's JSON without empty notes and host bytes, which one of the checkouts leaves out."""
    value = plan.to_json()
    stages = [{name: item for name, item in stage.items() if name != "host_bytes" or item} for stage in value["stages"]]
    return {name: item for name, item in value.items() if name != "notes" or item} | {"stages": stages}


def fits(row: Any) -> bool:
    return row.step_ms is not None and row.bubble_fraction is not None


def fixed_of(request: Any, fixed: dict[str, Any]) -> dict[str, Any]:
    """Return the fixed choices as the keywords of either checkout's `Request`."""
    if "fixed" not in request.__dataclass_fields__:
        return fixed
    from workbench.strategy import Fixed

    return {"fixed": Fixed(**fixed)}


@cache
def profile_of(name: str, seq_len: int, cluster: str, compiled: bool) -> Any:
    """Return the profile of a model, captured once for each device type."""
    try:
        from workbench.cost.graph_profiler import profile_graph
    except ImportError:  # the old checkout
        from workbench.cost import profile as profile_graph

    device = cluster_of(Case(name, seq_len, 1, cluster, 1)).device
    return profile_graph(graph_of(name, seq_len), device, "fp32" if cluster == "cpu" else "bf16", compiled=compiled)


@cache
def graph_of(name: str, seq_len: int) -> Any:
    from workbench import models
    from workbench.base.tensors import TensorSpec
    from workbench.capture import build_meta, capture

    model = {
        "bert-large": models.bert_large,
        "scaled": lambda: models.bert(hidden_size=1920, num_layers=54, num_heads=30),
        "gpt3-1.3b": models.gpt3,
        "gpt2": models.gpt2,
        "opt": models.opt,
    }[name]()
    fields = ("input_ids", "labels") if model.objective == "clm" else ("input_ids", "token_type_ids", "labels")
    batch = {name: TensorSpec(name, (2, seq_len), "int64") for name in fields}
    if model.objective == "mlm_nsp":
        batch["next_sentence_label"] = TensorSpec("next_sentence_label", (2,), "int64")
    return capture(build_meta(model.build), batch, name=model.name)


def cluster_of(case: Case) -> Any:
    from workbench.cost import Cluster, Device, Link

    if case.cluster != "cpu":
        return Cluster.of(case.cluster, gpus=case.gpus)
    device = Device("CPU", "cpu", 12 * GIB, {"fp32": 1.5e11, "bf16": 1.0e11}, 1.2e10)
    link = Link(2e9, 4e-5)
    return Cluster(device, case.gpus, case.gpus, link, link, 12 * GIB)


def compared(case: str, old: Any, new: Any) -> Iterator[str]:
    """Yield a line for every number or word that differs."""
    rows = [f"{case}: {path}: {left!r} -> {right!r}" for path, left, right in _differences("", old, new)]
    yield from rows


def _differences(path: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in (old.keys() | new.keys()) - IGNORED:
            if (key in FORGOTTEN and key not in new) or (key in ADDED and key not in old):
                continue
            yield from _differences(f"{path}.{key}", old.get(key, "absent"), new.get(key, "absent"))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (left, right) in enumerate(zip(old, new, strict=True)):
            yield from _differences(f"{path}[{index}]", left, right)
    elif isinstance(old, float) and isinstance(new, float):
        if not math.isclose(old, new, rel_tol=1e-12):
            yield path, old, new
    elif old != new:
        yield path, old, new


if __name__ == "__main__":
    sys.exit(main())
