"""The whole test run, as `./build.sh test` starts it: `python -m tests.run`; arguments go to each pytest.

Tests on Spark mostly wait and the others mostly compute, so they run at once; those on Spark on two clusters, one for
the tests that share a session, after which the plain ones run, so that all streams end together. The first stream
prints as it goes, the output of the others comes at the end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

BUILD = Path(__file__).resolve().parents[1] / "build"
PYTHON = sys.executable
ON_S3 = os.environ | {"PYTHONPATH": f"{BUILD}/s3:{os.environ.get('PYTHONPATH', '')}".rstrip(":")}
# Longer than any of these tests may take: one that even its own limit cannot end, ends the run, with all stacks.
PYTEST = [PYTHON, "-m", "pytest", "-o", "faulthandler_timeout=720", "-o", "faulthandler_exit_on_timeout=true"]
CHOSEN = "not faults or ci"
SHARED, OWN = f"({CHOSEN}) and not own_session", f"({CHOSEN}) and own_session"
PLAIN = ["tests/unit", "tests/component/collectives"]
FILLING = ["tests/simulation", *(f"tests/component/{name}" for name in ("tensorflow", "keras", "worker"))]
OTHERS = [f"--ignore={folder}" for folder in ("tests/spark", "tests/faults", *PLAIN, *FILLING)]
# Each stream: what its pytests, one after the other, are to run.
STREAMS = {
    "the tests on Spark that share a session, and the plain ones": [
        ["-m", SHARED, "tests/spark", "tests/faults"],
        ["-m", CHOSEN, *PLAIN],
    ],
    "the tests on Spark with sessions of their own, some without, and those on S3": [
        ["-m", OWN, "tests/spark", "tests/test_wheel.py"],
        ["-m", SHARED, *FILLING],
        ["-m", CHOSEN, "tests/component/s3"],
    ],
    "the tests without Spark": [["-m", SHARED, *OTHERS]],
}
running: list[subprocess.Popen[bytes]] = []
log_paths = {title: BUILD / f"tests-{number}.log" for number, title in enumerate(STREAMS)}


def run_stream(title: str) -> bool:
    """Whether all tests passed. Each process has a session of its own, so that it gets Ctrl-C once, by `interrupt`."""
    log, ends = None if title == next(iter(STREAMS)) else log_paths[title].open("wb"), []
    for words in STREAMS[title]:
        command = [*PYTEST, *(sys.argv[1:] or ["--durations=30"]), *words]
        environment = ON_S3 if words[-1].endswith("s3") else None
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        running.append(process)
        ends.append(process.wait())
        if ends[-1] == 2:  # interrupted
            break
    return not any(ends)


def interrupt(*_: object) -> None:
    for process in running:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)


def archive_classes() -> None:
    """The classes that Spark loads, for JVMs to map: a third of what tests on Spark compute goes without it."""
    program = os.path.join(os.environ["JAVA_HOME"], "bin", "java") if "JAVA_HOME" in os.environ else "java"
    java = subprocess.run([program, "-version"], capture_output=True, text=True, check=True).stderr
    ready, wanted = BUILD / "spark-classes.ready", f"{java}Version: {version('pyspark')}\n"
    if not ready.exists() or ready.read_text() != wanted:
        print("== archiving Spark's classes (a minute, once)", flush=True)
        with (BUILD / "spark-classes.log").open("wb") as log:
            subprocess.run([PYTHON, "-m", "tests.spark.class_archive"], stdout=log, stderr=log, check=True)
        ready.write_text(wanted)


def main() -> int:
    """The exit status."""
    with ThreadPoolExecutor(len(STREAMS)) as pool:
        archived = pool.submit(archive_classes)
        native = ["ctest", "--test-dir", BUILD / "native", "--output-on-failure", "--no-tests=ignore"]
        subprocess.run(native, check=True)
        subprocess.run([PYTHON, "tests/environment.py", "packages", "s3"], check=True)
        # Without them, the tests on S3 would be skipped.
        subprocess.run([PYTHON, "-W", "ignore", "-c", "import s3fs, moto.server"], env=ON_S3, check=True)
        archived.result()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, interrupt)
        passed = list(pool.map(run_stream, STREAMS))
    for title in list(STREAMS)[1:]:
        print(f"== {title}", flush=True)
        print(log_paths[title].read_text(errors="replace"), flush=True)
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
