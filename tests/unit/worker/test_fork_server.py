from __future__ import annotations

from pathlib import Path

from spark_elastic.worker.fork_server import find_open_devices


def test_accelerators_opened_by_imports_are_found(tmp_path: Path) -> None:
    for number, name in enumerate(("/dev/null", "pipe:[7]", "/dev/nvidiactl", "/somewhere/dev/nvidia0")):
        (tmp_path / str(number)).symlink_to(name)
    assert find_open_devices(tmp_path) == ["/dev/nvidiactl"]
    assert find_open_devices() == []
