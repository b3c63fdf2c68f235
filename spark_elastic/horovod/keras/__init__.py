"""Horovod's interface for Keras; `spark_elastic.keras` exports it."""
