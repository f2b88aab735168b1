"""The time left of a notebook: recorded executions are played again, on a clock that the test turns."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

import workbench as wb
from tests.logs import append_event
from tests.patience import Clock
from workbench.notebooks import countdown
from workbench.notebooks.countdown import Countdown, seconds_left, slowness, told_progress, watching_engine
from workbench.record.history import read_tail
from workbench.runs.registry import text_curve

ROOT = Path(__file__).parents[2]
LOADED = json.loads(Path(__file__).with_name("cell_times.json").read_text())
"""Seconds of the cells of executions beside other work on both cores, by template and id."""
ON_TWO_CORES = sorted(ROOT.glob("notebooks/*_2cores.ipynb"))


def recorded(path: Path) -> dict[str, float]:
    """Return the seconds of each cell of an executed notebook."""
    cells = (cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code")
    return {cell.id: cell.metadata.get("papermill", {}).get("duration") or 0.0 for cell in cells}


def timelines() -> list[Any]:
    known = {path.stem.removesuffix("_2cores"): recorded(path) for path in ON_TWO_CORES}
    del known["opt_zero"]  # which states no times
    quiet = [pytest.param(name, seconds, id=f"{name}, quiet") for name, seconds in known.items()]
    return quiet + [pytest.param(name, seconds, id=f"{name}, load 9") for name, seconds in LOADED.items()]


@pytest.mark.parametrize(("template", "seconds"), timelines())
def test_in_the_middle_of_a_template_the_time_left_is_within_a_factor_of_1_5_of_what_comes(
    template: str, seconds: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(countdown, "time", clock)
    cells = nbformat.read(ROOT / "templates" / f"{template}.ipynb", as_version=4).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    shown, total = Countdown(cells), sum(seconds.get(cell.id, 0.0) for cell in code)
    began = clock.now
    for cell in code:
        shown.begin(cell)
        ends = clock.now + seconds.get(cell.id, 0.0)
        if clock.now < began + total / 2 <= ends:
            clock.now = began + total / 2
            assert shown.seconds_left is not None
            assert 1 / 1.5 < shown.seconds_left / (total / 2) < 1.5
        clock.now = ends


def test_one_cell_that_had_to_wait_tells_nothing_of_those_to_come() -> None:
    expected = [2.0, 5.0, 6.0, 3.0]
    assert slowness(expected, [26.0]) == 1.0, "it had said that 210 s were left, of which 35 came"
    assert slowness(expected, [2.0, 5.0, 60.0]) == 1.0
    assert slowness(expected, [10.0, 25.0]) == 5.0, "two that agree tell the speed of the machine"
    assert slowness([5.0], [5e9]) == slowness([5.0], [60.0]) == countdown.MOST_TIMES
    assert seconds_left(expected, [26.0], 0.0) == 14.0
    assert seconds_left(expected, [], 26.0) == 14.0 + 26.0 / 4


def test_what_a_cell_tells_of_its_progress_is_used_and_shortens_no_cell_of_several_calls() -> None:
    assert told_progress("Waiting for a: running, step 1,200 of 1,500 (80%) (1 min 05 s)") == (0.8, 65.0)
    assert told_progress("Sweeping: 3 of 4 runs (950 ms)") == (0.75, 0.95)
    assert told_progress("Planning: 2 of 0 (3.0 s)") is told_progress("Planning (3.0 s)") is told_progress("") is None
    assert seconds_left([0.0], [], 41.0, (0.8, 40.0)) == pytest.approx(10.0), "nothing else is known"
    assert seconds_left([100.0], [], 45.0, (0.8, 40.0)) == 55.0, "another run follows in the same cell"
    assert seconds_left([100.0], [], 60.0, (0.01, 10.0)) == 40.0, "it has hardly begun, and took that time to start"
    assert seconds_left([20.0], [], 80.0, (0.5, 80.0)) == pytest.approx(20 + 0.5 * (80 - 20)), "slower than expected"


def test_the_words_name_cell_heading_call_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(countdown, "time", clock)
    cells = [nbformat.v4.new_markdown_cell("Intro\n\n## Train both"), *map(nbformat.v4.new_code_cell, ("a", "b"))]
    cells[1].metadata["expected_s"], cells[2].metadata["expected_s"] = 30, "all of them"
    shown = Countdown(cells)
    shown.begin(cells[1])
    clock.now += 10
    assert str(shown) == "cell 1 of 2: Train both, about 20 s left"
    said = {"text/html": '<small class="workbench-waiting">', "text/plain": "Waiting for a: step 1 of 2 (4.0 s)"}
    cells[1].outputs = [nbformat.v4.new_output("display_data", data=said)]
    assert str(shown) == "cell 1 of 2: Train both: waiting for a: step 1 of 2, about 20 s left"
    shown.begin(cells[2])
    assert str(shown) == "cell 2 of 2: Train both, about 10 s left", "what is no number of seconds is not read"
    assert Countdown(cells, is_as_timed=False).seconds_left == pytest.approx(4.0), "other parameters take other times"
    assert str(Countdown([])) == "no cells"


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
            saves.append(len(seen[-1]._took))
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
