"""The whole test run, as `./build.sh test` starts it: `python -m tests.run`; arguments go to each pytest.

It has parts, each a process of its own, of which AT_ONCE run at a time: while one waits, others compute. They begin in
the order below, long ones first, so that all end together. What a part prints comes when it ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

BUILD = Path(__file__).resolve().parents[1] / "build"
PYTHON = sys.executable
ON_S3 = os.environ | {"PYTHONPATH": f"{BUILD}/s3:{os.environ.get('PYTHONPATH', '')}".rstrip(":")}
# Longer than any of these tests may take: one that even its own limit cannot end, ends its part, with all stacks.
PYTEST = [PYTHON, "-m", "pytest", "-o", "faulthandler_timeout=720", "-o", "faulthandler_exit_on_timeout=true"]
CHOSEN = "not faults or ci"
SHARED, OWN = f"({CHOSEN}) and not own_session", f"({CHOSEN}) and own_session"
PLAIN = ["tests/unit", "tests/component/collectives"]
# In this order: warm slots go on importing what jobs before have.
WORKERS = ["tests/simulation", *(f"tests/component/{name}" for name in ("worker", "tensorflow", "keras"))]
TORCH, S3 = "tests/component/torch", "tests/component/s3"
OTHERS = [f"--ignore={folder}" for folder in ("tests/spark", "tests/faults", *PLAIN, *WORKERS, TORCH, S3)]
AT_ONCE = 3
# What each pytest is to run.
PARTS = {
    "the tests on Spark that share a session": ["-m", SHARED, "tests/spark", "tests/faults"],
    "the tests on Spark with sessions of their own": ["-m", OWN, "tests/spark", "tests/test_wheel.py"],
    "the tests on torch": ["-m", CHOSEN, TORCH],
    "the other tests": ["-m", SHARED, *OTHERS],
    "the plain tests": ["-m", CHOSEN, *PLAIN],
    "the tests of workers": ["-m", CHOSEN, *WORKERS],
    "the tests on S3": ["-m", CHOSEN, S3],
}
ENGINE = ["ctest", "--test-dir", f"{BUILD}/native", "--output-on-failure", "--no-tests=ignore", "-j", "3"]
running: list[subprocess.Popen[bytes]] = []
interrupted = threading.Event()
printing = threading.Lock()


def run_part(title: str, command: list[str], needed: list[Future[None]], environment: dict[str, str]) -> bool:
    """Whether all tests passed. A part has a session of its own, so that it gets Ctrl-C once, by `interrupt`."""
    for each in needed:
        each.result()
    if interrupted.is_set():
        return False
    print(f"== {title} begin", flush=True)
    began, log = time.monotonic(), BUILD / f"tests-{title.replace(' ', '-')}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment, start_new_session=True
        )
        running.append(process)
        status = process.wait()
    with printing:
        print(f"== {title}, {time.monotonic() - began:.0f} s", flush=True)
        print(log.read_text(errors="replace"), flush=True)
    return status == 0


def interrupt(*_: object) -> None:
    interrupted.set()
    for process in running:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)


def archive_classes() -> None:
    """The classes that Spark loads, for JVMs to map: a third of what tests on Spark compute goes without it."""
    home = os.environ.get("JAVA_HOME")  # an empty one is none
    program = os.path.join(home, "bin", "java") if home else "java"
    java = subprocess.run([program, "-version"], capture_output=True, text=True, check=True).stderr
    ready, wanted = BUILD / "spark-classes.ready", f"{java}Version: {version('pyspark')}\n"
    if not ready.exists() or ready.read_text() != wanted:
        print("== archiving Spark's classes (a minute, once)", flush=True)
        with (BUILD / "spark-classes.log").open("wb") as log:
            subprocess.run([PYTHON, "-m", "tests.spark.class_archive"], stdout=log, stderr=log, check=True)
        ready.write_text(wanted)


def install_s3() -> None:
    """Without its packages, the tests on S3 would be skipped."""
    subprocess.run([PYTHON, "tests/environment.py", "packages", "s3"], check=True)
    subprocess.run([PYTHON, "-W", "ignore", "-c", "import s3fs, moto.server"], env=ON_S3, check=True)


def main() -> int:
    """The exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    with ThreadPoolExecutor(2) as makers, ThreadPoolExecutor(AT_ONCE) as players:
        classes, s3 = makers.submit(archive_classes), makers.submit(install_s3)

        def play(title: str, *words: str) -> Future[bool]:
            needed = [classes] * ("tests/spark" in words) + [s3] * (S3 in words or OWN in words)
            environment = ON_S3 if S3 in words else dict(os.environ)
            return players.submit(run_part, title, list(words), needed, environment)

        options = sys.argv[1:] or ["--durations=30"]
        parts = [play(title, *PYTEST, *options, *words) for title, words in PARTS.items()]
        parts.append(play("the tests of the engine", *ENGINE))
        return 0 if all(part.result() for part in parts) else 1


if __name__ == "__main__":
    sys.exit(main())
