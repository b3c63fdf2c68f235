"""States and data loaders of hand-written training in torch: the public name of `handwritten.torch_state`."""

from spark_elastic.handwritten.torch_state import (
    ElasticDataLoader,
    ElasticSampler,
    HostUpdateResult,
    ModelStateHandler,
    ObjectState,
    OptimizerStateHandler,
    SamplerStateHandler,
    SnapshotHandler,
    State,
    StateHandler,
    TorchState,
    WorkerNotificationManager,
    get_handler_registry,
    notification_manager,
    run,
    set_handler_registry,
)

__all__ = [
    "ElasticDataLoader",
    "ElasticSampler",
    "HostUpdateResult",
    "ModelStateHandler",
    "ObjectState",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "SnapshotHandler",
    "State",
    "StateHandler",
    "TorchState",
    "WorkerNotificationManager",
    "get_handler_registry",
    "notification_manager",
    "run",
    "set_handler_registry",
]
