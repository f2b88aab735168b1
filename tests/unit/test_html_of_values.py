"""What notebooks show of a value, and where an error points to another call."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from figure_values import plan
from typer.testing import CliRunner

import workbench as wb
from workbench.base.display import Html, html_table, text_table
from workbench.base.errors import UnknownParameter
from workbench.cli import app
from workbench.record.history import History
from workbench.runs.status import Status

NAME = "<script>alert(1)</script>"


def small(**values: object) -> wb.Experiment:
    model = wb.models.bert(hidden_size=32, num_layers=2, num_heads=2, vocab_size=512, max_positions=64)
    return wb.Experiment(model=model, data=wb.data.corpus("demo", vocab_size=512), steps=5, seq_len=32, **values)


def shown(value: object) -> str:
    page = value._repr_html_()  # type: ignore[attr-defined]
    assert "<script" not in page
    assert page.count("<tr>") == page.count("</tr>")
    return str(page)


def test_values_show_their_facts_as_html_without_a_script() -> None:
    experiment = shown(small(name=NAME, optimizer=wb.Optimizer("lamb", weight_decay=0.5)))
    assert "&lt;script&gt;" in experiment
    assert all(f">{word}</td>" in experiment for word in ("lamb", "weight_decay", "0.5", "seq_len", "32"))
    assert "beta" not in experiment, "what was left as it is by default"
    assert "16 × H200 in 2 nodes" in shown(wb.Cluster.of("h200", gpus=16))
    assert "&lt;script&gt;" in shown(replace(plan(2, 2), model=NAME))
    assert "&lt;script&gt;" in shown(Status("failed", NAME))
    losses = np.array([4.0, np.nan, 2.5])
    history = shown(History({"step": np.array([1.0, 2.0, 3.0]), "loss": losses, "mfu": np.full(3, np.nan)}))
    assert "<td" in history.partition("loss</td>")[2]
    assert "mfu" not in history, "a column that nothing was measured of"


def test_a_value_of_the_experiment_given_to_launch_points_to_replace() -> None:
    with pytest.raises(UnknownParameter, match=r"'steps'\. It is a value of the experiment: give experiment\.replace"):
        wb.launch(small(), steps=5)
    with pytest.raises(UnknownParameter, match="Did you mean 'directory'"):
        wb.launch(small(), directori="x")
    assert small().replace(steps=7).steps == 7


def test_the_command_line_prints_its_version() -> None:
    answer = CliRunner().invoke(app, ["--version"])
    assert (answer.exit_code, answer.output) == (0, f"workbench {wb.__version__}\n")


def test_columns_line_up_and_no_line_ends_in_spaces() -> None:
    assert text_table([("run", "state"), ("a longer name", "")]) == "run            state\na longer name"


def test_every_cell_is_escaped_unless_it_is_html() -> None:
    page = html_table(("a & b", "c"), [("<b>x</b>", Html("<b>y</b>"))])
    assert "&lt;b&gt;x&lt;/b&gt;" in page
    assert "<b>y</b>" in page
    assert "a &amp; b" in page


def test_a_row_may_have_a_look_and_a_table_attributes() -> None:
    page = html_table((), [("a", "1"), ("b", "2")], row_styles=["", "opacity:0.6"], attributes='class="runs"')
    assert page.startswith('<table class="runs"><tbody>')
    assert page.count("<tr style='opacity:0.6'>") == page.count("<tr>") == 1
