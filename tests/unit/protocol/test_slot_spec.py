"""What a slot's process and its training process learn of the job's settings. No process is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from spark_elastic.clusters import cli
from spark_elastic.clusters.local.slot import LocalSlot
from spark_elastic.config import ElasticConfig
from spark_elastic.errors import InvalidInput
from spark_elastic.protocol.types import SlotId, SlotIdentity, SlotSpec
from spark_elastic.rendezvous import codec

SETTINGS: dict[str, Any] = {"collective_timeout": 7.0, "driver_timeout": 8.0, "spare_after": 9.0}
SETTINGS |= {"fork_workers": False, "worker_port_range": (7000, 7010), "cpus_per_worker": 3}


def test_settings_of_the_config_reach_the_slot_under_their_names() -> None:
    spec = SlotSpec.from_config(ElasticConfig(**SETTINGS), address="127.0.0.1:7", key=b"key", attempt=2)
    assert {name: getattr(spec, name) for name in SETTINGS} == SETTINGS
    assert (spec.address, spec.key, spec.attempt) == ("127.0.0.1:7", b"key", 2)


def test_a_slot_spec_does_not_show_its_key() -> None:
    assert "secret" not in repr(SlotSpec(address="", key=b"secret", attempt=1))


def test_a_local_slots_process_reads_what_its_launcher_wrote() -> None:
    spec = SlotSpec(address="a:7", key=b"\xff\x00", attempt=2, preload=("torch",), **SETTINGS)
    slot = LocalSlot(spec, SlotIdentity(slot=SlotId("5-0"), host="a"), parent=1)
    assert codec.from_line(LocalSlot, codec.to_line(slot)) == slot


def test_settings_of_the_environment_reach_slots_of_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('hello')\n")
    monkeypatch.setenv("SPARK_ELASTIC_WORKER_PORT_RANGE", "7000-7010")
    monkeypatch.setenv("SPARK_ELASTIC_CPUS_PER_WORKER", "3")
    found: list[ElasticConfig] = []

    def supervise(*arguments: Any) -> None:
        found.extend(argument for argument in arguments if isinstance(argument, ElasticConfig))
        raise InvalidInput("enough is known.")

    monkeypatch.setattr(cli, "supervise", supervise)
    CliRunner().invoke(cli.run, ["-np", "2", "python", str(script)])
    assert [(config.worker_port_range, config.cpus_per_worker) for config in found] == [((7000, 7010), 3)]
