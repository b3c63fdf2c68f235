"""Compressors of Horovod for torch: the public name of `horovod.torch.compression`."""

from spark_elastic.horovod.torch.compression import *
from spark_elastic.horovod.torch.compression import __all__ as __all__
