"""`spark_elastic.run`: its arguments, with Horovod's names, and the checks before anything is launched."""
