"""`WandbLogger` with the real package (`nox -s wandb`), offline: each point once, whichever rank writes."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from spark_elastic.integrations import loggers
from spark_elastic.integrations.loggers import WandbLogger
from spark_elastic.training.torch.callbacks import Training
from tests.leaks import SessionOwned

wandb = pytest.importorskip("wandb", reason="wandb is not installed: nox -s wandb")

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def threads_of_wandb(session_owned: SessionOwned) -> None:
    """Its telemetry has threads that live as long as the process."""
    session_owned.thread_modules.add("opentelemetry")


def _make_training(rank: int) -> Training:
    weight = torch.nn.Parameter(torch.zeros(1))
    return Training(torch.nn.Linear(1, 1), torch.optim.SGD([weight], lr=0.5), rank, 2)


def _steps(callback: WandbLogger, rank: int, *losses: float) -> None:
    for loss in losses:
        callback.on_step_end(_make_training(rank), {"epoch": 0, "step": 0, "loss": loss, "rows": 4})


def _read_history(folder: Path) -> tuple[str, list[dict[str, Any]]]:
    """The id of the one run whose offline files are there, and its rows."""
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    rows = []
    for data in _iter_records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({item.key or item.nested_key[0]: json.loads(item.value_json) for item in items})
    return path.stem.removeprefix("run-"), rows


def _iter_records(content: bytes) -> Iterator[bytes]:
    """The records of a file in the form of LevelDB's log: blocks of 32 KB, parts of records with a head of 7 bytes."""
    place, record = 7, b""  # behind the file's own head
    while place + 7 <= len(content):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def test_a_run_offline_has_every_point_once_whichever_rank_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loggers, "END_WAIT", 120.0)
    monkeypatch.setenv("WANDB_SILENT", "true")
    folders = [tmp_path / "leader", tmp_path / "follower"]
    for folder in folders:
        folder.mkdir()
    leader = WandbLogger("digits", every=2, mode="offline", dir=str(folders[0]))
    follower = pickle.loads(pickle.dumps(leader))
    follower._options["dir"] = str(folders[1])
    for callback, rank in ((leader, 0), (follower, 1)):
        callback.on_fit_begin(_make_training(rank))
        _steps(callback, rank, 1.0, 2.0, 3.0, 4.0)
    leader.on_fit_end(_make_training(0), [])
    _steps(follower, 0, 5.0, 6.0)
    follower.on_epoch_end(_make_training(0), {"epoch": 0, "loss": 3.5, "val_loss": 7.0})
    follower.on_fit_end(_make_training(0), [])
    wandb.teardown()
    (first, before), (second, after) = map(_read_history, folders)
    assert first == second == leader.key
    assert [(row["step"], row["step/loss"]) for row in before] == [(2, 2.0), (4, 4.0)]
    assert (after[0]["step"], after[0]["step/loss"]) == (6, 6.0)
    assert (after[1]["epoch"], after[1]["epoch/val_loss"]) == (0, 7.0)
    assert len(after) == 2


def test_a_failing_init_costs_one_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loggers, "END_WAIT", 120.0)
    callback = WandbLogger("digits", every=1, mode="no such mode")
    callback.on_fit_begin(_make_training(0))
    _steps(callback, 0, 1.0, 2.0)
    callback.on_fit_end(_make_training(0), [])
    (record,) = [record for record in caplog.records if record.name == "spark_elastic"]
    assert "W&B does not take the training's numbers" in record.getMessage()
