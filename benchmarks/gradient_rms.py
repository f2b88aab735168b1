"""Measure how large the gradients of BERT-Large and of scaled BERT are, kind by kind of parameter, early in training.

    python benchmarks/gradient_rms.py TEXT OUT.json [large width depth] [--steps 10 300 1000] [--tiny]

The experiments are those of notebooks/bert_scaling_1xH100.ipynb: BERT-Large, and scaled BERT by the rule of width
(`width`) and by that of width and depth (`depth`). Each trains in this process, in bf16 on one GPU, with plain
PyTorch and the optimiser, samples and clipping of a run. At the steps named, the root mean square of the gradient
before clipping is written for each kind of parameter, beside the epsilon that AdamW adds to it. `--tiny` rehearses on
a CPU. Results are added to OUT.json.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

import workbench as wb
from workbench.base.validation import factor_of
from workbench.execution.gradients import clip_factor, scale_gradients, squared_norm
from workbench.optimizers.building import build_optimizer
from workbench.optimizers.parameters import learning_rate_factor

LARGE = {"hidden_size": 1024, "num_layers": 24, "num_heads": 16}
SCALED = {"hidden_size": 1920, "num_layers": 54, "num_heads": 30}
TINY = ({"hidden_size": 32, "num_layers": 2, "num_heads": 2}, {"hidden_size": 64, "num_layers": 4, "num_heads": 4})
FIXED = {"layout": "pre_ln", "next_sentence": False, "dropout": 0.0}
KINDS = {
    r"embeddings.*weight": "embeddings",
    r"attention\.self.*weight|qkv.*weight": "query, key and value matrices",
    r"attention\.output\.dense\.weight": "attention output matrices",
    r"intermediate.*weight": "first feed-forward matrices",
    r"layer\.\d+\.output\.dense\.weight": "second feed-forward matrices",
    r"cls.*dense\.weight": "matrix of the head",
}
"""Kind of parameter by its name; the first that matches counts, and the others are norms and biases."""
MICRO_BATCH = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text")
    parser.add_argument("out", type=Path)
    parser.add_argument("models", nargs="*", default=["large", "width", "depth"])
    parser.add_argument("--steps", nargs="*", type=int, default=[10, 300, 1000])
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    for name in asked.models:
        result = measured(experiment(name, asked.text, asked.tiny), asked.steps, asked.out, name)
        print(f"{name}\n{table(result)}", flush=True)


def experiment(name: str, text: str, tiny: bool) -> wb.Experiment:
    """Return the experiment of a name, with the schedule of 30 M tokens."""
    sizes = TINY if tiny else (LARGE, SCALED)
    text_sizes = {"vocab_size": 300 if tiny else 30522}
    large = wb.Experiment(
        model=wb.models.bert(**sizes[0], **FIXED, **text_sizes, name="bert-large"),
        data=wb.data.corpus(text, masked_share=0.3, **text_sizes),
        steps=3662,
        global_batch=64,
        seq_len=16 if tiny else 128,
        learning_rate=4e-4,
        optimizer=wb.Optimizer(betas=(0.9, 0.98), eps=1e-6, weight_decay=0.01, clip_norm=1.0),
        evaluation=wb.Evaluation(every=122, samples=512),
    )
    if name == "large":
        return large
    target = wb.models.bert(**sizes[1], **FIXED, **text_sizes, name="bert-scaled")
    rule = wb.models.scaling(large.model, target, depth_rule=name == "depth")
    return large.replace(model=rule.model, **rule.optimizer)


def measured(settings: wb.Experiment, steps: list[int], out: Path, name: str) -> dict[str, Any]:
    """Train up to the last of the steps, and return and write what the gradients were at each of them."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(settings.seed)
    module: Any = settings.model.build().to(device)
    parameters = dict(module.named_parameters())
    optimizer = build_optimizer(parameters, settings)
    peaks = [group["lr"] for group in optimizer.param_groups]
    scales = settings.optimizer.grad_norm_scale or {}
    divisors = {each: factor_of(each, scales) ** -2 for each in parameters}
    samples = settings.reading.dataset()
    found: dict[str, Any] = {}
    started = time.time()
    for step in range(max(steps) + 1):
        factor = learning_rate_factor(step, settings.warmup, settings.steps, "linear")
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * factor
        first = step * settings.global_batch
        batch = samples.__getitems__(list(range(first, first + settings.global_batch)))
        loss = backward(module, {key: value.to(device) for key, value in batch.items()})
        norm = squared_norm(((p.grad, divisors[each]) for each, p in parameters.items()), device).sqrt()
        if step in steps:
            found[str(step)] = {
                "loss": loss,
                "norm": float(norm),
                "clip_norm": settings.optimizer.clip_norm,
                "rms": rms_by_kind(parameters),
            }
            print(name, step, json.dumps(found[str(step)]), f"{time.time() - started:.0f} s", flush=True)
            write(out, name, result_of(settings, parameters, found, device))
        scale_gradients(parameters.values(), clip_factor(norm, settings.optimizer.clip_norm))
        optimizer.step()
        optimizer.zero_grad()
    return result_of(settings, parameters, found, device)


def backward(module: Any, batch: dict[str, Any]) -> float:
    """Add up the gradient of the mean loss over all labelled tokens of a batch, and return that loss."""
    labelled = int((batch["labels"] >= 0).sum())
    total = 0.0
    for start in range(0, len(batch["labels"]), MICRO_BATCH):
        part = {key: value[start : start + MICRO_BATCH] for key, value in batch.items()}
        with torch.autocast(part["labels"].device.type, torch.bfloat16):
            loss = module(**part).loss
        share = loss * (int((part["labels"] >= 0).sum()) / labelled)
        share.backward()
        total += float(share.detach())
    return total


def kind_of(name: str) -> str:
    """Return the kind of a parameter by its name."""
    if "bias" in name or re.search(r"LayerNorm|\bln\b", name):
        return "norms and biases"
    return next((kind for pattern, kind in KINDS.items() if re.search(pattern, name)), "norms and biases")


def rms_by_kind(parameters: dict[str, Any]) -> dict[str, float]:
    """Return the root mean square of the gradient over all parameters of each kind."""
    squares, counts = defaultdict[str, float](float), defaultdict[str, int](int)
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            squares[kind_of(name)] += float(parameter.grad.double().square().sum())
            counts[kind_of(name)] += parameter.numel()
    return {kind: (squares[kind] / counts[kind]) ** 0.5 for kind in sorted(squares)}


def result_of(settings: wb.Experiment, parameters: dict[str, Any], found: Any, device: torch.device) -> dict[str, Any]:
    """Return everything that is written about one model."""
    scales = settings.optimizer.eps_scale or {}
    eps = {kind_of(name): settings.optimizer.eps * factor_of(name, scales) for name in parameters}
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    return {"model": settings.model.name, "eps": eps, "steps": found, "device": gpu, "torch": torch.__version__}


def write(out: Path, name: str, result: dict[str, Any]) -> None:
    """Add the result of one model to the file."""
    earlier = json.loads(out.read_text()) if out.exists() else {}
    out.write_text(json.dumps({**earlier, name: result}, indent=1))


def table(result: dict[str, Any]) -> str:
    """Return a Markdown table of the gradients of one model."""
    steps = list(result["steps"])
    lines = [f"| kind | eps | {' | '.join(f'step {step}' for step in steps)} |", "|---|--:" + "|--:" * len(steps) + "|"]
    for kind, eps in sorted(result["eps"].items()):
        cells = [f"{result['steps'][step]['rms'].get(kind, float('nan')):.1e}" for step in steps]
        lines.append(f"| {kind} | {eps:.1e} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
