"""Settings by which Spark itself would end or harm a job: told at its start. Pure but for `warn`, which logs.

What each of them does, and what does not matter, is in docs/spark-settings.md.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

log = logging.getLogger("spark_elastic.spark")

FEW_FAILURES = 100  # lost executors that an elastic job may well live through
YARN_DEFAULT = "spark.executor.maxNumFailures"
YARN_OLD = "spark.yarn.max.executor.failures"
VALIDITY = ("spark.executor.failuresValidityInterval", "spark.yarn.executor.failuresValidityInterval")
ADDRESS_SPACE = "spark.executor.pyspark.memory"
# Each of them encrypts what Spark's driver sends to executors, tasks among it.
ENCRYPTION = (
    "spark.network.crypto.enabled",
    "spark.authenticate.enableSaslEncryption",
    "spark.ssl.rpc.enabled",
)


def ssl_enabled(settings: Mapping[str, str]) -> bool:
    """Spark's own servers speak TLS, so that ours do unless the configuration says otherwise."""
    return settings.get("spark.ssl.enabled", "false").lower() == "true"


def warn(settings: Mapping[str, str], application: object, plain: str | None = None) -> None:
    """Log what `remarks` finds, a line each, once an application: its context or session keeps what was told."""
    told: set[str] = vars(application).setdefault("_spark_elastic_told", set())
    for remark in remarks(settings, plain):
        if remark not in told:
            told.add(remark)
            log.warning("%s", remark)


def remarks(settings: Mapping[str, str], plain: str | None = None) -> list[str]:
    """What Spark decides for the whole application, and what limits workers unseen; a sentence each.

    plain: host of a Spark Connect server to which the session speaks without TLS.
    """
    found = []
    if plain is not None and not _is_loopback(plain):
        found.append(
            f"a job's key travels to the Spark Connect server {plain} in the clear, and who listens to the network can "
            "take it and join a job. Connect with sc://...;use_ssl=true."
        )
    master = settings.get("spark.master", "")
    if master == "yarn" or master.startswith("k8s://"):
        found += _failure_count(settings)
    if ADDRESS_SPACE in settings:
        found.append(
            f"{ADDRESS_SPACE}={settings[ADDRESS_SPACE]} limits the address space of each worker, not its memory, and "
            "frameworks reserve much more than they use, CUDA most of all: use spark.executor.memoryOverhead instead."
        )
    if not _stays_on_one_machine(settings) and not any(
        settings.get(name, "false").lower() == "true" for name in ENCRYPTION
    ):
        found.append(
            "a job's key travels inside Spark's tasks, which are not encrypted here, and who listens to the network "
            "can take it and join a job. Set spark.authenticate=true and spark.network.crypto.enabled=true."
        )
    return found


def _stays_on_one_machine(settings: Mapping[str, str]) -> bool:
    if settings.get("spark.master", "local").startswith("local"):
        return True
    return _is_loopback(settings.get("spark.driver.host", ""))


def _is_loopback(host: str) -> bool:
    return host.strip("[]") in ("localhost", "::1") or host.startswith("127.")


def _failure_count(settings: Mapping[str, str]) -> list[str]:
    """On YARN and Kubernetes Spark ends an application whose executors failed too often, whatever its jobs think."""
    said = settings.get(YARN_DEFAULT, settings.get(YARN_OLD))
    forgets = any(name in settings for name in VALIDITY)
    if forgets or (said is not None and said.isdigit() and int(said) >= FEW_FAILURES):
        return []
    count = f"{said} executors" if said is not None else "few executors (twice their number by default)"
    return [
        f"Spark ends the whole application after the failure of {count}, and no job can prevent it: set "
        f"{YARN_DEFAULT} to 1000, or {VALIDITY[0]} to 10m."
    ]
