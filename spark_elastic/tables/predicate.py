"""Which rows of a table `where` keeps: comparisons of columns with values, as the `filters` of pyarrow and pandas.

Null matches no comparison, and NaN only != and "not in". The same kernels of Arrow compare values (`match`) and, of
the parts of a file, the bounds of their values (`judge`). With bounds `pyarrow.dataset.Expression` would lose rows:
where 1 is the only number beside NaN, it excludes them for k != 1. Values; any thread.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction
from functools import reduce
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

_ORDERS = ("<", "<=", ">", ">=")
_OPPOSITES = {"!=": "==", "not in": "in"}
_OPERATORS = ("==", *_ORDERS, *_OPPOSITES, "in")
_NANOSECONDS = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9, "day": 86_400 * 10**9}


@dataclass(frozen=True)
class Bounds:
    """What is known of the values of a column in each part of a file."""

    low: pa.Array  # of each part, a value that no other is less than, nulls and NaN aside; null: not known
    high: pa.Array  # of each part, a value that no other is greater than; null: not known
    is_null: Mask  # of each part, whether it has nulls alone
    may_be_null: Mask  # of each part, whether it may have nulls
    may_be_nan: bool  # whether there may be NaN beside what the bounds tell of

    def slice(self, part: int) -> Bounds:
        mine = slice(part, part + 1)
        known = self.low[mine], self.high[mine], self.is_null[mine], self.may_be_null[mine]
        return Bounds(*known, self.may_be_nan)


@dataclass(frozen=True)
class Predicate:
    """Which rows to take."""

    groups: tuple[tuple[Comparison, ...], ...]  # a row matches if it matches all comparisons of one of these

    @classmethod
    def parse(cls, where: Any) -> Predicate | None:
        """where: a list of comparisons that all must hold, or a list of such lists of which one must."""
        if where is None:
            return None
        groups = [where] if _is_group(where) else where
        if not isinstance(groups, list | tuple) or not groups or not all(map(_is_group, groups)):
            raise InvalidInput(
                f"where must be a list of comparisons (column, operator, value), or a list of such lists of which one "
                f"must hold, with the operators {', '.join(_OPERATORS)}; got {where!r}."
            )
        plain = ([(name, sign, _sort_members(value)) for name, sign, value in group] for group in groups)
        return cls(tuple(map(tuple, plain)))

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(name for group in self.groups for name, _, _ in group))

    def combine(self, decide: Callable[[Comparison], Mask]) -> Mask:
        """Of each row, whether it matches. decide: of each, or of all at once, whether one comparison holds."""
        return reduce(np.logical_or, (reduce(np.logical_and, map(decide, group)) for group in self.groups))


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


def match(values: pa.Array, comparison: Comparison) -> Mask:
    """Of each value, whether the comparison holds. Raises InvalidInput: they cannot be compared."""
    (name, operator, value), values = comparison, _simplify(values)
    found = pa.array(np.zeros(len(values), np.bool_))
    try:
        limits, side = _fit_all(comparison, values.type)
        if operator in _ORDERS and len(limits):
            found = _choose_kernel(operator, side)(values, limits[0])
        elif len(limits):
            found = pc.is_in(values, value_set=limits)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise InvalidInput(
            f"where compares column {name!r}, which is {values.type}, with {value!r} ({type(value).__name__}), which "
            "cannot be: give a value of the column's type."
        ) from error
    return (_to_mask(found) ^ (operator in _OPPOSITES)) & _to_mask(values.is_valid())


def judge(bounds: Bounds, comparison: Comparison) -> Mask:
    """(2, parts): whether the comparison may hold for a row, and whether it holds for all. Raises as `match`."""
    if bounds.is_null.all():
        return np.zeros((2, len(bounds.low)), np.bool_)
    name, operator, value = comparison
    positive, is_opposite = (name, _OPPOSITES.get(operator, operator), value), operator in _OPPOSITES
    low, high = _simplify(bounds.low), _simplify(bounds.high)
    first, last = match(low, positive), match(high, positive)
    if operator in _ORDERS:
        some, every = first | last, first & last
    else:
        members, _ = _fit_all(positive, low.type)
        is_single = _to_mask(pc.equal(low, high))
        some, every = first | last, first & is_single
        for part in np.flatnonzero(~is_single).tolist():
            inside = pc.and_(pc.greater_equal(members, low[part]), pc.less_equal(members, high[part]))
            some[part] = bool(pc.any(inside).as_py())
    is_known = _to_mask(low.is_valid()) & _to_mask(high.is_valid())
    some, every = some | ~is_known, every & is_known
    if is_opposite:
        some, every = ~every, ~some
    if bounds.may_be_nan:
        some, every = some | is_opposite, every & is_opposite
    return np.array([some & ~bounds.is_null, every & ~bounds.may_be_null])


def _to_mask(found: pa.Array) -> Mask:
    return np.asarray(pc.fill_null(found, False).to_numpy(zero_copy_only=False))


def _simplify(values: pa.Array) -> pa.Array:
    """The values in a type whose comparisons Arrow has, and has exactly."""
    kind = values.type
    if types.is_dictionary(kind):
        return _simplify(values.dictionary_decode())
    if types.is_float16(kind):
        return _simplify(values.cast(pa.float32()))
    if types.is_floating(kind):  # 0.1 is no value of float32; to add 0.0 makes one zero of two
        return pc.add(values.cast(pa.float64()), 0.0)
    # Bytes of another length are no value of a type of fixed length.
    return values.cast(pa.binary()) if types.is_fixed_size_binary(kind) else values


def _choose_kernel(operator: str, side: int) -> Any:
    """Arrow's function of two values that compares with what `_fit` gives, which lies on this side of the given one."""
    if operator in ("<", "<="):
        return pc.less_equal if side > 0 or (side == 0 and operator == "<=") else pc.less
    return pc.greater_equal if side < 0 or (side == 0 and operator == ">=") else pc.greater


def _fit_all(comparison: Comparison, kind: pa.DataType) -> tuple[pa.Array, int]:
    """What values of the type are compared with: one at most, and its side, as `_fit` has them; or those members of a
    list that the type has. Null and NaN equal nothing."""
    _, operator, value = comparison
    given = [each for each in (value if isinstance(value, list | tuple) else [value]) if each is not None]
    fitted = [_fit(each, kind) for each in given if each == each]
    limits = [limit for limit, side in fitted if side == 0 or operator in _ORDERS]
    return pa.array(limits, kind), fitted[0][1] if fitted else 0


def _fit(value: Any, kind: pa.DataType) -> tuple[pa.Scalar, int]:
    """The greatest value of the type that is not above the given one, and 0 if equal, else 1; or the least, and -1."""
    value = value.item() if isinstance(value, np.number) else value
    if types.is_temporal(kind):
        most = 2 ** (kind.bit_width - 1) - 1
        units, side = _round_down(_count_units(value, kind), -most - 1, most)
        return pa.scalar(units, pa.int32() if kind.bit_width == 32 else pa.int64()).cast(kind), side
    if not (types.is_integer(kind) or types.is_decimal(kind) or types.is_floating(kind)):
        return pa.scalar(value, kind), 0
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        raise TypeError(type(value))
    if types.is_floating(kind):
        value = float(value) if isinstance(value, Decimal) else value
        most_float = sys.float_info.max
        near = float(max(-most_float, min(most_float, value))) if isinstance(value, int) else value + 0.0
        return pa.scalar(near if near <= value else math.nextafter(near, -math.inf)), int(near != value)
    if types.is_integer(kind):
        limits = np.iinfo(kind.to_pandas_dtype())
        units, side = _round_down(value, int(limits.min), int(limits.max))
        return pa.scalar(units, kind), side
    if math.inf != abs(value):  # a float is the decimal that it is written as
        value = Fraction(repr(value) if isinstance(value, float) else value) * Fraction(10) ** kind.scale
    units, side = _round_down(value, 1 - 10**kind.precision, 10**kind.precision - 1)
    return pa.scalar(Decimal(units).scaleb(-kind.scale, Context(prec=80)), kind), side


def _round_down(exact: Any, least: int, most: int) -> tuple[int, int]:
    """The greatest whole number in a range that is not above the given one, and its side, as `_fit`."""
    if exact < least:
        return least, -1
    if exact > most:
        return most, 1
    units = math.floor(exact)
    return units, int(units != exact)


def _count_units(value: Any, kind: pa.DataType) -> Fraction:
    """A date, time or duration in units of the type. A date is its midnight, in UTC where times have a zone."""
    given = pa.scalar(value)
    (family, unit), (own, own_unit) = _split_type(given.type), _split_type(kind)
    has_zone, own_has_zone = (getattr(each, "tz", None) is not None for each in (given.type, kind))
    are_moments = {family, own} <= {"date", "timestamp"}
    if not (are_moments or family == own) or (has_zone != own_has_zone and "date" not in (family, own)):
        raise TypeError(type(value))
    return Fraction(given.value * _NANOSECONDS[unit], _NANOSECONDS[own_unit])


def _split_type(kind: pa.DataType) -> tuple[str, str]:
    """Such as ("timestamp", "us")."""
    found = re.match(r"(date|timestamp|time|duration)(?:32|64)?\[(\w+)", str(kind))
    if found is None:
        raise TypeError(str(kind))
    return found[1], found[2]
