"""`spark_elastic.run`: a function or a script on elastic workers. Runs in the caller's thread.

`prepare` checks a call and returns a `RunCall`, which `run_on_spark` executes, or `cli` without Spark.
"""

from __future__ import annotations

import inspect
import itertools
import os
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, overload

from spark_elastic.clock import SystemClock
from spark_elastic.clusters.coordinator import resume_after_coordinator_loss
from spark_elastic.clusters.run import captures, early_imports, options
from spark_elastic.config import ElasticConfig, check_environment
from spark_elastic.driver.job import LaunchResult, make_limits
from spark_elastic.errors import InvalidInput
from spark_elastic.monitoring.console import LineRateLimiter, OutputListener, supports_live_line
from spark_elastic.monitoring.listener import close_within_deadline
from spark_elastic.monitoring.logs import log_to_listener
from spark_elastic.monitoring.report import JobReport
from spark_elastic.protocol.types import Limits
from spark_elastic.runs.checkpoint import CheckpointPolicy, CheckpointStore
from spark_elastic.runs.owned_run import OwnedRun
from spark_elastic.worker.context import get_context
from spark_elastic.worker.function_program import FunctionProgram
from spark_elastic.worker.program import decode_result
from spark_elastic.worker.script import Module, Script

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


T = TypeVar("T")


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
    options: options.Options  # the arguments that are not the function's
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
    named = dict(arguments)
    args, kwargs = named.pop("args", ()), named.pop("kwargs", None)
    if isinstance(fn, str | os.PathLike):
        if args or kwargs:
            advice = "leave args and kwargs out"
            raise InvalidInput(f"a script takes its arguments one by one after its path: {advice}.")
        fn = Script.read(os.fspath(fn), *(str(argument) for argument in given))
        name, args, kwargs = os.path.basename(fn.path), (), {}
    else:
        args, kwargs, named = _place_positional(given, args, kwargs, named)
        name = getattr(fn, "__name__", type(fn).__name__)
    chosen = options.parse(named, config)
    if not callable(fn):
        raise InvalidInput(f"run() takes a function or the path of a script; got a {type(fn).__name__}.")
    imports: tuple[str, ...] = ()
    if chosen.preload != ():
        code = inspect.unwrap(fn)
        if isinstance(code, Script | Module):
            imports = early_imports.find_in_source(code.source, code.folder, code.package)
        else:
            imports = early_imports.find_in_function(code)
    store, conf = chosen.open_store(), chosen.config
    checkpoints = None
    if chosen.run_id is not None and store is not None:
        checkpoints = store, CheckpointPolicy(chosen.run_id, conf.checkpoint_steps, conf.checkpoint_seconds)
    program = FunctionProgram(fn, args, kwargs, chosen.env, captures.dumps, checkpoints, imports)
    check_environment({**os.environ, **chosen.env})
    return RunCall(program, chosen, chosen.preload or (), name)


def decode_results(launched: LaunchResult) -> Results[Any]:
    """The results of the members of the last world, by rank."""
    return Results(map(decode_result, launched.results, itertools.count()), launched.report)


def _place_positional(
    given: Sequence[Any], args: Any, kwargs: Any, named: dict[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any], dict[str, Any]]:
    """`args`, `kwargs` and all named arguments, after those that were given by position, in Horovod's order."""
    positions = ("args", "kwargs", "num_workers")
    if len(given) > len(positions):
        raise InvalidInput(
            f"run() takes {', '.join(positions)} by position, after the function; name the others."
        )
    placed = dict(zip(positions, given, strict=False))
    if ("args" in placed and args) or ("kwargs" in placed and kwargs):
        raise InvalidInput("args and kwargs are given by position or by name, not both.")
    args, kwargs = placed.get("args", args), placed.get("kwargs", kwargs)
    if placed.get("num_workers") is not None:
        if named.get("num_workers") is not None:
            raise InvalidInput("num_workers is given by position and by name: give it once.")
        named["num_workers"] = placed["num_workers"]
    if isinstance(args, str | bytes) or not isinstance(args, Sequence):
        raise InvalidInput(f"args must be a sequence of arguments, such as a tuple; got {args!r}.")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise InvalidInput(f"kwargs must be a dict of arguments; got {kwargs!r}.")
    return args, kwargs or {}, named
