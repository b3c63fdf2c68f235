"""The keyword arguments of `run`: its own, settings, Horovod's names, and those that it refuses with a reason. Pure."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral
from typing import IO, Any

from spark_elastic.config import ElasticConfig, changes_setting, from_env
from spark_elastic.data.store import Store, check_storage_options, parse_store_url
from spark_elastic.errors import InvalidInput
from spark_elastic.runs import owned_run

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
_SPARK = "workers run where Spark's executors are; spark-elastic-run takes hosts"
# Horovod's name -> (values that are accepted and ignored, why any other is refused).
REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "use_gloo": ((None, True), _MESH),
    "use_mpi": ((None, False), _MESH),
    "extra_mpi_args": ((None, ""), f"{_MESH}, and there is no MPI in it"),
    "mpi_args": ((None, ""), f"{_MESH}, and there is no MPI in it"),
    "nics": (
        (None,),
        "workers use the address at which the driver reaches them: set bind_address and advertise_address",
    ),
    "network_interfaces": (
        (None,),
        "workers use the address at which the driver reaches them: set bind_address and advertise_address",
    ),
    "executable": ((None,), "workers run the Python of Spark's executors: set spark.pyspark.python"),
    "stderr": ((None,), "what workers write to either stream comes in one, in order: give stdout alone"),
    "hosts": ((None,), _SPARK),
    "hostfile": ((None,), _SPARK),
    "slots": ((None,), "an executor has a slot for each spark.task.cpus of its cores"),
    "ssh_port": ((None,), "workers are started by Spark, not by ssh"),
    "ssh_identity_file": ((None,), "workers are started by Spark, not by ssh"),
    "disable_cache": ((None, False), "no check of the hosts is kept from one call to the next"),
    "output_filename": ((None,), "give an open file as stdout"),
}
OWN = (
    "num_workers", "min_workers", "max_workers", "env", "stdout", "verbose", "prefix_output_with_timestamp", "preload",
    "run_id", "store", "storage_options",
)  # fmt: skip
# Settings that apply only to a run with a name.
RUN_OPTIONS = ("checkpoint_steps", "checkpoint_seconds", "checkpoints_kept")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of a call, after their checks."""

    # None: Spark's default parallelism.
    num_workers: int | None = None
    # None: num_workers, as in Horovod.
    min_workers: int | None = None
    # None: num_workers. R16 (start) uses all three.
    max_workers: int | None = None
    # Variables of the training processes.
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    # Where the workers' lines go; None: standard output.
    stdout: IO[str] | None = None
    # 0: what workers print. 1: also worlds, joins, losses and drains. 2: also the log "spark_elastic", level INFO.
    verbose: int = 1
    # Each line of the workers begins with the time.
    prefix_output_with_timestamp: bool = False
    # Modules that are imported before a worker is warm; None: those that the function seems to need.
    preload: tuple[str, ...] | None = None
    # Checkpoints of commits are written to the store under this name, and another call with it continues from them.
    run_id: str | None = None
    # Path or url of the store; goes with `run_id`. None: commits are in memory alone.
    store: str | None = None
    # fsspec's options for the store. They may hold credentials, and are neither shown nor stored.
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    # The settings of the job, arguments that name one included.
    config: ElasticConfig = field(default_factory=ElasticConfig)

    def open_store(self) -> Store | None:
        """Open the store; None if the call has none. Raises StoreError."""
        return None if self.store is None else Store.open(self.store, **self.storage_options)

    def resolve_workers(self, default: int) -> tuple[int, int, int]:
        """(num_workers, min_workers, max_workers).

        Args:
            default: num_workers, if the call does not say it.

        Raises:
            InvalidInput: they contradict each other.
        """
        number = self.num_workers
        if number is None:
            number = max(default, self.min_workers or 1)
            number = number if self.max_workers is None else min(number, self.max_workers)
        least = number if self.min_workers is None else self.min_workers
        most = number if self.max_workers is None else self.max_workers
        if not 1 <= least <= number <= most:
            raise InvalidInput(
                "the numbers of workers must be 1 <= min_workers <= num_workers <= max_workers; "
                f"got {least}, {number}, {most}."
            )
        return number, least, most


def parse(given: Mapping[str, Any], config: object = None) -> Options:
    """Check the keyword arguments of a call.

    With `elastic_timeout` (Horovod's wait for `min_workers`), `start_timeout` means the wait for `num_workers`.

    Args:
        given: by our names or Horovod's. None counts as not given, except in checkpoint_seconds=None: not by time.
        config: the settings that `given` overrides.

    Raises:
        InvalidInput: a name is unknown, refused, or one of two names of one setting.
    """
    if config is not None and not isinstance(config, ElasticConfig):
        raise InvalidInput(f"config must be an ElasticConfig; got {config!r}.")
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
        own = names.get(name, name)
        if not changes_setting(own, value):
            continue
        if own in values:
            raise InvalidInput(f"{spelled[own]} and {name} are two names of one setting: give one of them.")
        values[own], spelled[own] = value, name
    mine = {name: values.pop(name) for name in OWN if name in values}
    _check(mine)
    settings = {field.name for field in dataclasses.fields(ElasticConfig)}
    unknown = sorted(set(values) - settings)
    if unknown:
        there_are = ", ".join(sorted({*OWN, *settings, *ALIASES, *REFUSED}))
        raise InvalidInput(f"run() has no argument {unknown[0]!r}; there are: {there_are}.")
    for name in RUN_OPTIONS:
        if values.get(name) is not None and "run_id" not in mine:
            raise InvalidInput(
                f"{name} is about checkpoints in a store: give run_id and store as well, or leave it out."
            )
    whole = from_env(**values) if config is None else dataclasses.replace(config, **values)
    return Options(config=whole, **mine)


def _check(mine: dict[str, Any]) -> None:
    for name in ("num_workers", "min_workers", "max_workers"):
        value = mine.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < 1:
            raise InvalidInput(f"{name} must be a whole number of at least 1; got {value!r}.")
        if name in mine:
            mine[name] = int(value)  # numpy's, too
    env = mine.get("env", {})
    if not isinstance(env, Mapping) or not all(_is_variable(*pair) for pair in env.items()):
        raise InvalidInput(
            "env must map names of variables to their values, all of them text without NUL, the names without '='."
        )
    verbose = mine.get("verbose", 1)
    if not isinstance(verbose, Integral) or int(verbose) < 0:
        raise InvalidInput(f"verbose must be 0, 1 or 2; got {verbose!r}.")
    if "verbose" in mine:
        mine["verbose"] = int(verbose)
    timestamps = mine.get("prefix_output_with_timestamp", False)
    if not isinstance(timestamps, bool):
        raise InvalidInput(f"prefix_output_with_timestamp must be True or False; got {timestamps!r}.")
    if "preload" in mine:
        mine["preload"] = _check_modules(mine["preload"])
    if (mine.get("run_id") is None) is not (mine.get("store") is None):
        raise InvalidInput(
            "run_id and store go together: the name of the run, and the folder or url where it is kept."
        )
    if "store" in mine:
        mine["store"] = parse_store_url(mine["store"])
    if "storage_options" in mine and "store" not in mine:
        raise InvalidInput("storage_options belong to a store: give store and run_id as well.")
    if "storage_options" in mine:
        mine["storage_options"] = check_storage_options(mine["storage_options"])
    if "run_id" in mine:
        owned_run.check_name(mine["run_id"])
    if "stdout" in mine and not _takes_text(mine["stdout"]):
        raise InvalidInput(f"stdout must be an open text file; got {mine['stdout']!r}.")


def _is_variable(name: Any, value: Any) -> bool:
    if not isinstance(name, str) or not isinstance(value, str):
        return False
    return bool(name) and "=" not in name and "\0" not in name + value


def _check_modules(names: Any) -> tuple[str, ...]:
    several = isinstance(names, Iterable) and not isinstance(names, str)
    found = tuple(names) if several else (names,)
    if not all(isinstance(name, str) for name in found):
        raise InvalidInput(f"preload must be names of modules, such as ['torch']; got {names!r}.")
    return found


def _takes_text(stream: Any) -> bool:
    """Whether it is open and not known to take bytes. It need not be a file: notebooks have streams of their own."""
    is_binary = isinstance(stream, io.RawIOBase | io.BufferedIOBase) or "b" in str(
        getattr(stream, "mode", "")
    )
    return hasattr(stream, "write") and not is_binary and not getattr(stream, "closed", False)
