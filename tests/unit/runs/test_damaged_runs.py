"""Whatever becomes of a store, a run in it is as it was, or as it was to be, or refused in one sentence (P7).

Documents are changed in one place after the other, to values of other kinds, names outside of the store and numbers
that would take all memory: whoever may write to a store may also change what it says. The power is cut, and the disk
is full, at every call of the kernel.
"""

from __future__ import annotations

import copy
import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spark_elastic.clock import SystemClock
from spark_elastic.clusters.run import attached
from spark_elastic.data.manifest import Column, Manifest, RowGroup, RowGroups
from spark_elastic.data.store import Store, list_entries
from spark_elastic.driver.run_board import RunBoard, Shown, encode_request, requests_folder, status_name
from spark_elastic.errors import ElasticError
from spark_elastic.estimators.fit_rows import RowRecord, RunRecord, RunResult
from spark_elastic.monitoring.report import JobReport
from spark_elastic.protocol.commands import End, JobOutcome
from spark_elastic.protocol.events import DrainRequested
from spark_elastic.protocol.types import Checkpoint, Fence, Phase, Position
from spark_elastic.rendezvous import codec
from spark_elastic.runs.checkpoint import CheckpointStore, OwnedRun
from tests.memory_store import make_memory_store
from tests.unit.runs.forgetful_disk import DiskFull, DiskRecorder, Loss

RUN, ROWS = "r", "runs/r/rows"
TEXTS = (b"", b"{", b"\xff", b"null", b"NaN", b"7" * 5000, b"[" * 100_000, b'{"a":' * 50_000)
VALUES: tuple[Any, ...] = (
    None, True, -1, 10**12, 10**400, 1.5, "", "x", "../../x", "/etc/passwd", "a\0b", [], {}, [[]], {"a": 1},
)  # fmt: skip


def write_checkpoint(run: OwnedRun, step: int) -> Checkpoint:
    parts = {"values": b"values %d" % step, "memory": b"memory %d" % step * 9}
    position = Position(0, Phase.TRAIN, step)
    return CheckpointStore(run.store, RUN).write(Fence(run.attempt, 1), position, parts)


def save_record(store: Store, folder: str, part: str) -> Manifest:
    """Of a run with the rows of that file, and their manifest."""
    columns, groups = (Column("x", "float32", (2,)),), RowGroups.of([RowGroup(0, 0, 5, 20)])
    manifest = Manifest(columns, (part,), groups, "from", "content")
    settings = {"seed": 1, "shuffle": True, "batch_size": 5, "backward_passes_per_step": 1}
    RunRecord(folder, RowRecord(manifest.to_json(), 5, 1), None, settings, {}).save(store, RUN)
    return manifest


class RunInStore:
    """A run with something of everything, and what reads it."""

    def __init__(self) -> None:
        self.store = make_memory_store()
        self.run = OwnedRun.acquire(self.store, RUN)
        self.run.load_commit_key()
        self.checkpoints = CheckpointStore(self.store, RUN)
        self.checkpoint = write_checkpoint(self.run, 1)
        self.run.publish_now((self.checkpoint,))
        save_record(self.store, "", "data/x/part").save(self.store, "data/manifest.json")
        RunResult("runs/r/model", "", "", 1, [{"loss": 1.0}], 5).save(self.store, RUN)
        self.posted: list[Any] = []
        end = End("it is over", JobOutcome.SUCCESS, ("{}",))
        shown = Shown({"stage": "ended"}, JobReport(), end, beat=1)
        self.store.write_bytes(status_name(RUN, 1), json.dumps(codec.to_plain(shown)).encode())
        self.request = f"{requests_folder(RUN)}/000001-x"
        self.store.write_bytes(self.request, encode_request(DrainRequested(0, "why", host="h")))

    def read_list(self) -> None:
        found = OwnedRun.acquire(self.store, RUN).checkpoints
        sorted(found, key=lambda each: (each.fence, each.position))
        if found:
            self.checkpoints.read_first_undamaged(found)

    def read_checkpoint(self) -> None:
        text = self.store.read_bytes(f"runs/r/checkpoints/{self.checkpoint.name}/manifest.json")
        self.checkpoints.read(replace(self.checkpoint, digest=hashlib.sha256(text).hexdigest()))

    def read_manifest(self) -> None:
        self.use(Manifest.load(self.store, "data/manifest.json"))

    def use(self, manifest: Manifest) -> None:
        manifest.max_decoded_group_bytes()
        for name in manifest.files:
            self.store.path(name)

    def read_record(self) -> None:
        record = RunRecord.load(self.store, RUN)
        if record is not None:
            self.use(record.load_manifest())
            record.load_validation()
        list_entries(self.store)

    def read_result(self) -> None:
        result = RunResult.load(self.store, RUN)
        assert result is not None
        self.store.exists(result.model)

    def attach(self) -> None:
        job = attached.AttachedJob(self.store, RUN, SystemClock())
        repr(job), job.status(), job.report, job.has_ended
        if job.has_ended:
            job.result()

    def read_requests(self) -> None:
        RunBoard(self.run, Shown, self.posted.append, SystemClock())._read_requests()
        assert not self.store.exists(self.request), "it would keep those behind it from being read"

    def read_key(self) -> None:
        assert len(self.run.load_commit_key()) == 32


def find_places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield place
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from find_places(each, (*place, key))


def spoil(value: Any) -> Iterator[bytes]:
    """The document with each place changed, removed or joined by another."""
    text = json.dumps(value).encode()
    yield from TEXTS
    yield from (text[:size] for size in range(0, len(text), max(1, len(text) // 40)))
    yield from (json.dumps(each).encode() for each in VALUES)
    for *path, last in filter(None, find_places(value)):
        for new in (*VALUES, "removed"):
            changed = copy.deepcopy(value)
            place = changed
            for key in path:
                place = place[key]
            if new == "removed":
                del place[last]
            else:
                place[last] = new
            yield json.dumps(changed).encode()


DOCUMENTS: dict[str, Callable[[RunInStore], None]] = {
    "runs/r/checkpoints/published-000001-00000001.json": RunInStore.read_list,
    "runs/r/checkpoints/{checkpoint}/manifest.json": RunInStore.read_checkpoint,
    "data/manifest.json": RunInStore.read_manifest,
    "runs/r/run.json": RunInStore.read_record,
    "runs/r/result.json": RunInStore.read_result,
    "runs/r/status/000001.json": RunInStore.attach,
    "runs/r/requests/000001-x": RunInStore.read_requests,
    "runs/r/commit-key": RunInStore.read_key,
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_p7_a_changed_document_is_read_or_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attached, "SILENT_AFTER", 0.0)
    # Whoever alters a manifest can make its hash right.
    monkeypatch.setattr(Manifest, "hash", "right")
    there = RunInStore()
    path = name.format(checkpoint=there.checkpoint.name)
    text = there.store.read_bytes(path)
    DOCUMENTS[name](there)
    changed = list(spoil(text.decode() if name.endswith("key") else json.loads(text)))
    assert len(changed) > 50
    for each in changed:
        there.store.write_bytes(path, each)
        try:
            DOCUMENTS[name](there)
        except ElasticError as error:
            said = str(error)
        except BaseException as error:
            raise AssertionError(f"{each[:300]!r} raises {error!r}") from error
        else:
            continue
        assert said.endswith((".", "once")), said
        assert "\n" not in said


def test_what_others_keep_among_checkpoints_stays_and_disturbs_nothing(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    run = OwnedRun.acquire(store, RUN)
    others = ["1st try/x", "0-old/x", "published-000009.json", "published-000001-x.json", "²/x"]
    for name in others:
        store.write_bytes(f"runs/r/checkpoints/{name}", b"")
    store.write_bytes("runs/r/attempts/²", b"")
    for step in (1, 2):
        new = write_checkpoint(run, step)
        run.publish_now((new,))
    assert OwnedRun.acquire(store, RUN).checkpoints == (new,)
    assert all(os.path.exists(tmp_path / "runs/r/checkpoints" / name) for name in others)
    assert len(store.list("runs/r/checkpoints")) == len(others) + 2  # the newest list and checkpoint


Acknowledge = Callable[[str, int], None]  # (what the run has now, a number)
Story = Callable[[Store, Acknowledge], None]


def publish_checkpoints(store: Store, acknowledge: Acknowledge) -> None:
    """Two drivers, one after the other."""
    step = 0
    for count in (2, 1):
        run = OwnedRun.acquire(store, RUN)
        acknowledge("attempt", run.attempt)
        run.load_commit_key()
        kept = run.checkpoints
        for _ in range(count):
            step += 1
            kept = (write_checkpoint(run, step), *kept)[:2]
            run.publish_now(kept)
            acknowledge("checkpoint", step)
    run.mark_ended()


def begin_fit(store: Store, acknowledge: Acknowledge) -> OwnedRun:
    run = OwnedRun.acquire(store, RUN)
    store.write_bytes(f"{ROWS}/part", b"rows")
    save_record(store, ROWS, f"{ROWS}/part")
    return run


def fit(store: Store, acknowledge: Acknowledge) -> None:
    run, model = begin_fit(store, acknowledge), b"model" * 9
    acknowledge("record", 1)
    run.publish_now((write_checkpoint(run, 1),))
    acknowledge("checkpoint", 1)
    name = f"runs/{RUN}/model-{run.attempt:06d}.pt"
    store.write_verified(name, model)
    run.mark_ended()
    RunResult(name, hashlib.sha256(model).hexdigest(), "", 1, [], 5).save(store, RUN)
    acknowledge("result", 1)
    run.delete_objects(ROWS, f"runs/{RUN}/checkpoints", run.commit_key_name)


def fit_in_vain(store: Store, acknowledge: Acknowledge) -> None:
    begin_fit(store, acknowledge).delete_run(ROWS)


def judge(store: Store, acknowledged: dict[str, int]) -> None:
    """Open the run as the next driver does, and continue."""
    run, record, result = OwnedRun.acquire(store, RUN), RunRecord.load(store, RUN), RunResult.load(store, RUN)
    assert run.attempt > acknowledged.get("attempt", 0)
    assert not store.find_partial()
    if result is not None:
        assert record is not None
        assert hashlib.sha256(store.read_bytes(result.model)).hexdigest() == result.sha256
        return
    assert "result" not in acknowledged
    assert record is not None or "record" not in acknowledged
    if record is not None:
        assert [store.read_bytes(name) for name in record.load_manifest().files] == [b"rows"]
    checkpoints = CheckpointStore(store, RUN)
    step = 0
    if run.checkpoints:
        found, parts = checkpoints.read_first_undamaged(run.checkpoints)
        step = found.position.step
        assert parts == {"values": b"values %d" % step, "memory": b"memory %d" % step * 9}
    assert step - acknowledged.get("checkpoint", 0) in (0, 1)
    assert len(run.load_commit_key()) == 32
    newest = write_checkpoint(run, 9)
    run.publish_now((newest, *run.checkpoints)[:2])
    assert OwnedRun.acquire(store, RUN).checkpoints[0] == newest


def refuse_links(*arguments: object, **options: object) -> None:
    raise OSError(errno.EPERM, "this mount has no links")


STORIES = [publish_checkpoints, fit, fit_in_vain]
SEEDS = pytest.mark.parametrize(
    "seeds", [1, pytest.param(20, marks=pytest.mark.faults)], ids=["a seed", "20 seeds"]
)


@SEEDS
@pytest.mark.parametrize(
    ("story", "links"), [*((story, True) for story in STORIES), (publish_checkpoints, False)]
)
def test_p7_a_power_cut_at_any_moment_leaves_the_old_or_the_new_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, story: Story, links: bool, seeds: int
) -> None:
    if not links:
        monkeypatch.setattr(os, "link", refuse_links)
    live = tmp_path / "live"
    live.mkdir()
    disk = DiskRecorder(live, monkeypatch)
    with disk.record():
        story(Store.open(live), disk.acknowledge)
    assert len(disk.moments) > 20
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # what follows suffers no power cut
    number = 0
    for moment in disk.moments:
        for loss in Loss:
            for seed in range(seeds if loss is Loss.SOME else 1):
                number += 1
                left = moment.leave(tmp_path / str(number), loss, seed)
                try:
                    judge(Store.open(left), moment.acknowledged)
                except (AssertionError, ElasticError, ValueError) as error:
                    raise AssertionError(
                        f"power cut after {moment.after}, which lost {loss.value}, seed {seed}: {error!r}"
                    ) from error


@pytest.mark.parametrize("story", STORIES)
def test_p7_a_disk_that_is_full_at_any_write_costs_what_was_to_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, story: Story
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    fails_at, is_full = 0, True
    while is_full:
        fails_at += 1
        live = tmp_path / str(fails_at)
        live.mkdir()
        acknowledged: dict[str, int] = {}
        said = "No space left on device"
        disk = DiskFull(live, fails_at)
        with disk.fill(monkeypatch):
            try:
                story(Store.open(live), acknowledged.__setitem__)
            except ElasticError as error:
                said = str(error)
        assert "No space left on device" in said
        assert "\n" not in said
        is_full = disk.calls >= fails_at
        judge(Store.open(live), acknowledged)
    assert fails_at > 10
