"""The one gate before a training: whatever starts one asks `check_runnable` whether it can."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from workbench.base.arguments import checked_arguments
from workbench.base.errors import DataError, PlanInfeasible, PlanMismatch
from workbench.base.machine import available_cores
from workbench.base.units import count, gib
from workbench.base.user_code import UserFunction
from workbench.data import Prepared
from workbench.experiment import Experiment
from workbench.planning.plan import Plan
from workbench.planning.planner import NOT_GATHERED, facts_of
from workbench.planning.request import Rule, Words, apart, divided_in_spite_of, first_broken
from workbench.strategy import SCHEDULES

if TYPE_CHECKING:
    from workbench.capture.captured_model import Facts


CAPTURED_FIELDS = (
    *("model", "data", "eval_data", "seq_len", "loss", "batch_coupling"),
    *("evaluation", "metrics", "samples", "sparsity", "optimizer"),
)
"""Values of an experiment, by short name, for which the gate may need the model's graphs."""


def check_runnable(experiment: Experiment, plan: Plan, facts: Facts | None, *, progress: bool | None = None) -> None:
    """Raise unless a training of this experiment can start under this plan.

    The kernel asks before it starts a process, and each rank once it has captured its model. Checks that take no time
    come first; the model is captured only for an experiment that evaluates, writes samples or has sparse weights. A
    training that would wait for its text to be tokenised is warned of.

    Args:
        experiment: what is to be trained.
        plan: how its step is divided.
        facts: what is known of its model (`facts_for`); None if it was checked before, or only the ranks load its code.
        progress: show a progress bar while data are tokenised that were not; None for data that were checked before.

    Raises:
        PlanMismatch: the plan is for another model, batch, precision, optimiser or form of the weights.
        PlanInfeasible: neither a GPU nor its host has room for the whole model.
        InvalidExperiment: the sparsity, a metric or the optimiser does not suit the model.
        CaptureError: the model cannot be captured, or its evaluation cannot run in the plan's stages.
        DataError: the data cannot feed it, a prompt cannot be read, or too few samples are held out.
    """
    from workbench.cost.sparse_matrices import check_sparsity
    from workbench.data import held_out

    _raise_broken(PLAN_RULES, experiment, plan)
    if (refusal := too_large_to_build(plan)) is not None:
        raise refusal
    captured = None if facts is None else facts.captured
    if facts is not None and captured is not None:
        check_facts(experiment, plan, facts)
        check_sparsity(experiment, plan, captured)

    # Data: prepared here, unless only the ranks load its code, apart from the number of samples that was asked for.
    is_loaded = _has_loaded_data(experiment)
    if progress is not None and is_loaded:
        supply = supply_of(experiment.reading.prepare(progress=progress), plan)
        if supply is not None and not supply.keeps_up:
            warnings.warn(repr(supply), stacklevel=4)
    if progress is not None and experiment.evaluation is not None:
        over = "the global batch, whose samples the loss compares" if plan.coupled else "one micro-batch of the plan"
        smaller = "train with a smaller global_batch" if plan.coupled else "plan with a smaller micro_batch"
        sets = {"": experiment, **{f" in {name!r}": each for name, each in experiment.held_out_sets.items()}}
        for where, each in sets.items():
            samples = len(held_out(each)) if is_loaded else experiment.evaluation.samples
            if samples < plan.evaluation_batch:
                raise DataError(
                    f"There are {samples:,} held-out samples{where}, fewer than the {plan.evaluation_batch:,} of "
                    f"{over}. Give more eval_data, raise Evaluation.samples, or {smaller}."
                )

    # Evaluations and samples run in the plan's stages; prompts need the tokeniser, which is made with the data.
    if captured is not None:
        cuts = [stage.first_block for stage in plan.stages[1:]]
        captured.check_between_steps(experiment, cuts, plan.tensor, plan.loss_samples)


def facts_for(experiment: Experiment, plan: Plan) -> Facts | None:
    """Return the facts that the gate compares with a plan: those that it was made from in this process, if they hold.

    Otherwise the model is built without weights and not captured. Returns None for a model or data that are only
    described, because their code is stored with a run.
    """
    functions = (experiment.loss, experiment.optimizer.algorithm, *experiment.metrics.values(), *experiment.callbacks)
    is_loaded = experiment.model.is_loaded and _has_loaded_data(experiment)
    if not is_loaded or any(not each.is_loaded for each in functions if isinstance(each, UserFunction)):
        return None
    planned = plan.facts
    if planned is None or planned.captured is None or not planned.captured.is_of(experiment):
        return facts_of(experiment)
    same_update = planned.captured.optimizer == experiment.optimizer
    return planned if same_update else facts_of(experiment, planned.captured)


def _has_loaded_data(experiment: Experiment) -> bool:
    return experiment.data.is_loaded and (experiment.eval_data is None or experiment.eval_data.is_loaded)


def check_facts(experiment: Experiment, plan: Plan, facts: Facts) -> None:
    """Raise `PlanMismatch` unless a plan suits what is known of the experiment's model."""
    _raise_broken(MODEL_RULES, experiment, plan, facts)


def _raise_broken(rules: Sequence[Rule], experiment: Experiment, plan: Plan, *facts: Facts) -> None:
    words = {"model": plan.model, "experiment": experiment.name, "optimizer": experiment.optimizer.name}
    if (said := first_broken(rules, experiment, plan, *facts, **words)) is not None:
        raise PlanMismatch(said)


# Rules: what a plan must have in common with the experiment, and with what is known of its model.

PLAN_ANEW, PLAN_AGAIN = "Plan it anew: wb.plan(experiment).", "Plan again with wb.plan(experiment)."


def _other_sizes(experiment: Experiment, plan: Plan) -> Words | None:
    sizes = (
        ("global_batch", experiment.largest_batch, "samples a step"),
        ("seq_len", experiment.seq_len, "tokens a sample"),
    )
    for size, asked, unit in sizes:
        if asked != (planned := getattr(plan, size)):
            return {"size": size, "planned": count(planned), "asked": count(asked), "unit": unit}
    return None


def _undivided_batch(experiment: Experiment, plan: Plan) -> Words | None:
    """Return the first size of a batch that changes which the plan does not divide."""
    stretches, schedule = experiment.batches.stretches, SCHEDULES[plan.schedule]
    for step, batch in stretches if len(stretches) > 1 else ():
        divided, rest = divmod(batch, plan.data * plan.micro_batch)
        obstacle = ""
        if plan.cuda_graphs or plan.gathers:
            obstacle = "CUDA graphs and gathered losses need one number of micro-batches"
        elif rest:
            obstacle = f"{batch} samples are no whole micro-batches of {plan.micro_batch} on {plan.data} replicas"
        elif not schedule.runs(plan.pipeline, divided):
            obstacle = f"{schedule.needs_in_words()}, and {batch} samples are {divided} micro-batches"
        if obstacle:
            return {"step": f"{step:,}", "obstacle": obstacle}
    return None


PLAN_RULES = (
    Rule(
        _other_sizes,
        "The plan for {model} divides {size}={planned} ({unit}), but the experiment {experiment} has {size}={asked}.",
        PLAN_ANEW,
    ),
    Rule(
        _undivided_batch,
        "The plan for {model} does not divide the batch of {experiment} from step {step} on: {obstacle}.",
        PLAN_ANEW,
    ),
    Rule(
        lambda experiment, plan: (
            experiment.precision not in ("auto", plan.precision)
            and {"planned": plan.precision, "asked": experiment.precision}
        ),
        "The plan for {model} computes in {planned}, but the experiment {experiment} asks for {asked}.",
        PLAN_ANEW,
    ),
    Rule(
        lambda experiment, plan: plan.offload_optimizer and not experiment.optimizer.record.can_be_offloaded,
        "The plan for {model} keeps AdamW's moments in the host's memory, and the experiment {experiment} trains with "
        "{optimizer}, whose state stays on the device.",
        PLAN_ANEW,
    ),
)
"""Mismatches of a plan and an experiment that show without its model."""


def _reordered(_: Experiment, plan: Plan, facts: Facts) -> bool:
    planned, found = plan.computation, facts.computation
    is_known = facts.signature != plan.signature and planned is not None and found is not None
    return is_known and planned.parameters == found.parameters  # type: ignore[union-attr]


def _other_model(experiment: Experiment, plan: Plan, facts: Facts) -> Words | None:
    if facts.signature == plan.signature:
        return None
    found = {"found": experiment.model.name, "length": experiment.seq_len, "signature": facts.signature}
    return {**found, "planned_length": plan.seq_len, "planned": plan.signature}


def _other_forward(_: Experiment, plan: Plan, facts: Facts) -> Words | None:
    captured = facts.captured
    if facts.computation is None or plan.computation is None or captured is None:
        return None
    if (line := captured.difference_from(plan.computation)) is None:
        return None
    if not captured.is_on_rank:
        return {"than": f"than the one that was planned{line.where}", "way": PLAN_ANEW}
    return {
        "than": f"in the workers than where it was planned{line.where}",
        "way": "They import files as they are now, and read the environment and what the constructor reads there. "
        "Restart the kernel if one of these has changed since, and do not replace functions of modules in the kernel: "
        "define what differs in a cell, or in the file.",
    }


def _other_blocks(_: Experiment, plan: Plan, facts: Facts) -> Words | None:
    if facts.blocks is None or plan.gathers or len(facts.blocks) == len(plan.block_names):
        return None
    return {"planned": len(plan.block_names), "blocks": len(facts.blocks)}


def _ungathered(experiment: Experiment, plan: Plan, facts: Facts) -> Words | None:
    if not plan.gathers or facts.captured is None:
        return None
    if asked := [name for name in NOT_GATHERED if getattr(experiment, name) is not None]:
        return {"reason": f"the experiment has {' and '.join(asked)}, which a gathered loss is not computed for"}
    blocks = tuple(block.name for block in facts.captured.step_graph(plan.loss_samples).blocks)
    return None if blocks == plan.block_names else {"reason": "the model's forward has changed"}


def _divided_in_spite_of_coupling(experiment: Experiment, plan: Plan, facts: Facts) -> Words | None:
    """Return the operation that compares samples which the plan divides, and nobody allowed it to.

    The plan may have been made for another loss, or for an experiment with `batch_coupling="allow"`.
    """
    is_whole = plan.gathers or plan.micro_batch == plan.global_batch
    if not facts.coupled or is_whole or experiment.numerics.batch_coupling == "allow":
        return None
    return {"operation": facts.coupled[0], "batch": plan.global_batch, "micro_batch": plan.micro_batch}


MODEL_RULES = (
    Rule(
        _reordered,
        "The parameters of {model} have another order in this process than where it was planned.",
        "Its constructor goes through a set, whose order each process draws anew: give it an order, such as "
        "`for name in sorted(names)`.",
    ),
    Rule(
        _other_model,
        "The plan was made for {model} at sequence length {planned_length} (signature {planned}), and this is {found} "
        "at {length} ({signature}).",
        PLAN_AGAIN,
    ),
    Rule(_other_forward, "The forward of {model} computes something else {than}.", "{way}"),
    Rule(
        _other_blocks,
        "The plan was made for {model} of {planned} blocks, and this model has {blocks}: its forward has changed.",
        PLAN_AGAIN,
    ),
    Rule(
        _ungathered,
        "The plan for {model} gathers the samples of its loss over micro-batches, and {reason}.",
        "Plan the experiment anew: wb.plan(experiment).",
    ),
    Rule(
        _divided_in_spite_of_coupling,
        "The loss of {model} compares samples of one batch ({operation}), and the plan divides the {batch} samples "
        "into micro-batches of {micro_batch}.",
        "Plan this experiment again with wb.plan(experiment), or give it batch_coupling='allow'.",
    ),
    Rule(
        lambda _, plan, facts: plan.world > 1 and divided_in_spite_of(facts.reach, plan),
        "The plan has {name}={given}, which divides what the optimizer of {optimizer} needs whole: {why}.",
        PLAN_AGAIN,
    ),
)
"""Mismatches of a plan with what is known of the experiment's model."""


# What takes more than a comparison: memory to build the model, its data, evaluations, and numbers.


def too_large_to_build(plan: Plan) -> PlanInfeasible | None:
    """Return the refusal where neither a GPU nor its host has room to initialise the whole model, as each rank does."""
    cluster, whole = plan.cluster, plan.model_bytes
    if cluster.device.type == "cpu" or cluster.host_bytes is None:
        return None
    ranks = min(plan.world, cluster.gpus_per_node)
    offered = ranks * cluster.host_bytes  # ranks build one after the other where memory is scarce
    if whole <= max(offered, plan.built_on_device_bytes):
        return None
    need, offer = apart(whole, offered)
    return PlanInfeasible(
        f"Every rank of {plan.model} first initialises the whole model, {need} in fp32: on its GPU up to "
        f"{gib(plan.built_on_device_bytes)}, otherwise in the host's memory, of which {offer} fall to the {ranks} "
        f"ranks of a node. Use hosts with more memory.",
        needed_bytes=whole,
        offered_bytes=offered,
    )


# Whether text that is tokenised while it trains is tokenised as fast as a plan trains on it.


@dataclass(frozen=True)
class DataSupply:
    """The tokens that a plan is predicted to train on in a second, beside those that a node can make."""

    needed_tokens_per_s: float
    """Predicted tokens per second of the training, over all devices; each node makes all of them."""
    tokens_per_core_s: float
    """Tokens that one core makes in a second, measured on excerpts of the text."""
    cores: int
    """Cores of this machine that its ranks leave, at least one."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens that the cores make in a second."""
        return self.cores * self.tokens_per_core_s

    @property
    def cores_needed(self) -> int:
        """Cores that would make the tokens as fast as they are trained on."""
        return math.ceil(self.needed_tokens_per_s / self.tokens_per_core_s)

    @property
    def keeps_up(self) -> bool:
        """True if training need not wait for tokens."""
        return self.cores >= self.cores_needed

    @property
    def waiting_share(self) -> float:
        """Predicted share of the time that training waits for tokens."""
        return max(0.0, 1 - self.tokens_per_s / self.needed_tokens_per_s)

    def __repr__(self) -> str:
        cores = f"{self.cores} core{'s' * (self.cores > 1)}"
        said = (
            f"Tokenising makes {count(self.tokens_per_s)} tokens/s on the {cores} that the ranks leave, and the plan "
            f"trains on {count(self.needed_tokens_per_s)} tokens/s"
        )
        if self.keeps_up:
            return f"{said}: it keeps up, for which {self.cores_needed} would do."
        return (
            f"{said}: training will wait for {self.waiting_share:.0%} of the time. {self.cores_needed} cores would "
            "keep up; or tokenise the text beforehand, with streaming=False."
        )


@checked_arguments
def data_supply(experiment: Experiment, plan: Plan) -> DataSupply:
    """Say whether streamed text is tokenised as fast as a plan trains on it, and how many cores that takes.

    `experiment` has the text and `plan` the pace: its predicted tokens per second are compared with those that the
    cores of this machine make, measured on excerpts of the text. `launch` warns of a training that would wait. Raises
    `DataError` for data that are not streamed.
    """
    experiment.reading.check()
    supply = supply_of(experiment.reading.prepare(), plan)
    if supply is None:
        raise DataError(
            f"{experiment.data.name} is not tokenised while it trains, so that training does not wait for it. Streamed "
            "text is wb.data.corpus(path, streaming=True)."
        )
    return supply


def supply_of(prepared: Prepared, plan: Plan) -> DataSupply | None:
    """Compare a plan with text that was prepared for it; None for data that are not tokenised while training."""
    if prepared.tokens_per_core_s is None:
        return None
    ranks = min(plan.world, plan.cluster.gpus_per_node)
    cores = max(1, available_cores() - ranks)
    return DataSupply(plan.prediction.tokens_per_s, prepared.tokens_per_core_s, cores)
