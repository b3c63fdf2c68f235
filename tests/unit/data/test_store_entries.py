"""What a store holds and what may go, over files and over memory."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from spark_elastic.clusters import store_cli
from spark_elastic.data.store import Store, list_entries, remove_old_entries
from spark_elastic.errors import InvalidInput, StoreError
from spark_elastic.protocol.types import Checkpoint, Fence, Phase, Position
from spark_elastic.runs.checkpoint import OwnedRun

OLD, READ = "0" * 32, "f" * 32  # data sets
ENDED = "[*op]*"  # a run whose name is a pattern of "open"
FOREIGN = ("data/raw/rows.csv", "runs/Nov28_12-00/events.out", "runs/other/run.json", "probes/a/b")
LATER = 4e9  # seconds since 1970: long after anything that a test writes


@pytest.fixture(params=["file", "memory"])
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return Store.open(str(tmp_path) if request.param == "file" else f"memory://{uuid.uuid4().hex}")


@pytest.fixture
def store(empty: Store) -> Store:
    fill(empty)
    return empty


def names(entries: Iterable[Any]) -> list[str]:
    return [entry.name for entry in entries]


def fill(store: Store) -> None:
    def run(name: str, rows: str) -> None:
        manifest = json.dumps({"files": [rows]})
        store.write_bytes(f"runs/{name}/attempts/000001", b"")
        store.write_bytes(f"runs/{name}/run.json", json.dumps({"rows": {"manifest": manifest}}).encode())

    for name in (OLD, READ):
        store.write_bytes(f"data/{name}/x/part.parquet", b"123")
        store.write_bytes(f"data/{name}/manifest.json", b"45")
    run(ENDED, f"data/{OLD}/x/part.parquet")
    store.write_bytes(f"runs/{ENDED}/result.json", b"{}")
    run("open", f"data/{READ}/x/part.parquet")
    store.write_bytes("somebody/else's", b"1")
    for name in FOREIGN:
        store.write_bytes(name, b"another program's")


def test_data_of_an_unfinished_run_stays(store: Store) -> None:
    assert [(each.name, each.needed) for each in list_entries(store)] == [
        (f"data/{OLD}", False),
        (f"data/{READ}", True),
        (f"runs/{ENDED}", False),
        ("runs/open", True),
    ]
    assert list_entries(store)[0].bytes == 5
    assert not remove_old_entries(store, 3600, 0.0), "nothing is so old"
    assert not store.clean(older_than=3600), "by the clock, nothing is"
    assert names(remove_old_entries(store, 3600, LATER)) == [f"data/{OLD}", f"runs/{ENDED}"]
    assert names(remove_old_entries(store, 3600, LATER, unfinished=True)) == [f"data/{READ}", "runs/open"]
    assert not list_entries(store)
    assert names(store.find()) == sorted([*FOREIGN, "somebody/else's"])


def test_a_run_without_a_record_is_unfinished_until_its_last_job_has_succeeded(store: Store) -> None:
    run = OwnedRun.acquire(store, "mine")

    def is_unfinished() -> bool:
        return next(each.needed for each in list_entries(store) if each.name == "runs/mine")

    assert not is_unfinished(), "without a checkpoint there is nothing to continue from"
    run.publish_now((Checkpoint(Fence(1, 1), Position(0, Phase.TRAIN, 5), "c", "d"),))
    assert is_unfinished()
    assert "runs/mine" not in names(remove_old_entries(store, 3600, LATER))
    run.mark_ended()
    assert not is_unfinished()
    continued = OwnedRun.acquire(store, "mine")
    assert continued.attempt == 2
    assert is_unfinished(), "a job with more steps has begun"
    run.mark_ended()
    assert is_unfinished(), "another driver owns the run"
    continued.mark_ended()
    assert "runs/mine" in names(remove_old_entries(store, 3600, LATER))


def test_files_of_a_killed_writer_are_listed_and_removed(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path))
    fill(store)
    half, checksum = f".part-{'0a' * 16}", ".part-00000-0a.c000.snappy.parquet.crc"
    for name in (f"runs/{ENDED}/{half}", f"runs/open/{half}", f"somebody/{half}", f"data/raw/{checksum}"):
        (tmp_path / name).write_bytes(b"half a model")
    partial = [entry for entry in list_entries(store) if entry.kind == "partial"]
    ours = [f"runs/{ENDED}/{half}", f"runs/open/{half}"]
    assert [(entry.name, entry.bytes) for entry in partial] == [(name, 12) for name in ours]
    removed = names(remove_old_entries(store, 3600, LATER))
    assert removed == [*ours, f"data/{OLD}", f"runs/{ENDED}"]
    left = {path.parent.name: path.name for path in tmp_path.rglob(".part-*")}
    assert left == {"raw": checksum, "somebody": half}


LEFT_BY_A_KILLED_JOB = (
    *(
        f"data/{OLD}/{READ}/_temporary/0/part.parquet",
        f"data/{OLD}/validation.json",
        "runs/mine/attempts/000001",
    ),
    *("runs/mine/checkpoints/published-000001-00000001.json", "runs/mine/logs/000001-000001.log"),
    *("runs/mine/status/000001.html", f"probes/{OLD}", f"probes/{OLD}/driver", f"channels/{OLD}/1"),
)
OF_OTHER_PROGRAMS = (
    *("data", f"data/{OLD}", f"data/{OLD}/photo.png", "runs/mine/attempts/1"),  # the first two are files
    *("runs/mine/logs/000001_loss.png", "runs/mine/checkpoints/000001.pt", "runs/mine/model-000001.pt"),
    "channels/1/a",
)


@pytest.mark.parametrize("name", [*LEFT_BY_A_KILLED_JOB, *OF_OTHER_PROGRAMS])
def test_what_a_killed_job_has_left_is_removed_and_what_others_keep_stays(empty: Store, name: str) -> None:
    empty.write_bytes(name, b"1")
    removed = remove_old_entries(empty, 3600, LATER, unfinished=True)
    assert len(removed) == (name in LEFT_BY_A_KILLED_JOB)
    assert names(empty.find()) == ([] if removed else [name])


@pytest.mark.parametrize("name", ["runs/mine", f"probes/{OLD}", "runs/mine/rows/a", "runs/mine/up"])
def test_a_deletion_follows_no_symbolic_link(tmp_path: Path, name: str) -> None:
    store, precious = Store.open(tmp_path / "jobs"), tmp_path / "precious"
    Store.open(precious).write_bytes("attempts/000001", b"1")
    store.write_bytes("runs/other/attempts/000001", b"1")
    link = tmp_path / "jobs" / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(".." if name.endswith("up") else precious)
    remove_old_entries(store, 3600, LATER, unfinished=True)
    store.remove_tree(name)
    assert (precious / "attempts/000001").exists()
    assert not store.find("runs")


def test_a_damaged_run_record_is_an_error(store: Store) -> None:
    store.write_bytes("runs/open/run.json", b"{")
    with pytest.raises(StoreError, match=r"runs/open/run\.json .* is damaged"):
        list_entries(store)


def test_the_command_line_lists_and_removes_entries(tmp_path: Path) -> None:
    fill(Store.open(str(tmp_path)))
    listed = CliRunner().invoke(store_cli.group, ["store", "ls", str(tmp_path)])
    assert [line.split()[-2:] for line in listed.output.splitlines()][1] == [f"data/{READ}", "unfinished"]
    cleaned = CliRunner().invoke(store_cli.group, ["store", "clean", str(tmp_path), "--older-than", "0s"])
    assert cleaned.output.endswith("removed 2, 104 bytes\n"), cleaned.output
    words = ["store", "clean", str(tmp_path), "--older-than", "1d", "--unfinished"]
    kept = CliRunner().invoke(store_cli.group, words)
    assert kept.output == "removed 0, 0 bytes\n"


@pytest.mark.parametrize("command", [("ls",), ("clean", "--older-than", "1d")])
def test_a_folder_that_does_not_exist_is_no_empty_store(tmp_path: Path, command: tuple[str, ...]) -> None:
    done = CliRunner().invoke(store_cli.group, ["store", *command, str(tmp_path / "jbos")])
    assert isinstance(done.exception, InvalidInput)
    assert str(done.exception).startswith(f"there is no folder {tmp_path}/jbos: ")


def test_ages_are_parsed() -> None:
    assert [store_cli.parse_age(text) for text in ("90s", "1.5h", "2w")] == [90, 5400, 14 * 86400]
    with pytest.raises(InvalidInput, match="as in 30d"):
        store_cli.parse_age("soon")
    wrong: Any
    for wrong in (-1, None, "1d", float("nan")):
        with pytest.raises(InvalidInput, match="older_than must be a number of seconds, 0 or more; got"):
            remove_old_entries(Store.open("memory://empty"), wrong, LATER)


def test_an_option_of_the_store_without_a_value_is_refused(tmp_path: Path) -> None:
    listed = CliRunner().invoke(store_cli.group, ["store", "ls", str(tmp_path), "--option", "endpoint_url"])
    assert isinstance(listed.exception, InvalidInput)
    assert "--option takes NAME=VALUE; got 'endpoint_url'" in str(listed.exception)


def test_an_option_of_the_store_is_json_or_else_text(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    there = Store.open("memory://b")
    monkeypatch.setattr(Store, "open", lambda url, **options: given.update(options) or there)
    words = ("retry_seconds=30", "anon=false", "profile=me", 'account="12"', "key=a=b", "empty=")
    store_cli._open_existing("s3://b", words)
    texts = {"profile": "me", "account": "12", "key": "a=b", "empty": ""}
    assert given == {"retry_seconds": 30, "anon": False, **texts}
