"""Lets `SparkFiles` find in a training process what it finds in the task of the process's slot.

Imported after pyspark in processes that run a user's code beside Spark's Python worker. Main thread.
"""

from contextlib import suppress

from spark_elastic.worker.context import get_process_context

if get_process_context().files:
    with suppress(ImportError):  # a client for Spark Connect alone has no files of Spark's
        from pyspark import SparkFiles

        SparkFiles._root_directory = get_process_context().files  # as Spark's Python worker does
        SparkFiles._is_running_on_worker = True
