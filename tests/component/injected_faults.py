"""Faults in the middle of a training on processes. Training waits at each place until its fault was injected.

Workers call `await_fault`, tests call the rest. They communicate through a folder: a file stands for a planned fault.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

from spark_elastic.testing.fakes import ProcessLauncher

FOLDER = "ELASTIC_TEST_FAULTS"
STEP = 8  # of an epoch, before which faults are injected
LOOK_EVERY = 0.02  # seconds


def await_fault(epoch: int, step: int, validates: bool = False) -> None:
    """Wait for a fault at the beginning of a step, or of a step of the validation after the epoch."""
    if FOLDER in os.environ and (validates or step == STEP):
        to_come = Path(os.environ[FOLDER], f"validation {epoch}" if validates else f"epoch {epoch}")
        while to_come.exists():
            to_come.with_suffix(".reached").touch()
            time.sleep(LOOK_EVERY)


@contextmanager
def inject_faults(folder: Path, acts: Mapping[str, Callable[[], object]]) -> Iterator[None]:
    """Trainings started inside stand still at those places, "epoch 0" or "validation 1", until that act is over.

    folder: to be made. acts: in the order of their places; each in a thread beside the test's.
    """
    folder.mkdir()
    for place in acts:
        (folder / place).touch()
    over = threading.Event()

    def play() -> None:
        for place, act in acts.items():
            while not (folder / f"{place}.reached").exists():
                if over.wait(LOOK_EVERY):
                    return
            if not failures:
                try:
                    act()
                except BaseException as failure:
                    # It is raised below: training may go on to its end.
                    failures.append(failure)
            (folder / place).unlink()

    failures: list[BaseException] = []
    thread = threading.Thread(target=play, name="faults")
    os.environ[FOLDER] = str(folder)  # slots hand it down
    thread.start()
    try:
        yield
    finally:
        del os.environ[FOLDER]
        over.set()
        thread.join()
    for failure in failures:
        raise failure


def kill(cluster: ProcessLauncher, job: int) -> None:
    """A slot and its processes at once, which by themselves die a little after it."""
    processes = psutil.Process(cluster.slots()[job]).children()
    cluster.kill(job)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
