"""The user's program: a function, whose calls leave nothing to the next, or a script, as a shell would run it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from elastic_collectives import MismatchError
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.process_sets import ProcessSet, add_process_set, get_process_set_ids_and_ranks
from spark_elastic.worker.context import get_context
from spark_elastic.worker.function_program import PORTS, FunctionProgram, Module, Script, find_free_port
from spark_elastic.worker.program import Completed, WorkerHandle, decode_result
from tests.fake_group import FakeFabric
from tests.worlds import enter_group, use_context_per_thread

OF_A_MODULE = ProcessSet([1])


@pytest.fixture(autouse=True)
def alone_in_a_world(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """And what the function puts into the environment goes with the test."""
    use_context_per_thread(monkeypatch)
    enter_group(FakeFabric(1).group(0))
    with patch.dict(os.environ):
        yield


def train() -> dict[int, list[int]]:
    add_process_set([0])
    add_process_set(OF_A_MODULE)
    return get_process_set_ids_and_ranks()


def run_program(program: FunctionProgram) -> Any:
    """In the world of this thread."""
    worker: Any = get_context()
    handle = WorkerHandle(lambda: 0, lambda at: None, lambda told: None, _fail_if_called)
    return program.run(worker.world, worker.group, handle)


def test_a_function_that_is_called_again_can_add_its_process_sets_again() -> None:
    program = FunctionProgram(train)
    for generation in (1, 2):
        enter_group(FakeFabric(1, fence=(1, generation)).group(0))
        run_program(program)
        assert get_process_set_ids_and_ranks() == {0: [0], 1: [0], 2: []}


@pytest.mark.parametrize("code", [None, 0, 3])
def test_a_function_that_exits_with_zero_has_succeeded_without_a_result(code: int | None) -> None:
    with pytest.raises(SystemExit, match="3") if code else nullcontext():
        outcome = run_program(FunctionProgram(sys.exit, (code,)))
        assert isinstance(outcome, Completed)
        assert decode_result(outcome.result, 0) is None


def test_collectives_that_do_not_match_get_a_sentence() -> None:
    """They end the job: another world would not help."""

    def reduce_mismatched() -> None:
        raise MismatchError((1,), "rank 1 has other sizes")

    with pytest.raises(InvalidInput, match="collectives do not match: rank 1 has"):
        run_program(FunctionProgram(reduce_mismatched))


TALKS = """
import os, sys, types
import torch.distributed as dist
from accelerate import Accelerator
from tests.fake_group import FakeFabric
from spark_elastic.worker.context import get_context
from spark_elastic.worker.function_program import FunctionProgram
from spark_elastic.worker.program import WorkerHandle
from tests.worlds import enter_group

library = sys.modules["library"] = types.ModuleType("library")
library.group = None

def talk():
    import library
    accelerator = Accelerator(cpu=True)  # like many a program it does not destroy what it made
    accelerator.wait_for_everyone()
    if library.group is None:
        library.group = dist.new_group([0])
    dist.barrier(library.group)

program = FunctionProgram(talk)
for generation in (1, 2):
    enter_group(FakeFabric(1, fence=(1, generation)).group(0))
    handle = WorkerHandle(lambda: 0, lambda at: None, lambda metrics: None, None)
    program.run(get_context().world, get_context().group, handle)
    print(os.environ["MASTER_PORT"], flush=True)
os._exit(0)
"""


def test_a_function_that_is_called_again_meets_no_process_group_or_ranks_of_its_earlier_world() -> None:
    command = [sys.executable, "-c", TALKS]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert len(done.stdout.split()) == 2, done.stderr


def _fail_if_called(error: object) -> Any:
    raise AssertionError("the function stays in its world")


# ---- scripts and modules, and a free port for their process group


@pytest.fixture(autouse=True)
def arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["before"])
    monkeypatch.setattr(sys, "told", None, raising=False)  # what a script says


def read_told() -> Any:
    """What a script has said."""
    return vars(sys)["told"]


def test_a_script_runs_on_a_host_that_does_not_have_it(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import sys\nsys.told = __file__\n")
    script = Script.read(str(path))
    path.write_text("raise AssertionError('another script of that name')\n")
    script()
    assert Path(read_told()).name == "train.py"
    assert read_told() != str(path)
    assert not Path(read_told()).exists()


def test_a_linked_script_imports_beside_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "neighbour_of_a_linked_script", raising=False)
    own, link = tmp_path / "own", tmp_path / "train.py"
    own.mkdir()
    (own / "neighbour_of_a_linked_script.py").write_text("value = 7\n")
    program = "import sys, neighbour_of_a_linked_script as near\nsys.told = near.value, __file__\n"
    (own / "train.py").write_text(program)
    link.symlink_to(own / "train.py")
    Script.read(str(link))()
    assert read_told() == (7, str(link))


@pytest.mark.parametrize("here", [True, False])
def test_a_script_is_read_in_the_encoding_that_it_declares(here: bool, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_bytes("# -*- coding: latin-1 -*-\nimport sys\nsys.told = 'café'\n".encode("latin-1"))
    script = Script.read(str(path))
    if not here:
        path.unlink()
    script()
    assert read_told() == "café"


def test_a_script_with_a_nonzero_exit_code_raises(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import sys\nsys.exit('no data')\n")
    with pytest.raises(SystemExit, match="no data"):
        Script.read(str(path))()
    with pytest.raises(InvalidInput, match="cannot be read"):
        Script.read(str(tmp_path / "nowhere.py"))


def test_a_script_may_change_the_module_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / "train.py"
    path.write_text("import sys\ndel sys.path[0]\nraise KeyError('the reason')\n")
    with pytest.raises(KeyError, match="the reason"):
        Script.read(str(path))()


def test_a_module_runs_as_with_python_m(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package_to_run"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "near.py").write_text("value = 7\n")
    program = "import sys\nfrom .near import value\nsys.told = __name__, sys.argv[1:], value\nsys.exit(0)\n"
    (package / "__main__.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    module, before = Module.find("package_to_run", "--lr", "0.1"), list(sys.path)
    monkeypatch.chdir("/")
    module()
    assert read_told() == ("__main__", ["--lr", "0.1"], 7)
    assert (sys.path, module.__name__) == (before, "package_to_run")
    assert b"from .near import value" in module.source
    for name in ("nowhere", "nowhere.train", "package_to_run.nowhere", "sys"):
        with pytest.raises(InvalidInput, match=f"no module '{name}' to run"):
            Module.find(name)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_free_port_is_in_its_range_and_no_process_listens_on_it(address: str) -> None:
    with socket.create_server(("127.0.0.2", 0)) as busy:  # at another address of this host
        port = busy.getsockname()[1]
        assert find_free_port("127.0.0.1", (port, port)) == 0
        assert find_free_port(address, (port + 1, port + 50)) in range(port + 1, port + 51)
    outgoing, _ = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    assert PORTS[1] < int(outgoing)


# ---- a module follows the import of a framework


FRAMEWORK = "import sys\nloaded_before = 'follower' in sys.modules\n"
PROGRAM = """
from spark_elastic.worker import imports
imports.FOLLOWERS.clear()
imports.FOLLOWERS["framework"] = "follower"
{first}
imports.import_followers()
imports.import_followers()
import framework, sys
assert not framework.loaded_before
assert sys.modules["follower"].seen == "framework"
assert type(framework.__spec__.loader).__name__ == "SourceFileLoader"
assert sum(type(finder).__name__ == "_FollowingFinder" for finder in sys.meta_path) == 1
"""


@pytest.mark.parametrize("first", ["", "import framework"])
def test_the_following_module_is_imported_after_its_framework(tmp_path: Path, first: str) -> None:
    (tmp_path / "framework.py").write_text(FRAMEWORK)
    follower = "import framework\nframework.loaded_before\nseen = framework.__name__\n"
    (tmp_path / "follower.py").write_text(follower)
    program = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n" + PROGRAM.format(first=first)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
