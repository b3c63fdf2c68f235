"""What is said of a table while it is written."""

from __future__ import annotations

import logging

import pytest

from spark_elastic.spark.dataframes.materialize import warn_about_small_partitions


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
