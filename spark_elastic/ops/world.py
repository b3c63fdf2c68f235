"""The current world as operations see it: its group, or a world of one in a process that is no worker. Any thread."""

from __future__ import annotations

from typing import cast

from elastic_collectives import Group
from spark_elastic.ops.alone import Alone
from spark_elastic.worker.context import current
from spark_elastic.worker.seat import group_of


def world() -> Group:
    """The group of all ranks. Only the main thread may call its collectives.

    Raises:
        CollectiveError: between two worlds there is none.
    """
    here = current()
    return cast(Group, Alone()) if here is None else group_of(here)
