"""The parameters of a notebook: values have the type of their default, however they are written."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import nbformat
import pytest

from workbench import notebooks
from workbench.base.errors import InvalidArgument, InvalidExperiment, UnknownParameter, WorkbenchError
from workbench.notebooks import executing
from workbench.notebooks.executing import parameters, templates, values_of, with_values

SOURCE = '''%matplotlib inline
from typing import Literal
flag = False
steps = 40  # of the training
lr = 1e-3
name = "trial"
rates = [1e-3, 2]
seeds = (0, 1)
x: str | None = None  # anything
width: float = 16
mode: Literal["fast", "slow"] = "fast"
sizes: list[int] | None = None
size = 2**20
anything = None
text = """two
lines"""  # of text
'''


@pytest.fixture
def notebook(tmp_path: Path) -> Path:
    cell = nbformat.v4.new_code_cell(SOURCE, metadata={"tags": ["parameters"]})
    after = nbformat.v4.new_code_cell("print(f'flag={flag!r} x={x!r} lr={lr!r} name={name!r} width={width!r}')")
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=[cell, after], metadata=kernel), tmp_path / "trial.ipynb")
    return tmp_path / "trial.ipynb"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        *(("flag", word, False) for word in ("no", "No", "off", "false", "False", "0")),
        *(("flag", word, True) for word in ("yes", "on", "true", "True", "1")),
        ("steps", "1_000", 1000),
        ("lr", "3", 3),
        ("lr", "3e-4", 3e-4),
        ("name", "5", "5"),
        ("name", "no", "no"),
        ("name", "'a b'", "a b"),
        ("rates", "[1, 0.5]", [1, 0.5]),
        ("seeds", "[3]", [3]),
        ("x", "no", "no"),
        ("x", "5", "5"),
        ("x", "None", None),
        ("width", "2.5", 2.5),
        ("mode", "slow", "slow"),
        ("sizes", "[4]", [4]),
        ("sizes", "null", None),
        ("size", "7", 7),
        ("anything", '{"a": true}', {"a": True}),
        ("text", "one", "one"),
    ],
)
def test_a_written_value_has_the_type_of_its_parameter(notebook: Path, name: str, text: str, value: Any) -> None:
    found = values_of(notebook, {name: text})[name]
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("flag", "maybe", "trial cannot use flag='maybe'. Give True or False."),
        ("flag", "2", "trial cannot use flag=2. Give True or False."),
        ("steps", "2.5", "trial cannot use steps=2.5. Give a whole number."),
        ("steps", "yes", "trial cannot use steps='yes'. Give a whole number."),
        ("steps", "0", "Experiment.steps=0 must be 1 or more."),
        ("lr", "abc", "trial cannot use lr='abc'. Give a number."),
        ("lr", "True", "trial cannot use lr=True. Give a number."),
        ("lr", "nan", "trial cannot use lr='nan'. Give a number."),
        ("rates", "[1e-3, 'a']", "trial cannot use rates[1]='a'. Give a number."),
        ("rates", "[1e999]", "rates=[inf] is not finite."),
        ("rates", "3", "trial cannot use rates=3. Give a list of these."),
        ("mode", "quick", "trial cannot use mode='quick'. Give one of fast, slow."),
        ("sizes", "['a']", "trial cannot use sizes=['a']."),
        ("name_", "a", "trial.ipynb has no parameter 'name_'. Did you mean 'name'?"),
    ],
)
def test_a_value_of_another_type_is_refused(notebook: Path, name: str, text: str, words: str) -> None:
    with pytest.raises((InvalidArgument, InvalidExperiment, UnknownParameter)) as raised:
        values_of(notebook, {name: text})
    assert str(raised.value).startswith(words)


def test_values_of_python_are_checked_before_anything_runs(
    notebook: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for values, words in (({"flag": "no"}, "flag='no'"), ({"steps": 2.5}, "steps=2.5"), ({"lr": "1e-3"}, "lr='1e-3'")):
        with pytest.raises(InvalidArgument, match=words):
            notebooks.execute(notebook, tmp_path / "out", values)
    assert not (tmp_path / "out").exists()
    values = {"flag": True, "x": "Kyoto", "lr": 2, "width": 0.5}
    page = notebooks.execute(notebook, tmp_path / "out", values).notebook
    assert "unknown parameter" not in caplog.text
    [output] = nbformat.read(page, as_version=4).cells[-1].outputs
    assert output.text == "flag=True x='Kyoto' lr=2 name='trial' width=0.5\n"


def test_a_cell_is_read_as_python_reads_it(notebook: Path) -> None:
    found = parameters(notebook)
    assert list(found) == [line.split(" ")[0].rstrip(":") for line in SOURCE.splitlines()[2:] if "=" in line]
    assert (found["x"].help, found["text"].help, found["steps"].default) == ("anything", "of text", "40")
    given = {"x": "a", "text": "b", "flag": True}
    names: dict[str, Any] = {}
    written = with_values(SOURCE.replace("%matplotlib inline", ""), given)
    exec(written, names)
    assert {name: names[name] for name in given} == given
    assert "# anything" in written
    value = nbformat.read(notebook, as_version=4)
    value.cells[0].source = "steps = = 4"
    nbformat.write(value, notebook)
    with pytest.raises(WorkbenchError, match=r"trial\.ipynb tagged parameters is no Python: invalid syntax"):
        notebooks.execute(notebook, notebook.parent / "out", {"steps": 4})


@pytest.mark.parametrize("template", sorted(templates()))
def test_the_defaults_of_a_template_have_their_own_type(template: str) -> None:
    path = notebooks.template_path(template)
    defaults = {name: each.default for name, each in parameters(path).items()}
    assert len(values_of(path, defaults)) == len(defaults) > 4


@pytest.mark.parametrize(
    ("sentence", "again"),
    [("Kernel didn't respond in 60 seconds", True), ("Kernel died before replying to kernel_info", True), ("x", False)],
)
def test_a_kernel_that_does_not_come_up_is_started_again(
    sentence: str, again: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import papermill

    failures, starts = executing.STARTS - 1, list[int]()

    def started(*_: Any, **__: Any) -> None:
        starts.append(1)
        if len(starts) <= failures:
            raise RuntimeError(sentence)

    monkeypatch.setattr(papermill, "execute_notebook", started)
    run = functools.partial(executing._run_papermill, tmp_path / "a.ipynb", tmp_path / "b.ipynb", {}, None, None, print)
    if again:
        assert run() is None
        failures, starts = executing.STARTS, []
    with pytest.raises(RuntimeError, match=sentence):
        run()
    assert len(starts) == (executing.STARTS if again else 1)
