from collections.abc import Callable, Sequence
from typing import Any

class DataType:
    float32: DataType
    float64: DataType
    int32: DataType
    int64: DataType

class ReduceOp:
    sum: ReduceOp
    min: ReduceOp
    max: ReduceOp
    product: ReduceOp

class Endpoint:
    def __init__(self, key: bytes, host: str, first: int, last: int, advertise: str) -> None: ...
    @property
    def address(self) -> str: ...
    def close(self) -> None: ...

class Group:
    def __init__(
        self,
        endpoint: Endpoint,
        rank: int,
        peers: Sequence[str],
        fence: tuple[int, int],
        timeout: float,
        bcube_limit: int,
    ) -> None: ...
    def allreduce(
        self, data: Any, count: int, bytes: int, type: DataType, op: ReduceOp, algorithm: str
    ) -> None: ...
    def broadcast(self, data: Any, bytes: int, root: int) -> None: ...
    def allgather(self, data: Any, out: Any, sizes: Sequence[int]) -> None: ...
    def barrier(self) -> None: ...
    def abort(self, reason: str) -> None: ...
    def close(self) -> None: ...

def set_raiser(function: Callable[[int, Sequence[int], str], None]) -> None: ...
def sha256_hmac(key: bytes, message: bytes) -> bytes: ...
