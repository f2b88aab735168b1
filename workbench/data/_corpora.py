"""`Corpus` and `HubText`: text as a value, tokenised on first use and sampled for the model's objective."""

from __future__ import annotations

import dataclasses
import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import DataError, suggestion
from workbench.tensors import TensorSpec
from workbench.units import count, duration

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from workbench.data._datasets import Batch, TextDataset
    from workbench.data._text import TextSource
    from workbench.data._tokens import TokenStore

DEMO = "demo"
TOKENIZER_KIND = {"mlm": "wordpiece", "mlm_nsp": "wordpiece", "clm": "bpe"}
"""By objective; other rooms and users speak of objectives only."""
SMALLEST_VOCABULARY = {"wordpiece": 64, "bpe": 300}
SHORTEST_SEQUENCE = 8
CHECKED_WHOLE_BYTES = 1 << 20
"""Texts up to this size are tokenised when an experiment is checked, so that its numbers are exact."""


@dataclass(frozen=True)
class Prepared:
    """What `prepare` found or made."""

    name: str
    samples: int
    """Different samples in one epoch."""
    tokens: int | None = None
    documents: int | None = None
    vocabulary: int | None = None
    folder: Path | None = None
    seconds: float = 0.0
    """That tokenising took, now or when it was done."""
    reused: bool = False

    def __repr__(self) -> str:
        if self.tokens is None:
            return f"Prepared({self.name}: {count(self.samples)} samples)"
        how = "from the cache" if self.reused else f"tokenised in {duration(self.seconds)}"
        return (
            f"Prepared({self.name}: {count(self.tokens)} tokens in {self.documents:,} documents, "
            f"vocabulary {self.vocabulary:,}, {how})"
        )


class _Text(ABC):
    """What packaged, local and hub text share: everything but where it comes from."""

    vocab_size: int
    objective: str | None

    @property
    @abstractmethod
    def name(self) -> str: ...

    @property
    def is_custom(self) -> bool:
        return False

    def check(self, experiment: Any) -> None:
        """Refuse what cannot feed the experiment, with the numbers; `DataError`. Trains and tokenises nothing large."""
        objective = self._objective(experiment)
        _require_seq_len(experiment.seq_len)
        _require_vocabulary(self, experiment.model, objective)
        source = self._source()
        if source.text_bytes <= CHECKED_WHOLE_BYTES:
            self.prepare(experiment, progress=False)

    def batch_specs(self, experiment: Any) -> dict[str, TensorSpec]:
        """Fields of one sample, without a batch dim, in the order the model takes them."""
        fields = ["input_ids", "labels"]
        if self._objective(experiment) == "mlm_nsp":
            fields = ["input_ids", "token_type_ids", "labels", "next_sentence_label"]
        seq_len = (experiment.seq_len,)
        return {name: TensorSpec(name, () if name == "next_sentence_label" else seq_len, "int64") for name in fields}

    def labelled_share(self, experiment: Any) -> float:
        """Share of the word labels that are not ignored, on average: what a masked model is asked of, or all."""
        from workbench.data._sampling import MASKED_SHARE

        return 1.0 if self._objective(experiment) == "clm" else MASKED_SHARE

    def examples(self, experiment: Any) -> Batch | None:
        """None: random tokens of the vocabulary do as well, and need no text to be tokenised."""
        del experiment
        return None

    def prepare(self, experiment: Any, progress: bool = True) -> Prepared:
        """Train the vocabulary and tokenise, unless the cache has both; with progress bars.

        The cache is keyed by the text's content, so a changed text is tokenised anew. Several processes
        may ask at once: one works and the others wait. Raises `DataError` for text that cannot be read,
        or holds less than one sequence.
        """
        store, reused = self._store(experiment, progress)
        samples = _samples(store, self._objective(experiment), experiment)
        if store.tokens < samples.width:
            raise DataError(
                f"{self.name} holds {store.tokens} tokens, fewer than the {samples.width} of one sequence "
                f"(seq_len={experiment.seq_len}). Give more text, or a shorter seq_len.",
                tokens=store.tokens,
                seq_len=experiment.seq_len,
            )
        return Prepared(
            name=self.name,
            samples=store.tokens // samples.width,
            tokens=store.tokens,
            documents=store.documents,
            vocabulary=store.vocabulary,
            folder=store.folder,
            seconds=store.seconds,
            reused=reused,
        )

    def dataset(self, experiment: Any) -> TextDataset:
        """Every sample of the training in order: item i depends on the seed and i only, never on a plan.

        Its length is `steps * global_batch`. `DataLoader(ds, batch_size=b, collate_fn=ds.collate)` yields
        dicts of int64 tensors, `(b, seq_len)` and `(b,)`. Prepares the text if nothing has.
        """
        from workbench.data._datasets import TextDataset

        self.prepare(experiment, progress=False)
        store, _ = self._store(experiment, progress=False)
        samples = _samples(store, self._objective(experiment), experiment)
        return TextDataset(samples, experiment.steps * experiment.global_batch)

    def tokenizer(self, experiment: Any) -> Tokenizer:
        """The trained tokeniser, to turn samples back into text."""
        return self._store(experiment, progress=False)[0].tokenizer()

    def _objective(self, experiment: Any) -> str:
        model = experiment.model
        if self.objective is None and model.objective is None:
            raise DataError(
                f"{self.name} is text, and nothing says what {model.name} learns from it. "
                'Give the corpus an objective ("mlm", "mlm_nsp" or "clm"), or pass your own dataset.',
                model=model.name,
            )
        if self.objective and model.objective and self.objective != model.objective:
            raise DataError(
                f"{self.name} is prepared for {self.objective!r}, but {model.name} learns {model.objective!r}. "
                "Leave the corpus's objective out, or change the model.",
                data=self.objective,
                model=model.objective,
            )
        return str(self.objective or model.objective)

    def _store(self, experiment: Any, progress: bool) -> tuple[TokenStore, bool]:
        from workbench.data import _tokens

        kind = TOKENIZER_KIND[self._objective(experiment)]
        return _tokens.tokenised(self.name, self._fingerprint(), self._source, kind, self.vocab_size, progress)

    def _fingerprint(self) -> str:
        return self._source().fingerprint()

    @abstractmethod
    def _source(self) -> TextSource: ...


@dataclass(frozen=True, kw_only=True)
class Corpus(_Text):
    """Packaged or local text."""

    path: str
    """`demo`, or the absolute path of a text file or of a folder of them."""
    vocab_size: int = 30522
    """At most; a small text does not fill it."""
    objective: str | None = None
    """`None` takes the model's."""

    def __post_init__(self) -> None:
        _require_values(self.vocab_size, self.objective)

    @property
    def name(self) -> str:
        return self.path if self.path == DEMO else Path(self.path).name.split(".")[0]

    def to_json(self) -> dict[str, Any]:
        return {"kind": "corpus", **dataclasses.asdict(self)}

    def _source(self) -> TextSource:
        from workbench.data import _text

        return _text.packaged_speeches() if self.path == DEMO else _text.local_text(self.path)


@dataclass(frozen=True, kw_only=True)
class HubText(_Text):
    """The text column of a Hugging Face dataset, each row one document."""

    repository: str
    config: str | None = None
    split: str = "train"
    text_column: str = "text"
    revision: str | None = None
    """A commit or tag of the dataset; pin it where the text may change under its name."""
    vocab_size: int = 30522
    objective: str | None = None

    def __post_init__(self) -> None:
        _require_values(self.vocab_size, self.objective)

    @property
    def name(self) -> str:
        return self.repository

    def check(self, experiment: Any) -> None:
        """Refuse what cannot feed the experiment; asks the hub, unless the text is tokenised already."""
        objective = self._objective(experiment)
        _require_seq_len(experiment.seq_len)
        _require_vocabulary(self, experiment.model, objective)
        from workbench.data import _hub, _tokens

        if not _tokens.is_tokenised(self._fingerprint(), TOKENIZER_KIND[objective], self.vocab_size):
            _hub.require_reachable(self)

    def to_json(self) -> dict[str, Any]:
        return {"kind": "hub", **dataclasses.asdict(self)}

    def _fingerprint(self) -> str:
        parts = [self.repository, self.config, self.split, self.text_column, self.revision]
        if (folder := Path(self.repository)).is_dir():
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            parts += [f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files]
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def _source(self) -> TextSource:
        from workbench.data import _hub

        return _hub.rows(self, self._fingerprint())


def _samples(store: TokenStore, objective: str, experiment: Any) -> Any:
    from workbench.data._sampling import SAMPLES

    return SAMPLES[objective](store, experiment.seq_len, experiment.seed)


def _require_values(vocab_size: int, objective: str | None) -> None:
    if vocab_size < SMALLEST_VOCABULARY["wordpiece"]:
        raise DataError(
            f"vocab_size={vocab_size} leaves no room for words. Give at least {SMALLEST_VOCABULARY['wordpiece']}.",
            vocab_size=vocab_size,
        )
    if objective is not None and objective not in TOKENIZER_KIND:
        raise DataError(
            f"objective={objective!r} is not one that text can be prepared for. "
            f"{suggestion(str(objective), TOKENIZER_KIND)}",
            objective=objective,
        )


def _require_seq_len(seq_len: int) -> None:
    if seq_len < SHORTEST_SEQUENCE:
        raise DataError(
            f"seq_len={seq_len} is too short for a sample of text. Give at least {SHORTEST_SEQUENCE}.",
            seq_len=seq_len,
        )


def _require_vocabulary(data: _Text, model: Any, objective: str) -> None:
    if model.vocab_size is not None and data.vocab_size > model.vocab_size:
        raise DataError(
            f"{data.name} is tokenised into a vocabulary of {data.vocab_size:,}, but {model.name} embeds "
            f"{model.vocab_size:,} tokens. Give the data vocab_size={model.vocab_size}, or the model "
            f"vocab_size={data.vocab_size}.",
            data=data.vocab_size,
            model=model.vocab_size,
        )
    least = SMALLEST_VOCABULARY[TOKENIZER_KIND[objective]]
    if data.vocab_size < least:
        raise DataError(
            f"vocab_size={data.vocab_size} is less than the {least} that byte-level tokens need. "
            f"Give the data at least vocab_size={least}.",
            vocab_size=data.vocab_size,
        )
