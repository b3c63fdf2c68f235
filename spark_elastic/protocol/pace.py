"""How often slots beat. Pure."""

from __future__ import annotations

SHORTEST = 1.0  # seconds between two beats of a slot, in a small job with an ordinary lease
PER_LEASE = 5  # beats of a slot in a lease, at ease
# Of these one may be lost, and half a lease without any tells that the driver is deaf (R12).
FEWEST_PER_LEASE = 2.5
ALL_PER_SECOND = 250  # beats of all slots together, about a quarter of what one core serves


def beat_every(lease: float, slots: int) -> float:
    """Seconds between two beats of each of so many slots: it grows with them, and the lease bounds it."""
    at_ease = min(SHORTEST, lease / PER_LEASE)
    return max(at_ease, min(slots / ALL_PER_SECOND, lease / FEWEST_PER_LEASE))
