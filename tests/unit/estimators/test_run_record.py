"""What a run is bound to (R19): settings, the user's objects, its rows; and records of other releases."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from spark_elastic.data.manifest import Column, Manifest, RowGroup, RowGroups
from spark_elastic.errors import InvalidInput, StoreError
from spark_elastic.estimators import dataframe_rows
from spark_elastic.estimators.dataframe_rows import DataFrameRows
from spark_elastic.estimators.dataframes.materialize import compare_digests
from spark_elastic.estimators.dataframes.scan import MissingValues
from spark_elastic.estimators.elastic_estimator import check_run_ids
from spark_elastic.estimators.fit_rows import RunRecord, RunResult
from spark_elastic.estimators.fitting import _load_finished_run
from spark_elastic.estimators.validation import FitRequest
from spark_elastic.protocol.types import Fence, Phase, Position
from spark_elastic.runs.checkpoint import CheckpointStore
from spark_elastic.runs.identity import WEIGHTS
from tests.memory_store import make_memory_store
from tests.unit.estimators.requests import request as file_request

ROWS = Manifest((Column("x", "float32"),), ("a",), RowGroups.of([RowGroup(0, 0, 48, 9)]), "f", "c0-48-ab")
IDENTITY = {"model": "m", "loss": "l", WEIGHTS: "w"}


def request(identity: dict[str, str] | None = None, **values: Any) -> FitRequest:
    objects = SimpleNamespace(transformation=None, identity=lambda: IDENTITY | (identity or {}))
    return file_request(**{"objects": objects, "learning_rate": 0.1, "epochs": 2, **values})


def test_a_record_comes_back_as_it_was_and_agrees_with_its_request() -> None:
    store, made = make_memory_store(), RunRecord.create(request(input_shapes=((2, 2),)), "rows", ROWS, None)
    made.save(store, "r")
    loaded = RunRecord.load(store, "r")
    assert loaded is not None
    assert loaded == made
    loaded.check(request(input_shapes=((2, 2),)), "r")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", 0.2),
        ("gradient_clip_norm", 1.0),
        ("gradient_clip_value", 1.0),
        ("precision", "bf16"),
        ("gradient_compression", "fp16"),
        ("input_shapes", ((2, 2),)),
        ("label_shapes", ((1,),)),
        ("seed", 2),
        ("loss_scope", "step"),
    ],
)
def test_another_setting_is_named(name: str, value: Any) -> None:
    record = RunRecord.create(request(), "rows", ROWS, None)
    with pytest.raises(InvalidInput, match=f"run_id 'r' began with {name}=.*use another run_id"):
        record.check(request(**{name: value}), "r")


def test_another_model_and_other_initial_weights_are_refused_with_different_reasons(caplog: Any) -> None:
    record = RunRecord.create(request(), "rows", ROWS, None)
    with pytest.raises(InvalidInput, match="run_id 'r' began with another model than this fit's"):
        record.check(request({"model": "n", WEIGHTS: "v"}), "r")
    assert caplog.messages == []
    record.check(request({WEIGHTS: "v"}), "r")
    assert caplog.messages == ["run r keeps its own weights: this fit's model begins with others"]


@pytest.mark.parametrize("lacking", [{"settings": {"seed": 1}}, {"validation": {}}])
def test_p7_a_record_that_lacks_what_a_run_needs_is_damaged(lacking: dict[str, Any]) -> None:
    store, made = make_memory_store(), RunRecord.create(request(), "rows", ROWS, ROWS)
    made.save(store, "r")
    fields = json.loads(store.read_bytes("runs/r/run.json")) | lacking
    store.write_bytes("runs/r/run.json", json.dumps(fields).encode())
    with pytest.raises(StoreError, match=r"runs/r/run\.json in the store .* is damaged"):
        RunRecord.load(store, "r")


@pytest.mark.parametrize("fields", [{"format": 99, "new": 1}, {"format": 2}, {"data": ""}])
def test_a_run_record_of_another_format_is_refused(fields: dict[str, Any]) -> None:
    store = make_memory_store()
    store.write_bytes("runs/r/run.json", json.dumps(fields).encode())
    with pytest.raises(StoreError, match=f"has format {fields.get('format', 1)}, and this release reads 5"):
        RunRecord.load(store, "r")


def test_tables_are_distinguished_by_rows_and_values() -> None:
    assert compare_digests(48, "c0-48-ab", "48-ab") is None
    assert compare_digests(48, "c0-48-ab/__validation=false", "48-ab") is None
    assert compare_digests(48, "c0-48-ab", "48-cd") == "its rows have other values"
    assert compare_digests(48, "c0-48-ab", "36-cd") == "it had 48 rows and has 36"


@pytest.mark.parametrize("ended", [True, False])
def test_r19_another_table_is_refused_whether_the_run_has_ended_or_not(
    monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    store, asked = make_memory_store(), []

    def difference(df: Any, *others: Any) -> str | None:
        asked.append(df)
        return None if df == "mine" else "its rows have other values"

    monkeypatch.setattr(dataframe_rows, "find_difference", difference)
    wanted: Any = request(missing=MissingValues())
    RunRecord.create(wanted, "rows", ROWS, None).save(store, "r")
    if ended:
        RunResult("model.pt", "s", "d", 2, [], 48).save(store, "r")
    mine: Any = DataFrameRows("mine")  # type: ignore[arg-type]
    assert (_load_finished_run(mine, wanted, store, "r") is not None) == ended
    _load_finished_run(mine, wanted, store, "r")
    assert asked == ["mine"], "known to be the same, and asked again"
    with pytest.raises(InvalidInput, match=r"began with another table \(its rows have other values\): con"):
        _load_finished_run(DataFrameRows("fold 2"), wanted, store, "r")  # type: ignore[arg-type]


def test_r19_a_run_of_files_refuses_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_memory_store()
    RunRecord.create(request(), "s3://bucket/files", ROWS, None).save(store, "r")
    with pytest.raises(InvalidInput, match="began on the files in s3://bucket/files"):
        _load_finished_run(DataFrameRows(None), request(), store, "r")  # type: ignore[arg-type]


def test_r19_a_run_refuses_fewer_epochs_than_it_has_trained() -> None:
    """It would end with steps of an epoch that the fit did not ask for."""
    store = make_memory_store()
    RunRecord.create(request(), "rows", ROWS, None).save(store, "r")
    rows: Any = SimpleNamespace(check_same_rows=lambda *given: None)
    checkpoints = CheckpointStore(store, "r")
    checkpoints.publish(1, [checkpoints.write(Fence(1, 1), Position(2, Phase.TRAIN, 0), {})])
    for epochs in (2, 3):
        assert _load_finished_run(rows, request(epochs=epochs), store, "r") is None
    checkpoints.publish(1, [checkpoints.write(Fence(1, 2), Position(2, Phase.TRAIN, 1), {})])
    assert _load_finished_run(rows, request(epochs=3), store, "r") is None
    with pytest.raises(InvalidInput, match="run_id 'r' is in epoch 3 already and this fit wants 2 epochs"):
        _load_finished_run(rows, request(epochs=2), store, "r")


def test_several_fits_do_not_share_a_run() -> None:
    own: Any
    given: Any
    for own, given in (None, [None, None]), ("r", ["a", "b"]), (None, ["a", None]):
        check_run_ids(own, given)
    for own, given, name in ("r", [None], "r"), ("r", ["a", None], "r"), (None, ["a", "b", "b"], "b"):
        with pytest.raises(InvalidInput, match=f"run_id '{name}' names one run, and this would make several"):
            check_run_ids(own, given)
