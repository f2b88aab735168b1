"""The simulated step of a finished plan, for figures."""

from __future__ import annotations

from workbench.cost.communication import point_to_point_s
from workbench.planning.plan import Plan
from workbench.planning.schedules import Timeline, build_schedule, simulate


def timeline(plan: Plan) -> Timeline:
    """Start and end of every forward and backward of one step, by the plan's own stage times."""
    link = plan.cluster.link(plan.pipeline * plan.data)
    sends = [1e3 * point_to_point_s(stage.send_bytes, link) if stage.send_bytes else 0.0 for stage in plan.stages]
    schedule = build_schedule(plan.schedule, plan.pipeline, plan.num_microbatches)
    return simulate(schedule, [s.forward_ms for s in plan.stages], [s.backward_ms for s in plan.stages], sends)
