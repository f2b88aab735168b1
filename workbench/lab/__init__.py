"""Workbench in JupyterLab: the launcher's cards, the sidebar of runs, and the server's endpoints behind them.

The browser's part is in `jupyter/labextensions/workbench/static/`: modules that JupyterLab loads as they are.
"""

from __future__ import annotations

from typing import Any


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    return [{"module": "workbench.lab"}]


def _load_jupyter_server_extension(server: Any) -> None:
    """Add the endpoints below `workbench/`; Jupyter calls this when the server starts."""
    from jupyter_server.utils import url_path_join

    from workbench.lab.handlers import HANDLERS

    base = server.web_app.settings["base_url"]
    server.web_app.add_handlers(
        ".*$", [(url_path_join(base, "workbench", path), handler) for path, handler in HANDLERS.items()]
    )
