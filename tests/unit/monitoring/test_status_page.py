"""What the pages hold: a page that needs nothing from elsewhere, data of bounded size, metrics that parse."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser

from spark_elastic.monitoring.job_history import JobHistory
from spark_elastic.monitoring.report import WorldChange
from spark_elastic.monitoring.status import MOST_SLOTS, MOST_TEXT, exposition, pages, snapshot, text
from spark_elastic.protocol import driver_machine
from spark_elastic.protocol import events as on
from spark_elastic.protocol.commands import Publish
from spark_elastic.protocol.messages import DriverMessage, JoinWorld, RegisterSlot, WorkerStarted, WorldFormed
from spark_elastic.protocol.types import Limits
from spark_elastic.testing.fakes import FakeClock
from tests.simulator.stamping import stamp


def ignore(change: WorldChange) -> None:
    """Nobody listens."""


def job(workers: int) -> JobHistory:
    """A job whose first world stands, and whose rank 1 is stuck."""
    chronicle = JobHistory(0.0, ignore)
    state, _ = driver_machine.initial(Limits(workers, 1, workers), 1)
    world = None

    def play(played: on.DriverEvent | DriverMessage) -> None:
        nonlocal state, world
        event = stamp(played, 1.0)
        state, commands = driver_machine.step(state, event)
        chronicle.turn(event, commands, state)
        world = next((c.world for c in commands if isinstance(c, Publish)), world)

    for number in range(1, workers + 1):
        play(RegisterSlot(f"{number}-0", f"host-{number % 7}", number, "node"))
        play(WorkerStarted(f"{number}-0", f"{number}-0.1"))
        play(JoinWorld(f"{number}-0.1", None, None))
    assert world is not None
    for member in world.members:
        play(WorldFormed(member.worker, world.fence))
    stack = "rank 1 keeps others waiting\n" + "  File x\n" * MOST_TEXT
    play(on.WorkerStalled(0, world.members[1].worker, world.fence, stack))
    return chronicle


def test_a_snapshot_of_a_training_that_stands_still_has_no_speed() -> None:
    chronicle = job(2)
    for second in range(10):
        chronicle.heard(second, {"epoch": 0, "epochs": 1, "step": 10 * second, "steps": 1000, "rows": 64})
    seen = [snapshot(chronicle, "job", now) for now in (9.0, 60.0)]
    assert [one["rows_per_second"] for one in seen] == [640.0, 0.0]
    assert seen[0]["seconds_left"] is not None
    assert seen[1]["seconds_left"] is None
    assert b'spark_elastic_rows_per_second{job_name="job"} 0.0' in exposition(seen[1])


def test_a_snapshot_says_how_the_job_stands() -> None:
    chronicle = job(3)
    chronicle.heard(2.0, {"epoch": 0, "step": 4, "steps": 9, "loss": 0.5, "rows": 8, "auc": 0.9, "note": "x"})
    seen = json.loads(text(snapshot(chronicle, "job", 3.0)))
    assert (seen["stage"], seen["size"], seen["generation"]) == ("running", 3, 1)
    assert [slot["rank"] for slot in seen["slots"]] == [0, 1, 2]
    assert [slot["stuck"] for slot in seen["slots"]] == [False, True, False]
    assert {slot["status"] for slot in seen["slots"]} == {"running"}
    assert seen["stuck"][0]["text"].startswith("rank 1 keeps others waiting")
    assert seen["numbers"]["auc"] == 0.9
    assert "note" not in seen["numbers"]
    assert seen["curve"] == {"at": [2.0], "loss": [0.5], "rows": [0.0]}
    assert seen["changes"][0]["text"].startswith("world of 3: started in 1.00 s")


def test_a_large_job_makes_a_bounded_snapshot() -> None:
    seen = snapshot(job(MOST_SLOTS + 50), "job", 3.0)
    assert len(seen["slots"]) == MOST_SLOTS
    assert seen["more_slots"] == 50
    assert len(text(seen)) < 400_000


def test_a_job_that_has_not_begun_has_a_snapshot_too() -> None:
    seen = snapshot(JobHistory(0.0, ignore), "job", 1.0)
    assert (seen["stage"], seen["slots"]) == ("starting", [])
    assert b"spark_elastic_world_size" in exposition(seen)


def test_what_json_has_no_number_for_is_null() -> None:
    chronicle = job(2)
    chronicle.heard(2.0, {"step": 1, "loss": math.nan, "lr": math.inf})
    seen = json.loads(text(snapshot(chronicle, "job", 3.0)), parse_constant=lambda name: 1 / 0)
    assert (seen["numbers"]["loss"], seen["numbers"]["lr"], seen["curve"]["loss"]) == (None, None, [None])


def test_metrics_are_in_the_exposition_format() -> None:
    chronicle = job(3)
    chronicle.heard(2.0, {"epoch": 0, "step": 4, "loss": math.inf, "val_loss": 0.5})
    lines = exposition(snapshot(chronicle, 'a "job"\\', 3.0)).decode().splitlines()
    sample = re.compile(
        r'spark_elastic_\w+\{job_name="a \\"job\\"\\\\"(,\w+="[\w ]+")?\} (-?[\d.e+-]+|Inf|NaN)'
    )
    assert [line for line in lines if not line.startswith("#") and not sample.fullmatch(line)] == []
    assert 'spark_elastic_slots{job_name="a \\"job\\"\\\\",status="running"} 3.0' in lines
    assert 'spark_elastic_loss{job_name="a \\"job\\"\\\\"} Inf' in lines
    assert 'spark_elastic_reported{job_name="a \\"job\\"\\\\",name="val_loss"} 0.5' in lines
    typed = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(typed) == len(set(typed))


def test_the_page_needs_nothing_from_elsewhere() -> None:
    page = pages(JobHistory(0.0, ignore), "job", FakeClock())[""]
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
