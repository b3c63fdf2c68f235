"""torch.distributed over the engine on real processes: its calls beside torch's own Gloo, and what it has besides."""

from __future__ import annotations

import json
import re
import sys
from concurrent.futures import Future
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from elastic_collectives import CollectiveTimeout
from spark_elastic.errors import InvalidInput
from spark_elastic.integrations.torch_distributed.work import EngineWork, PendingWorks
from tests import simulated_nccl
from tests.component.torch import distributed_calls as calls
from tests.component.torch import distributed_programs
from tests.component.torch.distributed_calls import compare
from tests.component.torch.distributed_programs import PROGRAMS, SIZE, run_programs
from tests.component.torch.hand_written import CARRIERS, Run, run_over
from tests.conformance import suite
from tests.conformance.suite import CHOSEN, RESULTS, find_unexplained
from tests.devices import ACCELERATORS

pytestmark = [pytest.mark.native, pytest.mark.timeout(300)]

for module in (__name__, calls.__name__, distributed_programs.__name__, suite.__name__):
    cloudpickle.register_pickle_by_value(sys.modules[module])


@pytest.fixture(scope="module", params=CARRIERS)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of all calls and programs, by rank: one world makes them all."""
    suite = str(tmp_path_factory.mktemp("suite")) if request.param == "engine" else ""
    return run_over(request.param, partial(call_and_run, suite), SIZE)[0]


def call_and_run(suite: str) -> dict[str, Any]:
    return compare(suite) | run_programs()


@pytest.mark.parametrize("program", [program.__name__ for program in PROGRAMS])
def test_it_works_as_torch_documents_it(results: list[dict[str, Any]], program: str) -> None:
    for of_rank in results:
        found = of_rank[program]
        if found == "absent":
            pytest.skip("this version of torch lacks it")
        assert not isinstance(found, str), found
        for got, expected in found:
            assert got == expected


@pytest.mark.parametrize("call", [move.__name__ for move in calls.MOVES])
def test_every_dtype_is_exchanged_as_over_gloo(results: list[Any], call: str) -> None:
    compared = 0
    for dtype in calls.MOVED:
        for found, expected in (of_rank[f"{call} {dtype}"] for of_rank in results):
            assert not isinstance(found, str), (dtype, found)
            if isinstance(expected, list):  # Gloo does not know all dtypes
                assert [part.tolist() for part in found] == [part.tolist() for part in expected], dtype
                compared += bool(found)
    assert compared


@pytest.mark.parametrize("call", [reduction.__name__ for reduction in calls.REDUCTIONS])
def test_reductions_of_every_dtype_agree_with_gloo(results: list[Any], call: str) -> None:
    cases = [f"{call} {dtype} {op}" for dtype in calls.REDUCED for op in calls.find_ops(call, dtype)]
    assert cases
    for case in cases:
        for found, expected in (of_rank[case] for of_rank in results):
            assert not isinstance(found, str), (case, found)
            torch.testing.assert_close(found, expected, msg=lambda text, case=case: f"{case}: {text}")


def test_ddp_and_fsdp_train_as_over_gloo(results: list[Any]) -> None:
    for of_rank in results:
        weights = of_rank["ddp over elastic"]
        assert weights == results[0]["ddp over elastic"]
        for other in {"ddp over gloo", "fsdp over elastic", "first fsdp over elastic"} & of_rank.keys():
            assert of_rank[other] == pytest.approx(weights, rel=0, abs=1e-12)


def test_other_calls_of_torch_distributed_agree_with_gloo(results: list[Any]) -> None:
    for rank, of_rank in enumerate(results):
        assert of_rank["sparse"] == [10.0, 0.0, 10.0]
        assert of_rank["premultiplied"] == 6.0
        assert of_rank["of two dtypes"] == [[8.0] * 3] * 2
        assert of_rank["in a callback"] == 24.0
        assert of_rank["pair"] == (2.0 if rank in (0, 2) else None)
        assert of_rank["backend names"] == ("undefined", "gloo", "gloo", "nccl", "elastic")
        assert of_rank["store"] == (True, SIZE, b"by one rank")


def test_profilers_and_dispatch_modes_see_collectives_as_those_of_gloo(results: list[Any]) -> None:
    for of_rank in results:
        found, expected = of_rank.get("observed", (None, None))
        assert found == expected


def test_groups_and_stores_describe_themselves_as_torchs_own(results: list[Any]) -> None:
    for rank, of_rank in enumerate(results):
        assert of_rank["counted"] == 1
        assert of_rank["named"] == ("gloo", 50.0)
        assert of_rank["keys"] == (b"of the group", SIZE)
        assert re.search(r"no rank has set .* within 1 s", of_rank["a missing key"])
        if rank == 0:
            at_once, later = of_rank["alone in a barrier"]
            assert "Rank 0 timed out in monitoredBarrier" in at_once
            assert "Ranks 1, 2, 3 failed to pass monitoredBarrier in 1000 ms" in later


def test_torchs_own_tests_of_each_collective_pass(results: list[Any]) -> None:
    for of_rank in results:
        if of_rank["suite"]:  # one carrier runs them
            failed = {name: error for name, (status, error) in of_rank["suite"].items() if status == "fail"}
            assert not failed
            assert of_rank["suite"].keys() == set(CHOSEN)


def test_what_torchs_suite_says_of_gloo_it_says_of_elastic() -> None:
    assert find_unexplained(json.loads(RESULTS.read_text())) == []


@pytest.mark.parametrize(
    ("mistake", "sentence"),
    [
        ("another size", r"MismatchError: .*rank"),
        ("another reduction", r"MismatchError: .*rank"),
        ("an ended group", "InvalidInput: this process group has ended.*init_process_group in each world"),
        ("bool average", r"InvalidInput: ReduceOp.AVG takes no bool: convert"),
        ("complex product", r"InvalidInput: ReduceOp.PRODUCT takes no complex numbers"),
        ("too few tensors", r"InvalidInput: all_gather takes a tensor for each of 4 ranks; got 1"),
        ("a shorter tensor", r"InvalidInput: all_gather puts 1 elements into this rank's tensor .* has 6"),
        ("a tensor elsewhere", r"InvalidInput: this collective got a tensor on meta, which has no values"),
        ("another rank", r"this worker is rank \d of 4, and the process group was asked for as rank"),
    ],
)
def test_invalid_input_is_refused_with_a_sentence(results: list[Any], mistake: str, sentence: str) -> None:
    for of_rank in results:
        assert re.search(sentence, of_rank[mistake]), of_rank[mistake]


def test_a_wait_that_takes_too_long_names_its_limit() -> None:
    group: Any = SimpleNamespace(pending=PendingWorks(), record_wait=nullcontext)
    with pytest.raises(CollectiveTimeout, match=r"the collective did not end within 0\.01 s"):
        EngineWork(group, Future(), []).wait(timedelta(seconds=0.01))


def test_outside_of_a_job_there_is_no_elastic_backend() -> None:
    says = "the backend 'elastic' works inside of a job only: start the program with"
    with pytest.raises(InvalidInput, match=says):
        dist.init_process_group("elastic", store=dist.HashStore(), rank=0, world_size=1)


# Over NCCL, trainings lose workers in test_bulk_plane.py, too.
@pytest.mark.parametrize("carrier", ["engine", pytest.param(simulated_nccl.NAME, marks=pytest.mark.faults)])
@pytest.mark.parametrize(
    "measure", ["", *(pytest.param(name, marks=pytest.mark.faults) for name in ("torch", "horovod"))]
)
def test_ddp_continues_at_the_step_in_flight_after_a_kill(carrier: str, measure: str) -> None:
    check_ddp(*run_over(carrier, partial(calls.train_ddp, measure=measure), 3))


@pytest.mark.parametrize("device", ACCELERATORS, indirect=True)
def test_ddp_on_a_device_that_all_workers_share_continues_after_a_kill(device: str) -> None:
    modules = ("tests.pretend_device",) if device == "pretend" else ()
    job = Run(calls.train_ddp, (device,), room=3, num_workers=3, device=device, modules=modules)
    check_ddp(job.results(), job.sizes())


def check_ddp(results: list[Any], sizes: list[int]) -> None:
    assert sizes[:2] == [3, 2]
    whole = calls.train_alone()
    for result in results:
        torch.testing.assert_close(torch.tensor(result["weights"]), torch.tensor(whole), rtol=0, atol=1e-12)
        assert result["error"] is None or re.search("rank 1", result["error"])
    trained = max((result["trained"] for result in results), key=len)
    assert trained == list(range(len(trained)))  # no step was taken again, none left out
    assert any(result["error"] for result in results)
