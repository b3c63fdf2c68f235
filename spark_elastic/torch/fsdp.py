"""The state of FSDP2 models: the public name of `handwritten.fsdp`."""

from spark_elastic.handwritten.fsdp import FSDPState

__all__ = ["FSDPState"]
