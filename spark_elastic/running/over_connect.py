"""`run` over Spark Connect: the driver beside the client, slots as jobs of its session. Runs in the caller's thread."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import cloudpickle

from spark_elastic.clock import SystemClock
from spark_elastic.driver.gathering import Application, GatherTurn
from spark_elastic.driver.ports import Contact
from spark_elastic.launch import Gathering, Site, supervise
from spark_elastic.running.call import Call, results
from spark_elastic.spark import connect
from spark_elastic.spark.memory import room_of
from spark_elastic.spark.preflight import Carried, admit, facts
from spark_elastic.spark.settings import warn
from spark_elastic.spark.slot_task import SlotTask

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def over_connect(call: Call, spark: SparkSession) -> list[Any]:
    """What each worker returned, in rank order.

    Raises:
        InvalidInput: what cannot work there. Else as `run`.
    """
    config, clock = call.options.config, SystemClock()
    program = cloudpickle.dumps(call.program)
    limits = call.limits(connect.check(config, call.options.num_workers, program))
    settings, bind = connect.settings_of(spark), connect.bind_of(spark, config)
    warn(settings, spark)
    number, timeout = limits.num_workers, config.start_timeout
    connect.preflight(spark, call.program.pickled, call.store(), call.needs, number, bind, timeout)
    room = room_of(settings)
    site = Site(
        bind=bind.host,
        advertise=bind.advertise,
        encrypted=settings.get("spark.ssl.enabled") == "true",
        admit=admit(facts(), call.needs),
        run=call.held(),
    )

    def make_task(contact: Contact) -> SlotTask:
        return SlotTask(
            contact,
            Carried(program),
            config.worker_port_range,
            call.preload,
            config.collective_timeout,
            config.driver_timeout,
            config.cpus_per_worker,
            room,
            config.spare_after,
        )

    launcher = connect.ConnectLauncher(spark, make_task, clock)
    application = vars(spark).setdefault("_spark_elastic_application", Application())
    name = f"{call.name}-{uuid.uuid4().hex[:8]}"
    with call.watched() as narrator, GatherTurn(application, name, limits, clock) as turn:
        return results(supervise(launcher, turn, site, limits, config, name, Gathering(narrator, turn)))
