"""Every plan that the planner may offer runs, and is plain PyTorch: schedules, ZeRO stages, recomputation, tensors.

A representative part by default; everything in `make test-exhaustive`. Cases that use equally many processes
share one launch.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed import zoo
from tests.distributed.harness import (
    CPU,
    HALF,
    LINK,
    Division,
    forced_plan,
    launch,
    part_of,
    plain_step,
    trainer_for,
    unlike_plain,
    whole_parameters,
    worst,
)
from tests.distributed.test_training import Outcome, batch_of, experiment_of, plain
from tests.exhaustive import EXHAUSTIVE, exhaustive
from workbench.capture import Graph, capture, spec_of
from workbench.capture.blocks.tensor_parallel import plan_tensor_parallel
from workbench.cost.graph_profiler import profile_graph
from workbench.cost.hardware import Cluster
from workbench.execution.blocks.block_module import BlockModule
from workbench.execution.parallel.sharding import local
from workbench.execution.trainer import Trainer
from workbench.optimizers.adamw import OffloadedAdamW, ShardedAdamW
from workbench.planning.plan import Plan
from workbench.planning.search import what_if

TOLERANCE = 1e-5
BACKEND = "aot_eager_decomp_partition"
"""Traces blocks and decides what the backward computes again as the default compiler does, and generates no code."""
MICRO_BATCH = 2


def gpt2_of_a_prime_vocabulary() -> nn.Module:
    model = zoo.gpt2()
    model.resize_token_embeddings(97, mean_resizing=False)
    return model


MODELS = {
    **zoo.MODELS,
    "gpt2-odd": gpt2_of_a_prime_vocabulary,
    "bert-half-frozen": zoo.bert_half_frozen,
    "bert-dropout": functools.partial(zoo.bert_pretraining, 0.1),
}


@dataclass(frozen=True)
class Case(Division):
    """One way to divide a step."""

    schedule: str = "1f1b"
    recompute: str = "none"
    recompute_first: int | None = None
    """Number of the first blocks of each stage to which `recompute` applies; None for all of them."""
    recompute_rest: str = "none"
    num_microbatches: int = 4
    offload_optimizer: bool = False
    compile: bool = False
    cuda_graphs: bool = False

    def __str__(self) -> str:
        chosen = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default}
        return " ".join(f"{name}={value}" for name, value in chosen.items()) or "one process"


@dataclass(frozen=True)
class Difference:
    """Largest relative differences from plain PyTorch."""

    loss: float
    gradient: float


def differences(name: str, *cases: Case | Plan) -> list[Difference]:
    """Measure differences on real processes, the same number for each case."""
    [world] = {case.world for case in cases}
    found: list[Difference] = launch(_measured, world, name, cases, ahead=functools.partial(captured_once, name))
    return found


def assert_equal_to_plain_pytorch(name: str, *cases: Case | Plan) -> None:
    found = zip(cases, differences(name, *cases), strict=True)
    wrong = [(case, error) for case, error in found if not max(error.loss, error.gradient) <= TOLERANCE]
    assert not wrong, wrong


def captured(name: str) -> tuple[nn.Module, Graph]:
    torch.manual_seed(0)
    model = MODELS[name]().train()
    specs = {key: spec_of(key, value) for key, value in zoo.batch(name, MICRO_BATCH).items()}
    return model, capture(model, specs, name=name)


@functools.cache
def captured_once(name: str) -> tuple[nn.Module, Graph]:
    """Capture for tests that copy the model and do not look at what stays in memory."""
    return captured(name)


ONE_BERT = functools.partial(captured_once, "bert")


@contextmanager
def compiler(backend: str) -> Iterator[None]:
    """Make `torch.compile` use `backend` inside this context, which holds the steps too: they compile heads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
        yield


@compiler(BACKEND)
def _measured(_rank: int, name: str, cases: tuple[Case | Plan, ...]) -> list[Difference]:
    model, graph = captured_once(name)
    found = []
    for case in cases:
        plan = case if isinstance(case, Plan) else plan_of(graph, case)
        compiles = isinstance(case, Case) and case.compile
        found.append(_difference(name, copy.deepcopy(model), graph, plan, compiles))
    return found


def plan_of(graph: Graph, case: Case) -> Plan:
    chosen = {name: value for name, value in dataclasses.asdict(case).items() if name != "compile"}
    return forced_plan(graph, **chosen, micro_batch=MICRO_BATCH)


def trainer_of(model: nn.Module, graph: Graph, plan: Plan, compiles: bool = False) -> Trainer:
    return trainer_for(experiment_of("bert"), model, graph, plan, compiles=compiles)


def _difference(name: str, model: nn.Module, graph: Graph, plan: Plan, compiles: bool) -> Difference:
    batch = zoo.batch(name, plan.global_batch)
    plain = plain_step(model, batch, MICRO_BATCH if name in zoo.NORMALISED_BY_BATCH else None)
    trainer = trainer_of(model, graph, plan, compiles)
    found = Difference(*unlike_plain(trainer, batch, *plain))
    graphs = trainer.context.cuda_graphs
    assert not plan.cuda_graphs or (graphs is not None and graphs._forwards)
    return found


EQUAL: dict[str, list[Case]] = {
    "bert": [
        *(Case(pipeline=stages) for stages in (1, 2, 4)),
        *(Case(pipeline=2, data=2, zero=zero) for zero in (0, 2, 3)),
        *(Case(data=2, zero=zero) for zero in (0, 1, 3)),
        *(Case(data=2, zero=zero, recompute="full") for zero in (1, 3)),
        Case(recompute="selective"),
        Case(pipeline=2, recompute="full"),
        Case(pipeline=2, schedule="gpipe"),
        *(Case(pipeline=2, chunks=2, schedule="interleaved", recompute=mode) for mode in ("none", "full")),
        # the first two of three blocks per stage are recomputed, with less or none for the third
        Case(pipeline=2, recompute="selective", recompute_first=2),
        Case(pipeline=2, recompute="full", recompute_first=2, recompute_rest="selective"),
        Case(data=2, zero=3, recompute="full", recompute_first=4),
        *(Case(tensor=2, recompute=mode) for mode in ("none", "selective")),
    ],
    # The frozen blocks, which take no gradient, are all of the first of two stages; of four stages, part of the second.
    "bert-half-frozen": [
        *(Case(pipeline=2), Case(pipeline=2, recompute="full"), Case(data=2, zero=3), Case(tensor=2)),
        Case(pipeline=2, chunks=2, schedule="interleaved"),
    ],
    # The embedding is used in several stages of a rank, and the decoder depends on more than the received values.
    "t5": [Case(pipeline=2), *(Case(pipeline=2, chunks=chunks, schedule="interleaved") for chunks in (2, 3))],
    # GPT-2's fused query, key and value; tied embedding and head; a vocabulary that no degree divides.
    "gpt2-odd": [Case(pipeline=2, tensor=2)],
    **{name: [Case(pipeline=2)] for name in ("gpt2", "albert", "skips")},
}
if EXHAUSTIVE:
    EQUAL["gpt2-odd"] += [Case(data=2, tensor=2, zero=2), Case(tensor=4)]
    EQUAL["bert-half-frozen"] += [Case(pipeline=4), Case(pipeline=2, data=2), Case(pipeline=2, tensor=2)]
    EQUAL["bert-half-frozen"] += [Case(pipeline=2, data=2, zero=1), Case(pipeline=4, compile=True)]


@pytest.mark.parametrize(
    ("name", "world"),
    [
        pytest.param(name, world, marks=[pytest.mark.representative] if (name, world) == ("bert", 2) else [])
        for name in EQUAL
        for world in sorted({case.world for case in EQUAL[name]})
    ],
)
def test_loss_and_every_gradient_equal_those_of_plain_pytorch(name: str, world: int) -> None:
    """Compare all cases of a model that use so many processes, which start once."""
    assert_equal_to_plain_pytorch(name, *(case for case in EQUAL[name] if case.world == world))


@pytest.mark.parametrize(
    "name", ["bert", *(pytest.param(n, marks=exhaustive) for n in ("albert", "gpt2", "t5", "bert-half-frozen"))]
)
def test_blocks_on_their_way_to_cuda_graphs_give_the_gradients_of_plain_pytorch(name: str) -> None:
    """Prepare blocks for CUDA graphs as on a GPU, without ever capturing one."""
    graphs = Case(compile=True, cuda_graphs=True)
    two = [replace(graphs, pipeline=2), replace(graphs, tensor=2), replace(graphs, data=2, num_microbatches=2)]
    two.append(replace(graphs, pipeline=2, chunks=2, schedule="interleaved", recompute="selective"))
    assert_equal_to_plain_pytorch(name, *two)
    if EXHAUSTIVE:  # each of two replicas does all that one process does
        assert_equal_to_plain_pytorch(name, graphs)


def test_recomputing_some_blocks_of_a_compiled_stage_changes_no_gradient() -> None:
    some = Case(recompute="selective", recompute_first=3, num_microbatches=1, compile=True)
    less = replace(some, recompute="full", recompute_rest="selective", pipeline=2, num_microbatches=2)
    assert_equal_to_plain_pytorch("bert", some)
    if EXHAUSTIVE:
        assert_equal_to_plain_pytorch("bert", less, replace(less, schedule="interleaved", chunks=2))


def _recomputed_at(_rank: int) -> dict[str, list[int]]:
    """Count how often each block runs in one step of one micro-batch, under three plans."""
    (model, graph), batch = ONE_BERT(), zoo.batch("bert", MICRO_BATCH)
    found = {}
    for first in (0, 3, None):
        case = Case(recompute="selective" if first != 0 else "none", recompute_first=first or None, num_microbatches=1)
        stage = (trainer := trainer_of(copy.deepcopy(model), graph, plan_of(graph, case))).stages.stages[0]
        runs = [0] * len(graph.blocks)
        for block in stage.block_modules():
            block._compute = _counted(block._compute, runs, block.block.index)  # type: ignore[method-assign]
        trainer.gradients(0, batch)
        found[str(first)] = runs
    return found


def _counted(compute: Any, runs: list[int], block: int) -> Any:
    def counting(*arguments: Any) -> Any:
        runs[block] += 1
        return compute(*arguments)

    return counting


def test_so_many_blocks_run_twice_as_the_plan_says_the_first_ones_and_the_last_never() -> None:
    found = launch(_recomputed_at, 1)
    blocks = len(found["0"])
    assert found == {"0": [1] * blocks, "3": [2] * 3 + [1] * (blocks - 3), "None": [2] * (blocks - 1) + [1]}


def _trained(_rank: int, cases: tuple[Case, ...]) -> dict[Case, Outcome]:
    """Train three steps of BERT under each case."""
    found = {}
    model, graph = ONE_BERT()
    for case in cases:
        trainer = trainer_of(copy.deepcopy(model), graph, plan_of(graph, case))
        scalars = [trainer.step(step, part_of(trainer, batch_of("bert", step))).scalars.tolist() for step in range(3)]
        assert type(trainer.optimizer) is (OffloadedAdamW if case.offload_optimizer else ShardedAdamW)
        parameters = whole_parameters(trainer)
        found[case] = Outcome([s[0] for s in scalars], [s[1] ** 0.5 for s in scalars], parameters, {}, {})
    return found


def assert_trains_as_plain_adamw(*cases: Case) -> None:
    expected = plain("bert", 3)
    [world] = {case.world for case in cases}
    for case, found in launch(_trained, world, cases, ahead=ONE_BERT).items():
        assert found.losses == pytest.approx(expected.losses, rel=1e-5), case
        assert found.norms == pytest.approx(expected.norms, rel=1e-5), case
        assert worst(found.parameters, expected.parameters) < 1e-5, case


@pytest.mark.representative
def test_updates_under_every_kind_of_division_are_plain_adamws() -> None:
    """Return losses, clipped norms (each parameter once) and weights."""
    assert_trains_as_plain_adamw(
        Case(tensor=2),
        Case(pipeline=2, chunks=2, schedule="interleaved"),
        Case(data=2, zero=1, num_microbatches=2),
        Case(data=2, zero=3, num_microbatches=2, offload_optimizer=True),
    )


@exhaustive
def test_updates_under_combined_divisions_are_plain_adamws() -> None:
    assert_trains_as_plain_adamw(
        Case(pipeline=2, tensor=2, offload_optimizer=True),
        Case(pipeline=2, tensor=2, chunks=2, schedule="interleaved"),
        *(Case(data=2, tensor=2, zero=zero, num_microbatches=2) for zero in (0, 1, 2, 3)),
        Case(pipeline=2, data=2, chunks=2, schedule="interleaved", num_microbatches=2),
    )


def _dropped_out(_rank: int) -> dict[str, Any]:
    """Run one backward of BERT with dropout, with and without recomputation, on two tensor-parallel devices."""
    (model, graph), batch = captured_once("bert-dropout"), zoo.batch("bert", 2 * MICRO_BATCH)
    losses, gradients, largest = [], [], 0.0
    for recompute in ("none", "full", "selective"):
        case = Case(tensor=2, recompute=recompute, num_microbatches=2)
        trainer = trainer_of(copy.deepcopy(model), graph, plan_of(graph, case))
        losses.append(trainer.gradients(0, batch).item())
        gradients.append({name: trainer.full_gradient(name) for name in trainer.stages.model_parameters()})
        for name, parameter in trainer.stages.model_parameters().items():
            if name not in trainer.stages.shardings:
                both = [torch.empty_like(parameter) for _ in range(2)]
                torch.distributed.all_gather(both, parameter.grad.contiguous())
                largest = max(largest, (both[0] - both[1]).abs().max().item())
    seeds: list[Any] = [None, None]
    torch.distributed.all_gather_object(seeds, trainer.context.device_seed(1))
    random = {
        block.name for block, how in zip(graph.blocks, plan_tensor_parallel(graph, 2).blocks, strict=True) if how.random
    }
    return {"losses": losses, "gradients": gradients, "between": largest, "seeds": seeds, "random": random}


def test_dropout_under_tensor_parallelism_differs_in_divided_regions_and_nowhere_else() -> None:
    found = launch(_dropped_out, 2, ahead=functools.partial(captured_once, "bert-dropout"))
    assert found["seeds"][0] != found["seeds"][1]
    assert found["random"] == {f"bert.encoder.layer.{layer}" for layer in range(4)}, "attention draws on each device"
    assert found["between"] == 0, "a weight that both devices hold received different gradients"
    assert found["losses"][1:] == pytest.approx([found["losses"][0]] * 2, rel=1e-6)
    for other in found["gradients"][1:]:
        assert worst(other, found["gradients"][0]) < 1e-5, "recomputation drew other masks"


class _AllReduces(TorchDispatchMode):
    """Counts them, and those of several dims by their type."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.types: Counter[torch.dtype] = Counter()

    def __torch_dispatch__(self, operation: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation is torch.ops._c10d_functional.all_reduce.default:
            self.count += 1
            self.types[args[0].dtype] += args[0].dim() > 2
        return operation(*args, **(kwargs or {}))


def _all_reduces(_rank: int) -> dict[str, int]:
    """Count the all-reduces of one step on two tensor-parallel devices, for each way of recomputing activations."""
    (model, graph), batch = ONE_BERT(), zoo.batch("bert", MICRO_BATCH)
    found = {}
    for recompute in ("none", "selective", "full"):
        plan = plan_of(graph, Case(tensor=2, recompute=recompute, num_microbatches=1))
        trainer = trainer_of(copy.deepcopy(model), graph, plan)
        with _AllReduces() as counted:
            trainer.gradients(0, batch)
        found[recompute] = counted.count
    division = plan_tensor_parallel(graph, 2)
    found["planned"] = sum(len(b.forward_elements) + len(b.backward_elements) for b in division.blocks)
    return found


def test_reductions_are_those_of_the_analysis_and_selective_recomputation_repeats_none() -> None:
    found = launch(_all_reduces, 2, ahead=ONE_BERT)
    assert found["none"] == found["selective"] == found["planned"] + 1, "a cross-entropy reduces twice"
    assert found["full"] > found["none"]


def _in_bf16(_rank: int) -> dict[str, Any]:
    """Return the error of gradients under autocast, on one device and on two tensor-parallel devices."""
    (model, graph), batch = ONE_BERT(), zoo.batch("bert", MICRO_BATCH)
    _, exactly = plain_step(model, batch)
    exact = {key: p.grad for key, p in exactly.named_parameters()}
    with HALF():
        _, halved = plain_step(model, batch)
    alone = {key: p.grad for key, p in halved.named_parameters()}
    plan = plan_of(graph, Case(tensor=2, num_microbatches=1))
    trainer = trainer_of(copy.deepcopy(model), graph, dataclasses.replace(plan, precision="bf16"))
    with _AllReduces() as counted:
        trainer.gradients(0, batch)
    divided = {name: trainer.full_gradient(name) for name in exact}

    def distance(gradients: Mapping[str, torch.Tensor]) -> float:
        off = sum((gradients[name] - value).square().sum().item() for name, value in exact.items())
        return float((off / sum(value.square().sum().item() for value in exact.values())) ** 0.5)

    return {"types": dict(counted.types), "alone": distance(alone), "divided": distance(divided)}


def test_under_autocast_gradients_of_activations_are_summed_in_its_type_and_about_as_exact() -> None:
    found = launch(_in_bf16, 2, ahead=ONE_BERT)
    layers, head, embedding = 4 * 4, 1, 1
    assert found["types"] == {torch.bfloat16: layers + head, torch.float32: embedding}
    assert 0 < found["divided"] < 1.2 * found["alone"]


def planned(name: str, world: int, **asked: Any) -> Plan:
    """Return the planner's plan: its own cut, and its choice of everything that is not requested."""
    _, graph = captured_once(name)
    return what_if(
        profile_graph(graph, CPU, "fp32", compiled=False),
        global_batch=16,
        seq_len=zoo.SEQ,
        cluster=Cluster(CPU, world, world, LINK, LINK),
        micro_batch=MICRO_BATCH,
        **asked,
    )


def test_what_the_planner_offers_runs() -> None:
    asked: list[dict[str, Any]] = [
        {"tensor": 2, "data": 2, "zero": 1, "recompute": "selective"},
        {"pipeline": 2, "tensor": 2, "schedule": "interleaved", "chunks": 2},
    ]
    if EXHAUSTIVE:
        asked += [{"tensor": tensor, "zero": zero} for tensor in (1, 2) for zero in (0, 1, 2, 3)]
        asked += [{"schedule": name, "pipeline": 2} for name in ("gpipe", "1f1b")]
        asked += [{}]
    assert_equal_to_plain_pytorch("bert", *(planned("bert", 4, **fixed) for fixed in asked))


@exhaustive
@pytest.mark.parametrize("name", zoo.MODELS)
def test_every_model_under_tensor_parallelism_equals_plain_pytorch(name: str) -> None:
    assert_equal_to_plain_pytorch(name, Case(tensor=2), Case(tensor=2, recompute="selective"))
    assert_equal_to_plain_pytorch(name, Case(tensor=4), Case(pipeline=2, tensor=2), Case(data=2, tensor=2, zero=3))


@exhaustive
@pytest.mark.parametrize("name", ["bert", "t5", "gpt2", "albert"])
def test_every_schedule_times_every_zero_stage_equals_plain_pytorch(name: str) -> None:
    cases = [
        Case(pipeline=2, data=2, chunks=chunks, schedule=schedule, zero=zero, recompute=recompute)
        for schedule, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2))
        for zero in (0, 1, 2, 3)
        for recompute in ("none", "selective")
    ]
    assert_equal_to_plain_pytorch(name, *cases)


def _memory(model: nn.Module) -> dict[str, StorageWeakRef]:
    return {name: StorageWeakRef(weight.untyped_storage()) for name, weight in model.named_parameters()}


def _left_over(_rank: int, cases: tuple[Case, ...]) -> list[set[str]]:
    """Return the weights of the built model that are still in memory although no stage of the rank holds them.

    Python collects no garbage meanwhile.
    """
    found = []
    gc.disable()
    model, graph = captured("bert")
    for case in cases:
        memory = _memory(model)
        trainer = trainer_of(model, graph, plan_of(graph, case))
        held = {
            StorageWeakRef(local(weight).untyped_storage()) for weight in trainer.stages.model_parameters().values()
        }
        found.append({name for name, storage in memory.items() if not storage.expired() and storage not in held})
        model = MODELS["bert"]().train()
    gc.enable()
    return found


def test_a_rank_holds_nothing_of_the_model_but_its_own_weights() -> None:
    cases = Case(pipeline=2), Case(pipeline=2, chunks=2, schedule="interleaved"), Case(tensor=2), Case(data=2, zero=3)
    assert launch(_left_over, 2, cases) == [set()] * len(cases)


def _whole_at_each_sharding(_rank: int) -> list[int]:
    """Return the weights of the model that are in memory when FSDP2 shards a block or, last, the stage."""
    found = []
    gc.disable()
    model, graph = captured("bert")
    memory = _memory(model)

    def sharded(*given: Any, **named: Any) -> Any:
        found.append(sum(not storage.expired() for storage in memory.values()))
        return fully_shard(*given, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("workbench.execution.parallel.sharding.fully_shard", sharded)
        trainer_of(model, graph, plan_of(graph, Case(data=2, zero=3)))
    gc.enable()
    return found


def test_a_blocks_whole_weights_are_let_go_before_the_next_is_sharded() -> None:
    found = launch(_whole_at_each_sharding, 2)
    assert len(found) > 4
    assert all(later < earlier for earlier, later in itertools.pairwise(found))
    assert found[-1] <= 2, "what several blocks share"


def _gathers_and_forwards(_rank: int, zero: int) -> list[tuple[str, int]]:
    """Return, of one forward, when the weights of each block are all-gathered and when the block runs."""
    found: list[tuple[str, int]] = []
    model, graph = ONE_BERT()
    trainer = trainer_of(copy.deepcopy(model), graph, plan_of(graph, Case(data=2, zero=zero)))
    unshard, forward = FSDPParamGroup.unshard, BlockModule.forward

    def gathering(group: FSDPParamGroup, *given: Any) -> None:
        if group._all_gather_result is None and not group.is_unsharded:
            found.extend(("gather", module.block.index) for module in group.modules if isinstance(module, BlockModule))
        unshard(group, *given)

    def running(module: BlockModule, *given: Any) -> Any:
        found.append(("forward", module.block.index))
        return forward(module, *given)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(FSDPParamGroup, "unshard", gathering)
        patch.setattr(BlockModule, "forward", running)
        part = part_of(trainer, zoo.batch("bert", trainer.plan.global_batch))
        trainer.context.label_counts = trainer.count_labels_on_host(part)
        trainer.context.loss_denominators = [torch.ones(()) for _ in graph.label_counts]
        trainer.stages.stages[0](**{name: field[: trainer.plan.micro_batch] for name, field in part.items()})
    return found


@pytest.mark.parametrize("zero", [1, 3])
def test_a_blocks_weights_are_on_their_way_when_the_block_before_it_runs(zero: int) -> None:
    found = launch(_gathers_and_forwards, 2, zero, ahead=ONE_BERT)
    gathered = [block for event, block in found if event == "gather"]
    assert gathered == sorted(gathered)
    assert len(gathered) > 2
    assert all(found.index(("gather", block)) < found.index(("forward", block - 1)) for block in gathered[1:])
