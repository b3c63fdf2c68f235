"""Callbacks of estimators and of hand-written training: the public name of `training.torch.callbacks`."""

from spark_elastic.training.torch.callbacks import (
    BestWeights,
    Callback,
    EarlyStopping,
    LearningRateSchedule,
    Logs,
    Progress,
    Training,
    progress,
)

__all__ = [
    "BestWeights",
    "Callback",
    "EarlyStopping",
    "LearningRateSchedule",
    "Logs",
    "Progress",
    "Training",
    "progress",
]
