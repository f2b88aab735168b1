"""The parameters of a notebook, the templates, and the execution of a notebook with other values of its parameters.

The execution records in the notebook what a second one needs.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import hashlib
import io
import json
import logging
import math
import os
import re
import shutil
import sys
import tempfile
import threading
import time
import tokenize
import typing
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.base import arguments
from workbench.base.code_identity import steady_digests
from workbench.base.display import waiting
from workbench.base.errors import InvalidArgument, RunNotFound, UnknownParameter, WorkbenchError, in_words, suggestion
from workbench.base.secrets import masked_json
from workbench.figures.figure import written
from workbench.notebooks.countdown import Countdown, watching_engine
from workbench.notebooks.pages import finished_notebook, notebook_text, notebook_to_html, read_notebook
from workbench.record.rundir import LAUNCHES, RunDir
from workbench.runs.environment import environment
from workbench.runs.registry import ProgressReporter, list_runs, text_curve
from workbench.runs.run import Run
from workbench.runs.tracking.delivery import start_recorder

# The parameters of a notebook: what its cell tagged `parameters` sets, and that cell with other values.

LONGEST_TEXT = 10_000
"""Largest number of characters of a value that a form may send."""

LONGEST_SEQUENCE = 2**20
"""Largest number of tokens of a sequence that a form takes."""

TYPES: Mapping[str, Any] = {
    "bool": bool,
    "int": int,
    "float": float,
    "str": str,
    "list": list,
    "tuple": Sequence,
    "Sequence": Sequence,
    "dict": dict,
    "Mapping": dict,
    "None": None,
}
"""Types that an annotation of a parameter may name; another one takes every value."""
YES_NO = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
"""Words for True and False, in any case."""


@dataclass(frozen=True)
class Parameter:
    """One parameter: its name, its default as Python writes it, its comment, and the choices that this quotes."""

    name: str
    default: str
    help: str
    choices: tuple[str, ...]
    annotation: str = ""
    """The type as the cell writes it, `steps: int | None = None`; empty where the default says it."""

    @property
    def type(self) -> Any:
        """The type of its values: that of the annotation, or else of the default; `Any` if neither says it."""
        if self.annotation:
            return _annotated(ast.parse(self.annotation, mode="eval").body)
        try:
            return _type_of(ast.literal_eval(self.default))
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return Any  # an expression


def parameters(notebook: Path) -> dict[str, Parameter]:
    """Return the parameters of a notebook by name, in the order of its cell.

    Raises `WorkbenchError` for a cell that is no Python.
    """
    tagged = [cell for cell in read_notebook(notebook).cells if "parameters" in cell.metadata.get("tags", ())]
    source = "".join(re.sub(r"^[%!].*", "", line) for line in tagged[0].source.splitlines(True)) if tagged else ""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError) as error:
        raise WorkbenchError(f"The cell of {notebook.name} tagged parameters is no Python: {error}. Mend it.") from None
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    found = {}
    for node in body:
        for name, value, annotation in _assigned(node):
            default, comment = ast.get_source_segment(source, value) or "", comments.get(node.end_lineno or 0, "")
            kind = "" if annotation is None else ast.get_source_segment(source, annotation) or ""
            choices = tuple(re.findall(r'"(\w+)"(?=:)', comment))
            quoted = default.strip("\"'") in choices
            found[name] = Parameter(name, default, comment, choices if quoted else (), kind)
    return found


def _assigned(node: ast.stmt) -> list[tuple[str, ast.expr, ast.expr | None]]:
    """Return the name, value and annotation that a statement gives one variable, if it does only that."""
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
        return [(node.target.id, node.value, node.annotation)]
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        return [(node.targets[0].id, node.value, None)]
    return []


def _annotated(node: ast.expr) -> Any:
    """Return the type that an annotation names."""
    if isinstance(node, ast.Constant):
        return _annotated(ast.parse(node.value, mode="eval").body) if isinstance(node.value, str) else node.value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return typing.Union[_annotated(node.left), _annotated(node.right)]  # noqa: UP007
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None
    if not isinstance(node, ast.Subscript):
        return TYPES.get(str(name), Any)
    outer = ast.unparse(node.value).rpartition(".")[2]
    inner = list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]
    if outer == "Literal":
        return typing.Literal[tuple(ast.literal_eval(one) for one in inner)]
    if outer in ("Union", "Optional"):
        none = [None] if outer == "Optional" else []
        return typing.Union[(*map(_annotated, inner), *none)]
    if outer in ("list", "tuple", "Sequence"):
        return Sequence[_annotated(inner[0])]  # type: ignore[misc]
    return TYPES.get(outer, Any)


def _type_of(value: Any) -> Any:
    """Return the type of a default; that of a list says what it holds, if all of it is of one type."""
    if value is None:
        return Any
    if isinstance(value, list | tuple):
        types = {_type_of(item) for item in value}
        types = {float} if types == {int, float} else types
        return Sequence[types.pop()] if len(types) == 1 else list  # type: ignore[misc]
    return type(value)


def check_values(notebook: Path, values: Mapping[str, Any]) -> None:
    """Raise an error for the first value that a parameter of the notebook cannot have.

    A value must have the type of its default, or that of the annotation. One that is named as a field of an experiment
    is checked as that field, unless it is None or a list, which stands for several values. Raises `UnknownParameter`
    for a name that the cell does not set, and the `InvalidArgument` or `InvalidExperiment` that names the first wrong
    value.
    """
    import workbench as wb

    declared = parameters(notebook) if values else {}
    fields_of_experiment = {field.name for field in fields(wb.Experiment)}
    for name in values:
        if name not in declared:
            names = ", ".join(declared) or "none"
            hint = suggestion(name, declared) if declared else "It has no cell tagged parameters."
            listed = "" if hint.startswith("Known names") or not declared else f" It has: {names}."
            raise UnknownParameter(f"{notebook.name} has no parameter {name!r}. {hint}{listed}")
    for name, value in values.items():
        kind, choices = declared[name].type, declared[name].choices
        if typing.get_origin(kind) is typing.Literal:
            kind, choices = Any, typing.get_args(kind)
        if choices and value not in choices:
            hint = f"Give one of {', '.join(map(str, choices))}."
            raise InvalidArgument(f"{notebook.stem} cannot use {name}={value!r}. {hint}")
        arguments.check(notebook.stem, name, value, kind)
        if not _is_finite(value):
            raise InvalidArgument(f"{name}={value!r} is not finite. Give a finite number.")
        if value is not None and not isinstance(value, list) and name in fields_of_experiment:
            model = wb.models.bert_large(max_positions=LONGEST_SEQUENCE)  # the template's own model may take fewer
            wb.Experiment(model=model, data=wb.data.corpus("demo"), **{name: value})


def values_of(notebook: Path, texts: Mapping[str, str]) -> dict[str, Any]:
    """Return the values that a user wrote for parameters, each of the type of its parameter; see `check_values`."""
    declared = parameters(notebook) if texts else {}
    kinds = {name: parameter.type for name, parameter in declared.items()}
    values = {name: _value(text[:LONGEST_TEXT].strip(), kinds.get(name, Any)) for name, text in texts.items()}
    check_values(notebook, values)
    return values


def _value(text: str, kind: Any) -> Any:
    """Return what a text means for a type: Python's or JSON's literals, `yes` and `no`, and text where it is neither.

    A text that has no meaning for the type is returned as it is read without one, for `check_values` to refuse.
    """
    literal: Any = text
    try:
        literal = ast.literal_eval(text)
        repr(literal)  # ValueError for a number of thousands of digits, which nothing could show
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        literal = text
        with contextlib.suppress(ValueError, RecursionError):
            literal = json.loads(text)
    kinds = typing.get_args(kind) if typing.get_origin(kind) is typing.Union else (kind,)
    if type(None) in kinds and (literal is None or text.lower() == "null"):
        return None
    if bool in kinds and text.lower() in YES_NO and not (int in kinds and text in "01"):
        return YES_NO[text.lower()]
    if str in kinds and not isinstance(literal, str):
        others = [one for one in kinds if one is not str]
        return literal if any(arguments.fits(literal, one) for one in others) else text
    return literal


def _is_finite(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def with_values(source: str, values: Mapping[str, Any]) -> str:
    """Return the source of a parameters cell with other values; its comments stay."""
    lines = source.encode().splitlines(keepends=True)  # ast counts bytes
    for node in reversed(ast.parse(source).body):
        for name, value, _ in _assigned(node):
            if name not in values:
                continue
            first, last = value.lineno - 1, (value.end_lineno or 1) - 1
            written = repr(values[name]).encode()
            lines[first : last + 1] = [lines[first][: value.col_offset] + written + lines[last][value.end_col_offset :]]
    return b"".join(lines).decode()


# The template notebooks, in a checkout and where an installed wheel puts them.

FOLDER = Path("notebook_templates") / "workbench"
"""Folder of the templates inside a Jupyter data folder."""
CHECKOUT = Path(__file__).resolve().parents[2] / "templates"


def template_path(template: str) -> Path:
    """Return `template` as a path if it is one, or the template of that name; raises `RunNotFound` with those known."""
    given = Path(template)
    if given.is_file():
        return given
    installed = templates()
    if given.stem in installed:
        return installed[given.stem]
    none = "No templates are installed here; give the path of a notebook."
    raise RunNotFound(f"There is no notebook {template!r}. {suggestion(given.stem, installed) if installed else none}")


def templates() -> dict[str, Path]:
    """Return the templates by name: those of the current folder win over the checkout's and the installed ones."""
    from jupyter_core.paths import jupyter_path

    installed = [Path(folder) for folder in reversed(jupyter_path(*FOLDER.parts))]
    folders = [*installed, Path(sys.prefix) / "share/jupyter" / FOLDER, CHECKOUT, Path("templates")]
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.ipynb"))}


def new(template: str, path: str | Path | None = None) -> Path:
    """Copy a template to `path` (a file or a folder; the current folder by default) and return the copy's path.

    Raises `RunNotFound` for an unknown template, and `WorkbenchError` if the file exists already.
    """
    source = template_path(template)
    target = Path(path) if path is not None else Path()
    if target.is_dir():
        target /= source.name
    target = target.with_suffix(".ipynb").absolute()
    if target.exists():
        raise WorkbenchError(f"{target} exists already. Give another path: workbench new {source.stem} PATH.")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    return target


# The record of an executed notebook's runs, kept in its metadata, holds enough to run it again and compare the curves.

FORMAT = 1
"""Version of the record's format."""
KEY = "workbench"
"""Name of the record in the notebook's metadata."""
PRIVATE = ("command", "directory", "executable", "host")
"""Facts of an environment that are left out, because they describe only the machine of the author."""
MAX_POINTS = 20_000
"""Largest number of points of a curve that a notebook holds; the curve's digest covers all points."""
Column = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class LossCurve:
    """Loss by step, as exact numbers."""

    step: Column
    loss: Column
    steps: int
    """Number of logged steps of the whole run; more than `len(step)` if points were left out."""
    digest: str
    """SHA-256 over every step and loss."""

    @staticmethod
    def of(run: Run) -> LossCurve:
        """Return the curve of a run."""
        history = run.history()
        step, loss = np.array(history.step), np.array(history.loss)
        digest = hashlib.sha256(step.astype("<f8").tobytes() + loss.astype("<f8").tobytes()).hexdigest()
        every = max(1, -(-len(step) // MAX_POINTS))
        return LossCurve(step[::every], loss[::every], len(step), digest)

    def to_json(self) -> dict[str, Any]:
        """Return the curve as JSON that `from_json` reads without losing a bit."""
        return {"step": _pack(self.step), "loss": _pack(self.loss), "steps": self.steps, "digest": self.digest}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> LossCurve:
        """Return the curve that `to_json` wrote."""
        return LossCurve(_unpack(value["step"]), _unpack(value["loss"]), int(value["steps"]), value["digest"])


def _pack(column: Column) -> str:
    return base64.b64encode(zlib.compress(column.astype("<f8").tobytes(), 9)).decode()


def _unpack(text: str) -> Column:
    """Return a packed column; raises `WorkbenchError` for one that is damaged, or that expands to more than is written.

    A record of a few kilobytes could otherwise expand to gigabytes.
    """
    most = 8 * (MAX_POINTS + 1)
    try:
        decompressor = zlib.decompressobj()
        content = decompressor.decompress(base64.b64decode(text), most)
        if not decompressor.eof or len(content) % 8:
            raise ValueError(f"it is larger than {MAX_POINTS:,} points, or not whole")
        return np.frombuffer(content, "<f8")
    except (TypeError, ValueError, zlib.error) as error:
        raise WorkbenchError(
            f"The curve in the notebook's record is damaged: {error}. Share the notebook again."
        ) from None


@dataclass(frozen=True)
class RecordedRun:
    """One run of the notebook: what it trained, how, and its loss curve."""

    name: str
    experiment: Mapping[str, Any]
    plan: Mapping[str, Any]
    data_fingerprint: str | None
    state: str
    curve: LossCurve
    code: Mapping[str, str] = field(default_factory=dict)
    """Hash of the identity of each user-defined part; empty in older records, and for another Python."""

    @staticmethod
    def of(run: Run) -> RecordedRun:
        """Return the record of a run."""
        plan = {key: value for key, value in run.plan.to_json().items() if key != "candidates"}
        fingerprint = run.environment.get("data_fingerprint")
        code = steady_digests(run.directory.code)
        return RecordedRun(run.name, run.config, plan, fingerprint, run.status.state, LossCurve.of(run), code)

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON."""
        return {**vars(self), "curve": self.curve.to_json()}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> RecordedRun:
        """Return the record that `to_json` wrote."""
        return RecordedRun(**{**value, "curve": LossCurve.from_json(value["curve"])})


@dataclass(frozen=True)
class Record:
    """The time and the environment of a notebook's execution, and its runs in the order of their launch."""

    time: float
    environment: Mapping[str, Any]
    runs: tuple[RecordedRun, ...]

    @staticmethod
    def of(notebook_runs: Sequence[Run]) -> Record:
        """Return the record of a notebook that launched these runs."""
        machine = notebook_runs[0].environment if notebook_runs else environment()
        of_data = ("data_fingerprint", "held_out_fingerprint")
        public = {key: value for key, value in machine.items() if key not in (*PRIVATE, *of_data)}
        return Record(time.time(), public, tuple(map(RecordedRun.of, notebook_runs)))

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON."""
        described = {"format": FORMAT, "time": self.time, "environment": dict(self.environment)}
        return {**described, "runs": [run.to_json() for run in self.runs]}


def recorded_in(notebook: Any, name: str) -> Record:
    """Return the record in a notebook's metadata; raises `WorkbenchError` if there is none or its format is unknown."""
    value = notebook.metadata.get(KEY)
    if not isinstance(value, Mapping) or not value.get("runs"):
        raise WorkbenchError(
            f"{name} holds no record of a run, so there is nothing to compare a second run with. Execute it with "
            "`workbench execute`, or share it with `workbench share` on the machine that has its runs."
        )
    if value.get("format") != FORMAT:
        raise WorkbenchError(
            f"{name} was recorded in format {value.get('format')}, and this Workbench reads format {FORMAT}. Use the "
            "version that wrote it; the notebook's metadata name it."
        )
    try:
        return Record(
            float(value["time"]), dict(value["environment"]), tuple(map(RecordedRun.from_json, value["runs"]))
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, WorkbenchError):
            raise
        raise WorkbenchError(
            f"The record in {name} is damaged ({in_words(error)}). Share the notebook again."
        ) from None


def runs_shown_in(notebook: Any) -> list[Run]:
    """Return the runs whose names appear in the notebook's outputs, oldest first."""
    text = "\n".join(_texts(output) for cell in notebook.cells for output in cell.get("outputs", ()))
    oldest_first = reversed(list(list_runs(archived=True)))
    return [run for run in oldest_first if re.search(rf"(?<![\w-]){re.escape(run.name)}(?![\w-])", text)]


def _texts(value: Any) -> str:
    """Return every text inside a JSON value."""
    if isinstance(value, str):
        return value
    parts: Iterable[Any] = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return "\n".join(_texts(part) for part in parts)


REPORT_EVERY_S = 15.0
"""Seconds between two progress lines of a run."""
POLL_S = 0.5
"""Seconds between two reads of the runs."""
STARTS = 3
"""Starts of a kernel that ends before it is ready, or does not answer: the ports that it was given may be taken before
it opens them."""
NOT_STARTED = ("Kernel died before replying", "Kernel didn't respond")
"""Beginnings of the messages of `jupyter_client` on such a kernel, in which nothing has been executed."""
KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}
"""Kernel of a notebook that names none."""


@dataclass(frozen=True)
class Executed:
    """An executed notebook, the page made of it, and the runs that it launched, in order."""

    notebook: Path
    page: Path
    runs: tuple[Run, ...]


def execute(
    notebook: Path,
    to: Path,
    parameters: Mapping[str, Any] | None = None,
    *,
    kernel: str | None = None,
    report: Callable[[str], None] | None = None,
    variables: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Executed:
    """Execute a notebook into the folder `to`, export it as a page, and record its runs in its metadata.

    A failing cell still leaves notebook and page, up to the failure. Each figure of the notebook has a picture beside
    it, which shows where no script runs.

    Args:
        notebook: the notebook to execute; it is not changed.
        to: folder of the executed notebook and its page.
        parameters: new values for names that the notebook's `parameters` cell sets.
        kernel: name of the kernel; the notebook's own by default.
        report: function that gets a line of progress every few seconds while runs of the notebook train.
        variables: environment variables that are added to the kernel's.
        folder: folder in which the kernel starts.

    Raises `UnknownParameter` before anything runs if the `parameters` cell does not set a name, `InvalidArgument` for a
    value that has not the type of its default, or that of its annotation (`name: str | None = None`), and
    `WorkbenchError` for a kernel that is not installed, a failing cell, and a `to` that holds the notebook itself.
    """
    import nbformat

    check_not_overwritten(notebook, to, "execute")
    executed, page = to.absolute() / notebook.name, to.absolute() / f"{notebook.stem}.html"
    with tempfile.TemporaryDirectory() as scratch:
        source, value = notebook, read_notebook(notebook)
        if not value.metadata.get("kernelspec", {}).get("name"):  # as some editors leave it
            source = Path(scratch) / notebook.name
            value.metadata["kernelspec"] = nbformat.from_dict(KERNEL)
            nbformat.write(value, source)
        check_values(source, parameters or {})
        to.mkdir(parents=True, exist_ok=True)
        launches = Path(scratch) / "launches"
        launches.touch()
        seen = list[Countdown]()

        def look() -> tuple[str, str]:
            return str(seen[-1]) if seen else "starting the kernel", ""

        with (
            _environment({**(variables or {}), LAUNCHES: str(launches)}),
            _progress_reports(launches, lambda: look()[0], report),
            waiting(f"executing {notebook.name}", look),
        ):
            failure = _run_papermill(source, executed, parameters or {}, kernel, folder, seen.append)
            runs, finished = launched_runs(launches), finished_notebook(executed)
            papermill = finished.metadata.get("papermill", {})  # whose paths of this machine become names
            names = ("input_path", "output_path")
            papermill |= {name: Path(papermill[name]).name for name in names if papermill.get(name)}
            finished.metadata[KEY] = nbformat.from_dict(Record.of(runs).to_json())
            notebook_to_html(written(executed, notebook_text(finished).encode()), page)
    # The tracker gets what lies in a run's directory.
    without_secrets = notebook_text(masked_json(finished)).encode() if runs else b""
    for run in runs:
        run.directory.notebook.write_bytes(without_secrets)
        start_recorder(run.directory, "--upload")
    if failure is not None:
        raise WorkbenchError(f"{failure} See {page}.")
    return Executed(executed, page, tuple(runs))


def check_not_overwritten(notebook: Path, to: Path, command: str) -> None:
    """Raise `WorkbenchError` if the folder `to` holds the notebook itself."""
    if (to / notebook.name).resolve() == notebook.resolve():
        raise WorkbenchError(
            f"{notebook} would be overwritten. Give another folder: workbench {command} … --to FOLDER."
        )


def _knows_the_parameter(record: logging.LogRecord) -> bool:
    return "unknown parameter" not in record.getMessage()


def _run_papermill(
    notebook: Path,
    executed: Path,
    parameters: Mapping[str, Any],
    kernel: str | None,
    folder: Path | None,
    watch: Callable[[Countdown], None],
) -> str | None:
    """Execute every cell, of which `watch` gets the countdown; return None, or a sentence that says what failed."""
    import papermill
    from jupyter_client.kernelspec import NoSuchKernel
    from nbclient.exceptions import DeadKernelError
    from papermill.engines import papermill_engines

    # Names are checked already, and papermill does not see those of annotated parameters.
    logging.getLogger("papermill").addFilter(_knows_the_parameter)
    papermill_engines.register(KEY, watching_engine(watch, is_as_timed=not parameters))
    for starts_left in reversed(range(STARTS)):
        try:
            papermill.execute_notebook(
                str(notebook),
                str(executed),
                parameters=dict(parameters),
                kernel_name=kernel,
                engine_name=KEY,
                progress_bar=False,
                cwd=None if folder is None else str(folder),
            )
        except papermill.PapermillExecutionError as error:
            said = f": {error.evalue}" if str(error.evalue).strip() else " without a message"
            return f"{notebook.name} failed in cell {error.exec_count}: {error.ename}{said}"
        except NoSuchKernel as error:
            raise WorkbenchError(
                f"{notebook.name} asks for the kernel {error.name!r}, which is not installed here. Run it with another "
                f"one: --kernel {KERNEL['name']}."
            ) from None
        except DeadKernelError:
            return (
                f"The kernel of {notebook.name} died: it was killed, or ran out of memory. Runs that it launched go on "
                "training."
            )
        except RuntimeError as error:
            if not starts_left or not str(error).startswith(NOT_STARTED):
                raise
        else:
            break
    return None


def launched_runs(file: Path) -> list[Run]:
    """Return the runs in the file that `$WORKBENCH_LAUNCHES` names, in the order of their launch."""
    paths = [Path(line) for line in file.read_text().splitlines() if line]
    return [Run(path) for path in dict.fromkeys(paths) if RunDir(path).experiment.is_file()]


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for a while; the kernel inherits them."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _progress_reports(launches: Path, words: Callable[[], str], report: Callable[[str], None] | None) -> Iterator[None]:
    """Report from another thread which cell runs, in `words`, and how far the runs are that were launched so far."""
    if report is None:
        yield
        return
    done = threading.Event()

    def follow() -> None:
        reporter, due, drawn = ProgressReporter(REPORT_EVERY_S), 0.0, set[Path]()
        while not done.wait(POLL_S):
            runs, is_due = launched_runs(launches), time.monotonic() >= due
            if is_due:
                due = time.monotonic() + REPORT_EVERY_S
                report(f"{time.strftime('%H:%M:%S')}  {words()}")
            for line in reporter.lines(runs):
                report(line)
            training = (run for run in runs if is_due or run.path not in drawn)
            for run in (each for each in training if each.status.state == "running"):
                if curve := text_curve(run.history()):
                    report(f"{'':10}{run.name}  {curve}")
                    drawn.add(run.path)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
