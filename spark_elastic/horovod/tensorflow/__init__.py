"""Horovod's interface for TensorFlow; `spark_elastic.tensorflow` exports it."""
