"""`wb.bisect`: whether two plans of an experiment differ by rounding or by a fault, and where the fault begins.

Ranks train some steps under each plan, and one more process compares their numbers with one device
(`workbench.analysis.examining_ranks`). All have run directories in a folder that is removed when they have answered.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.analysis.deviation import EVERY, LOSS, NORM, Deviation, from_json, to_json
from workbench.base.arguments import checked_arguments
from workbench.base.display import facts_html, html_table, text_table
from workbench.base.errors import InvalidArgument, PlanInfeasible
from workbench.base.units import count, gib
from workbench.experiment import Experiment
from workbench.planning.plan import Plan
from workbench.planning.runnable import check_runnable, facts_for
from workbench.record.rundir import RunDir, read_record, runs_root
from workbench.runs.evaluating import wait_for_child
from workbench.runs.launching.device_queue import devices_for
from workbench.runs.launching.launcher import Attempt, start_attempt

EXAMINER = "workbench.analysis.examining_ranks"
"""Module that the ranks of `wb.bisect` and `wb.parity` execute."""
MOST_STEPS = 100
SHOWN = 12
"""Number of deviations in the table of a `Bisection`."""
REFERENCE_BYTES = 8 * 4 + 4 * 4
"""Bytes for each parameter on the device of the reference: weights, gradients and two moments in float64 and fp32."""
TRACE_BYTES = 4 * 4
"""Bytes on disk for each parameter and step: gradient, weight and two moments."""
SAME_REFERENCE = 1e-9
"""Relative difference of two losses in float64 up to which they are of the same computation."""
LEAST_FACTOR = 1e-3
"""Distance of a factor from 1 from which four digits tell them apart."""
MOSTLY = 0.95
"""Fraction of a difference from which a factor describes it."""
HEAD = ("plan", "step", "block", "tensor", "difference", "noise", "over the limit")


@dataclass(frozen=True)
class Bisection:
    """The result of `wb.bisect`, whose `verdict` says in a sentence how two plans differ."""

    experiment: str
    plans: tuple[str, str]
    """The division of plans A and B, such as `PP 2 × DP 1, 1F1B, 4 × 2 samples`."""
    steps: int
    reference: str
    """Type in which one device computed the reference: `float64`, or `float32` if the model cannot."""
    compared: int
    """Number of tensors of both plans that were compared."""
    losses: tuple[tuple[float | None, ...], tuple[float | None, ...]]
    """Loss of each step, under plans A and B."""
    begins: Deviation | None
    """The tensor in which the fault begins; None for rounding."""
    deviations: tuple[Deviation, ...]
    """Tensors that differ by more than rounding, in the order in which they arise; for rounding, the largest."""
    without_dropout: bool
    """True if dropouts were off, because the plans draw other masks than one device does."""
    unlike: float
    """Relative difference of the plans' references in the first step. It is not 0 where the model computes something
    else for micro-batches of another size: it draws dropout for each, or has statistics over a batch."""

    @property
    def is_fault(self) -> bool:
        """True if roundings do not explain how the plans differ from one device."""
        return self.begins is not None

    @property
    def verdict(self) -> str:
        """Say in plain English how the plans differ, and where a fault begins."""
        if self.begins is not None:
            return f"A fault begins at {_place(self.begins)}: {self._extent(self.begins)}{self._other_fault()}"
        largest = (
            f" The largest, {_place(self.deviations[0])} of plan {self.deviations[0].plan}, is "
            if self.deviations
            else ""
        )
        told = f"{largest}{self.deviations[0].excess:.2g} of what they explain." if self.deviations else ""
        if self.unlike:
            return (
                "The plans differ by the size of their micro-batches, with which the model computes something else "
                "(dropout is drawn for each micro-batch, or a layer has statistics over a batch): by "
                f"{self.unlike:.2g} of the first loss. Apart from that they differ by rounding.{told}"
            )
        return (
            f"The plans differ by rounding: {count(self.compared)} tensors of {self.steps} steps lie as near to one "
            f"device in {self.reference} as roundings explain.{told}"
        )

    def _extent(self, fault: Deviation) -> str:
        who = f"plan {fault.plan} ({self.plans['AB'.index(fault.plan)]})"
        return extent(fault, who, f"one device in {self.reference}")

    def _other_fault(self) -> str:
        other = next(
            (each for each in self.deviations if self.begins and each.plan != self.begins.plan and each.excess > 1),
            None,
        )
        if other is None:
            return ""
        return f" Plan {other.plan} is at fault as well, from {_place(other)} on."

    def to_json(self) -> dict[str, Any]:
        """Return the fields of the result, and its verdict, as plain values."""
        return {
            **{
                name: getattr(self, name)
                for name in ("experiment", "plans", "steps", "reference", "compared", "losses")
            },
            "verdict": self.verdict,
            "begins": None if self.begins is None else to_json(self.begins),
            "deviations": [to_json(each) for each in self.deviations],
            "without_dropout": self.without_dropout,
            "unlike": self.unlike,
        }

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (
                each.plan,
                str(each.step),
                f"{each.block} {each.block_name}",
                tensor_words(each),
                f"{each.size:.2g}",
                f"{each.noise:.2g}",
                f"{each.excess:.3g}",
            )
            for each in self.deviations[:SHOWN]
        ]

    @property
    def _notes(self) -> list[str]:
        return ["Dropout was off: these plans draw other masks than one device does."] if self.without_dropout else []

    def __repr__(self) -> str:
        plans = [f"plan {name}: {plan}" for name, plan in zip("AB", self.plans, strict=True)]
        table = text_table([HEAD, *self._rows()])
        return "\n".join([f"Bisection of {self.experiment}: {self.verdict}", *plans, *self._notes, table])

    def _repr_html_(self) -> str:
        facts = [("verdict", self.verdict), *((f"plan {n}", p) for n, p in zip("AB", self.plans, strict=True))]
        facts += [("note", note) for note in self._notes]
        return facts_html(f"Bisection of {self.experiment}", facts) + html_table(HEAD, self._rows())


def extent(fault: Deviation, who: str, reference: str) -> str:
    """Say in a sentence by how much a plan differs from the reference; both are given in words."""
    if math.isinf(fault.size):
        return f"{who} has none, or numbers that are not finite, where {reference} has some, or the other way round."
    ranks = f" on rank{'s' * (len(fault.ranks) > 1)} {', '.join(map(str, fault.ranks))}"
    noise = f"roundings change it by {fault.noise:.2g} of its size" if fault.noise else "roundings do not change it"
    off, is_hidden = abs(fault.factor - 1), fault.size <= fault.bound  # among roundings of single elements
    is_factor = off > MOSTLY * fault.size or (fault.measure == "scale" and is_hidden)
    if off >= LEAST_FACTOR and is_factor:
        return f"{who} has {fault.factor:.4g} times the reference{ranks}, and {noise}."
    what = {
        "size": f"by {fault.size:.2g} of its size",
        "element": f"in single elements, by {fault.distance:.2g} of the largest",
        "scale": f"in its projection on it, by {fault.distance:+.2g} of it",
        "offset": f"in its mean, by {fault.distance:+.2g} of the root mean square of its elements",
    }["size" if fault.measure == "scale" and not is_hidden else fault.measure]
    times = f", {fault.excess:,.3g} times what roundings explain" if math.isfinite(fault.excess) else ""
    if fault.excess <= 1:  # a block before the first that exceeds it (`first_fault`)
        times = f", {fault.excess:.2g} of what roundings explain, and the next block by more than that"
    return f"{who} differs from the reference{ranks} {what}{times} ({noise})."


def tensor_words(each: Deviation) -> str:
    """Name a tensor, relative to its block where it lies in it."""
    if each.tensor in (LOSS, NORM, EVERY):
        return each.tensor
    name = each.tensor.removeprefix("optim.").removeprefix("average.").removeprefix(f"{each.block_name}.")
    where = "" if each.micro_batch is None else f", micro-batch {each.micro_batch}"
    if each.tensor.startswith("optim."):
        name, _, slot = name.rpartition(".")
        return f"optimiser state {slot} of {name}"
    if each.tensor.startswith("average."):
        return f"average of {name}"
    words = {
        "weights": "first value of {}",
        "samples": "batch field {}",
        "output": "output {}",
        "passed gradient": "gradient passed back to {}",
        "gradient": "gradient of {}",
        "update": "update of {}",
    }
    return words[each.part].format(name) + where


def _place(each: Deviation) -> str:
    return f"step {each.step}, block {each.block} `{each.block_name}`, {tensor_words(each)}"


@checked_arguments
def bisect(experiment: Experiment, plan_a: Plan, plan_b: Plan, *, steps: int = 2, progress: bool = True) -> Bisection:
    """Say whether two plans of an experiment differ by rounding or by a fault, and where the fault begins.

    Each plan trains the same first samples for a few steps, in processes of its own. Then one device repeats each step
    in float64, from the weights that the ranks had, and several times in the plan's precision with other roundings.
    What each block sends and passes back, the gradients and the updates are measured against these.

    Args:
        experiment: what is trained; nothing is evaluated and no checkpoint is written.
        plan_a: one plan for it.
        plan_b: another one.
        steps: number of steps, from 1 to 100. A fault in how a stage reads its weights shows from the second on.
        progress: show a progress bar while a corpus is tokenised.

    Raises what `wb.launch` raises, `PlanInfeasible` if one device cannot hold the reference, and `InvalidArgument`,
    before a process starts. Raises `RunFailed` if the ranks of a plan fail.

    Examples:
        >>> stages, shards = wb.plan(experiment, pipeline=2), wb.plan(experiment, tensor=2)
        >>> found = wb.bisect(experiment, stages, shards, progress=False)
        >>> found.is_fault
        False
        >>> found.verdict[:29]
        'The plans differ by rounding:'
    """
    results, reference, without_dropout = compared(experiment, (plan_a, plan_b), steps, progress=progress)
    return _bisection(experiment, (plan_a, plan_b), steps, results, reference, without_dropout)


def compared(
    experiment: Experiment,
    plans: Sequence[Plan],
    steps: int,
    *,
    progress: bool = False,
    workers: Sequence[str] = (),
) -> tuple[list[Mapping[str, Any]], str, bool]:
    """Return how each plan differs from the reference, as its worker wrote it, the reference's type, and whether
    dropout was off. `workers` are the modules that the ranks of each plan execute.
    """
    experiment = examined(experiment, steps)
    check_examined(experiment, plans, steps, progress)
    compiles = experiment.numerics.compile
    draws_alike = all(
        plan.tensor == 1 and not (plan.cluster.device.type == "cuda" if compiles is None else compiles)
        for plan in plans
    )
    settings: dict[str, Any] = {"steps": steps, "without_dropout": not draws_alike}
    started: list[RunDir] = []
    with folder_of("bisection") as folder:
        for index, (plan, worker) in enumerate(zip(plans, workers or [EXAMINER] * len(plans), strict=True)):
            attempt = Attempt(experiment, plan, folder / f"plan-{index}", provenance={"bisection": settings})
            started.append(start_attempt(attempt, worker=worker, is_training=False))
            wait_for_child(started[-1])  # the next ranks are forked from a process that has imported what they need
        settings = {**settings, "traces": [str(run.path) for run in started]}
        from workbench.analysis.examining_ranks import RESULT
        from workbench.analysis.plain_loop import on_one_device

        attempt = Attempt(experiment, on_one_device(plans[0]), folder / "reference", provenance={"bisection": settings})
        started.append(start_attempt(attempt, worker=EXAMINER, is_training=False))
        wait_for_child(started[-1])
        found = read_record(started[-1].path / RESULT)
    return list(found["plans"]), str(found["reference"]), not draws_alike


def examined(experiment: Experiment, steps: int) -> Experiment:
    """Return an experiment that trains and does nothing else; raise `InvalidArgument` unless it has so many steps."""
    if 1 <= steps <= MOST_STEPS:
        experiment.reading.check()
        experiment = experiment.replace(evaluation=None, samples=None).resolved()
    most = min(MOST_STEPS, experiment.steps or MOST_STEPS)
    if not 1 <= steps <= most:
        raise InvalidArgument(f"steps={steps} lies outside 1 to {most}. A fault shows within few steps: give 2 or 3.")
    return experiment


def check_examined(experiment: Experiment, plans: Sequence[Plan], steps: int, progress: bool) -> None:
    """Raise unless a training of each plan can start, and one device has room for the reference."""
    for plan in plans:
        check_runnable(experiment, plan, facts_for(experiment, plan), progress=progress)
        devices_for(plan)
        _check_room(plan, steps)


@contextmanager
def folder_of(verb: str) -> Iterator[Path]:
    """Make a folder among the runs, which is removed with the block."""
    runs_root().mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{verb}-", dir=runs_root()))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check_room(plan: Plan, steps: int) -> None:
    """Raise `PlanInfeasible` if a device cannot hold the reference, or the disk the numbers of a plan."""
    parameters = plan.parameters
    device = plan.cluster.resized(1).device
    if parameters * REFERENCE_BYTES > device.memory_bytes:
        raise PlanInfeasible(
            f"The reference of {plan.model} needs {gib(parameters * REFERENCE_BYTES)} on one {device.name}, which has "
            f"{gib(device.memory_bytes)}. Compare the same plan of the model with fewer layers."
        )
    existing = next(folder for folder in (runs_root(), *runs_root().parents) if folder.exists())
    needed, free = parameters * TRACE_BYTES * steps, shutil.disk_usage(existing).free
    if needed > free:
        raise PlanInfeasible(
            f"The numbers of {steps} steps of {plan.model} take {gib(needed)} on disk, and {runs_root()} has "
            f"{gib(free)}. Compare fewer steps or fewer layers, or set WORKBENCH_RUNS to a larger disk."
        )


def _bisection(
    experiment: Experiment,
    plans: tuple[Plan, Plan],
    steps: int,
    results: Sequence[Mapping[str, Any]],
    reference: str,
    without_dropout: bool,
) -> Bisection:
    found = [[from_json({**each, "plan": n}) for each in r["deviations"]] for n, r in zip("AB", results, strict=True)]
    begins = [from_json({**r["fault"], "plan": n}) for n, r in zip("AB", results, strict=True) if r["fault"]]
    told = [each for one, result in zip(found, results, strict=True) if result["fault"] or not begins for each in one]
    first = min(begins, key=lambda each: each.order, default=None)
    key = (lambda each: (each.order, -each.excess)) if begins else (lambda each: -each.excess)
    (loss_a, *_), (loss_b, *_) = (result["reference_losses"] for result in results)
    unlike = abs(loss_a - loss_b) / max(abs(loss_a), abs(loss_b), 1e-30)
    return Bisection(
        experiment=experiment.name or experiment.model.name,
        plans=(plans[0].division(), plans[1].division()),
        steps=steps,
        reference=reference,
        compared=sum(int(result["compared"]) for result in results),
        losses=(tuple(results[0]["losses"]), tuple(results[1]["losses"])),
        begins=first,
        deviations=tuple(sorted(told, key=key)),
        without_dropout=without_dropout,
        unlike=unlike if unlike > SAME_REFERENCE else 0.0,
    )
