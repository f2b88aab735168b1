"""`workbench sweep`: the YAML file, what it starts, and the lines that it prints."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_figures_live_sweep import begin, finish, sweep  # noqa: F401  # a fixture

import workbench as wb
from workbench import cli
from workbench.base.errors import InvalidExperiment, UnknownParameter, WorkbenchError
from workbench.sweeps.sweep import Sweep, follow, read_sweep_file

FILE = """
experiment: bert:hidden_size=64,num_layers=2,num_heads=4
set:
  data: demo
  steps: 40
  evaluation: {every: 10, samples: 64}
axes:
  learning_rate: [1e-4, 3e-4]
  model: ["bert:hidden_size=64,num_layers=2,num_heads=4", "gpt2"]
seeds: 2
stop: {above: 6.5, after: 20}
directory: here
"""


def test_a_file_starts_the_sweep_that_it_describes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    def start(*args: Any, **named: Any) -> SimpleNamespace:
        started.append((*args, named))
        return SimpleNamespace(path=tmp_path, why="")

    monkeypatch.setattr(wb, "sweep", start)
    file = tmp_path / "sweep.yaml"
    file.write_text(FILE)
    cli.sweep(file, follow=False)
    [(asked, named)] = started
    model = wb.models.bert(hidden_size=64, num_layers=2, num_heads=4)
    assert asked == wb.Experiment(
        model=model, data=wb.data.corpus("demo"), steps=40, evaluation=wb.Evaluation(every=10, samples=64)
    )
    rule = wb.sweeps.diverged(above=6.5, after=20)
    axes = {"learning_rate": [1e-4, 3e-4], "model": [model, wb.models.gpt2()]}
    assert named == {"seeds": 2, "stop": rule, "directory": "here", **axes}


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("experiment: gpt2\naxes: {seeds: [1]}", UnknownParameter, "no parameter 'seeds' to sweep"),
        ("experiment: gpt2\naxes: {steps: [soon]}", InvalidExperiment, "steps='soon'"),
        ("experiment: gpt2\naxes: {model: [gpt9]}", InvalidExperiment, "no model 'gpt9'"),
        ("experiment: gpt9\naxes: {steps: [1]}", InvalidExperiment, "no model 'gpt9'"),
        ("experiment: gpt2\nset: {step: 3}\naxes: {steps: [1]}", UnknownParameter, "Did you mean 'steps'?"),
        ("experiment: gpt2\nset: {evaluation: {ever: 1}}\naxes: {steps: [1]}", UnknownParameter, "'every'"),
        ("experiment: gpt2\naxes: {steps: [1]}\nseed: 3", UnknownParameter, "Did you mean 'seeds'?"),
        ("experiment: gpt2\naxes: {steps: [1], steps: [2]}", InvalidExperiment, "'steps' stands twice in line 2"),
        ("experiment: gpt2\naxes: {steps: [1]}\nstop: {abov: 3}", InvalidExperiment, "stop: median"),
        ("experiment: gpt2\naxes: [steps]", InvalidExperiment, "one field of the experiment in each line"),
        ("experiment: 3\naxes: {steps: [1]}", InvalidExperiment, "Write a model"),
        ("axes: {steps: [1]}", InvalidExperiment, "describes no sweep"),
        ("experiment: [gpt2", InvalidExperiment, "is not YAML"),
    ],
)
def test_a_wrong_file_is_refused_in_a_sentence(tmp_path: Path, text: str, error: type, words: str) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(text)
    with pytest.raises(error) as refused:
        cli.sweep(file)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_that_does_not_exist_and_two_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidExperiment, match="No such file"):
        read_sweep_file(tmp_path / "none.yaml")
    with pytest.raises(WorkbenchError, match="Give either"):
        cli.sweep(tmp_path / "sweep.yaml", tmp_path)
    with pytest.raises(WorkbenchError, match="Give either"):
        cli.sweep(None, None)


def test_lines_tell_the_runs_that_end_and_the_best_so_far(sweep: Sweep) -> None:  # noqa: F811
    lines = follow(sweep, every_s=0)
    assert "learning_rate=0.001-seed=0  running  10 of 100" in next(lines)
    assert "learning_rate=0.0001-seed=0  running  10 of 100" in next(lines)
    finish(sweep, 1, 3.5)
    sweep.directory.supervisor.unlink()
    rest = list(lines)
    assert any("finished" in line for line in rest)
    told = "1 of 4 runs have ended, not at work; resume() goes on; best so far 3.5 with learning_rate 0.0001"
    assert any(line.endswith(told) for line in rest)
