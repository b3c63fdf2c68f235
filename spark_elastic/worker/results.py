"""What a function returned, on its way from a worker to the caller: any object that cloudpickle takes.

The text travels in messages that prove the job's key; nothing else is ever decoded.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import cloudpickle

from spark_elastic.errors import InvalidInput
from spark_elastic.rendezvous import codec
from spark_elastic.rendezvous.messages import BODY_AT_MOST

ENVELOPE = 4096  # bytes that a message may need besides the result, generously
MOST = 5 << 20  # bytes of a pickled result: it travels in one message, as text that is a third longer


def encode(value: object, rank: int) -> str:
    """JSON text. rank: whose result it is, for the error.

    Raises:
        InvalidInput: the value cannot be pickled, or is too large.
    """
    try:
        pickled = cloudpickle.dumps(value)
    except Exception as error:  # objects raise anything when they are asked for their state
        raise InvalidInput(
            f"the function on rank {rank} returned a {type(value).__name__} that cannot be pickled ({error}): "
            "return plain data."
        ) from error
    if len(pickled) > MOST:
        raise InvalidInput(
            f"the function on rank {rank} returned a {type(value).__name__} of {len(pickled) / 2**20:.1f} MiB, and "
            f"at most {MOST >> 20} MiB can be returned: write it to a file or store, and return its path."
        )
    return json.dumps(base64.b64encode(pickled).decode("ascii"))


def refuse_too_large(text: str) -> None:
    """For a program's result, as JSON text.

    Raises:
        InvalidInput: it is too large.
    """
    size = len(codec.dumps({"result": text}))
    if size > BODY_AT_MOST - ENVELOPE:
        raise InvalidInput(
            f"what training returned takes {size / 2**20:.1f} MiB in a message, and at most {BODY_AT_MOST >> 20} MiB "
            "can be sent to the driver: keep fewer numbers in the history, and write what is large to the store."
        )


def decode(text: str, rank: int) -> Any:
    """The value; None for `null`, which stands for a worker that ended without a result. rank: as in `encode`.

    Raises:
        InvalidInput: the value cannot be made here again.
    """
    encoded = json.loads(text)
    if encoded is None:
        return None
    try:
        return cloudpickle.loads(base64.b64decode(encoded))
    except (
        Exception
    ) as error:  # a module that is not here, or a class whose objects pickle and do not come back
        raise InvalidInput(
            f"what the function returned on rank {rank} was pickled there and cannot be read here "
            f"({type(error).__name__}: {error}): return plain data."
        ) from error
