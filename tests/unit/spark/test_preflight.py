"""Which hosts may take part, from their versions alone; and Spark's own failures as sentences."""

from __future__ import annotations

import platform
import socket
from typing import Any

import cloudpickle
import pytest

pytest.importorskip("pyspark")

import spark_elastic
from spark_elastic.errors import JobCancelled, PreflightError
from spark_elastic.rendezvous.serving import Bind, dialled, listen
from spark_elastic.spark.preflight import Probe, _explain, admit, facts, judge_all

DRIVER = {"host": "d", "python": "3.11.7", "spark_elastic": "0.1.0", "numpy": "2.4.6", "torch": "2.13.0+cpu"}


def judged(needs: tuple[str, ...] = ("torch",), **changes: Any) -> str | None:
    host = {k: v for k, v in (DRIVER | {"host": "h1"} | changes).items() if v is not None}
    return admit(DRIVER, needs)(host)


def test_facts_are_of_this_process() -> None:
    found = facts()
    assert found["python"] == platform.python_version()
    assert found["spark_elastic"] == spark_elastic.__version__
    assert found["host"]


def test_a_host_is_fit_for_its_own_kind() -> None:
    assert admit(facts(), ("torch",))(facts()) is None


@pytest.mark.parametrize(
    "changes", [{"python": "3.11.2"}, {"numpy": "2.1.0"}, {"torch": "2.9.1+cu121"}, {"keras": "9.0"}, {}]
)
def test_small_differences_do_not_matter(changes: dict[str, str]) -> None:
    assert judged(**changes) is None


@pytest.mark.parametrize(
    ("package", "theirs"),
    [("python", "3.12.7"), ("numpy", "1.26.4"), ("torch", "1.13.1"), ("spark_elastic", "0.1.1")],
)
def test_a_mismatch_names_host_package_and_both_versions(package: str, theirs: str) -> None:
    sentence = judged(**{package: theirs})
    assert sentence is not None
    assert all(word in sentence for word in ("h1", package, theirs, DRIVER[package]))
    assert sentence.endswith(".")
    assert "\n" not in sentence


def test_what_is_missing_is_named() -> None:
    assert (
        judged(torch=None)
        == "host h1 has no torch, and the driver has 2.13.0+cpu: install torch 2.13.0+cpu there."
    )


def test_a_framework_that_the_job_does_not_use_may_be_missing() -> None:
    assert judged(needs=(), torch=None) is None


LOST = "Job aborted: Lost task 0.0 in stage 0.0 (TID 0) (10.0.0.7 executor 1): PythonException: Traceback\n"


def test_another_python_is_explained() -> None:
    explained = _explain(
        RuntimeError(
            f"{LOST}[PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.10 than that in driver: 3.11, "
            "PySpark cannot run with different minor versions."
        )
    )
    assert isinstance(explained, PreflightError)
    assert "host 10.0.0.7 has python 3.10, and the driver has 3.11: set PYSPARK_PYTHON to the same" in str(
        explained
    )


def test_a_cancelled_probe_is_a_cancelled_job() -> None:
    assert isinstance(_explain(RuntimeError("Job 3 cancelled part of cancelled job group g")), JobCancelled)


def test_other_errors_of_spark_stay_as_they_are() -> None:
    error = RuntimeError("disk full")
    assert _explain(error) is error


def test_a_probe_knocks_at_the_driver_s_door() -> None:
    bind = Bind("127.0.0.1")
    with listen(bind) as door:
        address = dialled(bind, door)
        assert Probe(None, "t", driver=address).report(0, cloudpickle.dumps(1)).unreached is None
    report = Probe(None, "t", driver=address).report(0, cloudpickle.dumps(1))
    fault = report.unreached
    assert report.fault is None
    assert fault is not None
    with pytest.raises(PreflightError, match="cannot reach the driver"):
        judge_all([report], admit(facts()), None)
    judge_all([report], admit(facts()), None, reached=False)
    assert fault.startswith(f"host {socket.gethostname()} cannot reach the driver at {address} (")
    assert "advertise_address" in fault


def test_a_probe_names_what_cannot_be_loaded() -> None:
    fault = Probe(None, "t", "the function or its arguments").report(0, b"no pickle").fault
    assert fault is not None
    assert "cannot load the function or its arguments (UnpicklingError" in fault
