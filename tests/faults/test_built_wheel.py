"""The wheels of all supported Pythons, and the source archive."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.sources import ROOT

pytestmark = [pytest.mark.faults, pytest.mark.native, pytest.mark.slow, pytest.mark.timeout(2400)]

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
OF_THE_C_LIBRARY = {"linux-vdso", "ld-linux-x86-64", "ld-linux-aarch64"}
OF_THE_C_LIBRARY |= {"libc", "libm", "libpthread", "libdl", "librt"}


def output_of(*command: str | Path, folder: str | Path = "/") -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=folder, env=environment, timeout=1800
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def test_every_wheel_runs_in_an_empty_environment(tmp_path: Path) -> None:
    said = output_of(sys.executable, "tests/platforms/wheels.py", folder=ROOT)
    assert set(re.findall(r"Python (3\.\d+): \d+ modules imported, two ranks added up", said)) == set(PYTHONS)
    oldest = re.findall(r"runs on glibc 2\.(\d+) and newer", said)
    assert len(oldest) == len(PYTHONS)
    assert max(map(int, oldest)) <= 28
    for version in PYTHONS:
        tag = f"cp{version.replace('.', '')}"
        (wheel,) = (ROOT / "dist").glob(f"spark_elastic-*-{tag}-{tag}-manylinux*.whl")
        archive = zipfile.ZipFile(wheel)
        (engine,) = (name for name in archive.namelist() if re.search(r"/_engine\..*\.so$", name))
        needed = re.findall(r"(\S+?)\.so", output_of("ldd", archive.extract(engine, tmp_path)))
        assert {Path(name).name for name in needed} <= OF_THE_C_LIBRARY


@pytest.mark.parametrize("gloo", ["the system's", "sources"])
def test_the_source_archive_has_what_a_build_needs(gloo: str, tmp_path: Path) -> None:
    """Gloo's sources are those that the wheel above was made with."""
    output_of(sys.executable, "-m", "nox", "-s", "sdist", folder=ROOT)
    (archive,) = (ROOT / "dist").glob("spark_elastic-*.tar.gz")
    options = ("-qq", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path)
    sources = ("-C", f"cmake.define.GLOO_SOURCE={ROOT / 'build' / 'gloo'}") if gloo == "sources" else ()
    output_of(sys.executable, "-m", "pip", "wheel", *options, *sources, archive)
    assert list(tmp_path.glob("spark_elastic-*.whl"))
