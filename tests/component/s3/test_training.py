"""Rows, checkpoints and the trained model on a real S3 API: all workers are lost, and nothing durable is (P7)."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_elastic.data.store import Store
from spark_elastic.runs.checkpoint import CheckpointStore
from spark_elastic.runs.owned_run import OwnedRun
from tests.component.injected_faults import inject_faults, kill
from tests.component.torch.job import (
    RUN,
    Follower,
    LauncherFactory,
    difference,
    make_data,
    make_job,
    train_elastic,
    train_plain,
)
from tests.patience import until

pytestmark = [pytest.mark.native, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]


@pytest.mark.faults  # in every build tests/spark/test_hosts.py trains from a bucket; test_training_hooks.py loses all
def test_p7_all_workers_are_lost_and_training_continues_from_the_bucket(store: Store, tmp_path: Path) -> None:
    here, manifest = make_data(tmp_path)
    for name in ("rows/part.parquet", "manifest.json"):
        store.write_bytes(name, here.read_bytes(name))
    job = make_job()
    make = LauncherFactory()

    def inject_fault() -> None:
        until(lambda: any(each.position.epoch == 1 for each in CheckpointStore(store, RUN).read_published()))
        for slot in make.made.slots():
            kill(make.made, slot)

    ledger = tmp_path / "ledger"
    with inject_faults(tmp_path / "faults", {"epoch 1": inject_fault}):
        run = OwnedRun.acquire(store, RUN)
        ours, result = train_elastic(
            job, store, manifest, str(ledger), Follower(), make, run=run, keep_commits=False
        )
    assert any("continues from checkpoint" in world.reason for world in result.worlds)
    assert difference(ours, train_plain(job, here, manifest)) < 1e-9
    assert len(CheckpointStore(store, RUN).read_published()) == 3
