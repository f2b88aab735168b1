"""Before a training that would wait for its tokens, it is said how long it would wait and how many cores would do."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from workbench.base.errors import DataError
from workbench.cost.hardware import Cluster
from workbench.data import Prepared
from workbench.planning.plan import Plan
from workbench.planning.runnable import DataSupply, check_runnable, supply_of

SIZES = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 400, "max_positions": 64}


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home"))
    path = tmp_path / "numbers.txt"
    path.write_text("\n\n".join(f"The square of {i} is {i * i}, and its cube is {i**3}." for i in range(3000)))
    return path


def asked(path: Path, **options: Any) -> wb.Experiment:
    data = wb.data.corpus(path, vocab_size=400, **options)
    return wb.Experiment(model=wb.models.opt(**SIZES), data=data, steps=4, global_batch=8, seq_len=16)


def faster(plan: Plan, tokens_per_s: float) -> Plan:
    return dataclasses.replace(plan, prediction=dataclasses.replace(plan.prediction, tokens_per_s=tokens_per_s))


def test_a_supply_says_in_words_whether_it_keeps_up() -> None:
    short, enough = DataSupply(1.2e6, 4e5, cores=2), DataSupply(6e5, 4e5, cores=2)
    assert (short.keeps_up, short.cores_needed, short.waiting_share) == (False, 3, pytest.approx(1 / 3))
    assert "will wait for 33% of the time. 3 cores would keep up" in repr(short)
    assert (enough.keeps_up, enough.cores_needed, enough.waiting_share) == (True, 2, 0.0)
    assert "it keeps up, for which 2 would do" in repr(enough)
    assert "on the 1 core that" in repr(DataSupply(1.0, 2.0, cores=1))


def test_ranks_of_one_node_leave_the_other_cores(monkeypatch: pytest.MonkeyPatch, text: Path) -> None:
    monkeypatch.setattr(sys.modules[supply_of.__module__], "available_cores", lambda: 64)
    plan = wb.plan(asked(text).replace(global_batch=64), Cluster.of("h200", gpus=16), data=16, zero=0, pipeline=1)
    prepared = Prepared("text", 10, tokens_per_core_s=1e5)
    supply = supply_of(prepared, plan)
    assert supply is not None
    assert supply.cores == 56
    assert supply_of(Prepared("text", 10), plan) is None


def test_a_launch_that_would_wait_warns_before_it_starts(text: Path) -> None:
    streamed = asked(text, streaming=True)
    plan = wb.plan(streamed, Cluster.of("h200", gpus=1))
    with pytest.warns(UserWarning, match="cores would keep up; or tokenise the text beforehand"):
        check_runnable(streamed, faster(plan, 1e12), None, progress=False)
    assert wb.planning.data_supply(streamed, faster(plan, 1.0)).keeps_up
    with pytest.raises(DataError, match="streaming=True"):
        wb.planning.data_supply(asked(text), plan)
