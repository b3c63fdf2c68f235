"""The wheels of `./build.sh wheel`: builds one, and tries one in an environment that holds nothing else.

`python tests/platforms/wheels.py [VERSION ...]` makes those of all supported Pythons, or of those named, and tries
each: pip installs the wheel and what it requires, every module is imported, and two ranks add up.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, os.path.dirname(__file__))
from commands import ROOT, run, say
from interpreters import find_python

# Prints JSON: the number of modules that were imported, and the packages that the others lack.
IMPORT_ALL = """
import importlib, json, pathlib
imported, lacking = 0, set()
for package in map(importlib.import_module, ("spark_elastic", "elastic_collectives")):
    folder = pathlib.Path(package.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        try:
            importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
            imported += 1
        except ModuleNotFoundError as error:
            lacking.add(error.name.split(".")[0])
print(json.dumps([imported, sorted(lacking)]))
"""
# What an empty environment lacks: frameworks, which the user chooses, and packages of the extras.
OF_THE_USER = {
    *("torch", "accelerate", "transformers", "tensorflow", "keras", "pyspark", "py4j", "pandas", "petastorm")
}


def build_wheel(version: str) -> Path:
    """The wheel of this tree for a Python, built anew where a source has changed."""
    say(run(ROOT / "build.sh", "wheel", version).strip().splitlines()[-1])
    return find_wheel(version)


def find_wheel(version: str) -> Path:
    """The wheel in dist/ for a Python.

    Raises:
        SystemExit: there is none, or more than one.
    """
    tag = f"cp{version.replace('.', '')}"
    found = list((ROOT / "dist").glob(f"spark_elastic-*-{tag}-{tag}-manylinux*.whl"))
    if len(found) != 1:
        raise SystemExit(f"dist/ holds {len(found)} wheels for Python {version}: ./build.sh wheel {version}")
    return found[0]


def try_wheel(version: str) -> str:
    """What was seen of it in an environment of its own."""
    wheel = find_wheel(version)
    with tempfile.TemporaryDirectory() as folder:
        run(find_python(version), "-m", "venv", folder)
        python = Path(folder, "bin", "python")
        run(python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-compile", wheel)
        imported, lacking = json.loads(run(python, "-W", "error", "-c", IMPORT_ALL))
        if not OF_THE_USER.issuperset(lacking):
            raise SystemExit(f"{wheel.name} does not require {set(lacking) - OF_THE_USER}, which it imports.")
        runner = Path(folder, "bin", "spark-elastic-run")
        program = ROOT / "tests" / "sum_of_ranks.py"
        printed = run(runner, "-np", "2", "-H", "localhost:2", python, program, seconds=120)
        if printed.count("sum 2000.0") != 2:
            raise SystemExit(f"{wheel.name}: two ranks did not add up, but printed {printed}")
    return f"{imported} modules imported, two ranks added up"


def main(versions: Iterable[str]) -> None:
    for version in versions:
        build_wheel(version)
        say(f"trying the wheel for Python {version} in an empty environment")
        say(f"Python {version}: {try_wheel(version)}")


if __name__ == "__main__":
    main(sys.argv[1:] or ["3.10", "3.11", "3.12", "3.13", "3.14"])
