"""What workers print, in parts in the store: whole, bounded, and no worry of the job's."""

from __future__ import annotations

import pytest

from spark_elastic.data.store import Store
from spark_elastic.errors import StoreError
from spark_elastic.monitoring import logs as log_files
from spark_elastic.monitoring.logs import MAX_PENDING_PARTS, StoreLog
from spark_elastic.testing.fakes import FakeClock
from tests.memory_store import make_memory_store


def _read_logs(store: Store) -> list[tuple[str, str]]:
    return [(found.name, store.read_bytes(found.name).decode()) for found in store.find("runs/r/logs")]


def test_each_kept_line_has_time_worker_and_rank() -> None:
    store = make_memory_store()
    files = StoreLog(store, "r", 3, 1 << 20, FakeClock(wall=0.25))
    files.on_output("", None, "importing")
    files.on_output("0-0.1", 1, "one")
    files.on_output("0-0.1", 1, "two caf\udce9")
    files.start()
    files.close()
    assert _read_logs(store) == [
        (
            "runs/r/logs/000003-000001.log",
            "1970-01-01T00:00:00.250+00:00 - [-] importing\n"
            "1970-01-01T00:00:00.250+00:00 0-0.1 [1] one\n"
            "1970-01-01T00:00:00.250+00:00 0-0.1 [1] two caf?\n",
        )
    ]


def test_the_oldest_parts_are_deleted_and_the_newest_are_kept() -> None:
    store = make_memory_store()
    files = StoreLog(store, "r", 1, 4000, FakeClock())
    for number in range(200):
        files.on_output("0-0.1", 0, f"line {number}.")
        files._write()
    files.start()
    files.close()
    names, texts = zip(*_read_logs(store), strict=True)
    assert sum(map(len, texts)) <= 4000
    assert "line 199." in texts[-1]
    assert "line 0." not in "".join(texts)
    assert "".join(texts).count("line") >= 40, "the newest fill what there is room for"
    assert names == tuple(sorted(names))


def test_a_growing_part_is_one_object() -> None:
    store = make_memory_store()
    files = StoreLog(store, "r", 1, 1 << 20, FakeClock())
    for text in ("one", "two"):
        files.on_output("0-0.1", 0, text)
        files._write()
    ((_, text),) = _read_logs(store)
    assert text.splitlines()[1].endswith("two")


def test_lines_that_found_no_room_last_are_counted_at_the_end() -> None:
    store = make_memory_store()
    files = StoreLog(store, "r", 1, 4000, FakeClock())
    for number in range(MAX_PENDING_PARTS + 3):
        files.on_output("0-0.1", 0, f"{number} {'x' * 1000}")
    files.start()
    files.close()
    assert _read_logs(store)[-1][1].endswith(" - [-] 3 lines are missing: the store was too slow\n")


@pytest.mark.parametrize("error", [StoreError("The store is away."), MemoryError()])
def test_a_store_that_fails_costs_one_warning_and_then_lines(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What finds no room in memory is counted, and told once the store is back."""
    store, working = make_memory_store(), False
    write = Store.write_bytes

    def write_or_fail(self: Store, name: str, data: bytes) -> None:
        if not working:
            raise error
        write(self, name, data)

    monkeypatch.setattr(Store, "write_bytes", write_or_fail)
    monkeypatch.setattr(log_files, "WRITE_INTERVAL", 0.001)
    files = StoreLog(store, "r", 1, 400, FakeClock())
    for number in range(30):
        files.on_output("0-0.1", 0, f"{number} {'x' * 100}")
    with pytest.raises(type(error)):
        files._write()
    working = True
    files._write()
    files.on_output("0-0.1", 0, "back")
    files.start()
    files.close()
    assert " lines are missing: the store was too slow\n" in _read_logs(store)[-1][1]
    working = False
    for _ in range(2):
        files = StoreLog(store, "r", 1, 400, FakeClock())
        files.on_output("0-0.1", 0, "lost")
        files.start()
        files.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
