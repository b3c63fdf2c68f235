"""Settings of Spark that users have, and that a job must bear."""

from __future__ import annotations

NARROW = {
    "spark.task.maxFailures": "1",
    "spark.driver.maxResultSize": "1m",
    "spark.rpc.message.maxSize": "1",
    "spark.python.worker.reuse": "false",
    "spark.executorEnv.http_proxy": "http://127.0.0.1:9",
    "spark.executorEnv.https_proxy": "http://127.0.0.1:9",
}
SPECULATIVE = {
    "spark.speculation": "true",
    "spark.speculation.interval": "200ms",
    "spark.speculation.task.duration.threshold": "1s",
    "spark.scheduler.mode": "FAIR",
    "spark.decommission.enabled": "true",
    "spark.excludeOnFailure.enabled": "true",  # with maxFailures=1 Spark itself refuses it
}
DYNAMIC = {
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.shuffleTracking.enabled": "true",
    "spark.dynamicAllocation.minExecutors": "0",
    "spark.dynamicAllocation.maxExecutors": "3",
    "spark.dynamicAllocation.executorIdleTimeout": "5s",
    "spark.dynamicAllocation.schedulerBacklogTimeout": "1s",
}
