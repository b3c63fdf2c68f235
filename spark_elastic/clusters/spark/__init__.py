"""Slots over Spark: launchers, discovery, preflight, and DataFrames written for training. Knows no training."""
