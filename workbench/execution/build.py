"""From a built model and a plan to this rank's stage, on its device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import fx, nn

from workbench.capture import Graph, capture
from workbench.capture.division import TensorDivision
from workbench.capture.label_counting import retarget
from workbench.capture.labelled import labelled_part
from workbench.capture.tensor_parallel import plan_tensor
from workbench.errors import PlanInfeasible
from workbench.execution.blocks.activation_checkpointing import checkpointed_when_compiled, supported_mode
from workbench.execution.blocks.autocast_types import match_autocast_types
from workbench.execution.blocks.context import StepContext
from workbench.execution.blocks.cuda_graphs import CudaGraphs
from workbench.execution.blocks.dropout import has_active_dropout, use_hashed_dropout
from workbench.execution.blocks.gradient_accumulation import GradientAccumulator
from workbench.execution.blocks.labelled_head import LabelledRows, Runner
from workbench.execution.blocks.split_backward import Deferral, defer_weight_gradients
from workbench.execution.blocks.tensor_parallel import divide_block, take_shard
from workbench.execution.blocks.weight_copies import WeightCopies
from workbench.execution.parallel.mesh import MeshCoordinate
from workbench.execution.parallel.pipeline import SPLIT_BACKWARD
from workbench.execution.parallel.sharding import distribute
from workbench.execution.parallel.stage import RankStages, StageModule, StageOptions
from workbench.planning.plan import BUILD_SHARE, Plan, Stage
from workbench.tensors import TensorSpec

FREE_SHARE = 0.8
"""Of the host's free memory, what models that are being built may take."""


def build_model(factory: Callable[[], nn.Module], model_bytes: int, device: torch.device, seed: int) -> nn.Module:
    """The user's model, initialised as their own script would under `torch.manual_seed(seed)`.

    Every rank builds all of it and keeps its stage, so that all plans start from the same weights.
    """
    where = torch.device("cpu") if _is_built_on_host(model_bytes, device) else device
    torch.manual_seed(seed)
    with torch.device(where):
        model = factory()
    return model.to(where).train()  # a table from NumPy is on the CPU, wherever it was made


def _is_built_on_host(model_bytes: int, device: torch.device) -> bool:
    return device.type == "cuda" and model_bytes > BUILD_SHARE * torch.cuda.mem_get_info(device)[0]


@contextmanager
def turn_to_build(model_bytes: int, device: torch.device, local_rank: int) -> Iterator[None]:
    """In it, a rank builds the model and takes its stages. A collective.

    Where models are too large for their GPUs, only as many ranks of a host build at once as it has memory for.
    """
    fitting = dist.get_world_size()
    if _is_built_on_host(model_bytes, device):
        fitting = max(1, int(FREE_SHARE * psutil.virtual_memory().available / model_bytes))
    agreed = torch.tensor([fitting, -(local_rank + 1)], device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN)  # ranks do not see the same memory to the byte
    at_once, local_ranks = int(agreed[0]), -int(agreed[1])
    turns, mine = -(-local_ranks // at_once), local_rank // at_once
    for _ in range(mine):
        dist.barrier()
    yield
    for _ in range(mine + 1, turns):
        dist.barrier()


def prepare_compiler() -> None:
    """See `workbench.execution.blocks.compiled`, which imports Inductor: seconds."""
    from workbench.execution.blocks.compiled import prepare

    prepare()


def capture_for(plan: Plan, model: nn.Module, batch: Mapping[str, TensorSpec]) -> Graph:
    """The model captured at the plan's micro-batch; `batch` gives per-sample specs."""
    sized = {name: spec.batched(plan.micro_batch) for name, spec in batch.items()}
    return capture(model, sized, name=plan.model)


def runners(
    graph: Graph,
    codes: Mapping[str, fx.GraphModule],
    device: torch.device,
    compile: bool,
    recompute: str,
    deferral: Deferral | None = None,
    bf16_weights: bool = False,
) -> dict[str, Runner]:
    """One callable per kind of block, compiled once however many blocks share it.

    Without compilation, `BlockModule` checkpoints. With it, the recomputation is part of what is compiled: the
    compiler decides what to keep, and replays the random numbers itself. (A checkpoint around compiled code cannot be
    traced again in the backward.) Compiled dropouts compute their masks (`workbench.execution.blocks.dropout`). With
    `deferral`, blocks run uncompiled: the compiler cannot split a backward. `gathered`: weights come as FSDP2 gathers
    them, in bf16.

    A block with a part that only labelled rows need becomes `LabelledRows`, unless tensor parallelism divides it.
    """
    for code in codes.values():
        retarget(code, device)
    blocks = {block.block_type: block for block in graph.blocks}

    def runner(kind: str, code: fx.GraphModule) -> Runner:
        if bf16_weights:
            code = match_autocast_types(code, len(blocks[kind].parameters))
        if deferral is not None:
            return defer_weight_gradients(code, len(blocks[kind].parameters), deferral)
        if not compile:
            return code
        if has_active_dropout(blocks[kind].code):
            code = use_hashed_dropout(code)
        return torch.compile(
            _with_checkpoint_inside(code, supported_mode(code, recompute)), dynamic=False, fullgraph=True
        )

    if compile:
        prepare_compiler()
        torch._dynamo.config.optimize_ddp = False  # it would split each block at DDP's bucket boundaries
    found: dict[str, Runner] = {}
    for kind, code in codes.items():
        part = labelled_part(blocks[kind]) if code is blocks[kind].code else None
        finish = partial(runner, kind)
        found[kind] = finish(code) if part is None else LabelledRows(code, part, finish)
    return found


def _with_checkpoint_inside(code: fx.GraphModule, recompute: str) -> fx.GraphModule:
    """`code` under activation checkpointing, as a graph module of its own: the compiler keeps one cache for each."""
    if recompute == "none":
        return code
    graph = fx.Graph()
    inputs = [graph.placeholder(str(node.target)) for node in code.graph.nodes if node.op == "placeholder"]
    inner = graph.get_attr("block")
    graph.output(graph.call_function(checkpointed_when_compiled, (recompute, inner, *inputs)))
    return fx.GraphModule({"block": code}, graph)


def build_stage(
    plan: Plan,
    coordinate: MeshCoordinate,
    model: nn.Module,
    graph: Graph,
    context: StepContext,
    *,
    compile: bool = False,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> RankStages:
    """The stages of one rank with their own weights, taken out of the model, which is left with none.

    Those of a plan that shards them are FSDP2's already: it takes them from where the model was built, block by block.
    Blocks that are recomputed alike share their runners: a kind of block is compiled once for each way.
    """
    _refuse_sharded_split(plan)
    weights = _Weights(plan, coordinate, model, graph)
    division = plan_tensor(graph, plan.tensor)
    codes = _codes(graph, division, coordinate)
    context.tensor_rank = coordinate.tensor_rank
    deferral = context.deferral if plan.schedule in SPLIT_BACKWARD else None
    compile = compile and deferral is None
    if compile and plan.cuda_graphs:
        context.cuda_graphs = CudaGraphs(context.device, plan.num_microbatches)
    bf16_weights = plan.shards and plan.precision == "bf16"
    options = StageOptions(context, plan.num_microbatches, compile, division, autocast)
    ready: dict[str, dict[str, Runner]] = {}
    held = []
    for stage in plan.stages_of(coordinate.pipeline_rank):
        modes = [stage.recompute_of(block) for block in range(stage.first_block, stage.end_block)]
        for mode in modes:
            if mode not in ready:
                ready[mode] = runners(graph, codes, context.device, compile, mode, deferral, bf16_weights)
        module = StageModule(
            graph,
            stage.first_block,
            stage.end_block,
            options,
            parameters=_parameters(stage, plan, weights, graph, division, context),
            buffers=_buffers(stage, model, graph, context.device),
            runners=[
                ready[mode][block.block_type]
                for mode, block in zip(modes, graph.blocks[stage.first_block : stage.end_block], strict=True)
            ],
            recompute=modes,
        )
        if plan.shards:
            distribute(module, coordinate.data_mesh, plan.zero, plan.precision)
        elif compile:
            for parameter in module.parameters():
                _mark_static(parameter)
        held.append(module)
    accumulator = GradientAccumulator(compiles=compile and context.device.type == "cuda")
    copied = held if plan.keeps_halves else []
    return RankStages(
        held,
        [WeightCopies([*stage.block_modules()], stage.model_parameters(), codes, accumulator) for stage in copied],
    )


def _refuse_sharded_split(plan: Plan) -> None:
    """The planner offers no such plan; one that was written by hand may ask for it."""
    if plan.schedule in SPLIT_BACKWARD and plan.shards:
        raise PlanInfeasible(
            f"The schedule {plan.schedule!r} runs with zero=0 only, and the plan asks for zero={plan.zero}: a sharded "
            f"gradient is reduced before the weights' half of the backward. Choose zero=0, or the schedule "
            f"'interleaved'.",
            schedule=plan.schedule,
            zero=plan.zero,
        )


def _codes(graph: Graph, division: TensorDivision, coordinate: MeshCoordinate) -> dict[str, fx.GraphModule]:
    """The code of each kind of block, rewritten where its work is divided over the tensor-parallel axis."""
    codes = {block.block_type: block.code for block in graph.blocks}
    if division.degree > 1:
        group = coordinate.tensor_group.group_name
        codes |= {
            kind: divide_block(codes[kind], how, coordinate.tensor_rank, group) for kind, how in division.kinds.items()
        }
    return codes


class _Weights:
    """A model's, each let go once the last of this rank's stages has it.

    Dropping the model would not do: cycles among what `torch.export` leaves hold it until Python collects garbage,
    which may be long after the first step.
    """

    def __init__(self, plan: Plan, coordinate: MeshCoordinate, model: nn.Module, graph: Graph) -> None:
        stages = plan.stages_of(coordinate.pipeline_rank)
        self._left = Counter(name for s in stages for name in graph.block_parameters(s.first_block, s.end_block))
        self._whole = dict(model.named_parameters())
        for name, parameter in self._whole.items():
            if name not in self._left:
                _let_go(parameter)

    @contextmanager
    def taken(self, name: str) -> Iterator[torch.Tensor]:
        """A stage's weight, whole and where the model was built; only until the end of the context."""
        yield self._whole[name].detach()
        self._left[name] -= 1
        if not self._left[name]:
            _let_go(self._whole[name])


def _let_go(parameter: nn.Parameter) -> None:
    """Of its memory, whoever holds the parameter."""
    parameter.data = parameter.data.new_empty(0)


def _parameters(
    stage: Stage, plan: Plan, weights: _Weights, graph: Graph, division: TensorDivision, context: StepContext
) -> dict[str, nn.Parameter]:
    """Of one stage (this device's part of the divided ones), by the model's own names."""
    found = {}
    for name in graph.block_parameters(stage.first_block, stage.end_block):
        sharding = division.parameters.get(name)
        with weights.taken(name) as held:
            if sharding is not None:
                held = take_shard(held, sharding, context.tensor_rank)
            if not plan.shards:
                held = held.to(context.device)
            found[name] = nn.Parameter(_alone(held), requires_grad=name not in graph.frozen)
    return found


def _buffers(stage: Stage, model: nn.Module, graph: Graph, device: torch.device) -> dict[str, torch.Tensor]:
    """Of one stage, constants among them, by the model's own names."""
    tensors: dict[str, torch.Tensor] = {**dict(model.named_buffers()), **graph.constants}
    blocks = graph.blocks[stage.first_block : stage.end_block]
    return {name: tensors[name].detach().to(device) for block in blocks for name in block.buffers}


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` in memory of its own: a view of a part would keep the whole."""
    shares = tensor.untyped_storage().nbytes() > tensor.nbytes
    return tensor.clone(memory_format=torch.contiguous_format) if shares else tensor.contiguous()


def _mark_static(parameter: nn.Parameter) -> None:
    """Tell the compiler that a weight outlives the step, so that it may save the weight for the backward (free), not a
    bf16 copy of it for every micro-batch in flight. (Blocks probed on H200 kept the copies all the same: `Halves`.)"""
    torch._dynamo.mark_static_address(parameter, guard=False)
