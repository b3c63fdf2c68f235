"""Blows in the middle of a training on processes, which stands still there until they have fallen, however late.

`await_blow` is called in workers, the rest by tests. They meet in a folder: a file stands for a blow to come.
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

FOLDER = "ELASTIC_TEST_BLOWS"
STEP = 8  # of an epoch, at whose beginning blows fall
LOOK_EVERY = 0.02  # seconds


def await_blow(epoch: int, step: int, validates: bool = False) -> None:
    """Wait for a blow at the beginning of a step, or of a step of the validation after the epoch."""
    if FOLDER in os.environ and (validates or step == STEP):
        to_come = Path(os.environ[FOLDER], f"validation {epoch}" if validates else f"epoch {epoch}")
        while to_come.exists():
            to_come.with_suffix(".reached").touch()
            time.sleep(LOOK_EVERY)


@contextmanager
def blows(folder: Path, acts: Mapping[str, Callable[[], object]]) -> Iterator[None]:
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
            try:
                act()
            finally:
                (folder / place).unlink()

    thread = threading.Thread(target=play, name="blows")
    os.environ[FOLDER] = str(folder)  # slots hand it down
    thread.start()
    try:
        yield
    finally:
        del os.environ[FOLDER]
        over.set()
        thread.join()


def kill(cluster: ProcessLauncher, job: int) -> None:
    """A slot and its processes at once, which by themselves die a little after it."""
    processes = psutil.Process(cluster.slots()[job]).children()
    cluster.kill(job)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
