"""A whole GPU for each slot, by a stage-level resource profile, where Spark's own tasks do not get one.

`whole_gpu` is pure; `profile_of` asks Spark whether the cluster takes profiles, and logs why not. Runs in the caller's
thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from pyspark.resource import ResourceProfile, ResourceProfileBuilder, TaskResourceRequests

log = logging.getLogger("spark_elastic.spark")

EXECUTOR_GPUS = "spark.executor.resource.gpu.amount"
TASK_GPUS = "spark.task.resource.gpu.amount"


def whole_gpu(settings: Mapping[str, str]) -> bool:
    """Whether executors have GPUs of which a task gets none, or a part."""
    return int(settings.get(EXECUTOR_GPUS, "0")) > 0 and float(settings.get(TASK_GPUS, "0")) < 1


def profile_of(
    settings: Mapping[str, str], take: Callable[[ResourceProfile], object]
) -> ResourceProfile | None:
    """The profile of slots; None: the application's own. take: makes Spark accept it, or raises."""
    if not whole_gpu(settings):
        return None
    cpus = int(settings.get("spark.task.cpus", "1"))
    requests = TaskResourceRequests().cpus(cpus).resource("gpu", 1)
    try:
        profile: ResourceProfile = ResourceProfileBuilder().require(requests).build
        take(profile)
    except Exception as error:  # py4j's or Spark Connect's, with Spark's reason
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        said = next((line for line in lines if "upported" in line), lines[0] if lines else repr(error))
        log.warning(
            "slots take no whole GPU each, since this cluster has no stage-level resources (%s): set %s=1",
            said[:200],
            TASK_GPUS,
        )
        return None
    log.info("slots take a whole GPU each, by a stage-level resource profile")
    return profile
