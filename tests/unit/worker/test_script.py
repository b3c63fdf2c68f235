"""A user's script runs as the shell would run it, and its process group finds a free port."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from spark_elastic.errors import InvalidInput
from spark_elastic.worker.function_program import PORTS, Module, Script, find_free_port


@pytest.fixture(autouse=True)
def arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["before"])
    monkeypatch.setattr(sys, "told", None, raising=False)  # what a script says


def told() -> Any:
    """What a script has said."""
    return vars(sys)["told"]


def test_a_script_runs_on_a_host_that_does_not_have_it(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import sys\nsys.told = __file__\n")
    script = Script.read(str(path))
    path.write_text("raise AssertionError('another script of that name')\n")
    script()
    assert Path(told()).name == "train.py"
    assert told() != str(path)
    assert not Path(told()).exists()


def test_a_linked_script_imports_beside_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "neighbour_of_a_linked_script", raising=False)
    own, link = tmp_path / "own", tmp_path / "train.py"
    own.mkdir()
    (own / "neighbour_of_a_linked_script.py").write_text("value = 7\n")
    program = "import sys, neighbour_of_a_linked_script as near\nsys.told = near.value, __file__\n"
    (own / "train.py").write_text(program)
    link.symlink_to(own / "train.py")
    Script.read(str(link))()
    assert told() == (7, str(link))


@pytest.mark.parametrize("here", [True, False])
def test_a_script_is_read_in_the_encoding_that_it_declares(here: bool, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_bytes("# -*- coding: latin-1 -*-\nimport sys\nsys.told = 'café'\n".encode("latin-1"))
    script = Script.read(str(path))
    if not here:
        path.unlink()
    script()
    assert told() == "café"


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
    assert told() == ("__main__", ["--lr", "0.1"], 7)
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
