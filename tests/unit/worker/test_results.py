"""Results on their way to the caller, and scripts as functions."""

from __future__ import annotations

import numpy as np
import pytest

from spark_elastic.errors import InvalidInput
from spark_elastic.rendezvous.auth_middleware import RequestLimits
from spark_elastic.worker.program import RESULT_AT_MOST, check_result_size, decode_result, encode_result


def test_any_object_comes_back() -> None:
    for value in (None, {"a": (1, 2.5)}, "text", b"bytes"):
        assert decode_result(encode_result(value, 0), 0) == value
    assert decode_result(encode_result(np.arange(3), 0), 0).tolist() == [0, 1, 2]
    assert decode_result(encode_result(lambda x: x + 1, 0), 0)(2) == 3


def test_a_worker_that_ended_without_a_result_counts_as_none() -> None:
    assert decode_result("null", 0) is None


def test_what_cannot_be_pickled_is_one_sentence() -> None:
    with pytest.raises(InvalidInput, match="generator that cannot be pickled"):
        encode_result((number for number in range(3)), 0)


class _StaysAway(Exception):
    """As many a class of exceptions does, it pickles and does not come back."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(what)


def test_what_cannot_be_made_again_here_is_one_sentence() -> None:
    with pytest.raises(InvalidInput, match=r"on rank 3 .* cannot be read here \(TypeError: .*'where'"):
        decode_result(encode_result(_StaysAway("back", "nowhere"), 3), 3)


def test_a_result_too_large_for_a_message_is_one_sentence() -> None:
    assert len(encode_result(bytes(RESULT_AT_MOST - 1000), 0)) < RequestLimits().body
    with pytest.raises(InvalidInput, match=r"on rank 3 returned a bytes of 5\.0 MiB, and at most 5 MiB"):
        encode_result(bytes(RESULT_AT_MOST), 3)


def test_what_the_server_would_not_read_is_one_sentence() -> None:
    check_result_size("x" * (7 << 20))
    with pytest.raises(InvalidInput, match=r"takes 8\.6 MiB in a message, and at most 8 MiB"):
        check_result_size('"' * 4_500_000)
