"""Row groups of Parquet files as numpy arrays: the readers, and what they keep in memory and cut on disk."""
