"""The project's sources as syntax trees: what the tests of the house read."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"spark_elastic": ROOT, "elastic_collectives": ROOT / "python"}
# Processes that tests start, and those below, load torch's compiler when they use it, and not before.
LIGHT_START = ROOT / "tests" / "light_start"
PYTHONPATH = os.pathsep.join(map(str, [*PACKAGES.values(), LIGHT_START]))


@dataclass(frozen=True)
class Module:
    """A Python file of one of the two packages."""

    name: str
    path: Path
    tree: ast.Module
    is_package: bool

    def imports(self) -> Iterator[tuple[str, int]]:
        """(dotted name, line) of everything imported anywhere in the file, inside functions too. `from a.b import c`
        gives a.b.c where that is one of our modules, a.b otherwise."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((alias.name, node.lineno) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                source = self._make_absolute(node)
                for alias in node.names:
                    inner = f"{source}.{alias.name}"
                    yield (inner if inner in names() else source), node.lineno

    def lines_for_types_only(self) -> frozenset[int]:
        """Lines under `if TYPE_CHECKING:`, which never run."""
        blocks = (node for node in ast.walk(self.tree) if isinstance(node, ast.If))
        return frozenset(
            line
            for block in blocks
            if isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"
            for statement in block.body
            for line in range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
        )

    def _make_absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        drop = node.level - 1 if self.is_package else node.level
        return ".".join([*parts[: len(parts) - drop], *([node.module] if node.module else [])])


def _files() -> Iterator[tuple[str, Path]]:
    for package, folder in PACKAGES.items():
        for path in sorted((folder / package).rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


@cache
def names() -> frozenset[str]:
    """Dotted names of all modules of both packages."""
    return frozenset(name for name, _ in _files())


@cache
def modules() -> tuple[Module, ...]:
    """Every module of both packages."""
    return tuple(
        Module(name, path, ast.parse(path.read_text(), str(path)), path.name == "__init__.py")
        for name, path in _files()
    )
