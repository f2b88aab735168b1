"""The endpoints below `workbench/`. Each verb asks who calls; a test fails on one that does not."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import nbformat
import tornado.web
from jupyter_core.utils import ensure_async
from jupyter_server.auth.decorator import authorized

from workbench.errors import WorkbenchError, suggestion
from workbench.lab.run_handlers import RUN_HANDLERS, Handler
from workbench.notebooks.parameters import parameters, templates, values_of, with_values


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
        path = await self._free_path(await self._known_folder(asked.get("folder", "")), template.stem)
        await ensure_async(self.contents_manager.save({"type": "notebook", "content": notebook}, path))
        self.set_status(201)
        self.finish({"path": path})

    async def _known_folder(self, name: Any) -> str:
        """Return the name of a folder of the server's files; answers 400 to any other."""
        manager: Any = self.contents_manager
        with contextlib.suppress(OSError, ValueError):  # a name that no file can have
            if isinstance(name, str) and await ensure_async(manager.dir_exists(name)):
                return name
        raise tornado.web.HTTPError(400, f"There is no folder {name!r:.200} among the server's files.")

    async def _free_path(self, folder: str, name: str) -> str:
        """Return the path of a notebook that does not exist: `name.ipynb`, `name-2.ipynb` and so on."""
        manager: Any = self.contents_manager
        number, path = 1, f"{folder}/{name}.ipynb".lstrip("/")
        while await ensure_async(manager.exists(path)):
            number += 1
            path = f"{folder}/{name}-{number}.ipynb".lstrip("/")
        return path


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


HANDLERS = {"templates": Templates, "parameters": Parameters, "notebooks": Notebooks, **RUN_HANDLERS}
"""Path below `workbench/` -> its handler."""
