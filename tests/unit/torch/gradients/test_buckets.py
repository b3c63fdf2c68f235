"""Layouts: every parameter once, nothing overlaps, the same cut on every rank (R7); where their memory lies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spark_elastic.gradients import host_memory
from spark_elastic.gradients.buckets import ALIGN, FIRST_BUCKET, ParameterSpec, build_buckets, hash_layout
from spark_elastic.gradients.layout import BucketMemory, build_specs

SHAPES = st.lists(st.integers(0, 1 << 11), max_size=2).map(tuple)
DTYPES = st.sampled_from([("float32", 4), ("float64", 8)])


@st.composite
def models(draw: st.DrawFn) -> list[ParameterSpec]:
    kinds = draw(st.lists(st.tuples(SHAPES, DTYPES), min_size=1, max_size=30))
    return [ParameterSpec(f"p{i}", shape, *dtype) for i, (shape, dtype) in enumerate(kinds)]


@given(models(), st.integers(1, 4 * FIRST_BUCKET))
def test_r07_every_parameter_is_once_in_a_bucket_of_its_dtype(specs: list[ParameterSpec], size: int) -> None:
    buckets = build_buckets(specs, size)
    order = [part.index for bucket in buckets for part in bucket.slices]
    assert order == list(reversed(range(len(specs))))
    for number, bucket in enumerate(buckets):
        end = 0
        for part in bucket.slices:
            spec = specs[part.index]
            assert part.numel == spec.numel
            assert spec.dtype == bucket.dtype
            assert part.offset >= end
            assert part.offset * spec.itemsize % ALIGN == 0
            end = part.offset + part.numel
        assert bucket.numel >= end
        limit = FIRST_BUCKET if number == 0 else size
        assert len(bucket.slices) == 1 or end * specs[bucket.slices[0].index].itemsize <= limit


@given(models(), st.integers(1, 1 << 24))
def test_r07_different_layouts_have_different_hashes(specs: list[ParameterSpec], size: int) -> None:
    same = hash_layout(specs, size)
    assert same == hash_layout([replace(spec) for spec in specs], size)
    assert same < 1 << 64
    first = specs[0]
    for change in ({"name": "q"}, {"shape": (*first.shape, 1)}, {"dtype": "int8"}):
        other = replace(first, **change)  # type: ignore[arg-type]
        assert hash_layout([other, *specs[1:]], size) != same
    assert hash_layout(specs, size + 1) != same


def test_the_first_bucket_is_small_so_that_it_is_sent_early() -> None:
    specs = [ParameterSpec(f"p{i}", (1 << 16,), "float32", 4) for i in range(64)]
    first, second, *_ = build_buckets(specs, 1 << 22)
    assert first.numel * 4 == FIRST_BUCKET
    assert second.numel * 4 == 1 << 22


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
    told = [record.getMessage().partition(",")[0] for record in caplog.records]
    assert told == ["tensors of GPUs are exchanged through the host"] * times
