"""A finished search as a `Plan`: its stages, its notes, and the rows of its table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from workbench.cost.memory import Array, ParameterTable
from workbench.cost.profile import Profile, SparseCosts
from workbench.planning.options import Option
from workbench.planning.plan import Candidate, Memory, Plan, Prediction, Stage, common_recompute
from workbench.planning.prediction import predict
from workbench.planning.refusals import apart, host_need
from workbench.planning.request import Request, no_kernels, unknown_rates
from workbench.planning.stage_costs import StrategyCosts, overlapped
from workbench.planning.stage_cuts import Cut, Cutter
from workbench.units import duration, gib

UNCONFIRMED = (
    "which follows from the operations alone: the model is too large to compare numbers here. A run compares them on "
    "its first device before the first update."
)
"""End of the sentence on a gathered loss that no numbers confirm."""
MAX_ROWS = 400
"""Number of options that a plan lists, nearest to the chosen one first."""
MAX_OPAQUE = 5
"""Number of opaque calls whose shares a plan lists, the largest first."""
MAX_REJECTED = 60
"""Number of these that do not fit, nearest to fitting first."""


def assemble(
    profile: Profile, request: Request, best: Option, options: Sequence[Option], other: Option | None = None
) -> Plan:
    """Return the plan of the best option, with all options as its candidates.

    `other` is the best option that executes sparse weights in the other way.
    """
    costs, cut = best.costs, best.cut
    assert cut is not None
    # The last block of a gathered loss is its tail; the profile of block-sparse weights counts those present alone.
    divided = profile if costs.profile.tail is None else costs.profile
    choices = dict(vars(best.strategy))
    del choices["chunks"], choices["recompute"]
    loss_depends = _notes_of_state(profile, best)
    prediction = predict(costs, cut, costs.times(cut.stages), request)
    stretches = _stretches(best, cut, request)
    if stretches:
        prediction = replace(prediction, training_s=sum(steps * step_ms for _, steps, step_ms in stretches) / 1e3)
    plan = Plan(
        model=profile.model,
        signature=profile.signature,
        cluster=request.cluster,
        global_batch=request.global_batch,
        seq_len=request.seq_len,
        precision=profile.precision,
        block_names=tuple(block.name for block in divided.blocks),
        stages=_stages(costs, cut, ParameterTable(divided).elements),
        memory_limit_bytes=request.memory_limit_bytes,
        flops_per_step=round(profile.flops_per_sample * request.global_batch),
        prediction=prediction,
        coupled=bool(profile.coupled),
        notes=(
            *profile.notes,
            *_notes_of_division(profile, best),
            *loss_depends,
            *_opaque_note(divided, costs),
            *(_coupling_note(operation, best, request) for operation in profile.coupled),
            *weights_note(profile, request, best, other),
            *_ramp_note(stretches, prediction),
        ),
        loss_depends=loss_depends,
        candidates=_rows(best, options, request),
        computation=None if profile.captured is None else profile.captured.computation,
        **choices,
    )
    object.__setattr__(plan, "origin", (profile, request))
    return plan


def _stretches(best: Option, cut: Cut, request: Request) -> list[tuple[int, int, float]]:
    """Return samples, steps and predicted milliseconds of a step for each stretch of a batch that changes."""
    found = []
    for batch, steps in request.ramp:
        strategy = best.strategy
        count = batch // strategy.data // strategy.micro_batch
        costs = best.costs.model.of(replace(strategy, num_microbatches=count))
        predicted = predict(costs, cut, costs.times(cut.stages), replace(request, global_batch=batch))
        found.append((batch, steps, predicted.step_ms))
    return found


def _ramp_note(stretches: Sequence[tuple[int, int, float]], prediction: Prediction) -> tuple[str, ...]:
    if not stretches:
        return ()
    each = [f"{steps:,} of {batch:,} samples in {duration(step_ms / 1e3)} each" for batch, steps, step_ms in stretches]
    return (
        f"The batch changes: {', '.join(each)}, {duration(prediction.training_s)} together. Memory and all other "
        "figures are those of the largest batch.",
    )


def _notes_of_division(profile: Profile, best: Option) -> tuple[str, ...]:
    """Return the sentences that hold for a batch that is divided as in the best option."""
    strategy = best.strategy
    is_whole = strategy.gathers or strategy.data * strategy.num_microbatches == 1
    return () if is_whole else profile.notes_if_divided


def _notes_of_state(profile: Profile, best: Option) -> tuple[str, ...]:
    """Return the sentences on state that each micro-batch of a step changes for the next."""
    strategy = best.strategy
    return profile.notes_if_accumulated if strategy.num_microbatches > 1 and not strategy.gathers else ()


def _opaque_note(profile: Profile, costs: StrategyCosts) -> tuple[str, ...]:
    """Return a sentence on the share of the step that blocks with opaque calls take; none for other models."""
    block_ms = costs.blocks.forward_ms + costs.blocks.backward_ms
    shares = {
        labels: sum(block_ms[at] for at, block in enumerate(profile.blocks) if block.opaque == labels) / block_ms.sum()
        for labels in dict.fromkeys(block.opaque for block in profile.blocks if block.opaque)
    }
    if not shares:
        return ()
    largest = sorted(shares.items(), key=lambda item: -item[1])
    each = [f"{' and '.join(labels)} {share:.1%}" for labels, share in largest[:MAX_OPAQUE]]
    rest = [f"{len(largest) - MAX_OPAQUE} others the rest"] if len(largest) > MAX_OPAQUE else []
    return (
        f"Of the predicted time of forward and backward, {sum(shares.values()):.1%} goes to the layers that run as "
        f"written, with what stands beside them in their blocks: {', '.join([*each, *rest])}.",
    )


def _coupling_note(operation: str, best: Option, request: Request) -> str:
    strategy, tail = best.strategy, best.costs.profile.tail
    said = f"The loss compares samples of one batch ({operation}), so that the plan"
    if tail is None:
        return f"{said} keeps the global batch in one micro-batch on one replica."
    count, size = strategy.num_microbatches, gib(tail.gathered_bytes)
    micro = f"{count} micro-batches, each of which runs forward twice" if count > 1 else "one micro-batch"
    replicas = f", on each of {strategy.data} replicas" if strategy.data > 1 else ""
    return (
        f"{said} gathers what lies before the comparison, {size} of {request.global_batch} samples in {micro}"
        f"{replicas}: loss and gradients are those of the whole batch, "
        + ("as numbers confirm." if tail.is_compared else UNCONFIRMED)
    )


def _stages(costs: StrategyCosts, cut: Cut, elements: Array) -> tuple[Stage, ...]:
    times, cutter, mixed, modes = costs.times(cut.stages), Cutter(costs), cut.stages, costs.model.modes
    pipeline = costs.strategy.pipeline
    at_peak = [cutter.fullest_moment(rank, cut)[0] for rank in range(pipeline)]
    crossing, state, hidden = costs.profile.crossing_bytes, cutter.state, overlapped(costs, cut.stages)
    again = {"full": costs.blocks.full_recompute_ms, "selective": costs.blocks.selective_recompute_ms}
    stages = []
    for s, (i, j) in enumerate(pairwise(cut.cuts)):
        recomputed = int(mixed.middle[s]) - i
        is_mixed = 0 < recomputed < j - i
        to_come = cutter.gradients_to_come(cut, s)
        block_ms = costs.blocks.forward_ms[i:j] + costs.blocks.backward_ms[i:j]
        for mode, part in ((mixed.heavier[s], slice(recomputed)), (mixed.lighter[s], slice(recomputed, None))):
            if modes[mode] in again:
                block_ms[part] += again[modes[mode]][i:j][part]
        stages.append(
            Stage(
                index=s,
                first_block=i,
                end_block=j,
                parameters=int(elements[i, j]),
                forward_ms=float(times.forward[s] + times.forward_wait[s]),
                backward_ms=float(times.backward[s] + times.backward_wait[s]),
                send_bytes=int(crossing[j] * costs.strategy.micro_batch) if j < len(crossing) - 1 else 0,
                recompute=modes[mixed.heavier[s]],
                memory=Memory(
                    parameters=int(state.parameters[i, j]),
                    gradients=int(state.gradients[i, j] - to_come),
                    optimizer=int(state.optimizer[i, j]),
                    activations=int(at_peak[s % pipeline][s // pipeline] - state.total[i, j] + to_come),
                    workspace=int(state.workspace[i, j]),
                ),
                recompute_first=recomputed if is_mixed else None,
                recompute_rest=modes[mixed.lighter[s]] if is_mixed else "none",
                host_bytes=cutter.host_bytes(i, j),
                forward_wait_ms=float(times.forward_wait[s]),
                backward_wait_ms=float(times.backward_wait[s]),
                host_wait_ms=float(times.host_wait[s]),
                overlapped_ms=(float(hidden[0][s]), float(hidden[1][s]), float(hidden[2][s])),
                end_wait_ms=float(times.step_wait[s]),
                optimizer_ms=float(times.optimizer[s]),
                block_shares=tuple((block_ms / block_ms.sum()).round(6).tolist()),
            )
        )
    return tuple(stages)


def _rows(best: Option, options: Sequence[Option], request: Request) -> tuple[Candidate, ...]:
    fitting = sorted((o for o in options if o.may_fit), key=lambda option: (option is not best, option.least_ms))
    rejected = sorted((o for o in options if not o.may_fit), key=lambda option: option.least_bytes)
    rejected = rejected[:MAX_REJECTED]
    return tuple(_row(option, best, request) for option in (*fitting[: MAX_ROWS - len(rejected)], *rejected))


def _row(option: Option, best: Option, request: Request) -> Candidate:
    recomputed: dict[str, int] = {}
    choices = dict(vars(option.strategy))
    if option.cut is not None:
        mixed, modes = option.cut.stages, option.costs.model.modes
        blocks = np.zeros(len(modes), dtype=int)
        np.add.at(blocks, mixed.heavier, mixed.middle - mixed.first)
        np.add.at(blocks, mixed.lighter, mixed.end - mixed.middle)
        recomputed = dict(zip(modes, blocks.tolist(), strict=True))
        choices["recompute"] = common_recompute(recomputed)
    return Candidate(
        step_ms=option.least_ms if option.may_fit else None,
        peak_bytes=int(option.least_bytes) if option.weighed and np.isfinite(option.least_bytes) else None,
        verdict=_verdict(option, best, request),
        bubble_fraction=option.bubble_fraction,
        selective_blocks=recomputed.get("selective", 0),
        full_blocks=recomputed.get("full", 0),
        **choices,
    )


def _verdict(option: Option, best: Option, request: Request) -> str:
    if option is best:
        return "chosen"
    if not option.may_fit and not np.isfinite(option.least_bytes):
        return f"{host_need(Cutter(option.costs).least_host, request)} fall to one"
    if not option.may_fit:
        needed, offered = apart(option.least_bytes, request.offered_bytes)
        return f"needs at least {needed} of {offered}"
    assert best.step_ms is not None
    if option.step_ms is not None and option.step_ms < best.step_ms:
        return f"{1 - option.step_ms / best.step_ms:.1%} faster, if its host keeps up"
    step, least = (option.step_ms, "") if option.step_ms is not None else (option.bound_ms, "at least ")
    return f"{least}{step / best.step_ms - 1:.1%} slower"


def weights_note(profile: Profile, request: Request, best: Option, other: Option | None) -> tuple[str, ...]:
    """Return one note for a model with sparse weights, none for others.

    `other` is the best option that executes the weights in the other way than `best`, if one was found.
    """
    sparse = profile.sparse
    if sparse is None:
        return ()
    block = f"{sparse.block} × {sparse.block}"
    what = f"Of the {block} blocks of the sparse weights, {100 * sparse.sparsity:.3g} % are absent. The weights are"
    if best.strategy.block_sparse:
        how = "block-sparse (only present blocks are stored, multiplied and optimised)"
    else:
        how = "dense and masked"
    why = _reason(profile, sparse, request, best)
    if other is not None:
        name = "dense and masked" if best.strategy.block_sparse else "block-sparse"
        why = f": {_figures(best)} are predicted, and {_figures(other)} for the best plan with {name} ones"
    break_even = ""
    if sparse.break_even_sparsity is not None:
        break_even = (
            f" By rates measured on one H200, products with blocks of {sparse.block} are faster than dense ones from a "
            f"sparsity of {sparse.break_even_sparsity:.2f}."
        )
    return (f"{what} {how}{why}.{break_even}",)


def _figures(option: Option) -> str:
    return f"{duration(option.least_ms / 1e3)} a step and {gib(option.least_bytes)} a device"


def _reason(profile: Profile, sparse: SparseCosts, request: Request, best: Option) -> str:
    if best.strategy.block_sparse:
        return ", because block_sparse is True" if request.fixed.block_sparse else ", because no other plan fits"
    if request.fixed.block_sparse is False:
        return ", because block_sparse is False"
    obstacle = sparse.obstacle or no_kernels(request.cluster.device) or unknown_rates(profile.precision)
    return f", because {obstacle or 'every plan that fits divides them over devices'}"
