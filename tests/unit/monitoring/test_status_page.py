"""What the pages hold: a page that needs nothing from elsewhere, data of bounded size, metrics that parse."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from spark_elastic.monitoring.job_history import (
    LOST_SECONDS,
    MAX_SLOTS,
    JobHistory,
    build_status_pages,
    format_prometheus,
)
from spark_elastic.monitoring.report import MAX_TEXT, JobReport, encode_json, read_page, save_page
from spark_elastic.protocol import events as on
from spark_elastic.testing.fakes import FakeClock
from tests.unit.monitoring.played_job import SimulatedJob

# As much of a browser as the page's script uses.
DOCUMENT = """
const make_element = () => ({
  textContent: "", className: "", children: [], style: {}, dataset: {}, attributes: {},
  append(...added) { this.children.push(...added); }, prepend(added) { this.children.unshift(added); },
  replaceChildren(...added) { this.children = added; }, setAttribute(name, value) { this.attributes[name] = value; },
});
const elements = {}, location = { search: "" };
const document = {
  body: make_element(), createElement: make_element, createElementNS: make_element,
  getElementById: name => elements[name] ??= make_element(),
};
"""


def create_job(workers: int) -> SimulatedJob:
    """A job whose first world stands, and whose rank 1 is stuck."""
    job = SimulatedJob.training(workers)
    assert job.world is not None
    stack = "rank 1 keeps others waiting\n" + "  File x\n" * MAX_TEXT
    job.on(on.WorkerStalled(0, job.world.members[1].worker, job.world.fence, stack))
    return job


def read_status(job: SimulatedJob) -> dict[str, Any]:
    return job.history.build_status("job")


def test_the_status_of_a_training_without_reports_has_no_throughput() -> None:
    job = create_job(2)
    for second in range(10):
        job.now += 1.0
        job.report(10 * second, steps=1000, rows=64)
    seen = [read_status(job)]
    job.now += 51.0
    seen.append(read_status(job))
    assert [one["rows_per_second"] for one in seen] == [640.0, 0.0]
    assert seen[0]["seconds_left"] is not None
    assert seen[1]["seconds_left"] is None
    assert b'spark_elastic_rows_per_second{job_name="job"} 0.0' in format_prometheus(seen[1])


def test_a_loop_that_counts_no_rows_has_no_rows_per_second() -> None:
    job = create_job(2)
    job.history.on_progress({"step": 10, "loss": 0.5})
    found = format_prometheus(read_status(job))
    assert b"spark_elastic_step{" in found
    assert b"spark_elastic_rows_per_second{" not in found


def test_a_slot_that_is_gone_stays_on_the_page_for_a_while_with_the_reason() -> None:
    job = create_job(3)
    job.on(on.LaunchEnded(0, 2, "executor 7 was lost: SIGKILL", executor_lost=True))
    (gone,) = read_status(job)["lost_slots"]
    assert (gone["host"], gone["worker"], gone["rank"]) == ("host-2", "2-0.1", 1)
    assert "executor 7 was lost: SIGKILL" in gone["reason"]
    job.now += LOST_SECONDS + 1.0
    assert not read_status(job)["lost_slots"]


def test_the_status_describes_stage_slots_and_metrics() -> None:
    job = create_job(3)
    job.now = 2.0
    job.history.on_progress(
        {"epoch": 0, "step": 4, "steps": 9, "loss": 0.5, "rows": 8, "auc": 0.9, "note": "x", "done": True}
    )
    job.now = 3.0
    seen = json.loads(encode_json(read_status(job)))
    assert (seen["stage"], seen["size"], seen["generation"]) == ("running", 3, 1)
    assert [slot["rank"] for slot in seen["slots"]] == [0, 1, 2]
    assert [slot["stalled"] for slot in seen["slots"]] == [False, True, False]
    assert {slot["status"] for slot in seen["slots"]} == {"running"}
    assert seen["stalled"][0]["text"].startswith("rank 1 keeps others waiting")
    assert seen["metrics"]["auc"] == 0.9
    assert not {"note", "done"} & seen["metrics"].keys()
    assert seen["epochs"] == []
    assert seen["curve"] == {"at": [2.0], "loss": [0.5], "rows": [0.0]}
    assert any(event["text"].startswith("world of 3: started in 1.00 s") for event in seen["events"])


def test_a_loss_is_one_event_of_the_page_with_its_cost() -> None:
    job = SimulatedJob.training(3)
    job.lose_host(2, step=4, regroup=0.4)
    broken = [event["text"] for event in read_status(job)["events"]]
    assert [text for text in broken if "world" in text][-1].startswith("world of 2: 1 of 3 lost")
    job.form()
    texts = [event["text"] for event in read_status(job)["events"]]
    assert len([text for text in texts if "lost" in text and "world" in text]) == 1
    assert [text for text in texts if text.startswith(("publish world", "abort world", "world broken"))] == []
    assert "1 of 3 lost, recovered in 0.40 s" in "".join(texts)


def test_the_page_of_a_report_holds_its_data_and_needs_no_server() -> None:
    job = SimulatedJob.training(2)
    job.now += 1.0
    job.report(3, loss=0.125)
    job.lose_host(2, step=4, regroup=0.4)
    job.form()
    report = JobReport.from_json(job.result.to_json())
    page = report.to_html("</script><b>mine")
    head, _, rest = page.partition('<script type="application/json" id="saved">')
    data = json.loads(rest.partition("</script>")[0])
    assert head + rest.partition("</script>\n")[2] == read_page().decode()
    assert (data["name"], data["curve"]["loss"]) == ("</script><b>mine", [0.125])
    assert data["report"]["recoveries"] == 1
    assert "1 of 2 lost" in data["events"][-1]["text"]


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_script_of_the_page_shows_a_saved_report(tmp_path: Path) -> None:
    job = SimulatedJob(2)
    job.now = 30.0
    job.begin([1, 2])
    for step in range(20):
        job.now += 0.5
        job.report(step, loss=118.9 * 0.6**step, a_very_large_number=4.25e12)
    shown = run_script(save_page(job.history.build_status("mine")), tmp_path)
    assert shown["times"] == "–,1 min 0 s,2 min 0 s,28 min 0 s,1 h 0 min,2 h 0 min"
    assert find_text(shown["name"]) == "mine"
    assert find_text(shown["loss-title"]) == "Loss (logarithmic scale)"
    assert "4.25e+12" in find_text(shown["tiles"]), "short enough for its tile"
    assert "world of 2: started in 31.00 s" in find_text(shown["events"])
    points = shown["loss"]["children"][-1]["attributes"]["points"].split()
    lefts, heights = zip(*(map(float, point.split(",")) for point in points), strict=True)
    drops = [after - before for before, after in itertools.pairwise(heights)]
    assert min(drops) > 0.8 * max(drops), "an exponential loss falls as a straight line"
    assert lefts[0] < 60, "the start-up of 30 s takes no room"


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_script_of_the_page_shows_training_and_validation_by_epoch(tmp_path: Path) -> None:
    job = SimulatedJob.training(2)
    for step in range(1, 101):
        job.now += 0.1
        job.report(step)
    job.lose_host(2, step=100, regroup=0.4)
    job.form()
    figures = [(0.5, 0.75, 0.1), (0.25, 0.5, 0.05)]
    history = [
        {"epoch": n, "rows": 9, "planned": 10, "steps": 100, "loss": loss, "val_loss": val, "learning_rate": rate}
        for n, (loss, val, rate) in enumerate(figures)
    ]  # fmt: skip
    shown = run_script(job.result.with_rows(history, 10).to_html(), tmp_path)
    loss, rate = shown["by-epoch"]["children"]
    texts = [find_text(box) for box in (loss, rate)]
    assert "loss by epoch 0.25 to 0.75" in texts[0]
    assert "training 0.25 validation 0.5 epochs 1 to 2" in texts[0]
    assert "last 0.05 epochs 1 to 2" in texts[1]
    drawn = [child["attributes"] for child in loss["children"][1]["children"]]
    (mark,) = [line["x1"] for line in drawn if line["class"] == "mark loss"]
    assert mark == 150, "the worker was lost at the end of the first of two epochs, of 300 units"
    curves = {line["class"]: line["points"] for line in drawn if "points" in line}
    assert curves == {"curve training": "150.0,50.0 300.0,96.0", "curve validation": "150.0,4.0 300.0,50.0"}
    assert "rows missing 2 rows twice 0" in find_text(shown["tiles"])


def run_script(page: str, folder: Path) -> dict[str, Any]:
    """The elements of the page by their id, once its script has run; and "times", which it has formatted."""
    data, script = re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL)
    program = folder / "page.js"
    saved = f"elements.saved = make_element(); elements.saved.textContent = {json.dumps(data)};"
    tail = "elements.times = [null, 59.96, 119.7, 1679.9, 3599.6, 7199].map(time).join();"
    program.write_text(f"{DOCUMENT}\n{saved}\n{script}\n{tail}\nconsole.log(JSON.stringify(elements));\n")
    done = subprocess.run(["node", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def find_text(element: dict[str, Any]) -> str:
    """Of a chart's heading or scale the parts are read in their order."""
    parts = [element["textContent"], *(find_text(child) for child in element["children"])]
    return " ".join(" ".join(map(str, parts)).split())


def test_the_status_of_a_large_job_is_bounded() -> None:
    seen = read_status(create_job(MAX_SLOTS + 50))
    assert len(seen["slots"]) == MAX_SLOTS
    assert seen["more_slots"] == 50
    assert len(encode_json(seen)) < 400_000
    assert f'status="running"}} {MAX_SLOTS + 50}.0' in format_prometheus(seen).decode()


def test_a_job_that_has_not_begun_has_a_status() -> None:
    seen = JobHistory(FakeClock()).build_status("job")
    assert (seen["stage"], seen["slots"]) == ("starting", [])
    assert b"spark_elastic_world_size" in format_prometheus(seen)


def test_infinities_and_nan_are_null_in_the_status() -> None:
    job = create_job(2)
    job.history.on_progress({"step": 1, "loss": math.nan, "lr": math.inf})
    seen = json.loads(encode_json(read_status(job)), parse_constant=lambda name: 1 / 0)
    assert (seen["metrics"]["loss"], seen["metrics"]["lr"], seen["curve"]["loss"]) == (None, None, [None])


def test_metrics_have_the_prometheus_text_format() -> None:
    job = create_job(3)
    job.history.on_progress({"epoch": 0, "step": 4, "loss": math.inf, "val_loss": 0.5})
    lines = format_prometheus(job.history.build_status('a "job"\\')).decode().splitlines()
    number = r"(-?[\d.e+-]+|Inf|NaN)"
    sample = re.compile(r'spark_elastic_\w+\{job_name="a \\"job\\"\\\\"(,\w+="[\w ]+")?\} ' + number)
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
    policy = r"default-src 'none'; script-src 'sha256-\S{44}'; style-src 'sha256-\S{44}'; .*"
    assert re.fullmatch(policy, page.policy)
