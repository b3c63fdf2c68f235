"""Training processes from a real fork server: like spawned ones in every respect, and children of the slot."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest

from spark_elastic.protocol.types import SLOT_LINE_PREFIX, SlotSpec
from spark_elastic.worker import forking
from spark_elastic.worker.child import find_load_error, find_load_error_in_fork
from spark_elastic.worker.forking import fork_server_cache
from tests.component.worker.forked_child import ForkedChild
from tests.patience import until

FORKED, SPAWNED = ("json",), None


@pytest.fixture(autouse=True)
def no_fork_server() -> Iterator[None]:
    """No server of an earlier test, and none left behind."""
    fork_server_cache.close()
    yield
    fork_server_cache.close()


def describe_process() -> dict[str, object]:
    """All properties by which processes can be distinguished."""
    import faulthandler
    import gc
    import multiprocessing
    import threading
    from pathlib import Path

    def status(*names: str) -> list[str]:
        lines = Path("/proc/self/status").read_text().splitlines()
        return [line for line in lines if line.startswith(names)]

    def kind(descriptor: str) -> str:
        return os.readlink(f"/proc/self/fd/{descriptor}").partition(":[")[0]

    open_now = [name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")]
    main = sys.modules["__main__"]
    return {
        "parent": os.getppid(),
        "command": Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").decode(),
        "name": Path("/proc/self/comm").read_text(),
        "environment": dict(os.environ),
        "arguments": (sys.argv, sys.orig_argv, sys.path, sys.executable, sys.flags),
        "main": (main.__file__, main.__spec__.name if main.__spec__ else None),
        "folder": os.getcwd(),
        "descriptors": sorted(map(kind, open_now)),
        "streams": [(stream.fileno(), stream.encoding, stream.isatty(), stream.line_buffering)
                    for stream in (sys.stdin, sys.stdout, sys.stderr)],
        "process": status("Umask", "SigBlk", "SigIgn", "SigCgt", "NoNewPrivs", "Cpus_allowed_list"),
        "group": (os.getpgid(0), os.getsid(0), os.nice(0)),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "is main": threading.current_thread() is threading.main_thread(),
        "native": threading.main_thread().native_id == os.getpid(),
        "handled": repr(sys.exception()),
        "faulthandler": faulthandler.is_enabled(),
        "gc": (gc.isenabled(), gc.get_threshold()),
        "multiprocessing": (multiprocessing.parent_process(), multiprocessing.current_process().name),
    }  # fmt: skip


def test_a_forked_process_looks_like_a_spawned_one() -> None:
    with ForkedChild(FORKED, describe_process) as one, ForkedChild(SPAWNED, describe_process) as other:
        forked, spawned = one.read_message(), other.read_message()
    assert fork_server_cache.pid is not None
    assert forked["parent"] == os.getpid()
    assert forked == spawned


def test_the_slot_gets_the_exit_codes_of_processes_of_one_fork_server() -> None:
    with ForkedChild(FORKED, lambda: sys.exit(3)) as first, ForkedChild(FORKED, lambda: None) as second:
        assert first.end() == 3
        assert second.await_warm().ppid() == os.getpid()
        second.child.kill()
        assert second.end() == -signal.SIGKILL


def test_another_environment_needs_another_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = []

    def threads() -> object:
        return os.environ.get("OMP_NUM_THREADS"), os.environ.get("A_VARIABLE")

    for number, variable in ((1, "a"), (2, "a"), (2, "b")):
        monkeypatch.setenv("A_VARIABLE", variable)
        with ForkedChild(FORKED, threads, number) as life:
            assert life.read_message() == [str(number), variable]
            servers.append(fork_server_cache.pid)
    assert None not in servers
    assert len(set(servers)) == 3
    assert not psutil.pid_exists(servers[0] or 0)


SLOT = """
    import os, sys, signal
    sys.path[:0] = {path!r}
    from spark_elastic.worker.forking import fork_server_cache
    from test_forking import FORKED, ForkedChild

    if __name__ == "__main__":
        life = ForkedChild(FORKED, lambda: None)
        sys.stdout.write(f"{{life.await_warm().pid}} {{fork_server_cache.pid}}\\n")
        sys.stdout.flush()
        signal.pause()
"""


def test_a_forked_process_and_its_server_end_with_the_slot(tmp_path: Path) -> None:
    script = tmp_path / "slot.py"
    script.write_text(textwrap.dedent(SLOT.format(path=[str(Path(__file__).parent), *sys.path])))
    slot = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE)
    assert slot.stdout is not None
    with slot.stdout:
        family = [psutil.Process(int(pid)) for pid in slot.stdout.readline().split()]
        assert {process.ppid() for process in family} == {slot.pid}
        slot.kill()
        slot.wait()
    _, alive = psutil.wait_procs(family, timeout=10.0)
    assert not alive


def fork_sleeper_and_end() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with suppress(PermissionError):  # what it forks gets its turn after its end
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    if pid := os.fork():
        os.write(1, f"{pid}\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def test_what_a_program_forks_ends_with_a_process_that_ends_at_once() -> None:
    with ForkedChild(FORKED, fork_sleeper_and_end) as child:
        sleeper = int(child.lines.get(timeout=60.0))
        until(lambda: not psutil.pid_exists(sleeper))


def test_a_forked_process_outlives_its_server_and_the_next_process_gets_a_new_server() -> None:
    with ForkedChild(FORKED, lambda: None) as first:
        process, server = first.await_warm(), fork_server_cache.pid
        assert server is not None
        os.kill(server, signal.SIGKILL)
        psutil.wait_procs([psutil.Process(server)] if fork_server_cache.pid else [], timeout=10.0)
        with ForkedChild(FORKED, lambda: None) as second:
            second.await_warm()
            assert fork_server_cache.pid not in (None, server)
        assert process.is_running()
        first.child._input.put(None)
        assert first.end() == 0


def test_a_process_is_spawned_if_its_server_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create_module(tmp_path, monkeypatch, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    with ForkedChild(("written",), lambda: None, forked=False) as life:
        assert life.await_warm().ppid() == os.getpid()
        assert "the fork server is gone" in life.lines.get(timeout=60.0)


def create_module(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Install a module with the name `written`, for the server to import."""
    installed = folder / "site-packages"
    installed.mkdir()
    (installed / "written.py").write_text(text)
    monkeypatch.syspath_prepend(installed)


THREAD = "import threading; threading.Thread(target=threading.Event().wait, name='lost', daemon=True).start()"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (THREAD, "written is imported by each process anew: a forked process would lack its thread '"),
        ("1 / 0", "written is imported once the program asks for it: ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", "written is imported once the program asks for it: SystemExit: 3"),
    ],
)
def test_a_module_that_cannot_be_imported_in_advance_costs_the_others_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, why: str
) -> None:
    create_module(tmp_path, monkeypatch, text)
    imports = ("no_such_module", "written", "written:name?", "torch_is_optional?", "colorsys")
    for expected in ([why], []):  # the second process says nothing
        with ForkedChild(imports, lambda: ["written" in sys.modules, "colorsys" in sys.modules]) as life:
            life.await_warm()
            said = [life.lines.get(timeout=60.0) for _ in range(len(expected) + 1)]
            assert [line.startswith(SLOT_LINE_PREFIX + why) for line in said[:-1]] == [True] * len(expected)
            assert json.loads(said[-1]) == [text == THREAD, True]


def test_a_process_is_spawned_where_no_fork_is_safe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(THREAD)
    monkeypatch.syspath_prepend(tmp_path)
    with ForkedChild(FORKED, lambda: "spawned", forked=False) as life:
        assert "no process can be forked, so each starts anew" in life.lines.get(timeout=60.0)
        assert life.read_message() == "spawned"


def test_a_process_is_spawned_if_the_slot_cannot_adopt_a_forked_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that was not adopted has not read the input that the spawned one needs."""
    monkeypatch.setattr(forking, "PR_SET_CHILD_SUBREAPER", forking.PR_GET_CHILD_SUBREAPER)
    with ForkedChild(FORKED, lambda: "spawned", forked=False) as life:
        assert life.read_message() == "spawned"


def test_a_kill_before_the_fork_prevents_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create_module(tmp_path, monkeypatch, "import time; time.sleep(1.0)")
    with ForkedChild(("written",), lambda: "started") as life:
        assert life.child.state() == ""
        begin = time.monotonic()
        life.child.kill()
        assert life.end() == -signal.SIGKILL
        assert time.monotonic() - begin < 0.8
        with ForkedChild(("written",), lambda: "next") as following:
            assert following.read_message() == "next"
        assert life.lines.empty()


def test_each_forked_process_prints_what_imports_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create_module(tmp_path, monkeypatch, "print('written was imported')")
    for _ in range(2):
        with ForkedChild(("written",), lambda: "then") as life:
            assert life.lines.get(timeout=60.0) == "written was imported"
            assert life.read_message() == "then"


def test_an_idle_fork_server_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create_module(tmp_path, monkeypatch, "import __main__; __main__.IDLE_SECONDS = 0.2")
    with ForkedChild(("written",), lambda: None) as life:
        life.await_warm()
        time.sleep(0.5)
        assert fork_server_cache.pid is not None, "a server with a process ended"
    until(lambda: fork_server_cache.pid is None)


# What workers of estimators, functions and Trainers of Hugging Face and Lightning use: imported before the fork.
EARLY = (
    "keras", "lightning.pytorch", "pyarrow", "sklearn", "spark_elastic.training.keras.trainer",
    "spark_elastic.training.torch.trainer", "torch._dynamo", "transformers.trainer",
)  # fmt: skip


def use_frameworks() -> list[object]:
    """Compute with what starts threads and processes; what was loaded before, sums, what torch has of the slot, and
    numbers that no two processes may share."""
    loaded = sorted({*EARLY} & {*sys.modules})
    import multiprocessing
    import random

    import keras
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc
    import torch

    gpus = os.environ["CUDA_VISIBLE_DEVICES"], torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    rows = torch.utils.data.DataLoader(torch.arange(8.0), batch_size=2, num_workers=2)
    sums = sum(float(batch.sum()) for batch in rows), pc.sum(pa.array(range(1000))).as_py()
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse")
    model.fit(np.ones((8, 2)), np.ones((8, 1)), verbose=0)
    authkey = multiprocessing.current_process().authkey.hex()
    drawn = [random.random(), np.random.rand(), float(torch.rand(1)), authkey]
    return [loaded, sums, [torch.get_num_threads(), *gpus], drawn]


@pytest.mark.timeout(180)
def test_workers_of_every_kind_of_program_are_forked_with_their_gpus_and_seeds() -> None:
    """Estimators, functions, Trainers of Hugging Face and Lightning, Keras: their imports leave nothing in the way, and
    torch has not asked CUDA for anything."""
    from spark_elastic.estimators import keras_estimator, torch_estimator

    kinds = *torch_estimator.TORCH.preload, *keras_estimator.KERAS.preload, "spark_elastic.torch"
    others = "transformers:Trainer", "lightning.pytorch", "sklearn.linear_model", "spark_elastic.keras"
    imports = (*kinds, *others)
    with (
        ForkedChild(imports, use_frameworks, 2, gpus=("1",)) as first,
        ForkedChild(imports, use_frameworks, 2, gpus=("2",)) as second,
    ):
        server = fork_server_cache.pid
        (*result, one), (*other, two) = first.read_message(), second.read_message()
        assert server == fork_server_cache.pid
    assert result == [[*EARLY], [28.0, 499500], [2, "1", False]]
    assert other == [[*EARLY], [28.0, 499500], [2, "2", False]]
    assert not set(one) & set(two)


class Loading:
    """Unpickling it calls a function."""

    def __init__(self, call: Callable[..., Any], *arguments: object) -> None:
        self._call = call, arguments

    def __reduce__(self) -> Any:
        return self._call


def test_what_does_not_load_is_named_and_leaves_a_fork_server_for_the_slots_to_come() -> None:
    spec = SlotSpec(address="", key=b"", attempt=0, imports=("json",), cpus_per_worker=2)
    assert find_load_error_in_fork(cloudpickle.dumps({"rows": [1, 2]}), spec) is None
    server = fork_server_cache.pid
    lacking, ended = (
        cloudpickle.dumps(Loading(*how)) for how in ((__import__, "no_such_module"), (os._exit, 3))
    )
    expected = "ModuleNotFoundError: No module named 'no_such_module'"
    assert find_load_error_in_fork(lacking, spec) == find_load_error(lacking) == expected
    assert find_load_error_in_fork(ended, spec) == "the process that loads it ended: exit code 3"
    assert server is not None
    assert fork_server_cache.pid == server
