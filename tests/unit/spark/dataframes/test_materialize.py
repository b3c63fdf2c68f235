"""What is said of a table while it is written."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import Any
from unittest.mock import MagicMock

import pytest

from spark_elastic.data.store import Store, StoreFull
from spark_elastic.errors import InvalidInput, StoreError
from spark_elastic.estimators.dataframes import materialize
from spark_elastic.estimators.dataframes.materialize import WriteOptions, _Target, warn_about_small_partitions


@pytest.mark.parametrize(
    ("rows", "partitions", "says"),
    [
        (10_000, 2000, ["the table has 2000 partitions, of 5 rows on average"]),
        (10_000, 100, []),  # three seconds
        (10_000_000, 2000, []),
    ],
)
def test_many_small_partitions_are_logged(
    rows: int, partitions: int, says: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "spark_elastic"):
        warn_about_small_partitions(rows, partitions)
    assert [message.partition(", and Spark")[0] for message in caplog.messages] == says


@pytest.mark.parametrize(
    ("causes", "raises", "says"),
    [
        # Of a local folder, as py4j gives it.
        (
            "org.apache.hadoop.fs.FSError: java.io.IOException: No space left on device",
            StoreFull,
            r"^Spark cannot write the rows to the store .* \(org.* No space left on device\): make room .*\.$",
        ),
        ("java.io.IOException: Disk quota exceeded", StoreFull, "Disk quota exceeded"),
        # Of tasks in Python.
        (
            "org.apache.spark.api.python.PythonException: Traceback:\n"
            "spark_elastic.data.store.StoreFull: Cannot write 'data/a' (No space left on device).",
            StoreFull,
            r"\(Cannot write 'data/a' \(No space left on device\)\): make room",
        ),
        (
            "org.apache.spark.api.python.PythonException: Traceback:\n"
            "ModuleNotFoundError: No module named 'spark_elastic'",
            InvalidInput,
            "install it there, or write them with row_order='table'",
        ),
        # A Python function of the user ended.
        (
            "org.apache.spark.api.python.PythonException: Traceback:\nOSError: No space left on device",
            ValueError,
            "^An error",
        ),
    ],
)
def test_spark_s_failure_for_lack_of_room_is_one_sentence(
    causes: str, raises: type[Exception], says: str
) -> None:
    rows: Any = MagicMock()
    rows.sparkSession.version = "4.0.0"
    writer = rows.write.options.return_value.mode.return_value
    writer.parquet.side_effect = ValueError(f"An error occurred.\n\tat x.Y\nCaused by: {causes}\n\tat x.Y")
    target = _Target(Store.open("memory://rows"), "data", "", WriteOptions())
    with pytest.raises(raises, match=says):
        target.write(rows, None)


def test_a_store_that_cannot_remove_what_was_written_does_not_hide_the_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise StoreError("Cannot delete 'data' in the store.")

    def write(*_: object) -> None:
        raise InvalidInput("The column 'x' has NaN.")

    monkeypatch.setattr(Store, "remove_tree", fail)
    monkeypatch.setattr(materialize, "_write", write)
    monkeypatch.setattr(materialize, "describe_jobs", lambda *_: nullcontext())
    target = _Target(Store.open("memory://rows"), "data", "", WriteOptions())
    with pytest.raises(InvalidInput, match="has NaN"):
        materialize._write_and_publish(MagicMock(), {}, target, [])
    assert caplog.messages == ["Cannot delete 'data' in the store. Remove it by hand."]
