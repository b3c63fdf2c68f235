"""What probes of the hosts find out, alone and of each other, and which versions may take part."""

from __future__ import annotations

import socket
import sys
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import cloudpickle
import pytest

from spark_elastic.clock import SystemClock
from spark_elastic.clusters.spark import probe as meeting
from spark_elastic.clusters.spark.host_facts import collect_host_facts
from spark_elastic.clusters.spark.preflight import check_reports, require_report
from spark_elastic.clusters.spark.probe import Probe, ProbeReport, find_mismatch, find_unreachable_peer
from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidInput, PreflightError
from spark_elastic.rendezvous.addresses import Bind, format_address, listen
from spark_elastic.testing.fakes import FakeClock
from tests.memory_store import make_memory_store


def test_a_probe_dials_the_driver() -> None:
    bind = Bind("127.0.0.1")
    with listen(bind) as door:
        address = format_address(bind, door)
        probe = Probe(driver=address)
        assert probe.report(0, cloudpickle.dumps(1)).unreached is None
    report = probe.report(0, cloudpickle.dumps(1))
    fault = report.unreached
    assert report.fault is None
    assert fault is not None
    with pytest.raises(PreflightError, match="cannot reach the driver"):
        check_reports(probe, [report])
    check_reports(probe, [report], reached=False)
    assert fault.startswith(f"host {socket.gethostname()} cannot reach the driver at {address} (")
    assert "advertise_address" in fault


def test_a_port_that_is_taken_leaves_nothing_in_the_store(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    with listen(Bind("127.0.0.1")) as taken:
        probe = Probe(store=store, bind=Bind("127.0.0.1", taken.getsockname()[1]))
        with pytest.raises(InvalidInput, match="cannot listen"), probe.open():
            pass
    assert store.find() == []


def test_a_probe_names_a_program_that_cannot_be_loaded() -> None:
    fault = Probe(what="the function or its arguments").report(0, b"no pickle").fault
    assert fault is not None
    assert "cannot load the function or its arguments (UnpicklingError" in fault


@pytest.mark.native
def test_a_probe_checks_encryption(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where OpenSSL is no library of the system the engine raises; Python may have its own, and HTTP speak TLS."""
    probe = Probe(encrypted=True)
    assert probe.report(0, cloudpickle.dumps(1)).fault is None
    refused = RuntimeError("TLS between workers needs OpenSSL, and there is none: install it on this host")
    monkeypatch.setattr("spark_elastic.worker.entry.Endpoint", Mock(side_effect=refused))
    fault = probe.report(0, cloudpickle.dumps(1)).fault
    assert fault is not None
    assert fault.endswith("needs OpenSSL, and there is none: install it on this host, or set tls=False.")


def test_probes_leave_nothing_in_a_store(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    with Probe(store=store).open():
        with Probe(store=store).open():
            pass
        assert len(store.list("probes")) == 1  # another job's
    assert list(tmp_path.iterdir()) == []


def run_check(store: Store, number: int) -> list[str | None]:
    found: list[str | None] = []

    def probe() -> None:
        found.append(find_unreachable_peer(store, "meeting", "127.0.0.1", number, SystemClock()))

    threads = [threading.Thread(target=probe) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_peers_that_reach_one_another_find_no_fault() -> None:
    store = make_memory_store()
    assert run_check(store, 3) == [None] * 3
    assert all(name.endswith(".done") for name in store.list("meeting"))


def test_a_peer_that_cannot_be_dialled_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "create_connection", Mock(side_effect=OSError("no route")))
    said = run_check(make_memory_store(), 2)
    assert any(address is not None and address.startswith("127.0.0.1:") for address in said)


def test_a_store_that_fails_is_a_fault_and_no_error_of_the_task() -> None:
    store = make_memory_store()
    store.write_bytes("probes/t/driver", b"t")

    def refuse_peers(pipe: Any) -> Any:
        def write(path: str, *arguments: Any, **options: Any) -> None:
            if "/peers/" in path:
                raise OSError("Input/output error")
            pipe(path, *arguments, **options)

        return write

    store.filesystem.pipe_file = refuse_peers(store.filesystem.pipe_file)
    probe = Probe(store=store, token="t", peers=2, reachable_host="127.0.0.1")
    fault = probe.report(0, cloudpickle.dumps(1)).fault
    assert fault is not None
    assert "could not exchange addresses with other executors, so start the job again: Cannot write" in fault


def test_a_probe_that_runs_alone_finds_no_fault() -> None:
    """Its time is over, and one that has gone by then is no fault."""
    clock = FakeClock()
    assert find_unreachable_peer(make_memory_store(), "meeting", "127.0.0.1", 2, clock) is None
    assert clock.now() >= meeting.PEERS_SECONDS


DRIVER = {"host": "d", "python": "3.11.7", "spark_elastic": "0.1.0", "numpy": "2.4.6", "torch": "2.13.0+cpu"}


def check_host(needs: tuple[str, ...] = ("torch",), **changes: Any) -> str | None:
    host = {k: v for k, v in (DRIVER | {"host": "h1"} | changes).items() if v is not None}
    return find_mismatch(DRIVER, host, needs)


def test_a_report_with_another_version_is_an_error_and_so_is_a_host_that_lacks_the_package() -> None:
    facts = {**collect_host_facts(), "host": "h1", "numpy": "1.0.0"}
    report = ProbeReport(facts, 1, "", "it cannot load the model.")
    with pytest.raises(PreflightError, match=r"^host h1 has numpy 1\.0\.0, and the driver has "):
        check_reports(Probe(), [report])
    sentence = (
        rf"^host h1 cannot load spark_elastic with /bin/p \(No module\), and the driver has .* in {sys.executable}: "
        "set PYSPARK_PYTHON to a Python that has it on every host, "
    )
    with pytest.raises(PreflightError, match=sentence):
        require_report(("h1", "No module", "/bin/p"))


@pytest.mark.parametrize(
    "changes", [{"python": "3.11.2"}, {"numpy": "2.1.0"}, {"torch": "2.9.1+cu121"}, {"keras": "9.0"}, {}]
)
def test_small_version_differences_do_not_matter(changes: dict[str, str]) -> None:
    assert check_host(**changes) is None


@pytest.mark.parametrize(
    ("package", "theirs"),
    [("python", "3.12.7"), ("numpy", "1.26.4"), ("torch", "1.13.1"), ("spark_elastic", "0.1.1")],
)
def test_a_mismatch_names_host_package_and_both_versions(package: str, theirs: str) -> None:
    sentence = check_host(**{package: theirs})
    assert sentence is not None
    assert all(word in sentence for word in ("h1", package, theirs, DRIVER[package]))
    assert sentence.endswith(".")
    assert "\n" not in sentence


def test_a_missing_package_is_named_if_the_job_uses_it() -> None:
    says = "host h1 has no torch, and the driver has 2.13.0+cpu: install torch 2.13.0+cpu there."
    assert check_host(torch=None) == says
    assert check_host(needs=(), torch=None) is None
