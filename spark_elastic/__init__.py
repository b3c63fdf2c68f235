"""Elastic deep-learning training as a Spark ML estimator.

Owns the list of public names and nothing else. Each name is imported when it is first used (PEP 562), so that
`import spark_elastic` costs milliseconds and needs neither Spark nor a framework. To publish a name, add it to
`_MODULES` and to the `TYPE_CHECKING` block below it; tests/test_public_api.py compares the two.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# Module -> the public names that it defines.
_MODULES = {
    "clusters.run.attached": ("attach",),
    "clusters.run.call": ("run",),
    "clusters.run.torch_distributor": ("TorchDistributor",),
    "config": ("ElasticConfig",),
    "data.packing": ("Packing", "Ragged"),
    "driver.discovery": ("JobHandle",),
    "errors": (
        *("ElasticError", "InvalidInput", "PreflightError", "StoreError", "JobCancelled", "ConnectionClosed"),
        *("JobFailed", "WorkerFailed", "NotEnoughWorkers", "OutOfMemory", "TimeLimitReached"),
        *("CoordinatorLost", "FailureBudgetExceeded", "DriverUnreachable", "Unauthorized", "StaleGeneration"),
    ),
    "estimators.keras_estimator": ("ElasticKerasEstimator",),
    "estimators.keras_model": ("ElasticKerasModel",),
    "estimators.rows": ("Rows",),
    "estimators.torch_estimator": ("ElasticTorchEstimator",),
    "estimators.torch_model": ("ElasticTorchModel",),
    "worker.session": ("report", "task_resources"),
}
_EXPORTS = {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names}

if TYPE_CHECKING:
    from spark_elastic.clusters.run.attached import attach as attach
    from spark_elastic.clusters.run.call import run as run
    from spark_elastic.clusters.run.torch_distributor import TorchDistributor as TorchDistributor
    from spark_elastic.config import ElasticConfig as ElasticConfig
    from spark_elastic.data.packing import Packing as Packing
    from spark_elastic.data.packing import Ragged as Ragged
    from spark_elastic.driver.discovery import JobHandle as JobHandle
    from spark_elastic.errors import ConnectionClosed as ConnectionClosed
    from spark_elastic.errors import CoordinatorLost as CoordinatorLost
    from spark_elastic.errors import DriverUnreachable as DriverUnreachable
    from spark_elastic.errors import ElasticError as ElasticError
    from spark_elastic.errors import FailureBudgetExceeded as FailureBudgetExceeded
    from spark_elastic.errors import InvalidInput as InvalidInput
    from spark_elastic.errors import JobCancelled as JobCancelled
    from spark_elastic.errors import JobFailed as JobFailed
    from spark_elastic.errors import NotEnoughWorkers as NotEnoughWorkers
    from spark_elastic.errors import OutOfMemory as OutOfMemory
    from spark_elastic.errors import PreflightError as PreflightError
    from spark_elastic.errors import StaleGeneration as StaleGeneration
    from spark_elastic.errors import StoreError as StoreError
    from spark_elastic.errors import TimeLimitReached as TimeLimitReached
    from spark_elastic.errors import Unauthorized as Unauthorized
    from spark_elastic.errors import WorkerFailed as WorkerFailed
    from spark_elastic.estimators.keras_estimator import ElasticKerasEstimator as ElasticKerasEstimator
    from spark_elastic.estimators.keras_model import ElasticKerasModel as ElasticKerasModel
    from spark_elastic.estimators.rows import Rows as Rows
    from spark_elastic.estimators.torch_estimator import ElasticTorchEstimator as ElasticTorchEstimator
    from spark_elastic.estimators.torch_model import ElasticTorchModel as ElasticTorchModel
    from spark_elastic.worker.session import report as report
    from spark_elastic.worker.session import task_resources as task_resources

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> object:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module 'spark_elastic' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
