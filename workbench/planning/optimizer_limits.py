"""Limits that an optimiser sets to a plan: its state may have to stay on the device, and its tensors undivided."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from workbench.errors import PlanInfeasible, PlanMismatch
from workbench.experiment import Experiment
from workbench.planning.plan import Plan
from workbench.strategy import Choices
from workbench.user_code import UserFunction

_NEEDED_WHOLE = {
    "zero": "its update of a tensor differs from its updates of the tensor's halves",
    "tensor": "its update of a tensor differs from its updates of the tensor's halves",
    "pipeline": "its update of one parameter depends on other parameters",
}
Shapes = Mapping[str, Sequence[int]]


def choices_for_optimizer(experiment: Experiment, choices: Choices) -> Choices:
    """Return the choices with those that the experiment's optimiser leaves no choice about.

    Raises `PlanInfeasible` for a choice that it rules out, and `InvalidExperiment` for an optimiser of the user's that
    cannot train.
    """
    chosen: dict[str, Any] = dict(choices)
    if isinstance(experiment.optimizer.algorithm, UserFunction):
        from workbench.capture import build_meta

        named = build_meta(experiment.build).named_parameters()
        whole = _needed_whole(experiment, {name: tuple(p.shape) for name, p in named if p.requires_grad})
        for name, needed in whole.items():
            if chosen.get(name) not in (None, needed):
                raise PlanInfeasible(
                    f"{name}={chosen[name]} divides what the optimizer of {experiment.optimizer.name} needs whole: "
                    f"{_NEEDED_WHOLE[name]}. Choose {name}={needed}, or leave it out."
                )
        chosen |= whole
    if experiment.optimizer.algorithm != "adamw":
        if chosen.get("offload_optimizer") is True:
            raise PlanInfeasible(
                f"offload_optimizer=True keeps AdamW's moments in the host's memory, and the experiment trains with "
                f"{experiment.optimizer.name}, whose state stays on the device. Leave offload_optimizer out, or choose "
                "optimizer='adamw'."
            )
        chosen["offload_optimizer"] = False
    return cast(Choices, chosen)


def check_optimizer(experiment: Experiment, plan: Plan, trained_shapes: Callable[[], Shapes]) -> None:
    """Raise `PlanMismatch` if the plan divides what an optimiser of the user's needs whole.

    `trained_shapes` returns those of the trained parameters, by name. Raises `InvalidExperiment` for an optimiser that
    cannot train.
    """
    if not isinstance(experiment.optimizer.algorithm, UserFunction):
        return
    for name, needed in _needed_whole(experiment, trained_shapes()).items():
        if getattr(plan, name) > needed and plan.world > 1:
            raise PlanMismatch(
                f"The plan has {name}={getattr(plan, name)}, which divides what the optimizer of "
                f"{experiment.optimizer.name} needs whole: {_NEEDED_WHOLE[name]}. Plan again with wb.plan(experiment)."
            )


def _needed_whole(experiment: Experiment, shapes: Shapes) -> dict[str, int]:
    """Return the degrees and ZeRO stage that plans must have for an optimiser of the user's."""
    from workbench.optimizers.building import ELEMENT, MODEL, reach_of_update

    reach = reach_of_update(experiment, shapes)
    return {} if reach == ELEMENT else {"zero": 0, "tensor": 1, **({"pipeline": 1} if reach == MODEL else {})}
