"""What a state uses of the worker that it lives in: `WorkerSession`. Training thread only."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, TypeVar

import numpy as np

from elastic_collectives import CollectiveError, Group
from spark_elastic.errors import DriverUnreachable
from spark_elastic.protocol.types import (
    INITIAL_VERSION,
    HostUpdateResult,
    MembershipVersion,
    Phase,
    Position,
    WorldView,
)
from spark_elastic.runs.checkpoint import CHECKPOINTER, SNAPSHOT_READER, Checkpointer, SnapshotReader
from spark_elastic.worker.context import WorkerContext, get_context
from spark_elastic.worker.program import WorkerHandle
from spark_elastic.worker.script import DIST_ENV, DistEnv, exchange_dist_env
from spark_elastic.worker.session import mark_loop_begun, update_metrics

R = TypeVar("R")

MARKED = "marked"  # key of the process's values: this worker has told the driver that it enters its loop


class WorkerSession:
    def __init__(self, handle: WorkerHandle) -> None:
        self._handle = handle
        self.process_values: dict[str, Any] = handle.process_values  # outlive one call of the user's function
        # Writes checkpoints, and reads those of the run; None in a job without them.
        self.checkpointer: Checkpointer | None = handle.process_values.get(CHECKPOINTER)
        self.snapshot_reader: SnapshotReader | None = handle.process_values.get(SNAPSHOT_READER)
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
        """Wait until no other thread calls the group's collectives."""
        _require_context().group_context.wait_until_idle()

    def report_commit(self, commits: int) -> None:
        """Report that this worker now holds the state of `commits` commits."""
        self._handle.report_position(make_commit_position(commits))
        metrics: dict[str, Any] = {"step": commits, "world": self.world.size}
        if self.checkpointer is not None:
            metrics["checkpoint_seconds"] = self.checkpointer.stall_seconds
        update_metrics(self._handle, metrics)

    def agree_to_stop(self) -> bool:
        """Whether all ranks stop here for a planned change; the same answer on each (R6, step summary). It follows from
        the membership version of the last exchange of gradients; if there was none, a small exchange takes place."""
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
        """What the planned change does that all ranks know of since `agree_to_stop`."""
        return self._agreed_version.update

    def is_job_ending(self) -> bool:
        return self._agreed_version.job_ends

    def enter_loop(self) -> None:
        """Be in one world with the others that are in their loops. R21 (outside of the loop): the driver knows of it
        before this worker exchanges anything inside."""
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
        """Leave this world, because of `error` or at an agreed boundary, and return once the next one stands. Raises
        CollectiveError if that one broke at once."""
        self._exchange_env(*self._handle.next_world(error)).apply()

    def _exchange_env(self, world: WorldView, group: Group) -> DistEnv:
        worker = _require_context()
        return exchange_dist_env(world, group, worker.address, worker.ports, in_loop=True)


def get_session() -> WorkerSession | None:
    """The session of this process; None in a process that is not a worker."""
    worker = get_context()
    return None if worker is None or worker.handle is None else WorkerSession(worker.handle)


def make_commit_position(commits: int) -> Position:
    """The position of a hand-written training after so many commits: in epoch 0."""
    return Position(0, Phase.TRAIN, commits)


def _require_context() -> WorkerContext:
    worker = get_context()
    assert worker is not None
    return worker
