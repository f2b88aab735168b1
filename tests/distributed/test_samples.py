"""Samples of text equal plain PyTorch's under every plan, and writing them leaves training alone."""

from __future__ import annotations

import copy
import functools
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import workbench as wb
from tests.distributed.harness import Division, launch, trainer_of
from tests.distributed.test_evaluation import DIVISIONS, whole_tensors
from tests.exhaustive import EXHAUSTIVE
from workbench.capture import Graph
from workbench.capture.captured_model import CapturedModel
from workbench.execution.between_steps import Sampler
from workbench.execution.blocks.step_context import mix
from workbench.execution.trainer import Trainer

SEQ, STEPS, TOKENS = 24, 2, 9
SIZES: dict[str, Any] = {"vocab_size": 320, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_positions": SEQ}
MODELS = {
    "causal": lambda: wb.models.gpt2(**SIZES, dropout=0.1),
    "masked": lambda: wb.models.bert(**SIZES, dropout=0.1),
}
PROMPTS = {
    "causal": ("Birds", "Document 7 says that 7 birds sing in tree", "that"),
    "masked": ("7 [MASK] sing in tree [MASK].", "Document 3 [MASK].", "all [MASK] sing in tree [MASK]."),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for index in range(30):
        (folder / f"{index}.txt").write_text(
            f"Document {index} says that {index} birds sing in tree {index % 7}.\n" * 9
        )
    return folder


def experiment(name: str, folder: Path, seed: int | None, **changes: Any) -> wb.Experiment:
    fields = {
        "model": MODELS[name](),
        "data": wb.data.corpus(folder, vocab_size=300),
        "samples": wb.Samples(prompts=PROMPTS[name], tokens=TOKENS, seed=seed),
        "steps": STEPS,
        "global_batch": 8,
        "seq_len": SEQ,
        "learning_rate": 1e-2,
    }
    return wb.Experiment.of(**{**fields, **changes})


@functools.cache
def captured(name: str, folder: Path) -> tuple[nn.Module, Graph, Any]:
    """Return a model, its graph and the graphs that write its samples, which a seed does not change."""
    asked = experiment(name, folder, None)
    torch.manual_seed(0)
    model = asked.model.build()
    found = CapturedModel(asked, 2, model)
    return model, found.graph, found.samples(asked)


def train(name: str, division: Division, folder: Path, seed: int | None, samples: bool) -> tuple[Any, Any, Any, Any]:
    """Train; return the losses, the samples by Workbench and by plain PyTorch, and the parameters."""
    asked = experiment(name, folder, seed)
    model, graph, graphs = captured(name, folder)
    trainer = trainer_of(asked, copy.deepcopy(model), graph, division, 2)
    sampler = Sampler(trainer, graphs)
    dataset = asked.data.reads(asked).dataset()
    losses, found, expected = [], list[Any](), list[Any]()
    for step in range(STEPS):
        if samples:
            state = torch.get_rng_state()
            found += sampler.samples()
            assert torch.equal(state, torch.get_rng_state())
            expected += plain_samples(asked, trainer)
        first = step * 8 + trainer.coordinate.data_rank * trainer.samples
        batch = dataset.__getitems__(range(first, first + trainer.samples))
        losses.append(trainer.step(step, batch).scalars[0].item())
    return losses, found, expected, whole_tensors(trainer)


def plain_samples(asked: wb.Experiment, trainer: Trainer) -> list[dict[str, Any]]:
    """Return what the unmodified model in eval mode answers to each prompt by itself."""
    assert asked.samples is not None
    state = whole_tensors(trainer)
    with torch.random.fork_rng([]), torch.no_grad():
        model = asked.model.build().eval()
        model.load_state_dict(state, strict=False)
        prompts = asked.data.reads(asked).encoded(asked.samples.prompts)
        known = prompts.vocabulary
        answers = []
        for prompt, text in enumerate(prompts.texts):
            ids = list(prompts.ids[prompt])
            if not prompts.is_causal:
                logits = model(input_ids=torch.tensor([ids])).prediction_logits[0, :, :known].double()
                best = [logits[at].softmax(-1).topk(5) for at in prompts.masks(prompt)]
                answers.append({"prompt": text, "masks": [[*map(prompts.token, b.indices.tolist())] for b in best]})
                answers[-1]["probabilities"] = [value for b in best for value in b.values.tolist()]
                continue
            for number in range(TOKENS):
                logits = model(input_ids=torch.tensor([ids[-SEQ:]])).logits[0, -1, :known].double()
                if asked.samples.seed is None:
                    ids.append(int(logits.argmax()))
                    continue
                values, tokens = logits.sort(descending=True)
                random = mix(asked.samples.seed, prompt, number) / 2**63
                total = 0.0
                for value, token in zip(values[:50].softmax(0).tolist(), tokens.tolist(), strict=False):
                    total += value
                    if total > random:
                        ids.append(int(token))
                        break
            answers.append({"prompt": text, "text": prompts.continuation(ids[len(prompts.ids[prompt]) :])})
        return answers


def capture_both(folder: Path) -> None:
    for name in MODELS:
        captured(name, folder)


def both_ways(_rank: int, divisions: list[Division], folder: Path) -> None:
    """Check the samples of both kinds of models, and that training without them gives the same bits."""
    for division, (name, seed) in product(divisions, (("causal", 5), ("causal", None), ("masked", 0))):
        losses, found, expected, parameters = train(name, division, folder, seed, True)
        for answer, plain in zip(found, expected, strict=True):
            if "masks" in answer:
                assert [[token for token, _ in mask] for mask in answer["masks"]] == plain["masks"]
                probabilities = [value for mask in answer["masks"] for _, value in mask]
                assert probabilities == pytest.approx(plain["probabilities"], rel=1e-5)
            else:
                assert answer == plain
        assert len(found) == 3 * STEPS
        assert found[:3] != found[3:]
        if seed is not None:
            others, _, _, without = train(name, division, folder, seed, False)
            assert losses == others
            assert parameters.keys() == without.keys()
            assert all(torch.equal(parameters[key], without[key]) for key in parameters)


CHOSEN = ["one process", "PP 2", "DP 2", "ZeRO 3", "TP 2", "PP 2 × DP 2"]
TRIED = CHOSEN if EXHAUSTIVE else ["TP 2", "ZeRO 3", "PP 2"]


@pytest.mark.parametrize("world", sorted({DIVISIONS[name].world for name in TRIED}))
def test_samples_equal_plain_pytorch_and_leave_training_alone(
    world: int, folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path_factory.getbasetemp() / "home"))
    divisions = [DIVISIONS[name] for name in TRIED if DIVISIONS[name].world == world]
    launch(both_ways, world, divisions, folder, ahead=functools.partial(capture_both, folder))


@pytest.mark.representative
def test_a_run_records_the_text_that_its_model_writes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path / "runs"))
    asked = experiment("causal", folder, 0, steps=3, samples=wb.Samples(["Birds", "Document"], every=2, tokens=4))
    written = wb.runs.debug(asked, wb.plan(asked, wb.measure.local_cluster(1), micro_batch=4)).samples()
    assert written.steps == [0, 2, 3]
    assert [sample["prompt"] for sample in written[0]["samples"]] == ["Birds", "Document"]
    assert written.at(2.5) == written[1]
    assert written.at(-1) is None
    assert "<table>" in written._repr_html_()
    assert repr(written).count("\n") == 5
