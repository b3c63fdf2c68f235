"""Slots as plain processes, of this machine and through ssh of others: the elastic machinery without Spark or a JVM."""
