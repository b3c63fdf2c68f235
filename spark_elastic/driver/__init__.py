"""The driver's thread and its ports to a cluster. Knows no Spark: a cluster implements `driver/ports.py`."""
