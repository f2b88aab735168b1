"""The template of OPT under ZeRO, executed in miniature with real trainings."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

import workbench as wb
from tests.distributed.documents import Document, executed
from workbench.sweeps.grid import MeasuredCell

RATES, BATCH, STEPS = [0.6, 0.01], 32, 240


def test_the_template_measures_each_finding_and_closes_with_their_verdicts(tmp_path, monkeypatch):
    small = {"seq_len": 32, "global_batch": 4, "data_steps": 5, "grid_steps": 4, "zero_stages": [3]}
    small |= {"learning_rates": RATES, "batches": [BATCH], "rescue_steps": STEPS, "stop_share": 0.4}
    document = executed("opt_zero", tmp_path, monkeypatch, **small, predicted_gpus=[64])
    ways = {run.name.split("-")[2]: run for run in document.runs if "-st" in run.name}
    check_streaming(ways, document)
    cells = check_scaling(tmp_path / "runs", document)
    check_what_does_not_fit(document)
    check_rescue(tmp_path / "runs", document)
    findings = reported(document.printed("findings = {"))
    tokenising, streaming, memory, nodes, scaling, zero3, rescue, unlearned = findings
    mb_per_s = float(re.match(r"[\d.]+", tokenising["measured"])[0])  # slow where other tests take the cores
    happened, _, rest = tokenising["here"].partition(", ")
    assert rest == "by the rate; 120 GB did not run"
    told = "confirmed" if mb_per_s < 0.28 else "not confirmed"
    assert mb_per_s == 0.28 or happened == told or happened.startswith("not judged: the machine was busy")
    assert streaming["here"] == "not confirmed"
    assert streaming["measured"].startswith("5 of 5 steps under ZeRO 3, finished")
    assert memory["here"] == nodes["here"].partition(":")[0] == zero3["here"] == unlearned["here"] == "did not run"
    assert memory["measured"] == "this machine enforces no limit"
    assert "opt-350m: up to micro-batch 4 without ZeRO, 8 under ZeRO 3" in memory["predicted"]
    assert "opt-125m on V100 16GB: " in nodes["predicted"]
    speedup = cells[0].step_ms / cells[1].step_ms
    assert scaling["here"] == wb.sweeps.verdict(speedup < 1.9, cells)
    assert f"{speedup:.2f} times as fast" in scaling["measured"]
    assert rescue["here"] == "confirmed"


def check_streaming(runs: dict[str, wb.Run], document: Document) -> None:
    stored, streamed = runs["stored"], runs["streamed"]
    assert stored.history().loss.tolist() == streamed.history().loss.tolist()
    assert stored.evaluations().eval_loss.tolist() == streamed.evaluations().eval_loss.tolist()
    printed = document.printed("rows, waits, idle = ")
    assert "Largest difference of the two curves in any step: 0 nats." in printed
    table = rows(printed)
    for row, run in zip(table, (stored, streamed), strict=True):
        history = run.history()
        wait = np.average(history.data_wait[1:], weights=history.step_ms[1:])
        assert row["waiting for data"] == f"{wait:.1%}"
        assert row["steps"] == "finished after 5 of 5"
        assert row["tokens/s"] == f"{4 * 32 / np.median(history.step_ms[1:]) * 1e3:,.0f}"


def check_scaling(folder: Path, document: Document) -> list[MeasuredCell]:
    """Check the section on ZeRO, and return the cells of one device and of two."""
    grids = sorted(
        (wb.sweeps.load_grid(file.parent).cells() for file in folder.glob("*/grid.json")), key=lambda c: c[0].plan.world
    )
    [one], [two] = grids
    table = rows(document.printed("def device_ms"))
    assert [(row["devices"], row["ZeRO"]) for row in table] == [("1", "0"), ("2", "3")]
    assert table[1]["efficiency"] == f"{one.step_ms / two.step_ms / 2:.0%}"
    assert table[1]["efficiency, predicted"] == f"{one.predicted_ms / two.predicted_ms / 2:.0%}"
    [measured] = document.figures("    display(wb.figures.scaling_efficiency([cell for cell, _ in cells]))")
    diamonds = next(trace for trace in measured["data"] if trace["name"] == "measured")
    assert diamonds["y"] == pytest.approx([1.0, 2 * two.step_ms / one.step_ms])
    predicted = document.figures("        display(wb.figures.scaling_efficiency(plans))")
    assert len(predicted) == 2
    assert all("measured" not in {trace["name"] for trace in figure["data"]} for figure in predicted)
    words = document.printed("def additions")
    assert len(re.findall(r"Predicted: .*V100 16GB, 64 devices under ZeRO 3: \d+% of linear", words)) == 2
    assert words.count("exposed communication +") == 2
    return [one, two]


def check_what_does_not_fit(document: Document) -> None:
    _, of_350m = document.figures("    display(wb.figures.heat_map(limits")
    assert any("GiB" in word for line in of_350m["data"][0]["hovertext"] for word in line if word.startswith("+"))
    words = document.printed("def fits")
    fitting = re.findall(r"(opt-\d+m) fits up to micro-batch (\d+) without ZeRO and up to (\d+) under ZeRO 3", words)
    assert fitting == [("opt-125m", "16", "16"), ("opt-350m", "4", "8")]


def check_rescue(folder: Path, document: Document) -> None:
    [sweep] = [wb.sweeps.load_sweep(file.parent) for file in folder.glob("*/sweep.json")]
    states = {row.values["learning_rate"]: row.states for row in sweep.rows()}
    [stalled] = states.pop(RATES[0])
    assert stalled in ("stopped early", "finished"), "a run that is faster than the sweep's looks at it ends first"
    assert states == {RATES[1]: ("finished",)}
    [rescued] = sweep.best()
    level = float(re.search(r"Unigram entropy: ([\d.]+) nats", document.printed("level = "))[1])
    assert rescued.evaluations().eval_loss[-1] < level - 0.1
    table = rows(document.printed("def outcome"))
    said = "stalled" if stalled == "stopped early" else "did not learn"
    assert [row[""].partition(":")[0] for row in table] == [said, "learned"]
    assert (rescued.path / "exported" / "config.json").exists()
    exported = document.printed("folder = ")
    of_model, of_run = re.search(r"loaded model: ([\d.]+); of the run: ([\d.]+\d)", exported).groups()
    assert float(of_model) == pytest.approx(float(of_run), abs=2e-4)
    assert f"{of_run}" == f"{rescued.evaluations().eval_loss[-1]:.4f}"
    assert "OPTForCausalLM" in exported
    for name in ("tried_first", "rescued"):
        assert "Hello! I am" in document.cell(f"{name}.samples()").outputs[-1]["data"]["text/html"]


def reported(text: str) -> list[dict[str, str]]:
    """Return the rows of the table of a report as text, by the names of its columns."""
    head, *lines = text.partition("\n")[2].splitlines()  # below the headline
    starts = [match.start() for match in re.finditer(r"(?:^|(?<=  ))\S", head)]
    cells = [[line[a:b].strip() for a, b in itertools.pairwise([*starts, None])] for line in (head, *lines)]
    return [dict(zip(cells[0], each, strict=True)) for each in cells[1:]]


def rows(text: str) -> list[dict[str, str]]:
    """Return the rows of the table in a text, by the names of its columns."""
    lines = [[word.strip() for word in line[2:-2].split(" | ")] for line in text.splitlines() if line.startswith("| ")]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]
