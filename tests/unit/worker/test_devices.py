"""Which device a worker trains on, and which GPUs it sees."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_elastic.config import ElasticConfig
from spark_elastic.errors import InvalidInput
from spark_elastic.protocol.slot_spec import SlotIdentity, SlotSpec
from spark_elastic.protocol.types import SlotId
from spark_elastic.worker.context import get_process_context
from spark_elastic.worker.devices import VISIBLE, GpuClaims, apply_device, find_gpu


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


def test_a_gpu_that_is_not_visible_is_an_error() -> None:
    with pytest.raises(
        InvalidInput, match="Spark gave GPU '7' to this slot, and CUDA_VISIBLE_DEVICES shows '0,1'"
    ):
        find_gpu("7", {VISIBLE: "0,1"})


def make_devices(folder: Path, count: int) -> Path:
    (folder / "dev").mkdir()
    for name in [*(f"nvidia{number}" for number in range(count)), "nvidiactl", "nvidia-uvm"]:
        (folder / "dev" / name).touch()
    return folder / "dev"


def test_without_spark_slots_take_a_gpu_each(tmp_path: Path) -> None:
    devices = make_devices(tmp_path, 2)
    claims = [GpuClaims(tmp_path / "locks", devices) for _ in range(4)]
    spec, slot = make_spec("cuda"), make_slot()
    first, second, third = (each.assign(spec, slot, {}) for each in claims[:3])
    assert (first.resources, second.resources) == ({"gpu": ("0",)}, {"gpu": ("1",)})
    assert not third.resources
    with pytest.raises(
        InvalidInput, match=r"all of its 2 GPUs are taken by 2 other slots of this host: lower num_work"
    ):
        apply_device(spec, third, {})
    claims[0].close()  # its slot ended
    assert claims[3].assign(spec, slot, {}).resources == {"gpu": ("0",)}
    for each in claims:
        each.close()


def test_slots_share_a_gpu_on_request(tmp_path: Path) -> None:
    claims = [GpuClaims(tmp_path / "locks", make_devices(tmp_path, 1))]
    claims += [GpuClaims(tmp_path / "locks", tmp_path / "dev") for _ in range(2)]
    slots = [each.assign(make_spec("cuda", 2), make_slot(), {}) for each in claims]
    assert [slot.resources for slot in slots] == [{"gpu": ("0",)}, {"gpu": ("0",)}, {}]
    assert "its GPU is taken by 2 other slots" in slots[2].device_problem
    for each in claims:
        each.close()


def test_a_host_without_gpus_is_one_sentence(tmp_path: Path) -> None:
    with_none = GpuClaims(tmp_path / "locks", make_devices(tmp_path, 0))
    slot = with_none.assign(make_spec("cuda"), make_slot(), {})
    with pytest.raises(InvalidInput, match="device='cuda', and this host shows no GPU: look at nvidia-smi"):
        apply_device(make_spec("cuda"), slot, {})
    assert with_none.assign(make_spec("auto"), make_slot(), {}) == make_slot()
    assert with_none.assign(make_spec("cuda"), make_slot("5"), {}) == make_slot("5")


@pytest.mark.parametrize("device", ["gpu", "cuda:1", ""])
def test_an_unknown_device_is_refused(device: str) -> None:
    with pytest.raises(InvalidInput, match="device must be 'auto', 'cpu' or 'cuda'; got"):
        ElasticConfig(device=device)
