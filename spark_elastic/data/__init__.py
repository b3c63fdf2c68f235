"""From a table in a store to the rows of each step: the plan, the store, the manifest, readers and loaders."""

from spark_elastic.data.horovod_data import AsyncDataLoaderMixin, BaseDataLoader

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]
