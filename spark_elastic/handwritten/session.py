"""The run loop's session in a worker. Training thread only."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np

from elastic_collectives import CollectiveError, Group
from spark_elastic.errors import DriverUnreachable
from spark_elastic.handwritten.elastic_loop import elastic
from spark_elastic.handwritten.object_state import make_commit_position
from spark_elastic.protocol.types import (
    INITIAL_VERSION,
    HostUpdateResult,
    MembershipVersion,
    WorldView,
)
from spark_elastic.runs.checkpoint import CHECKPOINTER, SNAPSHOT_READER, Checkpointer, SnapshotReader
from spark_elastic.worker.context import WorkerContext, get_context
from spark_elastic.worker.program import WorkerHandle
from spark_elastic.worker.script import DIST_ENV, DistEnv, exchange_dist_env
from spark_elastic.worker.session import mark_loop_begun, update_metrics

R = TypeVar("R")

MARKED = "marked"  # key of the process's values: this worker has told the driver that it enters its loop


def run(func: Callable[..., R]) -> Callable[..., R]:
    """Decorator: call `func(state, ...)` again in each world, from where its state stands, until it returns.

    A collective that breaks inside a tf.function, `model.fit` included, ends the world as any other does.
    """
    return elastic(func, get_session)


class ContextSession:
    """`WorkerSession` over the current worker. A count of commits is reported as a position in epoch 0."""

    def __init__(self, handle: WorkerHandle) -> None:
        self._handle = handle
        self._agreed_version = INITIAL_VERSION  # newest membership version that all ranks know

    @property
    def world(self) -> WorldView:
        world = _require_context().world
        assert world is not None
        return world

    @property
    def group(self) -> Group:
        return _require_context().require_group()

    @property
    def address(self) -> str:
        return _require_context().address

    def wait_until_idle(self) -> None:
        _require_context().group_context.wait_until_idle()

    @property
    def process_values(self) -> dict[str, Any]:
        return self._handle.process_values

    def report_commit(self, commits: int) -> None:
        self._handle.report_position(make_commit_position(commits))
        metrics: dict[str, Any] = {"step": commits, "world": self.world.size}
        if self.checkpointer is not None:
            metrics["checkpoint_seconds"] = self.checkpointer.stall_seconds
        update_metrics(self._handle, metrics)

    def agree_to_stop(self) -> bool:
        """Whether all ranks stop here. The answer follows from the membership version that came with the last exchange
        of gradients; if there was none, a small exchange takes place."""
        worker = _require_context()
        version = worker.group_context.take_agreed_version()
        if version is None:
            newest = np.array([self._handle.membership_version().encode()], np.int64)
            self.wait_until_idle()
            worker.require_group().allreduce(newest, op="max")
            version = MembershipVersion.decode(int(newest[0]))
        self._agreed_version = version
        return version > self.world.version

    @property
    def host_update(self) -> HostUpdateResult:
        return self._agreed_version.update

    @property
    def checkpointer(self) -> Checkpointer | None:
        checkpointer: Checkpointer | None = self._handle.process_values.get(CHECKPOINTER)
        return checkpointer

    @property
    def snapshot_reader(self) -> SnapshotReader | None:
        reader: SnapshotReader | None = self._handle.process_values.get(SNAPSHOT_READER)
        return reader

    def is_job_ending(self) -> bool:
        return self._agreed_version.job_ends

    def enter_loop(self) -> None:
        """R21 (outside of the loop): the driver knows of it before this worker exchanges anything inside."""
        worker = _require_context()
        if worker.driver is not None and MARKED not in self.process_values:
            self.process_values[MARKED] = True
            with suppress(DriverUnreachable):  # `DriverWatch` ends the worker in time
                mark_loop_begun(worker.driver)
        joined = self._handle.join_others()
        if joined is not None:
            env = self.process_values.pop(DIST_ENV, None)
            (env or self._exchange_env(*joined)).apply()

    def next_world(self, error: CollectiveError | None) -> None:
        self._exchange_env(*self._handle.next_world(error)).apply()

    def _exchange_env(self, world: WorldView, group: Group) -> DistEnv:
        worker = _require_context()
        return exchange_dist_env(world, group, worker.address, worker.ports, in_loop=True)


def get_session() -> ContextSession | None:
    """The session of this process; None in a process that is not a worker."""
    worker = get_context()
    return None if worker is None or worker.handle is None else ContextSession(worker.handle)


def _require_context() -> WorkerContext:
    worker = get_context()
    assert worker is not None
    return worker
