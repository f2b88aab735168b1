"""A run by the rule equals plain PyTorch with CompleteP's multipliers in forward, under one process and several."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.harness import Division, launch, part_of, trainer_of
from workbench import data, models
from workbench.capture import Graph, capture, spec_of
from workbench.experiment import Experiment

STEPS, MICRO_BATCH, GLOBAL_BATCH, SEQ_LEN, VOCABULARY = 30, 2, 4, 12, 60
WIDE, DEEP = 2, 3
RATE, DECAY, BETAS, CLIP = 1e-2, 0.1, (0.9, 0.98), 0.2
SIZES = {"vocab_size": VOCABULARY, "max_positions": 16, "dropout": 0.0, "initializer_range": 0.1}
BASES = {
    "bert": models.bert(16, 1, 2, layout="pre_ln", next_sentence=True, **SIZES),
    "bert by the width rule": models.bert(16, 1, 2, layout="post_ln", next_sentence=True, **SIZES),
    "gpt2": models.gpt2(16, 1, 2, **SIZES),
    "opt": models.opt(16, 1, 2, **SIZES),
}
BRANCHES = (".output.dense", ".c_proj", ".out_proj", ".fc2")
READ_OUTS = ("cls.predictions.decoder", "cls.seq_relationship", "lm_head")


def target(family: str) -> Any:
    base = BASES[family]
    return dataclasses.replace(
        base, hidden_size=16 * WIDE, intermediate_size=64 * WIDE, num_heads=2 * WIDE, num_layers=DEEP
    )


def uses_depth_rule(family: str) -> bool:
    return family != "bert by the width rule"


def batch_of(family: str, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(VOCABULARY, (GLOBAL_BATCH, SEQ_LEN), generator=generator)
    ids[:, 1::2] = (ids[:, ::2] * 7 + 3) % VOCABULARY  # every other token follows from the one before
    batch = {"input_ids": ids, "labels": ids}
    return batch | ({"next_sentence_label": ids[:, 0] % 2} if "bert" in family else {})


@functools.cache
def explicit(family: str, eps: float) -> tuple[list[float], list[float]]:
    """Train the target with multipliers in forward, without any code of the rule; return its losses and norms."""
    deep = DEEP if uses_depth_rule(family) else 1
    torch.manual_seed(0)
    model = target(family).build()
    groups = []
    for name, parameter in model.named_parameters():
        in_block = ".layer." in name or ".layers." in name or ".h." in name
        is_hidden = parameter.ndim == 2 and (in_block or ".dense." in name)
        if is_hidden:
            published = DEEP**0.5 if ".c_proj." in name else 1.0  # GPT-2 divides by 1/sqrt(2 L): here as in the base
            parameter.data.mul_(published / WIDE**0.5)
        is_bias_of_logits = name in ("cls.predictions.bias", "cls.seq_relationship.bias")
        group = {
            "lr": RATE / (WIDE if is_hidden else 1),
            "weight_decay": DECAY * (WIDE if is_hidden else 1) if parameter.ndim == 2 else 0.0,
            "eps": eps if is_bias_of_logits else eps / (WIDE * (deep if in_block else 1)),
        }
        groups.append({"params": [parameter], **group})
    for name, module in model.named_modules():
        if name.endswith(BRANCHES):
            module.register_forward_hook(lambda _module, _inputs, output: output / deep)
        if name in READ_OUTS:
            module.register_forward_pre_hook(lambda _module, inputs: (inputs[0] / WIDE,))
    optimizer, losses, norms = torch.optim.AdamW(groups, betas=BETAS), [], []
    for step in range(STEPS):
        loss = model(**batch_of(family, step)).loss
        optimizer.zero_grad()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


@functools.cache
def captured(family: str) -> Graph:
    specs = {key: spec_of(key, value[:MICRO_BATCH]) for key, value in batch_of(family, 0).items()}
    return capture(target(family).build(), specs, name=family)


def capture_all() -> None:
    for family in BASES:
        captured(family)


def train(family: str, eps: float, division: Division) -> tuple[list[float], list[float]]:
    """Train by the rule with the trainer of a run; return its losses and norms."""
    torch.manual_seed(0)
    rule = models.scaling(BASES[family], target(family), depth_rule=uses_depth_rule(family))
    experiment = Experiment.of(
        model=rule.model,
        data=data.corpus(),
        global_batch=GLOBAL_BATCH,
        seq_len=SEQ_LEN,
        steps=STEPS,
        warmup_steps=0,
        lr_schedule="constant",
        learning_rate=RATE,
        weight_decay=DECAY,
        betas=BETAS,
        eps=eps,
        clip_norm=CLIP,
        **rule.optimizer,
    )
    trainer = trainer_of(experiment, rule.model.build(), captured(family), division, MICRO_BATCH)
    losses, norms = [], []
    for step in range(STEPS):
        loss, squared_norm, _ = trainer.step(step, part_of(trainer, batch_of(family, step))).scalars.tolist()
        losses.append(loss)
        norms.append(squared_norm**0.5)
    return losses, norms


CASES = [
    ("bert", 1e-8, Division()),
    ("bert", 1e-6, Division(data=2, zero=3)),
    ("bert", 1e-6, Division(pipeline=2)),
    ("bert", 1e-3, Division(tensor=2)),
    ("bert by the width rule", 1e-6, Division()),
    ("gpt2", 1e-6, Division()),
    ("opt", 1e-6, Division()),
]


def train_each(_rank: int, cases: list[tuple[str, float, Division]]) -> list[tuple[list[float], list[float]]]:
    return [train(*case) for case in cases]


@functools.cache
def outcomes(world: int) -> dict[tuple[str, float, Division], tuple[list[float], list[float]]]:
    """Train all cases on so many processes, which start once."""
    cases = [case for case in CASES if case[2].world == world]
    return dict(zip(cases, launch(train_each, world, cases, ahead=capture_all), strict=True))


@pytest.mark.parametrize(("family", "eps", "division"), CASES)
def test_a_run_by_the_rule_equals_explicit_multipliers(family: str, eps: float, division: Division) -> None:
    losses, norms = outcomes(division.world)[family, eps, division]
    expected_losses, expected_norms = explicit(family, eps)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert norms == pytest.approx(expected_norms, rel=1e-4)
    assert min(norms) > CLIP, "the clip does not bind, and the test says nothing about the norm"
    assert losses[-1] < losses[0] - 0.5
