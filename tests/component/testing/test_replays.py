"""A real job's journal: what its driver decided, it decides again, and the id of an event tells what followed."""

from __future__ import annotations

import os
import re
import signal
import urllib.request
from pathlib import Path

import pytest

from spark_elastic.protocol.commands import AbortWorld, End, PublishWorld
from spark_elastic.testing import replay
from tests.component.worker.losses import Job
from tests.component.worker.moments import HeldProgram


class WatchedJob(Job):
    """Knows the address of its status page."""

    url = ""

    def on_message(self, text: str) -> None:
        if text.startswith("the status page"):
            self.url = text.split()[-1]

    def read_status(self) -> str:
        with urllib.request.urlopen(self.url.replace("/?token", "/data?token"), timeout=20) as answer:
            return str(answer.read(), "utf-8")


def test_a_real_jobs_journal_tells_its_story(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "spark_elastic.driver")
    path, page = tmp_path / "journal", list[str]()
    job = WatchedJob(HeldProgram(steps=15, seconds=0.02), size=2)
    job.act_at_step(5, lambda: os.kill(job.workers()[1].pid, signal.SIGKILL))
    job.act_at_world(2, lambda: page.append(job.read_status()))
    result = job.run()
    path.write_text("".join(job.journal))
    (loss,) = [line for line in job.journal if '"AbortWorld"' in line]
    (event,) = re.findall(r'"event":\{"type":"\w+","now":[\d.]+,"id":"(e\d+)"', loss)
    story = re.compile(rf"\b{event}\b")
    journal, log = ("\n".join(filter(story.search, lines)) for lines in (job.journal, caplog.messages))
    assert re.search(rf"is lost: [^\"]* \({event}[,)]", journal)
    for told in (journal, log):
        assert re.search(r"AbortWorld.*PublishWorld", told, re.DOTALL), "the loss, then the new world"
        assert re.search(r"world 2, of [12] worker", told), "a spare may be there at once"
    assert [
        text
        for text in re.findall(r'"text":"(.*?)"', page[0])
        if story.search(text) and "1 of 2 lost" in text
    ]
    again = replay(path)
    said = [command for entry in again.entries for command in entry.commands]
    assert [c.world.size for c in said if isinstance(c, PublishWorld)] == [
        world.size for world in result.worlds
    ]
    assert sum(isinstance(c, AbortWorld) for c in said) == 1
    ends = [c for c in said if isinstance(c, End)]
    assert [end.results for end in ends] == [result.results]
    again.as_test()
