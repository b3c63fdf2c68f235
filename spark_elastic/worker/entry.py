"""Main of a training process: `python -m spark_elastic.worker.entry`, started by a slot's agent or a fork server.

Standard input brings a header line, the pickled program, and later one line that activates the process as a worker;
until then it is a warm spare with everything imported. The end of standard input means that the slot is gone.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NoReturn

import cloudpickle

from elastic_collectives import Endpoint
from spark_elastic.clock import SystemClock
from spark_elastic.config import operations_from_env
from spark_elastic.protocol.slot_spec import SlotSpec, WorkerIdentity
from spark_elastic.rendezvous import codec
from spark_elastic.rendezvous.client import RendezvousClient
from spark_elastic.rendezvous.messages import WorkerCalls
from spark_elastic.worker.loop import DriverWatch, GroupConnector, MetricsReporter, WorkerLoop
from spark_elastic.worker.program import Program, compute_fingerprint, format_traceback, get_environment
from spark_elastic.worker.stack_sampler import StackSampler, WaitRecordingAsks

# How a training process ends: with the code that the interpreter would give it, and with what `atexit` has.


AT_EXIT_TIMEOUT = 2.0  # seconds that `atexit` has; less than a slot's patience


def get_exit_code(error: BaseException) -> int:
    """The exit code, as the interpreter would have it; says what it would say."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        sys.stderr.write(f"{error.code}\n")
    else:
        traceback.print_exception(error)
    return 1


def exit_process(code: int) -> NoReturn:
    """With what is registered with `atexit`, such as a logger's last words, but for no longer than it has time.

    Threads of user code or of a framework do not keep a finished worker alive.
    """
    late = threading.Timer(AT_EXIT_TIMEOUT, os._exit, (code,))
    late.daemon = True
    late.start()
    with contextlib.suppress(BaseException):  # told by the interpreter already
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or nobody reads it: no reason for another code
            stream.flush()
    os._exit(code)


@contextlib.contextmanager
def exit_forks() -> Iterator[None]:
    """What the block's code forks (`os.fork`) ends with the block, as it would with a script: it is no worker, and must
    not speak for the one that forked it."""
    own = os.getpid()
    code = 0
    try:
        yield
    except BaseException as error:
        if os.getpid() == own:
            raise
        code = get_exit_code(error)
    if os.getpid() != own:
        exit_process(code)


PR_SET_PDEATHSIG = 1
ChildFds = tuple[int, int, int]  # descriptors of the status pipe and of what is watched: see `Header`


@dataclass(frozen=True)
class Header:
    """What a slot tells its child process on the first line of its standard input."""

    spec: SlotSpec
    identity: WorkerIdentity
    # Process id of the slot.
    parent: int
    # Length of the pickled program, which follows the header.
    payload_bytes: int
    # The pipe on which the child reports that it is warm.
    status_fd: int
    # The files through which the slot watches the child: see `stack_sampler`.
    watch_fds: tuple[int, int]

    def to_line(self) -> bytes:
        return codec.dumps(self) + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Header:
        return codec.read(cls, codec.loads(line))


def main(handed: ChildFds | None = None) -> int:
    """Returns the process's exit code."""
    channel = sys.stdin.buffer
    header = Header.from_line(channel.readline())
    if handed is not None:
        header = replace(header, status_fd=handed[0], watch_fds=handed[1:])
    die_with_parent(header.parent)
    stop_ignoring_interrupts()
    clock = SystemClock()
    faulthandler.enable()  # a crash in native code says in which line of Python
    sampler = StackSampler(*header.watch_fds, clock)
    sampler.start()
    payload = channel.read(header.payload_bytes)
    program, failure = _load_program(payload, header.spec.preload)
    os.write(header.status_fd, b"warm\n")
    os.close(header.status_fd)
    activation = channel.readline()
    if not activation:
        return 0
    spec, worker = header.spec, json.loads(activation)["worker"]
    me = replace(header.identity, worker=worker, ports=spec.worker_port_range)
    threading.Thread(
        target=_exit_with_slot, args=(_detach_stdin(),), name="spark-elastic-parent", daemon=True
    ).start()
    with RendezvousClient(
        spec.address, spec.key, spec.attempt, clock, spec.driver_timeout, spec.certificate
    ) as client:
        driver = WorkerCalls(WaitRecordingAsks(client, sampler), me.worker, me.slot)
        if program is None:
            driver.failed(None, None, *failure)
            return 1
        return _work(me, program, driver, spec, sampler)


def die_with_parent(parent: int) -> None:
    """SIGKILL for this process once its parent's spawning thread ends; exits at once if that has happened already."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def stop_ignoring_interrupts() -> None:
    """Where Ctrl-C is ignored, since the driver answers it, what the program starts is not to ignore it as well: the
    program may interrupt it. A handler, unlike SIG_IGN, ends with an exec."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda number, frame: None)


def _load_program(payload: bytes, preload: tuple[str, ...]) -> tuple[Program | None, tuple[str, str]]:
    """The prepared program, or None with fingerprint and traceback of what its loading raised."""
    gc.disable()  # a framework's import makes objects that stay: to look through them again and again is a tenth of it
    try:
        program: Program = cloudpickle.loads(payload)
        os.environ.update(get_environment(program))  # before what is preloaded looks at it
        _print_log(operations_from_env().log_level)
        for module in preload:
            importlib.import_module(module)
        program.prepare()
    except (
        Exception
    ) as error:  # the driver decides what follows; it hears of it once this process is a worker
        return None, (compute_fingerprint(error), format_traceback(error))
    finally:
        gc.freeze()  # nor need the collector look through them once in the middle of the first epoch
        gc.enable()
    return program, ("", "")


def _print_log(level: str | None) -> None:
    """Standard error is passed on to the driver; the user's own logging is left alone."""
    if level is not None:
        log = logging.getLogger("spark_elastic")
        log.setLevel(level)
        log.addHandler(logging.StreamHandler())


def _work(
    me: WorkerIdentity, program: Program, driver: WorkerCalls, spec: SlotSpec, sampler: StackSampler
) -> int:
    clock = SystemClock()
    encrypted = spec.certificate is not None
    with Endpoint(spec.key, host=me.address, port_range=me.ports, encrypted=encrypted) as endpoint:
        watch = DriverWatch(me.worker, driver, clock, spec.driver_timeout)
        reporter = MetricsReporter(driver)
        groups = GroupConnector(endpoint, spec.collective_timeout, sampler)
        loop = WorkerLoop(me, program, driver, clock, watch, reporter, groups)
        watch.start(loop.handle_event)
        reporter.start()
        try:
            return loop.run()
        finally:
            watch.close()
            reporter.close()


def find_tls_problem() -> str | None:
    """Why workers of this host could not talk inside TLS; None if they could."""
    try:
        Endpoint(b"nobody's", encrypted=True).close()
    except RuntimeError as error:
        return str(error)
    return None


def _detach_stdin() -> int:
    """The descriptor that tells of the slot; standard input is empty from now on.

    A process that `multiprocessing` forks closes its `sys.stdin` first, such as a DataLoader's worker: it would wait
    without end for the lock that a thread holds which reads from there.
    """
    taken = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return taken


def _exit_with_slot(descriptor: int) -> None:
    while os.read(descriptor, 1024):
        pass
    os._exit(1)


def _run(handed: ChildFds | None) -> int:
    """The exit code."""
    try:
        return main(handed)
    except BaseException as error:
        return get_exit_code(error)


def run(handed: ChildFds | None = None) -> NoReturn:
    """A training process's whole life. handed: where it has the header's descriptors under other numbers."""
    exit_process(_run(handed))


if __name__ == "__main__":
    run()
