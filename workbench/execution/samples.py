"""Samples of text that a model writes while it trains, in the stages of the training.

Each token of a causal model costs a whole forward over the prompts and what was written: there is no cache of keys and
values, so that the blocks are those that train. Suffixes of tensor names: P prompts, S tokens, V tokens of the
vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from workbench.capture import Graph
from workbench.events import TextSample
from workbench.execution.blocks.context import mix
from workbench.execution.build import evaluation_programs
from workbench.execution.forward_pass import ForwardPass
from workbench.execution.step_log import StepLog
from workbench.execution.trainer import Trainer
from workbench.rundir import log_event

if TYPE_CHECKING:
    from workbench.data.sampling import PromptGroup

MOST_PROBABLE = 50
"""Number of tokens among which the next one is drawn; the default of `transformers` too."""
GUESSES = 5
"""Number of tokens that are recorded for each mask."""


class Sampler:
    """Lets the model answer the prompts of its experiment; the same texts on every rank. Writes them when they are due.

    Their time counts neither as training time nor as time of a step.
    """

    def __init__(self, trainer: Trainer, graphs: Sequence[Graph], events: Path | None = None) -> None:
        """`graphs` are those of `CapturedModel.samples`; `events` is None on all ranks but one."""
        experiment, plan = trainer.experiment, trainer.plan
        assert experiment.samples is not None
        self.trainer, self._settings, self._events = trainer, experiment.samples, events
        self._prompts = experiment.data.encoded(experiment, experiment.samples.prompts)
        self._groups = self._prompts.groups(experiment.samples.tokens, experiment.seq_len)
        self._device = trainer.context.device
        here, context, compact = trainer.coordinate, trainer.context, trainer.stages.compact
        programs = [evaluation_programs(plan, here, graph, context, compact=compact) for graph in graphs]
        self._passes = [ForwardPass(trainer, *each) for each in zip(graphs, programs, strict=True)]

    def is_due(self, step: int) -> bool:
        """Return True if samples are to be written after `step` steps."""
        return step % self._settings.every == 0 or step == self.trainer.experiment.total_steps

    def run(self, step: int, log: StepLog) -> None:
        """Let the model write after `step` steps; a collective."""
        log.flush()
        started = time.perf_counter()
        samples = self.samples()
        if self._events is not None:
            log_event(self._events, "samples", step=step, samples=samples, seconds=time.perf_counter() - started)
        log.restart_clock()

    def samples(self) -> list[TextSample]:
        """Return the answer to each prompt; a collective."""
        answers: dict[int, TextSample] = {}
        for group, forward in zip(self._groups, self._passes, strict=True):
            with forward.untouched_training():
                forward.context.label_counts = {}
                answers |= self._continued(group, forward) if self._prompts.is_causal else self._filled(group, forward)
        return [answers[prompt] for prompt in sorted(answers)]

    def _continued(self, group: PromptGroup, forward: ForwardPass) -> dict[int, TextSample]:
        """Return the continuations of prompts, which grow by one token in each forward."""
        texts = [list(self._prompts.ids[prompt]) for prompt in group.prompts]
        for number in range(self._settings.tokens):
            shown = [text[-group.length :] for text in texts]
            logits_PSV = self._logits(group, forward, shown)
            chosen_P = torch.zeros(len(texts), dtype=torch.int64)
            if logits_PSV is not None:
                for row, (prompt, text) in enumerate(zip(group.prompts, shown, strict=True)):
                    logits_V, seed = logits_PSV[row, len(text) - 1], self._settings.seed
                    chosen_P[row] = logits_V.argmax() if seed is None else drawn(logits_V, mix(seed, prompt, number))
            for text, token in zip(texts, self._agreed(chosen_P).tolist(), strict=True):
                text.append(int(token))
        return {
            prompt: {
                "prompt": self._prompts.texts[prompt],
                "text": self._prompts.continuation(text[len(self._prompts.ids[prompt]) :]),
            }
            for prompt, text in zip(group.prompts, texts, strict=True)
        }

    def _filled(self, group: PromptGroup, forward: ForwardPass) -> dict[int, TextSample]:
        """Return the most probable tokens at each mask of some prompts."""
        masks = [(row, at) for row, prompt in enumerate(group.prompts) for at in self._prompts.masks(prompt)]
        count = min(GUESSES, self._prompts.vocabulary)
        logits_PSV = self._logits(group, forward, [list(self._prompts.ids[prompt]) for prompt in group.prompts])
        found = torch.zeros(len(masks), count, 2, dtype=torch.float64)
        if logits_PSV is not None:
            for index, (row, at) in enumerate(masks):
                best = logits_PSV[row, at].softmax(-1).topk(count)
                found[index] = torch.stack([best.indices.double(), best.values], dim=-1)
        answers: dict[int, TextSample] = {
            prompt: {"prompt": self._prompts.texts[prompt], "masks": []} for prompt in group.prompts
        }
        for (row, _), guesses in zip(masks, self._agreed(found).tolist(), strict=True):
            named = [(self._prompts.token(int(token)), float(probability)) for token, probability in guesses]
            answers[group.prompts[row]]["masks"].append(named)
        return answers

    def _logits(self, group: PromptGroup, forward: ForwardPass, texts: Sequence[Sequence[int]]) -> torch.Tensor | None:
        """Return the logits (P, S, V) of one forward, in float64 on the host; None on ranks without the last stage."""
        input_ids_PS = torch.zeros(len(texts), group.length, dtype=torch.int64)
        for row, text in enumerate(texts):
            input_ids_PS[row, : len(text)] = torch.tensor(text)
        batch = {name: field.to(self._device) for name, field in self._prompts.fields(input_ids_PS).items()}
        result, ones = None, [torch.ones((), device=self._device) for _ in forward.graph.label_counts]
        for _, _, (_, logits) in forward.run(iter([batch]), [ones]):
            result = logits.reshape(len(texts), group.length, -1)[..., : self._prompts.vocabulary].double().cpu()
        return result

    def _agreed(self, value: torch.Tensor) -> torch.Tensor:
        """Return the value of the last stage's first replica on every rank."""
        coordinate = self.trainer.coordinate
        decides = self.trainer.stages.computes_loss and coordinate.data_rank == coordinate.tensor_rank == 0
        shared = (value if decides else torch.zeros_like(value)).to(self._device)
        dist.all_reduce(shared)
        return shared.cpu()


def drawn(logits_V: torch.Tensor, bits: int) -> int:
    """Return a token drawn among the 50 most probable ones; `bits` is a random integer of 63 bits."""
    best = logits_V.topk(min(MOST_PROBABLE, len(logits_V)))
    reached = best.values.softmax(-1).cumsum(-1) > bits / 2**63
    return int(best.indices[int(reached.int().argmax())])
