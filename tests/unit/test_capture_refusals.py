"""Models that export cannot follow run as written, or are refused; both with the line and the reason."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import accelerate
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers.models.wav2vec2.modeling_wav2vec2 import _compute_mask_indices

from tests.unit import capture_models
from tests.unit.capture_models import Batch, Checks, LayerDrop, Net, batch_for, captured, interpret
from workbench.base.errors import CaptureError
from workbench.capture import build_meta, capture, torch_internals
from workbench.capture.export.opaque import is_opaque


def refused(model: nn.Module, name: str = "Mine", batch: Batch | None = None) -> CaptureError:
    with pytest.raises(CaptureError) as caught:
        captured(model, batch or batch_for(name), name)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    return caught.value


def runs_as_written(model: nn.Module, batch: Batch | None = None) -> str:
    """Return the note on the one opaque call of a captured model."""
    [note] = [note for note in captured(model, batch or batch_for("Mine"), "Mine").notes if "as written" in note]
    return note


def line_of(model_class: type, text: str) -> int:
    source = Path(str(sys.modules[model_class.__module__].__file__)).read_text().splitlines()
    first = next(i for i, line in enumerate(source) if line.strip().startswith(f"class {model_class.__name__}"))
    return next(i for i, line in enumerate(source[first:], first + 1) if text in line)


def test_a_branch_on_a_tensors_value_runs_as_written_and_its_line_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    class Branches(Net):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            if x.sum() > 0:
                x = -x
            return super().body(x)

    note = runs_as_written(Branches())
    line = line_of(Branches, "if x.sum() > 0")
    assert f"depends on the values of a tensor at {__file__}:{line} (`if x.sum() > 0:`)" in note
    assert capfd.readouterr() == ("", ""), "nothing is printed beside the note"


class Selects(Net):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        kept = x[x[:, 0] > 0]
        return x + super().body(kept).sum(0)


class Numbers(Net):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.mean().item()
        return super().body(x) * scale


@pytest.mark.parametrize("model", [Selects, Numbers])
def test_the_module_around_layers_that_share_what_depends_on_values_runs_as_written(model: type[Net]) -> None:
    assert "depends on the values in another at " in runs_as_written(model())


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(_ctx, value):
        return value.clone()

    @staticmethod
    def backward(_ctx, gradient):
        return 2 * gradient


def test_a_custom_autograd_function_runs_as_written_because_its_backward_would_be_lost() -> None:
    class Straight(Net):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            return Doubled.apply(super().body(x))

    note = runs_as_written(Straight())
    assert note.startswith("Doubled runs as written")
    assert f"{__file__}:{line_of(Straight, 'Doubled.apply')} " in note
    assert torch.equal(Doubled.apply(torch.ones(2)), torch.ones(2)), "the function itself is not changed"


def test_a_custom_function_of_a_library_is_blamed_on_no_line_outside_of_forward() -> None:
    """The lines that lead to the capture are not the model's."""
    namespace = {"__name__": "library", "nn": nn, "Doubled": Doubled}
    source = "class Layer(nn.Module):\n    def forward(self, x):\n        return Doubled.apply(x)\n"
    exec(compile(source, f"{sys.prefix}/lib/library.py", "exec"), namespace)

    class Uses(Net):
        def __init__(self) -> None:
            super().__init__()
            self.layer = namespace["Layer"]()

        def body(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(super().body(x))

    assert f"{__file__}:{line_of(Uses, 'return self.layer(')} " in runs_as_written(Uses())


def test_reentrant_checkpointing_runs_as_written_and_the_other_way_is_captured() -> None:
    class Checkpoints(Net):
        reentrant = True

        def body(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(super().body, x, use_reentrant=self.reentrant)

    assert f"{__file__}:{line_of(Checkpoints, 'return checkpoint(')} " in runs_as_written(Checkpoints())
    Checkpoints.reentrant = False
    assert not captured(Checkpoints(), batch_for("Net")).notes


def test_a_branch_in_a_model_of_a_library_is_named_with_its_line_and_the_users() -> None:
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    backbone = ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], layer_type="basic", out_features=["stage1"])
    sizes = {
        f"{half}_{what}": 2 for half in ("encoder", "decoder") for what in ("layers", "ffn_dim", "attention_heads")
    }
    config = DetrConfig(backbone_config=backbone, use_pretrained_backbone=False, d_model=16, num_queries=2, **sizes)

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.detr = DetrForObjectDetection(config)

        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            return self.detr(pixels).logits.mean()

    note = runs_as_written(Wrapper(), batch={"pixels": torch.zeros(2, 3, 32, 32)})
    assert "detr/modeling_detr.py" in note
    assert "(`if not torch.isfinite(hidden_states).all():`, called from " in note
    assert f"{__file__}:{line_of(Wrapper, 'return self.detr')}" in note


class Packs(nn.Module):
    packs = True

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.packs:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
            last = self.cells(packed)[1][0][0]
        else:
            last = self.cells(x)[0][torch.arange(len(x), device=x.device), lengths - 1]
        return functional.cross_entropy(self.head(last), labels)


def test_packed_sequences_run_as_written_and_the_captured_way_is_equal() -> None:
    lengths = torch.tensor([6, 2, 5, 3])
    batch = {"x": torch.randn(4, 6, 8), "lengths": lengths, "labels": torch.arange(4)}
    model = Packs()
    note = runs_as_written(model, batch=batch)
    assert note.startswith("cells runs as written")
    assert "self.cells(packed)" in note
    expected = model(**batch)
    model.packs = False
    assert torch.allclose(model(**batch), expected)
    assert not captured(model, batch).notes


class Scores(Net):
    """Sequences scored by the CTC loss, or rows by `torch.vmap`."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        if how == "torch.jit.script":
            self.layers[0] = torch.jit.script(self.layers[0])

    def body(self, x: torch.Tensor) -> torch.Tensor:
        x = super().body(x)
        if self.how == "CTC":
            spoken, said = torch.full((4,), 3), torch.full((4,), 1)
            scores = self.head(x).log_softmax(-1).expand(3, 4, 5)
            return functional.ctc_loss(scores, torch.ones(4, 1, dtype=torch.long), spoken, said)
        if self.how == "torch.vmap":
            return x * torch.vmap(lambda row: row > 0)(x)
        return x


@pytest.mark.parametrize(
    ("how", "line", "way_out"),
    [
        ("CTC", "return functional.ctc_loss", "torch.library.custom_op"),
        ("torch.jit.script", "", "as it was before torch.jit.script"),
    ],
)
def test_a_feature_that_export_lacks_is_refused_by_its_name(how: str, line: str, way_out: str) -> None:
    error = refused(Scores(how))
    assert how in str(error)
    assert way_out in str(error)
    assert "see that model(**batch) runs" not in str(error)
    assert how != "torch.jit.script" or str(error).endswith("compile=True of the experiment compiles it.")
    assert not line or error.facts["line"] == line_of(Scores, line)


@pytest.mark.parametrize("how", ["renorm", "clamp"])
def test_a_weight_that_forward_replaces_is_refused_at_its_line(how: str) -> None:
    class Replaces(Net):
        def forward(self, **batch: torch.Tensor) -> object:
            weight = self.head.weight
            weight.data = torch.renorm(weight.data, 2, 0, 1.0) if how == "renorm" else weight.data.clamp(-1, 1)
            return super().forward(**batch)

    error = refused(Replaces())
    assert error.facts["line"] == line_of(Replaces, "weight.data = ")
    assert "file an issue" not in str(error)
    assert "torch.renorm(weight, 2, 0, 1.0) to the function that uses it" in str(error)


def test_data_of_a_tensor_is_read_as_its_detached_value_and_a_write_to_it_is_one_to_the_parameter() -> None:
    class Reads(Net):
        def forward(self, **batch: torch.Tensor) -> object:
            if self.writes:
                self.head.weight.data.clamp_(-1, 1)
            return super().forward(**batch) + self.head.weight.data.norm()

    model, batch = Reads(), batch_for("Net")
    model.writes = False
    torch.testing.assert_close(interpret(captured(model, batch), model, batch), model(**batch))
    model.writes = True
    error = refused(model)
    assert "writes to its parameter head.weight" in str(error)
    assert error.facts["line"] == line_of(Reads, "clamp_")


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (KeyError("tokens"), "KeyError at .*: there is no key 'tokens'. It was called with"),
        (
            RuntimeError("An op is unknown. Please file an issue on github. "),
            "RuntimeError at .*: An op is unknown. It",
        ),
    ],
)
def test_an_exception_of_forward_is_a_reason_in_words(raised: Exception, said: str) -> None:
    class Raises(Net):
        def body(self, _: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            raise raised

    assert re.search(said, str(refused(Raises())))


def test_nobody_is_advised_to_rewrite_a_library() -> None:
    class Asks(Net):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            hidden = _compute_mask_indices(tuple(x.shape), 0.5, 2, attention_mask=(x > 0).long())
            scale = {1000: 2.0}[int(x.sum())]  # which no random values have
            return super().body(scale * x * torch.tensor(hidden))

    error = refused(Asks())
    assert f"called from {__file__}:{line_of(Asks, 'hidden = ')}" in str(error)
    assert "The line is a library's: put the call that leads to it into a module of your own" in str(error)
    assert "torch.where" not in str(error)


def test_a_forward_that_maps_by_vmap_runs_as_written() -> None:
    assert "torch.vmap" in runs_as_written(Scores("torch.vmap"))


def test_a_parameter_with_a_name_of_exports_own_is_refused() -> None:
    model = Net()
    model.code = nn.Parameter(torch.zeros(2))
    assert "called code" in str(refused(model))


def test_a_hook_on_a_tensor_runs_as_written_because_it_would_be_lost() -> None:
    class Scales(Net):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            x.register_hook(lambda gradient: gradient / 2)
            return super().body(x)

    assert f"{__file__}:{line_of(Scales, 'x.register_hook')} " in runs_as_written(Scales())


@pytest.mark.parametrize("how", ["manual_seed", "set_rng_state", "saved_tensors_hooks", "torch.func.jvp"])
def test_a_seed_a_hook_on_what_is_saved_and_a_forward_derivative_run_as_written(how: str) -> None:
    """Each in a layer, which draws the same or learns the same as in plain PyTorch also where it is recomputed."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if how == "manual_seed":
                with torch.random.fork_rng():
                    torch.manual_seed(3)
                    return self.linear(x) * torch.rand(16)
            if how == "set_rng_state":
                state = torch.get_rng_state()
                noise = torch.rand(16)
                torch.set_rng_state(state)
                return self.linear(x) + noise - torch.rand(16)
            if how == "saved_tensors_hooks":
                with torch.autograd.graph.saved_tensors_hooks(lambda t: t.half(), lambda t: t.float()):
                    return self.linear(x).sin()
            return torch.func.jvp(lambda y: self.linear(y).sin(), (x,), (torch.ones_like(x),))[1]

    def make() -> nn.Module:
        model = Net()
        model.layers[1] = Layer()
        return model

    model, same = capture_models.copies(make)
    batch = batch_for("Net")
    graph = captured(same, batch)
    [note] = graph.notes
    assert f"{__file__}:" in note
    [opaque] = [block for block in graph.blocks if is_opaque(block.code)]
    code, expected = opaque.code, capture_models.loss_of(model, batch)
    expected.backward()
    for recomputed in (False, True):
        same.zero_grad()
        computes = (lambda *given: checkpoint(code, *given, use_reentrant=False)) if recomputed else code
        blocks = tuple(replace(b, code=computes) if b is opaque else b for b in graph.blocks)
        found = interpret(replace(graph, blocks=blocks), same, batch)
        found.backward()
        torch.testing.assert_close(found, expected)
        for mine, theirs in zip(same.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)


def test_a_layer_that_seeds_what_is_drawn_after_it_runs_as_written_with_the_model_around() -> None:
    class Seeds(nn.Identity):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.manual_seed(3)
            return x

    model = Net()
    model.layers[0] = Seeds()
    assert runs_as_written(model).startswith("Mine runs as written")


def test_a_backward_in_forward_is_refused_because_its_gradients_would_be_lost() -> None:
    class Trains(Net):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            self.layers[0](x.detach()).square().mean().backward()
            return super().body(x)

    error = refused(Trains())
    assert error.facts["line"] == line_of(Trains, "backward()")
    assert "calls backward in its forward" in str(error)


def test_a_lazy_module_is_refused_until_the_model_was_called_once() -> None:
    class Lazy(Net):
        def __init__(self) -> None:
            super().__init__()
            self.layers[1] = nn.LazyLinear(16)

    assert "model(**batch); return model" in str(refused(Lazy()))

    def build() -> nn.Module:
        model = Lazy()
        model(torch.zeros(2, 8), torch.zeros(2, dtype=torch.long))
        return model

    assert "layers.1.weight" in captured(build_meta(build), batch_for("Net")).parameters


def test_a_buffer_that_is_assigned_to_another_is_refused_and_a_copy_is_captured() -> None:
    class Previous(Net):
        copies = False

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("current", torch.zeros(16))
            self.register_buffer("previous", torch.ones(16))

        def body(self, x: torch.Tensor) -> torch.Tensor:
            x = super().body(x + self.previous)
            if self.copies:
                self.previous.copy_(self.current)
            else:
                self.previous = self.current
            self.current = self.current + 1
            return x

    assert "self.previous.copy_(self.current)" in str(refused(Previous()))
    Previous.copies = True
    model, same = capture_models.copies(Previous)
    graph, batch = captured(same, batch_for("Net")), batch_for("Net")
    for _ in range(3):
        torch.testing.assert_close(interpret(graph, same, batch), capture_models.loss_of(model, batch))


def test_a_derivative_in_forward_runs_as_written_and_its_line_is_named() -> None:
    class Penalty(Net):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            loss = super().forward(x.requires_grad_(), labels)
            return loss + torch.autograd.grad(loss, x, create_graph=True)[0].square().mean()

    assert f"{__file__}:{line_of(Penalty, 'torch.autograd.grad')} " in runs_as_written(Penalty())


@pytest.mark.parametrize("what", ["parameter", "module"])
def test_backward_hooks_are_refused_because_nothing_would_call_them(what: str) -> None:
    model = Net()
    if what == "parameter":
        model.head.weight.register_hook(lambda gradient: 0 * gradient)
    else:
        model.head.register_full_backward_hook(lambda _module, inputs, _outputs: inputs)
    assert f"backward hook on the {what} head" in str(refused(model))


@pytest.mark.parametrize("source", ["random", "numpy"])
def test_random_numbers_that_are_not_torchs_are_refused_because_they_would_be_drawn_once(source: str) -> None:
    class Draws(Net):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            return super().body(x) * (random.random() if source == "random" else np.random.rand())

    assert "Draw from torch's" in str(refused(Draws()))


def test_a_model_without_its_labels_is_refused_with_the_missing_loss() -> None:
    class NoLabels(Net):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, object]:  # type: ignore[override]
            return {"loss": None if labels is None else super().forward(x, labels)}

    assert "returned no loss for a batch of x" in str(refused(NoLabels(), batch={"x": torch.zeros(4, 8)}))


def functions() -> list[object]:
    """Return the functions that capture replaces while it exports a model."""
    owners = (torch, "rand"), (torch, "tensor"), (torch.autograd, "grad"), (torch.Tensor, "register_hook")
    more = (torch.autograd.Function, "apply"), (torch.nn.modules.transformer, "_detect_is_causal_mask")
    return [vars(owner)[name] for owner, name in (*owners, *more)]


def test_functions_of_torch_are_restored_after_a_failed_capture() -> None:
    model, before = Scores("CTC"), functions()
    refused(model)
    assert functions() == before
    assert "forward" not in vars(model)


def test_layerdrop_that_could_drop_runs_as_written_and_its_line_is_named() -> None:
    assert f":{line_of(LayerDrop, 'torch.rand([])')} " in runs_as_written(LayerDrop(0.1))


def test_a_forward_that_lacks_a_field_of_the_batch_is_refused_with_the_fields() -> None:
    class NoLabels(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return self.head(self.body(self.stem(x))).sum()

    assert "x [4, 8], labels [4]: let forward take exactly these" in str(refused(NoLabels()))


def test_a_forward_that_needs_more_than_the_batch_is_refused_with_the_fields() -> None:
    class More(Net):
        def forward(self, x: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x * mask, labels)

    message = str(refused(More()))
    assert "'mask'" in message
    assert "let forward take exactly these" in message


@pytest.mark.parametrize("result", ["logits", "dict", "nothing", "labels"])
def test_a_model_that_returns_no_scalar_loss_is_refused(result: str) -> None:
    class NoLoss(Net):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> object:  # type: ignore[override]
            logits = self.head(self.body(self.stem(x)))
            return {"logits": logits, "dict": {"logits": logits}, "nothing": None, "labels": labels.sum()}[result]

    assert "Let forward return a scalar loss" in str(refused(NoLoss()))


@pytest.mark.parametrize("how", ["batch alone", "no_grad", "detach", "frozen"])
def test_a_loss_that_no_parameter_can_learn_from_is_refused(how: str) -> None:
    class Unlearnable(Net):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            with torch.set_grad_enabled(how != "no_grad"):
                loss = x.mean() if how == "batch alone" else super().forward(x, labels)
            return loss.detach() if how == "detach" else loss

    model = Unlearnable().requires_grad_(how != "frozen")
    assert "depends on no trainable parameter" in str(refused(model))


def test_a_parameter_written_in_forward_is_refused() -> None:
    class Clamps(Net):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.head.weight.clamp_(-0.1, 0.1)
            return super().body(x)

    message = str(refused(Clamps()))
    assert "writes to its parameter head.weight" in message
    assert capture_models.__file__ in message  # the line of forward that called `body`


def test_a_batch_that_does_not_fit_the_model_is_refused_with_the_shapes() -> None:
    message = str(refused(Net(), batch={"x": torch.zeros(4, 7), "labels": torch.zeros(4, dtype=torch.long)}))
    assert "x [4, 7]" in message
    assert "see that model(**batch) runs" in message


class LossAsNumber(Net):
    """Returns its loss as a number of Python's."""

    def __init__(self, how: Callable[[torch.Tensor], float]) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> float:  # type: ignore[override]
        loss = functional.cross_entropy(self.logits(x), labels)
        return float(loss) if self.how is float else self.how(loss)


@pytest.mark.parametrize("how", [float, torch.Tensor.item, lambda _: 1.5, lambda _: 2])
def test_a_loss_that_is_a_number_is_refused_with_the_way_out(how: Callable[[torch.Tensor], float]) -> None:
    message = str(refused(LossAsNumber(how)))
    assert "a number of Python's" in message
    assert "the tensor itself, without .item() or float()." in message


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(CaptureError, match="batch without fields"):
        capture(Net(), {})


def test_every_private_name_of_torch_that_capture_uses_is_there() -> None:
    """A newer torch that lost one of them fails here, not in the middle of a capture."""
    names = {
        torch._ops: ["OpOverload", "_ModeStackStateForPreDispatch", "_mode_stack_state_for_pre_dispatch"],
        torch._C: ["_set_grad_enabled"],
        torch._C._autograd: [f"_{each}_saved_tensors_default_hooks" for each in ("top", "pop", "push")],
        torch.autograd.forward_ad: ["_set_fwd_grad_enabled"],
        torch: ["_grouped_mm"],
        torch.amp.autocast_mode: ["_enter_autocast", "_exit_autocast"],
        torch.nn.modules.transformer: ["_detect_is_causal_mask"],
        nn.Module(): ["_parameters", "_buffers", *torch_internals.MODULE_HOOKS],
        nn.Module(): ["_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"],
        torch.zeros(1, requires_grad=True): list(torch_internals.PARAMETER_HOOKS),
        torch.ops.aten.add.Tensor: ["_schema", "_opname", "_overloadpacket", "tags"],
        torch.zeros(1): ["_version"],
        torch.utils._pytree: ["tree_flatten", "tree_unflatten", "tree_leaves", "tree_map"],
        torch.utils._python_dispatch: ["TorchDispatchMode"],
        accelerate.PartialState: ["_shared_state"],
        torch.nn.attention.flex_attention: ["_validate_device"],
        torch.ops.higher_order: ["wrap_with_set_grad_enabled", "wrap_with_autocast"],
        torch.fx.proxy: ["CapturedTraceback"],
        torch._dynamo.convert_frame: ["input_codes"],
        torch._dynamo.eval_frame: ["reset_code"],
        torch.fx.experimental.symbolic_shapes: ["uninteresting_files"],
        torch.fx.Graph(): ["_codegen"],
    }
    missing = [
        f"{owner}.{name}" for owner, all_names in names.items() for name in all_names if not hasattr(owner, name)
    ]
    assert not missing
    program = torch.export.export(Net(), (torch.zeros(4, 8), torch.zeros(4, dtype=torch.long)), strict=False)
    assert any("nn_module_stack" in node.meta and node.stack_trace for node in program.graph.nodes)


def test_what_the_allocator_hands_out_and_gets_back_is_seen_in_order() -> None:
    size = 1 << 20
    with torch_internals.seen_allocations() as seen:
        first = torch.ones(size, dtype=torch.uint8)
        second = torch.ones(3 * size, dtype=torch.uint8)
        places = [first.data_ptr(), second.data_ptr()]
        del first
    large = [(address, number) for address, number in seen if abs(number) >= size]
    assert large == [(places[0], size), (places[1], 3 * size), (places[0], -size)]
    with torch.profiler.profile(), torch_internals.seen_allocations() as seen:
        torch.ones(1)
    assert seen == [], "another profiler runs"


def test_a_patch_is_undone_after_an_error_and_refuses_a_name_that_is_gone() -> None:
    class Owner:
        name = "class"

        def fail(self) -> None:
            raise KeyError(self.name)

    owner = Owner()
    with pytest.raises(KeyError, match="patched"), torch_internals.patched(owner, "name", "patched"):
        owner.fail()
    assert vars(owner) == {}
    with torch_internals.patched(Owner, "name", "patched"):
        assert owner.name == "patched"
    assert owner.name == "class"
    with pytest.raises(AttributeError, match="gone"), torch_internals.patched(owner, "gone", None):
        pass


BATCH = batch_for("Net")


def test_each_check_is_a_note_with_its_line() -> None:
    notes = captured(Checks(), BATCH).notes
    texts = ("labels.max() >= 5", "x.abs().max().item() > 100", "assert not torch.isnan(loss)")
    assert all(sum(text in note and "capture_models.py:" in note for note in notes) == 1 for text in texts), notes
    assert len(notes) == len(texts)
    assert all("as if it passed in every step" in note for note in notes)
    assert captured(Net(), BATCH).notes == ()


class Mixed(Net):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        if (x > 9).any() and not (x < -9).any():
            raise ValueError("x is not balanced.")
        return super().body(x)


class Caught(Net):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        try:
            assert x.sum() > 0
        except AssertionError:
            x = -x
        return super().body(x)


@pytest.mark.parametrize("model", [Mixed, Caught])
def test_what_may_be_a_branch_runs_as_written(model: type[Net]) -> None:
    how, why_whole = captured(model(), BATCH).notes
    assert "runs as written" in how
    assert "depends on the values of a tensor" in how
    assert "has one pipeline stage" in why_whole


def test_the_truth_of_tensors_is_as_before_after_a_capture() -> None:
    before = torch.Tensor.__bool__, torch.SymBool.__bool__
    captured(Checks(), BATCH)
    assert (torch.Tensor.__bool__, torch.SymBool.__bool__) == before
    assert "__bool__" not in vars(torch.Tensor) or vars(torch.Tensor)["__bool__"] is before[0]
    with pytest.raises(AssertionError):
        assert not torch.tensor(True)
