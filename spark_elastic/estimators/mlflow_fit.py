"""A fit as a run of MLflow: the public name of `integrations.export`."""

from spark_elastic.integrations.export import log_fit

__all__ = ["log_fit"]
