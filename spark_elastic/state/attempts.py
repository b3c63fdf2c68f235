"""Which driver holds a run: each that opens it takes the next attempt, and the highest is the holder (R10).

An attempt is an object of the store that exactly one driver could create. Any thread; no state.
"""

from __future__ import annotations

import json
import os
import socket

from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidInput, StoreError

TRIES = 100  # drivers that open the run at the same moment


def check_name(run_id: object) -> None:
    """Raises InvalidInput where a run cannot be called so."""
    if not isinstance(run_id, str) or run_id in ("", ".", "..") or "/" in run_id:
        raise InvalidInput(f"run_id must be a name without slashes, other than '.' and '..'; got {run_id!r}.")


def take(store: Store, run_id: str) -> int:
    """The attempt that is this driver's alone.

    Raises:
        StoreError: the store cannot be read or written.
    """
    content = json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode()
    attempt = highest(store, run_id)
    for _ in range(TRIES):
        attempt += 1
        if store.create_exclusive(f"{folder(run_id)}/{attempt:06d}", content):
            return attempt
    raise StoreError(f"Run {run_id!r}: {TRIES} other drivers opened it at the same moment; try again.")


def highest(store: Store, run_id: str) -> int:
    """The attempt that holds the run; 0 where nobody has opened it."""
    names = [name.rpartition("/")[2] for name in store.list(folder(run_id))]
    return max((int(name) for name in names if name.isdigit()), default=0)


def driver_of(store: Store, run_id: str, attempt: int) -> str:
    """For sentences: which driver took it."""
    try:
        driver = json.loads(store.read_bytes(f"{folder(run_id)}/{attempt:06d}"))
        return f"attempt {attempt}, process {driver['pid']} on {driver['host']}"
    except (StoreError, ValueError, TypeError, KeyError):
        return f"attempt {attempt}"


def folder(run_id: str) -> str:
    """Where a run's attempts are."""
    return f"runs/{run_id}/attempts"
