"""The cards of the launcher: what a template's first cell says of it."""

from __future__ import annotations

import nbformat

from workbench.notebooks.templates import templates


def cards() -> list[dict[str, str]]:
    """Return the name of each template, its heading, and the first sentence below it."""
    found = []
    for name, path in templates().items():
        first = nbformat.read(path, as_version=4).cells[0].source
        title, _, text = first.partition("\n")
        description = text.strip().partition("\n")[0].split(". ")[0].rstrip(".:")
        found.append({"name": name, "title": title.lstrip("# "), "description": f"{description}."})
    return found
