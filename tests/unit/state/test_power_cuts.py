"""Power cuts and full disks at every call of the kernel: a run in a local store is as it was, or as it was to be."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from spark_elastic.data.manifest import Column, Manifest, RowGroup, RowGroups
from spark_elastic.data.store import Store
from spark_elastic.errors import ElasticError
from spark_elastic.estimators.fit_rows import RowRecord, RunRecord, RunResult
from spark_elastic.protocol.types import Checkpoint, Fence, Phase, Position
from spark_elastic.runs.checkpoint import CheckpointStore
from spark_elastic.runs.owned_run import OwnedRun
from tests.unit.state.forgetful_disk import DiskFull, DiskRecorder, Loss

RUN, ROWS = "r", "runs/r/rows"
Acknowledge = Callable[[str, int], None]  # (what the run has now, a number)
Story = Callable[[Store, Acknowledge], None]


def write_checkpoint(run: OwnedRun, step: int) -> Checkpoint:
    parts = {"values": b"values %d" % step, "memory": b"memory %d" % step * 9}
    position = Position(0, Phase.TRAIN, step)
    return CheckpointStore(run.store, RUN).write(Fence(run.attempt, 1), position, parts)


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
    columns = (Column("x", "float32"),)
    manifest = Manifest(columns, (f"{ROWS}/part",), RowGroups.of([RowGroup(0, 0, 5, 20)]), "from", "content")
    settings = {"seed": 1, "shuffle": True, "batch_size": 5, "backward_passes_per_step": 1}
    RunRecord(ROWS, RowRecord(manifest.to_json(), 5, 1), None, settings, {}).save(store, RUN)
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
