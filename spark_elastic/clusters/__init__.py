"""Where jobs run: Spark, plain processes, ssh; `run`, its command line, and the coordinator of a job in a task."""
