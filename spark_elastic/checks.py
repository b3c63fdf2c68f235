"""Checks of single values that users give: what a value must be, in words, and how it is kept. Values only."""

from __future__ import annotations

import importlib
import math
import operator
import os
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field
from numbers import Number, Real
from typing import Any

from spark_elastic.errors import InvalidInput

MAX_SHOWN = 80  # characters of a value in a message
_PLAIN = (str, bytes, Number, type(None), list, tuple, set, dict)  # kinds of values that a message shows


@dataclass(frozen=True)
class Check:
    """What a value must be. A call with the value's name and the value returns the one to keep."""

    wanted: str  # in words, as in "a whole number of 1 or more"
    convert: Callable[[Any], Any]  # returns the value to keep, or raises TypeError or ValueError

    def __call__(self, name: str, value: Any) -> Any:
        """Return the value to keep. Raises InvalidInput if the value does not fit."""
        try:
            return self.convert(value)
        except InvalidInput:  # has a sentence of its own
            raise
        except (TypeError, ValueError):
            raise InvalidInput(f"{name} must be {self.wanted}; got {describe(value)}.") from None

    def or_none(self) -> Check:
        return Check(f"{self.wanted}, or None", lambda value: None if value is None else self.convert(value))


def describe(value: Any) -> str:
    """A value for a message: a short plain one as it is, else its type."""
    text = repr(value) if isinstance(value, _PLAIN) else ""
    return text if text and len(text) <= MAX_SHOWN and "\n" not in text else type(value).__name__


def make_whole(least: int = 0, most: float = math.inf, wanted: str | None = None) -> Check:
    """A check for whole numbers, numpy's too, which are kept as Python's own."""

    def convert(value: Any) -> int:
        number = operator.index(value)
        if isinstance(value, bool) or not least <= number <= most:
            raise ValueError
        return number

    return Check(wanted or f"a whole number of {least} or more", convert)


def make_number(wanted: str, fits: Callable[[float], bool]) -> Check:
    """A check for numbers, which are kept as floats."""

    def convert(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, Real) or not fits(float(value)):
            raise ValueError
        return float(value)

    return Check(wanted, convert)


def make_choice(*allowed: str) -> Check:
    def convert(value: Any) -> str:
        return allowed[allowed.index(value)]

    names = ", ".join(map(repr, allowed))
    return Check(f"one of {names}" if len(allowed) > 1 else names, convert)


def make_range(wanted: str, bound: Check) -> Check:
    """A check for (first, last), the first not above the last."""

    def convert(value: Any) -> tuple[Any, Any]:
        first, last = map(bound.convert, value)
        if first > last:
            raise ValueError
        return first, last

    return Check(wanted, convert)


def make_kind(wanted: str, *kinds: type) -> Check:
    def convert(value: Any) -> Any:
        if not isinstance(value, kinds):
            raise TypeError
        return value

    return Check(wanted, convert)


def _to_text(value: Any) -> str:
    text = os.fspath(value)
    if not isinstance(text, str):
        raise TypeError
    return text


def _to_function(value: Any) -> Any:
    if not callable(value):
        raise TypeError
    return value


WHOLE = make_whole()
COUNT = make_whole(1)
ABOVE_0 = make_number("a number above 0", lambda number: number > 0)
SECONDS = make_number("a number of seconds above 0", lambda number: number > 0)
FLAG = make_kind("True or False", bool)
TEXT = Check("text", _to_text)
FUNCTION = Check("a function", _to_function)
COLUMN = make_kind("the name of a column", str)
VERBOSE = Check("0, 1 or 2", lambda value: WHOLE.convert(int(value) if isinstance(value, bool) else value))


def param(check: Any, default: Any = MISSING, *, may_change: bool = False) -> Any:
    """A field of a component's config. may_change: a later fit of the same run may have another value."""
    return field(default=default, metadata={"check": check, "may_change": may_change})


def check_workers(least: int, number: int, most: int) -> None:
    """Raise InvalidInput if the numbers of workers contradict each other."""
    if not 1 <= least <= number <= most:
        raise InvalidInput(
            "the numbers of workers must be 1 <= min_workers <= num_workers <= max_workers; "
            f"got {least}, {number}, {most}."
        )


def require_package(module: str, what: str, package: str) -> Any:
    """A module of a package that `what` needs and pip calls so. Raises InvalidInput if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InvalidInput(f"{what} needs {package} ({error}): pip install {package}.") from error
