"""The status page in a headless Chromium, at four moments of a job and once it is over: what a person sees.

It makes the pictures of docs/observing.md, too. The job's events are played to the real driver machine and the page
comes from a real server; no worker is needed. Needs what `nox -s browser` brings; SPARK_ELASTIC_PICTURES: the folder
that keeps the pictures.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spark_elastic.monitoring.report import save_page
from spark_elastic.protocol import events as on
from spark_elastic.protocol.messages import Heartbeat
from tests.component.rendezvous.driver_side import serve_pages
from tests.unit.monitoring.played_job import SimulatedJob

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: nox -s browser")
BROWSERS = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")
BROWSER = next((found for name in BROWSERS if (found := shutil.which(name))), None)
SHOWN = 10_000  # milliseconds until a page must show what is waited for
WIDTH, HEIGHT = 1180, 700
SIDES = ("right", "left"), ("bottom", "top")
INSIDE = (
    "[...document.querySelectorAll('.tile, section')].every(part => part.scrollWidth <= part.clientWidth)"
)
BOXES = (
    "[...document.querySelectorAll('.tile, section:not([hidden])')].map(part => part.getBoundingClientRect())"
)
# The text with the least contrast to what is behind it, as the WCAG counts it.
CONTRAST = r"""() => {
  const parse = color => color.match(/[\d.]+/g).map(Number);
  const linear = c => c / 255 <= .04045 ? c / 255 / 12.92 : ((c / 255 + .055) / 1.055) ** 2.4;
  const light = color => { const [r, g, b] = parse(color).map(linear); return .2126 * r + .7152 * g + .0722 * b; };
  const behind = e => { const color = parse(getComputedStyle(e).backgroundColor);
    return color.length === 4 && color[3] === 0 ? behind(e.parentElement) : getComputedStyle(e).backgroundColor; };
  const own = e => [...e.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
  const shown = [...document.body.querySelectorAll("*")].filter(e => own(e) && e.getClientRects().length);
  return Math.min(...shown.map(e => { const [a, b] = [light(getComputedStyle(e).color), light(behind(e))];
    return (Math.max(a, b) + .05) / (Math.min(a, b) + .05); }));
}"""
STACK = """  File "train.py", line 41, in step
    rows = next(batches)
  File "reader.py", line 88, in __next__
    return self._files[number].read()"""

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium: nox -s browser")


class SimulatedTraining(SimulatedJob):
    """Trains in played time, which the page's clock shows."""

    def train(self, first: int, last: int) -> None:
        """Four steps a second."""
        for step in range(first, last):
            self.now += 0.25
            self.report(step, loss=0.2 + 2 * math.exp(-step / 30) + 0.03 * math.sin(step))
        for slot in list(self.state.slots.values()):
            self.on(Heartbeat(slot.slot, slot.worker, "S"))

    def joins(self, job: int, step: int) -> None:
        """A newcomer, for whom the world stops at a boundary."""
        self.start_worker(job)
        self.now += 0.1
        self.on(on.Tick(0))
        assert self.world is not None
        self.leave_world(step, planned=True)
        self.now += 0.2
        self.form()


class BrowserPage:
    """One page of a browser, and everything that it complained of."""

    def __init__(self, page: Any, folder: Path) -> None:
        self.page = page
        self._folder = folder
        self.complaints: list[str] = []
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def expect_texts(self, *texts: str) -> None:
        for text in texts:
            self.page.get_by_text(text).first.wait_for(timeout=SHOWN)

    def save_screenshot(self, name: str) -> None:
        self.page.screenshot(path=self._folder / f"{name}.png")

    def fits(self) -> bool:
        """Nothing sticks out to the side, and no part lies over another or out of its frame."""
        boxes = self.page.evaluate(BOXES)
        apart = all(
            any(one[end] <= two[begin] for one, two in ((a, b), (b, a)) for end, begin in SIDES)
            for i, a in enumerate(boxes)
            for b in boxes[:i]
        )
        width = self.page.viewport_size["width"]
        inside = self.page.evaluate(INSIDE) and all(box["right"] <= width for box in boxes)
        return len(boxes) > 10 and apart and inside

    def read_curve(self, chart: str) -> list[tuple[float, float]]:
        points = self.page.locator(f"#{chart} polyline").get_attribute("points")
        return [(float(x), float(y)) for x, y in (point.split(",") for point in points.split())]


@pytest.fixture
def job() -> SimulatedTraining:
    return SimulatedTraining(3)


@pytest.fixture
def url(job: SimulatedTraining) -> Iterator[str]:
    with serve_pages(job.history) as (server, status_app):
        yield status_app.url(server.url)


@pytest.fixture
def screen(tmp_path: Path) -> Iterator[BrowserPage]:
    folder = Path(os.environ.get("SPARK_ELASTIC_PICTURES", tmp_path))
    with playwright.sync_playwright() as player:
        browser = player.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield BrowserPage(browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}), folder)
        browser.close()


def test_the_page_at_four_moments_of_a_job(job: SimulatedTraining, url: str, screen: BrowserPage) -> None:
    job.begin([1, 2, 3])
    job.train(1, 40)
    screen.page.goto(url)
    screen.expect_texts("3 of 3", "running", "39 / 100")
    assert "token" not in screen.page.url
    screen.page.reload()  # by the cookie alone
    screen.expect_texts("39 / 100")
    assert screen.fits()
    loss = screen.read_curve("loss")
    assert loss[0][1] < loss[-1][1], "the loss falls, and y grows downwards"
    screen.save_screenshot("status-steady")

    job.lose_host(2, step=40, regroup=0.4)
    job.form()
    job.train(40, 46)
    screen.expect_texts("2 of 3", "1 of 3 lost, recovered in 0.40 s")
    assert screen.page.locator("#world .mark").count() == 1
    assert screen.fits()
    screen.save_screenshot("status-after-loss")

    job.on(on.LaunchEnded(0, 2, "its host is lost"))
    job.joins(4, step=46)
    job.train(46, 80)
    screen.expect_texts("3 of 3", "1 joined in")
    assert len({y for _, y in screen.read_curve("world")}) == 2, "two and three workers"
    screen.save_screenshot("status-recovered")

    assert job.world is not None
    text = f"rank 1 keeps rank 0 and 2 waiting for 3 s; its process is in state D\n{STACK}"
    job.on(on.WorkerStalled(0, job.world.members[1].worker, job.world.fence, text))
    screen.expect_texts("Stalled workers, which keep the others waiting", "reader.py")
    assert screen.fits()
    screen.save_screenshot("status-stuck")
    assert not screen.complaints


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("workers", [3, 200])
def test_the_page_is_readable_in_any_scheme_width_and_number_of_workers(
    workers: int, width: int, scheme: str, screen: BrowserPage, tmp_path: Path
) -> None:
    job = SimulatedTraining(workers)
    job.begin(range(1, workers + 1))
    job.train(1, 40)
    job.lose_host(2, step=40, regroup=0.4)
    job.form()
    job.on(on.LaunchEnded(0, 2, "its host is lost"))
    job.joins(workers + 1, step=46)
    job.train(46, 101)
    assert job.world is not None
    job.on(on.WorkerStalled(0, job.world.members[-1].worker, job.world.fence, STACK))
    history = [
        {"epoch": number, "rows": 1000, "steps": 20, "loss": 1 / (number + 1), "val_loss": 1.2 / (number + 1)}
        for number in range(5)
    ]
    screen.page.emulate_media(color_scheme=scheme)
    screen.page.set_viewport_size({"width": width, "height": 900})
    for page in (
        save_page(job.history.build_status("application_1700000000000_0042-digits")),
        job.result.with_rows(history, 1000).to_html("digits"),
    ):
        file = tmp_path / "page.html"
        file.write_text(page)
        screen.page.goto(file.as_uri())
        screen.expect_texts("recovery p50")
        assert screen.fits()
        assert screen.page.evaluate("document.documentElement.scrollWidth") <= width
        assert screen.page.evaluate("document.documentElement.scrollHeight") < 2600
        assert screen.page.evaluate(CONTRAST) > 4.5
    screen.expect_texts("training 0.2", "validation 0.24", "epochs 1 to 5")
    assert screen.page.locator("#by-epoch .mark").count() == 2
    assert not screen.complaints


def test_a_notebooks_frame_shows_the_page_of_a_report(screen: BrowserPage) -> None:
    job = SimulatedTraining(3)
    job.begin([1, 2, 3])
    job.train(1, 40)
    screen.page.set_content(f"<body>{job.result._repr_html_()}</body>")
    screen.page.frame_locator("iframe").get_by_text("rows/s").first.wait_for(timeout=SHOWN)
    assert not screen.complaints


def test_in_a_frame_of_another_origin_where_the_browser_takes_no_cookie(
    job: SimulatedTraining, url: str, screen: BrowserPage
) -> None:
    job.begin([1, 2, 3])
    screen.page.set_content(f'<iframe src="{url}" width="900" height="700"></iframe>')
    screen.page.frame_locator("iframe").get_by_text("3 of 3").first.wait_for(timeout=SHOWN)


def test_the_page_shows_that_the_server_is_gone(job: SimulatedTraining, screen: BrowserPage) -> None:
    job.begin([1, 2, 3])
    with serve_pages(job.history) as (server, status_app):
        screen.page.goto(status_app.url(server.url))
        screen.expect_texts("3 of 3")
    screen.expect_texts("the job is over, or the driver cannot be reached")
