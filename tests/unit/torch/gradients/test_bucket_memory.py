"""Where gradients lie, and what is said of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from spark_elastic.gradients import host_memory
from spark_elastic.gradients.bucket_memory import BucketMemory
from spark_elastic.gradients.buckets import build_buckets
from spark_elastic.gradients.layout import build_specs


class Memory:
    """What a `BucketMemory` asks of a group when it is made."""

    def buffer(self, nbytes: int) -> Any:
        return np.zeros(nbytes, np.uint8)


@pytest.mark.parametrize(("device", "times"), [("cpu", 0), ("meta", 1)])
def test_exchange_of_gpu_gradients_through_the_host_is_logged_once(
    device: str, times: int, caplog: pytest.LogCaptureFixture
) -> None:
    group = Memory()
    host_memory.warn_about_gpus.cache_clear()
    parameters = [torch.nn.Parameter(torch.ones(3, device=device)) for _ in range(2)]
    buckets = build_buckets(build_specs(["a", "b"], parameters), bucket_bytes=1)
    for _ in range(2):  # in the next world, too, it is known
        BucketMemory(parameters, buckets, group)  # type: ignore[arg-type]
    assert len(buckets) == 2
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == [
        "tensors of GPUs are exchanged through the host"
    ] * times
