"""Exceptions of user code and results, on their way from a worker to the user."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidInput, add_note
from spark_elastic.gradients.step_summary import StepDecision
from spark_elastic.protocol.types import INITIAL_VERSION, START
from spark_elastic.rendezvous.messages import MAX_BODY_BYTES
from spark_elastic.worker import program as raised_module
from spark_elastic.worker.function_program import Script
from spark_elastic.worker.program import (
    LINE_AT_MOST,
    RESULT_AT_MOST,
    TRACEBACK_AT_MOST,
    check_result_size,
    compute_fingerprint,
    decode_result,
    encode_result,
    format_traceback,
)


def catch(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


def format_raised(call: Callable[[], object]) -> str:
    """The traceback of what the call raises, without this module's own frames."""
    with pytest.raises((Exception,)) as caught:
        call()
    inner = caught.value.__traceback__
    while inner is not None and inner.tb_frame.f_code.co_filename == __file__:
        inner = inner.tb_next
    return format_traceback(caught.value.with_traceback(inner))


class ErrorWithoutText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_equal_exceptions_have_equal_fingerprints() -> None:
    assert compute_fingerprint(catch(ValueError("a"))) == compute_fingerprint(catch(ValueError("a")))
    assert compute_fingerprint(catch(ValueError("a"))) != compute_fingerprint(catch(ValueError("b")))
    objects = object(), object()
    drawn = [f"{a} is not in /x/tmp{b}" for a, b in zip(objects, ("ab_12cd3", "zz9yxw_1"), strict=True)]
    assert len({compute_fingerprint(catch(ValueError(text))) for text in drawn}) == 1


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ValueError("cannot read /data/caf\udce9.jpg"), "ValueError: cannot read /data/caf\\udce9.jpg"),
        (ErrorWithoutText(), "ErrorWithoutText: <exception str() failed>"),
        (ValueError("bad batch " + "x" * 9_000_000 + " of 3"), "ValueError: bad batch xx"),
    ],
    ids=["a file name that is no text", "no message at all", "a tensor printed whole"],
)
def test_any_exception_gives_a_traceback_that_fits_in_a_message(error: Exception, says: str) -> None:
    text = format_traceback(catch(error))
    text.encode()
    assert says in text
    assert len(text) < 2 * LINE_AT_MOST
    assert len(compute_fingerprint(catch(error))) == 16


def test_a_long_traceback_keeps_its_beginning_and_end() -> None:
    error = catch(ValueError("\n".join(f"row {n} is bad" for n in range(50_000))))
    add_note(error, "in step 3")
    text = format_traceback(error)
    assert text.startswith("Traceback (most recent call last)")
    assert "ValueError: row 0 is bad" in text
    assert "characters are left out here" in text
    assert text.endswith("row 49999 is bad\nin step 3\n")
    assert TRACEBACK_AT_MOST <= len(text) < TRACEBACK_AT_MOST + 100


def test_a_traceback_begins_at_the_users_first_frame(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("def step():\n    return 1 / 0\n\n\nstep()\n")
    text = format_raised(Script.read(str(path)))
    first, at, *_ = text.splitlines()
    assert (first, at.split(",")[0]) == ("Traceback (most recent call last):", f'  File "{path}"')
    assert text.endswith("ZeroDivisionError: division by zero\n")


def check_loss(file: Path) -> None:
    none = np.zeros(0, np.bool_)
    StepDecision(INITIAL_VERSION, 4, math.nan, 4.0, none, none).check_finite(START)


def write_into_file(file: Path) -> None:
    file.write_text("")
    Store.open(str(file)).write_bytes("model.pt", b"")


@pytest.mark.parametrize(
    ("fail", "sentence"),
    [
        (check_loss, "FloatingPointError: the loss became nan in step 0 of epoch 1: "),
        (write_into_file, "spark_elastic.errors.StoreError: Cannot write 'model.pt' in the store file:///"),
    ],
)
def test_sentences_are_shown_without_frames(
    fail: Callable[[Path], None], sentence: str, tmp_path: Path
) -> None:
    text = format_raised(lambda: fail(tmp_path / "file"))
    assert text.startswith(sentence)
    assert text.count("\n") == 1


def as_number(text: str) -> int:
    return int(text)


def test_code_in_a_folder_with_a_similar_name_counts_as_the_users() -> None:
    beside = f"{Path(raised_module.__file__).parents[1]}_of_mine.py"
    code = compile("def step():\n    int('x')\nstep()", beside, "exec")
    assert format_raised(lambda: exec(code, {"int": as_number})).count(beside) == 2
    assert "function_program.py" in format_raised(lambda: Script.read("missing.py")), "all its frames"


def test_any_picklable_result_comes_back_equal() -> None:
    for value in (None, {"a": (1, 2.5)}, "text", b"bytes"):
        assert decode_result(encode_result(value, 0), 0) == value
    assert decode_result(encode_result(np.arange(3), 0), 0).tolist() == [0, 1, 2]
    assert decode_result(encode_result(lambda x: x + 1, 0), 0)(2) == 3
    assert decode_result("null", 0) is None  # of a worker that ended without one


class _UnpicklableError(Exception):
    """As many a class of exceptions does, it pickles and does not come back."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(what)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ((number for number in range(3)), "generator that cannot be pickled"),
        (_UnpicklableError("back", "nowhere"), r"on rank 3 .* cannot be read here \(TypeError: .*'where'"),
        (bytes(RESULT_AT_MOST), r"on rank 3 returned a bytes of 5\.0 MiB, and at most 5 MiB"),
    ],
    ids=["not pickled", "not read back", "too large"],
)
def test_a_result_that_cannot_be_handed_back_is_refused_with_a_sentence(value: object, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        decode_result(encode_result(value, 3), 3)


def test_a_result_larger_than_the_servers_limit_is_refused_with_a_sentence() -> None:
    assert len(encode_result(bytes(RESULT_AT_MOST - 1000), 0)) < MAX_BODY_BYTES
    check_result_size("x" * (7 << 20))
    with pytest.raises(InvalidInput, match=r"takes 8\.6 MiB in a message, and at most 8 MiB"):
        check_result_size('"' * 4_500_000)
