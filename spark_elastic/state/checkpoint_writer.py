"""Writes checkpoints beside the training: one thread, one in flight, and a newer one replaces one that waits.

`offer` is called by the training thread and returns at once; the thread is `offer`'s to start. A store that fails
costs a warning and that checkpoint, never the training.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

from spark_elastic.errors import ElasticError
from spark_elastic.protocol.types import Checkpoint, Fence, Position
from spark_elastic.state.checkpoint import Checkpoints

log = logging.getLogger("spark_elastic.state")

END_WAIT = 60.0  # seconds that closing waits for the one in flight
LAST_WAIT = 3600.0  # seconds that the end of a training waits for its last checkpoint
TELL_EVERY = 60.0  # seconds


class CheckpointWriter:
    """tell: hands a written checkpoint to the driver, which decides whether it counts."""

    def __init__(self, checkpoints: Checkpoints, tell: Callable[[Checkpoint], object]) -> None:
        self._checkpoints = checkpoints
        self._tell = tell
        self._changed = threading.Condition()
        self._waiting: tuple[Fence, Position, Callable[[], Mapping[str, bytes]]] | None = None
        self._writing = False
        self._closing = False
        self._thread: threading.Thread | None = None

    def offer(self, fence: Fence, position: Position, parts: Callable[[], Mapping[str, bytes]]) -> None:
        """Write what `parts` gives, which is called in the writer's thread."""
        with self._changed:
            self._waiting = (fence, position, parts)
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="spark-elastic-checkpoints", daemon=True)
            self._thread.start()

    def flush(self) -> None:
        """Wait until all that was offered is written and told, or could not be; a store that is slow is waited for."""
        for minute in range(1, int(LAST_WAIT / TELL_EVERY) + 1):
            with self._changed:
                if self._changed.wait_for(lambda: self._waiting is None and not self._writing, TELL_EVERY):
                    return
            log.warning("the last checkpoint is still being written, after %g s.", minute * TELL_EVERY)
        log.error(
            "the last checkpoint is given up: the store does not answer. The newest one before it stays."
        )

    def close(self) -> None:
        """Write what waits, and end."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(END_WAIT)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._waiting is not None)
                job, self._waiting = self._waiting, None
                self._writing = job is not None
            if job is None:
                return
            fence, position, parts = job
            try:
                self._tell(self._checkpoints.write(fence, position, parts()))
            except ElasticError as error:
                log.warning("checkpoint at %s not written: %s", position, error)
            except Exception:  # of whatever made the bytes; the next checkpoint may fare better
                log.exception("checkpoint at %s not written", position)
            with self._changed:
                self._writing = False
                self._changed.notify_all()
