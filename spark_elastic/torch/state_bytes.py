"""A captured training state as bytes, and back: torch's own format, read without unpickling anything but tensors and
plain values. Pure; any thread."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from spark_elastic.protocol.types import Phase, Position


def dumps(captured: Mapping[str, Any]) -> bytes:
    """What `TorchState.capture` gives, as bytes."""
    position, rng = captured["position"], captured["rng"]
    kind, words, *rest = rng["numpy"]
    plain = {
        **captured,
        "position": [position.epoch, position.phase.value, position.step],
        "rng": {**rng, "numpy": [kind, torch.from_numpy(words.astype(np.int64)), *rest]},
    }
    buffer = io.BytesIO()
    torch.save(plain, buffer)
    return buffer.getvalue()


def loads(data: bytes) -> dict[str, Any]:
    """What `TorchState.load` takes."""
    plain: dict[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    epoch, phase, step = plain["position"]
    kind, words, *rest = plain["rng"]["numpy"]
    rng = {**plain["rng"], "numpy": (kind, words.numpy().astype(np.uint32), *rest)}
    return {**plain, "position": Position(epoch, Phase(phase), step), "rng": rng}
