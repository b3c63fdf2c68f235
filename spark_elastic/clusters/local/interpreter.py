"""Which Python runs the command of `spark-elastic-run`: this process's own, or another one that has the package.

Main thread, before the job. Another Python is asked in a process of its own; nothing of it is imported here.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import spark_elastic
from spark_elastic.errors import InvalidInput
from spark_elastic.worker.script import Module

OWN_NAMES = ("python", "python3")  # without a folder they mean the Python that runs spark-elastic-run
ANSWER_WITHIN = 60.0  # seconds
_QUESTION = """
import base64, json, sys
import spark_elastic
from spark_elastic.worker.script import Module
try:
    found = Module.find(sys.argv[1]) if sys.argv[1:] else None
    source = base64.b64encode(found.source).decode() if found else ""
    module = {"name": found.name, "folder": found.folder, "source": source} if found else None
    answer = {"version": spark_elastic.__version__, "module": module}
except spark_elastic.InvalidInput as error:
    answer = {"version": spark_elastic.__version__, "error": str(error)}
print(json.dumps(answer))
"""


@dataclass(frozen=True)
class Interpreter:
    """A Python that workers run with."""

    path: str  # of its executable

    @property
    def is_own(self) -> bool:
        """Whether it is the one that runs this process."""
        return self.path == sys.executable

    @classmethod
    def find(cls, name: str) -> Interpreter:
        """The Python that a command names: by its path, or as the shell finds it.

        Raises:
            InvalidInput: there is no such executable.
        """
        if name in OWN_NAMES:
            return cls(sys.executable)
        path = shutil.which(name)
        if path is None:
            raise InvalidInput(f"there is no executable {name!r}: give the path of a Python.")
        path = os.path.abspath(path)  # links stay: by its folder a Python knows its environment
        folders = os.path.realpath(os.path.dirname(path)), os.path.realpath(os.path.dirname(sys.executable))
        same = folders[0] == folders[1] and os.path.realpath(path) == os.path.realpath(sys.executable)
        return cls(sys.executable if same else path)

    def find_module(self, name: str, *arguments: str) -> Module:
        """The module that `-m` names, as this Python finds it.

        Raises:
            InvalidInput: there is none, or this Python cannot run workers.
        """
        if self.is_own:
            return Module.find(name, *arguments)
        found: dict[str, str] = self._ask(name)["module"]
        return Module(found["name"], found["folder"], base64.b64decode(found["source"]), arguments)

    def check(self) -> None:
        """
        Raises:
            InvalidInput: this Python cannot run workers.
        """
        if not self.is_own:
            self._ask()

    def _ask(self, *module: str) -> dict[str, Any]:
        problem = f"workers cannot run with {self.path}"
        try:
            done = subprocess.run(
                [self.path, "-c", _QUESTION, *module],
                capture_output=True,
                text=True,
                timeout=ANSWER_WITHIN,
                check=False,
            )
            answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
            if not isinstance(error, ValueError | IndexError):
                raise InvalidInput(f"{problem} ({error}): give a Python that has spark_elastic.") from error
            said = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
            raise InvalidInput(
                f"{problem} ({said}): give a Python that has spark_elastic, or install it there."
            ) from error
        if answer["version"] != spark_elastic.__version__:
            raise InvalidInput(
                f"{problem}: it has spark_elastic {answer['version']}, and spark-elastic-run is of "
                f"{spark_elastic.__version__}; install the same version."
            )
        if "error" in answer:
            raise InvalidInput(answer["error"])
        return answer
