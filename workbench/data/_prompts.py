"""Prompts of a user as token ids, for the samples of text that a model writes while it trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from workbench.data._sampling import IGNORED
from workbench.data._tokenizer import SpecialTokens, TextTokenizer
from workbench.errors import DataError
from workbench.tensors import TensorSpec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class PromptGroup:
    """Prompts that pass through the model together, as one batch of `length` tokens."""

    prompts: tuple[int, ...]
    length: int
    specs: dict[str, TensorSpec]
    """Fields of the batch."""


@dataclass(frozen=True)
class EncodedPrompts:
    """Prompts as token ids, and the tokeniser that turns ids back into text."""

    objective: str
    """`clm`, `mlm` or `mlm_nsp`."""
    texts: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]
    """Token ids of each prompt; those of a masked model are `[CLS] prompt [SEP]`."""
    tokenizer: TextTokenizer
    tokens: SpecialTokens

    @property
    def is_causal(self) -> bool:
        return self.objective == "clm"

    @property
    def vocabulary(self) -> int:
        """Number of ids of the tokeniser; a model may have more."""
        return self.tokens.vocabulary

    def groups(self, tokens: int, seq_len: int) -> list[PromptGroup]:
        """Return the prompts in groups of one length.

        A causal model reads all prompts together, padded to the longest with the `tokens` that it writes. A masked
        model would also read padding, so that only prompts of equal length go together.
        """
        import torch

        room = min(seq_len, max(map(len, self.ids)) + tokens)
        lengths = [room if self.is_causal else len(ids) for ids in self.ids]
        groups = []
        for length in dict.fromkeys(lengths):
            prompts = tuple(at for at, own in enumerate(lengths) if own == length)
            fields = self.fields(torch.empty(len(prompts), length, dtype=torch.int64))
            specs = {name: TensorSpec(name, tuple(field.shape), "int64") for name, field in fields.items()}
            groups.append(PromptGroup(prompts, length, specs))
        return groups

    def masks(self, prompt: int) -> tuple[int, ...]:
        """Return the positions of the masks in a prompt."""
        return tuple(at for at, token in enumerate(self.ids[prompt]) if token == self.tokens.mask)

    def fields(self, input_ids_PS: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a batch of the model's fields around `input_ids`, with labels that a masked model ignores."""
        import torch

        if self.is_causal:
            return {"input_ids": input_ids_PS, "labels": input_ids_PS.clone()}
        labels_PS = torch.full_like(input_ids_PS, IGNORED)
        if self.objective == "mlm":
            return {"input_ids": input_ids_PS, "labels": labels_PS}
        return {
            "input_ids": input_ids_PS,
            "token_type_ids": torch.zeros_like(input_ids_PS),
            "labels": labels_PS,
            "next_sentence_label": torch.zeros_like(input_ids_PS[:, 0]),
        }

    def continuation(self, ids: Sequence[int]) -> str:
        """Return the text of the tokens that a causal model wrote, up to the end of the document."""
        end = self.tokens.end
        return self.tokenizer.decode(ids[: ids.index(end)] if end is not None and end in ids else ids)

    def token(self, number: int) -> str:
        """Return the text of one token."""
        return self.tokenizer.token(number)


def encode(
    prompts: Sequence[str], tokenizer: TextTokenizer, tokens: SpecialTokens, objective: str, seq_len: int
) -> EncodedPrompts:
    """Encode prompts; raise `DataError` for one that is empty or too long, or that has no mask for a masked model."""
    if objective == "seq2seq":
        raise DataError(
            "Samples of text are written by causal and masked models, and this one is sequence-to-sequence. Remove "
            "samples, and try an export with transformers."
        )
    encoded = []
    for prompt in prompts:
        ids = tuple(tokenizer.encode(prompt))
        if objective != "clm":
            assert tokens.mask is not None
            if tokens.mask not in ids:
                mask = tokenizer.token(tokens.mask)
                raise DataError(
                    f"The prompt {prompt!r} has no {mask}, and the model fills masks. Write one where a word is to be "
                    f'found, such as "The capital of France is {mask}."'
                )
            ids = (*tokens.prefix, *ids, *tokens.suffix)
        elif tokens.begin is not None and ids:
            ids = (tokens.begin, *ids)
        if not ids:
            raise DataError(f"The prompt {prompt!r} has no token. Give at least one word.")
        if len(ids) > seq_len:
            raise DataError(
                f"The prompt {prompt[:60]!r} has {len(ids)} tokens, and the model reads {seq_len} (seq_len). Shorten "
                "the prompt."
            )
        encoded.append(ids)
    return EncodedPrompts(objective, tuple(prompts), tuple(encoded), tokenizer, tokens)
