"""From a table in a store to the rows of each step: the plan, the store, the manifest, readers and loaders."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spark_elastic.data.horovod_data import AsyncDataLoaderMixin as AsyncDataLoaderMixin
    from spark_elastic.data.horovod_data import BaseDataLoader as BaseDataLoader

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'spark_elastic.data' has no attribute {name!r}")
    from spark_elastic.data import (
        horovod_data,  # it imports numpy, and most modules of this package do without
    )

    return getattr(horovod_data, name)
