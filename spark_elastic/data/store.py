"""Where data and checkpoints are: whole objects by name under one root, over fsspec.

A `Store` writes objects that appear whole or not at all, and turns the errors of all file systems into StoreError. It
is picklable, so that workers get it; any thread may use it. This package writes `data/FINGERPRINT`, `runs/RUN`,
`probes/TOKEN` and `channels/JOB`. A run that has not ended can be resumed: neither it nor the rows that it reads are
removed unasked (R19, resuming a run).
"""

from __future__ import annotations

import errno
import inspect
import io
import json
import logging
import math
import os
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from numbers import Real
from typing import Any, BinaryIO, TypeVar, cast
from urllib.parse import urlsplit

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.core import url_to_fs
from fsspec.spec import AbstractFileSystem

from spark_elastic.clock import SystemClock
from spark_elastic.data.object_store import (
    RETRY_SECONDS,
    RemoteFile,
    RenewedCredentials,
    RetryingClient,
    renew,
)
from spark_elastic.errors import ElasticError, InvalidInput, StoreError

T = TypeVar("T")
log = logging.getLogger("spark_elastic")

_WRITE_BYTES = 1 << 20  # at a time: for more Linux takes large pages, which virtual machines find slowly
TEMPORARY = ".part-"  # prefix of files that are still being written
_HEX = "[0-9a-f]{32}"  # a uuid4().hex, or a fingerprint
# The prefix is not enough: Hadoop's checksums of files such as part-00000 have it, too.
_PARTIAL = re.compile(re.escape(TEMPORARY) + _HEX)
# What mounts of object stores answer to a hard link, and some to a rename.
_NO_SUCH_OPERATION = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP}


def create_file(path: str, data: bytes) -> bool:
    """Create a local file unless it exists; of several processes that try at once, one gets True."""
    folder = os.path.dirname(path)
    make_folder(folder)
    temporary = _name_temporary(folder)
    try:
        _write_new_file(temporary, data)
        try:
            os.link(temporary, path)
        except OSError as error:
            if not _is_unsupported(error):
                raise
            _write_new_file(path, data)  # it exists at once; its content follows a moment later
    except FileExistsError:
        return False
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)
    _sync_folder(folder)
    return True


def make_folder(path: str) -> None:
    """Create a local folder and its parents, unless they exist; each is still there after a power cut."""
    if not os.path.isdir(path):
        make_folder(os.path.dirname(path))
        with suppress(FileExistsError):  # another process was first
            os.mkdir(path)
        _sync_folder(os.path.dirname(path))


def _sync_folder(path: str) -> None:
    """A file's own fsync need not save its name."""
    with suppress(OSError):  # mounts need not know this; another job may have removed the folder
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _name_temporary(folder: str) -> str:
    return f"{folder}/{TEMPORARY}{uuid.uuid4().hex}"


def _write_new_file(path: str, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _is_unsupported(error: Exception) -> bool:
    """Whether the file system lacks the operation, rather than that this call failed."""
    return isinstance(error, NotImplementedError) or getattr(error, "errno", None) in _NO_SUCH_OPERATION


def parse_document(text: str | bytes, name: str, read: Callable[[Any], T]) -> T:
    """What `read` makes of JSON from a store, or StoreError, whatever somebody has written there."""
    try:
        return read(json.loads(text))
    except ElasticError:
        raise
    except Exception as error:  # also of JSON that is nested too deeply
        why = f"{type(error).__name__}: {str(error)[:200]}"
        raise StoreError(f"{name} is damaged and cannot be read ({why}): rewrite or remove it.") from error


class StoreFull(StoreError):
    """The store has no room for what was to be written."""


_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}  # what file systems and servers without room answer
_NO_ROOM_WORDS = (
    *map(os.strerror, _NO_ROOM),
    "StorageFull",  # MinIO
    "QuotaExceeded",  # Ceph; HDFS (DSQuotaExceededException)
)


def lacks_room(description: str) -> bool:
    """Whether an error of a file system says that there is no room."""
    return any(word in description for word in _NO_ROOM_WORDS)


MOST_RETRY_SECONDS = 240.0
LISTING_SECONDS = 600.0  # of a listing, or the deletion of a tree: a store gives a thousand names at a time
FILE_BUFFER = 1 << 20  # what `open_read` reads of an object store at least
# What a driver and its executors need beside the client, by scheme; for errors.
_NEEDS = {
    "hdfs": ": pyarrow's client needs Java and Hadoop's libhdfs on the driver and on all executors; set JAVA_HOME, "
    "HADOOP_HOME (or ARROW_LIBHDFS_DIR, the folder of libhdfs.so) and CLASSPATH (`hadoop classpath --glob`)"
}
# File systems where one put appears whole or not at all, and a rename is a copy.
_ARCHIVES = {"zip", "tar", "libarchive"}  # files that hold files: what follows "::" says where they are
_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oci", "memory"}


def parse_store_url(given: object) -> str:
    """The url or path of an argument. Raises InvalidInput for anything else."""
    text = os.fspath(given) if isinstance(given, str | os.PathLike) else None
    if not isinstance(text, str):
        raise InvalidInput(
            f"store must be a path or url; got {type(given).__name__}: for a Store of Horovod's give what that was "
            "made with, such as '/mnt/jobs' or 's3://bucket/jobs', and its storage_options as storage_options."
        )
    return text


def _open_filesystem(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """The file system of a url, and the path in it."""
    if _is_chained(url):
        return cast("tuple[Any, str]", url_to_fs(url, **options))
    colons = uuid.uuid4().hex  # fsspec would drop what follows "::" in any path: two stores would be one
    filesystem, root = url_to_fs(url.replace("::", colons), **options)
    return filesystem, root.replace(colons, "::")


def _is_chained(url: str) -> bool:
    """Whether a url names several file systems, as `simplecache::s3://bucket/jobs` does. Raises InvalidInput if what
    follows a further "::" is no url, which fsspec would drop."""
    head, *rest = url.split("::")
    scheme, _, path = head.partition("://")
    is_wrapper = scheme in fsspec.available_protocols() and (not path or scheme in _ARCHIVES)
    are_urls = ["://" in each or each.startswith("/") for each in rest]
    if not rest or not is_wrapper or not are_urls[0]:
        return False
    if not all(are_urls):
        raise InvalidInput(f"The store's url {url} has '::' behind {head}::, which drops it: rename it.")
    return True


def check_storage_options(given: object) -> dict[str, Any]:
    """The options of an argument; errors do not show their values, which may be credentials."""
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise InvalidInput(
            f"storage_options must map the names of fsspec's options to their values; got {type(given).__name__}: "
            "give a dict such as {'key': ..., 'secret': ...}."
        )
    if "url" in given:
        raise InvalidInput("storage_options has 'url', which is no option of fsspec: give the url as store.")
    return dict(given)


def _is_seconds(given: object, most: float = math.inf) -> bool:
    return isinstance(given, Real) and 0 <= float(given) <= most


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object of a listing."""

    name: str  # within the store
    bytes: int  # its size
    modified: float | None  # when it was last written, in seconds since 1970; None if the store does not say
    tag: str = field(default="", repr=False)  # an object store's name for this content; "": it has none

    @property
    def state(self) -> str:
        """Another text once the object was written again, whether it was listed or looked at."""
        # Some object stores round the time differently in the two.
        return f"{self.bytes} bytes, {self.tag or self.modified}"


@dataclass(frozen=True)
class Store:
    """A root under which objects are read and written by name ("data/ab12/manifest.json")."""

    url: str  # as given, with a scheme where it was a local path; Spark and messages get it
    filesystem: Any = field(repr=False, compare=False)  # of fsspec, with the user's `storage_options`
    root: str = field(repr=False)  # the url's path as the file system takes it, without a slash at the end
    retry_seconds: float = field(default=RETRY_SECONDS, repr=False, compare=False)  # of a remote call

    @classmethod
    def open(
        cls,
        url: str | os.PathLike[str],
        *,
        retry_seconds: float = RETRY_SECONDS,
        renewed_credentials: RenewedCredentials | None = None,
        **storage_options: Any,
    ) -> Store:
        """The store at an fsspec url or a local path; touches nothing yet. `storage_options` are fsspec's.
        renewed_credentials: for reading an object store, beside the options."""
        url = parse_store_url(url)
        if not url:
            raise InvalidInput("The store's url is empty: give a path or a url such as s3://bucket/jobs.")
        if not (_is_seconds(retry_seconds, MOST_RETRY_SECONDS) and retry_seconds):
            raise InvalidInput(
                f"retry_seconds in storage_options is {retry_seconds!r}: give seconds, at most "
                f"{MOST_RETRY_SECONDS:g}, after which a step waits for its rows no longer."
            )
        scheme, _, rest = url.partition(":/")
        if scheme == "dbfs":  # Databricks mounts it on every machine, and its volumes beside it
            path = rest.lstrip("/")
            url = f"/{path}" if path.startswith("Volumes/") else f"/dbfs/{path}"
        parts = url.split("::") if _is_chained(url) else [url]
        if any(":" in urlsplit(part).netloc.rpartition("@")[0] for part in parts):
            raise InvalidInput("The store's url has a password in it: give credentials as storage_options.")
        if scheme in ("file", "local") and rest.startswith("/") and not rest.startswith("//"):
            raise InvalidInput(
                f"The store's url {url} has no absolute path: write three slashes, as in file:///mnt/jobs."
            )
        given = {} if renewed_credentials is None else renewed_credentials.get().options
        try:
            filesystem, root = _open_filesystem(url, {**given, **storage_options})
        except (ImportError, ValueError, OSError) as error:
            reason = str(error).partition("\n")[0].rstrip(".")
            needs = _NEEDS.get(scheme, "")
            raise StoreError(f"The store {url} cannot be opened: {reason}{needs}.") from error
        # The url stays as given: clients drop the account or name node that Spark needs. A local path gets a scheme.
        shown = url.rstrip("/") if "://" in url else filesystem.unstrip_protocol(root)
        root = root.rstrip("/")
        if renewed_credentials is not None:
            filesystem = renew(filesystem, root, storage_options, renewed_credentials)
        return cls(shown, filesystem, root, retry_seconds)

    def clean(self, older_than: float, unfinished: bool = False) -> Sequence[StoreEntry]:
        """Remove, and return, the entries of this package that were not written to for `older_than` seconds.

        Args:
            unfinished: also remove runs that could be resumed, and their rows.
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
        with self._translate_errors("read", name):
            client = self.client
            if client is not None:
                return client.run(client.read_object(self.path(name)))
            return cast("bytes", self.filesystem.cat_file(self.path(name)))

    def read_tail(self, name: str, length: int) -> bytes:
        """The last `length` bytes of an object, or all of a shorter one."""
        with self._translate_errors("read", name):
            path, client = self.path(name), self.client
            if client is not None:
                return client.run(client.read_tail(path, length))[1]
            if self.is_local:  # fsspec opens a file three times as slowly, and a table may have 100,000
                with open(path, "rb") as file:
                    file.seek(max(0, file.seek(0, os.SEEK_END) - length))
                    return file.read()
            size = self.filesystem.size(path)
            return cast("bytes", self.filesystem.cat_file(path, start=max(0, size - length), end=size))

    def open_read(self, name: str) -> BinaryIO:
        """A seekable file over an object; the caller closes it."""
        with self._translate_errors("read", name):
            path, client = self.path(name), self.client
            if client is not None:
                file = RemoteFile(client, path, client.run(client.find_size(path)))
                return cast("BinaryIO", io.BufferedReader(file, FILE_BUFFER))
            return cast("BinaryIO", self.filesystem.open(path, "rb"))

    def read_range(self, name: str, begin: int, end: int) -> bytes:
        """The bytes `begin ... end` of an object."""
        with self._translate_errors("read", name):
            path, client = self.path(name), self.client
            if client is not None:
                return client.run(client.read_ranges(path, [(begin, end)]))[0]
            return cast("bytes", self.filesystem.cat_file(path, start=begin, end=end))

    def write_bytes(self, name: str, data: bytes | memoryview, *, durable: bool = True) -> None:
        """Write an object, or replace it; readers never see a part of it.

        On HDFS and the like an object is gone for a moment while it is replaced, and stays so if the writer is killed.
        durable: whether a local file must be there after a power cut.
        """
        with self._translate_errors("write", name):
            path = self.path(name)
            if _protocols(self.filesystem) & _OBJECT_STORES:
                self._call("pipe_file", path, bytes(data), size=len(data))
                return
            try:
                self._replace_file(path, data, durable)
            except FileNotFoundError:  # another job has removed the folder, which was empty
                self._replace_file(path, data, durable)

    def _replace_file(self, path: str, data: bytes | memoryview, durable: bool) -> None:
        """Whole or not at all where the file system can rename. Only a local file is replaced at once."""
        folder, files = os.path.dirname(path), self.filesystem
        if self.is_local:
            make_folder(folder)
        else:
            files.makedirs(folder, exist_ok=True)
        temporary = _name_temporary(folder)
        try:
            with files.open(temporary, "wb") as file:
                for begin in range(0, len(data), _WRITE_BYTES):
                    file.write(memoryview(data)[begin : begin + _WRITE_BYTES])
                file.flush()
                if self.is_local and durable:
                    os.fsync(file.fileno())
            self._rename(temporary, path, data)
        except BaseException:
            if files.exists(temporary):
                files.rm_file(temporary)
            raise

    def _rename(self, temporary: str, path: str, data: bytes | memoryview) -> None:
        files = self.filesystem
        try:
            if self.is_local:
                os.replace(temporary, path)
                _sync_folder(os.path.dirname(path))
                return
            # HDFS does not rename onto a file: for a moment there is no file, but never a part of one.
            if files.exists(path):
                files.rm_file(path)
            if type(files).mv is AbstractFileSystem.mv:  # a copy, of what the path matches as a pattern
                raise NotImplementedError
            files.mv(temporary, path)
        except (OSError, NotImplementedError) as error:
            if not _is_unsupported(error):
                raise
            # Without a rename a reader may see a part for a moment; it finds out by the checksum that it knows.
            with files.open(path, "wb") as file:
                file.write(data)
            files.rm_file(temporary)

    def write_verified(self, name: str, data: bytes) -> None:
        """Write an object and, unless the store is local, read it back: R18 (publication)."""
        self.write_bytes(name, data)
        if not self.is_local and self.read_bytes(name) != data:
            raise StoreError(f"The store {self.url} does not give back what was written to {name!r}.")

    def create_exclusive(self, name: str, data: bytes) -> bool:
        """Create an object unless it exists; of several processes that try at once, one gets True.

        Atomic on local file systems, in memory, on Azure, on GCS with gcsfs 2024.12 or newer, and on S3 with s3fs
        2024.12 and botocore 1.35.20 or newer, if the server heeds If-None-Match. Elsewhere (HDFS, older clients) an
        object that appears between the check and the write is replaced.
        """
        with self._translate_errors("create", name):
            path = self.path(name)
            if self.is_local:
                return create_file(path, data)
            if not _protocols(self.filesystem) & _OBJECT_STORES:
                self.filesystem.makedirs(os.path.dirname(path), exist_ok=True)
            exclusive = _choose_exclusive_option(self.filesystem)
            if exclusive:
                try:
                    self._call("pipe_file", path, data, size=len(data), **exclusive)
                    return True
                except (NotImplementedError, ValueError):  # a client without this mode
                    pass
                except Exception as error:
                    if isinstance(error, FileExistsError) or type(error).__name__ == "ResourceExistsError":
                        return False
                    raise
            if self._call("exists", path):
                return False
            self.write_bytes(name, data)
            return True

    def exists(self, name: str) -> bool:
        with self._translate_errors("look for", name):
            path = self.path(name)
            if self.is_local:  # that of fsspec also takes a file system that fails for one without the object
                with suppress(FileNotFoundError, NotADirectoryError):
                    os.stat(path)
                    return True
                return False
            return bool(self._call("exists", path))

    def describe(self, name: str) -> ObjectInfo:
        """The state that an object is in now. StoreError if there is none."""
        with self._translate_errors("look at", name):
            return _to_object_info(name, self._call("info", self.path(name)))

    def find(self, name: str = "") -> Sequence[ObjectInfo]:
        """All objects under a folder, at any depth, by name."""
        return [each for each in self.find_written(name) if not _is_partial(each.name)]

    def find_partial(self, name: str = "") -> Sequence[ObjectInfo]:
        """The files under a folder that are still being written, or whose writer was killed."""
        return [each for each in self.find_written(name) if _is_partial(each.name)]

    def find_written(self, name: str) -> Sequence[ObjectInfo]:
        """Both."""
        with self._translate_errors("list", name):
            folder = self.path(name)
            found = self._call("find", folder, longest=LISTING_SECONDS, detail=True)
            start = len(self.root) + 1
            return [_to_object_info(path[start:], info) for path, info in sorted(found.items())]

    def list(self, name: str = "") -> list[str]:
        """The names directly under a folder, sorted; none if there is no folder."""
        with self._translate_errors("list", name):
            try:
                found = self._call("ls", self.path(name), detail=False)
            except FileNotFoundError:
                return []
            names = (str(path).rstrip("/").rsplit("/", 1)[-1] for path in found)
            prefix = f"{name.rstrip('/')}/" if name else ""
            return sorted(prefix + each for each in names if not each.startswith(TEMPORARY))

    def delete(self, name: str) -> None:
        """Delete an object if it exists."""
        with self._translate_errors("delete", name):
            with suppress(FileNotFoundError):
                self._call("rm_file", self.path(name))

    def remove_tree(self, name: str) -> None:
        """Delete a folder and everything under it, if it exists. What is deleted later never outlives it."""
        if not name:
            raise InvalidInput("A store's root is never removed: name a folder in it.")
        with self._translate_errors("delete", name):
            path = self.path(name)
            if self.is_local:
                with suppress(FileNotFoundError):
                    self.filesystem.rm(path, recursive=True)
                    _sync_folder(os.path.dirname(path))
                return
            # `rm` of fsspec takes a path for a pattern: that of "runs/a[12]" would delete "runs/a1".
            found = self._call("find", path, longest=LISTING_SECONDS, detail=True, withdirs=True)
            if not isinstance(found, dict):  # adlfs: the path is that of an object
                found = {each: {} for each in found}
            below = {each: info for each, info in found.items() if f"{each}/".startswith(f"{path}/")}
            inner = {each for each, info in below.items() if info.get("type") == "directory"}
            files = sorted(below.keys() - inner)
            folders = sorted(inner | {path}.difference(files), reverse=True)
            client = self.client
            if client is not None:
                client.remove(files, folders)
                return
            for remove, paths in ((self.filesystem.rm_file, files), (self.filesystem.rmdir, folders)):
                for each in paths:
                    with suppress(FileNotFoundError):
                        remove(each)

    def discard(self, name: str) -> None:
        """Remove a tree at an end whose result or error counts more: a store that refuses to is a warning."""
        try:
            self.remove_tree(name)
        except StoreError as error:
            log.warning("%s Remove it by hand.", error)

    def remove_empty_folder(self, name: str) -> None:
        """Delete a local folder that has nothing in it. An object store has no folders."""
        if self.is_local:
            with suppress(OSError):  # it has something in it
                os.rmdir(self.path(name))

    @property
    def client(self) -> RetryingClient | None:
        """What retries the calls of an object store; None for file systems whose calls are not retried."""
        is_object_store = isinstance(self.filesystem, AsyncFileSystem)
        return RetryingClient(self.filesystem, self.retry_seconds) if is_object_store else None

    def _call(
        self, method: str, *arguments: Any, size: int = 0, longest: float | None = None, **options: Any
    ) -> Any:
        """A method of the file system, which remembers no listing. size, longest: see `RetryingClient.retry`."""
        self.filesystem.invalidate_cache()
        if self.client is not None:
            return self.client.call(method, *arguments, size=size, longest=longest, **options)
        return getattr(self.filesystem, method)(*arguments, **options)

    @contextmanager
    def _translate_errors(self, verb: str, name: str) -> Iterator[None]:
        """Raise StoreError for any error of a file system; each client library has its own classes."""
        try:
            yield
        except (StoreError, InvalidInput):
            raise
        except Exception as error:
            if isinstance(error, FileNotFoundError) and verb not in ("write", "create"):
                raise StoreError(f"The store {self.url} has no {name!r}.") from error
            reason = f"{type(error).__name__}: {error}"
            is_full = getattr(error, "errno", None) in _NO_ROOM or lacks_room(reason)
            raise (StoreFull if is_full else StoreError)(
                f"Cannot {verb} {name or 'the root'!r} in the store {self.url} ({reason})."
            ) from error


def _choose_exclusive_option(filesystem: Any) -> dict[str, Any]:
    """What makes a client's write fail if the object exists; {}: nothing does."""
    # A client may take any other argument, drop it without a word, and overwrite.
    parameters = inspect.signature(getattr(filesystem, "_pipe_file", filesystem.pipe_file)).parameters
    if "mode" in parameters:
        return {"mode": "create"}
    return {"overwrite": False} if "overwrite" in parameters else {}  # adlfs


def _is_partial(name: str) -> bool:
    return _PARTIAL.fullmatch(name.rpartition("/")[2]) is not None


def _protocols(filesystem: fsspec.AbstractFileSystem) -> set[str]:
    protocol = filesystem.protocol
    return {protocol} if isinstance(protocol, str) else set(protocol)


def _to_object_info(name: str, info: Mapping[str, Any]) -> ObjectInfo:
    tag = str(info.get("ETag") or info.get("etag") or "").strip('"')
    return ObjectInfo(name, int(info.get("size") or 0), _modified_time(info), tag)


def _modified_time(info: Mapping[str, Any]) -> float | None:
    """When an object was last written; each client has its own name for it."""
    for key in ("mtime", "LastModified", "last_modified", "updated", "created"):
        found = info.get(key)
        if isinstance(found, datetime):
            return found.timestamp() if found.tzinfo else found.replace(tzinfo=timezone.utc).timestamp()
        if isinstance(found, int | float):
            return float(found)
        if isinstance(found, str):
            return datetime.fromisoformat(found.replace("Z", "+00:00")).timestamp()  # Python 3.10 knows no Z
    return None


ENDED = "-ended"  # follows an attempt's number in the name of an object that says that its job has succeeded
_KINDS = {"data": "data", "runs": "run", "probes": "probe", "channels": "channel"}
# Objects that only this package makes. Each data set has one of these, also while it is written, and each run.
_OWN = re.compile(
    rf"data/{_HEX}/({_HEX}/.+|manifest\.json|validation\.json)|probes/{_HEX}(/.+)?|channels/{_HEX}/.+|runs/[^/]+/"
    rf"(attempts/\d{{6}}({ENDED})?|logs/\d{{6}}-\d{{6}}\.log|status/\d{{6}}\.(html|json)|checkpoints/published-\d{{6}}-.+)"
)


@dataclass(frozen=True)
class StoreEntry:
    """A folder of this package in a store."""

    name: str  # its path within the store
    kind: str  # data, run, probe, channel, or partial: a file whose writer was killed, or still writes
    bytes: int  # of all objects in it
    modified: float | None  # when its newest object was written, in seconds since 1970; None: not known
    needed: bool  # whether it is an unfinished run, or rows that one reads


def list_entries(store: Store) -> list[StoreEntry]:
    """Everything that this package wrote to the store, and nothing of others: partial files, then folders, by name."""
    partial: list[StoreEntry] = []
    own: set[str] = set()  # entries with objects that only this package makes
    sizes: dict[str, int] = {}
    changed: dict[str, float | None] = {}
    fits: set[str] = set()
    published: set[str] = set()  # runs with checkpoints from which they can be continued
    newest: dict[str, str] = {}  # attempt of each run; by its name, with ENDED once it has ended
    results: set[str] = set()
    for info in (each for kind in _KINDS for each in store.find_written(kind)):
        if _is_partial(info.name):
            partial.append(StoreEntry(info.name, "partial", info.bytes, info.modified, needed=False))
            continue
        name = "/".join(info.name.split("/", 2)[:2])
        if _OWN.fullmatch(info.name):
            own.add(name)
        sizes[name] = sizes.get(name, 0) + info.bytes
        times = [time for time in (changed.get(name), info.modified) if time is not None]
        changed[name] = max(times, default=None)
        part = info.name.removeprefix(f"{name}/")
        if part == "run.json":
            fits.add(name)
        elif part == "result.json":
            results.add(name)
        elif part.startswith("checkpoints/published-"):
            published.add(name)
        elif part.startswith("attempts/"):
            newest[name] = max(part, newest.get(name, ""))
    # A fit ends with its result; any other run with its newest attempt: a later one continues it.
    unfinished_fits = (fits & own) - results
    needed = unfinished_fits | {rows for run in unfinished_fits for rows in _iter_data_sets(store, run)}
    needed |= {run for run in published - fits if not newest.get(run, "").endswith(ENDED)}
    return partial + [
        StoreEntry(n, _KINDS[n.partition("/")[0]], sizes[n], changed[n], n in needed) for n in sorted(own)
    ]


def remove_old_entries(
    store: Store, older_than: float, now: float, unfinished: bool = False
) -> list[StoreEntry]:
    """Remove, and return, the entries that were last written more than `older_than` seconds before `now`.
    unfinished: also runs that could be resumed, and their rows."""
    if not _is_seconds(older_than):
        raise InvalidInput(f"older_than must be a number of seconds, 0 or more; got {older_than!r}.")
    removed = []
    for entry in list_entries(store):
        is_old = entry.modified is not None and entry.modified < now - older_than
        if is_old and (unfinished or not entry.needed):
            store.remove_tree(entry.name)
            removed.append(entry)
    return removed


def _iter_data_sets(store: Store, run: str) -> Iterator[str]:
    """The data sets outside of its own folder that a run reads."""

    def read(record: Any) -> list[list[str]]:
        return [file.split("/") for file in json.loads(record["rows"]["manifest"])["files"]]

    text = store.read_bytes(f"{run}/run.json")
    for parts in parse_document(text, f"{run}/run.json in the store {store.url}", read):
        if parts[0] == "data" and len(parts) > 2:
            yield "/".join(parts[:2])
