"""How every Parquet file is opened. Knows nothing of what is read from it. Any thread."""

from __future__ import annotations

from typing import Any

import pyarrow.parquet as pq


def opened(source: Any, pre_buffer: bool = False, buffer_size: int = 0) -> pq.ParquetFile:
    """source: an open file, which stays the caller's. Spark's timestamps (INT96) are read as it means them, in
    microseconds: Arrow's nanoseconds wrap around outside of the years 1677 to 2262."""
    return pq.ParquetFile(
        source, pre_buffer=pre_buffer, buffer_size=buffer_size, coerce_int96_timestamp_unit="us"
    )
