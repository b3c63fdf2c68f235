"""Rules of the house that a machine can see: sizes, names, time, the environment, and the paths of one machine."""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.sources import PACKAGES, ROOT, Module, modules

WALL = 800
FORBIDDEN = {"util", "utils", "common", "helper", "helpers", "manager", "base", "misc", "service"}
# Module -> why it may look up a variable of the environment.
READERS_OF_THE_ENVIRONMENT = {
    "spark_elastic.config": "the one place for settings",
    "spark_elastic.clusters.spark.slot_task": "the executor's id, which Spark on Kubernetes gives by environment alone",
    "spark_elastic.tables.catalogs": "a token, in the variable that the user names",
}
# Python 3.11 and newer have them.
NEWER_NAMES = {
    *("tomllib", "typing.Self", "typing.assert_never", "typing.Never", "typing.override"),
    *("datetime.UTC", "enum.StrEnum"),
    *("asyncio.timeout", "asyncio.TaskGroup", "asyncio.Runner", "contextlib.chdir", "hashlib.file_digest"),
    *("logging.getLevelNamesMapping", "itertools.batched", "sys.exception", "error.add_note", "exc.add_note"),
    *("logging.LoggerAdapter[]", "logging.StreamHandler[]"),  # as bases of a class
}
SOURCE_SUFFIXES = {".py", ".cc", ".cpp", ".h", ".sh"}
# Written in pieces, so that this file does not hold what it forbids.
MACHINE_PATHS = re.compile("/(" + "|".join(["work/", "root/", "home/[a-z]", "opt/pypi", r"tmp/\w"]) + ")")


def _list_tracked() -> list[Path]:
    listing = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True, timeout=30)
    return [ROOT / name for name in listing.split("\0") if name and (ROOT / name).is_file()]


def _functions(module: Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_no_module_needs_a_newer_standard_library_than_python_3_10_has() -> None:
    wrong = [
        f"{module.path.relative_to(ROOT)}:{node.lineno} {name}"
        for module in modules()
        for node in ast.walk(module.tree)
        for name in _library_names(node)
        if name in NEWER_NAMES
    ]
    assert not wrong


def _library_names(node: ast.AST) -> Iterator[str]:
    """`module.name` for each import of a name and each attribute of a plain name; `module.name[]` for each base."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Attribute):
        yield f"{node.value.id}.{node.attr}" if isinstance(node.value, ast.Name) else node.attr
    elif isinstance(node, ast.ClassDef):
        yield from (f"{ast.unparse(base.value)}[]" for base in node.bases if isinstance(base, ast.Subscript))


def test_no_file_has_more_than_800_lines() -> None:
    sources = [path for path in _list_tracked() if path.suffix in SOURCE_SUFFIXES]
    long = {str(path.relative_to(ROOT)): lines for path in sources if (lines := _count(path)) > WALL}
    assert not long, f"more than {WALL} lines, cut each along its concepts: {long}"


def _count(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_no_part_has_more_lines_than_its_budget() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page.partition("| lines |")[2].partition("\n\n")[0].splitlines()[2:]
    budgets = {cells[1]: int(cells[-2].replace(",", "")) for cells in (line.split("|") for line in table)}
    lines = dict.fromkeys(budgets, 0)
    for module in modules():
        package, _, inner = module.name.partition(".")
        part = package if package == "elastic_collectives" else inner.split(".")[0]
        if part:
            (parts,) = (parts for parts in budgets if f"`{part}`" in parts)
            lines[parts] += _count(module.path)
    over = {name: f"{lines[name]} of {most}" for name, most in budgets.items() if lines[name] > most}
    assert not over, "docs/architecture.md, Layers: cut lines, or raise the budget and say why"


def test_functions_are_short() -> None:
    for package in PACKAGES:
        own = [module for module in modules() if module.name.split(".")[0] == package]
        lengths = [1 + (f.end_lineno or f.lineno) - f.lineno for module in own for f in _functions(module)]
        longest = statistics.quantiles(lengths, n=10)[-1]
        assert longest <= 40, f"{package}: the longest tenth of its functions grew"


def test_file_names_are_specific() -> None:
    paths = [path.relative_to(ROOT) for path in _list_tracked()]
    wrong = [str(path) for path in paths if FORBIDDEN & {Path(part).stem for part in path.parts}]
    assert not wrong, f"names that say nothing: {wrong}"


def test_time_is_named_in_the_clock_alone() -> None:
    wrong = [
        f"{module.path}:{line}"
        for module in modules()
        if module.name.split(".")[0] == "spark_elastic" and module.name != "spark_elastic.clock"
        for name, line in module.imports()
        if name == "time"
    ]
    assert not wrong, f"take a Clock, or `now` as a value: {wrong}"


def test_environment_is_read_in_config_alone() -> None:
    wrong = [
        f"{module.path}:{line}"
        for module in modules()
        if module.name not in READERS_OF_THE_ENVIRONMENT
        for line in _environment_reads(module)
    ]
    assert not wrong, f"config.from_env() reads the environment, others take arguments: {wrong}"


def _environment_reads(module: Module) -> Iterator[int]:
    """Lines that look up one variable; handing the whole environment to a child process is no reading."""
    for node in ast.walk(module.tree):
        named = isinstance(node, ast.Attribute) and node.attr in {"get", "setdefault", "pop"}
        looked_up = named or (isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load))
        through_os = isinstance(node, ast.Attribute) and node.attr == "getenv"
        if through_os or (looked_up and ast.unparse(node.value).endswith("environ")):
            yield node.lineno


def test_modules_say_what_they_own() -> None:
    said = {str(module.path): ast.get_docstring(module.tree) or "" for module in modules()}
    wrong = [path for path, text in said.items() if not 1 <= len(text.splitlines()) <= 12]
    assert not wrong, f"a module has a docstring, of at most 12 lines: {wrong}"


def test_constructors_start_nothing() -> None:
    wrong = [
        f"{module.path}:{call.lineno}"
        for module in modules()
        for function in _functions(module)
        if function.name in {"__init__", "__post_init__"}
        for call in ast.walk(function)
        if isinstance(call, ast.Call) and ast.unparse(call.func).split(".")[-1] in {"start", "Popen"}
    ]
    assert not wrong, f"what start(), spawn() or `with` should do: {wrong}"


def test_every_folder_of_modules_is_a_package() -> None:
    """A namespace of Python's could be spread over several places, and has nowhere to say what it owns."""
    wrong = sorted({str(m.path.parent) for m in modules() if not (m.path.parent / "__init__.py").exists()})
    assert not wrong, f"without an __init__.py: {wrong}"


def test_no_path_of_a_machine() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in _list_tracked()
        if path.suffix not in {".png", ".npz", ".parquet", ".jsa"}
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if MACHINE_PATHS.search(line)
    ]
    assert not wrong, f"paths that exist on one machine only: {wrong}"


def test_the_changelog_is_brief() -> None:
    """What a version brings, in few lines; the documentation says the rest."""
    _, *versions = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    counts = {version.splitlines()[0]: version.count("\n- ") for version in versions}
    assert max(counts.values()) <= 50, f"more than 50 entries, sum them up: {counts}"
    assert "\n### Fixed" not in versions[-1], "of the first version nothing can be fixed: say it in docs/"


def test_errors_page_names_every_error() -> None:
    (errors,) = (module for module in modules() if module.name == "spark_elastic.errors")
    page = (ROOT / "docs" / "errors.md").read_text()
    names = [node.name for node in errors.tree.body if isinstance(node, ast.ClassDef)]
    missing = [name for name in names if f"`{name}`" not in page]
    assert missing == ["ElasticError"]  # named as spark_elastic.ElasticError


def test_tests_import_from_no_test_and_unit_tests_from_units_alone() -> None:
    wrong = []
    for path in _list_tracked():
        place = path.relative_to(ROOT).parts
        if place[0] != "tests" or path.suffix != ".py":
            continue
        for name, line in _test_imports(path):
            parts = name.split(".")
            beyond = place[1] == "unit" and parts[1] in {"component", "faults", "simulation", "spark"}
            if beyond or any(part.startswith("test_") for part in parts):
                wrong.append(f"{'/'.join(place)}:{line} imports {name}")
    assert not wrong, "\n".join(["what tests share stands in a module of its own beside them:", *wrong])


def _test_imports(path: Path) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of what a file imports from the folder of tests."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names if alias.name.startswith("tests."))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tests":
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
