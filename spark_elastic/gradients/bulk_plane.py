"""The bulk plane: sums gradients where they are, on GPUs, by a process group of torch (NCCL) for each world.

The engine stays the control plane, and no promise depends on NCCL's reports. A side thread builds a communicator while
the world already trains through host memory; once every rank has it, all switch at the same step. At the end of each
exchange the ranks tell each other over the engine whether their sums are complete: a peer that has died, which NCCL
would wait for in silence, breaks that exchange, and the communicator is aborted. A step whose sums did not complete on
every rank gets no step summary, so that it is never applied (R1, finalized steps; R6, step summary).

The training thread owns everything here, except where a method names another. A side thread builds a communicator,
another one aborts it: a communicator is never destroyed otherwise, since after a peer's abort that may block for ever.
"""

from __future__ import annotations

import math
import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from elastic_collectives import CollectiveError, Group, MismatchError
from spark_elastic.clock import SystemClock
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.reduction import ExchangeOptions
from spark_elastic.worker.context import WorkerContext, get_context

NCCL = "nccl"
BUILD_TIMEOUT = 600.0  # seconds: communicators of many ranks take minutes
ABORT_TIMEOUT = 10.0  # seconds that the training thread waits for the end of an abort
COMPUTE_TIMEOUTS = 10  # collectives' timeouts that the devices may compute before the first sum is complete
REQUIRE_EVERY = 0.02  # seconds between two looks at the ranks whose communicators are awaited
POLL_EVERY = 5e-5  # seconds between two looks at a sum
AGREE_EVERY = 5e-3  # seconds of waiting for a sum after which the ranks tell each other that they are alive
# torch's watchdog of NCCL leaves every decision to this module.
WATCHDOG = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}


class Readiness(IntEnum):
    """How far a rank is with its communicator, or with the sums of a step."""

    PENDING = 0
    READY = 1
    FAILED = 2


class BulkPlane:
    def __init__(
        self, group: Group, device: torch.device, backend: str, get_stores: Callable[[], tuple[Any, ...]]
    ) -> None:
        """backend: of torch.distributed. get_stores: returns the store over which the ranks find each other, first of
        what is to live as long as the plane. Called in the side thread."""
        self.device = device
        self.is_active = False  # all ranks have agreed to use it
        self.is_settled = False  # nothing is left to agree on
        self.seconds: float | None = None  # from its construction until it became active
        self.group = group
        self._backend = backend
        self._get_stores = get_stores
        self._clock = SystemClock()
        self._began = self._clock.now()
        # What the side thread leaves: the process group of torch, or why there is none.
        self.process_group: Any = None
        self._stores: tuple[Any, ...] = ()
        self._problem = ""
        self._built = threading.Event()
        self._builder = threading.Thread(target=self._build, name="spark-elastic-bulk-build", daemon=True)
        self._aborting: threading.Thread | None = None

    def start(self) -> None:
        """Begin to build the communicator. Every rank of the group must call it."""
        self._builder.start()

    def wait_until_ready(self) -> None:
        """Wait until all ranks are ready, or one has failed. Collective over the engine, which notices a rank that is
        lost meanwhile; not called again once `is_settled`. Raises CollectiveError if ranks are not ready in time."""
        deadline = self._clock.now() + BUILD_TIMEOUT
        while True:
            self._built.wait(REQUIRE_EVERY)
            states, expired = self.exchange_readiness(deadline)
            if self.is_settled:
                return
            if expired:
                late = _list_ranks(states, Readiness.PENDING)
                why = f"ranks {list(late)} have built no {self._backend} communicator in {BUILD_TIMEOUT:g} s"
                raise CollectiveError(late, why)

    def exchange_readiness(self, deadline: float = math.inf) -> tuple[list[int], bool]:
        """Tell all ranks how far this one is; switch if all are ready, and give the plane up if one has failed.
        Collective over the engine; not called again once `is_settled`. Returns the progress of all ranks, and whether
        the deadline of any has passed: one that gave up by its own clock would leave the others waiting."""
        own = Readiness.PENDING
        if self._built.is_set():
            own = Readiness.FAILED if self._problem else Readiness.READY
        expired = self._clock.now() > deadline
        told = self.group.allgather(np.array([own, expired], np.uint8)).reshape(-1, 2)
        states: list[int] = told[:, 0].tolist()
        if Readiness.FAILED in states:
            self._settle(False)
        elif all(state == Readiness.READY for state in states):
            self._settle(True)
        return states, bool(told[:, 1].any())

    def abort(self) -> None:
        """Give the communicator up, whatever it is doing. Returns at once; any number of times."""
        if self._aborting is None:
            name = "spark-elastic-bulk-abort"
            self._aborting = threading.Thread(target=self._abort, name=name, daemon=True)
            self._aborting.start()

    def wait_aborted(self) -> None:
        """Wait, not for ever, until an abort has ended: nothing then writes to the tensors any more."""
        if self._aborting is not None:
            self._aborting.join(ABORT_TIMEOUT)

    def _settle(self, active: bool) -> None:
        self.is_settled, self.is_active = True, active
        seconds = self._clock.now() - self._began
        self.seconds = seconds if active else None
        if active and self.group.rank == 0:
            sys.stderr.write(
                f"gradients travel by {self._backend} from now on, {seconds:.1f} s after the communicator was begun\n"
            )
        if not active:
            if self._problem:
                sys.stderr.write(f"gradients travel through host memory in this world: {self._problem}\n")
            self.abort()

    # ---- side threads

    def _build(self) -> None:
        try:
            process_group = self._create()
            if self._aborting is not None:
                raise RuntimeError("the world has ended")
            tensor = torch.ones(1, device=self.device)
            work = process_group.allreduce([tensor])  # communicators are made by their first collective
            _await_work(work, self._clock, BUILD_TIMEOUT)
            if float(tensor.cpu()) != self.group.size:
                raise RuntimeError(f"the sum over {self.group.size} ranks was {float(tensor.cpu()):g}")
        except Exception as error:
            self._problem = " ".join(str(error).split())[-400:] or type(error).__name__
        finally:
            self._built.set()

    def _create(self) -> Any:
        self._stores = self._get_stores()
        store, rank, size = self._stores[0], self.group.rank, self.group.size
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        _check_devices(store, rank, size, self.device)
        if self._backend != NCCL:
            plugin = dist.Backend._plugins[self._backend.upper()]
            self.process_group = plugin.creator_fn(store, rank, size, timedelta(seconds=BUILD_TIMEOUT))
            return self.process_group
        os.environ.update(WATCHDOG | dict(os.environ))
        options: Any = dist.ProcessGroupNCCL.Options()
        if hasattr(options, "config"):  # since torch 2.3
            options.config.blocking = 0  # abort is safe on no others
        nccl: Any = dist.ProcessGroupNCCL
        self.process_group = nccl(store, rank, size, options)
        if hasattr(nccl, "eager_connect_single_device"):
            self.process_group.eager_connect_single_device(self.device)
        return self.process_group

    def _abort(self) -> None:
        process_group = self.process_group
        if process_group is None:
            return  # the builder, if it still runs, fails by its own timeout
        for name in ("abort", "_abort", "_shutdown"):  # torch's names, the newest first
            if hasattr(process_group, name):
                try:
                    getattr(process_group, name)()
                except Exception as error:
                    sys.stderr.write(f"aborting the {self._backend} communicator raised {error!r}\n")
                return


class BulkSums:
    """Collectives of the bulk plane that the ranks confirm together: one of torch.distributed, or those of a step."""

    def __init__(self, plane: BulkPlane, signature: int = 0) -> None:
        """signature: what the collectives are, as a number of 31 bits; ranks that disagree are refused."""
        self._plane = plane
        self._group = plane.group
        self._signature = signature
        self._clock = SystemClock()
        self._works: list[Any] = []
        self._error: Exception | None = None

    def launch(self, start: Callable[[Any], Any]) -> None:
        """Begin a collective, in the same order on all ranks. start: gets the process group, and returns a `Work`."""
        if self._error is None:
            try:
                self._works.append(start(self._plane.process_group))
            except Exception as error:  # the ranks hear of it in `finish`, where all of them are
                self._error = error

    def finish(self) -> None:
        """Wait until every rank has all results. Collective over the engine. Raises CollectiveError if a rank is lost,
        late, or its part failed; the results are void, and the plane is aborted."""
        timeout, began = self._group.timeout, self._clock.now()
        try:
            while True:
                own_state = self._poll(self._clock.now() + AGREE_EVERY)
                waited = int(1000 * (self._clock.now() - began))  # ms
                own = np.array([own_state, self._signature, waited], np.int32)
                told = self._group.allgather(own).reshape(-1, 3)
                states = told[:, 0].tolist()
                if all(state == Readiness.READY for state in states) and len(set(told[:, 1].tolist())) == 1:
                    self._works = []
                    return
                shared = self._find_shared_failure(told)
                if shared is not None:
                    break
                # While no rank is complete, the devices may still compute what is to be summed. All ranks decide by
                # the one that waited longest: a rank that left by its own clock would look like one that is lost.
                limit = timeout if Readiness.READY in states else COMPUTE_TIMEOUTS * timeout
                if told[:, 2].max() > 1000 * limit:
                    late = _list_ranks(states, Readiness.PENDING)
                    why = f"the bulk sums of ranks {list(late)} were not complete after {limit:g} s"
                    raise CollectiveError(late, why)
        except CollectiveError as error:
            self.abandon(str(error))
            raise
        # All ranks see it, so that none has to hear of it by an abort, whose error would be another one.
        self._plane.abort()
        self._plane.wait_aborted()
        self._works = []
        raise shared

    def _find_shared_failure(self, told: npt.NDArray[np.int32]) -> CollectiveError | None:
        """What is wrong by what all ranks have told each other: (state, signature, ms waited) of each."""
        other = np.flatnonzero(told[:, 1] != told[0, 1]).tolist()
        if other:
            why = f"ranks [0, {other[0]}] called collectives of different kinds, shapes or dtypes"
            return MismatchError((0, other[0]), why)
        failed = _list_ranks(told[:, 0].tolist(), Readiness.FAILED)
        if failed:
            why = f": {self._error}" if self._error is not None else ""
            return CollectiveError(failed, f"the bulk sums of ranks {list(failed)} failed{why}")
        return None

    def abandon(self, reason: str) -> None:
        """Give up collectives that may not be complete, and the group with them."""
        if self._works or self._error is not None:
            self._plane.abort()
            self._group.abort(reason)
            self._plane.wait_aborted()
            self._works = []

    def _poll(self, until: float) -> Readiness:
        """Wait for this rank's results at most until then."""
        if self._error is not None:
            return Readiness.FAILED
        try:
            while not all(work.is_completed() for work in self._works):
                if self._clock.now() > until:
                    return Readiness.PENDING
                self._clock.sleep(POLL_EVERY)
            for work in self._works:
                work.wait()  # raises its error; the device's later work follows the sum
        except Exception as error:
            self._error = error
            return Readiness.FAILED
        return Readiness.READY


def _list_ranks(states: Sequence[int], state: Readiness) -> tuple[int, ...]:
    return tuple(rank for rank, its_state in enumerate(states) if its_state == state)


def _await_work(work: Any, clock: SystemClock, seconds: float) -> None:
    deadline = clock.now() + seconds
    while not work.is_completed():
        if clock.now() > deadline:
            raise RuntimeError(f"the first sum did not complete within {seconds:g} s")
        clock.sleep(0.001)
    work.wait()


def _check_devices(store: Any, rank: int, size: int, device: torch.device) -> None:
    """Refuse two ranks on one GPU, for which NCCL builds no communicator."""
    if device.type != "cuda":
        return
    # Before torch 2.4 NCCL itself finds out.
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", f"of rank {rank}")
    identity = f"{socket.gethostname()} {uuid}"
    store.set(f"device {rank}", identity)
    devices = [store.get(f"device {peer}").decode() for peer in range(size)]
    shared = [peer for peer, its_device in enumerate(devices) if devices.count(its_device) > 1]
    if shared:
        raise InvalidInput(f"ranks {shared} share a GPU, for which NCCL builds no communicator")


class _Planes(list[BulkPlane]):
    def close(self) -> None:
        """Give all planes up, since the world has ended. Does not wait for their communicators."""
        for plane in self:
            plane.abort()


def get_or_start_bulk_plane(group: Group, device: torch.device, options: ExchangeOptions) -> BulkPlane | None:
    """Return the plane that sums the gradients of a device in this group; None: they travel through host memory. The
    first call starts to build its communicator. Every rank of the group must call it at the same place among its
    collectives."""
    backend = options.bulk_backend
    if backend == "auto":
        has_nccl = device.type == "cuda" and dist.is_available() and dist.is_nccl_available()
        backend = NCCL if has_nccl else "host"
    worker = get_context()
    if backend == "host" or group.size == 1 or options.shares or options.compressor is not None:
        return None
    if worker is None or worker.driver is None:
        return None
    planes = worker.group_context.get_or_create_closeable(_Planes)
    for plane in planes:
        if plane.group is group and plane.device == device:
            return plane
    number = sum(plane.group.members == group.members for plane in planes)  # the same on all of these ranks
    plane = BulkPlane(group, device, backend, lambda: _get_stores(worker, group, number))
    planes.append(plane)
    plane.start()
    return plane


def _get_stores(worker: WorkerContext, group: Group, number: int) -> tuple[Any, ...]:
    """The store of a plane, and what it consists of: C++ does not keep a store alive that is written in Python."""
    from spark_elastic.gradients.store import DriverStore

    assert worker.driver is not None
    store = DriverStore(worker, worker.driver, timedelta(seconds=BUILD_TIMEOUT))
    prefix = f"bulk {number} of ranks {' '.join(map(str, group.members))}"
    prefixed: Any = dist.PrefixStore  # type: ignore[attr-defined]
    return prefixed(prefix, store), store
