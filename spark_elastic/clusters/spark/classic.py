"""A session with a SparkContext, which the driver reaches through py4j: probes, slots, and what becomes of executors.

Slots are single-task jobs, one thread each, without a barrier: a lost executor fails one job alone, and Spark's count
of failures cannot end the training. Queued jobs make dynamic allocation add executors."""

from __future__ import annotations

import logging
import queue
import re
import secrets
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark import InheritableThread, SparkContext

from spark_elastic.clock import Clock
from spark_elastic.clusters.spark.host_facts import LOOPBACK, mark_jobs
from spark_elastic.clusters.spark.payload import Payload, share
from spark_elastic.clusters.spark.platform import JobSpec, MakeTask, SparkPlatform
from spark_elastic.clusters.spark.preflight import await_probes, check_reports, require_report
from spark_elastic.clusters.spark.probe import Probe, Task
from spark_elastic.clusters.spark.settings import CLASSIC_PYTHON
from spark_elastic.clusters.spark.slot_task import CONTEXT_STOPPED, classify_error
from spark_elastic.config import ElasticConfig
from spark_elastic.driver.discovery import CombinedDiscovery
from spark_elastic.driver.gang_scheduler import GangScheduler, get_job_queue
from spark_elastic.driver.job import LaunchResult
from spark_elastic.driver.ports import Discovery, Post, ThreadPerSlotLauncher
from spark_elastic.errors import InvalidInput, JobCancelled, PreflightError
from spark_elastic.monitoring.listener import JobListener
from spark_elastic.monitoring.logs import announce_phase
from spark_elastic.protocol.events import DrainRequested, HostAppeared, HostLost
from spark_elastic.protocol.types import SlotOutcome, SlotSpec
from spark_elastic.worker.pickling import pickle_for_workers

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession

log = logging.getLogger("spark_elastic.spark")

ROUNDS = 3  # jobs of probes to reach every executor; busy ones are checked when their slot registers
POLL_EVERY = 0.5  # seconds; a poll of the executors costs about 3 ms
END_WAIT = 5.0  # seconds for a poll that the JVM has not answered yet
# What `ship` sends. cloudpickle: what the driver has pickled is best read by the same release.
PACKAGES = ("spark_elastic", "elastic_collectives", "cloudpickle")


class ClassicPlatform(SparkPlatform):
    """Programs travel as broadcasts, and the scheduler lists the executors."""

    python_settings = (CLASSIC_PYTHON,)

    def __init__(self, spark: SparkSession, config: ElasticConfig) -> None:
        self._sc = spark.sparkContext
        super().__init__(config, self._sc, dict(self._sc.getConf().getAll()))

    def count_workers(self, asked: int | None) -> int:
        return self._sc.defaultParallelism if asked is None else asked

    def launch(self, job: JobSpec, listener: JobListener | None = None) -> LaunchResult:
        bar: ProgressBar = vars(self._sc).setdefault("_spark_elastic_progress_bar", ProgressBar(self._sc))
        with bar:
            return super().launch(job, listener)

    def _find_address(self) -> str:
        return self._settings.get("spark.driver.host") or LOOPBACK

    def _probe(self, probe: Probe, number: int) -> list[dict[str, str]]:
        self._ship_package()
        return preflight(self._sc, probe, self._config.start_timeout, number)

    @contextmanager
    def _ship(self, program: object) -> Iterator[Payload]:
        self._ship_package()
        with share(self._sc, pickle_for_workers(program), "the program") as shipped:
            yield shipped

    def _check_profile(self, profile: ResourceProfile) -> object:
        return self._sc.emptyRDD().withResources(profile)

    def _make_launcher(self, make_task: MakeTask, profile: ResourceProfile | None) -> SparkLauncher:
        return SparkLauncher(self._sc, make_task, self._clock, profile)

    def _discover(self, scheduler: GangScheduler) -> Discovery:
        return CombinedDiscovery(ExecutorWatch(self._sc, self._clock), scheduler)

    def _ship_package(self) -> None:
        if self._config.ship:
            ship(self._sc)


class SparkLauncher(ThreadPerSlotLauncher):
    """`driver.ports.Launcher` over a SparkContext. Slot jobs inherit the caller's job group, pool and tags, and quote
    its description: a dispatcher thread, started from the caller's, hands its local properties on."""

    thread_class = InheritableThread

    def __init__(
        self, sc: SparkContext, make_task: MakeTask, clock: Clock, profile: ResourceProfile | None = None
    ) -> None:
        """make_task: builds the task, once the driver listens. profile: what a slot takes; None: as any task."""
        super().__init__(clock)
        self._sc, self._profile, self._make_task = sc, profile, make_task
        self._tag = ""
        self._launches: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._dispatcher: InheritableThread | None = None

    def start(self, spec: SlotSpec, post: Post) -> None:
        super().start(spec, post)
        # A tag of this launcher alone; Spark refuses commas in it.
        self._tag = f"spark_elastic-{spec.job_name}-{secrets.token_hex(4)}".replace(",", "_")
        self._dispatcher = InheritableThread(target=self._dispatch, daemon=True)
        self._dispatcher.start()

    def launch(self, launch: int) -> None:
        self._launches.put(launch)

    def close(self, timeout: float) -> list[str]:
        deadline = self._clock.now() + timeout
        self._closing.set()
        self._launches.put(None)
        if self._dispatcher is not None:
            self._dispatcher.join(timeout)
        return super().close(max(0.0, deadline - self._clock.now()))

    def cancel(self) -> None:
        try:
            self._sc.cancelJobsWithTag(self._tag)
        except (Py4JError, AttributeError, OSError) as error:
            log.debug("nothing left to cancel: %s", error)  # the SparkContext is gone, and its jobs with it

    def run_slot(self, launch: int) -> SlotOutcome:
        try:
            # Without a JVM thread for each of Python's, later jobs of the user would bear the tag, too.
            with mark_jobs(self._sc, f"{self.spec.job_name} slot {launch}", self._tag):
                rdd = self._sc.parallelize([launch], 1)
                if self._profile is not None:
                    rdd = rdd.withResources(self._profile)
                results: list[Any] = rdd.mapPartitions(self._make_task(self.spec)).collect()
            return SlotOutcome(str(results[0]) if results else "the slot task returned nothing")
        except Exception as error:  # Spark has many ways to fail a job; the kind decides about a new launch
            return CONTEXT_STOPPED if self._is_gone(error) else classify_error(str(error))

    def explain_failed_start(self, error: Exception) -> SlotOutcome:
        return CONTEXT_STOPPED if self._is_gone(error) else super().explain_failed_start(error)

    def _is_gone(self, error: Exception) -> bool:
        """Whether the SparkContext was stopped, or its JVM has ended."""
        return self._sc._jsc is None or isinstance(error, Py4JNetworkError | ConnectionError)

    def _dispatch(self) -> None:
        while (launch := self._launches.get()) is not None:
            super().launch(launch)


class ExecutorWatch:
    """`driver.ports.Discovery` that polls the scheduler's list of executors; idle in local mode. The driver does not
    depend on it: slots and workers report themselves, and broken connections are seen earlier."""

    def __init__(self, sc: SparkContext, clock: Clock) -> None:
        self._sc, self._clock = sc, clock
        self._closing = threading.Event()
        self._thread: InheritableThread | None = None

    def start(self, post: Post) -> None:
        if not _is_local(self._sc):
            name = "spark-elastic-executors"
            self._thread = InheritableThread(target=self._watch, args=(post,), name=name, daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join(END_WAIT)

    def _watch(self, post: Post) -> None:
        try:
            self._get_backend().getExecutorIds()
        except (Py4JError, AttributeError) as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            log.info(
                "this cluster does not let users look at its executors (%s); hosts are known by their slots' "
                "registrations alone",
                lines[-1].strip()[:200],
            )
            return
        known: set[str] | None = None  # None: the first are not posted, as slots may run on them already
        draining: set[str] = set()
        while not self._closing.wait(POLL_EVERY):
            try:
                backend = self._get_backend()
                ids = backend.getExecutorIds()
                present = {str(ids.apply(i)) for i in range(ids.size())}
                leaving = {host for host in present - draining if not backend.isExecutorActive(host)}
            except Exception as error:  # also a lack of descriptors or memory, which may pass
                # If the context was stopped, the slots' own jobs end with it.
                log.debug("the scheduler does not answer: %s", error)
                continue
            now = self._clock.now()
            before = present if known is None else known
            for host in sorted(present - before):
                post(HostAppeared(now, host))
            for host in sorted(before - present):
                post(HostLost(now, host, f"Spark lost executor {host}"))
            for host in sorted(leaving):
                post(DrainRequested(now, f"executor {host} is being decommissioned", host=host))
            draining |= leaving
            known = present

    def _get_backend(self) -> Any:
        return self._sc._jsc.sc().schedulerBackend()


def preflight(sc: SparkContext, spec: Probe, timeout: float, number: int = 1) -> list[dict[str, str]]:
    """Probe the live executors in a Spark job of short tasks; returns the facts of each. timeout: seconds in which they
    must answer, but not while another job of the application trains. number: of workers, whose imports probes begin
    where they can. Raises InvalidInput: the program is too large for Spark's driver. PreflightError: a host cannot run
    the job, or none answered. StoreError: the driver cannot write to the store."""
    with share(sc, spec.payload, spec.what) as program, spec.open() as probe:
        least = min(number, sc.defaultParallelism) if spec.forking_slot is not None else 1
        if _count_live_executors(sc) == 1:
            probe = replace(probe, hold=0.0)
        job = f"spark_elastic-preflight-{probe.token}", timeout, number
        task = probe.make_task(program)
        reports: list[Any] = []
        for attempt in range(1, ROUNDS + 1):
            executors = _count_live_executors(sc)
            if attempt == 1:
                announce_phase("checking the host" if executors == 1 else f"checking {executors} hosts")
            # Spark assigns tasks to executors in turns, so that so many reach each idle one.
            reports += map(require_report, _run_probes(sc, task, max(executors * attempt, least), *job))
            is_refused = any(report.fault or report.unreached for report in reports)
            if is_refused or len({report.executor for report in reports}) >= executors:
                break
        return check_reports(probe, reports)


def _is_local(sc: SparkContext) -> bool:
    """Whether Spark's driver is the only executor."""
    return str(sc.master).partition("[")[0] == "local"


def _count_live_executors(sc: SparkContext) -> int:
    if _is_local(sc):
        return 1
    try:
        registered = len(sc._jsc.sc().statusTracker().getExecutorInfos())
    except (Py4JError, AttributeError):  # users are denied access: one probe for each core
        return sc.defaultParallelism
    return max(1, registered - 1)  # the driver is one of them


def _run_probes(
    sc: SparkContext, task: Task, tasks: int, tag: str, timeout: float, workers: int
) -> list[Any]:
    """Run one Spark job under a tag. workers: that the job of the probes wants."""

    def collect() -> list[Any]:
        with mark_jobs(sc, "probes of the hosts", tag):
            try:
                return sc.parallelize(range(tasks), tasks).mapPartitions(task).collect()
            except Exception as error:
                raise _translate_error(error) from error

    cancel, explain = partial(sc.cancelJobsWithTag, tag), partial(_explain_delay, sc, tag, timeout, workers)
    return await_probes(collect, cancel, get_job_queue(sc), timeout, InheritableThread, explain)


def _explain_delay(sc: SparkContext, tag: str, timeout: float, workers: int) -> str | None:
    """Why the probes have not ended, in one sentence; None: it is not known."""
    try:
        tracker = sc._jsc.sc().statusTracker()
        stages = [
            tracker.getStageInfo(stage).get()
            for number in tracker.getJobIdsForTag(tag)
            for stage in tracker.getJobInfo(number).get().stageIds()
        ]
        running = sum(stage.numActiveTasks() for stage in stages)
        cores = sc.defaultParallelism
    except (Py4JError, AttributeError):  # users are denied access, or an older Spark
        return None
    within = f"{timeout:.0f} s (start_timeout)"
    if running:
        return (
            f"{running} probes of the hosts were still loading the program after {within}: see why imports take long "
            "there (a busy machine, Python on a network drive), or raise start_timeout."
        )
    return (
        f"no executor took a probe within {within}, while the job wants {workers} slots and Spark counts {cores} "
        "cores: free some of them, or raise start_timeout."
    )


def _translate_error(error: Exception) -> Exception:
    """Our error for Spark's words about an unsuitable Python or a cancelled job; any other error as it is."""
    text = str(error)
    pattern = r"Python in worker has different version:? (.+?) than that in driver:? (.+?), PySpark"
    if versions := re.search(pattern, text):
        place = re.search(r"\(TID \d+\) \(([^ )]+)", text)
        return PreflightError(
            f"host {place.group(1) if place else 'unknown'} has python {versions.group(1)}, and the driver has "
            f"{versions.group(2)}: set PYSPARK_PYTHON to the same version on both."
        )
    if "cancelled" in text:
        return JobCancelled("the job was cancelled while its hosts were probed.")
    return error


# ---- this package for executors that do not have it: `ElasticConfig(ship=True)`


def ship(sc: SparkContext) -> None:
    """Send the packages, once for each SparkContext. In local mode the driver is the executor, and has them.

    Spark unpacks an archive once per executor into the folder that comes first in `sys.path` of each Python worker, so
    a package under its own name is importable there. numpy and the framework depend on the machine."""
    if str(sc.master).startswith("local"):
        return
    folder = Path(str(sc._temp_dir))  # lives as long as the SparkContext, like its archives
    # Executors fetch an archive as soon as it is added: it is written once.
    with get_job_queue(sc).shipping_lock:
        shipped: set[str] = vars(sc).setdefault("_spark_elastic_shipped", set())
        for package in PACKAGES:
            if package not in shipped:
                archive = folder / f"spark_elastic-ship-{package}.zip"
                pack(_find_folder(package), archive)
                sc.addArchive(f"{archive}#{package}")
                shipped.add(package)


def pack(package: Path, archive: Path) -> None:
    """Write the files of a package's folder to a zip file, with the folder as its top."""
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as target:
        for file in sorted(package.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                target.write(file, file.relative_to(package))


def _find_folder(package: str) -> Path:
    spec = find_spec(package)
    places = list(spec.submodule_search_locations or []) if spec is not None else []
    if not places or not Path(places[0]).is_dir():
        raise InvalidInput(
            f"ship=True needs {package} as a folder of files, and the driver has it in {places or 'no folder'}: "
            "install it there with pip."
        )
    return Path(places[0])


class ProgressBar:
    """Spark's progress bar on a terminal; inside of a `with` block there is none. Blocks of several jobs may overlap.

    It has nothing to say about slots, which run as long as the training does, and would rewrite the line of our own
    progress. Spark cannot resume a stopped bar and offers no way to set another one: the field is set by reflection.
    Where a platform refuses that, the bar stays as it is."""

    def __init__(self, sc: SparkContext) -> None:
        self._sc = sc
        self._lock = threading.Lock()
        self._jobs = 0  # that run now
        self._stopped = False  # there was a bar, and it is stopped

    def __enter__(self) -> None:
        with self._lock:
            self._jobs += 1
            if self._jobs == 1:
                self._stopped = self._attempt(self._stop)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._jobs -= 1
            if self._jobs == 0 and self._stopped:
                self._attempt(self._start)

    def _attempt(self, action: Callable[[Any], bool]) -> bool:
        try:
            return action(self._sc._jsc.sc())
        except Exception as error:  # py4j is closed to us, or the SparkContext has been stopped
            log.debug("Spark's console progress bar is left as it is: %s", error)
            return False

    def _stop(self, context: Any) -> bool:
        bar = context.progressBar()
        if bar.isEmpty():
            return False
        bar.get().finishAll()  # clears the line
        bar.get().stop()
        return True

    def _start(self, context: Any) -> bool:
        if not context.isStopped():
            jvm: Any = self._sc._jvm
            field = context.getClass().getDeclaredField("_progressBar")
            field.setAccessible(True)
            field.set(context, jvm.scala.Some(jvm.org.apache.spark.ui.ConsoleProgressBar(context)))
        return True
