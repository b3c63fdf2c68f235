"""What a run has in a store: checkpoints, whole or not at all, with one holder (R10, R18), and a ledger (R2)."""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem

from spark_elastic.clock import SystemClock
from spark_elastic.data.store import Store
from spark_elastic.driver.run_board import RunBoard, Shown
from spark_elastic.errors import JobCancelled, StoreError
from spark_elastic.protocol.commands import PublishCheckpoint
from spark_elastic.protocol.events import DriverEvent
from spark_elastic.protocol.messages import CheckpointStoreFull, CheckpointWritten
from spark_elastic.protocol.types import Checkpoint, Fence, Phase, Position
from spark_elastic.runs import checkpoint
from spark_elastic.runs.checkpoint import (
    Checkpointer,
    CheckpointPolicy,
    CheckpointStore,
    OwnedRun,
    format_checkpoint_name,
)
from spark_elastic.runs.ledger import Ledger
from spark_elastic.runs.snapshot import PickleCodec, Snapshot
from tests.memory_store import make_memory_store
from tests.unit.protocol.driver_bench import Bench, name


@pytest.fixture(params=["folder", "objects"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return Store.open(str(tmp_path) if request.param == "folder" else f"memory://{uuid.uuid4().hex}")


def make_checkpointer(store: Store, told: list[Any], codec: PickleCodec | None = None) -> Checkpointer:
    return Checkpointer(store, CheckpointPolicy("r"), SystemClock(), codec or PickleCodec(), told.append)


def make_snapshot(step: int) -> Snapshot:
    return Snapshot(at(step), bytes(500), np.zeros(400, np.uint8))


def at(step: int) -> Position:
    return Position(1, Phase.TRAIN, step)


def write_checkpoint(store: Store, step: int, attempt: int = 1) -> Checkpoint:
    return CheckpointStore(store, "r").write(Fence(attempt, 2), at(step), {"a": b"%d" % step, "b": b"same"})


def test_r18_the_list_of_the_highest_attempt_counts(store: Store) -> None:
    run, old = CheckpointStore(store, "r"), write_checkpoint(store, 9)
    new = write_checkpoint(store, 3, attempt=2)
    run.publish(1, [old])
    assert run.read_published() == (old,)
    run.publish(2, [new, old])
    # By a driver that does not know yet that it lost the run.
    run.publish(1, [write_checkpoint(store, 10), old])
    assert run.read_published() == (new, old)


class Hadoop(LocalFileSystem):  # type: ignore[misc]
    """Does not rename onto a file, as HDFS."""

    protocol = "hdfs"
    dies = False

    def mv(self, path1: str, path2: str, **options: Any) -> None:
        if self.dies:
            raise KeyboardInterrupt
        super().mv(path1, path2, **options)


def test_r18_a_driver_that_dies_while_it_publishes_leaves_the_list_before(tmp_path: Path) -> None:
    hadoop = Hadoop(skip_instance_cache=True)
    store = Store("hdfs:///jobs", hadoop, str(tmp_path))
    run, first, second = OwnedRun.acquire(store, "r"), write_checkpoint(store, 1), write_checkpoint(store, 2)
    run.publish_now((first,))
    hadoop.dies = True
    with pytest.raises(KeyboardInterrupt):
        run.publish_now((second, first))
    hadoop.dies = False
    run = OwnedRun.acquire(store, "r")
    assert run.checkpoints == (first,)
    third = write_checkpoint(store, 3, run.attempt)
    for step in range(2):
        run.publish_now((third, first)[step:])
    assert CheckpointStore(store, "r").read_published() == (first,)
    assert [name for name in store.list("runs/r/checkpoints") if "published-000002" in name] == [
        "runs/r/checkpoints/published-000002-00000002.json"
    ]


def test_r18_a_list_replaced_while_it_is_read_gives_way(caplog: pytest.LogCaptureFixture) -> None:
    store = make_memory_store()
    run, first, second = OwnedRun.acquire(store, "r"), write_checkpoint(store, 1), write_checkpoint(store, 2)
    run.publish_now((first,))
    read, later = store.filesystem.cat_file, [(second, first)]

    def publish_and_read(path: str, **options: Any) -> Any:
        if later:
            run.publish_now(later.pop())
        return read(path, **options)

    store.filesystem.cat_file = publish_and_read
    assert CheckpointStore(store, "r").read_published() == (second, first)
    assert not caplog.records


DAMAGES = {
    "altered": ("a", b"3"),
    "part gone": ("b", None),
    "manifest gone": ("manifest.json", None),
    "torn": ("manifest.json", b'{"parts": {"a"'),
}


@pytest.mark.parametrize(("name", "content"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_gives_way(
    store: Store, name: str, content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    run, older, newer = CheckpointStore(store, "r"), write_checkpoint(store, 1), write_checkpoint(store, 2)
    path = f"runs/r/checkpoints/{newer.name}/{name}"
    store.delete(path) if content is None else store.write_bytes(path, content)
    with caplog.at_level(logging.WARNING, "spark_elastic"):
        found, parts = run.read_first_undamaged([newer, older])
    assert (found, parts["a"]) == (older, b"1")
    assert f"checkpoint {newer.name} is damaged" in caplog.text
    store.write_bytes(f"runs/r/checkpoints/{older.name}/a", b"x")
    with pytest.raises(StoreError, match="is whole"):
        run.read_first_undamaged([newer, older])


def test_r10_each_driver_takes_an_attempt_of_its_own(store: Store) -> None:
    with ThreadPoolExecutor(4) as pool:
        taken = pool.map(lambda _: checkpoint.acquire_attempt(store, "r"), range(4))
    assert sorted(taken) == [1, 2, 3, 4]
    assert checkpoint.find_highest_attempt(store, "r") == 4
    assert checkpoint.find_highest_attempt(store, "another") == 0


@pytest.mark.parametrize("lost", ["000002", "*"])
def test_r10_an_attempt_that_a_power_cut_has_lost_is_not_taken_again(store: Store, lost: str) -> None:
    """The checkpoints of the next attempt would be taken for older ones than those that it resumes from."""
    OwnedRun.acquire(store, "r")
    run = OwnedRun.acquire(store, "r")
    run.publish_now((write_checkpoint(store, 1, attempt=2),))
    for attempt in store.list("runs/r/attempts"):
        if lost == "*" or attempt.endswith(lost):
            store.delete(attempt)
    assert OwnedRun.acquire(store, "r").attempt == 3
    unpublished = write_checkpoint(store, 2, attempt=7)
    store.remove_tree("runs/r/attempts")
    assert OwnedRun.acquire(store, "r").attempt == unpublished.fence.attempt + 1


def acquire_run(store: Store) -> OwnedRun:
    for each in ("run.json", "rows/a"):
        store.write_bytes(f"runs/r/{each}", b"{}")
    return OwnedRun.acquire(store, "r")


def test_r18_only_the_holder_removes_a_run_without_checkpoints(store: Store) -> None:
    first, second = acquire_run(store), acquire_run(store)
    first.delete_run("runs/r/rows")
    first.delete_objects("runs/r/rows")
    assert checkpoint.find_highest_attempt(store, "r") == 2
    assert store.exists("runs/r/run.json")
    assert store.exists("runs/r/rows/a")
    second.delete_run("runs/r/rows")
    assert checkpoint.find_highest_attempt(store, "r") == 0
    assert not store.find("runs/r")
    assert store.list("runs") == []


def test_a_run_whose_files_cannot_be_deleted_keeps_its_record(caplog: pytest.LogCaptureFixture) -> None:
    store = make_memory_store()
    run = acquire_run(store)

    def deny(path: str) -> None:
        raise PermissionError("AccessDenied")

    store.filesystem.rm_file = deny
    run.delete_run("runs/r/rows")
    assert store.exists("runs/r/rows/a")
    assert "AccessDenied" in caplog.text
    left = "runs/r/run.json and runs/r/rows and runs/r/commit-key and runs/r/attempts"
    assert f"Remove {left} by hand" in caplog.text


def test_the_next_driver_of_a_run_removes_files_of_a_killed_writer(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path))
    acquire_run(store)
    for run in ("r", "another"):
        (tmp_path / "runs" / run).mkdir(exist_ok=True)
        (tmp_path / "runs" / run / f".part-{'0a' * 16}").write_bytes(b"half a model")
    acquire_run(store)
    assert [path.parent.name for path in tmp_path.rglob(".part-*")] == ["another"]


def test_the_holder_publishes_and_deletes(store: Store) -> None:
    run = OwnedRun.acquire(store, "r")
    lost: list[DriverEvent] = []
    first, second = write_checkpoint(store, 1), write_checkpoint(store, 2)
    with RunBoard(run, Shown, lost.append, SystemClock()) as board:
        board.publish((first,))
        board.publish((second,))
    assert not lost
    assert OwnedRun.acquire(store, "r").checkpoints == (second,)
    with pytest.raises(StoreError):
        CheckpointStore(store, "r").read(first)


def test_an_unpublished_checkpoint_is_deleted_once_a_newer_one_counts(store: Store) -> None:
    """What a dead attempt left, what was superseded before it was told; not what may be about to be told."""
    left, old = write_checkpoint(store, 9), write_checkpoint(store, 3)
    CheckpointStore(store, "r").publish(1, [old])
    checkpoint.acquire_attempt(store, "r")
    run = OwnedRun.acquire(store, "r")
    late, new, next_one = (write_checkpoint(store, step, run.attempt) for step in (4, 5, 6))
    store.write_bytes(f"runs/r/checkpoints/{late.name[:-1]}3/a", b"half")
    run.publish_now((new, old))
    there = {name.rpartition("/")[2] for name in store.list("runs/r/checkpoints")}
    lists = {"published-000001-00000001.json", f"published-{run.attempt:06d}-00000001.json"}
    assert there == {old.name, new.name, next_one.name, *lists}
    assert left.name not in there


def test_r15_a_result_that_cannot_be_read_back_is_not_reported() -> None:
    """An object store answered that it had written."""
    store = make_memory_store()
    pipe = store.filesystem.pipe_file
    store.filesystem.pipe_file = lambda path, data, **more: pipe(path, data[:-1], **more)
    with pytest.raises(StoreError):
        write_checkpoint(store, 1)


def test_r10_a_driver_that_lost_the_run_publishes_nothing_and_names_the_holder(store: Store) -> None:
    old = OwnedRun.acquire(store, "r")
    lost: list[Any] = []
    assert OwnedRun.acquire(store, "r").attempt == 2
    with RunBoard(old, Shown, lost.append, SystemClock()) as board:
        board.publish((write_checkpoint(store, 1),))
    by = f"attempt 2, process {os.getpid()} on {socket.gethostname()}"
    (cancelled,) = lost
    assert cancelled.reason == f"run 'r' was taken over by another driver ({by}; this one is attempt 1)"
    assert CheckpointStore(store, "r").read_published() == ()


def test_a_run_that_somebody_removed_is_not_said_to_be_another_drivers(store: Store) -> None:
    run = OwnedRun.acquire(store, "r")
    store.remove_tree("runs/r")
    said = r"run 'r' was removed from the store .* while this driver trained it"
    with pytest.raises(JobCancelled, match=said):
        run.check()


@pytest.mark.parametrize("fails", [False, True])
def test_a_newer_checkpoint_is_preferred(store: Store, fails: bool, caplog: pytest.LogCaptureFixture) -> None:
    told: list[Checkpoint] = []
    free, busy = threading.Event(), threading.Event()

    class SlowCodec(PickleCodec):
        def dumps(self, values: Any) -> bytes:
            if not busy.is_set():
                busy.set()
                assert free.wait(20.0)
                if fails:
                    raise MemoryError("no room for the bytes")
            return super().dumps(values)

    checkpointer = make_checkpointer(store, told, SlowCodec())
    with caplog.at_level(logging.ERROR, "spark_elastic"):
        checkpointer.offer(Fence(1, 2), make_snapshot(1))
        assert busy.wait(20.0)
        for step in (2, 3):
            checkpointer.offer(Fence(1, 2), make_snapshot(step))
        free.set()
        checkpointer.close()
    assert [checkpoint.position.step for checkpoint in told] == ([3] if fails else [1, 3])
    assert ("no room for the bytes" in caplog.text) is fails


def test_a_full_store_keeps_checkpointing_the_oldest_gives_way(caplog: pytest.LogCaptureFixture) -> None:
    """The store has room for three checkpoints. Three are kept, so a fourth needs the room of one of them."""
    store, bench = make_memory_store(), Bench(checkpoints_kept=3)
    bench.start(1, 2, 3, 4)
    limit_room(store, 5000)  # and for two lists
    run = OwnedRun.acquire(store, "r")
    told: list[Checkpoint | None] = []
    with caplog.at_level(logging.WARNING, "spark_elastic"):
        checkpointer = make_checkpointer(store, told)
        for step in range(1, 12):
            checkpointer.offer(Fence(1, 1), make_snapshot(step))
            checkpointer.flush()
            answer, full = told[-1], CheckpointStoreFull(name(1), told.count(None))
            for command in bench.on(full if answer is None else CheckpointWritten(name(1), answer)):
                assert isinstance(command, PublishCheckpoint)
                run.publish_now(command.checkpoints)
        checkpointer.close()
    published = CheckpointStore(store, "r").read_published()
    assert [each.position.step for each in published] == [11, 10]
    assert all(CheckpointStore(store, "r").read(each) for each in published)
    assert told.count(None) == 1
    refused, again = (record.getMessage() for record in caplog.records)
    assert refused.startswith("checkpoint at epoch 2, train, step 4 not written: Cannot write ")
    assert "No space left" in refused
    assert refused.endswith("The driver deletes the oldest checkpoint to make room, but never the newest.")
    assert again == "checkpoints are written again, after 1 that failed."


def test_a_full_store_is_one_warning_and_no_half_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    store = make_memory_store()
    limit_room(store, 700)
    told: list[Checkpoint | None] = []
    checkpointer = make_checkpointer(store, told)
    with caplog.at_level(logging.WARNING, "spark_elastic"):
        for step in range(5):
            checkpointer.offer(Fence(1, 1), make_snapshot(step))
            checkpointer.flush()
        checkpointer.close()
    assert told == [None] * 5
    assert len(caplog.records) == 1
    assert not store.find("runs/r")


def test_on_a_full_store_the_list_is_written_once_the_oldest_checkpoint_is_deleted() -> None:
    store = make_memory_store()
    run = OwnedRun.acquire(store, "r")
    old = CheckpointStore(store, "r").write(Fence(1, 2), at(1), {"a": bytes(1000)})
    newer = write_checkpoint(store, 2)
    run.publish_now((newer, old))
    limit_room(store, sum(each.bytes for each in store.find()))
    longer = f"{format_checkpoint_name(newer.fence, at(3))}-a-longer-name"
    newest = replace(newer, position=at(3), name=longer)
    run.publish_now((newest, newer))
    assert CheckpointStore(store, "r").read_published() == (newest, newer)
    with pytest.raises(StoreError):
        CheckpointStore(store, "r").read(old)


def limit_room(store: Store, room: int) -> None:
    """Have a store in memory refuse what exceeds so many bytes."""
    pipe = store.filesystem.pipe_file

    def pipe_within_room(path: str, data: bytes, **more: object) -> None:
        used = sum(each.bytes for each in store.find() if each.name != path.lstrip("/"))
        if used + len(data) > room:
            raise OSError(errno.ENOSPC, "No space left on device", path)
        pipe(path, data, **more)

    store.filesystem.pipe_file = pipe_within_room


def test_r02_lines_are_written_before_the_call_returns(tmp_path: Path) -> None:
    ledger = Ledger(Store.open("memory://ledgers"), str(tmp_path / "made"))
    here = Position(2, Phase.TRAIN, 5)
    (path,) = (tmp_path / "made").iterdir()
    ledger.write_ahead((2, 3), here, np.array([7, 9]))
    contributes = json.loads(path.read_text())
    assert contributes["event"] == "contributes"
    assert (contributes["attempt"], contributes["generation"]) == (2, 3)
    assert (contributes["epoch"], contributes["step"]) == (2, 5)
    assert contributes["rows"] == [7, 9]
    ledger.record_applied((2, 3), here, 4)
    applied = json.loads(path.read_text().splitlines()[1])
    assert (applied["event"], applied["world"]) == ("applied", 4)
    ledger.close()


def test_r02_a_store_without_appends_gets_an_object_for_each_step() -> None:
    store, fence = Store.open("memory://ledgers"), (1, 1)
    ledger = Ledger(store, "runs/r/ledger")
    for step in range(2):
        ledger.write_ahead(fence, Position(0, Phase.TRAIN, step), np.array([step]))
        ledger.record_applied(fence, Position(0, Phase.TRAIN, step), 4)
    written = [[json.loads(line)["event"] for line in text.splitlines()] for text in objects(store)]
    assert written == [["contributes"], ["applied", "contributes"]], "what follows may wait for the next step"
    ledger.close()
    assert [json.loads(line)["step"] for text in objects(store) for line in text.splitlines()] == [0, 0, 1, 1]


def objects(store: Store) -> list[str]:
    return [store.read_bytes(name).decode() for name in store.list("runs/r/ledger")]
