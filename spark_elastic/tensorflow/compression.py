"""Horovod's compressors, which are those of `spark_elastic.keras.compression`."""

from spark_elastic.keras.compression import *
from spark_elastic.keras.compression import __all__ as __all__
