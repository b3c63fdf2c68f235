"""Imports point downwards only: docs/architecture.md, "Layers", read off the syntax trees."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator

from tests.sources import ROOT, Module, modules

# Highest first. A module may import those of lower rows, and its own folder. `testing` is for users' tests and ours.
ROWS = (
    ("testing", "torch", "tensorflow", "keras", "as_horovod"),
    ("integrations",),
    ("horovod",),
    ("handwritten",),
    ("estimators",),
    ("clusters",),
    ("training",),
    ("gradients",),
    ("driver", "worker"),
    ("monitoring",),
    ("runs",),
    ("rendezvous", "tables"),
    ("data",),
    ("protocol", "data.plan", "gradients.buckets"),
    ("errors", "checks", "config", "clock"),
)
# Modules that only give a public name to what a higher part defines.
FACES = ("estimators.export", "estimators.mlflow_fit", "estimators.optuna_pruning")
# Steps sideways that are meant: who imports -> whom, with the reason.
SIDEWAYS = {
    ("checks", "errors"): "a wrong value is InvalidInput",
    ("config", "errors"): "a wrong setting is InvalidInput",
    ("config", "checks"): "settings are checked as other values are",
}
# The folders of csrc/, highest first; "" is csrc/ itself. A file may include those of lower ones, and its own.
ENGINE = ("", "calls", "shared", "transport", "numbers")
PURE = ("protocol", "data.plan", "gradients.buckets")
# A module outside of these parts that is pure says so in a sentence: "Pure.", "..., pure.", "Pure; any thread."
SAYS_PURE = re.compile(r"(?:^|[.,;] )[Pp]ure[.;:]", re.MULTILINE)
# What has a clock, a lock, a socket, a file or a source of randomness, or looks at the machine. `io` is memory here.
IMPURE = {
    "asyncio", "concurrent", "ctypes", "http", "importlib.metadata", "logging", "multiprocessing", "os", "pathlib",
    "platform", "queue", "random", "secrets", "select", "shutil", "signal", "socket", "ssl", "subprocess", "tempfile",
    "threading", "time", "urllib",
}  # fmt: skip
# Foreign package -> the parts of spark_elastic that may import it.
FOREIGN = {
    "cv2": ("data",),
    "PIL": ("data",),
    "pyspark": ("clusters.spark", "estimators"),
    "py4j": ("clusters.spark", "estimators.dataframes"),
    "pandas": ("clusters.spark", "estimators", "integrations"),
    "torch": ("training.torch", "gradients", "estimators", "handwritten", "horovod", "integrations", "data.packing"),
    "tensorflow": ("training.keras", "estimators", "horovod"),
    "keras": ("training.keras", "estimators", "horovod"),
    "transformers": ("integrations",),
    "accelerate": ("integrations",),
    "petastorm": ("data",),
    "deltalake": ("tables",),
    "pyiceberg": ("tables",),
    "pyarrow": ("data", "tables", "clusters.spark", "estimators"),
    "fsspec": ("data", "tables", "runs"),
    "click": ("clusters",),
    "matplotlib": ("monitoring",),
    "cloudpickle": ("clusters", "training", "worker", "driver", "runs", "estimators", "handwritten", "testing"),
    "numpy": (
        "data", "tables", "runs", "worker", "gradients", "training", "estimators", "handwritten", "horovod",
        "integrations", "testing",
    ),
    "elastic_collectives": (
        "worker", "runs", "gradients", "training", "handwritten", "horovod", "integrations", "testing",
    ),
}  # fmt: skip


def _find_part(name: str) -> str:
    """The part of the table that a module belongs to: data.plan, protocol, errors ... ("" for the package itself)."""
    path = name.removeprefix("spark_elastic").removeprefix(".")
    return path if path in (*PURE, *FACES) else path.split(".")[0]


def _find_row(part: str) -> int:
    folder = part if any(part in row for row in ROWS) else part.split(".")[0]
    for height, row in enumerate(ROWS):
        if folder in row:
            return height
    raise LookupError(f"{part!r} is not in the table of layers: tests/test_layers.py, docs/architecture.md")


def _may_import(importer: str, imported: str) -> bool:
    if importer in FACES or _find_row(imported) > _find_row(importer) or (importer, imported) in SIDEWAYS:
        return True
    # A folder's own modules know each other, but its pure module knows nothing of the folder.
    is_own = importer.split(".")[0] == imported.split(".")[0]
    return is_own and importer not in ("data.plan", "gradients.buckets")


def _list_ours() -> list[Module]:
    return [module for module in modules() if module.name.startswith("spark_elastic.")]


def _list_imports() -> Iterator[tuple[Module, str, int]]:
    for module in _list_ours():
        for name, line in module.imports():
            yield module, name, line


def test_every_part_has_a_layer() -> None:
    known = {*FACES, *(part for row in ROWS for part in row)}
    assert {_find_part(module.name) for module in _list_ours()} <= known


def test_architecture_page_shows_these_rows() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert "\n".join("  ".join(row) for row in ROWS) in page


def test_architecture_page_says_what_each_part_owns() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page.partition("| part | owns |")[2].partition("\n\n")[0]
    told = [name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.split("|")[1])]
    parts = [part for row in ROWS for part in row if "." not in part]
    assert sorted(told) == sorted([*parts, "elastic_collectives"])


def test_imports_point_downwards() -> None:
    wrong = [
        f"{module.path}:{line}: {_find_part(module.name)} imports {_find_part(name)}"
        for module, name, line in _list_imports()
        if name.split(".")[0] == "spark_elastic"
        and _find_part(name)
        and not _may_import(_find_part(module.name), _find_part(name))
    ]
    assert not wrong, "\n".join(wrong)


def test_no_modules_import_each_other_in_a_circle() -> None:
    imports: dict[str, set[str]] = {module.name: set() for module in _list_ours()}
    for module, name, line in _list_imports():
        if name in imports and line not in module.lines_for_types_only():
            imports[module.name].add(name)
    while leaves := [name for name, imported in imports.items() if not imported & imports.keys()]:
        for name in leaves:
            del imports[name]
    assert not imports, f"in circles, or above them: {sorted(imports)}"


ALLOWED = ["worker>runs", "estimators.export>integrations", "protocol>protocol", "data>data.plan"]
FORBIDDEN = ["driver>worker", "training>handwritten", "protocol>rendezvous", "data.plan>data"]


def test_the_layer_rule_allows_and_forbids_the_right_imports() -> None:
    assert [pair for pair in ALLOWED if not _may_import(*pair.split(">"))] == []
    assert [pair for pair in FORBIDDEN if _may_import(*pair.split(">"))] == []


def test_foreign_packages_stay_where_they_belong() -> None:
    wrong = []
    for module in _list_ours():
        for name, line in module.imports():
            package = name.split(".")[0]
            if package == "spark_elastic" or package in sys.stdlib_module_names:
                continue
            allowed = FOREIGN.get(package, ())
            # Naming a foreign type in an annotation ties nothing to the package.
            is_allowed = any(f"{module.name}.".startswith(f"spark_elastic.{part}.") for part in allowed)
            if not is_allowed and line not in module.lines_for_types_only():
                wrong.append(f"{module.path}:{line}: {module.name} imports {package}")
    assert not wrong, "\n".join(wrong)


def test_pure_modules_import_no_clock_lock_socket_or_file() -> None:
    wrong = [
        f"{module.path}:{line}: {name}"
        for module in modules()
        if _find_part(module.name) in PURE or SAYS_PURE.search(ast.get_docstring(module.tree) or "")
        for name, line in module.imports()
        if {name, name.split(".")[0]} & IMPURE
    ]
    assert not wrong, "\n".join(wrong)


def test_the_engine_knows_numpy_and_nothing_else() -> None:
    wrong = [
        f"{module.path}:{line}: {name}"
        for module in modules()
        if module.name.split(".")[0] == "elastic_collectives"
        for name, line in module.imports()
        if name.split(".")[0] not in {"elastic_collectives", "numpy", *sys.stdlib_module_names}
    ]
    assert not wrong, "\n".join(wrong)


def test_the_engines_includes_point_downwards() -> None:
    csrc = ROOT / "csrc"
    sources = [path for path in csrc.rglob("*") if path.suffix in (".h", ".cc")]
    assert {path.parent.name for path in sources if path.parent != csrc} == set(ENGINE[1:])
    for path in sources:
        own = "" if path.parent == csrc else path.parent.name
        for folder in re.findall(r'^#include "(?:(\w+)/)?\w+\.h"', path.read_text(), re.MULTILINE):
            assert ENGINE.index(own) <= ENGINE.index(folder), (
                f"{path.relative_to(ROOT)} includes {folder or 'csrc'}"
            )
