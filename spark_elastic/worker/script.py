"""A Python program as a function to run: as `__main__`, with arguments of its own, as `python train.py` would."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

from spark_elastic.data.scratch import scratch_folder
from spark_elastic.errors import InvalidInput
from spark_elastic.worker.ending import forks_end_here


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
            path = self._here(folder)
            # What it imports lies beside the file itself, as for Python, not beside a link to it.
            with _as_program(str(path), self.arguments, str(path.resolve().parent)):
                runpy.run_path(str(path), run_name="__main__")

    def _here(self, folder: Path) -> Path:
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
    def found(cls, name: str, *arguments: str) -> Module:
        """Raises InvalidInput where there is no such module."""
        folder = os.getcwd()
        with _found_in(folder):
            spec = _spec(name)
            if spec is not None and spec.submodule_search_locations is not None:
                spec = _spec(f"{name}.__main__")
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


def _spec(name: str) -> ModuleSpec | None:
    try:
        return find_spec(name)
    except ImportError:  # of the package that it would be in
        return None


@contextmanager
def _as_program(name: str, arguments: tuple[str, ...], folder: str) -> Iterator[None]:
    sys.argv = [name, *arguments]
    with _found_in(folder):
        try:
            with forks_end_here():
                yield
        except SystemExit as exit:
            if exit.code not in (None, 0):
                raise


@contextmanager
def _found_in(folder: str) -> Iterator[None]:
    """Inside the block modules are looked for in `folder` first."""
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
