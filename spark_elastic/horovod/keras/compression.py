"""`Compression` of the Keras backend in use: that of `spark_elastic.tensorflow` or of `spark_elastic.torch`."""

from __future__ import annotations

import importlib
from typing import Any

import keras

_FRAMEWORK = "torch" if keras.backend.backend() == "torch" else "tensorflow"
Compression: Any = importlib.import_module(f"spark_elastic.{_FRAMEWORK}.compression").Compression
