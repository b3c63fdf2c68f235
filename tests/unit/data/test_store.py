"""The store on a real folder and in memory: names, whole writes, sentences; credentials that end; scratch folders."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest.mock import Mock, patch

import fsspec
import pytest
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.local import LocalFileSystem

from spark_elastic.data import object_store
from spark_elastic.data import scratch as scratch_module
from spark_elastic.data.object_store import Lease, RenewedCredentials
from spark_elastic.data.scratch import make_scratch_folder, remove_stale_folders
from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidInput, StoreError
from spark_elastic.testing import FakeClock
from spark_elastic.worker.devices import GpuClaims
from tests.leaks import SessionOwned
from tests.memory_store import make_memory_store
from tests.special_names import check_special_names


class Bucket(LocalFileSystem):  # type: ignore[misc]
    protocol = "bucket"

    def mv(self, *_: object, **__: object) -> None:
        raise NotImplementedError


class ManyPages(AsyncFileSystem):  # type: ignore[misc]
    """An object store whose listings take long."""

    protocol = "pages"
    removed = 0

    async def _find(self, path: str, **_: object) -> dict[str, dict[str, object]]:
        await asyncio.sleep(0.5)
        return {f"{path}/{number}": {"size": 1} for number in range(3)}

    async def _rm_file(self, path: str, **_: object) -> None:
        self.removed += path.count("/") == 2


refuse = Mock(side_effect=OSError(errno.EOPNOTSUPP, "Operation not supported"))


@pytest.fixture(params=["file", "mount of an object store", "memory", "no rename"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    if request.param in ("file", "mount of an object store"):
        if request.param != "file":
            monkeypatch.setattr(os, "link", refuse)
            monkeypatch.setattr(os, "replace", refuse)
        yield Store.open(f"file://{tmp_path}/jobs")
        return
    if request.param == "no rename":
        yield Store("bucket://jobs", Bucket(), f"{tmp_path}/jobs")
        return
    yield Store.open(f"memory://{tmp_path.name}")
    fsspec.filesystem("memory").store.clear()


def test_objects_are_written_read_and_listed_by_name(store: Store) -> None:
    assert store.list() == []
    store.write_bytes("a/b/one", b"1")
    store.write_bytes("a/b/two", b"22")
    store.write_bytes("a/three", b"333")
    assert store.read_bytes("a/b/two") == b"22"
    assert store.read_tail("a/three", 2) == b"33"
    assert store.read_tail("a/three", 9) == b"333"
    assert store.list("a") == ["a/b", "a/three"]
    assert store.list("a/b") == ["a/b/one", "a/b/two"]
    assert store.exists("a/three")
    store.write_bytes("a/three", b"anew")
    assert store.read_bytes("a/three") == b"anew"
    store.delete("a/three")
    store.delete("a/three")
    assert not store.exists("a/three")
    store.remove_tree("a")
    store.remove_tree("a")
    assert not store.exists("a/b/one")


def test_what_a_store_refuses_to_discard_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    store = make_memory_store()
    for name in ("a/b", "a/c/d", "e"):
        store.write_bytes(name, b"1")
    for name in ("a", "e"):
        store.discard(name)
    assert store.find() == []
    store.write_bytes("a/b", b"1")
    store.filesystem.rm_file = Mock(side_effect=PermissionError("AccessDenied"))
    store.discard("a")
    (line,) = caplog.messages
    assert line.startswith("Cannot delete 'a' in the store memory://")
    assert line.endswith("AccessDenied). Remove it by hand.")


@pytest.mark.parametrize("root", ["ax", "a[xy]*?"])
def test_names_with_special_characters_are_taken_literally(store: Store, root: str) -> None:
    store.write_bytes("ay/runs/ax/b/one", b"a store whose url the pattern of another one's matches")
    check_special_names(replace(store, root=f"{store.root}/{root}"))
    assert store.exists("ay/runs/ax/b/one")


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("/x/a::1", "/x/a::1"),
        ("/x/a::1/", "/x/a::1"),
        ("file:///x/a::b::2", "/x/a::b::2"),
        ("/x/file::1", "/x/file::1"),
        ("memory://a::1", "/a::1"),
        ("simplecache::memory://a", "/a"),
    ],
)
def test_a_path_with_two_colons_is_the_one_that_was_said(url: str, root: str) -> None:
    store = Store.open(url)
    assert store.root == root
    assert Store.open(store.url).root == root
    assert ("simplecache" in store.filesystem.protocol) == url.startswith("simplecache")


def test_a_file_system_that_fails_is_not_taken_for_one_without_the_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.open(tmp_path)
    store.write_bytes("a", b"1")
    assert store.exists("a")
    assert not store.exists("b")
    assert not store.exists("a/b")
    fail = Mock(side_effect=OSError(errno.EIO, "Input/output error"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", fail)
        patch.setattr(os.path, "exists", fail)
        says = r"Cannot look for 'a' in the store .* \(OSError: .*Input/output error"
        with pytest.raises(StoreError, match=says):
            store.exists("a")


def test_only_one_of_two_writers_creates_an_object(store: Store) -> None:
    assert store.create_exclusive("a/new", b"first")
    assert not store.create_exclusive("a/new", b"second")
    assert store.read_bytes("a/new") == b"first"
    assert store.list("a") == ["a/new"]


def test_a_client_that_drops_modes_overwrites_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """As s3fs before 2024.12."""
    write = store.filesystem.pipe_file
    monkeypatch.setattr(
        store.filesystem, "pipe_file", lambda path, value, **_: write(path, value), raising=False
    )
    assert store.create_exclusive("a/new", b"first")
    assert not store.create_exclusive("a/new", b"second")
    assert store.read_bytes("a/new") == b"first"


class ResourceExistsError(Exception):
    """azure-core's."""


class Azure(AsyncFileSystem):  # type: ignore[misc]
    """As adlfs: newer releases read `mode` out of their keywords, older ones drop it."""

    protocol = "az"
    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.objects: dict[str, bytes] = {}

    async def _pipe_file(self, path: str, value: bytes, overwrite: bool = True, **_: object) -> None:
        if path in self.objects and not overwrite:
            raise ResourceExistsError(path)
        self.objects[path] = value

    async def _exists(self, path: str, **_: object) -> bool:
        return False  # another writer creates it after this


def test_only_one_of_two_writers_creates_an_object_in_azure(session_owned: SessionOwned) -> None:
    with session_owned.adopt():
        session_owned.thread_modules.add("fsspec.asyn")
        store = Store("az://jobs", Azure(), "jobs")
    assert store.create_exclusive("new", b"first")
    assert not store.create_exclusive("new", b"second")
    assert store.filesystem.objects == {"jobs/new": b"first"}


def test_urls_of_stores_are_accepted(tmp_path: Path) -> None:
    assert Store.open(tmp_path).url == Store.open(str(tmp_path)).url
    for given in (str(tmp_path), f"file://{tmp_path}", f"file://{tmp_path}/"):
        store = Store.open(given)
        assert store.url == f"file://{tmp_path}"
        assert store.join("a", "b") == f"file://{tmp_path}/a/b"
        assert store.path("a/b") == f"{tmp_path}/a/b"
        assert store.is_local


def test_a_missing_object_is_named(store: Store) -> None:
    with pytest.raises(StoreError, match="has no 'nothing/here'"):
        store.read_bytes("nothing/here")


def test_a_listing_may_take_longer_than_an_attempt_of_a_single_request(session_owned: SessionOwned) -> None:
    with session_owned.adopt():  # fsspec's thread, which it keeps for the life of the process
        pages = ManyPages(skip_instance_cache=True)
    store = Store("pages://jobs", pages, "jobs", retry_seconds=1.0)
    assert [each.name for each in store.find("a")] == ["a/0", "a/1", "a/2"]
    store.remove_tree("a")
    assert pages.removed == 3


@pytest.mark.parametrize("name", ["../up", "/absolute", "a/../../b"])
def test_names_outside_of_the_store_are_refused(store: Store, name: str) -> None:
    with pytest.raises(InvalidInput, match="no name inside a store"):
        store.write_bytes(name, b"")
    with pytest.raises(InvalidInput, match="root"):
        store.remove_tree("")


@pytest.mark.parametrize(
    ("url", "error", "says"),
    [
        ("", InvalidInput, "empty"),
        ("file://jobs/a", InvalidInput, "file://jobs/a has no absolute path"),
        ("nowhere://x", StoreError, "cannot be opened"),
        ("hdfs://localhost:1/x", StoreError, r"opened: Unable to load libjvm: .*set JAVA_HOME, .*glob`\)\.$"),
        ("memory://k:secret@b/x", InvalidInput, "storage_options"),
        ("simplecache::memory://k:secret@b/x", InvalidInput, "storage_options"),
        ("simplecache::memory://a::1", InvalidInput, "has '::' behind simplecache::, which drops it"),
    ],
)
def test_wrong_urls(url: str, error: type[Exception], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    with pytest.raises(error, match=says):
        Store.open(url)


@pytest.mark.parametrize("place", ["/proc/nothing", "{}/file"])
def test_an_unwritable_place_is_not_said_to_lack_an_object(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    root = place.format(tmp_path)
    with pytest.raises(StoreError, match=f"Cannot write 'a/b' in the store file://{root}"):
        Store.open(root).write_bytes("a/b", b"")


def test_a_write_survives_that_another_job_removes_its_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = Store.open(str(tmp_path)), iter([tmp_path / "probes"])
    make_folders = LocalFileSystem.makedirs

    def make_for_a_moment(self: LocalFileSystem, path: str, exist_ok: bool = False) -> None:
        make_folders(self, path, exist_ok)
        for folder in other:
            folder.rmdir()

    monkeypatch.setattr(LocalFileSystem, "makedirs", make_for_a_moment)
    store.write_bytes("probes/one", b"1")
    assert store.read_bytes("probes/one") == b"1"


@pytest.mark.parametrize("call", ["write_bytes", "create_exclusive", "create_exclusive without links"])
def test_a_power_cut_loses_no_name_of_an_object_and_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    synced: dict[str, list[str]] = {}  # what a folder had in it when it was synced last

    def record(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        synced[path] = os.listdir(path) if os.path.isdir(path) else []

    monkeypatch.setattr(os, "fsync", record)
    if call.endswith("links"):
        monkeypatch.setattr(os, "link", refuse)
    getattr(Store.open(tmp_path / "jobs"), call.partition(" ")[0])("runs/r/attempts/000001", b"{}")
    path = tmp_path
    for name in ("jobs", "runs", "r", "attempts", "000001"):
        assert name in synced[str(path)]
        path /= name


def test_a_failed_write_leaves_the_old_object_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.open(str(tmp_path))
    store.write_bytes("x", b"old")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(StoreError, match="No space left"):
        store.write_bytes("x", b"new")
    assert store.read_bytes("x") == b"old"
    assert os.listdir(tmp_path) == ["x"]


# ---- credentials that end: when others are asked for, and what happens if there are none


@dataclass
class Vendor:
    """Vends credentials that end after some seconds, or raises."""

    clock: FakeClock = field(default_factory=FakeClock)
    seconds: float | None = 100.0
    error: Exception | None = None
    vended: int = 0
    name: str = "t"

    def fetch(self) -> Lease:
        if self.error is not None:
            raise self.error
        self.vended += 1
        return Lease({"key": self.vended}, None if self.seconds is None else self.clock.wall() + self.seconds)


@pytest.fixture
def vendor() -> Iterator[Vendor]:
    vendor = Vendor()
    with patch.object(object_store, "_CLOCK", vendor.clock):
        yield vendor


def test_others_are_asked_for_before_the_end_and_not_long_before(vendor: Vendor) -> None:
    held = RenewedCredentials(vendor)
    first = held.get()
    vendor.clock.advance(69)
    assert held.get() is held.lease is first
    vendor.clock.advance(22)
    assert held.lease is None
    assert held.get().options == {"key": 2}


def test_while_they_are_valid_a_catalog_may_be_away(vendor: Vendor, caplog: pytest.LogCaptureFixture) -> None:
    held = RenewedCredentials(vendor)
    first = held.get()
    vendor.error = ConnectionError("nobody is there")
    vendor.clock.advance(95)
    assert held.get() is first
    assert "not renewed yet: nobody is there" in caplog.text
    assert held.lease is first  # it is not asked at each request
    vendor.clock.advance(5)
    with pytest.raises(ConnectionError):
        held.get()
    vendor.error = InvalidInput("The catalog says no.")
    with pytest.raises(StoreError, match=r"have ended and cannot be renewed: The catalog says no\."):
        held.get()
    vendor.error = None
    assert held.get().options == {"key": 2}


@pytest.mark.parametrize("seconds", [None, -5.0])
def test_those_without_an_end_and_those_that_our_clock_takes_for_ended_stay_until_they_are_refused(
    vendor: Vendor, seconds: float | None
) -> None:
    vendor.seconds = seconds
    held = RenewedCredentials(vendor)
    first = held.get()
    vendor.clock.advance(1e6)
    assert held.get() is first
    held.refuse(first)
    second = held.get()
    assert second.options == {"key": 2}
    held.refuse(first)  # by a request that was under way
    assert held.get() is second


# ---- scratch folders


HOLD = """
import sys
from spark_elastic.data.scratch import make_scratch_folder
with make_scratch_folder() as folder:
    (folder / "model.keras").write_bytes(b"weights")
    sys.stdout.write(f"{folder}\\n")
    sys.stdout.flush()
    sys.stdin.read()
"""


def test_a_host_without_a_temporary_folder_is_told_which_variable_to_set(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(scratch / "gone"))
    with pytest.raises(InvalidInput, match="set TMPDIR to a folder"), make_scratch_folder():
        pass
    GpuClaims()  # a slot without a GPU needs no such place


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_only_scratch_folders_of_killed_processes_are_removed(scratch: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        theirs = Path(process.stdout.readline().strip())
        (scratch / "spark_elastic-data").mkdir()
        with make_scratch_folder() as mine:
            remove_stale_folders()
            assert theirs.exists()
            process.send_signal(signal.SIGKILL)
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, and not collected yet
            remove_stale_folders()
            assert not theirs.exists()
            assert mine.exists()
    assert [path.name for path in scratch.iterdir()] == ["spark_elastic-data"]


def test_a_folder_of_an_earlier_process_with_the_same_id_is_removed(scratch: Path) -> None:
    with make_scratch_folder() as mine:
        boot, started, random = mine.name.rsplit("-", 2)
        earlier = scratch / f"{boot}-{int(started) - 1}-{random}"
        earlier.mkdir()
        remove_stale_folders()
        assert mine.exists()
        assert not earlier.exists()


def test_scratch_folders_of_other_machines_boots_and_namespaces_stay(scratch: Path) -> None:
    with make_scratch_folder() as mine:
        name = mine.name.replace(scratch_module._build_owner_prefix(), "spark_elastic-01234567-1")
    (scratch / name.replace(str(os.getpid()), "1")).mkdir()
    remove_stale_folders()
    assert len(list(scratch.iterdir())) == 1
