"""States and data loaders of hand-written training in torch: the public name of `handwritten.torch_state`."""

from spark_elastic.handwritten.torch_state import *
from spark_elastic.handwritten.torch_state import __all__ as __all__
