"""Options of `horovodrun` that `spark-elastic-run` passes on to the training processes, ignores or refuses.

Runs in the main thread of the command line.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import click

from spark_elastic.errors import InvalidInput

_MESH = "workers speak to each other over the job's own mesh"
_NO_MPI = f"{_MESH}, and there is no MPI in it"
_LEVELS = "the way between workers follows from where they are, and nothing is to be chosen"
_TUNING = "tuning tries three sizes of buckets in a world's first 15 steps and has no settings"
# Options that are refused: (names, takes a value, why).
REFUSED: tuple[tuple[tuple[str, ...], bool, str], ...] = (
    (("-cb", "--check-build"), False, "nothing is compiled for a framework, so there is no build to check"),
    (("--mpi",), False, _NO_MPI),
    (("--mpi-args",), True, _NO_MPI),
    (("--mpi-threads-disable",), False, _NO_MPI),
    (("--no-mpi-threads-disable",), False, _NO_MPI),
    (("--jsrun",), False, _NO_MPI),
    (("--tcp",), False, _MESH),
    (("--binding-args",), True, "workers are bound to no cores"),
    (("--thread-affinity",), True, "no thread is bound to a core"),
    (("--num-nccl-streams",), True, f"{_MESH}, and there is no NCCL in it"),
    (("--config-file",), True, "give options on the command line, or as SPARK_ELASTIC_<NAME> variables"),
    (("--cycle-time-ms",), True, "nothing waits for a cycle"),
    (("--cache-capacity",), True, "the cache has room for 4096 operations, always"),
    (("--hierarchical-allreduce",), False, _LEVELS),
    (("--no-hierarchical-allreduce",), False, _LEVELS),
    (("--hierarchical-allgather",), False, _LEVELS),
    (("--no-hierarchical-allgather",), False, _LEVELS),
    (("--torus-allreduce",), False, _LEVELS),
    (("--no-torus-allreduce",), False, _LEVELS),
    (("--autotune-log-file",), True, _TUNING),
    (("--autotune-warmup-samples",), True, _TUNING),
    (("--autotune-steps-per-sample",), True, _TUNING),
    (("--autotune-bayes-opt-max-samples",), True, _TUNING),
    (("--autotune-gaussian-process-noise",), True, _TUNING),
    (
        ("--log-with-timestamp", "--no-log-hide-timestamp"),
        False,
        "lines of the log have no time of their own; --prefix-output-with-timestamp puts it before what workers print",
    ),
)
# Options that change nothing: Gloo's algorithms, no cache of checks, constant buffer sizes, a log without times.
ALWAYS_ON: tuple[tuple[str, ...], ...] = (
    ("--gloo",),
    ("--disable-cache",),
    ("--autotune",),
    ("--no-autotune",),
    ("--log-without-timestamp", "--log-hide-timestamp"),
)
# Option -> its click arguments, and the variables of the training processes that follow from its value. If a variable
# of ours exists, it is set in place of Horovod's: ours wins, and an option should win over a variable.
PASSED_ON: dict[str, tuple[dict[str, Any], Callable[[Any], dict[str, object]]]] = {
    "--fusion-threshold-mb": (
        {
            "type": click.IntRange(min=0),
            "help": "MiB that travel together; 0: each operation and gradient alone.",
        },
        lambda mb: dict.fromkeys(("SPARK_ELASTIC_FUSION_THRESHOLD", "SPARK_ELASTIC_BUCKET_BYTES"), mb << 20),
    ),
    "--timeline-filename": (
        {"help": "File for a Chrome trace of all operations, written by rank 0."},
        lambda path: {"SPARK_ELASTIC_TIMELINE": path},
    ),
    "--timeline-mark-cycles/--no-timeline-mark-cycles": (
        {"help": "Mark rounds of negotiation in the trace."},
        lambda on: {"SPARK_ELASTIC_TIMELINE_MARK_CYCLES": int(on)},
    ),
    "--stall-check/--no-stall-check": (
        {"help": "Log which ranks an operation waits for; default: log."},
        lambda on: {"HOROVOD_STALL_CHECK_DISABLE": 0} if on else {"SPARK_ELASTIC_WARN_AFTER": "inf"},
    ),
    "--stall-check-warning-time-seconds": (
        {"type": click.FloatRange(min=0), "help": "Seconds until that is logged; default 10."},
        lambda seconds: {"SPARK_ELASTIC_WARN_AFTER": seconds},
    ),
    "--stall-check-shutdown-time-seconds": (
        {
            "type": click.FloatRange(min=0),
            "help": "Seconds until waiting is an error; 0: --gloo-timeout-seconds.",
        },
        lambda seconds: {"SPARK_ELASTIC_WAIT_AT_MOST": seconds},
    ),
}
_VARIABLES = "variables of the training processes"


def add_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add these options to a command; none of them becomes an argument of its function."""
    # Click shows the option first that was added last.
    for option, (arguments, follows) in reversed(PASSED_ON.items()):
        command = click.option(
            option, **arguments, default=None, expose_value=False, callback=partial(_pass_on, follows)
        )(command)
    for names in ALWAYS_ON:
        command = click.option(*names, is_flag=True, hidden=True, expose_value=False)(command)
    for names, takes_value, why in REFUSED:
        command = click.option(
            *names, is_flag=not takes_value, hidden=True, expose_value=False, callback=partial(_refuse, why),
            default=None if takes_value else False,
        )(command)  # fmt: skip
    return command


def get_variables(context: click.Context) -> dict[str, str]:
    """The variables that the options of this command line set for the training processes."""
    return dict(context.meta.get(_VARIABLES, {}))


def _pass_on(
    follows: Callable[[Any], dict[str, object]],
    context: click.Context,
    parameter: click.Parameter,
    value: object,
) -> None:
    if value is not None:
        found = context.meta.setdefault(_VARIABLES, {})
        for name, text in follows(value).items():
            if found.get(name) != "inf":  # --no-stall-check holds wherever it stands
                found[name] = str(text)


def _refuse(why: str, context: click.Context, parameter: click.Parameter, value: object) -> None:
    if value not in (None, False):
        raise InvalidInput(f"spark-elastic-run does not take {'/'.join(parameter.opts)}: {why}.")
