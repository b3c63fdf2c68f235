"""States and callbacks of an elastic `model.fit`: the public name of `horovod.keras.elastic`."""

from spark_elastic.horovod.keras.elastic import *
from spark_elastic.horovod.keras.elastic import __all__ as __all__
