"""One cluster and one Spark session at a time for all tests on real Spark.

`spark` is a session with the default settings, `spark_with(settings)` one with others (the JVM stays, so that a
change costs a few seconds), `standalone` the cluster, made whole again after each test, and `free_cluster` the same
without a session on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import cloudpickle
import pyspark
import pytest
from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession

from tests.leaks import SessionOwned
from tests.spark import estimators, fits, warm_daemon
from tests.spark.cluster import LOOPBACK, StandaloneCluster, await_true, cluster_environment

HOSTS = 3
SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.driver.host": LOOPBACK,
    "spark.driver.bindAddress": LOOPBACK,
    "spark.driver.memory": "512m",
    "spark.executor.memory": "512m",
    "spark.executor.cores": "1",
    "spark.sql.shuffle.partitions": "3",
    "spark.default.parallelism": "3",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
}


SparkWith = Callable[[Mapping[str, str]], SparkSession]
# The first test of a session starts five JVMs, on a busy machine too.
TIMEOUT = 600
# pyspark 3.5 leaves the sockets that rows come over to the collector.
LEFT_SOCKETS = "ignore:unclosed <socket.socket.*:ResourceWarning"


@pytest.hookimpl(tryfirst=True)  # before `-m` selects by the marks that are set here
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests beside this file: a timeout that bears the start of a cluster, and what pyspark 3.5 warns of in vain.

    Those that share the session with the default settings come first, since each change starts cold executors. The
    others are marked, so that `./build.sh test` can run them beside the first.
    """
    here = Path(__file__).parent
    places = [place for place, item in enumerate(items) if here in item.path.parents]
    ordered = sorted((items[place] for place in places), key=has_own_session)
    for place, item in zip(places, ordered, strict=True):
        items[place] = item
    for item in items:
        if here in item.path.parents:
            if has_own_session(item):
                item.add_marker(pytest.mark.own_session)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(TIMEOUT))
            if pyspark.__version__.startswith("3."):
                item.add_marker(pytest.mark.filterwarnings(LEFT_SOCKETS))


def has_own_session(item: pytest.Item) -> bool:
    """Whether a test does not take, or does not leave, the session with the default settings."""
    fixtures = getattr(item, "fixturenames", ())
    return "spark" not in fixtures or "spark_with" in fixtures or "free_cluster" in fixtures


class Sessions:
    """The one Spark session that a process can have; asked for with other settings, it is made anew."""

    def __init__(self, url: str, owned: SessionOwned, warehouse: Path) -> None:
        self._url = url
        self._owned = owned
        self._warehouse = warehouse
        self._settings: dict[str, str] | None = None
        self._session: SparkSession | None = None

    def open(self, settings: Mapping[str, str]) -> SparkSession:
        """A live session with exactly the default settings and these."""
        wanted = SETTINGS | {"spark.sql.warehouse.dir": str(self._warehouse)} | dict(settings)
        if self._session is not None and self._settings == wanted and self._alive(self._session):
            return self._session
        self.stop()
        with self._owned.adopt():
            self._session, self._settings = self._start(wanted), wanted
        return self._session

    def stop(self) -> None:
        """End the session; its JVM stays for the next one."""
        if self._session is not None:
            self._session.stop()
        self._session = None

    def end_java(self) -> None:
        """End the session and the JVM behind it."""
        self.stop()
        gateway = SparkContext._gateway
        if gateway is not None:
            gateway.shutdown()
            gateway.proc.stdin.close()
            gateway.proc.wait(timeout=30)
            SparkContext._gateway = SparkContext._jvm = None

    def _start(self, settings: Mapping[str, str]) -> SparkSession:
        # What a JVM is started with stays in it: the first session's own settings would be every later one's, too.
        SparkContext._ensure_initialized(conf=SparkConf(loadDefaults=False).setAll(list(SETTINGS.items())))
        builder = SparkSession.builder.master(self._url).appName("spark_elastic tests")
        for name, value in settings.items():
            builder = builder.config(name, value)
        session = builder.getOrCreate()
        session.sparkContext.setLogLevel("WARN")
        self._adopt(session)
        return session

    def _adopt(self, session: SparkSession) -> None:
        """py4j and the accumulators open a connection and a thread for each thread that talks to the JVM."""
        context = session.sparkContext
        self._owned.ports.add(context._gateway.gateway_parameters.port)
        self._owned.ports.add(context._accumulatorServer.server_address[1])
        self._owned.thread_modules.update({"py4j", "pyspark.accumulators"})

    @staticmethod
    def _alive(session: SparkSession) -> bool:
        return session.sparkContext._jsc is not None and not session.sparkContext._jsc.sc().isStopped()


def ready_executors(session: SparkSession) -> set[str]:
    """Ids of the registered executors that have their memory, which comes a moment after they register.

    Spark's list of memories says nothing by its length: an executor that dies within that moment stays in it.
    """
    context = session.sparkContext._jsc.sc()
    executors = context.statusStore().executorList(True)
    summaries = [executors.apply(place) for place in range(executors.size())]
    registered = context.schedulerBackend().getExecutorIds()
    return {each.id() for each in summaries if each.maxMemory() > 0 and registered.contains(each.id())}


@pytest.fixture(scope="session")
def spark_cluster(
    session_owned: SessionOwned, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StandaloneCluster]:
    """The cluster of the whole session: three hosts of one core. Tests that harm it take `standalone`.

    As long as it lives, the environment of this process makes Spark drivers ready for it.
    """
    with (
        StandaloneCluster(tmp_path_factory.mktemp("cluster")) as cluster,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in cluster_environment(cluster.scratch).items():
            patch.setenv(name, value)
        patch.delenv("SPARK_HOME", raising=False)
        # Executors die here, and their spares with them.
        patch.setenv("SPARK_ELASTIC_SPARE_AFTER", "3600")
        cluster.start_workers(HOSTS)
        session_owned.processes.update(cluster.pids)
        yield cluster


@pytest.fixture
def standalone(spark_cluster: StandaloneCluster, session_owned: SessionOwned) -> Iterator[StandaloneCluster]:
    """The cluster, for tests that kill and add hosts; afterwards it has its three hosts again."""
    yield spark_cluster
    for worker in [worker for worker in spark_cluster.workers if not worker.alive]:
        spark_cluster.kill_worker(worker)
    for worker in spark_cluster.workers[HOSTS:]:
        spark_cluster.kill_worker(worker)
    spark_cluster.start_workers(HOSTS - len(spark_cluster.workers))
    session_owned.processes.update(spark_cluster.pids)


@pytest.fixture(scope="session")
def sessions(
    spark_cluster: StandaloneCluster, session_owned: SessionOwned, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Sessions]:
    """The keeper of the one Spark session."""
    holder = Sessions(spark_cluster.url, session_owned, tmp_path_factory.mktemp("warehouse"))
    yield holder
    holder.end_java()


@pytest.fixture
def free_cluster(sessions: Sessions, standalone: StandaloneCluster) -> StandaloneCluster:
    """The cluster with all of its cores free, for a driver in a process of its own."""
    sessions.stop()
    return standalone


@pytest.fixture
def spark(sessions: Sessions, spark_cluster: StandaloneCluster) -> SparkSession:
    """A session with the default settings on three executors that take tasks, whose Python workers are warm."""
    session = sessions.open({"spark.python.daemon.module": warm_daemon.__name__})
    try:
        await_true(lambda: len(ready_executors(session)) == HOSTS, f"{HOSTS} ready executors")
    except TimeoutError:
        sessions.stop()  # the next test gets another one, instead of waiting as long
        raise
    return session


@pytest.fixture
def spark_with(sessions: Sessions) -> SparkWith:
    """A factory of sessions with settings of the test's own."""
    return sessions.open


@pytest.fixture
def nets_pickled_by_value() -> Iterator[None]:
    """Executors have no tests folder. On request: a class that is pickled by value never has the same bytes twice."""
    for module in (fits, estimators):
        cloudpickle.register_pickle_by_value(module)
    yield
    for module in (fits, estimators):
        cloudpickle.unregister_pickle_by_value(module)
