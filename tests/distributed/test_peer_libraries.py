"""DeepSpeed and Megatron-Core train, as peers of the benchmarks, with the losses of plain PyTorch."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import workbench as wb
from tests.distributed.harness import launch
from workbench.capture.random_batch import random_batch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import contenders
import peers_deepspeed
import peers_megatron
import throughput

CPU = torch.device("cpu")
SAMPLES, LENGTH, MICRO_BATCH, STEPS, VOCABULARY = 8, 32, 2, 4, 256
SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "max_positions": LENGTH, "dropout": 0.0}
GPT = wb.models.gpt2(32, 4, 2, **SIZES)
BERT = wb.models.bert(32, 4, 2, **SIZES)
OPT = wb.models.opt(32, 4, 2, **SIZES)
DEEPSPEED = ("deepspeed1", "deepspeed2", "deepspeed3+recompute")
MEGATRON = ("megatron", "megatron+fused+flash", "megatron-tp2+flash+recompute", "megatron-pp2+flash+recompute-half")

needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
needs_megatron = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="Megatron is not installed")


def experiment(model: Any) -> wb.Experiment:
    data = wb.data.corpus("demo", vocab_size=VOCABULARY)
    return wb.Experiment(model=model, data=data, steps=10, global_batch=SAMPLES, seq_len=LENGTH)


def global_batch(model: Any) -> dict[str, torch.Tensor]:
    specs, share = experiment(model).data.batch_specs(experiment(model)), 0.3 if model is BERT else 1.0
    return random_batch(specs, SAMPLES, vocab_size=VOCABULARY, labelled_share=share, device=CPU)


def plain_losses(model: Any) -> list[float]:
    """Return the losses of plain PyTorch in one process: the mean over micro-batches, as every peer accumulates."""
    torch.manual_seed(0)
    module, batch, losses = model.build(), global_batch(model), []
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    for _ in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for start in range(0, SAMPLES, MICRO_BATCH):
            loss = module(**{name: value[start : start + MICRO_BATCH] for name, value in batch.items()}).loss
            (loss / (SAMPLES // MICRO_BATCH)).backward()
            total += loss.item() / (SAMPLES // MICRO_BATCH)
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        losses.append(total)
    return losses


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
    os.environ |= {**peers_deepspeed.ENVIRONMENT, "LOCAL_RANK": str(rank)}
    found: dict[str, Any] = {
        kind: _losses(peers_deepspeed.Peer(kind, OPT.build, MICRO_BATCH, CPU), OPT) for kind in DEEPSPEED
    }
    turn = contenders.Turn("deepspeed1", contenders.strongest("deepspeed1"), MICRO_BATCH)
    return found | {"timed": contenders.measured(turn, experiment(BERT), 2, None, CPU, False)}


def _megatron(_rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in MEGATRON:
        peer = peers_megatron.Peer(kind, GPT.build, MICRO_BATCH, CPU)
        copy_gpt2(peer.model.module)
        found[kind] = _losses(peer, GPT)
    found["bert"] = _losses(peers_megatron.Peer("megatron-pp2+flash", BERT.build, MICRO_BATCH, CPU), BERT)
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


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
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


@needs_megatron
def test_a_peer_runs_where_its_degrees_divide_the_devices() -> None:
    assert peers_megatron.degrees("megatron-tp2pp4+flash") == (2, 4)
    assert [contenders.fits("megatron-tp2pp2", world) for world in (1, 2, 4, 8)] == [False, False, True, True]
    assert contenders.replicas_of("megatron-tp2+flash", 8) == 4


def test_a_library_that_is_not_installed_is_named_with_its_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setitem(sys.modules, "megatron", None)
    monkeypatch.setattr(sys, "argv", ["throughput.py", "--gpus", "2", "gpt3-1.3b"])
    with pytest.raises(ValueError, match=r"Run pip install deepspeed==.* Or leave it out: --skip deepspeed1"):
        throughput._refuse(throughput._arguments())
    monkeypatch.setattr(sys, "argv", ["throughput.py", "--gpus", "2", "--skip", "deepspeed", "gpt3-1.3b"])
    with pytest.raises(ValueError, match=r"Run pip install megatron-core==.* Or leave it out: --skip megatron"):
        throughput._refuse(throughput._arguments())
    monkeypatch.setattr(sys, "argv", ["throughput.py", "--gpus", "2", "--skip", "deepspeed,megatron", "gpt3-1.3b"])
    throughput._refuse(throughput._arguments())
