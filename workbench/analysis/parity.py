"""`wb.parity`: the same steps from the same start under every division that a model has, beside plain PyTorch.

**The bound.** A sum that is computed in another order is the exact sum of terms of which each is changed, relatively,
by at most (n - 1) u for n terms and a unit roundoff u (Higham, Accuracy and Stability of Numerical Algorithms, 2002,
§4.2), and by about the root of n where roundings are independent (Higham & Mary, SIAM J. Sci. Comput. 41, 2019). A
division of a step is another order of its sums. What it may change is therefore what random changes of size u change,
and that is measured: plain PyTorch repeats all steps in the plan's precision with weights and gradients rounded at
random (Monte Carlo arithmetic; Parker, UCLA CSD-970002, 1997). How far the repetitions are from the same loop in
float64 is the noise of each number. A difference counts as rounding up to six times the largest noise, or 1.5 times
that of roundings eight times coarser, or eight roundings. `workbench.analysis.deviation` judges it, as for
`wb.bisect`: of each tensor the size, the largest element, the scale and the mean.

The steps do not start anew from common weights. An update takes a rounding along, and Adam's magnifies those of small
gradients; the repetitions do so alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.analysis.bisection import (
    EXAMINER,
    Bisection,
    bisect,
    check_examined,
    examined,
    extent,
    folder_of,
    tensor_words,
)
from workbench.analysis.deviation import EVERY, LOSS, Deviation, from_json
from workbench.base.arguments import checked_arguments
from workbench.base.display import facts_html, html_table, text_table, waiting
from workbench.base.errors import InvalidArgument, PlanInfeasible, RunFailed
from workbench.base.units import count
from workbench.experiment import Experiment
from workbench.planning.plan import Plan
from workbench.planning.planner import profile_and_cluster
from workbench.planning.request import Request
from workbench.planning.search import checked_search
from workbench.record.rundir import read_json, write_json
from workbench.runs.evaluating import wait_for_child
from workbench.runs.launching.launcher import Attempt, start_attempt
from workbench.strategy import DEGREES, SCHEDULES, ZERO, Choices, Fixed

HEAD = ("division", "beside", "loss", "bound", "gradients", "bound", "verdict")
BESIDE = {"plain": "plain PyTorch", "captured": "one device that draws the same"}
"""References, by the names that ranks give them."""
MOST_FLOPS = 3e13
"""Operations of all steps of all divisions up to which CPUs compute them: some ten minutes on two cores."""
PROCESSES = 2
"""Processes of the worlds in which divisions are tried."""


@dataclass(frozen=True)
class DivisionParity:
    """Differences of the steps under one division from those of a reference."""

    plan: Plan = field(repr=False)
    beside: str
    """The reference: `plain PyTorch`, or `one device that draws the same` for the masks of dropouts."""
    losses: tuple[float, ...]
    """Loss of each step."""
    loss_differences: tuple[float, ...]
    """Difference of each loss from the reference's, relative to it."""
    loss_bounds: tuple[float, ...]
    """The largest such difference that roundings explain."""
    gradient_differences: tuple[float, ...]
    """Norm of the difference of all gradients of each step from the reference's, relative to their norm."""
    gradient_bounds: tuple[float, ...]
    compared: int
    """Number of tensors that were compared: losses, gradients of each step, weights at the start and at the end."""
    begins: Deviation | None
    """The first tensor that differs by more than roundings explain; None if none does."""
    nearest: Deviation
    """The tensor that comes nearest to its bound, or exceeds it most."""

    @property
    def is_fault(self) -> bool:
        """True if roundings do not explain how the division differs."""
        return self.begins is not None

    @property
    def division(self) -> str:
        """The division in words: `"PP 2 × DP 1, 1F1B, 4 × 2 samples"`."""
        return self.plan.division()


@dataclass(frozen=True)
class Parity:
    """The result of `wb.parity`, whose `verdict` says in words which divisions compute what plain PyTorch does."""

    experiment: Experiment = field(repr=False)
    steps: int
    reference: str
    """Type in which plain PyTorch computed the reference: `float64`, or `float32` if the model cannot."""
    comparisons: tuple[DivisionParity, ...]
    failed: tuple[tuple[str, str], ...]
    """Division and first line of the error of each that did not run."""
    left_out: tuple[tuple[str, str], ...]
    """Choices that this model does not have, or that cannot be compared, each with the reason."""
    notes: tuple[str, ...] = ()

    @property
    def faults(self) -> tuple[DivisionParity, ...]:
        """Comparisons with a difference that roundings do not explain."""
        return tuple(each for each in self.comparisons if each.is_fault)

    @property
    def is_equal(self) -> bool:
        """True if every division ran and differs from plain PyTorch by no more than roundings explain."""
        return bool(self.comparisons) and not self.faults and not self.failed

    @property
    def verdict(self) -> str:
        """Say in plain English whether the divisions compute what plain PyTorch does, and what comes nearest to not."""
        divisions = {each.division for each in self.comparisons}
        told = [self._about_faults()] if self.faults else []
        told += [f"{name} did not run: {error}" for name, error in self.failed]
        if self.comparisons and not told:
            worst = max(self.comparisons, key=lambda each: each.nearest.excess)
            told.append(
                f"{_counted(len(divisions), 'division')} and plain PyTorch in {self.reference} differ by rounding over "
                f"{_counted(self.steps, 'step')}: {count(sum(each.compared for each in self.comparisons))} losses, "
                f"gradients and weights lie within the bound. The nearest to it, {_place(worst.nearest)} under "
                f"{worst.division}, is at {worst.nearest.excess:.2g} of it."
            )
        if not self.comparisons and not told:
            told.append("No division could be compared.")
        if self.left_out:
            told.append(f"{_counted(len(self.left_out), 'choice')} could not be tried; the table says why.")
        return " ".join(told)

    def _about_faults(self) -> str:
        divisions = {each.division for each in self.comparisons}
        wrong = {each.division for each in self.faults}
        first = self.faults[0]
        assert first.begins is not None
        told = (
            f"{len(wrong)} of {_counted(len(divisions), 'division')} differ from the reference by more than rounding. "
            f"It begins at {_place(first.begins)}: {extent(first.begins, first.division, first.beside)}"
        )
        alone = [each for each in self.comparisons if each.plan.world == 1]
        if alone and all(each.is_fault for each in alone if each.beside == BESIDE["plain"]):
            return (
                f"{told} A single device differs as well, so that the fault is none of a division: what was captured "
                "computes something else than the model."
            )
        return f"{told} The block in which it arises is found by .bisect()."

    def bisect(self, *, progress: bool = True) -> Bisection:
        """Find the block in which the first faulty division begins to differ from one device, by `wb.bisect`.

        Raises `InvalidArgument` if no division is at fault, and what `wb.bisect` raises.
        """
        if not self.faults:
            raise InvalidArgument(f"There is no fault to look for. {self.verdict}")
        from workbench.analysis.plain_loop import on_one_device

        first = self.faults[0]
        assert first.begins is not None
        steps = min(self.steps, max(2, first.begins.step))
        return bisect(self.experiment, on_one_device(first.plan), first.plan, steps=steps, progress=progress)

    def to_json(self) -> dict[str, Any]:
        """Return the verdict and the rows of the table, as plain values."""
        rows = [dict(zip(_keys(), row, strict=True)) for row in self._rows()]
        return {"verdict": self.verdict, "is_equal": self.is_equal, "steps": self.steps, "rows": rows}

    def _rows(self) -> list[tuple[str, ...]]:
        rows = []
        for each in self.comparisons:
            said = f"rounding: {each.nearest.excess:.2g} of the bound"
            if each.begins is not None:
                said = f"FAULT: {_place(each.begins)}, {each.begins.excess:.3g} times the bound"
            pairs = (
                (each.loss_differences, each.loss_bounds),
                (each.gradient_differences, each.gradient_bounds),
            )
            worst = [max(zip(*pair, strict=True), key=lambda both: both[0] / (both[1] or math.inf)) for pair in pairs]
            numbers = [f"{value:.1e}" for pair in worst for value in pair]
            rows.append((each.division, each.beside, *numbers, said))
        rows += [(name, "", "", "", "", "", f"FAILED: {error}") for name, error in self.failed]
        return rows + [(name, "", "", "", "", "", f"not tried: {reason}") for name, reason in self.left_out]

    def __repr__(self) -> str:
        name = self.experiment.name or self.experiment.model.name
        return "\n".join([f"Parity of {name}: {self.verdict}", *self.notes, text_table([HEAD, *self._rows()])])

    def _repr_html_(self) -> str:
        name = self.experiment.name or self.experiment.model.name
        facts = [("verdict", self.verdict), *(("note", note) for note in self.notes)]
        return facts_html(f"Parity of {name}", facts) + html_table(HEAD, self._rows())


def _keys() -> tuple[str, ...]:
    return ("division", "beside", "loss", "loss_bound", "gradients", "gradient_bound", "verdict")


def _place(each: Deviation) -> str:
    at = f"step {each.step}, " if each.part not in ("weights", "update") else ""
    words = tensor_words(each)
    return f"{at}{words}" if each.tensor in (LOSS, EVERY) else f"{at}block `{each.block_name}`, {words}"


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


@checked_arguments
def parity(
    experiment: Experiment,
    plans: Sequence[Plan] | None = None,
    *,
    steps: int = 3,
    devices: str = "cpu",
    progress: bool = True,
) -> Parity:
    """Say whether a model trains under every division as a loop of plain PyTorch trains it, up to rounding.

    The loop is the unmodified model, autograd and the experiment's update, on one device in float64. Each division
    trains the same samples from the same weights, in processes of this machine and in the runtime of every training.
    Losses and all gradients of each step, and the weights at the end, are compared. The bound of each difference is
    what random roundings change in repetitions of the loop, and is explained in `workbench.analysis.parity`.

    Where the model draws random numbers, as for dropout, every sample is given the same in both, and dropouts keep
    everything. What each division draws by itself is compared with one device that draws the same.

    Args:
        experiment: what is trained; nothing is evaluated and no checkpoint is written.
        plans: the divisions. By default each that this model has on up to two devices: micro-batches, recomputation,
            data parallelism with ZeRO 0 to 3, tensor parallelism, pipelines of every schedule, and pairs of these.
        steps: number of steps, from 1 to 100. A fault in an update shows from the second on.
        devices: `cpu`, or `gpu` for the GPUs of this machine; `plans` have devices of their own.
        progress: show a progress bar while a corpus is tokenised.

    Raises what `wb.plan` raises for a model that cannot be captured, `PlanInfeasible` for one that is too large, and
    `InvalidArgument`, before a process starts. Raises `RunFailed` if plain PyTorch fails; a division that fails is part
    of the result.

    Examples:
        >>> found = wb.parity(experiment, [wb.plan(experiment, data=2)], steps=2, progress=False)
        >>> found.is_equal
        True
        >>> found.verdict[:30]
        '1 division and plain PyTorch i'
    """
    if devices not in ("cpu", "gpu"):
        raise InvalidArgument(f"devices={devices!r:.80} is neither 'cpu' nor 'gpu'.")
    if plans is not None and not plans:
        raise InvalidArgument("plans is empty. Give plans, or leave it out for every division that the model has.")
    experiment = examined(experiment, steps)
    with waiting(f"comparing divisions of {experiment.model.name}"):
        if plans is not None:
            return compared_with_plain(experiment, plans, steps, progress=progress)
        found = list(_divisions(experiment, devices))
        plans = [plan for _, plan in found if isinstance(plan, Plan)]
        left_out = [(name, plan) for name, plan in found if isinstance(plan, str)]
        if not plans:
            raise PlanInfeasible(f"No division of {experiment.model.name} can be tried: {left_out[0][1]}")
        return compared_with_plain(experiment, plans, steps, left_out, progress=progress)


def compared_with_plain(
    experiment: Experiment,
    plans: Sequence[Plan],
    steps: int,
    left_out: Sequence[tuple[str, str]] = (),
    *,
    progress: bool = False,
    worker: str = EXAMINER,
) -> Parity:
    """Return what `parity` does, for an experiment without evaluations; `worker` is the module that ranks execute."""
    for name, of_plans in (
        ("types of devices", {plan.cluster.device.type for plan in plans}),
        ("precisions", {plan.precision for plan in plans}),
    ):
        if len(of_plans) > 1:
            raise InvalidArgument(
                f"The plans have several {name}, {' and '.join(sorted(of_plans))}. Give those of one."
            )
    check_examined(experiment, plans, steps, progress)
    _check_time(plans, steps)
    with folder_of("parity") as folder:
        for index, plan in enumerate(plans):
            write_json(folder / f"plan-{index}.json", plan.to_json())
        failed = _run(experiment, plans, steps, folder, worker)
        return _parity(experiment, plans, steps, folder, failed, left_out)


# The divisions of a model


def _divisions(experiment: Experiment, devices: str) -> Iterator[tuple[str, Plan | str]]:
    """Yield the choices of each division in words, and its plan, or the reason why this model does not have it.

    The model is captured and priced once.
    """
    from workbench.measure.detection import cpu_cluster, detected_cluster

    cluster = cpu_cluster(PROCESSES) if devices == "cpu" else detected_cluster(None)
    if cluster.device.type != ("cpu" if devices == "cpu" else "cuda"):
        raise PlanInfeasible("devices='gpu' needs a CUDA GPU, and this machine shows none. Leave it out for CPUs.")
    costs, cluster = profile_and_cluster(experiment, cluster)
    batch = math.gcd(*(size for _, size in experiment.batches.stretches), experiment.largest_batch)
    micro = next(batch // parts for parts in (4, 2, 1) if batch % parts == 0)
    for chosen in _choices(batch, micro):
        world = PROCESSES if chosen.keys() & set(DEGREES) else 1
        name = ", ".join(f"{key}={value}" for key, value in chosen.items())
        if world > cluster.gpus:
            yield name, f"this machine has {_counted(cluster.gpus, 'GPU')}."
            continue
        try:
            degrees: Any = {**dict.fromkeys(DEGREES, 1), "recompute": "none", **chosen}
            request = Request.of(experiment, cluster.resized(world), None, Fixed(**degrees), costs.facts)
            yield name, checked_search(costs, costs.precision, request).plan()
        except PlanInfeasible as error:
            yield name, str(error)


def _choices(batch: int, micro: int) -> Iterator[Choices]:
    """Yield every kind of division that `PROCESSES` devices have: each alone, and with what can go along with it."""
    parts: Choices = {"micro_batch": micro}
    yield {"micro_batch": batch}
    if micro < batch:
        yield parts
    yield {**parts, "recompute": "selective"}
    yield {**parts, "recompute": "full"}
    for zero in ZERO:
        yield {"data": PROCESSES, "zero": zero, **parts}
    yield {"data": PROCESSES, "zero": max(ZERO), "recompute": "full", **parts}
    yield {"tensor": PROCESSES, **parts}
    yield {"tensor": PROCESSES, "recompute": "selective", **parts}
    for name in SCHEDULES:
        yield {"pipeline": PROCESSES, "schedule": name, **parts}
    yield {"pipeline": PROCESSES, "recompute": "full", **parts}


def _check_time(plans: Sequence[Plan], steps: int) -> None:
    """Raise `PlanInfeasible` for steps that would take CPUs more than some minutes."""
    on_cpu = [plan for plan in plans if plan.cluster.device.type == "cpu"]
    needed = steps * sum(plan.flops_per_step for plan in on_cpu)
    if needed > MOST_FLOPS:
        raise PlanInfeasible(
            f"{_counted(steps, 'step')} of {plans[0].global_batch} samples under {_counted(len(on_cpu), 'division')} "
            f"are {needed / 1e12:,.0f} TFLOP, which takes CPUs more than ten minutes. Compare fewer samples, "
            "wb.parity(experiment.replace(global_batch=8)), a model of fewer layers, or on GPUs, devices='gpu'."
        )


# The processes: one world for all plans of one size, the smallest of which makes the references.


def _run(experiment: Experiment, plans: Sequence[Plan], steps: int, folder: Path, worker: str) -> dict[int, str]:
    """Let every plan train, and return the errors of those that failed."""
    from workbench.analysis.plain_loop import on_one_device

    failed: dict[int, str] = {}
    for world in sorted({1, *(plan.world for plan in plans)}):
        left = [index for index, plan in enumerate(plans) if plan.world == world]
        has_references = world > 1
        while left or not has_references:
            said = f"{_counted(len(left), 'division')} on {world} process{'es' * (world > 1)}"
            asked = {"folder": str(folder), "steps": steps, "plans": left, "makes_references": not has_references}
            plan = plans[left[0]] if left else on_one_device(plans[0])
            attempt = Attempt(experiment, plan, folder / f"world-{world}-{len(left)}", provenance={"parity": asked})
            with waiting(said if has_references else f"plain PyTorch, and {said}"):
                child = start_attempt(attempt, worker=worker, is_training=False)
                try:
                    wait_for_child(child)
                    break
                except RunFailed as error:
                    has_references = (folder / FACTS).exists()
                    left = [index for index in left if not (folder / _result(index)).exists()]
                    if not has_references or not left:
                        raise
                    failed[left.pop(0)] = str(error).strip().splitlines()[0]  # the others are tried without it
    return failed


FACTS = "facts.json"


def _result(index: int) -> str:
    return f"found-{index}.json"


def _parity(
    experiment: Experiment,
    plans: Sequence[Plan],
    steps: int,
    folder: Path,
    failed: Mapping[int, str],
    left_out: Sequence[tuple[str, str]],
) -> Parity:
    """Return what the ranks have found."""
    facts, comparisons, rest = read_json(folder / FACTS), list[DivisionParity](), list(left_out)
    for index, plan in enumerate(plans):
        if index in failed:
            continue
        results = read_json(folder / _result(index))
        if not results:
            drawn = " and ".join(facts["draws"])
            reason = f"it draws other numbers ({drawn}) than one device does. Compare on CPUs, or without dropout."
            rest.append((plan.division(), reason))
        for name, found in results.items():
            nearest = from_json({**found["deviations"][0], "plan": plan.division()})
            begins = found["fault"] and from_json({**found["fault"], "plan": plan.division()})
            pairs = {key: [step[key] or (math.inf, 0.0) for step in found["steps"]] for key in (LOSS, EVERY)}
            comparisons.append(
                DivisionParity(
                    plan=plan,
                    beside=BESIDE[name],
                    losses=tuple(step["loss"] for step in found["steps"]),
                    loss_differences=tuple(pair[0] for pair in pairs[LOSS]),
                    loss_bounds=tuple(pair[1] for pair in pairs[LOSS]),
                    gradient_differences=tuple(pair[0] for pair in pairs[EVERY]),
                    gradient_bounds=tuple(pair[1] for pair in pairs[EVERY]),
                    compared=int(found["compared"]),
                    begins=begins,
                    nearest=nearest,
                )
            )
    notes = []
    if facts["depends"]:
        notes.append("The model computes with statistics or state of a micro-batch: plain PyTorch accumulates them.")
    if not facts["follows"]:
        notes.append(
            f"Plain PyTorch cannot be given the numbers that the model draws ({' and '.join(facts['draws'])}): "
            "divisions are compared with the captured model on one device."
        )
    said = tuple((plans[index].division(), error) for index, error in failed.items())
    return Parity(experiment, steps, facts["reference"], tuple(comparisons), said, tuple(rest), tuple(notes))
