"""The documentation names everything that `import workbench` offers, and shows pictures that exist."""

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import workbench as wb
from workbench.base import errors
from workbench.cli import app

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


def test_everyday_takes_at_most_35_names_and_completion_shows_no_others():
    assert len(wb.__all__) <= 35
    assert sorted(dir(wb)) == sorted(wb.__all__)


def test_the_page_of_the_command_line_has_every_command_with_its_options():
    page = (DOCS / "reference" / "cli.md").read_text()
    for name, command in get_command(app).commands.items():
        section = page.partition(f"### workbench {name} ")[2] or page.partition(f"### workbench {name}\n")[2]
        options = {option for parameter in command.params for option in parameter.opts if option.startswith("-")}
        assert set(re.findall(r"(?<=[`\s])--?[a-z-]+(?=[`,])", section.partition("\n##")[0])) >= options, name


def test_every_error_type_has_a_cause_and_a_remedy():
    types = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.WorkbenchError)
    }
    rows = re.findall(r"^\| `(\w+)` \| .+ \| .+ \|$", (DOCS / "reference" / "errors.md").read_text(), re.MULTILINE)
    assert set(rows) == types - {"WorkbenchError"}


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.stem)
def test_every_picture_of_a_page_exists(page):
    pictures = re.findall(r"!\[[^\]]+\]\((pictures/[^)]+)\)", page.read_text())
    assert [picture for picture in pictures if not (DOCS / picture).exists()] == []
    if page.stem in ("evaluation", "grids", "optimizers", "samples", "sweeps"):
        assert pictures


def test_every_file_that_a_page_links_to_exists():
    root = DOCS.parent
    pages = [*DOCS.rglob("*.md"), *root.glob("*.md"), *root.glob("benchmarks/*.md")]
    links = {page: re.findall(r"\]\(([^)#\s]+)[)#]", page.read_text()) for page in pages}
    assert sum(map(len, links.values())) > 100
    gone = [(page.name, link) for page in pages for link in links[page] if not (page.parent / link).exists()]
    assert [each for each in gone if "://" not in each[1]] == []


ROOMS = {
    "analysis": "analysis",
    **dict.fromkeys(("capture", "capture/blocks", "capture/coupling", "capture/export"), "capture"),
    "cost": "cost",
    "data": "data",
    "execution": "execution",
    "execution/blocks": "blocks",
    "execution/checkpoint": "checkpoints",
    "execution/parallel": "blocks",
    "figures": "figures",
    "lab": "dashboard",
    "measure": "measure",
    "planning": "planning",
    "widgets": "dashboard",
}
"""The page whose tables name the modules of a room."""


@pytest.mark.parametrize("room", ROOMS)
def test_the_page_of_a_room_names_each_of_its_modules_and_no_file_that_is_gone(room):
    modules = {file.name for file in (DOCS.parent / "workbench" / room).glob("*.py") if file.name != "__init__.py"}
    named = set(re.findall(r"`(?:[\w/]+/)?(\w+\.py)`", (DOCS / f"{ROOMS[room]}.md").read_text()))
    assert modules <= named
    files = {file.name for part in ("workbench", "tests", "benchmarks") for file in (DOCS.parent / part).rglob("*.py")}
    assert named <= files


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_lines_of_the_first_page_describe_the_pair_of_the_full_preset(page):
    root = DOCS.parent
    lines = (root / page).read_text().partition("```python\n")[2].partition("\nplan ")[0]
    first: dict[str, Any] = {}
    exec(lines, first)
    cells = json.loads((root / "templates" / "bert_scaling.ipynb").read_text())["cells"]
    parameters, presets, large, scaled = ["".join(each["source"]) for each in cells if each["cell_type"] == "code"][:4]
    template: dict[str, Any] = {}
    exec(parameters, template)
    template |= {"preset": "full", "corpus": "texts.txt", "tokens": 30_000_000}
    for code in (presets, large.replace("wb.runs.tokenize(large)", ""), scaled):
        exec(code, template)
    for name in ("large", "scaled"):
        mine, its = first[name], template[name].replace(evaluation=None)
        assert mine.warmup == its.warmup
        as_json = [each.replace(name="bert", warmup_steps=None, seed=0).to_json() for each in (mine, its)]
        for each in as_json:
            del each["model"]["name"]
        assert as_json[0] == as_json[1]
