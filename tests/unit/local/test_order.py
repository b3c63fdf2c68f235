"""What a slot's process and its training process learn of the job's settings. No process is started."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from spark_elastic import cli
from spark_elastic.config import ElasticConfig
from spark_elastic.errors import InvalidInput
from spark_elastic.local.slot import SlotOrder, SlotSettings

CONFIG = ElasticConfig(
    collective_timeout=7.0,
    driver_timeout=8.0,
    spare_after=9.0,
    fork_workers=False,
    worker_port_range=(7000, 7010),
    cpus_per_worker=3,
)


def test_settings_are_those_of_the_config() -> None:
    settings = SlotSettings.of(CONFIG)
    assert dataclasses.asdict(settings) == {
        field.name: getattr(CONFIG, field.name) for field in dataclasses.fields(SlotSettings)
    }


def test_they_reach_the_training_process() -> None:
    order = SlotOrder(
        address="127.0.0.1:7",
        key="abcd",
        attempt=2,
        certificate=None,
        job=5,
        host="a",
        preload=("torch", "numpy"),
        imports=("torch",),
        parent=1,
        settings=SlotSettings.of(CONFIG),
    )
    read = SlotOrder.from_json(order.to_json())
    assert read == order
    header = read.header(4, 99)
    assert (header.port_range, header.threads, header.imports) == ((7000, 7010), 3, ("torch",))
    assert (header.collective_timeout, header.driver_timeout) == (7.0, 8.0)
    assert (header.slot, header.preload, header.status_fd, header.payload_bytes) == (
        "5-0", ("torch", "numpy"), 4, 99,
    )  # fmt: skip


def test_the_command_line_hands_on_what_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('hello')\n")
    monkeypatch.setenv("SPARK_ELASTIC_WORKER_PORT_RANGE", "7000-7010")
    monkeypatch.setenv("SPARK_ELASTIC_CPUS_PER_WORKER", "3")
    found: list[SlotSettings] = []

    def launcher(*arguments: Any) -> None:
        found.append(arguments[-1])
        raise InvalidInput("enough is known.")

    monkeypatch.setattr(cli, "LocalLauncher", launcher)
    CliRunner().invoke(cli.run, ["-np", "2", "python", str(script)])
    assert [(settings.worker_port_range, settings.cpus_per_worker) for settings in found] == [
        ((7000, 7010), 3)
    ]
