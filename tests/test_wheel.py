"""The wheel beside the oldest stack that it promises to leave alone: it installs, runs and moves no version."""

from __future__ import annotations

import json
import re
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from tests.platforms.commands import run
from tests.platforms.matrix import Environment, Row
from tests.sources import ROOT, names
from tests.spark.cluster import cluster_environment

pytestmark = [pytest.mark.slow, pytest.mark.native, pytest.mark.own_session, pytest.mark.timeout(600)]

# What Databricks Runtime 15.4 LTS ships, the oldest versions that the wheel accepts.
OLDEST = ("numpy==1.23.5", "pandas==1.5.3", "pyarrow==14.0.1")
FRAMEWORKS = ("torch", "tensorflow", "petastorm")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from this tree in the tests' own environment, where the engine has been compiled for them."""
    folder = tmp_path_factory.mktemp("wheel")
    options = ("-qq", "--no-deps", "--no-build-isolation", "--wheel-dir", folder)
    build = f"--config-settings=build-dir={ROOT / 'build' / 'native'}"
    run(sys.executable, "-m", "pip", "wheel", *options, build, ROOT)
    (built,) = folder.glob("spark_elastic-*.whl")
    return built


def test_wheel_holds_both_packages_and_the_engine(wheel: Path) -> None:
    held = {name.split(".py")[0].removesuffix("/__init__") for name in zipfile.ZipFile(wheel).namelist()}
    missing = {name for name in names() if name.replace(".", "/") not in held}
    assert not missing
    files = zipfile.ZipFile(wheel).namelist()
    assert sum(name.startswith("elastic_collectives/_engine") and name.endswith(".so") for name in files) == 1
    assert {"spark_elastic/py.typed", "elastic_collectives/py.typed"} <= set(files)
    assert not [name for name in files if name.startswith(("tests", "benchmarks", "docs"))]


def test_wheel_requires_ranges_and_no_framework(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (path,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = archive.read(path).decode()
    (pythons,) = re.findall(r"^Requires-Python: (.*)$", metadata, re.MULTILINE)
    tried = ("3.9.18", "3.10.0", "3.14.9", "3.15.0")
    assert [version in SpecifierSet(pythons) for version in tried] == [False, True, True, False]
    lines = [line for line in metadata.splitlines() if line.startswith("Requires-Dist: ")]
    plain = [line.removeprefix("Requires-Dist: ") for line in lines if "extra ==" not in line]
    assert plain
    assert not [line for line in lines if "==" in line.split(";")[0]]
    assert not [line for line in plain if line.lower().startswith(("pyspark", *FRAMEWORKS))]


def test_source_archive_holds_no_environment_and_no_built_module(tmp_path: Path) -> None:
    """Of a copy, whose folders of builds and environments have one file each: all of them would be looked through."""
    tree, left_out = tmp_path / "tree", ("build", ".venv", ".git", ".*_cache", "__pycache__")
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*left_out))
    for name in ("build/spark.log", ".venv/bin/python", "python/elastic_collectives/_engine.so"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).touch()
    build = f"from scikit_build_core.build import build_sdist; build_sdist({str(tmp_path)!r})"
    run(sys.executable, "-c", f"import os; os.chdir({str(tree)!r}); {build}")
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        held = {name.split("/", 1)[1] for name in opened.getnames()}
    assert {"CMakeLists.txt", "csrc/module.cc", "python/elastic_collectives/py.typed"} <= held
    assert not [name for name in held if name.startswith((".venv", "build/", "tests"))]
    assert not [name for name in held if name.endswith(".so")]


@pytest.mark.scenario("G19")
def test_wheel_installs_beside_the_oldest_stack(wheel: Path) -> None:
    options = ("--dry-run", "--ignore-installed", "--disable-pip-version-check", "--quiet", "--report", "-")
    report = json.loads(run(sys.executable, "-m", "pip", "install", *options, wheel, *OLDEST))
    chosen = {entry["metadata"]["name"].lower(): entry["metadata"]["version"] for entry in report["install"]}
    assert {f"{name}=={chosen[name]}" for name in ("numpy", "pandas", "pyarrow")} == set(OLDEST)
    assert not set(FRAMEWORKS) & set(chosen)


@pytest.mark.faults  # pip fetches a gigabyte; `nox -s matrix` does it for each platform
@pytest.mark.spark
def test_wheel_runs_beside_the_oldest_platform(wheel: Path) -> None:
    """A row of tests/platforms/matrix.py, but only its fit, and petastorm, which it ships."""
    row = Row.read("dbr-15.4")
    if row.python != f"{sys.version_info.major}.{sys.version_info.minor}":
        pytest.skip(f"the wheel of this environment is not for Python {row.python}")
    environment = Environment.make(row)
    assert "spark-elastic" in environment.install(wheel)
    seen = environment.check("fit")
    assert seen["fit"].startswith("worlds of [3, 2")
    assert seen["petastorm"]


@pytest.mark.spark
def test_wheel_runs_beside_the_newest_spark(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other tests run on it, too, but on the sources and in the environment that they were installed into.

    They lose executors; what the installed files lack, one JVM shows.
    """
    monkeypatch.setenv("JDK_JAVA_OPTIONS", cluster_environment()["JDK_JAVA_OPTIONS"])  # JVMs start sooner
    environment = Environment.borrow(tmp_path / "venv")
    assert environment.install(wheel).keys() == {"spark-elastic"}
    assert environment.check("local")["fit"].startswith("worlds of [2, ")
