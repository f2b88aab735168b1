"""The command line: options become experiments, an error is one sentence, notebooks become pages."""

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import nbformat
import pytest
from typer.testing import CliRunner

import workbench as wb
from tests.logs import append_event
from tests.patience import PATIENCE_S
from workbench import cli, notebooks
from workbench.base.errors import InvalidArgument, InvalidExperiment, RunNotFound, UnknownParameter, WorkbenchError
from workbench.cost.hardware import Cluster
from workbench.planning.plan import Plan
from workbench.record.rundir import RunDir, this_process, write_json, write_record
from workbench.runs.run import Run
from workbench.strategy import Choices

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def workbench(tmp_path, monkeypatch, capsys):
    """Return a function that runs a command in `tmp_path` as the console script does, in this process."""
    monkeypatch.chdir(tmp_path)

    def command(*arguments: str) -> subprocess.CompletedProcess:
        monkeypatch.setattr(sys, "argv", ["workbench", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return subprocess.CompletedProcess(arguments, ended.value.code or 0, *capsys.readouterr())

    return command


@pytest.fixture
def notebook(tmp_path):
    parameters = nbformat.v4.new_code_cell("steps = 400\nname = 'default'")
    parameters.metadata["tags"] = ["parameters"]
    body = nbformat.v4.new_code_cell("assert steps < 1000, 'too many'\nprint(name, 'for', steps, 'steps')")
    path = tmp_path / "trial.ipynb"
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(nbformat.v4.new_notebook(cells=[parameters, body], metadata={"kernelspec": kernel}), path)
    return path


def test_options_make_the_same_experiment_as_python():
    from workbench import Experiment, data, models

    made = cli.experiment_from("bert:hidden_size=1920,num_layers=54,num_heads=30", ["data=demo", "steps=40"])
    model = models.bert(hidden_size=1920, num_layers=54, num_heads=30)
    assert made == Experiment(model=model, data=data.corpus("demo"), steps=40)
    assert cli.model_from("GPT3-1.3B") == models.gpt3("1.3B")
    assert cli.experiment_from("gpt2", ["model=bert-large"]).model == models.bert_large()


def test_settings_win_over_the_file(tmp_path):
    made = cli.experiment_from("bert-large", ["steps=40", "seed=3"])
    file = tmp_path / "experiment.json"
    file.write_text(json.dumps(made.to_json()))
    assert cli.experiment_from(str(file), ["steps=7"]) == made.replace(steps=7)
    with pytest.raises(InvalidExperiment, match=r"nowhere\.json cannot be read"):
        cli.experiment_from("nowhere.json")


def test_a_misspelt_model_size_or_field_is_refused():
    with pytest.raises(InvalidExperiment, match="Did you mean 'bert-large'"):
        cli.model_from("bert-lage")
    with pytest.raises(UnknownParameter, match=r"hiden_size.*Did you mean 'hidden_size'"):
        cli.model_from("bert:hiden_size=8")
    with pytest.raises(UnknownParameter, match="num_layers"):
        cli.model_from("bert-large:num_layers=3")
    with pytest.raises(UnknownParameter, match=r"stepz.*Did you mean 'steps'"):
        cli.experiment_from("bert-large", ["stepz=3"])


def test_a_cluster_is_a_device_with_options_or_devices_of_this_machine():
    assert cli.cluster_from("h200:gpus=16,nodes=4") == Cluster.of("h200", gpus=16, nodes=4)
    assert cli.cluster_from("a100") == Cluster.of("a100")
    assert cli.cluster_from(None) is None
    with pytest.raises(InvalidExperiment, match="for example h200:nodes=2"):
        cli.cluster_from("nodes=2")


def test_every_choice_of_a_plan_can_be_fixed():
    values = {str: "full", bool: "true", int: "2"}
    hints = {name: get_args(hint)[0] for name, hint in get_type_hints(Choices).items()}
    assert set(cli.choices_from([f"{name}={values[hint]}" for name, hint in hints.items()])) == set(hints)
    for command in (cli.plan, cli.run, cli.prepare):
        assert {"fix", "memory_limit_gib"} <= set(inspect.signature(command).parameters)


def test_a_plan_keeps_fixed_choices_and_is_shown_with_table_and_explanation(tmp_path, workbench):
    model = "bert:hidden_size=64,num_layers=4,num_heads=4"
    asked = ("plan", model, "--set", "seq_len=32", "--set", "clip_norm=null", "--cluster", "h200:gpus=4,nodes=2")
    asked += ("--memory-limit-gib", "100")
    choices = ("tensor=2", "schedule=interleaved", "chunks=2", "recompute=full")
    fixed = [word for choice in choices for word in ("--fix", choice)]
    answer = workbench(*asked, *fixed, "--show", "table", "--show", "explanation", "--save", "plan.json")
    assert answer.returncode == 0, answer.stderr
    assert "options weighed" in answer.stdout
    assert "Binding constraint" in answer.stdout
    plan = Plan.load(tmp_path / "plan.json")
    assert (plan.tensor, plan.schedule, plan.recompute, plan.pipeline) == (2, "interleaved", "full", 2)
    assert (plan.cluster.nodes, plan.memory_limit_bytes) == (2, 100 << 30)
    both = workbench("run", "bert-large", "--plan", "plan.json", "--fix", "zero=1")
    assert (both.returncode, "Remove --fix" in both.stderr) == (2, True)


def test_an_error_is_one_sentence_and_exit_code_2(workbench):
    answer = workbench("show", "nothing")
    assert answer.returncode == 2
    assert answer.stdout == ""
    assert answer.stderr.startswith("RunNotFound: There is no run 'nothing'.")
    assert "Traceback" not in answer.stderr
    missing = workbench("run", "bert-large", "--plan", "nowhere.json")
    assert (missing.returncode, missing.stderr.startswith("PlanMismatch: nowhere.json holds no plan")) == (2, True)
    assert workbench("plan", "bert-large", "--stepz", "3").returncode == 2


def test_scripts_read_runs_as_json(tmp_path, workbench):
    run = RunDir(tmp_path / "runs" / "bert-1")
    write_record(run.experiment, {"name": "bert", "steps": 100, "model": {}})
    write_record(run.environment, {})
    write_json(run.launcher, {"supervisor": this_process()})
    append_event(run.events, "status", state="running", message="")
    append_event(run.events, "step", step=4, loss=6.5, tokens_per_s=1e3)
    (row,) = json.loads(workbench("runs", "--json").stdout)
    assert (row["name"], row["state"], row["step"], row["loss"]) == ("bert-1", "running", 4, 6.5)
    assert json.loads(workbench("show", "bert-1", "--json").stdout) == row
    assert "4 of 100" in workbench("runs").stdout


def test_a_shell_filters_and_sorts_runs_as_python_does(tmp_path):
    root = str(tmp_path / "runs")
    for name, loss in (("a", 2.0), ("b", 1.0), ("c", 3.0)):
        run = RunDir(tmp_path / "runs" / name)
        write_record(run.experiment, {"name": name, "steps": 1, "model": {}})
        write_record(run.environment, {})
        append_event(run.events, "step", step=1, loss=loss, tokens_per_s=1e3)
        append_event(run.events, "status", state="finished", message="")
    for name in "ab":
        Run(tmp_path / "runs" / name).tag("tried")
    Run(tmp_path / "runs" / "c").archive()

    def names(*options):
        return [
            row["name"] for row in json.loads(CliRunner().invoke(cli.app, ["runs", root, "--json", *options]).stdout)
        ]

    assert names("--sort=loss", "--tag=tried") == ["b", "a"]
    assert names("--sort=-loss", "--archived", "--state", "finished") == ["c", "a", "b"]
    assert names("--text", "B") == ["b"]
    with pytest.raises(InvalidArgument, match="sort='los' does not exist"):
        CliRunner().invoke(cli.app, ["runs", root, "--sort", "los"], catch_exceptions=False)


def test_new_and_sync_are_commands(tmp_path, workbench):
    made = workbench("new", "bert_scaling", "mine")
    assert made.stdout.strip() == str(tmp_path / "mine.ipynb")
    refused = workbench("new", "bert_scaling", "mine")
    assert (refused.returncode, "exists already" in refused.stderr) == (2, True)
    assert workbench("sync").stdout == "Nothing to upload.\n"
    assert "no record of a run" in workbench("reproduce", "mine.ipynb").stderr


def test_a_run_is_followed_without_a_browser_until_it_has_failed(tmp_path):
    run = RunDir(tmp_path / "runs" / "bert-1")
    write_record(run.experiment, {"name": "bert", "steps": 100, "model": {}})
    write_record(run.environment, {})
    write_json(run.launcher, {"supervisor": this_process()})
    append_event(run.events, "status", state="running", message="")
    append_event(run.events, "step", step=4, loss=6.5, tokens_per_s=1e3, step_ms=500.0)
    command = [sys.executable, "-m", "workbench", "show", "bert-1", "--follow", "--every", "0.2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    following = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
    assert following.stdout.readline().split("  ")[1:] == [
        *("bert-1", "running", "4 of 100 (4%)", "loss 6.5", "1 k tokens/s", "50 s left\n")
    ]
    append_event(run.events, "step", step=5, loss=6.25)
    assert "5 of 100 (5%)  loss 6.25" in following.stdout.readline()
    append_event(run.events, "status", state="failed", message="rank 1 (stage 1): OSError: gone")
    assert "failed  5 of 100" in following.stdout.readline()
    assert "Run bert-1 failed: rank 1 (stage 1)" in following.stdout.read()
    assert following.wait(PATIENCE_S) == 1


PROGRESS = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from IPython.display import DisplayHandle
from tests.patience import eventually
from workbench.base import display

display.SHOWN_AFTER_S = display.EVERY_S = 0.01
shown, update = [], DisplayHandle.update
DisplayHandle.update = lambda *given, **options: (shown.append(given), update(*given, **options))
with display.waiting("counting"):
    eventually(lambda: shown)
print("counted")
"""
STUMBLES = """
import pathlib
from ipykernel import kernelapp
begun = pathlib.Path(__file__).with_name("begun")
if not begun.exists():
    begun.touch()
    raise SystemExit("Address already in use")
kernelapp.launch_new_instance()
"""


def test_a_notebook_is_executed_with_its_parameters_and_exported_though_its_kernels_port_was_taken(
    notebook, workbench, tmp_path, monkeypatch
):
    value = nbformat.read(notebook, as_version=4)
    value.cells.append(nbformat.v4.new_code_cell(PROGRESS))
    nbformat.write(value, notebook)
    (folder := tmp_path / "kernels" / "stumbling").mkdir(parents=True)
    (folder / "kernel.py").write_text(STUMBLES)
    words = [sys.executable, str(folder / "kernel.py"), "-f", "{connection_file}"]
    write_json(folder / "kernel.json", {"argv": words, "display_name": "Stumbling", "language": "python"})
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    words = ["-p", "steps=40", "-p", "name=short", "--to", "out", "--kernel", "stumbling"]
    answer = workbench("execute", str(notebook), *words)
    assert answer.returncode == 0, answer.stderr
    assert (folder / "begun").exists(), "another start was needed"
    executed, page = answer.stdout.split()
    assert (executed, page) == (str(tmp_path / "out" / "trial.ipynb"), str(tmp_path / "out" / "trial.html"))
    assert "short for 40 steps" in Path(page).read_text()
    assert str(tmp_path) not in Path(executed).read_text(), "a notebook that is handed on names no folder of its author"
    last = nbformat.read(executed, as_version=4).cells[-1]
    assert [output.get("text") for output in last.outputs] == ["counted\n"], "lines of progress leave no gaps"


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


def test_values_keep_their_types():
    pairs = ["steps=40", "rate=1e-4", "on=True", "name=trial=2", "sizes=[1, 2]", "limit=None"]
    values = {"steps": 40, "rate": 1e-4, "on": True, "name": "trial=2", "sizes": [1, 2], "limit": None}
    assert cli.values_from(pairs, "-p") == values
    with pytest.raises(UnknownParameter, match=r"-p was given 'steps'\. Write steps=VALUE"):
        cli.values_from(["steps"], "-p")
    for nameless in ("", "=5"):
        with pytest.raises(UnknownParameter, match=rf"--set was given '{nameless}'\. Write NAME=VALUE, such as"):
            cli.values_from([nameless], "--set")


def test_a_static_page_of_a_plan_has_its_words_as_text_and_no_script(tmp_path: Path) -> None:
    recorded = Path(__file__).parents[2] / "notebooks" / "recorded" / "bert-scaled-20261125-015026"
    page = cli.plan_page(wb.load_run(recorded), tmp_path / "plan.html", static=True).read_text()
    assert "<script" not in page
    assert re.search(r"<text[^>]*>[^<]*stage 0", page)


def test_a_command_on_notebooks_compiles_no_grammars_of_addresses():
    code = (
        "import sys; from workbench.cli import _without_grammars\n"
        "with _without_grammars():\n    import nbformat\n"
        "nbformat.validate(nbformat.v4.new_notebook())\n"
        "print('lark' in sys.modules, 'rfc3987_syntax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False False\n"


def test_a_word_of_another_tool_is_answered_with_the_command_that_is_meant():
    for word, meant in cli.OTHER_WORDS.items():
        answer = CliRunner().invoke(cli.app, [word])
        assert answer.exit_code == 2
        assert f"No such command '{word}'. Did you mean '{meant}'?" in answer.output
        assert CliRunner().invoke(cli.app, [meant, "--help"]).exit_code == 0, "it exists"
    assert "Did you mean 'bisect'" in CliRunner().invoke(cli.app, ["bisekt"]).output
