"""The reference of `wb.parity` and `wb.bisect`: steps on one device, by the unmodified model or by its captured blocks.

`PlainLoop` is what a researcher would write: the model as it was given, autograd, the experiment's update. `reference`
makes its steps in float64, and several times in the plan's precision with other roundings, which is the noise that
divisions are measured against (`workbench.analysis.deviation`).

Random roundings are those of Monte Carlo arithmetic (Parker, UCLA CSD-970002, 1997).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from workbench.analysis import deviation
from workbench.capture import Graph
from workbench.capture.captured_model import CapturedModel
from workbench.capture.losses import count_labels, on_device
from workbench.capture.operations import DROPOUT, drop_nothing, use_float64, with_mean_slope
from workbench.capture.outputs import find_loss
from workbench.capture.torch_internals import OpOverload
from workbench.execution import build
from workbench.execution.blocks.step_context import LabelCounts, StepContext, mix
from workbench.execution.checkpoint.save_load import entries
from workbench.execution.parallel.mesh import MeshCoordinate
from workbench.execution.trainer import Trainer
from workbench.experiment import Experiment
from workbench.optimizers.building import create_state, forget_state
from workbench.planning.plan import Memory, Plan, Stage

Batches = Sequence[tuple[Mapping[str, torch.Tensor], LabelCounts]]
"""The samples of each step, with the labels of each micro-batch."""
ROUNDINGS = (0, 1, 1, 1, 1, 1, deviation.COARSE, deviation.COARSE)
"""Coarseness of the random roundings of each repetition of all steps; 0 for the roundings of the arithmetic alone.

A bound of six times the largest of six draws of a normal distribution is exceeded by a seventh once in 10,000."""
OTHER_COMPUTATION = 1e-2
"""Relative difference of the first loss in float64 and in the plan's precision from which float64 is no reference."""


class Rounding:
    """Random roundings, each of which changes a floating-point number by up to `unit` of itself.

    With `bf16_weights`, all weights are rounded to bf16 before, as FSDP2 gathers them. Autocast does so in products
    alone. The rounding of a gain that begins at 1 is the same for many elements, so that scales and means show it.
    """

    def __init__(self, unit: float = 0.0, seed: int = 0, *, bf16_weights: bool = False) -> None:
        self.unit, self._seed, self._count, self._bf16_weights = unit, seed, 0, bf16_weights

    def of_weight(self, value: torch.Tensor) -> torch.Tensor:
        """Return rounded weights."""
        is_rounded = self._bf16_weights and value.is_floating_point()
        return self.of(value.bfloat16().to(value.dtype) if is_rounded else value)

    @property
    def changes_weights(self) -> bool:
        return bool(self.unit) or self._bf16_weights

    def of(self, value: torch.Tensor) -> torch.Tensor:
        """Return rounded numbers, through which a gradient passes as it is; other types and `unit` 0 are left alone."""
        if not self.unit or not value.is_floating_point():
            return value
        self._count += 1  # a generator of its own, because the model's must draw what they draw in the plan
        generator = torch.Generator(value.device).manual_seed(mix(self._seed, self._count))
        limits, old = torch.finfo(value.dtype), value.detach()
        draws = torch.rand(value.shape, dtype=torch.float64, device=value.device, generator=generator)
        new = (old.double() * (1 + self.unit * (2 * draws - 1))).clamp(limits.min, limits.max).to(value.dtype)
        return value + torch.where(old.isfinite(), new - old, 0.0)


# What ranks and references have: the state of a training, gradients, and the code of its blocks.


def state_of(trainer: Trainer, step: int, part: int) -> deviation.Numbers:
    """Return the weights, buffers and optimiser state of this rank, whole; a collective."""
    found: deviation.Numbers = {}
    blocks = first_blocks(trainer.graph)
    for key, name, value in entries(trainer):
        whole = trainer.full(name, value.to(trainer.context.device)) if value.ndim else value
        found[step, part, blocks.get(name, 0), key, -1] = whole.detach().to("cpu", copy=True)
    return found


def gradients_of(trainer: Trainer, step: int) -> deviation.Numbers:
    """Return the gradients of this rank's parameters, whole; a collective."""
    found: deviation.Numbers = {}
    blocks = first_blocks(trainer.graph)
    for name in trainer.stages.model_parameters():
        gradient = trainer.full_gradient(name)
        if gradient is not None:
            found[step, deviation.GRADIENT, blocks[name], name, -1] = gradient.detach().to("cpu", copy=True)
    return found


def first_blocks(graph: Graph) -> dict[str, int]:
    """Map parameters and buffers to the first block that reads them, whose backward completes a gradient."""
    return {name: b.index for b in reversed(graph.blocks) for name in (*b.parameters, *b.buffers)}


def block_on_rank(plan: Plan, graph: Graph, rank: int, key: deviation.Key) -> int:
    """Return the first block of a rank that has the tensor of a key."""
    _, part, first, name, _ = key
    if part not in (deviation.START, deviation.GRADIENT, deviation.UPDATE):
        return first
    stages = plan.stages_of(plan.pipeline_rank_of(rank))
    whole = name.partition(".")[2]  # behind `model.`, `average.` or `optim.`, which is followed by the slot
    for block in (graph.blocks[index] for stage in stages for index in range(stage.first_block, stage.end_block)):
        if any(each in (name, whole) or whole.startswith(f"{each}.") for each in (*block.parameters, *block.buffers)):
            return block.index
    return first


@torch.no_grad()
def set_state(trainer: Trainer, state: deviation.Numbers, rounding: Rounding) -> None:
    """Give a trainer on one device a state, with rounded weights."""
    values = {key[3]: value for key, value in state.items()}
    parameters = trainer.stages.model_parameters()
    begun = {name.removeprefix("optim.").rpartition(".")[0] for name in values if name.startswith("optim.")}
    if begun - {name for key, name, _ in entries(trainer) if key.startswith("optim.")}:
        create_state(trainer.optimizer)
    forget_state(trainer.optimizer, [parameter for name, parameter in parameters.items() if name not in begun])
    for key, name, value in entries(trainer):
        if key not in values:
            continue
        value.copy_(values[key])
        if key.startswith("model."):
            value.copy_(rounding.of_weight(value) if name in parameters else rounding.of(value))
    if trainer.sparse_weights is not None:
        trainer.sparse_weights.restore_patterns()


def with_changed_code(graph: Graph, change: Callable[[fx.GraphModule], None]) -> Graph:
    """Return the graph with copies of its blocks' code, each changed."""
    codes = {block.block_type: copy.deepcopy(block.code) for block in graph.blocks}
    for code in codes.values():
        change(code)
    return replace(graph, blocks=tuple(replace(block, code=codes[block.block_type]) for block in graph.blocks))


def on_one_device(plan: Plan) -> Plan:
    """Return the plan whose one stage computes the micro-batches of a plan's whole global batch."""
    parameters = plan.parameters
    nothing = Memory(0, 0, 0, 0, 0)
    return replace(
        plan,
        cluster=plan.cluster.resized(1),
        pipeline=1,
        data=1,
        tensor=1,
        zero=0,
        schedule="1f1b",
        num_microbatches=plan.num_microbatches * plan.data,
        stages=(Stage(0, 0, len(plan.block_names), parameters, 0.0, 0.0, 0, "none", nothing),),
        memory_limit_bytes=None,
        offload_optimizer=False,
        cuda_graphs=False,
        block_sparse=False,
        candidates=(),
    )


def captured_trainer(
    experiment: Experiment,
    plan: Plan,
    coordinate: MeshCoordinate,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    *,
    without_dropout: bool = False,
) -> Trainer:
    """Return the trainer of a plan of one device, whose captured blocks compute in fp32, bf16 or float64."""
    model = build.build_model(experiment.factory(), plan.model_bytes, device, experiment.seed)
    graph = CapturedModel(experiment, plan.micro_batch, model).step_graph(plan.loss_samples)
    if without_dropout:
        graph = with_changed_code(graph, drop_nothing)
    if dtype == torch.float64:
        model.double()
        graph = with_changed_code(graph, use_float64)
        constants = {n: c.double() if c.is_floating_point() else c for n, c in graph.constants.items()}
        graph = replace(graph, constants=constants)
    return trainer_under(experiment, plan, graph, model, coordinate, device)


def trainer_under(
    experiment: Experiment,
    plan: Plan,
    graph: Graph,
    model: torch.nn.Module,
    coordinate: MeshCoordinate,
    device: torch.device,
    *,
    compile: bool = False,
) -> Trainer:
    """Return the trainer of one rank under a plan; its weights are taken out of `model`."""
    context = StepContext(experiment.seed, device)
    stages = build.build_stage(
        plan,
        coordinate,
        model,
        graph,
        context,
        compile=compile,
        autocast=autocast_of(plan, device),
        compact=build.block_sparse_parameters(experiment, plan, coordinate, graph, device),
    )
    return Trainer(experiment, plan, graph, stages, context, coordinate)


def autocast_of(plan: Plan, device: torch.device) -> Any:
    """Return the factory of the context in which a plan's forward runs."""
    return partial(torch.autocast, device.type, torch.bfloat16) if plan.precision == "bf16" else nullcontext


# Modes: torch's operations in float64, and random numbers that do not depend on how the batch is divided.

DRAWN_FROM_TENSORS = frozenset({"multinomial", "poisson", "normal", "binomial", "_sample_dirichlet", "_standard_gamma"})
"""Operations whose distribution is that of a sample, so that its numbers cannot be given to every sample."""


class SameDraws(TorchDispatchMode):
    """Gives every sample the same random numbers, in every process, dropouts that keep everything, and mean slopes.

    A row of numbers depends on the operation and its size alone: a batch draws the same whole, in micro-batches and on
    replicas. What a dropout keeps is scaled as ever, so that a dropout that is lost shows.
    """

    supports_higher_order_operators = True

    def __init__(self, seen: set[str] | None = None) -> None:
        super().__init__()
        self._seen = set[str]() if seen is None else seen
        self._rows: dict[tuple[Any, ...], torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not isinstance(func, OpOverload) or torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if (leaked := with_mean_slope(name, args)) is not None:
            self._seen.add(name)
            return leaked
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, torch.Tensor) or "dropout" in name or "attention" in name:
            return result  # attention and recurrent layers at a rate of 0, or a device on which they draw themselves
        self._seen.add(name)
        if name.startswith("bernoulli"):
            return result.fill_(1)
        if not result.numel():
            return result
        size = result.shape[-1] if result.ndim > 1 or name == "randperm" else 1
        limits = tuple(arg for arg in args if isinstance(arg, (int, float)))
        key = name, result.dtype, size, limits
        if key not in self._rows:
            self._rows[key] = self._row(func, args, kwargs or {}, result, size)
        return result.copy_(self._rows[key] if result.ndim else self._rows[key][0])

    @staticmethod
    def _row(func: Any, args: Any, kwargs: Any, result: torch.Tensor, size: int) -> torch.Tensor:
        """Draw one row with a seed of its own: the first numbers of a larger tensor would be others."""
        if func._schema.name in ("aten::randperm", *(f"aten::{name}" for name in DRAWN_FROM_TENSORS)):
            given = args
        else:
            row = torch.empty(size, dtype=result.dtype, device=result.device)
            given = [
                row if arg is args[0] and isinstance(arg, torch.Tensor) else [size] if isinstance(arg, list) else arg
                for arg in args
            ]
        with torch.random.fork_rng([result.device] if result.is_cuda else []):
            torch.manual_seed(size)
            drawn: torch.Tensor = func(*given, **kwargs)
        return drawn.flatten()[:size].clone()


def keep_everything(code: fx.GraphModule) -> None:
    """Let dropouts scale all that they are given: those of tensor parallelism and of compiled code draw nothing."""
    for node in code.graph.find_nodes(op="call_function", target=DROPOUT):
        value, rate, trains = node.args
        if rate and trains:
            with code.graph.inserting_before(node):
                kept = code.graph.call_function(torch.ops.aten.div.Tensor, (value, 1 - rate))
            kept.meta = dict(node.meta)
            node.replace_all_uses_with(kept)
            code.graph.erase_node(node)
    code.recompile()


class InFloat64(TorchDispatchMode):
    """Makes float64 of every floating-point type that code casts to, or makes tensors of."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def widened(value: Any) -> Any:
            return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value

        args, kwargs = tree_map(widened, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __enter__(self) -> Any:
        self._before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *given: Any) -> None:
        super().__exit__(*given)
        torch.set_default_dtype(self._before)


# The loop


class PlainLoop:
    """The steps of a training as a loop of plain PyTorch makes them: the unmodified model, autograd, and the update.

    A trainer of one device shares the model's weights, and updates them as the experiment says; its blocks never run.
    """

    def __init__(
        self,
        experiment: Experiment,
        plan: Plan,
        graph: Graph,
        coordinate: MeshCoordinate,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        *,
        micro_batch: int | None = None,
        modes: Sequence[Callable[[], Any]] = (),
    ) -> None:
        """`plan` is of one device, and `graph` the model's.

        With `micro_batch`, gradients of micro-batches accumulate, as for a model that normalises by their statistics.
        Forwards and backwards run inside of the contexts that `modes` make.
        """

        def built() -> torch.nn.Module:
            model = build.build_model(experiment.factory(), plan.model_bytes, device, experiment.seed)
            return model.double() if dtype == torch.float64 else model

        self._model, self._micro_batch = built(), micro_batch
        self._counts = [on_device(count, device) for count in graph.label_counts]
        self.trainer = trainer_under(experiment, plan, graph, built(), coordinate, device)
        self.trainer._scalars = None  # what forward logs is not compared
        self._held = self.trainer.stages.model_parameters()
        for name, parameter in self._model.named_parameters():
            if name in self._held:  # in the model's own memory, of which it may have views
                self._held[name].data = parameter.data
        self._rest = {  # what the trainer does not hold
            name: value.detach().clone()
            for name, value in (*self._model.named_buffers(), *self._model.named_parameters())
            if name not in self._held
        }
        self._dtype, self._autocast = dtype, autocast_of(plan, device)
        self._modes = (*modes, *([InFloat64] if dtype == torch.float64 else []))
        self.others: deviation.Numbers = {}
        """Gradients of parameters that the captured graph does not have."""

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """The model's buffers, by their keys in the state of a training."""
        return {f"model.{name}": value.detach().to("cpu", copy=True) for name, value in self._model.named_buffers()}

    def restart(self) -> None:
        """Undo what forwards wrote to the model's buffers."""
        with torch.no_grad():
            for name, value in (*self._model.named_buffers(), *self._model.named_parameters()):
                if name in self._rest:
                    value.copy_(self._rest[name])

    def measure(self, step: int, batch: Mapping[str, torch.Tensor], label_counts: LabelCounts) -> torch.Tensor:
        """Compute the gradients of a step and return the scalars of its `StepResult`, as `Trainer.measure` does."""
        del label_counts
        trainer, graph = self.trainer, self.trainer.graph
        fields = {n: v.to(self._dtype) if v.is_floating_point() else v for n, v in batch.items()}
        size = self._micro_batch or len(next(iter(batch.values())))
        self._model.zero_grad(set_to_none=True)
        losses = []
        with ExitStack() as stack:
            for mode in self._modes:
                stack.enter_context(mode())
            for index, weight in enumerate(self._weights(batch, size)):
                rows = slice(index * size, (index + 1) * size)
                part = {name: value[rows].clone() for name, value in fields.items()}  # forward may write into a field
                with self._autocast():
                    loss = find_loss(self._model(**part), graph.loss_choice, part, graph.model)
                (loss.sum() * weight).backward()
                losses.append(loss.detach().sum() * weight)

        # The gradients where the experiment's update looks for them, and what the update does before it
        trainer.optimizer.zero_grad(set_to_none=True)
        self.others = {}
        for name, parameter in self._model.named_parameters():
            if parameter.grad is None:
                continue
            gradient = parameter.grad.detach()
            gradient = gradient.to_dense() if gradient.is_sparse else gradient.clone()
            if name in self._held:
                self._held[name].grad = gradient
            else:
                self.others[step, deviation.GRADIENT, 0, name, -1] = gradient.to("cpu", copy=True)
        if trainer.sparse_weights is not None:
            trainer.sparse_weights.mask_gradients(step)
        trainer._norms.free_untrained(step)
        return trainer.scalars(torch.stack(losses).sum())

    def _weights(self, batch: Mapping[str, torch.Tensor], size: int) -> list[float]:
        """Return the share of each micro-batch in a mean over the labels of all, or over the samples."""
        parts = len(next(iter(batch.values()))) // size
        if parts == 1 or not self._counts:
            return [1 / parts] * parts
        labels = count_labels(self._counts[0], batch, size)
        whole = self._counts[0].divisor(labels.sum().float())
        return [float(self._counts[0].divisor(each) / whole) for each in labels.float()]


Loop = PlainLoop | Trainer
"""Maker of the steps of a training."""


def trained(
    source: Loop,
    batches: Iterable[tuple[Any, LabelCounts]],
    rounding: Rounding,
    mode: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> deviation.Numbers:
    """Train on each batch, and return the start, each loss and gradient, and the weights at the end; a collective.

    Gradients are those before they are clipped. With a rounding, each step computes with rounded weights, and updates
    with rounded gradients. Passes run inside of the context that `mode` makes. No key says in which block a tensor is:
    blocks depend on the plan.
    """
    trainer = source.trainer if isinstance(source, PlainLoop) else source
    numbers, step = state_of(trainer, 0, deviation.START), -1
    parameters = trainer.stages.model_parameters().values()
    for step, (batch, counts) in enumerate(batches):
        with torch.no_grad():
            weights = [parameter.clone() for parameter in parameters] if rounding.changes_weights else []
            for parameter in parameters if rounding.changes_weights else ():
                parameter.copy_(rounding.of_weight(parameter))
            with torch.enable_grad(), mode():
                scalars = source.measure(step, batch, label_counts=counts)
            for parameter, weight in zip(parameters, weights, strict=False):
                parameter.copy_(weight)
            numbers[step, deviation.OUTPUT, 0, deviation.LOSS, -1] = scalars[0].to("cpu", copy=True)
            numbers[step, deviation.GRADIENT, 0, deviation.NORM, -1] = scalars[1].sqrt().to("cpu", copy=True)
            numbers |= gradients_of(trainer, step) | (source.others if isinstance(source, PlainLoop) else {})
            for parameter in parameters if rounding.unit else ():
                if parameter.grad is not None:
                    parameter.grad.copy_(rounding.of(parameter.grad))
        trainer.update(step, scalars)
    ended = state_of(trainer, step, deviation.UPDATE)
    if isinstance(source, PlainLoop):  # whose forward writes to buffers of its own
        buffers = source.buffers
        ended |= {key: buffers[key[3]] for key in ended if key[3] in buffers}
    numbers |= {key: value for key, value in ended.items() if key[3].startswith("model.")}
    return {(s, part, 0, name, index): value for (s, part, _, name, index), value in numbers.items()}


@dataclass(frozen=True)
class Reference:
    """The numbers of one device, and how far those of repetitions with other roundings are from them."""

    numbers: deviation.Numbers
    repetitions: Sequence[tuple[int, Mapping[deviation.Key, deviation.Distance]]]
    """Coarseness of the roundings of each repetition, with its distances."""
    dtype: str
    """`float64`, or `float32` where the model does not compute in float64."""

    @staticmethod
    def of(
        make: Callable[[torch.dtype], Loop],
        batches: Batches,
        precision: str,
        *,
        exact: bool = True,
        shards: bool = False,
    ) -> Reference:
        """Make the steps in float64 unless `exact` is False, and several times in fp32 or bf16 with other roundings.

        `make` returns what makes the steps in a type. With `shards`, some of the plans gather weights by FSDP2.
        """
        rounded = make(torch.float32)
        trainer = rounded.trainer if isinstance(rounded, PlainLoop) else rounded
        start = state_of(trainer, 0, deviation.START)
        half_ulp = torch.finfo(torch.bfloat16 if precision == "bf16" else torch.float32).eps / 2

        def run(source: Loop, coarse: int = 0, seed: int = 0, bf16_weights: bool = False) -> deviation.Numbers:
            if isinstance(source, PlainLoop):
                source.restart()
            set_state(source.trainer if isinstance(source, PlainLoop) else source, start, Rounding())
            return trained(source, batches, Rounding(coarse * half_ulp, seed, bf16_weights=bf16_weights))

        found, dtype, plain = None, "float64", run(rounded)
        if exact:
            try:
                found = run(make(torch.float64))
            except (RuntimeError, TypeError) as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                print(f"The model does not compute in float64, so that the reference is fp32: {error}", flush=True)
                torch._dynamo.reset()  # a `torch.cond` that failed in a dispatch mode would fail outside of it as well
        loss = (0, deviation.OUTPUT, 0, deviation.LOSS, -1)
        if found is None or not torch.isclose(found[loss], plain[loss], rtol=OTHER_COMPUTATION, equal_nan=True):
            found, dtype = plain, "float32"
        unmoved = {key for key, value in found.items() if key[1] == deviation.GRADIENT and not value.any()}
        reference = Reference({key: value for key, value in found.items() if key not in unmoved}, (), dtype)
        repeated = [(coarse, run(rounded, coarse, seed) if seed else plain) for seed, coarse in enumerate(ROUNDINGS)]
        if shards and precision == "bf16":
            repeated += [(coarse, run(rounded, coarse, len(ROUNDINGS) + coarse, True)) for coarse in (0, 1)]
        return replace(reference, repetitions=[(coarse, reference.distances(each)) for coarse, each in repeated])

    def distances(self, found: deviation.Numbers) -> dict[deviation.Key, deviation.Distance]:
        """Return the distance of each tensor from the reference; infinite for a gradient that it does not have."""
        return self.distances_of_shards(found, {})[0]

    def distances_of_shards(
        self, found: deviation.Numbers, owners: Mapping[str, torch.Tensor]
    ) -> tuple[dict[deviation.Key, deviation.Distance], dict[deviation.Key, deviation.Held]]:
        """Return the same, and that of each shard of the tensors whose elements have `owners`."""
        before = {key[3]: value for key, value in self.numbers.items() if key[1] == deviation.START}
        new = [k for k, v in found.items() if k[1] == deviation.GRADIENT and k not in self.numbers and bool(v.any())]
        whole, shards = deviation.distances_of_shards(self.numbers, found, before, owners)
        return whole | dict.fromkeys(new, deviation.MISSING), shards

    def rows(
        self,
        ranks: Sequence[Mapping[deviation.Key, deviation.Distance]],
        shards: Sequence[Mapping[deviation.Key, deviation.Held]],
        place: Callable[[int, deviation.Key], int],
        unlike: Iterable[str] = (),
    ) -> list[deviation.Row]:
        """Return what is judged of the distances of all ranks, that of all gradients together included.

        `shards` are those of each rank, and `place` returns the block of a rank that has a tensor. Tensors that are
        `unlike` on purpose are left out.
        """
        numbers = {key: value for key, value in self.numbers.items() if key[3] not in unlike}
        every = [self._of_every_gradient(each) for each in (ranks, *([each] for _, each in self.repetitions))]
        repetitions = [
            (coarse, {**each, **of_all}) for (coarse, each), of_all in zip(self.repetitions, every[1:], strict=True)
        ]
        numbers |= {key: torch.ones(1) for key in every[0]}
        return deviation.compared(numbers, repetitions, [{**ranks[0], **every[0]}, *ranks[1:]], place, shards)

    def _of_every_gradient(
        self, ranks: Sequence[Mapping[deviation.Key, deviation.Distance]]
    ) -> dict[deviation.Key, deviation.Distance]:
        """Return the distance of all gradients of each step as one vector: the norm of the difference over the norm."""
        squares: dict[int, list[float]] = {}
        for key, value in self.numbers.items():
            if key[1] == deviation.GRADIENT and key[3] != deviation.NORM:
                norm = value.double().norm().item()
                size = max((each[key].size for each in ranks if key in each), default=float("inf"))
                sums = squares.setdefault(key[0], [0.0, 0.0])
                sums[0] += (size * norm) ** 2
                sums[1] += norm**2
        return {
            (step, deviation.GRADIENT, 0, deviation.EVERY, -1): replace(
                deviation.SAME, size=(off / (total or 1.0)) ** 0.5
            )
            for step, (off, total) in squares.items()
        }

    def save(self, file: Any) -> None:
        """Write the reference to a file that `load` reads."""
        repetitions = [(coarse, {k: astuple(d) for k, d in each.items()}) for coarse, each in self.repetitions]
        torch.save({"numbers": self.numbers, "repetitions": repetitions, "dtype": self.dtype}, file)

    @staticmethod
    def load(file: Any) -> Reference:
        """Return the reference in a file that `save` wrote."""
        stored = torch.load(file, mmap=True)
        repetitions = [
            (coarse, {key: deviation.Distance(*each) for key, each in distances.items()})
            for coarse, distances in stored["repetitions"]
        ]
        return Reference(stored["numbers"], repetitions, stored["dtype"])
