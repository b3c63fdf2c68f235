"""`spark_elastic.run`: a function or a script on elastic workers. Runs in the caller's thread.

`prepare` checks a call and returns a `RunCall`, which `run_on_spark` executes, or `cli` without Spark.
"""

from __future__ import annotations

import inspect
import io
import itertools
import os
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import IO, TYPE_CHECKING, Any, TypeVar, overload

from spark_elastic import config as settings
from spark_elastic.checks import COUNT, FLAG, TEXT, VERBOSE, Check, check_workers
from spark_elastic.clock import SystemClock
from spark_elastic.clusters.coordinator import resume_after_coordinator_loss
from spark_elastic.clusters.run import user_code
from spark_elastic.config import ElasticConfig
from spark_elastic.data.store import Store, check_storage_options, parse_store_url
from spark_elastic.driver.job import LaunchResult, make_limits
from spark_elastic.errors import InvalidInput
from spark_elastic.monitoring.console import LineRateLimiter, OutputListener, supports_live_line
from spark_elastic.monitoring.listener import close_within_deadline
from spark_elastic.monitoring.logs import log_to_listener
from spark_elastic.monitoring.report import JobReport
from spark_elastic.protocol.types import Limits
from spark_elastic.runs.checkpoint import CheckpointPolicy, CheckpointStore, OwnedRun, check_name
from spark_elastic.worker.context import get_context
from spark_elastic.worker.function_program import FunctionProgram, Module, Script
from spark_elastic.worker.program import decode_result

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

T = TypeVar("T")
# Horovod's name -> ours.
ALIASES = {
    "num_proc": "num_workers",
    "np": "num_workers",
    "min_num_proc": "min_workers",
    "min_np": "min_workers",
    "max_num_proc": "max_workers",
    "max_np": "max_workers",
    "elastic_timeout": "start_timeout",
    "host_discovery_script": "host_discovery",
}
_MESH = "workers speak to each other over the job's own mesh"
_ADDRESS = "workers use the address at which the driver reaches them: set bind_address and advertise_address"
_SPARK = "workers run where Spark's executors are; spark-elastic-run takes hosts"
# Horovod's name -> (values that are accepted and ignored, why any other is refused).
REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "use_gloo": ((None, True), _MESH),
    "use_mpi": ((None, False), _MESH),
    **dict.fromkeys(("extra_mpi_args", "mpi_args"), ((None, ""), f"{_MESH}, and there is no MPI in it")),
    **dict.fromkeys(("nics", "network_interfaces"), ((None,), _ADDRESS)),
    "executable": ((None,), "workers run the Python of Spark's executors: set spark.pyspark.python"),
    "stderr": ((None,), "what workers write to either stream comes in one, in order: give stdout alone"),
    **dict.fromkeys(("hosts", "hostfile"), ((None,), _SPARK)),
    "slots": ((None,), "an executor has a slot for each spark.task.cpus of its cores"),
    **dict.fromkeys(("ssh_port", "ssh_identity_file"), ((None,), "workers are started by Spark, not by ssh")),
    "disable_cache": ((None, False), "no check of the hosts is kept from one call to the next"),
    "output_filename": ((None,), "give an open file as stdout"),
}
# Settings that apply only to a run with a name.
RUN_OPTIONS = ("checkpoint_steps", "checkpoint_seconds", "checkpoints_kept")


class Results(list[T]):
    """What the function returned on each worker, a list in rank order, and the job's report."""

    def __init__(self, returned: Iterable[T], report: JobReport) -> None:
        super().__init__(returned)
        self.report = report  # where the job's time went, and what losses cost


@overload
def run(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    /,
    *,
    spark: SparkSession | None = None,
    config: ElasticConfig | None = None,
    **arguments: Any,
) -> Results[T]: ...


@overload
def run(
    fn: str | os.PathLike[str],
    /,
    *script_arguments: str,
    spark: SparkSession | None = None,
    config: ElasticConfig | None = None,
    **arguments: Any,
) -> Results[None]: ...


def run(
    fn: Any,
    /,
    *given: Any,
    spark: SparkSession | None = None,
    config: ElasticConfig | None = None,
    **arguments: Any,
) -> Results[Any]:
    """Run `fn(*args, **kwargs)` on elastic workers over Spark. Returns their results in rank order, and the job's
    `report`.

    Args:
        fn: a function, or the path of a script that runs as `__main__`, followed by its arguments. The function that
            it passes to `spark_elastic.torch.elastic.run` continues through losses; all other code starts again, from
            the beginning of `fn`, in the world after a loss.
        arguments: num_workers (default: Spark's default parallelism), min_workers (num_workers: a lost worker is waited
            for), max_workers (num_workers), env, stdout, verbose, prefix_output_with_timestamp, preload, run_id and
            store (checkpoints are written, and a call with the same run_id continues from the newest one),
            storage_options (fsspec's for the store, such as credentials), all fields of `ElasticConfig`, and the
            arguments of Horovod's `run_elastic` under their names.

    Raises:
        InvalidInput: an argument is wrong, or `fn` captures what exists only on Spark's driver.
        PreflightError: a host cannot load `fn`, lacks a package, or cannot reach the driver.
        JobFailed: with its subclasses.
        JobCancelled: the user or Spark ended the job.
    """
    return prepare(fn, given, arguments, config).run_on_spark(spark)


@dataclass(frozen=True)
class RunCall:
    """A checked call of `run`, which has not begun."""

    program: FunctionProgram  # what each worker runs
    options: Options  # the arguments that are not the function's
    preload: tuple[str, ...]  # modules that the user wants to be imported before a process is warm
    name: str  # of the function or script

    def run_on_spark(self, spark: SparkSession | None = None) -> Results[Any]:
        """spark: a session in place of the active one."""
        from spark_elastic.clusters.spark import make_platform
        from spark_elastic.clusters.spark.host_facts import get_session
        from spark_elastic.clusters.spark.platform import JobSpec

        platform = make_platform(get_session(spark), self.options.config)
        limits = self.make_limits(platform.count_workers(self.options.num_workers))
        job = JobSpec(self.program, limits, f"{self.name}-{uuid.uuid4().hex[:8]}", self.preload)
        run_id, store = self.options.run_id, self.options.open_store()
        with self.open_output() as listener:

            def launch() -> Results[Any]:
                return decode_results(platform.launch(replace(job, run=self.take_run()), listener))

            what, payload = "the function or its arguments", self.program.pickled_call
            platform.preflight(payload, store, job.needs, limits.num_workers, what, job.imports)
            if run_id is None or store is None:
                return launch()
            return resume_after_coordinator_loss(launch, CheckpointStore(store, run_id).read_published)

    def take_run(self) -> OwnedRun | None:
        """Take over the run for this driver; None: the call has no `run_id`."""
        run_id, store = self.options.run_id, self.options.open_store()
        return None if run_id is None or store is None else OwnedRun.acquire(store, run_id)

    def make_limits(self, default_workers: int) -> Limits:
        number, least, most = self.options.resolve_workers(default_workers)
        return replace(make_limits(self.options.config, number, least, most), all_results=True)

    @contextmanager
    def open_output(self) -> Iterator[OutputListener]:
        """The listener of the job that runs inside the block: it prints what happens."""
        chosen = self.options
        stream = sys.stdout if chosen.stdout is None else chosen.stdout
        listener = OutputListener(
            stream,
            SystemClock(),
            timestamps=chosen.prefix_output_with_timestamp,
            show_messages=chosen.verbose > 0,
            show_output=chosen.config.show_logs,
            limiter=LineRateLimiter() if chosen.stdout is None else None,
            as_spark=chosen.stdout is None and not supports_live_line(stream),
        )
        with close_within_deadline(listener), log_to_listener(listener.on_message, chosen.verbose > 1):
            yield listener


def prepare(
    fn: Any, given: Sequence[Any], arguments: Mapping[str, Any], config: ElasticConfig | None = None
) -> RunCall:
    """Check a call, before anything is launched. given: what follows `fn` by position."""
    if get_context() is not None:
        raise InvalidInput("run() was called on a worker: call it where the SparkSession lives.")
    is_script = isinstance(fn, str | os.PathLike)
    try:
        args, kwargs, named = _bind(*(() if is_script else given), **arguments)
    except TypeError as error:
        raise InvalidInput(f"{str(error).replace('_bind', 'run')}.") from None
    if is_script:
        if args or kwargs:
            advice = "leave args and kwargs out"
            raise InvalidInput(f"a script takes its arguments one by one after its path: {advice}.")
        fn = Script.read(os.fspath(fn), *(str(argument) for argument in given))
        name = os.path.basename(fn.path)
    else:
        name = getattr(fn, "__name__", type(fn).__name__)
    chosen = parse_options(named, config)
    if not callable(fn):
        raise InvalidInput(f"run() takes a function or the path of a script; got a {type(fn).__name__}.")
    _check_arguments(fn, name, args, kwargs)
    imports: tuple[str, ...] = ()
    if chosen.preload != ():
        code = inspect.unwrap(fn)
        if isinstance(code, Script | Module):
            imports = user_code.find_in_source(code.source, code.folder, code.package)
        else:
            imports = user_code.find_in_function(code)
    store, conf = chosen.open_store(), chosen.config
    checkpoints = None
    if chosen.run_id is not None and store is not None:
        checkpoints = store, CheckpointPolicy(chosen.run_id, conf.checkpoint_steps, conf.checkpoint_seconds)
    program = FunctionProgram(fn, args, kwargs, chosen.env, user_code.dumps, checkpoints, imports)
    settings.check_environment({**os.environ, **chosen.env})
    return RunCall(program, chosen, chosen.preload or (), name)


def decode_results(launched: LaunchResult) -> Results[Any]:
    """The results of the members of the last world, by rank."""
    return Results(map(decode_result, launched.results, itertools.count()), launched.report)


def _bind(
    args: Any = (), kwargs: Any = None, num_workers: Any = None, **named: Any
) -> tuple[Sequence[Any], Mapping[str, Any], dict[str, Any]]:
    """What follows a function, by position in Horovod's order, or by name."""
    if isinstance(args, str | bytes) or not isinstance(args, Sequence):
        raise InvalidInput(f"args must be a sequence of arguments, such as a tuple; got {args!r}.")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise InvalidInput(f"kwargs must be a dict of arguments; got {kwargs!r}.")
    return args, kwargs or {}, named if num_workers is None else {**named, "num_workers": num_workers}


def _check_arguments(fn: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises InvalidInput if the function's own signature does not take these arguments. What it wraps is not asked: a
    decorator may add arguments."""
    try:
        signature = inspect.signature(fn, follow_wrapped=False)
    except (TypeError, ValueError):  # a built-in function may have none
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        named = ", ".join(map(str, kwargs)) or "nothing"
        raise InvalidInput(
            f"{name}{signature} was given {len(args)} in args and {named} in kwargs: {error}."
        ) from None


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of a call, after their checks."""

    num_workers: int | None = None  # None: Spark's default parallelism
    min_workers: int | None = None  # None: num_workers, as in Horovod
    max_workers: int | None = None  # None: num_workers. R16 (start) uses all three
    env: Mapping[str, str] = field(default_factory=dict, repr=False)  # variables of the training processes
    stdout: IO[str] | None = None  # where the workers' lines go; None: standard output
    # 0: what workers print. 1: also worlds, joins, losses and drains. 2: also the log "spark_elastic", level INFO.
    verbose: int = 1
    prefix_output_with_timestamp: bool = False  # each line of the workers begins with the time
    preload: tuple[str, ...] | None = None  # imported before a worker is warm; None: what seems to be needed
    run_id: str | None = None  # name of the run, whose checkpoints another call with it continues from
    store: str | None = None  # path or url; goes with `run_id`. None: commits are in memory alone
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)  # fsspec's; may be secret
    config: ElasticConfig = field(default_factory=ElasticConfig)  # settings, arguments that name one included

    def open_store(self) -> Store | None:
        """Open the store; None if the call has none. Raises StoreError."""
        return None if self.store is None else Store.open(self.store, **self.storage_options)

    def resolve_workers(self, default: int) -> tuple[int, int, int]:
        """(num_workers, min_workers, max_workers). default: num_workers, if the call does not say it."""
        number = self.num_workers
        if number is None:
            number = max(default, self.min_workers or 1)
            number = min(number, self.max_workers or number)
        least, most = self.min_workers or number, self.max_workers or number
        check_workers(least, number, most)
        return number, least, most


def parse_options(given: Mapping[str, Any], config: object = None) -> Options:
    """Check the keyword arguments of a call, by our names or Horovod's. config: what they override.

    With `elastic_timeout` (Horovod's wait for `min_workers`), `start_timeout` means the wait for `num_workers`. None
    counts as not given, except in checkpoint_seconds=None: not by time. Raises InvalidInput: a name is unknown or
    refused, or two are of one setting."""
    values: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    both = None not in (given.get("start_timeout"), given.get("elastic_timeout"))
    names = {**ALIASES, "start_timeout": "gather_timeout"} if both else ALIASES
    for name, value in given.items():
        if name in REFUSED:
            accepted, why = REFUSED[name]
            if not any(value is one or value == one for one in accepted):
                raise InvalidInput(f"run() does not take {name}={value!r}: {why}.")
            continue
        ours = names.get(name, name)
        if not settings.changes_setting(ours, value):
            continue
        if ours in values:
            raise InvalidInput(f"{spelled[ours]} and {name} are two names of one setting: give one of them.")
        values[ours], spelled[ours] = value, name
    own = {name: check(name, values.pop(name)) for name, check in _CHECKS.items() if name in values}
    if ("run_id" in own) is not ("store" in own):
        what = "the name of the run, and the folder or url where it is kept"
        raise InvalidInput(f"run_id and store go together: {what}.")
    if "storage_options" in own and "store" not in own:
        raise InvalidInput("storage_options belong to a store: give store and run_id as well.")
    settings.check_setting_names(values, {*_CHECKS, *ALIASES, *REFUSED}, "an argument of run()")
    for name in RUN_OPTIONS:
        if values.get(name) is not None and "run_id" not in own:
            raise InvalidInput(
                f"{name} is about checkpoints in a store: give run_id and store as well, or leave it out."
            )
    return Options(config=settings.build_config(config, values), **own)


def _check_variables(name: str, env: Any) -> Mapping[str, str]:
    try:
        if all(key and "=" not in key and "\0" not in key + value for key, value in env.items()):
            return dict(env)
    except (TypeError, AttributeError):
        pass  # a name or value is no text, or it is no mapping
    raise InvalidInput(  # without the values, which may be secrets
        f"{name} must map names of variables to their values, all of them text without NUL, the names without '='."
    )


def _to_modules(names: Any) -> tuple[str, ...]:
    return tuple(map(TEXT.convert, [names] if isinstance(names, str) else names))


def _to_stream(stream: Any) -> Any:
    """Refuse what is closed or known to take bytes. It need not be a file: notebooks have streams of their own."""
    mode = str(getattr(stream, "mode", ""))
    takes_bytes = isinstance(stream, io.RawIOBase | io.BufferedIOBase) or "b" in mode
    if not hasattr(stream, "write") or takes_bytes or getattr(stream, "closed", False):
        raise TypeError
    return stream


# What `run` takes beside settings -> its check.
_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "num_workers": COUNT,
    "min_workers": COUNT,
    "max_workers": COUNT,
    "env": _check_variables,
    "stdout": Check("an open text file", _to_stream),
    "verbose": VERBOSE,
    "prefix_output_with_timestamp": FLAG,
    "preload": Check("names of modules, such as ['torch']", _to_modules),
    "run_id": lambda _, run_id: check_name(run_id),
    "store": lambda _, store: parse_store_url(store),
    "storage_options": lambda _, options: check_storage_options(options),
}
