"""The command of `spark-elastic-run`: which Python it names, Python's options, or another program that starts Pythons.

Another Python is asked in a process of its own; nothing of it is imported here. Options of Python become the variables
of the environment that mean the same, for this process and all that it starts. Any other program (`env`, a shell's
script) runs once, here; each `python` of its PATH is a call of `spark-elastic-run` with the same options."""

from __future__ import annotations

import base64
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import spark_elastic
from spark_elastic.data.scratch import make_scratch_folder
from spark_elastic.errors import InvalidInput
from spark_elastic.worker.function_program import Module

OWN_NAMES = ("python", "python3")  # without a folder they mean the Python that runs spark-elastic-run
ANSWER_WITHIN = 60.0  # seconds
_QUESTION = """
import base64, json, sys
import spark_elastic
from spark_elastic.worker.function_program import Module
try:
    found = Module.find(sys.argv[1]) if sys.argv[1:] else None
    source = base64.b64encode(found.source).decode() if found else ""
    module = {"name": found.name, "folder": found.folder, "source": source} if found else None
    answer = {"version": spark_elastic.__version__, "module": module}
except spark_elastic.InvalidInput as error:
    answer = {"version": spark_elastic.__version__, "error": str(error)}
print(json.dumps(answer))
"""
PATH = "PATH"
# Flags of Python, and what means the same; None: nothing does, or nothing has to.
FLAGS = {
    "O": "PYTHONOPTIMIZE", "B": "PYTHONDONTWRITEBYTECODE", "s": "PYTHONNOUSERSITE", "P": "PYTHONSAFEPATH",
    "v": "PYTHONVERBOSE", "d": "PYTHONDEBUG", "u": None, "q": None,
}  # fmt: skip
SETTINGS = {
    "dev": "PYTHONDEVMODE", "utf8": "PYTHONUTF8", "faulthandler": "PYTHONFAULTHANDLER",
    "tracemalloc": "PYTHONTRACEMALLOC", "importtime": "PYTHONPROFILEIMPORTTIME",
    "int_max_str_digits": "PYTHONINTMAXSTRDIGITS", "no_debug_ranges": "PYTHONNODEBUGRANGES",
}  # fmt: skip
_SHIM = """#!/bin/sh
: > {folder}/used
PATH=$(printf %s "$PATH" | sed "s|{folder}:||g") exec {run} python "$@"
"""


def take_python_options(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """(the variables that stand for Python's options, the words from the script, -m or -c on)."""
    variables: dict[str, str] = {}
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "-m", "-c"):
        option = rest.pop(0)
        if option[:2] in ("-W", "-X"):
            value = option[2:] or (rest.pop(0) if rest else "")
            name, _, setting = value.partition("=")
            if option[1] == "W":
                variables["PYTHONWARNINGS"] = ",".join(filter(None, [variables.get("PYTHONWARNINGS"), value]))
            elif name in SETTINGS:
                variables[SETTINGS[name]] = setting or "1"
            else:
                _refuse(f"-X {name}")
            continue
        for flag in option[1:]:
            if flag not in FLAGS:
                _refuse(option)
            if variable := FLAGS[flag]:
                variables[variable] = str(int(variables.get(variable, "0")) + 1)
    return variables, rest


def _refuse(option: str) -> None:
    raise InvalidInput(
        f"the workers' Python cannot be given {option}: leave it out; -O, -B, -s, -P, -u, -v, -W, -c, -m and "
        f"-X {', '.join(SETTINGS)} are taken."
    )


def run_around(command: Sequence[str], options: Sequence[str], environment: MutableMapping[str, str]) -> int:
    """Run a program whose Pythons are elastic jobs with these options of `spark-elastic-run`. Returns its exit code.
    Raises InvalidInput: there is no such program, or it started no `python` of its PATH."""
    run = shlex.join([sys.executable, "-m", "spark_elastic.clusters.cli", *options])
    with make_scratch_folder() as folder:
        for name in ("python", "python3"):
            shim = Path(folder, name)
            shim.write_text(_SHIM.format(folder=folder, run=run))
            shim.chmod(0o700)
        inside = {**environment, PATH: f"{folder}:{dict(environment).get(PATH, os.defpath)}"}
        try:
            process = subprocess.Popen(list(command), env=inside, start_new_session=True)
        except OSError as error:
            problem = f"{command[0]!r} cannot be run ({error})"
            raise InvalidInput(f"{problem}: give a program or a Python.") from error
        try:
            code = process.wait()
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)  # its jobs end as this one would
            process.wait()
            raise
        if code == 0 and not Path(folder, "used").exists():
            raise InvalidInput(
                f"{command[0]} ended and has started no `python` or `python3` of its PATH, so that no worker has run: "
                "let it start Python by that name, or start it around spark-elastic-run."
            )
        return code


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
        """The Python that a command names: by its path, or as the shell finds it."""
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
        """The module that `-m` names, as this Python finds it."""
        if self.is_own:
            return Module.find(name, *arguments)
        found: dict[str, str] = self._ask(name)["module"]
        return Module(found["name"], found["folder"], base64.b64decode(found["source"]), arguments)

    def check(self) -> None:
        """Raises InvalidInput: this Python cannot run workers."""
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
