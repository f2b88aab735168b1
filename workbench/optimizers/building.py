"""The optimiser of an experiment over named parameters: built by its name, or by a function of the user's.

A user-defined optimiser is any `torch.optim.Optimizer`. It updates this rank's shards as plain tensors, and before a
plan divides a tensor, updates of small tensors show how far it may be divided.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.sgd import sgd as sgd_update

from workbench.algorithms import ELEMENT, MODEL, TENSOR
from workbench.base.errors import InvalidExperiment, in_words
from workbench.base.user_code import UserFunction
from workbench.capture.blocks.hidden_matrices import Projections
from workbench.experiment import Experiment
from workbench.optimizers.adamw import Lamb, OffloadedAdamW, ShardedAdamW
from workbench.optimizers.muon import MuonAndAdamW
from workbench.optimizers.parameters import Group, MatrixExchange, WholeTensors, local, momentum_of, parameter_groups

MOMENTUM = 0.9
"""Momentum of `optimizer="sgd"`."""


def build_optimizer(
    parameters: Mapping[str, nn.Parameter],
    experiment: Experiment,
    *,
    offload: bool = False,
    whole: WholeTensors | None = None,
    matrices: Mapping[str, Projections] = MappingProxyType({}),
    exchange: MatrixExchange | None = None,
    apart: Collection[str] = (),
) -> torch.optim.Optimizer:
    """Return the experiment's optimiser over the trainable parameters, which go by the model's names.

    `whole` is needed where parameters are divided over ranks. With `offload`, AdamW's moments stay in the host's
    memory. `matrices` are the parameters that Muon updates; `exchange` and `apart` are those of `MuonAndAdamW`.
    """
    groups = parameter_groups(parameters, experiment, matrices) or [{"params": [], "names": [], "orthogonal": False}]
    build: Build = pkgutil.resolve_name(experiment.optimizer.record.build)
    return build(groups, experiment, Setting(offload, whole, matrices, exchange, apart))


@dataclass(frozen=True)
class Setting:
    """Everything that the function of a record (`workbench.algorithms`) is given beside groups and experiment."""

    offload: bool
    whole: WholeTensors | None
    matrices: Mapping[str, Projections]
    exchange: MatrixExchange | None
    apart: Collection[str]


Build = Callable[[list[Group], Experiment, Setting], torch.optim.Optimizer]


def sgd(groups: list[Group], experiment: Experiment, _: Setting) -> torch.optim.Optimizer:
    return ShardedSGD(groups, lr=experiment.learning_rate, momentum=MOMENTUM)


def lamb(groups: list[Group], experiment: Experiment, setting: Setting) -> torch.optim.Optimizer:
    return Lamb(groups, **_of_adam(experiment), whole=setting.whole)


def muon(groups: list[Group], experiment: Experiment, setting: Setting) -> torch.optim.Optimizer:
    return MuonAndAdamW(
        groups,
        projections=setting.matrices,
        scale=experiment.optimizer.muon_scale,
        exchange=setting.exchange,
        apart=setting.apart,
        **_of_adam(experiment),
        fused=_fused(groups, setting),
    )


def adamw(groups: list[Group], experiment: Experiment, setting: Setting) -> torch.optim.Optimizer:
    of_class = OffloadedAdamW if setting.offload else ShardedAdamW
    return of_class(groups, **_of_adam(experiment), fused=_fused(groups, setting))


def user_defined(groups: list[Group], experiment: Experiment, _: Setting) -> torch.optim.Optimizer:
    assert isinstance(experiment.optimizer.algorithm, UserFunction)
    return ShardedUserOptimizer(experiment.optimizer.algorithm, groups)


def _of_adam(experiment: Experiment) -> dict[str, Any]:
    return {"lr": experiment.learning_rate, "betas": experiment.optimizer.betas, "eps": experiment.optimizer.eps}


def _fused(groups: list[Group], setting: Setting) -> bool | None:
    """PyTorch's fused update is the fastest on CPUs, too. It cannot update complex numbers."""
    is_real = not any(parameter.is_complex() for group in groups for parameter in group["params"])
    return True if is_real and not setting.offload else None


class ShardedSGD(torch.optim.SGD):
    """SGD that updates this rank's shard of each parameter as a plain tensor, with the numbers of `torch.optim.SGD`.

    Weight decay is added to the gradient, as there. The momentum of a `DTensor` is a `DTensor`; it begins at zero, so
    that the first update equals PyTorch's, which is the gradient.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                sgd_update(
                    [local(parameter) for parameter in parameters],
                    [local(parameter.grad) for parameter in parameters],
                    [local(momentum_of(self, parameter)) for parameter in parameters],
                    weight_decay=group["weight_decay"],
                    momentum=group["momentum"],
                    lr=group["lr"],
                    dampening=group["dampening"],
                    nesterov=group["nesterov"],
                    maximize=group["maximize"],
                )
        return loss


# User-defined optimisers: updates of shards, and checks before a run.

SIDE, STEPS = 8, 3
"""Largest dim of the small tensors that stand for the model's in the checks, and the number of updates of them."""


Tensors = dict[str, torch.Tensor]


def built_by_user(function: Callable[[list[Group]], Any], groups: list[Group]) -> torch.optim.Optimizer:
    """Return what the function makes of the groups; raise `InvalidExperiment` unless it optimises all parameters."""
    name = getattr(function, "name", "the function")
    optimizer = function(groups)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidExperiment(
            f"optimizer={name} returned {type(optimizer).__name__}. It is given a list of parameter groups and must "
            "return a torch.optim.Optimizer over them, as lambda groups: torch.optim.RAdam(groups) does.",
            parameter="optimizer",
        )
    taken = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    ignored = [
        named
        for group in groups
        for named, parameter in zip(group["names"], group["params"], strict=True)
        if id(parameter) not in taken
    ]
    if ignored:
        raise InvalidExperiment(
            f"The optimizer that {name} returned ignores {len(ignored)} of the model's parameters, among them "
            f"{', '.join(ignored[:3])}. Give it every group; freeze a parameter with requires_grad_(False) instead.",
            parameter="optimizer",
        )
    if not all("lr" in group for group in optimizer.param_groups):
        raise InvalidExperiment(
            f"A parameter group of the optimizer that {name} returned has no entry 'lr', which the learning-rate "
            "schedule sets before each step. Return an optimizer whose groups have one.",
            parameter="optimizer",
        )
    _require_values_of_experiment(optimizer, name)
    return optimizer


def _require_values_of_experiment(optimizer: torch.optim.Optimizer, name: str) -> None:
    """Raise `InvalidExperiment` for a rate or weight decay in the function, which those of the groups would replace."""
    usual = inspect.signature(type(optimizer).__init__).parameters
    for entry, ours in (("lr", "learning_rate"), ("weight_decay", "weight_decay")):
        written = optimizer.defaults.get(entry)
        used = {group.get(entry) for group in optimizer.param_groups}
        if written is not None and written not in used and (entry not in usual or written != usual[entry].default):
            raise InvalidExperiment(
                f"The optimizer that {name} returned is built with {entry}={written}, and its parameter groups have "
                f"{entry}={', '.join(map(str, used))}, which it uses instead. Give the value "
                f"to the experiment, {ours}={written}, and leave it out of the function.",
                parameter="optimizer",
            )


class ShardedUserOptimizer(torch.optim.Optimizer):
    """Lets a user-defined optimiser update this rank's shards as plain tensors.

    Its `state` goes by the model's parameters, and holds what is sharded as `DTensor`s over the same memory and
    numbers as tensors, so that checkpoints can write it and load into it.
    """

    def __init__(self, function: Callable[[list[Group]], Any], groups: list[Group]) -> None:
        self._parameters = [parameter for group in groups for parameter in group["params"]]
        shards = {p: nn.Parameter(local(p.detach()), requires_grad=True) for p in self._parameters}
        self._shards = shards
        shard_groups = [{**group, "params": [shards[p] for p in group["params"]]} for group in groups]
        self._inner = built_by_user(function, shard_groups)
        self._numbers: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        self.param_groups = self._inner.param_groups
        self.defaults = self._inner.defaults

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self._restore_numbers()
        for parameter, shard in self._shards.items():
            if parameter.grad is not None:
                shard.data, shard.grad = local(parameter.detach()), local(parameter.grad)
        return self._inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002 - gradients are always freed
        for parameter, shard in self._shards.items():
            parameter.grad = shard.grad = None

    @property
    def state(self) -> dict[torch.Tensor, dict[str, torch.Tensor]]:  # type: ignore[override]
        """State of every parameter, to be written or loaded into."""
        self._restore_numbers()
        state: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        for parameter, shard in self._shards.items():
            slots = self._inner.state.get(shard, {})
            for slot, value in slots.items():
                if value is None:
                    continue
                if not isinstance(value, torch.Tensor):
                    if not isinstance(value, int | float):
                        raise InvalidExperiment(
                            f"The optimizer keeps a {type(value).__name__} as {slot!r} of a parameter, and checkpoints "
                            "hold tensors and numbers of optimizer.state. Choose an optimizer that keeps those alone.",
                            parameter="optimizer",
                        )
                    number = torch.tensor(value, dtype=torch.float64)
                    self._numbers.append((slots, slot, number))
                    value = number
                elif isinstance(parameter, DTensor) and value.ndim:
                    value = DTensor(value, parameter._spec, requires_grad=False)
                state.setdefault(parameter, {})[slot] = value
        return state

    def _restore_numbers(self) -> None:
        """Give the numbers among the state the values that a checkpoint loaded into their tensors."""
        for slots, slot, number in self._numbers:
            slots[slot] = type(slots[slot])(number.item())
        self._numbers.clear()


def create_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimiser create the state of every parameter, to load into.

    Torch's own optimisers change no weight meanwhile, because their rate is 0; others may.
    """
    saved: list[dict[str, Any]] = [
        {name: group[name] for name in ("lr", "weight_decay") if name in group} for group in optimizer.param_groups
    ]
    for group, values in zip(optimizer.param_groups, saved, strict=True):
        group.update(dict.fromkeys(values, 0.0))
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, values in zip(optimizer.param_groups, saved, strict=True):
        group.update(values)


def forget_state(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Remove the state of parameters that were not trained yet, so that their first update is a first one."""
    for parameter in parameters:
        if not isinstance(optimizer, ShardedUserOptimizer):
            optimizer.state.pop(parameter, None)
        elif parameter in optimizer._shards:
            optimizer._inner.state.pop(optimizer._shards[parameter], None)


def reach_of_update(experiment: Experiment, shapes: Mapping[str, Sequence[int]]) -> str:
    """Return `ELEMENT`, `TENSOR` or `MODEL`, found by updating small tensors of these names whole and in parts.

    Raises `InvalidExperiment` for an optimiser that cannot train: one that ignores parameters, needs a closure or a
    second pass, draws random numbers, or keeps what no checkpoint would hold.
    """
    return _Probe(experiment, shapes).reach()


class _Probe:
    """Small tensors in the place of a model's parameters, and updates of them."""

    def __init__(self, experiment: Experiment, shapes: Mapping[str, Sequence[int]]) -> None:
        generator = torch.Generator().manual_seed(0)
        sizes = {name: [1 if d < 2 else min(SIDE, d - d % 2) for d in shape] for name, shape in shapes.items()}

        def drawn() -> Tensors:
            # In float64, small updates of large weights are compared with more than rounding.
            return {name: torch.randn(size, generator=generator, dtype=torch.float64) for name, size in sizes.items()}

        self._experiment = experiment
        self._function: Any = experiment.optimizer.algorithm
        self._weights, self._gradients = drawn(), [drawn() for _ in range(STEPS)]
        self._name = getattr(self._function, "name", "")

    def reach(self) -> str:
        expected = self._trained(lambda tensors: tensors)
        if not _equal(expected, self._trained(lambda tensors: tensors, seed=1)):
            raise self._unfit("draws random numbers, so that replicas of the model would drift apart")
        if not _equal(expected, self._trained(lambda tensors: tensors, interrupted=True)):
            raise self._unfit(
                "goes on differently from a checkpoint, which holds the tensors and numbers of optimizer.state: it "
                "keeps more in its groups or attributes"
            )
        if left_out := [name for name in self._uncalled_methods() if self._is_second_pass(name)]:
            raise self._unfit(
                f"has the method {left_out[0]}(), which reads gradients or moves weights beside step(), as for a "
                "second pass over the batch. Only step() is called, after one backward, so that training would be "
                "another one. Compute it in step() from the gradients; if training is whole without it, give a "
                f"subclass in which {left_out[0]} is None"
            )
        if not _equal(expected, self._in_two(_of_names)):
            return MODEL
        whole = all(_equal(expected, self._in_two(partial(_of_dim, dim=dim), dim)) for dim in (0, 1))
        return ELEMENT if whole and self._keeps_tensors_of_own_shape else TENSOR

    def _uncalled_methods(self) -> list[str]:
        """Return the public methods that the optimiser has beside torch's, and that its updates do not call."""
        names = [
            name
            for of_class in type(self._stepped(1.0)[1]).__mro__
            if not of_class.__module__.startswith("torch.")
            for name, value in vars(of_class).items()
            if inspect.isfunction(value) and not name.startswith("_") and not hasattr(torch.optim.Optimizer, name)
        ]
        called = set[str]()

        def noted(name: str, method: Any, *args: Any, **kwargs: Any) -> Any:
            called.add(name)
            return method(*args, **kwargs)

        _, inner = self._stepped(1.0)
        for name in names:
            if callable(method := getattr(inner, name)):  # a subclass may have put None in its place
                setattr(inner, name, partial(noted, name, method))
            else:
                called.add(name)
        with torch.no_grad(), torch.random.fork_rng([]):
            inner.step()
        return [name for name in dict.fromkeys(names) if name not in called]

    def _is_second_pass(self, name: str) -> bool:
        """Return True if a method moves weights, or if the gradients that it finds decide what the next update does."""
        ends = list[list[torch.Tensor]]()
        for factor in (1.0, -2.0):
            weights, inner = self._stepped(factor)
            before = [weight.detach().clone() for weight in weights]
            try:
                with torch.random.fork_rng([]):
                    getattr(inner, name)()
            except Exception:  # it needs arguments, of which nobody knows
                return not {"grad", "backward", "autograd"}.isdisjoint(_names_read(type(inner), name))
            if not all(map(torch.equal, before, weights)):
                return True
            for weight, gradient in zip(weights, self._gradients[-1].values(), strict=True):
                weight.grad = gradient.clone()
            with torch.no_grad():
                inner.step()
            ends.append([weight.detach() for weight in weights])
        return not all(map(torch.equal, *ends))

    def _stepped(self, factor: float) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
        """Return the shards and the user's own optimiser after an update, with the next gradients times a factor."""
        parameters = {name: nn.Parameter(value.clone()) for name, value in self._weights.items()}
        optimizer, (first, second, *_) = self._built(parameters), self._gradients
        for name, parameter in parameters.items():
            parameter.grad = first[name].clone()
        optimizer.step()
        for name, parameter in parameters.items():
            optimizer._shards[parameter].grad = factor * second[name]
        return list(optimizer._shards.values()), optimizer._inner

    def _in_two(self, part: Callable[[int, Tensors], Tensors], dim: int | None = None) -> Tensors | None:
        """Return what two optimisers, each of one part, change of the weights; None if one of them cannot be built."""
        try:
            first, second = (self._trained(partial(part, k)) for k in (0, 1))
        except InvalidExperiment:
            return None
        if dim is None:
            return first | second
        return {
            name: torch.cat((first[name], second[name]), dim) if _divides(weight, dim) else first[name]
            for name, weight in self._weights.items()
        }

    def _trained(self, part: Callable[[Tensors], Tensors], *, seed: int = 0, interrupted: bool = False) -> Tensors:
        """Return what all updates change of the weights; if `interrupted`, the last one is made from a checkpoint."""
        parameters = {name: nn.Parameter(value.clone()) for name, value in part(self._weights).items()}
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            try:
                optimizer: torch.optim.Optimizer = self._built(parameters)
                for step, gradients in enumerate(self._gradients):
                    if interrupted and step == STEPS - 1:
                        optimizer = self._continued(parameters, optimizer)
                    optimizer.zero_grad()
                    for name, gradient in part(gradients).items():
                        parameters[name].grad = gradient.clone()
                    optimizer.step()
            except InvalidExperiment:
                raise
            except Exception as error:
                raise self._unfit(
                    f"raised {in_words(error)}. It is built from parameter groups with the entries "
                    "params, names, lr and weight_decay, and step() is called without a closure"
                ) from error
            self._keeps_tensors_of_own_shape = all(
                value.ndim == 0 or value.shape == parameter.shape
                for parameter, slots in optimizer.state.items()
                for value in slots.values()
            )
        weights = part(self._weights)
        return {name: parameter.detach() - weights[name] for name, parameter in parameters.items()}

    def _built(self, parameters: Mapping[str, nn.Parameter]) -> ShardedUserOptimizer:
        return ShardedUserOptimizer(self._function, parameter_groups(parameters, self._experiment))

    def _continued(
        self, parameters: Mapping[str, nn.Parameter], before: torch.optim.Optimizer
    ) -> torch.optim.Optimizer:
        """Return a new optimiser with the state of another one, as a checkpoint restores it."""
        weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        saved = {p: {slot: value.clone() for slot, value in slots.items()} for p, slots in before.state.items()}
        optimizer = self._built(parameters)
        create_state(optimizer)
        state = optimizer.state
        for name, parameter in parameters.items():
            parameter.data.copy_(weights[name])
            for slot, value in state.get(parameter, {}).items():
                value.copy_(saved[parameter][slot])
        return optimizer

    def _unfit(self, what: str) -> InvalidExperiment:
        return InvalidExperiment(
            f"The optimizer of {self._name} {what}. Choose an optimizer that trains without it.", parameter="optimizer"
        )


def _names_read(of_class: type, name: str) -> set[str]:
    """Return the attributes that a method's code names, and those that the methods name which it calls."""
    left, seen, found = [name], set[str](), set[str]()
    while left:
        seen.add(method := left.pop())
        functions = [inspect.unwrap(vars(each)[method]) for each in of_class.__mro__ if method in vars(each)]
        names = {used for each in functions if inspect.isfunction(each) for used in each.__code__.co_names}
        found |= names
        left += [each for each in names - seen if hasattr(of_class, each)]
    return found


def _equal(expected: Tensors, found: Tensors | None) -> bool:
    return found is not None and all(
        torch.allclose(value, found[name], rtol=1e-4, atol=1e-5 * float(value.abs().max()))
        for name, value in expected.items()
    )


def _of_names(part: int, tensors: Tensors) -> Tensors:
    """Return the first or the second half of the tensors."""
    middle = (len(tensors) + 1) // 2
    return dict(list(tensors.items())[:middle] if part == 0 else list(tensors.items())[middle:])


def _of_dim(part: int, tensors: Tensors, dim: int) -> Tensors:
    """Return the first or the second half of each tensor along a dim; a tensor that it does not divide whole."""
    return {name: value.chunk(2, dim)[part] if _divides(value, dim) else value for name, value in tensors.items()}


def _divides(tensor: torch.Tensor, dim: int) -> bool:
    return tensor.ndim > dim and tensor.shape[dim] > 1
