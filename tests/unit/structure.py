"""The structure of a package: circles of imports, docstrings that are fragments, and files that name a capability."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

FRAGMENT = re.compile(
    r"^(of|what|such|where|whose|which|that|those|these|this|from|by|in|at|for|with|to|as|how|whether|beside|besides|"
    r"between|per|on|it|its)\b",
    re.IGNORECASE,
)
"""First words of docstrings that are fragments: prepositions, relative pronouns and pronouns that refer elsewhere."""


@dataclass(frozen=True)
class Place:
    """One finding: where it is, and what was measured there."""

    file: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what}"


class Package:
    """The modules of one package, parsed once; `root` is the package's folder."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.trees = {path: ast.parse(path.read_text()) for path in sorted(self.root.rglob("*.py"))}

    def _file(self, path: Path) -> str:
        return str(path.relative_to(self.root.parent))

    def naming(self, pattern: str) -> Counter[str]:
        """Count the files of each room that name a capability."""
        found = (path for path in self.trees if re.search(pattern, path.read_text(), re.IGNORECASE))
        return Counter(path.relative_to(self.root).parts[0].removesuffix(".py") for path in found)

    def fragments(self) -> list[Place]:
        """Docstrings, those below attributes and constants included, that begin with a preposition or a pronoun."""
        found = []
        for path, line, text in self._docstrings():
            if FRAGMENT.match(text):
                found.append(Place(self._file(path), line, text.splitlines()[0][:90]))
        return found

    def _docstrings(self) -> Iterator[tuple[Path, int, str]]:
        for path, tree in self.trees.items():
            for node in ast.walk(tree):
                for statement in getattr(node, "body", ()) if isinstance(getattr(node, "body", ()), list) else ():
                    value = getattr(statement, "value", None)
                    is_text = isinstance(value, ast.Constant) and isinstance(value.value, str)
                    if isinstance(statement, ast.Expr) and is_text:
                        assert isinstance(value, ast.Constant)
                        yield path, statement.lineno, str(value.value).strip()

    def circles(self) -> list[tuple[str, ...]]:
        """Groups of modules that import each other, lazily or for annotations included; a package is its `__init__`."""
        names = {self._module(path): path for path in self.trees}
        imports = {name: self._imports(self.trees[path], names) - {name} for name, path in names.items()}
        return [group for group in _strongly_connected(imports) if len(group) > 1]

    def hidden_arrows(self, layers: Sequence[str]) -> list[Place]:
        """Modules and files of rooms above that a file names in a text: for a process, a lookup by name, or to open.

        `layers` are the rooms from the top to the bottom, those of one floor separated by `" | "`.
        """
        floor = {room: number for number, layer in enumerate(layers) for room in layer.split(" | ")}
        found = []
        for path, tree in self.trees.items():
            here = floor.get(self._room(path), 0)
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    if floor.get(self._named_room(node.value), here) < here:
                        found.append(Place(self._file(path), node.lineno, node.value))
                elif isinstance(node, ast.Subscript) and ast.unparse(node) == f"sys.modules['{self.root.name}']":
                    found.append(Place(self._file(path), node.lineno, ast.unparse(node)))
        return found

    def _room(self, path: Path) -> str:
        return path.relative_to(self.root).parts[0].removesuffix(".py")

    def _named_room(self, text: str) -> str:
        """Return the room whose module or file is the whole of a text, such as `workbench.cli` or `lab/plot.js`."""
        module = re.fullmatch(rf"{self.root.name}\.([\w.]+)(:\w+)?", text)
        path = module[1].replace(".", "/") if module else text.removeprefix(f"{self.root.name}/")
        is_path = module is not None or re.fullmatch(r"[\w./-]+/[\w./-]+", path) is not None
        found = is_path and (self.root / path, self.root / f"{path}.py")
        return path.partition("/")[0] if found and any(each.exists() for each in found) else ""

    def _module(self, path: Path) -> str:
        parts = path.relative_to(self.root.parent).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def _imports(self, tree: ast.AST, names: dict[str, Path]) -> set[str]:
        found = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names if alias.name in names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module in names:
                modules = {f"{node.module}.{alias.name}" for alias in node.names}
                inside = modules & names.keys()
                found |= inside
                if modules - inside:
                    found.add(str(node.module))
        return found


def _strongly_connected(graph: dict[str, set[str]]) -> list[tuple[str, ...]]:
    """Tarjan's algorithm; every node in exactly one group."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[tuple[str, ...]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            groups.append(tuple(sorted(group)))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return groups
