"""The FLOPs of one sample: in a model's layers, as work on sparse training counts them, and with its head."""

from __future__ import annotations

import math
from dataclasses import dataclass

from workbench.arguments import checked_arguments
from workbench.experiment import Experiment
from workbench.planning.profiling import graph
from workbench.sparsity import Static


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
    from workbench.capture.sparse_matrices import absent_flops, products_with, sparse_matrices
    from workbench.cost.cluster import Cluster
    from workbench.cost.graph_profiler import profile_graph

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
    share = experiment.data.labelled_share(experiment)
    head = costs.flops_per_sample - within
    return SampleFlops(within - absent_flops(captured, experiment.sparsity), head, share)


def _layer(name: str) -> str:
    """Return the name of a parameter up to the first number in it: `encoder.layer.0` of its 12 weights."""
    words = name.split(".")
    first = next((at for at, word in enumerate(words) if word.isdigit()), len(words))
    return ".".join(words[: first + 1])
