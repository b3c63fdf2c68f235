"""Writes docs/tutorials/*.md: notebooks of examples/notebooks with what they print and draw.

`python docs/tutorials.py [NAME ...]`, in the repository, runs all of them or those named (a minute each).
"""

from __future__ import annotations

import base64
import os
import re
import sys
import tempfile
import textwrap
from pathlib import Path

import nbformat

from tests.notebooks import execute
from tests.spark.cluster import cluster_environment

DOCS = Path(__file__).resolve().parent
NOTEBOOKS = DOCS.parent / "examples" / "notebooks"
PICTURES = DOCS / "images" / "tutorials"
NAMES = (
    "02-tabular-classification",
    "08-text-from-a-table",
    "09-images-from-a-table",
    "10-lora",
    "07-loop-on-rows",
    "03-lose-an-executor",
)
HEAD = "<!-- made by python docs/tutorials.py of examples/notebooks/{}.ipynb -->"
# What differs from run to run, or is for a terminal.
SCRUBBED = (
    (rf"(file:/*)?{tempfile.gettempdir()}/[\w.-]+", "FOLDER"),
    (r"token=\S+", "token=TOKEN"),
    (r"\x1b\[[0-9;]*m", ""),
)
OUTPUT = re.compile(r"^```text\n.*?^```\n\n|^!\[.*?\]\(.*?\)\n\n", re.DOTALL | re.MULTILINE)
LARGEST = 60_000  # bytes of a picture


def page_path(name: str) -> Path:
    return DOCS / "tutorials" / f"{name[3:]}.md"


def read(name: str) -> nbformat.NotebookNode:
    return nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)


def render(name: str, notebook: nbformat.NotebookNode) -> tuple[str, dict[str, bytes]]:
    """The page, and its pictures by their names."""
    parts, pictures = [HEAD.format(name)], dict[str, bytes]()
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source.replace("](../../docs/", "](../"))
            continue
        code = f"```python\n{cell.source}\n```"
        if "findspark" in cell.source:  # alike in all notebooks
            code = f'??? note "Find Spark, or start it"\n\n{textwrap.indent(code, "    ")}'
        parts.append(code)
        printed = "".join(map(find_text, cell.outputs))
        for pattern, replacement in SCRUBBED:
            printed = re.sub(pattern, replacement, printed)
        if printed.strip():
            parts.append(f"```text\n{printed.strip(chr(10))}\n```")
        for output in cell.outputs:
            if "image/png" in output.get("data", {}):
                picture = f"{name[3:]}-{len(pictures) + 1}.png"
                pictures[picture] = base64.b64decode(output.data["image/png"])
                parts.append(f"![what the cell above draws](../images/tutorials/{picture})")
    return "\n\n".join(parts) + "\n", pictures


def find_text(output: nbformat.NotebookNode) -> str:
    """What it has for people to read; stderr has progress and warnings."""
    if output.output_type == "stream":
        return str(output.text) if output.name == "stdout" else ""
    data = output.get("data", {})
    return "" if "image/png" in data else str(data.get("text/plain", "")) + "\n"


def find_last_line(name: str) -> str:
    """The numbers with which the page ends."""
    *_, printed = re.findall(r"^```text\n(.*?)\n```$", page_path(name).read_text(), re.DOTALL | re.MULTILINE)
    return printed.splitlines()[-1]


def main() -> None:
    os.environ.update(cluster_environment())
    for name in sys.argv[1:] or NAMES:
        notebook = read(name)
        with tempfile.TemporaryDirectory() as folder:
            execute(notebook, folder)
        page, pictures = render(name, notebook)
        large = [picture for picture, content in pictures.items() if len(content) > LARGEST]
        assert not large, f"larger than {LARGEST} bytes: {large}"
        for path in (page_path(name).parent, PICTURES):
            path.mkdir(parents=True, exist_ok=True)
        page_path(name).write_text(page)
        for picture, content in pictures.items():
            (PICTURES / picture).write_bytes(content)
        print(find_last_line(name), flush=True)


if __name__ == "__main__":
    main()
