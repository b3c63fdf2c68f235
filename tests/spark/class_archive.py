"""Write an archive of the classes that Spark loads: JVMs that map it start in two thirds of the time.

    python -m tests.spark.class_archive

`cluster_environment` has every JVM of the tests map it. A JVM of another version, or with other jars, ignores it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from tests.spark.cluster import CLASS_ARCHIVE, cluster_environment


def main() -> None:
    from pyspark import SparkContext

    CLASS_ARCHIVE.unlink(missing_ok=True)
    os.environ.update(cluster_environment())
    os.environ["PYSPARK_SUBMIT_ARGS"] = (
        f"--conf spark.ui.enabled=false --driver-java-options -XX:ArchiveClassesAtExit={CLASS_ARCHIVE} pyspark-shell"
    )
    run_jobs("local[2]")  # what executors load
    run_jobs("local-cluster[1,1,512]")  # what masters and worker daemons load
    gateway = SparkContext._gateway
    gateway.shutdown()
    gateway.proc.stdin.close()
    sys.exit(gateway.proc.wait(timeout=120))


def run_jobs(master: str) -> None:
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as F

    spark = SparkSession.builder.master(master).config("spark.executor.memory", "512m").getOrCreate()
    with tempfile.TemporaryDirectory() as folder:
        table = str(Path(folder, "table"))
        df = spark.range(100).repartition(2).withColumn("x", F.array(F.rand(), F.col("id").cast("double")))
        df.cache().write.parquet(table)
        spark.read.parquet(table).orderBy("id").mapInArrow(lambda batches: batches, df.schema).collect()
        spark.sparkContext.parallelize(range(2), 2).map(str).collect()
    spark.stop()


if __name__ == "__main__":
    main()
