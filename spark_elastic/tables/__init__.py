"""Tables that are read where they lie: Parquet files, Delta and Iceberg, and what selects rows of them."""
