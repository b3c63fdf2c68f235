"""The elastic protocol: two pure state machines without clock, I/O or threads. The simulation runs the same code.

`driver_machine` decides about worlds, `worker_machine` about one training process. Both turn events into commands.
"""
