"""Which slots ask for a GPU of their own, and what is said where the cluster cannot give one."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("pyspark")

from spark_elastic.spark import settings
from spark_elastic.spark.settings import EXECUTOR_GPUS, TASK_GPUS, make_slot_profile, needs_whole_gpu


@pytest.mark.parametrize(
    ("executor", "task", "asked"),
    [(None, None, False), ("2", "1", False), ("2", "0.25", True), ("1", None, True), ("0", None, False)],
)
def test_a_slot_asks_for_a_gpu_if_tasks_get_none_or_a_part(
    executor: str | None, task: str | None, asked: bool
) -> None:
    conf = {EXECUTOR_GPUS: executor, TASK_GPUS: task}
    assert needs_whole_gpu({name: value for name, value in conf.items() if value is not None}) is asked


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
    assert make_slot_profile(conf, lambda profile: None) == "profile"  # type: ignore[comparison-overlap]
    assert make_slot_profile({}, refuse) is None
