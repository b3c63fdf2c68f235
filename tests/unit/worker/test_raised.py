"""Whatever user code raises reaches the user."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_elastic.errors import InvalidInput
from spark_elastic.worker import program as raised_module
from spark_elastic.worker.program import (
    LINE_AT_MOST,
    TRACEBACK_AT_MOST,
    compute_fingerprint,
    format_traceback,
)
from spark_elastic.worker.script import Script


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_the_same_defect_has_the_same_fingerprint() -> None:
    assert compute_fingerprint(raised(ValueError("a"))) == compute_fingerprint(raised(ValueError("a")))
    assert compute_fingerprint(raised(ValueError("a"))) != compute_fingerprint(raised(ValueError("b")))


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
    text = format_traceback(raised(error))
    text.encode()
    assert says in text
    assert len(text) < 2 * LINE_AT_MOST
    assert len(compute_fingerprint(raised(error))) == 16


def test_of_a_long_traceback_begin_and_end_are_kept() -> None:
    text = format_traceback(raised(ValueError("\n".join(f"row {n} is bad" for n in range(50_000)))))
    assert text.startswith("Traceback (most recent call last)")
    assert "ValueError: row 0 is bad" in text
    assert "characters are left out here" in text
    assert text.endswith("row 49999 is bad\n")
    assert TRACEBACK_AT_MOST <= len(text) < TRACEBACK_AT_MOST + 100


def test_a_traceback_begins_with_the_users_code(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("def step():\n    return 1 / 0\n\n\nstep()\n")
    with pytest.raises(ZeroDivisionError) as caught:
        Script.read(str(path))()
    ours = caught.value.__traceback__
    assert ours is not None
    text = format_traceback(caught.value.with_traceback(ours.tb_next))  # without this test's own frame
    first, at, *_ = text.splitlines()
    assert (first, at.split(",")[0]) == ("Traceback (most recent call last):", f'  File "{path}"')
    assert text.endswith("ZeroDivisionError: division by zero\n")


def as_number(text: str) -> int:
    return int(text)


def test_code_beside_ours_is_the_users() -> None:
    beside = f"{Path(raised_module.__file__).parents[1]}_of_mine.py"
    code = compile("def step():\n    int('x')\nstep()", beside, "exec")
    with pytest.raises(ValueError, match="invalid literal") as caught:
        exec(code, {"int": as_number})
    ours = caught.value.__traceback__
    assert ours is not None
    assert format_traceback(caught.value.with_traceback(ours.tb_next)).count(beside) == 2


def test_a_traceback_without_users_code_is_whole() -> None:
    with pytest.raises(InvalidInput) as caught:
        Script.read("missing.py")
    ours = caught.value.__traceback__
    assert ours is not None
    assert ours.tb_next is not None
    assert "script.py" in format_traceback(caught.value.with_traceback(ours.tb_next))
