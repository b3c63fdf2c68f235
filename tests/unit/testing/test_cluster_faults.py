from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from spark_elastic.errors import InvalidInput
from spark_elastic.testing import ClusterFaults, FakeClock, InjectedFault, generate_faults
from spark_elastic.testing.cluster_faults import KINDS


def test_a_seed_gives_the_same_plan_in_the_order_of_its_steps() -> None:
    faults = generate_faults(7, 12, steps=10, epochs=3)
    assert faults == generate_faults(7, 12, steps=10, epochs=3)
    assert faults != generate_faults(8, 12, steps=10, epochs=3)
    places = [(fault.epoch, fault.step) for fault in faults]
    assert places == sorted(set(places))
    assert all(step < 10 and epoch < 3 for epoch, step in places)
    assert {fault.kind for fault in generate_faults(1, 5, 100, kinds=["stop"])} == {"stop"}
    assert len(generate_faults(1, 5, steps=1)) == 5


@pytest.mark.parametrize(
    ("kind", "sent", "target"),
    [
        ("kill worker", signal.SIGKILL, os.getpid),
        ("kill slot", signal.SIGKILL, os.getppid),
        ("stop", signal.SIGSTOP, os.getpid),
    ],
)
def test_each_fault_is_injected_once_on_its_rank(
    kind: str, sent: int, target: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: signals.append((pid, number)))
    monkeypatch.setattr("spark_elastic.testing.cluster_faults.subprocess.Popen", lambda *given, **named: None)
    fault = InjectedFault(kind, step=3, epoch=1, rank=5)  # type: ignore[arg-type]
    first, second = (ClusterFaults([fault], folder) for folder in (tmp_path / "f", str(tmp_path / "f")))
    first.inject(2, 2, 3, epoch=1)
    first.inject(9, 2, 3, epoch=0)
    first.inject(3, 1, 3, epoch=1)
    assert signals == []
    first.inject(3, 2, 3, epoch=1)
    assert signals == [(target(), sent)]  # type: ignore[operator]
    second.inject(4, 2, 3, epoch=1)  # a later world, another process
    assert len(signals) == 1
    (injected,) = second.read_injected()
    told = {"kind": kind, "epoch": 1, "step": 3, "pid": signals[0][0]}
    assert told.items() <= injected.items()


@pytest.mark.parametrize(("pause", "late"), [({}, 0.5), ({"pause": 4.0}, 4.0)])
def test_a_slow_worker_is_late_for_a_while(tmp_path: Path, pause: dict[str, float], late: float) -> None:
    clock = FakeClock()
    fault = InjectedFault("slow", step=0, seconds=0.5, **pause)
    faults = ClusterFaults([fault], str(tmp_path / "f"), clock)
    for step in range(5):
        faults.inject(step, 0, 1)
    assert clock.now() == late


def test_a_cut_breaks_connections_but_not_listening_sockets(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as here, server.accept()[0] as there:
            ClusterFaults([InjectedFault("cut", step=0)], str(tmp_path / "f")).inject(0, 0, 1)
            assert (here.recv(1), there.recv(1)) == (b"", b"")
        with socket.create_connection(server.getsockname()), server.accept()[0]:
            pass  # who listens is still there


@pytest.mark.parametrize("kind", ["kill executor", "drain"])
def test_killing_an_executor_is_refused_without_one(kind: str, tmp_path: Path) -> None:
    faults = ClusterFaults([InjectedFault(kind, step=0)], str(tmp_path / "f"))  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="local-cluster"):
        faults.inject(0, 0, 1)
    assert faults.read_injected() == []


def test_an_unknown_kind_of_fault_is_refused(tmp_path: Path) -> None:
    assert len(KINDS) == 7
    with pytest.raises(InvalidInput, match="kill executor"):
        ClusterFaults([InjectedFault("explode", step=0)], str(tmp_path))  # type: ignore[arg-type]
