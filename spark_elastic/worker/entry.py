"""Main of a training process: `python -m spark_elastic.worker.entry`, started by a slot's agent or a fork server.

Standard input brings a header line, the pickled program, and later one line that activates the process as a worker:
until then it is a warm spare with everything imported. At its end the slot is gone.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import logging
import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from typing import NoReturn

import cloudpickle

from elastic_collectives import Endpoint
from elastic_collectives.engine import await_exit
from spark_elastic.clock import SystemClock
from spark_elastic.config import operations_from_env
from spark_elastic.protocol.messages import WorkerRaised
from spark_elastic.protocol.types import SlotSpec, WorkerIdentity
from spark_elastic.rendezvous import codec
from spark_elastic.rendezvous.client import RendezvousClient
from spark_elastic.rendezvous.messages import DriverClient
from spark_elastic.runs.kept_commits import CommitKeeper
from spark_elastic.worker.context import get_process_context
from spark_elastic.worker.devices import apply_device
from spark_elastic.worker.handover import IMPORT_LATER, Activation, ChildFds, Header
from spark_elastic.worker.imports import import_early, import_followers
from spark_elastic.worker.loop import BeginAgain, DriverWatch, GroupConnector, WorkerLoop
from spark_elastic.worker.program import (
    Program,
    compute_fingerprint,
    exit_forks,
    exit_process,
    format_traceback,
    get_exit_code,
)
from spark_elastic.worker.stack_sampler import StackSampler

PR_SET_PDEATHSIG = 1
_HOST_POLL = 0.005  # seconds between two looks at the executor's JVM


def main(fds: ChildFds | None = None) -> int:
    channel = sys.stdin.buffer
    header = codec.from_line(Header, channel.readline())
    if fds is None:  # else its fork server has seen to it
        fds = header.fds
        die_with_parent(header.parent)
    end_forks_with_process()
    stop_ignoring_interrupts()
    clock = SystemClock()
    faulthandler.enable()  # prints the Python frames of a crash in native code
    sampler = StackSampler(fds.activity, fds.stacks, clock)
    sampler.start()
    payload = channel.read(header.payload_bytes)
    program, failure = _load_program(payload, header)
    os.write(fds.status, b"warm\n")
    os.close(fds.status)
    activation = channel.readline()
    if not activation:
        return 0
    spec = header.spec
    own = vars(codec.from_line(Activation, activation))
    me = WorkerIdentity.of_slot(header.identity, ports=spec.worker_port_range, **own)
    exit_with_stdin()
    if me.host_pid:
        host = (me.host_pid,)
        threading.Thread(target=exit_with_process, args=host, name="spark-elastic-host", daemon=True).start()
    contact = spec.address, spec.key, spec.attempt
    with RendezvousClient(*contact, clock, spec.driver_timeout, spec.certificate) as driver:
        if program is None:
            driver.ask(WorkerRaised(me.worker, None, None, *failure))
            return 1
        return _run_worker(me, program, driver, spec, sampler)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that spawned it ends; exit if that has happened already."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def end_forks_with_process() -> None:
    """Have the kernel kill what the main thread forks, such as a DataLoader's workers, when this process ends: they may
    hang in a lock that another thread held. It counts the end of the forking thread, so others' forks are left
    alone."""
    prctl, parent, thread = ctypes.CDLL(None).prctl, os.getpid(), threading.get_ident()
    forks_itself = True  # and not a process that it has forked, which has these hooks, too

    def end_with_parent() -> None:
        nonlocal forks_itself
        if forks_itself and threading.get_ident() == thread:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # it has ended before the kernel knew
                os.kill(os.getpid(), signal.SIGKILL)
        forks_itself = False

    os.register_at_fork(after_in_child=end_with_parent)


def stop_ignoring_interrupts() -> None:
    """If this process ignores Ctrl-C, which the driver handles, the program's own processes still do not: it may want
    to interrupt them. A handler, unlike SIG_IGN, does not survive an exec."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda number, frame: None)


def _load_program(payload: bytes, header: Header) -> tuple[Program | None, tuple[str, str]]:
    """(the prepared program, ("", "")), or None with the fingerprint and traceback of what its loading raised."""
    gc.disable()  # visiting the many lasting objects of an import again and again takes a tenth of its time
    try:
        with exit_forks():
            apply_device(header.spec, header.identity, os.environ)
            context, spec = get_process_context(), header.spec
            context.files, context.slot = header.identity.files, header.parent
            if spec.commit_key is not None:
                context.commit_keeper = CommitKeeper(spec.commit_key, spec.attempt, spec.orphan_timeout)
            program: Program = cloudpickle.loads(payload)
            os.environ.update(getattr(program, "environment", {}))  # before preloaded modules read it
            _log_to_stderr(operations_from_env().log_level)
            import_followers()
            for module in header.spec.preload:
                importlib.import_module(module)
            if IMPORT_LATER not in sys.argv:
                import_early(header.spec.imports, os.environ)
            program.prepare()
    except Exception as error:  # reported once this process is a worker; the driver decides
        return None, (compute_fingerprint(error), format_traceback(error))
    finally:
        gc.freeze()  # spares a collection of all of them in the middle of the first epoch
        gc.enable()
    return program, ("", "")


def _log_to_stderr(level: str | None) -> None:
    """Print this package's log, which the slot passes on to the driver. The user's own logging is not changed."""
    if level is not None:
        log = logging.getLogger("spark_elastic")
        log.setLevel(level)
        log.addHandler(logging.StreamHandler())


def _run_worker(
    me: WorkerIdentity, program: Program, driver: DriverClient, spec: SlotSpec, sampler: StackSampler
) -> int:
    clock = SystemClock()
    encrypted = spec.certificate is not None
    with Endpoint(spec.key, host=me.address, port_range=me.ports, encrypted=encrypted) as endpoint:
        watch = DriverWatch(me.worker, driver, clock, spec.driver_timeout, sampler.driver_seen_at)
        groups = GroupConnector(endpoint, spec.collective_timeout, sampler)
        loop = WorkerLoop(me, program, driver, clock, watch, groups)
        watch.start(loop.handle_event)
        try:
            return loop.run()
        except BeginAgain as again:
            activation = Activation(me.worker, again.left, again.position)
            sampler.write_activation(codec.to_line(activation))
            exit_process(0)  # the driver would take it for lost meanwhile
        finally:
            watch.close()


def find_tls_problem() -> str | None:
    """Why workers of this host cannot use TLS; None if they can."""
    try:
        Endpoint(b"unused", encrypted=True).close()
    except RuntimeError as error:
        return str(error)
    return None


def exit_with_stdin() -> None:
    """End this process once the pipe on its standard input ends, with who has started it. Standard input itself is
    empty from now on. Else a process that `multiprocessing` forks, which first closes `sys.stdin`, would wait for the
    lock of who reads from there."""
    pipe = os.dup(0)
    empty_stdin()

    def wait() -> None:
        while os.read(pipe, 1024):
            pass
        os._exit(1)

    threading.Thread(target=wait, name="spark-elastic-parent", daemon=True).start()


def empty_stdin() -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


def exit_with_process(pid: int) -> None:
    """Wait until the executor's JVM ends; then end this process, its connections first. Else peers would hear of it
    after Spark's daemon, the slot task and this process had ended, each once its memory is free, which takes 0.1 s for
    a JVM."""
    if not await_exit(pid, _HOST_POLL):
        return  # the kernel ends this process with its slot
    shut_down_connections()
    os.kill(os.getpid(), signal.SIGKILL)  # as the executor was: a loss, and no exit code of the program's


def shut_down_connections(*families: socket.AddressFamily) -> None:
    """Break the connections of this process, of these families or all; both ends notice at once."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # it was closed meanwhile, or has no peer: one that listens stays
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    if not families or connection.family in families:
                        connection.getpeername()
                        connection.shutdown(socket.SHUT_RDWR)


def run(fds: ChildFds | None = None) -> NoReturn:
    """A training process's whole life. fds: replaces the header's descriptors in a forked process."""
    try:
        code = main(fds)
    except BaseException as error:
        code = get_exit_code(error)
    exit_process(code)


if __name__ == "__main__":
    run()
