"""The store by which process groups of torch and bulk planes find their peers: over the key-value store of the driver.

Each request proves the job's key. The values belong to one world and are forgotten with it. Any thread.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from elastic_collectives import CollectiveError
from spark_elastic.errors import StaleGeneration
from spark_elastic.protocol.messages import DriverRequest
from spark_elastic.rendezvous.messages import (
    MAX_POLL_SECONDS,
    CompareAndSet,
    Comparison,
    DriverClient,
    GetValues,
    ListKeys,
    SetValues,
)
from spark_elastic.rendezvous.server_state import name_generation_scope
from spark_elastic.worker.context import WorkerContext

R = TypeVar("R")
_Store: Any = dist.Store  # type: ignore[attr-defined]

PREFIX = "torch/"  # of the keys: the world's scope has others


class DriverStore(_Store):  # type: ignore[misc]
    """`torch.distributed.Store` over the driver, for one world. C++ does not keep the Python object alive: see
    `get_store`."""

    def __init__(self, worker: WorkerContext, driver: DriverClient, timeout: timedelta) -> None:
        super().__init__()
        assert worker.world is not None
        self._worker = worker
        self._driver = driver
        self._scope = name_generation_scope(worker.world.fence.generation)
        # Kept by C++, where torch sets that of the stores which it wraps around this one.
        self.set_timeout(timeout)

    def set(self, key: str, value: bytes | str) -> None:
        self.multi_set([key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        request = SetValues(self._scope, tuple(map(_prefix, keys)), tuple(map(_encode, values)))
        self._ask(request)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values, once all keys have one. Raises DistStoreError if they have not within the store's timeout."""
        return self._wait(list(keys), self.timeout)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._wait(list(keys), self.timeout if timeout is None else timeout)

    def check(self, keys: Sequence[str]) -> bool:
        request = GetValues(self._scope, tuple(map(_prefix, keys)))
        return None not in self._ask(request).values

    def add(self, key: str, value: int) -> int:
        return int(self._change(key, lambda now: str(int(now or b"0") + value).encode()) or b"0")

    def append(self, key: str, value: bytes | str) -> None:
        self._change(key, lambda now: (now or b"") + _encode(value))

    def delete_key(self, key: str) -> bool:
        return self._change(key, lambda now: None) is not None

    def num_keys(self) -> int:
        return len(self.list_keys())

    deleteKey, getNumKeys = delete_key, num_keys  # the names that C++ calls

    def list_keys(self) -> list[str]:
        return [key.removeprefix(PREFIX) for key in self._ask(ListKeys(self._scope, PREFIX)).keys]

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Set the value if it is `expected`, or if there is none and `expected` is empty. Returns the value then."""
        old = _encode(expected)
        reply = self._compare_and_set(key, old, _encode(desired))
        if reply.value is None and not old:
            reply = self._compare_and_set(key, None, _encode(desired))
        return old if reply.value is None else reply.value

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> DriverStore:
        return self

    def _change(self, key: str, change: Callable[[bytes | None], bytes | None]) -> bytes | None:
        """Replace the value by what `change` makes of it. Returns the new value, or the old one if there is none."""
        request = GetValues(self._scope, (_prefix(key),))
        now = self._ask(request).values[0]
        while True:
            new = change(now)
            reply = self._compare_and_set(key, now, new)
            if reply.changed:
                return now if new is None else new
            now = reply.value

    def _compare_and_set(self, key: str, expected: bytes | None, desired: bytes | None) -> Comparison:
        return self._ask(CompareAndSet(self._scope, _prefix(key), expected, desired, uuid.uuid4().hex))

    def _wait(self, keys: list[str], timeout: timedelta) -> list[bytes]:
        request = GetValues(self._scope, tuple(map(_prefix, keys)), wait=True)
        deadline = self._driver.now() + timeout.total_seconds()
        with self._worker.wait_recorder.record_wait():
            while True:
                left = max(0.0, deadline - self._driver.now())
                found = self._ask(request, min(MAX_POLL_SECONDS, left)).values
                missing = [key for key, value in zip(keys, found, strict=True) if value is None]
                if not missing:
                    return [value for value in found if value is not None]
                if self._driver.now() >= deadline:
                    raise dist.DistStoreError(
                        f"no rank has set {', '.join(missing)} within {timeout.total_seconds():g} s."
                    )

    def _ask(self, request: DriverRequest[R], hold: float = 0.0) -> R:
        try:
            return self._driver.ask(request, hold)
        except StaleGeneration as error:
            raise CollectiveError((), f"the world of this store has ended: {error}") from error


def get_store(worker: WorkerContext, driver: DriverClient, timeout: timedelta) -> DriverStore:
    """The store of the worker's world, which lives as long as that."""
    return worker.group_context.get_or_create(DriverStore, lambda: DriverStore(worker, driver, timeout))


def _prefix(key: str) -> str:
    return PREFIX + key


def _encode(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
