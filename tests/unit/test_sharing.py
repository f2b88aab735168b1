"""Notebooks: started from a template, shared in one piece, run again and judged."""

from __future__ import annotations

import base64
import functools
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest

from tests.logs import append_event
from workbench import notebooks
from workbench.analysis.curve import Curve
from workbench.base.code_identity import IMPORTED, identities_json, identity
from workbench.base.errors import RunNotFound, WorkbenchError
from workbench.figures.curves_view import loss_curves
from workbench.figures.figure import HIDE_DEAD_WIDGET, PLOTLY_MIME, WIDGET_MIME
from workbench.notebooks import executing, sharing
from workbench.notebooks.executing import LossCurve, Record, recorded_in
from workbench.notebooks.pages import notebook_text
from workbench.notebooks.sharing import BITWISE, DIFFERENT, NOISE, verdict
from workbench.record.rundir import RunDir, write_json, write_record
from workbench.runs.run import Run
from workbench.widgets.live_widget import EMPTY

ROOT = Path(__file__).resolve().parents[2]
STEPS = 400


def losses(seed: int, drift: float = 0.0) -> np.ndarray:
    """Return a falling curve with batch noise; `drift` raises it towards the end."""
    noise = np.random.default_rng(seed).normal(0.0, 0.05, STEPS)
    return 4 + 3 * np.exp(-np.arange(STEPS) / 60) + noise + drift * np.linspace(0, 1, STEPS)


def run_of(folder: Path, values: np.ndarray, name: str = "bert-1", **facts: Any) -> Run:
    run = RunDir(folder / name)
    write_record(run.experiment, {"name": "bert", "steps": len(values), "seed": 0})
    write_record(run.environment, {"python": "3.11.7", "packages": {"torch": "2.13.0"}, "gpus": [], **facts})
    from figure_values import plan

    write_json(run.plan, plan(2, 8, 4).to_json())
    append_event(run.events, "status", state="finished", message="")
    for step, loss in enumerate(values.tolist(), start=1):
        append_event(run.events, "step", step=step, loss=loss)
    return Run(run.path)


def curve(folder: Path, values: np.ndarray, name: str = "bert-1") -> LossCurve:
    return LossCurve.of(run_of(folder, values, name))


def test_a_curve_goes_through_a_notebook_without_losing_a_bit(tmp_path):
    values = losses(0)
    values[7] = np.nan
    original = curve(tmp_path, values)
    back = LossCurve.from_json(json.loads(json.dumps(original.to_json())))
    assert back.loss.tobytes() == values.tobytes()
    assert verdict(original, back).outcome == BITWISE


def test_equal_runs_are_bitwise_and_one_changed_bit_is_seen(tmp_path):
    recorded = curve(tmp_path, losses(0))
    changed = losses(0)
    changed[200] = np.nextafter(changed[200], np.inf)
    again = verdict(recorded, curve(tmp_path, changed, "again"))
    assert (again.outcome, again.first_step) == (NOISE, 201)
    assert verdict(recorded, curve(tmp_path, losses(0), "same")).outcome == BITWISE


def test_other_batches_of_the_same_training_are_within_noise_and_a_drift_is_not(tmp_path):
    recorded = curve(tmp_path, losses(0))
    others = [verdict(recorded, curve(tmp_path, losses(seed), f"s{seed}")).outcome for seed in range(1, 41)]
    assert others.count(NOISE) >= 38, "1 % of them may be called different"
    drifted = verdict(recorded, curve(tmp_path, losses(1, drift=0.15), "drifted"))
    assert drifted.outcome == DIFFERENT
    assert not drifted.same
    assert "standard errors apart around step" in drifted.reason


def test_fewer_steps_or_a_nan_where_there_was_none_are_different(tmp_path):
    recorded = curve(tmp_path, losses(0))
    assert "300 steps were logged instead of 400" in verdict(recorded, curve(tmp_path, losses(0)[:300], "short")).reason
    diverged = losses(1)
    diverged[300:] = np.nan
    assert verdict(recorded, curve(tmp_path, diverged, "nan")).outcome == DIFFERENT


def notebook_with(*outputs: dict[str, Any], text: str = "Run(bert-1: finished)") -> Any:
    cell = nbformat.v4.new_code_cell("runs")
    cell.outputs = [nbformat.v4.new_output("display_data", data=data) for data in outputs]
    cell.outputs.append(nbformat.v4.new_output("stream", name="stdout", text=text))
    return nbformat.v4.new_notebook(cells=[cell])


def figure(points: int = 50) -> dict[str, Any]:
    y = np.linspace(7, 5, points).round(4).tolist()
    return {"data": [{"type": "scatter", "name": "<b>a</b>", "y": y}], "layout": {"title": {"text": "Loss"}}}


@pytest.fixture
def no_browser(tmp_path, monkeypatch):
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "nowhere"))
    monkeypatch.setenv("PATH", str(tmp_path))


def test_a_shared_notebook_has_pictures_a_record_and_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("MY_API_KEY", "very-secret-value")
    monkeypatch.setenv("MY_SIGNING_KEY", '{"begin": "of-it"\n"middle-of-it"}')
    values = losses(0)
    run_of(tmp_path / "runs", values, data_fingerprint="abc", command=["x"], directory="/home/me")
    run_of(tmp_path / "runs", values, "bert-10")
    original = tmp_path / "<i>mine.ipynb"
    text = "Run(bert-1: finished) with very-secret-value <script>alert(1)</script>" + os.environ["MY_SIGNING_KEY"]
    widget = {WIDGET_MIME: {"model_id": "0"}, "text/plain": "FigureWidget({})"}
    nbformat.write(notebook_with({PLOTLY_MIME: figure()}, widget, text=text), original)
    shared = notebooks.share(original, tmp_path / "to")
    value = nbformat.read(shared.notebook, as_version=4)
    drawn, stream = value.cells[0].outputs
    assert drawn["data"]["image/png"].startswith("iVBOR"), shared.notes
    assert PLOTLY_MIME in drawn["data"]
    for secret in ("very-secret-value", "middle-of-it"):
        assert secret not in shared.notebook.read_text() + shared.page.read_text()
    assert stream["text"].startswith("Run(bert-1: finished) with ***")
    (recorded,) = recorded_in(value, "mine").runs
    assert (recorded.name, recorded.data_fingerprint) == ("bert-1", "abc")
    assert recorded.curve.loss.tolist() == values.tolist()
    assert "/home/me" not in shared.notebook.read_text()
    page = shared.page.read_text()
    assert "<title>&lt;i&gt;mine</title>" in page
    assert "<script>alert(1)" not in page
    assert not shared.notes
    assert original.read_text().count("image/png") == 0, "the original stays as it was"


def test_a_notebook_is_written_as_nbformat_writes_it_but_for_the_lines_of_figures():
    drawn = figure() | {"layout": {"title": {"text": 'lines\n"quoted" \u2028 \\d <b>'}}}
    notebook = notebook_with(
        {PLOTLY_MIME: drawn, "text/plain": "two\nlines"}, {PLOTLY_MIME: None}, {"text/html": "<b>"}
    )
    notebook.cells.append(nbformat.v4.new_markdown_cell("one\ntwo"))
    before, text = json.dumps(notebook), notebook_text(notebook)
    assert json.loads(text) == json.loads(nbformat.writes(notebook))
    assert json.dumps(notebook) == before, "what is written stays as it is"
    assert nbformat.writes(notebook).count("\n") - text.count("\n") > 50, "numbers have no line each"


def test_numbers_of_figures_cost_sharing_fewer_calls_than_nbformat_makes_to_write_them(tmp_path, monkeypatch):
    """It had taken 3.3 times the seconds of nbformat, when each number was looked at for a secret, with a line each."""
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path / "runs"))

    def calls(work):
        made = 0

        def count(_frame, event, _argument):
            nonlocal made
            made += event in ("call", "c_call")

        previous = sys.getprofile()
        sys.setprofile(count)
        try:
            work()
        finally:
            sys.setprofile(previous)
        return made

    def shared(name, points):
        nbformat.write(notebook_with({PLOTLY_MIME: figure(points), "image/png": ""}), tmp_path / name)
        return calls(lambda: notebooks.share(tmp_path / name, tmp_path / "shared"))

    shared("first.ipynb", 10)  # which imports
    few, many = shared("few.ipynb", 10), shared("many.ipynb", 50_000)
    notebook = notebook_with({PLOTLY_MIME: figure(50_000)})
    assert many - few < calls(lambda: nbformat.writes(notebook))


def test_an_attached_picture_is_on_the_page_and_a_lost_one_leaves_its_words(tmp_path):
    picture = base64.b64encode(b"a picture").decode()
    cells = [
        nbformat.v4.new_markdown_cell("![kept](attachment:a%20b.png)", attachments={"a b.png": {"image/png": picture}}),
        nbformat.v4.new_markdown_cell("![lost](attachment:gone.png) <img alt='tag' src='attachment:gone.png'>"),
        nbformat.v4.new_markdown_cell("![entity](&#97;ttachment:gone.png)"),
        nbformat.v4.new_markdown_cell("![empty](attachment:a.png) ![](attachment:)", attachments={"a.png": {}}),
    ]
    path = tmp_path / "mine.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    shared = notebooks.share(path, tmp_path / "to")
    page = shared.page.read_text()
    assert f'src="data:image/png;base64,{picture}"' in page
    assert all(words in page for words in ("lost", "tag", "entity", "empty"))
    kept = nbformat.read(shared.notebook, as_version=4).cells[0]
    assert (kept.source, kept.attachments["a b.png"]["image/png"]) == (cells[0].source, picture)


DAMAGED: dict[str, Any] = {
    "no base64": {"y": {"dtype": "f8", "bdata": "!!!"}},
    "half a number": {"y": {"dtype": "f8", "bdata": "AAAA"}},
    "no type": {"y": {"bdata": "AAAAAAAAAAA="}},
    "an unknown type": {"y": {"dtype": "zz", "bdata": "AAAAAAAAAAA="}},
    "objects": {"y": {"dtype": "O", "bdata": "AAAAAAAAAAA="}},
    "another shape": {"y": {"dtype": "f8", "bdata": "AAAAAAAAAAA=", "shape": "3, 4"}},
    "a number in place of text": {"y": {"dtype": "f8", "bdata": 7}},
    "rows of unequal lengths": {"y": [[1, 2], [3]]},
    "values of many types": {"y": [1, "a", None, {"a": 1}, [1, 2]]},
}


def test_a_damaged_figure_has_a_note_and_the_others_have_their_pictures(tmp_path):
    figures = [{"data": [{"type": "scatter", **each}], "layout": {}} for each in DAMAGED.values()]
    layouts = [{"xaxis": "a", "title": 5, "annotations": "b"}, {"annotations": [1, None]}, {"height": 1e9}]
    figures += [{"data": [{"type": "scatter", "y": [1, 2]}], "layout": layout} for layout in layouts]
    path = tmp_path / "mine.ipynb"
    nbformat.write(notebook_with(*({PLOTLY_MIME: each} for each in (*figures, figure()))), path)
    shared = notebooks.share(path, tmp_path / "to")
    outputs = nbformat.read(shared.notebook, as_version=4).cells[0].outputs
    assert "image/png" in outputs[len(figures)]["data"]
    assert not any("image/png" in output["data"] for output in outputs[: len(DAMAGED)])
    notes = " ".join(shared.notes)
    assert "A figure is damaged and has no picture beside it: ValueError: buffer size" in notes
    assert "it is 1,000,000,000 pixels high" in notes
    assert "Loss" in shared.page.read_text()


@pytest.mark.usefixtures("no_browser")
def test_without_a_browser_a_figure_that_needs_one_has_no_picture_and_a_note_says_so(tmp_path):
    path = tmp_path / "mine.ipynb"
    only_a_browser_draws = {"type": "pie", "values": [1, 2]}
    drawn = figure()
    drawn["data"].append(only_a_browser_draws)
    nbformat.write(notebook_with({PLOTLY_MIME: drawn}), path)
    shared = notebooks.share(path, tmp_path / "to")
    assert "image/png" not in nbformat.read(shared.notebook, as_version=4).cells[0].outputs[0]["data"]
    assert any("have no picture beside them" in note for note in shared.notes)
    assert any("cannot be reproduced" in note for note in shared.notes)


@pytest.mark.usefixtures("no_browser")
def test_curves_have_a_picture_without_a_browser_and_a_dead_widget_leaves_nothing(tmp_path):
    path, step = tmp_path / "mine.ipynb", np.arange(1, 300)
    curves = [Curve("a", {"step": step, "loss": 5 + 1 / step}), Curve("b", {"step": step, "loss": 6 + 1 / step})]
    drawn = json.loads(loss_curves(curves, x="step").to_json())
    widget = {WIDGET_MIME: {"model_id": "0"}, **EMPTY}
    twin = {"text/html": f"{HIDE_DEAD_WIDGET}<b>a</b>: running", "text/plain": ""}
    nbformat.write(notebook_with(widget, twin, {PLOTLY_MIME: drawn, "text/plain": ""}, dict(EMPTY)), path)
    shared = notebooks.share(path, tmp_path / "to")
    states, figure, _ = nbformat.read(shared.notebook, as_version=4).cells[0].outputs
    assert states["data"]["text/html"] == "<b>a</b>: running"
    assert figure["data"]["image/png"].startswith("iVBOR")
    assert not any("tables" in note for note in shared.notes)


@pytest.mark.usefixtures("no_browser")
def test_a_shared_notebook_stays_under_five_megabytes(tmp_path, monkeypatch):
    assert sharing.MAX_BYTES == 5_000_000
    monkeypatch.setattr(sharing, "MAX_BYTES", 250_000)  # which takes less long to draw
    path = tmp_path / "large.ipynb"
    nbformat.write(notebook_with({PLOTLY_MIME: figure(30_000)}, {PLOTLY_MIME: figure(100)}), path)
    assert path.stat().st_size > sharing.MAX_BYTES
    shared = notebooks.share(path, tmp_path / "to")
    assert shared.notebook.stat().st_size < sharing.MAX_BYTES
    first, second, _ = nbformat.read(shared.notebook, as_version=4).cells[0].outputs
    assert PLOTLY_MIME not in first["data"]
    assert "image/png" in first["data"]
    assert PLOTLY_MIME in second["data"]
    assert any("Left out an interactive figure" in note for note in shared.notes)


def test_sharing_never_overwrites_the_notebook_itself(tmp_path):
    path = tmp_path / "mine.ipynb"
    nbformat.write(notebook_with(), path)
    with pytest.raises(WorkbenchError, match="would be overwritten"):
        notebooks.share(path, tmp_path)


def test_a_notebook_without_a_record_cannot_be_reproduced(tmp_path):
    path = tmp_path / "mine.ipynb"
    nbformat.write(notebook_with(), path)
    with pytest.raises(WorkbenchError, match="holds no record of a run"):
        notebooks.reproduce(path, tmp_path / "again")


def test_what_differs_is_named(tmp_path):
    git = {"commit": "a" * 40, "dirty": False}
    first = run_of(tmp_path, losses(0), "first", git=git, data_fingerprint="1" * 64, cpu="A", cores=2)
    packages = {"torch": "2.11.0", "wandb": "0.31.0"}
    facts = {
        "git": {"commit": "b" * 40, "dirty": True, "diff_sha256": "3" * 64},
        "data_fingerprint": "2" * 64,
        "cpu": "A",
        "cores": 8,
    }
    second = run_of(tmp_path, losses(0), "second", packages=packages, **facts)
    write_record(second.directory.experiment, {"name": "bert", "steps": STEPS, "seed": 1})
    plan = second.plan.to_json()
    doubled = {"micro_batch": 2 * plan["micro_batch"], "num_microbatches": plan["num_microbatches"] // 2}
    write_json(second.directory.plan, {**plan, **doubled})
    for run, rate in ((first, 1.0), (second, 2.0)):
        rates = {"lr_schedule": identity(functools.partial(max, rate)), "metrics": identity(max)}
        run.directory.code.mkdir()
        (run.directory.code / IMPORTED).write_bytes(identities_json(rates))
    record = Record.of([first])
    found = {d.subject: (d.recorded, d.here) for d in sharing.differences_from(record, [second])}
    assert found == {
        "git commit": ("a" * 10, "b" * 10),
        "uncommitted changes": ("none", "some (3333333333)"),
        "torch": ("2.13.0", "2.11.0"),
        "wandb": ("not installed", "0.31.0"),
        "cores": ("2", "8"),
        "first: seed": ("0", "1"),
        "first: data": ("1" * 10, "2" * 10),
        "first: code of lr_schedule": found["first: code of lr_schedule"],
        "first: plan": tuple(
            f"micro_batch {of['micro_batch']}, num_microbatches {of['num_microbatches']}"
            for of in (plan, {**plan, **doubled})
        ),
    }
    assert sharing.differences_from(record, [first]) == []


def test_the_recorded_commit_is_checked_out_aside_and_removed_again(tmp_path, monkeypatch):
    repository = tmp_path / "repository"
    repository.mkdir()
    monkeypatch.chdir(repository)
    for variable in ("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL"):
        monkeypatch.setenv(variable, "tester")

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    for content in ("first", "second"):
        (repository / "model.py").write_text(content)
        git("add", "model.py")
        git("commit", "-q", "-m", content)
    record = Record(0.0, {"git": {"commit": git("rev-parse", "HEAD~1")}}, ())
    with sharing._work_tree(record, tmp_path, wanted=True) as tree:
        assert (tree / "model.py").read_text() == "first"
    assert not tree.exists()
    assert (repository / "model.py").read_text() == "second"
    with sharing._work_tree(record, tmp_path, wanted=False) as tree:
        assert tree is None
    lost = Record(0.0, {"git": {"commit": "f" * 40}}, ())
    with (
        pytest.raises(WorkbenchError, match="Commit ffffffffff cannot be checked out here"),
        sharing._work_tree(lost, tmp_path, wanted=True),
    ):
        pass


def test_a_template_is_copied_and_nothing_is_overwritten(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = notebooks.new("bert_scaling")
    assert made == tmp_path / "bert_scaling.ipynb"
    assert made.read_bytes() == (ROOT / "templates" / "bert_scaling.ipynb").read_bytes()
    with pytest.raises(WorkbenchError, match="exists already"):
        notebooks.new("bert_scaling")
    assert notebooks.new("bert_scaling", "deep/mine").name == "mine.ipynb"
    with pytest.raises(RunNotFound, match="Did you mean 'bert_scaling'"):
        notebooks.new("bert_scalin")


def test_templates_are_found_where_an_installed_wheel_puts_them(tmp_path, monkeypatch):
    folder = tmp_path / "share" / "jupyter" / executing.FOLDER
    folder.mkdir(parents=True)
    (folder / "mine.ipynb").write_text("{}")
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share" / "jupyter"))
    monkeypatch.chdir(tmp_path)
    assert notebooks.template_path("mine") == folder / "mine.ipynb"


def test_the_wheel_puts_the_templates_and_the_extension_where_jupyter_looks():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    places = {"labextensions": "share/jupyter", "jupyter_server_config.d": "etc/jupyter"}
    extension = {f"workbench/lab/jupyter/{folder}": f"{place}/{folder}" for folder, place in places.items()}
    assert settings["shared-data"] == {"templates": f"share/jupyter/{executing.FOLDER}", **extension}
    assert all((ROOT / folder).is_dir() for folder in settings["shared-data"])
