"""What each check keeps of a value, and the sentence for one that does not fit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spark_elastic import checks
from spark_elastic.errors import InvalidInput

PORTS = checks.make_range("two ports", checks.make_whole(1, 65535))


@pytest.mark.parametrize(
    ("check", "value", "kept"),
    [
        (checks.WHOLE, np.int64(3), 3),
        (checks.VERBOSE, True, 1),
        (checks.ABOVE_0, np.float32(0.5), 0.5),
        (checks.ABOVE_0, 2, 2.0),
        (checks.ABOVE_0.or_none(), None, None),
        (checks.TEXT, Path("hosts.sh"), "hosts.sh"),
        (checks.make_choice("bf16", "fp16"), "fp16", "fp16"),
        (PORTS, [np.int64(7000), 7010], (7000, 7010)),
        (checks.FUNCTION, len, len),
    ],
)
def test_a_value_that_fits_is_kept_as_pythons_own(check: checks.Check, value: Any, kept: Any) -> None:
    found = check("name", value)
    assert (type(found), found) == (type(kept), kept)


@pytest.mark.parametrize(
    ("check", "value", "sentence"),
    [
        (checks.COUNT, 0, "name must be a whole number of 1 or more; got 0."),
        (checks.COUNT, True, "name must be a whole number of 1 or more; got True."),
        (checks.COUNT.or_none(), "3", "name must be a whole number of 1 or more, or None; got '3'."),
        (checks.ABOVE_0, math.nan, "name must be a number above 0; got nan."),
        (checks.FLAG, 1, "name must be True or False; got 1."),
        (checks.TEXT, b"path", "name must be text; got b'path'."),
        (checks.VERBOSE, -1, "name must be 0, 1 or 2; got -1."),
        (checks.make_choice("bitwise").or_none(), "exact", "name must be 'bitwise', or None; got 'exact'."),
        (checks.make_choice("bf16", "fp16"), ["bf16"], "name must be one of 'bf16', 'fp16'; got ['bf16']."),
        (PORTS, (7010, 7000), "name must be two ports; got (7010, 7000)."),
        (PORTS, 7000, "name must be two ports; got 7000."),
        (checks.FUNCTION, "secret" * 20, "name must be a function; got str."),
    ],
)
def test_a_value_that_does_not_fit_is_refused(check: checks.Check, value: Any, sentence: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        check("name", value)
    assert str(raised.value) == sentence
