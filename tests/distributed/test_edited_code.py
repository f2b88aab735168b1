"""The code that runs is the code that was planned and started, or the run is refused with the function and its line."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from tests.distributed.harness import CPU, LINK
from tests.distributed.real_worker import Ranks, directory, plan
from tests.patience import PATIENCE_S
from workbench.code_identity import changed_on_disk, identity
from workbench.cost.hardware import Cluster
from workbench.errors import InvalidExperiment, PlanMismatch
from workbench.planning.planner import plan as make_plan
from workbench.rundir import read_record
from workbench.runs.launching import launcher

NET = """
    import functools
    import torch
    from torch import nn

    import edited_helper as helper
    from edited_helper import Middle


    class Net(nn.Module):
        # a comment
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Middle(4) for _ in range(2))

        def forward(self, x, y):
            \"\"\"Return the loss.\"\"\"
            for layer in self.layers:
                x = layer(x)
            return self.compared(helper.scaled(x)[:, 0], y)

        def compared(self, x, y):
            return ((x - y) ** 2).mean()

        def generate(self, x):
            return x + 1
"""
HELPER = """
    import functools
    import torch
    from torch import nn


    def logged(function):
        @functools.wraps(function)
        def inner(*args):
            return function(*args)

        return inner


    @logged
    def scaled(x):
        return 1.5 * x


    class Middle(nn.Linear):
        def __init__(self, width):
            super().__init__(width, width)

        @torch.no_grad()
        def frozen(self, x):
            return x in {"a", "b", "c"}

        def forward(self, x):
            return torch.tanh(super().forward(x))
"""
Edit = Callable[[str, str], None]


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[types.ModuleType, Edit]]:
    """Return a module of a model, and a function that edits the files of that module and of the one that it imports."""
    (tmp_path / "code").mkdir()
    files = {name: tmp_path / "code" / f"edited_{name}.py" for name in ("net", "helper")}
    for name, text in (("net", NET), ("helper", HELPER)):
        files[name].write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    importlib.invalidate_caches()

    def edit(old: str, new: str) -> None:
        for file in files.values():
            later = file.stat().st_mtime + 2  # compiled files are known by size and second of their source
            file.write_text(file.read_text().replace(old, new))
            os.utime(file, (later, later))

    yield importlib.import_module("edited_net"), edit
    for name in files:
        sys.modules.pop(f"edited_{name}", None)


def _asked(net: Any, **changes: Any) -> wb.Experiment:
    generator = torch.Generator().manual_seed(0)
    items = [{"x": torch.randn(4, generator=generator), "y": torch.tensor(float(i % 3))} for i in range(16)]
    fields = {"steps": 2, "global_batch": 4, "seq_len": 1, "project": "", "name": "edited"}
    return wb.Experiment.of(model=net.Net, data=items, **{**fields, **changes})


def test_functions_are_followed_through_modules_classes_decorators_and_bound_arguments(net: Any) -> None:
    module, _ = net
    found = identity(functools.partial(lambda build: build(), module.Net))
    names = {name.partition("edited_")[2] for name, each in found.items() if "edited_" in name and each.text is None}
    assert names == {
        *("net.Net.__init__", "net.Net.forward", "net.Net.compared"),
        *("helper.scaled", "helper.scaled'", "helper.Middle.__init__", "helper.Middle.forward"),  # ' is the decorator's
    }
    assert changed_on_disk(found) == []


def test_an_edit_counts_if_it_changes_what_is_computed(net: Any) -> None:
    module, edit = net
    asked = _asked(module)
    chosen = plan(asked, pipeline=1)
    for old, new, changed in (
        ("# a comment", "# another\n    # comment", ""),
        ('"""Return the loss."""', '"""Return what is minimised."""', ""),
        ("return x + 1", "return x + 2", ""),  # nothing that trains calls it
        ("1.5 * x", "2.5 * x", "edited_helper.scaled at"),
        ("torch.tanh(", "torch.relu(", "edited_helper.Middle.forward at"),
        ("(x - y) ** 2", "(x - y) ** 4", "edited_net.Net.compared at"),
        ("for _ in range(2)", "for _ in range(3)", "edited_net.Net.__init__ at"),
        ("def scaled(x):", "def scaled(x) -> (:", "edited_helper.scaled at"),
    ):
        edit(old, new)
        found = changed_on_disk(identity(module.Net))
        assert [changed in each for each in found][:1] == ([True] if changed else []), new
        if changed:
            with pytest.raises(InvalidExperiment, match=r"Restart the kernel, or importlib\.reload") as refused:
                wb.launch(asked, chosen)
            assert changed in str(refused.value)
        edit(new, old)


def test_the_source_of_equal_items_is_looked_for_and_written_once(net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module, _ = net
    sought = list[Any]()
    monkeypatch.setattr(launcher, "source_of", sought.append)
    assert launcher.user_code(_asked(module))["data.py"].count(b"# x\n") == 1
    assert sought.count(torch.Tensor) == 1, "the list has 16 items of two tensors, and each search takes long"


def test_a_method_that_was_replaced_in_this_process_is_refused_until_it_is_planned_and_can_travel(net: Any) -> None:
    module, _ = net
    asked = _asked(module)
    chosen = make_plan(asked, Cluster(CPU, 1, 1, LINK, LINK))
    cell: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("def absolute(self, x, y):\n    return (x - y).abs().mean()\n", "/a/cell.py", "exec"), cell)
    module.Net.compared = cell["absolute"]
    with pytest.raises(PlanMismatch, match=r"edited_net.Net.compared at /a/cell.py:1 has other code now"):
        wb.launch(asked, chosen)
    with pytest.raises(InvalidExperiment, match=r"edited_net.Net.compared at /a/cell.py:1 is not what"):
        wb.launch(asked, plan(asked, pipeline=1))


def test_ranks_refuse_a_file_that_was_edited_after_the_launch(net: Any, tmp_path: Path) -> None:
    module, edit = net
    asked = _asked(module)
    run = directory(tmp_path / "run", asked, plan(asked, pipeline=1))
    edit("1.5 * x", "2.5 * x")
    with pytest.raises(AssertionError):
        Ranks(run, 1).wait()
    assert "edited_helper.scaled at" in read_record(run.error(0))["message"]


def test_a_run_goes_on_with_the_code_that_was_started_or_not_at_all(net: Any, tmp_path: Path) -> None:
    module, edit = net
    asked = _asked(module, eval_data=[{"x": torch.ones(4), "y": torch.tensor(1.0)}] * 4, eval_every=2)
    run = wb.launch(asked, plan(asked, pipeline=1), directory=tmp_path / "run", progress=False).wait(PATIENCE_S)
    edit("1.5 * x", "2.5 * x")
    for goes_on in (lambda: run.resume(steps=4), run.clone, run.evaluate):
        with pytest.raises(PlanMismatch, match=r"edited_helper.scaled at \S+edited_helper.py:15 is not what"):
            goes_on()
    assert run.status.state == "finished"
    edit("2.5 * x", "1.5 * x  # as before")
    run.resume(steps=3).wait(PATIENCE_S)
    assert run.history().step.tolist() == [1, 2, 3]
