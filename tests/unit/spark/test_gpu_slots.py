"""Which slots ask for a GPU of their own, and what is said where the cluster cannot give one."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("pyspark")

from spark_elastic.clusters.spark import settings
from spark_elastic.clusters.spark.settings import (
    EXECUTOR_GPUS,
    TASK_GPUS,
    choose_gpus_of_slot,
    make_slot_profile,
)


@pytest.mark.parametrize(
    ("executor", "task", "device", "sharing", "asked"),
    [
        (None, None, "auto", 1, None),
        ("2", "1", "auto", 1, None),
        ("2", "2", "cuda", 1, None),
        ("2", "0.25", "auto", 1, 1.0),
        ("1", None, "cuda", 1, 1.0),
        ("0", None, "auto", 1, None),
        ("2", "1", "auto", 2, 0.5),
        ("2", "0.5", "auto", 2, None),
        ("2", "1", "cpu", 1, 0.0),
        ("2", None, "cpu", 1, None),
    ],
)
def test_a_slot_asks_for_the_gpus_that_spark_would_not_give_it(
    executor: str | None, task: str | None, device: str, sharing: int, asked: float | None
) -> None:
    conf = {EXECUTOR_GPUS: executor, TASK_GPUS: task}
    given = {name: value for name, value in conf.items() if value is not None}
    assert choose_gpus_of_slot(given, device, sharing) == asked


def test_a_cluster_without_resource_profiles_is_logged_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Builder:
        build = "profile"

        def require(self, requests: Any) -> Builder:
            assert requests.requests["gpu"].amount == 1
            assert requests.requests["cpus"].amount == 2
            return self

    class Requests:
        def __init__(self) -> None:
            self.requests: dict[str, Any] = {}

        def cpus(self, amount: int) -> Requests:
            return self.resource("cpus", amount)

        def resource(self, name: str, amount: int) -> Requests:
            self.requests[name] = type("Request", (), {"amount": amount})
            return self

    monkeypatch.setattr(settings, "ResourceProfileBuilder", Builder)
    monkeypatch.setattr(settings, "TaskResourceRequests", Requests)

    def refuse(profile: Any) -> None:
        raise RuntimeError(
            "An error occurred\nSparkException: TaskResourceProfiles are only supported for X."
        )

    conf = {EXECUTOR_GPUS: "1", "spark.task.cpus": "2"}
    assert make_slot_profile(conf, refuse) is None
    assert "no stage-level resources (SparkException: TaskResourceProfiles are only supported" in caplog.text
    assert f"set {TASK_GPUS}=1" in caplog.text
    assert "leaves idle" not in caplog.text
    assert make_slot_profile(conf, lambda profile: None) == "profile"  # type: ignore[comparison-overlap]
    assert make_slot_profile({}, refuse) is None
    assert f"unset {TASK_GPUS}" not in caplog.text
    assert make_slot_profile(conf | {TASK_GPUS: "1"}, refuse, device="cpu") is None
    assert f"unset {TASK_GPUS}" in caplog.text
    assert "executors have GPUs, which this job leaves idle" in caplog.text
