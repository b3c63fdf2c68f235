"""What this process knows of itself: its worker, and objects that live as long as a group, a call or the process.

The worker's loop sets the current worker; Horovod's interfaces (`spark_elastic.torch` and its siblings) read it. The
main thread writes; readers in other threads see the last complete value.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from elastic_collectives import CollectiveError, Group
from elastic_collectives.errors import refuse_forks
from spark_elastic.protocol.types import MembershipVersion, Position, WorkerId, WorldView
from spark_elastic.rendezvous.messages import DriverClient
from spark_elastic.runs.kept_commits import CommitKeeper
from spark_elastic.worker.program import WorkerHandle


class Closeable(Protocol):
    def close(self) -> None: ...


T = TypeVar("T")
C = TypeVar("C", bound=Closeable)


class CollectiveThread:
    """The thread that calls a group's collectives while the main thread computes, in the order of submission, which is
    the same on all ranks. Any thread may submit. It starts with the first submission: see `drain_and_call`."""

    def __init__(self) -> None:
        self._work: deque[Callable[[], None]] = deque()
        # One entry for each piece of work, which a helper may have taken; None: the thread ends.
        self._wakes: queue.SimpleQueue[bool | None] = queue.SimpleQueue()
        self._run_lock = threading.Lock()  # held by the thread that takes a piece of work and runs it
        self._lock = threading.Lock()  # owns _thread, _last and the order of _work
        self._thread: threading.Thread | None = None
        self._last: Future[Any] | None = None
        self._runner = 0  # identifies the thread that runs a piece of work; 0: none does
        self._pid = os.getpid()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` after everything submitted before. What a callback of a future submits, in the thread that
        completed it, runs at once: the callback may wait for it, as some of DDP's communication hooks do."""
        future: Future[T] = Future()
        refuse_forks(self._pid)
        if self._runner == threading.get_ident():
            _complete(future, work)
            return future
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="spark-elastic-collectives", daemon=True)
                thread.start()  # may fail; then the next submission tries again
                self._thread = thread
            self._last = future
            self._work.append(lambda: _complete(future, work))
            self._wakes.put(True)
        return future

    def run_pending_until_done(self, future: Future[Any]) -> None:
        """For who waits anyway: run submitted work here until it is done, which saves two changes of threads."""
        while not future.done() and self._run_next(wait=False):
            pass

    def drain_and_call(self, work: Callable[[], T]) -> T:
        """Call `work` in the calling thread after everything submitted. No other thread may submit meanwhile."""
        if self._runner != threading.get_ident():
            self.drain()
        return work()

    def drain(self) -> None:
        """Wait until all submitted work has ended, successfully or not. The group's timeout bounds the wait."""
        refuse_forks(self._pid)
        with self._lock:
            last = self._last
        if last is not None:
            last.exception()

    def close(self) -> None:
        """End the thread after all submitted work; a later submission starts another one."""
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._wakes.put(None)
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while self._wakes.get() is not None:
            if self._work:
                self._run_next(wait=True)

    def _run_next(self, *, wait: bool) -> bool:
        """Returns False if there is no work, or if another thread runs a piece. wait: until no other thread does."""
        if self._runner == threading.get_ident():  # a callback of a future waits for later work
            if not self._work:
                return False
            self._work.popleft()()
            return True
        if not self._run_lock.acquire(blocking=wait):
            return False
        try:
            if not self._work:
                return False
            self._runner = threading.get_ident()
            self._work.popleft()()
            return True
        finally:
            self._runner = 0
            self._run_lock.release()


def _complete(future: Future[T], work: Callable[[], T]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:  # raised again by the future
        future.set_exception(error)


class Scope:
    """Objects of one lifetime, at most one of each type. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._objects: dict[type, Any] = {}

    def get_or_create(self, cls: type[T], factory: Callable[[], T] | None = None) -> T:
        """The scope's object of that type; the first call creates it. factory: by default `cls` without arguments."""
        with self._lock:
            if cls not in self._objects:
                self._objects[cls] = (factory or cls)()
            scoped: T = self._objects[cls]
            return scoped


class GroupContext(Scope):
    """What the users of one group share. Main thread only, except for `collective_thread` and `get_or_create`."""

    def __init__(self) -> None:
        super().__init__()
        # Calls the group's collectives beside the main thread, in the same order on all ranks. The main thread calls
        # collectives after `collective_thread.drain`, or through `drain_and_call`.
        self.collective_thread = CollectiveThread()
        self.position: Position | None = None  # the step that is being taken
        self._agreed_version: MembershipVersion | None = None
        self._exchanged_gradients = False
        self._closeables: list[Closeable] = []

    def record_agreed_version(self, version: MembershipVersion) -> None:
        """An exchange brought every rank the same newest membership version: R6 (step summary)."""
        self._agreed_version = max(version, self._agreed_version or version)
        self._exchanged_gradients = True

    @property
    def is_used(self) -> bool:
        """Whether the program has exchanged anything over the group: gradients, or by what the group's users share."""
        return self._exchanged_gradients or bool(self._objects)

    def get_or_create_closeable(self, cls: type[C]) -> C:
        """`get_or_create` of an object that is closed once the group is. Any thread."""

        def create() -> C:
            created = cls()
            self._closeables.append(created)
            return created

        return self.get_or_create(cls, create)

    def close(self) -> None:
        """End the group's threads. Call it after the group was closed, which frees them from their collectives."""
        self.collective_thread.close()
        for closeable in self._closeables:
            closeable.close()

    def take_agreed_version(self) -> MembershipVersion | None:
        """The version last agreed on, the same on every rank; None if no exchange followed the last call."""
        version, self._agreed_version = self._agreed_version, None
        return version


class WaitRecorder:
    """Records that this process waits for others, and is not stalled. This one records nothing; see `StackSampler`."""

    def record_wait(self) -> AbstractContextManager[object]:
        """A context around a wait for other workers that is no collective of a watched group. Any thread."""
        return nullcontext()

    def set_bitwise(self) -> None:
        """The steps have the same bits, whichever workers compute them: R24 (suspicion)."""

    def watch_group(self, group: Group) -> Group:
        """The same group, with all its collectives recorded as waits. Not for a group that idles in collectives."""
        return group


@dataclass(frozen=True)
class WorkerContext:
    """The worker that this process is, at one point in time."""

    worker: WorkerId  # its id; the same as long as the process lives
    world: WorldView | None = None  # None before the first world
    group: Group | None = None  # None between two worlds
    handle: WorkerHandle | None = None  # the way to the worker's loop
    group_context: GroupContext = field(default_factory=GroupContext)  # a new one for each group
    driver: DriverClient | None = None  # None: a process without one
    address: str = "127.0.0.1"  # where the worker's peers find it
    ports: tuple[int, int] | None = None  # first and last port that the worker may listen on; None: any
    resources: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by name ("gpu")
    wait_recorder: WaitRecorder = field(default_factory=WaitRecorder)  # told of waits for others

    def require_group(self) -> Group:
        """The current world's group; raises `CollectiveError` between two worlds."""
        if self.group is None:
            raise CollectiveError((), "this worker is between two worlds")
        return self.group


class ProcessContext(Scope):
    """What lives as long as the process, in a process without a worker as well."""

    def __init__(self) -> None:
        super().__init__()
        self.device = "cpu"  # what this process trains on: "cpu", "cuda", or another device type of torch
        self.files = ""  # folder of the files that Spark's user added; "": Spark did not start the slot
        self.slot = os.getppid()  # process id of the slot, which may not be the parent
        self.commit_keeper: CommitKeeper | None = None  # None: the job has no run, or keeps none
        self.worker: WorkerContext | None = None  # None: this process is no worker
        self.call = Scope()  # what one call of the user's function shares, through all its worlds
        self.state_handlers: list[tuple[type, Any]] | None = None  # None: the defaults
        self.is_initialized = False  # whether `init` of one of Horovod's interfaces was called


_process = ProcessContext()  # module state, since Horovod's functions have no argument for it


def get_process_context() -> ProcessContext:
    return _process


def get_call_context() -> Scope:
    return _process.call


def start_call() -> None:
    """Drop what the call before shared: the user's function is called again, and creates all of it anew."""
    _process.call = Scope()


def get_context() -> WorkerContext | None:
    return _process.worker


def set_context(worker: WorkerContext | None) -> None:
    """Only for the worker's loop."""
    _process.worker = worker


def get_group_context() -> Scope:
    """What the users of the current group share; in a process that is no worker, what lives as long as the process."""
    return _process if _process.worker is None else _process.worker.group_context
