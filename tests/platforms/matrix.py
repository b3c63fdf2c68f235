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
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, os.path.dirname(__file__))
from interpreters import find_python
from stand_ins import write_stand_ins

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "matrix"
RESULTS = HERE / "results"
# What torch needs on a CPU. Its other requirements are NVIDIA's libraries, whose place stand-ins take.
BESIDE_TORCH = ("filelock", "fsspec", "jinja2", "networkx", "setuptools", "sympy", "typing-extensions")
SHOWN = ("torch", "numpy", "pandas", "pyarrow")  # packages in the documentation's table
INSTALL_SECONDS, CHECK_SECONDS = 1800, 1800


@dataclass(frozen=True)
class Row:
    """A platform and what it ships."""

    # Of the file.
    row: str
    # In words.
    name: str
    # Minor version, as in "3.11".
    python: str
    # Requirements, one per package.
    packages: tuple[str, ...]

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

    def __init__(self, row: Row) -> None:
        self.row = row
        self.folder = BUILD / row.row
        self.python = self.folder / "bin" / "python"
        self.shipped = self.folder / "shipped.json"  # package -> version, without the wheel

    def make(self) -> None:
        """torch without NVIDIA's libraries, then what else the platform ships; nothing if all that is there."""
        stamp = self.folder / ".ready"
        if stamp.exists() and stamp.read_text() == self.row.constraints.read_text():
            return
        say(f"{self.row.row}: an environment of Python {self.row.python} (some minutes, once)")
        shutil.rmtree(self.folder, ignore_errors=True)
        run(find_python(self.row.python), "-m", "venv", self.folder)
        is_torch = re.compile(r"torch\b")
        self.pip("--no-deps", *filter(is_torch.match, self.row.packages))
        (library,) = self.folder.glob("lib/python3*/site-packages/torch/lib")
        write_stand_ins(library)
        others = [package for package in self.row.packages if not is_torch.match(package)]
        self.pip("--constraint", self.row.constraints, *others, *BESIDE_TORCH)
        self.shipped.write_text(json.dumps(self.versions()))
        stamp.write_text(self.row.constraints.read_text())

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
        self.pip("--constraint", self.row.constraints, wheel)
        after = self.versions()
        moved = [
            f"{name} {version} -> {after.get(name)}"
            for name, version in before.items()
            if after.get(name) != version
        ]
        if moved:
            raise SystemExit(
                f"{self.row.row}: the wheel moved {', '.join(moved)}: lower its floors in pyproject.toml."
            )
        return {name: version for name, version in after.items() if name not in before}

    def check(self) -> dict[str, Any]:
        """What check.py saw in this environment, in a process that knows nothing of this repository."""
        scratch = self.folder / "check"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        shutil.copy(HERE / "check.py", scratch)
        output = run(self.python, "-u", scratch / "check.py", scratch, seconds=CHECK_SECONDS, cwd=scratch)
        seen: dict[str, Any] = json.loads(output.splitlines()[-1])
        return seen


def build_wheel(python: Path, version: str) -> Path:
    """The wheel of this tree for a Python; that of an earlier row, if no source has changed since."""
    folder = BUILD / "wheels" / version
    places = (ROOT / name for name in ("spark_elastic", "python", "csrc"))
    sources = [path for place in places for path in place.rglob("*.*") if path.suffix in (".py", ".cc", ".h")]
    changed = max(
        path.stat().st_mtime for path in (*sources, ROOT / "CMakeLists.txt", ROOT / "pyproject.toml")
    )
    for wheel in folder.glob("*.whl"):
        if wheel.stat().st_mtime > changed:
            return wheel
    shutil.rmtree(folder, ignore_errors=True)
    options = ("-qq", "--disable-pip-version-check", "--no-deps", "--wheel-dir", folder)
    run(
        python,
        "-m",
        "pip",
        "wheel",
        *options,
        f"--config-settings=build-dir={BUILD / 'objects' / version}",
        ROOT,
    )
    (wheel,) = folder.glob("*.whl")
    return wheel


def run(*command: str | Path, seconds: float = INSTALL_SECONDS, cwd: Path = ROOT) -> str:
    """What a command prints; SystemExit with the end of it if it fails."""
    left_out = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYSPARK_PYTHON", "SPARK_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=cwd, env=environment, timeout=seconds
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
    return done.stdout


def try_row(row: Row) -> dict[str, Any]:
    environment = Environment(row)
    environment.make()
    say(f"{row.row}: the wheel")
    came = environment.install(build_wheel(environment.python, row.python))
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


def say(text: str) -> None:
    sys.stdout.write(f"== {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
