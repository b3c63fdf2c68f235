"""A disk that may forget, at every moment, whatever was not synced: contents of files, and names in folders.

`DiskRecorder` follows what a block does in a folder, and notes after each call of the kernel what a power cut could
leave. `Loss` says what of that is lost. `DiskFull` makes the n-th write fail, with half of it written.
"""

from __future__ import annotations

import builtins
import errno
import os
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, TypeAlias

import pytest

Names: TypeAlias = dict[str, int]  # inodes by name
# What changes names in folders, or makes durable.
CALLS = ("fsync", "replace", "rename", "link", "unlink", "remove", "mkdir", "rmdir")


class Loss(Enum):
    """What a power cut loses of what was not synced."""

    ALL = "contents and names"
    CONTENTS = "contents: files are empty"
    HALVES = "the second halves of contents"
    SOME = "some contents and names, by a seed"


@dataclass(frozen=True)
class _Side:
    """A tree as it is seen, or as the disk has it."""

    folders: Mapping[int, Names]
    files: Mapping[int, bytes]


@dataclass(frozen=True)
class DiskMoment:
    """A moment at which the power may be cut."""

    after: str  # the call
    acknowledged: dict[str, int]  # what the program had said to be durable by then
    root: int
    live: _Side
    synced: _Side

    def leave(self, folder: Path, loss: Loss, seed: int = 0) -> Path:
        """Make the folder what the disk has after the power cut."""
        rng = random.Random(seed)
        folder.mkdir()
        self._write_folder(folder, self.root, loss, rng)
        return folder

    def _write_folder(self, folder: Path, inode: int, loss: Loss, rng: random.Random) -> None:
        synced, live = self.synced.folders.get(inode, {}), self.live.folders.get(inode, {})
        names = {Loss.ALL: synced, Loss.SOME: rng.choice((synced, live))}.get(loss, live)
        for name, each in sorted(names.items()):
            if each in self.live.folders or each in self.synced.folders:
                (folder / name).mkdir()
                self._write_folder(folder / name, each, loss, rng)
                continue
            durable, seen = self.synced.files.get(each), self.live.files.get(each, b"")
            kept = {Loss.ALL: b"", Loss.CONTENTS: b"", Loss.HALVES: seen[: len(seen) // 2]}
            torn = rng.choice((b"", seen[: len(seen) // 2], seen)) if loss is Loss.SOME else kept[loss]
            (folder / name).write_bytes(torn if durable is None else durable)


class DiskRecorder:
    """Notes the moments of what happens under a folder while `record` runs. What is there before is durable."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.moments: list[DiskMoment] = []
        self._acknowledged: dict[str, int] = {}
        self._root, self._patch = root, patch
        self._held: dict[int, int] = {}  # a descriptor of each inode, so that none is used again
        self._synced_folders: dict[int, Names] = {}
        self._synced_files: dict[int, bytes] = {}

    def acknowledge(self, what: str, number: int) -> None:
        """The program says that this is durable."""
        self._acknowledged[what] = number

    @contextmanager
    def record(self) -> Iterator[None]:
        live = self._look()
        self._synced_folders, self._synced_files = dict(live.folders), dict(live.files)
        real = {call: getattr(os, call) for call in CALLS}
        try:
            with self._patch.context() as patch:
                for call in CALLS:
                    patch.setattr(os, call, self._follow(call, real[call]))
                self._note("the beginning")
                yield
            self._note("the end")
        finally:
            for descriptor in self._held.values():
                os.close(descriptor)

    def _follow(self, call: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def followed(*arguments: Any, **options: Any) -> Any:
            if call == "fsync":  # which the real disk need not do, too
                self._note("a write")
                self._sync(arguments[0])
                done = None
            else:
                done = real(*arguments, **options)
            self._note(f"{call} {arguments[:2]}")
            return done

        return followed

    def _sync(self, descriptor: int) -> None:
        live, inode = self._look(), os.fstat(descriptor).st_ino
        if inode in live.folders:
            self._synced_folders[inode] = dict(live.folders[inode])
        else:
            self._synced_files[inode] = Path(f"/proc/self/fd/{descriptor}").read_bytes()

    def _note(self, after: str) -> None:
        synced = _Side(dict(self._synced_folders), dict(self._synced_files))
        root = self._root.stat().st_ino
        moment = DiskMoment(after, dict(self._acknowledged), root, self._look(), synced)
        if not self.moments or replace(self.moments[-1], after=after) != moment:
            self.moments.append(moment)

    def _look(self) -> _Side:
        folders: dict[int, Names] = {}
        files: dict[int, bytes] = {}
        for path, _, names in os.walk(self._root):
            entries = {each.name: each.inode() for each in os.scandir(path)}
            folders[self._hold(path)] = entries
            for name in names:
                files[self._hold(f"{path}/{name}")] = Path(path, name).read_bytes()
        return _Side(folders, files)

    def _hold(self, path: str) -> int:
        inode = os.stat(path).st_ino
        if inode not in self._held:
            self._held[inode] = os.open(path, os.O_RDONLY)
        return inode


class _FullFile:
    """A file of which one write fails."""

    def __init__(self, file: Any, disk: DiskFull) -> None:
        self._file, self._disk = file, disk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _FullFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def write(self, data: bytes | memoryview) -> int:
        if self._disk.is_full("write"):
            self._file.write(bytes(data)[: len(data) // 2])
            self._file.flush()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return int(self._file.write(data))


class DiskFull:
    """Fails the n-th call that needs room in a folder, and all after it; `calls` says how many there were."""

    NEED_ROOM = ("fsync", "replace", "link", "mkdir")

    def __init__(self, root: Path, fails_at: int) -> None:
        self.calls = 0
        self._root, self._fails_at = str(root), fails_at

    @contextmanager
    def fill(self, patch: pytest.MonkeyPatch) -> Iterator[None]:
        with patch.context() as patched:
            for call in self.NEED_ROOM:
                patched.setattr(os, call, self._limit(call, getattr(os, call)))
            patched.setattr(builtins, "open", self._limit_open(builtins.open))
            yield

    def is_full(self, call: str) -> bool:
        self.calls += 1
        return self.calls >= self._fails_at

    def _limit(self, call: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def limited(*arguments: Any, **options: Any) -> Any:
            if self.is_full(call):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(arguments[0]))
            return real(*arguments, **options)

        return limited

    def _limit_open(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def limited(path: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            if not str(path).startswith(self._root) or not set(mode) & set("wxa+"):
                return real(path, mode, *arguments, **options)
            if self.is_full("open"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            return _FullFile(real(path, mode, *arguments, **options), self)

        return limited
