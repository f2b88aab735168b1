"""Build the model, capture it, and take one rank's stages out of it, on the rank's device."""

from __future__ import annotations

import ctypes
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import fx, nn

from workbench.base.errors import CheckpointError, PlanMismatch
from workbench.base.user_code import line_of_node
from workbench.capture import Block, Graph
from workbench.capture.blocks.recomputation import supported_mode
from workbench.capture.blocks.tensor_parallel import ModelSharding, plan_tensor_parallel
from workbench.capture.export.exporting import load_export
from workbench.capture.export.observed_forward import items_of
from workbench.capture.export.opaque import is_opaque
from workbench.capture.losses import find_rowwise_head
from workbench.capture.operations import retarget
from workbench.cost.sparse_matrices import sparse_matrices
from workbench.data.datasets import seed_generators
from workbench.execution.blocks import block_module
from workbench.execution.blocks.cuda_graphs import CudaGraphs
from workbench.execution.blocks.loss_runners import GatheredLoss, LabelledRows, Runner
from workbench.execution.blocks.rewriting import has_active_dropout, use_fused_attention, use_hashed_dropout
from workbench.execution.blocks.sparse_weights import DENSE, BlockSparseParameters, initial_pattern
from workbench.execution.blocks.step_context import StepContext
from workbench.execution.blocks.tensor_parallel import divide_block, take_shard
from workbench.execution.gradients import GradientAccumulator
from workbench.execution.parallel.mesh import MeshCoordinate
from workbench.execution.parallel.sharding import distribute
from workbench.execution.parallel.stage import RankStages, StageModule
from workbench.experiment import Experiment
from workbench.models import bert
from workbench.planning.plan import BUILD_SHARE, Plan, Stage
from workbench.sparsity.kernels.index import BlockIndex, to_compact
from workbench.sparsity.pattern import is_present

FREE_SHARE = 0.8
"""Fraction of the host's free memory that models under construction may take."""


def build_model(factory: Callable[[], nn.Module], model_bytes: int, device: torch.device, seed: int) -> nn.Module:
    """Build the user's model with the weights that their own script would get if it seeded every generator.

    Python's, NumPy's and torch's generators are seeded alike on every rank. Each builds the whole model and keeps its
    stages, so that all plans start from the same weights. The model is built on the device, or in the host's memory if
    it would fill too much of the device's.
    """
    where = torch.device("cpu") if _is_built_on_host(model_bytes, device) else device
    with torch.device(where):
        seed_generators(seed)
        model = factory()
    return model.to(where).train()  # Tables from NumPy are on the CPU even if the model was built elsewhere.


NOT_INITIALISED = 3
"""`CUDA_ERROR_NOT_INITIALIZED`: what the driver answers in a process in which nobody has called `cuInit`."""


def preload(experiment: Mapping[str, Any]) -> None:
    """Import what build and capture of a named model import, in the process from which the ranks of a run are forked.

    `experiment` is the JSON of the run's; it is empty where it is not known yet.
    """
    with suppress(Exception), torch.device("meta"):  # the ranks tell what is wrong with an experiment
        load_export()
        model = (
            Experiment.from_json(experiment, {}).model if experiment else bert(hidden_size=8, num_layers=1, num_heads=1)
        )
        if model.is_loaded:  # code of the user's is for the ranks alone
            model.build()


def preload_compiler() -> None:
    """Import Inductor, and read the files of which its caches keep a digest, without CUDA."""
    from workbench.execution.blocks.compiled import load_digests

    load_digests()


def cuda_is_untouched() -> bool:
    """Return True if processes that are forked from this one can use CUDA: nobody has initialised it here."""
    if torch.cuda.is_initialized():
        return False
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:  # there is none
        return True
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == NOT_INITIALISED)


def _is_built_on_host(model_bytes: int, device: torch.device) -> bool:
    return device.type == "cuda" and model_bytes > BUILD_SHARE * torch.cuda.mem_get_info(device)[0]


@contextmanager
def build_lock(model_bytes: int, device: torch.device, local_rank: int) -> Iterator[bool]:
    """Return a context in which a rank builds the model and takes its stages; a collective.

    If models are too large for their GPUs, only as many ranks of a host build at once as its free memory allows. The
    value of the context is True if all ranks are in it at the same time.
    """
    fitting = dist.get_world_size()
    if _is_built_on_host(model_bytes, device):
        fitting = max(1, int(FREE_SHARE * psutil.virtual_memory().available / model_bytes))
    agreed = torch.tensor([fitting, -(local_rank + 1)], device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN)  # Each rank reads another number of free bytes.
    ranks_at_once, local_ranks = int(agreed[0]), -int(agreed[1])
    num_rounds, round_here = -(-local_ranks // ranks_at_once), local_rank // ranks_at_once
    for _ in range(round_here):
        dist.barrier()
    yield num_rounds == 1
    for _ in range(round_here + 1, num_rounds):
        dist.barrier()


def build_stage(
    plan: Plan,
    coordinate: MeshCoordinate,
    model: nn.Module,
    graph: Graph,
    context: StepContext,
    *,
    compile: bool = False,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    compact: BlockSparseParameters = DENSE,
) -> RankStages:
    """Return the stages of one rank with their own weights, which are taken out of `model`: its weights are freed.

    If the plan shards weights, FSDP2 has done so when this function returns; it moves them to the device block by block
    from where the model was built. Blocks of one type share a runner for each way of recomputing them. `compact` are
    the weights that are stored without absent blocks.
    """
    graph = compact.rewritten(graph)
    weights = _ModelWeights(plan, coordinate, model, graph)
    code = _RankCode(plan, coordinate, graph, context, compile)
    context.tensor_rank, context.autocast = coordinate.tensor_rank, autocast
    if compile and plan.cuda_graphs:
        context.cuda_graphs = CudaGraphs(context.device, plan.num_microbatches)

    tensors: dict[str, torch.Tensor] = {**dict(model.named_buffers()), **graph.constants}
    indices = compact.buffers  # themselves, not copies: a moving pattern changes them
    modules = []
    for stage in plan.stages_of(coordinate.pipeline_rank):
        blocks = graph.blocks[stage.first_block : stage.end_block]
        module = StageModule(
            graph,
            stage.first_block,
            context,
            num_microbatches=plan.num_microbatches,
            parameters=weights.of_stage(stage, code.division, context, compact.indices),
            buffers={
                name: indices[name] if name in indices else tensors[name].detach().to(context.device)
                for block in blocks
                for name in block.buffers
            },
            programs=[code.program(block, stage.recompute_of(block.index)) for block in blocks],
        )
        if plan.shards:
            distribute(module, coordinate.data_mesh, plan.zero, plan.precision)
        elif compile:
            # The compiler learns that a weight outlives the step, so that it may save the weight itself for the
            # backward and not a bf16 copy for each micro-batch in flight. It does not always; see `WeightCopies`.
            for parameter in module.parameters():
                torch._dynamo.mark_static_address(parameter, guard=False)
        modules.append(module)
    accumulator = GradientAccumulator(compiles=compile and context.device.type == "cuda")
    copied = modules if plan.keeps_weight_copies(plan.precision) else []
    copies = [
        block_module.WeightCopies([*m.block_modules()], m.model_parameters(), code.codes, accumulator) for m in copied
    ]
    return RankStages(modules, copies, compact, code.division.parameters)


def block_sparse_parameters(
    experiment: Experiment, plan: Plan, coordinate: MeshCoordinate, graph: Graph, device: torch.device
) -> BlockSparseParameters:
    """Return what one rank of a block-sparse plan stores without absent blocks at first; nothing for other plans."""
    if not plan.block_sparse:
        return DENSE
    stages = plan.stages_of(coordinate.pipeline_rank)
    names = {name for s in stages for name in graph.block_parameters(s.first_block, s.end_block)}
    assert experiment.sparsity is not None
    sparsity, shapes = experiment.sparsity, sparse_matrices(graph, experiment.sparsity)
    indices = {}
    for name, shape in shapes.items():
        if name in names:
            pattern = initial_pattern(sparsity, experiment.seed, name, shape, device)
            indices[name] = BlockIndex.from_mask(is_present(pattern), sparsity.block)
    return BlockSparseParameters(shapes, indices)


def evaluation_programs(
    plan: Plan,
    coordinate: MeshCoordinate,
    graph: Graph,
    context: StepContext,
    *,
    compile: bool = False,
    compact: BlockSparseParameters = DENSE,
) -> list[list[block_module.BlockProgram]]:
    """Return the code of each block of this rank's stages for evaluation, in the order of `build_stage`.

    `graph` is the model captured in eval mode, which `require_same_stages` has compared with the training graph.
    `compact` is what `build_stage` was given.
    """
    graph = compact.rewritten(graph)
    code = _RankCode(plan, coordinate, graph, context, compile)
    constants = {name: tensor.detach().to(context.device) for name, tensor in graph.constants.items()}
    programs: list[list[block_module.BlockProgram]] = []
    for stage in plan.stages_of(coordinate.pipeline_rank):
        programs.append([])
        for block in graph.blocks[stage.first_block : stage.end_block]:
            products_only = block_module.read_only_by_products(code.codes[block.block_type], len(block.parameters))
            copied = frozenset(name for name, only in zip(block.parameters, products_only, strict=True) if only)
            constants_read = {name: constants[name] for name in block.buffers if name in constants}
            programs[-1].append(replace(code.program(block, "none"), constants=constants_read, copied=copied))
    return programs


class _RankCode:
    """The code of each block as one rank runs it, rewritten where the tensor-parallel axis divides its work."""

    def __init__(
        self, plan: Plan, coordinate: MeshCoordinate, graph: Graph, context: StepContext, compile: bool
    ) -> None:
        self._graph, self._device, self._compile = graph, context.device, compile
        self._plan, self._context, self._group = plan, context, coordinate.data_group
        self._has_bf16_weights = plan.shards and plan.precision == "bf16"
        self._runners: dict[str, dict[str, Runner]] = {}
        self.division = plan_tensor_parallel(graph, plan.tensor)
        self.codes = {block.block_type: block.code for block in graph.blocks}
        """Code by block type."""
        if plan.tensor > 1:
            group = coordinate.tensor_group.group_name
            pairs = zip(graph.blocks, self.division.blocks, strict=True)
            for block_type, how in {block.block_type: how for block, how in pairs if how.divided}.items():
                self.codes[block_type] = divide_block(self.codes[block_type], how, coordinate.tensor_rank, group)

    def program(self, block: Block, recompute: str) -> block_module.BlockProgram:
        is_last = block is self._graph.blocks[-1]
        is_gathered = bool(self._graph.gathered) and is_last
        recompute = "none" if is_last else recompute  # its backward follows its forward
        if recompute not in self._runners:
            self._runners[recompute] = runners(
                self._graph, self.codes, self._device, self._compile, recompute, self._has_bf16_weights
            )
        run = self._runners[recompute][block.block_type]
        if is_gathered:
            count = self._plan.num_microbatches
            run = GatheredLoss(run, block, self._graph, self._context, count, self._group)
        compiled = self._compile and not is_opaque(block.code)
        return block_module.BlockProgram(block, run, recompute, self.division.blocks[block.index], compiled)


class _ModelWeights:
    """The weights of a built model, each freed once the last of this rank's stages has taken it.

    It would not be enough to drop the model: reference cycles in the results of `torch.export` hold it until Python
    collects garbage, which may be long after the first step.
    """

    def __init__(self, plan: Plan, coordinate: MeshCoordinate, model: nn.Module, graph: Graph) -> None:
        self._plan, self._graph = plan, graph
        stages = plan.stages_of(coordinate.pipeline_rank)
        self._uses_left = Counter(name for s in stages for name in graph.block_parameters(s.first_block, s.end_block))
        self._weights = dict(model.named_parameters())
        for name, weight in self._weights.items():
            if name not in self._uses_left:
                _free(weight)

    def of_stage(
        self, stage: Stage, division: ModelSharding, context: StepContext, indices: Mapping[str, BlockIndex]
    ) -> dict[str, nn.Parameter]:
        """Return the parameters of one stage by the model's names: whole, compact, or tensor-parallel shards."""
        parameters = {}
        for name in self._graph.block_parameters(stage.first_block, stage.end_block):
            weight, sharding = self._weights[name].detach(), division.parameters.get(name)
            if sharding is not None:
                weight = take_shard(weight, sharding, context.tensor_rank)
            if not self._plan.shards:
                weight = weight.to(context.device)
            if name in indices:
                weight = to_compact(weight, indices[name])
            # A view of a shard would keep the whole weight in memory.
            is_view = weight.untyped_storage().nbytes() > weight.nbytes
            own = weight.clone(memory_format=torch.contiguous_format) if is_view else weight.contiguous()
            parameters[name] = nn.Parameter(own, requires_grad=name not in self._graph.frozen)
            self._uses_left[name] -= 1
            if not self._uses_left[name]:
                _free(self._weights[name])
        return parameters


def _free(parameter: nn.Parameter) -> None:
    """Free the memory of a parameter, even if references to it remain."""
    parameter.data = parameter.data.new_empty(0)


# Runners


def runners(
    graph: Graph,
    codes: Mapping[str, fx.GraphModule],
    device: torch.device,
    compile: bool,
    recompute: str,
    bf16_weights: bool = False,
) -> dict[str, Runner]:
    """Return one callable per block type, compiled once however many blocks share it or differ in numbers only.

    Without compilation, `BlockModule` recomputes activations. With it, recomputation is part of the compiled code: the
    compiler decides what to save, and replays random numbers itself, since a checkpoint around compiled code cannot be
    traced again in the backward. Compiled dropouts compute their masks (`workbench.execution.blocks.rewriting`).
    `bf16_weights` says that weights arrive in bf16, as FSDP2 all-gathers them.

    A block with an opaque call is not compiled. A block with a part that only labelled rows need becomes a
    `LabelledRows`, unless tensor parallelism divides it or it is the tail of a gathered loss.
    """
    for code in codes.values():
        retarget(code, device)
    if compile:
        from workbench.execution.blocks.compiled import finish_alike, prepare, use_gelu

        prepare()
        torch._dynamo.config.optimize_ddp = False  # It would split each block at DDP's bucket boundaries.
    blocks = {block.block_type: block for block in graph.blocks}

    # What a code becomes before it runs
    def finish(block_type: str, code: fx.GraphModule) -> Runner:
        code = use_fused_attention(code)
        if bf16_weights:
            code = block_module.match_autocast_types(code, len(blocks[block_type].parameters))
        if not compile or is_opaque(code):
            return code
        code = use_gelu(code)
        if has_active_dropout(blocks[block_type].code):
            code = use_hashed_dropout(code)
        mode = supported_mode(code, recompute)
        if mode != "none":
            # The compiler caches by graph module, so that the checkpoint around the code is one of its own.
            graph = fx.Graph()
            inputs = [graph.placeholder(str(node.target)) for node in code.graph.nodes if node.op == "placeholder"]
            inner = graph.get_attr("block")
            graph.output(graph.call_function(block_module.checkpointed_when_compiled, (mode, inner, *inputs)))
            code = fx.GraphModule({"block": code}, graph)
        return torch.compile(code, dynamic=False, fullgraph=True)

    # One runner for each block type
    heads: dict[str, Runner] = {}
    for block_type, code in codes.items():
        is_divided = code is not blocks[block_type].code
        is_gathered = bool(graph.gathered) and block_type == graph.blocks[-1].block_type
        part = None if is_divided or is_gathered else find_rowwise_head(blocks[block_type])
        if part is not None:
            heads[block_type] = LabelledRows(code, part, partial(finish, block_type))
    others = {block_type: code for block_type, code in codes.items() if block_type not in heads}
    if compile:
        return heads | finish_alike(others, finish, device)
    return heads | {block_type: finish(block_type, code) for block_type, code in others.items()}


def prepare_compiler() -> None:
    """Call `workbench.execution.blocks.compiled.prepare`, which imports Inductor and takes seconds."""
    from workbench.execution.blocks.compiled import prepare

    prepare()


CUBLAS_SETTING = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
"""Environment variable that makes matrix products on several streams deterministic. cuBLAS reads it once, with its
first handle."""
NO_DETERMINISTIC_KERNEL = "does not have a deterministic implementation"
"""Phrase by which torch's error is recognised."""


def use_deterministic_kernels() -> None:
    """Use deterministic kernels from now on; call this before the first matrix product of the process."""
    os.environ.setdefault(*CUBLAS_SETTING)
    torch.use_deterministic_algorithms(True)
    # By default torch would now fill every new tensor, in case it is read before it is written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


# What all ranks must hold in common when they have built the model.
#
# Every generator is seeded alike, so that ranks build the same model. They differ all the same where a constructor asks
# the system for random numbers (`numpy.random.default_rng()`), the clock or the rank, or goes through a set.

ROW = 512
"""Words of 8 bytes that are added up before their positions count, in large tensors."""
LARGE = 2**14
"""Number of words from which a tensor is large: adding up first makes its digest several times faster."""
_STEP, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
"""The constants of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) as signed integers."""
Digests = Mapping[str, tuple[str, ...]]
"""Shape, type and hash of a tensor by its name, or the hash of what a block computes."""


def held_tensors(model: nn.Module, graphs: Iterable[Graph]) -> dict[str, torch.Tensor]:
    """Return by name the parameters and buffers of a model, what its modules hold beside, and its graphs' constants."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers()), **unregistered(model)}
    constants = (graph.constants.items() for graph in graphs)
    return tensors | {f"{name} ({at})": each for at, named in enumerate(constants) for name, each in named}


def unregistered(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return by place the tensors and arrays that modules hold as attributes, in lists, dicts and objects.

    Parameters, buffers, their views and what needs a gradient are left out.
    """
    registered = [*model.parameters(), *model.buffers()]
    memory = {each.untyped_storage().data_ptr() for each in registered if each.layout is torch.strided}
    found, seen = dict[str, torch.Tensor](), {id(each) for each in registered}
    waiting = deque(
        (f"{path}.{key}" if path else key, value)
        for path, module in model.named_modules()
        for key, value in vars(module).items()
        if key not in _OF_EVERY_MODULE
    )
    while waiting and len(seen) < MOST_HELD:
        place, value = waiting.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, np.ndarray) and value.flags.writeable:
            with suppress(TypeError, ValueError):  # it holds no numbers, or has them in another order
                found[place] = torch.from_numpy(value)
        elif isinstance(value, torch.Tensor):
            is_view = value.layout is torch.strided and value.untyped_storage().data_ptr() in memory
            if not (value.requires_grad or value.is_meta or is_view):
                found[place] = value
        else:
            waiting += items_of(value, place) or ()
    return found


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Attributes of every module: its tables of parameters, buffers, modules and hooks."""
MOST_HELD = 20_000
"""Objects that are searched for tensors."""


def digests(tensors: Mapping[str, torch.Tensor], graphs: Iterable[Graph]) -> Digests:
    """Return the digests of tensors, and of what each block of the graphs computes, with the numbers in its code.

    The hash of a tensor is computed on its device, and fetched from each device at once. Each word of 8 bytes is
    scattered with its position in the tensor, and the results are added up modulo 2**64. In a large tensor, the order
    of the words within a row of `ROW` does not count.

    A core of a CPU reads them about as fast as its memory gives them: the 438 MB of BERT-Base take 0.04 s of the 8.1 s
    in which a rank imports what it needs (4.9 s), builds and captures the model (3.2 s).
    """
    blocks = {f"block {b.name} ({at})": (b.block_type,) for at, graph in enumerate(graphs) for b in graph.blocks}
    values: dict[str, torch.Tensor] = {}  # in a layout that has bytes of its own
    for name, tensor in tensors.items():
        data = tensor.detach()
        if data.is_nested:
            values[name] = torch.cat([each.reshape(-1) for each in data.unbind()])
        elif data.is_quantized:
            values[name] = data.int_repr()
        else:
            strided = data if data.layout is torch.strided else data.to_dense()
            values[name] = strided.resolve_conj().resolve_neg()
    words = {name: _words(value) for name, value in values.items() if not value.is_meta}
    hashes: dict[str, str] = {}
    for device in {each.device for each in words.values()}:
        here = {name: each for name, each in words.items() if each.device == device}
        sizes = [len(each) for each in here.values()]
        positions = torch.arange(1, max(sizes) + 1, device=device) * _STEP
        mixed = torch.cat(list(here.values())) + torch.cat([positions[:size] for size in sizes])
        mixed = (mixed ^ (mixed >> 30)) * _FIRST
        mixed = (mixed ^ (mixed >> 27)) * _SECOND
        sums = torch.stack([part.sum() for part in (mixed ^ (mixed >> 31)).split(sizes)])
        hashes |= {name: f"{found:x}" for name, found in zip(here, sums.tolist(), strict=True)}
    return blocks | {
        name: (str(tuple(value.shape)), str(tensors[name].dtype), hashes.get(name, "no values"))
        for name, value in values.items()
    }


def _words(data: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor in words of 8, those of the last, incomplete one apart, or the sums of its rows."""
    octets = data.contiguous().view(-1).view(torch.uint8)
    if octets.storage_offset() % 8:
        octets = octets.clone()
    whole = len(octets) // 8 * 8
    words, rest = octets[:whole].view(torch.int64), octets[whole:].to(torch.int64)
    if len(words) >= LARGE:
        rows = len(words) // ROW * ROW
        words, rest = words[:rows].view(-1, ROW).sum(1), torch.cat([words[rows:], rest])
    return torch.cat([words, rest]) if len(rest) else words


# What the start of a run held, for where it goes on, is evaluated or is cloned.
#
# Checkpoints hold parameters and buffers. Other tensors are made by the constructor, which may draw without a seed.

MOST_KEPT = 64 << 20
"""Bytes of unregistered tensors up to which their values are kept; larger ones are compared."""


@dataclass(frozen=True)
class Start:
    """The tensors of a model as they were when its run was started: digests of all, and values of unregistered ones."""

    digests: Digests
    values: Mapping[str, torch.Tensor]
    made_by: str
    """Device and version of torch, with which a table may be rounded otherwise."""

    @staticmethod
    def read(file: Path) -> Start | None:
        """Return the start of a run, or None before there is one; raise `CheckpointError` for a damaged file."""
        if not file.exists():
            return None
        try:
            found = torch.load(file, map_location="cpu", weights_only=True)
            return Start(found["digests"], found["values"], found["made_by"])
        except Exception as error:  # whatever the bytes make of the reader
            raise CheckpointError(
                f"{file}, with what the model held at the start beside what checkpoints store, is damaged. Remove it "
                "to go on with what the constructor makes now."
            ) from error

    @staticmethod
    def of(model: nn.Module, digests: Digests, device: torch.device) -> Start:
        """Return the start of a run that begins."""
        values, room = dict[str, torch.Tensor](), MOST_KEPT
        for name, tensor in unregistered(model).items():
            is_whole = tensor.layout is torch.strided and tensor.nbytes <= tensor.untyped_storage().nbytes()
            if is_whole and tensor.nbytes <= room:  # nothing can be written to an expanded tensor
                values[name], room = tensor.to("cpu", copy=True), room - tensor.nbytes
        return Start(digests, values, made_by(device))

    def write(self, file: Path) -> None:
        """Write the file such that a reader sees all of it or none."""
        part = file.with_suffix(".part")
        torch.save({"digests": dict(self.digests), "values": dict(self.values), "made_by": self.made_by}, part)
        part.replace(file)

    def give_back(self, model: nn.Module) -> None:
        """Let the model hold the unregistered tensors of the start, as far as it has them in the same shape."""
        with torch.no_grad():
            for name, tensor in unregistered(model).items():
                value = self.values.get(name)
                is_alike = value is not None and (value.shape, value.dtype) == (tensor.shape, tensor.dtype)
                if value is not None and is_alike and not torch.equal(value, tensor.cpu()):
                    tensor.copy_(value)

    def unlike(self, digests: Digests, device: torch.device) -> list[str]:
        """Return the names of tensors that have another content than at the start, in the same shape and type.

        Nothing is compared on another device or under another torch, which may round otherwise. Constants count if they
        are of the training's graph, and both captures have the same ones.
        """
        if made_by(device) != self.made_by:
            return []
        [then, now] = [{name for name in each if _is_of_training(name)} for each in (self.digests, digests)]
        return [
            name
            for name, own in digests.items()
            if len(own) > 1
            and (not name.startswith("_constant.") or (_is_of_training(name) and then == now))
            and (before := tuple(self.digests.get(name, own))) != own
            and before[:-1] == own[:-1]
        ]


def words_of_constant(graph: Graph, name: str) -> str:
    """Return the name of a tensor, or of a constant the line of the code that reads it, if that is known."""
    constant = name.removesuffix(" (0)")
    for block in graph.blocks if constant in graph.constants else ():
        if constant in block.buffers:
            given = block.code.graph.find_nodes(op="placeholder")[len(block.parameters) + block.buffers.index(constant)]
            where = next((line.where for node in given.users if (line := line_of_node(node)).file), "")
            return f"a tensor that forward reads{where}"
    return name


def _is_of_training(name: str) -> bool:
    return name.startswith("_constant.") and name.endswith(" (0)")


def made_by(device: torch.device) -> str:
    """Return what rounds the tables that a constructor computes."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{name}, torch {torch.__version__}"


def take_from_rank_0(model: str, own: Digests, tensors: Mapping[str, torch.Tensor], device: torch.device) -> list[str]:
    """Give every rank the values of rank 0 in those tensors that differ, and return their names; a collective.

    `own` are the digests of this rank. `tensors` may lack some of them, because they have been freed. Raises
    `PlanMismatch` on every rank for what cannot be taken over: what a block computes, or a tensor that is freed or has
    another shape.
    """
    first: list[Any] = [own]
    dist.broadcast_object_list(first, src=0)
    expected: Digests = first[0]
    mine = {name: own.get(name, ()) for name in {**expected, **own} if expected.get(name) != own.get(name)}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for rank, unlike in enumerate(everyone):
        for name, found in unlike.items():
            if name not in tensors or len(found) < 2 or found[:-1] != expected.get(name, ())[:-1]:
                plain = name.split(" (")[0]
                what = f"the value of {plain}" if len(found or expected[name]) > 1 else f"what its {plain} computes"
                raise PlanMismatch(
                    f"{model} is not the same on every rank: {what} is another on rank {rank} than on "
                    "rank 0, although Python's, NumPy's and torch's generators were seeded alike. Its constructor asks "
                    "for something that no seed decides: the system's random numbers, such as those of "
                    "numpy.random.default_rng(), the clock, the rank, or the order of a set. Seed what it draws, for "
                    "instance by numpy.random.default_rng(torch.initial_seed())."
                )
    taken = list({name: rank for rank, unlike in enumerate(everyone) for name in unlike})
    with torch.no_grad():
        for name in taken:
            value = tensors[name].detach().to(device).contiguous()
            dist.broadcast(value.view(-1).view(torch.uint8), src=0)
            tensors[name].detach().copy_(value)
    return taken
