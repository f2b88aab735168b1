"""The time left of a notebook: recorded executions are played again, on a clock that the test turns."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

import workbench as wb
from tests.logs import append_event
from tests.patience import Clock
from workbench.base.errors import WorkbenchError
from workbench.notebooks import countdown
from workbench.notebooks.countdown import Countdown, Parts, slowness, told_progress, watching_engine
from workbench.record.history import read_tail
from workbench.runs.registry import text_curve

ROOT = Path(__file__).parents[2]
RECORDED = json.loads(Path(__file__).with_name("countdown_records.json").read_text())
"""Executions of templates on two cores: the load, the seconds of the whole, and events: the time in s, the number of
a cell, and what it says from then on ("" when it begins, and when what it waited for has ended)."""
MIDDLE = (0.4, 0.5, 0.6)
"""Parts of its time after which the countdown of an execution is looked at."""
TEMPLATES = sorted(path.stem for path in ROOT.glob("templates/*.ipynb"))


def code_cells(template: str) -> list[Any]:
    cells = nbformat.read(ROOT / "templates" / f"{template}.ipynb", as_version=4).cells
    return [cell for cell in cells if cell.cell_type == "code"]


def play(cells: list[Any], record: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[float, float]]:
    """Play an execution again; yield the part of its time that has passed and the seconds left, said over real."""
    clock = Clock(0.0)
    monkeypatch.setattr(countdown, "time", clock)
    shown, at, events = Countdown(cells), 0, list(record["events"])
    for middle in MIDDLE:
        passed = middle * record["seconds"]
        while events and events[0][0] <= passed:
            clock.now, cell, words = events.pop(0)
            while at < cell:
                at += 1
                shown.begin(cells[at])
            shown.hear(message(words))
        clock.now = passed
        left = shown.seconds_left
        assert left is not None
        yield middle, left / (record["seconds"] - passed)


def message(words: str, output: str = "a", kind: str = "update_display_data") -> dict[str, Any]:
    shown = {"text/plain": words, "text/html": words and f'<small class="workbench-waiting">{words}</small>'}
    return {"msg_type": kind, "content": {"data": shown, "transient": {"display_id": output}}}


@pytest.mark.parametrize("record", RECORDED, ids=lambda each: f"{each['template']}, load {each['load']:.0f}")
def test_in_the_middle_of_a_template_the_time_left_is_within_a_factor_of_1_5_of_what_comes(
    record: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for middle, ratio in play(code_cells(record["template"]), record, monkeypatch):
        assert 1 / 1.5 < ratio < 1.5, f"after {middle:.0%}"


def slower(cells: list[Any], times: float, draws: random.Random) -> dict[str, Any]:
    """Return the execution of cells on a slower machine, where each part takes up to a fifth more or less."""
    now, events = 0.0, list[tuple[float, int, str]]()
    for at, cell in enumerate(cells):
        events.append((now, at, ""))
        parts = cell.metadata.get("expected_s", [])
        for part, seconds in enumerate(parts):
            took = seconds * times * draws.uniform(0.8, 1.2)
            if len(parts) > 1 or seconds > 12:  # runs: a tenth of their time is their start
                for percent in range(101):
                    runs = took * (0.1 + 0.9 * percent / 100)
                    said = f"Waiting for run-{at}-{part}: running, step {percent} of 100 ({percent}%) ({runs:.1f} s)"
                    events.append((now + runs, at, said))
                events.append((now + took, at, ""))
            now += took
    return {"seconds": now + times * countdown.FINISH_S, "events": events}


@pytest.mark.parametrize("times", [0.4, 1.0, 5.0])
@pytest.mark.parametrize("template", TEMPLATES)
def test_so_it_is_for_each_template_on_a_machine_of_another_speed(
    template: str, times: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = code_cells(template)
    assert any("expected_s" in cell.metadata for cell in cells), "it states no times"
    for middle, ratio in play(cells, slower(cells, times, random.Random(template)), monkeypatch):
        assert 1 / 1.5 < ratio < 1.5, f"after {middle:.0%}"


def test_one_cell_that_had_to_wait_tells_nothing_of_those_to_come() -> None:
    expected = [2.0, 5.0, 6.0, 3.0]
    assert slowness([(2.0, 26.0)]) == 1.0, "it had said that 210 s were left, of which 35 came"
    assert slowness(list(zip(expected, [2.0, 5.0, 60.0], strict=False))) == 1.0
    assert slowness([(10.0, 10.0), (10.0, 25.0), (5.0, 25.0)]) == 2.5
    assert slowness([(10.0, 50.0), (5.0, 25.0)]) == 5.0, "two that agree tell the speed of the machine"
    assert slowness([(5.0, 5e9)]) == slowness([(5.0, 60.0)]) == countdown.MOST_TIMES
    assert Parts(26.0).left([(2.0, 26.0)], 5.0, [6.0, 3.0], 26.0) == 14.0
    assert Parts(0.0).left([], 2.0, [5.0, 6.0, 3.0], 26.0) == 14.0 + 26.0 / 4


def test_what_a_call_tells_of_its_progress_is_read() -> None:
    assert told_progress("Waiting for a: running, step 1,200 of 1,500 (80%) (1 min 05 s)") == ("Waiting for a", 0.8, 65)
    assert told_progress("Waiting for s: 1 of 4 runs have ended, 30% of the work (9.0 s)") == ("Waiting for s", 0.3, 9)
    assert told_progress("Sweeping: 3 of 4 runs (950 ms)") == ("Sweeping", 3.5 / 4, 0.95), (
        "half of the next one is done"
    )
    assert told_progress("Sweeping: 4 of 4 runs (950 ms)") == ("Sweeping", 1.0, 0.95)
    assert told_progress("Planning: 2 of 0 (3.0 s)") is told_progress("Planning (3.0 s)") is told_progress("") is None


def test_the_pace_of_a_call_is_that_since_its_first_progress() -> None:
    parts = Parts(0.0)
    for percent, now in ((0, 10), (0, 30), (5, 32), (20, 38)):
        parts.hear(f"Waiting for a: step {percent} of 100 ({percent}%) ({now} s)", now)
    assert parts.call(38.0) == (0.2, pytest.approx(0.8 * 8 / 0.2)), "its start of 30 s does not happen again"
    assert parts.call(48.0) == (0.2, pytest.approx(22.0)), "10 s have passed since it was heard"
    parts.hear("Waiting for a: planning: 50% (50 s)", 50.0)
    assert parts.call(50.0) is None, "another call inside has a pace of its own"
    parts.hear("Waiting for a: planning: 75% (55 s)", 55.0)
    assert parts.call(55.0) == (0.75, pytest.approx(5.0))
    parts.hear("", 56.0)
    assert parts.call(56.0) is None


def test_what_a_call_tells_shortens_only_a_part_in_which_no_other_follows() -> None:
    def left(stated: float | list[float], call: str, percent: float) -> float:
        parts = Parts(0.0)
        parts.hear(f"{call}: 10% (5 s)", 5.0)
        parts.hear(f"{call}: {percent}% (40 s)", 40.0)
        return parts.left([], stated, [], 40.0)

    assert left(0.0, "Waiting for a", 80) == pytest.approx(10.0), "nothing else is known"
    assert left(100.0, "Waiting for a", 80) == 60.0, "another run may follow in the same cell"
    assert left([100.0], "Planning a", 80) == 60.0, "another call will"
    assert left([100.0], "Waiting for a", 80) == pytest.approx(10.0)
    assert left([100.0], "Waiting for a", 25) == 175.0 == left(100.0, "Waiting for a", 25), "it is slower than expected"
    assert left([160.0], "Waiting for a", 40) == pytest.approx(120**0.2 * 70**0.8), "its first half may be its faster"
    assert left([100.0, 50.0], "Waiting for a", 25) == pytest.approx(175 + 2.15 * 50), "the next one will be as slow"


def test_each_wait_for_other_runs_is_a_part_and_the_rest_is_expected_when_it_ends() -> None:
    parts = Parts(0.0)
    parts.hear("Planning a (3 s)", 3.0)
    parts.hear("Waiting for a: starting (2 s)", 5.0)
    parts.hear("", 20.0)
    assert parts.left([], [30.0, 40.0], [5.0], 20.0) == pytest.approx(20 / 30 * (40 + 5)), "it was that much faster"
    parts.hear("Waiting for b: starting (2 s)", 25.0)
    assert parts.took == [25.0]
    parts.hear("Waiting for a (2 s)", 26.0)
    parts.hear("Waiting for c (2 s)", 35.0)
    assert parts.took == [25.0, 10.0]
    assert parts.left([], [30.0, 40.0], [], 39.0) == 1.0, "a quarter more of a part that nobody knows"


def test_the_words_name_cell_heading_call_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(countdown, "time", clock)
    cells = [nbformat.v4.new_markdown_cell("Intro\n\n## Train both"), *map(nbformat.v4.new_code_cell, ("a", "b"))]
    cells[1].metadata["expected_s"], cells[2].metadata["expected_s"] = 30, "all of them"
    shown = Countdown(cells)
    shown.begin(cells[1])
    clock.now += 10
    assert str(shown) == "cell 1 of 2: Train both, about 20 s left"
    shown.hear(message("Waiting for a: step 1 of 2 (4.0 s)"))
    assert str(shown) == "cell 1 of 2: Train both: waiting for a: step 1 of 2, about 20 s left"
    shown.hear(message("a table", kind="execute_result"))
    shown.hear(message("", output="another"))
    assert "waiting for a" in str(shown)
    shown.hear(message(""))
    assert str(shown) == "cell 1 of 2: Train both, about 20 s left"
    shown.begin(cells[2])
    assert str(shown) == "cell 2 of 2: Train both, about 10 s left", "what is no number of seconds is not read"
    shown.end(is_whole=True)
    assert str(shown) == "writing its page, about 10 s left"
    assert [cell.metadata.get("expected_s") for cell in cells[1:]] == [[10.0], None]
    assert str(Countdown([])) == "no cells"
    other = Countdown(cells, is_as_timed=False)
    for percent in (10, 50):
        clock.now += 10
        other.hear(message(f"Waiting for a: {percent}% ({clock.now % 100:.0f} s)"))
    assert str(other).endswith("waiting for a: 50%, about 10 s of it left"), "other parameters take other times"
    assert other.seconds_left is None
    other.end(is_whole=False)
    assert "expected_s" not in cells[1].metadata, "nor does a failed execution leave the times of other parameters"


@pytest.mark.parametrize("stated", ["x", [], ["x", None], -5, [-5.0, True], 1e9, float("nan"), {"a": 1}, [[5.0]]])
def test_a_time_that_is_none_is_not_read(stated: Any) -> None:
    cells = [nbformat.v4.new_code_cell("a"), nbformat.v4.new_code_cell("b")]
    cells[0].metadata["expected_s"] = stated
    assert Countdown(cells).seconds_left is None
    cells[1].metadata["expected_s"] = 30
    assert Countdown(cells).seconds_left == pytest.approx(30 + countdown.FINISH_S)


def test_an_executed_notebook_states_its_own_times(tmp_path: Path) -> None:
    wait = "import time\n"
    for name in "ab":
        said = {"text/plain": f"Waiting for {name} (2.0 s)", "text/html": '<small class="workbench-waiting">'}
        wait += f"display({said}, raw=True, display_id=True)\n"
        wait += "time.sleep(0.3)\n"  # clock: what a cell takes at the least, which no load shortens
    sources = wait, "1", "pause = 0\n1 / pause"
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(each, metadata={"expected_s": 100}) for each in sources]
    )
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, tmp_path / "waits.ipynb")
    with pytest.raises(WorkbenchError, match="division by zero"):
        wb.notebooks.execute(tmp_path / "waits.ipynb", tmp_path / "failed")
    failed = nbformat.read(tmp_path / "failed" / "waits.ipynb", as_version=4).cells
    assert [cell.metadata.expected_s for cell in failed if cell.source in sources] == [100] * 3, "it tells nothing"
    notebook.cells[2].source = "1"
    nbformat.write(notebook, tmp_path / "waits.ipynb")
    executed = wb.notebooks.execute(tmp_path / "waits.ipynb", tmp_path / "out").notebook
    cells = nbformat.read(executed, as_version=4).cells
    parts = cells[0].metadata["expected_s"]
    assert len(parts) == 2
    assert 0.6 <= sum(parts) != 100


def test_a_curve_is_drawn_as_a_line_of_text_with_its_losses(tmp_path: Path) -> None:
    for step in range(1, 101):
        append_event(tmp_path / "events.jsonl", "step", step=step, loss=5.0 - 0.04 * step)
    drawn = text_curve(read_tail(tmp_path / "events.jsonl").read())
    # the first loss, and the end of the smoothed curve: weights of exp(-d) at a distance of d steps average 1 / (e - 1)
    assert f"{1.0 + 0.04 / (math.e - 1):.4g}" == "1.023"
    assert re.fullmatch(r"loss 4\.96 █[▁▂▃▄▅▆▇█]{38}▁ 1\.023 at step 100", drawn), drawn
    assert [*dict.fromkeys(drawn.split()[2])] == [*"█▇▆▅▄▃▂▁"], "it falls"
    assert text_curve(read_tail(tmp_path / "none" / "events.jsonl").read()) == ""


def test_a_notebook_of_many_small_cells_is_saved_at_its_start_and_end_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from papermill.clientwrap import PapermillNotebookClient

    clock, saves, seen = Clock(), list[int](), list[Countdown]()
    monkeypatch.setattr(countdown, "time", clock)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1") for _ in range(450)])

    class Manager:
        nb = notebook

        def save(self) -> None:
            saves.append(len(seen[-1]._ended))
            clock.now += 0.1

        def cell_start(self, *_: Any) -> None:
            self.save()

    cell_s = 0.0

    def execute(client: Any) -> None:
        for index, cell in enumerate(client.nb.cells):
            client.nb_man.cell_start(cell, index)
            clock.now += cell_s
            client.nb_man.save()

    monkeypatch.setattr(PapermillNotebookClient, "execute", execute)
    engine: Any = watching_engine(seen.append, True)
    engine.execute_managed_notebook(Manager(), "python3")
    assert saves == [0], "the first; papermill saves the last by itself"
    saves.clear()
    cell_s = 1.0
    engine.execute_managed_notebook(Manager(), "python3")
    assert len(saves) == pytest.approx(450 * countdown.SAVED_SHARE / 0.1, rel=0.1), "a twentieth of the time"


def test_an_executed_notebook_opens_no_port_and_its_kernel_says_nothing_about_eavesdropping(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    kernel = "from ipykernel.kernelapp import IPKernelApp\nprint(IPKernelApp.instance().transport)"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(kernel)])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, tmp_path / "asks.ipynb")
    executed = wb.notebooks.execute(tmp_path / "asks.ipynb", tmp_path / "out")
    assert nbformat.read(executed.notebook, as_version=4).cells[-1].outputs[0].text == "ipc\n"
    assert "encryption" not in "".join(capfd.readouterr())
