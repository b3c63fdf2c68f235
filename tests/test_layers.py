"""Imports point downwards only: docs/architecture.md, "Layers", read off the syntax trees."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator

import pytest

from tests.sources import ROOT, Module, modules

# Highest first. A module may import those of lower rows, and its own folder. `testing` is for users' tests and ours.
ROWS = (
    ("testing",),
    ("launch", "coordinator", "platforms", "running", "cli", "store_cli", "estimators"),
    ("spark", "local", "torch", "tensorflow", "keras", "horovodrun_options"),
    ("ops", "training"),
    ("driver", "worker", "monitoring"),
    ("state",),
    ("rendezvous", "data"),
    ("protocol", "data.plan", "torch.gradients.buckets"),
    ("errors", "config", "clock"),
)
# Steps sideways that are meant: who imports -> whom, with the reason.
SIDEWAYS = {
    ("estimators", "launch"): "fit() is run() over a materialized DataFrame",
    ("estimators", "platforms"): "the kinds of session that a fit runs over",
    ("estimators", "running"): "fit() pickles the user's objects with the errors of run()",
    ("running", "launch"): "run() is launch() with a function for a program",
    ("running", "platforms"): "the kinds of session that a call runs over",
    ("platforms", "launch"): "a session of Spark is one way to launch",
    ("platforms", "coordinator"): "a session whose client is out of reach has its coordinator in a task",
    ("coordinator", "launch"): "the task supervises the job, as a client within reach does",
    ("cli", "launch"): "the command line calls run()",
    ("cli", "running"): "the command line calls run()",
    ("config", "errors"): "a wrong setting is InvalidInput",
    ("keras", "tensorflow"): "Keras on the TensorFlow backend uses its collectives",
    ("keras", "torch"): "Keras on the torch backend uses its collectives",
}
# The folders of csrc/, highest first; "" is csrc/ itself. A file may include those of lower ones, and its own.
ENGINE = ("", "calls", "shared", "transport", "numbers")
PURE = ("protocol", "data.plan", "torch.gradients.buckets")
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
    "pyspark": ("spark", "estimators"),
    "py4j": ("spark",),
    "pandas": ("spark", "estimators"),
    "torch": ("torch", "keras", "estimators"),
    "tensorflow": ("tensorflow", "keras", "estimators"),
    "keras": ("keras", "estimators"),
    "transformers": ("torch",),
    "accelerate": ("torch",),
    "petastorm": ("data.reading.petastorm_reader",),
    "deltalake": ("data",),
    "pyiceberg": ("data",),
    "starlette": ("rendezvous", "monitoring"),
    "uvicorn": ("rendezvous",),
    "httpx": ("rendezvous",),
    "pyarrow": ("data", "spark", "estimators"),
    "fsspec": ("data", "state"),
    "click": ("cli", "horovodrun_options", "store_cli"),
    "matplotlib": ("monitoring",),
    "cloudpickle": (
        "spark",
        "keras",
        "local",
        "worker",
        "launch",
        "platforms",
        "running",
        "estimators",
        "state",
        "training",
        "testing",
    ),
    "numpy": (
        "data",
        "state",
        "worker",
        "ops",
        "training",
        "torch",
        "tensorflow",
        "keras",
        "estimators",
        "testing",
    ),
    "elastic_collectives": ("worker", "ops", "training", "state", "torch", "tensorflow", "keras", "testing"),
}


def _find_part(name: str) -> str:
    """The part of the table that a module belongs to: data.plan, protocol, errors ... ("" for the package itself)."""
    path = name.removeprefix("spark_elastic").removeprefix(".")
    return path if path in PURE or path == "data.reading.petastorm_reader" else path.split(".")[0]


def _find_row(part: str) -> int:
    folder = part if any(part in row for row in ROWS) else part.split(".")[0]
    for height, row in enumerate(ROWS):
        if folder in row:
            return height
    raise LookupError(f"{part!r} is not in the table of layers: tests/test_layers.py, docs/architecture.md")


def _may_import(importer: str, imported: str) -> bool:
    if _find_row(imported) > _find_row(importer) or (importer, imported) in SIDEWAYS:
        return True
    # A folder's own modules know each other, but its pure module knows nothing of the folder.
    return (
        importer not in ("data.plan", "torch.gradients.buckets")
        and importer.split(".")[0] == imported.split(".")[0]
    )


def _list_ours() -> list[Module]:
    return [module for module in modules() if module.name.startswith("spark_elastic.")]


def _list_imports() -> Iterator[tuple[Module, str, int]]:
    for module in _list_ours():
        for name, line in module.imports():
            yield module, name, line


def test_every_part_has_a_layer() -> None:
    assert {_find_part(module.name) for module in _list_ours()} <= {part for row in ROWS for part in row} | {
        "data.reading.petastorm_reader"
    }


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


def test_modules_for_hand_written_loops_import_no_trainer_of_the_estimators() -> None:
    wrong = [
        f"{module.path}:{line}: {module.name} imports {name}"
        for module, name, line in _list_imports()
        for learner in ("spark_elastic.torch.train", "spark_elastic.keras.train")
        if f"{name}.".startswith(f"{learner}.")
        and not f"{module.name}.".startswith((f"{learner}.", "spark_elastic.estimators."))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("importer", "imported", "allowed"),
    [
        ("driver", "protocol", True),
        ("driver", "worker", False),
        ("driver", "spark", False),
        ("worker", "state", True),
        ("protocol", "rendezvous", False),
        ("protocol", "protocol", True),
        ("data", "data.plan", True),
        ("data.plan", "data", False),
        ("torch", "torch.gradients.buckets", True),
        ("data.reading.petastorm_reader", "data", True),
        ("errors", "clock", False),
    ],
)
def test_the_layer_rule_allows_and_forbids_the_right_imports(
    importer: str, imported: str, allowed: bool
) -> None:
    assert _may_import(importer, imported) is allowed


def test_foreign_packages_stay_where_they_belong() -> None:
    wrong = []
    for module in _list_ours():
        part = _find_part(module.name)
        for name, line in module.imports():
            package = name.split(".")[0]
            if package == "spark_elastic" or package in sys.stdlib_module_names:
                continue
            allowed = FOREIGN.get(package, ())
            # Naming a foreign type in an annotation ties nothing to the package.
            if not {part, part.split(".")[0]} & set(allowed) and line not in module.lines_for_types_only():
                wrong.append(f"{module.path}:{line}: {part} imports {package}")
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
        and (module.name, name) != ("elastic_collectives.backends.pygloo", "pygloo")
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
