"""The command line: flags to experiments, errors to one sentence, notebooks to pages."""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from workbench import api, cli, notebooks
from workbench.errors import InvalidExperiment, RunNotFound, UnknownParameter, WorkbenchError
from workbench.rundir import RunDir, append_event, this_process, write_json

ROOT = Path(__file__).resolve().parents[2]
NO_SIZES = {"hidden_size": None, "num_layers": None, "num_heads": None, "layout": None}


def workbench(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "workbench", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def notebook(tmp_path):
    parameters = nbformat.v4.new_code_cell("steps = 400\nname = 'default'")
    parameters.metadata["tags"] = ["parameters"]
    body = nbformat.v4.new_code_cell("assert steps < 1000, 'too many'\nprint(name, 'for', steps, 'steps')")
    path = tmp_path / "trial.ipynb"
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(nbformat.v4.new_notebook(cells=[parameters, body], metadata={"kernelspec": kernel}), path)
    return path


def test_flags_make_the_same_experiment_as_python():
    from workbench import Experiment, data, models

    sizes = {**NO_SIZES, "hidden_size": 1920, "num_layers": 54, "num_heads": 30}
    made = cli.experiment_from(None, "bert", sizes, "demo", {"steps": 40, "seq_len": None})
    model = models.bert(hidden_size=1920, num_layers=54, num_heads=30)
    assert made == Experiment(model=model, data=data.corpus("demo"), steps=40)
    assert cli.named_model("GPT3-1.3B", {}) == models.gpt3("1.3B")


def test_flags_win_over_the_file(tmp_path):
    made = cli.experiment_from(None, "bert-large", NO_SIZES, None, {"steps": 40, "seed": 3})
    file = tmp_path / "experiment.json"
    file.write_text(json.dumps(made.to_json()))
    assert cli.experiment_from(file, None, NO_SIZES, None, {"steps": 7}) == made.replace(steps=7)


def test_a_misspelt_model_or_a_size_without_a_model_is_refused():
    with pytest.raises(InvalidExperiment, match="Did you mean 'bert-large'"):
        cli.named_model("bert-lage", {})
    with pytest.raises(InvalidExperiment, match="--model"):
        cli.experiment_from(None, None, {**NO_SIZES, "hidden_size": 8}, None, {})
    with pytest.raises(UnknownParameter, match="num_layers"):
        cli.named_model("bert-large", {"num_layers": 3})


@pytest.mark.parametrize("verb", [cli.plan, cli.run])
def test_whatever_a_plan_can_be_told_in_python_has_a_flag(verb):
    shell = {"data": "data_parallel"}  # where --data is the text
    asked = set(inspect.signature(api.plan).parameters) - {"experiment", "cluster"}
    assert {shell.get(name, name) for name in asked} <= set(inspect.signature(verb).parameters)


def test_a_shell_shows_what_was_weighed_and_why_and_keeps_to_what_was_fixed(tmp_path):
    sizes = ("--model", "bert", "--hidden-size", "64", "--layers", "4", "--heads", "4", "--seq-len", "32")
    asked = ("plan", *sizes, "-p", "clip_norm=null", "--device", "h200", "--gpus", "4", "--nodes", "2")
    fixed = ("--tensor", "2", "--schedule", "interleaved", "--chunks", "2", "--recompute", "full")
    told = workbench(*asked, *fixed, "--all", "--explain", "--save", "plan.json", cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    assert "plans weighed" in told.stdout
    assert "Binding constraint" in told.stdout
    plan = api.load_plan(tmp_path / "plan.json")
    assert (plan.tensor, plan.schedule, plan.recompute, plan.pipeline) == (2, "interleaved", "full", 2)
    assert plan.cluster.nodes == 2
    alone = workbench("plan", *sizes, "--nodes", "2", cwd=tmp_path)
    assert (alone.returncode, "--device" in alone.stderr) == (2, True)


def test_an_error_is_one_sentence_and_exit_code_2(tmp_path):
    answer = workbench("show", "nothing", cwd=tmp_path)
    assert answer.returncode == 2
    assert answer.stdout == ""
    assert answer.stderr.startswith("RunNotFound: There is no run 'nothing'.")
    assert "Traceback" not in answer.stderr
    missing = workbench("run", "--model", "bert-large", "--plan", "nowhere.json", cwd=tmp_path)
    assert (missing.returncode, missing.stderr.startswith("PlanMismatch: nowhere.json holds no plan")) == (2, True)
    assert workbench("plan", "--stepz", "3", cwd=tmp_path).returncode == 2


def test_scripts_read_runs_as_json(tmp_path):
    run = RunDir(tmp_path / "runs" / "bert-1")
    write_json(run.experiment, {"name": "bert", "steps": 100, "model": {}})
    write_json(run.environment, {})
    write_json(run.launcher, {"supervisor": this_process()})
    append_event(run.events, "status", state="running", message="")
    append_event(run.events, "step", step=4, loss=6.5, tokens_per_s=1e3)
    (row,) = json.loads(workbench("runs", "--json", cwd=tmp_path).stdout)
    assert (row["name"], row["state"], row["step"], row["loss"]) == ("bert-1", "running", 4, 6.5)
    assert json.loads(workbench("show", "bert-1", "--json", cwd=tmp_path).stdout) == row
    assert "4 of 100" in workbench("runs", cwd=tmp_path).stdout


def test_new_and_sync_are_verbs_of_the_shell(tmp_path):
    made = workbench("new", "bert_scaling", "mine", cwd=tmp_path)
    assert made.stdout.strip() == str(tmp_path / "mine.ipynb")
    refused = workbench("new", "bert_scaling", "mine", cwd=tmp_path)
    assert (refused.returncode, "is there already" in refused.stderr) == (2, True)
    assert workbench("sync", cwd=tmp_path).stdout == "Nothing to upload.\n"
    assert "no record of a run" in workbench("reproduce", "mine.ipynb", cwd=tmp_path).stderr


def test_a_run_is_followed_without_a_browser_until_it_has_failed(tmp_path):
    run = RunDir(tmp_path / "runs" / "bert-1")
    write_json(run.experiment, {"name": "bert", "steps": 100, "model": {}})
    write_json(run.environment, {})
    write_json(run.launcher, {"supervisor": this_process()})
    append_event(run.events, "status", state="running", message="")
    append_event(run.events, "step", step=4, loss=6.5, tokens_per_s=1e3, step_ms=500.0)
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from workbench.cli import main; main()"
    command = [sys.executable, "-c", code, "show", "bert-1", "--follow", "--every", "0.2"]
    following = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert following.stdout.readline().split("  ")[1:] == [
        *("bert-1", "running", "4 of 100 (4%)", "loss 6.5", "1 k tokens/s", "48.0 s left\n")
    ]
    append_event(run.events, "step", step=5, loss=6.25)
    assert "5 of 100 (5%)  loss 6.25" in following.stdout.readline()
    append_event(run.events, "status", state="failed", message="rank 1 (stage 1): OSError: gone")
    assert "failed  5 of 100" in following.stdout.readline()
    assert "Run bert-1 failed: rank 1 (stage 1)" in following.stdout.read()
    assert following.wait(30) == 1


def test_a_notebook_is_executed_with_its_parameters_and_exported(notebook, tmp_path):
    answer = workbench("execute", str(notebook), "-p", "steps=40", "-p", "name=short", "--to", "out", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    executed, page = answer.stdout.split()
    assert (executed, page) == (str(tmp_path / "out" / "trial.ipynb"), str(tmp_path / "out" / "trial.html"))
    assert "short for 40 steps" in Path(page).read_text()


def test_a_misspelt_notebook_parameter_fails_with_the_known_ones(notebook, tmp_path):
    with pytest.raises(UnknownParameter, match=r"no parameter 'stepz'.*'steps'.*It has: steps, name"):
        notebooks.execute(notebook, tmp_path / "out", {"stepz": 3})
    assert not (tmp_path / "out").exists()


def test_a_failing_cell_is_named_and_leaves_the_page_up_to_it(notebook, tmp_path):
    with pytest.raises(WorkbenchError, match="AssertionError: too many"):
        notebooks.execute(notebook, tmp_path / "out", {"steps": 5000})
    assert (tmp_path / "out" / "trial.html").exists()


def test_a_notebook_is_not_executed_over_itself(notebook, tmp_path):
    before = notebook.read_bytes()
    for folder in (tmp_path, tmp_path / "out" / ".."):
        with pytest.raises(WorkbenchError, match="would be overwritten"):
            notebooks.execute(notebook, folder)
    assert notebook.read_bytes() == before


def test_a_notebook_without_a_kernel_runs_with_pythons_and_one_with_an_unknown_one_is_answered(notebook, tmp_path):
    value = nbformat.read(notebook, as_version=4)
    value.metadata.kernelspec.name = "somebody-elses"
    nbformat.write(value, tmp_path / "theirs.ipynb")
    with pytest.raises(WorkbenchError, match=r"asks for the kernel 'somebody-elses'.*--kernel python3"):
        notebooks.execute(tmp_path / "theirs.ipynb", tmp_path / "out")
    del value.metadata["kernelspec"]
    nbformat.write(value, notebook)
    assert "default for 7 steps" in notebooks.execute(notebook, tmp_path / "out", {"steps": 7}).page.read_text()


def test_a_kernel_that_dies_leaves_the_page_up_to_there(notebook, tmp_path):
    value = nbformat.read(notebook, as_version=4)
    value.cells.append(nbformat.v4.new_code_cell("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"))
    nbformat.write(value, notebook)
    with pytest.raises(WorkbenchError, match=r"kernel of trial.ipynb died"):
        notebooks.execute(notebook, tmp_path / "out")
    assert "default for 400 steps" in (tmp_path / "out" / "trial.html").read_text()


def test_a_template_that_does_not_exist_is_answered_with_what_there_is(tmp_path, monkeypatch):
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "bert_scaling.ipynb").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert notebooks.template_path("bert_scaling").name == "bert_scaling.ipynb"
    with pytest.raises(RunNotFound, match="Did you mean 'bert_scaling'"):
        notebooks.template_path("bert_scalin")


def test_parameters_keep_their_types():
    pairs = ["steps=40", "rate=1e-4", "on=True", "name=trial=2", "sizes=[1, 2]", "limit=None"]
    values = {"steps": 40, "rate": 1e-4, "on": True, "name": "trial=2", "sizes": [1, 2], "limit": None}
    assert cli.parameters_from(pairs) == values
    with pytest.raises(UnknownParameter, match="-p steps=VALUE"):
        cli.parameters_from(["steps"])
