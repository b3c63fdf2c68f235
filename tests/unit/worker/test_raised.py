"""Whatever user code raises reaches the user."""

from __future__ import annotations

import pytest

from spark_elastic.worker.raised import LINE_AT_MOST, TRACEBACK_AT_MOST, fingerprint, traceback_of


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_the_same_defect_has_the_same_fingerprint() -> None:
    assert fingerprint(raised(ValueError("a"))) == fingerprint(raised(ValueError("a")))
    assert fingerprint(raised(ValueError("a"))) != fingerprint(raised(ValueError("b")))


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ValueError("cannot read /data/caf\udce9.jpg"), "ValueError: cannot read /data/caf\\udce9.jpg"),
        (Mute(), "Mute: <exception str() failed>"),
        (ValueError("bad batch " + "x" * 9_000_000 + " of 3"), "ValueError: bad batch xx"),
    ],
    ids=["a file name that is no text", "no message at all", "a tensor printed whole"],
)
def test_any_exception_can_be_told(error: Exception, says: str) -> None:
    text = traceback_of(raised(error))
    text.encode()
    assert says in text
    assert len(text) < 2 * LINE_AT_MOST
    assert len(fingerprint(raised(error))) == 16


def test_of_a_long_traceback_begin_and_end_are_kept() -> None:
    text = traceback_of(raised(ValueError("\n".join(f"row {n} is bad" for n in range(50_000)))))
    assert text.startswith("Traceback (most recent call last)")
    assert "ValueError: row 0 is bad" in text
    assert "characters are left out here" in text
    assert text.endswith("row 49999 is bad\n")
    assert TRACEBACK_AT_MOST <= len(text) < TRACEBACK_AT_MOST + 100
