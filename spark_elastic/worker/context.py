"""The current worker of this process: the one piece of module state of the project.

Set by the worker's loop, read by the façades alone (`spark_elastic.torch` and its siblings). Written by the main
thread; readers in other threads see the last complete value.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

from elastic_collectives import Group
from spark_elastic.protocol.types import Position, WorkerId, World
from spark_elastic.worker.program import Session

# The one thread of a process that calls its group's collectives while the main thread computes.
#
# Work runs in the order of submission, which the submitters must make the same on all ranks. It is handed over from any
# thread; the thread itself begins with the first work. Knows neither groups nor tensors.


R = TypeVar("R")


class EngineThread:
    """`submit` and go on, or `run` in the calling thread once nothing is under way."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # owns _thread, _last and the order of _work
        self._thread: threading.Thread | None = None
        self._last: Future[Any] | None = None

    def submit(self, work: Callable[[], R]) -> Future[R]:
        """Run `work` after everything submitted before; the future has what it returns or raises."""
        done: Future[R] = Future()
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="spark-elastic-engine", daemon=True)
                self._thread.start()
            self._last = done
            self._work.put(lambda: _settle(done, work))
        return done

    def run(self, work: Callable[[], R]) -> R:
        """Run `work` in this thread, after everything submitted. For the main thread: nobody else submits meanwhile."""
        self.drain()
        return work()

    def drain(self) -> None:
        """Wait until everything submitted is through, whether it failed or not. The group's timeout bounds the wait."""
        with self._lock:
            last = self._last
        if last is not None:
            last.exception()

    def close(self) -> None:
        """End the thread after everything submitted; a later submit begins another one."""
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._work.put(None)
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()


def _settle(done: Future[R], work: Callable[[], R]) -> None:
    try:
        done.set_result(work())
    except BaseException as error:  # raised again by the future
        done.set_exception(error)


T = TypeVar("T")


class Floor:
    """What the façades of a process share about one group. Main thread only, but for `engine` and `shared`.

    engine: the one thread that calls the group's collectives beside the main thread. Whoever hands it work puts it in
    the same order on all ranks; the main thread calls collectives once it is `clear`, or through `engine.run`.
    """

    def __init__(self) -> None:
        self.engine = EngineThread()
        self._lock = threading.Lock()
        self._shared: dict[str, Any] = {}
        self._agreed: int | None = None

    def shared(self, key: str, make: Callable[[], T]) -> T:
        """What `make` made for this group under `key`; made now, if it was not yet. Any thread."""
        with self._lock:
            if key not in self._shared:
                self._shared[key] = make()
            found: T = self._shared[key]
            return found

    def agree(self, version: int) -> None:
        """An exchange brought every rank the same newest version of the membership (R6)."""
        self._agreed = max(version, self._agreed or 0)

    def take_agreed(self) -> int | None:
        """The version last agreed on; None if no exchange took place since the last call. The same on every rank."""
        agreed, self._agreed = self._agreed, None
        return agreed

    def clear(self) -> None:
        """Wait until the engine's thread is idle. Called before a collective of the main thread."""
        self.engine.drain()


@dataclass(frozen=True)
class Current:
    """The worker that this process is. `group` is None between worlds; `position` is the step being taken.

    resources: addresses of what Spark gave to the slot, by name ("gpu"). address: of this worker for its peers.
    ports: first and last of those that it may listen on; None: any.
    waiting: entered around a wait for other workers that is no collective of `group`; any thread.
    watched: a group beside `group` whose collectives all count as such waits; not for one that idles in them.
    """

    worker: WorkerId
    world: World | None = None
    group: Group | None = None
    position: Position | None = None
    session: Session | None = None
    floor: Floor = field(default_factory=Floor)
    address: str = "127.0.0.1"
    ports: tuple[int, int] | None = None
    resources: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    waiting: Callable[[], AbstractContextManager[object]] = nullcontext
    watched: Callable[[Group], Group] = lambda group: group


class _Holder:
    value: Current | None = None
    own = Floor()
    call = Floor()
    handlers: list[tuple[type, Any]] | None = None
    initialized = False


def current() -> Current | None:
    """The worker that this process is; None if it is not a worker."""
    return _Holder.value


def floor_of_process() -> Floor:
    """What the façades share for the life of the process, also in one that is not a worker."""
    return _Holder.own


def floor_of_call() -> Floor:
    """What the façades share during one call of the user's function, through all its worlds."""
    return _Holder.call


def begin_call() -> None:
    """The user's function begins again, and asks for everything again."""
    _Holder.call = Floor()


def set_current(value: Current | None) -> None:
    """Set the current worker. Only for the worker's loop."""
    _Holder.value = value


def registered_handlers() -> list[tuple[type, Any]] | None:
    """What the user set as handlers of states, (type, handler class) pairs; None: nothing."""
    return _Holder.handlers


def register_handlers(handlers: list[tuple[type, Any]] | None) -> None:
    """For the façades' `set_handler_registry`."""
    _Holder.handlers = handlers


def initialized() -> bool:
    """Whether a façade's `init` was called in this process."""
    return _Holder.initialized


def set_initialized(value: bool) -> None:
    """For the façades' `init` and `shutdown`."""
    _Holder.initialized = value
