"""Horovod's interface for torch; `spark_elastic.torch` exports it."""
