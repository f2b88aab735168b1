"""The peers of the benchmarks train as plain PyTorch does, and each of their options does what it says."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import json
import os
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import workbench as wb
from tests.distributed.harness import launch
from workbench.capture.coupling.division import random_batch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import by_hand
import contenders
import kernels
import throughput
from peers import plain, with_deepspeed, with_megatron

CPU = torch.device("cpu")
MODEL = wb.models.bert(hidden_size=32, num_layers=4, num_heads=2, vocab_size=128, max_positions=32, dropout=0.0)
SAMPLES, LENGTH, MICRO_BATCH, STEPS = 8, 32, 2, 4
SIZES: dict[str, Any] = {"vocab_size": 256, "max_positions": LENGTH, "dropout": 0.0}
GPT, BERT, OPT = (make(32, 4, 2, **SIZES) for make in (wb.models.gpt2, wb.models.bert, wb.models.opt))
DEEPSPEED = ("deepspeed1", "deepspeed2", "deepspeed3+recompute")
MEGATRON = ("megatron", "megatron+fused+flash", "megatron-tp2+flash+recompute", "megatron-pp2+flash+recompute-half")
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="make test-peers installs DeepSpeed"
)
needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="make test-peers installs Megatron-Core"
)
WORDS = ("--skip", "deepspeed,megatron", "--rounds", "2")
ALONE = ("loop", "loop+labelled-head+masters", "loop+masters+recompute")
KINDS = (
    "ddp",
    "ddp+labelled-head+recompute",
    "ddp+masters+labelled-head",
    "fsdp",
    "fsdp+labelled-head+one-reduction",
    "fsdp3+labelled-head+one-reduction+recompute-half",
    "pp2",
    "pp2+labelled-head+balanced+recompute",
)
PAIR = wb.models.bert(32, 4, 2, layout="pre_ln", next_sentence=False, intermediate_size=64, **SIZES)
WITH_MUON = (
    "ddp+muon",
    "ddp+masters+muon+sdpa+labelled-head",
    "fsdp+muon+labelled-head+one-reduction",
    "ddp+muon+sdpa+labelled-head+recompute",
)


def experiment(model: Any = MODEL) -> wb.Experiment:
    data = wb.data.corpus("demo", vocab_size=model.vocab_size)
    return wb.Experiment(model=model, data=data, steps=10, global_batch=SAMPLES, seq_len=LENGTH)


def global_batch(model: Any = MODEL) -> dict[str, torch.Tensor]:
    specs, share = experiment(model).data.reads(experiment(model)).batch_specs(), 1.0 if model in (GPT, OPT) else 0.3
    return random_batch(specs, SAMPLES, vocab_size=model.vocab_size, labelled_share=share, device=CPU)


def plain_losses(model: Any = MODEL, muon: bool = False) -> list[float]:
    """Return the losses of plain PyTorch in one process: the mean over micro-batches, as every peer accumulates."""
    torch.manual_seed(0)
    module, batch, losses = model.build(), global_batch(model), []
    hidden = [each.weight for each in module.modules() if isinstance(each, nn.Linear) and each.out_features != 256]
    hidden = hidden if muon else []
    others = [each for each in module.parameters() if not any(each is one for one in hidden)]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(others, lr=1e-4)]
    if muon:
        optimizers.append(torch.optim.Muon(hidden, lr=plain.MUON_RATE, weight_decay=0.0))
    for _ in range(STEPS):
        module.zero_grad()
        total = 0.0
        for start in range(0, SAMPLES, MICRO_BATCH):
            loss = module(**{name: value[start : start + MICRO_BATCH] for name, value in batch.items()}).loss
            (loss / (SAMPLES // MICRO_BATCH)).backward()
            total += loss.item() / (SAMPLES // MICRO_BATCH)
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        losses.append(total)
    return losses


class Collectives(TorchDispatchMode):
    """Count the operations of `torch.distributed` by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func.__name__] = self.counts.get(func.__name__, 0) + 1
        return func(*args, **(kwargs or {}))


def _trained(_rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {kind: _one(kind) for kind in KINDS}
    found |= {kind: _one(kind, PAIR) for kind in WITH_MUON}
    turn = contenders.Turn("fsdp", contenders.strongest("fsdp"), MICRO_BATCH)
    found["timed"] = contenders.measured(turn, experiment(), 2, None, CPU, False)
    return found


def _trained_alone(_rank: int) -> dict[str, Any]:
    return {kind: _one(kind) for kind in ALONE}


def _one(kind: str, model: Any = MODEL) -> dict[str, Any]:
    peer = plain.Peer(kind, model.build, MICRO_BATCH, CPU)
    share, whole = SAMPLES // peer.data, global_batch(model)
    batch = {name: value[peer.replica * share : (peer.replica + 1) * share] for name, value in whole.items()}
    losses = []
    for step in range(STEPS):
        with Collectives() as seen:
            loss = peer.step(batch)
        dist.all_reduce(loss)  # a stage that has no loss counts as 0
        losses.append(loss.item() / peer.data)
        if step == 0:
            counts = seen.counts
    found = {"losses": losses, "tokens": peer.tokens, "data": peer.data, "collectives": counts}
    if kind.startswith(("loop", "ddp")):
        weights = [weakref.ref(weight) for weight in peer.trained.parameters()]
        del peer
        gc.collect()
        found["kept"] = sum(weight() is not None for weight in weights)
    return found


@pytest.fixture(scope="module")
def trained() -> dict[str, Any]:
    return launch(_trained, 2)


def test_loops_of_one_device_have_the_losses_of_plain_pytorch_and_run_on_no_more() -> None:
    expected, found = plain_losses(), launch(_trained_alone, 1)
    for kind in ALONE:
        assert found[kind]["losses"] == pytest.approx(expected, rel=1e-5), kind
        assert not found[kind]["collectives"]
        assert [contenders.fits(kind, world) for world in (1, 2)] == [True, False]


def test_every_peer_has_the_losses_of_plain_pytorch(trained: dict[str, Any]) -> None:
    expected = plain_losses()
    assert expected[-1] < expected[0]
    for kind in KINDS:
        assert trained[kind]["losses"] == pytest.approx(expected, rel=2e-4), kind
        assert trained[kind]["losses"][-1] < trained[kind]["losses"][0], kind


def test_what_a_peer_has_trained_is_freed_with_it(trained: dict[str, Any]) -> None:
    """The contenders of a round share a process, in which what one of them kept is missing to the others."""
    assert {kind: found["kept"] for kind, found in trained.items() if "kept" in found} == dict.fromkeys(
        [kind for kind in (*KINDS, *WITH_MUON) if kind.startswith("ddp")], 0
    )


def test_muon_shared_out_over_the_ranks_has_the_losses_of_torch_muon(trained: dict[str, Any]) -> None:
    expected = plain_losses(PAIR, muon=True)
    assert expected[-1] < expected[0] - 0.05
    for kind in WITH_MUON:
        assert trained[kind]["losses"] == pytest.approx(expected, rel=2e-3), kind


def test_the_phases_of_a_profiled_step_are_those_between_its_marks() -> None:
    def kernel(name: str, start: float, end: float, stream: int = 7) -> kernels.Kernel:
        return kernels.Kernel(name, 1e3 * start, 1e3 * end, stream)

    def step(at: float) -> list[kernels.Kernel]:
        marks = [kernel(f"void spin_kernel({i})", at + 10 * i, at + 10 * i + 0.001) for i in range(3)]
        return [
            *marks,
            kernel("nvjet_tst", at + 1, at + 9),
            kernel("ncclDevKernel_AllGather_RING_LL", at + 5, at + 15, 20),
            kernel("flash_bwd", at + 12, at + 18),
            kernel("multi_tensor_apply", at + 21, at + 25),
        ]

    names = ["before", "backward", "update"] * 3
    found = kernels.marked_step([each for at in (0, 30, 60) for each in step(at)], names, 1)
    assert len(found.kernels) == 4
    phases = kernels.phases(found)
    assert [phases[name]["in all"] for name in names[:3]] == pytest.approx([10, 10, 10])
    before, backward = phases["before"], phases["backward"]
    assert (before["matrix products"], before["communication"], before["communication alone"]) == (8, 5, 1)
    assert (backward["communication"], backward["attention"], backward["communication alone"]) == (5, 6, 2)
    assert (backward["idle"], phases["update"]["idle"]) == pytest.approx((2, 6))
    assert backward["collectives"] == {"ncclDevKernel_AllGather_RING_LL": {"calls": 1, "ms": 5.0, "alone ms": 2.0}}
    late = kernels.Step(tuple(kernel(k.name, k.start_us / 1e3, k.end_us / 1e3 - 4) for k in found.kernels[1:2]))
    told = kernels.collectives([found, late])["ncclDevKernel_AllGather_RING_LL"]
    assert told == pytest.approx({"calls": 1, "longest rank ms": 10, "without waiting ms": 6})
    lost = kernels.marked_step(step(0), names, 1)
    assert [(name, told["in all"]) for name, told in kernels.phases(lost).items()] == [
        ("all steps, with 3 marks of 9", pytest.approx(25))
    ]
    assert kernels.phases(kernels.marked_step([], names, 1)) == {}


def test_every_peer_trains_on_all_tokens_of_the_batch(trained: dict[str, Any]) -> None:
    for kind in KINDS:
        assert trained[kind]["tokens"] * trained[kind]["data"] == SAMPLES * LENGTH, kind
    assert trained["timed"]["tokens_per_step"] == SAMPLES * LENGTH
    assert len(trained["timed"]["step_ms"]) == 2
    assert len(trained["timed"]["losses"]) == contenders.WARM_UP + 2


def test_one_reduction_reduces_and_gathers_once_a_step(trained: dict[str, Any]) -> None:
    def counts(kind: str) -> tuple[int, int]:
        seen = trained[kind]["collectives"]
        return seen["_reduce_scatter_base_.default"], seen["_allgather_base_.default"]

    micro_batches = SAMPLES // 2 // MICRO_BATCH
    groups = MODEL.num_layers + 1
    assert counts("fsdp") == (groups * micro_batches, groups * micro_batches)
    assert counts("fsdp+labelled-head+one-reduction") == (groups, groups)
    assert counts("fsdp3+labelled-head+one-reduction+recompute-half")[0] == groups


def test_the_labelled_head_computes_labelled_positions_only() -> None:
    torch.manual_seed(0)
    model, batch = MODEL.build(), global_batch()
    rows: list[int] = []
    model.cls.predictions.decoder.register_forward_hook(lambda _, inputs, __: rows.append(inputs[0].shape[0]))
    expected = model(**batch).loss
    labelled = plain._LabelledPretraining(model)
    labelled.capacity = plain.capacity([batch])
    assert labelled(**batch).item() == pytest.approx(expected.item(), rel=1e-6)
    count = int((batch["labels"] != plain.IGNORED).sum())
    assert count <= rows[1] < count + SAMPLES * LENGTH / plain.HEAD_GRAIN
    assert rows[0] == SAMPLES


@pytest.mark.parametrize("layers", [4, 7, 24, 54])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_no_split_has_a_faster_slowest_stage_than_the_balanced_one(layers: int, stages: int) -> None:
    for head in (0.2, 1.4, 2.6):

        def slowest(bounds: list[int], head: float = head) -> float:
            sizes = [end - start for start, end in itertools.pairwise(bounds)]
            return max(*sizes[:-1], sizes[-1] + head)

        cuts = itertools.combinations(range(1, layers), stages - 1)
        best = min(slowest([0, *cut, layers]) for cut in cuts)
        bounds = plain.balanced_bounds(layers, stages, head)
        assert (bounds[0], bounds[-1], len(bounds)) == (0, layers, stages + 1)
        assert slowest(bounds) == pytest.approx(best)


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("horovod", "'horovod' is no hand-written peer"),
        ("ddp+one-reduction", "ddp has no option 'one-reduction'"),
        ("fsdp+masters", "fsdp has no option 'masters'"),
        ("fsdp+recompute+recompute-half", "Keep one of the two options"),
        ("ppx", "'ppx' is no pipeline"),
        ("deepspeed4", "'deepspeed4' is no peer of DeepSpeed. Write deepspeed1, deepspeed2, deepspeed3"),
        ("deepspeed1+offload", "deepspeed1 has no option 'offload'"),
        ("megatron-", "'megatron-' is no peer of Megatron-Core"),
        ("megatron-tp0", "'megatron-tp0' is no peer of Megatron-Core"),
        ("megatron+zero3", "megatron has no option 'zero3'"),
        ("megatron+te+flash", "Keep one of the two"),
    ],
)
def test_an_unknown_peer_is_refused(kind: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence.replace("+", r"\+")):
        contenders.family_of(kind)


def test_a_micro_batch_that_leaves_samples_over_is_refused() -> None:
    with pytest.raises(ValueError, match="8 samples of a replica do not divide into micro-batches of 3"):
        list(plain.micro_batches(global_batch(), 3))
    with pytest.raises(ValueError, match="does not name a micro-batch"):
        by_hand.peer("fsdp")


def _bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[throughput.Bench, list[str]]:
    """Return a benchmark whose processes are replaced: micro-batches above 2 run out of memory, others take 10 ms."""
    monkeypatch.setattr(sys, "argv", ["throughput.py", "--tiny", "--gpus", "2", "--out", str(tmp_path / "raw"), *words])
    arguments = throughput._arguments()
    raw = throughput._opened(arguments.out)
    raw["starts"].append({})
    launched: list[str] = []

    def of(_name: str, turns: Any, steps: int, _profile: bool = False) -> Any:
        for turn in turns:
            launched.append(turn.label)
            if turn.kind != "ours" and turn.micro_batch > 2 and "recompute" not in turn.kind:
                yield turn, {"error": "out of memory: 1 GiB"}
                return
            ms = 10.0 if turn.kind == "ours" else 40.0 / turn.micro_batch + 9 * ("recompute" in turn.kind)
            yield turn, {"step_ms": [ms] * steps, "tokens_per_step": 256}

    bench = throughput.Bench(arguments, raw)
    monkeypatch.setattr(bench, "_launched", of)
    return bench, launched


def test_a_sweep_keeps_the_fastest_and_rounds_alternate_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, launched = _bench(tmp_path, monkeypatch, *WORDS, "--ablate", "ddp,fsdp", "large")
    bench.predict("large")
    assert json.loads((tmp_path / "raw").read_text())["predictions"]["large"]["ours"]["step_ms"] > 0
    assert not launched
    bench.sweep("large")
    tried = [(entry["kind"], entry["micro_batch"], "error" in entry) for entry in bench.raw["sweeps"]]
    assert tried[:4] == [
        ("ddp+labelled-head", 1, False),
        ("ddp+labelled-head", 2, False),
        ("ddp+labelled-head", 4, True),
        ("ddp+labelled-head+recompute-half", 4, False),
    ]
    assert not [kind for kind, *_ in tried if kind.endswith("recompute")]  # every second layer was enough
    bench.compare("large")
    order = [entry["contender"].partition(":")[0] for entry in bench.raw["measurements"]]
    first = order[: len(order) // 2]
    assert first[0] == "ours"
    assert "ddp+labelled-head+recompute-half, 4" in first
    assert {"fsdp+one-reduction+recompute-half, 4", "fsdp+recompute-half, 4"} <= set(first)
    assert order[len(order) // 2 :] == first[::-1]
    assert "planner's choice / best peer" in throughput.report(bench.raw)
    again, launched_again = _bench(tmp_path, monkeypatch, *WORDS, "--ablate", "ddp,fsdp", "large")
    again.predict("large")
    again.sweep("large")
    again.compare("large")
    assert not launched_again


def test_bad_input_is_refused_before_a_process_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for words, sentence in (
        (("--peer", "pp4,1", "large"), "pp4 does not run on 2 devices"),
        (("--peer", "fsdp,3", "large"), "Give a divisor of 4"),
        (("--peer", "horovod,3", "large"), "no hand-written peer"),
        (("--rounds", "0", "large"), "--rounds 0 is not at least 1"),
        (("larger",), "There is no row 'larger'. The rows are .*, large,"),
    ):
        bench, _ = _bench(tmp_path, monkeypatch, *words)
        with pytest.raises(ValueError, match=sentence):
            throughput._refuse(bench.arguments)
    (tmp_path / "raw").write_text("[]")
    with pytest.raises(SystemExit, match="an earlier version of this command"):
        throughput._opened(tmp_path / "raw")


def _losses(peer: Any, model: Any) -> dict[str, Any]:
    share = SAMPLES // peer.data
    batch = {
        name: value[peer.replica * share : (peer.replica + 1) * share] for name, value in global_batch(model).items()
    }
    losses = []
    for _ in range(STEPS):
        loss = peer.step(batch)
        counts = torch.tensor(float(loss != 0))  # a stage that has no loss returns 0
        dist.all_reduce(loss)
        dist.all_reduce(counts)
        losses.append(loss.item() / counts.item())
    return {"losses": losses, "tokens": peer.tokens * peer.data}


def _deepspeed(rank: int) -> dict[str, Any]:
    os.environ |= {**with_deepspeed.ENVIRONMENT, "LOCAL_RANK": str(rank)}
    found: dict[str, Any] = {
        kind: _losses(with_deepspeed.Peer(kind, OPT.build, MICRO_BATCH, CPU), OPT) for kind in DEEPSPEED
    }
    turn = contenders.Turn("deepspeed1", contenders.strongest("deepspeed1"), MICRO_BATCH)
    return found | {"timed": contenders.measured(turn, experiment(BERT), 2, None, CPU, False)}


def _megatron(_rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in MEGATRON:
        peer = with_megatron.Peer(kind, GPT.build, MICRO_BATCH, CPU)
        copy_gpt2(peer.model.module)
        found[kind] = _losses(peer, GPT)
    found["bert"] = _losses(with_megatron.Peer("megatron-pp2+flash", BERT.build, MICRO_BATCH, CPU), BERT)
    turn = contenders.Turn("megatron", contenders.strongest("megatron-tp2"), MICRO_BATCH)
    return found | {"timed": contenders.measured(turn, experiment(BERT), 2, None, CPU, False)}


@torch.no_grad()
def copy_gpt2(stage: Any) -> None:
    """Give a stage of Megatron-Core's GPT the weights of Hugging Face's, whose linear layers are transposed."""
    from megatron.core import parallel_state

    torch.manual_seed(0)
    source = GPT.build().transformer.state_dict()
    target = dict(stage.named_parameters())
    ranks, rank = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_rank(),
    )

    def put(name: str, value: torch.Tensor) -> None:
        if name in target:
            into = target.pop(name)
            divided = [dim for dim in range(value.dim()) if value.shape[dim] != into.shape[dim]]
            into.copy_(value.chunk(ranks, divided[0])[rank] if divided else value)

    put("embedding.word_embeddings.weight", source["wte.weight"])
    put("output_layer.weight", source["wte.weight"])
    put("embedding.position_embeddings.weight", source["wpe.weight"])
    for local, layer in enumerate(stage.decoder.layers):
        for ours, theirs in (
            ("input_layernorm", "ln_1"),
            ("self_attention.linear_qkv", "attn.c_attn"),
            ("self_attention.linear_proj", "attn.c_proj"),
            ("pre_mlp_layernorm", "ln_2"),
            ("mlp.linear_fc1", "mlp.c_fc"),
            ("mlp.linear_fc2", "mlp.c_proj"),
        ):
            for part in ("weight", "bias"):
                value = source[f"h.{layer.layer_number - 1}.{theirs}.{part}"]
                value = value.T if value.dim() == 2 else value
                if theirs == "attn.c_attn":  # query, key and value of a head stand together
                    value = value.unflatten(0, (3, GPT.num_heads, -1)).transpose(0, 1).flatten(0, 2)
                put(f"decoder.layers.{local}.{ours}.{part}", value)
    for part in ("weight", "bias"):
        put(f"decoder.final_layernorm.{part}", source[f"ln_f.{part}"])
    assert not target


@needs_deepspeed
def test_deepspeed_has_the_losses_of_plain_pytorch() -> None:
    trained, expected = launch(_deepspeed, 2), plain_losses(OPT)
    assert expected[-1] < expected[0]
    for kind in DEEPSPEED:
        assert trained[kind]["losses"] == pytest.approx(expected, rel=1e-5), kind
        assert trained[kind]["tokens"] == SAMPLES * LENGTH, kind
    assert trained["timed"]["tokens_per_step"] == SAMPLES * LENGTH
    assert trained["timed"]["losses"][-1] < trained["timed"]["losses"][0]


@needs_megatron
def test_megatron_core_has_the_losses_of_plain_pytorch() -> None:
    trained, expected = launch(_megatron, 2), plain_losses(GPT)
    for kind in MEGATRON:
        assert trained[kind]["losses"] == pytest.approx(expected, rel=1e-5), kind
        assert trained[kind]["tokens"] == SAMPLES * LENGTH, kind
    assert trained["bert"]["losses"][-1] < trained["bert"]["losses"][0]
    assert trained["bert"]["tokens"] == SAMPLES * LENGTH
    assert trained["timed"]["tokens_per_step"] == SAMPLES * LENGTH
    assert trained["timed"]["losses"][-1] < trained["timed"]["losses"][0]


@needs_megatron
def test_a_peer_runs_where_its_degrees_divide_the_devices() -> None:
    assert with_megatron.degrees("megatron-tp2pp4+flash") == (2, 4)
    assert [contenders.fits("megatron-tp2pp2", world) for world in (1, 2, 4, 8)] == [False, False, True, True]
    assert contenders.replicas_of("megatron-tp2+flash", 8) == 4


def test_a_library_that_is_not_installed_is_named_with_its_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setitem(sys.modules, "megatron", None)
    monkeypatch.setattr(sys, "argv", ["throughput.py", "--gpus", "2", "gpt3-1.3b"])
    with pytest.raises(
        ValueError, match=r"Run pip install -r benchmarks/peers/requirements.txt.* Or leave it out: --skip deepspeed1"
    ):
        throughput._refuse(throughput._arguments())
    monkeypatch.setattr(sys, "argv", ["throughput.py", "--gpus", "2", "--skip", "deepspeed", "gpt3-1.3b"])
    with pytest.raises(
        ValueError, match=r"Run pip install -r benchmarks/peers/requirements.txt.* Or leave it out: --skip megatron"
    ):
        throughput._refuse(throughput._arguments())
    monkeypatch.setattr(sys, "argv", ["throughput.py", "--gpus", "2", "--skip", "deepspeed,megatron", "gpt3-1.3b"])
    throughput._refuse(throughput._arguments())
