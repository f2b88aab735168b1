"""The predicted step of one cut of one option, what its times are based on, and the timeline of a finished plan."""

from __future__ import annotations

import numpy as np

from workbench.cost.communication import point_to_point_s
from workbench.cost.device import CALIBRATED, DATA_SHEET, FITTED, TIMED, Device
from workbench.cost.profile import Profile
from workbench.pipeline_schedules import build_schedule
from workbench.planning.device_costs import Array
from workbench.planning.plan import Plan, Prediction
from workbench.planning.request import Request
from workbench.planning.simulation import MicroBatchTimes, Timeline, simulate, step_ms
from workbench.planning.stage_costs import StageTimes, StrategyCosts, boundary_link
from workbench.planning.stage_cuts import Cut
from workbench.strategy import Strategy


def bound_ms(costs: StrategyCosts, cut: Cut, times: StageTimes) -> float:
    """Return a lower bound of the step, without simulating it.

    The bound is the longest of these: all of a rank's own work, before it what a first micro-batch takes down to its
    first stage, and after it what a last one takes back up; then the end of the step.
    """
    strategy = costs.strategy
    above = slice(strategy.pipeline - 1)
    sends = _sends(costs, cut)
    own = strategy.num_microbatches * _by_rank(times.busy, strategy)
    longest = own + np.concatenate([[0.0], np.cumsum(times.busy[above] + 2 * sends[above])])
    return float(longest.max() + _by_rank(times.ending, strategy).max())


def predict(costs: StrategyCosts, cut: Cut, times: StageTimes, request: Request) -> Prediction:
    """Simulate the schedule with the stages' times, and add what follows the last backward."""
    strategy, count = costs.strategy, costs.strategy.num_microbatches
    forward, backward = times.forward, times.backward
    waits = times.forward_wait + times.backward_wait
    each = MicroBatchTimes(
        (forward + times.forward_wait).tolist(),
        (backward + times.backward_wait).tolist(),
        _sends(costs, cut).tolist(),
    )
    length, bubble = step_ms(strategy.schedule, strategy.pipeline, count, each)
    ends = _by_rank(times.ending, strategy)
    tied = costs.tied_ms(cut.cuts)
    total = length + float(ends.max()) + tied
    last, busiest = int(ends.argmax()), int(_by_rank(forward + backward + waits, strategy).argmax())
    host = count * float(_by_rank(times.host_wait, strategy)[busiest])
    compute = count * float(_by_rank(forward + backward, strategy)[busiest]) - host
    waiting = count * float(_by_rank(waits, strategy)[busiest])
    cluster, profile = costs.cluster, costs.profile
    flops = profile.flops_per_sample - (0.0 if profile.sparse is None else profile.sparse.absent_flops)
    peak = None if cluster.device.type == "cpu" else cluster.gpus * cluster.device.peak(profile.precision)
    return Prediction(
        step_ms=total,
        compute_ms=compute,
        bubble_ms=length - compute - host - waiting,
        communication_ms=waiting + float(_by_rank(times.step_wait, strategy)[last]) + tied,
        optimizer_ms=float(_by_rank(times.optimizer, strategy)[last]),
        bubble_fraction=bubble,
        tokens_per_s=request.global_batch * request.seq_len / (total / 1e3),
        mfu=None if peak is None else flops * request.global_batch / (total / 1e3) / peak,
        host_ms=host,
        orthogonalisation_ms=float(_by_rank(times.orthogonalisation, strategy)[last]),
        basis=basis_of_times(costs.profile, costs.cluster.device),
    )


def _sends(costs: StrategyCosts, cut: Cut) -> Array:
    """Return the time to send one micro-batch from each stage to the next; 0 after the last."""
    return np.array([row[j] for row, j in zip(costs.send_ms, cut.cuts[1:], strict=True)])


def _by_rank(values: Array, strategy: Strategy) -> Array:
    """Return the sum over the stages of each pipeline rank."""
    return np.asarray(values.reshape(strategy.chunks, strategy.pipeline).sum(axis=0))


BLOCKS_FIRST = "On a machine that has this GPU, the model's blocks are measured first."


def basis_of_times(profile: Profile, device: Device) -> str:
    """Return, for instance, `"Times are those of this model's blocks, as measured on H200."`"""
    if profile.time_ratios and profile.measured_on == device.name:
        return f"Times are those of this model's blocks, as measured on {device.name}."
    if device.type == "cpu":
        how = "wb.measure.calibrate()" if device.basis == CALIBRATED else "a matrix product and a copy"
        return f"Times come from {how}, timed on this machine{device.measured}: enough to rank plans."
    return {
        FITTED: f"Times come from constants that were fitted to training on {device.name}. {BLOCKS_FIRST}",
        CALIBRATED: f"Times come from wb.measure.calibrate() on {device.name}{device.measured}. {BLOCKS_FIRST}",
        TIMED: f"Times come from a matrix product and a copy that were timed on this machine's {device.name}"
        f"{device.measured}, and from the efficiency of other GPUs: enough to rank plans.",
        DATA_SHEET: f"Times come from the data sheet of {device.name} and the efficiency of other GPUs; nothing was "
        f"measured: enough to rank plans. {BLOCKS_FIRST}",
    }[device.basis]


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
