"""The trace: one row a name, its phases in order, readable whether closed or not."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from elastic_collectives import Group
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.timeline import start_timeline, stop_timeline
from spark_elastic.horovod.ops.negotiation import OperationRequest
from spark_elastic.horovod.ops.operations import get_queue
from spark_elastic.rendezvous.server_state import KeyValueStore
from spark_elastic.worker import context
from tests.fake_group import FakeFabric
from tests.worlds import enter_group, run_in_fake_world, use_context_per_thread

pytestmark = pytest.mark.usefixtures("context_per_thread")


def test_rank_0_writes_the_phases_of_each_operation(tmp_path: Path) -> None:
    def work(group: Group) -> None:
        start_timeline(str(tmp_path / f"{group.rank}.json"), mark_cycles=True)
        for name in ("a", "b", "a"):
            request = OperationRequest("allreduce", name, ("float64",), ((1,),), "sum")
            get_queue().submit(request, [np.ones(1)]).wait()
        get_queue().submit(OperationRequest("barrier")).wait()
        stop_timeline()

    run_in_fake_world(2, work)
    enter_group(FakeFabric(1).group(0))
    with pytest.raises(InvalidInput, match="cannot be written"):
        start_timeline(str(tmp_path / "nowhere" / "trace.json"))
    assert [path.name for path in tmp_path.iterdir()] == ["0.json"]
    events = [event for event in json.loads((tmp_path / "0.json").read_text()) if event]
    about, *_ = events
    zero = about["args"]["start_time_since_epoch_in_micros"]
    rows = {event["args"]["name"]: event["pid"] for event in events[1:] if event["ph"] == "M"}
    assert {"a", "b"} <= rows.keys()
    spans = [event for event in events if event["ph"] == "X" and event["pid"] == rows["a"]]
    assert [span["name"] for span in spans] == ["QUEUE", "NEGOTIATE_ALLREDUCE", "ALLREDUCE"] * 2
    assert all(span["dur"] >= 0 for span in spans)
    assert all(abs(zero + span["ts"] - time.time() * 1e6) < 600e6 for span in spans)
    assert [span["ts"] for span in spans] == sorted(span["ts"] for span in spans)
    assert any(event["name"] == "CYCLE_START" for event in events)


def test_a_new_rank_0_continues_the_timeline(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text('[{"name": "of the former rank 0", "ph": "i"},\n')
    enter_group(FakeFabric(2).group(1))
    start_timeline(str(tmp_path / "trace.json"))
    enter_group(FakeFabric(1, fence=(1, 2)).group(0))
    get_queue()
    stop_timeline()
    events = json.loads((tmp_path / "trace.json").read_text())
    assert events == [{"name": "of the former rank 0", "ph": "i"}, {}]


def make_driver() -> Any:
    """The driver's key-value store, in this process."""
    values = KeyValueStore()
    return SimpleNamespace(
        ask=lambda request, *_, **__: values.compare_and_set(request),
        now=lambda: 0.0,
        last_answered_at=lambda: 0.0,
    )


def enter_as_process(monkeypatch: pytest.MonkeyPatch, generation: int, driver: Any) -> None:
    """Another process, alone in the world of that generation."""
    use_context_per_thread(monkeypatch)
    enter_group(FakeFabric(1, fence=(1, generation)).group(0))
    worker = context.get_context()
    assert worker is not None
    context.set_context(dataclasses.replace(worker, driver=driver))


def write_operation(label: str) -> Any:
    timeline = get_queue().timeline
    assert timeline is not None
    timeline.write_gradients(label, 8, 0.0, 1.0, 2.0)
    return timeline


def test_a_new_rank_0_begins_anew_after_an_older_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The former rank 0 was lost before its first operation."""
    path, driver = tmp_path / "trace.json", make_driver()
    path.write_text('[{"name": "of an older job", "ph": "i"},\n{}]\n')
    monkeypatch.setenv("HOROVOD_TIMELINE", str(path))
    for generation in (2, 3):
        enter_as_process(monkeypatch, generation, driver)
        write_operation(f"of {generation}")
        stop_timeline()
    text = path.read_text()
    assert all(f"of {generation}" in text for generation in (2, 3))
    assert "of an older job" not in text


def test_a_rank_0_that_cannot_write_the_timeline_of_the_environment_trains_without_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The path's folder may be on another host alone."""
    monkeypatch.setenv("HOROVOD_TIMELINE", str(tmp_path / "nowhere" / "trace.json"))
    enter_group(FakeFabric(2).group(1))
    get_queue()
    enter_group(FakeFabric(1, fence=(1, 2)).group(0))
    for _ in range(2):
        get_queue()
    assert caplog.text.count("cannot be written") == 1
    use_context_per_thread(monkeypatch)  # another job, whose first rank it is from the start
    enter_group(FakeFabric(1).group(0))
    for _ in range(2):
        assert get_queue().timeline is None
    assert caplog.text.count("cannot be written") == 2


def test_a_timeline_continues_with_its_function(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In the same process, and in another one, the first of which was killed."""
    path, driver = tmp_path / "trace.json", make_driver()
    path.write_text('[{"name": "of an older job", "ph": "i"},\n{}]\n')
    for generation in (1, 2):
        enter_as_process(monkeypatch, generation, driver)
        for turn in range(2):
            start_timeline(str(path))
            timeline = write_operation(f"of {generation}, {turn}")
        if generation == 1:
            timeline._file.close()
    with pytest.raises(InvalidInput, match="stop_timeline"):
        start_timeline(str(tmp_path / "second.json"))
    text = path.read_text()
    assert all(f"of {generation}, {turn}" in text for generation in (1, 2) for turn in range(2))
    assert "of an older job" not in text
    stop_timeline()
    start_timeline(str(path))
    stop_timeline()
    assert "of 1" not in path.read_text(), "a timeline that was stopped is another one"


def test_a_full_disk_ends_the_timeline_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    def work(group: Group) -> float:
        start_timeline("/dev/full", mark_cycles=True)
        array = np.ones(1)
        for _ in range(2):
            request = OperationRequest("allreduce", "a", ("float64",), ((1,),), "sum")
            get_queue().submit(request, [array]).wait()
        stop_timeline()
        return float(array[0])

    assert run_in_fake_world(2, work) == [4.0, 4.0]
    assert caplog.text.count("the timeline /dev/full ends here") == 1
    assert "No space left" in caplog.text
