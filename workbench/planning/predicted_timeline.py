"""The simulated step of a finished plan, for figures."""

from __future__ import annotations

from workbench.cost.communication import point_to_point_s
from workbench.pipeline_schedules import build_schedule
from workbench.planning.plan import Plan
from workbench.planning.simulation import MicroBatchTimes, Timeline, simulate
from workbench.planning.stage_costs import boundary_link


def timeline(plan: Plan) -> Timeline:
    """Return start and end of every forward and backward of one step, from the times of the plan's own stages."""
    sends = []
    for stage in plan.stages:
        here, there = stage.index % plan.pipeline, (stage.index + 1) % plan.pipeline
        link = boundary_link(plan.cluster, plan.data * plan.tensor, here, there)
        is_sent = here != there and stage.send_bytes
        sends.append(1e3 * point_to_point_s(stage.send_bytes, link) if is_sent else 0.0)
    forward, backward = zip(*((stage.forward_ms, stage.backward_ms) for stage in plan.stages), strict=True)
    schedule = build_schedule(plan.schedule, plan.pipeline, plan.num_microbatches, plan.chunks)
    return simulate(schedule, MicroBatchTimes(forward, backward, sends), queued=plan.interleaves)
