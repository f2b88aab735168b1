"""The documentation names everything that `import workbench` offers, and shows pictures that exist."""

import inspect
import re
from pathlib import Path

import pytest

import workbench as wb

DOCS = Path(__file__).resolve().parents[2] / "docs"


MODULES = [name for name in wb.__all__ if inspect.ismodule(getattr(wb, name))]
"""The public modules, which hold by purpose what is not flat in `wb`."""


@pytest.mark.parametrize("module", ["everyday", *MODULES])
def test_the_page_of_each_tier_documents_its_public_names_and_no_others(module):
    page = (DOCS / "reference" / f"{module}.md").read_text()
    prefix, public = (
        ("", set(wb.__all__) - set(MODULES)) if module == "everyday" else (f"{module}.", set(dir(getattr(wb, module))))
    )
    documented = set(re.findall(rf"^::: workbench\.{re.escape(prefix)}(\w+)$", page, re.MULTILINE))
    assert documented == public


def test_everyday_takes_at_most_32_names_and_completion_shows_no_others():
    assert len(wb.__all__) <= 32
    assert sorted(dir(wb)) == sorted(wb.__all__)


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.stem)
def test_every_picture_of_a_page_exists(page):
    pictures = re.findall(r"!\[[^\]]+\]\((pictures/[^)]+)\)", page.read_text())
    assert [picture for picture in pictures if not (DOCS / picture).exists()] == []
    if page.stem in ("evaluation", "grids", "optimizers", "samples", "sweeps"):
        assert pictures
