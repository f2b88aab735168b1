"""The simulated step of a finished plan, for figures."""

from __future__ import annotations

from workbench.cost.communication import point_to_point_s
from workbench.planning.plan import INTERLEAVED, Plan
from workbench.planning.pricing import boundary_link
from workbench.planning.schedules import Schedule, Timeline, build_schedule, simulate


def schedule_of(plan: Plan) -> Schedule:
    """What each pipeline rank runs, in order."""
    return build_schedule(plan.schedule, plan.pipeline, plan.num_microbatches, plan.chunks)


def timeline(plan: Plan) -> Timeline:
    """Start and end of every forward and backward of one step, by the plan's own stage times."""
    return simulate(
        schedule_of(plan),
        [stage.forward_ms for stage in plan.stages],
        [stage.backward_ms for stage in plan.stages],
        send_times_ms(plan),
        [stage.weight_ms for stage in plan.stages],
        queued=plan.schedule in INTERLEAVED,
    )


def send_times_ms(plan: Plan) -> list[float]:
    """One micro-batch from each stage to the next; 0 after the last, and between stages of one rank."""
    found = []
    for stage in plan.stages:
        here, there = stage.index % plan.pipeline, (stage.index + 1) % plan.pipeline
        if here == there or not stage.send_bytes:
            found.append(0.0)
            continue
        link = boundary_link(plan.cluster, plan.data * plan.tensor, here, there)
        found.append(1e3 * point_to_point_s(stage.send_bytes, link))
    return found
