"""Pickles what workers load: cloudpickle, in which code keeps the name of its file.

cloudpickle 3.1.3 replaces that name by "<dynamic-code>". Tracebacks of a user's function, the stack of a stalled worker
and the place of a crash would then show line numbers without a file. Predictions use it, which need no engine.
"""

from __future__ import annotations

import io
from types import CodeType
from typing import Any

import cloudpickle

UNNAMED_FILE = "<dynamic-code>"


def _reduce_code(code: CodeType) -> tuple[Any, ...]:
    build, args = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return build, tuple(code.co_filename if arg == UNNAMED_FILE else arg for arg in args)


class WorkerPickler(cloudpickle.Pickler):  # type: ignore[misc] # cloudpickle has no types
    """Use it as `pickle.Pickler`."""

    dispatch_table = cloudpickle.Pickler.dispatch_table.new_child({CodeType: _reduce_code})


def pickle_for_workers(value: object) -> bytes:
    """What `cloudpickle.loads` takes on a worker."""
    buffer = io.BytesIO()
    WorkerPickler(buffer).dump(value)
    return buffer.getvalue()
