"""Describes the user's objects as text that is equal in every process, to compare them (R19, resuming a run).

The text of a plain value is the value, that of an array or tensor its content; of a function its code, its closure and
what it uses of its module's numbers, arrays and lists of them; of any other object its class, and its numbers, arrays
and functions. It contains no addresses, no names of modules (a script is `__main__` in one process only), no line
numbers and no strings of the user's module or objects, which may be folders or dates. Pure; any thread.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Set
from types import CodeType, FunctionType
from typing import Any

import numpy as np

WEIGHTS = "initial weights"  # the entry of an identity that may differ: a model need not be seeded
PLAIN = (bool, int, float, complex, str, bytes, type(None))
NUMBERS = (bool, int, float, complex)


def digest(thing: Any) -> str:
    """16 hex digits of `to_text(thing)`."""
    return hashlib.sha256(to_text(thing).encode()).hexdigest()[:16]


def to_text(thing: Any, inside: tuple[int, ...] = ()) -> str:
    """A text that is equal for objects with the same behaviour, as far as that can be compared.

    Args:
        inside: ids of the objects that contain this one: a function may be in its own closure.
    """
    if isinstance(thing, PLAIN):
        return repr(thing)
    if id(thing) in inside:
        return f"the same {type(thing).__name__}"
    text_of = functools.partial(to_text, inside=(*inside, id(thing)))
    if isinstance(thing, Mapping):
        return f"{{{', '.join(f'{key}: {text_of(thing[key])}' for key in sorted(thing, key=str))}}}"
    if isinstance(thing, list | tuple):
        return f"[{', '.join(map(text_of, thing))}]"
    if isinstance(thing, Set):
        return f"set {sorted(map(text_of, thing))}"
    if _is_array(thing):
        return _describe_array(thing)
    if isinstance(thing, CodeType):
        return f"code {thing.co_code.hex()} {thing.co_names} {text_of(thing.co_consts)}"
    if isinstance(thing, FunctionType):
        closure = [_read_cell(cell) for cell in thing.__closure__ or ()]
        used = _find_globals(thing.__code__, thing.__globals__)
        also = f" {text_of(used)}" if used else ""
        return f"function {text_of(thing.__code__)} {text_of(thing.__defaults__)} {text_of(closure)}{also}"
    if isinstance(thing, functools.partial):
        return f"partial {text_of(thing.func)} {text_of(thing.args)} {text_of(thing.keywords)}"
    if callable(thing) and hasattr(thing, "__name__"):
        return f"named {thing.__name__}"
    settings = {name: value for name, value in getattr(thing, "__dict__", {}).items() if is_comparable(value)}
    return f"{type(thing).__name__} {text_of(settings)}"


def is_comparable(value: Any, kinds: tuple[type, ...] = NUMBERS) -> bool:
    """Whether this is a value of these kinds, an array or a function, or a container of such values.

    Args:
        kinds: plain types. Without str: a string of the user's may be a folder or a date.
    """
    if isinstance(value, Mapping):
        return all(is_comparable(each, kinds) for each in value.values())
    if isinstance(value, list | tuple | Set):
        return all(is_comparable(each, kinds) for each in value)
    return isinstance(value, (*kinds, FunctionType)) or _is_array(value)


def _is_array(thing: Any) -> bool:
    """An array of numpy or a tensor of any framework."""
    return all(hasattr(thing, name) for name in ("dtype", "shape", "__array__")) and not isinstance(
        thing, type
    )


def _describe_array(thing: Any) -> str:
    head = f"array {thing.dtype} {tuple(thing.shape)}"
    tensor = thing.detach() if hasattr(thing, "detach") else thing
    try:
        values = np.asarray(tensor.cpu() if hasattr(tensor, "cpu") else tensor)
    except (
        TypeError,
        RuntimeError,
        NotImplementedError,
    ):  # a dtype that numpy lacks, or a tensor without values
        return head if str(getattr(thing, "device", "")) == "meta" else f"{head} {tensor.tolist()!r}"
    content = repr(values.tolist()).encode() if values.dtype.hasobject else values.tobytes()
    return f"{head} {hashlib.sha256(content).hexdigest()}"


def _find_globals(code: CodeType, known: Mapping[str, Any]) -> dict[str, Any]:
    """What a function, or a function inside it, uses of its module's numbers, arrays and containers of them."""
    found = {
        name: known[name]
        for name in code.co_names
        if is_comparable(known.get(name)) and not isinstance(known[name], FunctionType)
    }
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found |= _find_globals(inner, known)
    return found


def _read_cell(cell: Any) -> Any:
    """The value in a closure's cell if it can be compared, else the name of its class."""
    try:
        value = cell.cell_contents
    except ValueError:  # not filled yet
        return None
    return value if is_comparable(value, PLAIN) else type(value).__name__
