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

    settings = server.web_app.settings
    base = settings["base_url"]
    server.web_app.add_handlers(
        ".*$", [(url_path_join(base, "workbench", path), handler) for path, handler in HANDLERS.items()]
    )

    def ask_for_changes() -> None:
        # JupyterLab lets browsers keep the files of extensions for a year, since builders write a digest into names.
        # Ours have names that stay: after an upgrade, a browser would go on with the modules of before.
        kept = settings.get("static_immutable_cache", [])
        settings["static_immutable_cache"] = [path for path in kept if not path.endswith("/workbench/static")]

    server.io_loop.add_callback(ask_for_changes)  # when all extensions have been loaded, in whichever order
