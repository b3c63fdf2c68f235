"""The bulk plane alone: over the simulated NCCL, and over NCCL itself in a world of one, all that one GPU allows."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from elastic_collectives import CollectiveError, Group
from spark_elastic.clock import SystemClock
from spark_elastic.gradients import bulk_plane
from spark_elastic.gradients.bulk_plane import BulkPlane, BulkSums, get_or_start_bulk_plane
from spark_elastic.gradients.layout import ExchangedParameters
from spark_elastic.gradients.modes import BulkMode
from spark_elastic.gradients.reduction import DEFAULT_OPTIONS, ExchangeOptions
from spark_elastic.worker.context import CollectiveThread, WorkerContext
from tests import simulated_nccl
from tests.fake_group import FakeFabric
from tests.worlds import run_in_world

pytestmark = pytest.mark.native

# (device, backend, ranks)
PLANES = [("cpu", simulated_nccl.NAME, 3), pytest.param("cuda", "nccl", 1, marks=pytest.mark.gpu)]


def make_plane(
    group: Group, store: Any = None, device: str = "cpu", backend: str = simulated_nccl.NAME
) -> BulkPlane:
    kind = torch.device(device, 0) if device == "cuda" else torch.device(device)
    return BulkPlane(group, kind, backend, lambda: (store,))


def open_plane(group: Group, *how: Any) -> BulkPlane:
    """Returns once all ranks have agreed."""
    plane = make_plane(group, *how)
    plane.start()
    while not plane.is_settled:
        plane.exchange_readiness()
        time.sleep(0.01)
    return plane


def sum_gradients(
    group: Group, plane: BulkPlane, options: ExchangeOptions, gradients: list[torch.Tensor]
) -> list[torch.Tensor]:
    """The sums over all ranks, of gradients that arrive one after the other."""
    parameters = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    named = [(str(number), parameter) for number, parameter in enumerate(parameters)]
    layout = ExchangedParameters(named).lay_out(options, frozenset())
    mode = BulkMode(layout, group, lambda: True, plane)
    with closing(CollectiveThread()) as thread:
        mode.begin(1, thread, None)
        for index, gradient in enumerate(gradients):
            parameters[index].grad = gradient
            mode.on_gradient(index)
        mode.finish()
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def await_threads() -> None:
    """The simulation's threads end a moment after an abort."""
    deadline = time.monotonic() + 5
    while any(thread.name == "simulated-nccl" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def store() -> Any:
    return dist.HashStore()  # type: ignore[attr-defined,unused-ignore]


@pytest.mark.parametrize(("device", "backend", "size"), PLANES, indirect=["device"])
@pytest.mark.parametrize("wire", [None, "bf16", "fp16"])
def test_sums_are_divided_and_compressed_where_they_are(
    device: str, backend: str, size: int, wire: str | None, store: Any
) -> None:
    options = replace(DEFAULT_OPTIONS, average=True, predivide=2.0, wire=wire)

    def work(group: Group) -> list[float]:
        plane = open_plane(group, store, device, backend)
        assert plane.is_active
        gradients = [torch.full((5,), float(group.rank + 1 + number), device=device) for number in range(2)]
        summed = sum_gradients(group, plane, options, gradients)
        plane.abort()
        plane.wait_aborted()
        return [float(gradient[0]) for gradient in summed]

    found = run_in_world(size, work)
    mean = sum(range(1, size + 1)) / size
    assert found == [pytest.approx([mean, mean + 1], rel=1e-2 if wire else 1e-6)] * size
    await_threads()


@pytest.mark.parametrize(("device", "backend", "size"), PLANES, indirect=["device"])
def test_an_aborted_plane_raises_on_every_rank(device: str, backend: str, size: int, store: Any) -> None:
    def work(group: Group) -> None:
        plane = open_plane(group, store, device, backend)
        if group.rank == 0:
            plane.abort()
            plane.wait_aborted()
        with pytest.raises(CollectiveError, match=r"the bulk sums of ranks \[0\] failed"):
            sum_gradients(group, plane, DEFAULT_OPTIONS, [torch.ones(3, device=device)])
        plane.abort()
        plane.wait_aborted()

    run_in_world(size, work)
    await_threads()


def test_a_rank_whose_communicator_fails_leaves_all_with_the_host(
    capsys: pytest.CaptureFixture[str], store: Any
) -> None:
    def work(group: Group) -> bool:
        backend = simulated_nccl.NAME if group.rank else "no such backend"
        plane = open_plane(group, store, "cpu", backend)
        if group.rank:  # its builder waits for rank 0, which never comes
            store.set("port", "1")
        plane._builder.join(10)
        return plane.is_active

    assert run_in_world(2, work) == [False, False]
    assert "gradients travel through host memory in this world" in capsys.readouterr().err


def test_each_device_of_a_group_has_a_plane_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, group = WorkerContext("w", driver=cast("Any", object())), FakeFabric(2).group(0)
    options = replace(DEFAULT_OPTIONS, bulk_backend=simulated_nccl.NAME)
    monkeypatch.setattr(bulk_plane, "get_context", lambda: worker)
    monkeypatch.setattr(bulk_plane, "_get_stores", lambda worker, group, number: (number,))
    monkeypatch.setattr(BulkPlane, "start", lambda self: None)
    devices = [torch.device(name) for name in ("cuda:0", "cuda:1", "cuda:0")]
    first, second, again = (get_or_start_bulk_plane(group, device, options) for device in devices)
    assert first is again
    assert first is not None
    assert second is not None
    assert (first._get_stores(), second._get_stores()) == ((0,), (1,))


class FastClock(SystemClock):
    """A hundred times as fast: that rank's deadlines pass first."""

    def now(self) -> float:
        return 100 * super().now()


@pytest.mark.parametrize("first", [0, 1])
def test_every_rank_names_the_ranks_without_a_communicator(first: int) -> None:
    done = threading.Event()

    def work(group: Group) -> tuple[int, ...]:
        plane = make_plane(group)
        if group.rank == 1:
            plane._build = done.wait  # type: ignore[method-assign,assignment]
            plane._builder = threading.Thread(target=done.wait)
        else:
            plane._create = Alone  # type: ignore[method-assign]
        if group.rank == first:
            plane._clock = FastClock()
        plane.start()
        says = r"ranks \[1\] have built no simnccl communicator in 30 s"
        with pytest.raises(CollectiveError, match=says) as error:
            plane.wait_until_ready()
        done.set()
        plane._builder.join()
        return tuple(error.value.ranks)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("spark_elastic.gradients.bulk_plane.BUILD_TIMEOUT", 30.0)
        assert run_in_world(2, work) == [(1,), (1,)]


@pytest.mark.parametrize("first", [0, 1])
def test_every_rank_names_the_ranks_whose_sums_are_late(first: int) -> None:
    def work(group: Group) -> tuple[int, ...]:
        plane = make_plane(group)
        plane.process_group = Alone()
        sums = BulkSums(plane)
        if group.rank == first:
            sums._clock = FastClock()
        if group.rank == 1:
            sums.launch(lambda _: simulated_nccl.Work())  # never complete
        else:
            sums.launch(lambda alone: alone.allreduce([torch.ones(1)]))
        says = r"the bulk sums of ranks \[1\] were not complete after 30 s"
        with pytest.raises(CollectiveError, match=says) as error:
            sums.finish()
        return tuple(error.value.ranks)

    assert run_in_world(2, work, timeout=30.0) == [(1,), (1,)]


class Alone:
    """A communicator whose collectives are complete at once."""

    def allreduce(self, tensors: Any) -> Any:
        tensors[0].fill_(2.0)
        work = simulated_nccl.Work()
        work.done.set()
        return work
