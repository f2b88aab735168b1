"""The endpoints below `workbench/`, and the index of runs behind the sidebar.

Each verb asks who calls; a test fails on one that does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import nbformat
import psutil
import tornado.web
from jupyter_core.utils import ensure_async
from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler

from workbench.base.errors import RunNotFound, WorkbenchError, suggestion
from workbench.base.machine import core_numbers
from workbench.base.units import count, gib, many, time_left
from workbench.lab import run_groups
from workbench.lab.prepared_kernel import PreparedKernel
from workbench.notebooks.executing import parameters, templates, values_of, with_values
from workbench.record.rundir import FINAL_STATES, RunDir, known_runs_roots, parsed
from workbench.record.step_table import StepTable
from workbench.runs.launching.device_queue import GpuMeter, waiting_and_training
from workbench.runs.loss_basis import read_loss_basis
from workbench.runs.registry import distinct_names, measurements, row_or_reason
from workbench.runs.run import Run, progress_words, step_text
from workbench.runs.status import RunRow, state_in_words, unreadable_row
from workbench.sweeps.queue import group_of, groups_of, stop_queue_of
from workbench.widgets.run_reader import state_color

# The rows of JupyterLab's sidebar: a user's own runs, of which each reading looks only at what has changed.

SPARKLINE_POINTS = 60
READING_S = 0.3
"""Seconds after which a reading answers with what it has; the rest comes with the next one."""

MOST_LETTERS = 1000
"""Longest text of an experiment that is a cell of the table."""

Signature = tuple[tuple[int, int], ...]


@dataclass
class _Entry:
    """One run as it was last read."""

    run: Run
    version: int
    signature: Signature = ()
    """Size and time of change of the files that a row is made of."""
    row: dict[str, Any] = field(default_factory=dict)


class RunIndex:
    """Rows of all runs below some folders; one index serves every page of a server.

    `folder` is the user's, in relation to which a page names a run's place.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or Path.cwd()
        self._entries: dict[Path, _Entry] = {}
        self._gone: dict[str, int] = {}
        self._version = 0
        self._lock = threading.Lock()
        self._meter: GpuMeter | None = None
        with contextlib.suppress(Exception):  # no driver, or one of another version
            import pynvml

            pynvml.nvmlInit()
            if num_gpus := pynvml.nvmlDeviceGetCount():
                self._meter = GpuMeter([str(index) for index in range(num_gpus)])
        self._cpu_times, self._cpu_share = _cpu_times(), 0.0

    def read(self, roots: Iterable[Path], since: int = 0) -> dict[str, Any]:
        """Return the rows that changed after version `since`, the paths that are gone, the queue and the devices.

        `unread` is the number of runs whose row has a name only, because there was no time to read more.
        """
        with self._lock:
            unread = self._update(user_runs(roots))
            times = _cpu_times()  # psutil.cpu_percent() begins anew in each thread of the server
            passed, idle = (now - before for now, before in zip(times, self._cpu_times, strict=True))
            if passed > 1.0:
                self._cpu_times, self._cpu_share = times, max(0.0, 1 - idle / passed)
            name = f"CPU, {many(len(core_numbers()), 'core')}"
            devices = [{"name": name, "share": self._cpu_share, "used_bytes": None}]
            if self._meter is not None:
                sample = self._meter.sample()
                columns = zip(sample.names, sample.shares, sample.used_bytes, strict=True)
                devices += [{"name": name, "share": share, "used_bytes": used} for name, share, used in columns]
            try:
                queue = [row for row in waiting_and_training() if row["waits_for"] or row["devices"] is None]
            except (OSError, WorkbenchError):  # no run was ever launched here, or the folder cannot be written
                queue = []
            return {
                "version": self._version,
                "rows": [entry.row for entry in self._entries.values() if entry.version > since],
                "gone": [path for path, version in self._gone.items() if version > since],
                "unread": unread,
                "queue": queue,
                "devices": devices,
            }

    def _update(self, found: Sequence[Path]) -> int:
        for path in self._entries.keys() - set(found):
            del self._entries[path]
            self._version += 1
            self._gone[str(path)] = self._version
        waiting = list[tuple[_Entry, Signature]]()
        for path in found:
            directory, stats = RunDir(path), list[tuple[int, int]]()
            for file in (directory.experiment, directory.events, directory.steps_tail, directory.labels):
                try:
                    at = file.stat()
                    stats.append((at.st_size, at.st_mtime_ns))
                except OSError:
                    stats.append((0, 0))
            signature, entry = tuple(stats), self._entries.get(path)
            # Another experiment: a run of the same name has taken the place, and what was read is of the one before.
            if entry is None or (entry.signature and entry.signature[0] != signature[0]):
                self._version += 1
                self._gone.pop(str(path), None)
                entry = self._entries[path] = _Entry(Run(path), self._version)
                inside = path.is_relative_to(self._folder)
                place = path.relative_to(self._folder) if inside else Path("…", *path.parts[-2:])
                made = {"path": str(path), "name": path.name, "created": signature[0][1] / 1e9}
                entry.row = {**made, "place": str(place)}
            # Nothing but a change of its files can change the row of a run that has ended.
            if signature != entry.signature or entry.row.get("state") not in FINAL_STATES:
                waiting.append((entry, signature))
        waiting.sort(key=lambda pair: (bool(pair[0].signature), pair[1][0][1]), reverse=True)  # then the newest first
        deadline, read = time.monotonic() + READING_S, 0
        for entry, signature in waiting:
            row = {**entry.row, **_row(entry.run, signature != entry.signature, self._folder)}
            entry.signature = signature
            if row != entry.row:
                self._version += 1
                entry.row, entry.version = row, self._version
            read += 1
            if time.monotonic() > deadline:
                break
        return sum(not entry.signature for entry, _ in waiting[read:])


def _cpu_times() -> tuple[float, float]:
    """Return the seconds that have passed on the cores that runs may use, and those in which they were idle."""
    each = psutil.cpu_times(percpu=True)
    own = [each[core] for core in core_numbers() if core < len(each)] or each
    return sum(map(sum, own)), sum(times.idle for times in own)


def user_runs(roots: Iterable[Path]) -> list[Path]:
    """Return the directories of this user's runs in some folders; neither those of other users nor links."""
    found = []
    for root in roots:
        with contextlib.suppress(OSError), os.scandir(root) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    is_own = entry.is_dir(follow_symlinks=False) and entry.stat().st_uid == os.getuid()
                    if is_own and RunDir(Path(entry.path)).experiment.is_file():
                        found.append(Path(entry.path))
    return found


def user_run(path: str, roots: Iterable[Path]) -> Run:
    """Return the run of this user at a path that a page names; raises `RunNotFound` for every other path."""
    with contextlib.suppress(OSError, ValueError):
        real = Path(path).resolve(strict=True)
        if real.parent in {root.resolve() for root in roots} and real in user_runs([real.parent]):
            return Run(real)
    raise RunNotFound(f"You have no run {path!r:.200} in a folder of runs.")


def _row(run: Run, has_changed: bool, folder: Path) -> dict[str, Any]:
    """Return a run's row; its curve, its settings, its group and its notebook only if it `has_changed`.

    A run whose files cannot be shown has failed, with the reason as its message: it hides no other.
    """
    try:
        shown = _shown(run, row_or_reason(run), has_changed)
        if has_changed:
            group = group_of(run)
            shown |= {"group": group and group._asdict(), "notebook": run_groups.notebook_of(run.directory, folder)}
        json.dumps(shown, allow_nan=False)
    except Exception as error:  # the files of a run may hold anything
        shown = _shown(run, unreadable_row(run.directory, error), False)
        return {**shown, "losses": [], "basis": [], "settings": {}, "group": None, "notebook": None}
    return shown


def _shown(run: Run, row: RunRow, has_changed: bool) -> dict[str, Any]:
    from workbench.experiment import values_by_name

    words = ("state", "message", "step", "steps", "alerts", "tags", "notes", "archived")
    losses, numbers = ("loss", "eval_loss", "training_loss"), ("tokens", "mfu", "devices", "peak_bytes", "time")
    shown: dict[str, Any] = {name: each for name, each in row.items() if name in words}
    for name in (*losses, *numbers, "tokens_per_s", "eta_s"):
        value: Any = dict(row)[name]
        shown[name] = value if isinstance(value, int | float) and math.isfinite(value) else None
    shown["held_out"] = row["eval_loss"] is not None
    shown["words"] = state_in_words(row["state"], row["step"], row["training_loss"])
    shown["color"], shown["ended"] = state_color(shown["words"]), row["state"] in FINAL_STATES
    left, devices = list[str](), list[str]()
    if row["state"] not in FINAL_STATES:
        left = [] if row["eta_s"] is None else [f"{time_left(row['eta_s'])} left"]
        several = [f"{row['devices']} devices"] if (row["devices"] or 0) > 1 else []
        devices = [f"GPU {', '.join(map(str, row['gpus']))}"] if row["gpus"] else several
    # A narrow list cuts the end off, so the time left comes first.
    shown["pace"] = " · ".join([*left, *(word for word in progress_words(row) if "tokens" in word), *devices])
    shown["facts"] = " · ".join([*left, f"step {step_text(row)}", *progress_words(row), *devices])
    spelt: dict[str, Callable[[float], str]] = {
        "tokens": count,
        "tokens_per_s": count,
        "mfu": "{:.1%}".format,
        "peak_bytes": gib,
        "eta_s": time_left,
    }
    spelt |= dict.fromkeys(("loss", "eval_loss", "training_loss"), "{:.4g}".format)
    shown["written"] = {"step": step_text(row)}
    shown["written"] |= {n: spell(shown[n]) for n, spell in spelt.items() if shown[n] is not None}
    shown["resumable"] = row["state"] in ("stopped", "failed") and bool(run.checkpoints)
    if has_changed:
        shown["losses"] = _losses(run.directory)
        basis = read_loss_basis(run.directory)
        shown["basis"] = [] if basis is None else basis.of(shown["held_out"])
        # The numbers and words of the experiment by their short names are columns of the table.
        values = dict[str, Any]()
        with contextlib.suppress(WorkbenchError, ValueError, AttributeError, TypeError):  # a damaged file
            values = values_by_name(run.config)
            for group in ("model", "data"):
                values |= {f"{group}.{name}": value for name, value in (values.get(group) or {}).items()}
        shown["settings"] = {
            name: value
            for name, value in values.items()
            if (isinstance(value, str) and len(value) <= MOST_LETTERS)
            or (isinstance(value, int | float) and math.isfinite(value))
        }
    return shown


def _losses(run: RunDir) -> list[tuple[int, float]]:
    """Return about `SPARKLINE_POINTS` losses spread evenly over a run; of steps that are repeated, the later ones."""
    table, losses, first = StepTable(run.path), list[tuple[int, float]](), math.inf
    for row in range(table.refresh() - 1, -1, -max(1, len(table) // SPARKLINE_POINTS)):
        step, loss = (float(table.column(name, row, row + 1)[0]) for name in ("step", "loss"))
        if step < first and math.isfinite(loss):
            losses.append((int(step), float(f"{loss:.4g}")))
        first = min(first, step)
    return losses[::-1]


class Handler(APIHandler):
    """A handler whose requests have a JSON object as their body."""

    auth_resource = "contents"

    def asked(self) -> dict[str, Any]:
        """Return the fields of the request; answers 400 with a sentence to a body that is no JSON object."""
        try:
            fields = parsed(self.request.body or b"{}")
            json.dumps(fields, ensure_ascii=False).encode()  # half a letter of Unicode is in no name of a file
        except ValueError as error:  # no JSON, no UTF-8, nested too deeply, or a number of thousands of digits
            raise tornado.web.HTTPError(400, f"The request is no JSON that can be read: {error}.") from None
        if not isinstance(fields, dict):
            raise tornado.web.HTTPError(400, f"The request is a JSON {type(fields).__name__}. Send an object.")
        return fields

    async def known_folder(self, asked: Mapping[str, Any]) -> str:
        """Return the `folder` of a request; answers 400 to one that is not among the server's files."""
        folder = asked.get("folder", "")
        with contextlib.suppress(OSError, ValueError):  # a name that no file can have
            if isinstance(folder, str) and await ensure_async(self.contents_manager.dir_exists(folder)):
                return folder
        raise tornado.web.HTTPError(400, f"There is no folder {folder!r:.200} among the server's files.")

    @property
    def prepared_kernel(self) -> PreparedKernel:
        """The server's only kernel that waits for a click."""
        if "workbench_prepared_kernel" not in self.settings:
            self.settings["workbench_prepared_kernel"] = PreparedKernel(self.settings, self.log)
        kernel: PreparedKernel = self.settings["workbench_prepared_kernel"]
        return kernel


# Behind the sidebar: its rows, and the figures that compare runs. They read and change this user's own runs only.

Result = TypeVar("Result")
MOST_CURVES = 50
MOST_RUNS = 2000
"""Most runs of one request."""
MOST_DIGITS = 18
"""Most digits of a version that are read: Python refuses to read thousands."""
ACTIONS: dict[str, Callable[[Run, Any], Any]] = {
    "stop": lambda run, _: run.stop(),
    "resume": lambda run, _: run.resume(),
    "tag": lambda run, value: run.tag(value),
    "untag": lambda run, value: run.untag(value),
    "note": lambda run, value: run.note(value),
    "archive": lambda run, value: run.archive(value),
    "delete": lambda run, _: run.delete(),
}


def dashboard_of(runs: Sequence[Run], baseline: Run | None = None) -> dict[str, Any]:
    """Return the dashboard of runs: its `figures` as `plot.js` draws them, and why those `failures` failed that did.

    The curve of a `baseline` that is none of the runs is drawn last.

    The figures are the loss curves, and panels of speed, devices and memory. Of a single run with a plan, what was
    predicted beside what was measured follows, and of one that records norms, the map of its updates by layer. A
    failure has its root exception, where it arose and a remedy.
    """
    from workbench.figures import theme
    from workbench.figures.curves_view import loss_curves
    from workbench.figures.figure import page_json
    from workbench.figures.norms_view import draw_norms
    from workbench.figures.panels_view import panel_names, panels
    from workbench.figures.timeline_view import prediction
    from workbench.record.norms import NormsTail
    from workbench.widgets.run_reader import RunReader, folds_of, panel_inputs, with_looks

    drawn = [*runs, *([baseline] if baseline is not None and baseline.path not in {run.path for run in runs} else [])]
    named = zip(distinct_names(drawn), drawn, strict=True)
    snapshots = [replace(RunReader(run.path).read(), name=name) for name, run in named]
    if len(drawn) > len(runs):
        snapshots[-1] = replace(snapshots[-1], name=f"{snapshots[-1].name} (baseline)")
    if len(drawn) > theme.MAX_INSIDE:
        snapshots = with_looks(snapshots, folds_of(snapshots, groups_of(drawn)))
    curves, peaks, usage = panel_inputs(snapshots)
    figures = [loss_curves(curves, title=runs[0].name if len(runs) == 1 else f"Loss of {len(runs)} runs")]
    if panel_names(curves, peaks, usage):
        figures.append(panels(curves, peaks, usage=usage))
    if len(runs) == 1:
        with contextlib.suppress(WorkbenchError):  # it has no plan, or one that this version cannot read
            figures.append(prediction(runs[0].plan, measurements(runs[0]), "Predicted and measured"))
        if runs[0].records_norms and len(found := NormsTail(runs[0].directory.events).read()):
            figures.append(draw_norms(found, runs[0].name))
    for figure in figures:
        figure.layout.uirevision = "kept"  # a zoom stays when the curves grow
    failures = (f"{snapshot.name}: {snapshot.failure}" for snapshot in snapshots if snapshot.failure is not None)
    return {"figures": list(map(page_json, figures)), "failures": "\n\n".join(failures)}


class _RunHandler(Handler):
    """A handler that reads files in threads, so that a slow disk does not hold up the server."""

    @property
    def roots(self) -> list[Path]:
        """The folders of runs of this user, and `runs` beside the notebooks."""
        return list(dict.fromkeys([*known_runs_roots(), self.folder / "runs"]))

    @property
    def folder(self) -> Path:
        """The folder of the server's files."""
        return Path(self.settings.get("server_root_dir") or ".").expanduser().absolute()

    def asked_paths(self, asked: Mapping[str, Any], most: int) -> list[str]:
        """Return the `paths` of a request; answers 400 to none, or to more than `most`."""
        paths = asked.get("paths")
        if not isinstance(paths, list) or not 1 <= len(paths) <= most:
            raise tornado.web.HTTPError(400, f"Name 1 to {most:,} runs.")
        return list(map(str, paths))

    @property
    def index(self) -> RunIndex:
        """The server's only index of runs."""
        if "workbench_run_index" not in self.settings:
            self.settings["workbench_run_index"] = RunIndex(self.folder)
        index: RunIndex = self.settings["workbench_run_index"]
        return index

    async def in_thread(self, work: Callable[[], Result]) -> Result:
        """Return the result of some work; an error of Workbench's becomes the answer."""
        try:
            return await asyncio.to_thread(work)
        except RunNotFound as error:
            raise tornado.web.HTTPError(404, str(error)) from None
        except WorkbenchError as error:
            raise tornado.web.HTTPError(409, str(error).partition("\n")[0]) from None


class Runs(_RunHandler):
    """The rows of the sidebar."""

    @tornado.web.authenticated
    @authorized
    async def get(self) -> None:
        """Answer with the rows that changed since version `since` of index `index`."""
        index = self.index
        same = self.get_query_argument("index", "") == str(id(index))
        since = self.get_query_argument("since", "0")
        version = int(since[:MOST_DIGITS]) if same and since.isdecimal() else 0
        answer = await self.in_thread(lambda: index.read(self.roots, version))
        self.finish({"index": str(id(index)), "since": version, **answer})


class RunActions(_RunHandler):
    """The buttons of a row."""

    @tornado.web.authenticated
    @authorized
    async def post(self) -> None:
        """Do `action` (a key of `ACTIONS`) to the run at `path`, or to each of those at `paths`, with `value`.

        Of several runs, those that refuse do not keep it from the others; the answer says why they `refused`. With
        `queues`, what stops a run of a sweep or a grid stops its queue as well.
        """
        asked = self.asked()
        action = ACTIONS.get(str(asked.get("action")))
        if action is None:
            raise tornado.web.HTTPError(400, f"There is no action {asked.get('action')!r:.80}.")
        if "paths" not in asked:
            await self.in_thread(lambda: action(user_run(str(asked.get("path")), self.roots), asked.get("value")))
            self.finish({})
            return
        paths = self.asked_paths(asked, MOST_RUNS)

        def done() -> list[str]:
            refused = list[str]()
            for path in paths:
                try:
                    run = user_run(path, self.roots)
                    if asked.get("action") == "stop" and asked.get("queues") is True:
                        stop_queue_of(run)
                    action(run, asked.get("value"))
                except WorkbenchError as error:
                    refused.append(str(error).partition("\n")[0])
            return refused

        self.finish({"refused": await self.in_thread(done)})


class RunsTogether(_RunHandler):
    """Facts of several runs together: before they are deleted, and beside a baseline."""

    @tornado.web.authenticated
    @authorized
    async def post(self) -> None:
        """Answer `ask`: what `differs` between the runs at `paths`, what is `lost` with them, or their `difference`s.

        Differences are those from the run at `baseline`, by path.
        """
        asked = self.asked()
        ask, paths = asked.get("ask"), self.asked_paths(asked, MOST_RUNS)

        def answer() -> dict[str, Any]:
            runs = [user_run(path, self.roots) for path in paths]
            if ask == "differs":
                return run_groups.what_differs(runs)
            if ask == "lost":
                return run_groups.what_is_lost(runs)
            baseline = user_run(str(asked.get("baseline")), self.roots)
            found = {str(run.path): run_groups.difference_from(baseline, run) for run in runs}
            return {"differences": found}

        if ask not in ("differs", "lost", "difference"):
            raise tornado.web.HTTPError(400, f"Nothing is known of runs by {ask!r:.80}.")
        self.finish(await self.in_thread(answer))


class RunCurves(_RunHandler):
    """The figures of the main area."""

    @tornado.web.authenticated
    @authorized
    async def post(self) -> None:
        """Answer with the figures and failures of the runs at `paths`, unless their logs have the stamps `seen`.

        Runs that are gone are left out; 404 says that all are. The curve of the run at `baseline`, if it is there, is
        drawn beside theirs.
        """
        asked = self.asked()
        paths, pinned = self.asked_paths(asked, MOST_CURVES), asked.get("baseline")

        def drawn() -> dict[str, Any]:
            runs, baseline, gone = list[Run](), None, list[RunNotFound]()
            for path in paths:
                try:
                    runs.append(user_run(path, self.roots))
                except RunNotFound as error:
                    gone.append(error)
            if not runs:
                raise gone[0]
            if pinned is not None:
                with contextlib.suppress(RunNotFound):  # it was deleted
                    baseline = user_run(str(pinned), self.roots)
            stamps = [run.directory.log_stamp for run in [*runs, *([] if baseline is None else [baseline])]]
            if stamps == asked.get("seen"):
                return {"seen": stamps, "figures": None}
            return {"seen": stamps, **dashboard_of(runs, baseline)}

        self.finish(await self.in_thread(drawn))


class Plotly(_RunHandler):
    """The library that draws the figure."""

    @tornado.web.authenticated
    @authorized
    async def get(self) -> None:
        """Answer with the source of plotly.js."""
        from workbench.figures.figure import plotly_js

        self.finish({"source": await self.in_thread(plotly_js)})


# Behind the launcher: the cards, the form of their parameters, and copies of templates.


class Templates(Handler):
    """The cards of the launcher."""

    @tornado.web.authenticated
    @authorized
    def get(self) -> None:
        """Answer with the name, the title and the description of each template."""
        self.finish({"templates": cards()})


class Parameters(Handler):
    """The parameters of a template."""

    @tornado.web.authenticated
    @authorized
    def get(self) -> None:
        """Answer with the name, the default, the comment and the choices of each parameter of a `template`."""
        declared = parameters(known_template(self.get_query_argument("template", "")))
        shown = ("name", "default", "help", "choices")
        self.finish({"parameters": [{name: getattr(each, name) for name in shown} for each in declared.values()]})


class Notebooks(Handler):
    """Copies of templates beside the user's notebooks."""

    @tornado.web.authenticated
    @authorized
    async def post(self) -> None:
        """Copy a `template` into a `folder` of the server's files, and answer with the copy's path.

        `parameters` holds the text of each value that differs from the template's. The contents manager writes the
        copy, and refuses a folder outside the server's root.
        """
        asked = self.asked()
        template, given = known_template(asked.get("template")), asked.get("parameters", {})
        if not isinstance(given, dict):
            raise tornado.web.HTTPError(400, f"Parameters are a JSON {type(given).__name__}. Send an object.")
        texts = {str(name): str(text) for name, text in given.items()}
        notebook = nbformat.read(template, as_version=4)
        if texts:
            try:
                values = values_of(template, texts)
            except WorkbenchError as error:
                self.set_status(400)
                self.finish({"message": str(error)})
                return
            cell = next(cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
            cell.source = with_values(cell.source, values)
        manager: Any = self.contents_manager
        folder = await self.known_folder(asked)
        # The copy is called `name.ipynb`, or `name-2.ipynb` and so on where that exists.
        number, path = 1, f"{folder}/{template.stem}.ipynb".lstrip("/")
        while await ensure_async(manager.exists(path)):
            number += 1
            path = f"{folder}/{template.stem}-{number}.ipynb".lstrip("/")
        await ensure_async(manager.save({"type": "notebook", "content": notebook}, path))
        self.set_status(201)
        self.finish({"path": path})


class PreparedKernels(Handler):
    """The kernel that waits for a click on a card."""

    auth_resource = "kernels"

    @tornado.web.authenticated
    @authorized
    async def post(self) -> None:
        """Let a kernel import what the templates use, for a notebook in a `folder` of the server's files."""
        await self.prepared_kernel.prepare(await self.known_folder(self.asked()))
        self.finish({})


class Sessions(Handler):
    """The session of a notebook with the kernel that waits."""

    auth_resource = "sessions"

    @tornado.web.authenticated
    @authorized
    async def post(self) -> None:
        """Give the notebook at `path` the kernel that waits; answers `given` false if it must start its own."""
        path = self.asked().get("path")
        with contextlib.suppress(OSError, ValueError):  # a name that no file can have
            if isinstance(path, str) and await ensure_async(self.contents_manager.file_exists(path)):
                self.finish({"given": await self.prepared_kernel.hand_over(path)})
                return
        raise tornado.web.HTTPError(400, f"There is no notebook {path!r:.200} among the server's files.")


def known_template(name: Any) -> Path:
    """Return the path of an installed template; raises 404 with the known names."""
    if not isinstance(name, str) or name not in templates():
        raise tornado.web.HTTPError(404, f"There is no template {name!r}. {suggestion(str(name), templates())}")
    return templates()[name]


def cards() -> list[dict[str, str]]:
    """Return a card for each template: its name, the first words of its heading, and the first sentence below it."""
    found = []
    for name, path in templates().items():
        heading, _, text = nbformat.read(path, as_version=4).cells[0].source.partition("\n")
        sentence = text.strip().partition("\n")[0].split(". ")[0].rstrip(".:")
        description = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", sentence)  # links become their text
        title = heading.lstrip("# ").partition(":")[0].partition(",")[0]
        found.append({"name": name, "title": title, "description": f"{description}."})
    return found


HANDLERS = {
    "templates": Templates,
    "parameters": Parameters,
    "notebooks": Notebooks,
    "kernel": PreparedKernels,
    "session": Sessions,
    "runs": Runs,
    "run": RunActions,
    "together": RunsTogether,
    "curves": RunCurves,
    "plotly": Plotly,
}
"""Path below `workbench/` -> its handler."""
