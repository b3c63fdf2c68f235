"""What the pages hold: a page that needs nothing from elsewhere, data of bounded size, metrics that parse."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser

from spark_elastic.monitoring.job_history import LOST_SECONDS, JobHistory
from spark_elastic.monitoring.status import (
    MAX_SLOTS,
    MAX_TEXT,
    build_status,
    build_status_pages,
    encode_json,
    format_prometheus,
)
from spark_elastic.protocol import driver_machine
from spark_elastic.protocol import events as on
from spark_elastic.protocol.commands import PublishWorld
from spark_elastic.protocol.messages import DriverMessage, JoinWorld, RegisterSlot, WorkerStarted, WorldFormed
from spark_elastic.protocol.types import Limits, SlotId, WorkerId
from spark_elastic.testing.fakes import FakeClock
from tests.simulator.stamping import stamp


def create_job(workers: int) -> tuple[JobHistory, FakeClock]:
    """A job whose first world stands, and whose rank 1 is stuck."""
    clock = FakeClock()
    history = JobHistory(clock)
    state, _ = driver_machine.initial(Limits(workers, 1, workers), 1)
    world = None

    def play(played: on.DriverEvent | DriverMessage) -> None:
        nonlocal state, world
        event = stamp(played, 1.0)
        state, commands = driver_machine.step(state, event)
        history.on_transition(event, commands, state)
        world = next((c.world for c in commands if isinstance(c, PublishWorld)), world)

    for number in range(1, workers + 1):
        play(RegisterSlot(SlotId(f"{number}-0"), f"host-{number % 7}", number, "node"))
        play(WorkerStarted(SlotId(f"{number}-0"), WorkerId(f"{number}-0.1")))
        play(JoinWorld(WorkerId(f"{number}-0.1"), None, None))
    assert world is not None
    for member in world.members:
        play(WorldFormed(member.worker, world.fence))
    stack = "rank 1 keeps others waiting\n" + "  File x\n" * MAX_TEXT
    play(on.WorkerStalled(0, world.members[1].worker, world.fence, stack))
    return history, clock


def test_the_status_of_a_training_without_reports_has_no_throughput() -> None:
    history, clock = create_job(2)
    for second in range(10):
        clock.advance(1.0 if second else 0.0)
        history.on_progress({"epoch": 0, "epochs": 1, "step": 10 * second, "steps": 1000, "rows": 64})
    seen = [build_status(history, "job")]
    clock.advance(51.0)
    seen.append(build_status(history, "job"))
    assert [one["rows_per_second"] for one in seen] == [640.0, 0.0]
    assert seen[0]["seconds_left"] is not None
    assert seen[1]["seconds_left"] is None
    assert b'spark_elastic_rows_per_second{job_name="job"} 0.0' in format_prometheus(seen[1])


def test_a_slot_that_is_gone_stays_on_the_page_for_a_while_with_the_reason() -> None:
    history, clock = create_job(3)
    state = history.view().state
    assert state is not None
    event = on.LaunchEnded(1.0, 2, "executor 7 was lost: SIGKILL", executor_lost=True)
    after, commands = driver_machine.step(state, event)
    history.on_transition(event, commands, after)
    (gone,) = build_status(history, "job")["lost_slots"]
    assert (gone["host"], gone["worker"], gone["rank"]) == ("host-2", "2-0.1", 1)
    assert "executor 7 was lost: SIGKILL" in gone["reason"]
    clock.advance(LOST_SECONDS + 2.0)
    assert not build_status(history, "job")["lost_slots"]


def test_the_status_describes_stage_slots_and_metrics() -> None:
    history, clock = create_job(3)
    clock.advance(2.0)
    history.on_progress({"epoch": 0, "step": 4, "steps": 9, "loss": 0.5, "rows": 8, "auc": 0.9, "note": "x"})
    clock.advance(1.0)
    seen = json.loads(encode_json(build_status(history, "job")))
    assert (seen["stage"], seen["size"], seen["generation"]) == ("running", 3, 1)
    assert [slot["rank"] for slot in seen["slots"]] == [0, 1, 2]
    assert [slot["stalled"] for slot in seen["slots"]] == [False, True, False]
    assert {slot["status"] for slot in seen["slots"]} == {"running"}
    assert seen["stalled"][0]["text"].startswith("rank 1 keeps others waiting")
    assert seen["metrics"]["auc"] == 0.9
    assert "note" not in seen["metrics"]
    assert seen["curve"] == {"at": [2.0], "loss": [0.5], "rows": [0.0]}
    assert seen["world_changes"][0]["text"].startswith("world of 3: started in 1.00 s")


def test_the_status_of_a_large_job_is_bounded() -> None:
    seen = build_status(create_job(MAX_SLOTS + 50)[0], "job")
    assert len(seen["slots"]) == MAX_SLOTS
    assert seen["more_slots"] == 50
    assert len(encode_json(seen)) < 400_000


def test_a_job_that_has_not_begun_has_a_status() -> None:
    seen = build_status(JobHistory(FakeClock()), "job")
    assert (seen["stage"], seen["slots"]) == ("starting", [])
    assert b"spark_elastic_world_size" in format_prometheus(seen)


def test_infinities_and_nan_are_null_in_the_status() -> None:
    history, clock = create_job(2)
    clock.advance(2.0)
    history.on_progress({"step": 1, "loss": math.nan, "lr": math.inf})
    seen = json.loads(encode_json(build_status(history, "job")), parse_constant=lambda name: 1 / 0)
    assert (seen["metrics"]["loss"], seen["metrics"]["lr"], seen["curve"]["loss"]) == (None, None, [None])


def test_metrics_have_the_prometheus_text_format() -> None:
    history, clock = create_job(3)
    clock.advance(2.0)
    history.on_progress({"epoch": 0, "step": 4, "loss": math.inf, "val_loss": 0.5})
    lines = format_prometheus(build_status(history, 'a "job"\\')).decode().splitlines()
    sample = re.compile(
        r'spark_elastic_\w+\{job_name="a \\"job\\"\\\\"(,\w+="[\w ]+")?\} (-?[\d.e+-]+|Inf|NaN)'
    )
    assert [line for line in lines if not line.startswith("#") and not sample.fullmatch(line)] == []
    assert 'spark_elastic_slots{job_name="a \\"job\\"\\\\",status="running"} 3.0' in lines
    assert 'spark_elastic_loss{job_name="a \\"job\\"\\\\"} Inf' in lines
    assert 'spark_elastic_reported{job_name="a \\"job\\"\\\\",name="val_loss"} 0.5' in lines
    typed = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(typed) == len(set(typed))


def test_the_status_page_loads_nothing_from_elsewhere() -> None:
    page = build_status_pages(JobHistory(FakeClock()), "job")[""]
    html = page.render().decode()
    found: list[tuple[str, str | None]] = []

    class Links(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.extend((name, value) for name, value in attrs if name in ("src", "href", "action", "style"))

    Links().feed(html)
    assert found == []
    assert "//" not in html.replace("http://www.w3.org/2000/svg", "")
    assert "innerHTML" not in html
    assert re.fullmatch(
        r"default-src 'none'; script-src 'sha256-\S{44}'; style-src 'sha256-\S{44}'; .*", page.policy
    )
