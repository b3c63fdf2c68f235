"""`Compression` for Keras on the backend at hand: that of the TensorFlow or of the torch half. Values only."""

from __future__ import annotations

import importlib
from typing import Any

import keras

_HALF = "torch" if keras.backend.backend() == "torch" else "tensorflow"
Compression: Any = importlib.import_module(f"spark_elastic.{_HALF}.compression").Compression
