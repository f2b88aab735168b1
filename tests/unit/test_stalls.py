"""A stall is told from what takes long; the rank that others wait for is found in stacks and collectives."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_runs import make_run

from tests import worlds
from tests.logs import append_event
from tests.patience import PATIENCE_S, Clock, eventually
from workbench.execution import heartbeat
from workbench.execution.heartbeat import Heartbeat, RankOperations, awaited, read_beat, waits
from workbench.record.events import ProcessRecord
from workbench.record.rundir import RunDir, process_alive, process_record, read_json, this_process, write_json
from workbench.runs.launching import processes, stalls
from workbench.runs.launching.stalls import StallWatch, in_words
from workbench.runs.run import Run

ROOT = Path(__file__).parents[2]
RANK = """
import sys, time
sys.path[:0] = {paths!r}
from pathlib import Path
from workbench.execution.heartbeat import RankOperations, awaited, waits
from workbench.execution.heartbeat import Heartbeat
from workbench.record.rundir import RunDir
beat = Heartbeat(RunDir(Path({run!r})), {rank})
beat.begin({activity!r}, 7)

def loads_forever():
    print("ready", flush=True)
    time.sleep(600)  # clock: it hangs until it is killed

loads_forever()
"""
COLLECTIVE = """
import sys
sys.path[:0] = {paths!r}
exec(compile(open({code!r}).read(), "/env/torch/distributed/distributed_c10d.py", "exec"))
"""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock by which stalls are told."""
    clock = Clock()
    monkeypatch.setattr(stalls, "time", clock)
    return clock


@pytest.fixture
def run(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> RunDir:  # noqa: ARG001
    monkeypatch.setattr(heartbeat, "ANSWER_S", PATIENCE_S)
    monkeypatch.setenv("WORKBENCH_STALL_LIMIT_S", "1000")
    return make_run(tmp_path, supervisor=this_process())


@pytest.fixture
def answered(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks that live answer before the clock goes on; the main thread of each is written last."""
    send = processes.send_signal

    def asked(records: Iterable[ProcessRecord], number: int) -> None:
        stacks = [run.stack(record["rank"]) for record in records if process_alive(record)]  # type: ignore[typeddict-item]
        before = {stack: len(stack.read_text()) for stack in stacks}
        send(records, number)
        for stack, size in before.items():
            eventually(lambda stack=stack, size=size: stack.read_text()[size:].endswith(worlds.OUTERMOST))

    monkeypatch.setattr(processes, "send_signal", asked)


@pytest.fixture
def started(run: RunDir, tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Return two ranks: rank 0 is in a collective by the name of its file, and rank 1 loads data."""
    found = []
    for rank, activity in enumerate(("step", "batch")):
        code = RANK.format(paths=[str(ROOT)], run=str(run.path), rank=rank, activity=activity)
        if rank == 0:
            (tmp_path / "rank.py").write_text(code)
            code = COLLECTIVE.format(paths=[str(ROOT)], code=str(tmp_path / "rank.py"))
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        write_json(run.rank(rank), {**process_record(process.pid), "rank": rank, "stage": rank})
        found.append(process)
    yield found
    for process in found:
        process.kill()
        process.wait()


def watched(run: RunDir, step_ms: float = 10.0, steps: int = 5) -> StallWatch:
    watch = StallWatch(run)
    for _ in range(steps):
        watch.note_step(step_ms)
    return watch


def status_after(watch: StallWatch, run: RunDir, clock: Clock, seconds: float) -> str:
    until = clock.now + seconds
    while clock.now < until:
        clock.sleep(stalls.LOOK_S)
        watch.look()
    return Run(run.path).status.state


@pytest.mark.usefixtures("answered")
def test_the_rank_that_waits_for_nobody_is_named_and_after_the_limit_its_error_holds_all_stacks(
    run: RunDir, clock: Clock, started: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = watched(run)
    assert status_after(watch, run, clock, 59.0) == "running"
    assert status_after(watch, run, clock, 2.0) == "stalled"
    message = Run(run.path).status.message
    assert "Step 7 has made no progress" in message
    assert "Rank 1 (stage 1) is busy in loads_forever at " in message
    assert "Waiting: rank 0 (stage 0) in loads_forever at distributed/distributed_c10d.py:" in message
    assert "Rank 0" not in message
    monkeypatch.setenv("WORKBENCH_STALL_LIMIT_S", "70")
    assert not watch.look()
    assert not run.error(1).exists()
    status_after(watch, run, clock, 10.0)
    assert watch.look()
    error = read_json(run.error(1))
    assert (error["rank"], error["type"]) == (1, "Stalled")
    assert error["traceback"].count("in loads_forever") == 2
    os.kill(started[1].pid, signal.SIGKILL)
    started[1].wait()
    assert status_after(watched(run), run, clock, 61.0) == "stalled"
    assert "Rank 1 (stage 1) does not answer: its process is gone." in Run(run.path).status.message


@pytest.mark.parametrize(
    ("activity", "timed"),
    [
        ("starting", "batch"),
        ("evaluation", "batch"),
        ("checkpoint", "batch"),
        ("locating", "leaving"),
        ("ending", "leaving"),
    ],
)
def test_what_may_take_long_is_no_stall(activity: str, timed: str, run: RunDir, clock: Clock) -> None:
    beat = Heartbeat(run, 0)
    write_json(run.rank(0), {**this_process(), "rank": 0, "stage": 0})
    beat.begin(activity, 3)
    watch = watched(run)
    assert status_after(watch, run, clock, 120.0) == "running"
    beat.begin(timed)
    assert status_after(watch, run, clock, 61.0) == "stalled"
    what = "Leaving the process groups after step 3" if timed == "leaving" else "Step 3"
    assert f"{what} has made no progress" in Run(run.path).status.message
    beat.begin("step", 4)
    assert status_after(watch, run, clock, 1.0) == "running"
    assert (beaten := read_beat(run, 0)) is not None
    assert (beaten.step, beaten.activity) == (4, "step")


def test_neither_the_first_steps_nor_a_step_of_nine_medians_is_a_stall(run: RunDir, clock: Clock) -> None:
    write_json(run.rank(0), {**this_process(), "rank": 0, "stage": 0})
    Heartbeat(run, 0).begin("step", 3)
    assert status_after(watched(run, steps=2), run, clock, 600.0) == "running"
    assert status_after(watched(run, step_ms=10_000.0), run, clock, 90.0) == "running"
    assert status_after(watched(run, step_ms=10_000.0), run, clock, 101.0) == "stalled"


def test_a_stalled_run_has_no_time_left_in_any_table(run: RunDir) -> None:
    for step in (1, 2):
        append_event(run.events, "step", step=step, loss=1.0, step_ms=100.0)
    assert Run(run.path).row()["eta_s"] == pytest.approx(9.8)
    append_event(run.events, "status", state="stalled", message="Step 3 has made no progress.")
    facts = Run(run.path).row()
    assert (facts["state"], facts["eta_s"]) == ("stalled", None)
    assert "stalled, step 2 of 100" in repr(Run(run.path))


WORLD = {
    "0": {"name": "default_pg", "ranks": [0, 1, 2, 3]},
    "7": {"name": "mesh_dp_shard", "ranks": [1, 3]},
    "9": {"name": "mesh_tp", "ranks": [2, 3]},
}


def entry(name: str, number: int, group: str = "0", ended: bool = False, size: int = 8) -> dict[str, Any]:
    """Return an entry of NCCL's recorder, as torch's server tells it."""
    is_pair = "send" in name or "recv" in name or name == "coalesced"
    return {
        "process_group": [group, WORLD[group]["name"]],
        "profiling_name": f"nccl:{name}",
        "is_p2p": is_pair,
        "p2p_seq_id": number if is_pair else 0,
        "collective_seq_id": 0 if is_pair else number,
        "input_sizes": [[size, 4]],
        "input_dtypes": ["BFloat16"],
        "output_sizes": [],
        "output_dtypes": [],
        "state": "completed" if ended else "scheduled",
        "retired": ended,
    }


def told(rank: int, *entries: dict[str, Any]) -> RankOperations:
    return RankOperations.read({name: group for name, group in WORLD.items() if rank in group["ranks"]}, entries)


def test_the_rank_at_the_end_of_the_chain_of_waits_is_the_one_that_is_missing() -> None:
    """Ranks 0 and 2 wait for 1, which waits for 3; 3 has entered nothing and waits for nobody."""
    found = {
        0: told(0, entry("all_reduce", 4, ended=True), entry("all_reduce", 5)),
        1: told(1, entry("all_reduce", 4, ended=True), entry("_all_gather_base", 12, "7")),
        2: told(2, entry("all_reduce", 4, ended=True), entry("all_reduce", 5)),
        3: told(3, entry("all_reduce", 4, ended=True), entry("_all_gather_base", 11, "7", ended=True)),
    }
    assert awaited(waits(found)) == {3}
    assert [in_words(wait, {3: "rank 3 (stage 1)"}) for wait in waits(found)] == [
        "Rank 0, rank 2 wait in all-reduce 5 of 8 × 4 bf16 in the group of all ranks (ranks 0, 1, 2, 3), which "
        "rank 1, rank 3 (stage 1) have not entered.",
        "Rank 1 waits in all-gather 12 of 8 × 4 bf16 in the data-parallel group (ranks 1, 3), which "
        "rank 3 (stage 1) has not entered.",
    ]
    del found[3]  # as one that is stopped
    assert in_words(waits(found)[1], {}).endswith(
        "in the data-parallel group (ranks 1, 3), and nothing is known of rank 3."
    )


def test_collectives_that_differ_and_those_that_all_have_entered_are_told_apart() -> None:
    ranks = {rank: told(rank, entry("all_reduce", 5, size=8 if rank != 2 else 16)) for rank in range(4)}
    (wait,) = waits(ranks)
    assert "but rank 2 entered all-reduce 5 of 16 × 4 bf16: their code differs there" in in_words(wait, {})
    (wait,) = waits({rank: told(rank, entry("all_reduce", 5)) for rank in range(4)})
    assert "which all ranks have entered: a link or a device hangs" in in_words(wait, {})
    assert awaited([wait]) == set()
    assert waits({rank: told(rank, entry("all_reduce", 5, ended=True)) for rank in range(4)}) == []


def test_a_receive_without_its_send_names_the_sender_and_transfers_enqueued_together_end_together() -> None:
    """NCCL marks only the entry that closes a batch of transfers as ended; numbers in a name are those in the group."""
    batch = [entry("send 0->1", 1, "9"), entry("recv 0<-1", 1, "9"), entry("coalesced", 1, "9", ended=True)]
    receiver = told(2, *batch, entry("recv 0<-1", 2, "9"), entry("coalesced", 2, "9"), entry("send 0->1", 3, "9"))
    sender = told(3, entry("send 1->0", 1, "9"), entry("coalesced", 1, "9", ended=True))
    (wait,) = waits({2: receiver, 3: sender})
    assert awaited([wait]) == {3}
    names = {2: "rank 2 (stage 0)", 3: "rank 3 (stage 1)"}
    begin = "Rank 2 (stage 0) waits to receive 8 × 4 bf16 from rank 3 (stage 1), which"
    assert in_words(wait, names) == f"{begin} has not begun its side."
    (wait,) = waits({2: receiver})
    assert in_words(wait, names) == f"{begin} does not answer."
    both = told(3, entry("send 1->0", 2, "9"), entry("coalesced", 2, "9"))
    assert waits({2: receiver, 3: both}) == [], "both sides have entered"


READS = """
import sys, time
sys.path[:0] = {paths!r}
from pathlib import Path
import torch
from torch.utils.data import DataLoader
from workbench.execution.heartbeat import Heartbeat
from workbench.record.rundir import RunDir
beat = Heartbeat(RunDir(Path({run!r})), 0)
beat.begin("batch", 7)

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        if index == 1:
            print("ready", flush=True)
            time.sleep(600)  # clock: it hangs until it is killed
        return torch.ones(1)

for _ in DataLoader(Slow(), batch_size=None, num_workers=2):
    pass
"""


@pytest.mark.usefixtures("answered")
def test_the_line_of_the_process_that_reads_the_batch_is_named_and_not_that_in_which_its_rank_waits(
    run: RunDir, clock: Clock
) -> None:
    code = READS.format(paths=[str(ROOT)], run=str(run.path))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, process_group=0) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        write_json(run.rank(0), {**process_record(process.pid), "rank": 0, "stage": 0})
        said = status_after(watched(run), run, clock, 61.0)
        os.killpg(process.pid, signal.SIGKILL)
    assert said == "stalled"
    line = 1 + READS.splitlines().index("            time.sleep(600)  # clock: it hangs until it is killed")
    assert f"Rank 0 (stage 0) is busy in __getitem__ at <string>:{line}." in Run(run.path).status.message


COLLECTIVES = """
import time
from pathlib import Path
import torch, torch.distributed as dist
from workbench.execution.heartbeat import Heartbeat, serving_collectives
from workbench.record.rundir import RunDir, this_process, write_json
run, rank = RunDir(Path({run!r})), {rank}
dist.init_process_group("gloo", init_method="file://{store}", rank=rank, world_size=3)
last = dist.new_group([1, 2], group_desc="mesh_dp_replicate")
beat = Heartbeat(run, rank)
write_json(run.rank(rank), {{**this_process(), "rank": rank, "stage": rank}})

def loads_forever():
    time.sleep(600)  # clock: it hangs until it is killed

with serving_collectives(run, rank):
    value = torch.ones(2, 3)
    dist.all_reduce(value)
    beat.begin("step", 7)
    if rank == 2:
        loads_forever()
    # The operation as C++ calls it holds the interpreter while it waits.
    dist.all_reduce(value) if rank == 0 else torch.ops._c10d_functional.wait_tensor(
        torch.ops._c10d_functional.all_reduce(value[:1], "sum", last.group_name))
"""


@pytest.mark.usefixtures("answered")
def test_real_ranks_tell_their_collectives_also_while_they_hold_the_interpreter(
    run: RunDir, clock: Clock, tmp_path: Path
) -> None:
    expected = (
        "Rank 0 (stage 0) waits in all-reduce 2 of 2 × 3 fp32 in the group of all ranks (ranks 0, 1, 2), which "
        "rank 1 (stage 1), rank 2 (stage 2) have not entered. Rank 1 (stage 1) waits in all-reduce 1 of 1 × 3 fp32 in "
        "the data-parallel group (ranks 1, 2), which rank 2 (stage 2) has not entered."
    )

    def message() -> str:
        """What is said of a stall now, which is all of it once each rank is where it hangs."""
        status_after(watched(run), run, clock, 61.0)
        return Run(run.path).status.message

    worlds.preload()
    context = multiprocessing.get_context("forkserver")
    codes = [COLLECTIVES.format(run=str(run.path), rank=rank, store=tmp_path / "store") for rank in range(3)]
    ranks = [context.Process(target=exec, args=(code, {})) for code in codes]
    try:
        for rank in ranks:
            rank.start()
        told = eventually(lambda: said if expected in (said := message()) else "", message)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    assert "Rank 2 (stage 2) is busy in loads_forever at " in told
    assert "`run.kill()`, and a launch begins anew." in told
