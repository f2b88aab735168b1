"""Measure the structure of a package: sizes, parameters, import cycles, and docstrings that are fragments.

    python tests/unit/structure.py workbench            # prints the table and every place over a limit
    python tests/unit/structure.py workbench --check    # exits with 1 if there is any
    python tests/unit/structure.py OLD NEW              # two checkouts' packages side by side

`test_architecture.py` enforces the limits in CI.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LONGEST_FUNCTION = 80
"""Lines of a function, its docstring left out."""
UNCOMMENTED = 50
"""Lines from which on a function has a comment where its parts begin."""
MOST_PARAMETERS = 8
LONGEST_CLASS = 250
"""Lines of a class, from its first line to its last."""
FRAGMENT = re.compile(
    r"^(of|what|such|where|whose|which|that|those|these|this|from|by|in|at|for|with|to|as|how|whether|beside|besides|"
    r"between|per|on|it|its)\b",
    re.IGNORECASE,
)
"""First words of docstrings that are fragments: prepositions, relative pronouns and pronouns that refer elsewhere."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


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

    def _nodes(self, kind: type[ast.AST] | tuple[type[ast.AST], ...]) -> Iterator[tuple[Path, ast.AST]]:
        for path, tree in self.trees.items():
            yield from ((path, node) for node in ast.walk(tree) if isinstance(node, kind))

    @property
    def lines(self) -> int:
        return sum(len(path.read_text().splitlines()) for path in self.trees)

    def lines_per_function(self) -> float:
        return self.lines / sum(1 for _ in self._nodes((ast.FunctionDef, ast.AsyncFunctionDef)))

    def import_lines(self) -> int:
        """Lines of import statements, those inside functions included."""
        nodes = (node for _, node in self._nodes((ast.Import, ast.ImportFrom)))
        return sum(node.end_lineno - node.lineno + 1 for node in nodes)  # type: ignore[attr-defined]

    def naming(self, pattern: str) -> Counter[str]:
        """Count the files of each room that name a capability."""
        found = (path for path in self.trees if re.search(pattern, path.read_text(), re.IGNORECASE))
        return Counter(path.relative_to(self.root).parts[0].removesuffix(".py") for path in found)

    def long_functions(self) -> list[Place]:
        found = []
        for path, node in self._nodes((ast.FunctionDef, ast.AsyncFunctionDef)):
            assert isinstance(node, Function)
            has_docstring = ast.get_docstring(node) is not None
            body = node.body[1:] if has_docstring and len(node.body) > 1 else node.body
            length = (node.end_lineno or 0) - body[0].lineno + 1
            text = path.read_text().splitlines()[body[0].lineno - 1 : node.end_lineno]
            if length > LONGEST_FUNCTION:
                found.append(Place(self._file(path), node.lineno, f"{node.name} has {length} lines"))
            elif length > UNCOMMENTED and not any(line.lstrip().startswith("#") for line in text):
                said = f"{node.name} has {length} lines and no comment where its parts begin"
                found.append(Place(self._file(path), node.lineno, said))
        return found

    def many_parameters(self) -> list[Place]:
        """Functions with more parameters than allowed; `self` and `cls` are not counted.

        Triton's kernels are left out: their parameters are addresses, strides and constants, which they take singly.
        """
        found = []
        for path, node in self._nodes((ast.FunctionDef, ast.AsyncFunctionDef)):
            assert isinstance(node, Function)
            if any(ast.unparse(decorator) == "triton.jit" for decorator in node.decorator_list):
                continue
            names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            count = len([name for name in names if name not in ("self", "cls")])
            if count > MOST_PARAMETERS:
                found.append(Place(self._file(path), node.lineno, f"{node.name} has {count} parameters"))
        return found

    def long_classes(self) -> list[Place]:
        found = []
        for path, node in self._nodes(ast.ClassDef):
            assert isinstance(node, ast.ClassDef)
            length = (node.end_lineno or 0) - node.lineno + 1
            if length > LONGEST_CLASS:
                found.append(Place(self._file(path), node.lineno, f"{node.name} has {length} lines"))
        return found

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

    def docstrings(self) -> int:
        return sum(1 for _ in self._docstrings())

    def circles(self) -> list[tuple[str, ...]]:
        """Groups of modules that import each other, lazily or for annotations included; a package is its `__init__`."""
        names = {self._module(path): path for path in self.trees}
        imports = {name: self._imports(self.trees[path], names) - {name} for name, path in names.items()}
        return [group for group in _strongly_connected(imports) if len(group) > 1]

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

    def findings(self) -> list[Place]:
        """Every place over a limit, circles of imports included."""
        circles = [Place(circle[0], 1, f"imports in a circle: {' '.join(circle)}") for circle in self.circles()]
        return [*self.long_functions(), *self.many_parameters(), *self.long_classes(), *circles, *self.fragments()]

    def used_once(self) -> tuple[int, int]:
        """Private functions whose name stands only once more in their file, and all private functions."""
        once = total = 0
        for path, tree in self.trees.items():
            words = Counter(re.findall(r"\w+", path.read_text()))
            names = [n.name for n in ast.walk(tree) if isinstance(n, Function) and re.match(r"_[a-z]", n.name)]
            total += len(names)
            once += sum(words[name] == 2 for name in names)
        return once, total

    def table(self) -> dict[str, int | str]:
        once, total = self.used_once()
        return {
            "files": len(self.trees),
            "lines": self.lines,
            "lines per function": f"{self.lines_per_function():.1f}",
            "imports": f"{self.import_lines() / self.lines:.1%}",
            f"functions over {LONGEST_FUNCTION} lines, or {UNCOMMENTED} without a comment": len(self.long_functions()),
            f"functions over {MOST_PARAMETERS} parameters": len(self.many_parameters()),
            f"classes over {LONGEST_CLASS} lines": len(self.long_classes()),
            "circles of imports": len(self.circles()),
            "docstrings": self.docstrings(),
            "docstrings that begin with a preposition or pronoun": len(self.fragments()),
            "private functions used once, of all": f"{once} of {total}",
        }


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


def main(arguments: list[str]) -> int:
    folders = [argument for argument in arguments if argument != "--check"]
    packages = [Package(Path(folder)) for folder in folders]
    tables = [package.table() for package in packages]
    for row in tables[0]:
        print(f"| {row} | {' | '.join(str(table[row]) for table in tables)} |")
    if len(packages) > 1:
        return 0
    findings = [*map(str, packages[0].findings())]
    print(*findings, sep="\n")
    return 1 if findings and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
