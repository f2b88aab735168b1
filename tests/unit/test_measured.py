"""Measured blocks correct an analytic profile, and probes measure every block type."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache
from torch._inductor.codecache import FxGraphCache

from tests.patience import PATIENCE_S, eventually
from tests.unit.cost_values import bert, layered_profile
from workbench import data, models
from workbench.base.tensors import TensorSpec
from workbench.capture import capture
from workbench.capture.coupling.division import random_batch
from workbench.cli import describe_plan
from workbench.cost import Cluster
from workbench.cost.graph_profiler import profile_graph
from workbench.cost.profile import BlockMeasurement, DividedCosts, corrected_profile
from workbench.data.sampling import IGNORED
from workbench.execution import block_probe
from workbench.execution.block_probe import Probe, sampled_blocks
from workbench.experiment import Experiment
from workbench.measure import block_probes as probing
from workbench.measure.block_probes import (
    MAX_BLOCKS_PER_TYPE,
    BlockProbes,
    ProbeRequest,
    cached_measurements,
    has_cached_measurements,
    likely_micro_batches,
    measure_blocks,
    probed_micro_batches,
)
from workbench.measure.calibration import local_cluster
from workbench.measure.detection import with_measured_rates
from workbench.planning import planner
from workbench.planning.explanation import explain
from workbench.planning.plan import Plan
from workbench.planning.planner import weigh
from workbench.planning.prediction import basis_of_times
from workbench.planning.request import Request as PlanRequest
from workbench.planning.search import what_if

H200 = Cluster.of("h200", gpus=4)
LAYER = 1
"""The first layer of `layered_profile`."""


def layers_measured(*points: tuple[int, float, float], held: float = 0.0, once: float = 0.0) -> list[BlockMeasurement]:
    return [
        BlockMeasurement(LAYER, size, forward, back, size * held + once, 7e6 * size) for size, forward, back in points
    ]


def test_a_measured_block_takes_its_measured_time_and_a_surcharge_in_a_step_of_several_devices() -> None:
    found = corrected_profile(layered_profile(), H200.device, layers_measured((4, 3.0, 7.0), (16, 11.0, 25.0)))
    for size, forward, backward in ((4, 3.0, 7.0), (16, 11.0, 25.0)):
        costs = found.at(size, H200.device)
        assert costs.forward_ms[LAYER : LAYER + 12] == pytest.approx(forward)
        assert costs.backward_ms[LAYER] == pytest.approx(backward)
    assert found.in_step(H200.device, devices=1) == pytest.approx(1.0)
    slower = found.in_step(H200.device, devices=2)
    assert slower[LAYER : LAYER + 12] == pytest.approx(H200.device.efficiency.in_step)
    assert slower[-1] == 1.0, "the head was not measured, and constants are those of whole steps"

    asked: dict[str, Any] = {"global_batch": 8, "seq_len": 512, "micro_batch": 4, "data": 1, "recompute": "none"}
    alone = what_if(found, cluster=H200.resized(1), pipeline=1, **asked).prediction.compute_ms
    divided = what_if(found, cluster=H200.resized(2), pipeline=2, schedule="gpipe", **asked)
    added = sum(stage.forward_ms + stage.backward_ms for stage in divided.stages)
    assert added == pytest.approx(H200.device.efficiency.in_step * alone / 2, rel=0.02)


class PostNorm(torch.nn.Module):
    """Layers of one code, of which the first receives what a product makes: bf16 under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.widen = torch.nn.Embedding(64, 8), torch.nn.Linear(8, 16)
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.LayerNorm(16)) for _ in "abcd"
        )

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.widen(self.table(input_ids))
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.square().mean()


def test_a_measurement_counts_for_all_layers_of_one_code_also_where_the_first_receives_another_type() -> None:
    with torch.device("meta"):
        graph = capture(PostNorm(), {"input_ids": TensorSpec("input_ids", (2, 4), "int64")}, name="post-norm")
    counted = profile_graph(graph, H200.device, "bf16", compiled=True)
    *layers, _ = (index for index, block in enumerate(counted.blocks) if block.name.startswith("layers"))
    assert len({graph.variant(graph.blocks[index]) for index in layers}) == 1, "the probe measures one of them"
    assert len({counted.blocks[index].block_type for index in layers}) == 2, "the first is priced apart"
    found = corrected_profile(counted, H200.device, [BlockMeasurement(layers[0], 4, 3.0, 7.0, 0.0, 0.0)])
    costs = found.at(4, H200.device)
    assert costs.forward_ms[layers] == pytest.approx(3.0)
    assert costs.backward_ms[layers] == pytest.approx(7.0)


def test_a_device_whose_clock_fell_in_a_probe_is_slower_in_training() -> None:
    points, tuned = layers_measured((4, 3.0, 7.0), (16, 11.0, 25.0)), H200.device.efficiency
    for clocks, alone in (((1980, 1905), tuned.sustained), ((1980, 1965), 1.0), ((None, 1905), 1.0)):
        seen = [replace(one, clock_mhz=clock) for one, clock in zip(points, clocks, strict=True)]
        found = corrected_profile(layered_profile(), H200.device, seen)
        assert found.in_step(H200.device, devices=1)[LAYER] == alone
        assert found.in_step(H200.device, devices=2)[LAYER] == tuned.in_step
        assert found.in_step(Cluster.of("h100").device, devices=1)[LAYER] == 1.0, "that device was not measured"


def test_captured_blocks_take_the_measured_share_of_their_time() -> None:
    sizes, shares = ((4, 3.0, 7.0), (16, 11.0, 25.0)), (0.8, 1.0)
    points = [replace(one, replayed=share) for one, share in zip(layers_measured(*sizes), shares, strict=True)]
    types = tuple(replace(cost, capturable=("none",)) for cost in layered_profile().block_types)
    found = corrected_profile(replace(layered_profile(), block_types=types), H200.device, points)
    shares_at = {size: found.replayed_share(size, H200.device) for size in (1, 4, 8, 16, 32)}
    assert shares_at == pytest.approx({1: 0.8, 4: 0.8, 8: 0.9, 16: 1.0, 32: 1.0})
    assert found.replayed_share(4, Cluster.of("h100").device) == 1.0, "that device was not measured"

    asked: dict[str, Any] = {"global_batch": 64, "seq_len": 512, "data": 1, "recompute": "none", "micro_batch": 4}
    launched, replayed = (what_if(found, cluster=H200.resized(1), cuda_graphs=on, **asked) for on in (False, True))
    assert replayed.prediction.compute_ms == pytest.approx(0.8 * launched.prediction.compute_ms, rel=0.02)


@pytest.mark.parametrize(
    ("share", "asked", "captures"), [(0.95, None, True), (0.995, None, False), (0.8, False, False)]
)
def test_cuda_graphs_that_save_a_percent_are_chosen_although_the_host_is_ahead(
    share: float, asked: bool | None, captures: bool
) -> None:
    points = [replace(one, replayed=share) for one in layers_measured((4, 30.0, 70.0), (16, 110.0, 250.0))]
    types = tuple(replace(cost, capturable=("none",)) for cost in layered_profile().block_types)
    found = corrected_profile(replace(layered_profile(), block_types=types), H200.device, points)
    best = what_if(found, cluster=H200.resized(1), global_batch=16, seq_len=512, cuda_graphs=asked)
    assert best.cuda_graphs is captures


def test_the_ratio_of_measured_to_analytic_time_is_interpolated_between_micro_batches() -> None:
    counted = layered_profile()
    priced = {size: counted.analytic_ms(1, size, H200.device)[0] for size in (4, 8, 16, 64)}
    points = [(4, 2.0 * priced[4], 1.0), (16, 1.0 * priced[16], 1.0)]
    found = corrected_profile(counted, H200.device, layers_measured(*points))
    assert found.at(8, H200.device).forward_ms[LAYER] == pytest.approx(1.5 * priced[8])
    assert found.at(64, H200.device).forward_ms[LAYER] == pytest.approx(priced[64])


def test_measured_host_times_replace_the_devices_constants() -> None:
    """The least of all micro-batches counts; block types without host times keep the constants."""
    points = layers_measured((4, 3.0, 7.0), (16, 11.0, 25.0))
    seen = [replace(points[0], forward_host_ms=1.5, backward_host_ms=0.9), replace(points[1], forward_host_ms=1.6)]
    seen[1] = replace(seen[1], backward_host_ms=2.0)
    found = corrected_profile(layered_profile(), H200.device, seen)
    tuned = H200.device.efficiency
    forward, backward = found.at(4, H200.device).host_ms
    assert forward[LAYER] == pytest.approx(tuned.host_in_step * 1.5)
    assert backward[LAYER] == pytest.approx(tuned.host_in_step * 0.9)
    assert forward[-1] == pytest.approx(1e3 * tuned.block_forward_s)
    assert corrected_profile(layered_profile(), H200.device, points).measured_host_ms == {}


def test_a_plan_states_the_basis_of_its_times(tmp_path: Path) -> None:
    counted = layered_profile()
    seen = corrected_profile(counted, H200.device, layers_measured((4, 3.0, 7.0)))
    asked: dict[str, Any] = {"global_batch": 64, "seq_len": 512}
    said = {
        "this model's blocks, as measured on H200": what_if(seen, cluster=H200, **asked),
        "fitted to training on H200": what_if(counted, cluster=H200, **asked),
        "the data sheet of RTX 4090": what_if(seen, cluster=Cluster.of("rtx-4090", gpus=4), **asked),
    }
    for words, plan in said.items():
        assert words in plan.prediction.basis
        assert Plan.load(plan.save(tmp_path / "plan.json")).prediction.basis == plan.prediction.basis
        assert plan.prediction.basis in str(explain(plan))
        assert plan.prediction.basis in describe_plan(plan)
    cards = [with_measured_rates(Cluster.of("l40s").device, {"bf16": 2e14, "bandwidth": 7e11}), local_cluster(2).device]
    assert [basis_of_times(counted, card).split(": ")[-1] for card in cards] == ["enough to rank plans."] * 2
    table = weigh(counted, "bf16", PlanRequest(64, 512, H200))
    assert table.best.prediction.basis in repr(table)
    assert "fitted to training on H200" in table._repr_html_()


def test_unmeasured_block_types_and_other_devices_keep_analytic_times() -> None:
    counted = layered_profile()
    found = corrected_profile(counted, H200.device, layers_measured((4, 30.0, 70.0)))
    assert found.at(4, H200.device).forward_ms[-1] == counted.at(4, H200.device).forward_ms[-1]
    h100 = Cluster.of("h100").device
    assert (found.at(4, h100).forward_ms == counted.at(4, h100).forward_ms).all()


def test_memory_held_is_a_line_through_the_measurements() -> None:
    points = layers_measured((4, 3.0, 7.0), (16, 11.0, 25.0), held=20e6, once=5e6)
    costs = corrected_profile(layered_profile(), H200.device, points).at(8, H200.device)
    assert costs.saved_bytes[LAYER] == pytest.approx(8 * 20e6)
    assert costs.weight_copy_bytes[LAYER] == pytest.approx(5e6)
    assert costs.workspace_bytes[LAYER] == pytest.approx(8 * 7e6)


@pytest.mark.parametrize(
    ("seen", "expected"), [(86.0, 50.0), (50.0, 14.0 + (50.0 - 14.0) / 2), (10.0, 10.0), (90.0, 50.0 * 90 / 86)]
)
def test_bytes_that_the_compiler_does_not_save_are_taken_off_the_divided_share(seen: float, expected: float) -> None:
    """A layer is counted to save 86 bytes, of which 14 are on both devices."""
    whole = layered_profile()
    kinds = tuple(replace(kind, saved_bytes=86.0) for kind in whole.block_types)
    halves = tuple(replace(kind, saved_bytes=50.0) for kind in whole.block_types)
    counted = replace(whole, block_types=kinds, divided={2: DividedCosts(halves, whole.parameters)})
    found = corrected_profile(counted, H200.device, layers_measured((4, 3.0, 7.0), (16, 11.0, 25.0), held=seen))
    assert found.block_types[1].saved_bytes == pytest.approx(seen)
    assert found.on_tensor_axis(2).block_types[1].saved_bytes == pytest.approx(expected)
    assert found.on_tensor_axis(2).block_types[2].saved_bytes == 50.0, "not measured"


def test_a_device_without_an_allocator_to_ask_keeps_the_counted_memory() -> None:
    counted = layered_profile()
    point = replace(layers_measured((4, 3.0, 7.0))[0], workspace_bytes=0.0)
    found = corrected_profile(counted, H200.device, [point])
    assert found.block_types[1].saved_bytes == counted.block_types[1].saved_bytes


def test_probed_micro_batches_fall_by_quarters_from_a_devices_share_of_the_global_batch() -> None:
    assert probed_micro_batches(layered_profile(), H200, 32) == (8, 2, 1)
    largest, *rest = probed_micro_batches(layered_profile(), H200, 1 << 20)
    assert rest == [largest // 4, largest // 16]
    assert probed_micro_batches(layered_profile(), H200, 1) == (1,)


def test_expected_micro_batches_are_right_if_a_devices_share_is_quick_enough() -> None:
    for global_batch in (1, 32, 100):
        assert probed_micro_batches(layered_profile(), H200, global_batch) == likely_micro_batches(H200, global_batch)
    assert likely_micro_batches(H200, 1 << 20)[0] > probed_micro_batches(layered_profile(), H200, 1 << 20)[0]


def request_of(model: models.Model, seq_len: int = 16) -> ProbeRequest:
    experiment = Experiment(model=model, data=data.corpus("demo", vocab_size=512), seq_len=seq_len, global_batch=8)
    read = experiment.data.reads(experiment)
    return ProbeRequest(
        model.name, model.build, read.batch_specs(), 512, read.labelled_share(), "fp32", False, False, (1,)
    )


@pytest.mark.parametrize("make", [lambda: bert(num_layers=7), lambda: models.gpt2(64, 7, 4, vocab_size=512)])
def test_the_probe_runs_every_block_type_and_few_blocks_of_each(make: object) -> None:
    assert callable(make)
    probe = Probe(request_of(make()), 2, torch.device("cpu"))
    probe.compile()
    found = probe.measure()
    assert [one.micro_batch for one in found] == [2, 2, 2]
    assert [one.first_block for one in found] == [0, 1, 8]
    assert all(one.forward_ms > 0 and one.backward_ms > 0 for one in found)


def test_frozen_and_trained_layers_are_measured_separately() -> None:
    """Frozen layers have no backward; the one of the lowest trained layer ends with the whole backward."""
    probe = Probe(replace(request_of(bert()), build=half_frozen_bert), 2, torch.device("cpu"))
    probe.compile()
    found = {one.first_block: one for one in probe.measure()}
    assert list(found) == [0, 1, 6, 7, 9], "embedding, five layers, the lowest trained one, two more, head"
    assert all(one.forward_ms > 0 for one in found.values())
    assert {first for first, one in found.items() if one.backward_ms > 0} == {6, 7, 9}


def test_every_measured_block_has_a_backward_if_layers_of_two_types_alternate() -> None:
    """Skipped layers must not cut the blocks before them off from the loss."""
    tokens = {f"{name}_token_id": index for index, name in enumerate(("pad", "bos", "eos", "cls", "sep"))}
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "vocab_size": 512,
        "local_attention": 4,
    }

    def build() -> torch.nn.Module:
        return transformers.ModernBertForMaskedLM(
            transformers.ModernBertConfig(num_hidden_layers=10, **sizes, **tokens)
        )

    probe = Probe(replace(request_of(bert()), build=build), 2, torch.device("cpu"))
    probe.compile()
    found = {one.first_block: one for one in probe.measure()}
    assert list(found) == [0, 1, 2, 4, 11], "embedding, the first layer, those with a window, those without, head"
    assert all(one.backward_ms > 0 for one in found.values())


def half_frozen_bert() -> torch.nn.Module:
    model = bert(num_layers=8).build()
    for module in (model.bert.embeddings, *model.bert.encoder.layer[:5]):
        module.requires_grad_(False)
    return model


def test_the_first_few_blocks_of_each_type_are_sampled() -> None:
    from tests.unit.cost_values import graph_of

    graph = graph_of(bert(num_layers=7))
    picked = sampled_blocks(graph)
    kinds = [graph.blocks[index].block_type for index in picked]
    assert set(kinds) == set(graph.block_types)
    assert max(map(kinds.count, kinds)) == MAX_BLOCKS_PER_TYPE


@pytest.mark.parametrize(("host_s", "device_s", "waited_s"), [(0.01, 0.02, 0.0), (0.02, 0.01, 0.014)])
def test_a_device_waits_ahead_of_a_round_only_for_a_slower_host(
    host_s: float, device_s: float, waited_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that need not wait computes, so that its clocks are those of training."""
    slept: list[float] = []
    clock_s = itertools.count(0.0, host_s)  # two looks at the clock time a round, and other work must not
    monkeypatch.setattr(block_probe.time, "perf_counter", lambda: next(clock_s))
    monkeypatch.setattr(block_probe, "SUSTAINED_S", 0.4)
    monkeypatch.setattr(block_probe, "_sleep", lambda _device, seconds: slept.append(seconds))

    class Round(block_probe._Log):
        def device_s(self) -> float:
            return device_s

    single, sustained, _ = block_probe._sustained(lambda: Round(torch.device("cpu")), torch.device("cpu"))
    monkeypatch.undo()
    assert len(single) == block_probe.SINGLE
    assert slept[2:] == [pytest.approx(waited_s)] * (len(slept) - 2)
    assert len(sustained) == 10


def test_a_host_that_falls_behind_once_in_each_round_does_not_make_captured_blocks_shorter() -> None:
    """The wait is 10 ms in another block of each round: longer rounds, and the same blocks."""
    from tests.unit.cost_values import graph_of

    graph = graph_of(bert(num_layers=6))
    chain = sampled_blocks(graph)

    def round_with(late: int | None) -> block_probe._Log:
        log, at_s = block_probe._Log(torch.device("cpu")), 0.0
        log.lowest = 0

        def moment() -> block_probe._Moment:
            return block_probe._Moment(block_probe.Timestamp(None, at_s), 0, 0, at_s, at_s)

        log.forward.append(moment())
        for _ in chain:
            at_s += 0.002
            log.forward.append(moment())
        for position in reversed(range(len(chain))):
            at_s += 0.014 if position == late else 0.004
            log.backward[position] = moment()
        return log

    calm, behind = [round_with(None)] * 9, [round_with(position % len(chain)) for position in range(9)]
    assert statistics.median(log.device_s() for log in behind) > 1.2 * calm[0].device_s()
    for rounds in (calm, behind):
        measurements = block_probe._summary(graph, chain, rounds, rounds, 4)
        assert block_probe.launched_s(graph, chain, measurements) == pytest.approx(calm[0].device_s())


def test_a_random_batch_has_the_given_share_of_labels() -> None:
    specs = {"input_ids": TensorSpec("input_ids", (500,), "int64"), "labels": TensorSpec("labels", (500,), "int64")}
    batch = random_batch(specs, 20, vocab_size=50, labelled_share=0.15, device=torch.device("cpu"))
    assert 0.13 < (batch["labels"] != IGNORED).float().mean() < 0.17
    assert set(batch["input_ids"].unique().tolist()) <= set(range(50))


class Answers(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Three samples of 16 tokens with labels at the last one, two and three."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(16) + 100 * index
        return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(16) < 15 - index, IGNORED)}


def test_user_defined_data_are_measured_with_its_samples_and_priced_for_its_labels() -> None:
    """The micro-batch has one sample more than the data, so the first is repeated."""
    gpt = models.gpt2(64, 2, 4, vocab_size=512)
    experiment = Experiment(model=gpt, data=Answers(), seq_len=16, global_batch=8)
    request = ProbeRequest.of(experiment, local_cluster(1))
    probe = Probe(request, 4, torch.device("cpu"))
    assert probe._batch["input_ids"][:, 0].tolist() == [0, 100, 200, 0]
    assert planner.profile(experiment, H200).labelled_share == pytest.approx((3 + 1) / 32)


def test_only_blocks_before_the_first_that_cannot_be_captured_run_in_the_graph() -> None:
    gpt = models.gpt2(64, 2, 4, vocab_size=512)
    experiment = Experiment(model=gpt, data=Answers(), seq_len=16, global_batch=8)
    probe = Probe(ProbeRequest.of(experiment, local_cluster(1)), 4, torch.device("cpu"))
    chain, modules = probe._chain, [*probe._chain._modules.values()]
    assert chain.num_capturable == 0, "nothing is compiled here"
    for module in modules[:-1]:
        module.is_capturable = True
    assert chain.num_capturable == len(modules) - 1
    chain.run_first(2, probe._batch)
    own = [[getattr(module, attribute) for attribute in module.exclusive_parameters.values()] for module in modules]
    made = [any(bool(weight.grad.any()) for weight in weights) for weights in own if weights]
    assert made == [*([True] * 2), *([False] * (len(made) - 2))]


def test_all_labels_count_if_no_head_can_skip_rows() -> None:
    experiment = Experiment(model=Everything, data=Answers(), global_batch=8)
    assert planner.profile(experiment, H200).labelled_share == 1


class Everything(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(512, 8)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (self.table(input_ids) * labels[..., None]).mean()


def test_a_custom_model_is_measured_with_its_corpus_vocabulary() -> None:
    corpus = data.corpus("demo", vocab_size=512, objective="clm")
    experiment = Experiment(model=models.gpt2(64, 2, 4, vocab_size=512).build, data=corpus, seq_len=16, global_batch=8)
    probe = Probe(ProbeRequest.of(experiment, local_cluster(1)), 4, torch.device("cpu"))
    assert int(probe._batch["input_ids"].max()) > 256


class Layered(torch.nn.Module):
    """A model whose layers take a compiler little time: they are products, which it does not write code for."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = torch.nn.Embedding(512, 8), torch.nn.Linear(8, 512)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8, bias=False) for _ in "ab")

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.table(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return torch.nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def test_helpers_compile_for_the_probe_through_the_compilers_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The caches of graphs are empty; that of compiled headers is everybody's.
    for cache in (FxGraphCache, AOTAutogradCache):
        monkeypatch.setattr(cache, "_get_tmp_dir", lambda cache=cache: str(tmp_path / cache.__name__))
    request = replace(request_of(models.gpt2(64, 1, 4, vocab_size=512)), build=Layered, compiled=True)
    cpu = torch.device("cpu")

    def cached(work: Callable[[Probe], None]) -> tuple[int, int]:
        """Forward and backward graphs that were not, and that were in the cache."""
        torch._dynamo.reset()
        counters.clear()
        work(Probe(request, 2, cpu))
        return counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"]

    each = [cached(lambda probe, helper=helper: probe.compile_some(helper, 2)) for helper in (1, 2)]
    assert each == [(2, 0), (2, 0)], "the head, and a layer"
    assert cached(Probe.compile) == (2, 4), "the embedding is left to the probe"


@pytest.fixture
def one_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path))
    monkeypatch.setattr(probing, "SIZES", 1)
    monkeypatch.setattr(probing, "TIMEOUT_S", PATIENCE_S)


@pytest.mark.usefixtures("one_size")
def test_a_probe_is_a_process_that_measures_what_it_is_told_and_its_measurements_are_cached() -> None:
    """It was asked for micro-batches of two samples, and is told that they have one."""
    cpu, counted = local_cluster(1), layered_profile()
    request = replace(request_of(bert(num_layers=4)), micro_batches=(2,))
    assert cached_measurements(counted, cpu) == ()
    assert not has_cached_measurements(counted.model)
    said = list[str]()
    with BlockProbes(named=True) as probes:
        probes.ask(request)
        found = measure_blocks(probes, counted, cpu, 1, said.append)
    words = [each.removeprefix("micro-batch 1 ") for each in dict.fromkeys(said)]
    in_order = ["is built", "is captured", "is compiled", "waits", "is measured", "is done"]
    assert words[0] == "is built"
    assert words == [each for each in in_order if each in words], "a fast phase may pass between two looks"
    assert [(one.first_block, one.micro_batch) for one in found] == [(0, 1), (1, 1), (5, 1)]
    assert cached_measurements(counted, cpu) == found
    assert cached_measurements(replace(counted, code="of another forward"), cpu) == ()
    assert cached_measurements(replace(counted, deterministic=True), cpu) == (), "other kernels"
    assert cached_measurements(replace(counted, frozen=frozenset(list(counted.parameters)[:1])), cpu) == (), (
        "other gradients"
    )
    [seconds] = probes.seconds
    assert list(seconds) == ["imported", "asked", "built", "captured", "compiled", "assigned", "measured"]
    assert list(seconds.values()) == sorted(seconds.values())
    assert {one.clock_mhz for one in found} == {None}, "a CPU's clock is not asked for"
    assert has_cached_measurements(counted.model)
    assert not has_cached_measurements("the same by another name")
    assert cached_measurements(replace(counted, model="the same by another name"), cpu) == found
    assert has_cached_measurements("the same by another name"), "so that its next plan starts no probe"


@pytest.mark.usefixtures("one_size")
def test_probes_end_with_their_context() -> None:
    with BlockProbes() as probes:
        probes.ask(request_of(bert()))
        assert probes._process.poll() is None
        all_of_them = eventually(psutil.Process(probes._process.pid).children)
    assert probes._process.poll() is not None
    assert psutil.wait_procs(all_of_them, PATIENCE_S)[1] == []


@pytest.mark.usefixtures("one_size")
def test_a_model_that_cannot_be_probed_is_planned_from_constants_with_a_warning() -> None:
    request = replace(request_of(bert()), samples={})
    cpu = local_cluster(1)
    with BlockProbes() as probes:
        probes.ask(request)
        with pytest.warns(UserWarning, match="could not be measured"):
            assert measure_blocks(probes, layered_profile(), cpu, global_batch=1) == ()


@pytest.mark.usefixtures("one_size")
@pytest.mark.parametrize("cluster", [None, H200], ids=["this machine", "GPUs that it does not have"])
def test_probes_end_if_this_machine_turns_out_to_have_no_such_gpu(
    monkeypatch: pytest.MonkeyPatch, cluster: Cluster | None
) -> None:
    started: list[BlockProbes] = []

    class Seen(BlockProbes):
        def __init__(self, named: bool) -> None:
            super().__init__(named)
            assert named, "BERT is one of transformers' models"
            started.append(self)

    monkeypatch.setattr(probing, "BlockProbes", Seen)
    monkeypatch.setattr(probing, "has_nvidia_gpus", lambda: True)
    model = models.bert(hidden_size=32, num_layers=2, num_heads=2, vocab_size=64, max_positions=32)
    corpus = data.corpus("demo", vocab_size=64)
    planner.profile(Experiment(model=model, data=corpus, global_batch=8, seq_len=32), cluster)
    [probes] = started
    assert probes._process.poll() is not None
