from __future__ import annotations

import json
from pathlib import Path

from spark_elastic.driver.journal import Journal
from spark_elastic.protocol.commands import End, LaunchSlot, Outcome
from spark_elastic.protocol.events import CancelRequested, SlotBeat, SlotJobEnded, Tick


def test_the_story_leaves_out_what_changed_nothing() -> None:
    journal = Journal()
    journal.record(Tick(10.0), ())
    journal.record(SlotBeat(10.5, "1-0", "1-0.1", "R"), ())
    journal.record(Tick(11.0), (LaunchSlot("a worker is missing", 4, 0.5),))
    story = journal.story()
    assert [line.split()[:3] for line in story] == [
        ["1.000", "event", "Tick"],
        ["1.000", "command", "LaunchSlot"],
    ]
    assert "a worker is missing" in story[1]


def test_the_file_holds_every_field_of_an_entry(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(str(path))
    journal.record(SlotJobEnded(5.0, 3, "lost"), ())
    journal.record(CancelRequested(7.5, "enough"), (End("enough", Outcome.CANCELLED),))
    journal.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["at"], line["kind"], line["type"]) for line in lines] == [
        (0.0, "event", "SlotJobEnded"),
        (2.5, "event", "CancelRequested"),
        (2.5, "command", "End"),
    ]
    assert lines[0]["value"] == {"now": 5.0, "job": 3, "reason": "lost", "cancelled": False}
    assert lines[2]["value"]["outcome"] == "CANCELLED"
