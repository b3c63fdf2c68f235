"""Compressors of Horovod for TensorFlow: the public name of `horovod.tensorflow.compression`."""

from spark_elastic.horovod.tensorflow.compression import *
from spark_elastic.horovod.tensorflow.compression import __all__ as __all__
