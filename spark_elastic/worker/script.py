"""A Python script as a function to run: as `__main__`, with arguments of its own, as `python train.py` would."""

from __future__ import annotations

import os
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path

from spark_elastic.data.scratch import scratch_folder
from spark_elastic.errors import InvalidInput


@dataclass(frozen=True)
class Script:
    """path: where it lies at the caller. source: its text, for hosts that do not have it there."""

    path: str
    source: str
    arguments: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: str, *arguments: str) -> Script:
        """Raises InvalidInput where there is no such file."""
        whole = os.path.abspath(path)
        try:
            return cls(whole, Path(whole).read_text(encoding="utf-8"), arguments)
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInput(
                f"the script {path!r} cannot be read ({error}): give the path of a Python file."
            ) from error

    def __call__(self) -> None:
        """Run it. An exit code other than 0 is an error, as for the shell."""
        with scratch_folder() as folder:
            path = self._here(folder)
            sys.argv = [str(path), *self.arguments]
            sys.path.insert(0, str(path.parent))
            try:
                runpy.run_path(str(path), run_name="__main__")
            except SystemExit as exit:
                if exit.code not in (None, 0):
                    raise
            finally:
                sys.path.remove(str(path.parent))

    def _here(self, folder: Path) -> Path:
        """Where it lies on this host: at its own place, beside the modules that it imports, or a copy."""
        own = Path(self.path)
        try:
            if own.read_text(encoding="utf-8") == self.source:
                return own
        except (OSError, UnicodeDecodeError):
            pass  # it is not here, or is another file
        copy = folder / own.name
        copy.write_text(self.source, encoding="utf-8")
        return copy
