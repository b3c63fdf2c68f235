"""The parts of a fit that need no Spark: where it keeps its files, and what bounds its job."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from spark_elastic.config import ElasticConfig
from spark_elastic.data.manifest import Column
from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidInput, PreflightError, StoreError
from spark_elastic.estimators import fitting, torch_estimator
from spark_elastic.estimators.fit_rows import RunResult
from spark_elastic.estimators.fitting import (
    FitRun,
    _open_store,
    check_replicas,
    make_fit_limits,
)
from spark_elastic.estimators.torch_estimator import TORCH
from spark_elastic.estimators.validation import FitRequest
from spark_elastic.protocol.types import Limits
from spark_elastic.runs.checkpoint import OwnedRun
from spark_elastic.training.torch.spec import TorchUserObjects
from tests.memory_store import make_memory_store
from tests.unit.estimators.requests import request

# Its programs are not run, nor is the model tried on rows.
UNTRIED: Any = dataclasses.replace(TORCH, build_program=lambda spec, objects: "program")


def test_without_a_store_a_fit_on_one_machine_has_a_folder_for_as_long_as_it_takes(tmp_path: Path) -> None:
    for master in ("local[2]", "local-cluster[3,1,1024]"):
        with _open_store(request(), master) as store:
            store.write_bytes("runs/x/model.pt", b"1")
            assert os.path.isdir(store.root)
        assert not os.path.exists(store.root)
    with pytest.raises(InvalidInput, match="store is missing: executors of yarn"):
        with _open_store(request(), "yarn"):
            pass
    with _open_store(request(store=str(tmp_path)), "yarn") as store:
        assert store.root == str(tmp_path)
    assert tmp_path.exists()


def test_every_setting_of_the_config_that_bounds_a_job_reaches_it() -> None:
    limited: dict[str, Any] = {"failure_budget": 4, "failure_window": 5.5, "cooldown_range": (8.5, 9.5)}
    limited |= {"gather_timeout": 1.5, "start_timeout": 2.5, "lease": 3.5, "driver_timeout": 7.5}
    config = ElasticConfig(**limited, reset_limit=6, idle_slot_timeout=10.5, checkpoints_kept=11)
    limits = make_fit_limits(request(elastic=config, num_workers=3, min_workers=2, max_workers=4), 24)
    for field in dataclasses.fields(Limits):
        if hasattr(config, field.name):
            assert getattr(limits, field.name) == getattr(config, field.name), field.name
    workers = limits.num_workers, limits.min_workers, limits.max_workers
    assert (*workers, limits.max_global_batch) == (3, 2, 4, 24)


@pytest.mark.parametrize(("workers", "scales", "lines"), [(2, False, 1), (2, True, 0), (1, False, 0)])
def test_an_unscaled_learning_rate_is_logged(capsys: Any, workers: int, scales: bool, lines: int) -> None:
    platform: Any = SimpleNamespace(launch=lambda order, progress: None)
    wanted = request(num_workers=workers, min_workers=1, max_workers=2, scale_lr=scales, epochs=1, verbose=1)
    plan: Any = SimpleNamespace(plan=SimpleNamespace(global_batch=8), features=())
    with fitting._show_progress(wanted) as shown:
        given = {"platform": platform, "request": wanted, "framework": UNTRIED, "listener": shown}
        training: Any = SimpleNamespace(run_id="r", modules=(), **given)
        FitRun.launch(training, plan, SimpleNamespace(run_id="r"))
    assert capsys.readouterr().err.count("the learning rate is not multiplied") == lines


@dataclasses.dataclass
class Rows:
    """Those of a run `r` of a store, let go of as a table's are."""

    order: list[str]

    def begin_run(self, wanted: FitRequest, store: Store, run: OwnedRun) -> Any:
        for name in ("rows/a", "run.json", "checkpoints/c"):
            store.write_bytes(f"runs/r/{name}", b"{}")
        remove = store.filesystem.rm_file
        store.filesystem.rm_file = lambda path: (self.note("remove ", path), remove(path))
        manifest = SimpleNamespace(rows=9)
        return SimpleNamespace(load_manifest=lambda: manifest, is_on_files=False, data="runs/r/rows")

    def open_data(self, store: Store, record: Any) -> Store:
        return store

    def note(self, what: str, path: str) -> None:
        self.order.append(what + path.split("/")[3])


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What becomes of the store, one after the other."""
    done: list[str] = []
    save = RunResult.save
    trained = '{"model": "m", "sha256": "s", "digest": "d", "history": []}'
    launched = SimpleNamespace(results=[trained], worlds=(), report=None)
    monkeypatch.setattr(FitRun, "build_spec", lambda *given: None)
    monkeypatch.setattr(FitRun, "launch", lambda *given: launched)
    monkeypatch.setattr(RunResult, "save", lambda *given: (done.append("result"), save(*given)))
    return done


FRAMEWORK = fitting.Framework((), (), ".pt", None)  # type: ignore[arg-type]


def train(rows: Rows, store: Store, transformation: Any = None) -> Any:
    objects = SimpleNamespace(transformation=transformation)
    wanted = request(store="memory://x", feature_cols=("x",), objects=objects)
    return FitRun(None, rows, wanted, FRAMEWORK, store, "r", None, None).run()  # type: ignore[arg-type]


def test_a_program_that_hosts_cannot_load_leaves_no_rows_that_were_written_meanwhile(
    order: list[str],
) -> None:
    store = make_memory_store()
    refuse = Mock(side_effect=PreflightError("host h cannot load"))
    wanted = request(store="memory://x", feature_cols=("x",), objects=SimpleNamespace(transformation=None))
    fit: Any = FitRun(None, Rows(order), wanted, FRAMEWORK, store, "r", None, None, (), refuse)  # type: ignore[arg-type]
    with pytest.raises(PreflightError, match="host h cannot load"):
        fit.run()
    assert "remove rows" in order
    assert not store.list("runs/r/rows")


def test_p7_checkpoints_stay_until_the_result_is_read(order: list[str]) -> None:
    store = make_memory_store()
    train(Rows(order), store)
    assert order == ["result", "remove rows", "remove checkpoints"]
    assert RunResult.load(store, "r") is not None


@pytest.mark.parametrize("error", [StoreError("the rows cannot be read here"), MemoryError()])
def test_the_sample_row_for_a_transformation_is_stored(
    order: list[str], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    assert train(Rows(order), make_memory_store()).sample is None
    monkeypatch.setattr(fitting, "read_sample_row", lambda data, manifest, columns: [f"a row's {columns[0]}"])
    assert train(Rows(order), make_memory_store(), dict).sample == ["a row's x"]
    monkeypatch.setattr(fitting, "read_sample_row", Mock(side_effect=error))
    assert train(Rows(order), make_memory_store(), dict).sample is None


def test_p7_a_store_that_refuses_deletes_costs_neither_result_nor_error(
    order: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    deny = Mock(side_effect=PermissionError("AccessDenied"))
    store = make_memory_store()
    store.filesystem.rm_file = deny
    train(Rows(order), store)
    assert RunResult.load(store, "r") is not None
    assert "Remove runs/r/rows by hand" in caplog.text
    assert "Remove runs/r/checkpoints and runs/r/commit-key by hand" in caplog.text
    store = make_memory_store()
    store.filesystem.rm_file = deny
    monkeypatch.setattr(FitRun, "launch", Mock(side_effect=ZeroDivisionError("of the training")))
    with pytest.raises(ZeroDivisionError, match="of the training"):
        train(Rows(order), store)


def test_p7_a_run_that_ends_while_another_fit_waits_in_its_preflight_is_not_trained_again(
    order: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = make_memory_store()
    ended = RunResult("runs/r/model", hashlib.sha256(b"w").hexdigest(), "d", 1, [], 9)
    manifest = SimpleNamespace(content="digest", column=lambda name: Column(name, "float32"))
    record = SimpleNamespace(check=lambda *given: None, load_manifest=lambda: manifest)

    class OtherDriverEndsIt:
        master = "yarn"

        def may_import_ahead(self, imports: tuple[str, ...]) -> bool:
            return False

        def preflight(self, *given: Any, loads: bool) -> None:
            logging.getLogger("spark_elastic.spark").info("what the preflight says")
            store.write_bytes(ended.model, b"w")
            ended.save(store, "r")

    @contextmanager
    def open_store(*given: Any) -> Iterator[Store]:
        yield store

    monkeypatch.setattr(fitting, "make_platform", lambda *given: OtherDriverEndsIt())
    monkeypatch.setattr(fitting, "_open_store", open_store)
    known = lambda store, run_id: record if store.exists("runs/r/result.json") else None  # noqa: E731
    monkeypatch.setattr(fitting.RunRecord, "load", known)
    checks = dict.fromkeys(("check", "check_same_rows"), lambda *given: None)
    rows: Any = SimpleNamespace(session=None, describe=lambda record: "version 3", **checks)
    wanted = request(run_id="r", epochs=1, num_workers=1, verbose=2)
    assert fitting.train_model(rows, wanted, FRAMEWORK).weights == b"w"
    assert order == ["result"], "it was trained again"
    assert "what the preflight says" in capsys.readouterr().err


def test_p4_replicas_with_different_weights_are_an_error(caplog: pytest.LogCaptureFixture) -> None:
    same: list[Any] = [{"digest": "a", "rank": 0}, None, {"digest": "a", "rank": 2}]
    assert check_replicas(same) == same[0]
    assert not caplog.records
    assert check_replicas([same[0], {"digest": "b", "rank": 1}]) == same[0]
    assert "ranks [1] came to differ" in caplog.text


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"losses": (threading.Lock(),)}, "loss"),
        ({"metrics": {"m": threading.Lock()}}, "metrics"),
        ({"callbacks": (threading.Lock(),)}, "callbacks"),
        ({"transformation": threading.Lock()}, "transformation_fn"),
    ],
)
def test_a_parameter_that_cannot_be_pickled_is_named_before_the_preflight(
    changes: dict[str, Any], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = torch.nn.Linear(1, 1)
    objects = TorchUserObjects(module, None, **{"losses": (torch.nn.MSELoss(),), **changes})
    rows: Any = SimpleNamespace(session=None, check=lambda *given: None)
    monkeypatch.setattr(fitting, "make_platform", lambda *given: SimpleNamespace(master="local"))
    wanted = request(objects=objects, store=str(tmp_path), num_workers=1, storage_options={})
    with pytest.raises(InvalidInput, match=rf"^the parameter {name} cannot be pickled \(.*lock.*: create su"):
        fitting.train_model(rows, wanted, FRAMEWORK)


def test_a_callback_that_watches_a_missing_metric_is_refused() -> None:
    rows: Any = SimpleNamespace(has_validation=lambda request: False)
    watched = ("loss", "val_loss")
    objects = TorchUserObjects(torch.nn.Linear(1, 1), None, (torch.nn.MSELoss(),), watched=watched)
    wanted = request(label_cols=("y",), objects=objects)
    with pytest.raises(InvalidInput, match="a callback watches 'val_loss', but nothing is validated"):
        torch_estimator.fit_torch(rows, wanted)
