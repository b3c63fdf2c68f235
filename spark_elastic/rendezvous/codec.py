"""Dataclasses to JSON text and back, checked field by field against their type hints. Pure.

The wire is strict: a missing, unknown or ill-typed field is refused with a sentence that names it. Bytes travel as
base64, tuples as lists, enums as their value.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import json
import math
import types
import typing
import zlib
from collections.abc import Callable, Hashable, Mapping
from enum import Enum
from typing import Any, TypeVar

T = TypeVar("T")
Reader = Callable[[Any, str], Any]

COMPRESS_ABOVE = 4096  # bytes
NON_FINITE = ("nan", "inf", "-inf")  # as Python writes and reads them


class MalformedMessage(ValueError):
    """Not what the wire speaks; the message says where."""


def _refuse_constant(name: str) -> None:
    raise ValueError(name)  # NaN and infinities are not JSON


_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def dumps(value: object) -> bytes:
    """One line of JSON in UTF-8. What UTF-8 cannot say (a file's name in a traceback) becomes a question mark."""
    return _ENCODER.encode(to_plain(value)).encode("utf-8", "replace")


def loads(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`.

    Raises:
        MalformedMessage: it is no JSON object.
    """
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
    """Raises MalformedMessage as `read`."""
    return read(cls, loads(line))


def compress(text: bytes) -> bytes:
    """`text` as it travels; the announcement of a large world shrinks to a tenth."""
    return zlib.compress(text, 1) if len(text) > COMPRESS_ABOVE else text


def decompress(body: bytes) -> bytes:
    """What was `compress`. Only for bodies that are proven genuine: little can become much.

    Raises:
        MalformedMessage: it was not.
    """
    if body[:1] == b"{":
        return body
    try:
        return zlib.decompress(body)
    except zlib.error:
        raise MalformedMessage("the body is neither JSON nor packed") from None


def encode_numbers(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """With NaN and infinities as text, since JSON has neither; `decode_numbers` reverses it."""
    return {name: str(value) if _is_non_finite(value) else value for name, value in numbers.items()}


def decode_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """What `encode_numbers` was given."""
    return {name: float(value) if value in NON_FINITE else value for name, value in values.items()}


def _is_non_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def to_plain(value: Any) -> Any:
    """`value` as JSON types: dataclasses become objects, bytes base64."""
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    return {
        name: to_plain(getattr(value, name)) for name in _field_names(typing.cast("Hashable", type(value)))
    }


def read(cls: type[T], value: object) -> T:
    """`value` (JSON types) as the dataclass `cls`.

    Raises:
        MalformedMessage: a field is missing, unknown or of another type.
    """
    return typing.cast("T", read_as(cls, value, cls.__name__))


def read_as(hint: Any, value: object, where: str) -> object:
    """`value` (JSON types) as what a type hint says; `where` is its name in errors.

    Raises:
        MalformedMessage: it is of another type.
    """
    return _build_reader(hint)(value, where)


@functools.cache
def _field_names(cls: Hashable) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(typing.cast("type", cls)))


@functools.cache
def _build_reader(hint: Any) -> Reader:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _build_optional_reader([_build_reader(a) for a in arguments if a is not type(None)])
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return _sequence(_build_reader(arguments[0]))
        return _make_tuple_reader([_build_reader(argument) for argument in arguments])
    if origin is list:
        sequence = _sequence(_build_reader(arguments[0]))
        return lambda value, where: list(sequence(value, where))
    if origin in (dict, Mapping) or hint is dict:
        return _mapping(_build_reader(arguments[1]) if arguments else _read_anything)
    if hint is Any:
        return _read_anything
    if hint is bytes:
        return _read_bytes
    if dataclasses.is_dataclass(hint):
        return _record(typing.cast("type", hint))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _build_enum_reader(hint)
    if isinstance(hint, type) and issubclass(hint, str) and hint is not str:
        return _build_identifier_reader(hint)
    return _scalar(hint)


def _read_anything(value: Any, where: str) -> Any:
    return value


def _scalar(hint: type) -> Reader:
    def parse(value: Any, where: str) -> Any:
        # JSON has one kind of number; Python's bool is an int, on the wire it is not.
        if type(value) is hint or (hint is float and type(value) is int):
            return value
        raise MalformedMessage(f"{where} must be {hint.__name__}, not {type(value).__name__}")

    return parse


def _build_identifier_reader(hint: type[str]) -> Reader:
    """Reads a subclass of str, whose constructor raises ValueError for text that it does not take."""

    def parse(value: Any, where: str) -> str:
        if type(value) is not str:
            raise MalformedMessage(f"{where} must be str, not {type(value).__name__}")
        try:
            return hint(value)
        except ValueError as error:
            raise MalformedMessage(f"{where}: {error}") from None

    return parse


def _read_bytes(value: Any, where: str) -> bytes:
    if not isinstance(value, str):
        raise MalformedMessage(f"{where} must be base64 text")
    try:
        return base64.b64decode(value.encode("ascii"), validate=True)
    except ValueError:
        raise MalformedMessage(f"{where} must be base64 text") from None


def _build_optional_reader(readers: list[Reader]) -> Reader:
    if len(readers) != 1:
        raise TypeError("the wire knows only `X | None`")
    (reader,) = readers
    return lambda value, where: None if value is None else reader(value, where)


def _sequence(reader: Reader) -> Reader:
    def parse(value: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise MalformedMessage(f"{where} must be a list")
        return tuple(reader(item, where) for item in value)

    return parse


def _make_tuple_reader(readers: list[Reader]) -> Reader:
    def parse(value: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) != len(readers):
            raise MalformedMessage(f"{where} must be a list of {len(readers)}")
        return tuple(reader(item, where) for reader, item in zip(readers, value, strict=True))

    return parse


def _mapping(reader: Reader) -> Reader:
    def parse(value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise MalformedMessage(f"{where} must be an object")
        return {key: reader(item, where) for key, item in value.items()}

    return parse


def _build_enum_reader(hint: type[Enum]) -> Reader:
    def parse(value: Any, where: str) -> Enum:
        try:
            return hint(value)
        except ValueError:
            raise MalformedMessage(f"{where} must be one of {[m.value for m in hint]}") from None

    return parse


def _record(cls: type) -> Reader:
    hints = typing.get_type_hints(cls)
    fields = dataclasses.fields(cls)
    readers = {field.name: _build_reader(hints[field.name]) for field in fields}
    required = {
        field.name
        for field in fields
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }

    def parse(value: Any, where: str) -> Any:
        if not isinstance(value, dict):
            raise MalformedMessage(f"{where} must be an object")
        if missing := required - value.keys():
            raise MalformedMessage(f"{where} lacks {min(missing)}")
        if unknown := value.keys() - readers.keys():
            raise MalformedMessage(f"{where} has no field {min(unknown)[:40]!r}")
        return cls(**{name: readers[name](item, f"{where}.{name}") for name, item in value.items()})

    return parse
