"""The engine alone: collectives among processes that come and go. numpy in, numpy out; no Spark, no framework."""

from elastic_collectives.engine import Endpoint, Exchange, Group, connect
from elastic_collectives.errors import (
    CollectiveError,
    CollectiveTimeout,
    GroupAborted,
    MismatchError,
    PeerLost,
    RequestTimeout,
)

__all__ = [
    "CollectiveError",
    "CollectiveTimeout",
    "Endpoint",
    "Exchange",
    "Group",
    "GroupAborted",
    "MismatchError",
    "PeerLost",
    "RequestTimeout",
    "connect",
]
