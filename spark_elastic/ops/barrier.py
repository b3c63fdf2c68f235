"""`barrier` under Horovod's name. Any thread."""

from __future__ import annotations

from spark_elastic.ops.channels import channel_of
from spark_elastic.ops.process_sets import ProcessSet, global_process_set
from spark_elastic.ops.rounds import request as kinds
from spark_elastic.ops.rounds.request import Request


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return once all ranks of the set have called it."""
    channel_of(process_set).submit(Request(kinds.BARRIER), awaited=True).wait()
