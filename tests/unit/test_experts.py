"""Products of rows with experts' matrices: one operation, whatever a model wrote, in the precision of autocast."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import transformers as tf
from torch import fx, nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils.flop_counter import FlopCounterMode

from tests.distributed import zoo
from tests.unit.capture_models import Batch, captured, copies, interpret, loss_of
from workbench.base.errors import CaptureError
from workbench.base.tensors import TensorSpec
from workbench.capture import build_meta, capture
from workbench.capture.captured_model import CapturedModel
from workbench.capture.export import opaque_search
from workbench.capture.export.opaque import opaque_calls
from workbench.capture.export.rewrites import grouped_mm
from workbench.cost import Cluster
from workbench.cost.graph_profiler import profile_graph
from workbench.execution.blocks.block_module import read_only_by_products
from workbench.experiment import Experiment

EXPERTS, ROWS, INSIDE, OUTSIDE = 4, 24, 16, 8
ENDS = torch.tensor([5, 5, 17, ROWS], dtype=torch.int32)
"""The second expert has no rows."""


def operands(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(ROWS, INSIDE, generator=generator, dtype=dtype, requires_grad=True)
    return rows, torch.randn(EXPERTS, OUTSIDE, INSIDE, generator=generator, dtype=dtype, requires_grad=True)


def one_by_one(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    parts = torch.tensor_split(rows, ENDS[:-1].long())
    return torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])


@pytest.mark.parametrize("transposed", [True, False])
def test_each_row_is_multiplied_by_its_experts_matrix_and_gradients_are_right(transposed: bool) -> None:
    (rows, weights), (rows_again, weights_again) = operands(torch.float64), operands(torch.float64)
    turned, turned_again = weights.transpose(1, 2), weights_again.transpose(1, 2)
    if not transposed:
        turned, turned_again = turned.contiguous(), turned_again.contiguous()
    found, expected = grouped_mm(rows, turned, ENDS), one_by_one(rows_again, turned_again)
    torch.testing.assert_close(found, expected)
    found.pow(2).sum().backward()
    expected.pow(2).sum().backward()
    torch.testing.assert_close(rows.grad, rows_again.grad)
    torch.testing.assert_close(weights.grad, weights_again.grad)
    assert weights.grad is not None
    assert not weights.grad[1].any()


def test_gradients_of_operands_without_requires_grad_are_not_computed() -> None:
    rows, weights = operands()
    product = grouped_mm(rows.detach(), weights.transpose(1, 2), ENDS)
    with FlopCounterMode(display=False) as counter:
        product.backward(torch.ones_like(product))
    assert counter.get_total_flops() == 2 * ROWS * INSIDE * OUTSIDE


def test_autocast_runs_grouped_products_in_bf16_and_returns_fp32_gradients() -> None:
    rows, weights = operands()
    with torch.autocast("cpu", torch.bfloat16):
        product = grouped_mm(rows, weights.transpose(1, 2), ENDS)
    assert product.dtype == torch.bfloat16
    product.float().sum().backward()
    assert rows.grad is not None
    assert rows.grad.dtype == torch.float32
    assert weights.grad is not None
    assert weights.grad.dtype == torch.float32


class ByTorch(torch.nn.Module):
    """A layer that calls torch's own grouped product, which takes bf16 only."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(32, INSIDE)
        self.experts = torch.nn.Parameter(torch.randn(EXPERTS, INSIDE, OUTSIDE))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        rows = self.table(input_ids).flatten(0, 1).bfloat16()
        ends = torch.arange(1, EXPERTS + 1, dtype=torch.int32) * (rows.shape[0] // EXPERTS)
        logits = functional.grouped_mm(rows, self.experts.bfloat16(), offs=ends)
        return functional.cross_entropy(logits.float(), labels.flatten())


def specs() -> dict[str, TensorSpec]:
    return {name: TensorSpec(name, (2, zoo.SEQ), "int64") for name in ("input_ids", "labels")}


def products(code: fx.GraphModule) -> list[fx.Node]:
    found = [node for node in code.graph.nodes if "grouped_mm" in str(node.target)]
    assert {node.target for node in found} == {torch.ops.workbench.grouped_mm.default}
    return found


def test_mixtures_of_transformers_call_one_operation_without_a_cast_before_it() -> None:
    block = capture(build_meta(zoo.mixtral), specs()).blocks[1]
    found = products(block.code)
    assert len(found) == 2
    assert all(node.args[0].target is not torch.ops.aten.to.dtype for node in found)  # type: ignore[union-attr]
    read = read_only_by_products(block.code, len(block.parameters))
    experts = [name for name, only in zip(block.parameters, read, strict=True) if only and "experts" in name]
    assert len(experts) == 2


def test_a_call_of_torchs_grouped_product_becomes_the_same_operation_in_its_own_type() -> None:
    [block] = capture(ByTorch(), specs()).blocks
    [product] = products(block.code)
    rows, weights = (value.meta["val"] for value in product.args[:2])  # type: ignore[union-attr]
    assert rows.dtype == weights.dtype == torch.bfloat16


def test_experts_are_priced_for_their_rows_in_bf16() -> None:
    graph = capture(build_meta(zoo.mixtral), specs())
    costs = profile_graph(graph, Cluster.of("h200").device, "bf16", compiled=True)
    layer = costs.block_types[costs.blocks[1].block_type]
    grouped = [kernel.flops for kernel in layer.forward]
    chosen = 2 * zoo.SEQ  # two experts for each token
    expected = 2 * chosen * (zoo.HIDDEN * 2 * zoo.INNER + zoo.INNER * zoo.HIDDEN)
    attention = 2 * zoo.SEQ * zoo.HIDDEN * (2 * zoo.HIDDEN + zoo.HIDDEN)  # half as many keys and values
    router, scores = 2 * zoo.SEQ * zoo.HIDDEN * 4, 2 * 2 * zoo.SEQ * zoo.SEQ * zoo.HIDDEN
    assert sum(grouped) == pytest.approx(expected + attention + router + scores)


def test_compiled_experts_give_the_same_loss_and_gradients() -> None:
    rows, matrices = operands()

    def loss(rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return grouped_mm(rows, matrices.transpose(1, 2), ENDS).float().pow(2).mean()

    found = []
    for function in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        ours = [copy.deepcopy(value.detach()).requires_grad_() for value in (rows, matrices)]
        result = function(*ours)
        result.backward()
        found.append([result.detach(), *(value.grad for value in ours)])
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(eager, compiled, rtol=0, atol=0)


WIDTH, STEPS = 8, 6


class Packs(nn.Module):
    """Packs embedded tokens in its own forward, and takes a mean over as many steps as the longest sequence has."""

    def __init__(self, make: Callable[..., nn.RNNBase] = nn.LSTM, sorted_first: bool = False, **padding: Any) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, WIDTH)
        self.rnn = make(WIDTH, WIDTH, batch_first=not sorted_first)
        self.head = nn.LazyLinear(5)
        self.sorted_first, self.padding = sorted_first, padding
        with torch.no_grad():
            self(torch.zeros(2, STEPS, dtype=torch.long), torch.tensor([2, 2]), torch.zeros(2, dtype=torch.long))

    def steps(self, input_ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids)
        if self.sorted_first:
            lengths, order = lengths.sort(descending=True)
            packed = pack_padded_sequence(x[order].transpose(0, 1), lengths.cpu())
        else:
            packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        found, last = self.rnn(packed)
        state = last[0] if isinstance(last, tuple) else last
        out, counted = pad_packed_sequence(found, batch_first=True, **self.padding)
        return out.mean(1) + state[-1].mean(-1, keepdim=True) + counted.to(x.device)[:, None] / STEPS

    def forward(self, input_ids: torch.Tensor, lengths: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.head(self.steps(input_ids, lengths)), labels)


class ReadsData(Packs):
    """Reads the rows of the packed sequence themselves, of which there are as many as the lengths say."""

    def steps(self, input_ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(self.tokens(input_ids), lengths.cpu(), batch_first=True, enforce_sorted=False)
        packed = PackedSequence(packed.data.tanh(), *packed[1:])
        return self.rnn(packed)[1][0][-1] + packed.data.mean()


def batch_of(*lengths: int) -> Batch:
    count = len(lengths)
    generator = torch.Generator().manual_seed(0)
    return {
        "input_ids": torch.randint(0, 20, (count, STEPS), generator=generator),
        "lengths": torch.tensor(lengths),
        "labels": torch.arange(count) % 5,
    }


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "an LSTM": Packs,
    "a GRU of two layers and two directions": partial(Packs, partial(nn.GRU, num_layers=2, bidirectional=True)),
    "an RNN, steps first, of sorted sequences": partial(Packs, nn.RNN, sorted_first=True),
    "padding with ones": partial(Packs, padding_value=1.0),
    "a fixed length": partial(Packs, total_length=STEPS),
    "a greater length": partial(Packs, total_length=STEPS + 2, padding_value=0.5),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_recurrent_module_alone_runs_as_written_and_equals_plain_pytorch(name: str) -> None:
    model, same = copies(MODELS[name])
    batch = batch_of(2, 5, 3, 4)  # the longest has one step less than the batch
    graph = captured(same, batch)
    assert [call.label for block in graph.blocks for call in opaque_calls(block.code.graph)] == ["rnn"]
    assert [block.name for block in graph.blocks] == ["tokens", "rnn", "head"]
    for lengths in ((2, 5, 3, 4), (6, 1, 1, 1)):
        batch = batch_of(*lengths)
        expected, found = loss_of(model, batch), interpret(graph, same, batch)
        torch.testing.assert_close(found, expected)
        model.zero_grad()
        same.zero_grad()
        expected.backward()
        found.backward()
        for mine, theirs in zip(same.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)


def test_a_forward_that_reads_the_rows_of_a_packed_sequence_runs_as_written_as_a_whole() -> None:
    model, same = copies(ReadsData)
    batch = batch_of(2, 5, 3, 4)
    graph = captured(same, batch)
    assert [call.label for block in graph.blocks for call in opaque_calls(block.code.graph)] == ["model"]
    torch.testing.assert_close(interpret(graph, same, batch), loss_of(model, batch))


def test_steps_that_are_not_cut_are_refused_before_the_first_update(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_of(*[2, 5, 3, 4] * 4)
    samples = [{name: field[index] for name, field in batch.items()} for index in range(16)]
    experiment = Experiment.of(model=Packs, data=samples, steps=1, global_batch=8, seq_len=1)
    right = opaque_search._pad

    def uncut(value: torch.Tensor, sizes: torch.Tensor, *rest: Any) -> Any:
        total_length = STEPS  # noqa: F841  (which the caller's frame is asked for)
        return right(value, sizes, *rest)

    monkeypatch.setattr(opaque_search, "_pad", uncut)
    with pytest.raises(CaptureError, match="does not compute the model's"):
        _ = CapturedModel(experiment, 2).division


def jetmoe() -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_key_value_heads": 2, "kv_channels": 8, "vocab_size": 64}
    return tf.JetMoeForCausalLM(tf.JetMoeConfig(**sizes, intermediate_size=32, num_local_experts=4))


class NaFlex(nn.Module):
    """SigLIP 2 over images of several shapes, whose positions are interpolated to the shape of each."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        text = sizes | {"vocab_size": 64, "max_position_embeddings": 8, "projection_size": 16}
        vision = sizes | {"num_patches": 16, "patch_size": 4}
        self.model = tf.Siglip2Model(tf.Siglip2Config(vision_config=vision, text_config=text))

    def forward(
        self,
        input_ids: torch.Tensor,
        pixel_values: torch.Tensor,
        pixel_attention_mask: torch.Tensor,
        spatial_shapes: torch.Tensor,
    ) -> Any:
        fields = {"pixel_attention_mask": pixel_attention_mask, "spatial_shapes": spatial_shapes}
        return self.model(input_ids=input_ids, pixel_values=pixel_values, return_loss=True, **fields).loss


def of_text(step: int) -> Batch:
    ids = torch.randint(2, 64, (4, 8), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def of_images(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    shapes = torch.tensor([[4, 4], [2, 6], [3, 5]])[torch.randint(0, 3, (4,), generator=generator)]
    mask = (torch.arange(16) < shapes.prod(1, keepdim=True)).long()
    pixels = torch.randn(4, 16, 48, generator=generator) * mask[..., None]
    batch = {"input_ids": of_text(step)["input_ids"], "pixel_values": pixels}
    return batch | {"pixel_attention_mask": mask, "spatial_shapes": shapes}


@pytest.mark.parametrize(("make", "batch_of"), [(jetmoe, of_text), (NaFlex, of_images)])
def test_sizes_that_are_values_of_the_batch_train_as_in_a_plain_loop(
    make: Callable[[], nn.Module], batch_of: Callable[[int], Batch]
) -> None:
    plain, ours = copies(make)
    graph = captured(ours, batch_of(0))
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (plain, ours)]
    for step in range(3):
        losses = [loss_of(plain, batch_of(step)), interpret(graph, ours, batch_of(step))]
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
        for optimizer, loss in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
