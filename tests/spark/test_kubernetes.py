"""The job of examples/kubernetes on Spark's own Kubernetes scheduler, whose pods are killed and evicted."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pyspark
import pytest

from tests.patience import until
from tests.scenarios import Fault
from tests.sources import ROOT
from tests.spark.cluster import LOOPBACK, cluster_environment
from tests.spark.kubernetes_cluster import KubernetesCluster

yaml = pytest.importorskip("yaml", reason="needs PyYAML")

pytestmark = [
    pytest.mark.spark,
    pytest.mark.native,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.faults,  # two minutes of both cores; test_hosts.py plays such losses in every build
]

MANIFESTS = ROOT / "examples" / "kubernetes"
EXECUTORS, EPOCHS = 3, 12  # of 42 steps, which take 8 s each before the losses are over


def read_manifest(kind: str) -> dict[str, Any]:
    texts = [path.read_text() for path in MANIFESTS.glob("*.yaml")]
    found = [each for text in texts for each in yaml.safe_load_all(text)]
    (only,) = [each for each in found if each["kind"] == kind]
    return dict(only)


def build_driver_command(cluster: KubernetesCluster, store: Path) -> list[str]:
    """The command of the driver's pod, for this machine: no image, ports that are free, a store that is a folder."""
    (container,) = read_manifest("Job")["spec"]["template"]["spec"]["containers"]
    replaced = {
        "/opt/spark/bin/spark-submit": str(Path(pyspark.__file__).parent / "bin" / "spark-submit"),
        "/opt/job/train_job.py": str(Path(__file__).with_name("kubernetes_job.py")),
        "--master=k8s://https://kubernetes.default.svc": f"--master=k8s://{cluster.url}",
        "--conf=spark.driver.host=spark-elastic-driver": f"--conf=spark.driver.host={LOOPBACK}",
        "--conf=spark.driver.port=7078": "--conf=spark.driver.port=0",
        "--conf=spark.driver.blockManager.port=7079": "--conf=spark.driver.blockManager.port=0",
        "--store=s3://bucket/jobs": f"--store={store}",
    }
    words = [*container["command"], *container["args"]]
    assert replaced.keys() <= set(words)
    words = [replaced.get(word, word) for word in words]
    words = [word.replace("$(NAMESPACE)", "default").replace("$(POD)", "driver") for word in words]
    return [*words, f"--epochs={EPOCHS}"]


def test_the_manifests_job_loses_a_pod_and_is_warned_of_another_and_trains_each_row_once(
    tmp_path: Path, fault: Fault
) -> None:
    role = read_manifest("Role")
    rights = [(kind, verb) for rule in role["rules"] for kind in rule["resources"] for verb in rule["verbs"]]
    with KubernetesCluster(tmp_path, rights) as cluster, (tmp_path / "driver.log").open("wb") as log:
        cluster.add("pods", "driver", {"app": "spark-elastic-driver"})
        command = build_driver_command(cluster, tmp_path / "store")
        gate = tmp_path / "over"
        environment = os.environ | cluster_environment(tmp_path) | {"GATE": str(gate)}
        how: Any = {"env": environment, "stdout": subprocess.PIPE, "stderr": log, "text": True}
        with subprocess.Popen(command, **how) as driver:
            try:
                until(lambda: count_steps(tmp_path) > 50, 240.0)
                first = cluster.running_pods()
                fault(cluster.kill, first[1])
                until(lambda: len(set(cluster.running_pods()) - set(first)) == 1, 120.0)
                fault(cluster.delete, "pods", first[2])  # as a drained node does
                until(lambda: len(set(cluster.running_pods()) - set(first)) == 2, 120.0)
                gate.touch()
                output, _ = driver.communicate(timeout=300)
            finally:
                driver.kill()
        assert driver.returncode == 0, (tmp_path / "driver.log").read_text()[-4000:]
        verdict = json.loads(output.splitlines()[-1])
        assert (verdict["rows_missing"], verdict["rows_doubled"]) == (0, 0), output
        assert max(verdict["worlds"]) == EXECUTORS, output
        assert EXECUTORS - 1 in verdict["worlds"], output
        assert cluster.forbidden == []
        until(lambda: not cluster.running_pods())


def count_steps(folder: Path) -> int:
    """Steps that workers have written down."""
    return sum(path.read_text().count('"applied"') for path in folder.glob("store/runs/*/ledger/*.jsonl"))
