"""Takes the pictures of docs/images: the status page in a headless browser, at four moments of a job.

The job's events are played to the real driver machine, and the page comes from a real server; no worker is needed. Each
picture is taken once the page shows what it is to show. Needs playwright (`pip install playwright`) and the system's
chromium or chromium-headless-shell: `PYTHONPATH=.:python python docs/screenshots.py`.
"""

from __future__ import annotations

import math
import shutil
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from spark_elastic.clock import SystemClock
from spark_elastic.observe.status_page import pages
from spark_elastic.protocol import events as on
from spark_elastic.rendezvous.server import Hooks, RendezvousServer
from spark_elastic.rendezvous.status_door import StatusDoor
from tests.unit.observe.test_chronicle import STARTED, Job

IMAGES = Path(__file__).parent / "images"
BROWSERS = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")
SHOWN = 10_000  # milliseconds until a page must show what is waited for
STACK = """  File "train.py", line 41, in step
    rows = next(batches)
  File "reader.py", line 88, in __next__
    return self._files[number].read()"""


class Played(Job):
    """Also a clock: of the played job, so that the page shows its time."""

    def trains(self, first: int, last: int) -> None:
        """Four steps a second."""
        for step in range(first, last):
            self.now += 0.25
            self.report(step, loss=0.2 + 2 * math.exp(-step / 30) + 0.03 * math.sin(step))
        for slot in list(self.state.slots.values()):
            self.on(on.SlotBeat(0, slot.slot, slot.worker or "", "S"))

    def joins(self, job: int, step: int) -> None:
        """A newcomer, for whom the world stops at a boundary."""
        self.comes(job)
        self.now += 0.1
        self.on(on.Tick(0))
        assert self.world is not None
        self.returns(step, planned=True)
        self.now += 0.2
        self.form()


def main() -> None:
    job, clock = Played(3), SystemClock()
    page_clock = type("PlayedClock", (SystemClock,), {"now": lambda self: STARTED + job.now})()
    door = StatusDoor(pages(job.chronicle, "digits", page_clock), clock)
    hooks = Hooks(lambda event: None, lambda lines: None)
    with RendezvousServer(bytes(32), 1, hooks, clock, door=door) as server, sync_playwright() as playwright:
        path = next(found for name in BROWSERS if (found := shutil.which(name)))
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        take(browser.new_page(viewport={"width": 1180, "height": 700}), job, door.url(server.url))
        in_a_frame(browser.new_page(), door.url(server.url))
        browser.close()


def take(page: Page, job: Played, url: str) -> None:
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    job.start([1, 2, 3])
    job.trains(1, 40)
    page.goto(url)
    shows(page, "3 of 3", "running", "39 / 100")
    assert "token" not in page.url, page.url
    page.reload()  # by the cookie alone
    shoot(page, "status-steady", "39 / 100")
    job.loses(2, step=40, regroup=0.4)
    job.form()
    job.trains(40, 46)
    shoot(page, "status-after-loss", "2 of 3", "1 of 3 lost, recovered in 0.40 s")
    job.on(on.SlotJobEnded(0, 2, "its host is lost"))
    job.joins(4, step=46)
    job.trains(46, 80)
    shoot(page, "status-recovered", "3 of 3", "1 joined in")
    assert job.world is not None
    text = f"rank 1 keeps rank 0 and 2 waiting for 3 s; its process is in state D\n{STACK}"
    job.on(on.WorkerStalled(0, job.world.members[1].worker, job.world.fence, text))
    shoot(page, "status-stuck", "Who keeps the others waiting", "reader.py")
    assert not complaints, complaints


def in_a_frame(page: Page, url: str) -> None:
    """As in a notebook of another origin, where the browser takes no cookie."""
    page.set_content(f'<iframe src="{url}" width="900" height="700"></iframe>')
    page.frame_locator("iframe").get_by_text("3 of 3").first.wait_for(timeout=SHOWN)


def shows(page: Page, *texts: str) -> None:
    for text in texts:
        page.get_by_text(text).first.wait_for(timeout=SHOWN)


def shoot(page: Page, name: str, *texts: str) -> None:
    shows(page, *texts)
    IMAGES.mkdir(exist_ok=True)
    page.screenshot(path=IMAGES / f"{name}.png")
    sys.stdout.write(f"{name}.png\n")


if __name__ == "__main__":
    main()
