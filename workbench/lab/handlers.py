"""The endpoints below `workbench/`. Each verb asks who calls; a test fails on one that does not."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import nbformat
import tornado.web
from jupyter_core.utils import ensure_async
from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler

from workbench.errors import RunNotFound, WorkbenchError, suggestion
from workbench.lab.run_index import RunIndex, own_run
from workbench.notebooks.parameters import parameters, templates, values_of, with_values
from workbench.rundir import known_runs_roots, parsed
from workbench.runs.registry import distinct_names, measurements
from workbench.runs.run import Run


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


# Behind the sidebar: its rows, and the figures that compare runs. They read and change this user's own runs only.

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
        folder, is_known = asked.get("folder", ""), False
        with contextlib.suppress(OSError, ValueError):  # a name that no file can have
            is_known = isinstance(folder, str) and await ensure_async(manager.dir_exists(folder))
        if not is_known:
            raise tornado.web.HTTPError(400, f"There is no folder {folder!r:.200} among the server's files.")
        # The copy is called `name.ipynb`, or `name-2.ipynb` and so on where that exists.
        number, path = 1, f"{folder}/{template.stem}.ipynb".lstrip("/")
        while await ensure_async(manager.exists(path)):
            number += 1
            path = f"{folder}/{template.stem}-{number}.ipynb".lstrip("/")
        await ensure_async(manager.save({"type": "notebook", "content": notebook}, path))
        self.set_status(201)
        self.finish({"path": path})


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
    "runs": Runs,
    "run": RunActions,
    "curves": RunCurves,
    "plotly": Plotly,
}
"""Path below `workbench/` -> its handler."""
