"""Settings of Spark: which harm a job, what memory there is for its workers, and which slots ask for a GPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from spark_elastic.clusters.spark import settings
from spark_elastic.clusters.spark.settings import (
    EXECUTOR_GPUS,
    TASK_GPUS,
    ExecutorMemory,
    choose_gpus_of_slot,
    explain_shortage,
    find_harmful_settings,
    make_slot_profile,
    parse_size,
    read_executor_memory,
    warn_about_settings,
)
from spark_elastic.data.available_memory import read_cgroup_limit

ENCRYPTED, YARN = {"spark.network.crypto.enabled": "true"}, {"spark.master": "yarn"}
STANDALONE = {"spark.master": "spark://host:7077", "spark.driver.host": "10.0.0.7"}


@pytest.mark.parametrize(
    ("settings", "server", "says"),
    [
        (YARN | ENCRYPTED, None, ["set spark.executor.maxNumFailures to 1000"]),
        ({"spark.master": "k8s://https://c:443"} | ENCRYPTED, None, ["executor.maxNumFailures to 1000"]),
        (YARN | {"spark.executor.maxNumFailures": "4"} | ENCRYPTED, None, ["failure of 4 executors"]),
        ({"spark.executor.pyspark.memory": "1g"}, None, ["spark.executor.memoryOverhead"]),
        (STANDALONE, None, ["spark.network.crypto.enabled=true"]),
        (STANDALONE | {"spark.network.crypto.enabled": "false"}, None, ["spark.network.crypto.enabled=true"]),
        (STANDALONE | {"spark.ssl.rpc.enabled": "false"}, None, ["spark.network.crypto.enabled=true"]),
        (ENCRYPTED, "10.0.0.7", ["the Spark Connect server 10.0.0.7 in the clear", "use_ssl=true"]),
        (STANDALONE | ENCRYPTED, None, []),
        (STANDALONE | {"spark.ssl.rpc.enabled": "true"}, None, []),
        (STANDALONE | {"spark.driver.host": "127.0.0.1"}, None, []),
        *((ENCRYPTED, host, []) for host in ("localhost", "127.0.0.1", "[::1]", None)),
        ({"spark.master": "local[2]"}, None, []),
        (YARN | {"spark.executor.maxNumFailures": "1000"} | ENCRYPTED, None, []),
        (YARN | {"spark.executor.failuresValidityInterval": "10m"} | ENCRYPTED, None, []),
    ],
)
def test_settings_that_harm_are_found(settings: dict[str, str], server: str | None, says: list[str]) -> None:
    found = find_harmful_settings(settings, server)
    assert len(found) == bool(says)
    assert all(words in found[0] for words in says)


def test_each_harmful_setting_is_logged_once_per_application(caplog: pytest.LogCaptureFixture) -> None:
    class Application:
        """Keeps what it was told."""

    first = Application()
    for application in (first, first, Application()):
        warn_about_settings(STANDALONE, application)
    assert len(caplog.records) == 2


G = 1 << 30
M = 1 << 20


def test_sizes_in_sparks_notation_are_parsed() -> None:
    sizes = {"1g": G, "512m": G // 2, "2048": 2 * G, "1gb": G, "64k": 64 << 10, "7b": 7}
    assert {text: parse_size(text) for text in sizes} == sizes


def test_overhead_counts_only_if_the_cluster_manager_limits_it() -> None:
    settings = {"spark.executor.memory": "8g", "spark.executor.cores": "4", "spark.task.cpus": "2"}
    for said, overhead in (
        ({"spark.master": "spark://host:1"}, None),
        ({"spark.master": "yarn"}, int(8 * G * 0.1)),
        ({"spark.master": "k8s://x", "spark.executor.memoryOverhead": "3g"}, 3 * G),
    ):
        assert read_executor_memory(settings | said) == ExecutorMemory(8 * G, overhead, 2)


@pytest.mark.parametrize(
    ("given", "overhead"),
    [
        ({}, 0.1),
        ({"spark.kubernetes.memoryOverheadFactor": "1.0"}, 1.0),
        ({"spark.kubernetes.memoryOverheadFactor": "1.0", "spark.executor.memoryOverheadFactor": "0.5"}, 0.5),
    ],
)
def test_the_overhead_of_pods_is_what_spark_gives_them(given: dict[str, str], overhead: float) -> None:
    settings = {"spark.executor.memory": "8g", "spark.master": "k8s://https://cluster:443", **given}
    assert read_executor_memory(settings).overhead == int(8 * G * overhead)


@pytest.mark.parametrize(
    ("memory", "used", "address_space", "limits", "says"),
    [
        (ExecutorMemory(G, 384 * M, 1), 800 * M, M, (None, None), "spark.executor.memoryOverhead to 1200m"),
        (ExecutorMemory(G, 800 * M, 1), 800 * M, M, (None, None), None),
        (ExecutorMemory(G, None, 2), 800 * M, M, (None, G + 500 * M), "500m beside its JVM"),
        (ExecutorMemory(G, None, 2), 800 * M, M, (None, 4 * G), None),
        (ExecutorMemory(G, None, 1), M, 900 * M, (G, None), "spark.executor.pyspark.memory"),
        (ExecutorMemory(G, None, 1), M, 700 * M, (G, None), None),
    ],
)
def test_a_memory_shortage_names_the_setting_and_an_amount(
    memory: ExecutorMemory, used: int, address_space: int, limits: tuple[int | None, ...], says: str | None
) -> None:
    """Of the manager's grant, of the container, and of the address space."""
    said = explain_shortage(memory, used, address_space, *limits)
    assert said is None if says is None else said is not None and says in said
    assert said is None or used != 800 * M or "800m" in said


def test_memory_is_measured_for_running_processes_only() -> None:
    assert ExecutorMemory(0, 1, 1).find_shortage(os.getpid()) is not None
    assert ExecutorMemory(0, 1 << 50, 1).find_shortage(os.getpid()) is None or read_cgroup_limit() is not None
    assert ExecutorMemory(0, 1, 1).find_shortage(2**22 + 1) is None


def test_shared_memory_counts_once_and_a_spare_counts_separately(tmp_path: Path) -> None:
    for pid, share in (("7", 900), ("8", 100), ("9", 50)):
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "statm").write_text("5000 4000 3000 1 0 2 0\n")
        (tmp_path / pid / "smaps_rollup").write_text(
            f"10-20 ---p 00000000 00:00 0 [rollup]\nRss: 2000000 kB\nPss: {share * 1024} kB\nPss_Dirty: 7 kB\n"
        )
    for pids, taken in (((7,), "3600m"), ((7, 8), "2000m"), ((7, 8, 9), "2100m")):
        said = ExecutorMemory(0, 100 * M, 2).find_shortage(*pids, proc=tmp_path)
        assert f"the 2 workers of an executor and their spares take {taken} by now" in str(said)


NONE = str(2**63 - 4096)  # as the kernel says it


@pytest.mark.parametrize(
    ("file", "text", "limit"),
    [("memory.max", "max", None), ("memory.max", str(G), G), ("memory/memory.limit_in_bytes", NONE, None)],
)
def test_limits_of_containers_are_read(tmp_path: Path, file: str, text: str, limit: int | None) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text + "\n")
    assert read_cgroup_limit(tmp_path) == limit


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

        def require(self, requests: dict[str, float]) -> Builder:
            assert requests == {"cpus": 2, "gpu": 1}
            return self

    class Requests(dict[str, float]):
        def cpus(self, amount: int) -> Requests:
            return self.resource("cpus", amount)

        def resource(self, name: str, amount: float) -> Requests:
            return Requests({**self, name: amount})

    monkeypatch.setattr(settings, "ResourceProfileBuilder", Builder)
    monkeypatch.setattr(settings, "TaskResourceRequests", Requests)

    def refuse(profile: Any) -> None:
        raise RuntimeError("An error occurred\nSparkException: TaskResourceProfiles are only supported.")

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
