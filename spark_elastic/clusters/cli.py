"""The command line tool `spark-elastic-run`: a script on elastic workers of this machine and others, without Spark.

`cli_options` has the options. Runs in the main thread of its process.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import click

import spark_elastic
from spark_elastic.clock import SystemClock
from spark_elastic.clusters.cli_options import get_variables, list_options
from spark_elastic.clusters.local.command import Interpreter, run_around, take_python_options
from spark_elastic.clusters.local.launcher import HostSlots, find_remote_hosts
from spark_elastic.clusters.local.ssh import SshLauncher, SshOptions, choose_addresses
from spark_elastic.clusters.run.call import prepare
from spark_elastic.config import ElasticConfig, find_interface_address, from_env, log_level
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
RunOptions: TypeAlias = SimpleNamespace  # the options of a command line, by their names; None: not given
PYTHON = re.compile(r"py(thon)?\d*(\.\d+)*t?$")  # how names of Pythons end


@click.command(
    name="spark-elastic-run", context_settings={"allow_interspersed_args": False, "max_content_width": 110}
)
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
    chosen = RunOptions(**options, environment=get_variables(context), words=words)
    try:
        sys.exit(execute(chosen))
    except ElasticError as error:
        click.echo(f"spark-elastic-run: {type(error).__name__}: {error}", err=True)
        sys.exit(1)


run.params[:0] = list_options()


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
        if not self.show_messages:
            click.echo(f"spark-elastic-run: {text}", err=True)


def execute(options: RunOptions) -> int:
    """Run the job to its end. Returns the exit code. Raises InvalidInput: the command line asks for something that does
    not exist. JobFailed: with its subclasses."""
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

    Raises InvalidInput: the run has no name, or as `execute`.
    """
    if options.run_id is None or options.store is None:
        raise InvalidInput(
            "--restarts needs --run-id and --store: by them the next driver continues the run."
        )
    assert options.restarts is not None
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
        raise InvalidInput(
            f"spark-elastic-run needs --min-np <= -np <= --max-np; got {least} <= {number} <= {most}."
        )
    environment = _make_environment(options)
    named: dict[str, Any] = {
        "num_workers": number,
        "min_workers": options.min_np,
        "max_workers": options.max_np,
        "run_id": options.run_id,
        "store": options.store,
        "checkpoint_steps": options.checkpoint_steps,
        "env": environment,
        "preload": options.preload or None,
    }
    named = {name: value for name, value in named.items() if value is not None}
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
        """The first hosts are checked before any worker starts; those that come later are not waited for. The launcher
        learns of hosts before the driver."""
        if not hosts.has_hosts:
            launcher.check_hosts(listed, limits.min_workers)
        hosts.update(listed)

    with close_within_deadline(output) as listener:
        listed = fixed or {LOCALHOST: limits.max_workers}
        discovery: Discovery = FixedHosts(listed, clock, update_hosts)
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
        raise InvalidInput(
            f"--output-filename {path} is no folder that files can be put into: {error}."
        ) from error
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
