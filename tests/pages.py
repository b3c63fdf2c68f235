"""Programs in the documentation as tests run them: a page's script, and what its diffs make of it."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from types import ModuleType

from tests.sources import ROOT


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of that language in docs/<page>, or in README.md."""
    text = (ROOT / page if page == "README.md" else ROOT / "docs" / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def maker(name: str) -> ModuleType:
    """The program docs/<name>.py, which writes pages."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def apply_diff(script: str, diff: str) -> str:
    """The script with each run of "-" lines, which must be there once, replaced by the "+" lines behind it."""
    for old, new in _hunks(diff):
        assert script.count(old) == 1, f"not there exactly once: {old}"
        script = script.replace(old, new)
    return script


def _hunks(diff: str) -> Iterator[tuple[str, str]]:
    """A "-" line that does not follow its forerunner in the script begins a hunk of its own: lines go one by one unless
    they are followed by "+" lines, which take the last one's place."""
    lines = diff.splitlines()
    for number, line in enumerate(lines):
        if line.startswith("-"):
            added = []
            for later in lines[number + 1 :]:
                if not later.startswith("+"):
                    break
                added.append(later[1:] + "\n")
            yield line[1:] + "\n", "".join(added)
