"""Executors that reach the driver but not one another, as on serverless compute: probes on real networks say so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import Network, find_obstacle
from tests.spark.cluster import cluster_environment

MISSING = find_obstacle()

pytestmark = [pytest.mark.faults, pytest.mark.timeout(200), pytest.mark.skipif(bool(MISSING), reason=MISSING)]

PROBE = """
import sys
from spark_elastic.data.store import Store
from spark_elastic.clusters.spark.probe import Probe
folder, driver = sys.argv[1:]
probe = Probe(Store.open(folder), "t", driver=f"{driver}:9", peers=2, reachable_host=driver)
assert "refused" in probe._check_driver("h"), "packets reach the driver, where nobody listens"
print(probe._check_peers("h"))
"""


@pytest.mark.parametrize("isolated", [False, True])
def test_probes_say_whether_executors_reach_one_another(tmp_path: Path, isolated: bool) -> None:
    with Network(3) as network:
        for node in (1, 2):
            if isolated:
                network.isolate(node)
        command = [sys.executable, "-c", PROBE, str(tmp_path), network.address(0)]
        environment = os.environ | cluster_environment()
        how: dict[str, Any] = {"env": environment, "stdout": subprocess.PIPE, "text": True}
        probes = [subprocess.Popen(network.build_command(node, *command), **how) for node in (1, 2)]
        said = [probe.communicate(timeout=120)[0].strip() for probe in probes]
    if isolated:
        told = [text for text in said if "cannot reach 10.77.0." in text]
        assert any("serverless compute does not allow" in text for text in told)
    else:
        assert said == ["None", "None"]
