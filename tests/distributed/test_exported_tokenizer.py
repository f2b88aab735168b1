"""Exports that carry the tokeniser of their text, as pipelines of `transformers` read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import workbench as wb
from tests.distributed import real_worker

TEXT = """ガラスのコップと、ﾊﾟﾝの値段がひどく上がった。
山の上では、がんばった人だけが湯気の立つ味噌汁を飲んだ。

東京都の電車は、雨のぶんだけ遅れて着く。
The café is open.

"""
PROMPT = "ガラスのコップと、ﾊﾟﾝの値段が"


def tiny_t5() -> torch.nn.Module:
    config = transformers.T5Config(
        vocab_size=420,
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=1,
        num_heads=2,
        use_cache=False,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home"))
    path = tmp_path / "text.txt"
    path.write_text(TEXT * 40)
    return path


def exported(model: Any, data: Any, folder: Path) -> tuple[Path, wb.Experiment]:
    """Train for a few steps with weights that are drawn large, so that answers differ, and export the model."""
    experiment = wb.Experiment(
        model=model, data=data, steps=4, global_batch=4, seq_len=32, checkpoints=wb.Checkpoints(every=4)
    )
    run = wb.runs.debug(experiment, real_worker.plan(experiment), directory=folder / "run", progress=False)
    files = run.export(folder / "model")
    assert {"config.json", "tokenizer_config.json"} <= {file.name for file in files}
    return folder / "model", experiment


def japanese_characters(folder: Path) -> Any:
    """Return a tokeniser that is written in Python, as those with a morphological analyser are."""
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(set(TEXT))]))
    return transformers.BertJapaneseTokenizer(
        str(folder / "vocab.txt"), word_tokenizer_type="basic", subword_tokenizer_type="character"
    )


@pytest.mark.parametrize("is_given", [False, True], ids=["trained", "in Python"])
def test_a_pipeline_fills_the_masks_of_an_exported_model(text: Path, tmp_path: Path, is_given: bool) -> None:
    data = wb.data.corpus(text, tokenizer=japanese_characters(tmp_path) if is_given else None, whole_words=True)
    data = data if is_given else wb.data.corpus(text, vocab_size=300)
    model = wb.models.bert(32, 2, 2, vocab_size=data.vocab_size, max_positions=48, initializer_range=0.3)
    folder, experiment = exported(model, data, tmp_path)
    pipeline = transformers.pipeline("fill-mask", str(folder))
    prompt = f"{PROMPT}[MASK]。"
    encoded = data.reads(experiment).encoded([prompt])
    assert pipeline.tokenizer(prompt).input_ids == list(encoded.ids[0])
    assert pipeline.tokenizer.decode(encoded.ids[0]).replace(" ", "").startswith("[CLS]ガラスのコップ")
    best = pipeline(prompt)
    logits = pipeline.model(torch.tensor([encoded.ids[0]])).logits[0, encoded.masks(0)[0]]
    assert [answer["token"] for answer in best] == logits.topk(5).indices.tolist()
    if not is_given:
        assert len(pipeline.tokenizer("東京都 " * 99, truncation=True).input_ids) == 48


@pytest.mark.representative
def test_a_pipeline_continues_text_with_an_exported_model_until_the_end_of_a_document(
    text: Path, tmp_path: Path
) -> None:
    data = wb.data.corpus(text, vocab_size=400)
    model = wb.models.gpt2(32, 2, 2, vocab_size=400, max_positions=48, initializer_range=0.3)
    folder, experiment = exported(model, data, tmp_path)
    pipeline = transformers.pipeline("text-generation", str(folder))
    [answer] = pipeline(PROMPT, max_new_tokens=6, do_sample=False)
    ids = list(data.reads(experiment).encoded([PROMPT]).ids[0])
    for _ in range(6):
        ids.append(int(pipeline.model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert answer["generated_text"] == data.reads(experiment).text_tokenizer().decode(ids)
    assert answer["generated_text"].startswith(PROMPT)
    assert pipeline.model.generation_config.eos_token_id == pipeline.tokenizer.eos_token_id == 0


def test_a_sequence_to_sequence_model_trains_on_text_and_restores_its_spans_with_the_exported_tokeniser(
    text: Path, tmp_path: Path
) -> None:
    data = wb.data.corpus(text, vocab_size=420, objective="seq2seq")
    folder, experiment = exported(tiny_t5, data, tmp_path)
    loaded = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    batch = data.reads(experiment).dataset()[3]
    shown = tokenizer.decode(batch["input_ids"], skip_special_tokens=False)
    assert "<extra_id_0>" in shown
    assert shown.endswith("</s>")
    assert tokenizer(shown.removesuffix("</s>")).input_ids == batch["input_ids"].tolist()
    assert loaded(**{name: torch.as_tensor(field)[None] for name, field in batch.items()}).loss.isfinite()
