"""The handle of a run, the registry, the device queue and the failure report, on run directories written here."""

import importlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx, nn

import workbench as wb
from tests.logs import append_event
from tests.unit.cost_values import layered_profile
from workbench.base.errors import PlanInfeasible, RunFailed, RunNotFound, root_exception
from workbench.cost import Cluster
from workbench.data import data_fingerprint
from workbench.execution import build, local_launch
from workbench.execution.build import CUBLAS_SETTING, use_deterministic_kernels
from workbench.execution.checkpoint import files as checkpoint
from workbench.execution.worker import error_message
from workbench.experiment import Experiment
from workbench.planning.plan import Plan
from workbench.planning.runnable import too_large_to_build
from workbench.planning.search import what_if
from workbench.record.rundir import RunDir, process_alive, process_record, this_process, write_json, write_record
from workbench.runs import status
from workbench.runs.environment import SHOWN_PACKAGES, doctor, environment, git_state
from workbench.runs.launching import device_queue, launcher
from workbench.runs.launching.launcher import Attempt, continued_provenance, write_attempt
from workbench.runs.launching.processes import record_silent_death, root_cause, run_failed
from workbench.runs.launching.supervisor import accelerate_command, worker_environment
from workbench.runs.registry import list_runs, load_run
from workbench.runs.run import Run
from workbench.widgets.run_reader import RunReader

doctor_module = importlib.import_module("workbench.runs.environment")

DEAD = {"pid": 2**22 + 1, "created": 0.0}


def make_run(folder, name="bert-1", steps=100, supervisor=DEAD) -> RunDir:
    run = RunDir(folder / name)
    write_record(run.experiment, {"name": name, "steps": steps, "model": {}})
    write_record(run.environment, {})
    write_json(run.launcher, {"supervisor": supervisor})
    append_event(run.events, "status", state="running", message="")
    return run


@pytest.fixture
def sleeper():
    """Yield a process that does nothing, in the place of a rank."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])  # clock: it is killed
    yield process
    process.kill()
    process.wait()


def test_a_run_is_what_its_events_say_while_its_supervisor_lives(tmp_path):
    run = make_run(tmp_path, supervisor=this_process())
    append_event(run.events, "step", step=40, loss=6.5, tokens_per_s=82_100.0, mfu=0.41)
    append_event(run.events, "memory", rank=0, stage=0, device="cuda:0", peak_bytes=61 * 2**30)
    handle = Run(run.path)
    assert handle.alive
    assert repr(handle) == (
        "Run(bert-1: running, step 40 of 100, loss 6.5, 82.1 k tokens/s, MFU 41.0%, 61.0 GiB at most on a device)"
    )
    assert "<progress value='0.4000'" in handle._repr_html_()


def test_a_continued_run_keeps_what_is_known_of_its_data_and_origin(tmp_path):
    from workbench import Experiment, data, models

    own = Experiment(model=models.bert_large(), data=[{"input_ids": [1]}] * 8, steps=100)
    named = own.replace(data=data.corpus("demo"))
    run = make_run(tmp_path)
    write_record(run.environment, {"cloned_from": "bert-0", "data_fingerprint": "abc", "python": "3.0"})
    kept = {"cloned_from": "bert-0", "data_fingerprint": "abc"}
    assert continued_provenance(run, own) == kept
    assert continued_provenance(run, own.replace(steps=200)) == kept | {"data_fingerprint": None}
    assert continued_provenance(run, named)["data_fingerprint"] == data_fingerprint(named) != "abc"
    run.environment.unlink()
    assert continued_provenance(run, own) == {}


def test_a_run_whose_processes_vanished_has_failed(tmp_path):
    run = make_run(tmp_path)
    handle = Run(run.path)
    assert not handle.alive
    assert str(handle.status) == "failed: The launcher vanished."
    assert isinstance(handle.error(), RunFailed)
    with pytest.raises(RunFailed, match="vanished"):
        handle.wait()


def test_a_failed_run_without_a_log_says_so_and_what_to_do(tmp_path):
    run = make_run(tmp_path)
    log = run.log("launcher")
    rest = "Train in this process to see the error: wb.runs.debug(experiment, plan)."
    begin = f"Run {run.path.name} failed: The launcher vanished. No rank left an error file."
    assert str(Run(run.path).error()) == f"{begin} There is no log of the launcher at {log}. {rest}"
    log.parent.mkdir(exist_ok=True)
    log.write_text("\n\n")
    assert str(Run(run.path).error()) == f"{begin} The launcher's log, {log}, is empty. {rest}"
    log.write_text("one\ntwo\n")
    assert str(Run(run.path).error()).endswith(f"log ends with:\n\none\ntwo\n\nThe whole log is {log}.")


def test_an_error_without_a_message_or_a_traceback_says_so(tmp_path):
    run = make_run(tmp_path)
    write_record(run.error(0), {"rank": 0, "stage": 0, "type": "AssertionError", "message": ""})
    assert root_cause(run).sentence == "rank 0 (stage 0): AssertionError without a message"
    said = str(run_failed(run, ""))
    assert "a message\n\nIt left no traceback.\n\nThere is no log of the rank at " in said
    write_record(run.error(0), {"rank": 0, "stage": 0, "type": "ValueError", "message": "\n  two lines\nthree"})
    assert root_cause(run).sentence == "rank 0 (stage 0): ValueError: two lines"


def test_a_run_that_is_queued_while_its_status_is_read_has_not_vanished(tmp_path, monkeypatch):
    run = make_run(tmp_path)
    run.launcher.unlink()
    append_event(run.events, "status", state="queued", message="")
    read = status.read_state

    def queued_meanwhile(*args):
        write_json(run.launcher, {"supervisor": this_process()})
        return read(*args)

    monkeypatch.setattr(status, "read_state", queued_meanwhile)
    assert Run(run.path).status.state == "queued"


def test_a_status_reads_each_file_of_its_run_once_and_a_live_view_the_processes(tmp_path, monkeypatch):
    run = make_run(tmp_path, supervisor=this_process())
    for rank in range(2):
        write_json(run.rank(rank), {**this_process(), "rank": rank})
    opened, open_file = Counter[str](), os.open

    def counted(path, *args, **kwargs):
        opened.update([os.path.relpath(path, run.path)] if str(path).startswith(str(run.path)) else [])
        return open_file(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", counted)
    assert Run(run.path).status.state == "running"
    assert opened.pop("steps.tail", 0) <= 1
    assert opened == dict.fromkeys(("launcher.json", "ranks/0.json", "ranks/1.json", "events.jsonl"), 1)
    opened.clear()
    assert RunReader(run.path).read().status.state == "running"
    assert (opened["launcher.json"], opened["ranks/0.json"], opened["events.jsonl"]) == (1, 1, 1)


def test_ranks_that_ended_in_order_are_believed_though_the_launcher_vanished(tmp_path):
    run = make_run(tmp_path)
    append_event(run.events, "end", steps=100, seconds=9.0)
    assert Run(run.path).status.state == "finished"
    append_event(run.events, "status", state="starting", message="")
    append_event(run.events, "end", steps=60, seconds=9.0)
    assert "Stopped at step 60 of 100" in Run(run.path).status.message


def test_a_live_rank_without_a_launcher_is_shown_and_a_reused_pid_is_not(tmp_path, sleeper):
    run = make_run(tmp_path)
    record = process_record(sleeper.pid)
    write_json(run.rank(0), {**record, "rank": 0, "stage": 0})
    assert Run(run.path).status.state == "running"
    assert "vanished" in Run(run.path).status.message
    write_json(run.rank(0), {**record, "ticks": None, "created": record["created"] - 1000, "rank": 0, "stage": 0})
    assert not Run(run.path).alive
    write_json(run.rank(0), {**record, "ticks": (record["ticks"] or 0) - 1000, "created": 0, "rank": 0, "stage": 0})
    assert not Run(run.path).alive


def test_a_zombie_is_not_alive(sleeper):
    record = process_record(sleeper.pid)
    assert process_alive(record)
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert not process_alive(record)


def test_a_misspelt_run_is_answered_with_the_near_ones(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path))
    make_run(tmp_path, "bert-large-20260101-101010")
    assert load_run("bert-large-20260101-101010").name == "bert-large-20260101-101010"
    with pytest.raises(RunNotFound, match="Did you mean 'bert-large-20260101-101010'"):
        load_run("bert-lrage-20260101")
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path / "none"))
    with pytest.raises(RunNotFound, match="There are no runs in"):
        load_run(tmp_path / "elsewhere" / "x")


def test_the_beginning_of_one_name_names_a_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path))
    make_run(tmp_path, "bert-large-20260101-101010")
    make_run(tmp_path, "bert-scaled-20260101-101010")
    assert load_run("bert-s").name == "bert-scaled-20260101-101010"
    assert load_run(tmp_path / "bert-l").name == "bert-large-20260101-101010"
    with pytest.raises(RunNotFound, match="Did you mean 'bert-large-20260101-101010' or 'bert-scaled-20260101"):
        load_run("bert")
    with pytest.raises(RunNotFound):
        load_run(tmp_path / "elsewhere" / "bert-s")
    with pytest.raises(RunNotFound):
        load_run("")


def test_the_registry_lists_runs_newest_first(tmp_path):
    for age, name in ((20, "old"), (10, "new")):
        run = make_run(tmp_path, name, supervisor=this_process())
        append_event(run.events, "step", step=age, loss=float(age), tokens_per_s=1e4)
        os.utime(run.environment, (1e9 - age, 1e9 - age))
    table = list_runs(tmp_path)
    assert [run.name for run in table] == ["new", "old"]
    assert table["old"].name == table[1].name
    assert [run.name for run in table[:1]] == ["new"]
    lines = repr(table).splitlines()
    assert lines[0].split() == ["name", "state", "step", "loss", "tokens/s", "MFU", "left", "devices", "when", "tags"]
    assert lines[1].split()[:6] == ["new", "running", "10", "of", "100", "10"]
    assert table._repr_html_().count("<tr>") == 3
    assert "No runs" in repr(list_runs(tmp_path / "nowhere"))


def test_a_row_of_the_registry_has_what_a_live_table_shows(tmp_path):
    run = make_run(tmp_path, supervisor=this_process())
    gpus = [{"index": 0, "uuid": "GPU-a"}, {"index": 3, "uuid": "GPU-b"}]
    write_record(run.environment, {"gpus": gpus})
    write_json(run.launcher, {"supervisor": this_process(), "plan": {"world": 2}, "devices": ["GPU-b", "GPU-a"]})
    (row,) = list_runs(tmp_path).rows()
    assert (row["state"], row["eta_s"], row["devices"], row["gpus"]) == ("running", None, 2, [3, 0])
    for step in range(1, 41):
        slow = 30_000.0 if step == 30 else 500.0
        append_event(run.events, "step", step=step, loss=1.0, step_ms=slow, tokens_per_s=1e4, mfu=0.4)
    (row,) = list_runs(tmp_path).rows()
    assert row["eta_s"] == pytest.approx(60 * 0.5)
    assert (row["step"], row["steps"], row["mfu"], row["loss"]) == (40, 100, 0.4, 1.0)
    append_event(run.events, "status", state="finished", message="")
    (row,) = list_runs(tmp_path).rows()
    assert (row["eta_s"], row["gpus"], row["devices"]) == (None, [], 2)


def test_only_checkpoints_that_are_complete_and_still_there_are_listed(tmp_path):
    run = make_run(tmp_path)
    append_event(run.events, "checkpoint", step=10, path="/moved/10", seconds=1.0)  # deleted since
    write_json(run.checkpoint(20) / "complete.json", {})  # its rank was killed before it could say so
    run.checkpoint(30).mkdir(parents=True)  # still being written
    write_json(run.checkpoints / "step-old" / "complete.json", {})  # somebody's copy
    assert [(c.step, c.path) for c in Run(run.path).checkpoints] == [(20, run.checkpoint(20))]
    assert launcher.checkpoint_of(run.path) == run.checkpoint(20)


def test_a_checkpoint_whose_deletion_was_interrupted_is_not_complete(tmp_path, monkeypatch):
    run = make_run(tmp_path)
    for step in (1, 2):
        write_json(run.checkpoint(step) / "complete.json", {})
    monkeypatch.setattr(checkpoint.shutil, "rmtree", lambda *_, **__: None)  # killed before the first file was gone
    checkpoint.prune(run.checkpoints, keep=1, step=2)
    assert [checkpoint.step for checkpoint in Run(run.path).checkpoints] == [2]


def test_the_earliest_error_is_the_root_cause(tmp_path):
    run = make_run(tmp_path)
    fields = {"stage": 0, "message": "m", "traceback": "t"}
    write_record(run.error(0), {**fields, "rank": 0, "type": "ConnectionError", "time": 2.0})
    write_record(run.error(3), {**fields, "rank": 3, "type": "OutOfMemoryError", "time": 1.0})
    assert root_cause(run).sentence == "rank 3 (stage 0): OutOfMemoryError: m"


def test_a_rank_killed_by_a_signal_comes_before_the_complaints_of_the_others(tmp_path):
    run = make_run(tmp_path)
    write_json(run.rank(1), {**DEAD, "rank": 1, "stage": 7})
    write_record(run.error(0), {"rank": 0, "stage": 0, "type": "RuntimeError", "message": "reset by peer", "time": 5.0})
    report = "Failures:\n  rank      : 0 (local_rank: 0)\n  exitcode  : 1 (pid: 10)\n" + (
        "Root Cause:\n  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 11)\n"
    )
    assert record_silent_death(run, report)
    cause = root_cause(run)
    assert (cause.rank, cause.stage, cause.type) == (1, 7, "SIGKILL")
    assert "out of memory" in cause.message


def test_of_the_ranks_that_the_supervisor_killed_none_is_the_cause(tmp_path):
    run = make_run(tmp_path)
    write_record(run.error(0), {"rank": 0, "type": "RuntimeError", "message": "reset by peer", "time": 5.0})
    report = "".join(f"  rank      : {rank} (local_rank: {rank})\n  exitcode  : -9 (pid: 1{rank})\n" for rank in (2, 1))
    assert not record_silent_death(run, report, gone=set())
    assert record_silent_death(run, report, gone={1})
    assert (root_cause(run).rank, root_cause(run).type) == (1, "SIGKILL")


def test_a_rank_that_said_why_is_not_overruled_by_its_exit_code(tmp_path):
    run = make_run(tmp_path)
    write_record(run.error(0), {"rank": 0, "type": "ValueError", "message": "bad", "time": 5.0})
    assert not record_silent_death(run, "  rank      : 1 (local_rank: 1)\n  exitcode  : -15 (pid: 11)\n")
    assert root_cause(run).type == "ValueError"


def test_runs_of_few_devices_share_a_node_and_a_large_one_waits_its_turn(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home"))
    pool = ("a", "b", "c", "d")

    def ticket(name, count):
        run = make_run(tmp_path, name)
        return device_queue.take_ticket(run, pool=pool, count=count, supervisor=this_process())

    one, two, four, late = ticket("one", 1), ticket("two", 2), ticket("four", 4), ticket("late", 1)
    assert two.try_start() is None, "one asked first"
    assert one.try_start() == ("a",)
    assert two.try_start() == ("b", "c")
    assert four.try_start() is None
    assert late.try_start() is None, "nobody overtakes a run that waits"
    assert four.ahead() == ["one", "two"]
    one.leave()
    two.leave()
    assert four.try_start() == pool


def test_runs_that_share_devices_are_spread_over_all_of_them(tmp_path, monkeypatch):
    """Nine runs of which each device could take nine would otherwise all train on the first."""
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home"))

    def ticket(number, count=1):
        fields = {"pool": ("a", "b", "c"), "supervisor": this_process(), "share": 1 / 9}
        return device_queue.take_ticket(make_run(tmp_path, f"run-{number}"), count=count, **fields)

    tickets = [ticket(number) for number in range(4)]
    assert [one.try_start() for one in tickets] == [("a",), ("b",), ("c",), ("a",)]
    tickets[1].leave()
    assert ticket(4).try_start() == ("b",)
    tickets[0].leave()
    tickets[3].leave()
    assert ticket(5, count=2).try_start() == ("a", "b"), "the emptiest two, in the order of the pool"
    alone = {"pool": ("a", "b", "c"), "count": 1, "supervisor": this_process()}
    assert device_queue.take_ticket(make_run(tmp_path, "alone"), **alone).try_start() is None, "each is used in part"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
def test_the_queue_names_a_users_own_runs_and_no_others(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home"))
    first, second, third = (
        device_queue.take_ticket(make_run(tmp_path, name), pool=["a"], count=1, supervisor=this_process())
        for name in ("theirs", "mine", "mine-too")
    )
    assert first.try_start() == ("a",)
    os.chown(first.path, 12345, 12345)
    assert third.ahead() == [device_queue.OTHERS, "mine"]
    assert [(row["name"], row["devices"], row["waits_for"]) for row in device_queue.waiting_and_training()] == [
        (device_queue.OTHERS, ["a"], []),
        ("mine", None, [device_queue.OTHERS]),
        ("mine-too", None, [device_queue.OTHERS, "mine"]),
    ]
    second.leave()


def test_runs_of_kernels_that_see_different_gpus_do_not_wait_for_each_other(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home"))

    def ticket(name, *pool):
        run = make_run(tmp_path, name)
        return device_queue.take_ticket(run, pool=pool, count=1, supervisor=this_process())

    first, second, other = ticket("first", "a"), ticket("second", "a"), ticket("other", "b")
    assert first.try_start() == ("a",)
    assert second.try_start() is None
    assert (other.ahead(), other.try_start()) == ([], ("b",))
    assert second.ahead() == ["first"]


def test_a_ticket_lapses_with_the_last_process_of_its_run(tmp_path, monkeypatch, sleeper):
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home"))
    orphan = make_run(tmp_path, "orphan")
    write_json(orphan.rank(0), {**process_record(sleeper.pid), "rank": 0})
    fields = {"pool": device_queue.CPU, "count": 1}
    assert device_queue.take_ticket(orphan, supervisor=this_process(), **fields).try_start()
    path = next((tmp_path / "home").rglob("000001.json"))
    path.write_text(json.dumps({**json.loads(path.read_text()), "supervisor": DEAD}))
    waiting = device_queue.take_ticket(make_run(tmp_path, "next"), supervisor=this_process(), **fields)
    assert waiting.try_start() is None
    sleeper.kill()
    sleeper.wait()
    assert waiting.try_start() == ("cpu",)


def test_the_ranks_inherit_the_callers_environment_but_no_other_launch(tmp_path):
    base = {"NCCL_DEBUG": "INFO", "RANK": "3", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x", "HOME": "/h"}
    cpu = worker_environment(base, world=2, device_type="cpu", devices=("cpu",))
    assert cpu["NCCL_DEBUG"] == "INFO"
    assert not {"RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID"} & cpu.keys()
    assert (cpu["ACCELERATE_USE_CPU"], cpu["CUDA_VISIBLE_DEVICES"]) == ("true", "")
    gpu = worker_environment({**base, "OMP_NUM_THREADS": "3"}, world=2, device_type="cuda", devices=("GPU-1", "GPU-2"))
    assert (gpu["CUDA_VISIBLE_DEVICES"], gpu["OMP_NUM_THREADS"]) == ("GPU-1,GPU-2", "3")
    assert gpu["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    own_setting = {**base, "PYTORCH_CUDA_ALLOC_CONF": "mine"}
    assert "PYTORCH_ALLOC_CONF" not in worker_environment(own_setting, 2, "cuda", devices=("GPU-1",))
    plan = {"world": 2, "device_type": "cuda", "precision": "bf16"}
    command = accelerate_command(tmp_path / "a.yaml", plan)
    assert command[command.index("--mixed_precision") + 1] == "bf16"


@pytest.mark.parametrize(("answer", "untouched"), [(3, True), (0, False), (100, False)], ids=["not", "yes", "no GPU"])
def test_ranks_on_gpus_are_forked_only_from_a_process_in_which_nobody_has_initialised_the_driver(
    monkeypatch: pytest.MonkeyPatch, answer: int, untouched: bool
) -> None:
    driver = SimpleNamespace(cuDeviceGetCount=lambda _count: answer)
    monkeypatch.setattr("ctypes.CDLL", lambda name: driver if name == "libcuda.so.1" else None)
    assert build.cuda_is_untouched() == untouched


def test_where_cuda_was_initialised_nothing_is_imported_for_ranks_on_gpus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda _name: SimpleNamespace(cuDeviceGetCount=lambda _count: 0))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1,GPU-2")
    monkeypatch.setattr(torch.cuda, "_cached_device_count", None)
    assert not local_launch.preload("no.such.worker", {}, on_cpu=False)
    assert "Ranks are new processes: an import has initialised CUDA's driver" in capsys.readouterr().out
    assert torch.cuda._cached_device_count == 2


def test_a_machine_without_the_driver_has_nothing_that_a_fork_could_break(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr("ctypes.CDLL", missing)
    assert build.cuda_is_untouched()


def test_torch_does_not_ask_cuda_for_gpus_in_the_process_from_which_ranks_on_them_are_forked() -> None:
    assert worker_environment({}, 2, "cuda", ("0", "1"))["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"
    assert "PYTORCH_NVML_BASED_CUDA_CHECK" not in worker_environment({}, 2, "cpu", ())


def test_the_environment_names_machine_versions_and_git_state(tmp_path):
    facts = environment()
    assert facts["cores"] >= 1
    assert facts["packages"]["torch"]
    json.dumps(facts)
    assert git_state(tmp_path) is None
    for command in ("init -q", "-c user.name=a -c user.email=a@b.c commit -q --allow-empty -m x"):
        subprocess.run(["git", "-C", str(tmp_path), *command.split()], check=True)
    state = git_state(tmp_path)
    assert len(state["commit"]) == 40
    assert state["dirty"] is False


def test_the_doctor_names_what_is_missing_with_its_remedy(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    report = doctor()
    templates = next(finding for finding in report if finding.subject == "Templates")
    assert templates in report.missing
    assert "pip install" in templates.remedy
    assert not report.ok
    assert "PyTorch" in repr(report)
    assert report._repr_html_().count("<tr>") == len(report.findings)


def test_the_doctor_tells_another_project_of_the_same_import_name_from_this_one(monkeypatch, tmp_path):
    def install(name: str, version: str) -> None:
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (folder / "RECORD").write_text(f"workbench/__init__.py,,\n{folder.name}/METADATA,,\n")
        importlib.invalidate_caches()

    monkeypatch.syspath_prepend(tmp_path)
    install("training-workbench", "0.1")
    assert doctor_module._name().ok
    install("workbench", "1.0.22")
    found = doctor_module._name()
    assert not found.ok
    assert found.found == "another project, workbench 1.0.22 of PyPI, is installed under the same import name"
    assert "pip uninstall --yes workbench training-workbench" in found.remedy


def test_the_doctor_misses_no_package_where_all_that_was_asked_for_is_installed():
    packages = [doctor_module._package(name) for name in SHOWN_PACKAGES]
    assert all(package.ok for package in packages), packages


def test_the_doctor_knows_packages_by_their_whole_names_and_refuses_old_ones(monkeypatch):
    asked = ["jupyterlab-templates>=0.5.3", "jupyterlab>=4.6", "wandb>=0.31,<1; extra == 'test'", "plotly (>=7.0)"]
    monkeypatch.setattr(doctor_module.metadata, "requires", lambda _: asked)
    monkeypatch.setattr(doctor_module, "package_version", {"jupyterlab": "4.6.0rc1", "plotly": "7.0.1"}.get)
    assert doctor_module._package("jupyterlab").remedy == "pip install 'jupyterlab>=4.6'."
    assert doctor_module._package("jupyterlab").found == "4.6.0rc1, >=4.6 needed"
    assert doctor_module._package("wandb").remedy == "pip install 'wandb'."
    assert doctor_module._package("plotly").ok


def plan_of_layers(**asked: Any) -> Plan:
    cluster = Cluster.of("h200", gpus=4)
    return what_if(layered_profile(), cluster, global_batch=64, seq_len=512, **asked)


def test_a_full_device_says_what_the_plan_counted_on_and_the_way_out():
    plan = plan_of_layers(memory_limit_gib=20)
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee documentation.")
    message = error_message(full, plan)
    assert message.startswith("CUDA out of memory. Tried to allocate 2.00 GiB. The plan predicts a peak of ")
    assert "allows 20.0 GiB per device" in message
    assert "wb.plan(experiment, memory_limit_gib=18)" in message
    assert error_message(ValueError("no"), plan) == "no"


@pytest.mark.parametrize(
    "layer", [nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Conv1d(2, 2, 1), nn.LayerNorm(8), nn.BatchNorm1d(8)]
)
def test_numbers_of_another_type_than_the_weights_are_told_with_a_way_out_that_works(layer):
    x = torch.randn(2, 8, dtype=torch.float64)
    with pytest.raises(RuntimeError) as refused:
        layer(x)
    message = error_message(refused.value, plan_of_layers())
    assert message.startswith(str(refused.value).rstrip("."))
    assert message.endswith("x.float() for weights in float32, or in forward: x.to(self.weight.dtype).")
    assert torch.isfinite(layer(x.float())).all()
    assert torch.isfinite(layer(x.to(layer.weight.dtype))).all()


def test_a_model_that_neither_gpu_nor_host_can_hold_whole_is_refused_before_a_process_starts(tmp_path):
    plan = plan_of_layers()
    assert plan.model_bytes == pytest.approx(4 * (12 * 50e6 + 60e6), rel=1e-3)
    gpu = replace(plan.cluster.device, memory_bytes=4 << 30)
    small = replace(plan, cluster=replace(plan.cluster, device=gpu, host_bytes=1 << 29))
    experiment = Experiment(model=wb.models.bert_large(), data=lambda: None, steps=1, global_batch=64, seq_len=512)
    with pytest.raises(PlanInfeasible) as refused:
        write_attempt(Attempt(experiment, small, directory=tmp_path / "run"))
    message = str(refused.value)
    assert "the whole model, 2.5 GiB in fp32: on its GPU up to 2.4 GiB" in message
    assert "of which 2.0 GiB fall to the 4 ranks of a node" in message
    assert not (tmp_path / "run").exists()
    for roomy in (replace(small.cluster, host_bytes=1 << 30), replace(small.cluster, host_bytes=None), plan.cluster):
        assert too_large_to_build(replace(plan, cluster=roomy)) is None


@pytest.fixture
def repeatable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    filling = torch.utils.deterministic.fill_uninitialized_memory
    monkeypatch.setenv(CUBLAS_SETTING[0], "as it was")
    use_deterministic_kernels()
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filling


@pytest.mark.usefixtures("repeatable")
def test_what_cannot_repeat_its_bits_is_refused_with_the_way_out():
    values, places = torch.nn.functional.max_pool2d(torch.rand(1, 1, 4, 4), 2, return_indices=True)
    with pytest.raises(RuntimeError) as refused:
        torch.nn.functional.max_unpool2d(values, places, 2)
    message = error_message(refused.value, plan_of_layers())
    assert message.startswith("max_unpooling2d_forward_out does not have a deterministic implementation, and")
    assert "remove deterministic=True" in message
    assert "use_deterministic_algorithms" not in message
    assert os.environ[CUBLAS_SETTING[0]] == "as it was", "the user's own setting stays"


def test_compiled_code_that_a_killed_process_left_is_named_with_the_way_out(tmp_path: Path) -> None:
    left = tmp_path / "main.so"
    left.touch()
    with pytest.raises(ImportError) as caught:
        ExtensionFileLoader("main", str(left)).create_module(ModuleSpec("main", None, origin=str(left)))
    message = error_message(caught.value, plan_of_layers())
    assert message == (
        f"The compiled code {left} is cut off, as by a process that was killed while it wrote the file. Remove it "
        f"(rm {left}), and start the run again: it is compiled anew."
    )


def test_an_error_of_compiled_code_is_told_from_the_compilers_own() -> None:
    def full(*_: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def backend(_code: object, _inputs: object) -> object:
        return full

    block = fx.symbolic_trace(nn.Linear(2, 2))
    with pytest.raises(Exception) as caught:  # noqa: PT011  (which one, depends on torch)
        torch.compile(block, backend=backend, dynamic=False, fullgraph=True)(torch.ones(1, 2))
    assert type(root_exception(caught.value)) is torch.OutOfMemoryError
    assert root_exception(caught.value).args == ("CUDA out of memory.",)
