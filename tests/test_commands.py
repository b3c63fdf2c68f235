"""Each command that a page or a program's docstring names: its verb, its script and its options are there.

What they then do has tests of its own: verbs are what runs the tests, `spark-elastic-run` has tests/component/local,
`spark-submit` and the five minutes tests/spark/test_examples.py, the wheel tests/faults/test_built_wheel.py.
"""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from benchmarks import run as benchmarks
from spark_elastic.clusters import cli, store_cli
from tests.sources import ROOT

PROGRAMS = ("./build.sh", "nox", "spark-elastic-run", "spark-elastic", "spark-submit", "python")
WORDS = ("NAME", "VERB", "[name]", "[...]")  # of what the reader fills in
VERBS = set(re.findall(r"^(\w+)\) # ", (ROOT / "build.sh").read_text(), re.MULTILINE))


def pages() -> list[Path]:
    return [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        ROOT / "benchmarks" / "results" / "README.md",
        *(ROOT / "benchmarks").glob("*.py"),
        *(ROOT / "examples").glob("*.py"),
    ]


def read_prose(page: Path) -> str:
    if page.suffix == ".py":
        return ast.get_docstring(ast.parse(page.read_text())) or ""
    return page.read_text()


def commands() -> list[tuple[str, list[str]]]:
    """(page, words) of each command between backticks, in a fence, or on an indented line of its own."""
    found = []
    for page in pages():
        text = read_prose(page).replace("\\\n", " ")
        lines = [line.strip().removeprefix("sudo ") for line in text.splitlines()]
        whole = [line.split("  #")[0].split("    ")[0] for line in lines if line.startswith(PROGRAMS)]
        quoted = [re.sub(r"^(sudo|\w+=\S+) ", "", code) for code in re.findall(r"`([^`\n]+)`", text)]
        for command in [part.strip() for line in whole + quoted for part in line.split("&&")]:
            if command.split(" ")[0] in PROGRAMS and " " in command:
                found.append((str(page.relative_to(ROOT)), shlex.split(command)))
    return found


def of(program: str) -> list[tuple[str, list[str]]]:
    return [(page, words[1:]) for page, words in commands() if words[0] == program]


def test_the_pages_contain_commands() -> None:
    named = {words[0] for _, words in commands()}
    assert named == set(PROGRAMS)
    assert len(commands()) >= 40


def test_pages_and_build_sh_have_the_same_verbs() -> None:
    named = {words[0] for _, words in of("./build.sh")}
    assert {"demo", "test", "build", "wheel"} == named == VERBS


def test_pages_and_the_noxfile_have_the_same_sessions() -> None:
    command = [sys.executable, "-m", "nox", "--list", "-f", str(ROOT / "noxfile.py")]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    sessions = set(re.findall(r"^[*-] (\S+)", listed, re.MULTILINE))
    named = {words[1] for _, words in of("nox") if words[0] == "-s"}
    # CONTRIBUTING has those of one kind in one row: `nox -s wheel` / `sdist`
    rows = re.findall(r"^\| `nox -s .*", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    named |= {word for row in rows for word in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named - set(WORDS) == sessions


def test_each_benchmark_of_the_table_exists_and_takes_its_settings() -> None:
    for name, case in benchmarks.CASES.items():
        module, function = case.measure.split(":")
        tree = ast.parse((ROOT / "benchmarks" / f"{module}.py").read_text())
        (measure,) = (n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == function)
        known = {argument.arg for argument in measure.args.args}
        assert len(measure.args.defaults) == len(known), name
        assert case.settings.keys() | case.small.keys() <= known, name
        assert (benchmarks.RESULTS / f"{name}.json").exists()
    for page, words in of("python"):
        if words[:2] == ["-m", "benchmarks.run"]:
            names = [word for word in words[2:] if not word.startswith(("-", "...")) and "=" not in word]
            assert set(names) <= {*benchmarks.CASES, *WORDS}, page


def test_each_script_of_a_page_exists_and_has_its_options() -> None:
    for page, words in [*of("python"), *of("spark-submit")]:
        scripts = [word for word in words if word.endswith(".py") and "/" in word]
        # One without a dot is the reader's own, as a script without a folder is.
        ours = words[0] == "-m" and "." in words[1]
        modules = [words[1].replace(".", "/") + ".py"] if ours else []
        for script in [*scripts, *modules]:
            assert (ROOT / script).is_file(), f"{page}: {script}"
        if modules and modules[0].startswith("benchmarks/"):
            known = (ROOT / modules[0]).read_text()
            unknown = [w for w in words if w.startswith("--") and f'"{w}"' not in known]
            assert unknown == [], page


@pytest.mark.parametrize(
    ("page", "words"), of("spark-elastic-run"), ids=lambda value: str(value)[:30].replace("/", "-")
)
def test_spark_elastic_run_has_the_options_of_the_pages(
    page: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[cli.RunOptions] = []
    monkeypatch.setattr(cli, "execute", taken.append)
    complete = words if "python" in words else [*words, "-np", "2", "python", "train.py"]
    result = CliRunner().invoke(cli.run, complete)
    assert (result.exit_code, len(taken)) == (0, 1), result.output


def test_spark_elastic_has_the_options_of_the_pages() -> None:
    for page, words in of("spark-elastic"):
        group: click.Command = store_cli.group
        for word in words[: 1 if words[0] == "doctor" else 2]:
            for name in word.split("|"):
                assert isinstance(group, click.Group), page
                assert name in group.commands, f"{page}: {name}"
            group = group.commands[word.split("|")[0]]
        known = {option for parameter in group.params for option in parameter.opts}
        given = {word.strip("[]").split("=")[0] for word in words if word.strip("[").startswith("-")}
        assert given <= known, f"{page}: {sorted(given - known)}"
