"""FSDP2 after a forward that no backward follows. It reaches into FSDP2's private names, of torch 2.11 and 2.13."""

from __future__ import annotations

from torch.distributed.fsdp import FSDPModule

from workbench.execution.parallel.stage import StageModule


def end_forward_only(stage: StageModule) -> None:
    """Free the all-gathered weights of a stage that has run forward without a backward.

    Forget the order of that forward too, from which FSDP2 would prefetch weights in the next backward.
    """
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
            state = module._get_fsdp_state()
            state._comm_ctx.post_forward_order.clear()
            groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one group or None
            for group in [state._fsdp_param_group] if groups is None else groups:
                if group is not None:
                    group._post_forward_indices.clear()
