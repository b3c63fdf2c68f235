"""Slots as plain processes of this machine: the whole elastic machinery without Spark or a JVM."""
