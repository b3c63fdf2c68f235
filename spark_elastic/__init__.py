"""Elastic deep-learning training as a Spark ML estimator.

Owns the list of public names and nothing else. Each name is imported when it is first used (PEP 562), so that
`import spark_elastic` costs milliseconds and needs neither Spark nor a framework. To publish a name, add it to
`_EXPORTS` and to the `TYPE_CHECKING` block below it; tests/test_public_api.py compares the two.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# Public name -> the module that defines it.
_EXPORTS = {
    "ConnectionClosed": "spark_elastic.errors",
    "DriverUnreachable": "spark_elastic.errors",
    "ElasticConfig": "spark_elastic.config",
    "ElasticError": "spark_elastic.errors",
    "ElasticKerasEstimator": "spark_elastic.estimators.keras_estimator",
    "ElasticKerasModel": "spark_elastic.estimators.keras_model",
    "ElasticTorchEstimator": "spark_elastic.estimators.torch_estimator",
    "ElasticTorchModel": "spark_elastic.estimators.torch_model",
    "CoordinatorLost": "spark_elastic.errors",
    "FailureBudgetExceeded": "spark_elastic.errors",
    "InvalidInput": "spark_elastic.errors",
    "JobCancelled": "spark_elastic.errors",
    "JobFailed": "spark_elastic.errors",
    "JobHandle": "spark_elastic.driver.discovery",
    "NotEnoughWorkers": "spark_elastic.errors",
    "OutOfMemory": "spark_elastic.errors",
    "Packing": "spark_elastic.data.packing",
    "PreflightError": "spark_elastic.errors",
    "Rows": "spark_elastic.estimators.rows",
    "Ragged": "spark_elastic.data.packing",
    "StaleGeneration": "spark_elastic.errors",
    "StoreError": "spark_elastic.errors",
    "TimeLimitReached": "spark_elastic.errors",
    "TorchDistributor": "spark_elastic.clusters.run.torch_distributor",
    "Unauthorized": "spark_elastic.errors",
    "WorkerFailed": "spark_elastic.errors",
    "attach": "spark_elastic.clusters.run.attached",
    "report": "spark_elastic.worker.session",
    "run": "spark_elastic.clusters.run.call",
    "task_resources": "spark_elastic.worker.session",
}

if TYPE_CHECKING:
    from spark_elastic.clusters.run.attached import attach
    from spark_elastic.clusters.run.call import run
    from spark_elastic.clusters.run.torch_distributor import TorchDistributor
    from spark_elastic.config import ElasticConfig
    from spark_elastic.data.packing import Packing, Ragged
    from spark_elastic.driver.discovery import JobHandle
    from spark_elastic.errors import (
        ConnectionClosed,
        CoordinatorLost,
        DriverUnreachable,
        ElasticError,
        FailureBudgetExceeded,
        InvalidInput,
        JobCancelled,
        JobFailed,
        NotEnoughWorkers,
        OutOfMemory,
        PreflightError,
        StaleGeneration,
        StoreError,
        TimeLimitReached,
        Unauthorized,
        WorkerFailed,
    )
    from spark_elastic.estimators.keras_estimator import ElasticKerasEstimator
    from spark_elastic.estimators.keras_model import ElasticKerasModel
    from spark_elastic.estimators.rows import Rows
    from spark_elastic.estimators.torch_estimator import ElasticTorchEstimator
    from spark_elastic.estimators.torch_model import ElasticTorchModel
    from spark_elastic.worker.session import report, task_resources

__all__ = [
    "ConnectionClosed",
    "CoordinatorLost",
    "DriverUnreachable",
    "ElasticConfig",
    "ElasticError",
    "ElasticKerasEstimator",
    "ElasticKerasModel",
    "ElasticTorchEstimator",
    "ElasticTorchModel",
    "FailureBudgetExceeded",
    "InvalidInput",
    "JobCancelled",
    "JobFailed",
    "JobHandle",
    "NotEnoughWorkers",
    "OutOfMemory",
    "Packing",
    "PreflightError",
    "Ragged",
    "Rows",
    "StaleGeneration",
    "StoreError",
    "TimeLimitReached",
    "TorchDistributor",
    "Unauthorized",
    "WorkerFailed",
    "attach",
    "report",
    "run",
    "task_resources",
]


def __getattr__(name: str) -> object:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module 'spark_elastic' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
