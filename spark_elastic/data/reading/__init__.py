"""Readers: row groups of Parquet files as numpy arrays."""
