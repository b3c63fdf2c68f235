"""Functions that make the user's model: one at a time in a process, since the generators that they draw initial weights
from are the process's. Fits of several folds call them in threads."""

from __future__ import annotations

import threading

DRAWING = threading.RLock()
