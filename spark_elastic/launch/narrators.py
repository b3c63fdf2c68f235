"""Who tells people how a job goes: the interface, and the one that says nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Narrator(Protocol):
    """Tells people how the job goes. Called from several threads, which may be held up by it."""

    def log(self, rank: int | None, line: str) -> None: ...

    def progress(self, numbers: Mapping[str, Any]) -> None: ...

    def world(self, size: int, reason: str) -> None: ...

    def tell(self, text: str) -> None:
        """A sentence for people: a join, loss, drain or recovery with its cost, once it is over."""
        ...


class Silent:
    """A narrator that says nothing."""

    def log(self, rank: int | None, line: str) -> None:
        """Says nothing."""

    def progress(self, numbers: Mapping[str, Any]) -> None:
        """Says nothing."""

    def world(self, size: int, reason: str) -> None:
        """Says nothing."""

    def tell(self, text: str) -> None:
        """Says nothing."""
