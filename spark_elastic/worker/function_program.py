"""A user's function, script or module as a program, called in the worker's main thread, and what tells it its rank.

A function that uses `elastic.run` is called once and continues from world to world. Any other is called again in each
world after a loss, in a new process: libraries keep much in one. A planned change waits for its end. A script or module
runs as `__main__`; `Torchrun` gives either torchrun's surroundings.
"""

from __future__ import annotations

import inspect
import os
import random
import runpy
import socket
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

from elastic_collectives import Group, MismatchError
from spark_elastic.clock import SystemClock
from spark_elastic.data.scratch import make_scratch_folder
from spark_elastic.errors import InvalidInput
from spark_elastic.protocol.types import Position, WorldView
from spark_elastic.runs.kept_commits import COMMIT_KEEPER
from spark_elastic.runs.snapshot import PickleCodec
from spark_elastic.worker.context import get_context, get_process_context, start_call
from spark_elastic.worker.devices import set_accelerate_device
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
from spark_elastic.worker.session import ENTERED, STATE

if TYPE_CHECKING:
    from spark_elastic.data.store import Store
    from spark_elastic.runs.checkpoint import Checkpointer, CheckpointPolicy

# Outside the range that systems use for outgoing connections, one of which could take the port before the user does.
PORTS = (20_000, 32_767)
TRIES = 1_000  # ports that are tried
DIST_ENV = "dist_env"  # in `process_values`: that of the others' world, while it is alone


class FunctionProgram:
    """`fn(*args, **kwargs)` on every worker. environment: set before the slow imports. dumps: pickles the call.
    checkpoint_target: store and policy of the checkpoints; None: there are none. imports: the function's early ones."""

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
        # Each forked process would import these modules anew. That of checkpoints takes long.
        own = [__name__] if checkpoint_target is None else [__name__, "spark_elastic.runs.checkpoint"]
        self.imports = (*imports, *(f"{module}?" for module in own))

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
        if self._ran:  # the first call may use what its modules created when they were imported
            start_call()
            destroy_process_group()
        self._ran = True
        if self._checkpoint_target is not None and self._checkpointer is None:
            from spark_elastic.runs import checkpoint

            store, policy = self._checkpoint_target
            codec, report, values = PickleCodec(), handle.report_checkpoint, handle.process_values
            self._checkpointer = checkpoint.Checkpointer(store, policy, SystemClock(), codec, report)
            values[checkpoint.CHECKPOINTER] = self._checkpointer
            keeper = get_process_context().commit_keeper
            kept = None if keeper is None else keeper.kept
            values[checkpoint.SNAPSHOT_READER] = checkpoint.SnapshotReader(store, policy.run_id, codec, kept)
            values[COMMIT_KEEPER] = keeper
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
            raise InvalidInput(  # another world would not help
                f"the workers' collectives do not match: {error}; let all ranks call the same ones, with the same "
                "names, shapes and dtypes."
            ) from error
        finally:
            self.needs_new_process = STATE not in handle.process_values  # else its process can go

    def close(self) -> None:
        if self._checkpointer is not None:
            self._checkpointer.close()


# ---- scripts and modules


@dataclass(frozen=True)
class Script:
    """A Python file to run as `python train.py` does; with the name `-c`, the program of `python -c`."""

    path: str  # Absolute, on the caller's host
    source: bytes  # the file's bytes, for hosts without that file
    arguments: tuple[str, ...] = ()  # what follows the script in `sys.argv`

    @classmethod
    def read(cls, path: str, *arguments: str) -> Script:
        whole = os.path.abspath(path)
        try:
            return cls(whole, Path(whole).read_bytes(), arguments)
        except OSError as error:
            sentence = f"the script {path!r} cannot be read ({error}): give the path of a Python file."
            raise InvalidInput(sentence) from error

    @property
    def folder(self) -> str:
        """In which its modules are searched first."""
        return str(Path(self.path).resolve().parent)

    @property
    def package(self) -> str:
        return ""

    def __call__(self) -> None:
        """Run the script. An exit code other than 0 raises `SystemExit`."""
        with ExitStack() as resources:
            path = self._locate(resources)
            # Modules are imported from the folder of the file itself, not of a link to it, as Python does.
            folder = Path(self.folder) if path.name == "-c" else path.resolve().parent
            with _as_program(str(path), self.arguments, str(folder)):
                runpy.run_path(str(path), run_name="__main__")

    def _locate(self, resources: ExitStack) -> Path:
        """The script's path on this host: the original beside the modules that it imports, or a copy that `resources`
        removes."""
        own = Path(self.path)
        try:
            if own.read_bytes() == self.source:
                return own
        except OSError:
            pass  # this host does not have the file
        copy = resources.enter_context(make_scratch_folder()) / own.name
        copy.write_bytes(self.source)
        return copy


@dataclass(frozen=True)
class Module:
    """A module to run as `python -m` does."""

    name: str  # with its package, as `python -m` takes it
    folder: str  # the caller's current folder, in which the module is searched first
    source: bytes  # the file's bytes
    arguments: tuple[str, ...] = ()  # what follows the module in `sys.argv`

    @classmethod
    def find(cls, name: str, *arguments: str) -> Module:
        folder = os.getcwd()
        with _search_first(folder):
            spec = _find_spec(name)
            if spec is not None and spec.submodule_search_locations is not None:
                spec = _find_spec(f"{name}.__main__")
        if spec is None or not spec.has_location or spec.origin is None:
            places = f"neither in {folder} nor among what is installed"
            raise InvalidInput(f"there is no module {name!r} to run, {places}.")
        return cls(name, folder, Path(spec.origin).read_bytes(), arguments)

    @property
    def __name__(self) -> str:
        return self.name

    @property
    def package(self) -> str:
        """To which its relative imports belong."""
        is_package = Path(self.folder, *self.name.split("."), "__main__.py").is_file()
        return self.name if is_package else self.name.rpartition(".")[0]

    def __call__(self) -> None:
        with _as_program(self.name, self.arguments, self.folder):
            runpy.run_module(self.name, run_name="__main__", alter_sys=True)


def _find_spec(name: str) -> ModuleSpec | None:
    try:
        return find_spec(name)
    except ImportError:  # of the package that should contain it
        return None


@contextmanager
def _as_program(name: str, arguments: tuple[str, ...], folder: str) -> Iterator[None]:
    sys.argv = [name, *arguments]
    with _search_first(folder), accept_exit_zero(), exit_forks():
        yield


@contextmanager
def _search_first(folder: str) -> Iterator[None]:
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with suppress(ValueError):  # the program may have removed it
            sys.path.remove(folder)


# ---- ranks, as variables of the environment


@dataclass(frozen=True)
class DistEnv:
    variables: dict[str, str]  # by name, of `os.environ`
    others_in_loop: bool  # whether another member is inside of its elastic loop

    def apply(self) -> None:
        os.environ.update(self.variables)
        if get_process_context().device == "cpu":
            set_accelerate_device(os.environ)


def exchange_dist_env(
    world: WorldView,
    group: Group,
    address: str,
    ports: tuple[int, int] | None = None,
    *,
    in_loop: bool = False,
) -> DistEnv:
    """MASTER_ADDR, RANK and so on, and Horovod's names for ranks and sizes. Collective, in each new world, before
    anything else. The master is rank 0; the port was free there. ports: first and last that may be used; None: any."""
    mine = f"{address} {find_free_port(address, ports or PORTS)}" if group.rank == 0 else " "
    told = [part.decode().split(" ") for part in group.allgather_bytes(f"{in_loop:d} {mine}".encode())]
    _, master, port = told[0]
    me = world.me
    has_own_gpu = get_process_context().device == "cuda"  # LOCAL_RANK is torch's number of it
    variables = {
        "MASTER_ADDR": master,
        "MASTER_PORT": port,
        "LOCAL_RANK": "0" if has_own_gpu else str(me.local_rank),
        "LOCAL_WORLD_SIZE": "1" if has_own_gpu else str(me.local_size),
        "GROUP_RANK": str(me.rank if has_own_gpu else me.cross_rank),
        "TORCHELASTIC_RUN_ID": "spark_elastic",  # by which Lightning takes RANK and WORLD_SIZE as they are
        "HOROVOD_HOSTNAME": me.host,
        "HOROVOD_ELASTIC": "1",
    }
    variables["RANK"] = variables["HOROVOD_RANK"] = str(me.rank)
    variables["WORLD_SIZE"] = variables["HOROVOD_SIZE"] = str(world.size)
    for name in ("local_rank", "local_size", "cross_rank", "cross_size"):
        variables[f"HOROVOD_{name.upper()}"] = str(getattr(me, name))
    return DistEnv(variables, any(inside == "1" for inside, *_ in told))


def destroy_process_group() -> None:
    """Destroy the process group that an earlier call left in torch.distributed: a process has only one. Libraries that
    keep groups in variables of their modules, and Accelerate, which keeps its ranks, begin anew."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available():
        return
    if dist.is_initialized():
        dist.destroy_process_group()
    for module in list(sys.modules.values()):
        # By class: some modules warn of whoever asks their variables for one.
        kept = [name for name, value in vars(module).items() if issubclass(type(value), dist.ProcessGroup)]
        for name in kept:
            setattr(module, name, None)
    accelerate = sys.modules.get("accelerate.state")
    if accelerate is not None:
        accelerate.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.GradientState._reset_state()


def find_free_port(address: str, ports: tuple[int, int]) -> int:
    """A port in this range, both ends included, on which no process listens at any address; 0 if none was found."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    first, last = ports
    dice = random.SystemRandom()  # user code may have seeded the global generator, alike on all workers
    for port in dice.sample(range(first, last + 1), min(TRIES, last - first + 1)):
        with socket.socket(family) as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    return 0


# ---- as under torchrun


@dataclass(frozen=True)
class ResultStore:
    """Where a result lies that is too large for a message."""

    url: str  # of a folder that driver and workers share
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)  # fsspec's, which may be credentials

    def put(self, pickled: bytes) -> StoredResult:
        name = f"results/{uuid.uuid4().hex}"
        self._open().write_verified(name, pickled)
        return StoredResult(name)

    def take(self, stored: StoredResult) -> Any:
        store = self._open()
        value = cloudpickle.loads(store.read_bytes(stored.name))
        store.delete(stored.name)
        return value

    def _open(self) -> Store:
        from spark_elastic.data.store import Store  # it takes long, and few results need it

        return Store.open(self.url, **self.options)


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
