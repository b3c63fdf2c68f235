"""A function in the surroundings that torchrun makes for one, of which rank 0's result counts: `Torchrun`."""

from __future__ import annotations

import inspect
import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidInput
from spark_elastic.worker.context import get_context, get_process_context
from spark_elastic.worker.program import RESULT_AT_MOST


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
        """Return the value, and remove it from the store."""
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
    """What torchrun sets beside RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and TORCHELASTIC_RUN_ID.

    Args:
        environment: has these.
        restarts: worlds before this one.
    """
    rank, size = environment["RANK"], environment["WORLD_SIZE"]
    # A worker sees the GPU of its slot alone, whose number is 0.
    is_local = one_node and get_process_context().device != "cuda"
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
