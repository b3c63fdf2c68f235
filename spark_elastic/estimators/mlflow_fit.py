"""A fit as a run of MLflow: the public name of `integrations.mlflow_fit`."""

from spark_elastic.integrations.mlflow_fit import log_fit

__all__ = ["log_fit"]
