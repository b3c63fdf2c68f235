"""A Spark job, a job of ours and a Spark job again, on a terminal: `python -m tests.spark.progress_bar_job MASTER`."""

from __future__ import annotations

import sys
import time

import spark_elastic

SECONDS = 2.0  # Spark shows its bar after half a second


def sleep(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def main() -> None:
    from pyspark.sql import SparkSession

    spark = (
        SparkSession.builder.master(sys.argv[1]).config("spark.ui.showConsoleProgress", "true").getOrCreate()
    )
    spark.sparkContext.parallelize([SECONDS], 1).map(sleep).collect()
    spark_elastic.run(sleep, (SECONDS,), num_workers=1)
    sys.stdout.write("the job has ended\n")
    sys.stdout.flush()
    spark.sparkContext.parallelize([SECONDS], 1).map(sleep).collect()
    spark.stop()


if __name__ == "__main__":
    main()
