"""How messages name values. Pure."""

from __future__ import annotations

from typing import Any


def kind(value: Any) -> str:
    """A value in a message."""
    return f"{type(value).__name__} ({str(value)[:40]!r})" if isinstance(value, str) else type(value).__name__
