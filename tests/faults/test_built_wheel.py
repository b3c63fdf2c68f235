"""The wheel of `./build.sh wheel` in an environment that holds nothing but what the wheel asks for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sources import ROOT

pytestmark = [pytest.mark.faults, pytest.mark.native, pytest.mark.slow, pytest.mark.timeout(2400)]

OF_THE_C_LIBRARY = {
    "linux-vdso",
    "ld-linux-x86-64",
    "ld-linux-aarch64",
    "libc",
    "libm",
    "libpthread",
    "libdl",
    "librt",
}


def output_of(*command: str | Path, folder: str | Path = "/") -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=folder, env=environment, timeout=1800
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def test_the_wheel_runs_in_an_empty_environment(tmp_path: Path) -> None:
    said = output_of(ROOT / "build.sh", "wheel", folder=ROOT)
    oldest = re.search(r"runs on glibc 2\.(\d+) and newer", said)
    assert oldest is not None, said
    assert int(oldest[1]) <= 28
    (wheel,) = (ROOT / "dist").glob("spark_elastic-*-manylinux*.whl")
    output_of(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    output_of(python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", wheel)
    where = "import elastic_collectives._engine as engine; print(engine.__file__)"
    needed = re.findall(r"(\S+?)\.so", output_of("ldd", output_of(python, "-c", where).strip()))
    assert {Path(name).name for name in needed} <= OF_THE_C_LIBRARY
    runner = tmp_path / "venv" / "bin" / "spark-elastic-run"
    printed = output_of(runner, "-np", "2", "-H", "localhost:2", python, ROOT / "tests" / "sum_of_ranks.py")
    assert printed.count("sum 2000.0") == 2


@pytest.mark.parametrize("gloo", ["the system's", "sources"])
def test_the_source_archive_has_what_a_build_needs(gloo: str, tmp_path: Path) -> None:
    """Gloo's sources are those that the wheel above was made with."""
    output_of(ROOT / "build.sh", "sdist", folder=ROOT)
    (archive,) = (ROOT / "dist").glob("spark_elastic-*.tar.gz")
    options = ("-qq", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path)
    sources = ("-C", f"cmake.define.GLOO_SOURCE={ROOT / 'build' / 'gloo'}") if gloo == "sources" else ()
    output_of(sys.executable, "-m", "pip", "wheel", *options, *sources, archive)
    assert list(tmp_path.glob("spark_elastic-*.whl"))
