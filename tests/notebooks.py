"""Runs a notebook of examples/notebooks to its end, as a user would find things there.

    python -m tests.notebooks examples/notebooks/01-first-steps.ipynb --spark-first --read-only

A program of its own, so that the kernel's threads are not the tests'. Prints what the last code cell prints; the error
of a cell is its end.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import nbformat
from nbclient import NotebookClient

SPARK_FIRST = """
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("{master}").config("spark.ui.enabled", "false").getOrCreate()
"""
NO_FINDSPARK = """
import sys
sys.modules["findspark"] = None
"""
READ_ONLY = "/proc"  # where not even root can make a file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--folder", default=".", help="the working directory")
    parser.add_argument("--spark-first", action="store_true", help="with `spark` made beforehand")
    parser.add_argument("--no-findspark", action="store_true", help="without the package findspark")
    parser.add_argument("--read-only", action="store_true", help="in a directory that cannot be written to")
    parser.add_argument("--store", help="the notebook's STORE, in place of a folder of its own")
    parser.add_argument("--twice", action="store_true", help="with each cell run again at once")
    options = parser.parse_args()
    notebook = nbformat.read(options.notebook, as_version=4)
    nbformat.validate(notebook)
    master = re.search(r'master\(\\?"([^"\\]+)', options.notebook.read_text())
    assert master is not None, "the notebook starts no Spark of its own"
    before = SPARK_FIRST.format(master=master[1]) * options.spark_first + NO_FINDSPARK * options.no_findspark
    if before:
        notebook.cells.insert(0, nbformat.v4.new_code_cell(before))
    if options.store:
        (chosen, *_) = [cell for cell in notebook.cells if cell.source.startswith("STORE = ")]
        chosen.source = f"STORE = {options.store!r}"
    if options.twice:
        again = [nbformat.NotebookNode(cell, id=f"{cell.id}-again") for cell in notebook.cells]
        notebook.cells = [each for pair in zip(notebook.cells, again, strict=True) for each in pair]
    folder = READ_ONLY if options.read_only else options.folder
    execute(notebook, folder)
    *_, last = [cell for cell in notebook.cells if cell.cell_type == "code"]
    print("".join(output.text for output in last.outputs if output.get("name") == "stdout"), end="")


def execute(notebook: nbformat.NotebookNode, folder: str) -> None:
    """Its cells get their outputs."""
    place = {"metadata": {"path": folder}}
    NotebookClient(notebook, timeout=600, startup_timeout=300, resources=place).execute()


if __name__ == "__main__":
    main()
