"""Callbacks that log to TensorBoard, MLflow and Weights & Biases: the public name of `integrations.loggers`."""

from spark_elastic.integrations.loggers import MLflowLogger, TensorBoardLogger, WandbLogger

__all__ = ["MLflowLogger", "TensorBoardLogger", "WandbLogger"]
