"""A user's function as a program, called in the worker's main thread.

A function that uses `elastic.run` is called once and continues from world to world. Any other function is called again
from its beginning in each world after a loss, in a new process: libraries keep much in one that they set up once. A
planned change waits for its end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import cloudpickle

from elastic_collectives import Group, MismatchError
from spark_elastic.clock import SystemClock
from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidInput
from spark_elastic.protocol.types import Position, WorldView
from spark_elastic.runs.checkpoint import (
    CHECKPOINTER,
    SNAPSHOT_READER,
    Checkpointer,
    CheckpointPolicy,
    SnapshotReader,
)
from spark_elastic.runs.kept_commits import COMMIT_KEEPER
from spark_elastic.runs.snapshot import PickleCodec
from spark_elastic.worker import pickling, program
from spark_elastic.worker.context import get_context, get_process_context, start_call
from spark_elastic.worker.exits import accept_exit_zero, exit_forks
from spark_elastic.worker.outside import ENTERED, STATE
from spark_elastic.worker.program import Completed, Outcome, WorkerHandle
from spark_elastic.worker.script import DIST_ENV, destroy_process_group, exchange_dist_env


class FunctionProgram:
    """`fn(*args, **kwargs)` on every worker.

    environment: variables of the training process, set before the slow imports. dumps: pickles the call.
    checkpoint_target: store and policy of the checkpoints; None: there are none. imports: early ones.
    """

    may_have_loop = True

    def __init__(
        self,
        fn: Callable[..., object],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        environment: Mapping[str, str] | None = None,
        dumps: Callable[[object], bytes] = pickling.dumps,
        checkpoint_target: tuple[Store, CheckpointPolicy] | None = None,
        imports: tuple[str, ...] = (),
    ) -> None:
        self._checkpoint_target = checkpoint_target
        self._checkpointer: Checkpointer | None = None
        self._ran = False
        self.needs_new_process = False
        self._call = dumps((fn, tuple(args), dict(kwargs or {})))
        self.environment = dict(environment or {})
        self.imports = imports

    @property
    def pickled_call(self) -> bytes:
        """The function with its arguments."""
        return self._call

    def prepare(self) -> None:
        """Import what loading the function imports."""
        cloudpickle.loads(self._call)

    def position(self) -> Position | None:
        """None: an elastic function reports its position through the handle."""
        return None

    def sync(self, world: WorldView, group: Group) -> Position | None:
        """None: an elastic function synchronizes its state itself, since a newcomer has none before its function has
        created one."""
        return None

    def run(self, world: WorldView, group: Group, handle: WorkerHandle) -> Outcome:
        worker = get_context()
        assert worker is not None
        handle.process_values.pop(ENTERED, None)
        # Not before the first call, which may use what its modules created when they were imported.
        if self._ran:
            start_call()
            destroy_process_group()
        self._ran = True
        if self._checkpoint_target is not None and self._checkpointer is None:
            store, policy = self._checkpoint_target
            codec, report = PickleCodec(), handle.report_checkpoint
            self._checkpointer = Checkpointer(store, policy, SystemClock(), codec, report)
            handle.process_values[CHECKPOINTER] = self._checkpointer
            keeper = get_process_context().commit_keeper
            kept = None if keeper is None else keeper.kept
            handle.process_values[SNAPSHOT_READER] = SnapshotReader(store, policy.run_id, codec, kept)
            handle.process_values[COMMIT_KEEPER] = keeper
        try:
            env = exchange_dist_env(world, group, worker.address, worker.ports)
            if env.others_in_loop and handle.go_alone is not None:
                handle.process_values[DIST_ENV] = env
                env = exchange_dist_env(*handle.go_alone(), worker.address, worker.ports)
            env.apply()
            fn, args, kwargs = cloudpickle.loads(self._call)
            value: object = None
            with accept_exit_zero(), exit_forks():
                value = fn(*args, **kwargs)
            # An elastic function may have gone on to later worlds.
            last = (get_context() or worker).group or group
            return Completed(program.encode_result(value, last.rank))
        except MismatchError as error:
            # Another world would not help.
            raise InvalidInput(
                f"the workers' collectives do not match: {error}; let all ranks call the same ones, with the same "
                "names, shapes and dtypes."
            ) from error
        finally:
            # Nothing is lost with the process of a function that has come to no elastic loop, and holds no state.
            self.needs_new_process = STATE not in handle.process_values

    def close(self) -> None:
        if self._checkpointer is not None:
            self._checkpointer.close()
