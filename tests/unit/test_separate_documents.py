"""Documents of one sample that are read apart equal samples of their own, in every kind of model, and others say so."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional

import workbench as wb
from workbench.base.errors import DataError, InvalidExperiment
from workbench.data.store import TokenStore, document_runs
from workbench.execution.comparison import check_numbers
from workbench.experiment import Experiment
from workbench.planning.planner import check_documents

LENGTH, WORDS = 32, 400
SIZES = {"hidden_size": 32, "num_layers": 2, "num_heads": 2}
OPTIONS: dict[str, Any] = {**SIZES, "vocab_size": WORDS, "max_positions": LENGTH, "dropout": 0.0}
MODELS = {
    "gpt2": wb.models.gpt2(**OPTIONS),
    "opt": wb.models.opt(**OPTIONS),
    "bert": wb.models.bert(**OPTIONS, next_sentence=False),
    "bert that adds masks to scores": wb.models.bert(**OPTIONS, next_sentence=False, layout="pre_ln"),
}


@pytest.fixture(scope="module")
def documents() -> list[str]:
    """Texts of 1 to 29 words, some of them shorter and some longer than a sample."""
    draw = np.random.default_rng(0)
    words = [
        "alpha",
        "beta",
        "gamma",
        "delta",
        "epsilon",
        "zeta",
        "eta",
        "theta",
        "iota",
        "kappa",
        "lambda",
        "mu",
        "nu",
        "xi",
    ]
    return [" ".join(draw.choice(words, int(draw.integers(1, 30)))) + f" {number}" for number in range(400)]


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_HOME", str(tmp_path_factory.mktemp("home")))
        yield


def asked(documents: list[str], model: Any, apart: bool = True, **changes: Any) -> Experiment:
    """Return an experiment on documents that are read apart, or not; `changes` are those of the text."""
    changes = {"vocab_size": WORDS, **changes}
    text = wb.data.documents(documents, separate_documents=apart, progress=False, **changes)
    return Experiment.of(model=model, data=text, seq_len=LENGTH, global_batch=8, steps=2)


def tokenizer_of(documents: list[str]) -> str:
    experiment = asked(documents, MODELS["gpt2"])
    return str(experiment.data.reads(experiment).tokenizer_folder())


def batch_of(experiment: Experiment) -> dict[str, torch.Tensor]:
    return experiment.data.reads(experiment).dataset().__getitems__(range(8))


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_of_packed_documents_are_those_of_each_as_a_sample_of_its_own(
    documents: list[str], name: str
) -> None:
    experiment, is_causal = asked(documents, MODELS[name]), MODELS[name].objective == "clm"
    batch, packed = batch_of(experiment), experiment.build()
    loss = packed(**batch).loss
    loss.backward()
    loss = loss.detach()
    # The loop: one piece of a document after the other through the model as transformers builds it
    plain = asked(documents, MODELS[name], apart=False).build()
    total, count = torch.zeros(()), 0
    for ids, places, labels in zip(batch["input_ids"], batch["position_ids"], batch["labels"], strict=True):
        begins = [*torch.nonzero(places == 0).flatten().tolist(), LENGTH]
        for begin, end in itertools.pairwise(begins):
            logits, wanted = plain(input_ids=ids[None, begin:end]).logits[0], labels[begin:end]
            if is_causal:
                logits, wanted = logits[:-1], wanted[1:]
            total = total + functional.cross_entropy(logits, wanted, reduction="sum")
            count += int((wanted != -100).sum())
    (total / count).backward()
    assert float(loss) == pytest.approx(float(total.detach() / count), rel=1e-6)
    assert len(begins) > 2, "no sample of several documents"
    for (key, own), (other, theirs) in zip(packed.named_parameters(), plain.named_parameters(), strict=True):
        assert key == other
        torch.testing.assert_close(own.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_positions_begin_anew_at_each_document_and_its_first_token_is_no_label(documents: list[str]) -> None:
    experiment = asked(documents, MODELS["gpt2"])
    dataset = experiment.data.reads(experiment).dataset()
    store, batch = dataset.samples.store, dataset.__getitems__(range(8))
    first_B = dataset.samples.starts(np.arange(8))
    begins = set(store.document_starts.tolist())
    for row, first in enumerate(first_B.tolist()):
        place = 0
        for at in range(LENGTH):
            place = 0 if at == 0 or first + at in begins else place + 1
            assert batch["position_ids"][row, at] == place
            assert batch["labels"][row, at] == (-100 if place == 0 else batch["input_ids"][row, at])
    assert list(batch) == list(experiment.data.reads(experiment).batch_specs())


def test_every_document_ends_also_the_last_one_and_masked_models_frame_each(documents: list[str]) -> None:
    for model, begin, end in (("gpt2", None, "</s>"), ("bert", "[CLS]", "[SEP]")):
        experiment = asked(documents, MODELS[model])
        reading = experiment.data.reads(experiment)
        store, tokenizer = reading.dataset().samples.store, reading.text_tokenizer()
        edges = [*store.document_starts.tolist(), store.tokens]
        assert len(edges) == len(documents) + 1
        ends = [tokenizer.token(int(store.ids[edge - 1])) for edge in edges[1:]]
        assert len(set(ends)) == 1, ends
        assert ends.count(ends[0]) == len(documents)
        assert end == ends[0] or begin is None  # the name of the end of a causal model is the tokeniser's
        if begin is not None:
            assert {tokenizer.token(int(store.ids[edge])) for edge in edges[:-1]} == {begin}
    batch = batch_of(asked(documents, MODELS["bert"], masked_share=0.8))
    special = (batch["input_ids"] == 2) | (batch["input_ids"] == 3)  # [CLS] and [SEP]
    assert special.any()
    assert (batch["labels"][special] == -100).all()


def test_the_end_of_the_last_document_changes_nothing_that_is_held_out(documents: list[str]) -> None:
    experiment = asked(documents, MODELS["gpt2"], apart=False)
    store: TokenStore = experiment.data.reads(experiment).dataset().samples.store
    edges, hashes = document_runs(store.ids[:-1], store.document_starts, store.tokens - 1)
    assert np.array_equal(store.runs[1], hashes)
    assert np.array_equal(store.runs[0][:-1], edges[:-1])
    assert store.runs[0][-1] == store.tokens


# Models of the user's


class Own(nn.Module):
    """A causal model with learned positions."""

    def __init__(self, uses_mask: bool = True, uses_positions: bool = True) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(WORDS, 16), nn.Embedding(LENGTH, 16)
        self.projection, self.head = nn.Linear(16, 48), nn.Linear(16, WORDS)
        self.uses_mask, self.uses_positions = uses_mask, uses_positions

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> torch.Tensor:
        places = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        if self.uses_positions and position_ids is not None:
            places = position_ids
        value = self.tokens(input_ids) + self.places(places)
        query, key, content = self.projection(value).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        mask = attention_mask if self.uses_mask else None
        mixed = functional.scaled_dot_product_attention(query, key, content, attn_mask=mask, is_causal=mask is None)
        logits = self.head(value + mixed.transpose(1, 2).flatten(2))
        assert labels is not None
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class WithoutMask(Own):
    def forward(self, input_ids: Any, position_ids: Any, labels: Any) -> torch.Tensor:  # type: ignore[override]
        return super().forward(input_ids, None, position_ids, labels)


class WithoutPositions(Own):
    """One whose positions are learned; with the same position everywhere, it has none."""

    def __init__(self, has_none: bool = False) -> None:
        super().__init__()
        self.has_none = has_none

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any) -> torch.Tensor:  # type: ignore[override]
        places = torch.zeros_like(input_ids) if self.has_none else None
        return super().forward(input_ids, attention_mask, places, labels)


class Shifted(Own):
    """One that reads the token before, whatever the mask says."""

    def forward(self, input_ids: Any, position_ids: Any, labels: Any, **_: Any) -> torch.Tensor:  # type: ignore[override]
        value = self.tokens(input_ids) + self.places(position_ids)
        logits = self.head(value + functional.pad(value, (0, 0, 1, 0))[:, :-1])
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class PassingOn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Own()

    def forward(self, **batch: Any) -> Any:
        return self.inner(**batch)


class WithNeither(Own):
    def forward(self, input_ids: Any, labels: Any) -> torch.Tensor:  # type: ignore[override]
        return super().forward(input_ids, None, None, labels)


@pytest.mark.parametrize(
    ("make", "is_right"),
    [
        (Own, True),
        (PassingOn, True),
        (lambda: WithoutPositions(has_none=True), True),
        (lambda: Own(uses_mask=False), False),
        (lambda: Own(uses_positions=False), False),
        (WithoutMask, False),
        (WithoutPositions, False),
        (Shifted, False),
    ],
)
def test_numbers_show_whether_a_model_of_the_users_reads_documents_apart(
    documents: list[str], make: Callable[[], nn.Module], is_right: bool
) -> None:
    experiment = asked(documents, make, objective="clm")
    if is_right:
        check_documents(experiment, experiment.build)
        return
    with pytest.raises(InvalidExperiment, match="does not read the documents of a sample apart"):
        check_documents(experiment, experiment.build)
    check_documents(asked(documents, make, apart=False, objective="clm"), experiment.build)


def test_a_model_that_mixes_documents_is_not_planned_and_a_large_one_not_trained(
    documents: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidExperiment, match="takes input_ids, labels, and samples with separate_documents=True"):
        wb.plan(asked(documents, WithNeither, objective="clm"), wb.Cluster.of("h200", gpus=1))
    wrong = asked(documents, WithoutMask, objective="clm")
    with pytest.raises(InvalidExperiment, match="does not read the documents of a sample apart"):
        wb.plan(wrong, wb.Cluster.of("h200", gpus=1))
    right = asked(documents, Own, objective="clm")
    plan = wb.plan(right, wb.Cluster.of("h200", gpus=1))
    monkeypatch.setattr("workbench.execution.comparison.MOST_TRIED_BY_PLAN", 0)
    from workbench.capture.captured_model import CapturedModel

    model_captured = CapturedModel(right, plan.micro_batch)
    with pytest.raises(InvalidExperiment, match="does not read the documents of a sample apart"):
        check_numbers(wrong, plan, model_captured, wrong.build())


@pytest.mark.parametrize(
    ("family", "changes", "is_right"),
    [
        ("Llama", {"num_key_value_heads": 1}, True),
        ("Mistral", {"num_key_value_heads": 1, "sliding_window": 8}, False),  # which a mask that is given replaces
        ("Roberta", {"is_decoder": True, "max_position_embeddings": LENGTH + 2}, False),  # which counts from 2
    ],
)
def test_pretrained_models_are_refused_that_read_a_text_otherwise_if_it_is_told_apart(
    documents: list[str], tmp_path: Path, family: str, changes: dict[str, Any], is_right: bool
) -> None:
    sizes = {**SIZES, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": WORDS, "intermediate_size": 32}
    sizes |= {"max_position_embeddings": LENGTH, "use_cache": False, **changes}
    del sizes["num_layers"], sizes["num_heads"]
    config = getattr(transformers, f"{family}Config")(**sizes)
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(tokenizer_of(documents)).save_pretrained(tmp_path)
    model = wb.models.pretrained(tmp_path, task="clm")
    experiment = asked(documents, model, tokenizer=str(tmp_path), vocab_size=None)
    if is_right:
        check_documents(experiment, experiment.build)
        return
    with pytest.raises(
        InvalidExperiment, match=r"reads a text otherwise if it is given positions from 0 on and a mask"
    ):
        check_documents(experiment, experiment.build)


def test_the_plan_prices_attention_with_a_mask_and_later_stages_make_it_anew(documents: list[str]) -> None:
    from workbench.capture.captured_model import CapturedModel

    packed, whole = (asked(documents, MODELS["gpt2"], apart) for apart in (True, False))
    graphs = [CapturedModel(each, 2).graph for each in (packed, whole)]
    assert [len(block.receives) for block in graphs[0].blocks] == [len(block.receives) for block in graphs[1].blocks]
    assert "position_ids" in graphs[0].blocks[2].inputs
    one = wb.Cluster.of("h200", gpus=1)
    plans = [wb.plan(each, one, recompute="none", micro_batch=8) for each in (packed, whole)]
    # What a boolean mask becomes in the kernel is kept for the backward of each layer, in two bytes or four.
    bias = 8 * LENGTH**2 * SIZES["num_layers"]
    kept = [plan.stages[0].memory.activations for plan in plans]
    assert 2 * bias <= kept[0] - kept[1] <= 2 * 4 * bias
    assert plans[0].prediction.step_ms >= plans[1].prediction.step_ms


def test_samples_that_cannot_be_told_apart_are_refused_with_a_way_out(documents: list[str]) -> None:
    paired = asked(documents, wb.models.bert(**OPTIONS))
    with pytest.raises(DataError, match=r"read for 'mlm_nsp'.*or choose the objective 'clm' or 'mlm'"):
        paired.data.reads(paired).check()
    streamed = asked(documents, MODELS["gpt2"], streaming=True)
    with pytest.raises(DataError, match=r"no places of documents.*Remove streaming=True"):
        streamed.data.reads(streamed).check()
