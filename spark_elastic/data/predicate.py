"""Which rows of a table `where` keeps: comparisons of columns with values, as the `filters` of pyarrow and pandas.

Null matches no comparison, and NaN only != and "not in". `judge` answers from bounds of a column, as statistics and
partitions have them, and `match` from the values. Values; any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as types

from spark_elastic.errors import InvalidInput

Comparison = tuple[str, str, Any]
"""Name of a column, operator, value; for "in" and "not in" a list of values."""
Mask = npt.NDArray[np.bool_]

_COMPARE: Mapping[str, Callable[[Any, Any], Any]] = {
    "==": pc.equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
_OPPOSITES = {"!=": "==", "not in": "in"}
_OPERATORS = (*_COMPARE, *_OPPOSITES, "in")


@dataclass(frozen=True)
class Bounds:
    """What is known of the values of a column in some rows."""

    # Values that all others but nulls and NaN lie between, these two included; None: all are null, NaN: all are NaN.
    low: Any
    high: Any
    # Whether there may be nulls or NaN.
    may_be_null: bool
    may_be_nan: bool


FindBounds = Callable[[str, Any], Bounds | None]
"""What is known of a column, as values of the kind that the given one is; None: nothing."""


@dataclass(frozen=True)
class Predicate:
    """A row matches if it matches all comparisons of one of the groups."""

    groups: tuple[tuple[Comparison, ...], ...]

    @classmethod
    def parse(cls, where: Any) -> Predicate | None:
        """where: a list of comparisons that all must hold, or a list of such lists of which one must; None: no `where`.

        Raises:
            InvalidInput: it is neither.
        """
        if where is None:
            return None
        groups = [where] if _is_group(where) else where
        if not isinstance(groups, list | tuple) or not groups or not all(map(_is_group, groups)):
            raise InvalidInput(
                f"where must be a list of comparisons (column, operator, value), or a list of such lists of which one "
                f"must hold, with the operators {', '.join(_OPERATORS)}; got {where!r}."
            )
        return cls(
            tuple(
                tuple((name, operator, _sort_members(value)) for name, operator, value in group)
                for group in groups
            )
        )

    @property
    def columns(self) -> list[str]:
        """The columns that are compared."""
        return list(dict.fromkeys(name for group in self.groups for name, _, _ in group))

    def judge(self, find_bounds: FindBounds) -> bool | None:
        """Whether all rows match, or none does; None: the values must be looked at."""
        return _combine_any(_all(_judge(each, find_bounds) for each in group) for group in self.groups)

    def match(self, find_bounds: FindBounds, read: Callable[[str], pa.Array], rows: int) -> Mask:
        """Of each row, whether it matches. read: gives a column, of which the bounds do not tell.

        Raises:
            InvalidInput: a column cannot be compared with a value.
        """
        found = np.zeros(rows, np.bool_)
        for group in self.groups:
            matching = np.ones(rows, np.bool_)
            for comparison in group:
                judged = _judge(comparison, find_bounds)
                matching &= _match(read(comparison[0]), comparison) if judged is None else judged
            found |= matching
        return found


def _sort_members(value: Any) -> Any:
    """A list in place of a set, whose order is another one in each process, and of an array, of which `repr` shows some
    values only: both decide whether a run that is resumed has the same predicate."""
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    return list(value) if isinstance(value, np.ndarray) else value


def _is_group(found: Any) -> bool:
    return isinstance(found, list | tuple) and bool(found) and all(map(_is_comparison, found))


def _is_comparison(found: Any) -> bool:
    if not isinstance(found, list | tuple) or len(found) != 3:
        return False
    name, operator, value = found
    is_list = isinstance(value, list | tuple | set | frozenset | np.ndarray)
    return isinstance(name, str) and operator in _OPERATORS and is_list == (operator in ("in", "not in"))


def _all(judged: Any) -> bool | None:
    found = list(judged)
    return False if False in found else None if None in found else True


def _combine_any(judged: Any) -> bool | None:
    found = list(judged)
    return True if True in found else None if None in found else False


def _judge(comparison: Comparison, find_bounds: FindBounds) -> bool | None:
    name, operator, value = comparison
    positive = _OPPOSITES.get(operator, operator)
    given = value if positive == "in" else [value]
    found: bool | None = False
    bounds = None
    for each in given or [""]:  # whatever is compared, no null matches: also where the list is empty
        bounds = find_bounds(name, each)
        if bounds is None:
            return None
        if bounds.low is None:
            return False
        if given:
            found = _combine_any([found, _judge_value("==" if positive == "in" else positive, each, bounds)])
    if bounds is None or found is None:
        return None
    matches_nan = operator in _OPPOSITES
    found = found is not matches_nan
    is_certain = not bounds.may_be_nan or found is matches_nan
    return found if is_certain and not (found and bounds.may_be_null) else None


def _judge_value(operator: str, value: Any, bounds: Bounds) -> bool | None:
    low, high = bounds.low, bounds.high
    if value != value or low != low:  # NaN, which no comparison but the opposite ones matches
        return False
    if isinstance(value, np.floating):
        value = value.item()  # as numpy compares, the bounds would get its precision
    if {type(value), type(low)} == {Decimal, float}:
        return None  # Arrow compares these inexactly
    try:
        if operator == "==":
            return False if value < low or value > high else True if low == high else None
        if operator in ("<", "<="):
            below, above = (high < value, low >= value) if operator == "<" else (high <= value, low > value)
        else:
            below, above = (low > value, high <= value) if operator == ">" else (low >= value, high < value)
        return True if below else False if above else None
    except TypeError:  # such as times with and without a zone: Arrow decides
        return None


def _match(values: pa.Array, comparison: Comparison) -> Mask:
    name, operator, value = comparison
    try:
        if types.is_dictionary(values.type):
            values = values.dictionary_decode()
        positive = _OPPOSITES.get(operator, operator)
        if positive == "in":
            given = [each for each in value if each == each]  # in Arrow's lists NaN equals itself
            kind = values.type if types.is_uint64(values.type) and all(map(_is_unsigned, given)) else None
            if types.is_decimal(values.type) and all(map(_is_decimal, given)):
                given, kind = _choose_decimals(given, values.type), values.type
            among = pa.array(given, kind)
            is_real = types.is_floating(values.type) or types.is_decimal(values.type)
            if is_real and types.is_floating(among.type):  # as "==" does: a cast of 0.1 would change it
                values = values.cast(pa.float64())
            if types.is_floating(values.type):  # in Arrow's lists 0.0 and -0.0 differ
                values, among = pc.add(values, 0.0), pc.add(among.cast(values.type), 0.0)
            found = pc.is_in(values, value_set=among.cast(values.type))
        else:
            is_exact = types.is_uint64(values.type) and _is_unsigned(value)
            found = _COMPARE[positive](values, pa.scalar(int(value), values.type) if is_exact else value)
        if operator in _OPPOSITES:
            found = pc.invert(found)
        return np.asarray(
            pc.and_(pc.fill_null(found, False), values.is_valid()).to_numpy(zero_copy_only=False)
        )
    except (pa.ArrowException, TypeError, OverflowError) as error:
        raise InvalidInput(
            f"where compares column {name!r}, which is {values.type}, with {value!r} ({type(value).__name__}), which "
            "cannot be: give a value of the column's type."
        ) from error


def _is_unsigned(value: Any) -> bool:
    """Whether it is a whole number that uint64 has. Arrow takes it for int64, which it does not compare with uint64."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(0 <= value < 2**64)


def _is_decimal(value: Any) -> bool:
    return isinstance(value, int | np.integer | Decimal) and not isinstance(value, bool)


def _choose_decimals(given: list[Any], kind: pa.DataType) -> list[Any]:
    """Those that the type of a decimal column has. Arrow refuses the others, which no row has, and casts int64 only to
    19 digits."""
    found = []
    for each in given:
        with suppress(pa.ArrowInvalid):
            found.append(pa.scalar(each if isinstance(each, Decimal) else Decimal(int(each)), kind))
    return found


def parse_constant(text: str, like: Any, is_text: bool = False) -> Any:
    """A value from the text of a partition, of the kind that another value is. Raises InvalidInput if it is no such.

    is_text: the column's values are texts, whatever they look like.
    """
    try:
        if is_text and not isinstance(like, str):
            raise TypeError(type(like))
        value = _parse_as(text, like)
        value < like  # noqa: B015 - times with and without a zone cannot be compared
    except (ValueError, KeyError, TypeError, ArithmeticError) as error:
        raise InvalidInput(
            f"where compares a partition column, which has the value {text!r}, with {like!r}: give values of one kind."
        ) from error
    return value


def _parse_as(text: str, like: Any) -> Any:
    if isinstance(like, bool | np.bool_):
        return {"true": True, "false": False}[text.lower()]
    if isinstance(like, int | float):
        return int(text) if text.lstrip("+-").isdigit() else float(text)
    if isinstance(like, datetime):
        return datetime.fromisoformat(text)
    return date.fromisoformat(text) if isinstance(like, date) else type(like)(text)
