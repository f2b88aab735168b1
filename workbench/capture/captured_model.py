"""The graphs of an experiment's model, each captured once: of a training step, of an evaluation and of its samples."""

from __future__ import annotations

import json
import os
import re
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import fx, nn

from workbench.base.arguments import memoised
from workbench.base.code_identity import Definition, changed_between, identity
from workbench.base.display import waiting
from workbench.base.errors import CaptureError, InvalidExperiment, PlanMismatch, in_words
from workbench.base.tensors import TensorSpec
from workbench.base.user_code import SourceLine, UserFunction, line_of_node
from workbench.capture.blocks import graph_json
from workbench.capture.blocks.block_extraction import line_of_digest
from workbench.capture.blocks.tensor_parallel import plan_tensor_parallel
from workbench.capture.coupling.division import (
    MOST_FLOPS,
    PARTS,
    Division,
    check_graph,
    division_fault,
    division_of,
    forward_flops,
    has_constants,
    is_compared_by_plan,
    random_batch,
    samples_from,
)
from workbench.capture.coupling.gathering import with_tail_of
from workbench.capture.export.opaque import call_of
from workbench.capture.export.opaque_search import FACTORIES
from workbench.capture.graph import Computation, Graph, signature
from workbench.capture.model import capture
from workbench.capture.operations import schema_of
from workbench.capture.outputs import Metric, read_by, slots_of
from workbench.capture.stored_captures import answered, device_of, key_of, patches, stored
from workbench.experiment import Experiment, Optimizer


@dataclass(frozen=True)
class Facts:
    """Facts of an experiment's captured model, beside its costs; found once.

    The plan reads it, and the gate before a training and every rank compare it with the plan. What only a capture
    shows is None while the model has not been captured, and what only a plan asks is None elsewhere.
    """

    signature: str
    """Digest of the model's parameters and of the fields of its batch."""
    reach: str
    """All that decides the new value of an element in an update: that `element`, its `tensor`, or the whole `model`."""
    computation: Computation | None = None
    """Operations of the forward of a step."""
    blocks: tuple[str, ...] | None = None
    """Names of its blocks."""
    coupled: tuple[str, ...] | None = None
    """Reasons why its batch must stay whole: operations that mix samples, or numbers that differ."""
    labelled_share: float = 1.0
    """Average share of labels that its loss does not ignore, of those that a head computes."""
    not_gathered: str | None = None
    """Sentence that says why the samples of a coupled loss cannot be gathered; empty if they can be."""
    is_gathering_compared: bool = False
    """True if numbers were compared with those of the gathered loss; the model is too large for it otherwise."""
    captured: CapturedModel | None = field(default=None, repr=False, compare=False)
    """The model itself with its graphs, in the process that captured it."""


def build_meta(factory: Callable[[], nn.Module]) -> nn.Module:
    """Build a model without its weights, in train mode; on the CPU if its constructor needs real numbers."""
    try:
        # A constructor that loads weights is told for each of them that nothing is loaded, which is what is wanted.
        with torch.device("meta"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"(?s).*copying from a non-meta parameter.*no-op")
            model = factory().train()
            FACTORIES[model] = factory  # which builds it again where a module that runs as written needs values
            return model
    except Exception:  # the constructor read a meta tensor's numbers; every other error comes again
        return factory().train()


class CapturedModel:
    """Captures an experiment's model, and answers what plans and ranks must know of it: each question once, when asked.

    A plan that was made in this process holds one, so that `wb.launch` need not capture the model again.
    """

    def __init__(self, experiment: Experiment, micro_batch: int, model: nn.Module | None = None) -> None:
        """`model` is the experiment's, if it has been built; otherwise it is built on the meta device, without weights.

        `micro_batch` is the number of samples of a step's graph and of an evaluation's.
        """
        self._source, self._loss, self._model = experiment.model, experiment.loss, model
        self._batch = _batch(experiment, micro_batch)
        self._micro_batch, self._experiment = micro_batch, experiment
        self._functions = _functions(experiment)
        self._patches: list[Any] | None = None
        self._seals = dict[str, str]()
        """Seals of the files that hold the captured graphs, by what they are of."""

    def facts(self, reach: str, *, captures: bool) -> Facts:
        """Return what the plan, the gate and the ranks ask about the model; `reach` is that of its optimiser's update.

        A model that has not been captured is captured with `captures`; without, its facts are those that need none.
        """
        if not captures and not self.is_captured:
            return Facts(self.signature, reach, captured=self)
        blocks = tuple(block.name for block in self.graph.blocks)
        return Facts(self.signature, reach, self.computation, blocks, self.division.coupled, captured=self)

    @property
    def is_captured(self) -> bool:
        """Return True if the graph of a step is there, so that asking for it takes no time."""
        return "graph" in vars(self)

    @cached_property
    def graph(self) -> Graph:
        """The graph of one micro-batch of a step; raises `CaptureError`."""
        return self._captured("step", self._batch, self._capture)

    @cached_property
    def division(self) -> Division:
        """The verdict on dividing the batch; on a rank, which has the whole model, operations alone decide."""
        if self._experiment.numerics.batch_coupling == "gather":
            return Division(self.graph.coupled or ("batch_coupling is 'gather'",))
        if self._model is not None:
            return Division(self.graph.coupled)

        def found() -> Division:
            with waiting(f"checking whether the batch of {self._source.name} can be divided"):
                return division_of(self.graph, self._experiment.build, _samples(self._experiment))

        def read(json: Any) -> Division:
            return Division(tuple(json[0]), json[1])

        if self.graph.coupled:  # which decides alone
            return found()
        return stored(self._key("division", self._drawn()), found, lambda each: [each.coupled, each.note], read)

    @memoised
    def obstacle_at(self, micro_batch: int) -> str:
        """Return why micro-batches of so many samples cannot run; what numbers say of two holds for its multiples."""
        if micro_batch % self._micro_batch == 0 or not self.graph.unknown_coupling:
            return ""
        try:
            coupled = CapturedModel(self._experiment, micro_batch).division.coupled
        except CaptureError as error:
            return str(error)
        return f"Its loss compares the samples of a micro-batch: {coupled[0]}." if coupled else ""

    @memoised
    def tower_and_tail(self, samples: int) -> Graph:
        """Return the graph of so many samples with the part of its loss that compares them as the last block.

        Raises `CaptureError` if that part cannot be cut off (`workbench.capture.coupling.gathering`).
        """

        def made(model: nn.Module, batch: Mapping[str, TensorSpec]) -> Graph:
            if samples == self._micro_batch and self.graph.tower_and_tail is not None:
                return self.graph.tower_and_tail()
            return self._capture(model, batch, gathers=True)

        return self._captured(
            "tower and tail", _batch(self._experiment, samples), made, f" for a loss over {samples:,} samples"
        )

    def step_graph(self, loss_samples: int | None) -> Graph:
        """Return the graph of a step whose loss is over so many samples, gathered; over a micro-batch's if None."""
        return self.graph if loss_samples is None else self.gathered(loss_samples)

    def gathered(self, samples: int) -> Graph:
        """Return the graph of a micro-batch whose last block computes the loss of so many samples."""
        return with_tail_of(self.tower_and_tail(self._micro_batch), self.tower_and_tail(samples))

    @cached_property
    def is_gathering_compared(self) -> bool:
        """True if the model is small enough for `gathering_fault`."""
        return is_compared_by_plan(self.graph)

    @cached_property
    def gathering_fault(self) -> str:
        """The difference of a gathered loss from that of the whole batch, in words; empty if there is none.

        The global batch itself is compared if that takes no longer than a few samples of a large model.
        """
        parts, rest = divmod(self._experiment.largest_batch, self._micro_batch)
        if rest or parts * forward_flops(self.graph) > MOST_FLOPS:
            parts = PARTS[0]

        def found() -> str:
            with waiting(f"comparing the gathered loss of {self._source.name}"):
                return self._gathering_fault(self._experiment.build().train(), parts)

        return stored(self._key("gathering", [parts, *self._drawn()]), found, str, str)

    @cached_property
    def gathering_obstacle(self) -> str:
        """Sentence that says why a loss that compares samples cannot gather them over micro-batches; empty if it can.

        Raises `InvalidExperiment` for a metric that no plan computes.
        """
        experiment, samples = self._experiment, self._experiment.largest_batch
        try:
            graph = self.gathered(samples)
            if experiment.evaluation is not None:
                require_same_stages(graph, self.evaluation(experiment, samples), (), 1)
            fault = self.gathering_fault if self.is_gathering_compared else ""
        except InvalidExperiment:
            raise
        except CaptureError as error:
            return str(error)
        except Exception as error:  # such as a forward that cannot take so many samples; the batch can still stay whole
            return f"Whether its samples can be gathered is not known: {in_words(error)}."
        return f"Gathered over micro-batches, it would be another loss: {fault}." if fault else ""

    def _gathering_fault(self, model: nn.Module, parts: int) -> str:
        graph = self.gathered(parts * self._micro_batch)
        if has_constants(graph):
            graph = CapturedModel(self._experiment, self._micro_batch, model).gathered(parts * self._micro_batch)
        return division_fault(graph, lambda: model, _samples(self._experiment), [parts] * 2)

    def fault_of(self, model: nn.Module, gathers: bool) -> str:
        """Return how the loss of micro-batches differs from that of the whole batch on the device of a built model.

        The result is empty if they are equal. The weights of `model` are changed.
        """
        if gathers:
            return self._gathering_fault(model, PARTS[0])
        return division_fault(self.graph, lambda: model, _samples(self._experiment), PARTS)

    def compared(self, question: str, find: Callable[[], str | None]) -> str | None:
        """Return the stored answer to a question about the graph of a step, or what `find` answers (`answered`)."""
        self.graph  # noqa: B018  # its seal is known once it is captured
        return answered(self._seals.get("step", ""), question, find)

    def check_graph(self, copied: Callable[[], nn.Module]) -> str:
        """Raise `CaptureError` unless the graph computes what the model does; `copied` makes a copy of a built one.

        Returns why it could not be compared, or "" (`workbench.capture.coupling.division.check_graph`).
        """
        return check_graph(self.graph, copied(), _samples(self._experiment))

    @cached_property
    def computation(self) -> Computation:
        """Operations that the forward of a step computes, for a plan."""
        loss = self._loss.to_json() if isinstance(self._loss, UserFunction) else self._loss
        return computation_of(self.graph, [self._source.to_json(), loss, self._experiment.seed])

    def difference_from(self, planned: Computation) -> SourceLine | None:
        """Return the line of the first operation that a plan's forward does not have; None if they are the same.

        The model is captured again, for the plan's samples, if it may be their number alone that makes a difference.
        """
        at = self.computation.first_difference(planned)
        if at is None:
            return None
        if self._micro_batch != planned.samples:
            return CapturedModel(self._experiment, planned.samples, self._model).difference_from(planned)
        return line_of_operation(self.graph, at)

    @property
    def optimizer(self) -> Optimizer:
        """The optimiser of the experiment that the model was captured for."""
        return self._experiment.optimizer

    @property
    def is_on_rank(self) -> bool:
        """Return True if this is the model that a rank has built."""
        return self._model is not None

    @cached_property
    def signature(self) -> str:
        """The digest that a plan for this model has; it needs no capture."""
        return self.graph.signature if self.is_captured else signature(self._built(), self._batch)

    @cached_property
    def trained_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters that have a gradient, by name."""
        return {name: tuple(p.shape) for name, p in self._built().named_parameters() if p.requires_grad}

    def evaluation(self, experiment: Experiment, gathered: int | None = None) -> Graph:
        """Return the graph of the model in eval mode, with what the experiment's metrics read.

        Its last block computes the loss and what metrics read of `gathered` samples, if that is given.
        """
        return self._evaluation(tuple(experiment.metrics.items()), gathered)

    @memoised
    def _evaluation(self, metrics: tuple[tuple[str, Metric], ...], gathered: int | None) -> Graph:
        def made(model: nn.Module, batch: Mapping[str, TensorSpec]) -> Graph:
            return capture_for_evaluation(model, self.graph, dict(metrics), batch, gathered is not None, self._examples)

        def of_batch(samples: int) -> Graph:
            words = f"evaluation{' gathered' * (gathered is not None)} {[name for name, _ in metrics]}"
            return self._captured(
                words, _batch(self._experiment, samples), made, functions=[metric for _, metric in metrics]
            )

        part = of_batch(self._micro_batch)
        return part if gathered is None else with_tail_of(part, of_batch(gathered))

    def samples(self, experiment: Experiment) -> list[Graph]:
        """Return a graph in eval mode for each group of the experiment's prompts; none without `samples`."""
        asked = experiment.samples
        if asked is None:
            return []
        prompts = experiment.reading.encoded(asked.prompts)
        groups = prompts.groups(asked.tokens, experiment.seq_len)
        return [self._sampling(tuple(group.specs.items()), prompts.vocabulary) for group in groups]

    @memoised
    def _sampling(self, batch: tuple[tuple[str, TensorSpec], ...], vocabulary: int) -> Graph:
        def made(model: nn.Module, specs: Mapping[str, TensorSpec]) -> Graph:
            return capture_for_samples(model, self.graph, specs, vocabulary)

        return self._captured(f"samples {vocabulary}", dict(batch), made)

    def check_between_steps(
        self, experiment: Experiment, cuts: Sequence[int], tensor: int, loss_samples: int | None
    ) -> None:
        """Raise `CaptureError` unless evaluations and samples of the experiment run in a plan's stages.

        `cuts` and `tensor` are those of `require_same_stages`, and `loss_samples` those of `step_graph`. Raises
        `InvalidExperiment` for a metric that has the name of a scalar which the model logs.
        """
        if experiment.evaluation is not None:
            training = self.step_graph(loss_samples)
            require_same_stages(training, self.evaluation(experiment, loss_samples), cuts, tensor)
            named = {*experiment.metrics, *experiment.held_out_sets}
            if both := sorted({scalar.name for scalar in training.scalars} & named):
                raise InvalidExperiment(
                    f"{', '.join(both)} is a metric of the experiment and a scalar that {experiment.model.name} logs. "
                    "Give one of them another name."
                )
        for graph in self.samples(experiment):
            require_same_stages(self.graph, graph, cuts, tensor, same_shapes=False)

    def is_of(self, experiment: Experiment) -> bool:
        """Return True if the graph of a step is that of the experiment, whose model is built to see its parameters.

        Raises `PlanMismatch` if a function of the model or of the loss was replaced since the capture.
        """
        is_same = (self._source, self._loss) == (experiment.model, experiment.loss)
        if is_same and (changed := changed_between(self._functions, _functions(experiment))):
            raise PlanMismatch(
                f"{self._source.name} has changed since the plan was made: {changed[0]}. Plan "
                "the changed model: wb.plan(experiment)."
            )
        return (
            is_same
            and self._batch == _batch(experiment, self._micro_batch)
            and self.signature == signature(build_meta(experiment.build), self._batch)
        )

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Stay in this process: a plan that a user's function refers to travels to the ranks without its graphs."""
        return type(None), ()

    @property
    def _examples(self) -> Mapping[str, torch.Tensor] | None:
        return self._experiment.reading.examples()

    def _capture(self, model: nn.Module, batch: Mapping[str, TensorSpec], gathers: bool = False) -> Graph:
        name = self._source.name
        return capture(model, batch, name=name, loss=self._loss, gathers=gathers, logs=True, examples=self._examples)

    def _captured(
        self,
        what: str,
        batch: Mapping[str, TensorSpec],
        make: Callable[[nn.Module, Mapping[str, TensorSpec]], Graph],
        words: str = "",
        functions: Sequence[Any] = (),
    ) -> Graph:
        """Return the graph that `make` captures, or the stored one of the same model, batch and functions."""
        with waiting(f"capturing {self._source.name}{words}"):
            model = self._built()
            device, is_meta = device_of(model), any(p.is_meta for p in (*model.parameters(), *model.buffers()))
            specs = [[name, spec.shape, spec.dtype] for name, spec in batch.items()]
            return stored(
                self._key(what, specs, model, functions),
                lambda: make(model, batch),
                lambda graph: graph_json.written(graph, device),
                lambda json: graph_json.read(json, device, self._loss),
                has_constants if is_meta else None,
                lambda seal: self._seals.update({what: seal}),
            )

    def _key(
        self, what: str, described: object, model: nn.Module | None = None, functions: Sequence[Any] = ()
    ) -> str | None:
        """Return the key of what is stored of this model; None if that cannot be told."""
        experiment, examples = self._experiment, self._examples
        loss = self._loss.function if isinstance(self._loss, UserFunction) else self._loss
        of_data = {name: (field, field.stride()) for name, field in (examples or {}).items()}
        factory = getattr(self._source, "factory", None)
        model = self._built() if model is None else model
        if self._patches is None:
            self._patches = patches(model)
        given = [*functions, factory, loss, of_data, *self._patches]
        source = [self._source.to_json(), self._source.name, self._micro_batch, experiment.seed]
        return key_of(model, given, [what, described, source])

    def _drawn(self) -> list[object]:
        """Return what decides numbers that are compared, beside the examples of the data: samples and given weights."""
        experiment = self._experiment
        [data, *_] = getattr(experiment.data, "parts", [experiment.data])
        vocabulary = experiment.model.vocab_size or int(getattr(data, "vocab_size", 0))
        share = experiment.reading.labelled_share()
        weights = Path(getattr(self._source, "path", "") or os.devnull)
        files = sorted(weights.iterdir()) if weights.is_dir() else []
        facts = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
        return [vocabulary, share, facts, *([name, spec.shape, spec.dtype] for name, spec in self._batch.items())]

    def _built(self) -> nn.Module:
        return build_meta(self._experiment.build) if self._model is None else self._model


def _functions(experiment: Experiment) -> dict[str, Definition]:
    """Return the identity of the user's code in the model and the loss, as it is now."""
    loss = experiment.loss.function if isinstance(experiment.loss, UserFunction) else None
    return identity((getattr(experiment.model, "factory", None), loss))


def random_samples(experiment: Experiment) -> Callable[[int, int], dict[str, torch.Tensor]]:
    """Return what makes batches of random samples: of a number of them, and with a seed."""

    def random(count: int, trial: int) -> dict[str, torch.Tensor]:
        [data, *_] = getattr(experiment.data, "parts", [experiment.data])  # texts of a mixture have one tokeniser
        vocabulary = experiment.model.vocab_size or int(getattr(data, "vocab_size", 0)) or 2
        return random_batch(
            experiment.reading.batch_specs(),
            count,
            vocab_size=vocabulary,
            # Every batch has positions without a label: a loss may depend on how many there are.
            labelled_share=min(0.7, experiment.reading.labelled_share()),
            device=torch.device("cpu"),
            seed=trial,
        )

    return random


def _samples(experiment: Experiment) -> Callable[[int, int], Mapping[str, torch.Tensor]]:
    """Return what makes the samples that numbers are compared for."""
    return samples_from(experiment.reading.examples(), random_samples(experiment))


def _batch(experiment: Experiment, micro_batch: int) -> dict[str, TensorSpec]:
    return {name: spec.batched(micro_batch) for name, spec in experiment.reading.batch_specs().items()}


# Comparison of a model captured in eval mode with the same model captured in train mode.


def capture_for_evaluation(
    model: nn.Module,
    training: Graph,
    metrics: Mapping[str, Metric] = MappingProxyType({}),
    batch: Mapping[str, TensorSpec] | None = None,
    gathers: bool = False,
    examples: Mapping[str, torch.Tensor] | None = None,
) -> Graph:
    """Capture the model in eval mode, by default at the micro-batch of `training`, and leave it in train mode.

    With `metrics`, the graph computes what they read of forward's outputs. `gathers` and `examples` are those of
    `capture`. Raises `InvalidExperiment` for a metric that cannot be computed.
    """
    batch = training.batch if batch is None else batch

    def read(template: Any) -> dict[int, str]:
        return {slot: f"The metric {metric!r}" for slot, metric in read_by(metrics, template, batch).items()}

    returns = read if metrics else None
    return _in_eval_mode(model, training, batch, returns=returns, gathers=gathers, examples=examples)


def capture_for_samples(model: nn.Module, training: Graph, batch: Mapping[str, TensorSpec], vocabulary: int) -> Graph:
    """Capture the model in eval mode for a batch of prompts, with its logits as the only output.

    `batch` has the fields of the training with P prompts of S tokens. The logits are the first tensor of shape
    (P, S, V) or (P * S, V) that forward returns, with V at least `vocabulary`; one whose V is that of the embedding is
    preferred. Raises `InvalidExperiment` if forward returns none. The model is left in train mode.
    """
    prompts, tokens = batch["input_ids"].shape
    rows = {spec.shape[0] for spec in training.parameters.values() if len(spec.shape) == 2}

    def logits(template: Any) -> dict[int, str]:
        slots = [slot for slot in slots_of(template) if slot.spec.is_floating and len(slot.spec.shape) in (2, 3)]
        fitting = [
            slot
            for slot in slots
            if slot.spec.shape[:-1] in ((prompts, tokens), (prompts * tokens,)) and slot.spec.shape[-1] >= vocabulary
        ]
        fitting.sort(key=lambda slot: slot.spec.shape[-1] not in rows)
        if not fitting:
            shapes = ", ".join(str(list(slot.spec.shape)) for slot in slots_of(template))
            raise InvalidExperiment(
                f"samples need the logits of every token, a tensor of {prompts} × {tokens} × at least {vocabulary:,} "
                f"for these prompts, and {training.model} returned {shapes or 'no tensor'}. Let forward return its "
                "logits beside the loss, or remove samples."
            )
        return {fitting[0].index: "samples"}

    return _in_eval_mode(model, training, batch, returns=logits)


def _in_eval_mode(model: nn.Module, training: Graph, batch: Mapping[str, TensorSpec], **options: Any) -> Graph:
    """Return the graph of a model in eval mode, and with what it logs, too, where stages exchange values for that.

    Evaluations log nothing, but a scalar of two layers' values (`(last - first).norm()`) lets stages send one of them.
    """
    captured = partial(capture, model, batch, name=training.model, loss=training.loss_choice, **options)
    model.eval()
    try:
        graph = captured()
        numbers = [
            [len(each.crossing(cut, with_outputs=False)) for cut in range(1, len(each.blocks))]
            for each in (training, graph)
        ]
        return captured(logs=True) if training.scalars and numbers[0] != numbers[1] else graph
    finally:
        model.train()


def require_same_stages(
    training: Graph, evaluation: Graph, cuts: Sequence[int], tensor: int, same_shapes: bool = True
) -> None:
    """Raise `CaptureError` unless the evaluation can run in stages of the training.

    `cuts` are the first blocks of all stages but the first; `tensor` is the tensor-parallel degree. Each block may read
    only parameters and buffers that the same block reads in training, and stages must exchange the same shapes, or with
    `same_shapes=False` as many values.
    """
    reason = _difference(training, evaluation, cuts, tensor, same_shapes)
    if reason:
        raise CaptureError(
            f"{training.model} cannot be evaluated under this plan, because {reason}. Let its forward use the same "
            "layers in train and eval mode, or train without evaluate, metrics and samples."
        )


def _difference(training: Graph, evaluation: Graph, cuts: Sequence[int], tensor: int, same_shapes: bool) -> str:
    """Return why an evaluation cannot run in stages of the training; empty if it can."""
    counts = len(training.blocks), len(evaluation.blocks)
    if counts[0] != counts[1]:
        return f"it has {counts[0]} blocks in train mode and {counts[1]} in eval mode"
    for block, other in zip(training.blocks, evaluation.blocks, strict=True):
        extra = [p for p in other.parameters if p not in block.parameters]
        extra += [b for b in other.buffers if b not in block.buffers and b not in evaluation.constants]
        if extra:
            return f"block {block.name} reads {', '.join(extra[:3])} in eval mode only"
    for cut in cuts:
        specs = [[g.values[name] for name in g.crossing(cut, with_outputs=False)] for g in (training, evaluation)]
        sent, received = ([(spec.shape, spec.dtype) for spec in each] for each in specs)
        if sent != received if same_shapes else len(sent) != len(received):
            where = f"block {training.blocks[cut].name}"
            return f"{len(sent)} values reach {where} in train mode, {len(received)} in eval"
    shards, others = (plan_tensor_parallel(graph, tensor).parameters for graph in (training, evaluation))
    if any(others.get(parameter) != sharding for parameter, sharding in shards.items() if parameter in others):
        return f"its {tensor} tensor-parallel devices would divide its parameters differently"
    whole = [p for p in evaluation.parameters if p in shards and p not in others]
    return f"eval mode needs the whole of {whole[0]}, which {tensor} devices divide" if whole else ""


# A forward as text that another process can compare: its operations with their numbers, and their wiring.
#
# A plan stores it, and each rank compares what it has captured. The two may have been captured for another number of
# samples, so that sizes may be larger in proportion.

_NUMBER = re.compile(r"(?<![\w.%-])-?\d+(?![\w.])")
"""A whole number in the text of an opaque call: no node (`%3`), and no part of a name or of a fraction."""
_SIZES = frozenset({"size", "shape", "split_size", "split_sizes", "repeats", "output_size", "start", "end", "length"})
"""Names of the arguments of operations that may grow with the number of samples."""


def computation_of(graph: Graph, described: object) -> Computation:
    """Return what the forward of a captured model computes; `described` says what it is made of."""
    values = (node.meta.get("val") for block in graph.blocks for node in block.code.graph.nodes)
    tensor = next(value for value in values if isinstance(value, torch.Tensor))
    named = sorted(f"{name} {spec.shape}" for name, spec in graph.parameters.items())
    origin = _digest(json.dumps([described, torch.__version__, tensor.device.type], sort_keys=True, default=str))
    return Computation(origin, graph.micro_batch, _digest(" ".join(named)), tuple(word for word, _ in _words(graph)))


def line_of_operation(graph: Graph, index: int) -> SourceLine:
    """Return the line of the operation of that index in `computation_of`; of the last one before it that has a line."""
    nodes = [node for _, node in list(_words(graph))[: index + 1] if node is not None]
    lines = (line for node in reversed(nodes) if (line := line_of_node(node)).file)
    return next(lines, SourceLine())


def _digest(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


def _words(graph: Graph) -> Iterator[tuple[str, fx.Node | None]]:
    """Yield each operation as a hash, with its sizes behind it, and its node."""
    made = {name: index for index, name in enumerate(name for block in graph.blocks for name in block.sends)}
    types: dict[str, int] = {}
    for block in graph.blocks:
        reads = [made[name] for name in block.receives]
        is_new = block.block_type not in types
        known = types.setdefault(block.block_type, len(types))
        yield f"{known} {_digest(str((block.parameters, reads, block.inputs)))}", None
        position = {node: index for index, node in enumerate(block.code.graph.nodes)}
        for node in block.code.graph.nodes if is_new else ():
            sizes: list[int] = []
            text = line_of_digest(node, block.code, position, given=_without_sizes(node, sizes))
            if call_of(node) is not None:  # whose shapes stand in its text
                sizes += map(int, _NUMBER.findall(text))
                text = _NUMBER.sub("size", text)
            yield ":".join([_digest(text), *map(str, sizes)]), node


def _without_sizes(node: fx.Node, sizes: list[int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a node without the sizes among them, which are appended to `sizes`."""

    def taken(value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            sizes.append(value)
            return "size"
        return value

    schema = schema_of(node)
    formals = [formal.name for formal in schema.arguments] if schema is not None else []
    args = [
        fx.node.map_aggregate(arg, taken) if name in _SIZES else arg
        for arg, name in zip(node.args, formals, strict=False)
    ]
    kwargs = {name: fx.node.map_aggregate(arg, taken) if name in _SIZES else arg for name, arg in node.kwargs.items()}
    return (*args, *node.args[len(args) :]), kwargs
