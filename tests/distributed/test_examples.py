"""Every verb of `wb.` has an example in its docstring, which is executed here."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import workbench as wb
from tests.distributed.documents import run_script

SETTING = """
import doctest
import inspect
import os
from pathlib import Path

import nbformat
from jupyter_client.provisioning import local_provisioner

import workbench as wb
from tests.distributed import documents
from workbench import notebooks
from workbench.runs.launching import fork_server

documents.server = lambda: (fork_server.client(), dict(os.environ))
local_provisioner.launch_kernel = documents.fork_kernel
experiment = documents.tiny(steps=40)
runs = [wb.launch(experiment.replace(seed=seed, name=f"seed-{seed}")) for seed in (0, 1)]
for run in runs:
    run.wait()
training = "from tests.distributed.documents import *; wb.launch(tiny(name='shared')).wait()"
for name, cell in {
    "curves": nbformat.v4.new_markdown_cell("Curves."),
    "training": nbformat.v4.new_code_cell(training),
}.items():
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), f"{name}.ipynb")
notebooks.share(notebooks.execute(Path("training.ipynb"), Path("executed")).notebook, Path("shared"))
verbs = {name: verb for name in wb.__all__ if inspect.isfunction(verb := getattr(wb, name))}
for room in (getattr(wb, name) for name in wb.__all__ if inspect.ismodule(getattr(wb, name))):
    of_room = {f"{room.__name__}.{name}": getattr(room, name) for name in room.__all__}
    verbs |= {name: verb for name, verb in of_room.items() if inspect.isfunction(verb)}
finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner()
names = {"wb": wb, "experiment": experiment, "runs": runs, "run": runs[0]}
examples = [each for name, verb in verbs.items() for each in finder.find(verb, name, globs=dict(names))]
assert [each.name for each in examples if runner.run(each).failed] == []
assert runner.tries > 20
"""


def test_every_verb_has_an_example() -> None:
    verbs = {name: verb for name in wb.__all__ if inspect.isfunction(verb := getattr(wb, name))}
    assert [name for name, verb in verbs.items() if ">>> " not in (verb.__doc__ or "")] == []


def test_the_examples_of_all_verbs_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_script(SETTING, tmp_path, monkeypatch)
