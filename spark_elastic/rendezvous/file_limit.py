"""How many files this process may open: the server needs some for each worker's connections. Any thread."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from spark_elastic.errors import InvalidInput

# Connections: two long polls, and heartbeats, log lines, reports and a request for a world at the same time.
FILES_PER_WORKER = 6
RESERVED_FILES = 256  # for what else the driver's process opens

_reserve_lock = threading.Lock()  # owns _reserved
# Workers of each job that runs in this process; not all of them are connected yet.
_reserved: list[int] = []


@contextmanager
def reserve_files(workers: int) -> Iterator[None]:
    """Have room for so many workers' connections beside those of this process's other jobs, while the block runs.

    Raises:
        InvalidInput: as `raise_file_limit`.
    """
    with _reserve_lock:
        raise_file_limit(workers, sum(_reserved))
        _reserved.append(workers)
    try:
        yield
    finally:
        with _reserve_lock:
            _reserved.remove(workers)


def raise_file_limit(workers: int, others: int = 0) -> None:
    """Raise this process's soft limit to what the server needs for so many workers, where it is lower.

    Args:
        others: workers of other jobs. Some are connected already, so their need alone is no error.

    Raises:
        InvalidInput: the hard limit forbids it.
    """
    needed = len(os.listdir("/proc/self/fd")) + RESERVED_FILES + FILES_PER_WORKER * workers
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = needed + FILES_PER_WORKER * others
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        most = workers - -(-(needed - hard) // FILES_PER_WORKER)
        fewer = f" or set max_workers to {most} or less" if most > 0 else ""
        raise InvalidInput(
            f"The driver may open {hard} files and needs {needed} for {workers} workers' connections: raise its hard "
            f"limit (ulimit -Hn){fewer}."
        )
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
    )
