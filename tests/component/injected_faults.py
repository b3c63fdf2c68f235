"""Faults in the middle of a training on processes. Training waits at each place until its fault was injected.

Workers call `await_fault`, tests call the rest. They communicate through a folder: a file stands for a planned fault.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

from spark_elastic.testing.fakes import ProcessLauncher

# A link to the folder, where faults are planned. Slots hand it down.
LINK = os.environ.setdefault("ELASTIC_TEST_FAULTS", f"{tempfile.gettempdir()}/planned-faults-{os.getpid()}")
STEP = 8  # of an epoch, before which faults are injected
LOOK_EVERY = 0.02  # seconds


def await_fault(epoch: int, step: int, validates: bool = False) -> None:
    """Wait for a fault at the beginning of a step, or of a step of the validation after the epoch."""
    if validates or step == STEP:
        to_come = Path(LINK, f"validation {epoch}" if validates else f"epoch {epoch}")
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
    os.symlink(folder, LINK)
    thread.start()
    try:
        yield
    finally:
        os.unlink(LINK)
        over.set()
        thread.join()
    for failure in failures:
        raise failure


def list_workers(cluster: ProcessLauncher) -> list[psutil.Process]:
    """The training process of each living slot, in the order of the slots' numbers."""
    return [worker for _, slot in sorted(cluster.slots().items()) for worker in find_worker(slot)]


def find_worker(slot: int) -> list[psutil.Process]:
    """The training process of a slot's process, if there is one; its spare is younger."""
    workers = [child for child in psutil.Process(slot).children() if is_training_process(child)]
    return sorted(workers, key=lambda child: child.create_time())[:1]


def is_training_process(child: psutil.Process) -> bool:
    """A slot may have a fork server beside them."""
    try:
        return "spark_elastic.worker.entry" in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill(cluster: ProcessLauncher, job: int) -> None:
    """A slot and its processes at once, which by themselves die a little after it."""
    processes = psutil.Process(cluster.slots()[job]).children()
    cluster.kill(job)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
