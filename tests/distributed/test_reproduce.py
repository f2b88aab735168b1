"""A notebook whose runs are real processes is shared, run again, and told apart from one that trains otherwise."""

import textwrap
from pathlib import Path

import nbformat
import pytest
from jupyter_client.provisioning import local_provisioner
from nbconvert import HTMLExporter
from typer.testing import CliRunner

from tests.distributed.documents import fork_kernel
from tests.distributed.test_launch import HERE, ROOT, experiment, plan_for
from tests.patience import PATIENCE_S
from workbench import notebooks
from workbench.cli import app
from workbench.figures.figure import PLOTLY_MIME
from workbench.planning.plan import Plan
from workbench.planning.planner import facts_of
from workbench.record.rundir import LAUNCHES, write_json
from workbench.runs.run import REPLAY, replayed_plan

CELL = f"""
    import sys
    sys.path.insert(0, {str(HERE)!r})
    from test_launch import experiment, launch, plan_for
    asked = experiment(steps)
    run = launch(asked, plan_for(asked, 1), worker="standin_worker").wait({PATIENCE_S})
    import workbench as wb
    display(wb.compare(run), wb.show(run), wb.live(run), run.plan)
    run
"""


@pytest.fixture(autouse=True)
def node(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(local_provisioner, "launch_kernel", fork_kernel)
    return tmp_path


def written(path: Path) -> Path:
    parameters = nbformat.v4.new_code_cell("steps = 40")
    parameters.metadata["tags"] = ["parameters"]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    body = nbformat.v4.new_code_cell(textwrap.dedent(CELL))
    nbformat.write(nbformat.v4.new_notebook(cells=[parameters, body], metadata={"kernelspec": kernel}), path)
    return path


def test_a_shared_notebook_comes_out_bitwise_the_same_and_says_when_it_does_not(node, monkeypatch):
    lines = []
    done = notebooks.execute(written(node / "mine.ipynb"), node / "out", {"steps": 30}, report=lines.append)
    (run,) = done.runs
    assert run.directory.notebook.read_bytes() == done.notebook.read_bytes(), "W&B gets it from there"
    assert_every_figure_shows_without_a_script(done.notebook)
    assert any("finished  30 of 30" in line for line in lines) or any("running" in line for line in lines)
    shared = notebooks.share(done.notebook, node / "shared")
    assert shared.notebook.stat().st_size < 500_000, "no plotly.js"
    again = notebooks.reproduce(shared.notebook, node / "again", trust=True)
    assert again.same
    assert [c.verdict.outcome for c in again.comparisons] == ["bitwise"]
    assert {d.subject for d in again.differences} <= {"git commit", "uncommitted changes"}, "of this very checkout"

    monkeypatch.setenv("WORKBENCH_STANDIN_LIFT", "0.5")
    words = ["reproduce", "--yes", str(shared.notebook), "--to", str(node / "other")]
    answer = CliRunner().invoke(app, words)
    assert answer.exit_code == 1, answer.output
    assert ": different (" in answer.stdout


def assert_every_figure_shows_without_a_script(path: Path) -> None:
    outputs = [output.get("data", {}) for cell in nbformat.read(path, 4).cells for output in cell.get("outputs", ())]
    figures = [data for data in outputs if PLOTLY_MIME in data]
    assert len(figures) >= 4
    assert all(data["image/png"].startswith("iVBOR") for data in figures)
    page, _ = HTMLExporter().from_filename(str(path))
    shown = [data["image/png"].strip() for data in figures if "text/html" not in data]
    assert all(picture in page.replace("\n", "") for picture in shown)
    assert len(shown) >= 4, "the plan among them"


def test_a_repeated_launch_takes_the_recorded_plan_where_it_can_run(node, monkeypatch):
    asked = experiment(3)
    planned = plan_for(asked, 1).to_json()
    doubled = {"micro_batch": 2, "num_microbatches": planned["num_microbatches"] // 2}
    recorded = Plan.from_json({**planned, **doubled, "signature": facts_of(asked).signature})
    entries = [{"experiment": asked.to_json(), "plan": recorded.to_json()}]
    entries.append({"experiment": asked.to_json(), "plan": plan_for(asked, 4, device_type="cuda").to_json()})
    write_json(node / "replay.json", entries)
    (node / "launches").touch()
    assert replayed_plan(asked) is None
    monkeypatch.setenv(REPLAY, str(node / "replay.json"))
    monkeypatch.setenv(LAUNCHES, str(node / "launches"))
    assert replayed_plan(asked) == recorded
    assert replayed_plan(asked.replace(global_batch=32)) is None
    (node / "launches").write_text("first\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert replayed_plan(asked) is None, "this machine has no GPU"
    (node / "launches").write_text("first\nsecond\n")
    assert replayed_plan(asked) is None
    write_json(node / "replay.json", [entries[1], entries[0]])
    (node / "launches").write_text("first\nfirst\n")  # which was continued
    assert replayed_plan(asked) == recorded
