"""The cards of the launcher: what a template's first cell says of it."""

from __future__ import annotations

import re

import nbformat

from workbench.notebooks.templates import templates


def cards() -> list[dict[str, str]]:
    """Return the name of each template, the first words of its heading, and the first sentence below it."""
    found = []
    for name, path in templates().items():
        heading, _, text = nbformat.read(path, as_version=4).cells[0].source.partition("\n")
        sentence = text.strip().partition("\n")[0].split(". ")[0].rstrip(".:")
        description = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", sentence)  # links become their text
        title = heading.lstrip("# ").partition(":")[0].partition(",")[0]
        found.append({"name": name, "title": title, "description": f"{description}."})
    return found
