"""Verdict by numbers on whether micro-batches compute the loss of the whole batch.

The model's own forward over a few samples is compared with the captured graph over their micro-batches, combined as a
step combines them: the loss, and its gradient for every parameter. The weights and samples are not those of the
training, so that no wrong combination is right by chance at a symmetric point.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from workbench.base.errors import CaptureError, in_words
from workbench.base.tensors import TensorSpec
from workbench.capture.coupling.gathering import join_rows
from workbench.capture.export.opaque import opaque_calls, same_numbers
from workbench.capture.graph import Block, Graph
from workbench.capture.losses import code_on, count_labels, on_device
from workbench.capture.model import capture
from workbench.capture.operations import dtype_of, names, op_name, shape_of, with_mean_slope
from workbench.capture.outputs import LossChoice, find_loss
from workbench.capture.torch_internals import (
    HigherOrderOperator,
    OpOverload,
    differentiable,
    enter_autocast,
    exit_autocast,
    forgotten_by_dynamo,
)
from workbench.data.datasets import untouched_generators
from workbench.data.sampling import IGNORED

ALWAYS_FLOPS = 2e8
"""Operations of the forward of one micro-batch up to which numbers are compared even if nothing is unknown."""
MOST_FLOPS = 1e10
"""Operations up to which they are compared if something is unknown: about ten seconds on two cores."""
MOST_PARAMETERS = 300_000_000
"""Parameters up to which a model is built for that."""
LOSS_TOLERANCE = 1e-5
"""Relative difference of two losses that rounding in fp32 explains."""
GRADIENT_TOLERANCE = 1e-3
"""Difference of two gradients of a parameter, relative to its norm, that rounding in fp32 explains."""
NOISE_FACTOR = 30
"""Multiple of the difference that weights rounded otherwise make, which rounding explains, too.

Another order of the samples would be no measure of it: a loss that depends on the order compares samples, as a mixture
of experts does whose experts take the first tokens of a batch."""
_BF16_FACTOR = 300
"""Factor of both tolerances for a forward that casts to bf16 or fp16 itself."""
PARTS = (2, 3)
"""Micro-batches of each trial. Two numbers, since a wrong factor can be right for one of them."""
Batch = Mapping[str, torch.Tensor]
_PRODUCTS = names("linear matmul mm bmm addmm baddbmm einsum scaled_dot_product_attention")
_DRAWS = names(
    "bernoulli bernoulli_ normal normal_ uniform_ rand randn rand_like randn_like randint randint_like random_ "
    "exponential_ log_normal_ geometric_ cauchy_ multinomial poisson binomial _standard_gamma _sample_dirichlet"
)


def forward_flops(graph: Graph) -> float:
    """Return roughly the floating point operations of one forward of one micro-batch."""
    by_type = {block.block_type: sum(map(_flops, block.code.graph.nodes)) for block in graph.blocks}
    return sum(by_type[block.block_type] for block in graph.blocks)


def is_compared_by_plan(graph: Graph, samples: int | None = None) -> bool:
    """Return True if the forward of so many samples, a micro-batch by default, is small enough for a CPU."""
    flops = forward_flops(graph) * (samples or graph.micro_batch) / graph.micro_batch
    return flops <= MOST_FLOPS and graph.parameter_count <= MOST_PARAMETERS


def is_checked_by_plan(graph: Graph, samples: int | None = None) -> bool:
    """Return True if `division_of` compares a graph of so many samples, a micro-batch by default, with its model."""
    flops = forward_flops(graph) * (samples or graph.micro_batch) / graph.micro_batch
    is_asked = bool(graph.unknown_coupling) or flops <= ALWAYS_FLOPS
    return not graph.coupled and is_asked and is_compared_by_plan(graph, samples)


def _flops(node: Any) -> float:
    if node.op != "call_function":
        return 0
    made, name = _numel(shape_of(node)), op_name(node)
    shapes = [shape_of(source) for source in node.all_input_nodes]
    if "conv" in name:
        return 2.0 * made * _numel(shapes[1]) / max(1, shapes[1][0])
    if name == "scaled_dot_product_attention":  # its operands may be one tensor
        return 4.0 * made * _numel(shape_of(node.args[1])[-2:-1])
    if name not in _PRODUCTS or len(shapes) < 2:
        return 10.0 * made  # bound by memory
    if name == "einsum":
        return 2.0 * math.sqrt(made * _numel(shapes[0]) * _numel(shapes[1]))
    left = shapes[1] if name in ("addmm", "baddbmm") else shapes[0]
    return 2.0 * made * _numel(left[-1:])


def _numel(shape: Sequence[Any]) -> int:
    return math.prod(size for size in shape if isinstance(size, int))


@dataclass(frozen=True)
class _Result:
    """A loss and its gradients by parameter."""

    loss: torch.Tensor
    gradients: Mapping[str, torch.Tensor]

    def differs_from(self, other: _Result) -> tuple[float, float, str]:
        """Return the relative differences of the loss and of the gradient that differs most, and its parameter."""
        size = torch.stack([gradient.norm() for gradient in self.gradients.values()]).norm()
        # A gradient far below all others is rounding, and counts relative to 1e-5 of them.
        least = 1e-5 * float(size) + 1e-12
        gradients = [
            (float((other.gradients[name] - mine).norm()) / (float(mine.norm()) + least), name)
            for name, mine in self.gradients.items()
        ]
        return _relative(other.loss, self.loss), *max(gradients, default=(0.0, ""))

    @property
    def is_finite(self) -> bool:
        return bool(self.loss.isfinite()) and all(bool(value.isfinite().all()) for value in self.gradients.values())


@dataclass(frozen=True)
class Division:
    """Verdict on dividing the batch of a model."""

    coupled: tuple[str, ...] = ()
    """Reasons why the batch must stay whole: operations that mix samples, with their lines, or numbers that differ."""
    note: str = ""
    """A sentence on what could not be decided."""


def division_of(graph: Graph, build: Callable[[], nn.Module], samples: Callable[[int, int], Batch]) -> Division:
    """Decide whether the runtime's combination of micro-batches is the loss of the whole batch.

    Operations that certainly mix samples decide alone. Otherwise numbers do, if the model is small enough to compare
    them in seconds; for small models they confirm what is known.

    Args:
        graph: the captured model; its micro-batch is the size of the parts.
        build: makes the model on the CPU.
        samples: returns a batch of a number of samples; the second argument counts the trials.

    Raises:
        CaptureError: the captured graph computes another loss than the model.
    """
    if graph.coupled:
        return Division(graph.coupled)
    flops, unknown, is_small = forward_flops(graph), graph.unknown_coupling, is_checked_by_plan(graph)
    obstacle = f"the model is too large to compare numbers here ({flops / 1e9:,.0f} GFLOP a forward)"
    if is_small:
        try:
            fault = division_fault(graph, build, samples, PARTS)
        except CaptureError:
            raise
        except Exception as error:  # the forward needs another device, or samples of other values
            obstacle = f"its forward raised {in_words(error)} on the CPU"
        else:
            after = f"; the batch is not followed past {unknown}" if unknown else ""
            return Division((f"{fault}{after}",) if fault else ())
    if not unknown:
        return Division()
    way = "If it does, fix micro_batch to the global batch."
    if not is_small:
        way = (
            "A run that divides the batch compares numbers on its first device before the first update. If the loss "
            "does, batch_coupling='gather' keeps it whole."
        )
    return Division(
        note=f"Whether the loss compares samples of one batch is not known: {obstacle}, and the batch is not followed "
        f"past {unknown}. {way}"
    )


@forgotten_by_dynamo()
def division_fault(
    graph: Graph, build: Callable[[], nn.Module], samples: Callable[[int, int], Batch], parts_of_trials: Sequence[int]
) -> str:
    """Return how the loss of a whole batch differs from that of its micro-batches; "" if they are equal.

    `parts_of_trials` has the number of micro-batches of each trial.
    """
    size, model = graph.micro_batch, build().train()
    device = next(model.parameters(), torch.empty(0)).device
    with untouched_generators(device), _same_kernels(device), differentiable():
        torch.manual_seed(0)
        comparison = _Comparison(graph, model, device, samples)
        for trial, parts in enumerate(parts_of_trials):
            for change in (trial, 2 * trial):  # it may not take samples that were changed
                try:
                    batch = samples(parts * size, change)
                    fault = comparison.fault(batch)
                    break
                except Exception:
                    if trial == 0:
                        raise
            else:
                break
            if not fault:
                continue
            one = {name: field[:size] for name, field in batch.items()}
            if graph.gathered or not (wrong := comparison.fault(one)):
                return fault
            # Not even one micro-batch has the loss of the graph: the model is another one each time, or we are wrong.
            twice = (capture(build(), graph.batch, name=graph.model, loss=graph.loss_choice) for _ in range(2))
            types = [[block.block_type for block in each.blocks] for each in twice]
            if types[0] == types[1]:
                raise comparison.wrong(wrong, one)
            pairs = zip(graph.blocks, *types, strict=False)
            unlike = next((block.name for block, *both in pairs if both[0] != both[1]), "loss")
            raise CaptureError(
                f"{graph.model} computes something else each time it is built, in its block {unlike}, although "
                "Python's, NumPy's and torch's generators were seeded alike. Its constructor takes a number that no "
                "seed decides, from random.SystemRandom(), numpy.random.default_rng() or the clock. Seed what it "
                "draws, for instance by numpy.random.default_rng(torch.initial_seed())."
            )
    return ""


@forgotten_by_dynamo()
def check_graph(graph: Graph, model: nn.Module, samples: Callable[[int, int], Batch]) -> str:
    """Compare the graph of one micro-batch with its model: the loss, and its gradient for every parameter.

    Two micro-batches are compared, the second with changed values. Returns "" if both have equal numbers, and otherwise
    a clause that says why they could not be compared.

    Args:
        graph: the graph, captured of this model.
        model: the model in train mode on the device that it was captured for; its weights are changed.
        samples: returns a batch of a number of samples; the second argument counts the trials.

    Raises:
        CaptureError: the captured graph computes another loss, or other gradients, than the model.
    """
    device = next(model.parameters()).device
    with untouched_generators(device), _same_kernels(device), differentiable():
        torch.manual_seed(0)
        comparison = _Comparison(graph, model, device)
        for trial in (0, 2):  # 1 would change numbers that may index a table, at which a GPU fails for good
            try:
                batch = samples(graph.micro_batch, trial)
                fault = comparison.fault(batch)
            except Unrepeatable:
                return "its forward computes something else each time that it is called"
            except Exception:  # it may not take samples that were changed
                if trial == 0:
                    raise
                break
            if not comparison.has_compared:
                return "its loss or a gradient is not finite with the weights of the comparison"
            if fault:
                raise CaptureError(
                    f"{comparison.wrong(fault, batch)} Nothing was updated. If there is nothing like that, "
                    "capture has misread an operation: write that part with others, and report it with the model."
                )
    return ""


def comparison_bytes(graph: Graph, samples: int) -> int:
    """Return about the bytes that `check_graph` takes for a micro-batch of so many samples, beside the model itself.

    These are a copy of the weights, its gradients twice, and a changed copy where rounding is measured; and what the
    operations of one forward make. Attention makes its scores here.
    """
    by_type = {block.block_type: sum(map(_made_bytes, block.code.graph.nodes)) for block in graph.blocks}
    activations = sum(by_type[block.block_type] for block in graph.blocks)
    return 4 * 4 * graph.parameter_count + activations * samples // graph.micro_batch


def _made_bytes(node: Any) -> int:
    if node.op != "call_function":
        return 0
    made = _numel(shape_of(node))
    if op_name(node) == "scaled_dot_product_attention":
        query, key = (shape_of(each) for each in node.args[:2])
        made += 3 * _numel(query[:-1]) * _numel(key[-2:-1])
    return 4 * made


@contextmanager
def _same_kernels(device: torch.device) -> Iterator[None]:
    """Multiply in full fp32, and run on a GPU the operations that `_same_for_each_sample` knows from the CPU."""
    precision, is_cpu = torch.get_float32_matmul_precision(), device.type == "cpu"
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.backends.cudnn.flags(enabled=False), nullcontext() if is_cpu else sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)


def has_constants(graph: Graph) -> bool:
    """Return True if a graph holds tensors of its own, which have no values if it was captured on the meta device."""
    codes = [code for count in graph.label_counts for code in (count.code, count.of_total) if code is not None]
    return bool(graph.constants) or any(list(code.buffers()) for code in codes)


def samples_from(examples: Batch | None, random: Callable[[int, int], Batch]) -> Callable[[int, int], Batch]:
    """Return the `samples` of `division_of`: real ones, and in further trials the same with changed values.

    The change meets coincidences of the data: weights that are all one, masks that hide nothing. In trial 1, a field
    that is equal in all examples, such as a flag that none has, differs from sample to sample, too. Without `examples`,
    `random` makes all samples.
    """
    if examples is None:
        return random
    known = _size(examples)
    equal = {name for name, field in examples.items() if bool((field == field[:1]).all())}

    def draw(count: int, trial: int) -> Batch:
        generator = torch.Generator().manual_seed(trial)
        index = torch.cat([torch.randperm(known, generator=generator) for _ in range(math.ceil(count / known))])[:count]
        batch = {name: field[index].cpu() for name, field in examples.items()}
        if trial == 1:
            batch |= {name: _unlike(batch[name], generator) for name in equal}
        return {name: _changed(field, generator) for name, field in batch.items()} if trial else batch

    return draw


def _unlike(field: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return values of which some are 1 where they were 0, or 0 where they were another number; masks of ones stay."""
    if field.ndim > 1 and bool((field == 1).all()):
        return field
    is_other = torch.rand(field.shape, generator=generator) < 0.5
    if field.ndim > 1:
        is_other[:, 0] = False  # of a mask of what is left out, something stays
    return torch.where(is_other, field == 0, field)


def _changed(field: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return values between half and all of the old ones; for a mask of ones, one with zeros.

    Large values are brought to a root mean square of one: a model with changed weights may saturate on them, and a loss
    and a gradient of zero are equal however they were combined.
    """
    share = torch.rand(field.shape, generator=generator)
    if field.is_floating_point():
        size = max(1.0, float(field.double().square().mean().sqrt())) if field.numel() else 1.0
        return field * ((0.5 + share / 2) / (size if math.isfinite(size) else 1.0)).to(field.dtype)
    if field.is_complex() or field.ndim < 2 or not bool((field == 1).all()):
        return field
    kept = share > 0.3
    kept[:, 0] = True  # a sample of which nothing is kept would divide by zero in many models
    return field * kept.to(field.dtype)


class _made(TorchDispatchMode):  # noqa: N801
    """Collect what operations make of given shapes; the value of the `with` block is the list."""

    supports_higher_order_operators = True

    def __init__(self, shapes: Collection[torch.Size]) -> None:
        super().__init__()
        self._shapes, self._tensors = shapes, list[torch.Tensor]()

    def __enter__(self) -> list[torch.Tensor]:
        super().__enter__()
        return self._tensors

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = (leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        self._tensors += [leaf.detach() for leaf in leaves if leaf.shape in self._shapes]
        return result


class Unrepeatable(CaptureError):
    """A forward is no function of its samples, weights and seeds."""


class _Comparison:
    """A model with changed weights, and its graph that reads the same weights."""

    def __init__(
        self,
        graph: Graph,
        model: nn.Module,
        device: torch.device,
        samples: Callable[[int, int], Batch] | None = None,
    ) -> None:
        """`samples` are for a graph that may have been captured on the meta device; its constants have no values."""
        self._model, self._device = model, device
        self.has_compared = False
        """True if numbers of the last batch were compared, because they were finite."""
        for parameter in model.parameters():
            # Away from zeros, ones and equal rows, for which a wrong combination may give the right number. 0.02 is the
            # size of usual first weights.
            if parameter.is_floating_point():
                parameter.data.mul_(1 + 0.05 * torch.randn_like(parameter)).add_(
                    torch.randn_like(parameter), alpha=0.02
                )
        if samples is not None and not graph.gathered and has_constants(graph):
            examples = samples(PARTS[0] * graph.micro_batch, 0)
            graph = capture(model, graph.batch, name=graph.model, loss=graph.loss_choice, examples=examples)
        self._graph = graph
        self._counts = [on_device(count, device) for count in graph.label_counts]
        self._codes = {block.block_type: code_on(block.code, device) for block in graph.blocks}
        self._calls = [call for block in graph.blocks for call in opaque_calls(block.code.graph)]
        self._parameters = dict(model.named_parameters())
        # Also those of which the graph says that they get no gradient
        self._trained = {name: each for name, each in self._parameters.items() if each.requires_grad}
        self._buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        nodes = [node for block in graph.blocks for node in block.code.graph.nodes]
        # Code that compiles a part of itself, as `torch.cond` does for its backward.
        is_compiled = any(isinstance(node.target, HigherOrderOperator) for node in nodes)
        self._compiles = is_compiled or any(call.compiles for call in self._calls)
        casts = (node.target in (enter_autocast, exit_autocast) for node in nodes)
        is_low = any(casts) or any(dtype_of(node) in (torch.bfloat16, torch.float16) for node in nodes)
        self._factor = _BF16_FACTOR if is_low else 1

    def fault(self, batch: Batch) -> str:
        batch = {name: field.to(self._device) for name, field in batch.items()}
        tolerances = self._factor * LOSS_TOLERANCE, self._factor * GRADIENT_TOLERANCE
        with same_numbers(self._model, self._calls), _same_for_each_sample(self._compiles):
            whole = self._whole(batch)
            self.has_compared = whole.is_finite
            if not whole.is_finite:
                return ""
            divided = self._divided(batch)
            parts = _size(batch) // self._graph.micro_batch
            where = f"{parts} micro-batches" if parts > 1 else "the graph"
            if not divided.is_finite:
                return f"{_size(batch)} samples have finite losses and gradients, and in {where} not"
            found = whole.differs_from(divided)
            if found[0] <= tolerances[0] and found[1] <= tolerances[1]:
                return ""
            again = whole.differs_from(self._whole(batch))
            if again[0] > tolerances[0] or again[1] > tolerances[1]:
                raise Unrepeatable(
                    f"The forward of {self._graph.model} computes something else each time that it is called with the "
                    f"same samples, weights and seeds (losses differ by {again[0]:.2%}), and capture would repeat one "
                    "of them in every step: it reads what changes from call to call, such as the clock or a file. Make "
                    "that a field of the batch, or a buffer that forward updates in place."
                )
            with self._rounded_otherwise():
                noise = whole.differs_from(self._whole(batch))
        limits = [max(least, NOISE_FACTOR * each) for least, each in zip(tolerances, noise[:2], strict=True)]
        if found[0] <= limits[0] and found[1] <= limits[1]:
            return ""
        known, loss, other = f"{_size(batch)} samples have the loss", float(whole.loss), float(divided.loss)
        if found[0] <= limits[0]:
            same = f"{known} {loss:.4g}, also in {where}, which differ{'s' * (parts == 1)}"
            return f"{same} in the gradient of {found[2]} by {found[1]:.2%} of its norm"
        digits = next((each for each in range(4, 9) if f"{loss:.{each}g}" != f"{other:.{each}g}"), 9)
        numbers = f"{known} {loss:.{digits}g}, and {other:.{digits}g} in {where}"
        if _relative(parts * divided.loss, whole.loss) <= limits[0]:
            return f"{numbers}: it is a sum over the samples; divide it by their number"
        return numbers

    def wrong(self, fault: str, batch: Batch) -> CaptureError:
        """Return the error that the graph of a micro-batch differs from the model by `fault`, with a way out."""
        said = f"The captured graph of {self._graph.model} does not compute the model's loss: {fault}."
        with suppress(Exception):  # it only says where
            said += f" {self._reason(batch)}"
        return CaptureError(said)

    def _reason(self, batch: Batch) -> str:
        batch = {name: field.to(self._device) for name, field in batch.items()}
        with same_numbers(self._model, self._calls), _same_for_each_sample(self._compiles):
            self._renew_buffers()
            divisors = [each.divisor(count_labels(each, batch, _size(batch)).sum().float()) for each in self._counts]
            values = self._interpreted(self._graph.blocks, batch, {}, divisors)
            self._renew_buffers()
            with _made({value.shape for value in values.values()}) as made:
                self._model(**batch)

        def is_made(name: str) -> bool:
            # The loss has been compared strictly. Other values only name the block, and are compared loosely.
            value, is_loss = values[name], name == self._graph.loss
            limits = (self._factor * LOSS_TOLERANCE, 0.0) if is_loss else (1e-3, 1e-4)
            alike = (each for each in made if (each.shape, each.dtype) == (value.shape, value.dtype))
            return any(torch.allclose(each, value, *limits) for each in alike)

        parted = (block for block in self._graph.blocks if not all(map(is_made, block.sends)))
        if (first := next(parted, None)) is None:
            return (
                "All values that they make are equal, so that they differ in what has a gradient: a detach, a no_grad "
                "or a backward of forward's own."
            )
        module = dict(self._model.named_modules()).get(first.name)
        named = first.name if module is None else f"{first.name} ({type(module).__name__})"
        return (
            f"They part in {named}, which computes with what was fixed when it was captured, such as a tensor or a "
            "number that was made of its weights before. Compute it in forward, from the parameters themselves."
        )

    @contextmanager
    def _rounded_otherwise(self) -> Iterator[None]:
        """Change every weight by about the last bit of fp32 inside a `with` block."""
        before = [parameter.detach().clone() for parameter in self._model.parameters()]
        for parameter in self._model.parameters():
            if parameter.is_floating_point():
                parameter.data.mul_(1 + torch.finfo(torch.float32).eps * torch.randn_like(parameter))
        try:
            yield
        finally:
            for parameter, value in zip(self._model.parameters(), before, strict=True):
                parameter.data.copy_(value)

    def _whole(self, batch: Batch) -> _Result:
        graph = self._graph
        torch.manual_seed(0)
        self._renew_buffers()
        return self._result(find_loss(self._model(**batch), graph.loss_choice, batch, graph.model))

    def _divided(self, batch: Batch) -> _Result:
        size, samples = self._graph.micro_batch, _size(batch)
        torch.manual_seed(0)
        parts = [
            {name: field[first : first + size] for name, field in batch.items()} for first in range(0, samples, size)
        ]
        totals = [count_labels(count, batch, size).sum().float() for count in self._counts]
        pairs = zip(self._counts, totals, strict=True)
        graph, count = self._graph, 1 if self._graph.gathered else len(parts)
        divisors = [each.divisor(total) / count for each, total in pairs]
        blocks = graph.blocks[:-1] if graph.gathered else graph.blocks
        computed = []
        for part in parts:
            self._renew_buffers()
            computed.append(self._interpreted(blocks, part, {}, divisors))
        if not graph.gathered:
            return self._result(torch.stack([values[graph.loss] for values in computed]).mean())
        gathered = {rows.name: join_rows(rows, [values[rows.name] for values in computed]) for rows in graph.gathered}
        self._renew_buffers()
        return self._result(self._interpreted(graph.blocks[-1:], batch, gathered, divisors)[graph.loss])

    def _interpreted(
        self, blocks: Sequence[Block], batch: Batch, values: dict[str, torch.Tensor], divisors: list[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return `values` and what blocks of the graph compute, one after another over a table of values."""
        buffers = {**dict(self._model.named_buffers()), **self._graph.constants}
        for block in blocks:
            sent = self._codes[block.block_type](
                *(self._parameters[name] for name in block.parameters),
                *(buffers[name] for name in block.buffers),
                *(values[name] for name in block.receives),
                *(batch[name] for name in block.inputs),
                *(divisors[index] for index in block.counts),
            )
            values |= dict(zip(block.sends, sent, strict=True))
        return values

    def _result(self, loss: torch.Tensor) -> _Result:
        """Take the gradients as training does: the backward of a reversible network adds to `grad` itself."""
        for parameter in self._trained.values():
            parameter.grad = None
        loss.float().sum().backward()
        gradients = {key: torch.zeros_like(p) if p.grad is None else p.grad for key, p in self._trained.items()}
        return _Result(loss.detach().float().sum(), gradients)

    def _renew_buffers(self) -> None:
        """Undo what a forward wrote to the buffers: each micro-batch starts from those of the whole batch."""
        for name, value in self._buffers.items():
            module, _, own = name.rpartition(".")
            self._model.get_submodule(module)._buffers[own] = value.clone()


class _same_for_each_sample(TorchDispatchMode):  # noqa: N801
    """Make torch's random numbers and BatchNorm's statistics independent of how many samples a batch has.

    Each sample gets the same random numbers, dropout keeps everything, random slopes are their mean, and BatchNorm
    normalises by its running averages: what these do to a micro-batch is documented and no coupling of samples.
    """

    supports_higher_order_operators = True

    def __init__(self, compiles: bool) -> None:
        super().__init__()
        self._drawn: dict[tuple[Any, ...], torch.Tensor] = {}
        self._compiles = compiles

    def ignore_compile_internals(self) -> bool:  # type: ignore[override]
        return self._compiles

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not isinstance(func, OpOverload):  # FlexAttention, which draws nothing
            return func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name == "native_dropout":  # a GPU's
            value, probability, _ = args
            return value / (1 - probability), torch.ones_like(value, dtype=torch.bool)
        if name in ("native_batch_norm", "native_batch_norm_backward") and args[0].shape[0] > 1:
            return func(*_by_running_averages(name, args), **(kwargs or {}))
        if (leaked := with_mean_slope(name, args)) is not None:
            return leaked
        result = func(*args, **(kwargs or {}))
        if name == "randperm":
            return self._remembered((name, result.numel()), result)
        if name not in _DRAWS or not isinstance(result, torch.Tensor) or not result.numel():
            return result
        if name in ("bernoulli", "bernoulli_"):
            return result.fill_(1)
        row = result.flatten()[: result.shape[-1]].clone() if result.ndim > 1 else result.flatten()[0].clone()
        limits = tuple(arg for arg in args if isinstance(arg, (int, float)))
        operation = name.replace("randint_like", "random_")  # which an export replaces by the former
        return result.copy_(self._remembered((operation, result.dtype, row.numel(), limits), row))

    def _remembered(self, key: tuple[Any, ...], drawn: torch.Tensor) -> torch.Tensor:
        return self._drawn.setdefault(key, drawn)


def _by_running_averages(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a BatchNorm that does not take its statistics from the batch, but 0 and 1 if it has none.

    These are the positional arguments of `aten::native_batch_norm` and of its backward.
    """
    is_forward = name == "native_batch_norm"
    value, (mean, variance) = args[0] if is_forward else args[1], args[3:5]
    channels = value.new_zeros(value.shape[1])
    averages = channels if mean is None else mean, channels + 1 if variance is None else variance
    if is_forward:
        return (*args[:3], *averages, False, *args[6:])
    return (*args[:3], *averages, *args[5:7], False, *args[8:])


def _relative(one: torch.Tensor, other: torch.Tensor) -> float:
    return abs(float(one) - float(other)) / max(abs(float(other)), 1e-12)


def _size(batch: Batch) -> int:
    return len(next(iter(batch.values())))


# Labels that are the inputs: the samples of a causal model of text. The model shifts them, or it learns to copy.

SHORT = 16
"""Tokens of the samples with which that is tried, or all where the model takes no fewer."""
MIXED_CHANGE = 1e-4
"""Relative change of a loss that is no rounding in fp32."""
SEEN_CHANGE = 3e-3
"""Relative change of a difference of two losses that is no rounding in fp32."""


def sees_its_labels(build: Callable[[], nn.Module], samples: Batch, loss: LossChoice, name: str) -> bool:
    """Return True if a model is shown the token that it predicts, where labels are the inputs.

    By how much the loss changes with a label says what the model predicts for it. If that depends on the token at the
    label's own position, the model sees it. False is also the answer where numbers do not show it: the model cannot be
    built or run here, its loss does not read the labels, is not the same each time, or is computed in less than fp32.

    Args:
        build: makes the model; its weights are left as they are.
        samples: a batch whose `input_ids` are random tokens.
        loss: the experiment's choice of the loss.
        name: the model's name in errors.
    """
    return _tried(_sees_its_labels, build, samples, loss, name)


def mixes_documents(build: Callable[[], nn.Module], samples: Batch, loss: LossChoice, name: str) -> bool:
    """Return True if what a model makes of a document depends on the others in its sample, or on its place there.

    The loss of the labels of one document is compared where it stands before one and behind another. False is also the
    answer where numbers do not show it, as in `sees_its_labels`, which explains the arguments.
    """
    return _tried(_mixes_documents, build, samples, loss, name)


def counts_otherwise(build: Callable[[], nn.Module], samples: Batch, loss: LossChoice, name: str) -> bool:
    """Return True if a model reads a document that is given positions, from 0 on, and a mask unlike one without them.

    RoBERTa counts from 2, and Mistral attends within a window, which a mask that is given replaces. Whole samples are
    read. The arguments and the answer False are as in `mixes_documents`.
    """
    return _tried(_counts_otherwise, build, samples, loss, name, lengths=(None,))


def _tried(
    judge: Callable[[Batch, Callable[[Batch], float]], bool],
    build: Callable[[], nn.Module],
    samples: Batch,
    loss: LossChoice,
    name: str,
    lengths: tuple[int | None, ...] = (SHORT, None),
) -> bool:
    """Return what `judge` says of a batch without labels, and of what computes a loss with weights that are drawn."""
    with suppress(Exception):
        model = build().train()
        for tokens in lengths:
            given = {"input_ids": samples["input_ids"][:, :tokens].to(next(model.parameters()).device)}
            if "position_ids" in samples:
                given["position_ids"] = torch.ones_like(given["input_ids"]).cumsum(1) - 1
            with suppress(Exception), _losses(model, loss, name) as found:  # such as one for samples of one length
                return judge(given, found)
    return False


@contextmanager
def _losses(model: nn.Module, loss: LossChoice, name: str) -> Iterator[Callable[[Batch], float]]:
    """Yield what computes the loss of a batch with weights that are drawn; NaN of one in less than fp32."""
    parameters = dict(model.named_parameters())
    device = next(iter(parameters.values())).device
    with untouched_generators(device), _same_kernels(device):
        torch.manual_seed(0)
        # Weights of a size at which each token has an effect: a head of zeros shows none, and small weights little.
        drawn = {
            key: torch.randn_like(each) * (each.shape[0] / each.numel()) ** 0.5
            for key, each in parameters.items()
            if each.ndim > 1 and each.is_floating_point() and each.numel()
        }
        buffers = {key: each.clone() for key, each in model.named_buffers()}

        def found(batch: Batch) -> float:
            torch.manual_seed(0)
            fields = {**drawn, **{key: each.clone() for key, each in buffers.items()}}
            with _same_for_each_sample(True):
                result = torch.func.functional_call(model, fields, args=(), kwargs=dict(batch))
                value = find_loss(result, loss, batch, name)
            is_fp32 = {value.dtype, *(each.dtype for each in drawn.values())} == {torch.float32}
            return float(value.detach().double()) if is_fp32 else math.nan

        yield found


def _sees_its_labels(given: Batch, found: Callable[[Batch], float]) -> bool:
    ids = given["input_ids"]

    def with_labels(tokens: torch.Tensor, labels: torch.Tensor) -> float:
        return found({**given, "input_ids": tokens, "labels": labels})

    def with_other(at: int, source: int) -> torch.Tensor:
        changed = ids.clone()
        changed[:, at] = ids[:, source]
        return changed

    first, seen = with_labels(ids, ids), False
    for at in (ids.shape[1] // 2, ids.shape[1] - 2):
        # What another label does to the loss, with the token at its position and with three others there
        label, tokens = with_other(at, 0), (ids, *(with_other(at, n) for n in range(1, 4)))
        moves = [with_labels(each, label) - with_labels(each, ids) for each in tokens]
        size = max(map(abs, moves))
        if size > 1e-4 * abs(first):  # else the loss does not read this label
            seen = max(moves) - min(moves) > SEEN_CHANGE * size
            if not seen:
                return False
    return seen and math.isclose(with_labels(ids, ids), first, rel_tol=1e-5)


def _mixes_documents(given: Batch, found: Callable[[Batch], float]) -> bool:
    ids = given["input_ids"]
    length, own = ids.shape[1], ids.shape[1] // 2
    document, others = ids[:, :own], (ids[:, own:], ids[:, own:].flip(1).roll(1, 0))

    def with_document_at(begin: int, other: torch.Tensor) -> float:
        """Return the loss of the document's labels alone, where it begins at 0 or behind another."""
        parts = [document, other] if begin == 0 else [other, document]
        labels = torch.full_like(ids, IGNORED)
        labels[:, begin + 1 : begin + own] = document[:, 1:]
        places = torch.cat([torch.arange(part.shape[1], device=ids.device) for part in parts]).expand_as(ids)
        return found({"input_ids": torch.cat(parts, 1), "position_ids": places, "labels": labels})

    first = with_document_at(0, others[0])
    moves = [abs(with_document_at(length - own, other) - first) for other in others]
    return max(moves) > MIXED_CHANGE * abs(first) and math.isclose(with_document_at(0, others[0]), first, rel_tol=1e-5)


def _counts_otherwise(given: Batch, found: Callable[[Batch], float]) -> bool:
    ids = given["input_ids"]
    told, untold = found({**given, "labels": ids}), found({"input_ids": ids, "labels": ids})
    return abs(told - untold) > MIXED_CHANGE * abs(untold)


# Batches for measurements of speed: random ones that need no data, or a few samples repeated.

TOKEN_FIELDS = frozenset({"input_ids", "decoder_input_ids", "labels"})
"""Names of the fields that hold token ids; integers of any other field are 0 or 1."""


def random_batch(
    samples: Mapping[str, TensorSpec],
    count: int,
    *,
    vocab_size: int,
    labelled_share: float,
    device: torch.device,
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """Return `count` random samples of the given specs; a fraction `labelled_share` of the labels is not ignored."""
    generator = torch.Generator(device=device).manual_seed(seed)
    batch = {}
    for name, spec in samples.items():
        shape, dtype = (count, *spec.shape), getattr(torch, spec.dtype)
        if dtype.is_floating_point:
            batch[name] = torch.randn(shape, device=device, generator=generator, dtype=torch.float32).to(dtype)
        else:
            high = vocab_size if name in TOKEN_FIELDS else 2
            batch[name] = torch.randint(0, high, shape, device=device, generator=generator).to(dtype)
    if labelled_share < 1 and "labels" in batch:
        ignored = torch.rand(batch["labels"].shape, device=device, generator=generator) >= labelled_share
        batch["labels"] = batch["labels"].masked_fill(ignored, IGNORED)
    return batch


def repeated(examples: Mapping[str, torch.Tensor], count: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Return `count` samples, which are those of the batch `examples` in turn."""
    index = torch.arange(count) % len(next(iter(examples.values())))
    return {name: field[index].to(device) for name, field in examples.items()}
