"""The endpoints below `workbench/`. Each verb asks who calls; a test fails on one that does not."""

from __future__ import annotations

from typing import Any

import nbformat
import tornado.web
from jupyter_core.utils import ensure_async
from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler

from workbench.errors import suggestion
from workbench.lab.cards import cards
from workbench.notebooks.templates import templates


class Templates(APIHandler):
    """The cards of the launcher."""

    auth_resource = "contents"

    @tornado.web.authenticated
    @authorized
    def get(self) -> None:
        """Answer with the name, the title and the description of each template."""
        self.finish({"templates": cards()})


class Notebooks(APIHandler):
    """Copies of templates beside the user's notebooks."""

    auth_resource = "contents"

    @tornado.web.authenticated
    @authorized
    async def post(self) -> None:
        """Copy a `template` into a `folder` of the server's files, and answer with the copy's path.

        The contents manager writes the copy, and refuses a folder outside the server's root.
        """
        asked = self.get_json_body() or {}
        name = str(asked.get("template"))
        if name not in templates():
            raise tornado.web.HTTPError(404, f"There is no template {name!r}. {suggestion(name, templates())}")
        notebook = nbformat.read(templates()[name], as_version=4)
        path = await self._free_path(str(asked.get("folder", "")), name)
        await ensure_async(self.contents_manager.save({"type": "notebook", "content": notebook}, path))
        self.set_status(201)
        self.finish({"path": path})

    async def _free_path(self, folder: str, name: str) -> str:
        """Return the path of a notebook that does not exist: `name.ipynb`, `name-2.ipynb` and so on."""
        manager: Any = self.contents_manager
        number, path = 1, f"{folder}/{name}.ipynb".lstrip("/")
        while await ensure_async(manager.exists(path)):
            number += 1
            path = f"{folder}/{name}-{number}.ipynb".lstrip("/")
        return path


HANDLERS = {"templates": Templates, "notebooks": Notebooks}
"""Path below `workbench/` -> its handler."""
