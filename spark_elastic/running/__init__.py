"""`spark_elastic.run`: its arguments, Horovod's names among them, and what it refuses before anything is launched."""
