"""A function of the user as a program: called once in the worker's main thread, and elastic where it says so.

A function that hands its loop to `elastic.run` keeps control over all worlds. One that does not is called again from
its beginning, on fresh copies of its arguments, in each world that follows a loss; a planned change waits for its end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import cloudpickle

from elastic_collectives import Group, MismatchError
from spark_elastic.clock import SystemClock
from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidInput
from spark_elastic.protocol.types import Position, World
from spark_elastic.state.checkpoint import CheckpointPolicy
from spark_elastic.state.durable_commits import DURABLE, DurableCommits
from spark_elastic.state.elastic_loop import ENTERED
from spark_elastic.worker import program
from spark_elastic.worker.context import get_context, start_call
from spark_elastic.worker.entry import exit_forks
from spark_elastic.worker.program import Completed, Outcome, WorkerHandle
from spark_elastic.worker.script import destroy_process_group, set_dist_env


class FunctionProgram:
    """`fn(*args, **kwargs)` on every worker.

    environment: variables of the training process, set before anything slow is imported. dumps: pickles the call.
    durable: where commits are made durable, and when; None: nowhere.
    """

    def __init__(
        self,
        fn: Callable[..., object],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        environment: Mapping[str, str] | None = None,
        dumps: Callable[[object], bytes] = cloudpickle.dumps,
        durable: tuple[Store, CheckpointPolicy] | None = None,
    ) -> None:
        self._durable = durable
        self._commits: DurableCommits | None = None
        self._ran = False
        self._call = dumps((fn, tuple(args), dict(kwargs or {})))
        self.environment = dict(environment or {})

    @property
    def pickled_call(self) -> bytes:
        """The function with its arguments."""
        return self._call

    def prepare(self) -> None:
        """Everything that the function's loading imports."""
        cloudpickle.loads(self._call)

    def position(self) -> Position | None:
        """Told through the handle, if the function is elastic."""
        return None

    def sync(self, world: World, group: Group) -> Position | None:
        """The function hands its state on itself."""
        return None

    def run(self, world: World, group: Group, handle: WorkerHandle) -> Outcome:
        worker = get_context()
        assert worker is not None
        handle.persistent.pop(ENTERED, None)
        if self._ran:  # before the first call, what its modules asked for when they were imported
            start_call()
            destroy_process_group()
        self._ran = True
        if self._durable is not None and self._commits is None:
            store, policy = self._durable
            self._commits = DurableCommits(store, policy, SystemClock(), handle.report_checkpoint)
            handle.persistent[DURABLE] = self._commits
        try:
            set_dist_env(world, group, worker.address, worker.ports)
            fn, args, kwargs = cloudpickle.loads(self._call)
            with exit_forks():
                value = fn(*args, **kwargs)
            last = (get_context() or worker).group or group  # an elastic function has gone on to later worlds
            return Completed(program.encode_result(value, last.rank))
        except MismatchError as error:
            # Not a loss that another world could mend.
            raise InvalidInput(
                f"the workers did not call the same collectives in the same order: {error}"
            ) from error

    def close(self) -> None:
        if self._commits is not None:
            self._commits.close()
