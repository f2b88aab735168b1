"""The FLOPs of a model's layers, as work on sparse training counts them."""

from __future__ import annotations

from workbench.arguments import checked_arguments
from workbench.experiment import Experiment
from workbench.planning.profiling import graph
from workbench.sparsity import Static


@checked_arguments
def layer_flops(experiment: Experiment, scope: str = "encoder") -> float:
    """Return the FLOPs, forward and backward, of one sample in the layers, without the products of absent blocks.

    The layers are the blocks of the model that hold a weight of the experiment's sparsity or, in a dense experiment,
    of `scope`: embeddings and the head do not count, and attention does. arXiv:2108.06277 counts in this way.
    """
    from workbench.capture.sparse_matrices import absent_flops, sparse_matrices
    from workbench.cost.cluster import Cluster
    from workbench.cost.graph_profiler import profile_graph

    sparsity = experiment.sparsity or Static(0.0, 1, scope)  # refuses a wrong scope before the model is captured
    captured = graph(experiment)
    names = sparse_matrices(captured, sparsity).keys()
    any_device = Cluster.of("h200", gpus=1).device  # FLOPs are the same on every one
    costs = profile_graph(captured, any_device, "fp32", compiled=False)
    layers = [costs.block_types[block.block_type] for block in costs.blocks if names & set(block.parameters)]
    dense = sum(layer.model_flops + layer.model_backward_flops for layer in layers)
    return dense - absent_flops(captured, experiment.sparsity)
