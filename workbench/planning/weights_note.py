"""The sentence that says how a plan executes sparse weights, and why."""

from __future__ import annotations

from workbench.cost.profile import Profile, SparseCosts
from workbench.planning.options import Option
from workbench.planning.request import Request, no_kernels, unknown_rates
from workbench.units import duration, gib


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
