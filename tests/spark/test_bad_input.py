"""Bad input to an estimator: one sentence each, before any Spark job unless only the data itself can tell."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from pyspark.sql import functions as F

from spark_elastic.errors import ElasticError
from tests.spark.estimators import Net, estimator, table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


@pytest.fixture
def job_group(spark: SparkSession) -> Iterator[str]:
    """Jobs of this thread, and of threads that carry on its properties, belong to it."""
    name = uuid.uuid4().hex
    spark.sparkContext.setJobGroup(name, "bad input")
    yield name
    spark.sparkContext.setLocalProperty("spark.jobGroup.id", None)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


WIDE = {"model": torch.nn.Linear(3, 1).double(), "optimizer": sgd}
# (changes, sentence, whether only the data tells)
WRONG: list[tuple[dict[str, Any], str, bool]] = [
    (
        {"feature_cols": ["s"]},
        "feature column 's' is string, which cannot be trained on",
        False,
    ),  # of the table
    ({"batch_size": 0}, "batch_size must be a whole number of 1 or more; got 0", False),  # of the parameters
    ({"model": Net()}, "the optimizer holds 4 of 4 parameters that are not the model's", False),
    ({"store": None}, "store is missing: executors of spark://", False),
    ({"store": "/proc/store"}, "Cannot write .* in the store", False),
    ({"feature_cols": ["r"]}, "column 'r' have different lengths, 2 and 3: the row with y=", True),
    (WIDE, r"two rows of the data, 'x' of .* with RuntimeError: mat1 and", True),
    (
        {"input_shapes": [(3, 1)], "run_id": "mine"},
        r"input_shapes says \(3, 1\) .* 'x', whose rows have 2",
        True,
    ),
]


@pytest.mark.parametrize(
    ("changes", "sentence", "runs"), WRONG, ids=[sentence[:40] for _, sentence, _ in WRONG]
)
def test_what_is_wrong_is_one_sentence_and_leaves_nothing_in_the_store(
    spark: SparkSession, job_group: str, tmp_path: Path, changes: dict[str, Any], sentence: str, runs: bool
) -> None:
    df = table(spark).withColumns({"s": F.lit("a"), "r": F.expr("array_repeat(1.0, if(id = 4, 3, 2))")})
    with pytest.raises(ElasticError, match=sentence) as caught:
        estimator(tmp_path).setParams(**changes).fit(df)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")
    assert bool(spark.sparkContext.statusTracker().getJobIdsForGroup(job_group)) is runs
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
