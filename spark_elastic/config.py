"""Settings of a job, validated once. The environment is read in `from_env` only, and an explicit argument wins."""

from __future__ import annotations

import dataclasses
import fcntl
import logging
import math
import os
import socket
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from spark_elastic import checks
from spark_elastic.errors import InvalidInput, suggest_name

log = logging.getLogger("spark_elastic")

PREFIX = "SPARK_ELASTIC_"
_warned: set[str] = set()  # variables of which the log of this process has a warning
# Horovod's names, which count where ours are unset; the first that is set.
_HOROVODS = {
    "start_timeout": ("HOROVOD_ELASTIC_TIMEOUT", "HOROVOD_SPARK_START_TIMEOUT"),
    "gather_timeout": ("HOROVOD_START_TIMEOUT",),
    "collective_timeout": ("HOROVOD_GLOO_TIMEOUT_SECONDS",),
    "bucket_bytes": ("HOROVOD_FUSION_THRESHOLD",),
    "fusion_threshold": ("HOROVOD_FUSION_THRESHOLD",),
    "warn_after": ("HOROVOD_STALL_CHECK_TIME_SECONDS",),
    "wait_at_most": ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",),
    "timeline": ("HOROVOD_TIMELINE",),
    "timeline_mark_cycles": ("HOROVOD_TIMELINE_MARK_CYCLES",),
    "log_level": ("HOROVOD_LOG_LEVEL",),
    "network_interface": ("HOROVOD_GLOO_IFACE",),
}

DEVICES = ("auto", "cpu", "cuda")
_SIOCGIFADDR = 0x8915  # Linux: asks for the address of an interface

# Annotation of a setting -> what its values must be.
_KINDS = {
    "bool": checks.FLAG,
    "bool | None": checks.FLAG.or_none(),
    "str | None": checks.TEXT.or_none(),
    "float": checks.SECONDS,
    "float | None": checks.SECONDS.or_none(),
    "int": checks.WHOLE,
    "int | None": checks.COUNT.or_none(),
    "object | None": checks.make_kind("a JobHandle", object),
}
_ORDERED = "the first not above the last"
# The same for settings of which the annotation does not say it.
_CHECKS = {
    "driver_port": checks.make_whole(0, 65535, "a port number, or 0 for any"),
    "worker_port_range": checks.make_range(f"two ports, {_ORDERED}", checks.make_whole(1, 65535)).or_none(),
    # What the engine can count.
    "collective_timeout": checks.make_number("seconds from 0.001 to 1e9", lambda value: 1e-3 <= value <= 1e9),
    "spare_after": checks.make_number("0 seconds or more", lambda seconds: 0 <= seconds < math.inf),
    "cooldown_range": checks.make_range(f"two numbers of seconds above 0, {_ORDERED}", checks.SECONDS),
    "host_discovery": checks.Check(
        "a function or the path of an executable",
        lambda value: value if callable(value) else checks.TEXT.convert(value),
    ).or_none(),
    "reset_limit": checks.WHOLE.or_none(),
    "checkpoints_kept": checks.COUNT,
    "slots_per_gpu": checks.COUNT,
    "device": checks.make_choice(*DEVICES),
}
_TRUTHS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
# Beginning of an annotation -> what the text of a variable of the environment must be.
_FORMS = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "tuple[int": "first-last, as in 20000-20099",
    "tuple[float": "lower-upper in seconds, as in 1-60",
}


@dataclass(frozen=True, kw_only=True)
class ElasticConfig:
    """How a job behaves; none of it changes what is trained. Times in seconds.

    driver_port: port of the rendezvous server, 0 for any free one.
    advertise_address: host name or address that executors dial; default: the address of `network_interface`, if that
        is set, or else `spark.driver.host`.
    network_interface: the interface of each host, the driver's included, whose address the others dial; None: the one
        on the way to the driver.
    bind_address: what the server binds; default `spark.driver.bindAddress`.
    tls: the server and the mesh use TLS; None: if `spark.ssl.enabled` is set or a certificate is given. See
        docs/security.md.
    tls_certificate: a PEM file; None: one is made for the job. Workers accept only this certificate.
    tls_key: the PEM file of its private key; goes with tls_certificate.
    worker_port_range: ports (first, last) that workers may listen on for each other; None for any free ones.
        MASTER_PORT is one of them.
    gather_timeout: how long the start waits for `num_workers` once `min_workers` are there.
    start_timeout: how long to wait for `min_workers`, at the start and after a loss.
    lease: silence after which a worker is taken for lost. One for which others wait is, after about a second, if its
        host is otherwise punctual.
    stall_after: a worker that keeps others waiting for this long is named in the log, with what it is doing.
    collective_timeout: longest wait of a worker for its peers in one collective.
    regroup_timeout: how long the others wait, after a loss, for a worker that runs code without collectives (an
        evaluation, a compilation); then they continue without it. Ten times as long if no other worker holds the state.
    driver_timeout: a worker that cannot reach the driver for this long ends itself.
    failure_budget: failures of workers within failure_window that the job tolerates (lost hosts do not count).
    failure_window: for how long a failure counts.
    reset_limit: most new worlds after the first, including planned ones; then no worker joins or drains, and a loss
        ends the job. None for no limit.
    cooldown_range: how long a slot is not used after its worker failed: at first, and, doubling each time, at most. The
        same for a host once more than one of its slots failed. (math.inf, math.inf): never again in this job.
    idle_slot_timeout: a slot that the world has no room for gives its core back after this long.
    spare_after: a slot starts a warm spare once its worker has been ready for this long. A job that ends sooner does
        not pay for one; a worker that dies sooner is replaced by one that starts cold. 0: at once.
    fork_workers: training processes are forked from a process that has imported what the program imports, once for all
        of a slot's, also for the next jobs of a Spark session; False: each starts anew. See docs/tuning.md.
    host_discovery: which hosts may take part, asked once a second: a function `() -> {host: slots}`, or an executable
        that prints `host[:slots]` lines. A host is an executor's id or its machine's name. None: all, with all slots.
    handle: a `JobHandle`, by which another thread can drain workers or hosts of the running job, or end it.
    checkpoint_steps: write a checkpoint every this many steps, while training continues; None: not by steps.
    checkpoint_seconds: write a checkpoint this many seconds after the last one; None: not by time.
    max_runtime: the job ends at its next step boundary this many seconds after it asked for its slots, and its newest
        checkpoint stays. Waiting for workers counts; what a fit does before (checks, writing rows) does not. A
        resumed run starts over with its time. None: never.
    checkpoints_kept: number of checkpoints to keep, the newest ones.
    keep_commits: the state of a run with a `run_id` is also kept in the memory of its hosts, outside of the workers and
        where it fits into half of what is free: each commit of a loop, and of an estimator as many steps as 5 % of the
        time allow, at least one in half a second. The next driver of the run repeats no more than that.
    orphan_timeout: for how long the memory of hosts keeps it once the workers have ended with their driver.
    ledger: workers of a fit write which rows they trained in which step, and when.
    ship: send this package (not numpy or the framework) to executors that lack it.
    cpus_per_worker: threads that a worker computes with (OMP_NUM_THREADS); None: `spark.task.cpus`.
    device: what workers train on: auto, a GPU where Spark gave one to the slot; cuda, also where Spark knows of none;
        cpu, and the job takes no GPU. A worker sees its own GPU alone, as `cuda:0`. See docs/gpu.md.
    slots_per_gpu: slots that share a GPU. They exchange gradients through the host.
    show_logs: print the workers' output, prefixed with their rank.
    log_bytes: how much of what workers print is kept in the run's store, under `runs/RUN/logs`, the newest; 0: nothing.
    status_page: the driver serves a page that shows the job; the log shows its address once.
    journal: a file on the driver's machine to which every event and decision is appended, for
        `spark_elastic.testing.replay`; None for none.
    """

    driver_port: int = 0
    advertise_address: str | None = None
    network_interface: str | None = None
    bind_address: str | None = None
    tls: bool | None = None
    tls_certificate: str | None = None
    tls_key: str | None = None
    worker_port_range: tuple[int, int] | None = None
    gather_timeout: float = 10.0
    start_timeout: float = 600.0
    lease: float = 5.0
    stall_after: float = 3.0
    collective_timeout: float = 60.0
    regroup_timeout: float = 600.0
    driver_timeout: float = 60.0
    failure_budget: int = 10
    failure_window: float = 600.0
    reset_limit: int | None = None
    cooldown_range: tuple[float, float] = (1.0, 60.0)
    idle_slot_timeout: float = 60.0
    spare_after: float = 10.0
    fork_workers: bool = True
    host_discovery: str | Callable[[], Mapping[str, int]] | None = None
    handle: object | None = None
    checkpoint_steps: int | None = None
    checkpoint_seconds: float | None = 60.0
    checkpoints_kept: int = 3
    keep_commits: bool = True
    orphan_timeout: float = 600.0
    max_runtime: float | None = None
    ledger: bool = False
    ship: bool = False
    cpus_per_worker: int | None = None
    device: str = "auto"
    slots_per_gpu: int = 1
    show_logs: bool = True
    log_bytes: int = 64 << 20
    status_page: bool = True
    journal: str | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            check = _CHECKS.get(field.name) or _KINDS[str(field.type)]
            object.__setattr__(self, field.name, check(field.name, getattr(self, field.name)))
        if (self.tls_certificate is None) is not (self.tls_key is None):
            raise InvalidInput("tls_certificate and tls_key go together: give the files of both, in PEM.")


def build_config(config: Any, settings: Mapping[str, Any]) -> ElasticConfig:
    """Settings that override a config, or, if that is None, those of the environment. Raises InvalidInput: it is no
    config, or a setting is unknown or has a value that does not fit."""
    check_setting_names(settings)
    if config is None:
        return from_env(**settings)
    checks.make_kind("an ElasticConfig", ElasticConfig)("config", config)
    given: ElasticConfig = config
    return dataclasses.replace(given, **_list_changes(settings))


def check_setting_names(names: Iterable[str], others: Iterable[str] = (), owner: str = "") -> None:
    """Raise InvalidInput with the first name that is no setting. others: names that the user may have meant, too.
    owner: what takes the others, in words."""
    known = {field.name for field in dataclasses.fields(ElasticConfig)}
    for name in sorted(set(names) - known):
        near = suggest_name(name, {*known, *others})
        kinds = f"neither {owner} nor a field of ElasticConfig" if owner else "no field of ElasticConfig"
        raise InvalidInput(f"{name!r} is {kinds}{near}: docs/params.md lists them.")


def find_launched_size() -> int:
    """How many processes torchrun, or another launcher of its kind, has started with this one; 1 if none has."""
    size = os.environ.get("WORLD_SIZE", "")
    return int(size) if size.isdecimal() else 1


def from_env(environment: Mapping[str, str] | None = None, **explicit: Any) -> ElasticConfig:
    """Config from `SPARK_ELASTIC_<NAME>` variables, or Horovod's where ours are unset, overridden by every explicit
    argument that is not None, or is where that says something. Raises InvalidInput: a name or value does not fit."""
    environment = os.environ if environment is None else environment
    check_environment(environment)
    values = _read_environment(ElasticConfig, environment)
    check_setting_names(explicit)
    values |= _list_changes(explicit)
    interface = values.get("network_interface")
    if interface and "advertise_address" not in values:
        values["advertise_address"] = find_interface_address(interface)
    return ElasticConfig(**values)


def check_environment(environment: Mapping[str, str]) -> None:
    """Check what `from_env` does not read. Names that nothing reads are warned of once. Raises InvalidInput: a variable
    of training processes has a value that does not fit."""
    operations_from_env(environment)
    known = [name.upper() for name in (*_list_settings(ElasticConfig), *_list_settings(OperationConfig))]
    for variable in sorted(environment):
        name = variable.removeprefix(PREFIX)
        if name not in (variable, *known) and variable not in _warned:
            _warned.add(variable)
            near = "".join(f" (did you mean {PREFIX}{near}?)" for near in get_close_matches(name, known, 1))
            text = "nothing reads the variable %s%s: docs/params.md lists those there are"
            log.warning(text, variable, near)


def find_interface_address(name: str, given_as: str = "network_interface (HOROVOD_GLOO_IFACE)") -> str:
    """The IPv4 address of a network interface of this machine. given_as: the option or variable that named it, for the
    error. Raises InvalidInput: there is no interface of that name, or it has no such address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError as error:
            known = ", ".join(known for _, known in socket.if_nameindex())
            raise InvalidInput(
                f"{given_as}={name!r} is no network interface of this machine with an IPv4 address "
                f"({error.strerror}); there are: {known}."
            ) from error
    return socket.inet_ntoa(answer[20:24])


def _list_changes(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if changes_setting(name, value)}


def changes_setting(name: str, value: object) -> bool:
    """Whether an argument changes a setting: None stands for the default, but where it is another value than that."""
    return value is not None or name == "checkpoint_seconds"


def log_level(text: str, given_as: str = "log_level") -> str:
    """The name that Python's logging has for a level, or for one of Horovod's. given_as: the option or variable, for
    the error. Raises InvalidInput: there is no level of that name."""
    level = _LOG_LEVELS.get(text.lower(), text.upper())
    if not isinstance(logging.getLevelName(level), int):
        raise InvalidInput(f"{given_as} must be trace, debug, info, warning, error or fatal; got {text!r}.")
    return level


def _list_settings(settings: type) -> dict[str, dataclasses.Field[Any]]:
    """The settings that have a variable: no text stands for an object."""
    return {f.name: f for f in dataclasses.fields(settings) if not str(f.type).startswith("object")}


def _find_variable(name: str, environment: Mapping[str, str]) -> str | None:
    """The variable that gives a setting, ours before Horovod's; an empty one says nothing."""
    variables = (PREFIX + name.upper(), *_HOROVODS.get(name, ()))
    return next((variable for variable in variables if environment.get(variable)), None)


def _read_environment(settings: type, environment: Mapping[str, str]) -> dict[str, Any]:
    """The settings that a variable of the environment gives."""
    return {
        name: _parse(variable, str(field.type), environment[variable])
        for name, field in _list_settings(settings).items()
        if (variable := _find_variable(name, environment)) is not None
    }


def _parse(variable: str, kind: str, text: str) -> Any:
    optional = kind.endswith(" | None")
    if optional and text.lower() == "none":
        return None
    try:
        if kind.startswith("bool"):
            return _TRUTHS[text.lower()]
        if kind.startswith("int"):
            return int(text)
        if kind.startswith("float"):
            return float(text)
        if kind.startswith("tuple"):
            number = float if "float" in kind else int
            first, last = text.split("-")
            return number(first), number(last)
    except (KeyError, ValueError) as error:
        wanted = next(form for start, form in _FORMS.items() if kind.startswith(start))
        none = ", or none" if optional else ""
        raise InvalidInput(f"{variable}={text!r} must be {wanted}{none}.") from error
    return text


@dataclass(frozen=True, kw_only=True)
class OperationConfig:
    """How negotiated operations behave; read in the training process, as each process has its own. Times in seconds."""

    bucket_bytes: int = 25 << 20  # bytes of gradients that are exchanged at once; 0: each gradient alone
    fusion_threshold: int = 64 << 20  # bytes of small reductions that travel as one
    # After this time the log names the ranks that have not requested an operation, or not brought their gradients.
    warn_after: float = 10.0
    # After this time a handle, or an exchange of gradients, gives up; None: the job's `collective_timeout`.
    wait_at_most: float | None = None
    stuck_after: float = 3.0  # after this time the log names ranks that all wait for different operations
    # What sums gradients on GPUs: auto, NCCL where each worker has a GPU of its own; host, the engine, through the
    # memory of the host; or a backend of torch.distributed.
    bulk_backend: str = "auto"
    # Whether a new world trains through the host while its NCCL communicator is built; False: its first step waits.
    hybrid_recovery: bool = True
    timeline: str | None = None  # file of a trace that begins with the process; None: no trace
    timeline_mark_cycles: bool = False  # rounds are marked in the trace
    log_level: str | None = None  # which records of the process's own log are printed; None: warnings


_LOG_LEVELS = {"trace": "DEBUG", "fatal": "CRITICAL"}  # Horovod's names that Python's logging has not


def operations_from_env(environment: Mapping[str, str] | None = None) -> OperationConfig:
    """From `SPARK_ELASTIC_<NAME>` variables, or Horovod's: 0 for no shutdown, DYNAMIC for a timeline begun later.
    Raises InvalidInput: a variable has a value that does not fit."""
    environment = os.environ if environment is None else environment
    values = _read_environment(OperationConfig, environment)
    for name, value in values.items():
        if value is not None and not isinstance(value, str) and not value >= 0:
            raise InvalidInput(f"{_find_variable(name, environment)} must be 0 or more; got {value!r}.")
    if environment.get("HOROVOD_STALL_CHECK_DISABLE", "0") not in ("0", ""):
        values.setdefault("warn_after", math.inf)
    values["wait_at_most"] = values.get("wait_at_most") or None
    if values.get("timeline") == "DYNAMIC":
        del values["timeline"]
    if values.get("log_level"):
        values["log_level"] = log_level(values["log_level"], str(_find_variable("log_level", environment)))
    if "bucket_bytes" in values:
        values["bucket_bytes"] = max(1, values["bucket_bytes"])
    return OperationConfig(**values)
