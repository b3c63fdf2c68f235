"""TensorBoard and MLflow: every point once, whoever is rank 0, and one sentence where a package is missing."""

from __future__ import annotations

import pickle
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from spark_elastic.errors import InvalidInput
from spark_elastic.integrations import loggers
from spark_elastic.integrations.loggers import MLflowLogger, TensorBoardLogger
from spark_elastic.training.torch.callbacks import Callback, Training


def _make_training(rank: int) -> Training:
    weight = torch.nn.Parameter(torch.zeros(1))
    return Training(torch.nn.Linear(1, 1), torch.optim.SGD([weight], lr=0.5), rank, 2)


def _steps(callback: Callback, rank: int, *losses: float) -> None:
    for loss in losses:
        callback.on_step_end(_make_training(rank), {"epoch": 0, "step": 0, "loss": loss, "rows": 4})


def _play_loss_of_rank_0(leader: Callback, follower: Callback) -> None:
    """Both take part in four steps; the follower, rank 0 since, ends the epoch and the fit."""
    for callback, rank in ((leader, 0), (follower, 1)):
        callback.on_fit_begin(_make_training(rank))
        _steps(callback, rank, 1.0, 2.0, 3.0, 4.0)
    leader.on_fit_end(_make_training(1), [])  # so that what it wrote has arrived
    _steps(follower, 0, 5.0, 6.0)
    follower.on_epoch_end(_make_training(0), {"epoch": 0, "loss": 3.5, "val_loss": 7.0, "stopped": "no"})
    follower.on_fit_end(_make_training(0), [])


def _file_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where MLflow may write to a folder. Its first use in a process imports for seconds."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setattr(loggers, "END_WAIT", 60.0)


def test_tensorboard_has_every_point_once(tmp_path: Path) -> None:
    leader = TensorBoardLogger(str(tmp_path), every=2)
    follower = pickle.loads(pickle.dumps(leader))
    _play_loss_of_rank_0(leader, follower)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    points: dict[str, dict[int, float]] = {}
    for path in tmp_path.iterdir():
        events = EventAccumulator(str(path)).Reload()
        for tag in events.Tags()["scalars"]:
            points.setdefault(tag, {}).update({e.step: e.value for e in events.Scalars(tag)})
    assert points["step/loss"] == {2: 2.0, 4: 4.0, 6: 6.0}
    assert points["step/learning_rate"] == {2: 0.5, 4: 0.5, 6: 0.5}
    assert points["epoch/val_loss"] == {0: 7.0}
    assert "epoch/stopped" not in points


def _read_run(folder: Path) -> tuple[Any, list[tuple[int, float]]]:
    """The only run, and its losses by step."""
    import mlflow

    client = mlflow.MlflowClient(folder.as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert run.info.status == "FINISHED"
    return run, [
        (point.step, point.value) for point in client.get_metric_history(run.info.run_id, "step_loss")
    ]


@pytest.mark.filterwarnings("ignore::FutureWarning:mlflow.*")
def test_mlflow_has_one_run_whichever_rank_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _file_store(monkeypatch)
    leader = MLflowLogger(tmp_path.as_uri(), "digits", "first", every=2)
    follower = pickle.loads(pickle.dumps(leader))
    _play_loss_of_rank_0(leader, follower)
    run, losses = _read_run(tmp_path)
    assert run.info.run_name == "first"
    assert losses == [(2, 2.0), (4, 4.0), (6, 6.0)]
    assert run.data.metrics["epoch_val_loss"] == 7.0


def test_a_tracking_server_that_fails_costs_one_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loggers, "END_WAIT", 60.0)
    callback = MLflowLogger("ftp://nowhere", "digits", every=1)
    callback.on_fit_begin(_make_training(0))
    _steps(callback, 0, 1.0, 2.0)
    callback.on_fit_end(_make_training(0), [])
    (record,) = caplog.records
    assert "MLflow at ftp://nowhere does not take the training's numbers" in record.getMessage()


def test_a_tracking_server_that_does_not_answer_holds_up_no_step(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow's client tries for minutes, and the other ranks would take rank 0 for missing."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    monkeypatch.setattr(loggers, "END_WAIT", 0.1)
    before = set(threading.enumerate())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        callback = MLflowLogger(f"http://127.0.0.1:{silent.getsockname()[1]}", "digits", every=1)
        callback.on_fit_begin(_make_training(0))
        _steps(callback, 0, 1.0, 2.0)
        assert caplog.records == []
        callback.on_fit_end(_make_training(0), [])
        (record,) = caplog.records
        assert "no answer within 0.1 s of the training's end" in record.getMessage()
    for thread in set(threading.enumerate()) - before:  # the server hung up
        thread.join(30.0)


@pytest.mark.filterwarnings("ignore::FutureWarning:mlflow.*")
def test_a_slow_tracking_server_gets_every_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _file_store(monkeypatch)
    monkeypatch.setattr(loggers, "REQUEST", 64)  # of four numbers a step
    import mlflow

    log_batch, sizes, all_written = mlflow.MlflowClient.log_batch, list[int](), threading.Event()

    def log_slowly(client: Any, run: str, metrics: Any) -> None:
        assert all_written.wait(30.0)
        sizes.append(len(metrics))
        log_batch(client, run, metrics)

    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", log_slowly)
    callback = MLflowLogger(tmp_path.as_uri(), "digits", every=1)
    callback.on_fit_begin(_make_training(0))
    _steps(callback, 0, *range(100))
    all_written.set()
    callback.on_fit_end(_make_training(0), [])
    assert [loss for _, loss in _read_run(tmp_path)[1]] == list(range(100))
    assert max(sizes) == 64
    assert len(sizes) < 10, "each step had a request of its own"


@pytest.mark.parametrize(
    ("callback", "modules", "package"),
    [
        (TensorBoardLogger("logs"), ["torch.utils.tensorboard", "tensorboard"], "tensorboard"),
        (MLflowLogger("logs", "digits"), ["mlflow"], "mlflow-skinny"),
    ],
    ids=["tensorboard", "mlflow"],
)
def test_a_missing_package_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, callback: Any, modules: list[str], package: str
) -> None:
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InvalidInput, match=f"on every executor, needs {package} .*: pip install {package}"):
        callback.on_fit_begin(_make_training(1))
    with pytest.raises(InvalidInput, match="every must be"):
        type(callback)("x", *["y"] * (type(callback) is MLflowLogger), every=0)
