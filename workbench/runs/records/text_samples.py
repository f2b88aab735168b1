"""The text that a model wrote while it trained, as a table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from workbench.events import SamplesEvent, TextSample
from workbench.tables import STYLE, html_table

SHOWN_STEPS = 5
"""Number of steps that the table of a notebook shows: the first, the last, and some between."""


@dataclass(frozen=True, repr=False)
class TextSamples:
    """Samples of text of one run, in order of the step after which they were written."""

    events: tuple[SamplesEvent, ...] = field(repr=False, default=())

    @property
    def steps(self) -> list[int]:
        """Return the steps after which samples were written."""
        return [event["step"] for event in self.events]

    def at(self, step: float) -> SamplesEvent | None:
        """Return the last samples that were written at or before a step; None if there are none."""
        return next((event for event in reversed(self.events) if event["step"] <= step), None)

    def __len__(self) -> int:
        return len(self.events)

    def __iter__(self) -> Iterator[SamplesEvent]:
        return iter(self.events)

    def __getitem__(self, index: int) -> SamplesEvent:
        return self.events[index]

    def __repr__(self) -> str:
        if not self.events:
            return "TextSamples(none yet)"
        written = ((event["step"], each) for event in self.events for each in event["samples"])
        return "\n".join(f"step {step:,}: {sample['prompt']} | {answer(sample)}" for step, sample in written)

    def _repr_html_(self) -> str:
        last = len(self.events) - 1
        shown = sorted({round(index * last / (SHOWN_STEPS - 1)) for index in range(SHOWN_STEPS)}) if last >= 0 else []
        return table_html([self.events[index] for index in shown])


def answer(sample: TextSample) -> str:
    """Return what the model wrote: a text, or the tokens for each mask with their probabilities in percent."""
    if "masks" not in sample:
        return sample.get("text", "")
    guesses = (", ".join(f"{token} {probability:.1%}" for token, probability in mask) for mask in sample["masks"])
    return "; ".join(guesses)


def table_html(events: list[SamplesEvent]) -> str:
    """Return a table of samples for a notebook; a rising step from top to bottom."""
    rows = [(f"{event['step']:,}", sample["prompt"], answer(sample)) for event in events for sample in event["samples"]]
    if not rows:
        return "no samples yet"
    return html_table(("step", "prompt", "what the model wrote"), rows, f"{STYLE};white-space:pre-wrap")
