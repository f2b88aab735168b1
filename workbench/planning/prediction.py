"""The predicted step of one cut of one option, what its times are based on, and the timeline of a finished plan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from workbench.cost.hardware import CALIBRATED, DATA_SHEET, FITTED, TIMED, Device, point_to_point_s
from workbench.cost.profile import Profile
from workbench.planning.device_costs import Array
from workbench.planning.plan import Plan, Prediction
from workbench.planning.request import Request
from workbench.planning.simulation import MicroBatchTimes, TimedAction, Timeline, simulate, step_ms
from workbench.planning.stage_costs import StageTimes, StrategyCosts, boundary_link
from workbench.planning.stage_cuts import Cut
from workbench.strategy import Strategy, build_schedule


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
    """Return start and end of all that one step does, from the times of the plan's own stages.

    The pipeline is simulated. In it, communication and waiting for the host lie where they hold compute up: what a
    forward needs is gathered before it, what a backward makes is reduced during and after it. After the last backward
    of all ranks come the rest of the communication and the update, whose clipping needs the norm of all gradients.
    """
    sends = []
    for stage in plan.stages:
        here, there = stage.index % plan.pipeline, (stage.index + 1) % plan.pipeline
        link = boundary_link(plan.cluster, plan.data * plan.tensor, here, there)
        is_sent = here != there and stage.send_bytes
        sends.append(1e3 * point_to_point_s(stage.send_bytes, link) if is_sent else 0.0)
    forward, backward = zip(*((stage.forward_ms, stage.backward_ms) for stage in plan.stages), strict=True)
    schedule = build_schedule(plan.schedule, plan.pipeline, plan.num_microbatches, plan.chunks)
    pipeline = simulate(schedule, MicroBatchTimes(forward, backward, sends), queued=plan.interleaves)
    return replace(pipeline, around=tuple(_around(plan, rank, pipeline) for rank in range(plan.pipeline)))


def _ending(plan: Plan, rank: int) -> tuple[float, float] | None:
    """Return the milliseconds of communication and update of a pipeline rank after the last backward, if stored."""
    wait = update = 0.0
    for stage in plan.stages_of(rank):
        if stage.end_wait_ms is None or stage.optimizer_ms is None:
            return None
        wait, update = wait + stage.end_wait_ms, update + stage.optimizer_ms
    return wait, update


def _around(plan: Plan, rank: int, pipeline: Timeline) -> tuple[TimedAction, ...]:
    """Return communication, waiting for the host and the update of one pipeline rank, in order of their starts."""
    lane, found = pipeline.lanes[rank], list[TimedAction]()
    last = max((action for action in lane if action.type == "B"), key=lambda action: action.end_ms)

    def add(type_: str, action: TimedAction, start: float, end: float) -> None:
        if end - start > 1e-9:
            found.append(TimedAction(type_, action.stage, action.micro_batch, start, end))

    for action in lane:
        stage = plan.stages[action.stage]
        in_forward, in_backward, in_last = stage.overlapped_ms
        if action.type == "F":
            begin = action.start_ms + stage.forward_wait_ms
            add("E", action, action.start_ms, begin)
            add("O", action, begin, min(action.end_ms, begin + in_forward))
            add("H", action, action.end_ms - stage.host_wait_ms / 2, action.end_ms)
        else:
            end, hidden = action.end_ms - stage.backward_wait_ms, in_backward + (in_last if action is last else 0.0)
            add("H", action, action.start_ms, action.start_ms + stage.host_wait_ms / 2)
            add("O", action, max(action.start_ms, end - hidden), end)
            add("E", action, end, action.end_ms)
    rest = max(0.0, plan.prediction.step_ms - pipeline.step_ms)
    ends = [_ending(plan, each) for each in range(plan.pipeline)]
    if (own := ends[rank]) is None:  # a plan that stored the end of the rank that ends last, alone
        update = min(rest, plan.prediction.optimizer_ms)
        wait = rest - update
    else:
        longest = max(sum(each) for each in ends if each is not None)
        wait, update = own[0] + max(0.0, rest - longest), own[1]  # and gradients of parameters that several ranks hold
    add("E", last, pipeline.step_ms, pipeline.step_ms + wait)
    add("U", last, pipeline.step_ms + wait, pipeline.step_ms + wait + update)
    return tuple(found)
