"""Keeps one worker that prints much from drowning all others: so many lines a second each, with a count of the rest.

Pure: times are arguments.
"""

from __future__ import annotations

from dataclasses import dataclass

RATE = 50.0  # lines a second of each worker
BURST = 500.0


@dataclass
class _Allowance:
    lines: float
    at: float
    left_out: int = 0


class LineLimit:
    """A number of lines that each name may print, refilled as time goes on."""

    def __init__(self, rate: float = RATE, burst: float = BURST) -> None:
        self._rate = rate
        self._burst = burst
        self._allowances: dict[str, _Allowance] = {}

    def pass_on(self, now: float, who: str, line: str) -> tuple[str, ...]:
        """The line, after a note on those left out before it; nothing where the allowance is used up."""
        mine = self._allowances.setdefault(who, _Allowance(self._burst, now))
        mine.lines = min(self._burst, mine.lines + self._rate * (now - mine.at))
        mine.at = now
        if mine.lines < 1:
            mine.left_out += 1
            return ()
        mine.lines -= 1
        missed, mine.left_out = mine.left_out, 0
        return (f"{missed} lines were left out", line) if missed else (line,)

    def left_out(self) -> list[tuple[str, int]]:
        """Whose lines were left out since their last one that was shown, and how many."""
        return [(who, mine.left_out) for who, mine in self._allowances.items() if mine.left_out]
