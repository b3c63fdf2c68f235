"""Where predictions run."""

from __future__ import annotations

import pytest

from spark_elastic.errors import InvalidInput
from spark_elastic.estimators.predictor import choose_gpu


@pytest.mark.parametrize(
    ("addresses", "visible", "number"),
    [
        ([], 0, None),
        ([], 2, None),  # Spark gave this task none
        (["1"], 0, None),
        (["1"], 4, 1),
        (["3"], 1, 0),  # the process sees its own alone
        (["GPU-5a1f"], 1, 0),
    ],
)
def test_a_task_uses_the_gpu_that_spark_assigned(
    addresses: list[str], visible: int, number: int | None
) -> None:
    assert choose_gpu(addresses, visible) == number


def test_an_assigned_gpu_that_is_not_visible_is_an_error() -> None:
    with pytest.raises(InvalidInput, match="Spark gave GPU '7' to this task, and CUDA shows 0, 1: let CUDA_"):
        choose_gpu(["7"], 2)


def test_names_of_visible_gpus_count_as_for_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,MIG-5a1f")
    assert [choose_gpu([address], 2) for address in ("2", "MIG-5a1f", "1")] == [0, 1, 1]
