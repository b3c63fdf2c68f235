"""A process that has as many threads as it may, for a moment."""

from __future__ import annotations

import threading

import pytest


def refuse_next_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next thread that this process starts does not start; the later ones do."""

    def refuse(thread: threading.Thread) -> None:
        monkeypatch.undo()
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
