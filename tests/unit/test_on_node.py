"""`benchmarks/on_node.py`: a list of commands on the GPUs of a node."""

import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks import on_node

COMMAND = Path(on_node.__file__)
LIST = """
[first]
command = "echo $GPUS of $LEFT minutes; date +%s.%N; sleep 4; date +%s.%N"
gpus = 1

[second]
command = "date +%s.%N; sleep 4; date +%s.%N"
gpus = 1

[all]
command = "date +%s.%N; echo again >> $FOLDER/times; test -e $FOLDER/mended"
rehearsal = "{rehearsal}"

[last]
command = "date +%s.%N"
gpus = 1
"""


def run(folder: Path, *words: str, content: str = LIST, rehearsal: str = "") -> subprocess.CompletedProcess[str]:
    (folder / "list.toml").write_text(content.replace("{rehearsal}", rehearsal))
    command = [sys.executable, COMMAND, folder / "list.toml", "--folder", folder, "--gpus", "2", "--rehearse", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=110)


def times(folder: Path, name: str) -> list[float]:
    """Return the times that a task printed."""
    lines = (folder / f"{name}.log").read_text().splitlines()
    return [float(line) for line in lines if line[0].isdigit() and " " not in line]


def test_commands_share_the_gpus_begin_in_order_and_go_on_where_they_stopped(tmp_path):
    done = run(tmp_path)
    assert (done.returncode, done.stderr) == (1, "Did not succeed: all.\n")
    first, second, everything, last = (times(tmp_path, name) for name in ("first", "second", "all", "last"))
    assert (tmp_path / "first.log").read_text().startswith("1 of 60.0 minutes\n")
    assert max(first[0], second[0]) < min(first[1], second[1]), "each has a GPU of its own, at the same time"
    assert max(first[1], second[1]) < everything[0] < last[0]
    (tmp_path / "mended").touch()
    again = run(tmp_path)
    assert (again.returncode, again.stderr) == (0, "")
    assert (tmp_path / "times").read_text() == "again\n" * 2, "what succeeded is not repeated"
    assert len(times(tmp_path, "first")) == 2


def test_a_rehearsal_replaces_the_command(tmp_path):
    assert run(tmp_path, rehearsal="echo rehearsed").returncode == 0
    assert (tmp_path / "all.log").read_text() == "rehearsed\n"


def test_at_the_end_of_the_time_nothing_is_left_and_nothing_is_begun_that_needs_more(tmp_path):
    """Launchers start their workers in sessions of their own, which a signal to the command does not reach."""
    content = """
    [long]
    command = "setsid sleep 600 & echo $! > $FOLDER/child; sleep 600"
    gpus = 1

    [longer]
    command = "true"
    gpus = 1
    minutes = 5
    """
    began = time.monotonic()
    done = run(tmp_path, "--minutes", "0.15", content=content.replace("[long]", "[long]\n    minutes = 0"))
    assert time.monotonic() - began < 90
    assert (done.returncode, done.stderr) == (1, "Did not succeed: longer, long.\n")
    assert "longer: not begun, it needs 5 minutes" in done.stdout
    assert not psutil.pid_exists(int((tmp_path / "child").read_text()))
    assert not (tmp_path / "long.done").exists()


def test_a_request_to_end_reaches_what_was_begun(tmp_path):
    (tmp_path / "list.toml").write_text("[long]\ncommand = 'setsid sleep 600 & echo $! > $FOLDER/child; sleep 600'\n")
    command = [sys.executable, COMMAND, tmp_path / "list.toml", "--folder", tmp_path, "--gpus", "1", "--rehearse"]
    started, child = subprocess.Popen(command, stderr=subprocess.PIPE), tmp_path / "child"
    while not (child.exists() and child.read_text()):
        time.sleep(0.1)
    started.terminate()
    started.communicate(timeout=100)
    assert started.returncode == 143
    assert not psutil.pid_exists(int(child.read_text()))


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("gpu = 1", r"\[bad\] has gpu, which this command does not know"),
        ("gpus = 3", r"\[bad\] needs 3 GPUs, and there are 2"),
    ],
)
def test_a_wrong_list_is_refused(tmp_path, line, sentence):
    done = run(tmp_path, content=f"[bad]\ncommand = 'true'\n{line}\n")
    assert done.returncode == 1
    assert re.search(sentence, done.stderr)


def test_more_gpus_than_there_are_are_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert on_node.visible_gpus(None, rehearse=False) == 2
    with pytest.raises(SystemExit, match="2 GPUs are visible here"):
        on_node.visible_gpus(3, rehearse=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert (on_node.first_devices(1), on_node.first_devices(2)) == (["5"], ["5", "7"])


@pytest.mark.parametrize("path", sorted((COMMAND.parent / "tasks").glob("*.toml")), ids=lambda path: path.stem)
def test_every_list_can_be_read(path):
    assert on_node.read_list(path, 4)
