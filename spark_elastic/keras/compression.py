"""Compressors of Horovod for Keras: the public name of `horovod.keras.compression`."""

from spark_elastic.horovod.keras.compression import Compression

__all__ = ["Compression"]
