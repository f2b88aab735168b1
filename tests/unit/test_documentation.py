"""The documentation names everything that `import workbench` offers, and shows pictures that exist."""

import re
from pathlib import Path

import pytest

import workbench as wb

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_every_public_name_is_in_the_api_reference():
    documented = set(re.findall(r"^::: workbench\.(\w+)", (DOCS / "api.md").read_text(), re.MULTILINE))
    assert set(wb.__all__) - documented - {"WorkbenchError"} == set()  # `errors` lists all errors


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.stem)
def test_every_picture_of_a_page_exists(page):
    pictures = re.findall(r"!\[[^\]]+\]\((pictures/[^)]+)\)", page.read_text())
    assert [picture for picture in pictures if not (DOCS / picture).exists()] == []
    if page.stem in ("evaluation", "grids", "optimizers", "samples", "sweeps"):
        assert pictures
