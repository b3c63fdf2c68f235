"""Temporary folders that outlive no process of this machine, however it ends."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spark_elastic.errors import InvalidInput

PREFIX = "spark_elastic"
DEAD = "ZX"  # states of a process that has ended, though its parent has not asked for the exit code


@contextmanager
def make_scratch_folder() -> Iterator[Path]:
    """A temporary folder for as long as the block takes. Another process removes it if this one is killed: its name
    identifies the owner by boot, process id namespace, process id and start time."""
    remove_stale_folders()
    me = os.getpid()
    try:
        made = tempfile.TemporaryDirectory(prefix=f"{_build_owner_prefix()}-{me}-{_process_start(me)}-")
    except OSError as error:
        raise InvalidInput(
            f"A temporary folder cannot be made on this host ({error}): set TMPDIR to a folder that has room and "
            "can be written."
        ) from error
    with made as folder:
        yield Path(folder)


def remove_stale_folders() -> None:
    """Remove the scratch folders of dead processes of this machine."""
    prefix = _build_owner_prefix()
    for folder in find_scratch_folders():
        pid, started, _ = folder.name.removeprefix(f"{prefix}-").split("-", 2)
        if pid.isdigit() and _process_start(int(pid)) != started:
            # Another process may remove it as well, or another user owns it
            shutil.rmtree(folder, ignore_errors=True)


def find_scratch_folders() -> list[Path]:
    """The scratch folders of all processes of this machine that this process can see."""
    try:
        return list(Path(tempfile.gettempdir()).glob(f"{_build_owner_prefix()}-*-*-*"))
    except OSError:
        return []  # there is no folder for temporary files


def _build_owner_prefix() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")[:8]
    return f"{PREFIX}-{boot}-{os.stat('/proc/self/ns/pid').st_ino}"


def _process_start(pid: int) -> str:
    """When a process was started, in ticks since the boot; "" if it is not alive."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if state in DEAD else fields[18]
