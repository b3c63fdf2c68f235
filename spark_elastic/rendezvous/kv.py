"""A key-value store by scope, bounded. Owned by the server's event loop thread; knows no HTTP and nobody's waiting.

A generation's scope is opened by its world and closed with it, so that a late writer meets nothing that lives; scopes
of other names open themselves on first write.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spark_elastic.errors import InvalidInput, StaleGeneration

GENERATION = "generation/"  # begins the scopes that only `open` makes


@dataclass(frozen=True)
class Bounds:
    """Most scopes, keys of a scope, bytes of a key or value, and bytes of all values together."""

    scopes: int = 256
    keys: int = 65536
    key_bytes: int = 512
    value_bytes: int = 4 << 20
    total_bytes: int = 256 << 20


def generation_scope(generation: int) -> str:
    return f"{GENERATION}{generation}"


class KeyValues:
    """scope -> key -> bytes. Methods raise `StaleGeneration` for a generation's scope that is not open, and
    `InvalidInput` where a bound would be exceeded."""

    def __init__(self, bounds: Bounds | None = None) -> None:
        self._bounds = bounds or Bounds()
        self._scopes: dict[str, dict[str, bytes]] = {}
        self._bytes = 0

    def open(self, scope: str) -> None:
        self._scopes.setdefault(scope, {})

    def close(self, scope: str) -> None:
        """Forget a scope and what is in it."""
        self._bytes -= sum(map(len, self._scopes.pop(scope, {}).values()))

    def close_generations(self) -> list[str]:
        """Close every generation's scope; their names."""
        names = [name for name in self._scopes if name.startswith(GENERATION)]
        for name in names:
            self.close(name)
        return names

    def set(self, scope: str, key: str, value: bytes) -> None:
        held = self._scope(scope, create=True)
        grown = self._bytes + len(value) - len(held.get(key, b""))
        bounds = self._bounds
        if len(value) > bounds.value_bytes or len(key) > bounds.key_bytes:
            raise InvalidInput(
                f"The value of {key[:80]!r} has {len(value)} bytes; {bounds.value_bytes} is the most."
            )
        if grown > bounds.total_bytes or (key not in held and len(held) >= bounds.keys):
            raise InvalidInput(f"The key-value store is full; scope {scope[:80]!r} cannot take {key[:80]!r}.")
        held[key] = value
        self._bytes = grown

    def get(self, scope: str, keys: Sequence[str]) -> tuple[bytes | None, ...]:
        held = self._scope(scope)
        return tuple(held.get(key) for key in keys)

    def missing(self, scope: str, keys: Iterable[str]) -> list[str]:
        held = self._scope(scope)
        return [key for key in keys if key not in held]

    def _scope(self, name: str, create: bool = False) -> dict[str, bytes]:
        held = self._scopes.get(name)
        if held is None:
            if name.startswith(GENERATION):
                raise StaleGeneration(f"{name} is not open.")
            held = {}
            if create:
                if len(self._scopes) >= self._bounds.scopes:
                    raise InvalidInput(f"The key-value store has {len(self._scopes)} scopes, its most.")
                self._scopes[name] = held
        return held
