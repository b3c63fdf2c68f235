"""Where a Python worker of Spark predicts: on the GPU that Spark assigned to its task, else on the CPU. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from spark_elastic.errors import InvalidInput


def gpu_for(addresses: Sequence[str], visible: int) -> int | None:
    """The GPU's number, as the framework counts them; None: the CPU.

    addresses: of the GPUs that Spark gave to the task. visible: GPUs that the framework sees. An address counts the
    host's GPUs; where a resource manager shows a process its own alone, that is number 0.

    Raises:
        InvalidInput: the framework sees several GPUs, and none of them has that address.
    """
    if not addresses or not visible:
        return None
    if addresses[0].isdecimal() and int(addresses[0]) < visible:
        return int(addresses[0])
    if visible == 1:
        return 0
    raise InvalidInput(
        f"Spark gave GPU {addresses[0]!r} to this task, and {visible} can be seen: let CUDA_VISIBLE_DEVICES show all "
        "of the host's GPUs, or the task's alone."
    )
