"""One environment per platform, of the versions that it ships; the wheel must move none of them and must run there.

`python tests/platforms/matrix.py [ROW ...]`. A row is a file ROW.txt beside this one: pip's constraints, with the
platform's name and Python in the first lines. Each row leaves its environment in build/matrix/ROW and what was seen in
results/ROW.json, from which docs/generate.py makes docs/platforms.md.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, os.path.dirname(__file__))
from commands import ROOT, run, say
from interpreters import find_python
from stand_ins import write_stand_ins
from wheels import build_wheel

HERE = Path(__file__).resolve().parent
BUILD = ROOT / "build" / "matrix"
RESULTS = HERE / "results"
# What torch needs on a CPU. Its other requirements are NVIDIA's libraries, whose place stand-ins take.
BESIDE_TORCH = ("filelock", "fsspec", "jinja2", "networkx", "setuptools", "sympy", "typing-extensions")
SHOWN = ("torch", "numpy", "pandas", "pyarrow")  # packages in the documentation's table
CHECK_SECONDS = 1800


@dataclass(frozen=True)
class Row:
    """A platform and what it ships."""

    row: str  # name of the file
    name: str  # in words
    python: str  # minor version, as in "3.11"
    packages: tuple[str, ...]  # requirements, one per package

    @classmethod
    def read(cls, row: str) -> Row:
        path = HERE / f"{row}.txt"
        if not path.exists():
            rows = sorted(found.stem for found in HERE.glob("*.txt"))
            raise SystemExit(f"there is no row {row!r} in tests/platforms: choose from {', '.join(rows)}.")
        text = path.read_text()
        head = dict(re.findall(r"^# (name|python): (.+)$", text, re.MULTILINE))
        packages = [line for line in text.splitlines() if line and not line.startswith("#")]
        return cls(row, head["name"], head["python"], tuple(packages))

    @property
    def constraints(self) -> Path:
        return HERE / f"{self.row}.txt"


class Environment:
    """A virtual environment of a row's Python, without anything of this repository."""

    def __init__(self, row: str, folder: Path) -> None:
        self.row = row
        self.folder = folder
        self.python = folder / "bin" / "python"
        self.shipped = folder / "shipped.json"  # package -> version, without the wheel
        self.constraints = folder / "constraints.txt"

    @classmethod
    def make(cls, row: Row) -> Environment:
        """torch without NVIDIA's libraries, then what else the platform ships; nothing if all that is there."""
        own = cls(row.row, BUILD / row.row)
        if own.constraints.exists() and own.constraints.read_text() == row.constraints.read_text():
            return own
        say(f"{row.row}: an environment of Python {row.python} (some minutes, once)")
        shutil.rmtree(own.folder, ignore_errors=True)
        run(find_python(row.python), "-m", "venv", own.folder)
        is_torch = re.compile(r"torch\b")
        own.pip("--no-deps", *filter(is_torch.match, row.packages))
        (library,) = own.folder.glob("lib/python3*/site-packages/torch/lib")
        write_stand_ins(library)
        others = [package for package in row.packages if not is_torch.match(package)]
        own.pip("--constraint", row.constraints, *others, *BESIDE_TORCH)
        own.shipped.write_text(json.dumps(own.versions()))
        shutil.copy(row.constraints, own.constraints)  # the last file: without it, all is made again
        return own

    @classmethod
    def borrow(cls, folder: Path) -> Environment:
        """The packages of the environment that runs this, without its sources and without a copy of anything."""
        own = cls(folder.name, folder)
        run(sys.executable, "-m", "venv", folder)
        (packages,) = folder.glob("lib/python3*/site-packages")
        (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
        shipped = own.versions()
        own.shipped.write_text(json.dumps(shipped))
        own.constraints.write_text("".join(f"{name}=={version}\n" for name, version in shipped.items()))
        return own

    def pip(self, *arguments: str | Path) -> None:
        options = ("-qq", "--disable-pip-version-check", "--no-compile")
        run(self.python, "-m", "pip", "install", *options, *arguments)

    def versions(self) -> dict[str, str]:
        listing = ("-m", "pip", "list", "--format=json", "--disable-pip-version-check")
        return {entry["name"].lower(): entry["version"] for entry in json.loads(run(self.python, *listing))}

    def install(self, wheel: Path) -> dict[str, str]:
        """The wheel beside what is there. Returns what came along with it.

        Raises:
            SystemExit: a version of the platform moved.
        """
        before: dict[str, str] = json.loads(self.shipped.read_text())
        of_earlier_wheel = self.versions().keys() - before.keys()
        if of_earlier_wheel:
            run(self.python, "-m", "pip", "uninstall", "-qq", "-y", *of_earlier_wheel)
        self.pip("--constraint", self.constraints, wheel)
        after = self.versions()
        changed = [name for name, version in before.items() if after.get(name) != version]
        if changed:
            moved = ", ".join(f"{name} {before[name]} -> {after.get(name)}" for name in changed)
            raise SystemExit(f"{self.row}: the wheel moved {moved}: lower its floors in pyproject.toml.")
        return {name: version for name, version in after.items() if name not in before}

    def check(self, *part: str) -> dict[str, Any]:
        """What check.py, or a part of it, saw here, in a process that knows nothing of this repository."""
        scratch = self.folder / "check"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        shutil.copy(HERE / "check.py", scratch)
        command = (self.python, "-u", scratch / "check.py", scratch, *part)
        output = run(*command, seconds=CHECK_SECONDS, cwd=scratch)
        seen: dict[str, Any] = json.loads(output.splitlines()[-1])
        return seen


def try_row(row: Row) -> dict[str, Any]:
    environment = Environment.make(row)
    say(f"{row.row}: the wheel")
    came = environment.install(build_wheel(row.python))
    say(f"{row.row}: a fit, a loop and Spark Connect")
    began = time.monotonic()
    seen = environment.check()
    versions = environment.versions()
    return {
        "name": row.name,
        "date": datetime.date.today().isoformat(),
        "python": run(environment.python, "-c", "import platform; print(platform.python_version())").strip(),
        "spark": versions["pyspark"],
        **{name: versions[name] for name in SHOWN},
        "came_along": came,
        "seconds": round(time.monotonic() - began, 1),
        "seen": seen,
    }


def main(rows: Iterable[str]) -> int:
    chosen = [Row.read(row) for row in rows or sorted(path.stem for path in HERE.glob("*.txt"))]
    RESULTS.mkdir(exist_ok=True)
    failed = []
    for row in chosen:
        try:
            result = try_row(row)
        except SystemExit as error:
            say(f"{row.row} failed\n{error}")
            failed.append(row.row)
            continue
        (RESULTS / f"{row.row}.json").write_text(json.dumps(result, indent=1) + "\n")
        say(f"{row.row} passed: {json.dumps(result['seen'])}")
    if failed:
        say(f"failed: {', '.join(failed)}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
