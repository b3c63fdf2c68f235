"""What developers run beside build.sh: `.venv/bin/nox --list`, `.venv/bin/nox -s NAME -- ARGUMENTS`.

Most sessions run in .venv, which `./build.sh build` makes; petastorm and pygloo have environments of their own, in
build/nox.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import tarfile
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent
BUILD = ROOT / "build"
PYTHON = f"{ROOT}/.venv/bin/python"
WHEEL_GLIBC = "2.28"  # of RHEL 8, Debian 10, Ubuntu 20.04, Amazon Linux 2023 and all newer ones
HOROVOD = "horovod-0.28.1"  # its source package has Gloo's sources; Gloo itself publishes none on PyPI
HOROVOD_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
SITE = f"{ROOT}/.venv/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
TESTED = "not faults or ci"  # by `./build.sh test`
VARIABLES = {"NO_MKDOCS_2_WARNING": "1", "SPARK_ELASTIC_PICTURES": "docs/images"}
nox.options.envdir = str(BUILD / "nox")
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["check"]
in_venv = nox.session(venv_backend="none")

# Name: what it is, and what Python runs. Packages beside .venv are those that tests/environment.py has by that name.
SESSIONS = {
    "s3": ("stores and a training on a real S3 API (moto's server)", "-m pytest tests/component/s3"),
    "wandb": ("`WandbLogger` beside the real wandb, offline", "-m pytest tests/component/wandb"),
    "kubernetes": (
        "examples/kubernetes against Kubernetes' published schemas",
        "-m pytest tests/test_kubernetes.py",
    ),
    "browser": (
        "the status page in a headless Chromium; its pictures go to docs/images",
        "-m pytest tests/component/rendezvous/test_status_in_browser.py",
    ),
    "fuzz": (
        "the rendezvous server's endpoints under a fuzzer led by coverage; --seconds N",
        "tests/faults/fuzz.py",
    ),
    "audit": (
        "the packages of .venv against the published list of vulnerabilities",
        f"-m pip_audit --path {SITE}",
    ),
}


def run_python(session: nox.Session, *words: str, beside: str = "") -> None:
    """Run .venv's Python, with the packages that tests/environment.py has by that name."""
    path = [str(ROOT), f"{ROOT}/python"]
    if beside:
        session.run(PYTHON, "tests/environment.py", "packages", beside, external=True)
        path.insert(0, str(BUILD / beside))
    variables = {"PYTHONPATH": ":".join(path), "PATH": f"{ROOT}/.venv/bin:{os.environ['PATH']}", **VARIABLES}
    session.run(PYTHON, *words, env=variables, external=True)


def add_session(name: str, what: str, command: str) -> None:
    def run(session: nox.Session) -> None:
        session.run("./build.sh", "build", external=True)
        run_python(session, *command.split(), *session.posargs, beside=name)

    run.__doc__ = what
    in_venv(run, name=name)


for name, session in SESSIONS.items():
    add_session(name, *session)


@in_venv
def check(session: nox.Session) -> None:
    """ruff, format, mypy, layers, clang-format"""
    session.run("./build.sh", "build", external=True)
    houses = [f"tests/test_{name}.py" for name in ("layers", "house", "public_api")]
    for words in (["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"], ["pytest", *houses]):
        run_python(session, "-m", *words)
    sources = [str(path) for folder in ("csrc", "tests/native") for path in (ROOT / folder).rglob("*.[hc]*")]
    session.run("clang-format", "--dry-run", "-Werror", *sources, external=True)


@in_venv
def docs(session: nox.Session) -> None:
    """build/site: the documentation as a site; a broken link is an error"""
    session.run("./build.sh", "build", external=True)
    run_python(session, "docs/generate.py")
    run_python(session, "-m", "mkdocs", "build", "--strict", "--quiet")


@in_venv
def faults(session: nox.Session) -> None:
    """the long fault plans; then the scenarios with their faults switched off, each of which must fail"""
    session.run("./build.sh", "test", "-m", "faults", *session.posargs, external=True)
    run_python(session, "-m", "pytest", "-m", "faults", "tests/component/s3", beside="s3")
    session.run("./build.sh", "test", "-m", f"scenario and ({TESTED})", "--without-faults", external=True)


def build_engine(session: nox.Session, python: str, folder: str, *options: str) -> None:
    cmake, place = f"{ROOT}/.venv/bin/cmake", f"{BUILD}/{folder}"
    pybind11 = session.run(python, "-m", "pybind11", "--cmakedir", silent=True, external=True)
    options = (f"-DPython_EXECUTABLE={python}", f"-Dpybind11_DIR={str(pybind11).strip()}", *options)
    session.run(
        cmake,
        "-S",
        ".",
        "-B",
        place,
        "-DCMAKE_BUILD_TYPE=RelWithDebInfo",
        *options,
        external=True,
        silent=True,
    )
    session.run(cmake, "--build", place, "-j", str(os.cpu_count()), external=True)


@in_venv
def sanitize(session: nox.Session) -> None:
    """the engine's own tests under the address, undefined-behaviour and thread sanitizers"""
    for kind in ("address,undefined", "thread"):
        build_engine(session, PYTHON, f"native/{kind}", "-DELASTIC_TESTS=ON", f"-DELASTIC_SANITIZE={kind}")
        session.run("ctest", "--test-dir", f"{BUILD}/native/{kind}", "--output-on-failure", external=True)


@nox.session
def petastorm(session: nox.Session) -> None:
    """Spark 3.5, and the reader petastorm with old versions of pyarrow and numpy"""
    # petastorm wants an older setuptools than torch says it does; both work with it.
    session.install("torch==2.13.0")
    reader = (
        "petastorm>=0.13,<0.14 pyarrow>=14,<15 numpy>=1.26,<2 setuptools<70 pyspark>=3.5,<3.6 pandas>=2,<3"
    )
    others = "fsspec cloudpickle starlette uvicorn httpx click pytest pytest-timeout psutil hypothesis"
    session.install(*reader.split(), *others.split())
    tests = "tests/component/data tests/component/torch/test_column_kinds.py tests/spark/test_materialize.py"
    tests += " tests/spark/test_row_order.py tests/spark/test_readers.py"
    without_deltalake = [f"--ignore=tests/component/data/test_{name}.py" for name in ("lake_tables", "where")]
    words = ["-m", "petastorm or spark", *tests.split(), *without_deltalake, *session.posargs]
    session.run("python", "-m", "pytest", *words, env={"PYTHONPATH": f"{ROOT}:{ROOT}/python"})


@nox.session(python=os.environ.get("PYTHON310", "3.10"))
def pygloo(session: nox.Session) -> None:
    """the engine on CPython 3.10 beside pygloo; PYTHON310 names that Python"""
    session.install(
        *[
            "pygloo>=0.2,<0.3",
            "numpy>=1.26,<3",
            "pybind11",
            "pytest",
            "pytest-timeout",
            "psutil",
            "hypothesis",
        ]
    )
    build_engine(session, f"{session.bin}/python", "pygloo")
    session.run(
        f"{ROOT}/.venv/bin/cmake", "--install", f"{BUILD}/pygloo", "--prefix", "python", external=True
    )
    session.run("python", "-m", "pytest", "-m", "pygloo", "tests/component/collectives", *session.posargs)


@in_venv
def wheel(session: nox.Session) -> None:
    """[VERSION ...]: dist/*.whl for this Python or those named, self-contained: needs only the C library"""
    tools, objects = BUILD / "wheel-tools", BUILD / "wheel-objects"
    session.run(PYTHON, "tests/environment.py", "packages", tools.name, external=True)
    # zig's compiler links against WHEEL_GLIBC, older than this machine's, and brings its own C++ library.
    machine, programs = os.uname().machine, {}
    for program, options in {
        "c++": f" -target {machine}-linux-gnu.{WHEEL_GLIBC}",
        "ar": "",
        "ranlib": "",
    }.items():
        programs[program] = BUILD / "zig" / program
        programs[program].parent.mkdir(exist_ok=True)
        programs[program].write_text(f'#!/bin/sh\nexec {tools}/ziglang/zig {program}{options} "$@"\n')
        programs[program].chmod(0o755)
    pybind11 = str(session.run(PYTHON, "-m", "pybind11", "--cmakedir", silent=True, external=True)).strip()
    variables = {"CMAKE_AR": programs["ar"], "CMAKE_RANLIB": programs["ranlib"], "pybind11_DIR": pybind11}
    variables["GLOO_SOURCE"] = fetch_gloo(session)
    settings = [f"--config-settings=cmake.define.{name}={value}" for name, value in variables.items()]
    environment = {"CXX": str(programs["c++"]), "PYTHONPATH": str(tools)}
    environment["PATH"] = f"{tools}/bin:{ROOT}/.venv/bin:{os.environ['PATH']}"
    for version in session.posargs or [f"{sys.version_info[0]}.{sys.version_info[1]}"]:
        find = (PYTHON, "tests/platforms/interpreters.py", version)
        python = str(session.run(*find, silent=True, external=True)).strip()
        # pybind11 has no stable ABI, so each Python needs its own wheel; but only the binding (csrc/module.cc) knows of
        # Python: the other objects are compiled once. Without isolation, for a builder elsewhere starts with none.
        (objects / "CMakeCache.txt").unlink(missing_ok=True)  # it names the Python before
        for old in (BUILD / "wheel").glob("*.whl"):
            old.unlink()
        pip = "-m pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir build/wheel ."
        words = [*pip.split(), f"--config-settings=build-dir={objects}", *settings]
        session.run(python, *words, env=environment, external=True)
        made = [str(path) for path in (BUILD / "wheel").glob("*.whl")]
        repair = [
            "repair",
            "--plat",
            f"manylinux_{WHEEL_GLIBC.replace('.', '_')}_{machine}",
            "--wheel-dir",
            "dist",
        ]
        session.run(PYTHON, "-m", "auditwheel", *repair, *made, env=environment, external=True)
        (engine,) = objects.glob(f"_engine.cpython-{version.replace('.', '')}-*.so")
        oldest = max(map(int, re.findall(rb"GLIBC_2\.(\d+)", engine.read_bytes())))
        print(f"{Path(made[0]).name}, in dist, runs on glibc 2.{oldest} and newer")


def fetch_gloo(session: nox.Session) -> str:
    """The folder of Gloo's sources: GLOO_SOURCE, or build/gloo."""
    folder, archive = BUILD / "gloo", BUILD / f"{HOROVOD}.tar.gz"
    if "GLOO_SOURCE" not in os.environ and not (folder / "gloo" / "context.h").exists():
        pip = "-m pip download -qq --disable-pip-version-check --no-deps --no-binary :all: --dest build"
        session.run(PYTHON, *pip.split(), HOROVOD.replace("-", "=="), external=True)
        if hashlib.sha256(archive.read_bytes()).hexdigest() != HOROVOD_SHA256:
            session.error(f"{archive} is not the archive that Gloo's sources are expected in.")
        with tarfile.open(archive) as file:
            file.extractall(BUILD, filter="data")
        (BUILD / HOROVOD / "third_party" / "gloo").rename(folder)
    return os.environ.get("GLOO_SOURCE", str(folder))
