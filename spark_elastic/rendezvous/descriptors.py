"""Files that the driver's process may have open: a connection is one, and every worker has several."""

from __future__ import annotations

import os
import resource

from spark_elastic.errors import InvalidInput

PER_WORKER = 6  # connections: two long polls, and beats, log lines, reports, a join at the same time
SPARE = 256  # for what else the driver's process opens


def make_room(workers: int) -> None:
    """Raise this process's soft limit to what the server needs for so many workers, where it is lower.

    Raises:
        InvalidInput: the hard limit forbids it.
    """
    needed = len(os.listdir("/proc/self/fd")) + SPARE + PER_WORKER * workers
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise InvalidInput(
            f"The driver may open {hard} files and needs {needed} for {workers} workers' connections: raise its hard "
            f"limit (ulimit -Hn) or set max_workers to {max(1, workers - -(-(needed - hard) // PER_WORKER))} or less."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
