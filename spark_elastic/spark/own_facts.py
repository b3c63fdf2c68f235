"""What a process says of itself, for `admission` to judge: its host and what is installed. Any thread; no state."""

from __future__ import annotations

import importlib.metadata
import platform
import socket

import spark_elastic


def facts() -> dict[str, str]:
    """This process's host name and the versions of what is installed; imports none of it."""
    found = {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "spark_elastic": spark_elastic.__version__,
    }
    for package in ("numpy", "torch", "tensorflow", "keras"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
