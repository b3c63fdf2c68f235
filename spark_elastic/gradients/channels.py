"""The engine's channels of the groups that form within a world."""

from __future__ import annotations

import hashlib


def choose_channel(use: str, *key: object) -> int:
    """Return the channel of a subgroup: the same on all of its ranks, and of no other use or key.

    Args:
        use: what the group is for.
        key: what tells it from others of that use; equal on all of its ranks.
    """
    return 1 + int.from_bytes(hashlib.sha256(f"{use} {key}".encode()).digest()[:7], "little")
