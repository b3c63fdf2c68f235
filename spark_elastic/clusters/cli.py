"""The command line tool `spark-elastic-run`: a script on elastic workers of this machine and others, without Spark.

Its options have Horovod's names; those of `horovodrun` are taken, passed on to the training processes, ignored or
refused. Runs in the main thread of its process.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, TypeAlias

import click

import spark_elastic
from spark_elastic.clock import SystemClock
from spark_elastic.clusters.local.command import Interpreter, run_around, take_python_options
from spark_elastic.clusters.local.launcher import HostSlots, find_remote_hosts
from spark_elastic.clusters.local.ssh import SshLauncher, SshOptions, choose_addresses
from spark_elastic.clusters.run.call import prepare
from spark_elastic.config import DEVICES, ElasticConfig, find_interface_address, from_env, log_level
from spark_elastic.driver.discovery import Find, HostPoller, ScriptFinder, parse_hosts
from spark_elastic.driver.job import DriverOptions, supervise
from spark_elastic.errors import ElasticError, InvalidInput
from spark_elastic.monitoring.console import LineRateLimiter, OutputListener
from spark_elastic.monitoring.listener import close_within_deadline
from spark_elastic.monitoring.logs import log_to_stream
from spark_elastic.worker.devices import require_gpus
from spark_elastic.worker.function_program import Module, Script

LOCALHOST = "localhost"
RunOptions: TypeAlias = SimpleNamespace  # the options of a command line, by their names; None: not given
PYTHON = re.compile(r"py(thon)?\d*(\.\d+)*t?$")  # how names of Pythons end

LOG_LEVELS = ("trace", "debug", "info", "warning", "error", "critical", "fatal")
_LEVEL = click.Choice(LOG_LEVELS, case_sensitive=False)
_SOME = click.IntRange(min=1)
_KEY = click.Path(exists=True, dir_okay=False, resolve_path=True)
Follows: TypeAlias = Callable[[Any], dict[str, object]]
# Names, what is taken (bool: the option is a flag), help.
OWN: tuple[tuple[str, Any, str], ...] = (
    ("-np --num-proc", _SOME, "Workers to start with; default: all slots of the hosts."),
    ("--min-np --min-num-proc", _SOME, "Fewest workers to start and to continue with; default: -np."),
    ("--max-np --max-num-proc", _SOME, "Most workers at any time; default: as many as at the start."),
    ("-H --hosts", str, "Hosts with their slots: host1:4,host2:4. Other machines are entered through ssh."),
    ("-hostfile --hostfile", click.Path(), "File with the same, one host:slots per line."),
    ("--host-discovery-script", str, "Executable that prints host[:slots] lines; run once a second."),
    ("-p --ssh-port", click.IntRange(1, 65535), "Port of the ssh servers of other hosts."),
    ("--ssh-user", str, "User at other hosts."),
    ("-i --ssh-identity-file", _KEY, "File with the private key for other hosts."),
    ("--network-interface --network-interfaces", str, "Interface whose address other hosts dial."),
    ("--slots-per-host", _SOME, "Slots of hosts that are given without a number."),
    ("--reset-limit", int, "Most new worlds after the first; default: no limit."),
    ("--elastic-timeout", float, "Seconds to wait for --min-np workers; default 600."),
    ("--start-timeout", float, "Seconds that the start waits for -np workers once --min-np are ready."),
    ("--blacklist-cooldown-range", (float, float), "Seconds without a slot that failed: first, and at most."),
    ("--gloo-timeout-seconds", float, "Longest wait for peers in one collective, in seconds."),
    ("--device", click.Choice(DEVICES), "What workers train on; default auto."),
    ("--output-filename", click.Path(), "Folder for the output of each rank: rank.N/stdout."),
    ("--run-id", str, "Name of the run: it writes checkpoints to the store, and the same name resumes."),
    ("--store", str, "Folder or fsspec url for the checkpoints of the run."),
    ("--restarts", _SOME, "How often a driver that a signal killed starts again, to continue the run."),
    ("--checkpoint-steps", _SOME, "Write a checkpoint every N commits; default: by time."),
    ("-prefix-timestamp --prefix-output-with-timestamp", bool, "Print the time of day before each line."),
    ("--log-level", _LEVEL, "Level of the log of the driver and of the training processes."),
    ("--verbose", bool, "Print each new world, and why it began."),
)
PRELOAD = "Module that each worker imports before it joins, beside those that the program imports at its top."

# Names, what is taken, help, and the variables of the training processes that follow from the value. If a variable of
# ours exists, it is set in place of Horovod's: ours wins, and an option should win over a variable.
PASSED_ON: tuple[tuple[str, Any, str, Follows], ...] = (
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
# Options of `horovodrun` that are refused: (why, takes a value, names of each option).
REFUSED: tuple[tuple[str, bool, tuple[str, ...]], ...] = (
    ("nothing is compiled for a framework, so there is no build to check", False, ("-cb --check-build",)),
    (_NO_MPI, False, ("--mpi", "--mpi-threads-disable", "--no-mpi-threads-disable", "--jsrun")),
    (_NO_MPI, True, ("--mpi-args",)),
    (_MESH, False, ("--tcp",)),
    ("workers are bound to no cores", True, ("--binding-args",)),
    ("no thread is bound to a core", True, ("--thread-affinity",)),
    (f"{_MESH}, and there is no NCCL in it", True, ("--num-nccl-streams",)),
    ("give options on the command line, or as SPARK_ELASTIC_<NAME> variables", True, ("--config-file",)),
    ("nothing waits for a cycle", True, ("--cycle-time-ms",)),
    ("the cache has room for 4096 operations, always", True, ("--cache-capacity",)),
    (_LEVELS, False, ("--hierarchical-allreduce", "--hierarchical-allgather", "--torus-allreduce")),
    (_LEVELS, False, ("--no-hierarchical-allreduce", "--no-hierarchical-allgather", "--no-torus-allreduce")),
    (_TUNING, True, ("--autotune-log-file", "--autotune-warmup-samples", "--autotune-steps-per-sample")),
    (_TUNING, True, ("--autotune-bayes-opt-max-samples", "--autotune-gaussian-process-noise")),
    (_NO_TIME, False, ("--log-with-timestamp --no-log-hide-timestamp",)),
)
# Options that change nothing: Gloo's algorithms, no cache of checks, constant buffer sizes, a log without times.
ALWAYS_ON = (
    *("--gloo", "--disable-cache", "--autotune", "--no-autotune"),
    "--log-without-timestamp --log-hide-timestamp",
)
_VARIABLES = "variables of the training processes"

FORM = {"allow_interspersed_args": False, "max_content_width": 110}


@click.command(name="spark-elastic-run", context_settings=FORM)
@click.version_option(spark_elastic.__version__, "-v", "--version")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def run(context: click.Context, /, **options: Any) -> None:
    """Run COMMAND, as in `python train.py --lr 0.1` or `python -m train`, on elastic workers. Any other program,
    such as `bash train.sh`, runs here, and each `python` that it starts by its PATH on elastic workers.

    They run on this machine, or on the hosts that -H, --hostfile or a discovery script names. Other machines are
    entered through `ssh`, which must ask nothing, and have the same Python and spark_elastic at the same path. Workers
    get this process's environment, and start in the current folder where the host has it.
    """
    words = tuple(sys.argv[1 : len(sys.argv) - len(options["command"])])
    # words: the command line before the command; environment: variables that follow from options
    chosen = RunOptions(**options, environment=context.meta.get(_VARIABLES, {}), words=words)
    try:
        sys.exit(execute(chosen))
    except ElasticError as error:
        click.echo(f"spark-elastic-run: {type(error).__name__}: {error}", err=True)
        sys.exit(1)


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
            click.Option(names.split(), is_flag=not takes_value, callback=partial(_refuse, why), **hidden)
            for why, takes_value, options in REFUSED
            for names in options
        ),
    ]


def _make_option(names: str, kind: Any, text: str, **more: Any) -> click.Option:
    form = {"is_flag": True} if kind is bool else {"type": kind}
    return click.Option(names.split(), help=text, **form, **more)


def _pass_on(follows: Follows, context: click.Context, parameter: click.Parameter, value: object) -> None:
    if value is not None:
        variables = context.meta.setdefault(_VARIABLES, {})
        for name, text in follows(value).items():
            if variables.get(name) != "inf":  # --no-stall-check holds wherever it stands
                variables[name] = str(text)


def _refuse(why: str, context: click.Context, parameter: click.Parameter, value: object) -> None:
    if value not in (None, False):
        raise InvalidInput(f"spark-elastic-run does not take {'/'.join(parameter.opts)}: {why}.")


run.params[:0] = list_options()


class CommandOutput(OutputListener):
    """Writes all output to `rank.N/stdout` as well, and marks what the driver says. Unless all messages are shown, each
    loss, join and notice is a line of standard error.

    folder: of the ranks' folders; None: no files. Workers outside of a world write to `rank.none`.
    """

    def __init__(self, folder: Path | None, *shown: Any, **named: Any) -> None:
        super().__init__(*shown, **named)
        self._folder = folder
        self._files: dict[str, IO[str]] = {}  # by folder
        self._files_lock = threading.Lock()
        self._loss = ""  # why a world has broken, while the next one is not there yet
        self._world_formed = False  # there has been a world

    def on_output(self, worker: str, rank: int | None, line: str) -> None:
        super().on_output(worker, rank, line)
        with self._files_lock:
            if self._folder is not None:
                name = "rank.none" if rank is None else f"rank.{rank}"
                if name not in self._files:
                    (self._folder / name).mkdir(parents=True, exist_ok=True)
                    self._files[name] = (self._folder / name / "stdout").open("a", encoding="utf-8")
                self._files[name].write(line + "\n")
                self._files[name].flush()

    def on_message(self, text: str) -> None:
        super().on_message(f"[driver] {text}")

    def close(self) -> None:
        super().close()
        with self._files_lock:
            for file in self._files.values():
                file.close()
            self._files.clear()
            self._folder = None

    def on_world_broken(self, reason: str) -> None:
        self._loss = reason
        self._print(reason)

    def on_world(self, size: int, reason: str) -> None:
        if self._world_formed:
            known = self._loss and self._loss.partition(": ")[2] in reason
            workers = "1 worker" if size == 1 else f"{size} workers"
            self._print(f"the next world has {workers}" if known else reason)
        self._world_formed, self._loss = True, ""

    def on_notice(self, text: str) -> None:
        super().on_notice(text)
        self._print(text)

    def _print(self, text: str) -> None:
        if not self.show_messages:
            click.echo(f"spark-elastic-run: {text}", err=True)


def execute(options: RunOptions) -> int:
    """Run the job to its end. Returns the exit code."""
    if options.restarts is not None:
        return supervise_driver(options)
    first = options.command[0]
    if not first.endswith(".py") and not PYTHON.search(os.path.basename(first)):
        return run_around(options.command, options.words, os.environ)
    if not (options.log_level or options.verbose):
        _execute(options)
        return 0
    logging.getLogger("spark_elastic").setLevel(log_level(options.log_level or "info"))
    with log_to_stream(sys.stderr, announced=not options.verbose):
        _execute(options)
    return 0


def supervise_driver(options: RunOptions) -> int:
    """Run the job in a process of its own, and again, up to `restarts` times, when a signal has killed that: its run
    continues. What ends with an error is not repeated. Returns the exit code."""
    if options.run_id is None or options.store is None:
        why = "by them the next driver continues the run"
        raise InvalidInput(f"--restarts needs --run-id and --store: {why}.")
    for left in range(options.restarts, -1, -1):
        driver = os.fork()
        if driver == 0:
            return execute(RunOptions(**{**vars(options), "restarts": None}))
        code = _await_driver(driver)
        if code >= 0 or left == 0:
            break
        click.echo(
            f"spark-elastic-run: the driver was killed by {signal.Signals(-code).name}; it starts again and continues "
            f"the run ({left - 1} restarts left)",
            err=True,
        )
    return code if code >= 0 else 128 - code


def _await_driver(driver: int) -> int:
    """The exit code of the driver's process, negative: the signal that killed it. Ctrl-C, which reaches it as well, and
    SIGTERM, which is passed on, end it for good."""
    ended_by_user: list[int] = []

    def end(number: int, frame: object) -> None:
        ended_by_user.append(number)
        if number == signal.SIGTERM:
            os.kill(driver, number)

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    code = os.waitstatus_to_exitcode(os.waitpid(driver, 0)[1])
    for number, handler in before.items():
        signal.signal(number, handler)
    return 128 - code if ended_by_user and code < 0 else code


def _execute(options: RunOptions) -> None:
    interpreter, program, arguments = _parse_program(options.command)
    fixed = _parse_fixed_hosts(options)
    number = sum(fixed.values()) if options.num_proc is None and fixed else options.num_proc
    if number is None:
        raise InvalidInput("spark-elastic-run needs -np, the number of workers to start with.")
    least, most = options.min_np or number, options.max_np or number
    if not least <= number <= most:
        got = f"{least} <= {number} <= {most}"
        raise InvalidInput(f"spark-elastic-run needs --min-np <= -np <= --max-np; got {got}.")
    environment = _make_environment(options)
    named = {
        name: getattr(options, name) for name in ("min_np", "max_np", "run_id", "store", "checkpoint_steps")
    }
    named |= {"np": number, "env": environment, "preload": options.preload or None}
    call = prepare(program, arguments, named, _make_config(options))
    hosts, clock = HostSlots(), SystemClock()
    config, limits = call.options.config, call.make_limits(number)
    ssh = SshOptions(port=options.ssh_port, user=options.ssh_user, identity_file=options.ssh_identity_file)
    launcher = SshLauncher(call.program, hosts, clock, ssh, call.preload, interpreter.path)
    folder = _make_output_folder(options.output_filename)
    if fixed and sum(fixed.values()) < limits.min_workers:
        raise InvalidInput(
            f"the hosts have {sum(fixed.values())} slots and the job needs {limits.min_workers} workers: give hosts "
            "more slots, or --min-np fewer workers."
        )
    is_here = not find_remote_hosts(fixed) and options.host_discovery_script is None
    if is_here:
        require_gpus(config, limits.min_workers, {**os.environ, **environment})
    limit = LineRateLimiter() if sys.stdout.isatty() else None
    timestamps, verbose = options.prefix_output_with_timestamp, options.verbose
    output = CommandOutput(folder, sys.stdout, clock, timestamps, verbose, config.show_logs, limit)

    def update_hosts(listed: Mapping[str, int]) -> None:
        """The first hosts are checked before any worker starts; those that come later are not waited for."""
        if not hosts.has_hosts:
            launcher.check_hosts(listed, limits.min_workers)
        hosts.update(listed)

    with close_within_deadline(output) as listener:
        listed = fixed or {LOCALHOST: limits.max_workers}
        finder: Find = partial(dict, listed)
        if path := options.host_discovery_script:
            command = [os.path.abspath(path) if os.path.exists(path) else path]
            finder = ScriptFinder(command, lambda text: parse_hosts(text, options.slots_per_host))
        discovery = HostPoller(finder, clock, update_hosts)
        driver = DriverOptions(run=call.take_run())
        if not is_here:  # else the driver listens where no other machine reaches it
            bind, advertise = choose_addresses(config, find_remote_hosts(listed), ssh)
            driver = replace(driver, bind=bind, advertise=advertise)
        supervise(launcher, discovery, driver, limits, config, call.name, listener)


def _make_output_folder(path: str | None) -> Path | None:
    """Create the folder for the output before anything is printed, so that nothing is missing in it."""
    if path is None:
        return None
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"is no folder that files can be put into: {error}"
        raise InvalidInput(f"--output-filename {path} {why}.") from error
    return folder


def _make_environment(options: RunOptions) -> dict[str, str]:
    """Variables of the training processes, in addition to this process's own."""
    level = {"SPARK_ELASTIC_LOG_LEVEL": options.log_level} if options.log_level else {}
    return {**options.environment, **level}


def _make_config(options: RunOptions) -> ElasticConfig:
    interface = options.network_interface
    address = find_interface_address(interface.split(",")[0], "--network-interface") if interface else None
    return from_env(
        advertise_address=address,
        reset_limit=options.reset_limit,
        start_timeout=options.elastic_timeout,
        gather_timeout=options.start_timeout,
        cooldown_range=options.blacklist_cooldown_range,
        collective_timeout=options.gloo_timeout_seconds,
        device=options.device,
    )


def _parse_program(command: tuple[str, ...]) -> tuple[Interpreter, str | Module | Script, tuple[str, ...]]:
    """The Python to run with, the script or module to run, and its arguments; Python's options take effect."""
    first = command[0]
    if Path(first).suffix == ".py":
        return Interpreter(sys.executable), first, command[1:]
    interpreter = Interpreter.find(first)
    variables, rest = take_python_options(command[1:])
    os.environ.update(variables)
    if rest[:1] == ["-m"] and len(rest) > 1:
        return interpreter, interpreter.find_module(*rest[1:]), ()
    interpreter.check()
    if rest[:1] == ["-c"] and len(rest) > 1:
        return interpreter, Script(os.path.abspath("-c"), rest[1].encode(), tuple(rest[2:])), ()
    if not rest or rest[0].startswith("-"):
        raise InvalidInput(f"give the path of a script after {first}, -m and a module, or -c and a program.")
    return interpreter, rest[0], tuple(rest[1:])


def _parse_fixed_hosts(options: RunOptions) -> dict[str, int]:
    if sum(map(bool, (options.hosts, options.hostfile, options.host_discovery_script))) > 1:
        raise InvalidInput("give one of -H, --hostfile and --host-discovery-script.")
    text = options.hosts or ""
    if options.hostfile:
        try:
            text = Path(options.hostfile).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInput(f"the host file {options.hostfile} cannot be read: {error}.") from error
    hosts = parse_hosts(text, options.slots_per_host)
    if not hosts and (options.hosts or options.hostfile):
        raise InvalidInput(f"{options.hostfile or '-H'} names no host: write one, as in node1:2.")
    return hosts


def main() -> None:
    """The entry point. SIGTERM ends the job as Ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run()
    except InvalidInput as error:  # of an option
        click.echo(f"spark-elastic-run: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
