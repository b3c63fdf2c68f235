"""The command line tool `spark-elastic-run`: a script on elastic workers of this machine and others, without Spark.

It defines the options, with Horovod's names. Runs in the main thread of its process.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import click

import spark_elastic
from spark_elastic.clock import SystemClock
from spark_elastic.clusters.horovodrun_options import add_options, get_variables
from spark_elastic.clusters.local.command import run_around, take_python_options
from spark_elastic.clusters.local.interpreter import Interpreter
from spark_elastic.clusters.local.launcher import HostSlots, find_remote_hosts
from spark_elastic.clusters.local.ssh import SshOptions
from spark_elastic.clusters.local.ssh_launcher import SshLauncher, choose_addresses
from spark_elastic.clusters.run.call import prepare
from spark_elastic.config import DEVICES, ElasticConfig, find_interface_address, from_env, log_level
from spark_elastic.driver.discovery import FixedHosts, HostPoller, ScriptFinder, parse_hosts
from spark_elastic.driver.job import DriverOptions, supervise
from spark_elastic.driver.ports import Discovery
from spark_elastic.errors import ElasticError, InvalidInput
from spark_elastic.monitoring.console import FileListener, LineRateLimiter
from spark_elastic.monitoring.listener import close_within_deadline
from spark_elastic.monitoring.logs import log_to_stream
from spark_elastic.worker.devices import require_gpus
from spark_elastic.worker.script import Module, Script

LOCALHOST = "localhost"
LEVELS = ("trace", "debug", "info", "warning", "error", "critical", "fatal")
SOME = click.IntRange(min=1)
PYTHON = re.compile(r"py(thon)?\d*(\.\d+)*t?$")  # how names of Pythons end


@click.command(
    name="spark-elastic-run", context_settings={"allow_interspersed_args": False, "max_content_width": 110}
)
@click.version_option(spark_elastic.__version__, "-v", "--version")
@click.option(
    "-np", "--num-proc", "num_proc", type=SOME, help="Workers to start with; default: all slots of the hosts."
)
@click.option(
    "--min-np",
    "--min-num-proc",
    "min_np",
    type=SOME,
    help="Fewest workers to start and to continue with; default: -np.",
)
@click.option(
    "--max-np",
    "--max-num-proc",
    "max_np",
    type=SOME,
    help="Most workers at any time; default: as many as at the start.",
)
@click.option(
    "-H",
    "--hosts",
    help="Hosts with their slots: host1:4,host2:4. Workers of other machines are started through ssh.",
)
@click.option(
    "-hostfile", "--hostfile", type=click.Path(), help="File with the same, one host:slots per line."
)
@click.option("--host-discovery-script", help="Executable that prints host[:slots] lines; run once a second.")
@click.option(
    "-p", "--ssh-port", type=click.IntRange(1, 65535), help="Port of the ssh servers of other hosts."
)
@click.option("--ssh-user", help="User at other hosts.")
@click.option(
    "-i",
    "--ssh-identity-file",
    type=click.Path(exists=True, dir_okay=False, resolve_path=True),
    help="File with the private key for other hosts.",
)
@click.option(
    "--network-interfaces",
    "--network-interface",
    "network_interface",
    help="Interface of this machine whose address other hosts dial; default: the one on the way to them.",
)
@click.option("--slots-per-host", type=SOME, help="Slots of hosts that are given without a number.")
@click.option("--reset-limit", type=int, help="Most new worlds after the first; default: no limit.")
@click.option("--elastic-timeout", type=float, help="Seconds to wait for --min-np workers; default 600.")
@click.option(
    "--start-timeout",
    type=float,
    help="Seconds that the start waits for -np workers once --min-np are ready.",
)
@click.option(
    "--blacklist-cooldown-range",
    type=float,
    nargs=2,
    help="Seconds that a slot is not used after a failure: at first, and at most.",
)
@click.option(
    "--gloo-timeout-seconds", type=float, help="Longest wait for peers in one collective, in seconds."
)
@click.option("--device", type=click.Choice(DEVICES), help="What workers train on; default auto.")
@click.option(
    "--output-filename", type=click.Path(), help="Folder for the output of each rank: rank.N/stdout."
)
@click.option(
    "--run-id", help="Name of the run: it writes checkpoints to the store, and the same name resumes."
)
@click.option("--store", help="Folder or fsspec url for the checkpoints of the run.")
@click.option(
    "--restarts",
    type=SOME,
    help="How often the driver is started again after a signal killed it; it continues the run. Needs --run-id.",
)
@click.option("--checkpoint-steps", type=SOME, help="Write a checkpoint every N commits; default: by time.")
@click.option(
    "-prefix-timestamp",
    "--prefix-output-with-timestamp",
    is_flag=True,
    help="Print the time of day before each line.",
)
@click.option(
    "--log-level",
    type=click.Choice(LEVELS, case_sensitive=False),
    help="Level of the log of the driver and of the training processes.",
)
@click.option("--verbose", is_flag=True, help="Print each new world, and why it began.")
@click.option(
    "--preload",
    multiple=True,
    metavar="MODULE",
    help="Module that each worker imports before it joins, beside those that the program imports at its top.",
)
@add_options
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
    chosen = RunOptions(**options, environment=get_variables(context), words=words)
    sys.exit(_run_and_report(lambda: execute(chosen)))


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of a command line, under their names there; None: not given."""

    command: tuple[str, ...]
    num_proc: int | None = None
    min_np: int | None = None
    max_np: int | None = None
    hosts: str | None = None
    hostfile: str | None = None
    host_discovery_script: str | None = None
    ssh_port: int | None = None
    ssh_user: str | None = None
    ssh_identity_file: str | None = None
    network_interface: str | None = None
    slots_per_host: int | None = None
    reset_limit: int | None = None
    elastic_timeout: float | None = None
    start_timeout: float | None = None
    blacklist_cooldown_range: tuple[float, float] | None = None
    gloo_timeout_seconds: float | None = None
    device: str | None = None
    output_filename: str | None = None
    run_id: str | None = None
    store: str | None = None
    restarts: int | None = None
    checkpoint_steps: int | None = None
    prefix_output_with_timestamp: bool = False
    log_level: str | None = None
    verbose: bool = False
    preload: tuple[str, ...] = ()
    words: tuple[str, ...] = field(default=(), compare=False)  # the command line before the command
    # Variables of the training processes that follow from options.
    environment: Mapping[str, str] = field(default_factory=dict)


class CommandOutput(FileListener):
    """The workers' output; unless all messages are shown, each loss, join and notice is a line of standard error."""

    _loss = ""  # why a world has broken, while the next one is not there yet
    _world_formed = False  # there has been a world

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
        if not self._show_messages:
            click.echo(f"spark-elastic-run: {text}", err=True)


def execute(options: RunOptions) -> int:
    """Run the job to its end. Returns the exit code.

    Raises:
        InvalidInput: the command line asks for something that does not exist.
        JobFailed: with its subclasses.
    """
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
    continues. What ends with an error is not repeated. Returns the exit code.

    Raises:
        InvalidInput: the run has no name, or as `execute`.
    """
    if options.run_id is None or options.store is None:
        raise InvalidInput(
            "--restarts needs --run-id and --store: by them the next driver continues the run."
        )
    assert options.restarts is not None
    for left in range(options.restarts, -1, -1):
        driver = os.fork()
        if driver == 0:
            return execute(replace(options, restarts=None))
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
        raise InvalidInput(
            f"spark-elastic-run needs --min-np <= -np <= --max-np; got {least} <= {number} <= {most}."
        )
    named: dict[str, Any] = {
        "num_workers": number,
        "min_workers": options.min_np,
        "max_workers": options.max_np,
        "run_id": options.run_id,
        "store": options.store,
        "checkpoint_steps": options.checkpoint_steps,
        "env": _make_environment(options),
        "preload": options.preload or None,
    }
    call = prepare(
        program,
        arguments,
        {name: value for name, value in named.items() if value is not None},
        _make_config(options),
    )
    hosts, clock = HostSlots(), SystemClock()
    config = call.options.config
    ssh = SshOptions(port=options.ssh_port, user=options.ssh_user, identity_file=options.ssh_identity_file)
    launcher = SshLauncher(call.program, hosts, clock, ssh, call.preload, interpreter.path)
    folder = _make_output_folder(options.output_filename)
    limits = call.make_limits(number)
    if fixed and sum(fixed.values()) < limits.min_workers:
        raise InvalidInput(
            f"the hosts have {sum(fixed.values())} slots and the job needs {limits.min_workers} workers: give hosts "
            "more slots, or --min-np fewer workers."
        )
    if not find_remote_hosts(fixed) and options.host_discovery_script is None:
        require_gpus(config, limits.min_workers, {**os.environ, **_make_environment(options)})
    limit = LineRateLimiter() if sys.stdout.isatty() else None
    timestamps, verbose = options.prefix_output_with_timestamp, options.verbose
    output = CommandOutput(folder, sys.stdout, clock, timestamps, verbose, config.show_logs, limit)
    with close_within_deadline(output) as listener:
        listed = fixed or {LOCALHOST: limits.max_workers}
        notify = partial(_update_hosts, launcher, hosts, limits.min_workers)
        discovery = _make_discovery(options, listed, notify)
        driver = _make_driver_options(options, find_remote_hosts(listed), config, ssh)
        supervise(
            launcher, discovery, replace(driver, run=call.take_run()), limits, config, call.name, listener
        )


def _make_output_folder(path: str | None) -> Path | None:
    """Create the folder for the output before anything is printed, so that nothing is missing in it."""
    folder = Path(path) if path else None
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(
            f"--output-filename {path} is no folder that files can be put into: {error}."
        ) from error
    return folder


def _make_environment(options: RunOptions) -> dict[str, str]:
    """Variables of the training processes, in addition to this process's own."""
    level = {"SPARK_ELASTIC_LOG_LEVEL": options.log_level} if options.log_level else {}
    return {**options.environment, **level}


def _make_config(options: RunOptions) -> ElasticConfig:
    cooldown, interface = options.blacklist_cooldown_range, options.network_interface
    return from_env(
        advertise_address=find_interface_address(interface.split(",")[0], "--network-interface")
        if interface
        else None,
        reset_limit=options.reset_limit,
        start_timeout=options.elastic_timeout,
        gather_timeout=options.start_timeout,
        cooldown_range=tuple(cooldown) if cooldown else None,
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
    given = [name for name in ("hosts", "hostfile", "host_discovery_script") if getattr(options, name)]
    if len(given) > 1:
        raise InvalidInput("give one of -H, --hostfile and --host-discovery-script.")
    text = options.hosts or ""
    if options.hostfile:
        try:
            text = Path(options.hostfile).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInput(f"the host file {options.hostfile} cannot be read: {error}.") from error
    found = parse_hosts(text, options.slots_per_host)
    if not found and (options.hosts or options.hostfile):
        raise InvalidInput(f"{options.hostfile or '-H'} names no host: write one, as in node1:2.")
    return found


def _make_driver_options(
    options: RunOptions, others: list[str], config: ElasticConfig, ssh: SshOptions
) -> DriverOptions:
    """A job whose hosts are all of this machine, now and later, listens where no other machine reaches it."""
    if not others and options.host_discovery_script is None:
        return DriverOptions()
    bind, advertise = choose_addresses(config, others, ssh)
    return DriverOptions(bind=bind, advertise=advertise)


def _make_discovery(
    options: RunOptions, fixed: Mapping[str, int], notify: Callable[[Mapping[str, int]], None]
) -> Discovery:
    """Discovery that tells the launcher of new hosts before it tells the driver."""
    clock = SystemClock()
    if options.host_discovery_script is None:
        return FixedHosts(fixed, clock, notify)
    path = options.host_discovery_script
    command = [os.path.abspath(path) if os.path.exists(path) else path]
    return HostPoller(
        ScriptFinder(command, lambda text: parse_hosts(text, options.slots_per_host)), clock, notify
    )


def _update_hosts(launcher: SshLauncher, hosts: HostSlots, needed: int, listed: Mapping[str, int]) -> None:
    """The first hosts are checked before any worker starts; those that come later are not waited for."""
    if not hosts.has_hosts:
        launcher.check_hosts(listed, needed)
    hosts.update(listed)


def _run_and_report(job: Callable[[], int]) -> int:
    """Run the job. Returns its exit code, or 1 after printing the error."""
    try:
        return job()
    except ElasticError as error:
        click.echo(f"spark-elastic-run: {type(error).__name__}: {error}", err=True)
        return 1


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def main() -> None:
    """The entry point. SIGTERM ends the job as Ctrl-C does."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        run()
    except InvalidInput as error:  # of an option
        click.echo(f"spark-elastic-run: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
