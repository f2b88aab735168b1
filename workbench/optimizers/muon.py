"""Muon for the hidden matrices of a model, and AdamW for all other parameters, over sharded parameters.

Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (https://kellerjordan.github.io/posts/muon/).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from workbench.optimizers.adamw import ShardedAdamW
from workbench.optimizers.shards import WholeTensors, local, momentum_of

MOMENTUM = 0.95
"""Momentum of `torch.optim.Muon`, by default with Nesterov's look-ahead."""
ITERATIONS = 5
"""Number of Newton-Schulz iterations of `torch.optim.Muon`."""
ADAMW_RMS = 0.2
"""Root mean square of AdamW's updates, to which those of Muon are scaled so that both use one learning rate and decay
(arXiv:2502.16982; `adjust_lr_fn="match_rms_adamw"` of `torch.optim.Muon`)."""


class MuonAndAdamW(ShardedAdamW):
    """Muon for the groups that have `orthogonal=True`, and AdamW for the others.

    The momentum of a matrix stays sharded. Each update all-gathers the direction in bf16, which is the precision of
    torch's orthogonalisation; every rank orthogonalises the whole matrix and takes its own shard of the result.
    """

    def __init__(self, groups: list[dict[str, Any]], *, whole: WholeTensors | None = None, **options: Any) -> None:
        super().__init__(groups, **options)
        self._whole = whole

    def _update(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        if not group["orthogonal"]:
            super()._update(parameters, group)
            return
        if self.skips_update is not None and bool(self.skips_update):  # the host waits for the device here
            return
        names = dict(zip(group["params"], group["names"], strict=True))
        gradients = self._scaled_gradients(parameters)
        momenta = [local(momentum_of(self, parameter)) for parameter in parameters]
        torch._foreach_lerp_(momenta, gradients, 1 - MOMENTUM)
        shards = [local(parameter) for parameter in parameters]
        torch._foreach_mul_(shards, 1 - group["lr"] * group["weight_decay"])
        for parameter, shard, gradient, momentum in zip(parameters, shards, gradients, momenta, strict=True):
            direction = gradient.lerp(momentum, MOMENTUM).bfloat16()
            if isinstance(parameter, DTensor):
                mesh, placements = parameter.device_mesh, parameter.placements
                shape, stride = parameter.shape, parameter.stride()
                direction = DTensor.from_local(direction, mesh, placements, run_check=False, shape=shape, stride=stride)
            name, access = names[parameter], self._whole
            whole = orthogonalised(direction if access is None else access.all_gathered(name, direction))
            mine = whole if access is None else access.own_shard(name, whole, parameter)
            shard.add_(mine, alpha=-group["lr"] * ADAMW_RMS * math.sqrt(max(whole.shape)))


def orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    """Return the nearest semi-orthogonal matrix, approximately, as `torch.optim.Muon` computes it.

    The result is the first update of a matrix of zeros without momentum. A wide matrix is given to torch, because
    torch would scale the update of a tall one.
    """
    is_tall = matrix.shape[0] > matrix.shape[1]
    update = nn.Parameter(torch.zeros_like(matrix.T if is_tall else matrix))
    update.grad = matrix.T if is_tall else matrix
    torch.optim.Muon([update], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, ns_steps=ITERATIONS).step()
    result = update.detach().neg_()
    return result.T if is_tall else result


def orthogonalisation_flops(rows: int, columns: int) -> tuple[float, int]:
    """Return the FLOPs, and the number, of the matrix products that orthogonalise a matrix.

    With m rows and n >= m columns, an iteration multiplies m·n by n·m, m·m by m·m, and m·m by m·n.
    """
    m, n = sorted((rows, columns))
    return ITERATIONS * (4.0 * m * m * n + 2.0 * m**3), 3 * ITERATIONS
