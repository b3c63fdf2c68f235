"""States of hand-written training in TensorFlow: the public name of `horovod.tensorflow.elastic`."""

from spark_elastic.horovod.tensorflow.elastic import *
from spark_elastic.horovod.tensorflow.elastic import __all__ as __all__
