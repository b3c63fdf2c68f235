"""A user's function as a program, called in the worker's main thread; `Torchrun` gives it torchrun's surroundings.

One that uses `elastic.run` is called once and continues from world to world. Any other is called again in each world
after a loss, in a new process: libraries keep much in one. A planned change waits for its end.
"""

from __future__ import annotations

import inspect
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
from spark_elastic.worker.context import get_context, get_process_context, start_call
from spark_elastic.worker.pickling import pickle_for_workers
from spark_elastic.worker.program import (
    RESULT_AT_MOST,
    Completed,
    Outcome,
    WorkerHandle,
    accept_exit_zero,
    encode_result,
    exit_forks,
)
from spark_elastic.worker.script import DIST_ENV, destroy_process_group, exchange_dist_env
from spark_elastic.worker.session import ENTERED, STATE


class FunctionProgram:
    """`fn(*args, **kwargs)` on every worker. environment: set before the slow imports. dumps: pickles the call.
    checkpoint_target: store and policy of the checkpoints; None: there are none. imports: early ones."""

    may_have_loop = True

    def __init__(
        self,
        fn: Callable[..., object],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        environment: Mapping[str, str] | None = None,
        dumps: Callable[[object], bytes] = pickle_for_workers,
        checkpoint_target: tuple[Store, CheckpointPolicy] | None = None,
        imports: tuple[str, ...] = (),
    ) -> None:
        self._checkpoint_target = checkpoint_target
        self._checkpointer: Checkpointer | None = None
        self._ran = False
        self.needs_new_process = False
        self.pickled_call = dumps((fn, tuple(args), dict(kwargs or {})))
        self.environment = dict(environment or {})
        self.imports = imports

    def prepare(self) -> None:
        cloudpickle.loads(self.pickled_call)

    def position(self) -> Position | None:
        """None: an elastic function reports its position through the handle."""
        return None

    def sync(self, world: WorldView, group: Group) -> Position | None:
        """None: an elastic function synchronizes its state itself, which a newcomer's function has yet to create."""
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
            fn, args, kwargs = cloudpickle.loads(self.pickled_call)
            value: object = None
            with accept_exit_zero(), exit_forks():
                value = fn(*args, **kwargs)
            last = (get_context() or worker).group or group  # it may have gone on to later worlds
            return Completed(encode_result(value, last.rank))
        except MismatchError as error:
            # Another world would not help.
            raise InvalidInput(
                f"the workers' collectives do not match: {error}; let all ranks call the same ones, with the same "
                "names, shapes and dtypes."
            ) from error
        finally:
            self.needs_new_process = STATE not in handle.process_values  # else its process can go

    def close(self) -> None:
        if self._checkpointer is not None:
            self._checkpointer.close()


# ---- as under torchrun


@dataclass(frozen=True)
class ResultStore:
    """Where a result lies that is too large for a message."""

    url: str  # of a folder that driver and workers share
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)  # fsspec's, which may be credentials

    def put(self, pickled: bytes) -> StoredResult:
        name = f"results/{uuid.uuid4().hex}"
        Store.open(self.url, **self.options).write_verified(name, pickled)
        return StoredResult(name)

    def take(self, stored: StoredResult) -> Any:
        store = Store.open(self.url, **self.options)
        value = cloudpickle.loads(store.read_bytes(stored.name))
        store.delete(stored.name)
        return value


@dataclass(frozen=True)
class StoredResult:
    """Stands for a result in the store."""

    name: str  # of the object


@dataclass(frozen=True)
class Torchrun:
    """A function, or a script without arguments, to be called in each worker."""

    function: Callable[..., Any]
    one_node: bool  # all workers are processes of one node; False: each one has a node of its own
    results: ResultStore | None  # None: results fit into a message

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.function

    @property
    def __name__(self) -> str:
        path = getattr(self.function, "path", type(self.function).__name__)
        return str(getattr(self.function, "__name__", os.path.basename(path)))

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        worker = get_context()
        assert worker is not None
        assert worker.world is not None
        restarts = worker.world.fence.generation - 1
        os.environ.update(make_torchrun_variables(os.environ, self.one_node, restarts))
        value = self.function(*args, **kwargs)
        worker = get_context() or worker  # an elastic function has gone on to later worlds
        if worker.group is not None and worker.group.rank:
            return None
        pickled = cloudpickle.dumps(value)
        if len(pickled) <= RESULT_AT_MOST:
            return value
        if self.results is None:
            raise InvalidInput(
                f"rank 0 returned a {type(value).__name__} of {len(pickled) / 2**20:.1f} MiB, and at most "
                f"{RESULT_AT_MOST >> 20} MiB travel in a message: give TorchDistributor(store=...) the folder or url "
                "of a store that driver and executors share."
            )
        return self.results.put(pickled)


def make_torchrun_variables(environment: Mapping[str, str], one_node: bool, restarts: int) -> dict[str, str]:
    """What torchrun sets beside the variables that `environment` has. restarts: worlds before this one."""
    rank, size = environment["RANK"], environment["WORLD_SIZE"]
    is_local = one_node and get_process_context().device != "cuda"  # else its GPU's number is 0
    return {
        "LOCAL_RANK": rank if is_local else "0",
        "LOCAL_WORLD_SIZE": size if is_local else "1",
        "GROUP_RANK": "0" if is_local else rank,
        "GROUP_WORLD_SIZE": "1" if is_local else size,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": size,
        "ROLE_NAME": "default",
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(2**31 - 1),
    }
