"""The gradients of a step: hooks in backward, buckets, and their sums over all ranks. `exchange` is the way in.

Estimators, Horovod's optimizers and torch's process groups share this package, and with it what is known of the world:
process sets, ranks, devices, random generators.
"""
