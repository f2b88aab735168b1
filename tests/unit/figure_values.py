"""Plans and curves for tests of figures, made by hand."""

from __future__ import annotations

import itertools

import numpy as np

from workbench.analysis.curve import Curve
from workbench.base.units import GIB
from workbench.cost.hardware import Cluster
from workbench.planning.plan import Memory, Plan, Prediction, Stage


def in_one_line(words: str) -> str:
    """Return a text of a figure without its line breaks."""
    return words.replace(" <br>", " ").replace("<br>", " ").replace("\u00a0", " ")


def curve(name: str = "run", steps: int = 2000, seed: int = 0, tokens_per_step: int = 8192) -> Curve:
    """A noisy loss that falls from 10.4 to about 4."""
    step = np.arange(1, steps + 1)
    noise = np.random.default_rng(seed).normal(0, 0.1, steps)
    seconds = step * 0.1
    return Curve(
        name,
        {
            "step": step,
            "loss": 4 + 6.4 * np.exp(-step / 200) + noise,
            "tokens": step * tokens_per_step,
            "seconds": seconds,
            "flops": step * 1e15,
            "gpu_hours": seconds * 4 / 3600,
            "tokens_per_s": np.full(steps, tokens_per_step / 0.1),
            "step_ms": np.full(steps, 100.0),
            "mfu": np.full(steps, 0.4),
        },
    )


def plan(
    stages: int = 4,
    blocks: int = 56,
    microbatches: int = 32,
    data: int = 1,
    memory_limit_bytes: int | None = None,
    model: str = "bert-1920x54",
    chunks: int = 1,
) -> Plan:
    """`blocks` equal blocks over `stages` equal stages on H200s, `chunks` of them on each pipeline rank."""
    cuts = [round(index * blocks / stages) for index in range(stages + 1)]
    return Plan(
        model=model,
        signature="0" * 16,
        cluster=Cluster.of("h200", gpus=stages // chunks * data),
        global_batch=8 * microbatches * data,
        seq_len=512,
        precision="bf16",
        pipeline=stages // chunks,
        data=data,
        tensor=1,
        zero=2 if data > 1 else 0,
        schedule="1f1b" if chunks == 1 else "interleaved",
        micro_batch=8,
        num_microbatches=microbatches,
        block_names=("bert.embeddings", *(f"bert.encoder.layer.{i}" for i in range(blocks - 2)), "cls"),
        stages=tuple(_stage(index, first, end, stages) for index, (first, end) in enumerate(itertools.pairwise(cuts))),
        memory_limit_bytes=memory_limit_bytes,
        flops_per_step=10**15,
        prediction=Prediction(800.0, 640.0, 80.0, 20.0, 60.0, 0.086, 160e3, 0.43),
    )


def _stage(index: int, first: int, end: int, stages: int) -> Stage:
    parameters = (end - first) * 44_000_000
    memory = Memory(4 * parameters, 4 * parameters, 8 * parameters, (stages - index) * GIB, 2 * GIB)
    return Stage(index, first, end, parameters, 0.4 * (end - first), 0.9 * (end - first), 10**7, "none", memory)
