"""Training on a standalone cluster over hosts that share nothing but a bucket on an S3 server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts import find_obstacle
from tests.scenarios import Fault
from tests.spark.host_cluster import PRIVATE, S3, HostCluster

MISSING = find_obstacle() or ("" if (S3 / "moto").exists() else f"S3's packages are not in {S3}: nox -s s3")
JOB = Path(__file__).with_name("host_job.py")
WORKERS = 4

pytestmark = [
    pytest.mark.spark,
    pytest.mark.native,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(MISSING), reason=MISSING),
]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[HostCluster]:
    with HostCluster(WORKERS, tmp_path) as made:
        yield made


def test_p1_p2_three_kills_and_a_cut_change_no_weight_and_lose_no_row(
    cluster: HostCluster, fault: Fault
) -> None:
    """An executor is killed, a host loses its power and boots, a training process is killed, a host is cut off."""
    job = cluster.submit(JOB, str(WORKERS), "undisturbed")
    job.await_message(world=WORKERS)
    fault(cluster.kill_executor, 1)
    job.await_message(world=WORKERS - 1)
    job.await_message(world=WORKERS)
    fault(cluster.hosts.kill, 2)
    job.await_message(world=WORKERS - 1)
    cluster.hosts.boot(2)
    cluster.start_worker(2)
    job.await_message(world=WORKERS)
    fault(cluster.kill_training, 3)
    job.await_message(world=WORKERS - 1)
    job.await_message(world=WORKERS)
    fault(cluster.hosts.disconnect, 4)
    job.await_message(world=WORKERS - 1)
    cluster.hosts.heal(4)
    job.await_message(world=WORKERS)
    cluster.end_slow_steps()
    verdict = job.await_message(verdict=...)["verdict"]
    assert verdict["rows exact"], verdict
    assert verdict["difference"] < 1e-9, verdict
    assert job.end() == 0


@pytest.mark.faults
def test_a_host_that_leaves_with_notice_costs_no_step(cluster: HostCluster, fault: Fault) -> None:
    job = cluster.submit(JOB, str(WORKERS))
    page = job.await_message(page=...)["page"]
    job.await_message(world=WORKERS)
    assert "<h2>Workers</h2>" in seen_from(cluster, 1, page), "the page is seen from another host"
    assert "<h2>Workers</h2>" in seen_from(cluster, 0, page.replace("//h0:", "//127.0.0.1:")), (
        "as proxies dial it"
    )
    fault(cluster.decommission, 1)
    job.await_message(world=WORKERS - 1)
    cluster.end_slow_steps()
    verdict = job.await_message(verdict=...)["verdict"]
    assert verdict["steps lost"] == 0, verdict
    assert verdict["rows exact"], verdict
    assert "leaving: " in verdict["worlds"][-1][1], verdict
    assert job.end() == 0


@pytest.mark.faults
def test_an_unreachable_driver_or_peer_is_named_in_one_sentence_within_seconds(cluster: HostCluster) -> None:
    """A store that only the driver's host sees, and an address of the driver that no host has."""
    nowhere = {"advertise_address": "10.77.0.99", "bind_address": "h0"}
    job = cluster.submit(
        JOB, str(WORKERS), json.dumps({"store": str(PRIVATE / "store")}), json.dumps(nowhere)
    )
    unseen = job.await_message(refused=...)
    assert "does not see what the driver wrote to the store" in unseen["refused"]
    unreached = job.await_message(refused=...)
    assert "cannot reach the driver at 10.77.0.99:" in unreached["refused"]
    for told in (unseen, unreached):
        assert told["refused"].startswith("host h")
        assert told["seconds"] < 60.0, told


def seen_from(cluster: HostCluster, node: int, url: str) -> str:
    visit = "import sys, urllib.request as r; print(r.urlopen(sys.argv[1], timeout=20).read().decode())"
    command = cluster.hosts.build_command(node, sys.executable, "-c", visit, url)
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
