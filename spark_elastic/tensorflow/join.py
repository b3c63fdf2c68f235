"""`join` under Horovod's name: for ranks that are out of data."""

from __future__ import annotations

from spark_elastic.ops.channels import channel_of


def join() -> int:
    """Take part in the others' reductions with nothing to add, until all have joined; the rank that joined last.

    Averages divide by the world's size all the same. Gathering and broadcasting take all ranks, and so do gradients
    with rows missing.

    Raises:
        CollectiveError: the world changed.
    """
    return int(channel_of().join().wait()[0][0])
