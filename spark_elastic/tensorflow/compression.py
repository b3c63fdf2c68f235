"""Horovod's compressors: the public name of `horovod.ops.compression`."""

from spark_elastic.horovod.ops.compression import *
from spark_elastic.horovod.ops.compression import __all__ as __all__
