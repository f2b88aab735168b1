"""What is trained: parameters and buffers by whatever name forward reads them, as in a plain loop of PyTorch."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from workbench.base.errors import CaptureError
from workbench.base.tensors import TensorSpec
from workbench.capture import Graph, build_meta, capture
from workbench.capture.captured_model import computation_of
from workbench.capture.export.aliasing import view_like

WIDTH, STEPS = 6, 3
BATCH = {name: TensorSpec(name, (4, WIDTH), "float32") for name in ("x", "y")}
GLOBAL: dict[str, torch.Tensor] = {}


class Net(nn.Module):
    """A layer and a matrix `a`, with what the subclasses set up and compute."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.a = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.set_up()

    def set_up(self) -> None:
        """Set up nothing."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(self.body(self.lin(x)), y)

    def body(self, h: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def net(set_up: Callable[[Any], Any], body: Callable[[Any, torch.Tensor], torch.Tensor]) -> type[Net]:
    return type("Mine", (Net,), {"set_up": set_up, "body": body})


def gains(self: Any) -> None:
    self.gains = []
    for index in range(2):
        gain = nn.Parameter(torch.full((WIDTH,), 1.0 + index))
        setattr(self, f"g{index}", gain)
        self.gains.append(gain)


def closure(self: Any) -> None:
    weight = self.a
    self.product = lambda h: h @ weight


def attribute(name: str, of: Callable[[Any], Any]) -> Callable[[Any], None]:
    return lambda self: object.__setattr__(self, name, of(self))


def buffer(view: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], None]:
    def set_up(self: Any) -> None:
        self.register_buffer("scale", torch.ones(2, WIDTH))
        self.held = [view(self.scale)]

    return set_up


def growing(self: Any, h: torch.Tensor) -> torch.Tensor:
    self.scale.mul_(1.1)
    return (h @ self.a) * self.held[0]


def assigned(self: Any, h: torch.Tensor) -> torch.Tensor:
    result = (h @ self.a) - self.scale[0]
    self._buffers["scale"] = self.scale + h.detach().mean(0)
    return result


def as_written(body: Callable[[Any, torch.Tensor], torch.Tensor]) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    """Choose by a value, which export does not follow."""
    return lambda self, h: body(self, h) if float(h.detach().sum()) < 1e9 else h


def list_of_gains(self: Any, h: torch.Tensor) -> torch.Tensor:
    return h * self.gains[0] * self.gains[1]


BY_OTHER_NAMES = {
    "list": net(gains, list_of_gains),
    "tuple": net(attribute("held", lambda self: (self.a,)), lambda self, h: h @ self.held[0]),
    "dict": net(attribute("held", lambda self: {"w": [self.a]}), lambda self, h: h @ self.held["w"][0]),
    "object": net(attribute("box", lambda self: types.SimpleNamespace(w=self.a)), lambda self, h: h @ self.box.w),
    "another module's attribute": net(
        lambda self: object.__setattr__(self.lin, "gain", self.a), lambda self, h: h @ self.lin.gain
    ),
    "global": net(lambda self: GLOBAL.update(w=self.a), lambda _, h: h @ GLOBAL["w"]),
    "closure": net(closure, lambda self, h: self.product(h)),
    "two names": net(attribute("tied", lambda self: self.a), lambda self, h: (h @ self.tied) @ self.a),
    "transposed data": net(attribute("copy", lambda self: self.a.data.t()), lambda self, h: h @ self.copy @ self.a),
    "some rows": net(attribute("rows", lambda self: self.a.detach()[1:4]), lambda self, h: (h @ self.rows.T) @ self.rows
                     @ self.a),
    "diagonal": net(attribute("diagonal", lambda self: self.a.data.diagonal()), lambda self, h: h @ self.a
                    * self.diagonal),
    "view with gradient": net(attribute("half", lambda self: self.a[:3]), lambda self, h: h @ self.half.T @ self.half),
    "true copy": net(attribute("copy", lambda self: self.a.data.clone()), lambda self, h: h @ self.copy @ self.a),
    "other dtype": net(attribute("low", lambda self: self.a.data.bfloat16()), lambda self, h: h @ self.a
                       @ self.low.float()),
    "parameter of data": net(
        attribute("held", lambda self: [nn.Parameter(self.a.data)]), lambda self, h: h @ self.held[0] @ self.a
    ),
    "functional call": net(gains, lambda self, h: torch.func.functional_call(
        self.lin, {"weight": self.a, "bias": self.gains[0]}, (h,))),
    "buffer": net(buffer(lambda scale: scale[0]), growing),
    "assigned buffer": net(buffer(lambda scale: scale[0]), assigned),
    "list, as written": net(gains, as_written(list_of_gains)),
    "view, as written": net(
        attribute("copy", lambda self: self.a.data.t()), as_written(lambda self, h: h @ self.copy @ self.a)
    ),
}  # fmt: skip
UNREGISTERED = {
    "list": (attribute("held", lambda _: [nn.Parameter(torch.ones(WIDTH))]), lambda self, h: h @ self.a * self.held[0]),
    "tensor": (attribute("gain", lambda _: torch.ones(WIDTH, requires_grad=True)), lambda self, h: h @ self.a
               * self.gain),
    "object": (
        attribute("box", lambda _: types.SimpleNamespace(w=nn.Parameter(torch.ones(WIDTH)))),
        lambda self, h: h @ self.a * self.box.w,
    ),
    "module": (attribute("held", lambda _: [nn.Linear(WIDTH, WIDTH)]), lambda self, h: self.held[0](h) @ self.a),
}  # fmt: skip


def batches() -> Iterator[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        yield {name: torch.randn(4, WIDTH, generator=generator) for name in BATCH}


def plain_losses(model: type[Net]) -> list[float]:
    torch.manual_seed(0)
    net = model()
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.05), []
    for batch in batches():
        loss = net(**batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def captured_losses(model: type[Net]) -> tuple[list[float], Graph]:
    """Train the blocks of a captured model, whose own weights are gone, as on a rank."""
    planned = capture(build_meta(model), BATCH, name="Mine")
    torch.manual_seed(0)
    net = model()
    graph = capture(net, BATCH, name="Mine")
    assert [block.block_type for block in planned.blocks] == [block.block_type for block in graph.blocks]
    weights = dict(net.named_parameters())
    own = {n: nn.Parameter(weights[n].detach().clone(), n not in graph.frozen) for n in graph.parameters}
    buffers = {**{name: buffer.clone() for name, buffer in net.named_buffers()}, **graph.constants}
    for weight in weights.values():
        weight.data = weight.data.new_empty(0)
    optimizer, losses = torch.optim.SGD(own.values(), lr=0.05), []
    for batch in batches():
        values: dict[str, torch.Tensor] = {}
        for block in graph.blocks:
            given = [own[name] for name in block.parameters] + [buffers[name] for name in block.buffers]
            given += [values[name] for name in block.receives] + [batch[name] for name in block.inputs]
            sent = block.code(*given, *(torch.tensor(4.0 * WIDTH) for _ in block.counts))
            values |= dict(zip(block.sends, sent, strict=True))
        optimizer.zero_grad()
        values[graph.loss].backward()
        optimizer.step()
        losses.append(float(values[graph.loss].detach()))
    return losses, graph


@pytest.mark.parametrize("name", BY_OTHER_NAMES)
def test_what_is_read_by_another_name_is_trained_as_in_a_plain_loop(name: str) -> None:
    expected = plain_losses(BY_OTHER_NAMES[name])
    found, graph = captured_losses(BY_OTHER_NAMES[name])
    assert found == pytest.approx(expected, rel=1e-5)
    assert all(later != earlier for earlier, later in pairwise(found))
    assert set(graph.constants) == ({"_constant.copy"} if name == "true copy" else
                                    {"_constant.low"} if name == "other dtype" else set())  # fmt: skip


@pytest.mark.parametrize("name", UNREGISTERED)
def test_what_needs_a_gradient_and_is_registered_nowhere_stays_as_in_a_plain_loop_and_is_a_note(name: str) -> None:
    model = net(*UNREGISTERED[name])
    found, graph = captured_losses(model)
    assert found == pytest.approx(plain_losses(model), rel=1e-5)
    assert all(f"at {__file__}" in note and "nn.ParameterList" in note for note in graph.notes)
    assert len(graph.notes) == (2 if name == "module" else 1)


def test_the_leaves_of_a_model_of_any_size_are_found_without_numbers() -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(400_000, 2_000)
            self.__dict__["tied"] = self.embedding.weight
            self.frozen = nn.Parameter(torch.ones(2_000), requires_grad=False)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return ((self.embedding(ids) * self.frozen) @ self.tied.T).logsumexp(-1).mean()

    graph = capture(build_meta(Large), {"ids": TensorSpec("ids", (2, 3), "int64")})
    assert (graph.parameter_count, graph.frozen, dict(graph.constants)) == (800_002_000, {"frozen"}, {})


def test_what_the_constructor_computed_from_a_parameter_is_refused_with_its_line_and_the_way_out_works() -> None:
    stale = net(attribute("twice", lambda self: self.a * 2), lambda self, h: h @ self.twice)
    with pytest.raises(RuntimeError, match="second time"):
        plain_losses(stale)
    with pytest.raises(CaptureError, match=rf"at {__file__}:\d+ .*when the model was built, from a .*from self\.a"):
        captured_losses(stale)
    fresh = net(Net.set_up, lambda self, h: h @ (self.a * 2))
    assert captured_losses(fresh)[0] == pytest.approx(plain_losses(fresh), rel=1e-5)


def test_a_buffer_in_the_memory_of_a_parameter_is_refused_and_the_plain_attribute_follows_its_updates() -> None:
    registered = net(lambda self: self.register_buffer("copy", self.a.data), lambda self, h: h @ self.copy @ self.a)
    with pytest.raises(CaptureError, match=r"copy and a of Mine .*same memory.* plain attribute"):
        captured_losses(registered)
    plain = net(attribute("copy", lambda self: self.a.data), lambda self, h: h @ self.copy @ self.a)
    assert captured_losses(plain)[0] == pytest.approx(plain_losses(plain), rel=1e-5)


def test_a_view_is_made_again_of_an_owner_in_any_layout() -> None:
    whole = torch.randn(6, 4, 5)
    for owner in (whole, torch.randn(5, 4, 6).permute(2, 1, 0), torch.randn(200)[40:160].view(6, 4, 5)):
        views = [owner, owner[1:4], owner[2], owner[..., ::2], owner[1:5:2, 2:].transpose(0, 2), owner[2, 3, 4]]
        views += [owner[None], owner[:, None].expand(6, 3, 4, 5), owner.permute(2, 0, 1)[1:3, None, 2], owner[:, :1]]
        if owner.is_contiguous():
            views += [owner.view(-1)[7:19].view(3, 4), owner.view(6, 20)[1:3], owner[0].diagonal()]
        for view in views:
            again = view_like(view, owner)
            assert again is not None
            assert torch.equal(again(owner), view)
            assert torch.equal(again(owner.contiguous()), view)
    assert view_like(whole.view(torch.int32), whole) is None


ARRAY = np.arange(WIDTH, dtype=np.float32)
READS_NUMBERS: dict[str, Callable[[], torch.Tensor]] = {
    "an array": lambda: torch.from_numpy(ARRAY),
    "a copy of an array": lambda: torch.tensor(ARRAY),
    "an array as a tensor": lambda: torch.as_tensor(ARRAY),
    "a buffer of Python": lambda: torch.frombuffer(bytearray(ARRAY.tobytes()), dtype=torch.float32),
    "an exchanged array": lambda: torch.from_dlpack(ARRAY),
    "a list": lambda: torch.tensor(ARRAY.tolist()),
    "a tensor of a list": lambda: torch.Tensor(ARRAY.tolist()),
}


@pytest.mark.parametrize("reads", READS_NUMBERS)
def test_numbers_that_forward_reads_are_those_of_a_model_without_weights_too(reads):
    """The plan is made from a model without weights, and each rank compares its own with it."""
    mine = net(lambda _: None, lambda self, h: (h @ self.a) * READS_NUMBERS[reads]())
    graphs = [capture(model, BATCH, name="Mine") for model in (build_meta(mine), mine())]
    planned, ranks = (computation_of(graph, "") for graph in graphs)
    assert planned.first_difference(ranks) is None
    called = [str(node.target) for block in graphs[0].blocks for node in block.code.graph.nodes]
    assert not any("opaque" in target for target in called)
