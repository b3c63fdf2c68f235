"""The keyword arguments of `run`: its own, settings, Horovod's names, and those that it refuses with a reason. Pure."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import IO, Any

from spark_elastic.checks import COUNT, FLAG, TEXT, VERBOSE, Check, check_workers
from spark_elastic.config import ElasticConfig, build_config, changes_setting, check_setting_names
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


def parse(given: Mapping[str, Any], config: object = None) -> Options:
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
        if not changes_setting(ours, value):
            continue
        if ours in values:
            raise InvalidInput(f"{spelled[ours]} and {name} are two names of one setting: give one of them.")
        values[ours], spelled[ours] = value, name
    own = {name: check(name, values.pop(name)) for name, check in _CHECKS.items() if name in values}
    if ("run_id" in own) is not ("store" in own):
        raise InvalidInput(
            "run_id and store go together: the run's name, and the folder or url where it is kept."
        )
    if "storage_options" in own and "store" not in own:
        raise InvalidInput("storage_options belong to a store: give store and run_id as well.")
    check_setting_names(values, {*_CHECKS, *ALIASES, *REFUSED}, "an argument of run()")
    for name in RUN_OPTIONS:
        if values.get(name) is not None and "run_id" not in own:
            raise InvalidInput(
                f"{name} is about checkpoints in a store: give run_id and store as well, or leave it out."
            )
    return Options(config=build_config(config, values), **own)


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


def _check_run_id(_: str, run_id: Any) -> str:
    owned_run.check_name(run_id)
    return str(run_id)


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
    "run_id": _check_run_id,
    "store": lambda _, store: parse_store_url(store),
    "storage_options": lambda _, options: check_storage_options(options),
}
