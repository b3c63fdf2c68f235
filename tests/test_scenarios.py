"""Each numbered scenario has a test that runs in every build, and the switch that turns faults off works."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import scenarios

TESTS = Path(__file__).parent


def _find_marked() -> Iterator[tuple[str, str, frozenset[str], bool]]:
    """(scenario, test, other marks, whether it takes `fault`) of every marked test, off the syntax trees."""
    for path in sorted(TESTS.rglob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
        marks_of_all = [node.value for node in assigned if _names(node.targets) == {"pytestmark"}]
        module_marks = _find_marks(marks_of_all)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                takes = "fault" in {argument.arg for argument in node.args.args + node.args.kwonlyargs}
                marks = module_marks | _find_marks(node.decorator_list)
                for number in (name for mark in node.decorator_list for name in _ids(mark)):
                    yield number, f"{path.name}::{node.name}", marks, takes


def _names(targets: list[ast.expr]) -> set[str]:
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _ids(mark: ast.expr) -> list[str]:
    if isinstance(mark, ast.Call) and ast.unparse(mark.func).endswith("mark.scenario"):
        return [str(ast.literal_eval(argument)) for argument in mark.args]
    return []


def _find_marks(expressions: list[ast.expr]) -> frozenset[str]:
    text = " ".join(ast.unparse(expression) for expression in expressions)
    return frozenset(re.findall(r"mark\.(\w+)", text))


def _runs_in_ci(marks: frozenset[str]) -> bool:
    return ("faults" not in marks or "ci" in marks) and not marks & {"skip", "skipif", "xfail"}


def test_every_scenario_has_a_test_in_every_build() -> None:
    played = {number for number, _, marks, _ in _find_marked() if _runs_in_ci(marks)}
    missing = [number for number in scenarios.IDS if number not in played]
    assert not missing, f"no test plays {', '.join(missing)}"


def test_every_mark_names_a_scenario_and_its_faults_can_be_switched_off() -> None:
    for number, test, _, takes_fault in _find_marked():
        assert number in scenarios.IDS, f"{test} plays {number}, which is no scenario"
        said = f"{test} plays {number} but does no fault by `fault`"
        assert takes_fault or number in scenarios.FAULTLESS, said


PLAYED = """
import pytest

@pytest.mark.scenario("E1")
def test_sees_its_fault(fault):
    assert fault(int, "1") == 1

@pytest.mark.scenario("E2")
def test_sees_nothing(fault):
    fault(int, "1")

@pytest.mark.scenario("E3")
def test_does_no_fault(fault):
    pass

@pytest.mark.scenario("E4")
def test_skips(fault):
    pytest.skip("no")
"""


@pytest.mark.parametrize(
    ("options", "failed"),
    [
        ((), {"test_does_no_fault", "test_skips"}),
        (("--without-faults",), {"test_sees_nothing", "test_does_no_fault", "test_skips"}),
    ],
)
def test_a_scenario_test_that_passes_without_its_fault_fails(
    tmp_path: Path, options: tuple[str, ...], failed: set[str]
) -> None:
    (tmp_path / "test_played.py").write_text(PLAYED)
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rA", str(tmp_path), *options]
    config = ["--rootdir", str(tmp_path), "-c", str(TESTS.parent / "pyproject.toml")]
    command, place = [*command, *config], TESTS.parent
    done = subprocess.run(command, check=False, cwd=place, capture_output=True, text=True, timeout=50)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    bad = {line.split("::")[1].split()[0] for line in lines}
    assert bad == failed, done.stdout
