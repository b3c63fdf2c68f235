"""The elastic protocol: pure machines, no clock, no I/O, no thread. Shells and the simulation run the same code."""
