"""What one probe finds out, as sentences."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import cloudpickle
import pytest

pytest.importorskip("pyspark")

from pyspark.sql import SparkSession

from spark_elastic.clusters.spark.host_facts import collect_host_facts
from spark_elastic.clusters.spark.probe import Probe, ProbeSpec, check_reports, make_version_check, open_probe
from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidInput, PreflightError, StoreError
from spark_elastic.estimators.dataframes.store_access import check_store_access
from spark_elastic.rendezvous.http_server import Bind, format_address, listen


def test_a_probe_dials_the_driver() -> None:
    bind = Bind("127.0.0.1")
    with listen(bind) as door:
        address = format_address(bind, door)
        assert Probe(None, "t", driver=address).report(0, cloudpickle.dumps(1)).unreached is None
    report = Probe(None, "t", driver=address).report(0, cloudpickle.dumps(1))
    fault = report.unreached
    assert report.fault is None
    assert fault is not None
    with pytest.raises(PreflightError, match="cannot reach the driver"):
        check_reports([report], make_version_check(collect_host_facts()), None)
    check_reports([report], make_version_check(collect_host_facts()), None, reached=False)
    assert fault.startswith(f"host {socket.gethostname()} cannot reach the driver at {address} (")
    assert "advertise_address" in fault


def test_a_port_that_is_taken_leaves_nothing_in_the_store(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    with listen(Bind("127.0.0.1")) as taken:
        spec = ProbeSpec(b"", store, bind=Bind("127.0.0.1", taken.getsockname()[1]))
        with pytest.raises(InvalidInput, match="cannot listen"), open_probe(spec):
            pass
    assert store.find() == []


def test_a_probe_names_a_program_that_cannot_be_loaded() -> None:
    fault = Probe(None, "t", "the function or its arguments").report(0, b"no pickle").fault
    assert fault is not None
    assert "cannot load the function or its arguments (UnpicklingError" in fault


@pytest.mark.native
def test_a_probe_checks_encryption(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where OpenSSL is no library of the system the engine raises; Python may have its own, and HTTP speak TLS."""
    probe = Probe(None, "t", encrypted=True)
    assert probe.report(0, cloudpickle.dumps(1)).fault is None

    def refuse(*arguments: object, **named: object) -> None:
        raise RuntimeError("TLS between workers needs OpenSSL, and there is none: install it on this host")

    monkeypatch.setattr("spark_elastic.worker.entry.Endpoint", refuse)
    fault = probe.report(0, cloudpickle.dumps(1)).fault
    assert fault == (
        f"host {socket.gethostname()}: TLS between workers needs OpenSSL, and there is none: install it on this host, "
        "or set tls=False."
    )


def test_probes_leave_nothing_in_a_store(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    with open_probe(ProbeSpec(b"", store)):
        with open_probe(ProbeSpec(b"", store)):
            pass
        assert len(store.list("probes")) == 1  # another job's
    check_store_access(cast("SparkSession", SimpleNamespace()), store)
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_cannot_remove_a_probe_s_objects_does_not_hide_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise StoreError("Cannot delete 'probes/t' in the store.")

    monkeypatch.setattr(Store, "remove_tree", fail)
    with (
        pytest.raises(PreflightError, match="a host is broken"),
        open_probe(ProbeSpec(b"", Store.open(tmp_path))),
    ):
        raise PreflightError("a host is broken.")
