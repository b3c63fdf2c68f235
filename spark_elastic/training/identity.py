"""What the user's objects are, as text that is the same in every process: a run is bound to it (R19, binding).

Plain values stand for themselves, functions for their code, what they close over and the numbers of their module that
they use, other objects for their class and numbers. Addresses, names of modules (a script is `__main__` in one process
only) and line numbers take no part. Pure; any thread.
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
    """16 hex digits of `text`, for equality."""
    return hashlib.sha256(text(thing).encode()).hexdigest()[:16]


def text(thing: Any) -> str:
    """Equal for things that do the same; of an object without plain form, its class and its numbers."""
    if isinstance(thing, PLAIN):
        return repr(thing)
    if isinstance(thing, Mapping):
        return f"{{{', '.join(f'{key}: {text(thing[key])}' for key in sorted(thing, key=str))}}}"
    if isinstance(thing, list | tuple):
        return f"[{', '.join(map(text, thing))}]"
    if isinstance(thing, CodeType):
        return f"code {thing.co_code.hex()} {thing.co_names} {text(thing.co_consts)}"
    if isinstance(thing, FunctionType):
        held = [_content(cell) for cell in thing.__closure__ or ()]
        numbers = _globals(thing.__code__, thing.__globals__)
        also = f" {text(numbers)}" if numbers else ""
        return f"function {text(thing.__code__)} {text(thing.__defaults__)} {text(held)}{also}"
    if isinstance(thing, functools.partial):
        return f"partial {text(thing.func)} {text(thing.args)} {text(thing.keywords)}"
    if callable(thing) and hasattr(thing, "__name__"):
        return f"named {thing.__name__}"
    numbers = {name: value for name, value in getattr(thing, "__dict__", {}).items() if _is_number(value)}
    return f"{type(thing).__name__} {text(numbers)}"


def _globals(code: CodeType, known: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers of its module that a function, or one within it, speaks of; a string may be a folder's name."""
    found = {name: known[name] for name in code.co_names if _is_number(known.get(name))}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found |= _globals(inner, known)
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float)


def _content(cell: Any) -> Any:
    """What a closure holds; a function that holds itself would have no end."""
    try:
        held = cell.cell_contents
    except ValueError:  # not filled yet
        return None
    return held if isinstance(held, PLAIN) else type(held).__name__
