"""The driver's shell around the driver machine. Knows no Spark: `driver/ports.py` says what it needs of a cluster."""
