"""Computations with a model between two steps of its training: held-out loss, samples of text, sparsity.

Evaluations and samples are forwards in eval mode, in the stages and over the parameters of the training. The model is
captured again in eval mode. Meanwhile the blocks of the stages run that code, so that sharding, tensor parallelism,
shared parameters and weight copies are those of the training. Nothing that training reads is changed, and the time
counts neither as training time nor as time of a step.

Suffixes of tensor names: P prompts, S tokens, V tokens of the vocabulary, R rows and C columns of blocks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from workbench.capture import Graph
from workbench.capture.blocks.hidden_matrices import projections
from workbench.capture.losses import count_labels, on_device
from workbench.capture.outputs import sum_and_count
from workbench.data.datasets import untouched_generators
from workbench.execution.blocks.block_module import BlockProgram
from workbench.execution.blocks.loss_runners import LabelCounter
from workbench.execution.blocks.step_context import Values, mix
from workbench.execution.build import evaluation_programs
from workbench.execution.parallel.pipeline import Batch
from workbench.execution.parallel.sharding import end_forward_only
from workbench.execution.parallel.stage import written_buffers
from workbench.execution.step_log import StepLog, flops_of
from workbench.execution.trainer import Trainer, layers_of
from workbench.optimizers.expected_update import ExpectedUpdates
from workbench.record.events import TextSample
from workbench.record.rundir import log_event
from workbench.sparsity import Dynamic
from workbench.sparsity.pattern import is_present

if TYPE_CHECKING:
    from workbench.data.sampling import PromptGroup

# Forward passes


class ForwardPass:
    """Runs micro-batches through the stages of all ranks, without a backward."""

    def __init__(self, trainer: Trainer, graph: Graph, programs: Sequence[Sequence[BlockProgram]]) -> None:
        """`graph` is the model in eval mode, and `programs` its code for each block of this rank's stages."""
        self.trainer, self.graph, self.programs = trainer, graph, programs
        self._plan, self._forward_only = trainer.plan, trainer.forward_only
        self.context = trainer.context
        self.blocks = [program.block for stage in programs for program in stage]

    def run(
        self, batches: Iterator[Batch], denominators: Sequence[list[torch.Tensor]]
    ) -> Iterator[tuple[int, Batch, Values]]:
        """Compute a micro-batch for each of `denominators`; on the last stage's ranks, yield each number and result.

        The results are the loss, divided by the plan's number of micro-batches, and the graph's outputs. All ranks
        must exhaust the iterator, within `untouched_training`: it is a collective. `denominators` has the loss
        denominators of each micro-batch. If the graph gathers samples, each batch is a global batch, of which each
        replica computes its micro-batches.
        """
        if not self._plan.gathers:
            yield from self._forward_only.run(batches, denominators)
            return
        size = self.trainer.samples
        first = self.trainer.coordinate.data_rank * size
        for number, self.context.loss_denominators in enumerate(denominators):
            batch = next(batches)
            own = {name: field[first : first + size] for name, field in batch.items()}
            result = self._forward_only.over_whole_batch(own, trains=False)
            if result is not None:
                yield number, batch, result

    @contextmanager
    def untouched_training(self) -> Iterator[None]:
        """Run the graph's code meanwhile, without gradients; afterwards everything that training reads is as before.

        Where the experiment averages weights, the code computes with the average.
        """
        average = self.trainer.average
        with nullcontext() if average is None else average.in_place_of_weights():
            self.trainer.prepare_forward()
            context, stages, coordinate = self.context, self.trainer.stages.stages, self.trainer.coordinate
            modules = [list(stage.block_modules()) for stage in stages]
            before = [
                (stage.graph, [module.program for module in own]) for stage, own in zip(stages, modules, strict=True)
            ]
            saved, held = dict(vars(context)), self.trainer.stages.model_buffers()
            trained = sorted(written_buffers(module.block for own in modules for module in own))
            names = {*trained, *(name for name in written_buffers(self.blocks) if name in held)}
            buffers = [(held[name], held[name].clone()) for name in names]
            if coordinate.data > 1:  # each replica has running averages of its own, and a checkpoint those of the first
                for name in trained:
                    value = held[name].contiguous()
                    dist.broadcast(value, group=coordinate.data_group, group_src=0)
                    held[name].copy_(value)
            context.first_microbatch, context.cuda_graphs, context.action_log, context.scalars = 0, None, None, None
            try:
                for stage, own, programs in zip(stages, modules, self.programs, strict=True):
                    stage.use(self.graph)
                    for module, program in zip(own, programs, strict=True):
                        module.use(program)
                with untouched_generators(context.device), torch.no_grad():
                    yield
            finally:
                vars(context).update(saved)
                for stage, own, (graph, programs) in zip(stages, modules, before, strict=True):
                    stage.use(graph)
                    for module, program in zip(own, programs, strict=True):
                        module.use(program)
                    end_forward_only(stage)
                for buffer, value in buffers:
                    buffer.copy_(value)


IN_MEMORY = 2**28
"""Largest size in bytes of a rank's held-out samples that stay in memory between two evaluations."""


@dataclass(frozen=True)
class WeightedMicroBatch:
    """Samples of one micro-batch, and the weight of its loss in the sum over the set; a weight of 0 is padding."""

    samples: tuple[int, ...]
    weight: float


def micro_batches(samples: int, size: int, replicas: int) -> list[WeightedMicroBatch]:
    """Divide a set into micro-batches of `size`, equally many for each replica, whose weighted sum is the set's.

    The captured model takes whole micro-batches only. Copies of sample 0 fill the last one, and a micro-batch of
    nothing but sample 0, with a negative weight, takes their loss out of the sum again.
    """
    whole, rest = divmod(samples, size)
    result = [WeightedMicroBatch(tuple(range(k * size, (k + 1) * size)), 1.0) for k in range(whole)]
    copies = (0,) * size
    if rest:
        result.append(WeightedMicroBatch((*range(whole * size, samples), *copies[rest:]), 1.0))
        result.append(WeightedMicroBatch(copies, -(size - rest) / size))
    result += [WeightedMicroBatch(copies, 0.0)] * (-len(result) % replicas)
    return result


class Evaluator:
    """Computes the mean loss over a dataset, the same number on every rank and under every plan; writes it when due.

    A loss that compares samples is computed over each `global_batch` samples in order, and the mean of these losses is
    taken; samples that fill no such batch are left out.
    """

    def __init__(
        self,
        trainer: Trainer,
        graph: Graph,
        programs: Sequence[Sequence[BlockProgram]],
        dataset: Any,
        metrics: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
        further: Mapping[str, Evaluator] = MappingProxyType({}),
        events: Path | None = None,
    ) -> None:
        """`graph` is the model in eval mode, and `programs` its code for each block of this rank's stages.

        With `metrics`, the graph has the outputs that they read. The losses of `further` sets are written as metrics
        of these names. `events` is None on all ranks but one.
        """
        self.trainer, self._forward, self._dataset = trainer, ForwardPass(trainer, graph, programs), dataset
        self._graph, self._metrics, self._further, self._events = graph, dict(metrics), dict(further), events
        self._plan, self._context = trainer.plan, trainer.context
        coordinate = trainer.coordinate
        self._size, self.samples = self._plan.evaluation_batch, len(dataset)
        """Samples of one loss, and of all."""
        if self._plan.coupled:
            self.samples -= self.samples % self._size
        divided = micro_batches(self.samples, self._size, 1 if self._plan.coupled else coordinate.data)
        share = len(divided) if self._plan.coupled else len(divided) // coordinate.data
        first = 0 if self._plan.coupled else coordinate.data_rank * share
        self._micro_batches = divided[first : first + share]
        self._denominators: list[list[torch.Tensor]] | None = None
        self._in_memory: list[Batch] | None = None

    def evaluate(self) -> tuple[float, dict[str, float | None]]:
        """Return the mean loss over the whole set and each metric, None for one whose count is 0; a collective."""
        device, entries = self._context.device, self._graph.label_counts
        with self._forward.untouched_training():
            if self._denominators is None:
                # For each mean loss, the labels of the whole set per micro-batch; where samples are compared, the
                # labels of each batch.
                on_host = [on_device(entry, torch.device("cpu")) for entry in entries]
                counts = torch.zeros(len(self._micro_batches), len(entries), dtype=torch.float64)
                if entries and any(block.counts for block in self._forward.blocks):
                    for row, item, batch in zip(counts, self._micro_batches, self._host_batches(), strict=True):
                        for index, entry in enumerate(on_host):
                            row[index] = item.weight * count_labels(entry, batch, self._plan.micro_batch).sum()
                counts, per_loss = counts.to(device), 1.0
                if not self._plan.coupled:
                    counts, per_loss = counts.sum(0, keepdim=True), self._size / self.samples
                    dist.all_reduce(counts, group=self.trainer.coordinate.data_group)
                on_it = [on_device(entry, device) for entry in entries]
                found = [
                    [(entry.divisor(total) * per_loss).float() for entry, total in zip(on_it, row, strict=True)]
                    for row in counts
                ]
                self._denominators = found if self._plan.coupled else found * len(self._micro_batches)

            # This rank's share of the sums over micro-batches: of the loss, and of each metric's sum and count
            total = torch.zeros(1 + 2 * len(self._metrics), dtype=torch.float64, device=device)
            results = self._forward.run(self._device_batches(), self._denominators)
            for number, batch, (part, *outputs) in results:
                weight = self._micro_batches[number].weight
                if not weight:
                    continue
                total[0] += weight * part.double() * self._plan.num_microbatches
                if self._graph.outputs is not None and self._metrics:
                    returned = self._graph.outputs.rebuilt(outputs)
                    for index, (name, metric) in enumerate(self._metrics.items()):
                        pair = sum_and_count(name, metric, returned, batch)
                        total[2 * index + 1 : 2 * index + 3] += weight * pair.to(device)
        dist.all_reduce(total)
        loss, *sums = (total / self._plan.tensor / (self._plan.data if self._plan.coupled else 1)).tolist()
        pairs = zip(self._metrics, sums[::2], sums[1::2], strict=True)
        metrics = {name: value / count if count else None for name, value, count in pairs}
        return loss * self._size / self.samples, metrics

    def _host_batches(self) -> Iterator[Batch]:
        """Yield this replica's micro-batches; those of a set of up to `IN_MEMORY` are made once and stay in memory.

        So only the first evaluation starts processes that make them.
        """
        if self._in_memory is not None:
            yield from self._in_memory
            return
        on_gpu, made, size = self._context.device.type == "cuda", list[Batch](), 0
        for batch in DataLoader(
            self._dataset,
            batch_sampler=[list(item.samples) for item in self._micro_batches],
            collate_fn=self._dataset.collate,
            num_workers=2 if on_gpu else 0,
            pin_memory=on_gpu,
            generator=torch.Generator(),  # its seed would be drawn from the generator that training uses
        ):
            size += sum(field.nbytes for field in batch.values())
            if size <= IN_MEMORY:
                made.append(batch)
            if len(made) == len(self._micro_batches):  # before the last one, after which nobody asks for another
                self._in_memory = made
            yield batch

    def _device_batches(self) -> Iterator[Batch]:
        """Yield this replica's micro-batches on its device; the labels that select rows are counted before."""
        blocks = self._forward.blocks
        modules = [module for stage in self.trainer.stages.stages for module in stage.block_modules()]
        losses = {loss for module in modules if (loss := module.selecting_loss) is not None}
        assert len(blocks) == len(modules)
        counter = LabelCounter({loss: self._graph.label_counts[loss] for loss in losses}, self._plan.micro_batch)
        counted: dict[int, list[int]] = {loss: [] for loss in losses}
        self._context.label_counts = counted
        for batch in self._host_batches():
            for loss, counts in counter.count(batch).items():
                counted[loss] += counts
            # A copy on CPUs, too: a forward may change what it is given.
            device = self._context.device
            yield {name: field.to(device, non_blocking=True, copy=True) for name, field in batch.items()}

    def is_due(self, step: int) -> bool:
        """Return True if the loss is to be computed after `step` steps."""
        evaluate, last = self.trainer.experiment.evaluation, self.trainer.experiment.total_steps
        return evaluate is not None and (step % evaluate.every == 0 or step == last)

    def run(self, step: int, log: StepLog) -> None:
        """Compute the loss after `step` steps, and write it; a collective."""
        log.flush()
        started = time.perf_counter()
        loss, metrics = self.evaluate()
        metrics |= {name: each.evaluate()[0] for name, each in self._further.items()}
        log.evaluated = {"eval_loss": loss, **{name: value for name, value in metrics.items() if value is not None}}
        if self._events is not None:
            samples = self.trainer.experiment.samples_before(step)
            log_event(
                self._events,
                "evaluation",
                step=step,
                loss=loss,
                **({"metrics": metrics} if metrics else {}),
                evaluated=self.samples,
                tokens=samples * self.trainer.experiment.seq_len,
                samples=samples,
                flops=flops_of(self._plan, samples),
                seconds=log.seconds,
                eval_seconds=time.perf_counter() - started,
            )
        log.restart_clock()


# Samples of text
#
# Each token of a causal model costs a whole forward over the prompts and what was written: there is no cache of keys
# and values, so that the blocks are those that train.

MOST_PROBABLE = 50
"""Number of tokens among which the next one is drawn; the default of `transformers` too."""
GUESSES = 5
"""Number of tokens that are recorded for each mask."""


class Sampler:
    """Lets the model answer the prompts of its experiment, the same on every rank, and writes the answers when due."""

    def __init__(self, trainer: Trainer, graphs: Sequence[Graph], events: Path | None = None) -> None:
        """`graphs` are those of `CapturedModel.samples`; `events` is None on all ranks but one."""
        experiment, plan = trainer.experiment, trainer.plan
        assert experiment.samples is not None
        self.trainer, self._settings, self._events = trainer, experiment.samples, events
        self._prompts = experiment.reading.encoded(experiment.samples.prompts)
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


# Norms of tensors


class NormsLog:
    """Writes what `TensorNorms` has measured of the last update, beside what the optimiser lets expect of it."""

    def __init__(self, trainer: Trainer, events: Path | None = None) -> None:
        """`events` is None on all ranks but one."""
        assert trainer.tensor_norms is not None
        self._norms, self._trainer, self._events = trainer.tensor_norms, trainer, events
        experiment, graph = trainer.experiment, trainer.graph
        self._layers = layers_of(graph)
        shapes = {name: graph.parameters[name].shape for name in self._layers}
        chosen = experiment.optimizer
        matrices = projections(graph, chosen) if chosen.record.updates_matrices else {}
        self._expected = ExpectedUpdates(experiment, shapes, matrices)
        self._elements = [math.prod(shape) for shape in shapes.values()]

    def is_due(self, step: int) -> bool:
        """Return True if the update that made `step` completed steps was measured."""
        return self._norms.is_due(step)

    def run(self, step: int, log: StepLog) -> None:
        """Write the norms of the last update; a collective."""
        if not step:  # before the first update
            return
        log.flush()
        found = self._norms.measured()
        if self._events is not None:
            names, layers = list(self._layers), [block.name for block in self._trainer.graph.blocks]
            norms = {what: dict(zip(names, values, strict=True)) for what, values in found.norms.items()}
            trained = {
                name: value for name, value in norms["gradients"].items() if not math.isnan(norms["updates"][name])
            }
            expected = self._expected.at(step - 1, norms["weights"], trained)
            log_event(
                self._events,
                "norms",
                step=step,
                tokens=self._trainer.experiment.samples_before(step) * self._trainer.experiment.seq_len,
                parameters=names,
                layers=[layers[layer] for layer in self._layers.values()],
                elements=self._elements,
                **{what: [_short(value) for value in values.values()] for what, values in norms.items()},
                least=[_short(expected[name].least) for name in names],
                most=[_short(expected[name].most) for name in names],
                histograms=[
                    {"layer": name, "of": what, **exponents_of(counts)}
                    for what, rows in found.counts.items()
                    for name, counts in zip(layers, rows, strict=False)
                    if any(counts)
                ],
                spent_s=self._norms.spent_s,
            )
        log.restart_clock()


def exponents_of(counts: Sequence[int]) -> dict[str, Any]:
    """Return the bins of a histogram from the first to the last that holds an element, those of no exponent apart."""
    held = [exponent for exponent, count in enumerate(counts[1:-1], start=1) if count]
    first, end = (held[0], held[-1] + 1) if held else (1, 1)
    return {"zeros": counts[0], "first": first, "counts": list(counts[first:end]), "not_finite": counts[-1]}


def _short(value: float) -> float:
    """Return a number with the digits that fp32 has."""
    return float(f"{value:.7g}")


# Sparsity

WINDOW = 64
"""Largest number of rows and columns of blocks that an event shows of a pattern, from its upper left corner."""


class SparsityLog:
    """Sums the counts of the patterns of all ranks; the rank that owns the first sparse weight writes the event."""

    def __init__(self, trainer: Trainer, events: Path) -> None:
        assert trainer.sparse_weights is not None
        self._trainer, self._sparse = trainer, trainer.sparse_weights
        self._owned = frozenset(name for name in self._sparse.patterns if trainer.owns(name))
        here = trainer.coordinate
        is_first = self._sparse.names[0] in self._owned and here.data_rank == here.tensor_rank == 0
        self._events = events if is_first else None
        self._update_steps = self._sparse.sparsity.update_steps(trainer.experiment.total_steps)

    def is_due(self, step: int) -> bool:
        """Return True if the pattern has just moved, after `step` steps."""
        return self._sparse.is_due(step - 1)

    def run(self, step: int, log: StepLog) -> None:
        """Write the state of the patterns after `step` steps; a collective."""
        log.flush()
        counts = self._sparse.counts(self._owned)
        if self._events is not None:
            experiment, sparsity, name = self._trainer.experiment, self._sparse.sparsity, self._sparse.names[0]
            corner_RC = is_present(self._sparse.patterns[name])[:WINDOW, :WINDOW].int()
            log_event(
                self._events,
                "sparsity",
                step=step,
                update=sum(each <= step for each in self._update_steps),
                prune_ratio=sparsity.ratio(step, experiment.total_steps) if isinstance(sparsity, Dynamic) else 0.0,
                **counts,
                tokens=(samples := experiment.samples_before(step)) * experiment.seq_len,
                flops=flops_of(self._trainer.plan, samples),
                seconds=log.seconds,
                weight=name,
                pattern=["".join(".#"[block] for block in row) for row in corner_RC.tolist()],
            )
        log.restart_clock()
