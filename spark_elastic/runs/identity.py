"""Describes the user's objects as text that is equal in every process, to compare them (R19, resuming a run).

A plain value or an array is its content; a function its code, its closure and what it uses of its module; a class the
code that a framework calls, with what that names; any other object its class and the attributes that can be compared.
Frameworks have their names alone. No addresses, modules (a script is `__main__` in one process only), line numbers,
comments, or strings of the user's, which may be folders or dates. Pure; any thread.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Set
from decimal import Decimal
from enum import Enum, EnumMeta
from fractions import Fraction
from types import CodeType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import numpy as np

WEIGHTS = "initial weights"  # the entry of an identity that may differ: a model need not be seeded
PLAIN = (bool, int, float, complex, str, bytes, type(None))
NUMBERS = (bool, int, float, complex)
NOTHING = "nothing to compare"  # in place of a value; compared by identity
_REPRS = (range, slice, Fraction, Decimal, np.dtype)  # whose repr is their value
_FRAMEWORKS = re.compile(  # code that is told apart by names: another version may continue
    r"(builtins|functools|numpy|torch|torchvision|transformers|keras|tensorflow|(pytorch_)?lightning(_fabric)?"
    r"|spark_elastic)(\.|$)"
)
_ENTRIES = ("__call__", "training_step")  # methods that are called whatever a class derives from
# Methods of a framework's classes that a user may override without changing what is trained.
_OTHERS = ("extra_repr", "get_config", "from_config", "validation_step", "test_step", "predict_step")


def digest(thing: Any) -> str:
    """16 hex digits of `to_text(thing)`."""
    return hashlib.sha256(to_text(thing).encode()).hexdigest()[:16]


def to_text(thing: Any, inside: tuple[int, ...] = ()) -> str:
    """A text that is equal for objects with the same behaviour. inside: ids of the objects that contain this one."""
    if isinstance(thing, PLAIN):
        return repr(thing)
    if id(thing) in inside:
        return f"the same {type(thing).__name__}"
    text_of = functools.partial(to_text, inside=(*inside, id(thing)))
    if isinstance(thing, Mapping):
        return f"{{{', '.join(f'{key}: {text_of(thing[key])}' for key in sorted(thing, key=str))}}}"
    if isinstance(thing, Enum):
        return f"{type(thing).__name__}.{thing.name}"
    if isinstance(thing, _REPRS) or type(thing).__name__ == "dtype":
        return repr(thing)
    if isinstance(thing, list | tuple | deque):
        return f"[{', '.join(map(text_of, thing))}]"
    if isinstance(thing, Set):
        return f"set {sorted(map(text_of, thing))}"
    if _is_array(thing):
        return _describe_array(thing)
    if isinstance(thing, CodeType):
        return f"code {thing.co_code.hex()} {thing.co_names} {text_of(thing.co_consts)}"
    if isinstance(thing, MethodType):
        owner = thing.__self__  # a model's own method: the model is compared by itself, without its weights
        described = type(owner).__name__ if hasattr(owner, "state_dict") else text_of(owner)
        return f"method {described} {text_of(thing.__func__)}"
    if isinstance(thing, type):
        return describe_class(thing, inside)
    if isinstance(thing, FunctionType) and not _is_of_framework(thing):
        closure = [_read_cell(cell) for cell in thing.__closure__ or ()]
        used = _find_globals(thing.__code__, thing.__globals__)
        also = f" {text_of(used)}" if used else ""
        first, *rest = thing.__code__.co_consts or (None,)
        code = thing.__code__.replace(co_consts=(None if first == thing.__doc__ else first, *rest))
        defaults = [thing.__defaults__, thing.__kwdefaults__] if thing.__kwdefaults__ else thing.__defaults__
        return f"function {text_of(code)} {text_of(defaults)} {text_of(closure)}{also}"
    if isinstance(thing, functools.partial):
        return f"partial {text_of(thing.func)} {text_of(thing.args)} {text_of(thing.keywords)}"
    if callable(thing) and hasattr(thing, "__name__"):
        wrapped = getattr(thing, "__wrapped__", None)  # of functools.cache and the like
        return f"named {thing.__name__}" if wrapped is None else text_of(wrapped)
    settings = pick_comparable(_list_attributes(thing))
    return f"{text_of(type(thing))} {text_of(settings)}"


def describe_class(kind: type, inside: tuple[int, ...] = ()) -> str:
    """The name of a class and, of a user's, what is called and read of it. inside: as of `to_text`."""
    used = _find_used_members(kind)
    code = ", ".join(f"{name}: {to_text(used[name], (*inside, id(kind)))}" for name in sorted(used))
    return f"{kind.__name__} {{{code}}}" if used else kind.__name__


def _find_used_members(kind: type) -> dict[str, Any]:
    """The user's methods that a framework calls, and the methods, numbers and arrays of the class that these name."""
    own = [base for base in kind.__mro__ if not _is_of_framework(base)]
    given = [base for base in kind.__mro__ if base not in own and base is not object]
    defined = {name: _unwrap(member) for base in reversed(own) for name, member in vars(base).items()}
    names = [name for name in defined if name[:2] != "__" and name not in _OTHERS]
    waiting = [*_ENTRIES, *(name for name in names if any(hasattr(base, name) for base in given))]
    found: dict[str, Any] = {}
    while waiting:
        name = waiting.pop()
        member = pick_comparable(defined[name]) if name in defined and name not in found else NOTHING
        if member is not NOTHING:
            found[name] = member
            waiting += _list_names(getattr(found[name], "__code__", None))
    return found


def _unwrap(member: Any) -> Any:
    names = ("__func__", "fget", "func")
    return next((f for name in names if (f := getattr(member, name, None)) is not None), member)


def _list_names(code: Any) -> Iterator[str]:
    if isinstance(code, CodeType):
        yield from code.co_names
        for inner in code.co_consts:
            yield from _list_names(inner)


def _is_of_framework(thing: Any) -> bool:
    return _FRAMEWORKS.match(str(getattr(thing, "__module__", ""))) is not None


def pick_comparable(value: Any, kinds: tuple[type, ...] = NUMBERS) -> Any:
    """What of the value can be compared; NOTHING: nothing. Strings of the user's may be folders or dates."""
    kept: Any
    if isinstance(value, Mapping):
        picked = {name: pick_comparable(each, kinds) for name, each in value.items()}
        kept = {name: each for name, each in picked.items() if each is not NOTHING}
    elif isinstance(value, list | tuple | Set | deque):
        kept = [each for each in (pick_comparable(each, kinds) for each in value) if each is not NOTHING]
        kept = frozenset(kept) if isinstance(value, Set) else kept
    else:
        is_named = callable(value) and hasattr(value, "__name__")  # also built in, methods and classes
        is_plain = isinstance(value, (*kinds, *_REPRS, functools.partial, Enum)) or _is_array(value)
        return value if is_plain or is_named or _is_record(value) else NOTHING
    return kept if kept or not value else NOTHING


def _is_record(value: Any) -> bool:
    """Whether its attributes say what it does: a record, or an object of a class of the user's that is called."""
    kind = type(value)
    if dataclasses.is_dataclass(value) or isinstance(value, SimpleNamespace) or kind.__name__ == "dtype":
        return True
    own = isinstance(getattr(kind, "__call__", None), FunctionType) and not _is_of_framework(kind)  # noqa: B004
    file = str(getattr(sys.modules.get(kind.__module__), "__file__", ""))
    # Those of others may count or date
    return own and not hasattr(value, "state_dict") and "-packages" not in file


def _list_attributes(thing: Any) -> dict[str, Any]:
    found = dict(getattr(thing, "__dict__", {}))
    for kind in type(thing).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name[:2] != "__" and hasattr(thing, name):
                found[name] = getattr(thing, name)
    return found


def _is_array(thing: Any) -> bool:
    has_values = all(hasattr(thing, name) for name in ("dtype", "shape", "__array__"))
    return has_values and not isinstance(thing, type)


def _describe_array(thing: Any) -> str:
    head = f"array {thing.dtype} {tuple(thing.shape)}"
    tensor = thing.detach() if hasattr(thing, "detach") else thing
    try:
        values = np.asarray(tensor.cpu() if hasattr(tensor, "cpu") else tensor)
    except (TypeError, RuntimeError, NotImplementedError):
        # A dtype that numpy lacks, or a tensor without values
        return head if str(getattr(thing, "device", "")) == "meta" else f"{head} {tensor.tolist()!r}"
    content = repr(values.tolist()).encode() if values.dtype.hasobject else values.tobytes()
    return f"{head} {hashlib.sha256(content).hexdigest()}"


def _find_globals(code: CodeType, known: Mapping[str, Any]) -> dict[str, Any]:
    """What a function, or a function inside it, uses of its module's values, and of what the module itself defines."""
    names = [name for name in _list_names(code) if name in known]
    found = {name: pick_comparable(known[name]) for name in names}
    for name in names:
        value = known[name]
        if isinstance(value, FunctionType | type):
            is_own = value.__module__ == known.get("__name__") and not issubclass(type(value), EnumMeta)
            found[name] = value if is_own else NOTHING
            if is_own and isinstance(value, type):
                read = {each: vars(value)[each] for each in _list_names(code) if each in vars(value)}
                found[name] = value, pick_comparable(read)
    return {name: value for name, value in found.items() if value is not NOTHING}


def _read_cell(cell: Any) -> Any:
    """The value in a closure's cell if it can be compared, else the name of its class."""
    try:
        value = cell.cell_contents
    except ValueError:  # not filled yet
        return None
    picked = pick_comparable(value, PLAIN)
    return type(value).__name__ if picked is NOTHING else picked
