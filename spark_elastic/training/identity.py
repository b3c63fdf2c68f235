"""Describes the user's objects as text that is equal in every process, so that a resumed run can be compared (R19).

The text of a plain value is the value; of a function its code, its closure and the numbers of its module that it uses;
of any other object its class and its numbers. It contains no addresses, no names of modules (a script is `__main__` in
one process only) and no line numbers. Pure; any thread.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from types import CodeType, FunctionType
from typing import Any

WEIGHTS = "initial weights"  # the entry of an identity that may differ: a model need not be seeded
PLAIN = (bool, int, float, complex, str, bytes, type(None))


def digest(thing: Any) -> str:
    """16 hex digits of `to_text(thing)`."""
    return hashlib.sha256(to_text(thing).encode()).hexdigest()[:16]


def to_text(thing: Any) -> str:
    """A text that is equal for objects with the same behaviour, as far as that can be compared."""
    if isinstance(thing, PLAIN):
        return repr(thing)
    if isinstance(thing, Mapping):
        return f"{{{', '.join(f'{key}: {to_text(thing[key])}' for key in sorted(thing, key=str))}}}"
    if isinstance(thing, list | tuple):
        return f"[{', '.join(map(to_text, thing))}]"
    if isinstance(thing, CodeType):
        return f"code {thing.co_code.hex()} {thing.co_names} {to_text(thing.co_consts)}"
    if isinstance(thing, FunctionType):
        closure = [_read_cell(cell) for cell in thing.__closure__ or ()]
        numbers = _find_global_numbers(thing.__code__, thing.__globals__)
        also = f" {to_text(numbers)}" if numbers else ""
        return f"function {to_text(thing.__code__)} {to_text(thing.__defaults__)} {to_text(closure)}{also}"
    if isinstance(thing, functools.partial):
        return f"partial {to_text(thing.func)} {to_text(thing.args)} {to_text(thing.keywords)}"
    if callable(thing) and hasattr(thing, "__name__"):
        return f"named {thing.__name__}"
    numbers = {name: value for name, value in getattr(thing, "__dict__", {}).items() if _is_number(value)}
    return f"{type(thing).__name__} {to_text(numbers)}"


def _find_global_numbers(code: CodeType, known: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers of its module that a function, or a function inside it, uses. Strings are left out: they may be paths."""
    found = {name: known[name] for name in code.co_names if _is_number(known.get(name))}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found |= _find_global_numbers(inner, known)
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float)


def _read_cell(cell: Any) -> Any:
    """The plain value in a closure's cell, else its class: a function that contains itself would never end."""
    try:
        value = cell.cell_contents
    except ValueError:  # not filled yet
        return None
    return value if isinstance(value, PLAIN) else type(value).__name__
