"""The endpoints behind the sidebar of runs, and the figures that compare them.

They read and change this user's own runs only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import tornado.web
from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler

from workbench.errors import RunNotFound, WorkbenchError
from workbench.lab.run_index import RunIndex, own_run
from workbench.rundir import known_runs_roots, parsed
from workbench.runs.registry import distinct_names, measurements
from workbench.runs.run import Run

Result = TypeVar("Result")
MOST_CURVES = 50
MOST_DIGITS = 18
"""Most digits of a version that are read: Python refuses to read thousands."""
ACTIONS: dict[str, Callable[[Run, Any], Any]] = {
    "stop": lambda run, _: run.stop(),
    "resume": lambda run, _: run.resume(),
    "tag": lambda run, value: run.tag(value),
    "untag": lambda run, value: run.untag(value),
    "note": lambda run, value: run.note(value),
    "archive": lambda run, value: run.archive(value),
}


def dashboard_of(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the dashboard of runs: its `figures` as `plot.js` draws them, and why those `failures` failed that did.

    The figures are the loss curves, and panels of speed, devices and memory. Of a single run with a plan, what was
    predicted beside what was measured follows. A failure has its root exception, where it arose and a remedy.
    """
    from workbench.figures.curves_view import loss_curves
    from workbench.figures.figure import page_json
    from workbench.figures.panels_view import panel_names, panels
    from workbench.figures.timeline_view import prediction
    from workbench.widgets.run_reader import RunReader, panel_inputs

    named = zip(distinct_names(runs), runs, strict=True)
    snapshots = [replace(RunReader(run.path).read(), name=name) for name, run in named]
    curves, peaks, usage = panel_inputs(snapshots)
    figures = [loss_curves(curves, title=runs[0].name if len(runs) == 1 else f"Loss of {len(runs)} runs")]
    if panel_names(curves, peaks, usage):
        figures.append(panels(curves, peaks, usage=usage))
    if len(runs) == 1:
        with contextlib.suppress(WorkbenchError):  # it has no plan, or one that this version cannot read
            figures.append(prediction(runs[0].plan, measurements(runs[0]), "Predicted and measured"))
    for figure in figures:
        figure.layout.uirevision = "kept"  # a zoom stays when the curves grow
    failures = (f"{snapshot.name}: {snapshot.failure}" for snapshot in snapshots if snapshot.failure is not None)
    return {"figures": list(map(page_json, figures)), "failures": "\n\n".join(failures)}


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
        """Do `action` (a key of `ACTIONS`) to the run at `path`, with `value`."""
        asked = self.asked()
        action = ACTIONS.get(str(asked.get("action")))
        if action is None:
            raise tornado.web.HTTPError(400, f"There is no action {asked.get('action')!r:.80}.")
        await self.in_thread(lambda: action(own_run(str(asked.get("path")), self.roots), asked.get("value")))
        self.finish({})


class RunCurves(_RunHandler):
    """The figures of the main area."""

    @tornado.web.authenticated
    @authorized
    async def post(self) -> None:
        """Answer with the figures and failures of the runs at `paths`, unless their events have the sizes `seen`."""
        asked = self.asked()
        paths = asked.get("paths")
        if not isinstance(paths, list) or not 1 <= len(paths) <= MOST_CURVES:
            raise tornado.web.HTTPError(400, f"Name 1 to {MOST_CURVES} runs.")

        def drawn() -> dict[str, Any]:
            runs = [own_run(str(path), self.roots) for path in paths]
            sizes = [run.directory.events.stat().st_size if run.directory.events.exists() else 0 for run in runs]
            if sizes == asked.get("seen"):
                return {"seen": sizes, "figures": None}
            return {"seen": sizes, **dashboard_of(runs)}

        self.finish(await self.in_thread(drawn))


class Plotly(_RunHandler):
    """The library that draws the figure."""

    @tornado.web.authenticated
    @authorized
    async def get(self) -> None:
        """Answer with the source of plotly.js."""
        from workbench.figures.figure import plotly_js

        self.finish({"source": await self.in_thread(plotly_js)})


RUN_HANDLERS = {"runs": Runs, "run": RunActions, "curves": RunCurves, "plotly": Plotly}
"""Path below `workbench/` -> its handler."""
