"""Ranks of a bisection that are at fault: the run `plan-<n>` has the n-th of `FAULTS`, counted round.

A run whose environment names `faults` trains once with each of them, under a plan of its own and from the same start,
for `benchmarks/bisect_faults.py`. These are `SIZED`: rank 1 mixes what is right with a share of what is wrong.
"""

import copy
import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from workbench.analysis.examining_ranks import TRACES, Tracer
from workbench.analysis.plain_loop import trainer_under
from workbench.capture.operations import ATTENTION, DROPOUT
from workbench.execution import build
from workbench.execution.blocks import tensor_parallel
from workbench.execution.feeding import TrainingSamples
from workbench.execution.parallel.mesh import MeshCoordinate
from workbench.execution.trainer import Trainer
from workbench.execution.worker import main
from workbench.optimizers.parameters import local
from workbench.planning.plan import Plan
from workbench.record.rundir import read_record

FAULTY_BLOCK = 2


def scaled_gradients(trainer: Trainer) -> None:
    """Multiply the gradients of the second stage by 1.01."""

    def faulty(gradients: Callable[..., Any], *given: Any) -> Any:
        loss = gradients(*given)
        for parameter in trainer.stages.model_parameters().values():
            parameter.grad.mul_(1.01)
        return loss

    if trainer.coordinate.pipeline_rank == 1:
        trainer.gradients = functools.partial(faulty, trainer.gradients)


def stale_weights(trainer: Trainer) -> None:
    """Let the second stage compute with the weights of the step before."""
    earlier: list[torch.Tensor] = []

    @torch.no_grad()
    def set_to(values: list[torch.Tensor]) -> list[torch.Tensor]:
        parameters = trainer.stages.model_parameters().values()
        present = [parameter.clone() for parameter in parameters]
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)
        return present

    def faulty(gradients: Callable[..., Any], *given: Any) -> Any:
        present = set_to(earlier or [p.clone() for p in trainer.stages.model_parameters().values()])
        loss = gradients(*given)
        set_to(present)
        earlier[:] = present
        return loss

    if trainer.coordinate.pipeline_rank == 1:
        trainer.gradients = functools.partial(faulty, trainer.gradients)


def _replace_code(trainer: Trainer, change: Callable[[Any], Any]) -> None:
    for stage in trainer.stages.stages:
        for module in stage.block_modules():
            if module.block.index == FAULTY_BLOCK:
                module.use(dataclasses.replace(module.program, run=change(module.program.run)))


def low_precision(trainer: Trainer) -> None:
    """Compute one block in bf16."""
    _replace_code(trainer, torch.autocast("cpu", torch.bfloat16))


def wrong_mask(trainer: Trainer) -> None:
    """Let the attention of one block see what comes before a token alone."""

    def causal(code: Any) -> Any:
        code = copy.deepcopy(code)
        [attention] = [node for node in code.graph.nodes if node.target is ATTENTION]
        attention.update_arg(5, True)
        code.recompile()
        return code

    _replace_code(trainer, causal)


def scaled_update(trainer: Trainer) -> None:
    """Let the second stage learn 1.01 times as fast."""
    if trainer.coordinate.pipeline_rank == 1:
        trainer._peak_rates = [1.01 * rate for rate in trainer._peak_rates]


def lone_replica(trainer: Trainer) -> None:
    """Let one replica add something to its gradients after they were reduced."""

    def faulty(gradients: Callable[..., Any], *given: Any) -> Any:
        loss = gradients(*given)
        trainer.stages.model_parameters()["cls.predictions.bias"].grad.add_(1e-3)
        return loss

    if trainer.coordinate.data_rank == 1:
        trainer.gradients = functools.partial(faulty, trainer.gradients)


QUERY = "bert.encoder.layer.1.attention.self.query.weight"


def flipped_shard(trainer: Trainer) -> None:
    """Let one rank begin with the rows of its shard in the other order."""
    if trainer.coordinate.data_rank == 1:
        with torch.no_grad():
            shard = local(trainer.stages.model_parameters()[QUERY])
            shard.copy_(shard.flip(0))


def doubled_shard(trainer: Trainer) -> None:
    """Double one rank's shard of a gradient after it was reduced."""

    def faulty(gradients: Callable[..., Any], *given: Any) -> Any:
        loss = gradients(*given)
        local(trainer.stages.model_parameters()[QUERY].grad).mul_(2.0)
        return loss

    if trainer.coordinate.data_rank == 1:
        trainer.gradients = functools.partial(faulty, trainer.gradients)


FAULTS = (
    *(scaled_gradients, stale_weights, low_precision, wrong_mask, scaled_update, lone_replica),
    *(flipped_shard, doubled_shard),
)


# The same kinds of faults on rank 1 of any plan for two devices, each of a size: the share of what is wrong.


def around_gradients(trainer: Trainer, before: Callable[[], object], after: Callable[[], object]) -> None:
    """Let a rank do something before and after the forwards and backwards of each step."""

    def faulty(gradients: Callable[..., Any], *given: Any) -> Any:
        before()
        try:
            return gradients(*given)
        finally:
            with torch.no_grad():
                after()

    trainer.gradients = functools.partial(faulty, trainer.gradients)


def a_matrix(trainer: Trainer) -> torch.nn.Parameter:
    """Return a weight of an attention that this rank holds."""
    held = trainer.stages.model_parameters()
    return held[min(name for name in held if held[name].ndim == 2 and ("query" in name or "attn" in name))]


@torch.no_grad()
def flipped_start(trainer: Trainer, share: float) -> None:
    """Let a matrix, or the shard of one, begin with its rows in the other order."""
    weight = local(a_matrix(trainer).detach())
    weight.lerp_(weight.flip(0), share)


def doubled_gradient(trainer: Trainer, share: float) -> None:
    """Count the gradient of a matrix, or its shard, twice after it was reduced."""
    around_gradients(trainer, lambda: None, lambda: local(a_matrix(trainer).grad).mul_(1 + share))


def lost_reduction(trainer: Trainer, share: float) -> None:
    """Leave what the other rank has out of the sums of collectives."""
    reducing = {name: getattr(dist, name) for name in REDUCTIONS if hasattr(dist, name)}
    summing = tensor_parallel._all_reduce

    def reduced(reduce: Callable[..., Any], output: torch.Tensor, *given: Any, **named: Any) -> Any:
        source = given[0] if given and isinstance(given[0], torch.Tensor) else named.get("input", output)
        own = source.chunk(source.numel() // output.numel())[dist.get_rank()] if source is not output else output
        own = own / dist.get_world_size() if named.get("op") == dist.ReduceOp.AVG else own.clone()
        work = reduce(output, *given, **named)
        if work is not None:
            work.wait()
        if output.numel() >= LEAST_REDUCED:
            output.lerp_(own, share)
        return work

    def of_tensors(value: torch.Tensor, operation: str, group: str) -> torch.Tensor:
        found = summing(value, operation, group)
        return found.lerp(value, share) if operation == "sum" and value.numel() >= LEAST_REDUCED else found

    def plant() -> None:
        tensor_parallel._all_reduce = of_tensors
        for name, reduce in reducing.items():
            setattr(dist, name, torch.no_grad()(functools.partial(reduced, reduce)))

    def mend() -> None:
        tensor_parallel._all_reduce = summing
        for name, reduce in reducing.items():
            setattr(dist, name, reduce)

    def of_bucket(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        own = bucket.buffer().div_(dist.get_world_size()).clone()
        work = reducing["all_reduce"](bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0].lerp_(own, share))

    for stage in trainer._schedules._pipe_stages:
        if isinstance(stage.submod, DistributedDataParallel):  # whose reducer calls no function of Python
            stage.submod.register_comm_hook(None, of_bucket)
    around_gradients(trainer, plant, mend)


REDUCTIONS = ("all_reduce", "reduce_scatter_tensor", "reduce_scatter_single")
LEAST_REDUCED = 16
"""Number of elements from which what is reduced is an activation or a gradient, and no count of labels."""


def other_divisor(trainer: Trainer, share: float) -> None:
    """Divide the loss by another number of labels."""
    prepare = trainer.prepare_forward

    def faulty() -> None:
        context = trainer.context
        context.loss_denominators = [each / (1 + share) for each in context.loss_denominators]
        prepare()

    trainer.prepare_forward = faulty


def less_dropout(trainer: Trainer, share: float) -> None:
    """Let through what the dropouts of the last block that has one hold back."""

    def changed(code: Any) -> Any:
        code = copy.deepcopy(code)
        for node in code.graph.find_nodes(op="call_function", target=DROPOUT):
            with code.graph.inserting_after(node):
                mixed = code.graph.call_function(torch.ops.aten.lerp.Scalar, (node, node.args[0], share))
            mixed.meta = dict(node.meta)
            node.replace_all_uses_with(mixed, delete_user_cb=lambda user, mixed=mixed: user is not mixed)
        code.recompile()
        return code

    modules = [module for stage in trainer.stages.stages for module in stage.block_modules()]
    with_dropout = [m for m in modules if list(m.block.code.graph.find_nodes(op="call_function", target=DROPOUT))]
    module = with_dropout[-1]
    module.use(dataclasses.replace(module.program, run=changed(module.program.run)))


def earlier_weights(trainer: Trainer, share: float) -> None:
    """Compute with the weights of the step before."""
    weights = [local(parameter.detach()) for parameter in trainer.stages.model_parameters().values()]
    present, earlier = list[torch.Tensor](), list[torch.Tensor]()

    def before() -> None:
        present[:] = [weight.clone() for weight in weights]
        for weight, old in zip(weights, earlier or present, strict=True):
            weight.lerp_(old, share)

    def after() -> None:
        for weight, new in zip(weights, present, strict=True):
            weight.copy_(new)
        earlier[:] = present

    around_gradients(trainer, torch.no_grad()(before), after)


def other_norm(trainer: Trainer, share: float) -> None:
    """Clip by a norm in which some weights count twice."""
    clip = trainer._norms.clip
    trainer._norms.clip = lambda optimizer, squared, groups: clip(optimizer, squared * (1 + share) ** 2, groups)


def other_rate(trainer: Trainer, share: float) -> None:
    """Learn faster."""
    trainer._peak_rates = [(1 + share) * rate for rate in trainer._peak_rates]


SIZED: dict[str, Callable[[Trainer, float], None]] = {
    each.__name__: each
    for each in (
        *(flipped_start, doubled_gradient, lost_reduction, other_divisor),
        *(less_dropout, earlier_weights, other_norm, other_rate),
    )
}


class FaultyTracer(Tracer):
    def _train(self, trainer: Trainer, *given: Any) -> Any:
        asked = read_record(self.run_dir.environment)
        if "faults" not in asked:
            FAULTS[int(self.run_dir.path.name.removeprefix("plan-")) % len(FAULTS)](trainer)
            return super()._train(trainer, *given)
        graph, meshes = self._code_to_run(trainer.graph), dict[tuple[int, ...], MeshCoordinate]()
        for index, (division, name, share) in enumerate(asked["faults"]):
            plan = Plan.from_json(division)
            degrees = plan.pipeline, plan.data, plan.tensor
            if degrees not in meshes:
                mesh = init_device_mesh(self.device.type, degrees, mesh_dim_names=("pp", "dp", "tp"))
                meshes[degrees] = MeshCoordinate.from_mesh(mesh)
            model = build.build_model(self.experiment.factory(), plan.model_bytes, self.device, self.experiment.seed)
            trainer = trainer_under(self.experiment, plan, graph, model, meshes[degrees], self.device)
            self.samples = TrainingSamples(self.experiment, meshes[degrees], self.device)
            if name is not None and dist.get_rank() == 1:
                SIZED[name](trainer, share)
            self.trace(trainer, self.run_dir.path / f"case-{index}" / TRACES)
        return dataclasses.replace(given[1], step=self.experiment.total_steps)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], FaultyTracer))
