"""The documentation: every page in the menu, links that lead somewhere, programs that run, a site that is built."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from spark_elastic.errors import JobFailed
from tests.pages import blocks, maker
from tests.sources import ROOT, modules

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
LINK = re.compile(r"(?<!!)\[[^]]*\]\(([^)\s]+)\)|!\[[^]]*\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """As the table of contents names its headings."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


def links(page: Path) -> Iterator[str]:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    for match in LINK.finditer(text):
        target = match[1] or match[2]
        if not target.startswith("http"):
            yield target


@pytest.mark.timeout(180)
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "ElasticTorchEstimator" in (tmp_path / "api" / "index.html").read_text()


def test_the_menu_has_every_page_once() -> None:
    named = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(str(page.relative_to(DOCS)) for page in PAGES)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.name)
def test_links_have_targets(page: Path) -> None:
    for target in links(page):
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target
        assert page == ROOT / "README.md" or DOCS in file.parents, f"{target} is not part of the site"


@pytest.mark.parametrize("page", sorted((DOCS / "operations").glob("*.md")), ids=lambda page: page.stem)
def test_each_place_to_run_says_whether_it_was_tried(page: Path) -> None:
    assert page.read_text().split("\n\n")[1].startswith(("Run by us on ", "Not run: from documentation"))


def test_the_page_of_parameters_is_current() -> None:
    page: str = maker("generate").params_page()
    assert page == (DOCS / "params.md").read_text(), "run python docs/generate.py"


@pytest.mark.parametrize("name", ["platforms", "works_with", "conformance"])
def test_the_page_of_what_was_tried_is_current(name: str) -> None:
    page: str = getattr(maker("generate"), f"{name}_page")()
    assert page == (DOCS / f"{name.replace('_', '-')}.md").read_text(), "run python docs/generate.py"


@pytest.mark.timeout(300)  # it imports both frameworks
def test_figures_of_pages_are_those_of_their_records() -> None:
    made = maker("generate")
    assert made.benchmarks_page() == (DOCS / "benchmarks.md").read_text(), "run python docs/generate.py"
    for page in PAGES:
        assert made.fill_figures(page.read_text()) == page.read_text(), "run python docs/generate.py"
    figure = "9.00<!-- ratio of memory: 1,024 MB in one row group: peak of a worker -->"
    assert made.fill_figures(figure)[:4] == "0.59"


def test_each_tutorial_has_the_text_and_code_of_its_notebook_and_ends_with_numbers() -> None:
    made = maker("tutorials")
    pages = {made.page_path(name): made.read(name) for name in made.NAMES}
    assert sorted(pages) == sorted((DOCS / "tutorials").glob("*.md"))
    for name, (path, notebook) in zip(made.NAMES, pages.items(), strict=True):
        page, _ = made.render(name, notebook)
        assert made.OUTPUT.sub("", path.read_text()) == page, f"run python docs/tutorials.py {name}"
        *_, last = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
        assert "assert " in last, name
        assert "\nprint(" in last, name


def test_the_first_page_has_the_figures_of_head_to_head() -> None:
    tables = (DOCS / "head-to-head.md").read_text().split("\n## ")
    undisturbed, killed = (
        {cells[0]: [re.sub(r" \(.*", "", cell) for cell in cells[1:]] for cells in rows(table)}
        for title in ("No fault", "A worker is killed every 20 s")
        for table in tables
        if table.startswith(title)
    )
    shown = rows((ROOT / "README.md").read_text().split("## Try it")[0])
    assert len(shown) == len(killed) == 5
    for peer, *figures in shown:
        name = re.sub(r"\*| (?:[\d.]+|nightly)$", "", peer).replace('`determinism="bitwise"`', "bitwise")
        _, took, _, missing, twice, again, stall, distance = killed[name]
        near = "0" if float(distance) == 0 else f"{float(distance):.0e}".replace("e-0", "e-")
        assert figures == [f"{took} ({undisturbed[name][1]})", stall, again, missing, twice, near]


def rows(table: str) -> list[list[str]]:
    """The cells of a table's rows below its head."""
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    lines = [line for line in lines if not line.startswith(("| |", "| peer"))]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@cache
def parse_tests() -> tuple[ast.Module, ...]:
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    return tuple(ast.parse(path.read_text(encoding="utf-8")) for path in paths)


def texts(trees: Iterable[ast.Module]) -> str:
    """All string constants of programs, as Python pieces them together; of patterns, what they match."""
    nodes = (node for tree in trees for node in ast.walk(tree))
    constants = (n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str))
    return re.sub(r"\\(.)", r"\1", "\n".join(constants))


def test_each_message_of_the_page_of_errors_is_in_the_code_and_in_a_test() -> None:
    page = (DOCS / "messages.md").read_text()
    messages = re.findall(r"^\| `(.*?)` \|", page, re.MULTILINE)
    assert len(messages) >= 25
    said, provoked = texts(module.tree for module in modules()), texts(parse_tests())
    assert [message for message in messages if message not in said] == [], "no error says this"
    assert [message for message in messages if message not in provoked] == [], "no test provokes this"


def test_each_error_of_the_page_is_expected_by_a_test() -> None:
    page = (DOCS / "errors.md").read_text()
    errors = set(re.findall(r"^\| `(\w+)` \|", page.split("## Recoverable or not")[0], re.MULTILINE))
    nodes = (node for tree in parse_tests() for node in ast.walk(tree))
    calls = (node for node in nodes if isinstance(node, ast.Call) and node.args)
    raises = (ast.unparse(call.args[0]) for call in calls if ast.unparse(call.func) == "pytest.raises")
    expected = set(re.findall(r"\w+", " ".join(raises)))
    assert len(errors) >= 14
    assert errors <= expected, f"no test provokes {sorted(errors - expected)}"


def test_the_page_of_errors_says_how_many_kinds_of_a_failed_job_there_are() -> None:
    page = (DOCS / "errors.md").read_text()
    below = page.split("the six below are its kinds")[1]
    kinds = {kind.__name__ for kind in JobFailed.__subclasses__()}
    assert set(re.findall(r"^\| `(\w+)` \|", below, re.MULTILINE)[:6]) == kinds


def test_rules_are_mentioned_with_the_names_that_the_protocol_gives_them() -> None:
    rules = "".join(page.read_text() for page in sorted(DOCS.glob("protocol*.md")))
    names = dict(re.findall(r"^- \*\*(R\d+) \((.+?)\)\.\*\*", rules, re.MULTILINE))
    assert len(names) >= 20
    sources = [path for folder in ("spark_elastic", "python", "csrc") for path in (ROOT / folder).rglob("*")]
    pages = [page for page in PAGES if not page.name.startswith("protocol")]
    wrong = []
    for path in (*pages, *(path for path in sources if path.suffix in (".py", ".h", ".cc"))):
        text = re.sub(r"\s+(?:# |// )?", " ", path.read_text())
        for rule, said in re.findall(r"\b(R\d+)\b(?:,? \(?([a-zA-Z0-9 ]+))?", text):
            if not said.startswith(names.get(rule, "?")):
                wrong.append(f"{path.relative_to(ROOT)}: {rule} {said}")
    assert wrong == [], "protocol.md has the names"


def test_the_page_that_explains_one_file_quotes_it() -> None:
    program = (ROOT / "examples" / "nano_elastic.py").read_text()
    assert len(program.splitlines()) <= 500
    quoted = blocks("how-it-works.md", "python")
    assert len(quoted) >= 5
    assert [block for block in quoted if block not in program] == []


def test_programs_of_the_testing_page_run(tmp_path: Path) -> None:
    programs = blocks("testing.md", "python")
    assert len(programs) >= 3
    assert sum("\nassert " in program for program in programs) >= 2, "the programs check what they show"
    for program in programs:
        exec(compile(program.replace("/path/that/all/hosts/see", str(tmp_path)), "testing.md", "exec"), {})
