"""Costs of strategies: checkpointing, ZeRO, offloading, CUDA graphs, tensor parallelism."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from cost_values import layered_profile
from plan_values import CAPTURABLE, H200, PROFILE, costs_of, divided_profile, plan_of, strategy_of, with_host

from workbench.base.errors import PlanInfeasible
from workbench.base.units import GIB
from workbench.cost import Cluster, Link
from workbench.cost.memory import ParameterTable, activations, keeps_bf16_gradients
from workbench.cost.profile import ParameterUpdate, Profile, SparseCosts
from workbench.planning import stage_costs
from workbench.planning.explanation import explain
from workbench.planning.prediction import timeline
from workbench.planning.stage_costs import RELAUNCHED, StrategyCosts
from workbench.strategy import RECOMPUTE


def test_a_tied_table_across_stages_costs_a_reduction() -> None:
    pricer = costs_of(PROFILE)
    strategy = strategy_of(pipeline=2, data=2, micro_batch=4, num_microbatches=8)
    last = len(PROFILE.blocks)
    assert pricer.of(strategy).tied_ms((0, 7, last)) > 0
    assert pricer.of(replace(strategy, pipeline=1, data=4)).tied_ms((0, last)) == 0
    on_one_rank = replace(strategy, schedule="interleaved", chunks=2)
    assert pricer.of(on_one_rank).tied_ms((0, 4, 6, 7, last)) > 0
    head_back_on_rank_0 = replace(
        PROFILE, blocks=(*PROFILE.blocks[:7], replace(PROFILE.blocks[-1], name="head"), *PROFILE.blocks[7:-1])
    )
    assert costs_of(head_back_on_rank_0).of(on_one_rank).tied_ms((0, 4, 6, 9, last)) == 0
    separate = replace(PROFILE, blocks=(*PROFILE.blocks[:-1], replace(PROFILE.blocks[-1], parameters=("head.bias",))))
    assert costs_of(separate).of(strategy).tied_ms((0, 7, last)) == 0


def test_every_schedule_and_zero_stage_is_tried() -> None:
    rows = plan_of(replace(PROFILE, compiled=False)).candidates
    assert {row.schedule for row in rows} == {"1f1b", "gpipe", "interleaved"}
    assert {row.zero for row in rows} == {0, 1, 2, 3}
    assert {row.offload_optimizer for row in rows} == {False, True}


def test_an_interleaved_plan_is_faster_than_its_1f1b_where_sends_are_free_and_holds_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stage_costs, "INTERLEAVED_SLOWDOWN", 0.0)
    fixed: dict[str, Any] = {"pipeline": 4, "micro_batch": 2, "recompute": "none"}
    fixed["cluster"] = replace(with_host(0.0), intra=Link(1e18, 0.0))
    plain = plan_of(**fixed, schedule="1f1b")
    interleaved = plan_of(**fixed, schedule="interleaved", chunks=2)
    assert interleaved.chunks == 2
    assert len(interleaved.stages) == 8
    assert interleaved.prediction.step_ms < plain.prediction.step_ms
    assert interleaved.peak_bytes > plain.peak_bytes
    assert interleaved.peak_bytes == max(sum(s.memory.total for s in interleaved.stages[rank::4]) for rank in range(4))
    assert timeline(interleaved).bubble_fraction == pytest.approx(interleaved.prediction.bubble_fraction, abs=0.01)


def test_gpus_compute_more_slowly_while_receives_of_several_stages_wait() -> None:
    """The slow-down was measured on H200s (7 to 10 %), where receives wait; one rank and CPUs have none."""

    def compute_ms(cluster: Cluster, **choices: Any) -> float:
        fixed: dict[str, Any] = {"micro_batch": 2, "recompute": "none", "tensor": 1, "data": 1}
        return plan_of(**fixed, cluster=cluster, **choices).prediction.compute_ms

    gpus = replace(with_host(0.0), gpus=2)
    plain = compute_ms(gpus, pipeline=2, schedule="gpipe")
    interleaved = compute_ms(gpus, pipeline=2, schedule="interleaved", chunks=2)
    assert 1.05 < interleaved / plain < 1.12


def test_earlier_stages_recompute_where_only_they_hold_too_much() -> None:
    """Of 1F1B's stages the first holds most: just below what fits without, it alone need recompute."""
    profile = layered_profile(layers=30, vocabulary=1_000_000)
    fixed = {"pipeline": 4, "schedule": "1f1b", "micro_batch": 2, "offload_optimizer": False}
    free = plan_of(profile, **fixed, recompute="none")
    mixed = plan_of(profile, **fixed, memory_limit_bytes=int(0.93 * free.peak_bytes / (1 - 0.04)))
    kinds = [stage.recompute for stage in mixed.stages]
    assert kinds[0] != "none"
    assert kinds[-1] == "none"
    assert mixed.recompute == "mixed"
    assert free.prediction.step_ms < mixed.prediction.step_ms
    full = plan_of(profile, **fixed, recompute="full")
    assert mixed.prediction.step_ms < full.prediction.step_ms


def test_selective_checkpointing_lies_between_none_and_full() -> None:
    fixed = {"pipeline": 1, "zero": 2, "micro_batch": 8, "offload_optimizer": False}
    none, selective, full = (plan_of(**fixed, recompute=kind) for kind in ("none", "selective", "full"))
    assert none.prediction.step_ms < selective.prediction.step_ms < full.prediction.step_ms
    assert none.peak_bytes > selective.peak_bytes > full.peak_bytes


def test_zero_1_shards_the_optimiser_and_nothing_else() -> None:
    fixed = {"pipeline": 1, "recompute": "none", "offload_optimizer": False, "cluster": with_host(0.0)}
    zero, one, two = (plan_of(**fixed, zero=stage, micro_batch=4) for stage in (0, 1, 2))
    assert one.stages[0].memory.optimizer == pytest.approx(zero.stages[0].memory.optimizer / 4, abs=1)
    assert one.stages[0].memory.gradients == zero.stages[0].memory.gradients / 2 == 4 * PROFILE.parameter_count
    assert two.stages[0].memory.gradients == pytest.approx(one.stages[0].memory.gradients / 4, abs=1)
    assert one.prediction.step_ms < two.prediction.step_ms, "four micro-batches, one reduction"


def test_a_step_of_one_micro_batch_reduces_gradients_as_they_come() -> None:
    """Where the head's backward is the fullest moment, no layer has any yet; ZeRO 1 holds what ZeRO 2 does."""
    fixed = {"pipeline": 1, "recompute": "none", "offload_optimizer": False, "micro_batch": 16}
    one, two = (plan_of(**fixed, zero=stage).stages[0].memory for stage in (1, 2))
    assert one == two
    table = 60_030_000
    assert one.gradients == pytest.approx(table, abs=1), "fp32, over four devices"
    kept = [PROFILE.block_types[block.block_type].saved_bytes for block in PROFILE.blocks]
    assert one.activations == pytest.approx(16 * (sum(kept) + PROFILE.block_types[2].workspace_bytes), abs=1)


def test_offloading_takes_the_optimiser_off_the_device_and_costs_its_transfer() -> None:
    fixed = {"pipeline": 4, "micro_batch": 4, "recompute": "none"}
    here, offloaded = (plan_of(**fixed, offload_optimizer=offload) for offload in (False, True))
    assert offloaded.offload_optimizer
    assert offloaded.stages[1].memory.optimizer < here.stages[1].memory.optimizer
    elements = max(stage.parameters for stage in here.stages)
    together = H200.device.shared_host_bandwidth
    assert together is not None
    assert together < 4 * H200.device.host_bandwidth
    transfer_ms = 2 * 8 * elements / (together / 4) * 1e3
    assert offloaded.prediction.step_ms == pytest.approx(here.prediction.step_ms + transfer_ms, rel=0.01)


def test_an_update_in_one_pass_saves_clipping_and_the_reads_of_weights_to_copy() -> None:
    types = tuple(replace(each, cast_elements=1e6) for each in PROFILE.block_types)
    profile, device = replace(PROFILE, block_types=types), H200.device
    byte_ms = 1e3 / (device.memory_bandwidth * device.efficiency.bandwidth)

    def saved_ms(profile: Profile, **choices: Any) -> float:
        one, several = (
            costs_of(replace(profile, optimizer_in_one_pass=in_one_pass)).of(strategy_of(**choices)).whole.optimizer
            for in_one_pass in (True, False)
        )
        return float(several - one)

    clipping = 8 * profile.parameter_count
    assert saved_ms(profile, data=4) == pytest.approx(clipping * byte_ms), "replicas keep no copies"
    copied = 1e6 * (len(profile.blocks) - 2) + profile.parameters["head.bias"]  # the tied table has no copy
    assert saved_ms(profile, num_microbatches=2) == pytest.approx((clipping + 4 * copied) * byte_ms)
    assert saved_ms(profile) == pytest.approx((clipping + 4 * copied + 4 * copied) * byte_ms), "bf16 is read twice"
    assert saved_ms(profile, offload_optimizer=True) == 0
    assert saved_ms(replace(profile, device_type="cpu")) == 0


def test_gradients_of_weights_with_copies_stay_in_bf16_where_each_is_made_once() -> None:
    types = tuple(replace(each, cast_elements=1e6) for each in PROFILE.block_types)
    profile, device = replace(PROFILE, block_types=types), H200.device
    byte_ms = 1e3 / (device.memory_bandwidth * device.efficiency.bandwidth)
    copied = 1e6 * (len(profile.blocks) - 2) + profile.parameters["head.bias"]  # the tied table has no copy

    def costs(num_microbatches: int, **changes: Any) -> StrategyCosts:
        return costs_of(replace(profile, **changes)).of(strategy_of(micro_batch=64, num_microbatches=num_microbatches))

    once, twice, others = costs(1), costs(2), costs(1, optimizer_in_one_pass=False)
    assert once.state().gradients[0, -1] == 4 * profile.parameter_count - 2 * copied
    assert twice.state().gradients[0, -1] == others.state().gradients[0, -1] == 4 * profile.parameter_count
    assert others.state_bytes - once.state_bytes == 2 * copied
    offloaded = costs_of(profile).of(strategy_of(micro_batch=64, offload_optimizer=True))
    backward = [each.whole.backward - each.whole.host_wait / 2 for each in (once, others, offloaded)]
    assert backward[1] - backward[0] == pytest.approx(10 * copied * byte_ms)
    assert backward[2] == backward[1]
    held = [float(each.state().total[0, -1] + each.activations().newest[0, 0, -1]) for each in (once, others)]
    assert held[0] == held[1] - 2 * 3e4, "at the last block's backward, the peak, there are its own gradients alone"


def test_other_plans_and_trainings_keep_gradients_in_fp32() -> None:
    assert keeps_bf16_gradients(PROFILE, strategy_of(tensor=2))
    choices = [{"num_microbatches": 2}, {"data": 2}, {"pipeline": 2}, {"offload_optimizer": True}]
    for chosen in (*choices, {"data": 2, "cuda_graphs": True}):
        assert not keeps_bf16_gradients(PROFILE, strategy_of(**chosen)), chosen
    changes: list[dict[str, Any]] = [{"precision": "fp32"}, {"device_type": "cpu"}, {"optimizer_in_one_pass": False}]
    for changed in (*changes, {"sparse": SparseCosts(0.9, 64, {}, 0.0)}):
        assert not keeps_bf16_gradients(replace(PROFILE, **changed), strategy_of()), changed


def test_devices_of_a_node_share_the_way_to_its_host() -> None:
    """Two devices have what one has; eight share what four do."""

    def transfer_ms(gpus: int) -> float:
        cluster = replace(H200, gpus=gpus, gpus_per_node=gpus)
        pricer = costs_of(replace(PROFILE, optimizer_in_one_pass=False), cluster)
        here = strategy_of(data=gpus, zero=1, micro_batch=4)
        offloaded = replace(here, offload_optimizer=True)
        return gpus * float(pricer.of(offloaded).whole.optimizer - pricer.of(here).whole.optimizer)

    assert transfer_ms(2) == pytest.approx(transfer_ms(1))
    assert transfer_ms(8) == pytest.approx(2 * transfer_ms(4))
    assert transfer_ms(4) > transfer_ms(2)


def test_a_device_waits_for_its_host_where_that_takes_longer_for_both_directions_together() -> None:
    """Not for each: while the backward runs, the host gets ahead with the next forward."""
    fixed: dict[str, Any] = {"pipeline": 4, "data": 1, "micro_batch": 4, "recompute": "none", "schedule": "1f1b"}
    fast = plan_of(**fixed, cluster=with_host(0.0))
    layers = fast.stages[1]
    forward_s = 1e-3 * layers.forward_ms / (layers.end_block - layers.first_block)
    assert plan_of(**fixed, cluster=with_host(1.1 * forward_s)).prediction == fast.prediction
    slow = plan_of(**fixed, cluster=with_host(1e-2, action_s=3e-3))
    for stage in slow.stages:
        blocks = stage.end_block - stage.first_block
        assert stage.forward_ms + stage.backward_ms == pytest.approx(2 * (10.0 * blocks + 3.0))
    alone = plan_of(**(fixed | {"pipeline": 1, "data": 4}), cluster=with_host(1e-2, action_s=3e-3)).stages[0]
    assert alone.forward_ms + alone.backward_ms <= 2 * 10.0 * alone.end_block, (
        "the last reduction is the host's time too"
    )


def test_blocks_are_recorded_where_launching_them_would_take_the_host_long() -> None:
    late = with_host(1e-2)
    plan = plan_of(CAPTURABLE, cluster=late, pipeline=1)
    launched = plan_of(CAPTURABLE, cluster=late, pipeline=1, cuda_graphs=False)
    assert plan.cuda_graphs
    assert plan.zero == 0
    assert plan.prediction.host_ms == 0 < launched.prediction.host_ms
    assert plan.prediction.step_ms < launched.prediction.step_ms
    assert "CUDA graphs" in plan.describe()
    assert not launched.cuda_graphs
    assert {row.cuda_graphs for row in plan.candidates if row.zero == 0} == {True, False}
    assert not any(row.cuda_graphs for row in plan.candidates if row.zero > 0), "FSDP2 moves weights"
    assert not any(row.cuda_graphs for row in plan_of(CAPTURABLE, cluster=with_host(0.0)).candidates)
    assert not any(row.cuda_graphs for row in plan_of(cluster=late).candidates), "its blocks cannot be recorded"


def test_an_explanation_says_what_cuda_graphs_would_win() -> None:
    late = plan_of(CAPTURABLE, cluster=with_host(1e-2), pipeline=1, cuda_graphs=False)
    assert "and CUDA graphs." in str(explain(late))
    [change] = [change for change in explain(late).changes if change.constraint == "cuda_graphs=False"]
    assert change.plan.cuda_graphs
    assert change.gain > 0.1


def test_blocks_are_recorded_where_a_host_might_fall_behind_though_it_should_not() -> None:
    """It takes from half of the device's time on: nothing is predicted to be won."""
    fixed: dict[str, Any] = {"pipeline": 4, "data": 1, "micro_batch": 4, "recompute": "none", "schedule": "1f1b"}
    layers = plan_of(**fixed, cluster=with_host(0.0)).stages[1]
    block_s = 1e-3 * (layers.forward_ms + layers.backward_ms) / (layers.end_block - layers.first_block)
    for share, recorded in ((0.7, True), (0.3, False)):
        cluster = with_host(share * block_s / 2)
        plan = plan_of(CAPTURABLE, **fixed, cluster=cluster)
        assert plan.cuda_graphs is recorded
        launched = plan_of(CAPTURABLE, **fixed, cluster=cluster, cuda_graphs=False)
        assert plan.prediction.step_ms == pytest.approx(launched.prediction.step_ms)


def test_graphs_take_memory_and_their_blocks_are_recomputed_as_ever() -> None:
    fixed: dict[str, Any] = {"pipeline": 4, "data": 1, "micro_batch": 4, "schedule": "1f1b", "cluster": with_host(1e-2)}
    recorded, launched = (plan_of(CAPTURABLE, **fixed, recompute="none", cuda_graphs=g) for g in (True, False))
    for with_them, without in zip(recorded.stages, launched.stages, strict=True):
        graphs = 2 * recorded.num_microbatches * (with_them.end_block - with_them.first_block)
        added = with_them.memory.workspace - without.memory.workspace
        assert added == pytest.approx(graphs * stage_costs.GRAPH_BYTES, abs=1)
    full = [plan_of(CAPTURABLE, **fixed, recompute="full", cuda_graphs=g).prediction.host_ms for g in (True, False)]
    assert full[0] == full[1] > 0, "what draws random numbers again cannot be recorded"


def test_replicas_average_beside_the_backward_what_is_a_recorded_blocks_own() -> None:
    """What several blocks share, and what is not recorded, they average behind it. `DistributedDataParallel` does not
    keep a second copy of the gradients."""
    fixed: dict[str, Any] = {"pipeline": 1, "data": 4, "zero": 0, "micro_batch": 16, "recompute": "none"}
    fixed |= {"global_batch": 128, "cluster": with_host(0.0)}
    embedding, layer, head = CAPTURABLE.block_types
    heads_alone = replace(CAPTURABLE, block_types=(embedding, replace(layer, capturable=()), head))
    launched, recorded = (plan_of(CAPTURABLE, **fixed, cuda_graphs=g) for g in (False, True))
    behind = plan_of(heads_alone, **fixed, cuda_graphs=True)
    hidden, shared, exposed = (plan.prediction.communication_ms for plan in (launched, recorded, behind))
    elements = CAPTURABLE.parameters
    of_layers = sum(size for name, size in elements.items() if name.startswith("layer"))
    assert exposed > 1.5 * hidden
    assert (shared - hidden) / (exposed - hidden) == pytest.approx(elements["table"] / (elements["table"] + of_layers))
    assert 2 * recorded.stages[0].memory.gradients == pytest.approx(launched.stages[0].memory.gradients)


def test_the_graphs_of_a_tensor_parallel_block_take_more_memory_for_each_all_reduce() -> None:
    fixed: dict[str, Any] = {"pipeline": 1, "data": 2, "tensor": 2, "zero": 0, "micro_batch": 4, "recompute": "none"}
    plans = [plan_of(divided_profile(), **fixed, cuda_graphs=graphs) for graphs in (True, False)]
    layers, in_layers, in_head = 6, 4, 2  # of Megatron's layer two in either direction; of the head one
    collectives = layers * in_layers + in_head
    each = (
        2 * len(divided_profile().blocks) * stage_costs.GRAPH_BYTES + collectives * stage_costs.GRAPH_ALL_REDUCE_BYTES
    )
    added = plans[0].stages[0].memory.workspace - plans[1].stages[0].memory.workspace
    assert added == pytest.approx(plans[0].num_microbatches * each, abs=1)


def test_a_host_launches_the_collectives_of_shards_as_often_as_a_step_has_them() -> None:
    launches = replace(with_host(0.0).device.efficiency, sharded_collective_s=1e-3)
    cluster = replace(H200, device=replace(H200.device, efficiency=launches))
    blocks, found = len(PROFILE.blocks), {}
    for zero in (0, 1, 2, 3):
        strategy = strategy_of(data=4, zero=zero, num_microbatches=4)
        found[zero] = 4 * float(costs_of(PROFILE, cluster).of(strategy).whole.host)
    assert found == {0: 0.0, 1: 2.0 * blocks, 2: 5.0 * blocks, 3: 8.0 * blocks}


def test_an_update_that_launches_kernels_for_each_matrix_may_hold_up_the_step() -> None:
    name = next(name for name in PROFILE.blocks[1].parameters)
    muon = replace(PROFILE, parameter_updates={name: ParameterUpdate(4.0, 20.0, 1e6, PROFILE.parameters[name])})
    idle = with_host(0.0)
    slow = replace(idle, device=replace(idle.device, efficiency=replace(idle.device.efficiency, matrix_s=0.25)))
    for profile, cluster, waits in ((PROFILE, slow, False), (muon, idle, False), (muon, slow, True)):
        times = costs_of(profile, cluster).of(strategy_of(micro_batch=2, num_microbatches=2)).whole
        assert bool(times.host_wait > 0) == waits
        step_ms = 2 * float(times.busy) + float(times.ending)
        assert not waits or step_ms == pytest.approx(250 + 2 * float(times.host)), "the host's time is the step's"


def test_what_a_host_does_once_a_step_counts_once_and_only_where_the_device_waits_for_it() -> None:
    fixed: dict[str, Any] = {"pipeline": 2, "data": 1, "micro_batch": 4, "schedule": "interleaved", "chunks": 2}
    free = replace(with_host(0.0), gpus=2)
    busy = plan_of(**fixed, cluster=free)
    longest_ms = max(sum(s.forward_ms + s.backward_ms for s in busy.stages[rank::2]) for rank in range(2))
    longest_ms *= busy.num_microbatches
    for step_ms, waits in ((0.4 * longest_ms, False), (3 * longest_ms, True)):
        late = plan_of(**fixed, cluster=with_host(0.0, cluster=free, step_s=step_ms / 1e3))
        assert (late.prediction == busy.prediction) != waits
        for rank in range(2) if waits else ():
            each_ms = sum(stage.forward_ms + stage.backward_ms for stage in late.stages[rank::2])
            assert each_ms * late.num_microbatches == pytest.approx(step_ms)


def test_a_host_launches_every_all_reduce_of_the_tensor_axis() -> None:
    fixed: dict[str, Any] = {"pipeline": 1, "data": 2, "tensor": 2, "zero": 0, "micro_batch": 4, "recompute": "none"}
    fixed["cuda_graphs"] = False
    free = with_host(1e-2)
    each = replace(free.device, efficiency=replace(free.device.efficiency, collective_s=1e-3))
    plans = [plan_of(divided_profile(), **fixed, cluster=cluster) for cluster in (replace(free, device=each), free)]
    costs = divided_profile().on_tensor_axis(2).at(4, H200.device)
    collectives = sum(map(len, (*costs.forward_reduced, *costs.backward_reduced)))
    added = [plan.stages[0].forward_ms + plan.stages[0].backward_ms for plan in plans]
    assert collectives > 0
    assert added[0] - added[1] == pytest.approx(collectives * 1.0)


def test_a_host_launches_what_checkpointing_computes_again() -> None:
    fixed: dict[str, Any] = {"pipeline": 4, "data": 1, "micro_batch": 4, "schedule": "1f1b", "cluster": with_host(1e-2)}
    none, full = (plan_of(**fixed, recompute=kind).stages[0] for kind in ("none", "full"))
    per_block = (none.forward_ms + none.backward_ms) / (none.end_block - none.first_block)
    assert (full.forward_ms + full.backward_ms) / (full.end_block - full.first_block) == pytest.approx(
        (1 + RELAUNCHED["full"] / 2) * per_block
    )


def test_offloading_is_refused_where_the_host_has_too_little_memory() -> None:
    profile = layered_profile(layers=30, elements=100_000_000)
    fixed = {"pipeline": 4, "micro_batch": 4, "offload_optimizer": True, "schedule": "1f1b"}
    small = replace(H200, host_bytes=int(10 * GIB))  # 8 GiB of it for 8 bytes of each of 3.1 B parameters over 4 stages
    plan = plan_of(profile, **fixed, cluster=small)
    assert max(8 * stage.parameters for stage in plan.stages) <= small.host_offered_bytes == 8 * GIB
    with pytest.raises(
        PlanInfeasible, match=r"needs at least .* of the host's memory for each device, and 4.0 GiB fall"
    ):
        plan_of(profile, **fixed, cluster=replace(H200, host_bytes=5 * GIB))
    tiny = replace(with_host(0.0), host_bytes=GIB)
    rows = plan_of(profile, cluster=tiny, pipeline=1, micro_batch=1, memory_limit_bytes=16 * GIB).candidates
    refused = [row for row in rows if "host's memory" in row.verdict]
    assert refused
    assert all(row.offload_optimizer and row.step_ms is None and row.peak_bytes is None for row in refused)
    assert plan_of(profile, **fixed, cluster=replace(H200, host_bytes=None)).offload_optimizer, "unknown is not refused"


def test_a_tight_host_moves_the_cut() -> None:
    """Stages whose optimiser state fits the host are found, though others would be faster."""
    profile = layered_profile(layers=6, elements=20_000_000, vocabulary=200_000_000)
    fixed = {"pipeline": 2, "data": 1, "micro_batch": 4, "offload_optimizer": True, "schedule": "1f1b"}
    two = replace(with_host(0.0), gpus=2, gpus_per_node=2)
    free = plan_of(profile, **fixed, cluster=replace(two, host_bytes=None))
    most = max(8 * stage.parameters for stage in free.stages)
    least = 8 * 260_000_000  # the table in both stages, and three layers in each
    limit = (most + least) / 2
    assert most > limit
    tight = plan_of(profile, **fixed, cluster=replace(two, host_bytes=int(limit / 0.8)))
    assert max(8 * stage.parameters for stage in tight.stages) <= limit


def test_optimiser_state_of_a_cpu_is_on_the_host_already() -> None:
    profile = replace(PROFILE, device_type="cpu", precision="fp32")
    cluster = replace(H200, device=replace(H200.device, type="cpu", name="CPU process"))
    assert not any(row.offload_optimizer for row in plan_of(profile, cluster=cluster, precision="fp32").candidates)
    with pytest.raises(PlanInfeasible, match=r"where a CPU process has it already\. Leave it out\."):
        plan_of(profile, cluster=cluster, precision="fp32", offload_optimizer=True)


def test_tensor_parallelism_divides_memory_and_compute_and_costs_its_all_reduces() -> None:
    fixed = {"pipeline": 1, "micro_batch": 16, "zero": 0, "recompute": "none", "offload_optimizer": False}
    plain, divided = (plan_of(divided_profile(), **fixed, tensor=degree, cluster=with_host(0.0)) for degree in (1, 2))
    assert (divided.tensor, divided.data, divided.world) == (2, 2, 4)
    assert divided.peak_bytes < 0.75 * plain.peak_bytes
    assert divided.stages[0].parameters == plain.stages[0].parameters == divided_profile().parameter_count
    per_micro_batch = divided.prediction.compute_ms / divided.num_microbatches
    assert per_micro_batch < 0.75 * plain.prediction.compute_ms / plain.num_microbatches
    hidden_BSD = 16 * 512 * 1024
    volume = 6 * 2 * (2 + 2) * hidden_BSD  # two all-reduces of bf16 forward, and backward, a layer
    least = divided.num_microbatches * volume / H200.intra.bandwidth * 1e3
    assert divided.prediction.communication_ms > least


def test_what_is_reduced_over_the_tensor_axis_is_kept_and_reduced_again_only_where_a_whole_block_is() -> None:
    fixed = {"pipeline": 1, "micro_batch": 16, "zero": 0, "tensor": 2, "offload_optimizer": False}
    none, selective, full = (plan_of(divided_profile(), **fixed, recompute=mode) for mode in RECOMPUTE)
    assert selective.prediction.communication_ms == pytest.approx(none.prediction.communication_ms)
    assert full.prediction.communication_ms > none.prediction.communication_ms
    costs = divided_profile().on_tensor_axis(2).at(16, H200.device)
    table, strategy = ParameterTable(divided_profile().on_tensor_axis(2)), strategy_of(data=2, num_microbatches=2)
    held = activations(costs, table, strategy, divided_profile(), ("selective",)).held[0, 1, 2]
    assert costs.forward_reduced[1], "a layer"
    assert held == costs.input_bytes[1] + costs.products_bytes[1] + sum(costs.forward_reduced[1])


def test_tensor_parallelism_is_offered_where_the_model_can_be_divided_and_within_a_node() -> None:
    assert {row.tensor for row in plan_of(divided_profile()).candidates} == {1, 2, 4}
    sixteen = Cluster.of("h200", gpus=16, nodes=4)
    assert {row.tensor for row in plan_of(divided_profile(), cluster=sixteen).candidates} == {1, 2, 4}
    with pytest.raises(PlanInfeasible, match=r"tensor=16 does not divide most of .*Choose one of 1, 2, 4, 8"):
        plan_of(divided_profile(), cluster=sixteen, tensor=16)


def test_replicas_over_several_nodes_share_the_nodes_network_cards() -> None:
    cluster = Cluster.of("h200", gpus=32)
    assert cluster.group_link(8) == cluster.intra
    assert cluster.group_link(4, stride=2) == cluster.intra
    across = cluster.group_link(32)
    assert across.bandwidth == min(cluster.intra.bandwidth, 8 * cluster.inter.bandwidth)
    assert cluster.group_link(4, stride=8).bandwidth == cluster.inter.bandwidth
    assert cluster.hop_link(0, 4, 4) == cluster.intra
    assert cluster.hop_link(4, 8, 4) == cluster.inter
