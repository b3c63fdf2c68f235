"""The options of `spark-elastic-run`, with Horovod's names: its own, and those of `horovodrun` that it passes on to the
training processes, ignores or refuses.

Runs in the main thread of the command line.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import click

from spark_elastic.config import DEVICES
from spark_elastic.errors import InvalidInput

LEVELS = ("trace", "debug", "info", "warning", "error", "critical", "fatal")
_SOME = click.IntRange(min=1)
_KEY = click.Path(exists=True, dir_okay=False, resolve_path=True)
# Names, what is taken (bool: the option is a flag), help.
OWN: tuple[tuple[str, Any, str], ...] = (
    ("-np --num-proc", _SOME, "Workers to start with; default: all slots of the hosts."),
    ("--min-np --min-num-proc", _SOME, "Fewest workers to start and to continue with; default: -np."),
    ("--max-np --max-num-proc", _SOME, "Most workers at any time; default: as many as at the start."),
    (
        "-H --hosts",
        str,
        "Hosts with their slots: host1:4,host2:4. Workers of other machines are started through ssh.",
    ),
    ("-hostfile --hostfile", click.Path(), "File with the same, one host:slots per line."),
    ("--host-discovery-script", str, "Executable that prints host[:slots] lines; run once a second."),
    ("-p --ssh-port", click.IntRange(1, 65535), "Port of the ssh servers of other hosts."),
    ("--ssh-user", str, "User at other hosts."),
    ("-i --ssh-identity-file", _KEY, "File with the private key for other hosts."),
    (
        "--network-interface --network-interfaces",
        str,
        "Interface of this machine whose address other hosts dial; default: the one on the way to them.",
    ),
    ("--slots-per-host", _SOME, "Slots of hosts that are given without a number."),
    ("--reset-limit", int, "Most new worlds after the first; default: no limit."),
    ("--elastic-timeout", float, "Seconds to wait for --min-np workers; default 600."),
    ("--start-timeout", float, "Seconds that the start waits for -np workers once --min-np are ready."),
    (
        "--blacklist-cooldown-range",
        (float, float),
        "Seconds that a slot is not used after a failure: at first, and at most.",
    ),
    ("--gloo-timeout-seconds", float, "Longest wait for peers in one collective, in seconds."),
    ("--device", click.Choice(DEVICES), "What workers train on; default auto."),
    ("--output-filename", click.Path(), "Folder for the output of each rank: rank.N/stdout."),
    ("--run-id", str, "Name of the run: it writes checkpoints to the store, and the same name resumes."),
    ("--store", str, "Folder or fsspec url for the checkpoints of the run."),
    (
        "--restarts",
        _SOME,
        "How often the driver is started again after a signal killed it; it continues the run. Needs --run-id.",
    ),
    ("--checkpoint-steps", _SOME, "Write a checkpoint every N commits; default: by time."),
    ("-prefix-timestamp --prefix-output-with-timestamp", bool, "Print the time of day before each line."),
    (
        "--log-level",
        click.Choice(LEVELS, case_sensitive=False),
        "Level of the log of the driver and of the training processes.",
    ),
    ("--verbose", bool, "Print each new world, and why it began."),
)
PRELOAD = "Module that each worker imports before it joins, beside those that the program imports at its top."

# Names, what is taken, help, and the variables of the training processes that follow from the value. If a variable of
# ours exists, it is set in place of Horovod's: ours wins, and an option should win over a variable.
PASSED_ON: tuple[tuple[str, Any, str, Callable[[Any], dict[str, object]]], ...] = (
    (
        "--fusion-threshold-mb",
        click.IntRange(min=0),
        "MiB that travel together; 0: each operation and gradient alone.",
        lambda mb: dict.fromkeys(("SPARK_ELASTIC_FUSION_THRESHOLD", "SPARK_ELASTIC_BUCKET_BYTES"), mb << 20),
    ),
    (
        "--timeline-filename",
        str,
        "File for a Chrome trace of all operations, written by rank 0.",
        lambda path: {"SPARK_ELASTIC_TIMELINE": path},
    ),
    (
        "--timeline-mark-cycles/--no-timeline-mark-cycles",
        bool,
        "Mark rounds of negotiation in the trace.",
        lambda on: {"SPARK_ELASTIC_TIMELINE_MARK_CYCLES": int(on)},
    ),
    (
        "--stall-check/--no-stall-check",
        bool,
        "Log which ranks an operation waits for; default: log.",
        lambda on: {"HOROVOD_STALL_CHECK_DISABLE": 0} if on else {"SPARK_ELASTIC_WARN_AFTER": "inf"},
    ),
    (
        "--stall-check-warning-time-seconds",
        click.FloatRange(min=0),
        "Seconds until that is logged; default 10.",
        lambda seconds: {"SPARK_ELASTIC_WARN_AFTER": seconds},
    ),
    (
        "--stall-check-shutdown-time-seconds",
        click.FloatRange(min=0),
        "Seconds until waiting is an error; 0: --gloo-timeout-seconds.",
        lambda seconds: {"SPARK_ELASTIC_WAIT_AT_MOST": seconds},
    ),
)
_MESH = "workers speak to each other over the job's own mesh"
_NO_MPI = f"{_MESH}, and there is no MPI in it"
_LEVELS = "the way between workers follows from where they are, and nothing is to be chosen"
_TUNING = "tuning tries three sizes of buckets in a world's first 15 steps and has no settings"
_NO_TIME = "lines of the log have no time; --prefix-output-with-timestamp puts it before what workers print"
# Options of `horovodrun` that are refused: (names, takes a value, why).
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
    (("--log-with-timestamp", "--no-log-hide-timestamp"), False, _NO_TIME),
)
# Options that change nothing: Gloo's algorithms, no cache of checks, constant buffer sizes, a log without times.
ALWAYS_ON = (
    *("--gloo", "--disable-cache", "--autotune", "--no-autotune"),
    "--log-without-timestamp --log-hide-timestamp",
)
_VARIABLES = "variables of the training processes"


def list_options() -> list[click.Parameter]:
    """The options, in the order of the help. Those of `horovodrun` become no arguments of the command's function."""
    hidden: dict[str, Any] = {"hidden": True, "expose_value": False}
    return [
        *(_make_option(*row) for row in OWN),
        click.Option(["--preload"], multiple=True, metavar="MODULE", help=PRELOAD),
        *(
            _make_option(*row, expose_value=False, default=None, callback=partial(_pass_on, follows))
            for *row, follows in PASSED_ON
        ),
        *(click.Option(names.split(), is_flag=True, **hidden) for names in ALWAYS_ON),
        *(
            click.Option(names, is_flag=not takes_value, callback=partial(_refuse, why), **hidden)
            for names, takes_value, why in REFUSED
        ),
    ]


def _make_option(names: str, kind: Any, text: str, **more: Any) -> click.Option:
    form = {"is_flag": True} if kind is bool else {"type": kind}
    return click.Option(names.split(), help=text, **form, **more)


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
        variables = context.meta.setdefault(_VARIABLES, {})
        for name, text in follows(value).items():
            if variables.get(name) != "inf":  # --no-stall-check holds wherever it stands
                variables[name] = str(text)


def _refuse(why: str, context: click.Context, parameter: click.Parameter, value: object) -> None:
    if value not in (None, False):
        raise InvalidInput(f"spark-elastic-run does not take {'/'.join(parameter.opts)}: {why}.")
