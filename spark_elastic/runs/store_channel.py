"""Messages through a store, for processes that cannot dial each other but reach the same store.

A `StoreChannel` exchanges messages between two sides: objects of the store, each a JSON list of the messages that were
sent since the last one, signed with the job's key. The side that reads them deletes all but the newest, by which
`wait_until_silent` sees that the other side lives. Each side has a thread of its own, from `start` to `close`."""

from __future__ import annotations

import base64
import hmac
import json
import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from spark_elastic.clock import Clock
from spark_elastic.data.store import Store
from spark_elastic.errors import StoreError
from spark_elastic.rendezvous import codec

log = logging.getLogger("spark_elastic.state")

POLL_EVERY = 0.5  # seconds between two looks into the store
SEND_EVERY = 2.0  # seconds after which a side without messages sends an empty list, as a sign of life
SILENT_AFTER = 4 * SEND_EVERY  # seconds after which a side that has sent nothing counts as gone


@dataclass(frozen=True)
class ChannelEnd:
    """One side's end of a channel."""

    store: Store  # that both sides reach
    folder: str  # of this channel alone, in the store
    key: bytes = field(repr=False)  # the job's, with which messages are signed
    own: str  # name of this side
    other: str  # name of the other side

    def object_name(self, to: str, number: int) -> str:
        return f"{self.folder}/{to}-{number:08d}"

    def sign(self, name: str, messages: list[dict[str, Any]]) -> bytes:
        """The content of the object of that name: a signature and, on the next line, the messages."""
        body = json.dumps(messages).encode()
        return self._signature(name, body) + b"\n" + body

    def verify(self, name: str, content: bytes) -> list[dict[str, Any]]:
        """The messages in the object of that name; StoreError: the other side did not write it so, or not yet all."""
        signature, _, body = content.partition(b"\n")
        if not hmac.compare_digest(signature, self._signature(name, body)):
            raise StoreError(f"The message {name} is not whole, or not signed with the job's key.")
        messages: list[dict[str, Any]] = json.loads(body)
        return messages

    def _signature(self, name: str, body: bytes) -> bytes:
        return base64.b64encode(hmac.digest(self.key, b"message\0" + name.encode() + b"\0" + body, "sha256"))


class StoreChannel:
    """One side of a channel. Messages are dataclasses; any thread may send them."""

    def __init__(
        self, end: ChannelEnd, receives: Iterable[type], on_message: Callable[[Any], None], clock: Clock
    ) -> None:
        """receives: types of messages. on_message: called with each in the channel's thread, which logs what it
        raises."""
        self._end, self._on_message, self._clock = end, on_message, clock
        self._types = {cls.__name__: cls for cls in receives}
        self._lock = threading.Lock()  # owns _outbox
        self._outbox: list[object] = []
        self._unconfirmed: bytes | None = None  # an object whose write failed; it may be there all the same
        self._sent = self._read = 0  # numbers of the next objects
        self._last_sent = clock.now()
        self.last_seen = clock.now()  # when the other side last sent something
        self._closing = threading.Event()
        self._give_up_at = 0.0  # the deadline of `close`
        self._thread = threading.Thread(target=self._run, name="spark-elastic-channel", daemon=True)

    def start(self) -> None:
        self.last_seen = self._clock.now()
        self._thread.start()

    def send(self, message: object) -> None:
        with self._lock:
            self._outbox.append(message)

    def close(self, timeout: float) -> None:
        """Send what waits and read what is there, even if the channel was never started. While the store fails, try
        again until `timeout` seconds have passed: the last message may be the job's result."""
        self._give_up_at = self._clock.now() + timeout
        self._closing.set()
        if self._thread.ident is None:
            self._thread.start()
        self._thread.join(timeout)

    def poll(self) -> None:
        """Send what waits and read what is there, once. After a StoreError (an object may not be whole) nothing is
        lost."""
        self._send_outbox()
        while self._end.store.exists(name := self._end.object_name(self._end.own, self._read)):
            # An object that does not verify stays: it may be incomplete, or lie where one is still to come.
            messages = self._end.verify(name, self._end.store.read_bytes(name))
            self._read += 1
            self.last_seen = self._clock.now()
            for message in messages:
                try:
                    self._on_message(codec.read(self._types[message.pop("type")], message))
                except Exception:
                    log.exception("a message could not be handled")
            if self._read > 1:
                self._end.store.delete(self._end.object_name(self._end.own, self._read - 2))

    def _send_outbox(self) -> None:
        if self._unconfirmed is not None:
            # The other side may have read it: send the same content again, and newer messages in the next object.
            self._write(self._unconfirmed)
        with self._lock:
            messages, self._outbox = self._outbox, []
        if messages or self._clock.now() - self._last_sent >= SEND_EVERY:
            plain = [{"type": type(each).__name__, **codec.to_plain(each)} for each in messages]
            self._write(self._end.sign(self._end.object_name(self._end.other, self._sent), plain))

    def _write(self, content: bytes) -> None:
        self._unconfirmed = content
        self._end.store.write_bytes(self._end.object_name(self._end.other, self._sent), content)
        self._unconfirmed = None
        self._sent += 1
        self._last_sent = self._clock.now()

    def _run(self) -> None:
        while True:
            closing = self._closing.wait(POLL_EVERY)
            try:
                self.poll()
                if closing:
                    return
            except StoreError as error:  # the next poll may succeed
                log.warning("messages wait: %s", error)
                if closing and self._clock.now() + POLL_EVERY > self._give_up_at:
                    return
                if closing:
                    self._clock.sleep(POLL_EVERY)


def wait_until_silent(end: ChannelEnd, clock: Clock) -> None:
    """Return once the side that has this end, too, has sent nothing for `SILENT_AFTER` seconds. While the store fails,
    nothing follows about that side, and the wait begins anew."""
    seen, since = "", clock.now()
    while clock.now() - since < SILENT_AFTER:
        clock.sleep(POLL_EVERY)
        try:
            sent = [name for name in end.store.list(end.folder) if f"/{end.other}-" in name]
        except StoreError as error:
            log.debug("the channel cannot be read: %s", error)
            since = clock.now()
        else:
            newest = max(sent, default="")
            seen, since = newest, since if newest == seen else clock.now()
