"""Over a SparkContext: what becomes of executors, how long probes are waited for, what is sent and said of our jobs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
from py4j.protocol import Py4JError

from spark_elastic.clusters.spark import classic
from spark_elastic.clusters.spark.classic import PACKAGES, ExecutorWatch, SparkLauncher
from spark_elastic.clusters.spark.host_facts import DESCRIPTION
from spark_elastic.errors import InvalidInput, JobCancelled, PreflightError
from spark_elastic.estimators.dataframes.materialize import _describe_source
from spark_elastic.estimators.dataframes.store_access import check_store_access
from spark_elastic.protocol.events import DriverEvent, HostAppeared, HostLost
from spark_elastic.protocol.types import SlotSpec
from spark_elastic.testing.fakes import FakeClock
from tests.memory_store import make_memory_store

# ---- executors


class Backend:
    """Of a scheduler whose executors differ from look to look; the last ones stay."""

    def __init__(self, *looks: set[str] | Exception) -> None:
        self._looks = list(looks)

    def getExecutorIds(self) -> Any:
        look = self._looks.pop(0) if len(self._looks) > 1 else self._looks[0]
        if isinstance(look, Exception):
            raise look
        ids = sorted(look)
        return SimpleNamespace(size=lambda: len(ids), apply=ids.__getitem__)

    def isExecutorActive(self, host: str) -> bool:
        return True


def test_executors_of_the_first_poll_are_not_posted_and_later_ones_are_whatever_a_poll_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = Backend({"1", "2"}, {"1", "2"}, MemoryError(), {"2", "3"})
    java = SimpleNamespace(schedulerBackend=lambda: backend)
    context: Any = SimpleNamespace(_jsc=SimpleNamespace(sc=lambda: java), master="yarn")
    monkeypatch.setattr(classic, "POLL_EVERY", 0.001)
    posted: SimpleQueue[DriverEvent] = SimpleQueue()
    watch = ExecutorWatch(context, FakeClock())
    watch.start(posted.put)
    try:
        events = [posted.get(timeout=30.0) for _ in range(2)]
    finally:
        watch.close()
    assert events == [HostAppeared(0.0, "3"), HostLost(0.0, "1", "Spark lost executor 1")]
    assert posted.empty()


class DeniedGateway:
    """Any method of it is refused at its call."""

    def __getattr__(self, name: str) -> Any:
        def refuse(*arguments: Any) -> None:
            raise Py4JError(f"\nPy4JSecurityException: Method {name}() is not whitelisted")

        return refuse


def test_where_py4j_is_refused_jobs_do_without_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "spark_elastic.spark")
    context: Any = SimpleNamespace(
        _jsc=SimpleNamespace(sc=DeniedGateway), defaultParallelism=3, master="yarn"
    )
    watch = ExecutorWatch(context, FakeClock())
    watch.start(lambda event: None)
    watch.close()
    (said,) = caplog.messages
    assert "schedulerBackend() is not whitelisted" in said
    assert said.endswith("hosts are known by their slots' registrations alone")
    assert classic._count_live_executors(context) == 3, "as many probes as cores"

    frame: Any = SimpleNamespace(_jdf=DeniedGateway())
    assert _describe_source(frame) != _describe_source(frame), "its plan is never the same"


# ---- probes


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        (
            "Job aborted: Lost task 0.0 in stage 0.0 (TID 0) (10.0.0.7 executor 1): PythonException: Traceback\n"
            "[PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.10 than that in driver: 3.11, "
            "PySpark cannot run with different minor versions.",
            PreflightError,
            "host 10.0.0.7 has python 3.10, and the driver has 3.11: set PYSPARK_PYTHON to the same",
        ),
        ("Job 3 cancelled part of cancelled job group g", JobCancelled, ""),
        ("disk full", RuntimeError, "disk full"),
    ],
)
def test_errors_of_spark_are_translated(text: str, kind: type[Exception], says: str) -> None:
    explained = classic._translate_error(RuntimeError(text))
    assert type(explained) is kind
    assert says in str(explained)


class OtherJobs:
    """Jobs of an application, one of which may train: it ends with the first question. holder: its name."""

    def __init__(self, holder: str | None) -> None:
        self.free = threading.Event()
        self._holder = holder

    def find_training_job(self) -> str | None:
        if self._holder is not None:
            self.free.set()
        return self._holder


class FullCluster:
    """A SparkContext whose cores are in use until the others let go of them."""

    def __init__(self, others: OtherJobs) -> None:
        self._spark_elastic_job_queue = others

    def collect(self) -> list[str]:
        assert self._spark_elastic_job_queue.free.wait(30)
        return ["answer"]

    def parallelize(self, *rows: Any) -> FullCluster:
        return self

    mapPartitions = parallelize

    def setLocalProperty(self, *property: Any) -> None: ...

    getLocalProperty = addJobTag = removeJobTag = setLocalProperty

    def cancelJobsWithTag(self, tag: str) -> None:
        self._spark_elastic_job_queue.free.set()


def run_probes(sc: Any, timeout: float = 0.0) -> list[Any]:
    return classic._run_probes(sc, lambda answers: answers, 2, "tag", timeout, 8)  # type: ignore[arg-type,return-value]


def test_the_preflight_waits_while_another_job_trains() -> None:
    assert run_probes(FullCluster(OtherJobs("a long fit"))) == ["answer"]


def test_the_error_of_a_stopped_context_is_that_of_its_job() -> None:
    class Stopped(FullCluster):
        def collect(self) -> list[str]:
            raise RuntimeError("Job 3 cancelled because SparkContext was shut down")

        def removeJobTag(self, tag: str) -> None:
            raise AttributeError("'NoneType' object has no attribute 'removeJobTag'")

    with pytest.raises(JobCancelled):
        run_probes(Stopped(OtherJobs(None)), 30.0)


class Tracker:
    """Spark's statusTracker and what it returns: one job of one stage."""

    def __init__(self, running: int) -> None:
        self.numActiveTasks = lambda: running
        self.statusTracker = self.get = lambda: self
        self.getJobIdsForTag = self.getJobInfo = self.getStageInfo = lambda _: self
        self.stageIds = lambda: [0]

    def __iter__(self) -> Iterator[int]:
        return iter([0])


@pytest.mark.parametrize(
    ("tracker", "says"),
    [
        (None, "no executor took a probe within 0 s"),
        (Tracker(2), r"^2 probes of the hosts were still loading the program after 0 s \(start_timeout\)"),
        (Tracker(0), r"while the job wants 8 slots and Spark counts 2 cores: free some of them"),
    ],
)
def test_a_preflight_ends_at_its_timeout_and_says_what_took_it(tracker: Tracker | None, says: str) -> None:
    sc: Any = FullCluster(OtherJobs(None))
    if tracker is not None:
        sc._jsc, sc.defaultParallelism = SimpleNamespace(sc=lambda: tracker), 2
    with pytest.raises(PreflightError, match=says):
        run_probes(sc)


# ---- the package, for executors that lack it


def test_a_package_that_the_driver_does_not_have_as_files_is_named() -> None:
    with pytest.raises(InvalidInput, match="ship=True needs no_such_package as a folder of files"):
        classic._find_folder("no_such_package")


class Context:
    """A SparkContext whose executors fetch an archive once it is added; it takes no more than `room` of them."""

    master = "spark://there"

    def __init__(self, folder: Path, room: int = 9) -> None:
        self._temp_dir = folder
        self.room = room
        self.added: list[str] = []

    def addArchive(self, path: str) -> None:
        if len(self.added) == self.room:
            raise OSError("no room")
        self.added.append(path.partition("#")[2])


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    packed: list[str] = []

    def write_slowly(package: Path, archive: Path) -> None:
        time.sleep(0.02)
        packed.append(package.name)

    monkeypatch.setattr(classic, "pack", write_slowly)
    return packed


def test_two_fits_at_once_send_each_package_once(tmp_path: Path, written: list[str]) -> None:
    """What is written again while an executor fetches it arrives cut off."""
    context: Any = Context(tmp_path)
    fits = [threading.Thread(target=classic.ship, args=(context,)) for _ in range(2)]
    for fit in fits:
        fit.start()
    for fit in fits:
        fit.join()
    assert written == context.added == list(PACKAGES)


def test_after_a_failure_packages_that_were_sent_stay_as_they_are(tmp_path: Path, written: list[str]) -> None:
    context: Any = Context(tmp_path, room=1)
    with pytest.raises(OSError, match="no room"):
        classic.ship(context)
    context.room = 9
    classic.ship(context)
    assert context.added == list(PACKAGES)
    assert written.count(PACKAGES[0]) == 1


# ---- what Spark's UI says of our jobs


class Properties(dict[str, Any]):
    """Local properties of a thread, as a SparkContext keeps them."""

    getLocalProperty = dict.get
    setLocalProperty = dict.__setitem__


@pytest.mark.parametrize("lost", [False, True])
def test_a_slot_job_leaves_neither_tag_nor_description_to_its_thread(lost: bool) -> None:
    tags: set[str] = set()
    during: list[tuple[int, str]] = []
    sc: Any = Properties({DESCRIPTION: "mine"})
    sc._jsc, sc.addJobTag, sc.removeJobTag = 1, tags.add, tags.remove

    def collect() -> list[str]:
        during.append((len(tags), sc[DESCRIPTION]))
        if lost:
            raise RuntimeError("ExecutorLostFailure")
        return ["released"]

    rdd = SimpleNamespace(mapPartitions=lambda task: SimpleNamespace(collect=collect))
    sc.parallelize = lambda launches, partitions: rdd
    task: Any = SimpleNamespace()  # nothing runs it
    launcher = SparkLauncher(sc, lambda spec: task, FakeClock())
    launcher.start(SlotSpec(address="", key=b"", attempt=1, job_name="RUN"), lambda event: None)
    try:
        assert launcher.run_slot(3).executor_lost == lost
    finally:
        launcher.close(1.0)
    assert during == [(1, "spark_elastic RUN slot 3 (mine)")]
    assert (tags, sc[DESCRIPTION]) == (set(), "mine")


def test_the_store_check_passes_if_the_jvm_denies_access() -> None:
    user = SimpleNamespace(UserGroupInformation=DeniedGateway())
    hadoop = SimpleNamespace(hadoop=SimpleNamespace(security=user))
    session: Any = SimpleNamespace(_jvm=SimpleNamespace(org=SimpleNamespace(apache=hadoop)))
    store = make_memory_store()
    check_store_access(session, store)
    assert store.list("probes") == []
