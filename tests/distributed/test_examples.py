"""Every verb of `wb.` has an example in its docstring, which is executed here."""

from __future__ import annotations

import doctest
import inspect
from pathlib import Path

import nbformat
import pytest

import workbench as wb
from workbench import notebooks

TRAINING = """
import workbench as wb
model = wb.models.bert(hidden_size=32, num_layers=2, num_heads=2, vocab_size=512, max_positions=32)
data = wb.data.corpus("demo", vocab_size=512)
run = wb.launch(wb.Experiment(model=model, data=data, steps=5, global_batch=8, seq_len=32, name="shared"))
run.wait()
"""


def verbs() -> dict[str, object]:
    return {name: getattr(wb, name) for name in wb.__all__ if inspect.isfunction(getattr(wb, name))}


def test_every_verb_has_an_example() -> None:
    assert [name for name, verb in verbs().items() if ">>> " not in (verb.__doc__ or "")] == []


def test_the_examples_of_all_verbs_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path / "runs"))
    model = wb.models.bert(hidden_size=32, num_layers=2, num_heads=2, vocab_size=512, max_positions=32)
    data = wb.data.corpus("demo", vocab_size=512)
    experiment = wb.Experiment(model=model, data=data, steps=40, global_batch=8, seq_len=32)
    runs = [wb.launch(experiment.replace(seed=seed, name=f"seed-{seed}")) for seed in (0, 1)]
    for run in runs:
        run.wait()
    cells = [nbformat.v4.new_markdown_cell("Curves.")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "curves.ipynb")
    cells = [nbformat.v4.new_code_cell(TRAINING)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "training.ipynb")
    notebooks.share(notebooks.execute(tmp_path / "training.ipynb", tmp_path / "executed").notebook, tmp_path / "shared")
    names = {"wb": wb, "experiment": experiment, "runs": runs, "run": runs[0]}
    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner()
    examples = [each for name, verb in verbs().items() for each in finder.find(verb, name, globs=dict(names))]
    assert [each.name for each in examples if runner.run(each).failed] == []
    assert runner.tries > 20
