"""The current worker of this process: the one piece of module state of the project.

Set by the worker's loop, read by the façades alone (`spark_elastic.torch` and its siblings). Written by the main
thread; readers in other threads see the last complete value.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic_collectives import Group
from spark_elastic.protocol.types import Position, WorkerId, World


@dataclass(frozen=True)
class Current:
    """The worker that this process is. `group` is None between worlds; `position` is the step being taken."""

    worker: WorkerId
    world: World | None = None
    group: Group | None = None
    position: Position | None = None


class _Holder:
    value: Current | None = None


def current() -> Current | None:
    """The worker of this process, or None in a process that is none."""
    return _Holder.value


def set_current(value: Current | None) -> None:
    """For the worker's loop alone."""
    _Holder.value = value
