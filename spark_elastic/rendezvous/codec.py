"""Dataclasses to JSON text and back, checked field by field against their type hints. Pure.

The wire is strict: a missing, unknown or ill-typed field is refused with a sentence that names it. Bytes travel as
base64, tuples as lists, enums as their value. A dataclass travels as an object or, where both sides have one release,
as a row: its fields in their order, without the last ones at their default.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Callable, Hashable, Mapping
from enum import Enum
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")
Reader = Callable[[Any, str], Any]

_SCALARS = frozenset((str, int, float, bool, type(None)))
MAX_KNOWN = 1 << 16  # identifiers of a kind that are kept
NON_FINITE = ("nan", "inf", "-inf")  # as Python writes and reads them


class MalformedMessage(ValueError):
    """Not what the wire speaks; the message says where."""


def _refuse_constant(name: str) -> None:
    raise ValueError(name)  # NaN and infinities are not JSON


_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def dumps(value: object, as_rows: bool = False) -> bytes:
    """One line of JSON in UTF-8. What UTF-8 cannot say (a file's name in a traceback) becomes a question mark."""
    return _ENCODER.encode(to_plain(value, as_rows)).encode("utf-8", "replace")


def loads(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`; raises `MalformedMessage`."""
    try:
        value = _DECODER.decode(body.decode())
    except (ValueError, RecursionError) as error:
        raise MalformedMessage(f"the body is not JSON ({type(error).__name__})") from None
    if not isinstance(value, dict):
        raise MalformedMessage("the body is not a JSON object")
    return value


def to_line(value: object) -> bytes:
    """A record as a line, for a pipe or a file; `from_line` reads it."""
    return dumps(value) + b"\n"


def from_line(cls: type[T], line: bytes) -> T:
    return read(cls, loads(line))


def encode_numbers(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """With NaN and infinities as text, since JSON has neither; `decode_numbers` reverses it."""
    finite = {name: not isinstance(value, float) or math.isfinite(value) for name, value in numbers.items()}
    return {name: value if finite[name] else str(value) for name, value in numbers.items()}


def decode_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: float(value) if value in NON_FINITE else value for name, value in values.items()}


def to_plain(value: Any, as_rows: bool = False) -> Any:
    """`value` as JSON types: dataclasses become objects or rows, bytes base64."""
    kind = typing.cast("Hashable", type(value))
    return value if kind in _SCALARS else _build_writer(kind, as_rows)(value)


def read(cls: type[T], value: object) -> T:
    """`value` (JSON types) as the dataclass `cls`. Raises MalformedMessage: a field is missing, unknown or wrong."""
    return typing.cast("T", read_as(cls, value, cls.__name__))


def read_as(hint: Any, value: object, where: str) -> object:
    """`value` (JSON types) as what a type hint says; `where` is its name in errors."""
    return _build_reader(hint)(value, where)


@functools.cache
def _build_writer(kind: Any, as_rows: bool) -> Callable[[Any], Any]:
    if issubclass(kind, Enum):
        return lambda value: value.value
    if issubclass(kind, str):
        return str
    if kind is bytes:
        return lambda value: base64.b64encode(value).decode("ascii")
    if issubclass(kind, tuple | list):
        return lambda value: [item if type(item) in _SCALARS else to_plain(item, as_rows) for item in value]
    if issubclass(kind, dict):
        return lambda value: {str(key): to_plain(item, as_rows) for key, item in value.items()}
    fields = dataclasses.fields(kind)
    names = [field.name for field in fields]
    if not as_rows:
        return lambda value: {name: to_plain(getattr(value, name)) for name in names}
    last_defaults = [field.default for field in reversed(fields)]  # one that there is not equals no value
    write_items = _build_writer(list, as_rows)

    def write_row(value: Any) -> Any:
        row = [getattr(value, name) for name in names]
        for default in last_defaults:
            if row[-1] is not default and row[-1] != default:
                break
            row.pop()
        return write_items(row)

    return write_row


@functools.cache
def _build_reader(hint: Any) -> Reader:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        (reader,) = (_build_reader(kind) for kind in arguments if kind is not type(None))  # `X | None` alone
        return lambda value, where: None if value is None else reader(value, where)
    if origin in (tuple, list) and (origin is list or arguments[-1] is Ellipsis):
        return partial(_read_items, origin, _build_reader(arguments[0]))
    if origin is tuple:
        return partial(_read_tuple, [_build_reader(argument) for argument in arguments])
    if origin in (dict, Mapping) or hint is dict:
        return partial(_read_mapping, _build_reader(arguments[1] if arguments else Any))
    if hint is Any:
        return lambda value, where: value
    if hint is bytes:
        return _read_bytes
    if dataclasses.is_dataclass(hint):
        return _build_record_reader(typing.cast("type", hint))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return partial(_read_enum, hint)
    if isinstance(hint, type) and issubclass(hint, str) and hint is not str:
        return partial(_read_identifier, hint, {})
    return partial(_read_scalar, hint)


def _read_scalar(hint: type, value: Any, where: str) -> Any:
    if type(value) is hint or (hint is float and type(value) is int):  # bool is no int here
        return value
    raise MalformedMessage(f"{where} must be {hint.__name__}, not {type(value).__name__}")


def _read_identifier(hint: type[str], known: dict[str, str], value: Any, where: str) -> str:
    """A subclass of str, whose constructor raises ValueError for text that it does not take. The same text is the same
    object again, so thousands of requests are not checked anew and leave less to the garbage collector."""
    text = _read_scalar(str, value, where)
    identifier = known.get(text)
    if identifier is None:
        try:
            identifier = hint(text)
        except ValueError as error:
            raise MalformedMessage(f"{where}: {error}") from None
        if len(known) >= MAX_KNOWN:
            known.clear()
        known[text] = identifier
    return identifier


def _read_enum(hint: type[Enum], value: Any, where: str) -> Enum:
    try:
        return hint(value)
    except ValueError:
        raise MalformedMessage(f"{where} must be one of {[member.value for member in hint]}") from None


def _read_bytes(value: Any, where: str) -> bytes:
    try:
        return base64.b64decode(value.encode("ascii"), validate=True)
    except (AttributeError, ValueError):  # no text at all has no `encode`
        raise MalformedMessage(f"{where} must be base64 text") from None


def _read_items(kind: type, reader: Reader, value: Any, where: str) -> Any:
    if not isinstance(value, list):
        raise MalformedMessage(f"{where} must be a list")
    return kind(reader(item, where) for item in value)


def _read_tuple(readers: list[Reader], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list) or len(value) != len(readers):
        raise MalformedMessage(f"{where} must be a list of {len(readers)}")
    return tuple(reader(item, where) for reader, item in zip(readers, value, strict=True))


def _read_mapping(reader: Reader, value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise MalformedMessage(f"{where} must be an object")
    return {key: reader(item, where) for key, item in value.items()}


def _build_record_reader(cls: type) -> Reader:
    hints = typing.get_type_hints(cls)
    fields, missing = dataclasses.fields(cls), dataclasses.MISSING
    readers = {field.name: _build_reader(hints[field.name]) for field in fields}
    required = {f.name for f in fields if f.default is missing and f.default_factory is missing}

    def read_record(value: Any, where: str) -> Any:
        if isinstance(value, list) and len(value) <= len(readers):
            value = dict(zip(readers, value, strict=False))
        if not isinstance(value, dict):
            raise MalformedMessage(f"{where} must be an object or a row of {len(readers)}")
        if not value.keys() >= required:
            raise MalformedMessage(f"{where} lacks {min(required - value.keys())}")
        if not value.keys() <= readers.keys():
            raise MalformedMessage(f"{where} has no field {min(value.keys() - readers.keys())[:40]!r}")
        return cls(**{name: readers[name](item, f"{where}.{name}") for name, item in value.items()})

    return read_record
