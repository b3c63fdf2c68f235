"""A checked call: what it asks the driver for."""

from __future__ import annotations

import io
import logging
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spark_elastic.clusters.run import call as running
from spark_elastic.clusters.run.call import decode_results, prepare
from spark_elastic.driver.job import LaunchResult
from spark_elastic.errors import InvalidInput
from spark_elastic.monitoring.report import JobReport
from spark_elastic.worker.program import encode_result


def test_r15_a_call_needs_the_result_of_every_worker() -> None:
    call = prepare(print, (), {"num_workers": 3, "regroup_timeout": 45.0})
    limits = call.make_limits(2)
    assert (limits.num_workers, limits.all_results, limits.regroup_timeout) == (3, True, 45.0)


def test_the_log_of_the_preflight_is_shown_like_that_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def make_logger(what: str) -> Any:
        return lambda *given: logging.getLogger("spark_elastic.spark").info(what)

    platform = SimpleNamespace(
        count_workers=lambda asked: 1, preflight=make_logger("the preflight"), launch=make_logger("the job")
    )
    monkeypatch.setattr("spark_elastic.clusters.spark.host_facts.get_session", lambda given: given)
    monkeypatch.setattr("spark_elastic.clusters.spark.make_platform", lambda *given: platform)
    monkeypatch.setattr(running, "decode_results", lambda launched: [])
    told = io.StringIO()
    prepare(print, (), {"num_workers": 1, "verbose": 2, "stdout": told}).run_on_spark(None)  # type: ignore[arg-type]
    assert "the preflight" in told.getvalue()
    assert "the job" in told.getvalue()


def test_results_are_a_list_with_the_jobs_report() -> None:
    report = JobReport(seconds=2.0, phases={"training": 1.5})
    returned = decode_results(LaunchResult((encode_result("first", 0), encode_result(None, 1)), report))
    assert returned == ["first", None]
    for same in (returned, pickle.loads(pickle.dumps(returned))):
        assert isinstance(same, list)
        assert same.report.goodput == 0.75


def test_a_script_takes_no_args_of_a_function(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="a script takes its arguments one by one after its path"):
        prepare(tmp_path / "train.py", (), {"args": ("--lr", "0.1")})


class Answering:
    """As a mock, or a proxy of a remote object."""

    def __getattr__(self, name: str) -> Any:
        return [name]


REMOTE = Answering()


def test_a_global_that_answers_to_any_name_is_no_module() -> None:
    def train() -> Any:
        import torch

        return torch, REMOTE

    assert "torch" in prepare(train, (), {}).program.imports
