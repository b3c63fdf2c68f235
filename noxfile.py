"""What developers run beside build.sh: `.venv/bin/nox --list`, `.venv/bin/nox -s NAME -- ARGUMENTS`.

Most sessions run in .venv, which `./build.sh build` makes; petastorm and pygloo have environments of their own, in
build/nox.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent
BUILD = ROOT / "build"
TESTED = "not faults or ci"  # by `./build.sh test`
GLIBC = "2.28"  # that wheels need: of RHEL 8, Debian 10, Ubuntu 20.04, Amazon Linux 2023 and all newer ones
HOROVOD = "horovod-0.28.1"  # its source package has Gloo's sources; Gloo itself publishes none on PyPI
HOROVOD_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
SITE = f".venv/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
nox.options.envdir = str(BUILD / "nox")
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["check"]
in_venv = nox.session(venv_backend="none")

# Name: what it is, and what runs in .venv beside the packages that tests/environment.py has by that name.
SESSIONS = {
    "s3": ("stores and a training on a real S3 API, moto's server", "pytest tests/component/s3"),
    "wandb": ("`WandbLogger` beside the real wandb, offline", "pytest tests/component/wandb"),
    "kubernetes": ("examples/kubernetes against published schemas", "pytest tests/test_kubernetes.py"),
    "browser": (
        "the status page in a headless Chromium; takes the pictures of docs/observing.md",
        "pytest tests/component/rendezvous/test_status_in_browser.py",
    ),
    "fuzz": ("[--seconds N]: the rendezvous server, by a fuzzer led by coverage", "tests/faults/fuzz.py"),
    "audit": ("the packages of .venv against the list of vulnerabilities", f"pip_audit --path {SITE}"),
}


def run(session: nox.Session, command: str, *more: str, beside: str = "", **variables: str) -> None:
    """Run a program of .venv."""
    path, programs = f"{ROOT}:{ROOT}/python", f"{ROOT}/.venv/bin:{os.environ['PATH']}"
    if beside:
        run(session, f"python tests/environment.py packages {beside}")
        path, programs = f"{BUILD}/{beside}:{path}", f"{BUILD}/{beside}/bin:{programs}"
    places = {"PATH": programs, "PYTHONPATH": path}
    session.run(*shlex.split(command), *more, env={**places, **variables}, external=True)


def ask(session: nox.Session, command: str) -> str:
    answer = session.run(*shlex.split(command), silent=True, external=True)
    return str(answer).strip()


def add_session(name: str, what: str, command: str) -> None:
    def play(session: nox.Session) -> None:
        run(session, "./build.sh build")
        program = command if ".py" in command.split()[0] else f"-m {command}"
        run(session, f"python {program}", *session.posargs, beside=name, SPARK_ELASTIC_PICTURES="docs/images")

    play.__doc__ = what
    in_venv(play, name=name)


for name, session in SESSIONS.items():
    add_session(name, *session)


@in_venv
def check(session: nox.Session) -> None:
    """ruff, format, mypy, layers, clang-format"""
    run(session, "./build.sh build")
    for command in ("ruff check .", "ruff format --check .", "mypy"):
        run(session, command)
    run(session, "pytest tests/test_layers.py tests/test_house.py tests/test_public_api.py")
    sources = [str(path) for folder in ("csrc", "tests/native") for path in (ROOT / folder).rglob("*.[hc]*")]
    run(session, "clang-format --dry-run -Werror", *sources)


@in_venv
def docs(session: nox.Session) -> None:
    """build/site: the documentation as a site; a broken link is an error"""
    run(session, "./build.sh build")
    run(session, "python docs/generate.py")
    run(session, "mkdocs build --strict --quiet", NO_MKDOCS_2_WARNING="1")


@in_venv
def faults(session: nox.Session) -> None:
    """the long fault plans; then the scenarios with their faults switched off, each of which must fail"""
    run(session, "./build.sh test -m faults", *session.posargs)
    run(session, "python -m pytest -m faults tests/component/s3", beside="s3")
    run(session, f"./build.sh test -m 'scenario and ({TESTED})' --without-faults")


@in_venv
def sanitize(session: nox.Session) -> None:
    """the engine's own tests under the address, undefined-behaviour and thread sanitizers"""
    run(session, "./build.sh build")
    for kind in ("address,undefined", "thread"):
        build_engine(session, ".venv/bin/python", f"-DELASTIC_TESTS=ON -DELASTIC_SANITIZE={kind}", kind)
        run(session, f"ctest --test-dir build/{kind} --output-on-failure")


def build_engine(session: nox.Session, python: str, options: str, folder: str) -> None:
    options += f" -DPython_EXECUTABLE={Path(python).absolute()} -DCMAKE_BUILD_TYPE=RelWithDebInfo"
    options += f" -Dpybind11_DIR={ask(session, f'{python} -m pybind11 --cmakedir')}"
    run(session, f"cmake -S . -B build/{folder} -G Ninja {options}")
    run(session, f"cmake --build build/{folder}")


@nox.session
def petastorm(session: nox.Session) -> None:
    """Spark 3.5, and the reader petastorm with old versions of pyarrow and numpy"""
    # petastorm wants an older setuptools than torch says it does; both work with it.
    session.install("torch==2.13.0")
    reader = "petastorm>=0.13,<0.14 pyarrow>=14,<15 numpy>=1.26,<2 setuptools<70 pandas>=2,<3"
    others = "pyspark>=3.5,<3.6 fsspec cloudpickle click"
    session.install(*f"{reader} {others} pytest pytest-timeout psutil hypothesis".split())
    tests = "tests/component/data tests/component/torch/test_column_kinds.py"
    tests += " tests/spark/test_materialize.py tests/spark/test_row_order.py"
    lacking = [
        f"--ignore=tests/component/data/test_{name}.py" for name in ("lake_tables", "where")
    ]  # deltalake
    words = ["-m", "petastorm or spark", *tests.split(), *lacking, *session.posargs]
    session.run("python", "-m", "pytest", *words, env={"PYTHONPATH": f"{ROOT}:{ROOT}/python"})


@in_venv
def pygloo(session: nox.Session) -> None:
    """the engine on CPython 3.10 beside pygloo; PYTHON310 names that Python"""
    found = ask(session, ".venv/bin/python tests/platforms/interpreters.py 3.10")
    run(session, f"{found} -m venv build/nox/pygloo")
    python = "build/nox/pygloo/bin/python"
    wanted = "'pygloo>=0.2,<0.3' 'numpy>=1.26,<3' pybind11 pytest pytest-timeout psutil hypothesis"
    run(session, f"{python} -m pip install -qq {wanted}")
    build_engine(session, python, "", "pygloo")
    run(session, "cmake --install build/pygloo --prefix python")
    run(session, f"{python} -m pytest -m pygloo tests/component/collectives", *session.posargs)


@in_venv
def sdist(session: nox.Session) -> None:
    """dist/*.tar.gz"""
    run(session, "python -c 'from scikit_build_core.build import build_sdist; build_sdist(\"dist\")'")


@in_venv
def sbom(session: nox.Session) -> None:
    """dist/*.cdx.json: what an environment with the newest wheel of dist contains, and what is linked into the wheel"""
    newest = max((ROOT / "dist").glob("*.whl"), key=lambda path: path.stat().st_mtime)
    version = re.search(r"-cp3(\d+)-", newest.name)
    if version is None:
        session.error(f"{newest.name} is not for one Python.")
    python = ask(session, f".venv/bin/python tests/platforms/interpreters.py 3.{version[1]}")
    run(session, f"{python} -m venv --clear --without-pip build/sbom-of")
    run(session, f"python -m pip -q --python build/sbom-of/bin/python install {newest}")
    listing = ROOT / "dist" / f"{newest.name.split('-cp')[0]}.cdx.json"
    command = (
        f"cyclonedx-py environment --output-reproducible --of JSON -o {listing} build/sbom-of/bin/python"
    )
    run(session, command, beside="sbom")
    listed = json.loads(listing.read_text())
    gloo = {"type": "library", "bom-ref": "gloo", "name": "gloo", "version": f"of {HOROVOD}"}
    listed["components"].append({**gloo, "licenses": [{"license": {"id": "BSD-3-Clause"}}]})
    listing.write_text(json.dumps(listed, indent=2) + "\n")


@in_venv
def wheel(session: nox.Session) -> None:
    """[VERSION ...]: dist/*.whl for this Python or those named, self-contained: needs only the C library. With
    MACHINE=aarch64 for that processor"""
    run(session, "python tests/environment.py packages wheel-tools")
    # zig's compiler links against GLIBC, older than this machine's, and brings its own C++ library.
    machine, zig = os.environ.get("MACHINE", os.uname().machine), BUILD / "zig"
    objects = BUILD / f"wheel-objects-{machine}"
    zig.mkdir(exist_ok=True)
    for program in (f"c++ -target {machine}-linux-gnu.{GLIBC}", "ar", "ranlib"):
        script = zig / program.split()[0]
        script.write_text(f'#!/bin/sh\nexec {BUILD}/wheel-tools/ziglang/zig {program} "$@"\n')
        script.chmod(0o755)
    pybind11 = ask(session, ".venv/bin/python -m pybind11 --cmakedir")
    cmake = [f"CMAKE_AR={zig}/ar", f"CMAKE_RANLIB={zig}/ranlib", f"pybind11_DIR={pybind11}"]
    # pybind11 has no stable ABI, so each Python needs its own wheel; but only the binding (csrc/module.cc) knows of
    # Python: the other objects are compiled once. One wheel for all, by ctypes, would make each call of a collective
    # 1.3 us longer (1.6, where pybind11 takes 0.3); the stable ABI has buffers from Python 3.11 on.
    # Without isolation, for a builder elsewhere starts with none.
    variables = {"CXX": f"{zig}/c++", "SKBUILD_BUILD_DIR": str(objects), "beside": "wheel-tools"}
    # Two builds of one commit give the same bytes: times of the commit, and no folder of this machine.
    made_at = os.environ.get("SOURCE_DATE_EPOCH") or ask(session, "git log -1 --format=%ct")
    variables |= {"SOURCE_DATE_EPOCH": made_at, "CXXFLAGS": f"-ffile-prefix-map={ROOT}=."}
    gloo = fetch_gloo(session)
    variables["SKBUILD_CMAKE_DEFINE"] = ";".join([*cmake, f"GLOO_SOURCE={gloo}"])
    for version in session.posargs or [f"{sys.version_info[0]}.{sys.version_info[1]}"]:
        python = ask(session, f".venv/bin/python tests/platforms/interpreters.py {version}")
        shutil.rmtree(BUILD / "wheel", ignore_errors=True)
        (objects / "CMakeCache.txt").unlink(missing_ok=True)  # it names the Python before
        if machine != os.uname().machine:  # Python and CMake go by these
            suffix = f".cpython-{version.replace('.', '')}-{machine}-linux-gnu.so"
            variables |= {"_PYTHON_HOST_PLATFORM": f"linux-{machine}", "SETUPTOOLS_EXT_SUFFIX": suffix}
            foreign = ["CMAKE_SYSTEM_NAME=Linux", f"CMAKE_SYSTEM_PROCESSOR={machine}"]
            foreign += [f"PYTHON_MODULE_EXTENSION={suffix}", "PYTHON_MODULE_DEBUG_POSTFIX="]
            variables["SKBUILD_CMAKE_DEFINE"] = ";".join([*cmake, *foreign, f"GLOO_SOURCE={gloo}"])
        run(
            session,
            f"{python} -m pip wheel -q --no-deps --no-build-isolation --wheel-dir build/wheel .",
            **variables,
        )
        made, platform = (
            next((BUILD / "wheel").glob("*.whl")),
            f"manylinux_{GLIBC.replace('.', '_')}_{machine}" if machine == os.uname().machine else "auto",
        )
        run(session, f"python -m auditwheel repair --plat {platform} --wheel-dir dist {made}", **variables)
        (engine,) = objects.glob(f"_engine.cpython-{version.replace('.', '')}-{machine}-*.so")
        oldest = max(map(int, re.findall(rb"GLIBC_2\.(\d+)", engine.read_bytes())))
        print(f"the wheel for Python {version}, in dist, runs on glibc 2.{oldest} and newer")


def fetch_gloo(session: nox.Session) -> str:
    """The folder of Gloo's sources: GLOO_SOURCE, or build/gloo."""
    archive = BUILD / f"{HOROVOD}.tar.gz"
    if "GLOO_SOURCE" not in os.environ and not (BUILD / "gloo" / "gloo" / "context.h").exists():
        run(
            session,
            f"python -m pip download -qq --no-deps --no-binary :all: --dest build {HOROVOD.replace('-', '==')}",
        )
        if hashlib.sha256(archive.read_bytes()).hexdigest() != HOROVOD_SHA256:
            session.error(f"{archive} is not the archive that Gloo's sources are expected in.")
        run(session, f"tar -xzf {archive} -C build --strip-components=2 {HOROVOD}/third_party/gloo")
    return os.environ.get("GLOO_SOURCE", f"{BUILD}/gloo")
