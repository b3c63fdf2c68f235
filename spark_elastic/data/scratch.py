"""Temporary folders that do not outlive their process for long: what a killed one could not remove, another takes away.

A folder's name says whose it is: boot, namespace of process ids, process and when that was started. Only what is surely
of a dead process is removed, so that neither a process id that is used again nor a folder that several machines or
containers share leads astray. Any thread, any process.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "spark_elastic"
DEAD = "ZX"  # states of a process that has ended, though nobody may have asked for its exit code


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder for as long as the block takes."""
    sweep()
    me = os.getpid()
    with tempfile.TemporaryDirectory(prefix=f"{_here()}-{me}-{_started(me)}-") as folder:
        yield Path(folder)


def sweep() -> None:
    """Remove the folders that dead processes of this machine have left."""
    here = _here()
    try:
        found = list(Path(tempfile.gettempdir()).glob(f"{here}-*-*-*"))
    except OSError:
        return  # there is no place for temporary files
    for folder in found:
        pid, started, _ = folder.name.removeprefix(f"{here}-").split("-", 2)
        if pid.isdigit() and _started(int(pid)) != started:
            shutil.rmtree(folder, ignore_errors=True)  # another may be at it as well, or it is another user's


def _here() -> str:
    """The beginning of all names that processes give which this one can see."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")[:8]
    return f"{PREFIX}-{boot}-{os.stat('/proc/self/ns/pid').st_ino}"


def _started(pid: int) -> str:
    """When a process was started, in ticks since the boot; "" where it does not live."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if state in DEAD else fields[18]
