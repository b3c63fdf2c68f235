"""A user's script or module as a function that runs it as `__main__`, and the variables that tell it its rank."""

from __future__ import annotations

import os
import random
import runpy
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

from elastic_collectives import Group
from spark_elastic.data.store import make_scratch_folder
from spark_elastic.errors import InvalidInput
from spark_elastic.protocol.types import WorldView
from spark_elastic.worker.context import get_process_context
from spark_elastic.worker.devices import set_accelerate_device
from spark_elastic.worker.program import accept_exit_zero, exit_forks

# Outside the range that systems use for outgoing connections, one of which could take the port before the user does.
PORTS = (20_000, 32_767)
TRIES = 1_000  # ports that are tried
DIST_ENV = "dist_env"  # in `process_values`: that of the others' world, while it is alone


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
    with _search_first(folder):
        with accept_exit_zero(), exit_forks():
            yield


@contextmanager
def _search_first(folder: str) -> Iterator[None]:
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with suppress(ValueError):  # the program may have removed it
            sys.path.remove(folder)


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
