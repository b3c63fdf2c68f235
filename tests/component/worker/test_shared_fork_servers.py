"""Slots of one executor, as processes of one parent: they make a program's imports once, and do not depend on each
other's fate."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from spark_elastic.worker.forking import SPARK_SECRET, InheritedSettings, fork_server_cache
from tests.component.worker.forked_child import ForkedChild
from tests.patience import until

SLOT = """
    import json, os, sys
    sys.path[:0] = {path!r}
    from spark_elastic.worker.context import get_process_context
    from spark_elastic.worker.forking import fork_server_cache
    from test_forking import ForkedChild, describe_process

    def count_descriptors():
        return len(os.listdir("/proc/self/fd"))

    def read_lines(child):
        lines = [child.lines.get(timeout=60.0)]
        while lines[-1] != "null":  # what the program says
            lines.append(child.lines.get(timeout=60.0))
        return lines

    def be_slot():
        children = []
        for line in sys.stdin:
            match line.split():
                case ["start"]:
                    children.append(ForkedChild(("counted",), lambda: None))
                    worker = children[-1].await_warm()
                    yield worker.pid, fork_server_cache.pid
                case ["request"]:
                    children.append(ForkedChild(("counted",), lambda: None))
                    yield None
                case ["lines"]:
                    yield read_lines(children[-1])
                case ["kill"]:
                    children[-1].child.kill()
                    yield children[-1].end()
                case ["end"]:
                    yield children.pop().end()
                case ["exit", code]:
                    with ForkedChild(("counted",), lambda: sys.exit(int(code))) as child:
                        yield child.end()
                case ["say", imports]:
                    with ForkedChild((imports,), lambda: None) as child:
                        yield read_lines(child)
                case ["describe"]:
                    with ForkedChild(("counted",), describe_process) as child:
                        yield child.read_message()
                case ["name"]:
                    with ForkedChild(("counted",), lambda: get_process_context().slot) as child:
                        yield int([child.lines.get(timeout=60.0) for _ in range(2)][-1])
                case ["descriptors"]:
                    yield count_descriptors()
        for child in children:
            child.child.close()
        fork_server_cache.close()

    if __name__ == "__main__":
        for said in be_slot():
            sys.stdout.write(json.dumps(said) + "\\n")
            sys.stdout.flush()
"""


class Slot:
    """A slot's process, which does one thing after the other."""

    def __init__(self, script: Path) -> None:
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
        self.process = subprocess.Popen([sys.executable, str(script)], **pipes)

    def order(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{text}\n".encode())

    def read(self, seconds: float = 60.0) -> Any:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], seconds)[0], "the slot says nothing"
        return json.loads(self.process.stdout.readline())

    def do(self, text: str) -> Any:
        self.order(text)
        return self.read()

    def start(self) -> list[psutil.Process]:
        """A worker and its server."""
        return [psutil.Process(pid) for pid in self.do("start")]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10.0)

    def close(self) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        return self.process.wait(30.0)


@pytest.fixture
def imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file to which the module `counted` appends a line when it is imported."""
    installed = tmp_path / "site-packages"
    installed.mkdir()
    counts = tmp_path / "imports"
    counts.touch()
    hold = str(tmp_path / "hold")  # the import takes until this file is gone
    text = f"import os, time\nopen({str(counts)!r}, 'a').write('imported\\n')\nprint('printed')\n"
    text += f"for _ in range(2000):\n    if os.path.exists({hold!r}):\n        time.sleep(0.01)\n"
    (installed / "counted.py").write_text(text)
    (installed / "broken.py").write_text(f"{text}1 / 0\n")
    (installed / "threaded.py").write_text(f"{text}import threading\nthreading.Timer(60, print).start()\n")
    (installed / "deadly.py").write_text(f"{text}import os\nos.kill(os.getpid(), 9)\n")
    monkeypatch.syspath_prepend(installed)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(installed), *filter(None, sys.path)]))
    monkeypatch.setenv(SPARK_SECRET, "of this executor")
    return counts


@pytest.fixture
def make_slot(tmp_path: Path, imports: Path) -> Iterator[Callable[[], Slot]]:
    script = tmp_path / "slot.py"
    script.write_text(textwrap.dedent(SLOT.format(path=[str(Path(__file__).parent), *sys.path])))
    slots: list[Slot] = []

    def make() -> Slot:
        slots.append(Slot(script))
        return slots[-1]

    yield make
    for slot in slots:
        slot.close()
    mark = str(imports.parent).encode()
    until(lambda: not list_marked(mark), 10.0)


def list_marked(mark: bytes) -> list[Path]:
    """Processes of this test, wherever they hang in the tree."""
    marked = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int(folder.name) != os.getpid() and mark in (folder / "environ").read_bytes():
                marked.append(folder)
        except OSError:
            continue
    return marked


def count(imports: Path) -> int:
    return len(imports.read_text().split())


def assert_ended(processes: list[psutil.Process], seconds: float) -> None:
    _, alive = psutil.wait_procs(processes, seconds)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_slots_that_start_at_once_import_once(make_slot: Callable[[], Slot], imports: Path) -> None:
    slots = [make_slot() for _ in range(3)]
    for slot in slots:
        slot.order("start")
    pids = [slot.read() for slot in slots]
    assert count(imports) == 1
    assert len({pid for pair in pids for pid in pair}) == 6, "each slot has a server of its own"
    parents = {psutil.Process(worker).ppid() for worker, _ in pids}
    assert len(parents & {slot.process.pid for slot in slots}) == 1, "one slot adopts its process"
    for slot, (worker, _) in zip(slots, pids, strict=True):
        os.kill(worker, signal.SIGTERM)
        assert slot.do("end") == -signal.SIGTERM
        assert slot.do("exit 7") == 7
        assert slot.do("exit 0") == 0
    assert count(imports) == 1


def test_a_process_of_another_slots_server_looks_like_an_adopted_one(make_slot: Callable[[], Slot]) -> None:
    first, second = make_slot(), make_slot()
    (_, server), ours = first.do("start"), first.do("describe")
    (_, other), theirs = second.do("start"), second.do("describe")
    assert server != other
    assert theirs.pop("parent") == other
    assert ours.pop("parent") == first.process.pid
    assert theirs == ours
    assert [slot.do("name") for slot in (first, second)] == [first.process.pid, second.process.pid]


@pytest.mark.parametrize("killed", ["slot", "server"])
def test_the_end_of_the_slot_or_server_that_imported_hurts_no_other_slot(
    make_slot: Callable[[], Slot], imports: Path, killed: str
) -> None:
    first, second = make_slot(), make_slot()
    own = first.start()
    worker, server = second.start()
    if killed == "slot":
        first.kill()
        assert_ended(own, 5.0)
    else:
        own[1].kill()
        assert_ended(own[1:], 5.0)
        assert own[0].is_running()
    another, same = second.start()
    assert same == server
    assert worker.is_running()
    another.kill()
    assert second.do("end") == -signal.SIGKILL
    assert worker.is_running()
    assert count(imports) == 1
    third = make_slot()  # the place where slots meet is free again
    third.start()
    assert count(imports) == 2


def test_the_processes_of_a_slot_end_with_it_and_no_others_do(make_slot: Callable[[], Slot]) -> None:
    first, second = make_slot(), make_slot()
    own, theirs = first.start(), second.start()
    second.kill()
    assert_ended(theirs, 1.0)
    assert all(process.is_running() for process in own)


def test_a_slot_whose_server_dies_loses_its_process_and_starts_a_server(
    make_slot: Callable[[], Slot], imports: Path
) -> None:
    first, second = make_slot(), make_slot()
    first.start()
    worker, server = second.start()
    server.kill()
    assert second.do("end") == -signal.SIGKILL
    assert_ended([worker], 1.0)
    _, next_server = second.start()
    assert next_server != server
    assert count(imports) == 1, "the first slot's server is still there"


def request_during_import(first: Slot, second: Slot, imports: Path) -> Path:
    """Have both ask for a process while the first one's server imports; it does until the file is gone."""
    hold = imports.parent / "hold"
    hold.touch()
    first.do("request")
    until(lambda: count(imports) == 1, 60.0)
    second.do("request")
    return hold


def test_a_slot_whose_neighbour_dies_importing_starts_its_process_itself(
    make_slot: Callable[[], Slot], imports: Path
) -> None:
    first, second = make_slot(), make_slot()
    hold = request_during_import(first, second, imports)
    first.kill()
    hold.unlink()
    assert any("the fork server is gone" in line for line in second.do("lines"))
    _, server = second.start()
    assert server.ppid() == second.process.pid


def test_a_kill_before_the_fork_prevents_it(make_slot: Callable[[], Slot], imports: Path) -> None:
    first, second = make_slot(), make_slot()
    hold = request_during_import(first, second, imports)
    assert second.do("kill") == -signal.SIGKILL
    hold.unlink()
    worker, _ = second.start()
    assert worker.is_running()
    assert count(imports) == 1


@pytest.mark.parametrize("module", ["broken", "threaded", "deadly"])
def test_what_imports_say_and_leave_out_is_the_same_for_each_slot(
    make_slot: Callable[[], Slot], imports: Path, module: str
) -> None:
    one, other = make_slot(), make_slot()
    said = one.do(f"say {module}")
    assert said
    assert other.do(f"say {module}") == said


def test_no_descriptor_is_left_in_a_slot(make_slot: Callable[[], Slot]) -> None:
    first, second = make_slot(), make_slot()
    first.start()
    second.do("exit 3")
    before = second.do("descriptors")
    for _ in range(3):
        assert second.do("exit 3") == 3
    assert second.do("descriptors") == before


def test_an_idle_slots_server_ends_and_the_next_is_forked_anew(
    make_slot: Callable[[], Slot], imports: Path
) -> None:
    text = (imports.parent / "site-packages" / "counted.py").read_text()
    (imports.parent / "site-packages" / "counted.py").write_text(
        f"{text}import __main__\n__main__.IDLE_SECONDS = 0.3\n"
    )
    first, second = make_slot(), make_slot()
    first.start()
    worker, server = second.start()
    worker.kill()
    second.do("end")
    assert_ended([server], 5.0)
    assert second.start()[1] != server
    assert count(imports) == 1


def test_slots_meet_where_all_settings_are_the_same_and_hold_a_secret() -> None:
    environment = {SPARK_SECRET: "one"}
    address = InheritedSettings.capture(("json",), environment).find_address()
    assert address is not None
    assert address.startswith("\0"), "in no folder"
    assert address == InheritedSettings.capture(("json",), dict(environment)).find_address()
    for imports, others in ((("json",), {SPARK_SECRET: "two"}), (("os",), environment)):
        assert InheritedSettings.capture(imports, others).find_address() not in (None, address)
    assert InheritedSettings.capture(("json",), {}).find_address() is None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_another_users_socket_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"\0spark-elastic-test-{os.getpid()}"
    monkeypatch.setattr(InheritedSettings, "find_address", lambda settings: address)
    listen = """if True:
        import os, socket, sys
        os.setuid(65534)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(chr(0) + sys.argv[1])
        listener.listen()
        print("listens", flush=True)
        print(listener.accept()[0].recv(64), flush=True)
    """
    other = subprocess.Popen([sys.executable, "-c", listen, address[1:]], stdout=subprocess.PIPE)
    assert other.stdout is not None
    try:
        other.stdout.readline()
        with ForkedChild(("json",), lambda: None) as child:
            assert child.await_warm().ppid() == os.getpid()
        assert other.stdout.readline() == b"b''\n", "it was sent a message"
        assert fork_server_cache.pid is not None
    finally:
        fork_server_cache.close()
        other.kill()
        other.stdout.close()
        other.wait(10.0)
