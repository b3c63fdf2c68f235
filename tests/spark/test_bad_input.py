"""Bad input to an estimator: one sentence each, before any Spark job unless only the data itself can tell."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from spark_elastic.errors import ElasticError, InvalidInput
from spark_elastic.estimators.torch_estimator import ElasticTorchEstimator

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark


@pytest.fixture
def job_group(spark: SparkSession) -> Iterator[str]:
    """Jobs of this thread, and of threads that carry on its properties, belong to it."""
    name = uuid.uuid4().hex
    spark.sparkContext.setJobGroup(name, "bad input")
    yield name
    spark.sparkContext.setLocalProperty("spark.jobGroup.id", None)


def jobs(spark: SparkSession, group: str) -> list[int]:
    return list(spark.sparkContext.statusTracker().getJobIdsForGroup(group))


def table(spark: SparkSession, features: str = "array<float>", rows: Any = None) -> DataFrame:
    rows = [(i, [float(i), 1.0], "a", float(i)) for i in range(6)] if rows is None else rows
    return spark.createDataFrame(rows, f"id int, x {features}, s string, y float")


def estimator(store: Path | str, /, **changes: Any) -> ElasticTorchEstimator:
    model = torch.nn.Linear(2, 1)
    values: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss": torch.nn.MSELoss(),
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "num_workers": 2,
        "store": str(store),
        "verbose": 0,
    }
    return ElasticTorchEstimator(**(values | changes))


BEFORE: list[tuple[dict[str, Any], str]] = [
    ({"feature_cols": ["s"]}, "feature column 's' is string, which cannot be trained on"),  # of the table
    ({"batch_size": 0}, "batch_size must be a whole number of 1 or more; got 0"),  # of the parameters
    ({"model": torch.nn.Linear(2, 1)}, "the optimizer holds 2 of 2 parameters that are not the model's"),
    ({"store": None}, "store is missing: the executors of spark://"),
    ({"store": "/proc/store"}, "Cannot write .* in the store"),
]


@pytest.mark.parametrize(("changes", "sentence"), BEFORE, ids=[sentence[:40] for _, sentence in BEFORE])
def test_invalid_params_are_refused_before_any_spark_job(
    spark: SparkSession, job_group: str, tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ElasticError, match=sentence) as caught:
        estimator(tmp_path, **changes).fit(table(spark))
    assert is_one_sentence(caught.value)
    assert jobs(spark, job_group) == []
    assert list(tmp_path.iterdir()) == []


def test_arrays_of_different_lengths_are_named_with_row_and_lengths(
    spark: SparkSession, job_group: str, tmp_path: Path
) -> None:
    rows = [(i, [1.0] * (3 if i == 4 else 2), "a", float(i)) for i in range(6)]
    with pytest.raises(
        InvalidInput, match=r"column 'x' have different lengths, 2 and 3: the row with y="
    ) as caught:
        estimator(tmp_path).fit(table(spark, rows=rows))
    assert is_one_sentence(caught.value)
    # Only the data could tell: this is also what shows that the other tests would see a job.
    assert jobs(spark, job_group) != []


def test_a_model_of_the_wrong_width_is_refused_before_workers_start(
    spark: SparkSession, tmp_path: Path
) -> None:
    with pytest.raises(
        InvalidInput, match=r"two rows of the data, 'x' of .* with RuntimeError: mat1 and"
    ) as caught:
        estimator(
            tmp_path, model=torch.nn.Linear(3, 1), optimizer=lambda params: torch.optim.SGD(params, lr=0.1)
        ).fit(table(spark))
    assert is_one_sentence(caught.value)


def test_a_shape_that_does_not_fit_the_rows_is_refused_and_leaves_nothing_of_its_run_in_the_store(
    spark: SparkSession, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInput, match=r"input_shapes says \(3, 1\) .* 'x', whose rows have 2") as caught:
        estimator(tmp_path, input_shapes=[(3, 1)], run_id="mine").fit(table(spark))
    assert is_one_sentence(caught.value)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def is_one_sentence(error: ElasticError) -> bool:
    return "\n" not in str(error) and str(error).endswith(".")
