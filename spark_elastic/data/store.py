"""Where data and checkpoints live: whole objects by name under one root, over fsspec.

Owns: names relative to the root, writes that appear whole or not at all, and one sentence for each failure. Knows
nothing of what the objects hold. Picklable, so that it travels to workers; any thread may use it.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, cast
from urllib.parse import urlsplit

import fsspec
from fsspec.core import url_to_fs
from fsspec.implementations.memory import MemoryFileSystem

from spark_elastic.clock import SystemClock
from spark_elastic.errors import InvalidInput, StoreError

# Files that appear whole or not at all, as far as their file system has hard links and renames. Any thread.


TEMPORARY = ".part-"  # how the names of files begin that are still being written
# What mounts of object stores answer where they have no hard links, and some where they have no rename.
_NO_SUCH_OPERATION = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP}


def create_file(path: str, data: bytes) -> bool:
    """A new local file, unless there is one of that name; of several who try at once, one gets True."""
    folder = os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    temporary = _temporary(folder)
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError as error:
        if not _is_unsupported(error):
            raise
        return _create_without_link(path, data)
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)
    return True


def replace_file(filesystem: Any, path: str, data: bytes, *, local: bool) -> None:
    """Write a file of an fsspec file system, in place of the one of that name."""
    temporary = _temporary(path.rpartition("/")[0])
    try:
        with filesystem.open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            if local:
                os.fsync(file.fileno())
        _rename(filesystem, temporary, path, data, local=local)
    except BaseException:
        if filesystem.exists(temporary):
            filesystem.rm_file(temporary)
        raise


def _temporary(folder: str) -> str:
    return f"{folder}/{TEMPORARY}{uuid.uuid4().hex}"


def _create_without_link(path: str, data: bytes) -> bool:
    """The name is taken at once, and the content comes a moment later."""
    try:
        with open(path, "xb") as file:
            file.write(data)
    except FileExistsError:
        return False
    return True


def _rename(filesystem: Any, temporary: str, path: str, data: bytes, *, local: bool) -> None:
    try:
        if local:
            os.replace(temporary, path)
            return
        # HDFS does not rename onto a file; for a moment there is none, never a part of one.
        if filesystem.exists(path):
            filesystem.rm_file(path)
        filesystem.mv(temporary, path)
    except (OSError, NotImplementedError) as error:
        if not _is_unsupported(error):
            raise
        # Without a rename a reader may see a part for a moment; checksums in what points to the file tell it.
        with filesystem.open(path, "wb") as file:
            file.write(data)
        filesystem.rm_file(temporary)


def _is_unsupported(error: Exception) -> bool:
    """Whether the file system has no such operation at all, rather than that this one failed."""
    return isinstance(error, NotImplementedError) or getattr(error, "errno", None) in _NO_SUCH_OPERATION


# Here one put is whole or not at all, and a rename is a copy.
_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oci", "memory"}


def parse_store_url(given: object) -> str:
    """A store as an argument named it. Raises InvalidInput for what is neither path nor url."""
    text = os.fspath(given) if isinstance(given, str | os.PathLike) else None
    if not isinstance(text, str):
        raise InvalidInput(
            f"store must be a path or url; got {type(given).__name__}: for a Store of Horovod's give what that was "
            "made with, such as '/mnt/jobs' or 's3://bucket/jobs', and its storage_options as storage_options."
        )
    return text


@dataclass(frozen=True)
class ObjectInfo:
    """An object that was listed. changed: seconds since 1970, None where the store does not say."""

    name: str
    bytes: int
    modified: float | None


@dataclass(frozen=True)
class Store:
    """A root under which objects are read and written by name ("data/ab12/manifest.json")."""

    url: str
    filesystem: Any = field(repr=False, compare=False)
    root: str = field(repr=False)

    @classmethod
    def open(cls, url: str | os.PathLike[str], **storage_options: Any) -> Store:
        """The store at an fsspec url or a local path; touches nothing yet. `storage_options` are fsspec's."""
        url = parse_store_url(url)
        if not url:
            raise InvalidInput(
                "The store's url is empty: give a path or an fsspec url such as s3://bucket/jobs."
            )
        scheme, _, rest = url.partition(":/")
        if scheme == "dbfs":  # Databricks mounts it on every machine, and its volumes beside it
            path = rest.lstrip("/")
            url = f"/{path}" if path.startswith("Volumes/") else f"/dbfs/{path}"
        if any(":" in urlsplit(part).netloc.rpartition("@")[0] for part in url.split("::")):
            raise InvalidInput("The store's url has a password in it: give credentials as storage_options.")
        try:
            filesystem, root = url_to_fs(url, **storage_options)
        except (ImportError, ValueError) as error:
            raise StoreError(f"The store {url} cannot be opened: {error}") from error
        # As it was given, since clients drop the account or name node that Spark needs; a local path gets its scheme.
        shown = url.rstrip("/") if "://" in url else filesystem.unstrip_protocol(root)
        return cls(shown, filesystem, root.rstrip("/"))

    def clean(self, older_than: float, unfinished: bool = False) -> Sequence[StoreEntry]:
        """Remove, and return, what this package wrote here and nobody has written to for `older_than` seconds.

        unfinished: also runs that could be taken up again, and their rows.
        """
        return remove_old_entries(self, older_than, SystemClock().wall(), unfinished)

    @property
    def is_local(self) -> bool:
        """Whether the store is a folder of this machine's file system."""
        return "file" in _protocols(self.filesystem)

    def path(self, name: str) -> str:
        """The object's path as the file system takes it."""
        parts = name.split("/")
        if name and (name.startswith("/") or ".." in parts):
            raise InvalidInput(f"{name!r} is no name inside a store: use a relative one without '..'.")
        return f"{self.root}/{name}" if name else self.root

    def join(self, *parts: str) -> str:
        """The url of an object."""
        return "/".join([self.url.rstrip("/"), *(part.strip("/") for part in parts)])

    def read_bytes(self, name: str) -> bytes:
        """All of an object."""
        with self._told("read", name):
            return cast("bytes", self.filesystem.cat_file(self.path(name)))

    def read_tail(self, name: str, length: int) -> bytes:
        """The last `length` bytes of an object, or all of a shorter one."""
        with self._told("read", name):
            path = self.path(name)
            size = self.filesystem.size(path)
            return cast("bytes", self.filesystem.cat_file(path, start=max(0, size - length), end=size))

    def open_read(self, name: str) -> BinaryIO:
        """A seekable file over an object; the caller closes it."""
        with self._told("read", name):
            return cast("BinaryIO", self.filesystem.open(self.path(name), "rb"))

    def write_bytes(self, name: str, data: bytes) -> None:
        """Write an object, or replace it; no reader ever sees a part of it."""
        with self._told("write", name):
            path = self.path(name)
            if _protocols(self.filesystem) & _OBJECT_STORES:
                self.filesystem.pipe_file(path, data)
                return
            self.filesystem.makedirs(os.path.dirname(path), exist_ok=True)
            replace_file(self.filesystem, path, data, local=self.is_local)

    def write_verified(self, name: str, data: bytes) -> None:
        """Write an object, and read it back where the store is no local file system: somebody will rely on it (R15)."""
        self.write_bytes(name, data)
        if not self.is_local and self.read_bytes(name) != data:
            raise StoreError(f"The store {self.url} does not give back what was written to {name!r}.")

    def create_exclusive(self, name: str, data: bytes) -> bool:
        """Write an object unless there is one of that name; of several who try at once, one gets True.

        Atomic on local file systems, and where fsspec's client can ask for it (S3, GCS, memory). Elsewhere an object
        that appears between the look and the write is replaced.
        """
        with self._told("create", name):
            path = self.path(name)
            if self.is_local:
                return create_file(path, data)
            if not _protocols(self.filesystem) & _OBJECT_STORES:
                self.filesystem.makedirs(os.path.dirname(path), exist_ok=True)
            try:
                self.filesystem.pipe_file(path, data, mode="create")
            except FileExistsError:
                return False
            except (TypeError, NotImplementedError, ValueError):  # a client that knows no such mode
                self.filesystem.invalidate_cache()
                if self.filesystem.exists(path):
                    return False
                self.write_bytes(name, data)
            return True

    def exists(self, name: str) -> bool:
        """Whether there is an object or a folder of that name."""
        with self._told("look for", name):
            self.filesystem.invalidate_cache()
            return bool(self.filesystem.exists(self.path(name)))

    def find(self, name: str = "") -> Sequence[ObjectInfo]:
        """All objects under a folder, at any depth, by name."""
        with self._told("list", name):
            self.filesystem.invalidate_cache()
            folder = self.path(name)
            found = self.filesystem.find(folder, detail=True)
            start = len(self.root) + 1
            return [
                ObjectInfo(path[start:], int(info.get("size") or 0), _changed(info))
                for path, info in sorted(found.items())
                if not path.rpartition("/")[2].startswith(TEMPORARY)
            ]

    def list(self, name: str = "") -> list[str]:
        """The names directly under a folder, sorted; none where there is no folder."""
        with self._told("list", name):
            self.filesystem.invalidate_cache()
            try:
                found = self.filesystem.ls(self.path(name), detail=False)
            except FileNotFoundError:
                return []
            names = (str(path).rstrip("/").rsplit("/", 1)[-1] for path in found)
            prefix = f"{name.rstrip('/')}/" if name else ""
            return sorted(prefix + each for each in names if not each.startswith(TEMPORARY))

    def delete(self, name: str) -> None:
        """Delete an object; nothing happens where there is none."""
        with self._told("delete", name):
            try:
                self.filesystem.rm_file(self.path(name))
            except FileNotFoundError:
                return

    def remove_tree(self, name: str) -> None:
        """Delete a folder and all under it; nothing happens where there is none."""
        if not name:
            raise InvalidInput("A store's root is never removed: name a folder in it.")
        with self._told("delete", name):
            try:
                self.filesystem.rm(self.path(name), recursive=True)
            except FileNotFoundError:
                return

    @contextmanager
    def _told(self, verb: str, name: str) -> Iterator[None]:
        """The one place where errors of file systems become ours; each client library has its own classes."""
        try:
            yield
        except (StoreError, InvalidInput):
            raise
        except FileNotFoundError as error:
            raise StoreError(f"The store {self.url} has no {name!r}.") from error
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise StoreError(
                f"Cannot {verb} {name or 'the root'!r} in the store {self.url} ({reason})."
            ) from error


def _protocols(filesystem: fsspec.AbstractFileSystem) -> set[str]:
    protocol = filesystem.protocol
    return {protocol} if isinstance(protocol, str) else set(protocol)


def _changed(info: Mapping[str, Any]) -> float | None:
    """Each client has its own name for it."""
    for key in ("mtime", "LastModified", "last_modified", "updated", "created"):
        found = info.get(key)
        if isinstance(found, datetime):
            return found.timestamp() if found.tzinfo else found.replace(tzinfo=UTC).timestamp()
        if isinstance(found, int | float):
            return float(found)
        if isinstance(found, str):
            return datetime.fromisoformat(found).timestamp()
    return None


# Temporary folders that do not outlive their process for long: what a killed one could not remove, another takes away.
#
# A folder's name says whose it is: boot, namespace of process ids, process and when that was started. Only what is
# surely of a dead process is removed, so that neither a process id that is used again nor a folder that several
# machines or containers share leads astray. Any thread, any process.


PREFIX = "spark_elastic"
DEAD = "ZX"  # states of a process that has ended, though nobody may have asked for its exit code


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder for as long as the block takes."""
    remove_stale_folders()
    me = os.getpid()
    with tempfile.TemporaryDirectory(prefix=f"{_here()}-{me}-{_started(me)}-") as folder:
        yield Path(folder)


def remove_stale_folders() -> None:
    """Remove the folders that dead processes of this machine have left."""
    here = _here()
    try:
        found = list(Path(tempfile.gettempdir()).glob(f"{here}-*-*-*"))
    except OSError:
        return  # there is no place for temporary files
    for folder in found:
        pid, started, _ = folder.name.removeprefix(f"{here}-").split("-", 2)
        if pid.isdigit() and _started(int(pid)) != started:
            shutil.rmtree(folder, ignore_errors=True)  # another may be at it as well, or it is another user's


def _here() -> str:
    """The beginning of all names that processes give which this one can see."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")[:8]
    return f"{PREFIX}-{boot}-{os.stat('/proc/self/ns/pid').st_ino}"


def _started(pid: int) -> str:
    """When a process was started, in ticks since the boot; "" where it does not live."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if state in DEAD else fields[18]


_KINDS = {"data": "data", "runs": "run", "probes": "probe", "channels": "channel"}


@dataclass(frozen=True)
class StoreEntry:
    """A folder of the store. kind: data, run, probe or channel. changed: of its newest object, seconds since 1970.

    needed: it is an unfinished run, or rows that one reads.
    """

    name: str
    kind: str
    bytes: int
    modified: float | None
    needed: bool


def list_entries(store: Store) -> list[StoreEntry]:
    """Everything that this package wrote there, by name."""
    sizes: dict[str, int] = {}
    changed: dict[str, float | None] = {}
    runs: set[str] = set()
    ended: set[str] = set()
    for found in store.find():
        kind, _, rest = found.name.partition("/")
        if kind not in _KINDS or "/" not in rest:
            continue
        name = f"{kind}/{rest.partition('/')[0]}"
        sizes[name] = sizes.get(name, 0) + found.bytes
        ages = [each for each in (changed.get(name), found.modified) if each is not None]
        changed[name] = max(ages, default=None)
        if found.name == f"{name}/run.json":
            runs.add(name)
        if found.name == f"{name}/result.json":
            ended.add(name)
    unfinished = runs - ended
    needed = unfinished | {rows for run in unfinished for rows in _rows_of(store, run)}
    return [
        StoreEntry(n, _KINDS[n.partition("/")[0]], sizes[n], changed[n], n in needed) for n in sorted(sizes)
    ]


def remove_old_entries(
    store: Store, older_than: float, now: float, unfinished: bool = False
) -> list[StoreEntry]:
    """Remove what was last written more than `older_than` seconds before `now`, and return it.

    unfinished: also runs that could be taken up again, and their rows. Where the store does not say when something was
    written, it stays.
    """
    if older_than < 0:
        raise InvalidInput(f"older_than is {older_than} seconds: it must not be negative.")
    old = [
        each for each in list_entries(store) if each.modified is not None and each.modified < now - older_than
    ]
    gone = [each for each in old if unfinished or not each.needed]
    for each in gone:
        store.remove_tree(each.name)
    return gone


def _rows_of(store: Store, run: str) -> Iterator[str]:
    """Data sets outside of a run's own folder that it reads."""
    try:
        manifest = json.loads(json.loads(store.read_bytes(f"{run}/run.json"))["manifest"])
        files: list[str] = manifest["files"]
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{run}/run.json in the store {store.url} is damaged: {error}") from error
    for name in files:
        parts = name.split("/")
        if parts[0] == "data" and len(parts) > 2:
            yield "/".join(parts[:2])


# A store in memory that belongs to whoever opened it; fsspec's own is shared by the whole process. Any thread.


class _Memory(MemoryFileSystem):  # type: ignore[misc] # fsspec has no types
    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.store: dict[str, object] = {}
        self.pseudo_dirs = [""]


def memory_store() -> Store:
    """An empty one."""
    return Store("memory://private", _Memory(), "")
