"""Finds Python interpreters: `python interpreters.py VERSION` prints one of that minor version."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def find_python(version: str) -> str:
    """An interpreter of that minor version, from the path or from pyenv.

    Raises:
        SystemExit: there is none.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    of_pyenv = sorted(map(str, pyenv.glob(f"versions/{version}.*/bin/python")))
    for place in (os.environ.get(f"PYTHON{version.replace('.', '')}", ""), f"python{version}", *of_pyenv):
        command = [place, "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
        except OSError:  # no such program
            continue
        if done.stdout.strip() == version:
            return place
    number = version.replace(".", "")
    raise SystemExit(f"no Python {version} was found: install it, or set PYTHON{number} to it.")


if __name__ == "__main__":
    sys.stdout.write(find_python(sys.argv[1]) + "\n")
