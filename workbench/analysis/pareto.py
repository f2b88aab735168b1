"""Cost of a training in FLOPs, and Pareto fronts: of finished runs in loss and cost, of plans in memory and time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from workbench.base.arguments import checked_arguments
from workbench.base.errors import InvalidExperiment
from workbench.experiment import Experiment, values_by_name
from workbench.models import UserModel
from workbench.planning.planner import graph
from workbench.runs.run import Run
from workbench.sparsity import Static

NOT_COMPARED = ("seed", "name", "tags", "project")
"""Fields of an experiment in which the seeds of one mark may differ."""


@dataclass(frozen=True)
class SampleFlops:
    """The FLOPs, forward and backward, of one sample, without the products of absent blocks."""

    layers: float
    """FLOPs of attention and of every product with a weight of the layers."""
    head: float
    """FLOPs of all other products, if the head runs over every position."""
    labelled_share: float
    """Share of the positions that have a label, on average."""

    @property
    def at_labels(self) -> float:
        """FLOPs of the layers, and of the head at the labelled positions, which are all that a loss needs."""
        return self.layers + self.labelled_share * self.head


@checked_arguments
def sample_flops(experiment: Experiment, scope: str = "encoder") -> SampleFlops:
    """Count the FLOPs of one sample, in the layers, as arXiv:2108.06277 counts them, and in the head.

    A layer is the element of a module list (`encoder.layer.0`) that holds a weight of the experiment's sparsity or, in
    a dense experiment, of `scope`.
    """
    from workbench.capture.operations import shape_of
    from workbench.cost.graph_profiler import profile_graph
    from workbench.cost.hardware import Cluster
    from workbench.cost.sparse_matrices import absent_flops, products_with, sparse_matrices

    sparsity = experiment.sparsity or Static(0.0, 1, scope)  # refuses a wrong scope before the model is captured
    captured = graph(experiment)
    layers = {_layer(name) for name in sparse_matrices(captured, sparsity)}
    outside = [name for name in captured.parameters if _layer(name) not in layers]
    any_device = Cluster.of("h200", gpus=1).device  # FLOPs are the same on every one
    costs = profile_graph(captured, any_device, "fp32", compiled=False)
    within = 0.0
    for block, cost in zip(captured.blocks, costs.blocks, strict=True):
        if any(_layer(name) in layers for name in block.parameters):
            of_type = costs.block_types[cost.block_type]
            within += of_type.model_flops + of_type.model_backward_flops
            # A model of one layer is one block, whose head is not of the layer. A backward is two products.
            for node, _, name in products_with(block, outside):
                rows = math.prod(shape_of(node)[:-1]) / captured.micro_batch
                within -= 3 * 2.0 * rows * captured.parameters[name].numel
    share = experiment.reading.labelled_share()
    head = costs.flops_per_sample - within
    return SampleFlops(within - absent_flops(captured, experiment.sparsity), head, share)


def _layer(name: str) -> str:
    """Return the name of a parameter up to the first number in it: `encoder.layer.0` of its 12 weights."""
    words = name.split(".")
    first = next((at for at, word in enumerate(words) if word.isdigit()), len(words))
    return ".".join(words[: first + 1])


DIFFERENCES: tuple[Callable[[Experiment], str], ...] = (
    lambda experiment: experiment.optimizer.name,
    lambda experiment: f"rate {experiment.learning_rate:.2g}",
    lambda experiment: f"{experiment.global_batch} samples a step",
    lambda experiment: f"{experiment.total_steps} steps",
)
"""Words for marks of one model and pattern: those that differ between them are said, in this order."""


@dataclass(frozen=True)
class ParetoPoint:
    """One configuration: its cost, and the held-out losses of its seeds."""

    name: str
    model: str
    """The model's name, and what tells the mark apart where another one has the same model and pattern."""
    group: str
    """`dense`, `static` or `dynamic`."""
    block: int
    """Side of the blocks of its pattern; 1 if it is dense."""
    gflop: float
    """FLOPs of one sequence, in the layers and at the labelled positions in the head, in 1e9."""
    seconds: float
    """Mean training time."""
    losses: tuple[float, ...]
    """Held-out loss at the end of the training, one for each seed."""

    @property
    def loss(self) -> float:
        return float(np.mean(self.losses))


def pareto_points(runs: Sequence[Run]) -> list[ParetoPoint]:
    """Return a mark for each experiment among the runs; raises `InvalidExperiment` for runs that have none."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        if not len(run.evaluations()):
            raise InvalidExperiment(
                f"{run.name} has no held-out loss. Train with evaluation=wb.Evaluation(every=100), or leave it out."
            )
        fields = {name: value for name, value in values_by_name(run.config).items() if name not in NOT_COMPARED}
        groups.setdefault(json.dumps(fields, sort_keys=True), []).append(run)
    for same in groups.values():
        experiment = same[0].experiment
        if isinstance(experiment.model, UserModel) or experiment.data.is_user_defined:
            raise InvalidExperiment(
                f"{same[0].name} trains a model or data of your own, which the run's description does not contain, so "
                "that its FLOPs are unknown. Compare it with wb.compare(runs, x='flops')."
            )
    experiments = [same[0].experiment for same in groups.values()]
    patterns = ["dense" if each.sparsity is None else each.sparsity.label for each in experiments]
    names = [f"{each.model.name}, {pattern}" for each, pattern in zip(experiments, patterns, strict=True)]
    suffixes = [""] * len(names)
    for words in DIFFERENCES:
        full = [name + suffix for name, suffix in zip(names, suffixes, strict=True)]
        said = [words(each) for each in experiments]
        for at, name in enumerate(full):
            if len({word for word, other in zip(said, full, strict=True) if other == name}) > 1:
                suffixes[at] += f", {said[at]}"
    return [
        ParetoPoint(
            name + suffix,
            experiment.model.name + suffix,
            "dense" if experiment.sparsity is None else type(experiment.sparsity).__name__.lower(),
            1 if experiment.sparsity is None else experiment.sparsity.block,
            sample_flops(experiment).at_labels / 1e9,
            float(np.mean([run.history().seconds[-1] for run in same])),
            tuple(float(run.evaluations().eval_loss[-1]) for run in same),
        )
        for name, suffix, experiment, same in zip(names, suffixes, experiments, groups.values(), strict=True)
    ]


def pareto_front(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the points of memory and step that none beats in both, the leanest first."""
    front: list[tuple[int, float]] = []
    for peak_bytes, ms in sorted(points):
        if not front or ms < front[-1][1]:
            front.append((peak_bytes, ms))
    return front
