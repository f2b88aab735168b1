"""Capture removes a mask that masks nothing, however the model writes it."""

import pytest
import torch
from torch import nn

from workbench.capture import capture
from workbench.tensors import TensorSpec

BATCH = {"x": TensorSpec("x", (2, 4, 8), "float32")}


class Written(nn.Module):
    """Attention as matmul, mask, softmax, matmul; the mask is made from the Python number `blocked`."""

    def __init__(self, blocked: float):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.blocked = blocked

    def forward(self, x):
        q, k, v = (part.view(2, 4, 2, 4).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        allowed = torch.ones(2, 1, 4, 4, dtype=torch.bool, device=x.device)
        mask = torch.where(allowed, torch.tensor(self.blocked, dtype=x.dtype, device=x.device), -1e30)
        weights = (q @ k.transpose(-1, -2) / 2.0 + mask).softmax(-1)
        return {"loss": (weights @ v).square().mean()}


def attention_nodes(model):
    return [
        node
        for block in capture(model, BATCH, name="written").blocks
        for node in block.code.graph.nodes
        if node.target is torch.ops.aten.scaled_dot_product_attention.default
    ]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_mask_of_zeros_made_from_a_number_is_removed(device):
    with torch.device(device):
        model = Written(0.0)
    [attention] = attention_nodes(model)
    assert attention.args[3] is None


def test_a_bias_made_from_a_number_is_kept():
    with torch.device("meta"):
        model = Written(0.5)
    [attention] = attention_nodes(model)
    assert attention.args[3] is not None
