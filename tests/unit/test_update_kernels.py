"""The kernels of AdamW and Muon make PyTorch's updates and write bf16 copies, in Triton's interpreter.

TRITON_INTERPRET=1 python -m tests.unit.test_update_kernels    # trains on the CPU; raises where something differs
python -m tests.unit.test_update_kernels      # compiles for Hopper, without a GPU; prints widths of loads and stores
"""

from __future__ import annotations

import collections
import copy
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.capture.blocks.hidden_matrices import Projections
from workbench.execution.gradients import Tables, squared_norm
from workbench.optimizers import muon
from workbench.optimizers.adamw import ShardedAdamW
from workbench.optimizers.muon import MuonAndAdamW

ROOT = Path(__file__).parents[2]
SHAPES = ((64, 64), (5,), (2048,), (3000,), (3, 2049), (0, 4))
OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.98), "eps": 1e-6, "fused": True}
FACTOR = 0.3
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def run(**environment: str) -> str:
    """Run this module in a process of its own: Triton is interpreted only if a variable is set before its import."""
    answer = subprocess.run(
        [sys.executable, "-m", "tests.unit.test_update_kernels"],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


@needs_triton
def test_the_interpreted_kernels_train_as_pytorch_does() -> None:
    assert json.loads(run(TRITON_INTERPRET="1")) == [check.__name__ for check in CHECKS]


@needs_triton
@pytest.mark.representative
def test_the_kernels_compile_for_hopper_to_wide_loads_and_stores() -> None:
    """A kernel that lost sight of its alignment would still be right, and several times slower."""
    adamw, direction, update, squares = json.loads(run(TRITON_INTERPRET="0"))
    assert adamw["ld.global.v4.b32"] == 4 * 2 + 1, (
        "32 bytes of parameter, gradient and both moments, or 16 of a bf16 one"
    )
    assert adamw["st.global.v4.b32"] == 3 * 2 + 1, "and of all but the gradient, and 16 of the copy"
    assert direction["ld.global.v4.b32"] == 2 * 2 + 1, "32 bytes of gradient and momentum, or 16 of a bf16 gradient"
    assert direction["st.global.v4.b32"] == 2 + 1, "32 bytes of the momentum, and 16 of the direction"
    assert update["ld.global.v4.b32"] == 2 * 2 + 1, "32 bytes of the weight and its update, or 16 of a bf16 update"
    assert update["st.global.v4.b32"] == 2 + 1, "32 bytes of the weight, and 16 of its copy"
    assert squares["ld.global.v4.b32"] == 2 + 1, "32 bytes of the gradient, or 16 of a bf16 one"


# In the interpreter


def weights_of(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def groups_of(weights: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": weights[:1], "weight_decay": 0.1}, {"params": weights[1:], "weight_decay": 0.0}]


def gradients_of(step: int, weights: list[nn.Parameter]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(weight.shape, generator=generator).to(weight.dtype) for weight in weights]


def updates_of_clipped_gradients() -> None:
    """Gradients may be bf16, begin at any element or be missing, and an update may be left out on the device."""
    ours, theirs = weights_of(), weights_of()
    found, expected = ShardedAdamW(groups_of(ours), **OPTIONS), torch.optim.AdamW(groups_of(theirs), **OPTIONS)
    found.gradient_factor = torch.tensor(FACTOR)
    for step in range(6):
        skipped = step == 3
        found.skips_update = torch.tensor(float(skipped))
        given = gradients_of(step, ours)
        present = len(ours) - step % 2
        for index, (mine, other, gradient) in enumerate(zip(ours[:present], theirs, given, strict=False)):
            if index % 2 == 0:  # as a backward of bf16 copies leaves it
                gradient = given[index] = gradient.bfloat16()
                mine.grad_dtype = torch.bfloat16
            begun = torch.empty(step + gradient.numel(), dtype=gradient.dtype)
            mine.grad = begun[step:].view(gradient.shape).copy_(gradient)
            other.grad = None if skipped else gradient.float() * FACTOR
        for optimizer in (found, expected):
            optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)
            optimizer.step()
        for mine, gradient in zip(ours[:present], given, strict=False):
            assert mine.grad is not None
            assert torch.equal(mine.grad, gradient), "gradients stay as they were"
        for optimizer in (found, expected):
            optimizer.zero_grad(set_to_none=True)
    torch.testing.assert_close([*map(torch.detach, ours)], [*map(torch.detach, theirs)], rtol=1e-5, atol=1e-6)
    states = [optimizer.state_dict()["state"] for optimizer in (found, expected)]
    torch.testing.assert_close(*states, rtol=1e-5, atol=1e-7)


def copies_of_new_weights() -> None:
    """The interpreter cuts bf16 numbers off where a GPU rounds them."""
    weights = weights_of()
    optimizer = ShardedAdamW(groups_of(weights), **OPTIONS)
    optimizer.copies = {weight: torch.zeros_like(weight, dtype=torch.bfloat16) for weight in weights[:4]}
    for step in range(2):
        for weight, gradient in zip(weights, gradients_of(step, weights), strict=True):
            weight.grad = gradient
        optimizer.step()
    assert optimizer.copied == {weight: weight._version for weight in weights[:4]}
    for weight, written in optimizer.copies.items():
        torch.testing.assert_close(written.float(), weight.detach(), rtol=2**-7, atol=0)
    weights[0].grad = gradients_of(2, weights)[0].T  # PyTorch updates this weight
    optimizer.step()
    assert list(optimizer.copied) == weights[1:4]


def tensors_that_the_kernel_cannot_update() -> None:
    """PyTorch updates them: the gradients are scaled in place, and no copy counts as written."""
    transposed = gradients_of(0, weights_of())
    transposed[0] = transposed[0].T.contiguous().T
    for weights, given in (
        (weights_of(torch.bfloat16), gradients_of(0, weights_of(torch.bfloat16))),
        (weights_of(), transposed),
    ):
        other = [nn.Parameter(weight.detach().clone()) for weight in weights[:1]]
        found, expected = ShardedAdamW(weights[:1], **OPTIONS), torch.optim.AdamW(other, **OPTIONS)
        found.copies = {weights[0]: torch.zeros_like(weights[0])}
        found.gradient_factor = torch.tensor(FACTOR)
        weights[0].grad, other[0].grad = given[0].clone(), given[0] * FACTOR
        found.step()
        expected.step()
        assert torch.equal(weights[0], other[0])
        assert torch.equal(weights[0].grad, given[0] * FACTOR)
        assert not found.copied


def tables_follow_new_addresses() -> None:
    """Gradients lie elsewhere in each step; the tables are made anew where an address or a size has changed."""
    from workbench.optimizers.update_kernels import KNOWN_TABLES, TensorTable

    weights = [weight.detach() for weight in weights_of()]
    gradients, nowhere, table = gradients_of(0, weights_of()), [None] * len(weights), TensorTable()
    assert table.fill(gradients, nowhere, weights, weights, weights)
    before, programs = table.table, table.programs
    assert len(programs) == 2 + 1 + 1 + 2 + 4
    assert table.fill(gradients, nowhere, weights, weights, weights)
    assert table.table is before
    assert not table.fill([gradients[0].T, *gradients[1:]], nowhere, weights, weights, weights)
    moved = gradients_of(1, weights_of())
    assert table.fill(moved, nowhere, weights, weights, weights)
    assert table.table is not before
    assert table.table[:, 3].tolist() == [gradient.data_ptr() for gradient in moved]
    assert table.programs is programs
    assert table.fill(gradients, nowhere, weights, weights, weights)
    assert table.table is before, "what lies where it lay before is not sent again"
    assert table.fill([gradient.bfloat16() for gradient in moved], nowhere, weights, weights, weights)
    assert table.table[:, 1].tolist() == [1] * len(weights)
    assert table.fill(moved[2:4], nowhere[2:4], weights[2:4])
    assert table.programs.tolist() == [[0, 0], [1, 0], [1, 1]]
    for begin in range(2 * KNOWN_TABLES):
        assert table.fill([torch.empty(begin + 1)[begin:]], nowhere[:1])
    assert len(table._known) == KNOWN_TABLES
    assert table.fill(gradients, nowhere, weights, weights, weights)
    assert table.table is not before, "the table is not one of the last ones"
    assert table.table[:, 3].tolist() == [gradient.data_ptr() for gradient in gradients]


def norms_of_gradients() -> None:
    """Gradients may be bf16, begin at any element and have no elements; the squares of others are PyTorch's."""
    tables: Tables = {}
    for step in range(3):
        given = gradients_of(step, weights_of())
        given[0] = given[0].bfloat16()
        given = [torch.empty(step + g.numel(), dtype=g.dtype)[step:].view(g.shape).copy_(g) for g in given]
        divisors = [1.0, 1.0, 4.0, 4.0, 1.0, 1.0]
        found = squared_norm(zip(given, divisors, strict=True), torch.device("cpu"), tables)
        expected = sum(g.double().square().sum() / divisor for g, divisor in zip(given, divisors, strict=True))
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)
    assert [len(table.programs) for table in tables.values()] == [2 + 1 + 4, 1 + 2]
    transposed = torch.ones(3, 5).T
    assert float(squared_norm([(transposed, 1.0)], torch.device("cpu"), tables)) == pytest.approx(15)
    for bad in (torch.nan, torch.inf):
        assert not squared_norm([(torch.tensor([1.0, bad]), 1.0)], torch.device("cpu"), tables).isfinite()


def counts_that_lie_beside_each_other() -> None:
    """Loaded states are other tensors, and a parameter without a gradient is not counted."""
    weights = weights_of()[:3]
    optimizer = ShardedAdamW(weights, **OPTIONS)
    for step in range(4):
        for weight, gradient in zip(weights[: 2 + step % 2], gradients_of(step, weights), strict=False):
            weight.grad = gradient
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step == 1:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert [float(optimizer.state[weight]["step"]) for weight in weights] == [4, 4, 2]


class NothingRead(TorchDispatchMode):
    """Raises where the host reads a number from a tensor, for which it would wait for a GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host reads a number"
        return func(*args, **(kwargs or {}))


def updates_that_the_host_does_not_wait_for() -> None:
    """A host that reads a number of the step's launches nothing ahead, and the device waits for each launch."""
    weights = weights_of()[:4]
    names = [str(index) for index in range(len(weights))]
    groups = [{"params": weights[:1], "names": names[:1], "weight_decay": 0.1, "orthogonal": True}]
    groups.append({"params": weights[1:], "names": names[1:], "weight_decay": 0.0, "orthogonal": False})
    for optimizer in (
        ShardedAdamW(groups_of(weights), **OPTIONS),
        MuonAndAdamW(groups, projections={"0": Projections()}, scale="spectral", **OPTIONS),
    ):
        optimizer.gradient_factor, optimizer.skips_update = torch.tensor(FACTOR), torch.tensor(0.0)
        for step in range(2):
            for weight, gradient in zip(weights, gradients_of(step, weights), strict=True):
                weight.grad = gradient
            before = [weight.detach().clone() for weight in weights]
            with NothingRead():
                optimizer.step()
            assert not any(map(torch.equal, before, weights))


MATRICES = {"wide": (24, 64), "other": (24, 64), "tall": (64, 24), "square": (24, 24), "fused": (72, 24), "odd": (7, 9)}
PROJECTIONS = dict.fromkeys(MATRICES, Projections()) | {"fused": Projections(sizes=(24, 24, 24))}


def muon_of_two_groups(weights: dict[str, nn.Parameter]) -> MuonAndAdamW:
    names = list(weights)
    groups = [
        {"params": [weights[name] for name in some], "names": some, "weight_decay": decay, "orthogonal": True}
        for some, decay in ((names[:2], 0.1), (names[2:], 0.0))
    ]
    return MuonAndAdamW(groups, projections=PROJECTIONS, scale="spectral", **OPTIONS)


def updates_by_muon_with_and_without_kernels() -> None:
    """Gradients may be bf16, begin at any element or be missing, and an update may be left out on the device."""
    generator = torch.Generator().manual_seed(0)
    values = {name: torch.randn(shape, generator=generator) for name, shape in MATRICES.items()}
    ours, theirs = ({name: nn.Parameter(value.clone()) for name, value in values.items()} for _ in range(2))
    found, expected = muon_of_two_groups(ours), muon_of_two_groups(theirs)
    found.copies = {ours["wide"]: torch.zeros(MATRICES["wide"], dtype=torch.bfloat16)}
    for step in range(5):
        for name, shape in MATRICES.items():
            gradient = torch.randn(shape, generator=generator)
            if step == 2:
                gradient = gradient * torch.nan
            if name == "tall":
                gradient = gradient.bfloat16()
                ours[name].grad_dtype = torch.bfloat16
            begun = torch.empty(step + gradient.numel(), dtype=gradient.dtype)
            is_missing = name == "square" and step == 3
            ours[name].grad = None if is_missing else begun[step:].view(shape).copy_(gradient)
            theirs[name].grad = None if is_missing else gradient.float()
        for optimizer in (found, expected):
            optimizer.gradient_factor = torch.tensor(FACTOR)
            optimizer.skips_update = torch.tensor(float(step == 2))
        found.step()
        with mock.patch.object(muon, "runs_triton", return_value=False):
            expected.step()
        assert found.copied == {ours["wide"]: ours["wide"]._version}
    assert not expected.copied
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], rtol=1e-4, atol=1e-6)
        momenta = [each.state[of[name]]["momentum_buffer"] for each, of in ((found, ours), (expected, theirs))]
        torch.testing.assert_close(*momenta, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.copies[ours["wide"]].float(), ours["wide"].detach(), rtol=2**-7, atol=0)


CHECKS: tuple[Callable[[], None], ...] = (
    updates_by_muon_with_and_without_kernels,
    updates_that_the_host_does_not_wait_for,
    updates_of_clipped_gradients,
    copies_of_new_weights,
    tensors_that_the_kernel_cannot_update,
    tables_follow_new_addresses,
    norms_of_gradients,
    counts_that_lie_beside_each_other,
)


def compiled() -> list[dict[str, int]]:
    """Compile the kernels for Hopper and count the loads and stores of each by width."""
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from workbench.optimizers import update_kernels as ours
    from workbench.optimizers.update_kernels import ELEMENTS, WARPS

    pointers = {"table_ptr": "*i64", "programs_ptr": "*i32", "buffer": "i64", "count": "i32"}
    found = []
    kernels = ((ours.adamw_kernel, 7), (ours.direction_kernel, 5), (ours.update_kernel, 5), (ours.squares_kernel, 4))
    for kernel, columns in kernels:
        names, constants = kernel.arg_names, {"COLUMNS": columns, "ELEMENTS": ELEMENTS, "DTYPE": tl.bfloat16}
        types = {name: pointers.get(name, "*fp32" if name.endswith("_ptr") else "fp32") for name in names}
        source = ASTSource(
            fn=kernel,
            signature={name: "constexpr" if name in constants else kind for name, kind in types.items()},
            constexprs={(names.index(name),): value for name, value in constants.items() if name in names},
            attrs={(names.index(name),): [["tt.divisibility", 16]] for name in names if name.endswith("_ptr")},
        )
        code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": WARPS}).asm["ptx"]
        found.append(collections.Counter(re.findall(r"(?:ld|st)\.global\S*", code)))
    return found


def main() -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        print(json.dumps(compiled()))
        return
    for check in CHECKS:
        check()
    print(json.dumps([check.__name__ for check in CHECKS]))


if __name__ == "__main__":
    main()
