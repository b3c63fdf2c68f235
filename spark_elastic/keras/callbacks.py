"""Horovod's callbacks for Keras: the public name of `horovod.keras.callbacks`."""

from spark_elastic.horovod.keras.callbacks import *
from spark_elastic.horovod.keras.callbacks import __all__ as __all__
