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
from workbench.base.code_identity import changed_on_disk, identity
from workbench.base.errors import InvalidExperiment, PlanMismatch, RunFailed
from workbench.cost.hardware import Cluster
from workbench.data.datasets import seeded
from workbench.execution import build
from workbench.planning.planner import plan as make_plan
from workbench.record.rundir import read_record
from workbench.runs.launching import launcher

NET = """
    import functools
    import numpy as np
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


    RATE = 0.0066
    SCALE = 0.5 * helper.BASE


    class Samples(torch.utils.data.Dataset):
        offset = 0.5

        def __len__(self):
            return 16

        def __getitem__(self, index):
            x = torch.randn(4, generator=torch.Generator().manual_seed(index))
            return {"x": x, "y": torch.tensor(index % 3 + self.offset)}


    def warm(step):
        return RATE * SCALE * (step + 1)


    def large(loss, batch, least=0.25):
        return (batch["y"] > least).sum(), batch["y"].numel()


    def stops(view):
        if view.step not in helper.STEPS["all"]:
            view.stop()


    def sgd(groups, *, momentum=0.5):
        return torch.optim.SGD(groups, momentum=momentum)


    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            drawn = np.random.default_rng()
            self.inner = nn.Linear(4, 1)
            self.shift = torch.from_numpy(drawn.normal(size=1)).float()
            self.held = {"gains": [torch.from_numpy(drawn.normal(size=4)).float()]}

        def forward(self, x, y):
            return ((self.inner(x * self.held["gains"][0])[:, 0] + self.shift - y) ** 2).mean()


    TABLE = torch.from_numpy(np.random.default_rng().normal(size=4)).float()


    class Global(Noisy):
        def forward(self, x, y):
            return super().forward(x * TABLE, y)
"""
HELPER = """
    import functools
    import torch
    from torch import nn


    BASE = 2.0
    STEPS = {"all": [1, 2, 3, 4]}


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
    fields = {"model": net.Net, "data": items, "steps": 2, "global_batch": 4, "seq_len": 1, "project": ""}
    return wb.Experiment.of(**{"name": "edited", **fields, **changes})


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
    parts: dict[str, Any] = {"data": module.Samples(), "lr_schedule": module.warm, "optimizer": module.sgd}
    parts |= {"callbacks": [module.stops], "metrics": {"large": module.large}, "eval_data": module.Samples()}
    asked = _asked(module, eval_every=2, learning_rate=1.0, **parts)
    run = wb.launch(asked, plan(asked, pipeline=1), directory=tmp_path / "run", progress=False).wait(PATIENCE_S)
    for old, new, said in (
        ("1.5 * x", "2.5 * x", r"model reads: edited_helper.scaled at \S+edited_helper.py:19 is not what"),
        ("0.0066", "0.0006", r"lr_schedule reads: edited_net.RATE at \S+:30 is 0.0006 in its file, and was 0.0066"),
        (
            "least=0.25",
            "least=0.5",
            r"metrics reads: edited_net.large\(least\) at \S+ is 0.5 in its file, and",
        ),
        ("2, 3, 4]", "2]", r"callbacks reads: edited_helper.STEPS\['all'\] at \S+ is \[1, 2\] in its file"),
        ("momentum=0.5", "momentum=0", r"optimizer reads: edited_net.sgd\(momentum\) at \S+ is 0 in its file, and was"),
        ("offset = 0.5", "offset = 2", r"data reads: edited_net.Samples.offset at \S+ is 2 in its file, and was 0.5"),
    ):
        edit(old, new)
        for goes_on in (lambda: run.resume(steps=4), run.clone, run.evaluate):
            with pytest.raises(PlanMismatch, match=said):
                goes_on()
        edit(new, old)
    assert run.status.state == "finished", "nothing was started"
    edit("0.5 * helper.BASE", "0.75 * helper.BASE")
    with pytest.raises(PlanMismatch, match=r"lr_schedule is another .*edited_net.SCALE of \S+ is 1.5, and was 1.0"):
        run.evaluate()  # whose rank imports the file
    edit("0.75 * helper.BASE", "0.5 * helper.BASE  # as before")
    run.resume(steps=3).wait(PATIENCE_S)
    assert run.history().step.tolist() == [1, 2, 3]
    assert run.history().learning_rate.tolist() == pytest.approx([0.0066, 0.0132, 0.0198])


def test_what_a_constructor_draws_without_a_seed_is_that_of_the_start(net: Any, tmp_path: Path) -> None:
    module, _ = net
    fields = {"optimizer": module.sgd, "lr_schedule": "constant", "learning_rate": 0.1, "warmup_steps": 0}
    more = {"weight_decay": 0.0, "clip_norm": None, "eval_data": module.Samples(), "eval_every": 2}
    asked = _asked(module, model=module.Noisy, data=module.Samples(), **fields, **more)
    run = wb.launch(asked, plan(asked, pipeline=1), directory=tmp_path / "run", progress=False).wait(PATIENCE_S)
    recorded = run.evaluations().eval_loss[-1]
    assert run.evaluate().loss == recorded
    run.resume(steps=4).wait(PATIENCE_S)
    start = build.Start.read(run.directory.start_tensors)
    assert start is not None
    # A plain loop from what was drawn at the start
    with seeded(asked.seed):
        model = module.Noisy()
    model.shift, model.held["gains"][0] = start.values["shift"], start.values["held['gains'][0]"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    samples, losses = run.experiment.replace(data=module.Samples()).data.reads(asked.replace(steps=4)).dataset(), []
    for step in range(4):
        loss = model(**samples.collate([samples[index] for index in range(4 * step, 4 * step + 4)]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert run.history().loss.tolist() == pytest.approx(losses, rel=1e-5)
    # A clone with the same seed has them too
    held = run.directory.start_tensors.read_bytes()
    assert launcher.code_of_clone(run.directory, run.experiment)["start.pt"] == held
    assert "start.pt" not in launcher.code_of_clone(run.directory, run.experiment.replace(seed=1))


def test_what_is_drawn_elsewhere_is_refused_with_the_line_that_reads_it(net: Any, tmp_path: Path) -> None:
    module, _ = net
    asked = _asked(module, model=module.Global, data=module.Samples())
    run = wb.launch(asked, plan(asked, pipeline=1), directory=tmp_path / "run", progress=False).wait(PATIENCE_S)
    with pytest.raises(RunFailed, match=r"a tensor that forward reads at \S+edited_net.py:\d+ .*TABLE"):
        run.resume(steps=4).wait(PATIENCE_S)
    problems = [event["message"] for event in run.events() if event["type"] == "code_problem"]
    assert any("edited_net.TABLE" in each and "Seed what draws it" in each for each in problems)
