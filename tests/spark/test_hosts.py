"""Training on a standalone cluster over hosts that share nothing but a bucket on an S3 server."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import find_obstacle
from tests.patience import until
from tests.scenarios import Fault
from tests.spark.host_cluster import PRIVATE, S3, HostCluster, Job

MISSING = find_obstacle() or ("" if (S3 / "moto").exists() else f"S3's packages are not in {S3}: nox -s s3")
JOB = Path(__file__).with_name("host_job.py")
WORKERS = 3
CUT_SECONDS = 30.0

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


# Executors and training processes are killed on one machine, too.
@pytest.mark.parametrize("kills", [False, pytest.param(True, marks=pytest.mark.faults)])
def test_p1_p2_losses_of_every_kind_change_no_weight_and_lose_no_row(
    cluster: HostCluster, fault: Fault, kills: bool
) -> None:
    """A host loses its power and boots, and one is cut off; before each an executor or a training process is killed."""
    job = cluster.submit(JOB, str(WORKERS))
    job.await_message(world=WORKERS)
    if kills:
        fault(cluster.kill_executor, 1)
        job.await_message(world=WORKERS - 1)
        job.await_message(world=WORKERS)
    fault(cluster.hosts.kill, 2)
    job.await_message(world=WORKERS - 1)
    cluster.hosts.boot(2)
    cluster.start_worker(2)
    job.await_message(world=WORKERS)
    if kills:
        fault(cluster.kill_training, 3)
        job.await_message(world=WORKERS - 1)
        job.await_message(world=WORKERS)
    fault(cluster.hosts.disconnect, 3)
    job.await_message(world=WORKERS - 1)
    cluster.hosts.heal(3)
    job.await_message(world=WORKERS)
    check_end(cluster, job)


def check_end(cluster: HostCluster, job: Job) -> dict[str, Any]:
    """The verdict: P1 and P2."""
    cluster.end_slow_steps()
    verdict: dict[str, Any] = job.await_message(verdict=...)["verdict"]
    assert verdict["rows exact"], verdict
    assert verdict["weights exact"], verdict
    assert job.end() == 0
    return verdict


@pytest.mark.faults
@pytest.mark.parametrize("lease", [1.0, 5.0])
def test_p1_p2_a_host_without_network_for_30_seconds_rejoins_and_its_zombie_ends_itself(
    cluster: HostCluster, fault: Fault, lease: float
) -> None:
    """The others continue within the lease."""
    job = cluster.submit(JOB, str(WORKERS), f"lease={lease}", "epochs=100")
    job.await_message(world=WORKERS, epoch=1)
    zombie, *_ = cluster.processes(1, "spark_elastic.worker.entry")
    cut = time.monotonic()
    fault(cluster.hosts.disconnect, 1)
    job.await_message(seconds=60.0, world=WORKERS - 1)
    assert time.monotonic() - cut < CUT_SECONDS / 2, "longer than the lease, and what a busy machine adds"
    time.sleep(max(0.0, cut + CUT_SECONDS - time.monotonic()))
    cluster.hosts.heal(1)
    job.await_message(seconds=90.0, world=WORKERS)
    until(lambda: not zombie.is_running())
    check_end(cluster, job)


@pytest.mark.faults
def test_p1_p2_a_host_whose_network_flickers_is_slow_and_not_lost(cluster: HostCluster, fault: Fault) -> None:
    job = cluster.submit(JOB, str(WORKERS), "lease=5", "epochs=100")
    job.await_message(world=WORKERS, epoch=1)
    for _ in range(15):
        fault(cluster.hosts.disconnect, 1)
        time.sleep(0.3)
        cluster.hosts.heal(1)
        time.sleep(0.7)
    check_end(cluster, job)


@pytest.mark.faults
def test_r12_a_driver_without_network_for_longer_than_the_lease_evicts_no_worker(
    cluster: HostCluster, fault: Fault
) -> None:
    """Training continues without it. The driver is on a host of its own."""
    driver = WORKERS + 1
    job = cluster.submit(JOB, str(WORKERS), "lease=3", "epochs=100", node=driver)
    before = after = job.await_message(world=WORKERS, epoch=1)
    fault(cluster.hosts.disconnect, driver)
    time.sleep(15.0)
    healed = time.time()
    cluster.hosts.heal(driver)
    while after["wall"] < healed + 5.0:  # what was under way at the cut comes first
        before, after = after if after["wall"] < healed else before, job.await_message(world=WORKERS)
    leap = 5 * (after["epoch"] - before["epoch"]) + after["step"] - before["step"]
    assert leap > 40, "steps went on while the driver heard nothing"
    assert [size for size, _ in check_end(cluster, job)["worlds"]] == [WORKERS], "nobody was lost"


@pytest.mark.faults
def test_a_host_that_leaves_with_notice_costs_no_step(cluster: HostCluster, fault: Fault) -> None:
    job = cluster.submit(JOB, str(WORKERS))
    page = job.await_message(page=...)["page"]
    job.await_message(world=WORKERS)
    assert "<h2>Workers" in seen_from(cluster, 1, page), "the page is seen from another host"
    assert "<h2>Workers" in seen_from(cluster, 0, page.replace("//h0:", "//127.0.0.1:")), "as proxies dial it"
    fault(cluster.decommission, 1)
    job.await_message(world=WORKERS - 1)
    verdict = check_end(cluster, job)
    assert verdict["steps lost"] == 0, verdict
    assert "leaving: " in verdict["worlds"][-1][1], verdict


@pytest.mark.faults
def test_an_unreachable_driver_or_peer_is_named_in_one_sentence_within_seconds(cluster: HostCluster) -> None:
    """A store that only the driver's host sees, and an address of the driver that no host has."""
    nowhere = {"advertise_address": "10.77.0.99", "bind_address": "h0"}
    unshared = {"store": str(PRIVATE / "store")}
    job = cluster.submit(JOB, str(WORKERS), json.dumps(unshared), json.dumps(nowhere))
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
