"""A Python program as a function to run: as `__main__`, with arguments of its own, as `python train.py` would."""

from __future__ import annotations

import os
import random
import runpy
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

from elastic_collectives import Group
from spark_elastic.data.store import scratch_folder
from spark_elastic.errors import InvalidInput
from spark_elastic.protocol.types import World
from spark_elastic.worker.entry import exit_forks


@dataclass(frozen=True)
class Script:
    """path: where it lies at the caller. source: its bytes, for hosts that do not have it there."""

    path: str
    source: bytes
    arguments: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: str, *arguments: str) -> Script:
        """Raises InvalidInput where there is no such file."""
        whole = os.path.abspath(path)
        try:
            return cls(whole, Path(whole).read_bytes(), arguments)
        except OSError as error:
            raise InvalidInput(
                f"the script {path!r} cannot be read ({error}): give the path of a Python file."
            ) from error

    def __call__(self) -> None:
        """Run it. An exit code other than 0 is an error, as for the shell."""
        with scratch_folder() as folder:
            path = self._locate(folder)
            # What it imports lies beside the file itself, as for Python, not beside a link to it.
            with _as_program(str(path), self.arguments, str(path.resolve().parent)):
                runpy.run_path(str(path), run_name="__main__")

    def _locate(self, folder: Path) -> Path:
        """The script's path on this host: its own place, beside the modules that it imports, or a copy."""
        own = Path(self.path)
        try:
            if own.read_bytes() == self.source:
                return own
        except OSError:
            pass  # it is not here
        copy = folder / own.name
        copy.write_bytes(self.source)
        return copy


@dataclass(frozen=True)
class Module:
    """A module to run as `python -m` does. folder: where the caller stands; it is looked for there first. source: its
    bytes."""

    name: str
    folder: str
    source: bytes
    arguments: tuple[str, ...] = ()

    @classmethod
    def find(cls, name: str, *arguments: str) -> Module:
        """Raises InvalidInput where there is no such module."""
        folder = os.getcwd()
        with _search_first(folder):
            spec = _find_spec(name)
            if spec is not None and spec.submodule_search_locations is not None:
                spec = _find_spec(f"{name}.__main__")
        if spec is None or not spec.has_location or spec.origin is None:
            raise InvalidInput(
                f"there is no module {name!r} to run, neither in {folder} nor among what is installed."
            )
        return cls(name, folder, Path(spec.origin).read_bytes(), arguments)

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self) -> None:
        """See `Script`."""
        with _as_program(self.name, self.arguments, self.folder):
            runpy.run_module(self.name, run_name="__main__", alter_sys=True)


def _find_spec(name: str) -> ModuleSpec | None:
    try:
        return find_spec(name)
    except ImportError:  # of the package that it would be in
        return None


@contextmanager
def _as_program(name: str, arguments: tuple[str, ...], folder: str) -> Iterator[None]:
    sys.argv = [name, *arguments]
    with _search_first(folder):
        try:
            with exit_forks():
                yield
        except SystemExit as exit:
            if exit.code not in (None, 0):
                raise


@contextmanager
def _search_first(folder: str) -> Iterator[None]:
    """Inside the block modules are looked for in `folder` first."""
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


# The variables by which scripts learn their place: set anew in each world. Main thread only; writes `os.environ`.


# Not of those that a system gives to outgoing connections: one of them could take the port before the function does.
PORTS = (20_000, 32_767)
TRIES = 1_000


def set_dist_env(world: World, group: Group, address: str, ports: tuple[int, int] | None = None) -> None:
    """Set MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE and their kin, and Horovod's names for ranks and sizes.

    address: of this worker. ports: first and last of those that it may listen on; None: any. The master is rank 0, the
    port one that was free there. Collective.

    Raises:
        CollectiveError: the group broke.
    """
    mine = f"{address} {find_free_port(address, ports or PORTS)}".encode() if group.rank == 0 else b""
    master, _, port = group.allgather_bytes(mine)[0].decode().partition(" ")
    me = world.members[group.rank]
    os.environ.update(
        {
            "MASTER_ADDR": master,
            "MASTER_PORT": port,
            "RANK": str(me.rank),
            "WORLD_SIZE": str(world.size),
            "LOCAL_RANK": str(me.local_rank),
            "LOCAL_WORLD_SIZE": str(me.local_size),
            "HOROVOD_RANK": str(me.rank),
            "HOROVOD_SIZE": str(world.size),
            "HOROVOD_LOCAL_RANK": str(me.local_rank),
            "HOROVOD_LOCAL_SIZE": str(me.local_size),
            "HOROVOD_CROSS_RANK": str(me.cross_rank),
            "HOROVOD_CROSS_SIZE": str(me.cross_size),
            "HOROVOD_HOSTNAME": me.host,
            "HOROVOD_ELASTIC": "1",
        }
    )


def destroy_process_group() -> None:
    """The one of torch.distributed that an earlier call of the function was done with, or could not go on with: there
    is one in a process, and the next call asks for its own."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def find_free_port(address: str, ports: tuple[int, int]) -> int:
    """One of these ports, both ends included, that nobody listens on at any address; 0 if none was found."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    first, last = ports
    dice = random.SystemRandom()  # the user's function may have set the seed of the other
    for port in dice.sample(range(first, last + 1), min(TRIES, last - first + 1)):
        with socket.socket(family) as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    return 0
