"""The command of `spark-elastic-run` where it is more than a Python and its script.

Options of Python become the variables of the environment that mean the same, for this process and all that it starts.
Any other program (`env`, `nice`, a shell's script) runs once, here; each `python` that it finds on its PATH is a call
of `spark-elastic-run` with the same options. Main thread.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import MutableMapping, Sequence
from pathlib import Path

from spark_elastic.errors import InvalidInput

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
    """(the variables that stand for Python's options, the words from the script, -m or -c on).

    Raises:
        InvalidInput: an option has no variable.
    """
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

    Raises:
        InvalidInput: there is no such program, or it started no `python` of its PATH.
    """
    run = shlex.join([sys.executable, "-m", "spark_elastic.clusters.cli", *options])
    with tempfile.TemporaryDirectory(prefix="spark-elastic-") as folder:
        for name in ("python", "python3"):
            shim = Path(folder, name)
            shim.write_text(_SHIM.format(folder=folder, run=run))
            shim.chmod(0o700)
        inside = {**environment, PATH: f"{folder}:{dict(environment).get(PATH, os.defpath)}"}
        try:
            process = subprocess.Popen(list(command), env=inside, start_new_session=True)
        except OSError as error:
            raise InvalidInput(
                f"{command[0]!r} cannot be run ({error}): give a program or a Python."
            ) from error
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
