"""Which device a worker trains on, and which GPUs it sees."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from spark_elastic.clock import SystemClock
from spark_elastic.config import ElasticConfig
from spark_elastic.errors import DriverUnreachable, InvalidInput
from spark_elastic.protocol.types import SlotId, SlotIdentity, SlotSpec
from spark_elastic.worker.context import get_process_context
from spark_elastic.worker.devices import (
    VISIBLE,
    GpuClaims,
    apply_device,
    check_host_device,
    collect_gpu_facts,
    find_gpu,
    list_visible_gpus,
    set_accelerate_device,
)
from spark_elastic.worker.slot_agent import SlotAgent


def make_spec(device: str, slots_per_gpu: int = 1) -> SlotSpec:
    config = ElasticConfig(device=device, slots_per_gpu=slots_per_gpu)
    return SlotSpec.from_config(config, address="here:1", key=b"", attempt=1)


def make_slot(*gpus: str, problem: str = "") -> SlotIdentity:
    resources = {"gpu": gpus} if gpus else {}
    return SlotIdentity(slot=SlotId.build(0, 0), resources=resources, device_problem=problem)


@pytest.mark.parametrize(
    ("device", "gpus", "visible", "expected", "sees"),
    [
        ("auto", (), None, "cpu", None),
        ("auto", (), "0,1", "cpu", "0,1"),  # a loop of the user's may use them
        ("auto", ("1",), None, "cuda", "1"),
        ("cuda", ("1",), None, "cuda", "1"),
        ("cpu", ("1",), None, "cpu", ""),
        ("cpu", (), "0,1", "cpu", ""),
        ("auto", ("1",), "MIG-a,MIG-b", "cuda", "MIG-b"),
    ],
)
def test_a_worker_sees_the_gpu_of_its_slot_alone(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    gpus: tuple[str, ...],
    visible: str | None,
    expected: str,
    sees: str | None,
) -> None:
    monkeypatch.setattr(get_process_context(), "device", "cpu")
    environment = {} if visible is None else {VISIBLE: visible}
    apply_device(make_spec(device), make_slot(*gpus), environment)
    assert get_process_context().device == expected
    assert environment.get(VISIBLE) == sees


@pytest.mark.parametrize(
    ("address", "visible", "found"),
    [
        ("3", None, "3"),
        ("3", "2,3", "3"),
        ("1", "2,3", "3"),  # numbers of a container, which sees a part
        ("3", "GPU-5a1f", "GPU-5a1f"),
        ("GPU-5a1f", "GPU-0000,GPU-5a1f", "GPU-5a1f"),
        ("MIG-7", None, "MIG-7"),
    ],
)
def test_addresses_of_spark_are_names_of_cuda(address: str, visible: str | None, found: str) -> None:
    assert find_gpu(address, {} if visible is None else {VISIBLE: visible}) == found
    with pytest.raises(InvalidInput, match="gave GPU '7' to this task, and CUDA shows 0, 1: let CUDA_VIS"):
        find_gpu("7", {VISIBLE: "0,1"})


def make_devices(folder: Path, count: int) -> Path:
    (folder / "dev").mkdir()
    for name in [*(f"nvidia{number}" for number in range(count)), "nvidiactl", "nvidia-uvm"]:
        (folder / "dev" / name).touch()
    return folder / "dev"


@pytest.mark.parametrize(
    ("gpus", "sharing", "taken", "says"),
    [
        (2, 1, ["0", "1", ""], "all of its 2 GPUs are taken by 2 other slots of this host: lower num_work"),
        (1, 2, ["0", "0", ""], "its GPU is taken by 2 other slots"),
        (2, 2, ["0", "1", "0"], ""),  # they share once each has one
        (0, 1, [""], "device='cuda', and this host shows no GPU: look at nvidia-smi"),
    ],
)
def test_without_spark_slots_take_a_gpu_each_or_share_one_on_request(
    gpus: int, sharing: int, taken: list[str], says: str, tmp_path: Path
) -> None:
    devices, spec, slot = make_devices(tmp_path, gpus), make_spec("cuda", sharing), make_slot()
    with ExitStack() as ends:
        claims = [GpuClaims(tmp_path / "locks", devices) for _ in range(len(taken) + 2)]
        for claim in claims[1:]:
            ends.callback(claim.close)
        slots = [claim.assign(spec, slot, {}) for claim in claims[: len(taken)]]
        assert ["".join(claimed.resources.get("gpu", ())) for claimed in slots] == taken
        if says:
            with pytest.raises(InvalidInput, match=says):
                apply_device(spec, slots[-1], {})
        claims[0].close()  # its slot ended
        assert claims[-2].assign(spec, slot, {}).resources == ({"gpu": ("0",)} if gpus else {})
        for gpu in ("2", "MIG-GPU-5a1f/1/0"):  # an executor that is shown others
            assert claims[-1].assign(make_spec("cuda"), slot, {VISIBLE: gpu}).resources == {"gpu": (gpu,)}
        assert claims[-1].assign(make_spec("cuda"), make_slot("5"), {}) == make_slot("5")
        assert gpus or claims[-1].assign(make_spec("auto"), slot, {}) == slot


def test_a_slot_that_cannot_register_gives_its_gpu_back(tmp_path: Path) -> None:
    """Spark starts the next slot in the same process."""
    devices = make_devices(tmp_path, 1)
    driver = MagicMock()
    driver.ask.side_effect = DriverUnreachable("paused")
    agent = SlotAgent(make_spec("cuda"), make_slot(), b"", driver, SystemClock())
    agent._gpu_claims = GpuClaims(tmp_path / "locks", devices)
    with pytest.raises(DriverUnreachable):
        agent.run()
    following = GpuClaims(tmp_path / "locks", devices)
    assert following.assign(make_spec("cuda"), make_slot(), {}).resources == {"gpu": ("0",)}
    following.close()


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("2, 0", ["2", "0"]),
        ("MIG-5a1f,GPU-7b", ["MIG-5a1f", "GPU-7b"]),
        ("1,-1,2", ["1"]),  # CUDA, too, ends there
        ("NoDevFiles", []),  # Slurm's word
    ],
)
def test_visible_gpus_are_those_that_cuda_reads(text: str, names: list[str], tmp_path: Path) -> None:
    assert list_visible_gpus({VISIBLE: text}) == names
    for name in ("nvidia3", "nvidia5", "nvidiactl", "nvidia-uvm"):  # of the host, in a container
        (tmp_path / name).touch()
    assert list_visible_gpus({}, tmp_path) == ["0", "1"]
    assert collect_gpu_facts({}, tmp_path)["gpus"] == "2"


@pytest.mark.parametrize("file", ["nvidia0", "kfd", "dxg"])
def test_accelerate_trains_on_the_cpu_where_no_gpu_is_or_none_is_shown(file: str, tmp_path: Path) -> None:
    def set_in(**environment: str) -> str | None:
        set_accelerate_device(environment, tmp_path)
        return environment.get("ACCELERATE_USE_CPU")

    assert set_in() == "true"
    assert set_in(ACCELERATE_USE_CPU="false") == "false", "the user's word counts"
    (tmp_path / file).touch()
    assert set_in() is None
    assert set_in(**{VISIBLE: ""}) == "true"


def test_gpus_are_numbered_as_sparks_addresses_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(get_process_context(), "device", "cpu")
    unset: dict[str, str] = {}
    apply_device(make_spec("auto"), make_slot("1"), unset)
    assert unset == {VISIBLE: "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    chosen = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    apply_device(make_spec("auto"), make_slot("1"), chosen)
    assert chosen["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"
    with pytest.raises(InvalidInput, match="a process can use one MIG instance, and Spark gave 2 to a slot"):
        apply_device(make_spec("auto"), make_slot("MIG-a", "MIG-b"), {})


BARE = {"gpus": "0", "torch_cuda": ""}


@pytest.mark.parametrize(
    ("host", "device", "needs", "assigned", "sentence"),
    [
        (BARE, "auto", "torch", True, None),
        (BARE, "cpu", "torch", False, None),
        (BARE | {"torch_cuda": "13.0"}, "cuda", "torch", True, None),
        (BARE | {"gpus": "2"}, "cuda", "tensorflow", False, None),
        (BARE | {"gpus": "2"}, "cuda", "torch", True, "torch 2.13.0 on host h is built without CUDA"),
        (BARE | {"torch_cuda": "1"}, "cuda", "torch", False, "host h: device='cuda', and this host"),
        ({}, "cuda", "torch", False, None),  # a host that does not say
    ],
)
def test_a_host_without_the_device_is_refused(
    host: dict[str, str], device: str, needs: str, assigned: bool, sentence: str | None
) -> None:
    said = check_host_device({"host": "h", "torch": "2.13.0", **host}, device, (needs,), assigned)
    assert said is None if sentence is None else said is not None and sentence in said
