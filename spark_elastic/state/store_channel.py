"""Letters between a client and a coordinator that cannot dial each other: objects of the store that both reach.

A letter is JSON, signed with the job's key, and deleted by whom it is for. What was posted since the last turn goes out
as one object, so that logs come in chunks; silence is broken now and then, so that each side knows of the other. What
does not verify stays where it is: it may be half of a letter, or in the place of one that is still to come. One
thread a side, `start` to `close`, which also calls `heard`; `post` may be called from any thread.
"""

from __future__ import annotations

import base64
import hmac
import json
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from spark_elastic.clock import Clock
from spark_elastic.data.store import Store
from spark_elastic.errors import StoreError

log = logging.getLogger("spark_elastic.state")

TURN = 0.5  # seconds between two looks
SEND_EVERY = 2.0  # seconds between two letters; an empty one is sent if there is nothing to say
Message = Mapping[str, Any]


@dataclass(frozen=True)
class ChannelEnd:
    """Where the letters of one job lie. own, other: names of the sides."""

    store: Store
    folder: str
    key: bytes = field(repr=False)
    own: str
    other: str

    def object_name(self, to: str, number: int) -> str:
        return f"{self.folder}/{to}-{number:08d}"

    def sign(self, name: str, letters: list[Message]) -> bytes:
        body = json.dumps(letters).encode()
        return base64.b64encode(self._seal(name, body)) + b"\n" + body

    def verify(self, name: str, content: bytes) -> list[Message]:
        """Raises StoreError for what nobody with the key has written under that name, or not yet to its end."""
        seal, _, body = content.partition(b"\n")
        if not hmac.compare_digest(seal, base64.b64encode(self._seal(name, body))):
            raise StoreError(f"The letter {name} is not whole, or not signed with the job's key.")
        letters: list[Message] = json.loads(body)
        return letters

    def _seal(self, name: str, body: bytes) -> bytes:
        return hmac.digest(self.key, b"letter\0" + name.encode() + b"\0" + body, "sha256")


class StoreChannel:
    """heard: called with each letter, in order; what it raises is logged."""

    def __init__(self, box: ChannelEnd, heard: Callable[[Message], None], clock: Clock) -> None:
        self._box = box
        self._on_message = heard
        self._clock = clock
        self._lock = threading.Lock()  # owns _waiting
        self._waiting: list[Message] = []
        self._under_way: bytes | None = None
        self._sent = self._read = 0
        self._last_sent = self.last_seen = clock.now()
        self._closing = threading.Event()
        self._until = 0.0  # of the last turn
        self._thread = threading.Thread(target=self._run, name="spark-elastic-mail", daemon=True)

    def start(self) -> None:
        self.last_seen = self._clock.now()
        self._thread.start()

    def send(self, letter: Message) -> None:
        with self._lock:
            self._waiting.append(letter)

    def close(self, timeout: float) -> None:
        """Send what waits, and read what is there; also where it was not started. Where the store fails, it is tried
        again until `timeout` seconds have passed: the last letter may be the job's result."""
        self._until = self._clock.now() + timeout
        self._closing.set()
        if self._thread.ident is None:
            self._thread.start()
        self._thread.join(timeout)

    def poll(self) -> None:
        """Send what waits and read what is there, once.

        Raises:
            StoreError: the store failed, or a letter in it is not whole; nothing is lost.
        """
        self._send()
        while self._box.store.exists(name := self._box.object_name(self._box.own, self._read)):
            letters = self._box.verify(name, self._box.store.read_bytes(name))
            self._read += 1
            self.last_seen = self._clock.now()
            for letter in letters:
                self._deliver(letter)
            self._box.store.delete(name)

    def _send(self) -> None:
        if self._under_way is not None:
            # It may have been written, and read, all the same: the same again, and what is new by the next one.
            self._write(self._under_way)
        with self._lock:
            letters, self._waiting = self._waiting, []
        if letters or self._clock.now() - self._last_sent >= SEND_EVERY:
            self._write(self._box.sign(self._next_name(), letters))

    def _next_name(self) -> str:
        return self._box.object_name(self._box.other, self._sent)

    def _write(self, content: bytes) -> None:
        self._under_way = content
        self._box.store.write_bytes(self._next_name(), content)
        self._under_way = None
        self._sent += 1
        self._last_sent = self._clock.now()

    def _deliver(self, letter: Message) -> None:
        try:
            self._on_message(letter)
        except Exception:
            log.exception("a letter could not be acted on")

    def _run(self) -> None:
        while True:
            last = self._closing.wait(TURN)
            try:
                self.poll()
                if last:
                    return
            except StoreError as error:  # the next turn may fare better
                log.warning("letters wait: %s", error)
                if last and self._clock.now() + TURN > self._until:
                    return
                if last:
                    self._clock.sleep(TURN)


# A sign of life in a store: a count that grows as long as its owner lives, and the wait until it stands still.
#
# Also across processes that were not started together: an absent count is one that stands still. One thread of who
# lives.


BEAT_EVERY = 2.0  # seconds
STILL = 4 * BEAT_EVERY  # seconds after which a count stands still
LOOK_EVERY = 0.5  # seconds
END_WAIT = 5.0  # seconds for a beat under way


class StoreHeartbeat:
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


def wait_until_stale(store: Store, name: str, clock: Clock) -> None:
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
