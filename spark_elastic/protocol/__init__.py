"""The elastic protocol: two pure machines, without clock, I/O or threads. Processes and simulation run the same code.

`driver_machine` decides about worlds, `worker_machine` about one training process. Both turn events into commands.
"""
