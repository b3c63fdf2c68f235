"""Results on their way to the caller, and scripts as functions."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from spark_elastic.errors import InvalidInput
from spark_elastic.rendezvous.gate import GateLimits
from spark_elastic.worker.results import MOST, decode, encode, refuse_too_large
from spark_elastic.worker.script import Script


def test_any_object_comes_back() -> None:
    for value in (None, {"a": (1, 2.5)}, "text", b"bytes"):
        assert decode(encode(value, 0)) == value
    assert decode(encode(np.arange(3), 0)).tolist() == [0, 1, 2]
    assert decode(encode(lambda x: x + 1, 0))(2) == 3


def test_a_worker_that_ended_without_a_result_counts_as_none() -> None:
    assert decode("null") is None


def test_what_cannot_be_pickled_is_one_sentence() -> None:
    with pytest.raises(InvalidInput, match="generator that cannot be pickled"):
        encode((number for number in range(3)), 0)


def test_a_result_too_large_for_a_message_is_one_sentence() -> None:
    assert len(encode(bytes(MOST - 1000), 0)) < GateLimits().body
    with pytest.raises(InvalidInput, match=r"on rank 3 returned a bytes of 5\.0 MiB, and at most 5 MiB"):
        encode(bytes(MOST), 3)


def test_what_the_server_would_not_read_is_one_sentence() -> None:
    refuse_too_large("x" * (7 << 20))
    with pytest.raises(InvalidInput, match=r"takes 8\.6 MiB in a message, and at most 8 MiB"):
        refuse_too_large('"' * 4_500_000)


def test_a_script_runs_where_it_lies_beside_its_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["before"])
    monkeypatch.delitem(sys.modules, "neighbour_of_a_script", raising=False)
    (tmp_path / "neighbour_of_a_script.py").write_text("value = 7\n")
    told = tmp_path / "told"
    path = tmp_path / "train.py"
    path.write_text(
        "import pathlib, sys, neighbour_of_a_script as near\n"
        f"told = pathlib.Path({str(told)!r})\n"
        "told.write_text(f'{__name__} {sys.argv[1:]} {near.value} {__file__}')\n"
        "sys.exit(0)\n"
    )
    before = list(sys.path)
    Script.read(str(path), "--lr", "0.1")()
    assert told.read_text() == f"__main__ ['--lr', '0.1'] 7 {path}"
    assert sys.path == before


def test_a_script_runs_on_a_host_that_does_not_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["before"])
    path, told = tmp_path / "train.py", tmp_path / "told"
    path.write_text(f"import pathlib\npathlib.Path({str(told)!r}).write_text(__file__)\n")
    script = Script.read(str(path))
    path.write_text("raise AssertionError('another script of that name')\n")
    script()
    assert Path(told.read_text()).name == "train.py"
    assert told.read_text() != str(path)
    assert not Path(told.read_text()).exists()


def test_a_script_that_exits_ill_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["before"])
    path = tmp_path / "train.py"
    path.write_text("import sys\nsys.exit('no data')\n")
    with pytest.raises(SystemExit, match="no data"):
        Script.read(str(path))()
    with pytest.raises(InvalidInput, match="cannot be read"):
        Script.read(str(tmp_path / "nowhere.py"))
