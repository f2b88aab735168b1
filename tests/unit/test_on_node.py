"""`benchmarks/on_node.py`: a list of commands on the GPUs of a node."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from benchmarks import on_node
from tests.patience import PATIENCE_S, Clock, eventually

COMMAND = Path(on_node.__file__)
LIST = """
[first]
command = "echo $GPUS of $LEFT minutes on $CUDA_VISIBLE_DEVICES; {wait}; echo first >> $FOLDER/ended"
gpus = 1

[second]
command = "echo $CUDA_VISIBLE_DEVICES; {wait}; echo second >> $FOLDER/ended"
gpus = 1

[all]
command = "echo all >> $FOLDER/ended; test -e $FOLDER/mended"

[last]
command = "echo last >> $FOLDER/ended"
gpus = 1
""".replace("{wait}", "until test -e $FOLDER/open-$CUDA_VISIBLE_DEVICES; do sleep 0.1; done")
NEVER_ENDS = "setsid sleep 600 & echo $! > $FOLDER/child.new; mv $FOLDER/child.new $FOLDER/child; sleep 600"
"""Launchers start their workers in sessions of their own, which a signal to the command does not reach."""


class Looks(Clock):
    """The clock of the command, which stands still. Where the command would pause, the test says what happens next."""

    strftime = staticmethod(time.strftime)

    def __init__(self, looks: Callable[[Clock], object]) -> None:
        super().__init__()
        self.looks = looks

    def sleep(self, _seconds: float) -> None:  # clock: a pause of the command, which lasts no time
        self.looks(self)


def an_end(_clock: Clock | None = None) -> None:
    """Wait until a command has ended, which is what the next look finds."""
    children = psutil.Process().children
    eventually(lambda: any((each.name(), each.status()) == ("bash", psutil.STATUS_ZOMBIE) for each in children()))


def run(
    folder: Path,
    patch: pytest.MonkeyPatch,
    content: str,
    looks: Callable[[Clock], object] = an_end,
    *words: str,
) -> object:
    """Rehearse a list on two GPUs, and return with what the command exits."""
    (folder / "list.toml").write_text(content)
    command = ["on_node.py", str(folder / "list.toml"), "--folder", str(folder), "--gpus", "2", "--rehearse", *words]
    patch.setattr(sys, "argv", command)
    patch.setattr(on_node, "time", Looks(looks))
    patch.setattr(on_node.signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        on_node.main()
    return ended.value.code


def test_commands_share_the_gpus_begin_in_order_and_go_on_where_they_stopped(tmp_path, monkeypatch):
    begun: list[set[str]] = []

    def looks(_clock: Clock) -> None:
        begun.append({path.stem for path in tmp_path.glob("*.log")})
        if len(begun) in (3, 5):  # the first GPU is free, and looked at again, before the second
            (tmp_path / f"open-{len(begun) // 4}").touch()
        if len(begun) == 3 or len(begun) >= 5:
            an_end()

    assert run(tmp_path, monkeypatch, LIST, looks) == "Did not succeed: all."
    assert begun[:5] == [{"first", "second"}] * 5, "each has a GPU of its own, and nobody overtakes who waits for both"
    logs = [(tmp_path / f"{name}.log").read_text() for name in ("first", "second")]
    assert logs == ["1 of 60.0 minutes on 0\n", "1\n"]
    assert (tmp_path / "ended").read_text().split() == ["first", "second", "all", "last"]
    (tmp_path / "mended").touch()
    assert run(tmp_path, monkeypatch, LIST) == 0
    assert (tmp_path / "ended").read_text().split()[4:] == ["all"], "what succeeded is not repeated"


def test_a_rehearsal_replaces_the_command(tmp_path, monkeypatch):
    assert run(tmp_path, monkeypatch, "[all]\ncommand = 'false'\nrehearsal = 'echo rehearsed'") == 0
    assert (tmp_path / "all.log").read_text() == "rehearsed\n"


def test_at_the_end_of_the_time_nothing_is_left_and_nothing_is_begun_that_needs_more(tmp_path, monkeypatch, capsys):
    def looks(clock: Clock) -> None:
        eventually((tmp_path / "child").exists)
        clock.now += 60

    content = (
        f"[long]\nminutes = 0\ncommand = '{NEVER_ENDS}'\ngpus = 1\n[longer]\ncommand = 'true'\nminutes = 5\ngpus = 1"
    )
    assert run(tmp_path, monkeypatch, content, looks, "--minutes", "1") == "Did not succeed: longer, long."
    assert "longer: not begun, it needs 5 minutes" in capsys.readouterr().out
    assert not psutil.pid_exists(int((tmp_path / "child").read_text()))
    assert not (tmp_path / "long.done").exists()


def test_a_request_to_end_reaches_what_was_begun(tmp_path):
    (tmp_path / "list.toml").write_text(f"[long]\ncommand = '{NEVER_ENDS}'\n")
    command = [sys.executable, COMMAND, tmp_path / "list.toml", "--folder", tmp_path, "--gpus", "1", "--rehearse"]
    with subprocess.Popen(command) as started:
        eventually((tmp_path / "child").exists)
        started.terminate()
        assert started.wait(PATIENCE_S) == 143
    assert not psutil.pid_exists(int((tmp_path / "child").read_text()))


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("gpu = 1", r"\[bad\] has gpu, which this command does not know"),
        ("gpus = 3", r"\[bad\] needs 3 GPUs, and there are 2"),
    ],
)
def test_a_wrong_list_is_refused(tmp_path, line, sentence):
    (tmp_path / "list.toml").write_text(f"[bad]\ncommand = 'true'\n{line}\n")
    with pytest.raises(SystemExit, match=sentence):
        on_node.read_list(tmp_path / "list.toml", 2)


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
