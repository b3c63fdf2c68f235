"""A sign of life in a store: a count that grows as long as its owner lives, and the wait until it stands still.

Also across processes that were not started together: an absent count is one that stands still. One thread of who lives.
"""

from __future__ import annotations

import logging
import threading
from types import TracebackType

from spark_elastic.clock import Clock
from spark_elastic.data.store import Store
from spark_elastic.errors import StoreError

log = logging.getLogger("spark_elastic.state")

BEAT_EVERY = 2.0  # seconds
STILL = 4 * BEAT_EVERY  # seconds after which a count stands still
LOOK_EVERY = 0.5  # seconds
END_WAIT = 5.0  # seconds for a beat under way


class Pulse:
    """Counts in the object `name` of the store while the block runs, and takes it away at the end."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spark-elastic-pulse", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._thread.join(END_WAIT)

    def _run(self) -> None:
        count = 0
        while True:
            try:
                self._store.write_bytes(self._name, str(count).encode())
            except StoreError as error:  # who watches cannot read it either, as a rule
                log.warning("no sign of life: %s", error)
            count += 1
            if self._closing.wait(BEAT_EVERY):
                break
        try:
            self._store.delete(self._name)
        except StoreError as error:
            log.debug("the last sign of life stays: %s", error)


def await_stillness(store: Store, name: str, clock: Clock) -> None:
    """Return once the count has stood still for `STILL` seconds. A store that fails is no sign of death."""
    seen, since = b"", clock.now()
    while clock.now() - since < STILL:
        clock.sleep(LOOK_EVERY)
        try:
            count = store.read_bytes(name) if store.exists(name) else b""
        except StoreError as error:
            log.debug("a sign of life cannot be looked for: %s", error)
            since = clock.now()
        else:
            seen, since = count, since if count == seen else clock.now()
