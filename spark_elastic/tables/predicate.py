"""Which rows of a table `where` keeps: comparisons of columns with values, as the `filters` of pyarrow and pandas.

Null matches no comparison, and NaN only != and "not in". `judge` answers from bounds of a column, as statistics and
partitions have them, and `match` from the values. Values; any thread.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
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
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
_OPPOSITES = {"!=": "==", "not in": "in"}
_OPERATORS = ("==", *_COMPARE, *_OPPOSITES, "in")


@dataclass(frozen=True)
class Bounds:
    """What is known of the values of a column in some rows."""

    # No value is less, nulls and NaN aside; None: all are null, NaN: all are NaN.
    low: Any
    # No value is greater; None and NaN as for `low`.
    high: Any
    # Whether there may be nulls.
    may_be_null: bool
    # Whether there may be NaN.
    may_be_nan: bool


FindBounds = Callable[[str, Any], Bounds | None]
"""What is known of a column, as values of the kind that the given one is; None: nothing."""


@dataclass(frozen=True)
class Predicate:
    """Which rows to take."""

    # A row matches if it matches all comparisons of one of the groups.
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
        if types.is_float16(values.type):  # of which Arrow compares none
            values = values.cast(pa.float32())
        positive = _OPPOSITES.get(operator, operator)
        if positive in ("==", "in"):
            found = _find_equal(values, [value] if positive == "==" else value)
        else:
            found = _compare(positive, values, _to_python(value))
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


def _to_python(value: Any) -> Any:
    """A number of numpy as Python has it, without a loss."""
    return value.item() if isinstance(value, np.number) else value


def _compare(operator: str, values: pa.Array, value: Any) -> Any:
    """By the order of values."""
    if types.is_integer(values.type) and type(value) is int:  # Arrow takes it for int64
        low, high = _find_range(values.type)
        judged = _judge_value(operator, value, Bounds(low, high, may_be_null=False, may_be_nan=False))
        if judged is not None:
            return pa.array(np.full(len(values), judged))
        value = pa.scalar(value, values.type)
    return _COMPARE[operator](values, value)


def _find_equal(values: pa.Array, given: Iterable[Any]) -> Any:
    """Of each row, whether it equals one of the given values."""
    of_type: dict[type, list[Any]] = defaultdict(list)
    for each in map(_to_python, given):
        if each == each:  # in Arrow's lists NaN equals itself
            of_type[type(each)].append(each)
    found = pa.array(np.zeros(len(values), np.bool_))
    if values.null_count == len(values):
        return found
    if types.is_fixed_size_binary(values.type):  # to which Arrow casts no bytes of another length
        values = values.cast(pa.binary())
    for kind, members in of_type.items():
        found = pc.or_(found, _find_members(values, members, kind))
    return found


def _find_members(values: pa.Array, given: list[Any], given_type: type) -> Any:
    """As `_find_equal`, of values of one type: looks up those that the column's type has, since no row is another."""
    kind = values.type
    if types.is_integer(kind) and given_type in (int, float, Decimal):
        low, high = _find_range(kind)
        among = pa.array([int(each) for each in given if low <= each <= high and each == int(each)], kind)
    elif types.is_decimal(kind) and given_type in (int, Decimal):
        among = pa.array(_choose_decimals(given, kind), kind)
    elif (types.is_decimal(kind) or types.is_floating(kind)) and given_type in (int, float):
        values = values.cast(pa.float64())  # a cast of 0.1 to float32 would change it
        among = pa.array([float(each) for each in given if float(each) == each], pa.float64())
    else:
        there = pa.array(given)
        among = there.cast(kind, safe=False)
        among = among.filter(pc.equal(among, there))
    if types.is_floating(values.type):  # in Arrow's lists 0.0 and -0.0 differ
        values, among = pc.add(values, 0.0), pc.add(among, 0.0)
    return pc.is_in(values, value_set=among)


def _find_range(kind: pa.DataType) -> tuple[int, int]:
    """The least and the greatest number of a type of whole numbers."""
    found = np.iinfo(kind.to_pandas_dtype())
    return int(found.min), int(found.max)


def _choose_decimals(given: list[Any], kind: pa.DataType) -> list[Any]:
    """Those that the type of a decimal column has. Arrow refuses the others, which no row has, and casts int64 only to
    19 digits."""
    found = []
    for each in given:
        with suppress(pa.ArrowInvalid):
            found.append(pa.scalar(Decimal(each), kind))
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
